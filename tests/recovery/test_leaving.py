"""A job with a node to drain: when it leaves the node, and what people may say to that."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from relaunch.job.claim import build_claim, build_current_claim
from relaunch.job.decide import check_answer
from relaunch.job.drain import (
    describe_drains,
    drains_at_checkpoint,
    nodes_to_drain,
)
from relaunch.job.events import (
    Answered,
    CancelRequested,
    CheckpointSaved,
    DrainCancelled,
    DrainDue,
    DrainRequested,
    NodesAcquired,
)
from relaunch.job.ladder import remaining_slots
from relaunch.job.next_step import NAMED, describe_next
from relaunch.job.state import Ignore, JobState, NodeDrain, Phase, Relaunch, Slot
from relaunch.spec.policy import preset
from tests.recovery.builders import (
    T0,
    at,
    error,
    exited,
    fault,
    play,
    raised,
    running,
    step,
    this,
    walk,
)
from tests.recovery.generated import searched
from tests.recovery.streams import Choice, Move, Run

PSU = DrainRequested("n2", "swap its PSU", "carol", at(7200))
NO = Answered("deny", "evaluation ends at noon", "alice", node="n2")
NOW = Answered("approve", "go ahead", "bob", node="n2")


def saved(job: JobState, number: int = 120) -> CheckpointSaved:
    return CheckpointSaved(job.generation, number, at(60))


def request_drain(job: JobState | None = None) -> JobState:
    return step(job or running(), PSU)[0]


# --- at a checkpoint


def test_it_leaves_after_its_next_checkpoint_and_spends_nothing(
    snapshot: SnapshotAssertion,
) -> None:
    before = request_drain()
    job, decision = step(before, saved(before), at(60))
    assert decision == Relaunch(2, decision.reason, without=("n2",))
    assert decision.reason == snapshot
    assert (job.phase, job.restarts_spent, job.tries, job.incident, job.incidents) == (
        Phase.LAUNCHING,
        0,
        (),
        None,
        (),
    )
    assert nodes_to_drain(job, at(60)) == ("n2",)
    job, _ = step(job, NodesAcquired((Slot("n1", "10.0.0.1"), Slot("n3", "10.0.0.3"))), at(61))
    assert job.drains == ()


def test_one_checkpoint_leaves_all_wanted_nodes_but_those_denied(
    snapshot: SnapshotAssertion,
) -> None:
    job, _ = play(
        running(nodes=4),
        PSU,
        replace(PSU, node="n3", reason=""),
        replace(PSU, node="n4"),
        replace(NO, node="n4"),
    )
    _, decision = step(job, saved(job), at(60))
    assert decision == Relaunch(2, decision.reason, without=("n2", "n3"))
    assert decision.reason == snapshot


def test_a_checkpoint_that_no_drain_waits_for_changes_nothing() -> None:
    for job in (
        running(),
        step(request_drain(), NO)[0],
        replace(request_drain(), phase=Phase.NODE_LOST),
    ):
        after, decision = step(job, saved(job), at(60))
        assert isinstance(decision, Ignore)
        assert replace(after, ledger=job.ledger) == job  # the ledger learns what is saved


def test_a_checkpoint_of_an_earlier_generation_is_not_one() -> None:
    job = request_drain()
    assert isinstance(step(job, replace(saved(job), generation=0), at(60))[1], Ignore)
    assert isinstance(step(replace(job, phase=Phase.LAUNCHING), saved(job), at(60))[1], Ignore)


# --- no, and at once


def test_a_no_keeps_it_there_past_checkpoints_until_it_has_to(snapshot: SnapshotAssertion) -> None:
    job, decision = step(request_drain(), NO, at(10))
    assert isinstance(decision, Ignore) and job.phase is Phase.RUNNING
    assert [(one.node, one.reason, one.by, one.until) for one in job.drains] == [
        ("n2", "swap its PSU", "carol", at(7200))
    ]
    assert job.drains[0].denied == snapshot(name="denied")
    assert job.notices[-1] == snapshot(name="notice")
    assert drains_at_checkpoint(job) == ()
    _, decision = step(job, DrainDue("n2"), at(7200))
    assert decision == Relaunch(2, decision.reason, without=("n2",))
    assert decision.reason == snapshot(name="relaunch")


def test_a_no_holds_over_relaunches_until_the_time_is_over() -> None:
    job, _ = step(request_drain(), NO, at(10))
    job = walk(job, (raised(), "RESTART_IN_PLACE"), now=at(20))
    assert (nodes_to_drain(job, at(7199)), nodes_to_drain(job, at(7200))) == ((), ("n2",))
    assert [slot.node for slot in remaining_slots(job, ())] == ["n1", "n2"]
    assert (
        build_claim(job, 3, keep=("n1", "n2")).stays == ("n2",)
        and build_claim(job, 3, keep=("n1",)).stays == ()
    )
    job, _ = step(job, NodesAcquired(job.slots), at(21))
    # it is there still, and so is the no
    assert job.drains[0].denied
    elastic = step(step(running(nodes={"min": 1, "max": 2}), PSU)[0], NO)[0]
    assert build_current_claim(elastic, 4, ("n1", "n2")).stays == ("n2",)


def test_a_job_that_may_go_leaves_the_node_with_any_relaunch() -> None:
    job = walk(request_drain(), (raised(), "RESTART_IN_PLACE"), now=at(20))
    assert nodes_to_drain(job, at(20)) == ("n2",)
    assert build_claim(job, 3, keep=("n1",)).stays == ()
    # until then it is there
    assert build_current_claim(request_drain(), 3, ("n1", "n2")).stays == ("n2",)


def test_an_approval_has_it_leave_at_once(snapshot: SnapshotAssertion) -> None:
    job, decision = step(request_drain(), NOW, at(10))
    assert decision == Relaunch(2, decision.reason, without=("n2",))
    assert decision.reason == snapshot(name="with-reason")
    assert job.notices[0] == snapshot(name="notice")
    assert job.notices[1] == snapshot(name="answer")
    _, decision = step(request_drain(), Answered("approve", "", "", node="n2"), at(10))
    assert decision == Relaunch(2, decision.reason, without=("n2",))
    assert decision.reason == snapshot(name="without-reason")


def test_an_approval_takes_a_no_back_at_any_time(snapshot: SnapshotAssertion) -> None:
    job, _ = step(request_drain(), NO, at(10))
    job, decision = step(replace(job, phase=Phase.LAUNCHING), NOW, at(20))
    assert isinstance(decision, Ignore) and job.phase is Phase.LAUNCHING
    # its time is over, and a timer says so as soon as it runs
    assert job.drains == (NodeDrain("n2", "swap its PSU", "carol", at(20)),)
    assert nodes_to_drain(job, at(20)) == ("n2",)
    assert check_answer(job, "deny", at(20), "n2") == snapshot


@pytest.mark.parametrize("decision", ["snooze", "take-over"])
def test_a_node_is_left_or_not_and_nothing_else(decision: str, snapshot: SnapshotAssertion) -> None:
    before = request_drain()
    said = check_answer(before, decision, at(1), "n2")
    assert said == snapshot
    job, decided = step(before, Answered(decision, "", "ada", node="n2"), at(1))  # type: ignore[arg-type]
    assert decided == Ignore(said) and job == before


def test_a_node_that_no_drain_wants_cannot_be_answered_for(snapshot: SnapshotAssertion) -> None:
    job = request_drain()
    assert check_answer(job, "approve", at(1), "n5") == snapshot(name="other-node")
    assert step(job, replace(NO, node="n5"))[0] == job
    ending, _ = step(job, CancelRequested("", ""))
    assert check_answer(ending, "deny", at(1), "n2") == snapshot(name="ending")
    assert (describe_drains(ending), describe_next(ending)) == ((), ending.next.what)


def test_an_answer_for_a_node_is_no_answer_to_the_jobs_question() -> None:
    job = replace(request_drain(), phase=Phase.WAITING_FOR_PERSON)
    after, decision = step(job, NO, at(10))
    assert (
        isinstance(decision, Ignore)
        and after.phase is Phase.WAITING_FOR_PERSON
        and after.drains[0].denied
    )


# --- asked again, and not any more


def test_asking_again_for_the_same_reason_asks_nothing_new() -> None:
    job, _ = step(request_drain(), NO, at(10))
    assert step(job, PSU)[0] == job
    later, _ = step(job, replace(PSU, until=at(9000)))
    # the no stands, until then
    assert later.drains == (replace(job.drains[0], until=at(9000)),)
    other, _ = step(job, replace(PSU, by="dave", reason="it smells"))
    assert other.drains == (NodeDrain("n2", "it smells", "dave", at(7200)),)


def test_a_request_counts_before_the_node_is_taken_in() -> None:
    """A launch waits for minutes after its nodes were granted, where a lost one has to fence."""
    wanted = DrainRequested("n3", "swap its PSU", "carol", at(7200))
    job = walk(running(), (raised(), "RESTART_IN_PLACE"))
    job, decision = step(job, wanted)
    assert isinstance(decision, Ignore) and [one.node for one in job.drains] == ["n3"]
    taken, _ = step(job, NodesAcquired((Slot("n1", "10.0.0.1"), Slot("n3", "10.0.0.3"))))
    assert [one.node for one in taken.drains] == ["n3"]
    other, _ = step(job, NodesAcquired((Slot("n1", "10.0.0.1"), Slot("n4", "10.0.0.4"))))
    assert other.drains == ()


def test_a_node_that_never_was_the_jobs_is_not_left() -> None:
    wanted = DrainRequested("n3", "swap its PSU", "carol", at(7200))
    assert step(running(), wanted)[0].drains == ()


def test_a_node_that_is_no_longer_wanted_is_kept(snapshot: SnapshotAssertion) -> None:
    before = request_drain()
    job, decision = step(before, DrainCancelled("n2", "back in service"))
    assert isinstance(decision, Ignore) and job.drains == ()
    assert job.notices[-1] == snapshot(name="cancelled")
    assert step(job, DrainCancelled("n2", "back in service"))[0] == job
    assert step(before, DrainCancelled("n2", ""))[0].notices[-1] == snapshot(name="without-reason")
    for event in (DrainDue("n2"), saved(job)):
        assert isinstance(step(job, event, at(7200))[1], Ignore)


# --- in words


def test_what_comes_next_says_who_wants_what_and_the_answers(snapshot: SnapshotAssertion) -> None:
    job = request_drain()
    assert describe_drains(job) == snapshot(name="asked")
    assert describe_next(job) == f"{job.next.what}; {describe_drains(job)[0]}"
    denied, _ = step(job, NO, at(10))
    assert describe_drains(denied) == snapshot(name="denied")
    nameless, _ = step(running(), DrainRequested("n2", "", "", at(7200)))
    assert describe_drains(nameless) == snapshot(name="nameless")
    assert describe_next(running()) == running().next.what


def test_when_a_rack_is_drained_what_comes_next_stays_one_line(snapshot: SnapshotAssertion) -> None:
    job = running(nodes=8)
    for slot in job.slots:
        job, _ = step(job, replace(PSU, node=slot.node))
    assert describe_next(job).count("carol wants") == NAMED
    assert describe_next(job) == snapshot


def test_a_job_that_has_ended_leaves_nothing() -> None:
    assert describe_drains(replace(request_drain(), phase=Phase.SUCCEEDED)) == ()


def test_a_fault_meanwhile_is_decided_as_ever_and_leaves_it_too() -> None:
    job = request_drain()
    job, decision = step(job, fault(job, exited(1, "n1", code=1, error=error())), at(30))
    assert isinstance(decision, Relaunch) and job.incident is not None
    assert nodes_to_drain(job, at(30)) == ("n2",)
    walk(job, (this(DrainDue("n2")), "LAUNCH without n2"), now=T0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**16), st.sampled_from(("leave", "answer", "answer", "watch", "people"))
        ),
        min_size=10,
        max_size=40,
    )
)
@searched(25)
def test_leaving_spends_nothing_and_accuses_no_node(
    moves: list[tuple[int, Any]],
) -> None:
    run = Run(preset("default"), nodes={"min": 1, "max": 3})
    for number, kind in moves:
        choice = Choice(number)
        if kind != "leave":
            Move(kind, number, timedelta(seconds=choice.among((0, 1, 600)))).do(run)
            continue
        node = choice.among([slot.node for slot in run.job.slots] or ["n1"])
        wanted = (
            replace(PSU, node=node, until=run.now + timedelta(hours=1)),
            DrainCancelled(node, ""),
            DrainDue(node),
        )
        said = (replace(NO, node=node), replace(NOW, node=node))
        before = run.job
        turn = run.take(
            choice.among(
                (*wanted[:1], CheckpointSaved(before.generation, 9, run.now), *said, *wanted[1:])
            )
        )
        assert isinstance(turn.decision, Ignore | Relaunch)
        if isinstance(turn.decision, Relaunch):
            assert (
                before.phase is Phase.RUNNING
                and turn.decision.without
                and turn.decision.take is None
            )
            spent = (run.job.restarts_spent, run.job.tries, run.job.incidents, run.job.avoided)
            assert spent == (before.restarts_spent, before.tries, before.incidents, before.avoided)
        assert describe_next(run.job).startswith(run.job.next.what)
