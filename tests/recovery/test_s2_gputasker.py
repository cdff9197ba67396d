"""The decisions of GPUTasker with heartbeats, row by row, under `gputasker`.

Silence is not failure, and nothing starts twice.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.job.apply import finish
from relaunch.job.events import (
    CancelRequested,
    DeadlinePassed,
    Launched,
    LaunchRefused,
    NodeDeclaredDead,
    NodeRefusal,
    NodesAcquired,
    RanksSucceeded,
    RetryRequested,
    Submitted,
)
from relaunch.job.fencing import safe_after
from relaunch.job.state import JobState, Phase, Relaunch, Slot
from relaunch.spec.policy import preset
from tests.recovery.builders import (
    T0,
    Turn,
    at,
    back,
    describe,
    died,
    exited,
    fault,
    hung,
    lose,
    new_job,
    play,
    raised,
    running,
    sick,
    step,
    this,
    walk,
    xid,
)

ONE, TWO = {"nodes": 1}, {"nodes": 2}


def job(**spec: Any) -> JobState:
    return running(policy=preset("gputasker"), **spec)


def test_s2_2_a_start_is_numbered_before_its_only_order() -> None:
    waiting, decision = step(new_job(policy=preset("gputasker")), Submitted("", "ada"))
    assert (describe(decision), waiting.generation, waiting.phase) == ("LAUNCH", 1, Phase.LAUNCHING)
    slots = (Slot("n1", "10.0.0.1"), Slot("n2", "10.0.0.2"))
    placed, decision = step(waiting, NodesAcquired(slots))
    # the launch that was decided upon goes on, and no other is
    assert describe(decision) == "IGNORE"
    started, decision = step(placed, Launched(1, T0, T0))
    assert (describe(decision), started.generation) == ("WAIT RUNNING", 1)
    for again in (Launched(1, T0, T0), NodesAcquired(slots)):
        after, decision = step(started, again)
        assert (after.generation, after.maybe_alive) == (1, ("n1", "n2"))
        assert not isinstance(decision, Relaunch)


def test_s2_2_a_node_that_has_seen_a_start_does_not_get_it_again() -> None:
    waiting, _ = play(
        new_job(policy=preset("gputasker")),
        Submitted("", "ada"),
        NodesAcquired((Slot("n1", "10.0.0.1"),)),
    )
    refused = LaunchRefused(
        1, (NodeRefusal("n1", "not_above", "generation 1 was launched before", (1000, 1)),)
    )
    walk(waiting, (this(refused), "FAILED 1"))


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        pytest.param(this(RanksSucceeded(1)), "SUCCEEDED 0", id="0 is done"),
        pytest.param(died(1), "FAILED 1", id="1 has failed"),
        pytest.param(died(255), "FAILED 255", id="any other code has failed"),
        pytest.param(raised(), "FAILED 1", id="an exception"),
        pytest.param(lambda j: fault(j, exited(3, signal=11)), "FAILED 139", id="a signal"),
        pytest.param(sick(xid(95)), "FAILED 1", id="a fault of a GPU is a failure like others"),
        pytest.param(hung(), "FAILED 1", id="past the exit barrier"),
    ],
)
def test_s2_3_0_is_done_and_anything_else_has_failed(ending: Any, expected: str) -> None:
    assert walk(job(), (ending, expected)).restarts_spent == 0


@pytest.mark.parametrize("spec", [ONE, TWO])
def test_s2_7_a_lost_node_is_no_failure_and_nothing_is_stopped(spec: dict[str, Any]) -> None:
    lost = walk(job(**spec), (lose("n1", 180), "WAIT NODE_LOST"), now=at(200))
    assert (lost.phase, lost.ending, lost.generation) == (Phase.NODE_LOST, None, 1)
    assert "n1" in lost.maybe_alive
    # since its last word
    assert lost.incident is not None and lost.incident.opened == at(20)


def test_s2_7_a_node_is_lost_after_180_seconds() -> None:
    assert preset("gputasker").timeouts.lost_after == timedelta(seconds=180)


@pytest.mark.parametrize(
    ("spec", "turns"),
    [
        pytest.param(
            ONE, [(lose("n1"), "WAIT NODE_LOST"), (back("n1"), "WAIT RUNNING")], id="it comes back"
        ),
        pytest.param(
            TWO,
            [(lose("n2"), "WAIT NODE_LOST"), (back("n2"), "WAIT RUNNING")],
            id="one of two comes back",
        ),
        pytest.param(
            TWO,
            [
                (lose("n2"), "WAIT NODE_LOST"),
                (lose("n1"), "WAIT NODE_LOST"),
                (back("n2"), "WAIT NODE_LOST"),
                (back("n1"), "WAIT RUNNING"),
            ],
            id="both do, one after the other",
        ),
        pytest.param(
            ONE,
            [
                (lose("n1"), "WAIT NODE_LOST"),
                (this(DeadlinePassed()), "ASK"),
                (this(DeadlinePassed()), "ASK"),
                (back("n1"), "WAIT RUNNING"),
            ],
            id="long after a person was asked, and reminded",
        ),
        pytest.param(
            TWO,
            [(lose("n2"), "WAIT NODE_LOST"), (hung(), "ASK"), (back("n2"), "WAIT RUNNING")],
            id="after the others had stood still and waited for it",
        ),
    ],
)
def test_s2_8_a_node_that_comes_back_goes_on_and_costs_nothing(
    spec: dict[str, Any], turns: list[Turn], snapshot: SnapshotAssertion
) -> None:
    after = walk(job(**spec), *turns)
    assert (after.phase, after.generation, after.lost, after.restarts_spent, after.incident) == (
        Phase.RUNNING,
        1,
        (),
        0,
        None,
    )
    assert after.incidents[-1].outcome == snapshot


def test_s2_8_a_lost_nodes_gpus_are_kept_until_its_ranks_end() -> None:
    asked = walk(job(), (lose("n2"), "WAIT NODE_LOST"), (hung(), "ASK"))
    assert set(asked.maybe_alive) == {"n1", "n2"}
    retried, decision = step(asked, RetryRequested("go on without it", "ada"), at(10))
    assert isinstance(decision, Relaunch) and decision.without == ("n2",)
    # the launch waits for what fences it
    assert (retried.lost_names, set(retried.maybe_alive)) == (("n2",), {"n1", "n2"})
    assert safe_after(retried, at(10)) == at(0) + timedelta(seconds=60 + 60 + 15 + 5)


def test_s2_8_a_rank_that_failed_on_a_lost_node_counts_on_return() -> None:
    asked = walk(job(), (lose("n2"), "WAIT NODE_LOST"), (raised(node="n1"), "ASK"))
    walk(asked, (back("n2"), "FAILED 1"))


def test_s2_8_a_fault_that_awaited_a_lost_node_is_one_incident() -> None:
    waiting = walk(
        job(gang="independent"),
        (lose("n2"), "WAIT NODE_LOST"),
        (raised(node="n1"), "WAIT NODE_LOST"),
    )
    after = walk(waiting, (back("n2"), "FAILED 1"))
    # something was stopped: it did not just come back
    assert after.incidents == ()
    assert after.incident is not None and after.incident.decisions[-1].decision == "Stop"


@pytest.mark.parametrize("spec", [ONE, TWO])
def test_s2_7_a_lost_node_is_not_waited_for_without_a_deadline(spec: dict[str, Any]) -> None:
    """No watch looks for hangs here, so nothing else would end this wait or notify a person."""
    lost = walk(job(**spec), (lose("n1"), "WAIT NODE_LOST"))
    assert lost.next.at == at(3600)
    walk(lost, (this(DeadlinePassed()), "ASK"), now=at(3600))


@pytest.mark.parametrize("end", [CancelRequested("", "ada"), RanksSucceeded(1)])
def test_s2_8_a_late_heartbeat_revives_nothing_that_has_ended(end: Any) -> None:
    ending, _ = play(job(), end)
    for ended in (ending, finish(ending, at(5))):
        after, decision = step(ended, back("n2")(ended), at(9))
        assert (describe(decision), after) == ("IGNORE", ended)


@pytest.mark.parametrize(
    ("event", "expected", "phase", "generation"),
    [
        pytest.param(
            CancelRequested("enough", "ada"),
            "CANCELLED 130",
            Phase.STOPPING,
            1,
            id="cancel ends it",
        ),
        pytest.param(
            RetryRequested("", "ada"),
            "LAUNCH without n1",
            Phase.LAUNCHING,
            2,
            id="retry starts it elsewhere",
        ),
        pytest.param(
            NodeDeclaredDead("n1", "burnt", "ada"),
            "ASK",
            Phase.WAITING_FOR_PERSON,
            1,
            id="declared dead: nothing starts by itself",
        ),
        pytest.param(
            NodeDeclaredDead("n7", "burnt", "ada"),
            "IGNORE",
            Phase.NODE_LOST,
            1,
            id="another node declared dead",
        ),
    ],
)
def test_s2_9_what_an_operator_may_do_about_a_lost_node(
    event: Any, expected: str, phase: Phase, generation: int
) -> None:
    after = walk(job(nodes=1), (lose("n1"), "WAIT NODE_LOST"), (this(event), expected))
    assert (after.phase, after.generation, after.restarts_spent) == (phase, generation, 0)


def test_s2_9_a_dead_node_holds_no_ranks_and_a_retry_may_follow() -> None:
    dead = walk(
        job(nodes=1),
        (lose("n1"), "WAIT NODE_LOST"),
        (this(NodeDeclaredDead("n1", "burnt", "ada")), "ASK"),
    )
    assert (dead.maybe_alive, dead.lost) == ((), ())
    walk(dead, (this(RetryRequested("", "ada", ("n1",))), "LAUNCH avoiding n1"))


def test_s2_9_only_a_person_ends_a_lost_job() -> None:
    lost = walk(job(nodes=1), (lose("n1"), "WAIT NODE_LOST"))
    for day in range(1, 30):
        lost = walk(lost, (this(DeadlinePassed()), "ASK"), now=at(86_400 * day))
    assert (lost.phase, lost.ending) == (Phase.WAITING_FOR_PERSON, None)
