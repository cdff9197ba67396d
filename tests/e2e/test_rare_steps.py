"""Programs in which all ranks say a step once and one of them says the others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.chaos.world import Job, World, chaos_policy

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

PROGRAM = """
import os, sys, time

folder, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def all_reduce(step):
    with open(f"{folder}/{rank}.part", "w") as file:
        file.write(str(step))
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}")
    for other in (f"{folder}/{number}" for number in range(world)):
        while not os.path.exists(other) or int(open(other).read()) < step:
            time.sleep(0.05)

def wait_for_data():
    while os.path.exists(f"{folder}/stall"):
        time.sleep(0.05)

print("resumed at step 60", flush=True)
step = 60
while not os.path.exists(f"{folder}/last") or step < int(open(f"{folder}/last").read()):
    step += 1
    time.sleep(0.2)
    if rank == 0:
        wait_for_data()
        if os.path.exists(f"{folder}/stop") and not os.path.exists(f"{folder}/last"):
            with open(f"{folder}/last.part", "w") as file:
                file.write(str(step + 1))
            os.rename(f"{folder}/last.part", f"{folder}/last")
    all_reduce(step)
    if rank == 0:
        print(f"step {step} loss 2.31", flush=True)
"""
AFTER_S = 6.0
"""`hang.after`, as its user wrote it: longer than a busy machine keeps a heartbeat back."""


async def submit(world: World, name: str) -> Job:
    folder = world.folder / "jobs" / name
    folder.mkdir(parents=True)
    program = folder / "train.py"
    program.write_text(PROGRAM)
    job = await world.submit(
        name=name,
        nproc=2,
        command=[world.python, "-S", str(program), str(folder)],
        progress={"log_pattern": r"step (?P<step>\d+)"},
        policy=chaos_policy(
            hang={"after": f"{AFTER_S:g}s", "first_step": "60s"},
            causes={"HANG": [{"strategy": "FAIL"}]},
        ),
    )
    await job.until_phase("RUNNING")
    return job


async def train_for(job: Job, seconds: float) -> None:
    """Wait until so much time has passed and training has advanced as far as it takes."""
    until, step = time.monotonic() + seconds, read_step(job.folder) + int(seconds)

    async def has_trained() -> bool:
        assert (await job.phase())[0] in ("RUNNING", "LAUNCHING"), await job.look()
        return time.monotonic() > until and read_step(job.folder) >= step

    await job.until(has_trained, "training does not advance")


def read_step(folder: Path) -> int:
    try:
        return int((folder / "0").read_text())
    except FileNotFoundError:
        return 60


async def test_steps_that_one_rank_prints_are_no_hang_of_the_others(world: World) -> None:
    job = await submit(world, "rare-steps")
    await train_for(job, 3 * AFTER_S)
    # The next watch hears at once that three ranks have printed nothing for long.
    await world.worker.end()
    await asyncio.sleep(1.0)
    await world.worker.start()
    await train_for(job, 2 * AFTER_S)

    async def shows_steps() -> bool:
        watch = (await job.look()).watch
        return watch is not None and watch.step is not None and watch.step > 60

    await job.until(shows_steps, "the step of the ranks that print none is shown")
    job.let_end()
    await job.until_phase("SUCCEEDED")
    state = await job.state()
    assert (state.generation, await job.incidents()) == (1, [])
    assert state.progress is not None and state.progress.step >= 60 + 5 * AFTER_S
    await world.tidy(job)


async def test_the_only_rank_that_prints_steps_is_named_when_it_stops(world: World) -> None:
    job = await submit(world, "rare-steps-stop")
    await train_for(job, AFTER_S)
    (job.folder / "stall").touch()
    await job.until_phase("FAILED")
    (incident,) = await job.incidents()
    assert (str(incident.cause), incident.generation) == ("HANG", 1)
    assert (incident.ranks, incident.nodes) == ((0,), ("n1",)), incident.reason
    assert f"step {read_step(job.folder)} has not changed for" in incident.reason
    await world.tidy(job)
