"""A job that names modules to import ahead, through the whole service: its ranks are forked."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.chaos.world import World, chaos_policy, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

PROGRAM = """
import os, sys, time
ahead = "decimal" in sys.modules
name = f"{sys.argv[1]}/{os.environ['RELAUNCH_GENERATION']}-{os.environ['RANK']}"
with open(name + ".partial", "w") as file:
    file.write(f"{os.getpid()} {ahead}")
os.rename(name + ".partial", name)
while not os.path.exists(sys.argv[1] + "/end"):
    time.sleep(0.05)
"""


async def test_ranks_are_forked_after_a_kill_and_a_dead_worker(world: World) -> None:
    folder = world.folder / "jobs" / "warm"
    folder.mkdir(parents=True)
    program = folder / "train.py"
    program.write_text(PROGRAM)
    job = await world.submit(
        name="warm",
        nodes=2,
        nproc_per_node=2,
        command=[sys.executable, str(program), str(folder)],
        warm=["decimal"],
        policy=chaos_policy({"lease": "5m"}, max_restarts=4),
    )

    async def ready() -> bool:
        nodes = [slot.node for slot in (await job.state()).slots]
        records = [job.on(node) / "warm" / "standby.json" for node in nodes]
        return all(
            path.exists() and json.loads(path.read_text())["state"] == "ready" for path in records
        )

    async def began(generation: int) -> dict[int, tuple[int, bool]] | None:
        files = {rank: folder / f"{generation}-{rank}" for rank in range(4)}
        if not all(path.exists() for path in files.values()):
            return None
        words = {rank: path.read_text().split() for rank, path in files.items()}
        return {rank: (int(pid), ahead == "True") for rank, (pid, ahead) in words.items()}

    first = await eventually(lambda: began(1), "the first generation does not begin")
    assert not any(ahead for _, ahead in first.values())
    for generation in (2, 3):
        await job.until_phase("RUNNING", generation=generation - 1)
        await job.until(ready, "no Python imports ahead")
        ranks = await began(generation - 1)
        assert ranks is not None
        if generation == 3:
            await world.worker.end()
        os.kill(ranks[generation][0], signal.SIGKILL)
        if generation == 3:
            await world.worker.start()
        again = await eventually(lambda g=generation: began(g), "it is not launched again")
        await job.until_phase("RUNNING", generation=generation)
        state = await job.state()
        assert all(ahead for _, ahead in again.values()), state.reason
        assert state.generation == generation
        assert "its ranks were forked from a Python that had imported ahead" in state.reason
    (folder / "end").touch()
    await job.until_phase("SUCCEEDED")

    async def has_ended() -> bool:
        # On spares it lives on for the time of a lost lease, which is long here.
        return not any(
            list(world.node(name).glob("jobs/*/warm/standby.json"))
            and _is_alive(json.loads(path.read_text())["pid"])
            for name in world.names[:2]
            for path in world.node(name).glob("jobs/*/warm/standby.json")
        )

    await eventually(has_ended, "a Python of the job outlives it")
    await world.tidy(job)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
