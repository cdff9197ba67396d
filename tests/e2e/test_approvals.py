"""A repair that asks a person, answered with the command that its question has, while parts die.

Real agents, processes, server, worker and command line; doubles of NVIDIA's programs, and a reboot
that ends the processes of a node.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.world import FLEET, Process, World, chaos_policy, eventually
from tests.doubles.cards import Cards
from tests.doubles.install import build_nvml, install_nvml, install_tool
from tests.e2e.test_nodes import ONE_GPU, PENDING, fail, reboots, tell_dcgm

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.long,  # its parts: tests/workflows/test_repair.py
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("e2e")
    async with World(folder / "world", 131, gpus=1, repairs="ask") as made:
        nvml = build_nvml(folder)
        for name in made.names:
            Cards(made.node(name) / "sys")
            install_nvml(made.node(name) / "lib", nvml, ONE_GPU)
            install_tool(made.node(name) / "bin", "nvidia-smi", stdout="All done.\n")
        yield made


async def kill_and_restart(*processes: Process) -> None:
    for process in processes:
        await process.end(signal.SIGKILL)
    for process in reversed(processes):
        await process.start()


async def refuse(world: World, *words: str) -> str:
    """Return why a command is refused, once the new worker answers for what it asks."""
    said: list[str] = []

    async def is_answered() -> bool:
        code, text = await world.run_starter(*words)
        said.append(text)
        assert code == 2, text
        return "no worker answers" not in text

    await eventually(is_answered, f"no worker answers to {words}", 60.0)
    return said[-1]


async def test_an_approval_survives_kills_and_reboots_once(world: World) -> None:
    # Timeouts of a day's work: a person is slower than a test.
    times = {"timeouts": {"reboot": "10m"}, "hang": {}}
    for name in world.names:
        tell_dcgm(world, name, PENDING, once=True)
    job = await world.submit(policy=chaos_policy(extends="ecs-reboot-once", **times))
    await job.until_phase("RUNNING", generation=1)
    await job.until_steps()
    node = (await job.state()).slots[1].node
    fail(job)

    async def asks() -> bool:
        state = await job.state()
        return state.phase == "REPAIRING" and "nodes answer" in state.next.what

    await eventually(asks, f"{job.name} shows no question", 120.0)
    await kill_and_restart(world.worker, world.server)
    await eventually(asks, f"{job.name} has forgotten its question", 120.0)

    refused = {
        ("answer", job.name, "approve"): "nodes answer",
        ("nodes", "answer", node, "approve", "--fleet", FLEET): "--reboot",
        ("nodes", "answer", node, "approve", "--power-cycle", "--fleet", FLEET): "--reboot now",
    }
    for words, expected in refused.items():
        text = await refuse(world, *words, "--reason", "go on")
        assert expected in text and len(text.splitlines()) == 1, text
    assert reboots(world, node) == []

    # What a person copies from the page.
    asked = re.search(
        r"`relaunch (nodes answer \S+ approve .*?) --reason …`", (await job.state()).next.what
    )
    assert asked is not None
    code, text = await world.run_starter(*shlex.split(asked[1]), "--reason", "it is free")
    assert code == 0, text
    await kill_and_restart(world.worker)
    for pid in world.sessions(node):
        os.kill(pid, signal.SIGKILL)
    await kill_and_restart(world.worker, world.server)
    await job.until_phase("RUNNING", generation=2)
    assert len(reboots(world, node)) == 1
    assert "no repair" in await refuse(world, *shlex.split(asked[1]), "--reason", "once more")
    assert len(reboots(world, node)) == 1
    await world.tidy(job)
