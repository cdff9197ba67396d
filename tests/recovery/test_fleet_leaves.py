"""Who is asked to leave a node, and who hears that it is over.

A person drains it, or another job's evidence is against it.
"""

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
    DrainMessage,
    EndedJobs,
    FleetFileContent,
    GrantMessage,
    PauseCommand,
    PermitMessage,
    PermitRequestEvent,
    PreviousRun,
    QuarantineCommand,
    ReclaimResult,
    ReleaseCommand,
    RepairRequest,
    ResumeCommand,
    RunningJobs,
)
from relaunch.pool.messages import Claim, DrainRequest, PermitRequest, Place
from relaunch.pool.restore import export_state
from relaunch.pool.state import NodeStatus
from tests.recovery.fleet_builders import T0, Desk, began, ended, nodes, suspect

TWO_HOURS = T0 + timedelta(hours=2)
XID = DrainRequest("n2", "failed on n2", "fleet gpus", TWO_HOURS)
DRAIN = QuarantineCommand("n2", "swap its PSU", "carol", timedelta(hours=1))
STILL_THERE: dict[str, Any] = {
    "keep": ("n2",),
    "holds": (Place("n2", gpus=(2, 3)),),
    "stays": ("n2",),
}
XID_119 = "Xid 119 on n2"
PSU = DrainRequest("n2", "swap its PSU", "carol", T0 + timedelta(hours=1))


def share(desk: Desk, *jobs: str) -> Desk:
    """Each has two of the eight GPUs of n2."""
    for number, job in enumerate(jobs):
        desk.claim(
            job,
            1,
            gpus=2,
            running=True,
            keep=("n2",),
            holds=(Place("n2", gpus=(2 * number, 2 * number + 1)),),
        )
    return desk


def shared(**more: Any) -> Desk:
    return share(Desk(*nodes("n1", "n2", "n3", "n4"), **more), "a", "b")


def accuse(desk: Desk, job: str = "a", seq: int = 2, **more: Any) -> list[Any]:
    """It leaves n2 by its own evidence, and is granted another one."""
    evidence = (suspect("n2", isolate=True, **more),)
    return desk.claim(job, 1, seq=seq, gpus=2, running=True, avoid=("n2",), suspects=evidence)


def over(desk: Desk) -> DrainRequest:
    """The request for n2 is withdrawn, for the reason that the fleet has just given."""
    reason = desk.of(DrainMessage)[0].request.reason
    return DrainRequest("n2", reason, "fleet gpus", desk.now, cancelled=True)


# --- a suspect that others share


def test_sharers_of_a_suspect_are_asked_once_then_it_is_examined() -> None:
    desk = shared()
    assert DrainMessage("b", XID) in accuse(desk) and len(desk.of(DrainMessage)) == 1
    assert (desk.node("n2").status, desk.node("n2").repair_drain, desk.node("n2").asked_jobs) == (
        NodeStatus.SUSPECT,
        XID,
        ("b",),
    )
    # no person has drained it
    assert desk.node("n2").drain is None
    desk.now += timedelta(minutes=5)
    assert [order for order in desk.go() if isinstance(order, DrainMessage | RepairRequest)] == []
    desk.claim("b", 1, seq=2, gpus=2, running=True, avoid=("n2",))
    assert desk.of(RepairRequest) == [RepairRequest("n2", "failed on n2")]
    assert desk.go(began("n2"), ended("n2")) == []
    assert (desk.node("n2").status, desk.node("n2").repair_drain, desk.node("n2").asked_jobs) == (
        NodeStatus.IN_SERVICE,
        None,
        (),
    )


def test_the_time_to_leave_is_the_fleet_file_s() -> None:
    desk = shared(drain_within="20m")
    accuse(desk)
    assert desk.of(DrainMessage) == [
        DrainMessage("b", replace(XID, until=T0 + timedelta(minutes=20)))
    ]


def test_a_job_whose_fault_came_to_nothing_is_asked_as_well() -> None:
    desk = shared()
    harmless = (suspect("n2", 1, Cause.APPLICATION),)
    desk.claim(
        "b",
        1,
        seq=2,
        gpus=2,
        running=True,
        keep=("n2",),
        holds=(Place("n2", gpus=(2, 3)),),
        suspects=harmless,
    )
    accuse(desk)
    assert [order.job for order in desk.of(DrainMessage)] == ["b"]


def test_jobs_that_both_accuse_it_leave_by_themselves() -> None:
    desk = shared()
    for job in ("a", "b"):
        desk.claim(
            job,
            1,
            seq=2,
            gpus=2,
            running=True,
            holds=("n2",),
            suspects=(suspect("n2", isolate=True),),
        )
        assert [order.job for order in desk.of(DrainMessage)] == (["b"] if job == "a" else [])
    alone = share(Desk(), "a")
    alone.claim(
        "a", 1, seq=2, gpus=2, running=True, holds=("n2",), suspects=(suspect("n2", isolate=True),)
    )
    assert (alone.of(DrainMessage), alone.node("n2").repair_drain) == ([], None)


@pytest.mark.parametrize("how", ["release", "retracted", "quarantine"])
def test_an_asked_job_hears_when_the_node_is_no_longer_wanted(
    how: str, snapshot: SnapshotAssertion
) -> None:
    desk = shared()
    accuse(desk, cause=Cause.HANG)
    if how == "release":
        desk.go(ReleaseCommand("n2", "reseated", "grace"))
        assert desk.orders == [DrainMessage("b", over(desk))]
    elif how == "quarantine":
        desk.go(QuarantineCommand("n2", "mine", "grace"))
        assert desk.orders == [DrainMessage("b", over(desk))]
    else:
        again = (suspect("n2", isolate=True, cause=Cause.HANG), suspect("n1", 2, Cause.HANG))
        desk.claim("a", 1, seq=3, gpus=2, running=True, keep=("n1",), suspects=again)
        assert desk.of(DrainMessage) == [DrainMessage("b", over(desk))]
        assert desk.node("n2").status is NodeStatus.IN_SERVICE
    assert over(desk).reason == snapshot
    assert (desk.node("n2").repair_drain, desk.node("n2").asked_jobs) == (None, ())
    assert desk.go() == []


def test_no_job_leaves_for_a_repair_that_would_not_be_done(snapshot: SnapshotAssertion) -> None:
    watched = shared()
    watched.go(FleetFileContent("observe", watched.specs, watched.limits))
    accuse(watched)
    assert watched.of(DrainMessage) == []
    desk = shared()
    desk.go(PauseCommand("", "grace"))
    accuse(desk)
    assert desk.of(DrainMessage) == []
    desk.now += timedelta(minutes=1)
    later = replace(XID, until=TWO_HOURS + timedelta(minutes=1))
    assert desk.go(ResumeCommand("", "grace")) == [DrainMessage("b", later)]
    assert desk.go(PauseCommand("", "grace")) == [DrainMessage("b", over(desk))]
    assert over(desk).reason == snapshot
    assert desk.go(PauseCommand("", "grace")) == []
    assert desk.go(ResumeCommand("", "grace")) == [DrainMessage("b", later)]


def test_a_job_that_states_what_it_has_is_granted_nothing_else() -> None:
    """Another node would stand idle: the job does not read the answer to such a claim."""
    desk = shared()
    desk.go(PauseCommand("", "grace"))
    accuse(desk)
    has: dict[str, Any] = {"gpus": 2, "running": True, **STILL_THERE, "stays": ()}
    desk.claim("b", 1, seq=2, is_current=True, **has)
    assert [place.node for place in desk.record("b").places] == ["n2"]
    desk.claim("b", 1, seq=3, **has)
    assert desk.granted()["b"] != ["n2"], "it wants to be launched, and not on a suspect"


def test_a_job_that_got_a_drained_node_later_is_asked_again() -> None:
    """The request has reached it between the grant and the moment when it took the node over."""
    desk = Desk()
    desk.claim("a", 2, running=True, keep=("n1",), avoid=("n2",))
    assert desk.granted() == {"a": ["n1", "n3"]}
    drain = QuarantineCommand("n3", "swap its PSU", "carol", timedelta(hours=1))
    first = desk.go(drain)
    has: dict[str, Any] = {"running": True, "keep": ("n1", "n3"), "is_current": True}
    assert desk.claim("a", 2, seq=2, **has) == first
    assert isinstance(first[0], DrainMessage)
    assert [place.node for place in desk.record("a").places] == ["n1", "n3"]
    assert desk.claim("a", 2, seq=3, stays=("n3",), **has) == [], "it knows now"


def test_waiting_jobs_hear_a_drain_and_departed_or_ended_do_not() -> None:
    desk = share(Desk(*nodes("n1", "n2", "n3")), "a", "b", "c", "d")
    accuse(desk)
    assert [order.job for order in desk.of(DrainMessage)] == ["b", "c", "d"]
    desk.claim("b", 3, seq=2, gpus=2, running=True, avoid=("n2",))
    desk.claim("c", 1, seq=2, gpus=2, running=True, avoid=("n2",))
    desk.go(EndedJobs((("d", 1),)))
    assert (desk.record("b").is_waiting, desk.record("c").is_waiting) == (True, False)
    desk.go(ReleaseCommand("n2", "", ""))
    assert [order.job for order in desk.of(DrainMessage)] == ["b"]


# --- a no


def test_a_job_keeps_its_node_over_relaunches_until_it_must_go() -> None:
    desk = shared()
    accuse(desk)
    desk.claim("b", 2, seq=2, gpus=2, running=True, keep=("n2",), holds=("n2",))
    # who says nothing gets another one in its place
    assert desk.granted()["b"] == ["n1", "n3"]
    desk = shared()
    accuse(desk)
    desk.claim(
        "b",
        2,
        seq=2,
        gpus=2,
        running=True,
        keep=("n2",),
        holds=(Place("n2", gpus=(2, 3)),),
        stays=("n2",),
    )
    assert desk.granted()["b"] == ["n2", "n1"]
    desk.now = TWO_HOURS
    desk.claim(
        "b", 2, seq=3, gpus=2, running=True, keep=("n2", "n1"), holds=("n2", "n1"), stays=("n2",)
    )
    assert desk.granted()["b"] == ["n1", "n3"]


def test_a_no_to_a_person_s_drain_holds_as_long() -> None:
    desk = shared()
    desk.go(DRAIN)
    desk.claim("b", 2, seq=2, gpus=2, running=True, keep=("n2",), holds=("n2",), stays=("n2",))
    assert "n2" in desk.granted()["b"]
    desk.now = PSU.until
    desk.claim("a", 1, seq=2, gpus=2, running=True, keep=("n2",), holds=("n2",), stays=("n2",))
    assert desk.granted() == {"a": ["n1"]}


# --- people


def test_a_withdrawn_drain_is_withdrawn_from_each_asked_job(snapshot: SnapshotAssertion) -> None:
    desk = shared()
    assert desk.go(DRAIN) == [DrainMessage("a", PSU), DrainMessage("b", PSU)]
    assert desk.go(ReleaseCommand("n2", "", "carol")) == [
        DrainMessage("a", over(desk)),
        DrainMessage("b", over(desk)),
    ]
    assert over(desk).reason == snapshot(name="released")
    assert desk.go() == []
    desk.go(DRAIN)
    assert desk.go(QuarantineCommand("n2", "later", "carol")) == [
        DrainMessage(job, over(desk)) for job in ("a", "b")
    ]
    assert over(desk).reason == snapshot(name="quarantined")


def test_a_drain_takes_the_place_of_what_the_fleet_asked() -> None:
    desk = shared()
    accuse(desk)
    assert desk.go(DRAIN) == [DrainMessage("b", PSU)]
    assert (desk.node("n2").repair_drain, desk.node("n2").drain) == (None, PSU)


# --- a fleet that restarts


def test_a_restarted_fleet_repeats_a_request_once_it_remembers() -> None:
    before = shared()
    accuse(before)
    desk = Desk(begun=False)
    desk.now += timedelta(minutes=30)
    desk.learn(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(("a", "b")))
    for job, more in (("a", {"suspects": (suspect("n2", isolate=True),)}), ("b", STILL_THERE)):
        desk.learn(ClaimEvent(Claim(job, 1, 9, 1, 2, running=True, **more)))
    desk.go()
    assert desk.node("n2").status is NodeStatus.SUSPECT and desk.of(DrainMessage) == []
    desk.go(export_state(before.state))
    assert desk.of(DrainMessage) == [DrainMessage("b", XID)]
    # b goes on there meanwhile
    assert [order.job for order in desk.of(GrantMessage)] == ["a"] and desk.record(
        "b"
    ).granted is not None


@pytest.mark.parametrize("drained", [True, False])
def test_a_request_is_remembered_where_no_job_has_spoken_since(drained: bool) -> None:
    before = shared()
    before.go(DRAIN) if drained else accuse(before)
    desk = Desk(begun=False)
    desk.learn(
        FleetFileContent("act", desk.specs, desk.limits),
        RunningJobs(("b",)),
        export_state(before.state),
    )
    assert (desk.node("n2").repair_drain, desk.node("n2").drain) == (
        (None, PSU) if drained else (XID, None)
    )
    desk.claim("b", 1, seq=9, gpus=2, running=True, keep=("n2",))
    # Job a has not spoken yet, and holds what it held: a drain is for everyone there.
    asked = (
        [DrainMessage("a", PSU), DrainMessage("b", PSU)] if drained else [DrainMessage("b", XID)]
    )
    assert desk.of(DrainMessage) == asked


def test_a_release_since_is_the_last_word() -> None:
    before = shared()
    accuse(before)
    desk = Desk(begun=False)
    desk.learn(
        FleetFileContent("act", desk.specs, desk.limits),
        RunningJobs(()),
        ReleaseCommand("n2", "", "grace"),
        export_state(before.state),
    )
    assert (desk.node("n2").status, desk.node("n2").repair_drain) == (NodeStatus.IN_SERVICE, None)


# --- a repair that a job has ordered of a node that it shares


def asks(desk: Desk, job: str = "a", seq: int = 1, **more: Any) -> list[tuple[bool, str]]:
    request = PermitRequest(
        "repair/gpus/n2", "r1", seq, "n2", "reset", XID_119, desk.now, job=job, **more
    )
    desk.go(began("n2", by=f"job {job}"), PermitRequestEvent(request))
    return [(tell.permit.allowed, tell.permit.reason) for tell in desk.of(PermitMessage)]


def test_a_refused_repair_of_a_shared_node_asks_others_to_leave(
    snapshot: SnapshotAssertion,
) -> None:
    desk = shared()
    ((allowed, reason),) = asks(desk)
    assert not allowed and reason == snapshot
    wish = replace(XID, reason=XID_119)
    # not the job that knows it by the refusal
    assert desk.of(DrainMessage) == [DrainMessage("b", wish)]
    node = desk.node("n2")
    assert (node.status, node.by, node.reason, node.repair_acts) == (
        NodeStatus.SUSPECT,
        "job a",
        XID_119,
        False,
    )
    desk.now += timedelta(minutes=10)
    # What was said stands.
    assert asks(desk, seq=2) == [(False, reason)]
    desk.go(ended("n2", "refused", job="a", verdict=Verdict.UNKNOWN))
    assert desk.node("n2").status is NodeStatus.SUSPECT
    desk.claim("b", 1, seq=2, gpus=2, running=True, avoid=("n2",))
    # the other one is there still
    assert desk.of(RepairRequest) == []
    desk.claim("a", 1, seq=2, gpus=2, running=True, avoid=("n2",))
    assert desk.of(RepairRequest) == [RepairRequest("n2", XID_119)]


def test_a_job_that_has_the_node_for_itself_may_repair_it(snapshot: SnapshotAssertion) -> None:
    desk = share(Desk(), "a")
    ((allowed, reason),) = asks(desk)
    assert allowed and reason == snapshot
    assert desk.node("n2").status is NodeStatus.IN_SERVICE


def test_a_refused_repair_of_a_foreign_node_asks_none_to_leave(snapshot: SnapshotAssertion) -> None:
    desk = shared()
    ((allowed, reason),) = asks(desk, job="z")
    assert (allowed, desk.of(DrainMessage)) == (False, [])
    assert reason == snapshot
    assert desk.node("n2").status is NodeStatus.IN_SERVICE


def test_ranks_of_a_job_that_has_ended_are_waited_for() -> None:
    desk = shared()
    desk.busy = {"reclaim/b/1"}
    desk.go(EndedJobs((("b", 1),)))
    assert asks(desk) == []
    assert desk.go(ReclaimResult("b", 1, ("n2",))) != []
    assert [tell.permit.allowed for tell in desk.of(PermitMessage)] == [True]


def test_paused_repairs_answer_nothing_and_no_job_leaves() -> None:
    desk = shared()
    desk.go(PauseCommand("", "grace"))
    assert (asks(desk), desk.of(DrainMessage)) == ([], [])


def test_a_node_that_a_person_has_quarantined_is_that_person_s(snapshot: SnapshotAssertion) -> None:
    desk = share(Desk(), "a", "b", "c")
    desk.go(QuarantineCommand("n2", "mine", "carol"))
    ((allowed, reason),) = asks(desk)
    assert not allowed and reason == snapshot(name="quarantined")
    assert (desk.node("n2").by, desk.of(DrainMessage)) == ("carol", [])
    desk.go(DRAIN)
    ((allowed, reason),) = asks(desk, seq=2)
    assert not allowed and reason == snapshot(name="drained")


def test_a_suspect_already_asked_about_is_not_asked_for_again(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2", "n3", gpus=16))
    for number, job in enumerate("abcdefg"):
        desk.claim(
            job,
            1,
            gpus=2,
            running=True,
            keep=("n2",),
            holds=(Place("n2", gpus=(2 * number, 2 * number + 1)),),
        )
    accuse(desk, "g")
    assert [order.job for order in desk.of(DrainMessage)] == list("abcdef")
    ((allowed, reason),) = asks(desk)
    assert not allowed and reason == snapshot
    assert desk.of(DrainMessage) == []


def test_a_restarted_fleet_hears_first_who_shares_the_node() -> None:
    desk = Desk(begun=False)
    desk.learn(
        FleetFileContent("act", desk.specs, desk.limits), RunningJobs(("a", "b")), PreviousRun()
    )
    desk.claim("a", 1, gpus=2, running=True, keep=("n2",))
    assert asks(desk) == []
    assert desk.of(ClaimReminder) == []
    desk.claim("b", 1, gpus=2, running=True, keep=("n2",))
    assert [tell.permit.allowed for tell in desk.of(PermitMessage)] == [False]
