"""Several nodes of a job that do not answer, and what else happens meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from relaunch.evidence.causes import Cause
from relaunch.job.claim import suspects
from relaunch.job.decide import check_answer
from relaunch.job.events import (
    Answered,
    CancelRequested,
    DeadlinePassed,
    NodesAcquired,
    NodesMissing,
    RanksHung,
    Submitted,
)
from relaunch.job.state import Ask, JobState, Phase, Slot
from relaunch.spec.policy import preset
from tests.recovery.builders import (
    at,
    back,
    describe,
    died,
    fallen,
    hung,
    lose,
    new_job,
    policy,
    running,
    sick,
    step,
    xid,
)

ASKS_ONLY = [
    pytest.param({"policy": preset("torchelastic")}, id="ranks that fence only as a whole"),
    pytest.param({"policy": preset("gputasker")}, id="a policy of single nodes"),
    pytest.param({"policy": policy(hang={"after": "off"})}, id="no hang is detected"),
    pytest.param({"gang": "independent"}, id="ranks that go on alone"),
]
"""Jobs whose lost nodes are a matter for a person."""
MISSING = NodesMissing("1 of 2 nodes")


@pytest.mark.parametrize("shape", ASKS_ONLY)
@pytest.mark.parametrize("fails", [False, True], ids=["the others go on", "another rank fails"])
def test_a_person_is_asked_although_one_of_two_is_back(shape: dict[str, Any], fails: bool) -> None:
    job = running(nodes=3, **shape)
    job, _ = step(job, lose("n2")(job), at(0))
    job, first = step(job, lose("n3")(job), at(60))
    if fails and job.policy.hang.after != "off":
        job, first = step(job, died(1, "n1", 0)(job), at(120))
    until = job.next.at
    assert first.kind == "Wait" and until is not None
    job, decision = step(job, back("n2")(job), at(180))
    assert (describe(decision), job.lost_names, job.next.at) == ("WAIT NODE_LOST", ("n3",), until)
    job, decision = step(job, DeadlinePassed(until), until)
    assert describe(decision) == "ASK" and job.phase is Phase.WAITING_FOR_PERSON


def test_a_job_that_finds_the_hang_itself_asks_no_person() -> None:
    job = running(nodes=3)
    for event in (lose("n2"), lose("n3"), back("n2")):
        job, decision = step(job, event(job), at(10))
        assert (describe(decision), job.next.at) == ("WAIT NODE_LOST", None)


def open_question(ladder: bool = False, **shape: Any) -> JobState:
    """A job that has lost n2 of three nodes and asks a person about it."""
    if ladder:
        shape["policy"] = policy(causes={"NODE_LOST": [{"strategy": "ASK"}]})
    job = running(nodes=3, **(shape or {"gang": "independent"}))
    job, _ = step(job, lose("n2")(job), at(0))
    job, decision = step(job, hung()(job) if ladder else DeadlinePassed(), at(3600))
    assert describe(decision) == "ASK"
    return job


def take_over(job: JobState) -> JobState:
    job, decision = step(job, Answered("take-over", "I look at n2", "carol"), at(3610))
    assert isinstance(decision, Ask) and decision.waits
    return job


WHILE_ASKED = [
    pytest.param(died(1, "n1", 0), id="a rank fails"),
    pytest.param(hung(), id="the others hang"),
    pytest.param(lose("n3"), id="another node is lost"),
]


@pytest.mark.parametrize("event", WHILE_ASKED)
@pytest.mark.parametrize("ladder", [False, True], ids=["deadline", "ladder"])
def test_an_open_question_is_not_withdrawn_by_the_next_fault(ladder: bool, event: Any) -> None:
    job = open_question(ladder)
    after, decision = step(job, event(job), at(3700))
    assert describe(decision) == "IGNORE"
    assert (after.phase, after.asked, after.next) == (job.phase, job.asked, job.next)
    assert check_answer(after, "approve", at(3701)) == ""
    # Unless ranks hang again, which the question was about, it is recorded.
    assert after.incident != job.incident or (ladder and isinstance(event(job), RanksHung))


@pytest.mark.parametrize("event", WHILE_ASKED)
@pytest.mark.parametrize("shape", [{"gang": "independent"}, {}], ids=["alone", "lockstep"])
def test_what_a_person_has_taken_over_is_left_to_them(shape: dict[str, Any], event: Any) -> None:
    job = running(nodes=3, policy=policy(hang={"after": "off"}), **shape)
    job, _ = step(job, lose("n2")(job), at(0))
    job, _ = step(job, DeadlinePassed(), at(3600))
    job = take_over(job)
    after, decision = step(job, event(job), at(3700))
    assert (describe(decision), after.asked, after.next.at) == ("IGNORE", job.asked, None)
    after, decision = step(after, back("n2")(after), at(3800))
    if after.lost or after.deferred_fault is not None:
        assert (describe(decision), after.phase) == ("IGNORE", Phase.WAITING_FOR_PERSON)
    else:
        assert describe(decision) == "WAIT RUNNING"
    job, decision = step(after, CancelRequested("", "ada"), at(3900))
    assert describe(decision).startswith("CANCELLED")


def test_the_last_node_that_returns_still_settles_the_question() -> None:
    job, decision = step(open_question(), back("n2")(open_question()), at(3700))
    assert (describe(decision), job.phase) == ("WAIT RUNNING", Phase.RUNNING)
    job = open_question()
    job, _ = step(job, died(1, "n1", 0)(job), at(3700))
    job, decision = step(job, back("n2")(job), at(3800))
    assert describe(decision) == "RESTART_IN_PLACE"


def test_a_witness_lets_the_job_find_the_hang_itself() -> None:
    """With no node that answers it could only ask."""
    job = running(nodes=3)
    for node in ("n1", "n2", "n3"):
        job, _ = step(job, lose(node)(job), at(0))
    job, decision = step(job, DeadlinePassed(), at(3600))
    assert describe(decision) == "ASK"
    job, decision = step(job, back("n1")(job), at(3700))
    assert describe(decision) == "WAIT NODE_LOST"


@pytest.mark.parametrize("event", [NodesAcquired((Slot("n1", "a"), Slot("n2", "b"))), MISSING])
def test_a_grant_that_crosses_a_take_over_starts_no_launch(event: Any) -> None:
    job, _ = step(new_job(), Submitted("", "ada"))
    job, _ = step(job, Answered("take-over", "wait", "carol"), at(5))
    job, decision = step(job, event, at(5))
    assert (describe(decision), job.phase) == ("IGNORE", Phase.WAITING_FOR_PERSON)
    assert check_answer(job, "approve", at(6)) == ""


def test_a_broken_node_is_left_together_with_a_lost_one() -> None:
    job = running(nodes=3)
    job, _ = step(job, lose("n2")(job), at(0))
    job, decision = step(job, sick(xid(79), node="n1", rank=0)(job), at(30))
    assert describe(decision) == "REPLACE_NODE without n2 n1 avoiding n1"
    assert "Xid 79" in decision.reason
    assert job.incident is not None
    found = [(one.cause, one.nodes) for one in job.incident.faults]
    assert found == [(Cause.NODE_LOST, ("n2",)), (Cause.GPU_FATAL, ("n1",))]
    assert [one.node for one in suspects(job) if one.isolate] == ["n1"]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(died(1, "n1", 0), id="what a program does"),
        pytest.param(fallen("n1"), id="what its ladder would restart in place"),
    ],
)
def test_only_a_node_that_would_be_left_is_left_with_it(event: Any) -> None:
    job = running(nodes=3)
    job, _ = step(job, lose("n2")(job), at(0))
    _, decision = step(job, event(job), at(30))
    assert describe(decision) == "REPLACE_NODE without n2"
