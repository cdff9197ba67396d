"""Examining and repairing local nodes for real.

Real agents and processes, NVML's own bindings; doubles of NVIDIA's programs.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.pool.nodes import PROBE_LIFETIME
from tests.chaos.world import FLEET, Job, World, chaos_policy, eventually
from tests.doubles.cards import H100, Cards, write
from tests.doubles.install import build_nvml, calls, install_nvml, install_tool
from tests.fakes.nodes import Sick
from tests.fakes.nodes.health import diagnosed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
PENDING = diagnosed(1, 2, (Sick(remap_pending=0),))
HEALTHY = diagnosed(1, 2, ())
ONE_GPU = "driver 570.124.06\ngpus 1\n"


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, nvml: Path) -> AsyncIterator[World]:
    async with World(tmp_path_factory.mktemp("e2e") / "world", 117, gpus=1) as made:
        for name in made.names:  # before it is connected to: then it looks there for network cards
            Cards(made.node(name) / "sys")
        yield made


@pytest.fixture(autouse=True)
def healthy(world: World, nvml: Path) -> None:
    for name in world.names:
        install_nvml(world.node(name) / "lib", nvml, ONE_GPU)
        (world.node(name) / "bin" / "dcgmi.calls").unlink(missing_ok=True)
        (world.node(name) / "reboots.jsonl").unlink(
            missing_ok=True
        )  # two in three days are all that a node gets
        tell_dcgm(world, name, HEALTHY)
        install_tool(world.node(name) / "bin", "nvidia-smi", stdout="All done.\n")


def tell_dcgm(
    world: World, node: str, says: tuple[int, str], *, once: bool = False, **more: Any
) -> None:
    """Have `dcgmi diag` say this, or say it once and be healthy from then on."""
    bin_ = world.node(node) / "bin"
    after = {"stdout": HEALTHY[1], "exit_code": HEALTHY[0]}
    then = {str(bin_ / "dcgmi.json"): json.dumps(after)} if once else {}
    install_tool(bin_, "dcgmi", stdout=says[1], exit_code=says[0], then=then, **more)


def boot_id(world: World, node: str) -> str:
    path = world.node(node) / "boot_id"
    return path.read_text() if path.exists() else ""


def reboots(world: World, node: str) -> list[dict[str, Any]]:
    path = world.node(node) / "reboots.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def starter(world: World, *words: str) -> tuple[int, str]:
    return await world.run_starter(*words)


async def broken(world: World, **changes: Any) -> tuple[Job, str]:
    """A job of which a rank has failed, and the node of that rank."""
    job = await world.submit(policy=chaos_policy(extends="ecs-reboot-once", hang={}, **changes))
    await job.until_phase("RUNNING", generation=1)
    await job.until_steps()
    node = (await job.state()).slots[1].node
    return job, node


def fail(job: Job) -> None:
    (job.folder / "fail.1").write_text("ValueError: boom")


async def decisions(job: Job) -> list[tuple[str, str | None]]:
    return [
        (d.decision, d.strategy) for incident in await job.incidents() for d in incident.decisions
    ]


async def test_s1_3_s1_5_s1_6_a_sick_node_is_rebooted_once_and_proven(
    world: World,
) -> None:
    job, node = await broken(world)
    before = boot_id(world, node)
    tell_dcgm(world, node, PENDING, once=True)
    fail(job)
    await job.until_phase("RUNNING", generation=2)
    assert await decisions(job) == [
        ("Examine", None),
        ("Repair", "REBOOT_NODE"),
        ("Relaunch", None),
    ]
    assert boot_id(world, node) != before
    assert len(reboots(world, node)) == 1
    assert [words[:3] for words in calls(world.node(node) / "bin", "dcgmi")] == [
        ["diag", "-r", "2"]
    ] * 2, "before and after"
    await world.tidy(job)


async def test_a_node_that_says_it_is_unfit_is_granted_to_no_job(world: World) -> None:
    unfit, *others = world.names
    (world.node(unfit) / "lib" / "nvml.txt").write_text(ONE_GPU + "recovery 0 1\n")
    await asyncio.sleep(PROBE_LIFETIME.total_seconds() + 1)  # what was read before counts no more
    job = await world.submit(nodes=len(others), policy=chaos_policy(hang={}))
    await job.until_phase("RUNNING", generation=1)
    assert sorted(slot.node for slot in (await job.state()).slots) == sorted(others)
    status, text = await starter(world, "nodes", "list", "--fleet", FLEET, "--json")
    found = next(one for one in json.loads(text) if one["name"] == unfit)
    assert (status, found["state"]) == (0, "suspect"), text
    assert "the driver asks for a reset of the GPU" in found["inventory"]["fault"]
    status, text = await starter(world, "nodes", "list", "--fleet", FLEET)
    assert "asks for a reset of the GPU" in text
    larger = await world.submit(nodes=1, policy=chaos_policy(hang={}))
    await larger.until_phase("QUEUED")
    (world.node(unfit) / "lib" / "nvml.txt").write_text(ONE_GPU)
    await starter(world, "nodes", "release", unfit, "--fleet", FLEET, "--reason", "it was reset")
    await larger.until_phase("RUNNING", generation=1)
    assert [slot.node for slot in (await larger.state()).slots] == [unfit]
    await world.tidy(larger)
    await world.tidy(job)


@pytest.mark.long
async def test_s1_5_on_a_healthy_node_the_job_fails_without_reboot(
    world: World,
) -> None:
    job, node = await broken(world)
    before = boot_id(world, node)
    fail(job)
    await job.until_phase("FAILED")
    assert (await decisions(job), boot_id(world, node)) == (
        [("Examine", None), ("Stop", None)],
        before,
    )
    await world.tidy(job)


@pytest.mark.long
async def test_a_dead_link_makes_a_node_unhealthy(world: World) -> None:
    cards = Cards(world.node("n1") / "sys")
    ports = [cards.add_rdma(name) for name in H100[:4]]
    check = ("nodes", "check", "n1", "--fleet", FLEET, "--level", "0", "--json")
    status, text = await starter(world, *check)
    assert (status, json.loads(text)[0]["health"]) == (0, "HEALTHY"), text
    write(ports[2], {"state": "1: DOWN", "phys_state": "2: Polling"})
    status, text = await starter(world, *check)
    (found,) = json.loads(text)
    assert (status, found["health"]) == (1, "UNHEALTHY"), text
    assert "mlx5_4 port 1 is DOWN (Polling); its 3 siblings are ACTIVE at 400 Gb/s" in text
    shutil.rmtree(world.node("n1") / "sys" / "class" / "infiniband")
    (world.node("n1") / "links.json").unlink()


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", [pytest.param("while it is examined", marks=pytest.mark.long), "while it reboots"]
)
async def test_s1_6_s5_1_a_worker_killed_midway_repeats_nothing(world: World, moment: str) -> None:
    job, node = await broken(world)
    known = len(reboots(world, node))
    tell_dcgm(world, node, PENDING, once=True, seconds=2 if moment == "while it is examined" else 0)
    fail(job)

    async def reached() -> bool:
        if moment == "while it is examined":
            return bool(calls(world.node(node) / "bin", "dcgmi"))
        return len(reboots(world, node)) > known

    await eventually(reached, f"never {moment}")
    await world.worker.end()
    await world.worker.start()
    await job.until_phase("RUNNING", generation=2)
    assert len(reboots(world, node)) == known + 1, (
        await job.incidents(),
        calls(world.node(node) / "bin", "dcgmi"),
    )
    await world.tidy(job)


@pytest.mark.long
async def test_s4_1_a_gpu_is_reset_by_bus_id_and_the_job_stays_there(
    world: World, nvml: Path
) -> None:
    job = await world.submit(policy=chaos_policy(extends="default", hang={}))
    await job.until_phase("RUNNING", generation=1)
    await job.until_steps()
    node = (await job.state()).slots[1].node
    folder = world.node(node)
    (folder / "kernel.log").write_text("")
    (folder / "lib" / "nvml.txt").write_text(ONE_GPU + "remapped 0 0 1 1 0\n")
    install_tool(
        folder / "bin",
        "nvidia-smi",
        stdout="reset\n",
        then={str(folder / "lib" / "nvml.txt"): ONE_GPU},
    )
    status, text = await starter(
        world, "nodes", "check", node, "--fleet", FLEET, "--level", "0", "--json"
    )
    found = json.loads(text)[0]
    assert (status, found["health"], found["state"], found["job"]) == (
        1,
        "UNHEALTHY",
        "busy",
        job.name,
    )
    status, text = await starter(
        world,
        "nodes",
        "repair",
        node,
        "--fleet",
        FLEET,
        "--reset-gpus",
        "--reason",
        "remap pending",
    )
    assert (status, "refused" in text, job.name in text) == (1, True, True), (
        "never while ranks run there"
    )
    await world.tidy(job)
    status, text = await starter(
        world,
        "nodes",
        "repair",
        node,
        "--fleet",
        FLEET,
        "--reset-gpus",
        "--reason",
        "remap pending",
    )
    assert (status, "done" in text) == (0, True), text
    assert [words[0] for words in calls(folder / "bin", "nvidia-smi")] == ["--gpu-reset"]
    status, text = await starter(world, "nodes", "list", "--fleet", FLEET)
    assert status == 0
    assert all(name in text for name in world.names)
    (folder / "kernel.log").unlink()
