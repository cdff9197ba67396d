"""What people answer when a job asks: approve, deny, snooze it, or take it over."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.job.decide import check_answer, describe_approval
from relaunch.job.events import (
    Answered,
    DeadlinePassed,
    FreeNodesCounted,
    NodeDeclaredDead,
    NodesMissing,
    NodeUnreachable,
    RetryRequested,
    Submitted,
)
from relaunch.job.ladder import launches_without_progress
from relaunch.job.state import Ask, Ignore, JobState, Phase, Relaunch, Stop, Wait
from tests.recovery.builders import (
    at,
    called,
    died,
    error,
    examine,
    exited,
    fault,
    hung,
    new_job,
    play,
    policy,
    raised,
    rungs,
    running,
    sick,
    step,
    this,
    walk,
    xid,
)

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
    assert decision == Relaunch(2, decision.reason, without=("n2",), approved=True)
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
    assert decision == Relaunch(job.generation + 1, decision.reason, without=("n2",), approved=True)
    assert decision.reason == snapshot


@pytest.mark.parametrize("free", [None, 3, 1, 0])
def test_a_question_says_on_which_nodes_an_approval_launches(
    free: int | None, snapshot: SnapshotAssertion
) -> None:
    job = asking()
    if free is not None:
        job, counted = step(job, FreeNodesCounted(job.generation, free), at(11))
        assert isinstance(counted, Ignore)
    assert (job.next.what, describe_approval(job)) == snapshot
    assert job.next.at == at(10) + ASKS.timeouts.answer_within
    snoozed, _ = step(job, Answered("snooze", "", "ada", at(60)), at(20))
    late, _ = step(snoozed, FreeNodesCounted(job.generation, 2), at(21))
    assert late.next == snoozed.next, "it is asked again later"
    again, _ = step(late, DeadlinePassed(at(60)), at(60))
    assert "2 other free nodes" in again.next.what


def test_an_elastic_job_needs_no_other_node_for_an_approval() -> None:
    job = replace(running(nodes={"min": 1, "max": 2}), policy=ASKS)
    job, _ = play(job, fault(job, BUG), FreeNodesCounted(1, 0))
    assert describe_approval(job).startswith("without n2")


def test_a_question_that_names_no_node_says_nothing_of_nodes() -> None:
    job = replace(running(policy=policy(unanswered="fail")), phase=Phase.WAITING_FOR_NODES)
    job, asked = step(job, DeadlinePassed(), at(99999))
    assert isinstance(asked, Ask)
    assert (asked.without, describe_approval(job)) == ((), "")
    assert step(job, FreeNodesCounted(1, 0))[0].phase is Phase.WAITING_FOR_PERSON
    job, decision = step(job, Answered("approve", "", "ada"))
    assert isinstance(decision, Relaunch) and decision.without == ()
    assert step(job, FreeNodesCounted(2, 5))[0] == job, "the question is answered"


def test_an_approval_renews_the_ladder_that_asked_and_no_other() -> None:
    ladder = [{"strategy": "RESTART_IN_PLACE", "tries": 1}, {"strategy": "ASK"}]
    causes = {"APPLICATION": ladder, "UNKNOWN": ladder}
    job = running(policy=policy(no_progress_stop="off", causes=causes))
    bug, crash = raised(), died(9)
    job = walk(
        job,
        (bug, "RESTART_IN_PLACE"),
        (crash, "RESTART_IN_PLACE"),
        (bug, "ASK"),
        (this(Answered("approve", "", "ada")), "LAUNCH without n2"),
        (crash, "ASK"),
        now=at(10),
    )
    job = replace(job, approved_at=None, ladders_renewed={Cause.APPLICATION: at(11)})
    job, _ = step(job, Answered("approve", "", "ada"), at(12))
    assert job.ladders_renewed == {Cause.APPLICATION: at(11), Cause.UNKNOWN: at(12)}
    walk(job, (bug, "RESTART_IN_PLACE"), (crash, "RESTART_IN_PLACE"), (bug, "ASK"), now=at(20))


def stuck() -> JobState:
    """A job that asks because two launches in a row brought no progress."""
    restart = {"strategy": "RESTART_IN_PLACE"}
    replace_broken = {"strategy": "REPLACE_NODE", "when": ["UNHEALTHY"], "isolate": True}
    patient = policy(
        no_progress_ask=2,
        no_progress_stop="off",
        startup_stop="off",
        causes={"APPLICATION": [restart], "HANG": [replace_broken, restart]},
    )
    return walk(
        running(policy=patient),
        (raised(), "RESTART_IN_PLACE"),
        (raised(), "RESTART_IN_PLACE"),
        (raised(), "ASK"),
    )


def test_an_approval_begins_the_count_of_launches_again(snapshot: SnapshotAssertion) -> None:
    job = stuck()
    assert job.asked == snapshot(name="question")
    job, _ = step(job, Answered("approve", "the data is fixed", "ada"), at(10))
    assert launches_without_progress(job) == 0
    assert job.incident is not None
    assert job.incident.decisions[-1].reason == snapshot(name="history")
    job = walk(
        job,
        (sick(xid(94)), "RESTART_IN_PLACE"),
        (sick(xid(94)), "RESTART_IN_PLACE"),
        (sick(xid(94)), "ASK"),
        now=at(20),
    )


def test_a_broken_node_is_replaced_however_often_it_was_launched() -> None:
    job, _ = step(stuck(), RetryRequested("", "ada"), at(10))
    job = walk(
        job,
        (sick(xid(79)), "REPLACE_NODE without n2 avoiding n2"),
        (this(NodeDeclaredDead("n1", "no power", "ada")), "REPLACE_NODE without n1"),
        (hung(), "CALL n1 n2"),
        (called(), "EXAMINE n1 n2"),
        (examine(n1="UNHEALTHY"), "REPLACE_NODE without n1 avoiding n1"),
        (hung(), "CALL n1 n2"),
        (called(), "EXAMINE n1 n2"),
        (examine(n1="HEALTHY", n2="HEALTHY"), "ASK"),
        now=at(20),
    )
    assert job.asked is not None and job.asked.ladder is None


def test_too_many_launches_ask_before_a_ladder_ends_the_job() -> None:
    used_up = rungs(
        {"strategy": "RESTART_IN_PLACE", "tries": 1},
        {"strategy": "REPLACE_NODE", "when": ["UNHEALTHY"]},
        no_progress_ask=1,
    )
    walk(
        running(policy=used_up),
        (raised(), "RESTART_IN_PLACE"),
        (raised(), "EXAMINE n2"),
        (examine(n2="HEALTHY"), "ASK"),
    )


def test_a_take_over_remembers_the_nodes_and_the_ladder() -> None:
    taken, ask = step(asking(), Answered("take-over", "", "ada"), at(20))
    assert isinstance(ask, Ask)
    assert (ask.without, ask.ladder) == (("n2",), Cause.APPLICATION)
    assert "without n2" in taken.next.what
    job = replace(running(), policy=rungs({"strategy": "RESTART_IN_PLACE", "delay": "1h"}))
    job, _ = play(job, fault(job, BUG), Answered("take-over", "", "ada"))
    assert job.asked is not None
    assert (job.asked.without, job.asked.ladder) == (("n2",), None), "of the newest fault"
    quiet, ask = step(replace(running(), phase=Phase.LAUNCHING), Answered("take-over", "", "ada"))
    assert isinstance(ask, Ask) and ask.without == ()
    assert quiet.next.what == ask.question


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
    assert step(job, DeadlinePassed(job.next.at), at(99999))[1] == replace(
        before.asked, reminders=1
    )


def test_a_question_without_an_answer_is_asked_again_and_again() -> None:
    before = asking()
    job, question = before, before.asked
    assert question is not None
    for number in range(1, 4):
        assert job.next.at is not None
        late = job.next.at
        job, decision = step(job, DeadlinePassed(late), late)
        assert decision == replace(question, reminders=number)
        assert (job.phase, job.reason) == (Phase.WAITING_FOR_PERSON, before.reason)
        assert (job.reminders, job.next.at) == (number, late + ASKS.timeouts.answer_within)
    launched, decision = step(job, Answered("approve", "", "ada"), at(999_999))
    assert isinstance(decision, Relaunch)
    assert launched.phase is Phase.LAUNCHING


def test_a_job_without_nodes_waits_on_and_counts_its_reminders() -> None:
    launching = replace(running(), phase=Phase.LAUNCHING)
    job, _ = step(launching, NodesMissing("1 of 2"), at(10))
    assert (job.phase, job.reminders, job.next.at) == (Phase.WAITING_FOR_NODES, 0, at(86_410))
    job, decision = step(job, DeadlinePassed(at(86_410)), at(86_410))
    assert isinstance(decision, Wait)
    assert (job.phase, job.reminders, job.next.at) == (Phase.WAITING_FOR_NODES, 1, at(172_810))
    # The fleet says again why: neither the deadline nor the count begins again.
    job, _ = step(job, NodesMissing("0 of 2"), at(90_000))
    assert (job.reason, job.reminders, job.next.at) == ("0 of 2", 1, at(172_810))


def test_a_policy_may_end_jobs_whose_questions_no_one_answers() -> None:
    job = replace(running(policy=policy(unanswered="fail")), phase=Phase.LAUNCHING)
    job, _ = step(job, NodesMissing("1 of 2"), at(10))
    job, decision = step(job, DeadlinePassed(at(86_410)), at(86_410))
    assert isinstance(decision, Ask) and job.phase is Phase.WAITING_FOR_PERSON
    job, decision = step(job, DeadlinePassed(at(172_810)), at(172_810))
    assert isinstance(decision, Stop) and decision.phase is Phase.FAILED


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


def test_new_jobs_queue_forever_and_those_losing_nodes_ask() -> None:
    queued, decision = play(
        new_job(), Submitted("", "ada"), NodesMissing("0 of 2 nodes: job llama holds 2")
    )
    assert isinstance(decision, Wait)
    assert (queued.phase, queued.next.at) == (Phase.QUEUED, None)
    job = replace(running(), phase=Phase.LAUNCHING)
    waiting, _ = step(job, NodesMissing("1 of 2 nodes"), at(1))
    assert waiting.phase is Phase.WAITING_FOR_NODES
    assert waiting.next.at == at(1) + job.policy.timeouts.answer_within
