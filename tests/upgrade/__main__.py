"""Upgrade a service under many training jobs, with faults, and roll it back once.

    python -m tests.upgrade --jobs 50 --upgrades 5 [--work FOLDER] [--seed N]

Every build gives a command that no other gives, and has fields in states, policy and messages that
no other knows. During each upgrade ranks of some jobs are killed. Printed is a row for each step;
the exit code is 1 if a job was touched that had no fault, or one did not recover from its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from relaunch.builds import list_running
from tests.chaos.checks import violations
from tests.chaos.rounds import Expected
from tests.chaos.world import QUEUE, Job, Process, World, chaos_policy, eventually
from tests.upgrade.builds import COMMANDS, FIELDS, OtherBuild, make_build

NODES = 8
FAULTS = 3
"""Jobs of which a rank is killed during each step."""
PATIENCE_S = 900.0
DISTURBANCES = ("nothing", "command", "server", "new worker")
"""What is killed while workflows move, in turn."""
DISTURBED_AFTER_S = 3.0
"""Seconds from the start of the command, which takes two to start on an idle machine."""
ATTEMPTS = 4
"""How often the command is repeated: it ends with an error when the server dies."""
STEP_S = "1.0"
PATIENT = chaos_policy(
    {
        "heartbeat": "2s",
        "lease": "90s",
        "lost_after": "45s",
        "fence_after": "15s",
        "stop_grace": "5s",
    },
    hang={"after": "10m", "first_step": "15m"},
)
"""Fifty jobs share two cores with their ranks: the machine is late, and no rank is lost by that."""


def processes() -> Iterator[tuple[int, bytes]]:
    """Process ids and command lines on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_bytes()


class Upgrades:
    def __init__(self, world: World, count: int, chance: random.Random) -> None:
        self.world = world
        self.count = count
        self.random = chance
        self.jobs: list[Job] = []
        self.faults: Counter[str] = Counter()
        """Ranks killed, by job."""
        self.pids: dict[str, list[int]] = {}
        """Ranks of each job, as last looked at."""
        self.wrong: list[str] = []
        self.disturbances = itertools.cycle(DISTURBANCES)

    async def begin(self) -> None:
        for number in range(self.count):
            job = await self.world.submit(
                nodes=1 + number % 2, policy=PATIENT, rank=("--step-time", STEP_S)
            )
            self.jobs.append(job)
        await self.settle()

    async def settle(self) -> None:
        """Wait until every job trains in the generation that its faults account for."""
        for job in self.jobs:
            generation = 1 + self.faults[job.name]
            await job.until_phase("RUNNING", generation=generation, patience=PATIENCE_S)
            await job.until_steps(1, patience=PATIENCE_S)
            if (await job.phase())[1] != generation:
                self.wrong.append(f"{job.name} is in generation {await job.phase()}")
            pids = sorted(job.rank_pids())
            if self.pids.get(job.name, pids) != pids:
                self.wrong.append(f"ranks of {job.name} were replaced without a fault")
            self.pids[job.name] = pids

    def harm(self) -> list[str]:
        harmed = self.random.sample(self.jobs, min(FAULTS, len(self.jobs)))
        for job in harmed:
            self.faults[job.name] += 1
            os.kill(self.random.choice(self.pids.pop(job.name)), signal.SIGKILL)
        return [job.name for job in harmed]

    async def move(
        self, build: OtherBuild, command: str, number: signal.Signals, old: Process
    ) -> tuple[Process, float]:
        """Move everything to a build; return its worker and how long it took, in seconds."""
        worker = await build.start_worker(self.world)
        harmed = self.harm()
        began = time.monotonic()
        words = (command,) if command == "upgrade" else (command, build.id)
        disturbance = next(self.disturbances)
        disturbing = asyncio.create_task(self.disturb(disturbance, worker))
        for _ in range(ATTEMPTS):
            code, said = await build.run(self.world, *words, "--within", "5m")
            if code == 0:
                break
        else:
            self.wrong.append(f"{command} to {build.id} ended with {code}: {said}")
        await disturbing
        took = time.monotonic() - began
        await old.end(number)
        await self.settle()
        await eventually(self._are_all_on(build.id), f"something is not on {build.id}")
        print(
            f"| {command} to {build.id} | {len(self.jobs)} | {len(harmed)} | {disturbance}"
            f" | {took:.1f} | {number.name} |",
            flush=True,
        )
        return worker, took

    async def disturb(self, what: str, worker: Process) -> None:
        """Kill something while workflows move."""
        await asyncio.sleep(DISTURBED_AFTER_S)
        if what == "server":
            await self.world.server.end()
            await self.world.server.start()
        elif what == "new worker":
            await worker.end()
            await worker.start()
        elif what == "command":
            for pid, words in processes():
                if b"starter.py" in words and b"--within" in words:
                    os.kill(pid, signal.SIGKILL)

    def _are_all_on(self, build: str) -> Callable[[], Awaitable[bool]]:
        async def look() -> bool:
            found = {one.id for one in await list_running(self.world.client, QUEUE, build)}
            return {f"job/{job.name}" for job in self.jobs} <= found

        return look

    async def end(self) -> None:
        for job in self.jobs:
            job.let_end()
        for job in self.jobs:
            await job.until_phase("SUCCEEDED", patience=PATIENCE_S)
            generation = 1 + self.faults[job.name]
            self.wrong += await violations(job, Expected(None, generation=generation))
            spent = (await job.state()).restarts_spent
            if spent > self.faults[job.name]:
                self.wrong.append(f"{job.name} spent {spent} restarts")


async def play(work: Path, jobs: int, upgrades: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    async with World(work / "world", 90, nodes=NODES, spares=0, answer_within=10.0) as world:
        played = Upgrades(world, jobs, chance)
        began = time.monotonic()
        await played.begin()
        print(f"{jobs} jobs train after {time.monotonic() - began:.0f} s", flush=True)
        print("| step | jobs | ranks killed | also killed | seconds | the old worker |")
        print("| -- | -- | -- | -- | -- | -- |", flush=True)
        worker, builds = world.worker, []
        for number in range(2, upgrades + 2):
            build = make_build(work, number, *COMMANDS, *FIELDS)
            builds.append(build)
            how = signal.SIGKILL if number % 2 else signal.SIGTERM
            worker, _ = await played.move(build, "upgrade", how, worker)
        if len(builds) > 1:
            await played.move(builds[-2], "rollback", signal.SIGTERM, worker)
        await played.end()
    return played.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--upgrades", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help="a new folder; default: a temporary one")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="upgrade-"))
    wrong = asyncio.run(play(work, arguments.jobs, arguments.upgrades, arguments.seed))
    print("\n".join(wrong) or "every job recovered from its own faults, and no other was touched")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
