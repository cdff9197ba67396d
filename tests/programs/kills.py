"""Kill ranks at random moments, and look for lines that were printed and are not in their logs.

    python -m tests.programs.kills --kills 1000

Each rank prints numbered lines with a bare `print` in the environment of a user's shell, and counts
in a shared mapping each line that `print` has returned from. Eight ranks of a job on two nodes are
killed with SIGKILL within some milliseconds; the job launches them again, and `relaunch logs` is
asked for the generation that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
from pathlib import Path

from relaunch.evidence.causes import Cause
from tests.chaos.world import Job, World, chaos_policy, eventually

PROGRAM = """
import mmap, os, random, struct, time
name = "%s.%s" % (os.environ["RELAUNCH_TOKEN"].rsplit("/", 1)[1], os.environ["RANK"])
with open(name, "w+b") as file:
    file.truncate(8)
    printed = mmap.mmap(file.fileno(), 8)
letters, line = random.Random(name), 0
while True:
    line += 1
    print(line, "x" * letters.randrange(200))
    printed[:8] = struct.pack("<Q", line)
    time.sleep(letters.random() / 1000)
"""
RANKS = 8
LINE = re.compile(r"\[rank (\d+)\]\s+(\d+) ")


async def kill_generation(job: Job, generation: int, chance: random.Random) -> set[int]:
    """Kill all ranks at random moments; return those that had not ended before."""
    await job.until_phase("RUNNING", generation=generation)
    counters = [job.folder / f"{generation}.{rank}" for rank in range(RANKS)]

    async def counting() -> bool:
        return all(path.exists() and path.stat().st_size == 8 for path in counters)

    await eventually(counting, "the ranks do not count")
    ranks = {read_rank(pid): pid for pid in job.rank_pids()}
    await asyncio.sleep(chance.random() / 2)
    killed = set()
    for rank, pid in sorted(ranks.items(), key=lambda _: chance.random()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed.add(rank)
        await asyncio.sleep(chance.random() / 200)
    return killed


def read_rank(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(v[5:] for v in variables if v.startswith(b"RANK=")))


async def count_lost(job: Job, generation: int, killed: set[int]) -> tuple[int, int]:
    """Return how many lines the killed ranks had printed, and how many of them are not found."""
    code, text = await job.world.run_starter("logs", job.name, "--generation", str(generation))
    assert code == 0, text
    found: dict[int, set[int]] = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    printed = lost = 0
    for rank in killed:
        (count,) = struct.unpack("<Q", (job.folder / f"{generation}.{rank}").read_bytes())
        printed += count
        lost += len(set(range(1, count + 1)) - found.get(rank, set()))
    return printed, lost


async def run(kills: int, seed: int, folder: Path) -> int:
    chance = random.Random(seed)
    forever = {cause.value: [{"strategy": "RESTART_IN_PLACE", "spends": False}] for cause in Cause}
    policy = chaos_policy(causes=forever, hang={}, no_progress_stop="off", no_progress_ask="off")
    done = printed = lost = generation = 0
    async with World(folder / "world", 30, spares=0, answer_within=5.0) as world:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        job = await world.submit(
            name="kills",
            nproc=RANKS // 2,
            policy=policy,
            command=[sys.executable, str(program)],
            workdir=str(world.folder / "jobs" / "kills"),
        )
        while done < kills:
            generation += 1
            killed = await kill_generation(job, generation, chance)
            of_them, missing = await count_lost(job, generation, killed)
            done, printed, lost = done + len(killed), printed + of_them, lost + missing
            print(f"{done} killed, {printed} lines printed, {lost} lost", flush=True)
        await job.signal("cancel")
        await job.until_phase("CANCELLED")
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        return asyncio.run(run(given.kills, given.seed, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
