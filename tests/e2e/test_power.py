"""Power cycles for real: the fleet file's command, by the command line.

A real fleet gives leave, and the power is cycled once although workers die.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from relaunch.backends import local_power
from tests.chaos.world import FLEET, World, chaos_policy, eventually
from tests.e2e.test_nodes import boot_id, starter

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with World(tmp_path_factory.mktemp("e2e") / "world", 121, nodes=3, spares=0) as made:
        switch(made)
        yield made


def switch(world: World, *before: str) -> None:
    """Give n1 and n3 a power command in the fleet file.

    It writes down that it runs, does what is asked for, and cycles the power.
    """
    *words, _ = local_power.command(world.node("n1"))
    script = world.folder / "cycle.sh"
    quoted = " ".join(f'"{word}"' for word in words)
    script.write_text(
        "\n".join(
            (f"echo $$ >> {ran(world)}", *before, f'exec {quoted} "{world.folder}/state/nodes/$1"')
        )
        + "\n"
    )
    file = world.folder / "chaos.yaml"
    if "power:" not in (text := file.read_text()):
        for name in ("n1", "n3"):
            line = next(one for one in text.splitlines() if f"name: {name}," in one)
            text = text.replace(
                line, f"{line.removesuffix('}')}, power: {{cycle: [/bin/sh, {script}, {name}]}}}}"
            )
        file.write_text(text)
    ran(world).unlink(missing_ok=True)


def ran(world: World) -> Path:
    return world.folder / "ran"


def cycles(world: World) -> int:
    return len(ran(world).read_text().splitlines()) if ran(world).exists() else 0


async def cycled(world: World) -> tuple[int, str]:
    return await starter(
        world,
        "nodes",
        "repair",
        "n1",
        "--power-cycle",
        "--reason",
        "it hangs",
        "--fleet",
        FLEET,
        "--level",
        "0",
    )


@pytest.mark.long
async def test_a_node_power_cycled_by_a_person_is_healthy_in_its_fleet(
    world: World,
) -> None:
    async def applied() -> bool:
        return (await starter(world, "nodes", "apply", "--fleet", FLEET))[0] == 0

    await eventually(applied, "the worker does not start")
    before = boot_id(world, "n1")
    status, text = await cycled(world)
    assert status == 0, text
    assert "n1: done, HEALTHY:" in text and "power-cycled" in text
    assert (cycles(world), boot_id(world, "n1") != before) == (1, True)
    status, text = await starter(
        world, "nodes", "repair", "n2", "--power-cycle", "--reason", "x", "--fleet", FLEET
    )
    assert (status, "no power" in text) == (1, True), text


@pytest.mark.long
async def test_a_power_command_whose_worker_died_is_not_run_again(
    world: World,
) -> None:
    switch(world, "sleep 2")
    before = boot_id(world, "n1")

    async def kill() -> bool:
        if cycles(world) == 0:
            return False
        await world.worker.end()
        return True

    ordered = asyncio.create_task(cycled(world))
    await eventually(kill, "the command is never run")
    await world.worker.start()
    status, text = await ordered
    assert (status, cycles(world)) == (0, 1), text
    assert boot_id(world, "n1") != before


@pytest.mark.long
async def test_a_node_that_a_job_has_keeps_its_power(world: World) -> None:
    switch(world)
    job = await world.submit(nodes=2)
    await job.until_phase("RUNNING")
    status, text = await cycled(world)
    assert (status, cycles(world)) == (1, 0), text
    assert f"job {job.name} generation 1" in text
    await job.signal(
        "cancel"
    )  # it gives its nodes back, which the fleet of one that is terminated learns later
    await job.until_phase("CANCELLED")
    await world.tidy(job)


@pytest.mark.long
async def test_a_suspect_that_cannot_reboot_is_power_cycled_and_reused(
    world: World,
) -> None:
    switch(world)
    (world.node("n3") / "reboots.jsonl").mkdir()  # what cannot be written down is not done
    ladder = [{"strategy": "REBOOT_NODE", "tries": 1}, {"strategy": "FAIL"}]
    # On a busy machine ranks must not end before by their lease, nor the node count as lost when it
    # is asked.
    times = {"reboot": "600s", "lease": "60s", "fence_after": "30s", "lost_after": "120s"}
    policy = chaos_policy(times=times, dcgm_level=0, causes={"NODE_FAULT": ladder})
    job = await world.submit(nodes=3, policy=policy)
    await job.until_phase("RUNNING")
    await job.until_steps()
    await asyncio.to_thread(local_power.reboot, world.node("n3"))
    await job.until_phase("RUNNING", generation=2)
    assert cycles(world) == 1, await job.incidents()
    assert sorted(slot.node for slot in (await job.state()).slots) == ["n1", "n2", "n3"]
    (first,) = (await job.state()).incidents or (await job.incidents())
    decided = [(one.decision, one.strategy) for one in first.decisions]
    assert decided == [("Repair", "REBOOT_NODE"), ("Relaunch", None)]
    assert "n3 was power-cycled" in first.decisions[-1].reason
    await world.tidy(job)
