"""A node loses its power soon after a launch, and with it the record of that launch."""

from __future__ import annotations

import pytest

from relaunch.backends.local import cut, heal
from relaunch.evidence.causes import Cause
from tests.chaos.world import World

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("is_lost", [False, True], ids=["soon", "once it is lost"])
async def test_a_job_whose_node_forgot_its_launch_goes_on(world: World, is_lost: bool) -> None:
    """Files that are written without fsync reach a disk one by one."""
    job = await world.submit(nodes=1)
    await job.until_phase("RUNNING", generation=1)
    await job.until_watched()
    (slot,) = (await job.state()).slots
    cut(world.node(slot.node))
    if is_lost:
        await job.until_phase("NODE_LOST")
    folder = job.generation_folder(slot.node)
    assert folder is not None
    world.places.reboot(slot.node)
    (folder / "started.json").unlink()
    heal(world.node(slot.node))
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    assert Cause.NODE_FAULT in {one.cause for one in await job.incidents()}
    assert job.lines("violations") == []
    job.let_end()
    await job.until_phase("SUCCEEDED")
    await world.tidy(job)
