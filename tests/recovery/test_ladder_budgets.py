"""What a ladder may use up: restarts, tries in time, generations without progress, delays."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import OWN_CAUSES, Cause
from relaunch.job.events import DeadlinePassed, StepReached
from relaunch.job.incidents import record_progress
from relaunch.job.ladder import list_used_budgets
from relaunch.job.state import Diagnosis, JobState, Progress, Relaunch, Repair
from tests.recovery.builders import (
    T0,
    at,
    climbed,
    describe,
    examine,
    policy,
    raised,
    relaunched,
    rungs,
    running,
    step,
    suspected,
    walk,
)

A = Cause.APPLICATION
RESTART, REPLACE, RESCHEDULE = (
    {"strategy": "RESTART_IN_PLACE"},
    {"strategy": "REPLACE_NODE"},
    {"strategy": "RESCHEDULE_JOB"},
)
SICK = {"strategy": "REPLACE_NODE", "when": "UNHEALTHY"}
RESET, REBOOT, FAIL = {"strategy": "RESET_GPU"}, {"strategy": "REBOOT_NODE"}, {"strategy": "FAIL"}


def on(*nodes: str, gpus: tuple[str, ...] = (), code: str = "exit 1") -> Diagnosis:
    return suspected(A, *nodes, gpus=gpus, code=code)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", [RESTART, REPLACE, RESCHEDULE, RESET, REBOOT])
def test_spends_says_whether_a_try_is_one_of_the_jobs_own(rung: dict[str, Any]) -> None:
    for spends, spent in ((True, 1), (False, 0)):
        job, decision = climbed(
            running(policy=rungs({**rung, "spends": spends}, max_restarts=1)), on("n1")
        )
        assert isinstance(decision, Relaunch | Repair)
        assert (decision.spent, job.restarts_spent, len(job.tries)) == (spends, spent, 1)
        _, again = climbed(job, on("n1"))
        assert describe(again) == ("FAILED 1" if spends else describe(decision))


def test_a_rung_that_spends_fails_a_spent_job_despite_free_rungs(
    snapshot: SnapshotAssertion,
) -> None:
    job = running(
        policy=rungs({**RESTART, "tries": 3}, {**REPLACE, "spends": False}, max_restarts=2)
    )
    for expected in ("RESTART_IN_PLACE", "RESTART_IN_PLACE", "FAILED 1"):
        job, decision = climbed(job, on("n1"))
        assert describe(decision) == expected
    assert decision.reason == snapshot


def test_a_job_without_restarts_fails_unless_the_rung_is_free() -> None:
    assert (
        describe(climbed(running(policy=rungs(RESTART, max_restarts=0)), on("n1"))[1]) == "FAILED 1"
    )
    assert (
        describe(
            climbed(running(policy=rungs({**RESTART, "spends": False}, max_restarts=0)), on("n1"))[
                1
            ]
        )
        == "RESTART_IN_PLACE"
    )


@pytest.mark.parametrize(
    ("renewal", "progress", "spent", "expected"),
    [
        pytest.param(
            "progress",
            "step",
            0,
            "RESTART_IN_PLACE",
            id="a passed step gives restarts and tries back",
        ),
        pytest.param(
            "progress",
            "healthy",
            0,
            "RESTART_IN_PLACE",
            id="healthy_for does so where nothing is reported",
        ),
        pytest.param("never", "step", 1, "FAILED 1", id="never: not even a passed step"),
        pytest.param("never", "healthy", 1, "FAILED 1", id="never: nor an hour in health"),
    ],
)
def test_what_gives_budgets_back(renewal: str, progress: str, spent: int, expected: str) -> None:
    job = running(policy=rungs({**RESTART, "tries": 1}, FAIL, renewal=renewal))
    job = relaunched(walk(job, (raised(), "RESTART_IN_PLACE")))
    event = StepReached(2, 1, at(3600)) if progress == "step" else DeadlinePassed()
    job, _ = step(job, event, at(3600))
    assert (job.restarts_spent, job.incident, job.progressed_at) == (spent, None, at(3600))
    walk(job, (raised(), expected), now=at(3601))


def stagnant(cause: Cause) -> JobState:
    """A job of which two generations in a row have not passed step 7."""
    job = running(policy=rungs(RESTART, cause=cause, no_progress_stop=2))
    return replace(job, flat_generations=2, furthest_step=7)


@pytest.mark.parametrize("cause", list(Cause))
def test_no_progress_stop_is_for_faults_that_may_be_the_jobs_own(cause: Cause) -> None:
    _, decision = climbed(stagnant(cause), suspected(cause, "n1"))
    assert describe(decision) == ("FAILED 1" if cause in OWN_CAUSES else "RESTART_IN_PLACE")


def test_a_no_progress_stop_names_the_step(snapshot: SnapshotAssertion) -> None:
    assert climbed(stagnant(Cause.HANG), suspected(Cause.HANG, "n1"))[1].reason == snapshot


@pytest.mark.parametrize(
    ("flat", "limit", "expected"),
    [(1, 2, "RESTART_IN_PLACE"), (2, 2, "FAILED 1"), (9, "off", "RESTART_IN_PLACE")],
)
def test_no_progress_stop_counts_to_its_number(flat: int, limit: int | str, expected: str) -> None:
    job = replace(running(policy=rungs(RESTART, no_progress_stop=limit)), flat_generations=flat)
    assert describe(climbed(job, on("n1"))[1]) == expected


@pytest.mark.parametrize(
    ("delay", "backoff", "seconds"),
    [
        pytest.param("0s", 1, [0, 0, 0], id="none"),
        pytest.param("5s", 1, [5, 5, 5], id="the same each time"),
        pytest.param(
            "10s",
            3,
            [10, 30, 90, 270, 810, 2430, 3600, 3600],
            id="so many times the one before it, at most an hour",
        ),
        pytest.param("30m", 100, [1800, 3600, 3600], id="the cap"),
        pytest.param("2h", 2, [7200, 7200], id="a longer delay than the cap is meant"),
    ],
)
def test_delay_and_backoff(delay: str, backoff: float, seconds: list[int]) -> None:
    job = running(
        policy=rungs({**RESTART, "delay": delay, **({"backoff": backoff} if backoff != 1 else {})})
    )
    for expected in seconds:
        job, decision = climbed(job, on("n1"))
        assert isinstance(decision, Relaunch) and decision.delay == timedelta(seconds=expected)


def test_backoff_does_not_overflow_after_thousands_of_tries() -> None:
    rung = rungs({**RESTART, "delay": "1s", "backoff": 100}).ladder(A)[0]
    assert rung.delay_of(10_000) == timedelta(hours=1)


def test_flat_generations_end_a_walk_whatever_the_ladder_has() -> None:
    job = replace(
        running(policy=rungs(RESTART, no_progress_stop=1)),
        progress=Progress(5, T0),
        furthest_step=5,
    )
    assert walk(job, (raised(), "FAILED 1")).flat_generations == 1


# --- used budgets ---------------------------------------------------------------------------------


def used(job: JobState, seconds: float = 0) -> list[tuple[str, str, int, str]]:
    return [
        (one.cause, one.rung.label, one.used, one.where)
        for one in list_used_budgets(job, at(seconds))
    ]


def test_used_budgets_are_those_of_which_something_is_used(snapshot: SnapshotAssertion) -> None:
    ladder = (
        {**RESTART, "tries": 1, "key": ["node", "gpu", "code"], "window": "1h"},
        {**SICK, "tries": 2},
        {**RESCHEDULE, "tries": 5, "key": "node"},
        FAIL,
    )
    job = running(policy=rungs(*ladder))
    assert used(job) == []
    gpu = on("n2", gpus=("05", "06"), code="Xid 94")
    job, _ = climbed(job, gpu)
    job, _ = climbed(job, on())
    assert [one[:3] for one in used(job)] == [("APPLICATION", "RESTART_IN_PLACE", 1)] * 2
    assert [one[3] for one in used(job)] == snapshot
    # what has left its window is not used any more, once training has advanced since
    assert len(used(job, 3600)) == 2
    job = record_progress(job, at(1))
    assert (len(used(job, 3599)), used(job, 3600)) == (2, [])
    job = walk(
        job,
        (raised(), "RESTART_IN_PLACE"),
        (raised(), "EXAMINE n2"),
        (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2"),
        now=at(3600),
    )
    job = walk(
        job, (raised(), "EXAMINE n2"), (examine(n2="HEALTHY"), "RESCHEDULE_JOB"), now=at(3601)
    )
    assert used(job, 9000) == [
        ("APPLICATION", "RESTART_IN_PLACE", 1, "n2 log python_bug"),
        ("APPLICATION", "REPLACE_NODE when UNHEALTHY", 1, ""),
        ("APPLICATION", "RESCHEDULE_JOB", 1, "n2"),
    ]


def test_budgets_of_causes_that_share_a_ladder_name_each_cause() -> None:
    source = {
        "extends": "gputasker",
        "max_restarts": 9,
        "causes": {"UNKNOWN": [{**RESTART, "tries": 2}, FAIL]},
    }
    job = running(policy=policy(**source))
    for cause in (Cause.STORAGE, Cause.STORAGE, Cause.NETWORK):
        job, _ = climbed(job, suspected(cause, "n1"))
    assert used(job) == [
        ("STORAGE", "RESTART_IN_PLACE", 2, ""),
        ("NETWORK", "RESTART_IN_PLACE", 1, ""),
    ]


def test_used_budgets_read_the_policy_as_it_is_now() -> None:
    job, _ = climbed(running(policy=rungs(RESTART)), on("n1"))
    assert used(job) == [("APPLICATION", "RESTART_IN_PLACE", 1, "")]
    # the rung is no longer there
    assert used(replace(job, policy=rungs(REPLACE))) == []
