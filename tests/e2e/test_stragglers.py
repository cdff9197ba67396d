"""A gang in lockstep, one of whose nodes works slower: people hear which one, and it goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from relaunch.job.state import JobState
from tests.chaos.world import ROOT, World, chaos_policy

PROGRAM = Path(__file__).with_name("lockstep_rank.py")
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


@pytest.mark.timeout(600)
async def test_a_slow_node_of_a_gang_in_lockstep_is_named(world: World) -> None:
    name = f"slow-{os.urandom(3).hex()}"
    folder = world.folder / "jobs" / name
    job = await world.submit(
        name=name,
        nproc=2,
        command=[sys.executable, str(PROGRAM), str(folder), "1"],
        env={"PYTHONPATH": str(ROOT)},
        policy=chaos_policy(stragglers={"over": "10s"}),
    )
    await job.until_phase("RUNNING", generation=1)

    async def find_slow() -> JobState | None:
        state = await job.state()
        assert state.generation == 1 and not state.phase.is_final, state.reason
        return state if state.slow_nodes else None

    state = await job.until(find_slow, "no node is named")
    (found,) = state.slow_nodes
    assert (found.slow.measure, found.slow.nodes, found.slow.ranks) == ("busy", 2, 4)
    assert found.slow.node == state.slots[1].node
    assert found.slow.ratio > 1.5 and found.slow.seconds > 0.12
    code, shown = await world.run_starter("show", name)
    assert code == 0 and f"notice      node {found.slow.node} is " in shown, shown
    code, shown = await world.run_starter("show", name, "--json")
    assert [one["node"] for one in json.loads(shown)["slow"]] == [found.slow.node]
    (folder / "end").touch()
    await job.until_phase("SUCCEEDED")
    assert (await job.state()).generation == 1 and await job.incidents() == []
    await world.tidy(job)
