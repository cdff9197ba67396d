"""Warm ranks on nodes that are reached by SSH: after a kill in place, and on a spare."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.agent.warm.python import SPACE
from tests.chaos.rounds import CUTS
from tests.chaos.world import RANK_PROGRAM, Job, World, chaos_policy, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> AsyncIterator[World]:
    """Nodes on loopback addresses: n1, n2, and the spare n3."""
    # Addresses of their own, because several processes run tests side by side.
    number = 100 + int(worker_id.removeprefix("gw").replace("master", "0"))
    async with World(
        tmp_path_factory.mktemp("e2e") / "warm", number, spares=1, backend="ssh", answer_within=5.0
    ) as made:
        yield made


async def submit(world: World, name: str) -> Job:
    folder = world.folder / "jobs" / name
    return await world.submit(
        name=name,
        command=[sys.executable, str(RANK_PROGRAM), str(folder)],
        warm=["decimal"],
        policy=chaos_policy(hang={"after": "12s", "first_step": "30s"}),
    )


def read_standby(job: Job, node: str) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((job.on(node) / "warm" / "standby.json").read_text())
    except FileNotFoundError:
        return None
    return record if is_alive(record["pid"]) else None


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def were_forked(job: Job, node: str) -> bool:
    """Return whether the rank of a node has the space for its environment that a fork needs."""
    (pid,) = job.rank_pids(node)
    return len(Path(f"/proc/{pid}/environ").read_bytes()) > SPACE


async def until_ready(job: Job, *nodes: str) -> dict[str, int]:
    """Wait until each node has imported; return the pids of the processes that have."""

    async def all_are() -> dict[str, int] | None:
        found = {node: read_standby(job, node) for node in nodes}
        ready = {node: one["pid"] for node, one in found.items() if one and one["state"] == "ready"}
        return ready if len(ready) == len(nodes) else None

    return await job.until(all_are, f"no Python imports ahead on all of {nodes}")


async def until_runs(job: Job, generation: int) -> dict[str, int | None]:
    """Wait until a generation trains; return the shim of each of its nodes."""
    await job.until_phase("RUNNING", generation=generation)
    await job.until_watched()
    assert (await job.phase())[1] == generation
    nodes = [slot.node for slot in (await job.state()).slots]
    return {node: job.agent_pid(node, "shim") for node in nodes}


async def until_connected(world: World) -> None:
    async def is_connected() -> bool:
        return all(len(world.sessions(node)) == 1 for node in world.names)

    await eventually(is_connected, "the worker does not log in to all nodes again")


async def end(world: World, job: Job) -> None:
    job.let_end()
    await job.until_phase("SUCCEEDED")

    async def none_lives() -> bool:
        return not any(read_standby(job, node) for node in world.names)

    await eventually(none_lives, "a Python of the job outlives it")
    await world.tidy(job)


async def test_s2_8_ranks_are_forked_in_place_and_on_a_spare(world: World) -> None:
    job = await submit(world, "warm")
    await until_runs(job, 1)
    assert not were_forked(job, "n1")
    first = await until_ready(job, "n1", "n2", "n3")
    status, text = await world.run_starter("nodes", "show", "n3", "--fleet", "chaos")
    assert status == 0, text
    assert "a Python of job warm has imported decimal, " in text
    # The spare gets no order meanwhile, and the next worker knows what to order.
    await world.worker.end(signal.SIGKILL)
    await world.worker.start()
    await until_connected(world)
    os.kill(job.rank_pids("n2")[0], signal.SIGKILL)
    shims = await until_runs(job, 2)
    assert were_forked(job, "n1") and were_forked(job, "n2")
    assert shims == {node: first[node] for node in ("n1", "n2")}
    second = await until_ready(job, "n1", "n2", "n3")
    assert second["n3"] == first["n3"], "the spare need not import again"
    (old,) = job.rank_pids("n2")
    world.places.cut("n2", CUTS["cut both"], freeze_ranks=True)
    shims = await until_runs(job, 3)
    assert were_forked(job, "n1") and were_forked(job, "n3")
    assert shims == {node: second[node] for node in ("n1", "n3")}
    assert not is_alive(old), "ranks of both generations are alive at once"
    assert not is_alive(second["n2"]), "a node that is cut off keeps a process of the job"
    world.places.heal("n2")
    await end(world, job)


async def test_a_python_killed_on_a_spare_is_started_again(world: World) -> None:
    job = await submit(world, "again")
    await until_runs(job, 1)
    waiting = await until_ready(job, "n3")
    os.kill(waiting["n3"], signal.SIGKILL)

    async def is_gone() -> bool:
        return not is_alive(waiting["n3"])

    await eventually(is_gone, "it outlives SIGKILL")
    again = await until_ready(job, "n3")
    assert again["n3"] != waiting["n3"]
    assert await job.phase() == ("RUNNING", 1)
    await end(world, job)
