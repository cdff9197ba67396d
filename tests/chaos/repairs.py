"""`python -m tests.chaos.repairs [--rounds 10] [--seed 1]`: deaths during repairs.

Any process dies while a node is examined, rebooted and examined again.

Each round breaks a rank on a node that DCGM calls sick until it is rebooted, and hits a victim at a
random moment between the fault and the next launch. Asked afterwards: was the node ordered to
reboot at most once, was it down no later than the new ranks came up on it, was nothing left
half-way? Real agents, a real server and worker; `dcgmi` and NVML are doubles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relaunch.backends.local import cut, heal, reboot
from tests.chaos.world import Job, World, chaos_policy, eventually
from tests.doubles.install import build_nvml, install_nvml, install_tool, pids
from tests.fakes.nodes import Sick
from tests.fakes.nodes.health import diagnosed

SICK, WELL = diagnosed(1, 2, (Sick(remap_pending=0),)), diagnosed(1, 2, ())
VICTIMS = ("worker", "server", "session", "dcgmi", "cut controller", "power")
WINDOW = 9.0
"""Seconds from the fault to the new ranks where nothing is hit: two examinations of a second, a
reboot that is looked at every five."""
CUT_FOR = 4.0


def tell_dcgmi(world: World, node: str, says: tuple[int, str]) -> None:
    install_tool(world.node(node) / "bin", "dcgmi", stdout=says[1], exit_code=says[0], seconds=1)


def journal(world: World, node: str) -> list[dict[str, Any]]:
    path = world.node(node) / "reboots.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def heals_by_reboot(world: World, node: str) -> None:
    """Play the GPU: whatever remap was pending is carried out as the node boots."""
    path = world.node(node) / "boot_id"

    def boot() -> str:
        return path.read_text() if path.exists() else ""

    before = boot()

    async def rebooted() -> bool:
        return boot() != before

    await eventually(rebooted, "it never reboots", patience=1000.0, pause=0.02)
    tell_dcgmi(world, node, WELL)


async def hit(world: World, job: Job, node: str, victim: str) -> None:
    match victim:
        case "worker" | "server":
            process = getattr(world, victim)
            await process.end()
            await process.start()
        case "session":
            _kill(world.sessions(node))
        case "dcgmi":
            _kill(pids(world.node(node) / "bin", "dcgmi"))
        case "cut controller":
            cut(world.node(node), ("controller-in", "controller-out"))
            await asyncio.sleep(CUT_FOR)
            heal(world.node(node))
        case "power":
            await asyncio.to_thread(reboot, world.node(node))


def _kill(found: list[int]) -> None:
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


async def play(world: World, victim: str, dice: random.Random) -> str:
    """Return how the job went on.

    The kill of dcgmi or the power cut may have made an examination or a repair fail.
    """
    node = "n2"
    (world.node(node) / "reboots.jsonl").unlink(missing_ok=True)
    tell_dcgmi(world, node, SICK)
    healing = asyncio.create_task(heals_by_reboot(world, node))
    job = await world.submit(policy=chaos_policy(extends="ecs-reboot-once", hang={}))
    try:
        await job.until_phase("RUNNING", generation=1)
        await job.until_steps()
        (job.folder / "fail.1").write_text("ValueError: boom")
        delay = dice.uniform(0.0, WINDOW)
        await asyncio.sleep(delay)
        await hit(world, job, node, victim)
        phase, generation = await settled(job)
        ordered = [one for one in journal(world, node) if one.get("id")]
        boots = {one["boot_id"] for one in ordered}
        assert len(ordered) == len(boots) <= 1, (
            f"{victim} after {delay:.2f} s: ordered to reboot more than once: {ordered}"
        )
        if (phase, generation) == ("RUNNING", 2):
            await job.until_steps()
        else:
            assert phase == "FAILED", (
                f"{victim} after {delay:.2f} s: {phase} in generation {generation}"
            )
            assert victim in ("dcgmi", "power"), (
                f"{victim} after {delay:.2f} s: failed: {(await job.state()).reason}"
            )
        return f"{phase} in generation {generation}"
    finally:
        healing.cancel()
        await world.tidy(job)


async def settled(job: Job) -> tuple[str, int]:
    """Wait for the next generation, or the end."""

    async def there() -> tuple[str, int] | None:
        phase, generation = await job.phase()
        return (
            (phase, generation)
            if phase == "FAILED" or (phase == "RUNNING" and generation > 1)
            else None
        )

    return await eventually(there, "neither trains again nor ends", patience=150.0)


async def run(rounds: int, seed: int, victims: tuple[str, ...], say: Callable[[str], None]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="relaunch-repairs-") as folder:
        library = build_nvml(Path(folder) / "nvml")
        async with World(Path(folder) / "world", 118, gpus=1) as world:
            for name in world.names:
                install_nvml(world.node(name) / "lib", library, "driver 570.124.06\ngpus 1\n")
                tell_dcgmi(world, name, WELL)
            for victim in victims:
                ends: Counter[str] = Counter()
                begun = time.monotonic()
                for number in range(rounds):
                    try:
                        ends[
                            await play(world, victim, random.Random(f"{seed}/{victim}/{number}"))
                        ] += 1
                    except AssertionError as error:
                        failed += 1
                        ends["broken"] += 1
                        say(f"  round {number}: {error}")
                say(f"{victim}: {dict(ends)} in {time.monotonic() - begun:.0f} s")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    arguments = parser.parse_args()
    failed = asyncio.run(
        run(
            arguments.rounds,
            arguments.seed,
            tuple(arguments.victims),
            lambda text: print(text, flush=True),
        )
    )
    print(f"{failed} of {arguments.rounds * len(arguments.victims)} rounds broke a promise")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
