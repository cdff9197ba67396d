"""A gang whose nodes lose each other, while the controller reaches both: a spare takes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaunch.evidence.reachability import CUT_OFF, LINK, NODE_LINK
from tests.chaos.places import SshPlaces
from tests.chaos.world import Job, World, chaos_policy

HANG = {"after": "6s", "first_step": "6s"}


def nodes_of(job: Job, generation: int) -> set[str]:
    return {one["node"] for one in job.starts() if one["token"].endswith(f"/{generation}")}


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_pair_that_lost_each_other_gets_a_spare(tmp_path: Path) -> None:
    async with World(
        tmp_path / "links", 127, spares=1, backend="ssh", apart=True, answer_within=5.0
    ) as world:
        job = await world.submit(policy=chaos_policy(hang=HANG))
        await job.until_phase("RUNNING")
        await job.until_watched()
        assert isinstance(world.places, SshPlaces) and world.places.network is not None
        world.places.network.part(1, 2)
        world.places.network.part(2, 1)
        await job.until_phase("RUNNING", generation=2)
        await job.until_steps()
        assert nodes_of(job, 2) == {"n1", "n3"}
        job.let_end()
        await job.until_phase("SUCCEEDED")
        (incident,) = await job.incidents()
        assert [(fault.cause, fault.code) for fault in incident.faults] == [
            ("HANG", CUT_OFF),
            ("NETWORK", LINK),
        ]
        assert incident.faults[-1].nodes == ("n2",)
        assert [str(one.strategy) for one in incident.decisions if one.strategy] == ["REPLACE_NODE"]
        state = await job.state()
        assert not state.avoided, "of two alike none is isolated"
        print(incident.faults[-1].reason)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [pytest.param(1, id="named"), pytest.param(2, id="unnamed")])
async def test_a_node_that_its_peers_cannot_reach_is_replaced(number: int, tmp_path: Path) -> None:
    """An examination finds such a node healthy, and restarts in place hang again.

    All ranks talk to rank 0 only, so of the others' loss a single pair shows.
    """
    node = f"n{number}"
    async with World(
        tmp_path / "links", 128, nodes=3, spares=1, backend="ssh", apart=True, answer_within=5.0
    ) as world:
        job = await world.submit(nodes=3, policy=chaos_policy(hang=HANG))
        await job.until_phase("RUNNING")
        await job.until_watched()
        assert isinstance(world.places, SshPlaces) and world.places.network is not None
        world.places.network.lose(number, "training")
        await job.until_phase("RUNNING", generation=2)
        await job.until_steps()
        assert nodes_of(job, 2) == {"n1", "n2", "n3", "n4"} - {node}
        job.let_end()
        await job.until_phase("SUCCEEDED")
        (incident,) = await job.incidents()
        assert [(fault.cause, fault.code) for fault in incident.faults] == [
            ("HANG", CUT_OFF),
            ("NETWORK", NODE_LINK),
        ]
        state = await job.state()
        # Of the others' loss the hang may name the node, or none; never a healthy one.
        assert incident.faults[0].nodes in (((node,),) if number == 1 else ((), (node,)))
        assert [one.node for one in state.avoided if one.isolated] == [node]
        print(incident.faults[-1].reason)
