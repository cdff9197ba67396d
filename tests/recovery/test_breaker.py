"""When nothing more is repaired or granted, who may act meanwhile, and how a person ends it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.access.orders import REPAIR_PROOF_LIFETIME
from relaunch.evidence.findings import Verdict
from relaunch.pool.events import (
    FleetFileContent,
    GrantMessage,
    PauseCommand,
    PermitMessage,
    PermitRequestEvent,
    QuarantineCommand,
    RepairRequest,
    ResumeCommand,
)
from relaunch.pool.messages import Permit, Place
from relaunch.pool.state import NodeStatus
from relaunch.spec.access import Access
from tests.recovery.fleet_builders import T0, Desk, began, ended, nodes, permit, suspect

EIGHT = nodes("n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8")
RESUME = ResumeCommand("looked at it", "grace")
ACCESS = Access.model_validate({"people": {"grace": {"role": "admin"}}})


def fail(desk: Desk, *names: str, seq: int = 1) -> None:
    desk.claim(
        "a",
        1,
        seq=seq,
        holds=("n1",),
        suspects=tuple(suspect(name, seq, isolate=True) for name in names),
    )


def allowed(desk: Desk) -> dict[str, bool]:
    return {
        tell.workflow.rpartition("/")[2]: tell.permit.allowed for tell in desk.of(PermitMessage)
    }


# --- nodes that are out


def test_one_node_too_many_stops_all_repairs_and_grants(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*EIGHT, nodes_out="25%")
    fail(desk, "n2", "n3")
    assert not desk.state.breaker.is_open
    desk.now += timedelta(minutes=3)
    fail(desk, "n4", seq=2)
    assert desk.state.breaker.reason == snapshot(name="breaker")
    assert desk.state.breaker.since == desk.now
    desk.claim("b", 1)
    assert desk.grants("waiting")["b"].reason == snapshot(name="grant")
    assert desk.go(ended("n2")) == []
    assert desk.node("n4").status is NodeStatus.SUSPECT
    assert desk.claim("c", 1, running=True, keep=("n8",)) == []
    # it has that already
    assert desk.record("c").granted == (Place("n8", "10.0.0.8"),)


def test_a_closed_breaker_opens_again_only_for_one_more_node(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*EIGHT, nodes_out=1, repairs_at_once=1)
    fail(desk, "n2", "n3", "n4", "n5", "n6")
    assert desk.state.breaker.reason == snapshot(name="opened")
    desk.claim("b", 1)
    assert desk.go(RESUME) != []
    assert desk.of(RepairRequest) == [RepairRequest("n2", "failed on n2")]
    assert desk.granted()["b"] == ["n7"]
    fail(desk, "n8", seq=2)
    assert desk.state.breaker.reason == snapshot(name="opened-again")


def test_what_a_person_knew_of_is_forgotten_once_it_is_over() -> None:
    desk = Desk(*EIGHT, nodes_out=1)
    fail(desk, "n2", "n3")
    desk.go(RESUME)
    assert desk.state.out_when_resumed == 2
    desk.go(ended("n2"), ended("n3"))
    assert desk.state.out_when_resumed == 0
    fail(desk, "n4", "n5", seq=2)
    assert desk.state.breaker.is_open


def test_nodes_people_quarantined_or_unlisted_do_not_count() -> None:
    desk = Desk(*EIGHT, nodes_out=1)
    desk.claim("a", 8)
    desk.go(*(QuarantineCommand(name, "dust", "grace") for name in ("n1", "n2", "n3")))
    desk.go(FleetFileContent("act", EIGHT[:4], desk.limits))
    assert len(desk.state.nodes) == 8
    assert not desk.state.breaker.is_open


def test_what_a_repair_could_not_mend_counts(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*EIGHT, nodes_out=1)
    fail(desk, "n2")
    desk.go(ended("n2", "refused"))
    fail(desk, "n3", seq=2)
    assert desk.state.breaker.reason == snapshot


# --- pause


def test_a_pause_stops_repairs_and_permits_and_nothing_else(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.go(PauseCommand("new firmware", "grace"))
    assert (desk.state.breaker.paused, desk.state.breaker.paused_since) == (
        "grace: new firmware",
        T0,
    )
    fail(desk, "n4")
    desk.claim("b", 1)
    assert desk.granted() == {"b": ["n2"]}
    assert desk.of(RepairRequest) == []
    assert desk.go(permit("n3")) == []
    desk.go(ResumeCommand("", ""))
    assert desk.of(RepairRequest) == [RepairRequest("n4", "failed on n4")]
    assert not desk.state.breaker.paused
    assert [notice.split(": ", 1)[1] for notice in desk.state.notices] == snapshot


@pytest.mark.parametrize("ends_both", [False, True], ids=["now", "as release 0.1.0"])
def test_closing_the_breaker_keeps_a_colleagues_pause(
    ends_both: bool, snapshot: SnapshotAssertion
) -> None:
    desk = Desk(nodes_out=1)
    desk.go(PauseCommand("cooling maintenance until noon", "carol"))
    fail(desk, "n3", "n4")
    assert desk.state.breaker.is_open
    desk.now += timedelta(hours=1)
    before = len(desk.state.notices)
    desk.go(replace(RESUME, ends_both=ends_both))
    assert not desk.state.breaker.is_open
    assert bool(desk.of(RepairRequest)) is ends_both
    assert desk.state.breaker.paused_since == (None if ends_both else T0)
    assert ends_both or "carol" in desk.state.breaker.paused
    desk.go(RESUME)
    assert not desk.state.breaker.paused
    assert ends_both or desk.of(RepairRequest)
    assert desk.state.notices[before:] == snapshot


@pytest.mark.parametrize("open_it", [True, False])
def test_requests_from_before_a_resume_have_to_ask_again(
    open_it: bool, snapshot: SnapshotAssertion
) -> None:
    desk = Desk(*EIGHT, nodes_out=1)
    if open_it:
        fail(desk, "n3", "n4")
    else:
        desk.go(PauseCommand("", ""))
    assert desk.go(permit("n2")) == []
    desk.now += timedelta(minutes=5)
    desk.go(RESUME)
    (told,) = desk.of(PermitMessage)
    assert told == PermitMessage(
        "repair/gpus/n2", Permit("r1", 1, False, told.permit.reason, stale=True, at=desk.now)
    )
    assert told.permit.reason == snapshot
    assert allowed(desk) == {"n2": False}
    desk.go(permit("n2", seq=2))
    assert allowed(desk) == {"n2": True}


def asked_while_paused(desk: Desk) -> None:
    """The fleet repairs n4, which asked while repairs were paused; a person has resumed them."""
    fail(desk, "n4")
    desk.go(began("n4"), PauseCommand("", "grace"), permit("n4"))
    desk.go(RESUME)
    assert allowed(desk) == {"n4": False}


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.UNHEALTHY])
def test_the_outcome_of_a_repair_to_ask_again_is_reexamined(verdict: Verdict) -> None:
    desk = Desk()
    asked_while_paused(desk)
    desk.now += timedelta(seconds=1)
    assert desk.go(ended("n4", "refused", verdict=verdict)) == [RepairRequest("n4", "failed on n4")]
    assert (desk.node("n4").status, desk.node("n4").by) == (NodeStatus.REPAIRING, "job a")


def test_only_the_last_answer_decides_if_a_repair_must_ask_again() -> None:
    desk = Desk()
    asked_while_paused(desk)
    desk.go(permit("n4", seq=2))
    assert allowed(desk) == {"n4": True}
    desk.go(ended("n4", "refused"))
    assert desk.node("n4").status is NodeStatus.QUARANTINED


def test_a_repair_that_must_ask_again_but_proved_health_is_done() -> None:
    desk = Desk()
    asked_while_paused(desk)
    desk.go(ended("n4"))
    assert desk.node("n4").status is NodeStatus.IN_SERVICE


def test_a_manual_quarantine_outlasts_a_repair_that_asks_again() -> None:
    desk = Desk()
    asked_while_paused(desk)
    desk.go(QuarantineCommand("n4", "a fan", "grace"), ended("n4", "refused"))
    assert (desk.node("n4").status, desk.node("n4").by) == (NodeStatus.QUARANTINED, "grace")


# --- permits


def test_a_permitted_repair_that_asks_again_is_permitted_again(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.go(began("n2"))
    told = desk.go(permit("n2"))
    (message,) = desk.of(PermitMessage)
    assert told == [message]
    given = Permit("r1", 1, True, message.permit.reason, at=desk.now)
    assert message == PermitMessage("repair/gpus/n2", given)
    assert message.permit.reason == snapshot
    assert desk.node("n2").repair_acts
    assert desk.go() == []
    assert desk.go(permit("n2")) == told
    assert desk.go(permit("n2", seq=2)) != []
    assert allowed(desk) == {"n2": True}


def test_repairs_over_the_limit_wait_until_another_has_ended() -> None:
    desk = Desk(*EIGHT, repairs_at_once=1)
    for name in ("n2", "n3", "n4"):
        desk.learn(began(name), permit(name))
    desk.go()
    assert allowed(desk) == {"n2": True}
    assert desk.go() == []
    desk.go(ended("n3"))
    assert desk.orders == []
    desk.go(ended("n2"))
    assert allowed(desk) == {"n4": True}


def test_a_request_by_an_unannounced_repair_begins_it() -> None:
    desk = Desk()
    desk.go(permit("n2"))
    assert desk.node("n2").repair == "repair/gpus/n2/r1"


def test_a_request_replaces_older_ones_of_its_repair_not_newer() -> None:
    desk = Desk()
    desk.go(PauseCommand("", ""))
    desk.go(
        permit("n2", seq=1),
        permit("n2", seq=2),
        permit("n2", seq=2),
        permit("n2", seq=1),
        permit("n3", seq=1),
    )
    assert [(one.node, one.seq) for one in desk.state.requests] == [("n2", 2), ("n3", 1)]


@pytest.mark.parametrize("renews", [True, False])
def test_a_reboot_that_was_not_ordered_does_not_count(renews: bool) -> None:
    """Each request after the first is for an order that no worker took."""
    desk = Desk(*EIGHT, reboots_per_hour=2)
    desk.go(began("n2"))
    given: datetime | None = None
    for seq in range(1, 5):
        desk.now += timedelta(minutes=1)
        asked = permit("n2", "reboot", seq).request
        desk.go(PermitRequestEvent(replace(asked, renews=given if renews else None)))
        given = next((told.permit.at for told in desk.of(PermitMessage)), None)
    assert desk.state.breaker.is_open is not renews
    assert len(desk.state.reboots) == (1 if renews else 2)


def test_a_repair_of_a_node_that_is_not_in_the_fleet_may_not_act(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk()
    desk.go(permit("n9"))
    (told,) = desk.of(PermitMessage)
    refused = Permit("r1", 1, False, told.permit.reason, at=desk.now)
    assert told == PermitMessage("repair/gpus/n9", refused)
    assert told.permit.reason == snapshot


def test_one_reboot_too_many_within_an_hour_opens_the_breaker(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*EIGHT, reboots_per_hour=2)
    desk.go(permit("n2", "reboot"))
    desk.go(ended("n2"))
    desk.wait(minutes=30)
    desk.go(permit("n3", "reboot"))
    desk.go(ended("n3"), permit("n4", "reset"))
    assert allowed(desk) == {"n4": True}
    desk.go(permit("n4", "reboot", seq=2), permit("n5", "reset"))
    assert allowed(desk) == {}
    assert desk.state.breaker.reason == snapshot
    desk.go(RESUME)
    assert allowed(desk) == {"n4": False, "n5": False}
    assert desk.state.reboots == ()
    desk.go(permit("n4", "reboot", seq=3))
    assert allowed(desk) == {"n4": True}


def test_reboots_of_more_than_an_hour_ago_do_not_count() -> None:
    desk = Desk(*EIGHT, reboots_per_hour=1)
    desk.go(permit("n2", "reboot"))
    desk.go(ended("n2"))
    assert len(desk.state.reboots) == 1
    desk.wait(hours=1)
    assert not desk.state.reboots
    desk.go(permit("n3", "reboot"))
    assert allowed(desk) == {"n3": True}


def test_the_newest_answers_are_kept() -> None:
    desk = Desk()
    for seq in range(1, 80):
        desk.go(permit("n2", seq=seq))
    assert [one.permit.seq for one in desk.state.permits] == list(range(16, 80))


def test_grants_come_with_permits_in_one_settling() -> None:
    desk = Desk()
    desk.learn(permit("n2"))
    assert {type(order) for order in desk.claim("a", 1)} == {PermitMessage, GrantMessage}


# --- signatures


def test_one_signature_orders_one_repair() -> None:
    desk = Desk(*EIGHT)
    desk.go(FleetFileContent("act", EIGHT, desk.limits, access=ACCESS))
    first = signed("n2", "r1")
    desk.go(first)
    assert allowed(desk) == {"n2": True}
    (used,) = desk.state.used_proofs
    assert (used.nonce, used.run, used.until) == ("n-1", "r1", desk.now + REPAIR_PROOF_LIFETIME)
    desk.go(signed("n2", "r1", seq=2))
    assert allowed(desk) == {"n2": True}, "its next step"
    assert desk.state.used_proofs == (used,)
    desk.go(signed("n3", "r2"))
    (told,) = desk.of(PermitMessage)
    assert not told.permit.allowed
    assert told.permit.reason == (
        "the signature of this order was used for another repair; order it again"
    )
    desk.now += REPAIR_PROOF_LIFETIME
    desk.go(signed("n4", "r3"))
    assert allowed(desk) == {"n4": True}
    assert [one.run for one in desk.state.used_proofs] == ["r3"], "the older one has expired"


def test_a_fleet_without_rules_notes_no_signature() -> None:
    desk = Desk(*EIGHT)
    desk.go(signed("n2", "r1"), signed("n3", "r2"))
    assert allowed(desk) == {"n2": True, "n3": True}
    assert desk.state.used_proofs == ()


def signed(node: str, run: str, seq: int = 1) -> PermitRequestEvent:
    """A request of a repair that a person has ordered, whose signature is always the same one."""
    request = permit(node, seq=seq, run=run)
    return replace(request, request=replace(request.request, nonce="n-1"))
