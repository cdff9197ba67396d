"""What a fleet that begins anew takes over from the run before it, and what it asks others again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from recovery.causes import Cause
from recovery.evidence import Verdict
from recovery.fleet import learn
from recovery.fleet.facts import Applied, Fact, JobsFound, PauseAsked, QuarantineAsked, ReleaseAsked, Remembered, ResumeAsked
from recovery.fleet.memory import memory
from recovery.fleet.messages import Place
from recovery.fleet.model import Breaker, NodeRecord, Standing
from recovery.fleet.orders import StartRepair, TellRepair
from tests.recovery.fleet_builders import T0, Desk, began, ended, nodes, permit, suspect

GRACE = QuarantineAsked("n1", "a fan", "grace", timedelta(minutes=30))


def anew(*facts: Fact, **limits: Any) -> Desk:
    """A fleet that was started anew, looked at its nodes and heard these facts, ten minutes later."""
    desk = Desk(begun=False, **limits)
    desk.now += timedelta(minutes=10)
    desk.go(Applied("act", desk.specs, desk.limits), JobsFound(()), *facts)
    return desk


def before(*facts: Fact, **limits: Any) -> Remembered:
    """What one knew that has been told these."""
    desk = Desk(**limits)
    desk.go(*facts)
    return memory(desk.state)


def standings(desk: Desk) -> dict[str, Standing]:
    return {node.name: node.standing for node in desk.state.nodes if node.standing is not Standing.IN_SERVICE}


def test_what_is_out_of_service_stays_out_with_its_reason_and_a_drain_is_asked_for_again() -> None:
    desk = anew(before(GRACE))
    node = desk.node("n1")
    assert (node.standing, node.because, node.by, node.since) == (Standing.QUARANTINED, "a fan", "grace", T0)
    assert node.drain is not None
    assert node.drain.until == T0 + timedelta(minutes=30)
    assert desk.state.notices == ("2026-03-01T12:10+00:00 remembers 1 node out of service from the run before",)
    desk.claim("a", 4)
    assert desk.granted() == {}


def test_a_node_that_was_under_repair_is_a_suspect_again_and_one_with_faults_keeps_them() -> None:
    desk = Desk()
    hang = replace(suspect("n3", 1, Cause.HANG), at=T0)
    desk.claim("a", 0, suspects=(suspect("n2", isolate=True), hang))
    desk.go(began("n2"), began("n4", by="grace"), ended("n4", by="grace"))
    assert desk.node("n2").standing is Standing.REPAIRING
    known = memory(desk.state)
    assert [(node.name, node.standing, node.repair) for node in known.nodes] == [
        ("n2", Standing.SUSPECT, ""),
        ("n3", Standing.IN_SERVICE, ""),
        ("n4", Standing.IN_SERVICE, ""),
    ]
    later = anew(known)
    assert later.of(StartRepair) == [StartRepair("n2", "it failed on n2")]
    assert later.node("n2").by == "job a"
    assert (later.node("n4").verdict, later.node("n4").verdict_at) == (Verdict.HEALTHY, T0)
    later.claim("a", 1, submission=2, suspects=(suspect("n3", 2, Cause.HANG),))
    later.claim("a", 1, submission=1, suspects=(hang,))
    assert [(mark.submission, mark.generation) for mark in later.node("n3").marks] == [(1, 1), (2, 2)]


def test_claims_and_looks_are_not_remembered_and_neither_is_what_is_as_it_is_in_the_file() -> None:
    desk = Desk()
    desk.claim("a", 2)
    assert memory(desk.state) == Remembered()
    assert anew(memory(desk.state)).state.notices == ()


def test_a_node_that_had_left_the_file_is_not_remembered_for_that() -> None:
    desk = Desk()
    desk.claim("a", 4)
    desk.go(Applied("act", nodes("n2"), desk.limits))
    assert desk.node("n1").standing is Standing.QUARANTINED
    assert standings(anew(memory(desk.state))) == {}
    assert standings(anew(before(QuarantineAsked("n9", "a fan", "grace")))) == {}


def test_nothing_is_given_repaired_or_permitted_before_it_is_known_what_the_run_before_knew() -> None:
    desk = Desk(begun=False)
    desk.go(Applied("act", desk.specs, desk.limits), JobsFound(()))
    desk.claim("blames", 0, suspects=(suspect("n4", isolate=True),))
    desk.go(permit("n3"))
    desk.claim("a", 1)
    assert desk.orders == []
    assert desk.wakes_in() == 5, "then it hears of it"
    desk.wait(seconds=5)
    assert desk.grants("waiting")["a"].because == "fleet gpus was started anew and asks the run before it which nodes are out of service"
    desk.go(before(QuarantineAsked("n1", "a fan", "grace")))
    assert desk.granted() == {"a": ["n2"]}
    assert [type(order) for order in (*desk.of(TellRepair), *desk.of(StartRepair))] == [TellRepair, StartRepair]


def test_who_keeps_what_it_has_does_not_wait_for_it() -> None:
    desk = Desk(begun=False)
    desk.go(Applied("act", desk.specs, desk.limits), JobsFound(()))
    assert desk.claim("a", 1, running=True, keep=("n1",)) == []
    assert desk.record("a").granted == (Place("n1", "10.0.0.1"),)


def test_after_fifteen_seconds_it_is_given_up_and_what_comes_later_changes_nothing() -> None:
    desk = Desk(begun=False)
    desk.go(Applied("act", desk.specs, desk.limits), JobsFound(()))
    assert desk.wakes_in() == 15
    desk.claim("a", 1)
    desk.wait(seconds=15)
    assert desk.granted() == {"a": ["n1"]}
    forgotten = "nobody could say what the run before knew: quarantines, pauses and faults of before are forgotten"
    assert desk.state.notices == (f"2026-03-01T12:00+00:00 {forgotten}",)
    desk.go(before(GRACE))
    assert standings(desk) == {}


def test_it_is_not_asked_for_before_the_fleet_has_nodes() -> None:
    desk = Desk(begun=False)
    desk.go(Applied("observe", (), desk.limits), before(GRACE))
    assert (desk.state.remembers_until, desk.state.remembered) == (None, False)
    desk.wait(hours=1)
    desk.go(Applied("act", desk.specs, desk.limits), before(GRACE))
    assert standings(desk) == {"n1": Standing.QUARANTINED}


@pytest.mark.parametrize(
    ("since", "standing", "by"),
    [
        (ReleaseAsked("n1", "new fan", "ada"), Standing.IN_SERVICE, ""),
        (QuarantineAsked("n1", "loud", "ada"), Standing.QUARANTINED, "ada"),
    ],
)
def test_what_a_person_has_said_of_a_node_since_counts(since: Fact, standing: Standing, by: str) -> None:
    desk = anew(since, before(GRACE))
    assert (desk.node("n1").standing, desk.node("n1").by) == (standing, by)


def test_a_job_that_suspects_a_node_since_does_not_lift_what_a_person_has_said_before() -> None:
    desk = anew()
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True),))
    assert desk.node("n1").standing is Standing.SUSPECT
    desk.go(before(GRACE))
    node = desk.node("n1")
    assert (node.standing, node.because, node.by) == (Standing.QUARANTINED, "a fan", "grace")
    assert [mark.job for mark in node.marks] == ["a"]  # what the job knows against it is kept
    assert desk.of(StartRepair) == []


def test_what_an_examination_has_found_since_counts() -> None:
    bad = ended("n1", "refused", "r0", job="a", verdict=Verdict.UNHEALTHY)
    desk = anew(began("n1"), ended("n1", job="a"), before(began("n1", "r0"), bad))
    assert desk.node("n1").verdict is Verdict.HEALTHY


def test_a_pause_and_an_open_breaker_are_remembered() -> None:
    desk = Desk(nodes_out=1)
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True), suspect("n2", isolate=True)))
    desk.go(PauseAsked("new firmware", "grace"))
    known = memory(desk.state)
    later = anew(known, nodes_out=1)
    assert later.state.breaker == desk.state.breaker
    said = "remembers 2 nodes out of service and an open breaker and a pause of repairs from the run before"
    assert later.state.notices == (f"2026-03-01T12:10+00:00 {said}",)
    again = anew(PauseAsked("", "ada"), known, nodes_out=1)
    assert (again.state.breaker.paused, again.state.breaker.is_open) == ("ada: no reason given", True)
    mine = anew(known, nodes_out=1).state.breaker
    opened = Desk(nodes_out=1, begun=False)
    opened.state = replace(opened.state, breaker=Breaker("too many", T0))
    opened.learn(Applied("act", opened.specs, opened.limits), known)
    assert (opened.state.breaker.because, opened.state.breaker.paused) == ("too many", mine.paused)


def test_a_person_who_has_resumed_repairs_since_is_not_overruled() -> None:
    desk = anew(ResumeAsked("", "grace"), before(PauseAsked("", "ada"), GRACE))
    assert not desk.state.breaker.paused
    assert desk.state.notices[-1].endswith("remembers 1 node out of service from the run before")


def test_nodes_that_were_out_while_the_breaker_was_closed_do_not_open_it() -> None:
    desk = Desk(nodes_out=1)
    desk.claim("a", 0, suspects=(suspect("n1", isolate=True), suspect("n2", isolate=True)))
    desk.go(ResumeAsked("it is the cooling", "grace"))
    later = anew(memory(desk.state), nodes_out=1)
    assert not later.state.breaker.is_open
    later.claim("b", 0, suspects=(suspect("n3", isolate=True),))
    assert later.state.breaker.is_open


def test_a_run_that_ended_before_it_had_learned_what_there_was_before_it_hides_nothing_of_that() -> None:
    first = Desk()
    first.go(GRACE, PauseAsked("", "grace"))
    short = Desk(begun=False)
    short.go(Applied("act", short.specs, short.limits), QuarantineAsked("n2", "loud", "ada"))
    desk = anew(memory(short.state, Desk(begun=False).state, first.state))
    assert {node.name: node.by for node in desk.state.nodes if node.by} == {"n1": "grace", "n2": "ada"}
    assert desk.state.breaker.paused
    told = Desk()
    assert memory(told.state, first.state) == Remembered()


def test_the_memory_counts_once() -> None:
    desk = anew(before(GRACE))
    once = desk.state
    assert learn(once, before(QuarantineAsked("n2", "a fan", "grace")), desk.now) == once
    assert memory(once).nodes[0] == NodeRecord(desk.specs[0], Standing.QUARANTINED, "a fan", "grace", T0, drain=once.nodes[0].drain)


def test_what_is_lost_of_the_run_before_is_said_to_people() -> None:
    state = anew(Remembered(lost="its workers are gone")).state
    assert state.remembered and len(state.notices) == 1
    assert state.notices[0].endswith("is not to be had, and has to be said again: its workers are gone")
