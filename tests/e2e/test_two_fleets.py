"""The same nodes in two fleets, by mistake or by intent.

One fleet at a time has them, and neither stops what is the other's.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from temporalio.testing import ActivityEnvironment

from relaunch.activities.fleet import FleetActivities, LookInput, ReclaimInput
from relaunch.cli import fleets, node_views
from relaunch.config import Settings
from relaunch.pool.state import NodeProbe
from relaunch.temporal import read_server_id
from relaunch.worker import WorkerFleets, make_fleets
from tests.chaos.world import FLEET, QUEUE, Job, World, eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
OTHER = "other"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with World(tmp_path_factory.mktemp("e2e") / "world", 122, nodes=2, spares=0) as made:
        file = made.folder / "chaos.yaml"
        (made.folder / "other.yaml").write_text(
            file.read_text().replace(f"name: {FLEET}\n", f"name: {OTHER}\n", 1)
        )
        made.environment["RELAUNCH_FLEETS"] = f"{file}:{made.folder / 'other.yaml'}"
        await made.worker.end()
        await made.worker.start()
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def here(world: World) -> AsyncIterator[WorkerFleets]:
    """Both fleets over the same state of the same nodes, without a workflow that uses them."""
    files = (world.folder / "chaos.yaml", world.folder / "other.yaml")
    made = make_fleets(Settings(state=world.folder / "state", fleets=files))
    made.set_server(await read_server_id(world.client))
    yield made
    await made.close()


def does(world: World, here: WorkerFleets) -> FleetActivities:
    return FleetActivities(here, world.client, QUEUE)


async def looked(world: World, here: WorkerFleets, fleet: str) -> tuple[NodeProbe, ...]:
    return await ActivityEnvironment().run(
        does(world, here).probe_nodes, LookInput(fleet, ("n1", "n2"))
    )


async def rows(world: World, fleet: str) -> dict[str, dict[str, Any]]:
    return {
        one["name"]: one for one in node_views.rows(await fleets.read(world.client, QUEUE, fleet))
    }


async def running(world: World, fleet: str = FLEET) -> Job:
    job = await world.submit(fleet=fleet)
    await job.until_phase("RUNNING", generation=1)
    await job.until_steps()
    return job


def lives_on(job: Job, fleet: str) -> str:
    return f"ranks of job {job.name} of fleet {fleet} live on it"


@pytest.mark.long
async def test_ranks_of_another_fleet_are_in_the_way_and_run_on(
    world: World, here: WorkerFleets
) -> None:
    job = await running(world)
    pids = job.rank_pids()
    assert len(pids) == 2
    mine, others = await looked(world, here, FLEET), await looked(world, here, OTHER)
    assert [[one.job for one in look.generations] for look in mine] == [[job.name], [job.name]]
    assert [(look.generations, look.busy) for look in others] == [((), lives_on(job, FLEET))] * 2

    waits = await world.submit(fleet=OTHER)
    await waits.until_phase("QUEUED", "WAITING_FOR_NODES")

    async def is_reported() -> bool:
        found = await rows(world, OTHER)
        return {(one["state"], one["reason"]) for one in found.values()} == {
            ("held", lives_on(job, FLEET))
        }

    await eventually(is_reported, "the other fleet does not say who is in its way")
    # While a job waits, the fleet looks every two seconds, and orders what it wants stopped.
    state = await fleets.read(world.client, QUEUE, OTHER)
    until = time.monotonic() + 60

    async def has_looked() -> bool:
        return (
            await fleets.read(world.client, QUEUE, OTHER)
        ).probe_count >= state.probe_count + 5 or time.monotonic() > until

    await eventually(has_looked, "it does not look again", patience=70)
    assert (await fleets.read(world.client, QUEUE, OTHER)).recent_reclaims == ()
    assert (job.rank_pids(), (await job.phase())[1]) == (pids, 1)
    await job.until_steps()

    job.let_end()
    await job.until_phase("SUCCEEDED")
    await waits.until_phase("RUNNING", generation=1)
    assert {one["reason"] for one in (await rows(world, FLEET)).values()} <= {
        "",
        lives_on(waits, OTHER),
    }
    await world.tidy(waits)


@pytest.mark.long
async def test_orphaned_ranks_are_stopped_by_their_own_fleet_only(
    world: World, here: WorkerFleets
) -> None:
    job = await running(world)
    pids = job.rank_pids()
    submission = (await job.state()).submission
    await fleets.read(world.client, QUEUE, OTHER)  # it is there, and looks
    chaos = world.client.get_workflow_handle(f"fleet/{FLEET}")
    await chaos.terminate("its nodes have no fleet for a moment")
    await world.client.get_workflow_handle(f"job/{job.name}").terminate("its ranks live on")
    # What the other fleet would do, were it ever to take them for its own.
    clean = await ActivityEnvironment().run(
        does(world, here).reclaim, ReclaimInput(OTHER, job.name, submission, ("n1", "n2"))
    )
    assert clean == ("n1", "n2"), "nothing of it lives there"
    assert job.rank_pids() == pids
    assert [look.busy for look in await looked(world, here, OTHER)] == [lives_on(job, FLEET)] * 2
    clean = await ActivityEnvironment().run(
        does(world, here).reclaim, ReclaimInput(FLEET, job.name, submission, ("n1", "n2"))
    )
    assert (set(clean), job.rank_pids()) == ({"n1", "n2"}, [])
    assert [(look.generations, look.busy) for look in await looked(world, here, OTHER)] == [
        ((), "")
    ] * 2
    await world.tidy(job)
