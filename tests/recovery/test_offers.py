"""Claims of jobs that may have fewer nodes: grants, later offers, and who comes first."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.pool.events import (
    ClaimEvent,
    EndedJobs,
    FleetFileContent,
    OfferMessage,
    ProbeOrder,
    QuarantineCommand,
    ReleaseCommand,
)
from relaunch.pool.grants import OFFER_INTERVAL, OFFER_TIMEOUT, PROBE_WAIT
from relaunch.pool.messages import Claim, Place
from relaunch.pool.scheduler import schedule
from relaunch.pool.state import LiveGeneration
from relaunch.spec.fleet import FleetNode
from tests.recovery.fleet_builders import T0, Desk, nodes, suspect

FOUR = nodes("n1", "n2", "n3", "n4")


def offers(desk: Desk) -> dict[str, list[str]]:
    return {tell.job: list(tell.offer.nodes) for tell in desk.of(OfferMessage)}


def goes_on(
    desk: Desk,
    job: str,
    keep: tuple[str, ...],
    seq: int,
    *,
    most: int = 4,
    after: float = 60,
    **more: Any,
) -> None:
    """The job runs on these, and would take more some time from now."""
    at = desk.now + timedelta(seconds=after)
    desk.claim(
        job,
        len(keep),
        seq=seq,
        keep=keep,
        most=most,
        had=len(keep),
        more_at=at,
        running=True,
        **more,
    )


def asks(
    desk: Desk,
    job: str,
    keep: tuple[str, ...],
    seq: int,
    *,
    fewest: int = 2,
    most: int = 4,
    **more: Any,
) -> None:
    desk.claim(
        job, fewest, seq=seq, keep=keep, most=most, **{"had": len(keep), "running": True, **more}
    )


def short(*specs: FleetNode, has: tuple[str, ...] = ("n1", "n2"), **limits: Any) -> Desk:
    """Job a runs on a part of the nodes, and would take all of them from a minute on."""
    desk = Desk(*(specs or FOUR), **limits)
    desk.claim("a", len(has), most=len(has))
    goes_on(desk, "a", has, 2)
    return desk


# --- grants between fewest and most


def test_s3_3_a_job_gets_its_most_if_free_and_never_too_few(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2, most=3)
    assert desk.granted() == {"a": ["n1", "n2", "n3"]}
    assert desk.grants()["a"].fewer == ""
    desk.claim("b", 1, most=3)
    assert desk.granted() == {"b": ["n4"]}
    assert desk.grants()["b"].fewer == snapshot


def test_s3_3_all_of_its_fewest_or_none(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 3)
    desk.claim("b", 2, most=4)
    assert desk.granted() == {}
    assert desk.grants("waiting")["b"].reason == snapshot


def test_a_job_that_wants_too_much_begins_with_what_there_is(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.claim("a", 2, most=4)
    assert desk.granted() == {"a": ["n1", "n2"]}
    assert desk.grants()["a"].fewer == snapshot


def test_more_than_its_fewest_keeps_no_earlier_job_waiting() -> None:
    desk = Desk()
    desk.claim("x", 1)
    desk.claim("large", 4, since=T0)
    desk.claim("a", 1, most=3, since=T0 + timedelta(seconds=1))
    # all is kept for the large one
    assert desk.granted() == {}
    desk.claim("large", 3, seq=2, since=T0)
    assert desk.granted() == {"large": ["n2", "n3", "n4"]}


def test_a_job_that_has_its_fewest_keeps_nothing_from_later_jobs() -> None:
    desk = Desk()
    desk.go(QuarantineCommand("n4", "a fan", "grace"))
    desk.claim("a", 1, most=4)
    goes_on(desk, "a", ("n1",), 2)
    desk.claim("b", 2)
    assert desk.granted() == {"b": ["n2", "n3"]}


def test_s3_3_a_job_goes_on_without_a_lost_node_and_says_so(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2, most=4)
    desk.silent["n2"] = "no route to host"
    asks(desk, "a", ("n1", "n3", "n4"), 2, avoid=("n2",), holds=("n1", "n2", "n3", "n4"), had=4)
    assert desk.granted() == {"a": ["n1", "n3", "n4"]}
    assert desk.grants()["a"].fewer == snapshot


def test_a_spare_replaces_a_lost_node_and_makes_no_job_larger(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2", "n3"), *nodes("n8", "n9", spare=True))
    desk.claim("a", 2, most=5)
    assert desk.granted() == {"a": ["n1", "n2", "n3"]}
    assert desk.grants()["a"].fewer == snapshot
    asks(desk, "a", ("n1", "n3"), 2, most=5, avoid=("n2",), holds=("n1", "n3"), had=3)
    assert desk.granted() == {"a": ["n1", "n3", "n8"]}
    goes_on(desk, "a", ("n1", "n3", "n8"), 3, most=5)
    desk.wait(seconds=61)
    # and not the other spare
    assert offers(desk) == {"a": ["n2"]}


def test_a_replacement_precedes_waiting_jobs_but_growth_does_not() -> None:
    desk = Desk(*nodes("n1", "n2", "n3", "n4", "n5"))
    desk.claim("a", 1, most=2)
    goes_on(desk, "a", ("n1", "n2"), 2, most=2)
    desk.claim("b", 4)
    assert desk.grants("waiting") != {}
    asks(desk, "a", ("n1",), 3, fewest=1, most=4, had=2, avoid=("n2",), holds=("n1",))
    # one for the one that it lost
    assert desk.granted() == {"a": ["n1", "n3"]}


def test_a_job_alone_gets_what_is_free_at_its_next_launch() -> None:
    desk = short()
    asks(desk, "a", ("n1",), 3, had=2, avoid=("n2",), holds=("n1",))
    assert desk.granted() == {"a": ["n1", "n3", "n4"]}


@pytest.mark.parametrize("why", ["the breaker", "a restarted fleet"])
def test_s3_3_a_job_that_can_run_waits_for_no_breaker_or_restore(
    why: str,
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk(*FOUR, nodes_out=1, begun=why == "the breaker")
    if why == "the breaker":
        desk.claim("x", 0, suspects=(suspect("n3", isolate=True), suspect("n4", isolate=True)))
        assert desk.state.breaker.is_open
    else:
        desk = Desk(*FOUR, jobs=("other",))
        assert desk.state.awaited_jobs == ("other",)
    asks(desk, "a", ("n1", "n2"), 1, had=3)
    assert desk.granted() == {"a": ["n1", "n2"]}
    assert desk.grants()["a"].fewer == snapshot
    asks(desk, "a", ("n1",), 2, had=3)
    # with one it cannot run
    assert desk.granted() == {}


def test_nodes_that_may_answer_soon_are_looked_at_before_a_start() -> None:
    desk = Desk()
    desk.now += timedelta(seconds=30)
    desk.look(["n1", "n2"])
    desk.learn(ClaimEvent(Claim("a", 1, 1, 2, since=T0, most=4)))
    desk.settle()
    assert [set(look.nodes) for look in desk.of(ProbeOrder)] == [
        {"n3", "n4"}
    ] and desk.granted() == {}
    desk.silent["n4"] = "no route to host"
    desk.look(["n3", "n4"])
    desk.settle()
    assert desk.granted() == {"a": ["n1", "n2", "n3"]}


def test_but_not_for_long() -> None:
    desk = Desk()
    desk.now += timedelta(seconds=30)
    desk.look(["n1", "n2"])
    desk.busy = {"probe"}
    desk.learn(ClaimEvent(Claim("a", 1, 1, 2, since=T0, most=4)))
    desk.settle()
    assert desk.granted() == {}
    while desk.wakes_in() < 10 and desk.now - T0 < timedelta(seconds=30) + PROBE_WAIT:
        desk.now += timedelta(seconds=desk.wakes_in())
        desk.look(["n1", "n2"])
        desk.settle()
    assert desk.granted() == {"a": ["n1", "n2"]}
    assert desk.now == T0 + timedelta(seconds=30) + PROBE_WAIT


def test_a_job_that_goes_on_with_all_that_it_has_gets_no_message() -> None:
    desk = short()
    assert desk.orders == [] and not desk.record("a").is_waiting


# --- offers


def test_s3_3_what_is_free_is_offered_once_the_job_has_run_long() -> None:
    desk = short()
    assert offers(desk) == {} and desk.wakes_in() == 60
    desk.wait(seconds=59)
    assert offers(desk) == {}
    assert desk.wakes_in() == 1
    desk.wait(seconds=1)
    assert offers(desk) == {"a": ["n3", "n4"]}
    (tell,) = desk.of(OfferMessage)
    assert (tell.offer.submission, tell.offer.seq, tell.offer.until) == (
        1,
        2,
        desk.now + OFFER_TIMEOUT,
    )
    assert desk.wait(seconds=1) == []


def test_a_node_is_looked_at_before_it_is_offered() -> None:
    desk = short()
    desk.silent["n3"] = "no route to host"
    desk.now += timedelta(seconds=61)
    desk.settle()
    assert offers(desk) == {} and {"n3", "n4"} <= set(desk.of(ProbeOrder)[0].nodes)
    desk.look()
    desk.settle()
    assert offers(desk) == {"a": ["n4"]}


def test_no_more_is_offered_than_is_wanted_and_first_comes_first() -> None:
    desk = Desk()
    for job, node, most in (("a", "n1", 2), ("b", "n2", 3)):
        desk.claim(job, 1, most=1)
        goes_on(desk, job, (node,), 2, most=most)
    desk.wait(seconds=61)
    assert offers(desk) == {"a": ["n3"], "b": ["n4"]}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"most": 2}, id="it has all that it would take"),
        pytest.param({"avoid": ("n3", "n4")}, id="it avoids those that are free"),
        pytest.param({"gpus": 16}, id="they have not the GPUs"),
    ],
)
def test_what_it_cannot_use_is_not_offered(more: dict[str, Any]) -> None:
    desk = Desk()
    desk.claim("a", 2)
    goes_on(desk, "a", ("n1", "n2"), 2, **more)
    desk.wait(seconds=61)
    assert offers(desk) == {}


def test_nothing_is_offered_while_a_job_waits() -> None:
    desk = short()
    desk.claim("b", 3)
    desk.wait(seconds=61)
    assert offers(desk) == {}
    desk.claim("b", 0, seq=2)
    assert offers(desk) == {"a": ["n3", "n4"]}


def test_nothing_is_offered_while_the_breaker_is_open() -> None:
    desk = short(*FOUR, nodes_out=1, reboots_per_hour=1)
    desk.claim("x", 0, suspects=(suspect("n3", isolate=True), suspect("n4", isolate=True)))
    assert desk.state.breaker.is_open
    desk.wait(seconds=61)
    assert offers(desk) == {}


def test_nothing_is_offered_to_a_job_that_has_to_leave_a_node() -> None:
    desk = short()
    desk.go(QuarantineCommand("n2", "a fan", "grace", timedelta(minutes=30)))
    desk.wait(seconds=61)
    assert offers(desk) == {}


def test_s3_3_a_node_that_is_back_is_offered(snapshot: SnapshotAssertion) -> None:
    desk = Desk(*nodes("n1", "n2", "n3"))
    desk.go(QuarantineCommand("n3", "a fan", "grace"))
    desk.claim("a", 2, most=3)
    assert desk.grants()["a"].fewer == snapshot
    goes_on(desk, "a", ("n1", "n2"), 2, most=3)
    desk.wait(seconds=600)
    assert offers(desk) == {}
    desk.go(ReleaseCommand("n3", "", "grace"))
    assert offers(desk) == {"a": ["n3"]}


def test_leftover_ranks_of_the_same_job_are_no_hindrance() -> None:
    desk = short(*nodes("n1", "n2", "n3"))
    desk.living["n3"] = (LiveGeneration("a", 1, 1),)
    desk.wait(seconds=61)
    assert offers(desk) == {"a": ["n3"]}


def test_what_is_offered_is_given_to_no_other_job_and_it_says_so(
    snapshot: SnapshotAssertion,
) -> None:
    desk = short()
    desk.wait(seconds=61)
    desk.claim("b", 1)
    assert desk.granted() == {}
    reason = desk.grants("waiting")["b"].reason
    assert reason == snapshot
    assert desk.wakes_in() <= OFFER_TIMEOUT.total_seconds()
    desk.now = desk.state.offers[0].until
    desk.go()
    assert desk.granted() == {"b": ["n3"]}


def test_an_offer_that_is_not_taken_is_made_again_later() -> None:
    desk = short()
    desk.wait(seconds=61)
    assert offers(desk) != {}
    end = desk.state.offers[0].until
    while desk.now < end + OFFER_INTERVAL:
        desk.now += timedelta(seconds=desk.wakes_in())
        desk.go()
        if desk.now < end + OFFER_INTERVAL:
            assert offers(desk) == {}
    assert desk.now == end + OFFER_INTERVAL and offers(desk) == {"a": ["n3", "n4"]}


def test_s3_3_a_job_that_takes_the_offer_gets_just_those_nodes() -> None:
    desk = short(*FOUR, *nodes("n5"))
    desk.wait(seconds=61)
    assert offers(desk) == {"a": ["n3", "n4"]}
    desk.claim("b", 3)
    asks(desk, "a", ("n1", "n2"), 3)
    assert desk.granted() == {"a": ["n1", "n2", "n3", "n4"]}
    assert desk.grants()["a"].fewer == ""
    # it may be offered more as soon as it would take it
    assert desk.state.offers == ()


def test_a_job_that_asks_after_its_offer_has_ended_gets_no_more() -> None:
    desk = short()
    desk.wait(seconds=61)
    desk.now += OFFER_TIMEOUT
    desk.go()
    desk.claim("b", 3)
    asks(desk, "a", ("n1", "n2"), 3)
    assert desk.granted() == {"a": ["n1", "n2"]}


def test_an_offer_ends_when_the_job_declines_it_or_ends() -> None:
    for last in (
        lambda desk: goes_on(desk, "a", ("n1", "n2"), 3),
        lambda desk: desk.go(EndedJobs((("a", 1),))),
    ):
        desk = short()
        desk.wait(seconds=61)
        desk.claim("b", 2)
        assert desk.granted() == {}
        last(desk)
        assert desk.granted() == {"b": ["n3", "n4"]}


def test_a_job_relaunched_for_a_fault_may_use_its_offer() -> None:
    desk = short()
    desk.wait(seconds=61)
    asks(desk, "a", ("n1",), 3, fewest=1, avoid=("n2",), holds=("n1",), had=2)
    assert desk.granted() == {"a": ["n1", "n3", "n4"]}


def test_a_part_of_a_node_is_granted_as_it_was_offered() -> None:
    desk = Desk(*nodes("n1", "n2", gpus=4))
    desk.claim("a", 1, most=1, gpus=2)
    goes_on(desk, "a", ("n1",), 2, most=2, gpus=2)
    desk.claim("b", 1, gpus=1)
    desk.wait(seconds=61)
    (offer,) = desk.state.offers
    assert offer.places == (Place("n2", "10.0.0.2", (0, 1)),)
    desk.claim("c", 1, gpus=4)
    assert desk.granted() == {}
    desk.claim("d", 1, gpus=2, running=True)
    assert desk.granted() == {"d": ["n2"]} and desk.grants()["d"].places[0].gpus == (2, 3)
    asks(desk, "a", ("n1",), 3, fewest=1, most=2, gpus=2)
    assert desk.grants()["a"].places[1] == Place("n2", "10.0.0.2", (0, 1))


def test_a_node_that_leaves_the_file_is_offered_no_more() -> None:
    desk = short()
    desk.wait(seconds=61)
    desk.go(FleetFileContent("act", FOUR[:3], desk.limits))
    assert [node.name for node in desk.state.nodes] == ["n1", "n2", "n3"]
    asks(desk, "a", ("n1", "n2"), 3)
    assert desk.granted() == {"a": ["n1", "n2", "n3"]}


def test_a_restarted_fleet_has_offered_nothing() -> None:
    desk = short()
    desk.wait(seconds=61)
    restarted = Desk(*FOUR)
    goes_on(restarted, "a", ("n1", "n2"), 3, after=0)
    assert offers(restarted) == {"a": ["n3", "n4"]}
    assert restarted.of(OfferMessage)[0].offer.seq == 3


def test_equal_states_make_equal_offers() -> None:
    desk = short()
    desk.now += timedelta(seconds=61)
    desk.look()
    assert schedule(desk.state, desk.now, frozenset()) == schedule(
        desk.state, desk.now, frozenset()
    )
