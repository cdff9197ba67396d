"""The decisions of torch.distributed.elastic (torch 2.11), row by row, under `torchelastic`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.observations import RanksVanished
from relaunch.job.events import (
    FaultObserved,
    LaunchRefused,
    NodeRefusal,
    RanksSucceeded,
    RetryRequested,
    StepReached,
)
from relaunch.job.state import JobState, Phase, Relaunch
from relaunch.spec.policy import Policy, preset, resolve
from tests.recovery.builders import (
    T0,
    Turn,
    at,
    back,
    climbed,
    describe,
    died,
    error,
    exited,
    fault,
    first_launch,
    hung,
    lose,
    raised,
    refused,
    relaunched,
    running,
    sick,
    step,
    suspected,
    this,
    walk,
    xid,
)

WORKER_FAILURES = [
    pytest.param(died(1), id="an exit code"),
    pytest.param(raised(), id="an exception"),
    pytest.param(lambda j: fault(j, exited(0, "n1", signal=11)), id="a signal"),
    pytest.param(lambda j: fault(j, exited(0, "n1", signal=9)), id="SIGKILL"),
    pytest.param(
        raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        id="out of memory",
    ),
    pytest.param(
        sick(xid(79, "GPU has fallen off the bus.")),
        id="a fatal fault of a GPU, which it knows nothing of",
    ),
    pytest.param(sick(xid(31)), id="a page fault of a GPU"),
    pytest.param(sick(xid(95)), id="a GPU to be reset"),
    pytest.param(
        raised("ConnectionResetError: [Errno 104] Connection reset by peer"), id="a lost connection"
    ),
    pytest.param(raised("OSError: [Errno 116] Stale file handle"), id="a lost file system"),
    pytest.param(hung(), id="a rank past the exit barrier"),
]


def job(policy: Policy | None = None, **spec: Any) -> JobState:
    return running(policy=policy or preset("torchelastic"), **spec)


def lost_and_missed(node: str = "n2") -> tuple[Turn, Turn]:
    """A node is gone and the others stand still: only then is it left behind."""
    return (lose(node), "WAIT NODE_LOST"), (hung(), f"REPLACE_NODE without {node}")


@pytest.mark.parametrize("failure", WORKER_FAILURES)
def test_s3_2_all_ranks_restart_until_max_restarts_then_it_fails(
    failure: Any,
    snapshot: SnapshotAssertion,
) -> None:
    after = job()
    for spent in (1, 2, 3):
        after = walk(after, (failure, "RESTART_IN_PLACE"))
        assert (after.generation, after.restarts_spent, after.avoided) == (spent + 1, spent, ())
    after, decision = step(relaunched(after), failure(after))
    assert describe(decision).startswith("FAILED"), decision
    assert decision.reason == snapshot


def test_s3_2_one_count_for_all_causes_survives_progress() -> None:
    after = walk(job(), (died(1), "RESTART_IN_PLACE"), (sick(xid(79)), "RESTART_IN_PLACE"))
    after, _ = step(relaunched(after), StepReached(3, 10_000, at(60)), at(60))
    after = walk(after, (hung(), "RESTART_IN_PLACE"), now=at(61))
    walk(after, (died(2), "FAILED 2"), now=at(62))


@pytest.mark.parametrize("most", [0, 1, 5])
def test_s3_2_max_restarts_is_the_number_of_restarts(most: int) -> None:
    turns: list[Turn] = [(died(1), "RESTART_IN_PLACE")] * most
    walk(
        job(resolve({"extends": "torchelastic", "max_restarts": most})),
        *turns,
        (died(1), "FAILED 1"),
    )


def test_s3_3_a_membership_change_restarts_all_and_is_no_retry() -> None:
    after = job(nodes=3)
    for _ in range(10):
        after = walk(after, *lost_and_missed())
        assert (after.phase, after.restarts_spent) == (Phase.LAUNCHING, 0)
    assert after.generation == 11
    after = walk(after, (this(RetryRequested("a node was added", "ada")), "LAUNCH"))
    walk(
        after,
        (died(1), "RESTART_IN_PLACE"),
        (died(1), "RESTART_IN_PLACE"),
        (died(1), "RESTART_IN_PLACE"),
        (died(1), "FAILED 1"),
    )


@pytest.mark.parametrize("cause", [Cause.NODE_LOST, Cause.NODE_FAULT, Cause.PREEMPTED])
def test_s3_3_and_it_may_happen_when_nothing_is_left(cause: Cause) -> None:
    after = walk(job(), *[(died(1), "RESTART_IN_PLACE")] * 3)
    for _ in range(20):
        after, decision = climbed(after, suspected(cause, "n2"))
        assert describe(decision) == "REPLACE_NODE without n2"
    # it may come back and join again
    assert (after.restarts_spent, after.avoided) == (3, ())


def test_s3_3_a_node_back_before_it_is_missed_restarts_nothing() -> None:
    assert walk(job(), (lose("n2"), "WAIT NODE_LOST"), (back("n2"), "WAIT RUNNING")).generation == 1


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        pytest.param(None, "SUCCEEDED 0", id="every rank"),
        pytest.param(
            [exited(0, "n1", code=0), exited(3, "n2", code=1, seconds=5)],
            "RESTART_IN_PLACE",
            id="one of many failed, the last",
        ),
        pytest.param(
            [exited(3, "n2", code=1), exited(0, "n1", code=0, seconds=5)],
            "RESTART_IN_PLACE",
            id="one of many failed, the first",
        ),
    ],
)
def test_s3_4_success_is_that_of_every_rank(observed: list[Any] | None, expected: str) -> None:
    walk(
        job(),
        (this(RanksSucceeded(1)) if observed is None else lambda j: fault(j, *observed), expected),
    )


def test_s3_5_past_the_exit_barrier_only_a_running_rank_hangs() -> None:
    assert preset("torchelastic").timeouts.exit_barrier == timedelta(seconds=300)
    after = walk(job(), (hung(3), "RESTART_IN_PLACE"))
    assert after.incident is not None and (after.incident.cause, after.incident.ranks) == (
        Cause.HANG,
        (3,),
    )
    walk(relaunched(after), (this(RanksSucceeded(2)), "SUCCEEDED 0"))


def test_s3_6_the_earliest_error_is_the_cause_with_its_traceback(
    snapshot: SnapshotAssertion,
) -> None:
    start = T0.timestamp()
    missing = error("KeyError: 'lr'", start + 1)
    first = exited(2, "n2", code=1, seconds=9, error=missing)
    others = [
        exited(0, "n1", code=1, seconds=8, error=error("RuntimeError: NCCL", start + 5)),
        exited(3, "n2", code=1, seconds=9, error=error("ValueError: b", start + 4)),
    ]
    after, decision = step(job(), fault(job(), others[0], first, others[1]), at(10))
    assert isinstance(decision, Relaunch)
    assert decision.reason == snapshot
    assert after.incident is not None
    assert (after.incident.ranks, after.incident.nodes) == ((2,), ("n2",))
    assert after.incident.traceback == missing.traceback.rstrip()


@pytest.mark.parametrize(
    ("whose", "event", "expected", "spent"),
    [
        pytest.param(
            "worker", died(1), "RESTART_IN_PLACE", 1, id="a worker's failure is the job's own"
        ),
        pytest.param("worker", died(2), "RESTART_IN_PLACE", 1, id="whatever its exit code"),
        pytest.param(
            "worker", died(127), "RESTART_IN_PLACE", 1, id="also one that says its input is wrong"
        ),
        pytest.param(
            "platform",
            this(LaunchRefused(1, (NodeRefusal("n1", "expired", "the order came too late"),))),
            "RESTART_IN_PLACE",
            0,
            id="the agent's error is not",
        ),
        pytest.param(
            "infrastructure",
            this(
                FaultObserved(
                    1, (RanksVanished("n2", T0, "the node rebooted", rebooted=True),), 0, T0
                )
            ),
            "REPLACE_NODE without n2",
            0,
            id="nor is the host's",
        ),
    ],
)
def test_s3_7_whose_fault_it_is_says_whose_budget_it_takes(
    whose: str, event: Any, expected: str, spent: int
) -> None:
    assert walk(job(), (event, expected)).restarts_spent == spent, whose


def test_s3_7_wrong_input_of_the_first_launch_is_not_retried() -> None:
    starting = first_launch(policy=preset("torchelastic"))
    ending = this(refused("command_not_found", "n1", "n2"))
    assert walk(starting, (ending, "FAILED 127")).restarts_spent == 0


def test_s3_7_platform_faults_fail_the_job_but_spend_no_restart() -> None:
    refused = this(LaunchRefused(1, (NodeRefusal("n1", "expired", "the order came too late"),)))
    after, count = job(), 0
    while after.ending is None:
        after, decision = climbed(after, suspected(Cause.PLATFORM))
        count += 1
        assert count < 9
    assert (count, after.restarts_spent, describe(decision)) == (6, 0, "FAILED 1")
    assert walk(job(), (refused, "RESTART_IN_PLACE")).tries[0].cause is Cause.PLATFORM


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [
        pytest.param([{"strategy": "FAIL"}], "FAILED 1", id="the gang fails"),
        pytest.param(
            [{"strategy": "REPLACE_NODE", "tries": 1}, {"strategy": "FAIL"}],
            "REPLACE_NODE without n2",
            id="the node is replaced",
        ),
        pytest.param([{"strategy": "ASK"}], "ASK", id="a person chooses"),
    ],
)
def test_s3_9_policy_replaces_a_lost_node_or_fails_the_gang(
    ladder: list[dict[str, Any]], expected: str
) -> None:
    policy = resolve({"extends": "torchelastic", "causes": {"NODE_LOST": ladder}})
    walk(job(policy), (lose("n2"), "WAIT NODE_LOST"), (hung(), expected))
