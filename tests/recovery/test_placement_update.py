"""A placement that has followed the fleet is as one that is built from the newest state."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from relaunch.pool.inventory import GpuUse
from relaunch.pool.messages import Claim, Place
from relaunch.pool.placement import NodeUse, Placement
from relaunch.pool.state import (
    ClaimRecord,
    FleetState,
    LiveGeneration,
    NodeProbe,
    NodeRecord,
    NodeStatus,
    OfferRecord,
)
from tests.recovery.fleet_builders import T0, gpus, nodes

JOBS = tuple("abcdef")
NAMES = tuple(f"n{number}" for number in range(1, 9))


def describe(placement: Placement) -> dict[str, Any]:
    def of(node: NodeUse) -> tuple[Any, ...]:
        bucket = node.bucket and (node.bucket[0] is placement._free, node.bucket[1])
        held = (list(node.holders.items()), node.contested, node.offers, node.claimants)
        return node.record, *held, node.foreign_gpus, bucket, node.in_file, node.eventual

    sets = ("notable", "watched", "foreign", "orphaned")
    return {
        "nodes": [of(node) for node in placement.nodes],
        "sets": [{node.name for node in getattr(placement, one)} for one in sets],
        "held": {job: {node.name for node in on} for job, on in placement.nodes_of.items()},
        "counts": (placement._in_file, placement._eventual),
        "free": [
            {key: [node.name for node in bucket] for key, bucket in buckets.items()}
            for buckets in (placement._free, placement._doubtful)
        ],
        "reserved": placement.reserved,
    }


def change_node(random: Random, record: NodeRecord, at: Any) -> NodeRecord:
    living = tuple(
        LiveGeneration(random.choice(JOBS), random.randint(1, 2), 1)
        for _ in range(random.choice((0, 0, 1, 2)))
    )
    probe = NodeProbe(record.name, silent=random.choice(("", "", "no route")), generations=living)
    used = ((random.randrange(8), "alice"),) if random.random() < 0.2 else ()
    return replace(
        record,
        status=random.choice((NodeStatus.IN_SERVICE,) * 3 + tuple(NodeStatus)),
        probe=random.choice((probe, probe, record.probe)),
        probed_at=at,
        probe_ordered_at=random.choice((None, at, at + timedelta(seconds=1))),
        silent_since=at if probe.silent else None,
        last_generations=living if probe.silent else (),
        inventory=gpus(8, *used),
        inventory_at=random.choice((None, at, at)),
        is_removed=random.random() < 0.1,
    )


def make_claim(random: Random, job: str) -> ClaimRecord:
    def places() -> tuple[Place, ...]:
        share = random.choice(((), (), (0, 1), (2, 3, 4)))
        return tuple(Place(name, gpus=share) for name in random.sample(NAMES, random.randint(0, 3)))

    claim = Claim(job, random.randint(1, 2), random.randint(1, 2), 2, holds=places())
    granted = random.choice((None, places()))
    return ClaimRecord(claim, granted=granted, is_closed=random.random() < 0.2)


@pytest.mark.parametrize("seed", range(40))
def test_a_placement_that_follows_is_as_one_that_is_new(seed: int) -> None:
    random, now = Random(seed), T0
    state = FleetState("gpus", nodes=tuple(map(NodeRecord, nodes(*NAMES))), awaited_jobs=())
    followed = Placement(state, now)
    for _ in range(60):
        now += timedelta(seconds=random.choice((0, 1, 4, 20, 400)))
        records, claims = list(state.nodes), {one.claim.job: one for one in state.claims}
        for _ in range(random.choice((0, 1, 3))):
            index = random.randrange(len(records))
            records[index] = change_node(random, records[index], now)
        for job in random.sample(JOBS, random.choice((0, 1, 2))):
            if random.random() < 0.5:
                claims.pop(job, None)
            if random.random() < 0.8:
                claims[job] = make_claim(random, job)
        offers = state.offers
        if random.random() < 0.3 and claims:
            one = random.choice(list(claims.values())).claim
            taken = (Place(random.choice(NAMES)),)
            offers = (OfferRecord(one.job, one.submission, one.seq, taken, now),)
            offers = (replace(offers[0], until=now + timedelta(seconds=30)),)
        state = replace(state, nodes=tuple(records), claims=tuple(claims.values()), offers=offers)
        followed.update(state, now)
        assert describe(followed) == describe(Placement(state, now))
        for record in state.claims:
            shape = followed.shape_of(record.claim)
            choice = followed.choose(record, shape)
            if random.random() < 0.5:
                followed.grant(record, choice)
            else:
                followed.reserve(record.claim.job, shape)
                followed.offer(record, choice.new)


def test_what_foreign_processes_use_is_free_once_they_have_gone() -> None:
    (spec,) = nodes("n1")
    record = NodeRecord(spec, probe=NodeProbe("n1"), probed_at=T0, inventory_at=T0)
    used = replace(gpus(8), used=(GpuUse((0,), "alice"),))
    state = FleetState("gpus", nodes=(replace(record, inventory=used),), awaited_jobs=())
    placement = Placement(state, T0)
    assert [node.name for node in placement.foreign] == ["n1"]
    placement.update(replace(state, nodes=(replace(record, inventory=gpus(8)),)), T0)
    assert not placement.foreign and placement.nodes[0].free_gpus() == tuple(range(8))
