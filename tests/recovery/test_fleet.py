"""What a fleet makes of claims, looks, its file, repairs and people; and what it orders."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.access.orders import REFUSED
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.pool.events import (
    ClaimEvent,
    ClaimReminder,
    DrainMessage,
    EndedJobs,
    FaultReportEvent,
    FleetFileContent,
    GrantMessage,
    MalformedMessage,
    Order,
    PauseCommand,
    PermitMessage,
    ProbeOrder,
    ProbeResults,
    QuarantineCommand,
    ReclaimOrder,
    ReclaimResult,
    ReleaseCommand,
    RepairRequest,
    RunningJobs,
)
from relaunch.pool.messages import Claim, DrainRequest, FaultReport, Grant, Healing, Place
from relaunch.pool.nodes import MAX_REMOVED
from relaunch.pool.restore import export_state
from relaunch.pool.scheduler import apply_event
from relaunch.pool.state import LiveGeneration, NodeProbe, NodeStatus, PastReason
from relaunch.pool.status import MAX_PAST
from relaunch.spec.access import Access
from relaunch.spec.fleet import FleetLimits
from relaunch.spec.policy import Strategy
from tests.recovery.fleet_builders import T0, Desk, began, ended, look, nodes, permit, suspect

ACCESS = Access.model_validate(
    {"people": {"ada": {"role": "operator"}}, "unproven": ["submit", "pause"]}
)

DRAIN = QuarantineCommand("n1", "a fan", "grace", timedelta(minutes=30))


# --- a fleet that was restarted


def test_a_new_fleet_reads_asks_and_probes_before_it_grants(snapshot: SnapshotAssertion) -> None:
    desk = Desk(begun=False)
    desk.learn(ClaimEvent(Claim("c", 1, 1, 1, since=T0)))
    assert desk.settle() == []
    desk.now += timedelta(seconds=5)
    desk.settle()
    assert desk.grants("waiting")["c"].reason == snapshot(name="no-file")
    desk.learn(FleetFileContent("act", desk.specs, desk.limits))
    assert desk.settle() == [look("n1", "n2", "n3", "n4")]
    desk.now += timedelta(seconds=5)
    desk.settle()
    assert desk.grants("waiting")["c"].reason == snapshot(name="which-jobs")
    desk.learn(RunningJobs(("a", "c", "b", "a")))
    desk.busy = {"probe"}
    desk.settle()
    assert desk.orders == [ClaimReminder("a"), ClaimReminder("b")]
    desk.now += timedelta(seconds=6)
    desk.settle()
    assert desk.grants("waiting")["c"].reason == snapshot(name="asks-jobs")
    desk.learn(ClaimEvent(Claim("a", 1, 7, 1, running=True, keep=("n1",), holds=(Place("n1"),))))
    desk.learn(ClaimEvent(Claim("b", 1, 3, 0)))
    desk.now += timedelta(seconds=5)
    desk.settle()
    assert desk.grants("waiting")["c"].reason == snapshot(name="probes")
    desk.busy = set()
    desk.look()
    desk.settle()
    assert desk.granted() == {"c": ["n2"]}
    assert desk.record("a").granted == (Place("n1", "10.0.0.1"),)


def test_a_job_keeping_its_nodes_never_waits_for_a_new_fleet() -> None:
    desk = Desk(begun=False)
    desk.learn(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(("a", "b")))
    desk.settle()
    desk.claim("a", 2, running=True, keep=("n1", "n2"))
    assert desk.of(GrantMessage) == []
    assert not desk.record("a").is_waiting


def test_a_job_of_unknown_nodes_is_awaited_and_keeps_its_ranks(snapshot: SnapshotAssertion) -> None:
    desk = Desk(nodes("n1")[0], jobs=("a",))
    desk.living["n1"] = (LiveGeneration("a", 1, 3),)
    desk.look()
    desk.claim("b", 1)
    assert desk.grants("waiting")["b"].reason == snapshot(name="asks-jobs")
    desk.wait(seconds=2)
    assert desk.wakes_in() == 28
    desk.wait(seconds=28)
    assert desk.grants("waiting")["b"].reason == snapshot(name="live-ranks")
    assert desk.wait(minutes=10) == []


def test_jobs_looked_up_again_are_awaited_unless_they_spoke() -> None:
    desk = Desk(jobs=("a", "b", "c"))
    desk.claim("a", 1)
    desk.claim("b", 0)
    settles = desk.state.awaited_until
    assert desk.go(RunningJobs(("a", "b", "d"))) == [ClaimReminder("d")]
    assert (desk.state.awaited_jobs, desk.state.awaited_until) == (("d",), settles)


def test_a_job_that_ended_silently_is_awaited_until_not_found() -> None:
    desk = Desk(jobs=("a", "b"))
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    desk.claim("b", 1)
    assert "b" not in desk.granted()
    assert desk.go(RunningJobs(("b",))) != []
    assert desk.state.awaited_jobs == ()
    assert (desk.granted(), desk.of(ReclaimOrder)) == (
        {"b": ["n2"]},
        [ReclaimOrder("a", 1, ("n1",))],
    )


def test_nothing_is_repaired_before_it_is_known_who_holds_it() -> None:
    desk = Desk(jobs=("b",))
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True),))
    assert desk.of(RepairRequest) == []
    desk.claim("b", 0)
    assert desk.of(RepairRequest) == [RepairRequest("n1", "failed on n1")]


def test_a_look_that_fails_is_ordered_again() -> None:
    desk = Desk(begun=False)
    desk.learn(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()))
    assert desk.settle() == [look("n1", "n2", "n3", "n4")]
    assert desk.settle() == []
    assert desk.wakes_in() == 2
    desk.now += timedelta(seconds=2)
    assert desk.settle() == [look("n1", "n2", "n3", "n4")]


def test_all_nodes_are_looked_at_every_minute() -> None:
    desk = Desk()
    assert desk.wakes_in() == 60
    desk.now += timedelta(seconds=60)
    desk.busy = {"probe"}
    assert desk.settle() == []
    assert desk.wakes_in() == 1
    desk.busy = set()
    assert desk.settle() == [ProbeOrder(("n1", "n2", "n3", "n4"))]
    assert desk.state.probe_count == 2


# --- claims


def test_repeated_late_or_withdrawn_claims_change_nothing() -> None:
    desk = Desk()
    first = ClaimEvent(Claim("a", 2, 1, 1, since=T0))
    desk.go(first)
    desk.claim("a", 2, seq=2, submission=2, holds=("n1",))
    known = desk.state
    for old in (first, ClaimEvent(Claim("a", 1, 9, 3))):
        assert is_only_told_its_number(desk.go(old))
        assert desk.state == known
    desk.claim("a", 0, seq=3, submission=2)
    assert desk.state.claims == ()
    gone = desk.state
    for old in (first, ClaimEvent(Claim("a", 2, 3, 0)), ClaimEvent(Claim("a", 1, 9, 3))):
        assert is_only_told_its_number(desk.go(old))
        assert desk.state == gone
    desk.claim("a", 1, seq=4, submission=2)
    assert desk.granted() == {"a": ["n1"]}


def is_only_told_its_number(orders: list[Order]) -> bool:
    """Whether at most the message that a later submission is known was ordered.

    A submission that has ended does not hear it.
    """
    return all(isinstance(order, GrantMessage) and order.grant.kind == "behind" for order in orders)


def test_a_job_that_repeats_itself_hears_the_same_answer() -> None:
    desk = Desk()
    desk.claim("a", 1)
    (told,) = desk.orders
    assert desk.claim("a", 1) == [told]
    assert desk.go() == []
    desk.claim("w", 4)
    assert desk.claim("w", 4) == []
    (told,) = desk.claim("a", 5, seq=2, running=True, keep=("n1",))
    assert desk.grants("hopeless")["a"].places == ()
    assert desk.claim("a", 5, seq=2, running=True, keep=("n1",)) == [told]


def test_a_job_that_holds_less_frees_the_rest_at_once() -> None:
    desk = Desk()
    desk.claim("a", 4)
    desk.claim("b", 2)
    desk.claim("a", 0, seq=2, holds=("n1", "n4"))
    assert desk.granted() == {"b": ["n2", "n3"]}
    assert desk.record("a").granted == ()
    desk.claim("a", 0, seq=3)
    assert [record.claim.job for record in desk.state.claims] == ["b"]


def test_the_wait_goes_on_when_a_waiting_job_claims_again() -> None:
    desk = Desk()
    desk.claim("a", 4)
    desk.claim("b", 1)
    desk.wait(seconds=10)
    desk.claim("b", 2, seq=2)
    assert desk.record("b").waiting_since == T0


# --- submissions of one name


def test_a_new_submission_keeps_nodes_and_stops_old_ranks_first(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk()
    desk.claim("a", 2, gpus=4)
    desk.claim("b", 3)
    desk.living["n3"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    desk.claim("a", 1, submission=2, gpus=4)
    grant = desk.grants()["a"]
    assert grant.places == (Place("n1", "10.0.0.1", (0, 1, 2, 3)),)
    assert grant.holding == ("n1", "n2", "n3")
    assert grant.reason == snapshot
    assert "b" not in desk.granted()
    desk.claim("a", 1, seq=2, submission=2, gpus=4, running=True, keep=("n1",), holds=("n1", "n2"))
    assert [(place.node, place.gpus) for place in desk.record("a").places] == [
        ("n1", (0, 1, 2, 3)),
        ("n2", (0, 1, 2, 3)),
    ]
    assert desk.grants()["a"].holding == ("n3",)
    desk.living.clear()
    desk.claim("a", 1, seq=3, submission=2, gpus=4, running=True, keep=("n1",))
    assert desk.node("n3").probe == NodeProbe(
        "n3", boot_id="boot", generations=(LiveGeneration("a", 1, 1),)
    )
    desk.wait(seconds=11)
    assert desk.granted() == {"b": ["n2", "n3", "n4"]}


def test_old_nodes_stay_until_a_new_submission_sees_its_grant() -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.claim("x", 2)
    desk.claim("a", 3, submission=2)
    desk.claim("a", 3, seq=2, submission=2, avoid=("n4",))
    assert desk.record("a").places == (Place("n1", "10.0.0.1"), Place("n2", "10.0.0.2"))
    desk.claim("x", 0, seq=2)
    assert desk.grants()["a"].holding == ("n1", "n2")
    desk.claim("a", 1, seq=3, submission=2, holds=("n3",))
    assert desk.granted() == {"a": ["n3"]}
    assert desk.record("a").places == (Place("n3", "10.0.0.3"),)


def test_a_job_claiming_before_it_sees_its_grant_stopped_nothing() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    desk.claim("a", 1, submission=2)
    assert desk.grants()["a"].holding == ("n1",)
    desk.claim("a", 1, seq=2, submission=2, avoid=("n1",))
    assert desk.granted() == {"a": ["n2"]}
    desk.claim("b", 1)
    # ranks of a live on n1
    assert "b" not in desk.granted()


def test_the_fleet_stops_old_ranks_if_a_new_submission_waits() -> None:
    """The first job in the queue may wait for just these nodes: each would wait for the other."""
    desk = Desk()
    desk.claim("b", 2)
    desk.claim("first", 4)
    desk.living["n3"] = (LiveGeneration("b", 1, 1),)
    desk.look()
    desk.claim("b", 1, submission=2, since=T0 + timedelta(hours=1))
    assert desk.of(ReclaimOrder) == [ReclaimOrder("b", 1, ("n1", "n2", "n3"))]
    desk.living.clear()
    desk.go(ReclaimResult("b", 1, ("n1", "n2", "n3")))
    assert desk.granted() == {"first": ["n1", "n2", "n3", "n4"]}


def test_old_ranks_are_stopped_if_a_new_submission_ends_silently() -> None:
    desk = Desk()
    desk.claim("a", 2)
    assert desk.claim("a", 0, submission=2) == [ReclaimOrder("a", 2, ("n1", "n2"))]
    desk.go(ReclaimResult("a", 2, ("n1",)))
    assert desk.record("a").places == (Place("n2", "10.0.0.2"),)
    desk.go(ReclaimResult("a", 2, ("n2",)))
    assert desk.state.claims == ()


def test_ranks_of_an_old_submission_found_later_are_stopped() -> None:
    desk = Desk()
    desk.claim("a", 1, submission=2)
    desk.claim("w", 4)
    desk.living["n3"] = (LiveGeneration("a", 1, 5), LiveGeneration("w", 0, 2))
    desk.wait(minutes=1)
    assert desk.of(ReclaimOrder) == [ReclaimOrder("a", 1, ("n3",)), ReclaimOrder("w", 0, ("n3",))]


def test_ranks_of_a_submission_newer_than_its_claim_are_spared() -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.living["n3"] = (LiveGeneration("a", 2, 1),)
    assert desk.wait(minutes=1) == []
    assert [type(order) for order in desk.go(EndedJobs((("a", 1),)))] == [ReclaimOrder]
    assert desk.orders == [ReclaimOrder("a", 1, ("n1",))]


# --- jobs that closed, and ranks that no job answers for


def test_a_closed_jobs_nodes_are_free_when_its_ranks_are_stopped() -> None:
    desk = Desk()
    desk.claim("a", 2, holds=("n3",))
    desk.living["n4"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    assert desk.go(EndedJobs((("a", 1), ("z", 1)))) == [ReclaimOrder("a", 1, ("n1", "n3", "n4"))]
    desk.busy = {"reclaim/a/1"}
    assert desk.wait(minutes=1) == []
    desk.busy = set()
    assert desk.go() == [ReclaimOrder("a", 1, ("n1", "n3", "n4"))]
    assert desk.wakes_in() == 10
    assert desk.wait(seconds=9) == []
    assert desk.wait(seconds=1) == [ReclaimOrder("a", 1, ("n1", "n3", "n4"))]
    desk.claim("b", 3)
    desk.living.clear()
    desk.go(ReclaimResult("a", 1, ("n3", "n4")))
    assert desk.granted() == {"b": ["n2", "n3", "n4"]}
    desk.go(ReclaimResult("a", 1, ("n1",)))
    assert [record.claim.job for record in desk.state.claims] == ["b"]


def test_a_closed_job_that_has_nothing_is_forgotten() -> None:
    desk = Desk()
    desk.claim("a", 4)
    desk.claim("w", 1)
    desk.go(EndedJobs((("w", 1),)))
    assert [record.claim.job for record in desk.state.claims] == ["a"]
    # Only a job that runs again after all, because its workflow was reset, will hear that.
    assert [order.grant.kind for order in desk.claim("w", 1)] == ["behind"]


def test_a_job_that_speaks_again_was_not_closed(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.go(EndedJobs((("a", 1),)))
    desk.busy = {"reclaim/a/1"}
    desk.claim("a", 1, seq=2, holds=("n1",))
    assert desk.grants("waiting")["a"].reason == snapshot
    desk.busy = set()
    desk.go(ReclaimResult("a", 1, ("n1",)))
    assert desk.granted() == {"a": ["n1"]}
    assert desk.record("a").claim.holds == (Place("n1"),)


def test_a_new_submission_takes_over_from_a_closed_one() -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.go(EndedJobs((("a", 1),)))
    desk.claim("a", 1, submission=2)
    assert desk.grants()["a"].holding == ("n1", "n2")
    desk.go(ReclaimResult("a", 1, ("n2", "n1")))
    assert desk.record("a").places == (Place("n1", "10.0.0.1"),)
    known = desk.state
    assert desk.go(ReclaimResult("a", 3, ("n3",))) == []
    assert desk.state == known


def test_ranks_of_an_unknown_job_are_stopped() -> None:
    desk = Desk()
    desk.living["n2"] = desk.living["n4"] = (LiveGeneration("ghost", 7, 1),)
    assert desk.wait(minutes=1) == [ReclaimOrder("ghost", 7, ("n2", "n4"))]
    desk.living.clear()
    desk.learn(ReclaimResult("ghost", 7, ("n2", "n4")))
    desk.settle()
    desk.claim("a", 4)
    assert desk.granted() == {"a": ["n1", "n2", "n3", "n4"]}


def test_a_probe_from_before_a_job_gave_nodes_back_stops_nothing() -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.claim("a", 0, seq=2)
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    assert desk.go() == []
    assert desk.wait(minutes=1) == [ReclaimOrder("a", 1, ("n1",))]


def test_nothing_is_stopped_before_it_is_known_which_jobs_run() -> None:
    desk = Desk(begun=False)
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    assert desk.go(FleetFileContent("act", desk.specs, desk.limits)) == []
    assert desk.go(RunningJobs(())) == [ReclaimOrder("a", 1, ("n1",))]


# --- marks


def test_bad_hardware_leaves_service_and_is_repaired_when_free(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2)
    said = suspect("n1", isolate=True, gpus=("0000:05:00",), code="Xid 79", reason="Xid 79")
    desk.claim(
        "a",
        2,
        seq=2,
        running=True,
        keep=("n2",),
        holds=("n1", "n2"),
        suspects=(said, suspect("n9")),
    )
    assert (desk.node("n1").status, desk.node("n1").by, desk.node("n1").reason) == (
        NodeStatus.SUSPECT,
        "job a",
        "Xid 79",
    )
    assert desk.granted() == {"a": ["n2", "n3"]}
    assert desk.of(RepairRequest) == []
    desk.claim("a", 2, seq=3, running=True, keep=("n2", "n3"), suspects=(said,))
    assert desk.of(RepairRequest) == [RepairRequest("n1", "Xid 79", ("0000:05:00",))]
    assert desk.node("n1").status is NodeStatus.REPAIRING
    assert desk.go() == []
    assert desk.go(began("n1")) == []
    desk.go(ended("n1"))
    assert (desk.node("n1").status, desk.node("n1").repair) == (NodeStatus.IN_SERVICE, "")
    assert desk.node("n1").marks[0].retracted == snapshot
    desk.claim("a", 2, seq=4, running=True, keep=("n2", "n3"), suspects=(said,))
    assert desk.node("n1").status is NodeStatus.IN_SERVICE


def test_a_suspect_with_live_ranks_is_probed_until_they_are_gone() -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    desk.claim("a", 1, seq=2, running=True, avoid=("n1",), suspects=(suspect("n1", isolate=True),))
    assert desk.of(RepairRequest) == []
    del desk.living["n1"]
    assert desk.wakes_in() == 60
    assert desk.wait(seconds=2) == [RepairRequest("n1", "failed on n1")]


def test_evidence_that_becomes_certain_counts_from_then_on() -> None:
    desk = Desk()
    desk.claim("a", 1, suspects=(suspect("n4"),))
    desk.claim("a", 1, seq=2, suspects=(suspect("n4"),), holds=("n1",))
    assert desk.node("n4").status is NodeStatus.IN_SERVICE
    desk.claim("a", 1, seq=3, suspects=(suspect("n4", isolate=True),), holds=("n1",))
    assert desk.node("n4").status is NodeStatus.REPAIRING
    assert len(desk.node("n4").marks) == 1


@pytest.mark.parametrize(
    ("cause", "follows"), [(Cause.UNKNOWN, True), (Cause.GPU_TRANSIENT, False)]
)
def test_a_fault_that_follows_the_job_clears_the_first_node(
    cause: Cause, follows: bool, snapshot: SnapshotAssertion
) -> None:
    desk = Desk()
    first = suspect("n1", 1, cause, code="exit 1", isolate=True)
    desk.claim("a", 1, holds=("n1",), suspects=(first,))
    assert desk.node("n1").status is NodeStatus.SUSPECT
    desk.claim(
        "a",
        1,
        seq=2,
        holds=("n1", "n2"),
        suspects=(suspect("n2", 1, cause, code="exit 1"), suspect("n3", 2, cause, code="exit 2")),
    )
    assert desk.node("n1").status is NodeStatus.SUSPECT
    desk.claim(
        "a", 1, seq=3, holds=("n1", "n2"), suspects=(first, suspect("n2", 2, cause, code="exit 1"))
    )
    (mark,) = desk.node("n1").marks
    assert mark.retracted == (snapshot if follows else "")
    assert desk.node("n1").status is (NodeStatus.IN_SERVICE if follows else NodeStatus.SUSPECT)
    assert desk.node("n3").marks[0].retracted == ""


def test_a_suspect_with_other_evidence_stays_if_a_fault_moves(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("b", 1, holds=("n1",), suspects=(suspect("n1", isolate=True),))
    desk.claim("a", 1, holds=("n1",), suspects=(suspect("n1", 1, Cause.HANG),))
    desk.claim("a", 1, seq=2, holds=("n1",), suspects=(suspect("n2", 2, Cause.HANG),))
    assert [mark.retracted for mark in desk.node("n1").marks] == snapshot
    node = desk.node("n1")
    assert (node.status, node.by, node.past) == (NodeStatus.SUSPECT, "job b", ())
    desk.claim("a", 1, seq=3, holds=("n1",), suspects=(suspect("n3", 3, Cause.HANG),))
    assert desk.node("n2").marks[0].retracted
    assert desk.node("n2").status is NodeStatus.IN_SERVICE


def test_a_suspect_shows_the_reason_that_still_holds_and_whose() -> None:
    desk = Desk()
    told = suspect("n1", 1, Cause.HANG, reason="step 7 stood still", isolate=True)
    desk.claim("b", 1, holds=("n1",), suspects=(suspect("n1", reason="Xid 79", isolate=True),))
    later = replace(told, at=T0 + timedelta(seconds=1))
    desk.claim("a", 1, suspects=(later,))
    assert (desk.node("n1").reason, desk.node("n1").by) == ("Xid 79", "job b")
    desk = Desk()
    desk.claim("a", 1, holds=("n1",), suspects=(told,))
    desk.claim("b", 1, suspects=(suspect("n1", reason="Xid 79", isolate=True),))
    assert (desk.node("n1").reason, desk.node("n1").by) == ("step 7 stood still", "job a")
    desk.now += timedelta(minutes=1)
    desk.claim("a", 1, seq=2, holds=("n1",), suspects=(suspect("n2", 2, Cause.HANG),))
    node = desk.node("n1")
    assert (node.status, node.reason, node.by) == (NodeStatus.SUSPECT, "Xid 79", "job b")
    followed = "the fault followed job a to n2"
    assert node.past == (PastReason("step 7 stood still", "job a", T0, desk.now, followed),)


def test_a_later_submission_repeats_faults_that_are_no_news() -> None:
    desk = Desk()
    old = suspect("n4", isolate=True)
    desk.claim("a", 1, suspects=(old,))
    desk.go(ended("n4"))
    desk.claim("a", 1, seq=1, submission=2, suspects=(old,))
    assert desk.node("n4").status is NodeStatus.IN_SERVICE
    assert len(desk.node("n4").marks) == 1
    new = replace(old, at=T0 + timedelta(hours=1))
    desk.claim("a", 1, seq=2, submission=2, suspects=(new,))
    assert desk.node("n4").status is NodeStatus.REPAIRING


def test_a_node_keeps_the_reasons_that_no_longer_hold() -> None:
    desk = Desk()
    desk.claim("a", 1, suspects=(suspect("n4", reason="Xid 79", isolate=True),))
    desk.now += timedelta(minutes=5)
    desk.go(ended("n4", "refused", reason="no sudo"))
    desk.now += timedelta(minutes=5)
    desk.go(ReleaseCommand("n4", "new card", "grace"))
    node = desk.node("n4")
    assert (node.status, node.reason, node.by) == (NodeStatus.IN_SERVICE, "", "")
    assert [(one.reason, one.by, one.end) for one in node.past] == [
        ("Xid 79", "job a", "relaunch quarantined it"),
        ("repair refused: no sudo", "relaunch", "grace released it: new card"),
    ]
    assert [one.until - (one.since or T0) for one in node.past] == [timedelta(minutes=5)] * 2
    for number in range(MAX_PAST + 1):
        desk.go(QuarantineCommand("n4", f"try {number}", "ada", None))
    assert [one.reason for one in desk.node("n4").past] == ["try 0", "try 1", "try 2", "try 3"]


def test_what_healed_a_node_is_kept_and_retracts_older_marks() -> None:
    desk = Desk()
    first, second = (suspect("n4", number, gpus=(f"0000:0{number}:00",)) for number in (1, 2))
    later = replace(suspect("n4", 3, gpus=first.gpus), at=T0 + timedelta(hours=1))
    desk.claim("a", 1, holds=("n4",), suspects=(first, second, suspect("n4", 4), later))

    def heal(strategy: Strategy, minutes: int, *gpus: str) -> Healing:
        healing = Healing(strategy, T0 + timedelta(minutes=minutes), gpus)
        desk.go(replace(ended("n4", job="a", run=f"r{minutes}"), healing=healing))
        return healing

    heal(Strategy.RESET_GPU, 1, *first.gpus)
    reset = heal(Strategy.RESET_GPU, 2, *first.gpus)
    assert desk.node("n4").healed == (reset,)
    assert [bool(mark.retracted) for mark in desk.node("n4").marks] == [True, False, False, False]
    other = heal(Strategy.RESET_GPU, 3, *second.gpus)
    assert desk.node("n4").healed == (reset, other)
    assert export_state(desk.state).nodes[0].healed == (reset, other)
    reboot = heal(Strategy.REBOOT_NODE, 4)
    assert desk.node("n4").healed == (reset, other, reboot)
    again = heal(Strategy.REBOOT_NODE, 5)
    assert desk.node("n4").healed == (reset, other, again)
    assert [bool(mark.retracted) for mark in desk.node("n4").marks] == [True, True, True, False]


def test_evidence_from_before_a_repair_or_a_release_is_no_news() -> None:
    desk = Desk()
    desk.claim("a", 1, holds=("n1",), suspects=(suspect("n4", isolate=True),))
    desk.now += timedelta(minutes=20)
    desk.go(began("n4"), ended("n4"))
    assert desk.node("n4").status is NodeStatus.IN_SERVICE
    # of another job, which could not report for some time
    late = replace(suspect("n4", isolate=True), at=desk.now - timedelta(seconds=1))
    desk.claim("b", 1, holds=("n2",), suspects=(late,))
    assert desk.node("n4").status is NodeStatus.IN_SERVICE
    assert desk.of(RepairRequest) == []
    assert desk.node("n4").marks[-1].retracted
    desk.now += timedelta(minutes=1)
    new = replace(late, generation=2, at=desk.now)
    desk.claim("b", 1, seq=2, holds=("n2",), suspects=(late, new))
    assert desk.node("n4").status is NodeStatus.REPAIRING
    desk.now += timedelta(minutes=1)
    desk.go(ended("n4", "refused"), ReleaseCommand("n4", "reseated", "grace"))
    older = replace(new, at=desk.now - timedelta(seconds=1))
    desk.claim("c", 1, holds=("n3",), suspects=(older,))
    assert desk.node("n4").status is NodeStatus.IN_SERVICE
    assert export_state(desk.state).nodes[-1].cleared_at == desk.now


def test_a_repair_gets_what_healed_the_node_within_the_cool_down() -> None:
    desk = Desk(cool_down="6h")
    card = ("0000:05:00",)

    def fail(generation: int) -> RepairRequest:
        more = replace(suspect("n4", generation, gpus=card, isolate=True), at=desk.now)
        desk.claim("a", 1, seq=generation, holds=("n1",), suspects=(more,))
        (order,) = desk.of(RepairRequest)
        return order

    assert fail(1).healed == ()
    desk.go(began("n4"))
    reset = Healing(Strategy.RESET_GPU, desk.now, card)
    desk.go(replace(ended("n4"), healing=reset))
    desk.now += timedelta(hours=5)
    assert fail(2).healed == (reset,)
    reboot = Healing(Strategy.REBOOT_NODE, desk.now)
    desk.go(began("n4", "r2"), replace(ended("n4", run="r2"), healing=reboot))
    desk.now += timedelta(hours=5)
    assert fail(3).healed == (reboot,)  # ten hours after the reset, five after the reboot
    desk.go(began("n4", "r3"), ended("n4", "refused", "r3"))
    assert desk.node("n4").status is NodeStatus.QUARANTINED
    desk.now += timedelta(minutes=1)
    desk.go(ReleaseCommand("n4", "new card", "grace"))
    desk.now += timedelta(minutes=1)
    assert fail(4).healed == ()  # grace has mended it


def test_a_release_withdraws_a_repair_that_has_done_nothing(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 1, holds=("n1",), suspects=(suspect("n4", isolate=True),))
    desk.go(began("n4"))
    desk.now += timedelta(minutes=20)
    desk.go(ReleaseCommand("n4", "it was the switch", "grace"))
    desk.go(permit("n4"))
    (answer,) = desk.of(PermitMessage)
    assert (answer.permit.allowed, answer.permit.reason) == (False, snapshot)
    desk.go(ended("n4", "refused", verdict=Verdict.UNHEALTHY, reason="released"))
    assert desk.node("n4").status is NodeStatus.IN_SERVICE
    assert desk.state.notices[-1] == snapshot


def test_three_jobs_failing_on_a_node_in_a_day_make_it_a_suspect(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk(repairs_at_once=1)
    desk.claim(
        "z", 1, suspects=(replace(suspect("n4", 1, Cause.UNKNOWN), at=T0 - timedelta(hours=25)),)
    )
    for job, cause, code in (("a", Cause.UNKNOWN, "exit 1"), ("b", Cause.HANG, "")):
        desk.claim(job, 1, suspects=(suspect("n4", 1, cause, code=code),))
        assert desk.node("n4").status is NodeStatus.IN_SERVICE
    desk.claim("c", 0, suspects=(suspect("n4", 1, Cause.UNKNOWN, code="exit 2"),))
    node = desk.node("n4")
    assert (node.status, node.by) == (NodeStatus.REPAIRING, "relaunch")
    assert node.reason == snapshot
    assert desk.of(RepairRequest) == [RepairRequest("n4", node.reason)]


def test_a_node_keeps_its_newest_marks_and_ignores_older_ones() -> None:
    desk = Desk()
    for number in range(2, 25):
        new = replace(suspect("n4", number, reason=""), at=T0 + timedelta(minutes=number))
        desk.claim("a", 1, seq=number, holds=("n1",), suspects=(new,))
    assert [mark.generation for mark in desk.node("n4").marks] == list(range(5, 25))
    assert desk.node("n4").marks[0].reason == "GPU_FATAL"
    desk.claim("a", 1, seq=30, holds=("n1",), suspects=(suspect("n4", 1, isolate=True),))
    assert desk.node("n4").status is NodeStatus.IN_SERVICE


# --- repairs


def test_the_oldest_suspects_are_repaired_first_up_to_the_limit(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk(repairs_at_once=2)
    desk.claim("a", 1, seq=1, holds=("n1",), suspects=(suspect("n4", isolate=True),))
    desk.go(ended("n4", "refused"), ReleaseCommand("n4", "ok", "grace"))
    desk.learn(began("n2", by="grace"))
    desk.claim("a", 1, seq=2, holds=("n1",), suspects=(suspect("n3", 2, isolate=True),))
    desk.now += timedelta(seconds=1)
    desk.claim(
        "a",
        1,
        seq=3,
        holds=("n1",),
        suspects=(
            replace(suspect("n4", 3, isolate=True), at=desk.now),
            suspect("n2", 3, isolate=True),
        ),
    )
    assert desk.node("n3").status is NodeStatus.REPAIRING
    assert desk.of(RepairRequest) == []
    assert desk.go(ended("n3", "refused", reason="no spare GPU")) == [
        RepairRequest("n4", "failed on n4")
    ]
    assert (desk.node("n3").status, desk.node("n3").by) == (NodeStatus.QUARANTINED, "relaunch")
    assert desk.node("n3").reason == snapshot
    assert desk.go(ended("n2", job="a")) == [RepairRequest("n2", "failed on n2")]


def test_a_jobs_repair_keeps_standing_unless_the_fleet_waited() -> None:
    desk = Desk()
    desk.go(began("n1"), ended("n1", "refused", job="a"))
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    desk.claim("a", 1, holds=("n1",), suspects=(suspect("n2", isolate=True),))
    desk.go(began("n2"), ended("n2", "done", job="a"))
    assert desk.node("n2").status is NodeStatus.IN_SERVICE


@pytest.mark.parametrize(
    ("outcome", "more", "standing"),
    [
        ("refused", {}, NodeStatus.IN_SERVICE),
        ("refused", {"verdict": Verdict.HEALTHY}, NodeStatus.IN_SERVICE),
        ("refused", {"verdict": Verdict.UNHEALTHY}, NodeStatus.QUARANTINED),
        ("ambiguous", {}, NodeStatus.QUARANTINED),
        ("refused", {"by": "fleet gpus"}, NodeStatus.QUARANTINED),
    ],
)
def test_a_refused_manual_repair_withdraws_only_unhealthy_nodes(
    outcome: str, more: dict[str, Any], standing: NodeStatus, snapshot: SnapshotAssertion
) -> None:
    desk = Desk()
    end = {"by": "grace", "reason": "job a runs there", **more}
    desk.go(began("n2", by="grace"), ended("n2", outcome, **end))
    assert (desk.node("n2").status, desk.node("n2").repair) == (standing, "")
    stays = standing is NodeStatus.IN_SERVICE
    assert desk.state.notices == ((snapshot,) if stays else ())


def test_a_finding_stays_until_another_examination_has_one() -> None:
    desk = Desk()
    assert desk.node("n1").verdict is None
    desk.go(began("n1"), ended("n1", job="a", reason="all was read"))
    assert (
        desk.node("n1").verdict,
        desk.node("n1").verdict_at,
        desk.node("n1").verdict_reason,
    ) == (Verdict.HEALTHY, T0, "all was read")
    known = desk.node("n1")
    desk.now += timedelta(hours=1)
    desk.go(began("n1", "r2"), ended("n1", "ambiguous", "r2", job="a"))
    assert (desk.node("n1").verdict, desk.node("n1").verdict_at) == (
        known.verdict,
        known.verdict_at,
    )
    desk.go(
        began("n1", "r3"),
        ended("n1", "refused", "r3", job="a", verdict=Verdict.UNHEALTHY, reason="Xid 79"),
    )
    assert (
        desk.node("n1").verdict,
        desk.node("n1").verdict_at,
        desk.node("n1").verdict_reason,
    ) == (Verdict.UNHEALTHY, desk.now, "Xid 79")


def test_messages_of_a_repair_not_under_way_change_nothing() -> None:
    desk = Desk()
    desk.go(began("n1", "r2"))
    known = desk.state
    desk.learn(ended("n1", "refused", "r1"), began("n1", "r2"))
    assert desk.state == known
    desk.learn(ended("n1", "done", "r2"))
    known = desk.state
    desk.learn(ended("n1", "refused", "r2"), began("n1", "r2"), ended("n9"))
    assert desk.state == known


def test_a_repair_on_a_node_that_is_not_in_the_fleet_is_noted(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.go(began("n9", by="grace"))
    assert desk.state.notices == snapshot


def test_a_repair_with_no_reported_end_ends_by_quarantine(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True),))
    desk.go(began("n2", by="grace"))
    desk.now += timedelta(hours=3) - timedelta(seconds=10)
    desk.go()
    assert desk.wakes_in() == 10
    desk.wait(seconds=10)
    assert desk.node("n1").status is NodeStatus.QUARANTINED
    assert desk.node("n1").reason == snapshot(name="quarantine")
    assert (desk.node("n2").status, desk.node("n2").repair) == (NodeStatus.IN_SERVICE, "")
    assert desk.state.notices[-1] == snapshot(name="notice")


def test_a_manual_quarantine_outlasts_repairs_until_released() -> None:
    desk = Desk()
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True),))
    desk.go(began("n1"), QuarantineCommand("n1", "a technician comes", "grace"), ended("n1"))
    assert (desk.node("n1").status, desk.node("n1").by) == (NodeStatus.QUARANTINED, "grace")
    desk.go(began("n1", "r2", by="grace"), ended("n1", "refused", "r2", by="grace"))
    assert (desk.node("n1").status, desk.node("n1").by) == (NodeStatus.QUARANTINED, "grace")
    desk.go(began("n1", "r3", by="grace"), ended("n1", "done", "r3", by="grace"))
    assert (desk.node("n1").status, desk.node("n1").by) == (NodeStatus.QUARANTINED, "grace")
    assert desk.node("n1").verdict is Verdict.HEALTHY
    desk.go(ReleaseCommand("n1", "the technician was there", "grace"))
    assert desk.node("n1").status is NodeStatus.IN_SERVICE


def test_nodes_out_of_service_cause_no_early_wakeup() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.silent["n1"] = "it is off"
    desk.go(QuarantineCommand("n1", "dust", "grace"))
    desk.wait(minutes=1)
    desk.claim("a", 2)
    assert desk.wakes_in() == 60


# --- the fleet file


def test_the_file_may_add_change_and_reorder_nodes() -> None:
    desk = Desk()
    desk.claim("a", 1)
    specs = (*nodes("n9"), *nodes("n2", "n1", gpus=4))
    desk.go(FleetFileContent("observe", specs, FleetLimits(nodes_out=3)))
    assert [node.spec for node in desk.state.nodes] == list(specs)
    assert (desk.state.repairs, desk.state.limits.nodes_out) == ("observe", 3)
    assert desk.node("n2").probe is not None


def test_a_node_that_left_the_file_goes_when_no_job_is_on_it() -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.claim("b", 0, suspects=(suspect("n4", isolate=True),))
    desk.go(QuarantineCommand("n1", "dust", "grace"))
    desk.go(FleetFileContent("act", nodes("n3"), desk.limits))
    assert [(node.name, node.status, node.by) for node in desk.state.nodes] == [
        ("n3", NodeStatus.IN_SERVICE, ""),
        ("n1", NodeStatus.QUARANTINED, "grace"),
        ("n4", NodeStatus.REPAIRING, "job b"),
    ]
    desk.go(ended("n4"))
    assert [node.name for node in desk.state.nodes] == ["n3", "n1"]
    desk.claim("a", 0, seq=2)
    assert [node.name for node in desk.state.nodes] == ["n3"]


def test_a_node_that_comes_back_into_the_file_is_what_it_was(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2, holds=("n1", "n2"), suspects=(suspect("n2", isolate=True),))
    desk.go(FleetFileContent("act", nodes("n3"), desk.limits))
    left = [(node.name, node.reason, node.by) for node in desk.state.nodes[1:]]
    assert [(name, by) for name, _, by in left] == [("n1", "fleet file"), ("n2", "fleet file")]
    assert {reason for _, reason, _ in left} == {desk.node("n1").reason}
    assert desk.node("n1").reason == snapshot
    desk.go(ReleaseCommand("n1", "why not", "grace"))
    assert desk.node("n1").status is NodeStatus.QUARANTINED
    desk.go(FleetFileContent("act", desk.specs, desk.limits))
    assert (desk.node("n1").status, desk.node("n1").is_removed) == (NodeStatus.IN_SERVICE, False)
    assert (desk.node("n2").status, desk.node("n2").reason) == (
        NodeStatus.SUSPECT,
        "failed on n2",
    )


def test_a_quarantined_node_returns_to_the_file_quarantined(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk()
    desk.go(QuarantineCommand("n1", "swap its PSU", "carol"))
    desk.claim("a", 0, suspects=(suspect("n2", isolate=True),))
    desk.go(ended("n2", "failed", verdict=Verdict.UNHEALTHY))
    away = FleetFileContent("act", nodes("n3"), desk.limits)
    desk.go(away)
    assert [node.name for node in desk.state.nodes] == ["n3"]
    desk.now += timedelta(days=3)
    before = len(desk.state.notices)
    desk.go(FleetFileContent("act", desk.specs, desk.limits))
    assert [(node.name, str(node.status), node.by) for node in desk.state.nodes] == [
        ("n1", "quarantined", "carol"),
        ("n2", "quarantined", "relaunch"),
        ("n3", "in service", ""),
        ("n4", "in service", ""),
    ]
    assert desk.state.notices[before:] == snapshot
    assert not desk.state.removed
    desk.go(away, ReleaseCommand("n1", "swapped", "carol"))
    desk.now += timedelta(days=31)
    desk.go(FleetFileContent("act", desk.specs, desk.limits))
    assert {node.status for node in desk.state.nodes} == {NodeStatus.IN_SERVICE}, "30 days are over"


def test_a_release_reaches_a_node_that_is_not_in_the_file() -> None:
    desk = Desk()
    desk.go(QuarantineCommand("n1", "swap its PSU", "carol"))
    desk.go(FleetFileContent("act", nodes("n3"), desk.limits))
    desk.go(ReleaseCommand("n1", "swapped", "carol"))
    desk.go(FleetFileContent("act", desk.specs, desk.limits))
    assert desk.node("n1").status is NodeStatus.IN_SERVICE


def test_only_so_many_removed_nodes_are_known() -> None:
    desk = Desk(*nodes(*(f"n{number}" for number in range(MAX_REMOVED + 2))))
    desk.learn(*(QuarantineCommand(one.name, "dust", "carol") for one in desk.specs[1:]))
    desk.go(FleetFileContent("act", desk.specs[:1], desk.limits))
    assert [one.record.name for one in desk.state.removed] == [
        one.name for one in desk.specs[2:]
    ], "the first is forgotten"


def test_a_file_that_names_no_node_takes_none_away(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.go(FleetFileContent("act", (), desk.limits))
    assert len(desk.state.nodes) == 4
    assert desk.state.notices[-1] == snapshot


@pytest.mark.parametrize(
    "change",
    [{"address": "10.0.0.9"}, {"user": "train"}, {"port": 2222}],
    ids=["address", "user", "port"],
)
def test_a_node_that_moves_while_a_job_has_it_is_reported(
    change: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    desk = Desk()
    desk.claim("a", 1, running=True, keep=("n2",))
    moved = tuple(spec.model_copy(update=change) for spec in desk.specs)
    before = len(desk.state.notices)
    desk.go(FleetFileContent("act", moved, desk.limits))
    (notice,) = desk.state.notices[before:]
    assert notice == snapshot
    desk.go(FleetFileContent("act", moved, desk.limits))
    # and it is reported once
    assert len(desk.state.notices) == before + 1


def test_many_nodes_that_move_are_a_few_notices(snapshot: SnapshotAssertion) -> None:
    names = tuple(f"n{number}" for number in range(1, 7))
    desk = Desk(*nodes(*names))
    desk.claim("a", 6, running=True, keep=names)
    before = len(desk.state.notices)
    desk.go(
        FleetFileContent(
            "act",
            tuple(spec.model_copy(update={"user": "train"}) for spec in desk.specs),
            desk.limits,
        )
    )
    assert len(desk.state.notices[before:]) == 5
    assert desk.state.notices[-1] == snapshot


# --- people


def test_a_person_quarantines_drains_and_releases_a_node(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2, gpus=2)
    desk.claim("b", 1, gpus=2)
    desk.claim("c", 1, gpus=2, holds=("n1",))
    desk.go(EndedJobs((("c", 1),)))
    desk.busy = {"reclaim/c/1"}
    until = T0 + timedelta(minutes=30)
    withdraw = DrainRequest("n1", "a fan", "grace", until)
    assert desk.go(DRAIN) == [DrainMessage("a", withdraw), DrainMessage("b", withdraw)]
    assert desk.go(DRAIN) == []
    assert desk.state.notices[0] == snapshot(name="quarantine")
    node = desk.node("n1")
    assert (node.status, node.reason, node.by, node.since) == (
        NodeStatus.QUARANTINED,
        "a fan",
        "grace",
        T0,
    )
    desk.now += timedelta(minutes=1)
    later = replace(withdraw, until=until + timedelta(minutes=1))
    assert desk.go(DRAIN) == [DrainMessage("a", later), DrainMessage("b", later)]
    desk.go(ReleaseCommand("n1", "", ""))
    node = desk.node("n1")
    assert (node.status, node.drain, node.asked_jobs) == (NodeStatus.IN_SERVICE, None, ())
    assert desk.state.notices[-1] == snapshot(name="release")


def test_a_release_takes_the_marks_off_a_suspect(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 1, holds=("n1",), suspects=(suspect("n1", isolate=True),))
    desk.go(ReleaseCommand("n1", "a loose cable", "grace"))
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    assert desk.node("n1").marks[0].retracted == snapshot


def test_commands_on_absent_nodes_and_bad_messages_are_noted(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.go(
        QuarantineCommand("n9", "", ""),
        ReleaseCommand("n9", "", "grace"),
        MalformedMessage("claim", "no job"),
    )
    assert [notice.split(": ", 1)[1] for notice in desk.state.notices] == snapshot
    for _ in range(60):
        desk.learn(MalformedMessage("claim", "no job"))
    assert len(desk.state.notices) == 50


# --- twice is once


@pytest.mark.parametrize(
    "fact",
    [
        ClaimEvent(
            Claim(
                "a", 1, 1, 1, suspects=(suspect("n1", isolate=True), suspect("n2", 1, Cause.HANG))
            )
        ),
        ClaimEvent(Claim("a", 1, 1, 0)),
        ClaimEvent(Claim("b", 1, 1, 2)),
        ClaimEvent(Claim("b", 2, 1, 0)),
        ProbeResults(
            (
                NodeProbe("n1", "off"),
                NodeProbe("n2", generations=(LiveGeneration("b", 1, 1),)),
                NodeProbe("n9"),
            )
        ),
        FleetFileContent("act", nodes("n3", "n5"), FleetLimits()),
        EndedJobs((("b", 1),)),
        RunningJobs(("b", "x")),
        ReclaimResult("b", 1, ("n1",)),
        began("n1"),
        ended("n1"),
        DRAIN,
    ],
    ids=lambda fact: type(fact).__name__,
)
def test_what_is_learned_twice_changes_nothing(fact: Any) -> None:
    desk = Desk()
    desk.claim("b", 2)
    once = apply_event(desk.state, fact, desk.now)
    twice = apply_event(once, fact, desk.now)
    assert replace(twice, notices=()) == replace(once, notices=())


def test_every_grant_answers_the_newest_claim() -> None:
    desk = Desk()
    desk.learn(ClaimEvent(Claim("a", 1, 1, 2)), ClaimEvent(Claim("a", 1, 2, 1)))
    assert desk.settle() == [
        GrantMessage("a", Grant(1, 2, "granted", (Place("n1", "10.0.0.1"),), "n1 joined"))
    ]


# --- a server whose clock was set back between two submissions


def test_a_submission_numbered_too_low_hears_so_and_goes_higher() -> None:
    desk = Desk()
    desk.claim("a", 2, submission=5000)
    desk.claim("a", 0, seq=2, submission=5000)
    desk.claim("a", 1, submission=4000)
    [behind] = desk.grants("behind").values()
    assert (behind.submission, behind.seq, behind.above) == (4000, 1, 5000)
    # it is sent once for each claim
    assert desk.state.claims == () and desk.wait(seconds=1) == []
    desk.claim("a", 1, seq=2, submission=5001)
    assert desk.granted() == {"a": ["n1"]}


def test_a_late_message_of_an_ended_submission_changes_nothing() -> None:
    desk = Desk()
    desk.claim("a", 2, submission=5000)
    before = desk.state.claims
    desk.claim("a", 4, seq=9, submission=4000)
    assert desk.state.claims == before
    # which no job takes for its own
    assert [(grant.submission, grant.seq) for grant in desk.grants("behind").values()] == [
        (4000, 9)
    ]


# --- a job whose workflow was reset, and which repeats an earlier claim


def test_an_earlier_claim_of_a_submission_hears_to_go_higher() -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.claim("a", 2, seq=4)
    before = desk.state.claims
    desk.claim("a", 1, seq=2)
    [behind] = desk.grants("behind").values()
    assert (behind.submission, behind.seq, behind.above) == (1, 2, 1)
    assert desk.state.claims == before


@pytest.mark.parametrize(("nodes", "kinds"), [(1, ["behind"]), (0, [])])
def test_the_last_claim_of_a_job_without_nodes_is_void(nodes: int, kinds: list[str]) -> None:
    """The same message twice is no new claim: a job that has returned its nodes may still run."""
    desk = Desk()
    desk.claim("a", 1)
    desk.claim("a", 0, seq=2)
    desk.claim("a", nodes, seq=2)
    assert [grant.kind for grant in desk.grants("behind").values()] == kinds
    assert desk.state.claims == ()


# --- faults that a job reports without a claim


def test_a_reported_fault_counts_as_claimed_and_changes_no_claim() -> None:
    desk = Desk()
    desk.claim("a", 2)
    before = desk.record("a")
    report = FaultReportEvent(FaultReport("a", 1, (suspect("n1", isolate=True), suspect("n9"))))
    desk.go(report)
    assert desk.node("n1").status is NodeStatus.SUSPECT
    assert [(mark.job, mark.generation, mark.isolated) for mark in desk.node("n1").marks] == [
        ("a", 1, True)
    ]
    assert desk.record("a") == before
    known = desk.state
    desk.go(report)
    assert desk.state == known, "twice is once"


# --- who may do what


def test_a_job_of_a_person_without_the_right_gets_no_nodes() -> None:
    desk = Desk()
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=ACCESS))
    desk.claim("a", 1, submitted_by="mallory")
    refusal = desk.grants("hopeless")["a"].reason
    assert refusal == desk.record("a").refusal and "mallory" in refusal
    desk.claim("b", 1, submitted_by="ada")
    assert desk.granted() == {"b": ["n1"]}
    assert (desk.record("b").submitter, desk.record("b").refusal) == ("ada (claimed)", "")
    # The claims that a fleet keeps do not hold names and signatures a second time.
    assert (desk.record("b").claim.submitted_by, desk.record("b").claim.signed) == ("", None)


def test_a_job_that_was_launched_is_not_refused_by_newer_rules() -> None:
    desk = Desk()
    desk.claim("a", 1, submitted_by="mallory")
    desk.claim("w", 4, submitted_by="mallory")
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=ACCESS))
    desk.claim("a", 1, seq=2, submitted_by="mallory", running=True, keep=("n1",))
    assert not desk.record("a").refusal
    desk.claim("w", 4, seq=2, submitted_by="mallory")
    assert "mallory" in desk.grants("hopeless")["w"].reason, "it was not launched yet"


@pytest.mark.parametrize("has_run", [False, True], ids=["of 0.1.0", "of this release"])
def test_a_launched_job_that_had_to_yield_is_not_refused(has_run: bool) -> None:
    """It queues like a job that is new, and says who has submitted it only if it is."""
    desk = Desk()
    desk.claim("a", 1, submitted_by="mallory")
    desk.claim("a", 1, seq=2, running=True, keep=("n1",), has_run=has_run)
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=ACCESS))
    for seq, count in ((3, 5), (4, 6), (5, 2)):
        desk.claim("a", count, seq=seq, has_run=has_run)
        assert not desk.record("a").refusal
    assert list(desk.granted()) == ["a"]
    desk.claim("a", 1, submission=2, submitted_by="mallory")
    assert "mallory" in desk.grants("hopeless")["a"].reason, "it is another submission"


def test_a_launched_job_is_known_by_its_claim_alone() -> None:
    """To a fleet that was terminated and started again it is a new one."""
    desk = Desk()
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=ACCESS))
    desk.claim("a", 1, seq=3, has_run=True)
    assert list(desk.granted()) == ["a"]


def test_a_submitter_is_checked_once() -> None:
    desk = Desk()
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=ACCESS))
    desk.claim("x", 4, submitted_by="ada")
    desk.claim("a", 4, submitted_by="ada")
    without = Access.model_validate({"people": {"grace": {"role": "admin"}}})
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=without))
    desk.claim("a", 3, seq=2, submitted_by="ada")
    assert (desk.record("a").submitter, desk.record("a").refusal) == ("ada (claimed)", "")


def test_an_order_without_the_right_to_it_is_only_noted() -> None:
    desk = Desk()
    desk.go(FleetFileContent("act", desk.specs, desk.limits, access=ACCESS))
    desk.go(PauseCommand("", "mallory"))
    assert not desk.state.breaker.paused
    assert f"{REFUSED}mallory (claimed) may not pause repairs" in desk.state.notices[-1]
    desk.go(PauseCommand("", "ada"))
    assert desk.state.breaker.paused
