"""What people answer when a job asks: approve, deny, snooze it, or take it over."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.job.decide import check_answer
from relaunch.job.events import (
    Answered,
    DeadlinePassed,
    NodesMissing,
    NodeUnreachable,
    RetryRequested,
    Submitted,
)
from relaunch.job.state import Ask, Ignore, JobState, Phase, Relaunch, Stop, Wait
from tests.recovery.builders import at, error, exited, fault, new_job, play, policy, running, step

BUG = exited(2, "n2", code=1, error=error("ValueError: bad batch"))
ASKS = policy(causes={"APPLICATION": [{"strategy": "ASK"}]})


def asking() -> JobState:
    """A job that asks since `at(10)`."""
    job = replace(running(), policy=ASKS)
    job, decision = step(job, fault(job, BUG), at(10))
    assert isinstance(decision, Ask)
    return job


def test_approve_launches_a_new_generation_and_names_who_said_so(
    snapshot: SnapshotAssertion,
) -> None:
    job, decision = step(asking(), Answered("approve", "the batch is fixed", "ada"), at(20))
    assert decision == Relaunch(2, decision.reason)
    assert decision.reason == snapshot
    assert (job.phase, job.generation) == (Phase.LAUNCHING, 2)


def test_approve_while_a_node_is_lost_launches_without_it(snapshot: SnapshotAssertion) -> None:
    job = running()
    job, _ = step(
        job, NodeUnreachable(job.generation, "n2", timedelta(seconds=180), "no answer"), at(1)
    )
    job, asked = step(job, DeadlinePassed(), at(4000))
    assert isinstance(asked, Ask)
    _, decision = step(job, Answered("approve", "", ""), at(4001))
    assert decision == Relaunch(job.generation + 1, decision.reason, without=("n2",))
    assert decision.reason == snapshot


def test_deny_ends_the_job_with_the_reason_for_which_it_asked(snapshot: SnapshotAssertion) -> None:
    before = asking()
    job, decision = step(before, Answered("deny", "it is hopeless", "ada"), at(20))
    assert decision == Stop(Phase.FAILED, decision.reason, exit_code=1)
    assert decision.reason == snapshot
    assert job.phase is Phase.STOPPING


def test_a_snoozed_question_comes_back_and_does_not_end_the_job(
    snapshot: SnapshotAssertion,
) -> None:
    before = asking()
    job, decision = step(before, Answered("snooze", "after breakfast", "ada", at(3620)), at(20))
    assert isinstance(decision, Wait)
    assert (decision.phase, decision.until) == (Phase.WAITING_FOR_PERSON, at(3620))
    assert decision.reason == snapshot(name="with-reason")
    assert decision.next == snapshot(name="next")
    again, _ = step(job, Answered("snooze", "", "ada", at(7000)), at(30))
    assert again.reason == snapshot(name="without-reason")  # not longer each time
    job, decision = step(again, DeadlinePassed(at(7000)), at(7000))
    assert decision == before.asked
    assert (job.reason, job.next.what) == (before.reason, before.next.what)
    assert job.next.at == at(7000) + ASKS.timeouts.answer_within
    assert isinstance(step(job, DeadlinePassed(job.next.at), at(99999))[1], Stop)


def test_a_taken_over_job_has_no_deadline_until_a_person_answers(
    snapshot: SnapshotAssertion,
) -> None:
    before = asking()
    job, decision = step(before, Answered("take-over", "I look at the data", "ada"), at(20))
    assert isinstance(decision, Ask)
    assert job.reason == snapshot
    assert (job.phase, job.next.at) == (Phase.WAITING_FOR_PERSON, None)
    assert "answer approve" in job.next.what
    assert isinstance(step(job, Answered("approve", "", "ada"), at(30))[1], Relaunch)
    assert isinstance(step(job, RetryRequested("", "ada"), at(30))[1], Relaunch)


def test_a_snooze_of_a_taken_over_job_ends_with_it_taken_over() -> None:
    taken, _ = step(asking(), Answered("take-over", "", "ada"), at(20))
    job, _ = step(taken, Answered("snooze", "", "bob", at(60)), at(30))
    job, decision = step(job, DeadlinePassed(at(60)), at(60))
    assert decision == taken.asked
    assert job.next.at is None


@pytest.mark.parametrize(
    "phase",
    [Phase.LAUNCHING, Phase.EXAMINING, Phase.REPAIRING, Phase.WAITING_FOR_NODES, Phase.QUEUED],
)
def test_work_of_relaunch_can_be_taken_over_but_asks_nothing(
    phase: Phase, snapshot: SnapshotAssertion
) -> None:
    job = replace(running(), phase=phase, reason="generation 2 is launched")
    after, decision = step(job, Answered("take-over", "", "ada"), at(20))
    assert isinstance(decision, Ask)
    assert after.reason != job.reason and after.reason.endswith(job.reason)
    for answer in ("approve", "deny", "snooze"):
        assert check_answer(job, answer, at(20)) == snapshot(name="no-question")


@pytest.mark.parametrize("decision", ["approve", "deny", "snooze", "take-over"])
def test_a_job_whose_ranks_run_is_not_stopped_by_an_answer(decision: str) -> None:
    job = running()
    after, decided = step(job, Answered(decision, "", "ada"), at(20))  # type: ignore[arg-type]
    assert isinstance(decided, Ignore)
    assert after == job
    assert "RUNNING" in check_answer(job, decision, at(20))


def test_s1_6_new_jobs_queue_forever_and_those_losing_nodes_ask() -> None:
    queued, decision = play(
        new_job(), Submitted("", "ada"), NodesMissing("0 of 2 nodes: job llama holds 2")
    )
    assert isinstance(decision, Wait)
    assert (queued.phase, queued.next.at) == (Phase.QUEUED, None)
    job = replace(running(), phase=Phase.LAUNCHING)
    waiting, _ = step(job, NodesMissing("1 of 2 nodes"), at(1))
    assert waiting.phase is Phase.WAITING_FOR_NODES
    assert waiting.next.at == at(1) + job.policy.timeouts.answer_within
