"""A service is moved to another build of relaunch and back while its jobs train.

The builds differ in the order of commands, in states and in messages.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from relaunch.builds import _read_pollers, list_running, read_builds
from relaunch.cli.service import HOST
from tests.chaos.checks import violations
from tests.chaos.rounds import KILLED, NOTHING, Expected
from tests.chaos.world import FLEET, QUEUE, ROOT, Job, World, eventually, free_port
from tests.upgrade.builds import BUG, COMMANDS, FIELDS, HARMLESS, make_build

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
METRIC = "temporal_workflow_task_execution_failed"
"""The name that docs/upgrade.md has."""


@pytest_asyncio.fixture(loop_scope="session")
async def own_world(tmp_path: Path, worker_id: str) -> AsyncIterator[World]:
    """A world for one test: its server will know other builds."""
    number = 60 + int(worker_id.removeprefix("gw").replace("master", "0"))
    async with World(tmp_path / "world", number, nodes=4, spares=0, answer_within=5.0) as made:
        yield made


async def read_failed_tasks(address: str) -> dict[str, int]:
    """Return how many workflow tasks of each type have failed, by the metrics of a worker."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    found = {}
    for line in (await asyncio.to_thread(read)).splitlines():
        if line.startswith(f"{METRIC}{{"):
            (kind,) = re.findall(r'workflow_type="(\w+)"', line)
            found[kind] = found.get(kind, 0) + int(float(line.rpartition(" ")[2]))
    return found


async def all_are_on(world: World, build: str, *jobs: Job) -> bool:
    found = {one.id for one in await list_running(world.client, QUEUE, build)}
    return {f"job/{job.name}" for job in jobs} <= found


async def until_moved(world: World, build: str, *jobs: Job) -> None:
    async def moved() -> bool:
        return await all_are_on(world, build, *jobs)

    await eventually(moved, f"not all jobs have moved to {build}")


async def test_jobs_move_to_another_build_and_back_untouched(own_world: World) -> None:
    world = own_world
    gang = await world.submit(nodes=3)
    await gang.until_phase("RUNNING")
    await gang.until_watched()
    await world.run_starter("nodes", "quarantine", "n4", "--fleet", FLEET, "--reason", "a fan")
    queued = await world.submit(nodes=4)
    await queued.until_phase("QUEUED")
    pids = gang.rank_pids()
    first = (await read_builds(world.client, QUEUE)).current
    assert first is not None
    other = make_build(world.folder, 2, *COMMANDS, *FIELDS)

    code, said = await other.run(world, "upgrade", "--within", "1s")
    assert (code, "no worker of build build-2" in said) == (2, True), said
    worker = await other.start_worker(world)

    assert await all_are_on(world, first.id, gang, queued)
    code, said = await other.run(world, "upgrade")
    assert (code, "nothing is left" in said) == (0, True), said
    assert await all_are_on(world, "build-2", gang, queued)
    # On a server that does not hear workers.
    assert set(await _read_pollers(world.client, QUEUE)) == {first.id, "build-2"}
    assert await world.worker.end(signal.SIGTERM) == 0
    await gang.until_watched()
    assert (gang.rank_pids(), (await queued.phase())[0]) == (pids, "QUEUED")
    os.kill(pids[0], signal.SIGKILL)
    await gang.until_phase("RUNNING", generation=2)
    await gang.until_watched()
    code, said = await other.run(world, "doctor")
    assert (code, "!" in said, "build-2 is current" in said) == (0, False, True), said

    await world.worker.start()
    code, said = await world.run_starter("rollback")
    assert (code, f"build {first.id} is current" in said) == (0, True), said
    assert await all_are_on(world, first.id, gang, queued)
    assert await worker.end(signal.SIGTERM) == 0
    await gang.until_watched()
    gang.let_end()
    await gang.until_phase("SUCCEEDED")
    assert await violations(gang, Expected((KILLED,))) == []
    await world.run_starter("nodes", "release", "n4", "--fleet", FLEET, "--reason", "replaced")
    await queued.until_phase("RUNNING", generation=1)
    await queued.until_steps()
    queued.let_end()
    await queued.until_phase("SUCCEEDED")
    assert await violations(queued, Expected((NOTHING,))) == []


@pytest.mark.long
async def test_a_build_put_in_the_place_of_another_takes_its_jobs_over(own_world: World) -> None:
    world = own_world
    job = await world.submit(nodes=2)
    await job.until_phase("RUNNING")
    await job.until_watched()
    pids = job.rank_pids()
    same = make_build(world.folder, 2, *HARMLESS)
    await world.worker.end()  # killed: the server is not informed
    worker = await same.start_worker(world)
    await until_moved(world, "build-2", job)
    await job.until_watched()
    assert job.rank_pids() == pids

    different = make_build(world.folder, 3, *COMMANDS, *FIELDS)
    assert await worker.end(signal.SIGTERM) == 0
    newest = await different.start_worker(world)

    async def is_logged() -> bool:
        return f"job/{job.name} belongs to build build-2" in different.log(world)

    await eventually(is_logged, "the log does not say that build 3 cannot continue it")
    code, said = await different.run(world, "doctor")
    assert (code, "start a worker of build-2" in said) == (1, True), said
    assert job.rank_pids() == pids
    again = await same.start_worker(world)
    await until_moved(world, "build-3", job)
    assert await again.end(signal.SIGTERM) == 0
    await job.until_watched()
    assert job.rank_pids() == pids
    os.kill(pids[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    job.let_end()
    await job.until_phase("SUCCEEDED")
    assert await violations(job, Expected((KILLED,))) == []
    await newest.end()


@pytest.mark.long
async def test_jobs_return_from_a_build_with_a_bug(own_world: World) -> None:
    world = own_world
    job = await world.submit(nodes=2)
    await job.until_phase("RUNNING")
    await job.until_watched()
    pids = job.rank_pids()
    first = (await read_builds(world.client, QUEUE)).current
    assert first is not None
    bad = make_build(world.folder, 2, *BUG)
    metrics = world.environment["RELAUNCH_METRICS"] = f"{HOST}:{free_port()}"
    worker = await bad.start_worker(world)
    del world.environment["RELAUNCH_METRICS"]
    code, said = await bad.run(world, "upgrade", "--within", "20s")
    assert (code, "a bug of build 2" in said) == (1, True), said
    code, said = await bad.run(world, "doctor")
    advice = f"`relaunch rollback {first.id}`"
    assert (code, "a bug of build 2" in said, advice in said) == (1, True, True), said
    code, said = await world.run_starter("show", job.name)
    assert "`relaunch doctor` says why" in said
    assert (await read_failed_tasks(metrics))["TrainingJob"] > 0
    assert f"{METRIC}[30m]" in (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    code, said = await world.run_starter("rollback", "--within", "5m")
    assert (code, "nothing is left" in said) == (0, True), said
    assert await all_are_on(world, first.id, job)
    await worker.end()
    await job.until_watched()
    assert job.rank_pids() == pids
    job.let_end()
    await job.until_phase("SUCCEEDED")
    assert await violations(job, Expected((NOTHING,))) == []
