"""A fleet in numbers: the states of its nodes, its breaker, and the jobs that wait."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from relaunch.pool.counts import FleetCounts, count_fleet
from relaunch.pool.events import PauseCommand, QuarantineCommand
from relaunch.pool.messages import DrainRequest, Place
from relaunch.pool.state import FleetState, LiveGeneration, NodeProbe, OfferRecord
from relaunch.pool.tenants import STATES, is_claimed, jobs_on, node_state, tenants
from tests.recovery.fleet_builders import T0, Desk, began, nodes


def test_nothing_is_known_of_nodes_before_each_was_probed() -> None:
    assert count_fleet(FleetState("gpus")) == FleetCounts()
    desk = Desk(*nodes("n1", "n2"), begun=False)
    assert count_fleet(desk.state).nodes == {}


def test_every_state_has_a_count_and_every_node_counts_once() -> None:
    desk = Desk(*nodes("n1", "n2", "n3", "n4", "n5"))
    desk.silent["n4"] = "connection refused"
    desk.held["n5"] = "an examination runs"
    desk.look()
    desk.go()
    desk.claim("train", 1)
    desk.go(QuarantineCommand("n3", "flaky", "ada"))
    counts = count_fleet(desk.state)
    assert list(counts.nodes) == list(STATES)
    assert {state: count for state, count in counts.nodes.items() if count} == {
        "free": 1,
        "busy": 1,
        "quarantined": 1,
        "silent": 1,
        "held": 1,
    }
    removed = replace(desk.state.nodes[0], is_removed=True)
    fewer = replace(desk.state, nodes=(removed, *desk.state.nodes[1:]))
    assert sum(count_fleet(fewer).nodes.values()) == 4


def test_what_keeps_a_node_from_jobs_takes_precedence() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.claim("train", 1)
    here = tenants(desk.state)
    (busy,) = (name for name in ("n1", "n2") if jobs_on(here[name]))
    node = desk.node(busy)
    drained = replace(node, drain=DrainRequest(busy, "maintenance", "ada", T0))
    assert node_state(drained, here[busy]) == "draining"
    assert node_state(drained, ()) == "free"
    repaired = replace(node, repair=f"repair/gpus/{busy}/r1")
    assert node_state(repaired, here[busy]) == "repairing"
    assert node_state(replace(node, probe=None), here[busy]) == "silent"


def test_tenants_are_those_of_claims_offers_and_agents() -> None:
    desk = Desk(*nodes("n1", "n2", "n3"))
    desk.claim("train", 1)
    (held,) = (name for name, here in tenants(desk.state).items() if here)
    free = next(name for name in ("n1", "n2", "n3") if name != held)
    until = T0 + timedelta(minutes=1)
    offer = OfferRecord("grow", 7, 1, (Place(free),), until)
    live = NodeProbe(held, generations=(LiveGeneration("train", 1, 1), LiveGeneration("old", 1, 1)))
    state = replace(
        desk.state,
        offers=(offer,),
        nodes=tuple(
            replace(one, probe=live) if one.name == held else one for one in desk.state.nodes
        ),
    )
    here = tenants(state)
    assert jobs_on(here[held]) == ["train", "old"]
    assert [one.place for one in here[held]][1] is None, "no claim of it is known"
    assert (jobs_on(here[free]), here[free][0].offered) == ([], until)
    assert is_claimed(here[held]) and not is_claimed(here[free])
    assert not is_claimed(here[held][1:]), "only its probe has these ranks"


def test_waiting_jobs_pauses_and_the_breaker_are_counted() -> None:
    desk = Desk(*nodes("n1"))
    desk.claim("train", 1)
    assert count_fleet(desk.state).waiting_jobs == 0
    desk.claim("queued", 1)
    desk.go(PauseCommand("maintenance", "ada"))
    counts = count_fleet(desk.state)
    assert (counts.waiting_jobs, counts.repairs_paused, counts.breaker_open) == (1, True, False)
    assert counts.waiting_since == desk.record("queued").waiting_since is not None
    opened = replace(desk.state, breaker=replace(desk.state.breaker, reason="too many are out"))
    assert count_fleet(opened).breaker_open


def test_a_node_under_repair_is_counted_as_repairing() -> None:
    desk = Desk(*nodes("n1"))
    desk.go(began("n1"))
    assert count_fleet(desk.state).nodes["repairing"] == 1
