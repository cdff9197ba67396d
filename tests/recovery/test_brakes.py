"""How long a job goes on without progress: consecutive brakes, stated budgets, start-up errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from relaunch.job.events import (
    DeadlinePassed,
    Event,
    Launched,
    ProgressSeen,
    RanksStopped,
    StepReached,
)
from relaunch.job.state import Ask, Examine, JobState, Relaunch, Repair, Stop
from tests.recovery.builders import (
    T0,
    at,
    error,
    examine,
    exited,
    fault,
    policy,
    record,
    relaunched,
    running,
    step,
    walk,
)

Make = Callable[[JobState], Event]


def generations(event: Make, *, minutes: float, **rules: Any) -> int:
    """Return how many generations run until the job fails or asks, each with this fault.

    Each generation fails so many minutes after its launch, with no step reported.
    """
    job, now = running(policy=policy(**rules)), T0
    for number in range(60):
        now += timedelta(minutes=minutes)
        job, decision = step(job, event(job), now)
        while not isinstance(decision, Relaunch):
            if isinstance(decision, Stop | Ask):
                return number + 1
            assert isinstance(decision, Examine | Repair), decision
            answer = examine(**dict.fromkeys(decision.nodes, "HEALTHY"))
            job, decision = step(job, answer(job), now)
        job = relaunched(job, now)
    return 60


def at_minute(minutes: float, **ending: Any) -> Make:
    """Return a fault so many minutes after the launch."""

    def make(job: JobState) -> Event:
        launched = ((job.launched_at or T0) - T0).total_seconds()
        return fault(job, exited(2, **ending), seconds=launched + 60 * minutes)

    return make


IMPORT = {"code": 1, "error": error("ModuleNotFoundError: No module named 'flash_attn'", None)}
NETWORK = {"code": 1, "error": error("ConnectionResetError: Connection reset by peer", None)}


@pytest.mark.parametrize(
    ("event", "minutes", "rules", "expected"),
    [
        pytest.param(at_minute(0.5, **IMPORT), 0.5, {}, 3, id="one error at start-up, thrice"),
        pytest.param(
            at_minute(0.5, **IMPORT), 0.5, {"max_restarts": 100}, 3, id="also with a budget"
        ),
        pytest.param(
            at_minute(0.5, **IMPORT), 0.5, {"startup_stop": "off"}, 4, id="unless it is off"
        ),
        pytest.param(at_minute(5, **IMPORT), 5, {}, 4, id="later it may be the data"),
        pytest.param(
            at_minute(5, **IMPORT), 5, {"max_restarts": 7}, 8, id="a stated budget is spent"
        ),
        pytest.param(at_minute(0.5, signal=9), 0.5, {}, 4, id="a kill says nothing of the code"),
        pytest.param(
            at_minute(5, signal=9), 5, {"max_restarts": 50}, 51, id="and is no end of a budget"
        ),
        pytest.param(
            at_minute(5, code=1, error=error("torch.OutOfMemoryError: CUDA out of memory.", None)),
            5,
            {"max_restarts": 5},
            6,
            id="nor is a ladder of one try",
        ),
        pytest.param(at_minute(5, code=127), 5, {"max_restarts": 50}, 1, id="wrong input is one"),
        pytest.param(at_minute(25, **NETWORK), 25, {}, 4, id="a network that fails twice an hour"),
        pytest.param(
            at_minute(25, **NETWORK),
            25,
            {"renewal": "never", "no_progress_ask": 30},
            31,
            id="without renewal only the count of all",
        ),
    ],
)
def test_how_many_generations_run_without_any_step(
    event: Make, minutes: float, rules: dict[str, Any], expected: int
) -> None:
    assert generations(event, minutes=minutes, **rules) == expected


def test_an_hour_without_a_fault_is_no_progress_below_a_step() -> None:
    """A job that resumes from a checkpoint hours old, and fails again before it is past it."""
    job, now = running(), T0
    job = record(job, ProgressSeen(1, 500, T0))
    for number in range(3):
        job, decision = step(job, at_minute(0, **NETWORK)(job), now)
        assert isinstance(decision, Relaunch), number
        job = relaunched(job, now)
        now += timedelta(hours=1)
        job, _ = step(job, DeadlinePassed(), now)
        assert (job.incident, job.report_at_step) == (None, 501)
        now += timedelta(minutes=40)
    job, decision = step(job, at_minute(0, **NETWORK)(job), now)
    assert isinstance(decision, Examine), "the fourth in a row, though none came within an hour"


def test_a_step_passed_after_the_incident_is_progress() -> None:
    job = record(running(), ProgressSeen(1, 500, T0))
    job, _ = step(job, at_minute(0, **NETWORK)(job))
    job = relaunched(job)
    job, _ = step(job, DeadlinePassed(), at(3600))
    job, _ = step(job, StepReached(job.generation, 501, at(7200)), at(7200))
    assert (job.progressed_at, job.report_at_step) == (at(7200), None)


@pytest.mark.parametrize("stopped_by", ["an order", "the next launch"])
def test_a_step_that_only_the_stop_reveals_was_reached_before(stopped_by: str) -> None:
    # The rank that prints the steps is not the one that fails: the watch knows of step 7.
    job = record(replace(running(), startup_failures=2), ProgressSeen(1, 7, T0))
    job, decision = step(job, at_minute(0, **NETWORK)(job))
    assert isinstance(decision, Relaunch)
    if stopped_by == "an order":
        job = relaunched(record(job, RanksStopped(job.generation, ("n1", "n2"), T0, step=8)))
    else:
        job = record(job, Launched(job.generation, T0, T0, step=8))
    assert (job.report_at_step, job.furthest_step, job.startup_failures) == (9, 8, 0)
    job = record(job, ProgressSeen(2, 8, T0))
    assert job.incident is not None and job.incident.reached == 8
    # A generation that ended earlier changes nothing.
    job = record(job, RanksStopped(job.generation, ("n1", "n2"), T0, step=6))
    assert (job.report_at_step, job.progress and job.progress.step) == (9, 8)


@pytest.mark.parametrize(("before", "failures"), [(1, 0), (2, 2)])
def test_a_step_of_before_the_last_generation_leaves_the_count_of_equal_starts(
    before: int, failures: int
) -> None:
    job, _ = step(running(), at_minute(0, **NETWORK)(running()))
    job = replace(job, startup_error="ImportError", startup_failures=2)
    generation = job.generation
    job = record(job, Launched(generation, T0, T0, step=8, step_generation=generation - before))
    assert (job.report_at_step, job.furthest_step, job.startup_failures) == (9, 8, failures)


def test_a_job_that_only_the_stop_reveals_to_have_trained_had_a_start() -> None:
    job, _ = step(running(), at_minute(0.1, **IMPORT)(running()))
    assert job.startup_failures == 1
    job = record(job, RanksStopped(job.generation, ("n1", "n2"), T0, step=3))
    assert (job.report_at_step, job.startup_failures) == (4, 0)


def test_a_spare_that_cannot_start_is_replaced_before_the_job_ends() -> None:
    job = replace(running(), progressed_at=T0)
    walk(
        job,
        (at_minute(0.5, **IMPORT), "RESTART_IN_PLACE"),
        (at_minute(0.5, **IMPORT), "RESTART_IN_PLACE"),
        (at_minute(0.5, **IMPORT), "EXAMINE n2"),
        (examine(n2="HEALTHY"), "REPLACE_NODE without n2"),
        (at_minute(0.5, **IMPORT), "FAILED 1"),
    )
