"""What a restarted fleet takes over from the run before it, and what it asks others again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.pool.events import (
    ClaimEvent,
    ClaimReminder,
    EndedJobs,
    FleetEvent,
    FleetFileContent,
    PauseCommand,
    PermitMessage,
    PreviousRun,
    QuarantineCommand,
    ReclaimOrder,
    ReclaimResult,
    ReleaseCommand,
    RepairRequest,
    ResumeCommand,
    RunningJobs,
)
from relaunch.pool.messages import Claim, Place
from relaunch.pool.restore import export_state
from relaunch.pool.scheduler import apply_event
from relaunch.pool.state import Breaker, LiveGeneration, NodeRecord, NodeStatus
from relaunch.spec.fleet import FleetLimits
from tests.recovery.fleet_builders import T0, Desk, began, ended, nodes, permit, suspect

GRACE = QuarantineCommand("n1", "a fan", "grace", timedelta(minutes=30))


def restart(*facts: FleetEvent, **limits: Any) -> Desk:
    """Return a restarted fleet that has looked at its nodes and got these events, 10 min later."""
    desk = Desk(begun=False, **limits)
    desk.now += timedelta(minutes=10)
    desk.go(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()), *facts)
    return desk


def before(*facts: FleetEvent, **limits: Any) -> PreviousRun:
    """What one knew that has been told these."""
    desk = Desk(**limits)
    desk.go(*facts)
    return export_state(desk.state)


def standings(desk: Desk) -> dict[str, NodeStatus]:
    return {
        node.name: node.status
        for node in desk.state.nodes
        if node.status is not NodeStatus.IN_SERVICE
    }


@pytest.mark.parametrize("leaves", ["while it runs", "while it is away"])
def test_a_restarted_fleet_knows_quarantined_nodes_that_return(leaves: str) -> None:
    away = FleetFileContent("act", nodes("n2", "n3"), FleetLimits())
    known = before(GRACE, away) if leaves == "while it runs" else before(GRACE)
    desk = Desk(begun=False)
    desk.go(away, RunningJobs(()), known)
    assert [node.name for node in desk.state.nodes] == ["n2", "n3"]
    desk.go(FleetFileContent("act", desk.specs, desk.limits))
    assert standings(desk) == {"n1": NodeStatus.QUARANTINED}
    # Where it is back before the fleet is:
    assert standings(restart(known)) == {"n1": NodeStatus.QUARANTINED}


def test_nodes_stay_out_with_reasons_and_drains_are_asked_again(
    snapshot: SnapshotAssertion,
) -> None:
    desk = restart(before(GRACE))
    node = desk.node("n1")
    assert (node.status, node.reason, node.by, node.since) == (
        NodeStatus.QUARANTINED,
        "a fan",
        "grace",
        T0,
    )
    assert node.drain is not None
    assert node.drain.until == T0 + timedelta(minutes=30)
    assert desk.state.notices == snapshot
    desk.claim("a", 4)
    assert desk.granted() == {}


def test_nodes_under_repair_are_suspects_again_and_faults_stay() -> None:
    desk = Desk()
    hang = replace(suspect("n3", 1, Cause.HANG), at=T0)
    desk.claim("a", 0, suspects=(suspect("n2", isolate=True), hang))
    desk.go(began("n2"), began("n4", by="grace"), ended("n4", by="grace"))
    assert desk.node("n2").status is NodeStatus.REPAIRING
    known = export_state(desk.state)
    assert [(node.name, node.status, node.repair) for node in known.nodes] == [
        ("n2", NodeStatus.SUSPECT, ""),
        ("n3", NodeStatus.IN_SERVICE, ""),
        ("n4", NodeStatus.IN_SERVICE, ""),
    ]
    later = restart(known)
    assert later.of(RepairRequest) == [RepairRequest("n2", "failed on n2")]
    assert later.node("n2").by == "job a"
    assert (later.node("n4").verdict, later.node("n4").verdict_at) == (Verdict.HEALTHY, T0)
    later.claim("a", 1, submission=2, suspects=(suspect("n3", 2, Cause.HANG),))
    later.claim("a", 1, submission=1, suspects=(hang,))
    assert [(mark.submission, mark.generation) for mark in later.node("n3").marks] == [
        (1, 1),
        (2, 2),
    ]


def test_looks_and_nodes_as_in_the_file_are_not_remembered() -> None:
    desk = Desk()
    desk.claim("a", 2)
    known = export_state(desk.state)
    assert (known.nodes, known.breaker, known.lost) == ((), Breaker(), "")
    assert restart(known).state.notices == ()


def test_having_left_the_file_is_not_remembered_of_a_node() -> None:
    desk = Desk()
    desk.claim("a", 4)
    desk.go(FleetFileContent("act", nodes("n2"), desk.limits))
    assert desk.node("n1").status is NodeStatus.QUARANTINED
    assert standings(restart(export_state(desk.state))) == {}
    assert standings(restart(before(QuarantineCommand("n9", "a fan", "grace")))) == {}


def test_no_grant_repair_or_permit_before_the_memory_is_restored(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk(begun=False)
    desk.go(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()))
    desk.claim("blames", 0, suspects=(suspect("n4", isolate=True),))
    desk.go(permit("n3"))
    desk.claim("a", 1)
    assert desk.orders == []
    # then it hears of it
    assert desk.wakes_in() == 5
    desk.wait(seconds=5)
    assert desk.grants("waiting")["a"].reason == snapshot
    desk.go(before(QuarantineCommand("n1", "a fan", "grace")))
    assert desk.granted() == {"a": ["n2"]}
    assert [type(order) for order in (*desk.of(PermitMessage), *desk.of(RepairRequest))] == [
        PermitMessage,
        RepairRequest,
    ]


def test_who_keeps_what_it_has_does_not_wait_for_it() -> None:
    desk = Desk(begun=False)
    desk.go(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()))
    assert desk.claim("a", 1, running=True, keep=("n1",)) == []
    assert desk.record("a").granted == (Place("n1", "10.0.0.1"),)


def test_after_15_s_it_gives_up_but_takes_over_what_comes_later(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk(begun=False)
    desk.go(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()))
    assert desk.wakes_in() == 15
    desk.claim("a", 1)
    desk.wait(seconds=15)
    assert desk.granted() == {"a": ["n1"]}
    assert desk.state.notices == snapshot(name="notices")
    assert desk.state.restore_error == snapshot(name="error")
    desk.go(before(GRACE))
    assert standings(desk) == {"n1": NodeStatus.QUARANTINED}
    assert desk.state.restore_error == ""
    desk.go(before(QuarantineCommand("n2", "a fan", "grace")))
    assert standings(desk) == {"n1": NodeStatus.QUARANTINED}, "once"


def test_it_is_not_asked_for_before_the_fleet_has_nodes() -> None:
    desk = Desk(begun=False)
    desk.go(FleetFileContent("observe", (), desk.limits), before(GRACE))
    assert (desk.state.restore_until, desk.state.is_restored) == (None, False)
    desk.wait(hours=1)
    desk.go(FleetFileContent("act", desk.specs, desk.limits), before(GRACE))
    assert standings(desk) == {"n1": NodeStatus.QUARANTINED}


@pytest.mark.parametrize(
    ("since", "standing", "by"),
    [
        (ReleaseCommand("n1", "new fan", "ada"), NodeStatus.IN_SERVICE, ""),
        (QuarantineCommand("n1", "loud", "ada"), NodeStatus.QUARANTINED, "ada"),
    ],
)
def test_what_a_person_has_said_of_a_node_since_counts(
    since: FleetEvent, standing: NodeStatus, by: str
) -> None:
    desk = restart(since, before(GRACE))
    assert (desk.node("n1").status, desk.node("n1").by) == (standing, by)


def test_a_later_suspicion_does_not_lift_an_earlier_quarantine() -> None:
    desk = restart()
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True),))
    assert desk.node("n1").status is NodeStatus.SUSPECT
    desk.go(before(GRACE))
    node = desk.node("n1")
    assert (node.status, node.reason, node.by) == (NodeStatus.QUARANTINED, "a fan", "grace")
    assert [mark.job for mark in node.marks] == ["a"]  # what the job knows against it is kept
    assert desk.of(RepairRequest) == []


def test_what_an_examination_has_found_since_counts() -> None:
    bad = ended("n1", "refused", "r0", job="a", verdict=Verdict.UNHEALTHY)
    desk = restart(began("n1"), ended("n1", job="a"), before(began("n1", "r0"), bad))
    assert desk.node("n1").verdict is Verdict.HEALTHY


def test_a_pause_and_an_open_breaker_are_remembered(snapshot: SnapshotAssertion) -> None:
    desk = Desk(nodes_out=1)
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True), suspect("n2", isolate=True)))
    desk.go(PauseCommand("new firmware", "grace"))
    known = export_state(desk.state)
    later = restart(known, nodes_out=1)
    assert later.state.breaker == desk.state.breaker
    assert later.state.notices == snapshot(name="notices")
    again = restart(PauseCommand("", "ada"), known, nodes_out=1)
    assert again.state.breaker.is_open
    assert again.state.breaker.paused == snapshot(name="paused")
    mine = restart(known, nodes_out=1).state.breaker
    opened = Desk(nodes_out=1, begun=False)
    opened.state = replace(opened.state, breaker=Breaker("too many", T0))
    opened.learn(FleetFileContent("act", opened.specs, opened.limits), known)
    assert (opened.state.breaker.reason, opened.state.breaker.paused) == ("too many", mine.paused)


def test_a_person_who_has_resumed_repairs_since_is_not_overruled(
    snapshot: SnapshotAssertion,
) -> None:
    desk = restart(ResumeCommand("", "grace"), before(PauseCommand("", "ada"), GRACE))
    assert not desk.state.breaker.paused
    assert desk.state.notices[-1] == snapshot


def test_nodes_out_while_the_breaker_was_closed_do_not_open_it() -> None:
    desk = Desk(nodes_out=1)
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True), suspect("n2", isolate=True)))
    desk.go(ResumeCommand("it is the cooling", "grace"))
    later = restart(export_state(desk.state), nodes_out=1)
    assert not later.state.breaker.is_open
    later.claim("b", 0, suspects=(suspect("n3", isolate=True),))
    assert later.state.breaker.is_open


def test_what_was_cleared_before_does_not_open_the_breaker() -> None:
    """A job repeats its suspects with each claim, and may come before the memory does."""
    old = Desk(nodes_out=1)
    told = (suspect("n1", isolate=True), suspect("n2", isolate=True))
    for seq, one in enumerate(told, 1):
        old.claim("a", 1, seq=seq, suspects=(one,), keep=("n3",))
        old.now += timedelta(minutes=5)
        old.go(ReleaseCommand(one.node, "seen to", "grace"))
    assert standings(old) == {} and not old.state.breaker.is_open
    again = ClaimEvent(Claim("a", 1, 3, 1, since=T0, keep=("n3",), suspects=told))
    desk = restart(again, nodes_out=1)
    assert standings(desk) == dict.fromkeys(("n1", "n2"), NodeStatus.SUSPECT)
    assert desk.state.breaker.is_open
    desk.go(export_state(old.state))
    assert standings(desk) == {} and not desk.state.breaker.is_open
    newer = tuple(
        replace(suspect(name, 2, isolate=True), at=desk.now) for name in ("n1", "n3", "n4")
    )
    new = ClaimEvent(Claim("b", 1, 1, 1, since=T0, suspects=(told[1], *newer)))
    later = restart(new, nodes_out=1)
    later.go(export_state(old.state))
    assert set(standings(later)) == {"n1", "n3", "n4"}
    assert later.state.breaker.reason.startswith("3 of 4 nodes are out"), "it opens again"


def test_a_run_that_never_restored_hides_nothing_from_the_next() -> None:
    first = Desk()
    first.go(GRACE, PauseCommand("", "grace"))
    short = Desk(begun=False)
    short.go(
        FleetFileContent("act", short.specs, short.limits), QuarantineCommand("n2", "loud", "ada")
    )
    desk = restart(export_state(short.state, Desk(begun=False).state, first.state))
    assert {node.name: node.by for node in desk.state.nodes if node.by} == {
        "n1": "grace",
        "n2": "ada",
    }
    assert desk.state.breaker.paused
    told = Desk()
    assert export_state(told.state, first.state) == PreviousRun()


def test_the_memory_counts_once() -> None:
    desk = restart(before(GRACE))
    once = desk.state
    assert apply_event(once, before(QuarantineCommand("n2", "a fan", "grace")), desk.now) == once
    assert export_state(once).nodes[0] == NodeRecord(
        desk.specs[0], NodeStatus.QUARANTINED, "a fan", "grace", T0, drain=once.nodes[0].drain
    )


def test_what_is_lost_of_the_run_before_is_said_to_people(snapshot: SnapshotAssertion) -> None:
    state = restart(PreviousRun(lost="its workers are gone")).state
    assert state.is_restored and len(state.notices) == 1
    assert state.notices[0] == snapshot


# --- who held which nodes


def died_with_its_fleet() -> Desk:
    """Job a runs on n1 and n2; its workflow and its fleet's end while n2 is cut off."""
    desk = Desk(*nodes("n1", "n2", "n3", "n4", gpus=8))
    desk.claim("a", 2)
    desk.claim("a", 2, seq=2, running=True, keep=("n1", "n2"))
    return desk


def cut_off(known: PreviousRun | None, jobs: tuple[str, ...] = ("a",)) -> Desk:
    """The fleet that comes after, which n2 does not answer."""
    desk = Desk(begun=False)
    desk.now += timedelta(seconds=1)
    desk.silent["n2"] = "no route to host"
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.go(
        FleetFileContent("act", desk.specs, desk.limits),
        RunningJobs(jobs),
        *([known] if known is not None else []),
    )
    return desk


def test_a_resubmitted_job_hears_of_a_remembered_silent_node() -> None:
    known = export_state(died_with_its_fleet().state)
    desk = cut_off(known)
    desk.claim("a", 2, submission=2)
    grant = desk.grants()["a"]
    assert "n2" not in [place.node for place in grant.places]
    # it stops the ranks on n1, and waits until those on n2 have fenced themselves
    assert grant.holding == ("n1", "n2")


def test_a_claim_that_precedes_the_memory_hears_of_it_as_well() -> None:
    desk = cut_off(None)
    desk.claim("a", 2, submission=2)
    assert desk.granted() == {}
    desk.go(export_state(died_with_its_fleet().state))
    assert desk.grants()["a"].holding == ("n1", "n2")


def test_the_next_fleet_keeps_and_cleans_nodes_of_an_ended_job() -> None:
    desk = cut_off(export_state(died_with_its_fleet().state), jobs=())
    desk.claim("b", 3)
    assert desk.granted() == {}
    desk.go(EndedJobs((("a", 1),)))
    assert desk.of(ReclaimOrder) == [ReclaimOrder("a", 1, ("n1", "n2"))]
    desk.living.clear()
    desk.go(ReclaimResult("a", 1, ("n1",)))
    assert desk.granted() == {"b": ["n1", "n3", "n4"]}
    assert [place.node for place in desk.record("a").places] == ["n2"]


def test_a_running_job_is_asked_even_if_its_nodes_are_remembered() -> None:
    desk = cut_off(export_state(died_with_its_fleet().state))
    assert desk.of(ClaimReminder) == [ClaimReminder("a")]
    desk.claim("a", 3, seq=3, running=True, keep=("n1", "n3", "n4"))
    # what it says itself counts
    assert [place.node for place in desk.record("a").places] == ["n1", "n3", "n4"]
    assert not desk.record("a").is_restored


def test_a_claim_of_the_same_submission_keeps_earlier_leftovers() -> None:
    before = died_with_its_fleet()
    before.claim("a", 2, submission=2)
    assert before.grants()["a"].holding == ("n1", "n2")
    unheard = cut_off(None)
    unheard.claim("a", 2, submission=2, seq=2)
    unheard.go(export_state(before.state))
    # it has not heard of its first grant
    assert unheard.grants()["a"].holding == ("n1", "n2")
    heard = cut_off(None)
    heard.claim("a", 2, submission=2, seq=2, running=True, keep=("n1", "n3"), holds=("n1", "n3"))
    heard.go(export_state(before.state))
    assert heard.record("a").inherited == ()


def test_a_job_that_gave_all_back_leaves_what_it_never_knew_of() -> None:
    known = export_state(died_with_its_fleet().state)
    same = cut_off(None)
    same.claim("a", 0, seq=3)
    same.go(known)
    # it knew what it held, and holds it no more
    assert same.state.claims == ()
    later = cut_off(None)
    later.claim("a", 0, submission=2)
    later.go(known)
    assert [place.node for place in later.record("a").places] == ["n1", "n2"]
    assert later.of(ReclaimOrder) == [ReclaimOrder("a", 2, ("n1", "n2"))]


def test_runs_that_never_restored_hand_on_what_earlier_ones_knew() -> None:
    first, second = died_with_its_fleet(), Desk(begun=False)
    second.learn(FleetFileContent("act", second.specs, second.limits))
    second.learn(ClaimEvent(Claim("b", 1, 1, 1, holds=(Place("n3"),))))
    known = export_state(second.state, first.state)
    assert {
        record.claim.job: [place.node for place in record.places] for record in known.claims
    } == {"a": ["n1", "n2"], "b": ["n3"]}


def test_ranks_last_seen_on_a_node_count_while_it_is_silent() -> None:
    desk = Desk()
    desk.living["n2"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    desk.silent["n2"] = "no route to host"
    desk.look()
    desk.look()
    desk.claim("a", 2, submission=2)
    assert desk.grants()["a"].holding == ("n2",)
    desk.go(ReclaimResult("a", 1, ("n2",)))
    assert desk.node("n2").last_generations == ()
    del desk.silent["n2"]
    desk.look()
    assert desk.node("n2").last_generations == ()


# --- a fleet whose memory is lost


LOST = "run r1 was of workers on task queue q1"


def test_a_job_on_a_silent_node_waits_where_memory_is_lost(snapshot: SnapshotAssertion) -> None:
    desk = cut_off(PreviousRun(lost=LOST), jobs=())
    desk.claim("a", 1, submission=2)
    assert desk.granted() == {}
    said = desk.grants("waiting")["a"].reason
    assert LOST in said and said == snapshot
    desk.wait(seconds=60)
    # there is no limit to how long unknown ranks may go on
    assert desk.granted() == {}
    assert desk.state.notices[-1].endswith(LOST) and len(desk.state.notices) == 1
    del desk.silent["n2"]
    desk.living["n2"] = (LiveGeneration("a", 1, 1),)
    desk.wait(seconds=60)
    assert desk.grants()["a"].holding == ("n1", "n2")


def test_a_silent_node_removed_from_the_file_is_not_waited_for() -> None:
    desk = cut_off(PreviousRun(lost=LOST), jobs=())
    desk.claim("a", 1, submission=2)
    desk.go(FleetFileContent("act", nodes("n1", "n3", "n4"), desk.limits))
    assert "a" in desk.granted()


def test_a_job_granted_nodes_before_waits_for_no_silent_ones() -> None:
    desk = cut_off(PreviousRun(lost=LOST))
    desk.claim("a", 2, running=True, keep=("n1",), holds=("n1",))
    assert desk.granted() == {"a": ["n1", "n3"]}
    desk.claim("b", 1, holds=("n4",))
    assert desk.granted() == {"b": ["n4"]}


def test_with_no_earlier_run_only_a_job_seen_elsewhere_waits(snapshot: SnapshotAssertion) -> None:
    desk = cut_off(PreviousRun(), jobs=())
    desk.claim("b", 1)
    assert desk.granted() == {"b": ["n3"]}
    desk.claim("a", 1, submission=2)
    assert desk.granted() == {}
    assert desk.grants("waiting")["a"].reason == snapshot
    desk.living.clear()
    desk.wait(seconds=60)
    assert "a" in desk.granted()


def test_what_is_lost_at_first_is_taken_over_when_it_can_be_had() -> None:
    desk = cut_off(PreviousRun(lost=LOST))
    desk.claim("a", 2, submission=2)
    desk.go(PreviousRun(lost=LOST))
    assert desk.granted() == {}
    desk.go(export_state(died_with_its_fleet().state))
    assert desk.grants()["a"].holding == ("n1", "n2")
    assert desk.state.restore_error == ""
