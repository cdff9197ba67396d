"""Who gets which nodes, who waits and why, who gives way.

Each test is a fleet of a few nodes and the claims of a few jobs.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.pool.events import (
    ClaimEvent,
    FleetFileContent,
    GrantMessage,
    ProbeOrder,
    QuarantineCommand,
    ReleaseCommand,
    RepairStart,
)
from relaunch.pool.messages import Claim, Grant, Place
from relaunch.pool.state import LiveGeneration, NodeStatus
from relaunch.spec.fleet import FleetNode
from tests.recovery.fleet_builders import T0, Desk, look, nodes, suspect

SPARE = (*nodes("n1", "n2"), *nodes("n8", "n9", spare=True))


def ages(seconds: int) -> dict[str, Any]:
    return {"since": T0 + timedelta(seconds=seconds)}


# --- all or none, and in order


def test_a_job_gets_all_its_nodes_in_file_order() -> None:
    desk = Desk()
    desk.claim("a", 2)
    grant = desk.grants()["a"]
    assert grant == Grant(
        1, 1, "granted", (Place("n1", "10.0.0.1"), Place("n2", "10.0.0.2")), "n1, n2 joined"
    )
    assert desk.record("a").granted == grant.places


def test_a_job_short_of_nodes_gets_none_and_hears_who_has_them(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 3)
    desk.claim("b", 2)
    assert desk.granted() == {}
    (waiting,) = desk.grants("waiting").values()
    assert waiting == Grant(1, 1, "waiting", reason=waiting.reason)
    assert waiting.reason == snapshot


def test_grant_order_is_replacements_priority_age_then_name() -> None:
    desk = Desk(*nodes("n1"))
    desk.claim("first", 1)
    for job, more in {
        "d": ages(1),
        "c": ages(0),
        "b": ages(0),
        "high": {**ages(9), "priority": 5},
        "runs": {**ages(9), "running": True},
    }.items():
        desk.learn(ClaimEvent(Claim(job, 1, 1, 1, **more)))
    served = []
    last = "first"
    for _ in range(5):
        desk.claim(last, 0, seq=2)
        (last,) = desk.granted()
        served.append(last)
    assert served == ["runs", "high", "b", "c", "d"]


def test_a_claim_without_a_start_time_counts_from_its_arrival() -> None:
    desk = Desk(*nodes("n1"))
    desk.claim("first", 1)
    desk.claim("b", 1, since=None)
    desk.now += timedelta(seconds=1)
    desk.claim("a", 1, since=None)
    desk.claim("first", 0, seq=2)
    assert desk.granted() == {"b": ["n1"]}


def test_a_large_claim_is_not_passed_by_for_ever(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("small", 1)
    desk.claim("large", 4, **ages(1))
    desk.claim("late", 1, **ages(2))
    assert desk.granted() == {}
    assert desk.grants("waiting")["late"].reason == snapshot
    desk.claim("small", 0, seq=2)
    assert desk.granted() == {"large": ["n1", "n2", "n3", "n4"]}


def test_a_claim_only_a_person_could_serve_reserves_nothing(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.go(QuarantineCommand("n4", "a fan", "grace"))
    desk.claim("large", 4)
    assert desk.grants("waiting")["large"].reason == snapshot
    desk.claim("small", 1)
    assert desk.granted() == {"small": ["n1"]}


def test_a_claim_that_a_repair_could_serve_keeps_its_nodes() -> None:
    desk = Desk()
    desk.claim("a", 1, keep=("n1",), holds=("n1",), suspects=(suspect("n4", isolate=True),))
    assert desk.node("n4").status is NodeStatus.REPAIRING
    desk.claim("large", 3, avoid=("n1",))
    desk.claim("small", 1, **ages(1))
    assert desk.granted() == {}
    desk.claim("large", 0, seq=2)
    assert desk.granted() == {"small": ["n2"]}


def test_a_node_that_has_been_silent_for_long_is_not_waited_for() -> None:
    desk = Desk()
    desk.silent["n4"] = "no route to host"
    desk.wait(minutes=1)
    desk.claim("large", 4)
    desk.claim("small", 1, **ages(1))
    assert desk.granted() == {}
    for _ in range(11):
        desk.wait(minutes=1)
    assert desk.record("small").granted is not None


def test_who_avoids_a_node_leaves_it_to_those_who_come_later(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.claim("large", 3, avoid=("n4",), **ages(1))
    desk.claim("late", 1, **ages(2))
    assert desk.granted() == {"late": ["n4"]}
    desk.claim("later", 1, **ages(3))
    assert desk.grants("waiting")["later"].reason == snapshot(name="later")
    desk.wait(seconds=6)
    assert desk.record("large").wait_reason == snapshot(name="large")


def test_a_claim_reserves_no_node_that_it_could_not_use() -> None:
    desk = Desk(*nodes("n1", "n2"), *nodes("n3", gpus=4))
    desk.claim("x", 1, gpus=8)
    desk.claim("large", 2, gpus=8)
    desk.claim("small", 1, gpus=4)
    assert desk.granted() == {"small": ["n3"]}
    desk.claim("next", 1, gpus=4)
    assert desk.granted() == {}, "n2 is free and reserved"


def test_jobs_of_one_shape_reserve_only_what_the_first_reserves(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk()
    desk.claim("a", 3)
    desk.claim("b", 2, **ages(1))
    desk.claim("c", 2, **ages(2))
    assert desk.grants("waiting")["c"].reason == snapshot


# --- shares of nodes


def test_jobs_share_a_node_by_its_lowest_free_gpus_and_pack_it() -> None:
    desk = Desk()
    desk.claim("a", 1, gpus=2)
    assert desk.grants()["a"].places == (Place("n1", "10.0.0.1", (0, 1)),)
    desk.claim("whole", 1, gpus=8)
    assert desk.grants()["whole"].places == (Place("n2", "10.0.0.2", ()),)
    desk.claim("b", 2, gpus=4)
    assert desk.grants()["b"].places == (
        Place("n1", "10.0.0.1", (2, 3, 4, 5)),
        Place("n3", "10.0.0.3", (0, 1, 2, 3)),
    )
    desk.claim("a", 0, seq=2)
    desk.claim("c", 1, gpus=3)
    assert desk.grants()["c"].places == (Place("n1", "10.0.0.1", (0, 1, 6)),)
    desk.claim("d", 1)
    assert desk.granted() == {"d": ["n4"]}


def test_a_job_with_a_share_leaves_the_rest_of_the_node_free() -> None:
    desk = Desk(*nodes("n1"))
    desk.claim("a", 1, gpus=4)
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.wait(minutes=1)
    desk.claim("b", 1, gpus=4)
    assert desk.grants()["b"].places == (Place("n1", "10.0.0.1", (4, 5, 6, 7)),)


def test_any_number_of_jobs_share_nodes_without_gpus_and_spread() -> None:
    desk = Desk(*nodes("n1", "n2", gpus=0))
    desk.living["n1"] = (LiveGeneration("x", 1, 1),)
    granted = []
    for job in ("a", "b", "c"):
        desk.claim(job, 1)
        granted += desk.granted()[job]
    assert granted == ["n1", "n2", "n1"]


def test_whole_nodes_are_not_granted_where_a_job_has_a_share(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.claim("a", 1, gpus=1)
    desk.claim("b", 2)
    assert desk.grants("waiting")["b"].reason == snapshot


# --- what is kept


def test_a_job_goes_on_with_the_nodes_and_shares_it_keeps(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2, gpus=4)
    places = desk.grants()["a"].places
    desk.now += timedelta(hours=1)
    keeps: dict[str, Any] = {"gpus": 4, "running": True, "keep": ("n2", "n1"), "holds": places}
    assert desk.claim("a", 2, seq=2, **keeps) == [], "it knows that"
    assert desk.record("a").granted == places[::-1]
    told = desk.claim("a", 2, seq=2, **keeps)
    reason = desk.grants()["a"].reason
    assert told == [GrantMessage("a", Grant(1, 2, "granted", places[::-1], reason))]
    assert reason == snapshot
    assert desk.go() == []


def test_a_grant_names_where_ranks_of_old_submissions_may_live(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk()
    desk.living["n3"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    desk.claim("a", 1, submission=2, running=True, keep=("n1",))
    grant = desk.grants()["a"]
    places = (Place("n1", "10.0.0.1"),)
    assert grant == Grant(2, 1, "granted", places, grant.reason, ("n3",))
    assert grant.reason == snapshot


def test_own_ranks_on_a_silent_node_are_of_no_earlier_submission() -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.living["n1"] = desk.living["n2"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    desk.silent["n2"] = "connection refused"
    desk.wait(minutes=1)
    desk.claim("a", 2, seq=2, running=True, keep=("n1",))
    grant = desk.grants()["a"]
    assert ([place.node for place in grant.places], grant.holding) == (["n1", "n3"], ())
    desk.claim("a", 1, submission=2)
    assert desk.grants()["a"].holding == ("n1", "n2", "n3")


def test_a_replacement_comes_after_what_is_kept() -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.claim("a", 2, seq=2, running=True, keep=("n2",), holds=("n2",), avoid=("n1",))
    assert desk.granted() == {"a": ["n2", "n3"]}
    assert desk.grants()["a"].reason == "n3 joined"
    desk.claim("b", 1)
    assert desk.granted() == {"b": ["n1"]}


@pytest.mark.parametrize(
    ("standing", "drain", "stays"),
    [
        (NodeStatus.QUARANTINED, None, True),
        (NodeStatus.QUARANTINED, timedelta(minutes=5), False),
        (NodeStatus.SUSPECT, None, False),
    ],
)
def test_a_kept_node_survives_quarantine_not_suspicion_or_drain(
    standing: NodeStatus, drain: timedelta | None, stays: bool
) -> None:
    desk = Desk()
    desk.claim("a", 1)
    more: dict[str, Any] = (
        {"suspects": (suspect("n1", isolate=True),)} if standing is NodeStatus.SUSPECT else {}
    )
    if standing is NodeStatus.QUARANTINED:
        desk.go(QuarantineCommand("n1", "a fan", "grace", drain))
    desk.claim("a", 1, seq=2, running=True, keep=("n1",), **more)
    assert desk.granted() == ({} if stays else {"a": ["n2"]})
    assert [place.node for place in desk.record("a").granted or ()] == ["n1" if stays else "n2"]


def test_unheld_avoided_or_unknown_nodes_are_not_kept() -> None:
    desk = Desk()
    desk.claim("b", 1)
    desk.claim(
        "a", 3, running=True, keep=("n1", "n3", "n9", "n4", "n4"), holds=("n3", "n4"), avoid=("n3",)
    )
    assert desk.granted() == {}
    desk.claim("b", 0, seq=2)
    assert desk.granted() == {"a": ["n4", "n1", "n2"]}


def test_a_job_gets_what_it_holds_before_what_is_free() -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.claim("a", 1, seq=2, holds=("n2",))
    assert desk.granted() == {"a": ["n2"]}
    desk.claim("b", 1)
    assert desk.granted() == {"b": ["n1"]}


def test_old_and_new_parts_of_one_node_both_belong_to_the_job() -> None:
    desk = Desk(*nodes("n1"))
    desk.claim("a", 1, gpus=2, holds=(Place("n1", gpus=(4, 5)),))
    assert desk.grants()["a"].places == (Place("n1", "10.0.0.1", (0, 1)),)
    assert desk.record("a").places == (Place("n1", "10.0.0.1", (0, 1, 4, 5)),)
    desk.claim("b", 1, gpus=4)
    assert desk.grants()["b"].places == (Place("n1", "10.0.0.1", (2, 3, 6, 7)),)


def test_what_it_holds_but_is_no_use_to_it_is_not_what_it_gets() -> None:
    desk = Desk(*nodes("n1", "n2", gpus=4), *nodes("n3"))
    desk.claim("a", 1, gpus=8, holds=("n1",))
    assert desk.granted() == {"a": ["n3"]}
    desk.claim("b", 1, gpus=4, holds=(Place("n2", gpus=(0,)),))
    assert desk.granted() == {"b": ["n2"]}


def test_what_it_holds_is_not_enough_where_others_have_the_rest() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.claim("a", 1, gpus=4)
    desk.claim("b", 1, gpus=8, holds=(Place("n1", gpus=(4,)),))
    assert desk.granted() == {"b": ["n2"]}


def test_a_job_cannot_keep_what_was_granted_before_it_claimed_it() -> None:
    desk = Desk(jobs=("late",))
    desk.claim("a", 1)
    desk.claim("b", 1, gpus=4)
    desk.wait(seconds=30)
    assert (desk.record("a").granted, desk.record("b").granted) == (
        (Place("n1", "10.0.0.1"),),
        (Place("n2", "10.0.0.2", (0, 1, 2, 3)),),
    )
    desk.claim(
        "late",
        2,
        gpus=4,
        running=True,
        keep=("n1", "n2"),
        holds=(Place("n1", gpus=(0, 1, 2, 3)), Place("n2", gpus=(4, 5, 6, 7))),
    )
    assert desk.granted() == {"late": ["n2", "n3"]}
    assert desk.claim("a", 1, seq=2, running=True, keep=("n1",)) == []
    assert desk.record("a").granted == (Place("n1", "10.0.0.1"),)


# --- spares


def test_spares_are_for_jobs_that_have_run(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*SPARE)
    desk.claim("a", 2)
    desk.claim("b", 1)
    assert desk.grants("waiting")["b"].reason == snapshot(name="all-spare")
    desk.claim("a", 2, seq=2, running=True, keep=("n1",), holds=("n1",), avoid=("n2",))
    assert desk.granted()["a"] == ["n1", "n8"]
    assert desk.granted()["b"] == ["n2"]
    desk.claim("c", 1)
    assert desk.grants("waiting")["c"].reason == snapshot(name="one-spare")


def test_a_quarantined_spare_is_for_no_job() -> None:
    desk = Desk(*SPARE)
    desk.go(QuarantineCommand("n8", "dust", "grace"))
    desk.claim("a", 2)
    desk.claim("b", 1)
    assert "1 spare is for jobs that have run" in desk.grants("waiting")["b"].reason


def test_a_job_too_large_for_the_fleet_without_spares_gets_them() -> None:
    desk = Desk(*SPARE)
    desk.claim("a", 3)
    assert desk.granted() == {"a": ["n1", "n2", "n8"]}


def test_a_spare_is_spent_only_once_no_other_node_answers() -> None:
    desk = Desk(*SPARE)
    desk.claim("a", 1, holds=("n1",), keep=("n1",), running=True)
    desk.now += timedelta(seconds=20)
    desk.look(("n8", "n9"))
    desk.silent["n2"] = "it is off"
    desk.learn(
        ClaimEvent(Claim("a", 1, 2, 2, running=True, keep=("n1",), holds=(Place("n1"),), since=T0))
    )
    assert desk.settle() == [look("n2")]
    desk.look(("n2",))
    desk.settle()
    assert desk.granted() == {"a": ["n1", "n8"]}


# --- looks


def test_nodes_not_probed_lately_are_probed_before_a_grant() -> None:
    desk = Desk()
    desk.now += timedelta(seconds=20)
    desk.learn(ClaimEvent(Claim("a", 1, 1, 2, since=T0)))
    assert desk.settle() == [look("n1", "n2", "n3", "n4")]
    desk.busy = {"probe"}
    assert desk.settle() == []
    desk.look()
    desk.busy = set()
    desk.settle()
    assert desk.granted() == {"a": ["n1", "n2"]}


def test_a_job_about_to_get_nodes_hears_nothing_for_a_moment(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.now += timedelta(seconds=20)
    desk.learn(ClaimEvent(Claim("a", 1, 1, 2, since=T0)))
    desk.settle()
    desk.busy = {"probe"}
    assert desk.wakes_in() == 2
    desk.now += timedelta(seconds=2)
    assert desk.settle() == []
    assert desk.wakes_in() == 3
    desk.now += timedelta(seconds=3)
    desk.settle()
    assert desk.grants("waiting")["a"].reason == snapshot


def test_a_silent_node_that_jobs_want_is_probed_ever_less_often(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.silent["n2"] = "connection refused"
    desk.wait(minutes=1)
    desk.claim("a", 2)
    assert desk.grants("waiting")["a"].reason == snapshot
    looks = []
    end = desk.now + timedelta(seconds=55)
    while desk.now < end:
        desk.now += timedelta(seconds=desk.wakes_in())
        desk.settle()
        for order in desk.of(ProbeOrder):
            looks.append(round((desk.now - T0).total_seconds()) - 60)
            desk.look(order.nodes)
    assert looks[:4] == [2, 4, 6, 8]
    assert max(later - earlier for earlier, later in pairwise(looks)) > 3
    del desk.silent["n2"]
    desk.wait(seconds=10)
    assert desk.granted() == {"a": ["n1", "n2"]}


def test_a_waiting_job_does_not_hear_that_answers_grow_old(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.go(QuarantineCommand("n2", "a fan", "grace"))
    told = [tell.grant.reason for tell in desk.claim("a", 2) if isinstance(tell, GrantMessage)]
    for _ in range(60):
        told += [
            tell.grant.reason for tell in desk.wait(seconds=5) if isinstance(tell, GrantMessage)
        ]
    assert told == snapshot


def test_a_node_held_by_an_examination_is_granted_when_free(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1"))
    desk.held["n1"] = "an examination holds it"
    desk.wait(minutes=1)
    desk.claim("a", 1)
    assert desk.grants("waiting")["a"].reason == snapshot
    del desk.held["n1"]
    desk.wait(seconds=2)
    assert desk.granted() == {"a": ["n1"]}


def test_a_node_under_repair_is_not_given(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.go(RepairStart("n1", "repair/gpus/n1", "r1", "grace", "to be sure"))
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n2"]}
    desk.claim("b", 1)
    assert desk.grants("waiting")["b"].reason == snapshot


def test_a_node_on_which_ranks_of_another_job_live_is_not_given(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.claim("b", 1)
    desk.claim("b", 0, seq=2)
    desk.living["n1"] = (LiveGeneration("b", 1, 1),)
    desk.look()
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n2"]}
    desk.claim("c", 1)
    assert desk.grants("waiting")["c"].reason == snapshot
    desk.living.clear()
    desk.wait(seconds=2)
    assert desk.granted() == {"c": ["n1"]}


def test_a_node_that_just_came_is_looked_at_first() -> None:
    desk = Desk(*nodes("n1"))
    desk.claim("a", 1)
    desk.claim("b", 1)
    desk.learn(FleetFileContent("act", nodes("n1", "n2"), desk.limits))
    assert desk.settle() == [look("n2")]
    desk.look(("n2",))
    desk.settle()
    assert desk.granted() == {"b": ["n2"]}


# --- no wait can help


def test_more_than_the_fleet_has_is_hopeless_and_waits_no_more(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1"), *nodes("n2", gpus=4))
    desk.claim("a", 3)
    assert desk.grants("hopeless")["a"].reason == snapshot(name="too-few-nodes")
    assert not desk.record("a").is_waiting
    desk.claim("b", 2, gpus=8)
    assert desk.grants("hopeless")["b"].reason == snapshot(name="too-few-gpus")
    desk.claim("c", 2, avoid=("n1", "n2"))
    assert desk.grants("waiting")["c"].reason == snapshot(name="avoided")


def test_a_fleet_whose_file_names_nothing_is_hopeless(snapshot: SnapshotAssertion) -> None:
    desk = Desk(begun=False)
    desk.learn(FleetFileContent("ask", (), desk.limits))
    desk.claim("a", 1)
    assert desk.grants("hopeless")["a"].reason == snapshot


def test_a_node_gone_from_the_file_counts_for_the_job_keeping_it() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.claim("a", 2)
    desk.go(FleetFileContent("act", nodes("n1"), desk.limits))
    desk.claim("a", 2, seq=2, running=True, keep=("n2",))
    assert desk.granted() == {"a": ["n2", "n1"]}


# --- what those hear who wait


def test_a_job_hears_only_news_and_at_most_every_five_seconds(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.claim("b", 1)
    desk.claim("w", 4)
    assert desk.grants("waiting")["w"].reason == snapshot(name="two-jobs")
    assert desk.go() == []
    desk.now += timedelta(seconds=1)
    desk.claim("b", 0, seq=2)
    assert desk.grants("waiting") == {}
    assert desk.wakes_in() == 4
    desk.wait(seconds=4)
    assert desk.grants("waiting")["w"].reason == snapshot(name="one-job")
    desk.claim("w", 4, seq=2)
    assert desk.grants("waiting")["w"].seq == 2


def test_names_and_reasons_that_are_many_are_counted(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"))
    for job in "abcde":
        desk.claim(job, 1)
    for name in ("n6", "n7", "n8", "n9"):
        desk.go(QuarantineCommand(name, "dust", "grace"))
    desk.claim("w", 1)
    assert desk.grants("waiting")["w"].reason == snapshot(name="jobs")
    desk.claim("w", 0, seq=2)
    desk.go(ReleaseCommand("n9", "clean", "grace"))
    desk.claim("a", 2, seq=2, running=True, keep=("n1",), avoid=("n2", "n3", "n4", "n5"))
    assert desk.granted()["a"] == ["n1", "n9"]
    desk.claim("a", 3, seq=3, running=True, keep=("n1", "n9"), avoid=("n2", "n3", "n4", "n5"))
    assert desk.grants("waiting")["a"].reason == snapshot(name="avoided")


def test_only_nodes_that_a_job_could_use_are_reasons(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2"), *nodes("n3", gpus=4))
    for name in ("n2", "n3"):
        desk.go(QuarantineCommand(name, "dust", "grace"))
    desk.claim("a", 2, gpus=8)
    assert desk.grants("waiting")["a"].reason == snapshot


def test_a_large_grant_names_a_few_nodes(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2", "n3", "n4", "n5", "n6"))
    desk.claim("a", 6)
    assert desk.grants()["a"].reason == snapshot


# --- who gives way


def stuck(**more: Any) -> Desk:
    """Two jobs of four nodes, each with two, that both lost others."""
    desk = Desk(**more)
    for job, kept in {"a": ("n1", "n2"), "b": ("n3", "n4")}.items():
        desk.learn(
            ClaimEvent(
                Claim(
                    job,
                    1,
                    1,
                    4,
                    running=True,
                    keep=kept,
                    holds=tuple(Place(one) for one in kept),
                    since=T0,
                )
            )
        )
    desk.go()
    return desk


def test_of_two_deadlocked_jobs_the_last_gives_way_once(snapshot: SnapshotAssertion) -> None:
    desk = stuck()
    assert desk.wakes_in() == 60
    desk.wait(minutes=9, seconds=50)
    assert desk.wakes_in() == 10
    assert desk.grants("yield") == {}
    desk.wait(seconds=10)
    grant = desk.grants("yield")["b"]
    assert desk.grants("yield") == {"b": Grant(1, 1, "yield", reason=grant.reason)}
    assert grant.reason == snapshot
    assert desk.wait(seconds=10) == []
    desk.claim("b", 4, seq=2, holds=("n3", "n4"))
    assert desk.granted() == {}
    desk.claim("b", 4, seq=3)
    assert desk.granted() == {"a": ["n1", "n2", "n3", "n4"]}
    assert desk.record("b").is_waiting


def test_a_job_that_ignores_a_call_to_yield_gets_no_second_one() -> None:
    desk = stuck()
    desk.wait(minutes=10)
    assert "b" in desk.grants("yield")
    for _ in range(30):
        assert desk.wait(minutes=1) == []


def test_no_job_gives_way_where_it_helps_no_other() -> None:
    desk = Desk()
    desk.learn(
        ClaimEvent(
            Claim(
                "a",
                1,
                1,
                4,
                running=True,
                keep=("n1",),
                holds=(Place("n1"),),
                avoid=("n3",),
                since=T0,
            )
        )
    )
    desk.learn(
        ClaimEvent(
            Claim(
                "b",
                1,
                1,
                4,
                running=True,
                keep=("n3", "n4"),
                holds=(Place("n3"), Place("n4"), Place("n7")),
                since=T0,
            )
        )
    )
    desk.go()
    desk.wait(minutes=11)
    assert desk.grants("yield") == {}
    assert desk.record("a").is_waiting and desk.record("b").is_waiting


def test_a_grant_to_a_running_job_restarts_the_wait() -> None:
    desk = stuck()
    desk.now += timedelta(minutes=9)
    desk.learn(
        ClaimEvent(Claim("c", 1, 1, 1, priority=1, running=True, holds=(Place("n5"),), since=T0))
    )
    desk.go(
        FleetFileContent(
            "act", (*desk.specs, FleetNode(name="n5", address="5", gpus=8)), desk.limits
        )
    )
    assert desk.granted() == {"c": ["n5"]}
    desk.wait(minutes=9, seconds=30)
    assert desk.grants("yield") == {}
    assert desk.wakes_in() == 30
    desk.wait(seconds=30)
    assert "b" in desk.grants("yield")
