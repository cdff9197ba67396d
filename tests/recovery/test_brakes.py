"""How long a job goes on without progress: consecutive brakes, stated budgets, start-up errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
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
from relaunch.job.ladder import STATED
from relaunch.job.state import Ask, Decision, Examine, JobState, Relaunch, Repair, Stop
from tests.recovery.builders import (
    T0,
    at,
    describe,
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


def on_any_node(**ending: Any) -> Make:
    """Return an end at once, of which each launch names another node than the one before."""

    def make(job: JobState) -> Event:
        launched = ((job.launched_at or T0) - T0).total_seconds()
        node = 1 + job.generation % 2
        return fault(job, exited(2 * node - 2, f"n{node}", **ending), seconds=launched + 30)

    return make


IMPORT = {"code": 1, "error": error("ModuleNotFoundError: No module named 'flash_attn'", None)}
NETWORK = {"code": 1, "error": error("ConnectionResetError: Connection reset by peer", None)}


@pytest.mark.parametrize(
    ("event", "minutes", "rules", "expected"),
    [
        pytest.param(on_any_node(**IMPORT), 0.5, {}, 3, id="one error at start-up, thrice"),
        pytest.param(on_any_node(**IMPORT), 0.5, {"max_restarts": 100}, 3, id="also with a budget"),
        pytest.param(at_minute(0.5, **IMPORT), 0.5, {}, 4, id="on one node of several, once more"),
        pytest.param(
            at_minute(0.5, **IMPORT), 0.5, {"max_restarts": 100}, 4, id="on one, with a budget"
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
def test_an_older_generations_step_leaves_the_equal_starts(before: int, failures: int) -> None:
    job, _ = step(running(), at_minute(0, **NETWORK)(running()))
    job = replace(job, startup_error="ImportError", startup_failures=2)
    generation = job.generation
    job = record(job, Launched(generation, T0, T0, step=8, step_generation=generation - before))
    assert (job.report_at_step, job.furthest_step, job.startup_failures) == (9, 8, failures)


def test_a_job_that_the_stop_reveals_to_have_trained_started() -> None:
    job, _ = step(running(), at_minute(0.1, **IMPORT)(running()))
    assert job.startup_failures == 1
    job = record(job, RanksStopped(job.generation, ("n1", "n2"), T0, step=3))
    assert (job.report_at_step, job.startup_failures) == (4, 0)


def test_a_spare_that_cannot_start_is_replaced_first() -> None:
    job = replace(running(), progressed_at=T0)
    walk(
        job,
        (at_minute(0.5, **IMPORT), "RESTART_IN_PLACE"),
        (at_minute(0.5, **IMPORT), "RESTART_IN_PLACE"),
        (at_minute(0.5, **IMPORT), "EXAMINE n2"),
        (examine(n2="HEALTHY"), "REPLACE_NODE without n2"),
        (at_minute(0.5, **IMPORT), "FAILED 1"),
    )


# --- counters that start again in each epoch


def trained(job: JobState, now: datetime, *, hours: float) -> tuple[JobState, datetime]:
    """Run for so long without a fault; the incident closes on time."""
    if job.incident is not None:
        job, _ = step(job, DeadlinePassed(), now + timedelta(hours=1))
        assert job.incident is None
    return job, now + timedelta(hours=hours)


def epochs(job: JobState, now: datetime, *, restarts: bool = True) -> JobState:
    """The report of a watch that has seen epochs of a thousand steps."""
    return record(job, ProgressSeen(job.generation, 1000, now, restarts=restarts), now)


def killed(job: JobState, now: datetime) -> tuple[JobState, Decision]:
    seconds = (now - T0).total_seconds()
    return step(job, fault(job, exited(2, signal=9), seconds=seconds), now)


def test_a_counter_of_epochs_does_not_fail_good_training() -> None:
    job, now = running(), T0
    for number in range(8):
        job, now = trained(job, now, hours=100)
        job, decision = killed(epochs(job, now), now)
        assert isinstance(decision, Relaunch), (number, decision)
        assert (job.flat_generations, len(job.tries)) == (0, number + 1)
        job = relaunched(job, now)
        assert decision.reason.endswith("RESTART_IN_PLACE 1 of 2 for UNKNOWN")


def test_a_counter_that_is_not_passed_still_fails_the_job() -> None:
    job, now = running(), T0
    for expected in ("RESTART_IN_PLACE", "RESTART_IN_PLACE", "EXAMINE n2", "FAILED 137"):
        job, now = trained(job, now, hours=2)
        job, decision = killed(epochs(job, now, restarts=False), now)
        assert describe(decision) == expected
        if isinstance(decision, Examine):
            job, decision = step(job, examine(n2="HEALTHY")(job), now)
        job = relaunched(job, now)


def test_a_counter_of_epochs_does_not_hide_a_fault_that_repeats() -> None:
    job, now = epochs(running(), T0), T0
    for expected in ("RESTART_IN_PLACE", "RESTART_IN_PLACE", "EXAMINE n2", "FAILED 137"):
        now += timedelta(minutes=30)
        job, decision = killed(epochs(job, now), now)
        assert describe(decision) == expected
        if isinstance(decision, Examine):
            job, decision = step(job, examine(n2="HEALTHY")(job), now)
        job = relaunched(job, now)
    assert "ended like the one before, none after 1h without a fault" in job.reason


def test_an_hour_counts_if_only_the_next_fault_shows_epochs() -> None:
    job = epochs(running(), T0, restarts=False)
    job, _ = killed(job, T0)
    job, now = trained(relaunched(job, T0), T0, hours=2)
    assert (job.progressed_at, job.report_at_step) == (None, 1001)
    job = epochs(job, now)
    assert (job.progressed_at, job.report_at_step, job.counter_restarts) == (now, None, True)
    later = now + timedelta(minutes=1)
    assert epochs(job, later).progressed_at == now, "once"


# --- errors at start-up


def test_start_ups_that_fail_on_one_node_try_another() -> None:
    missing = {
        "code": 1,
        "error": error("FileNotFoundError: [Errno 2] No such file: '/data/train.bin'", None),
    }
    walk(
        running(),
        (at_minute(0.5, **missing), "RESTART_IN_PLACE"),
        (at_minute(0.5, **missing), "RESTART_IN_PLACE"),
        (at_minute(0.5, **missing), "EXAMINE n2"),
        (examine(n2="HEALTHY"), "REPLACE_NODE without n2"),
        (at_minute(0.5, **missing), "FAILED 1"),
    )


def test_what_fails_on_another_node_as_well_is_the_program() -> None:
    walk(
        running(),
        (at_minute(0.5, **IMPORT), "RESTART_IN_PLACE"),
        (on_any_node(**IMPORT), "RESTART_IN_PLACE"),
        (at_minute(0.5, **IMPORT), "FAILED 1"),
    )


def test_the_only_node_of_a_job_is_named_by_each_error() -> None:
    def fails(job: JobState) -> Event:
        return fault(job, exited(0, "n1", **IMPORT))

    walk(
        running(nodes=1),
        (fails, "RESTART_IN_PLACE"),
        (fails, "RESTART_IN_PLACE"),
        (fails, "FAILED 1"),
    )


ADVICE = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param(
            [
                f"RuntimeError: CUDA error: {what}\nFor debugging consider CUDA_LAUNCH_BLOCKING=1\n"
                f"{ADVICE}"
                for what in ("misaligned address", "invalid argument", "no kernel image")
            ],
            1,
            id="advice that errors share",
        ),
        pytest.param(
            [
                f"ValueError: buffer of {size} bytes at 0x7f{size:x}: port {port} in use"
                for size, port in ((4096, 29500), (8192, 29501), (12288, 31007))
            ],
            3,
            id="numbers of a launch",
        ),
        pytest.param(
            ["KeyError: 'a'", "KeyError: 'b'", "KeyError: 'b'"], 2, id="words that differ"
        ),
    ],
)
def test_one_error_at_start_up_is_the_line_that_names_it(
    messages: list[str], expected: int
) -> None:
    job = running(policy=policy(startup_stop="off"))
    for message in messages:
        ended = exited(0, "n1", code=1, error=error(message, None))
        job, decision = step(job, fault(job, ended))
        while not isinstance(decision, Relaunch):
            assert isinstance(decision, Examine), decision
            job, decision = step(job, examine(n1="HEALTHY")(job))
        job = relaunched(job)
    assert job.startup_failures == expected


@pytest.mark.parametrize(
    ("errors", "expected"),
    [(("OSError: full", "KeyError: 'a'", "KeyError: 'a'"), 2), (("my own words",) * 2, 0)],
)
def test_below_a_launcher_it_is_what_failed_there(errors: tuple[str, ...], expected: int) -> None:
    wrapper = (
        "Traceback (most recent call last):",
        '  File "/opt/torch/distributed/run.py", line 1028, in main',
        "    run(args)",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "============================================================",
        "train.py FAILED",
    )
    job = running()
    for one in errors:
        below = (
            "Traceback (most recent call last):",
            '  File "train.py", line 1, in <module>',
            one,
        )
        tail = (*below, *wrapper)
        job, _ = step(job, fault(job, exited(2, code=1, log_tail=tail, launcher=True)))
        job = relaunched(job)
    assert job.startup_failures == expected


# --- a stated budget and a broken node


def test_a_stated_budget_is_not_spent_on_an_unhealthy_node() -> None:
    job = running(policy=policy(max_restarts=20))
    job = walk(
        job,
        (at_minute(5, signal=9), "RESTART_IN_PLACE"),
        (at_minute(5, signal=9), "RESTART_IN_PLACE"),
        (at_minute(5, signal=9), "EXAMINE n2"),
        (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2 avoiding n2"),
        (at_minute(5, signal=9), "EXAMINE n2"),
        (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2 avoiding n2"),
        (at_minute(5, signal=9), "EXAMINE n2"),
        (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2 avoiding n2"),
    )
    assert job.tries[-1].rung == STATED
    assert [one.node for one in job.avoided] == ["n2"]
