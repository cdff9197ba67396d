"""The decisions of the ECS GPU recovery, row by row, under `ecs-reboot-once`.

Source: github.com/yubingjiaocn/ecs-gpu-recovery (three Lambdas, 2025).
"""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.observations import RanksVanished
from relaunch.job.apply import finish, resubmit
from relaunch.job.events import (
    CancelRequested,
    DeadlinePassed,
    FaultObserved,
    LaunchFailed,
    LaunchRefused,
    NodeRefusal,
    NodesMissing,
    RanksStopped,
    RanksSucceeded,
    RepairEnded,
    StepReached,
)
from relaunch.job.state import JobState, Phase, Relaunch
from relaunch.spec.policy import Strategy, preset
from tests.recovery.builders import (
    T0,
    Turn,
    at,
    back,
    describe,
    died,
    examine,
    exited,
    fault,
    hung,
    lose,
    mended,
    raised,
    relaunched,
    running,
    sick,
    step,
    this,
    walk,
    xid,
)

OFF_THE_BUS = xid(79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")


def job(**spec: Any) -> JobState:
    return running(policy=preset("ecs-reboot-once"), **spec)


def vanished(reason: str = "the node rebooted") -> FaultObserved:
    return FaultObserved(1, (RanksVanished("n2", T0, reason, rebooted=True),), 0, T0)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        pytest.param(this(RanksSucceeded(1)), "SUCCEEDED 0", id="0 is COMPLETE"),
        pytest.param(died(1), "EXAMINE n2", id="1 has failed, and the node is examined"),
        pytest.param(raised(), "EXAMINE n2", id="1 with a traceback as well"),
        pytest.param(
            sick(OFF_THE_BUS),
            "EXAMINE n2",
            id="1 with a fault of a GPU as well: here the exit code is what counts",
        ),
        pytest.param(
            this(CancelRequested("", "ada")),
            "CANCELLED 130",
            id="stopped by a user is USER_STOPPED",
        ),
        pytest.param(died(2), "FAILED 2", id="any other code is FAILED_OTHERS"),
        pytest.param(died(134), "FAILED 134", id="134, which the original ignored"),
        pytest.param(died(137), "FAILED 137", id="137"),
        pytest.param(died(139), "FAILED 139", id="139"),
        pytest.param(lambda j: fault(j, exited(3, signal=9)), "FAILED 137", id="a signal"),
        pytest.param(
            lambda j: fault(j, exited(3, signal=1)), "FAILED 129", id="signal 1 is not exit code 1"
        ),
        pytest.param(
            sick(OFF_THE_BUS, code=139), "FAILED 139", id="a fault of a GPU with another exit code"
        ),
        pytest.param(this(vanished()), "FAILED 1", id="no exit code at all"),
        pytest.param(hung(), "FAILED 1", id="a hang"),
        pytest.param(
            this(LaunchFailed(1, ("n2",), False, at(0) - T0, "RunTask: capacity")),
            "FAILED 1",
            id="a start that failed",
        ),
        pytest.param(
            this(
                LaunchRefused(
                    1, (NodeRefusal("n1", "command_not_found", "trian.py is not on PATH"),)
                )
            ),
            "FAILED 127",
            id="a command that is not there",
        ),
    ],
)
def test_s1_1_every_way_to_end_is_classified(ending: Any, expected: str) -> None:
    walk(job(), (ending, expected))


@pytest.mark.parametrize(
    ("ending", "phase"), [(died(1), Phase.EXAMINING), (died(2), Phase.STOPPING)]
)
def test_s1_2_one_rank_fails_and_the_whole_generation_is_stopped(ending: Any, phase: Phase) -> None:
    after, _ = step(job(), ending(job()))
    # no node counts as stopped before it is proven
    assert (after.phase, after.maybe_alive) == (phase, ("n1", "n2"))
    partly, decision = step(after, RanksStopped(1, ("n1",), at(1)))
    assert (describe(decision), partly.phase, partly.maybe_alive) == ("IGNORE", phase, ("n2",))
    assert step(partly, RanksStopped(1, ("n2",), at(2)))[0].maybe_alive == ()


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        pytest.param(
            [exited(3, "n2", code=1)],
            "EXAMINE n2",
            id="the node of the failed rank, not the job's first",
        ),
        pytest.param(
            [exited(5, "n3", code=1, seconds=2), exited(3, "n2", code=1, seconds=1)],
            "EXAMINE n2",
            id="of several, that of the first",
        ),
        pytest.param(
            [
                exited(1, "n1", code=1, kernel=(OFF_THE_BUS,), seconds=2),
                exited(5, "n3", code=1, kernel=(OFF_THE_BUS,), seconds=1),
            ],
            "EXAMINE n3 n1",
            id="every suspect, the failing node first",
        ),
        pytest.param(
            [
                exited(
                    0,
                    "n1",
                    code=1,
                    seconds=1,
                    log_tail=("ConnectionResetError: [Errno 104] Connection reset by peer",),
                ),
                exited(5, "n3", code=1, seconds=2),
            ],
            "EXAMINE n3",
            id="a rank that only lost its peer is not the failed one",
        ),
    ],
)
def test_s1_3_suspects_are_examined_once_their_ranks_stopped(
    observed: list[Any], expected: str
) -> None:
    after = walk(job(nodes=3), (lambda j: fault(j, *observed), expected))
    # they may hold the GPUs that the examination needs
    assert after.maybe_alive == ("n1", "n2", "n3")


def test_s1_4_an_examination_has_a_phase_deadline_and_next_step(
    snapshot: SnapshotAssertion,
) -> None:
    after = walk(job(), (died(1), "EXAMINE n2"))
    assert (after.phase, after.next.at) == (Phase.EXAMINING, at(1800))
    assert after.next.what == snapshot(name="next")
    after = walk(after, (this(DeadlinePassed()), "FAILED 1"), now=at(1800))
    assert after.reason == snapshot(name="reason")


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([(died(1), "EXAMINE n2")], id="examining"),
        pytest.param(
            [(died(1), "EXAMINE n2"), (examine(n2="UNHEALTHY"), "REBOOT_NODE n2")], id="rebooting"
        ),
        pytest.param([(lose(), "WAIT NODE_LOST")], id="a node that does not answer"),
        pytest.param(
            [(this(NodesMissing("1 of 2 answer")), "WAIT WAITING_FOR_NODES")], id="too few nodes"
        ),
        pytest.param(
            [
                (died(1), "EXAMINE n2"),
                (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
                (mended(), "LAUNCH"),
                (this(NodesMissing("1 of 2")), "WAIT WAITING_FOR_NODES"),
            ],
            id="too few nodes after the reboot",
        ),
    ],
)
def test_s1_4_every_wait_has_a_deadline_and_a_next_step(turns: list[Turn]) -> None:
    after = walk(job(), *turns)
    assert after.next.what and after.next.at is not None


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(
            [(died(1), "EXAMINE n2"), (examine(n2="HEALTHY"), "FAILED 1")],
            id="healthy: a fault of the software",
        ),
        pytest.param(
            [(died(1), "EXAMINE n2"), (examine(n2="UNKNOWN"), "FAILED 1")],
            id="an exit of the check that is neither 0 nor 1 is neither",
        ),
        pytest.param(
            [(died(1), "EXAMINE n2"), (examine(n2="UNHEALTHY"), "REBOOT_NODE n2")],
            id="unhealthy the first time: reboot",
        ),
        pytest.param(
            [
                (died(1), "EXAMINE n2"),
                (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
                (mended(), "LAUNCH"),
                (died(1), "FAILED 1"),
            ],
            id="the second time: failed, whatever an examination would say",
        ),
        pytest.param(
            [
                (died(1), "EXAMINE n2"),
                (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
                (mended(), "LAUNCH"),
                (died(1, "n1", 0), "FAILED 1"),
            ],
            id="the second time on another node as well: the count is the job's",
        ),
        pytest.param(
            [
                (died(1), "EXAMINE n2"),
                (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
                (mended(), "LAUNCH"),
                (this(RanksSucceeded(2)), "SUCCEEDED 0"),
            ],
            id="a reboot that helped",
        ),
    ],
)
def test_s1_5_the_verdict_and_the_retry_count_decide(turns: list[Turn]) -> None:
    walk(job(), *turns)


def test_s1_6_a_proven_reboot_launches_again_as_one_retry(snapshot: SnapshotAssertion) -> None:
    after = walk(job(), (died(1), "EXAMINE n2"), (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"))
    # the retry is spent before the order
    assert (after.phase, after.generation, after.restarts_spent) == (Phase.REPAIRING, 1, 1)
    after, decision = step(after, mended("done", "boot id b1 is b2")(after))
    assert isinstance(decision, Relaunch)
    assert (decision.generation, decision.keep_nodes, decision.without) == (2, True, ())
    assert decision.reason == snapshot
    assert (relaunched(after).phase, after.restarts_spent) == (Phase.RUNNING, 1)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(back("n2"), id="the node answers"),
        pytest.param(
            lambda j: RepairEnded(j.generation, Strategy.RESET_GPU, ("n2",), "done", "reset"),
            id="another repair is done",
        ),
        pytest.param(
            lambda j: RepairEnded(j.generation, Strategy.REBOOT_NODE, ("n1",), "done", "boot id"),
            id="another node has rebooted",
        ),
        pytest.param(examine(n2="HEALTHY"), id="it is found healthy"),
    ],
)
def test_s1_6_nothing_but_proof_ends_a_reboot(event: Any) -> None:
    """The original launched 0.6 s after the order, and the reboot then ended the new rank."""
    rebooting = walk(job(), (died(1), "EXAMINE n2"), (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"))
    after, _ = step(rebooting, event(rebooting))
    assert (after.phase, after.generation, after.recovering) == (
        Phase.REPAIRING,
        1,
        rebooting.recovering,
    )


GIVING_UP: list[tuple[str, list[Turn]]] = [
    ("healthy", [(died(1), "EXAMINE n2"), (examine(n2="HEALTHY"), "FAILED 1")]),
    ("no verdict", [(died(1), "EXAMINE n2"), (examine(n2="UNKNOWN"), "FAILED 1")]),
    ("a check that never ends", [(died(1), "EXAMINE n2"), (this(DeadlinePassed()), "FAILED 1")]),
    (
        "a reboot that is refused",
        [
            (died(1), "EXAMINE n2"),
            (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
            (mended("refused", "not allowed"), "FAILED 1"),
        ],
    ),
    (
        "a reboot that cannot be proven",
        [
            (died(1), "EXAMINE n2"),
            (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
            (mended("ambiguous", "same boot id"), "FAILED 1"),
        ],
    ),
    (
        "a node that does not come back",
        [
            (died(1), "EXAMINE n2"),
            (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
            (this(DeadlinePassed()), "FAILED 1"),
        ],
    ),
    (
        "a second failure",
        [
            (died(1), "EXAMINE n2"),
            (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
            (mended(), "LAUNCH"),
            (died(1), "FAILED 1"),
        ],
    ),
    ("another exit code", [(died(2), "FAILED 2")]),
    ("a lost node", [(lose(), "WAIT NODE_LOST"), (hung(), "FAILED 1")]),
]


@pytest.mark.parametrize("turns", [pytest.param(turns, id=name) for name, turns in GIVING_UP])
def test_s1_7_every_decision_to_give_up_says_why(
    turns: list[Turn], snapshot: SnapshotAssertion
) -> None:
    """A notice is sent for each decision to stop, in its words, so each path has to end in one."""
    after = walk(job(), *turns)
    assert after.reason == snapshot
    assert after.incident is not None and after.incident.decisions[-1].decision == "Stop"
    assert after.incident.decisions[-1].reason == after.reason
    ended = finish(after, at(9))
    assert ended.phase is Phase.FAILED
    assert "FAILED" in (ended.incidents[-1].outcome or "")


def test_s1_11_only_a_person_gives_back_the_retry_count() -> None:
    once = relaunched(
        walk(
            job(),
            (died(1), "EXAMINE n2"),
            (examine(n2="UNHEALTHY"), "REBOOT_NODE n2"),
            (mended(), "LAUNCH"),
        )
    )
    stepped, _ = step(once, StepReached(2, 500, at(60)), at(60))
    healthy, _ = step(once, DeadlinePassed(), at(90_000))
    for renewed in (once, stepped, healthy):
        walk(renewed, (died(1), "FAILED 1"), now=at(90_001))
    ended = finish(walk(once, (died(1), "FAILED 1")), at(9))
    again = resubmit(ended, 2000, "ada", at(10), renew_budgets=False, avoid=())
    assert (again.restarts_spent, len(again.tries)) == (1, 1)
    assert resubmit(ended, 2000, "ada", at(10), renew_budgets=True, avoid=()).restarts_spent == 0
