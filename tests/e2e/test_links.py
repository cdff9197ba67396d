"""A gang whose nodes lose each other, while the controller reaches both: a spare takes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaunch.evidence.reachability import LINK
from tests.chaos.places import SshPlaces
from tests.chaos.world import World, chaos_policy

HANG = {"after": "6s", "first_step": "6s"}


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
        await job.until_phase("RUNNING", generation=3)
        await job.until_steps()
        assert {line["node"] for line in job.starts() if line["token"].endswith("/3")} == {
            "n1",
            "n3",
        }
        job.let_end()
        await job.until_phase("SUCCEEDED")
        (incident,) = await job.incidents()
        assert [(fault.cause, fault.code) for fault in incident.faults] == [
            ("HANG", ""),
            ("HANG", ""),
            ("NETWORK", LINK),
        ]
        assert incident.faults[-1].nodes == ("n2",)
        assert [str(one.strategy) for one in incident.decisions if one.strategy] == [
            "RESTART_IN_PLACE",
            "REPLACE_NODE",
        ]
        state = await job.state()
        assert not state.avoided, "of two alike none is isolated"
        print(incident.faults[-1].reason)
