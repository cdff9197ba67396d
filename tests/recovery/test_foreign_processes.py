"""Memory of a GPU that foreign processes hold: who is named, and what a job does about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relaunch.evidence.causes import Cause
from relaunch.job.claim import suspects
from relaunch.job.events import DeadlinePassed, Event, NodesExamined, StepReached
from relaunch.job.ladder import FOREIGN_DELAY, FOREIGN_PROCESS
from relaunch.job.state import Examine, ForeignUse, JobState, Phase, Relaunch
from relaunch.pool.inventory import describe_foreign
from relaunch.pool.nodes import PROBE_LIFETIME
from tests.recovery.builders import (
    T0,
    at,
    error,
    exited,
    fault,
    policy,
    raised,
    relaunched,
    running,
    step,
    this,
    walk,
)
from tests.recovery.nodes import gpu, nvml

FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
BOB = "bob (python, pid 4711) holds 71.0 GB of GPU 0"
AGAIN = (raised(FULL), "ASK WHO USES n2")


def answer_uses(*uses: ForeignUse) -> Callable[[JobState], Event]:
    return lambda job: NodesExamined(job.generation, (), foreign=uses)


NONE, BOB_ON_N2 = answer_uses(), answer_uses(ForeignUse("n2", BOB))
LEFT = (BOB_ON_N2, "REPLACE_NODE without n2")


# --- who is named


def process(pid: Any = 4711, used: Any = 71_000_000_000, **more: Any) -> dict[str, Any]:
    user = {"ours": False, "user": "bob", "program": "python"}
    return {"pid": pid, "used": used, **user, **more}


@pytest.mark.parametrize(
    ("rows", "share", "expected"),
    [
        pytest.param([gpu(0, processes=[process()])], (), BOB, id="one"),
        pytest.param([gpu(0, processes=[process()])], (1, 2), "", id="of another job's GPU"),
        pytest.param([gpu(0, processes=[process(ours=True)])], (), "", id="a rank"),
        pytest.param([gpu(0, processes=[{"pid": 1, "used": 9}])], (), "", id="not classified"),
        pytest.param(
            [gpu(0, processes=[process(used=None)])],
            (),
            "bob (python, pid 4711) uses GPU 0",
            id="memory not known",
        ),
        pytest.param(
            [gpu(0, processes=[process(used=10**9)]), gpu(1, processes=[process(used=10**9)])],
            (),
            "bob (python, pid 4711) holds 2.0 GB of GPU 0, 1",
            id="on two GPUs",
        ),
        pytest.param(
            [gpu(0, processes=[process(pid, pid * 10**9) for pid in (1, 2, 3, 4)])],
            (),
            "bob (python, pid 4) holds 4.0 GB of GPU 0, bob (python, pid 3) holds 3.0 GB of GPU 0, "
            "bob (python, pid 2) holds 2.0 GB of GPU 0 and 1 more",
            id="most first",
        ),
        pytest.param(
            [gpu(0, processes=[process(user=None, program="a\x1b[31m")])],
            (),
            "an unknown user (a, pid 4711) holds 71.0 GB of GPU 0",
            id="no name",
        ),
    ],
)
def test_who_holds_the_memory_is_named(rows: Any, share: tuple[int, ...], expected: str) -> None:
    assert describe_foreign(nvml(*rows), share) == expected


@pytest.mark.parametrize(
    "answer", [None, [], {"unreadable": "no library"}, {"gpus": 3}, {"gpus": [3, {}]}]
)
def test_an_answer_without_gpus_names_no_process(answer: Any) -> None:
    assert describe_foreign(answer) == ""


# --- what a job does


def test_a_job_leaves_gpus_that_a_foreign_process_holds() -> None:
    job = walk(running(), AGAIN, LEFT)
    newest = job.tries[-1]
    assert (newest.rung, newest.spent, job.restarts_spent) == (FOREIGN_PROCESS, False, 0)
    assert job.avoided == () and suspects(job) == (), "the node did nothing wrong"
    assert job.incident is not None and job.incident.cause is Cause.OUT_OF_MEMORY
    for reason in (job.incident.reason, job.incident.faults[-1].reason, job.reason):
        assert reason.startswith(f"on n2 {BOB}, not started by relaunch; rank 3 on n2")


def test_no_foreign_process_leaves_the_ladder_as_it_is() -> None:
    job = walk(running(), AGAIN, (NONE, "RESTART_IN_PLACE"), AGAIN, (NONE, "FAILED 1"))
    assert job.restarts_spent == 1
    assert job.reason.startswith("rank 3 on n2 exited with code 1")


def test_foreign_processes_spend_no_budget_of_the_job() -> None:
    """Of the ladder, of `max_restarts`, `startup_stop` or `no_progress_stop`."""
    job = walk(running(), *(AGAIN, LEFT) * 9)
    walk(job, AGAIN, (NONE, "RESTART_IN_PLACE"), AGAIN, (NONE, "FAILED 1"))
    spent = running(policy=policy(max_restarts=0))
    walk(spent, AGAIN, LEFT)


def test_after_many_launches_a_person_is_asked() -> None:
    job = walk(running(policy=policy(no_progress_ask=2)), *(AGAIN, LEFT) * 2)
    job = walk(job, AGAIN, (BOB_ON_N2, "ASK"))
    assert BOB in job.reason


def test_the_launch_waits_until_older_readings_are_void() -> None:
    job = walk(running(), AGAIN)
    job, decision = step(job, BOB_ON_N2(job))
    assert isinstance(decision, Relaunch) and decision.delay == FOREIGN_DELAY >= PROBE_LIFETIME
    assert job.next.what == "generation 2 is launched 10s after this decision"


def test_the_delay_grows_until_training_advances() -> None:
    job, delays = running(), []
    for _ in range(7):
        job = walk(job, AGAIN)
        _, decision = step(job, BOB_ON_N2(job))
        assert isinstance(decision, Relaunch)
        delays.append(decision.delay.total_seconds())
        job = walk(job, LEFT)
    assert delays == [10, 20, 40, 80, 160, 300, 300]
    job = relaunched(job)
    job, _ = step(job, StepReached(job.generation, 9, at(60)), at(60))
    job, _ = step(job, raised(FULL)(job), at(61))
    _, decision = step(job, BOB_ON_N2(job), at(61))
    assert isinstance(decision, Relaunch) and decision.delay == FOREIGN_DELAY


def test_a_node_that_does_not_say_changes_nothing() -> None:
    job = walk(running(), AGAIN)
    assert job.phase is Phase.EXAMINING
    walk(job, (this(DeadlinePassed(job.next.at)), "RESTART_IN_PLACE"))


@pytest.mark.parametrize(
    "message",
    ["MemoryError: Unable to allocate 8.0 GiB", "ValueError: bad batch", "std::bad_alloc"],
)
def test_other_faults_ask_no_node_who_uses_it(message: str) -> None:
    walk(running(), (raised(message), "RESTART_IN_PLACE"))


def test_nccl_that_found_no_memory_is_asked_about() -> None:
    walk(running(), (raised("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), AGAIN[1]))


def test_a_policy_can_turn_it_off() -> None:
    off = running(policy=policy(check_foreign_processes=False))
    walk(off, (raised(FULL), "RESTART_IN_PLACE"), (raised(FULL), "FAILED 1"))


def test_only_the_node_of_the_fault_is_asked() -> None:
    job = running()
    one = fault(job, exited(1, "n1", code=1, error=error(FULL)))
    job, decision = step(job, one)
    assert isinstance(decision, Examine) and decision.nodes == ("n1",)
    assert decision.foreign_processes and job.next.at is not None and job.next.at > T0
