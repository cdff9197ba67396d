"""What a job takes in and writes down beside the next decision.

Ranks it found, progress, archives, changes, and answers to no question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.job import copies
from relaunch.job.apply import list_changed_keys
from relaunch.job.decide import check_declaration, is_stale
from relaunch.job.events import (
    CancelRequested,
    DeadlinePassed,
    Event,
    IncidentsArchived,
    Launched,
    NodeDeclaredDead,
    NodesMissing,
    PolicyChanged,
    ProgressSeen,
    RanksFound,
    RanksStopped,
    RepairAsks,
    RepairEnded,
    RetryRequested,
    StepReached,
    StopUnproven,
    SubmissionRaised,
    Submitted,
    SubmitterChecked,
    WorkflowReset,
)
from relaunch.job.incidents import KEPT_DECISIONS, name_foreign_processes
from relaunch.job.state import Diagnosis, Ignore, JobState, Next, Progress, Relaunch, UnstoppedNode
from relaunch.spec.policy import Strategy
from tests.recovery.builders import (
    T0,
    at,
    back,
    describe,
    died,
    fallen,
    lose,
    mended,
    new_job,
    play,
    policy,
    raised,
    record,
    relaunched,
    rungs,
    running,
    step,
    this,
    walk,
)

RESTART = rungs({"strategy": "RESTART_IN_PLACE"}, no_progress_ask="off")


def test_ranks_found_anywhere_may_be_alive() -> None:
    job, _ = play(running(), RanksFound(("n9", "n2")))
    assert job.maybe_alive == ("n1", "n2", "n9")


@pytest.mark.parametrize(
    ("steps", "progress"),
    [
        pytest.param((5, 7), Progress(7, at(1)), id="a later step"),
        pytest.param((5, 5), Progress(5, at(0)), id="the same step, since when it stands"),
        pytest.param((5, 3), Progress(5, at(0)), id="an earlier step, from a rank that is behind"),
    ],
)
def test_progress_is_the_furthest_step_and_when_it_was_reached(
    steps: tuple[int, ...], progress: Progress
) -> None:
    job, _ = play(
        running(), *(ProgressSeen(1, step, at(number)) for number, step in enumerate(steps))
    )
    assert progress == job.progress


def test_archived_incidents_leave_the_state_and_still_count() -> None:
    job = running(policy=RESTART)
    for generation in (1, 2, 3):
        job = walk(job, (raised(), "RESTART_IN_PLACE"))
        job, _ = play(relaunched(job), StepReached(generation + 1, 0, T0))
    kept = job.incidents[2:]
    job, decision = step(job, IncidentsArchived(2))
    assert ("IGNORE", kept, 2) == (describe(decision), job.incidents, job.incidents_archived)


def test_a_long_incident_counts_all_but_first_and_last_decisions() -> None:
    job = running(policy=RESTART)
    faults = KEPT_DECISIONS + 25
    for second in range(faults):
        job, _ = step(job, raised()(job), at(second))
        job = relaunched(job)
    assert job.incident is not None
    kept = job.incident.decisions
    assert len(kept) <= KEPT_DECISIONS
    assert faults == len(kept) + job.incident.dropped_decisions
    half = KEPT_DECISIONS // 2
    assert [at(second) for second in range(half)] == [one.at for one in kept[:half]]
    assert at(faults - 1) == kept[-1].at


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        pytest.param({}, {}, (), id="nothing"),
        pytest.param({}, {"healthy_for": "2h"}, ("healthy_for",), id="a number"),
        pytest.param({}, {"hang": {"after": "off"}}, ("hang.after",), id="a part of a mapping"),
        pytest.param(
            {"healthy_for": "2h"},
            {
                "timeouts": {"lease": "90s"},
                "strict_lease": True,
                "causes": {"HANG": [{"strategy": "FAIL"}]},
            },
            ("causes.HANG", "healthy_for", "strict_lease", "timeouts.lease"),
            id="several, in the order of their names",
        ),
    ],
)
def test_a_change_of_the_policy_is_remembered_by_what_it_changes(
    before: dict[str, Any],
    after: dict[str, Any],
    keys: tuple[str, ...],
    snapshot: SnapshotAssertion,
) -> None:
    assert keys == list_changed_keys(policy(**before), policy(**after))
    job, decision = step(
        running(policy=policy(**before)), PolicyChanged(policy(**after), "so", "ada")
    )
    assert ("IGNORE", policy(**after), keys) == (
        describe(decision),
        job.policy,
        job.policy_changes[-1].keys,
    )
    assert job.notices == snapshot


RESET_ONCE = rungs(
    {"strategy": "RESET_GPU", "tries": 1}, {"strategy": "REPLACE_NODE"}, cause="NODE_FAULT"
)


def repairing() -> JobState:
    return walk(running(policy=RESET_ONCE), (fallen(), "RESET_GPU n2"))


def losing(node: str) -> JobState:
    return walk(running(nodes=3), (lose("n1"), "WAIT NODE_LOST"), (lose(node), "WAIT NODE_LOST"))


def failing() -> JobState:
    return walk(running(), (died(93), "FAILED 93"))


@pytest.mark.parametrize(
    ("job", "event", "expected"),
    [
        pytest.param(
            repairing,
            this(RepairEnded(1, Strategy.REBOOT_NODE, ("n2",), "done", "")),
            "IGNORE",
            id="another repair than the one that is waited for",
        ),
        pytest.param(
            running,
            this(RepairEnded(1, Strategy.RESET_GPU, ("n2",), "done", "")),
            "IGNORE",
            id="no repair goes on",
        ),
        pytest.param(
            repairing,
            mended("refused"),
            "REPLACE_NODE without n2",
            id="the repair that goes on, without effect",
        ),
        pytest.param(
            repairing,
            this(DeadlinePassed()),
            "REPLACE_NODE without n2",
            id="a repair that does not end",
        ),
        pytest.param(
            lambda: losing("n2"), back("n2"), "WAIT NODE_LOST", id="one of two lost nodes answers"
        ),
        pytest.param(
            lambda: losing("n2"), this(Launched(1, T0, T0)), "WAIT RUNNING", id="all nodes answered"
        ),
        pytest.param(
            lambda: losing("n2"),
            this(StepReached(1, 8, T0)),
            "WAIT NODE_LOST",
            id="the others go on without the lost ones",
        ),
        pytest.param(
            lambda: walk(
                running(),
                (this(RetryRequested("", "ada")), "LAUNCH"),
                (this(NodesMissing("1 of 2")), "WAIT WAITING_FOR_NODES"),
            ),
            this(DeadlinePassed()),
            "WAIT WAITING_FOR_NODES",
            id="nodes that never came",
        ),
        pytest.param(
            lambda: walk(new_job(), (this(Submitted("", "ada")), "LAUNCH")),
            this(DeadlinePassed()),
            "IGNORE",
            id="a deadline that was not set",
        ),
        pytest.param(
            running, this(NodeDeclaredDead("n9", "", "ada")), "IGNORE", id="a strange node is dead"
        ),
        pytest.param(
            failing,
            this(CancelRequested("", "")),
            "CANCELLED 130",
            id="a job that fails is cancelled",
        ),
        pytest.param(
            failing,
            this(CancelRequested("enough", "ada")),
            "CANCELLED 130",
            id="by a person, with a reason",
        ),
        pytest.param(failing, died(1), "IGNORE", id="a job that fails fails no further"),
    ],
)
def test_what_follows_in_one_state_only(
    job: Callable[[], JobState],
    event: Callable[[JobState], Event],
    expected: str,
    snapshot: SnapshotAssertion,
) -> None:
    before = job()
    after, decision = step(before, event(before))
    assert describe(decision) == expected
    assert decision.reason == snapshot
    assert expected != "IGNORE" or replace(after, notices=()) == before


def test_a_node_that_a_person_declares_dead_is_no_longer_alive(snapshot: SnapshotAssertion) -> None:
    job, _ = step(running(nodes=3), lose("n3")(running(nodes=3)), T0 + timedelta(minutes=4))
    job, decision = step(job, NodeDeclaredDead("n3", "", ""))
    assert (describe(decision), job.lost, job.maybe_alive) == (
        "REPLACE_NODE without n3",
        (),
        ("n1", "n2"),
    )
    assert job.notices == snapshot


def test_a_repair_waiting_for_a_person_shows_on_the_jobs_page() -> None:
    asks = RepairAsks("n2", "may n2 be treated with RESET_GPU?", at(600))
    job, decision = step(repairing(), asks)
    assert isinstance(decision, Ignore) and job.next == Next(asks.question, asks.until)
    # a job that waits for no repair is asked nothing
    assert step(running(), asks)[0].next == running().next


def test_an_answered_repair_asks_no_more_but_keeps_its_deadline() -> None:
    before = repairing()
    asks = RepairAsks("n2", "may n2 be treated with RESET_GPU?", at(600))
    other = RepairAsks("n1", "may n1 be treated with RESET_GPU?", at(900))
    job, _ = play(before, asks, other)
    assert job.next == Next(other.question, other.until)
    job, _ = step(job, RepairAsks("n1", ""))
    # the other one has no answer yet
    assert job.next == Next(asks.question, asks.until)
    assert before.next.at is not None
    assert is_stale(job, DeadlinePassed(at(900))) and not is_stale(
        job, DeadlinePassed(before.next.at)
    )
    job, _ = step(job, RepairAsks("n2", ""))
    assert job.next == before.next


def test_a_submission_is_renumbered_only_before_it_has_nodes(snapshot: SnapshotAssertion) -> None:
    job, decision = step(new_job(), SubmissionRaised(5001))
    assert isinstance(decision, Ignore) and job.submission == 5001
    assert job.notices == snapshot
    assert step(job, SubmissionRaised(17))[0].submission == 5001
    assert step(running(), SubmissionRaised(5001))[0].submission == running().submission


def test_after_a_reset_a_later_submission_claims_nodes() -> None:
    before = running()
    job, decision = step(before, WorkflowReset(before.submission + 5))
    assert isinstance(decision, Relaunch) and not decision.keep_nodes
    assert (job.submission, job.slots) == (before.submission + 5, ())
    assert job.generation == before.generation + 1
    assert set(job.maybe_alive) == {"n1", "n2"}, "its older ranks are stopped first"
    # What was under way goes on: ranks are stopped, and no node is claimed.
    ending = walk(before, (this(CancelRequested("", "ada")), "CANCELLED 130"))
    job, decision = step(ending, WorkflowReset(before.submission + 5))
    assert isinstance(decision, Ignore) and job == ending


def test_a_node_that_the_watch_hears_is_not_taken_for_dead(snapshot: SnapshotAssertion) -> None:
    assert check_declaration(running(), "n2") == snapshot
    lost = walk(running(nodes=3), (lose("n2"), "WAIT NODE_LOST"))
    assert (check_declaration(lost, "n2"), bool(check_declaration(lost, "n3"))) == ("", True)
    assert check_declaration(running(), "n9") == "", "it changes nothing"
    stopping = walk(running(), (this(CancelRequested("", "ada")), "CANCELLED 130"))
    # nothing watches it any more
    assert check_declaration(stopping, "n2") == ""


def test_nodes_are_unstopped_until_proven_or_declared_dead() -> None:
    job = replace(running(), maybe_alive=("n1", "n2"))
    unproven = StopUnproven(
        job.generation, (UnstoppedNode("n1", "it hangs"), UnstoppedNode("n2", "no answer"))
    )
    job = record(record(job, unproven), unproven)
    assert (len(job.unstopped), job.stop_reminders) == (2, 1)
    job = record(job, NodeDeclaredDead("n1", "", "ada"))
    assert [one.node for one in job.unstopped] == ["n2"]
    job = record(job, RanksStopped(job.generation, ("n2",), T0))
    assert job.unstopped == ()
    again = record(replace(job, maybe_alive=("n1", "n2")), replace(unproven, stopped=("n1",)))
    assert (again.stop_reminders, again.maybe_alive) == (0, ("n2",))
    launched = Launched(job.generation, T0, T0)
    assert record(again, launched).unstopped == (), "a launch has stopped what was there"


def test_the_submitter_is_who_the_fleet_has_checked() -> None:
    job = record(running(), SubmitterChecked("ada (claimed)"))
    assert job == replace(running(), submitted_by="ada (claimed)")


@dataclass(frozen=True)
class OneField:
    value: int


def test_a_class_of_one_field_is_copied() -> None:
    assert copies.replace(OneField(1), value=2) == OneField(2)
    assert copies.replace(OneField(1)) == OneField(1)
    with pytest.raises(TypeError, match="other"):
        copies.replace(OneField(1), other=2)


def test_without_an_incident_no_fault_is_renamed() -> None:
    job = running()
    assert name_foreign_processes(job, Diagnosis(Cause.OUT_OF_MEMORY, "full"), "bob") is job
