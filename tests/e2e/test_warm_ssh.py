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

from tests.chaos.rounds import CUTS
from tests.chaos.world import Job, World, chaos_policy, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

PROGRAM = """
import os, sys, time
ahead = "decimal" in sys.modules
name = "{}/{}-{}".format(sys.argv[1], os.environ["RELAUNCH_GENERATION"], os.environ["RANK"])
with open(name + ".partial", "w") as file:
    file.write("{} {} {}".format(os.getpid(), ahead, os.environ["RELAUNCH_NODE"]))
os.rename(name + ".partial", name)
while not os.path.exists(sys.argv[1] + "/end"):
    time.sleep(0.05)
"""
FORKED = "its ranks were forked from a Python that had imported ahead"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Nodes on loopback addresses: n1, n2, and the spare n3."""
    async with World(
        tmp_path_factory.mktemp("e2e") / "warm", 127, spares=1, backend="ssh", answer_within=5.0
    ) as made:
        yield made


async def submit(world: World, name: str) -> Job:
    folder = world.folder / "jobs" / name
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(PROGRAM)
    return await world.submit(
        name=name,
        nodes=2,
        command=[sys.executable, str(folder / "train.py"), str(folder)],
        warm=["decimal"],
        policy=chaos_policy(max_restarts=4),
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


async def until_ready(job: Job, *nodes: str) -> dict[str, int]:
    """Wait until each node has imported; return the pids of the processes that have."""

    async def all_are() -> dict[str, int] | None:
        found = {node: read_standby(job, node) for node in nodes}
        ready = {node: one["pid"] for node, one in found.items() if one and one["state"] == "ready"}
        return ready if len(ready) == len(nodes) else None

    return await job.until(all_are, f"no Python imports ahead on all of {nodes}")


async def until_began(job: Job, generation: int) -> dict[str, tuple[int, bool]]:
    """Wait for a generation; return pid and whether it was forked of its rank on each node."""

    async def has_begun() -> dict[str, tuple[int, bool]] | None:
        files = [job.folder / f"{generation}-{rank}" for rank in range(2)]
        if not all(path.exists() for path in files):
            return None
        rows = [path.read_text().split() for path in files]
        return {node: (int(pid), ahead == "True") for pid, ahead, node in rows}

    began = await job.until(has_begun, f"generation {generation} does not begin")
    await job.until_phase("RUNNING", generation=generation)
    return began


async def until_connected(world: World) -> None:
    async def is_connected() -> bool:
        return all(len(world.sessions(node)) == 1 for node in world.names)

    await eventually(is_connected, "the worker does not log in to all nodes again")


async def end(world: World, job: Job) -> None:
    (job.folder / "end").touch()
    await job.until_phase("SUCCEEDED")

    async def none_lives() -> bool:
        return not any(read_standby(job, node) for node in world.names)

    await eventually(none_lives, "a Python of the job outlives it")
    await world.tidy(job)


async def test_s1_3_s2_8_ranks_are_forked_in_place_and_on_a_spare_over_ssh(world: World) -> None:
    job = await submit(world, "warm")
    first = await until_began(job, 1)
    assert {node: ahead for node, (_, ahead) in first.items()} == {"n1": False, "n2": False}
    waiting = await until_ready(job, "n1", "n2", "n3")
    status, text = await world.run_starter("nodes", "show", "n3", "--fleet", "chaos")
    assert status == 0, text
    assert "a Python of job warm has imported decimal, " in text
    # Nobody asks the spare meanwhile, and the next worker knows what to ask.
    await world.worker.end(signal.SIGKILL)
    await world.worker.start()
    await until_connected(world)
    os.kill(first["n2"][0], signal.SIGKILL)
    second = await until_began(job, 2)
    assert all(ahead for _, ahead in second.values())
    assert FORKED in (await job.state()).reason
    again = await until_ready(job, "n1", "n2", "n3")
    assert again["n3"] == waiting["n3"], "the spare need not import again"
    world.places.cut("n2", CUTS["cut both"], freeze_ranks=True)
    third = await until_began(job, 3)
    assert {node: ahead for node, (_, ahead) in third.items()} == {"n1": True, "n3": True}, (
        await job.state()
    ).reason
    assert FORKED in (await job.state()).reason
    assert not is_alive(second["n2"][0]), "ranks of both generations are alive at once"
    assert not is_alive(again["n2"]), "a node that is cut off keeps a process of the job"
    world.places.heal("n2")
    await end(world, job)


async def test_s1_3_a_spare_whose_python_was_killed_starts_cold(world: World) -> None:
    job = await submit(world, "cold")
    await until_began(job, 1)
    waiting = await until_ready(job, "n1", "n2", "n3")
    world.places.cut("n2", CUTS["cut both"], freeze_ranks=True)
    os.kill(waiting["n3"], signal.SIGKILL)
    second = await until_began(job, 2)
    assert {node: ahead for node, (_, ahead) in second.items()} == {"n1": True, "n3": False}
    reason = (await job.state()).reason
    assert "its ranks on n3 were started from nothing: " in reason
    world.places.heal("n2")
    await end(world, job)
