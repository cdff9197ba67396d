"""A fleet hands the times of a job's launches to the next submission of that job.

That submission judges silent nodes by them.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from syrupy.assertion import SnapshotAssertion

from relaunch.generation import LaunchedGeneration
from relaunch.job.claim import build_claim
from relaunch.pool.events import (
    DeathDeclaration,
    EndedJobs,
    FleetFileContent,
    ReclaimOrder,
    ReclaimResult,
    RunningJobs,
)
from relaunch.pool.restore import export_state
from tests.recovery.builders import new_job, running
from tests.recovery.fleet_builders import Desk

PLANNED = build_claim(new_job(), 1).launched
RUNNING = build_claim(running(), 1).launched[:1]


def gangs(launched: tuple[LaunchedGeneration, ...]) -> list[tuple[str, ...]]:
    return [one.nodes for one in launched]


def test_a_new_submission_hears_old_launches_on_granted_nodes() -> None:
    desk = Desk()
    desk.claim("a", 2, launched=PLANNED)
    desk.claim("a", 1, submission=2)
    grant = desk.grants()["a"]
    assert grant.holding == ("n1", "n2")
    assert grant.launched == (replace(PLANNED[0], nodes=("n1", "n2")),)
    desk.claim("a", 1, seq=2, submission=2, avoid=("n4",))
    # it claimed again before it had received its grant
    assert desk.grants()["a"].launched == grant.launched
    desk.claim("a", 1, seq=3, submission=2, holds=("n1", "n2", "n3"))
    assert desk.grants()["a"].launched == ()


def test_joint_launches_are_known_when_some_nodes_are_free_again() -> None:
    desk = Desk()
    longer = replace(RUNNING[0], nodes=("n2", "n3"), fence_after=timedelta(hours=1))
    desk.claim("a", 2, launched=(longer, *PLANNED), holds=("n2", "n3"))
    desk.go(EndedJobs((("a", 1),)))
    desk.go(ReclaimResult("a", 1, ("n1", "n2")))
    desk.claim("a", 1, submission=2)
    grant = desk.grants()["a"]
    assert grant.holding == ("n3",)
    # n2 was proven stopped, and is proof for n3
    assert gangs(grant.launched)[0] == ("n2", "n3")


def test_a_third_submission_hears_of_a_first_the_second_missed() -> None:
    desk = Desk()
    desk.claim("a", 2, launched=PLANNED)
    desk.claim("a", 4, submission=2, launched=PLANNED)
    desk.claim("a", 0, seq=2, submission=2)
    assert gangs(desk.record("a").inherited_launched) == [("n1", "n2")]
    desk.claim("a", 1, submission=3)
    assert desk.grants()["a"].launched[0] == replace(PLANNED[0], nodes=("n1", "n2"))


# --- nodes that move while ranks may live there


def _moved(desk: Desk, *names: str, to: str = "10.9.9.9") -> FleetFileContent:
    specs = tuple(
        one.model_copy(update={"address": f"{to}{one.name}"}) if one.name in names else one
        for one in desk.specs
    )
    return FleetFileContent("act", specs, desk.limits)


def test_a_new_submission_hears_which_nodes_moved_before_it() -> None:
    desk = Desk()
    desk.claim("a", 2, launched=PLANNED)
    desk.go(_moved(desk, "n2", "n3"))
    desk.claim("a", 2, submission=2)
    grant = desk.grants()["a"]
    assert (grant.holding, grant.moved) == (("n1", "n2"), ("n2",)), "no job had n3"
    desk.claim("a", 2, seq=2, submission=2, keep=("n1", "n2"), holds=("n1", "n2"))
    # it may be terminated before it has proven anything
    assert desk.record("a").old_logins == {"n2": desk.specs[1].address}
    desk.claim("a", 1, seq=3, submission=2, keep=("n1",), holds=("n1",))
    assert desk.record("a").old_logins == {}


def test_a_node_that_moved_and_is_back_where_it_was_proves_again() -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.go(_moved(desk, "n2"), _moved(desk, "n2", to="10.8.8.8"))
    assert desk.record("a").old_logins == {"n2": desk.specs[1].address}
    desk.go(FleetFileContent("act", desk.specs, desk.limits))
    assert desk.record("a").old_logins == {}


def test_a_moved_nodes_answer_frees_it_of_no_ended_job(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.go(_moved(desk, "n2"))
    orders = desk.go(EndedJobs((("a", 1),)))
    assert [order for order in orders if isinstance(order, ReclaimOrder)] == [
        ReclaimOrder("a", 1, ("n1",))
    ]
    # One that was under way when the file changed has asked the wrong machine.
    desk.go(ReclaimResult("a", 1, ("n1", "n2")))
    assert [place.node for place in desk.record("a").places] == ["n2"]
    assert [order for order in desk.wait(minutes=5) if isinstance(order, ReclaimOrder)] == []
    desk.go(DeathDeclaration("n2", "the machine was scrapped", "grace"))
    assert desk.state.claims == ()
    assert desk.state.notices[-1] == snapshot(name="known")
    desk.go(DeathDeclaration("n9", "", ""))
    assert desk.state.notices[-1] == snapshot(name="unknown")


def test_a_person_vouches_for_a_node_an_old_submission_held() -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.go(_moved(desk, "n2"))
    desk.claim("a", 4, submission=2, avoid=("n4",))
    assert set(desk.record("a").old_logins) == {"n2"}
    desk.go(DeathDeclaration("n2", "scrapped", "grace"))
    assert [place.node for place in desk.record("a").inherited] == ["n1"]
    assert desk.record("a").old_logins == {}
    before = desk.record("a")
    desk.go(DeathDeclaration("n3", "this job was never there", "grace"))
    assert desk.record("a") == before


def test_a_fleet_restarted_with_a_new_file_knows_held_addresses() -> None:
    desk = Desk()
    desk.claim("a", 2)
    known = export_state(desk.state)
    later = Desk(begun=False)
    later.go(_moved(later, "n2"), RunningJobs(()), known)
    assert later.record("a").old_logins == {"n2": desk.specs[1].address}
