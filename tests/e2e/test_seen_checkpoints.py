"""A program that says nothing of its checkpoints: they are found in the folder of the job file."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta

import pytest

from relaunch.job.accounts import Account
from relaunch.job.ledger import settle
from tests.chaos.world import World, chaos_policy, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

PROGRAM = """
import os, pathlib, re, sys, time, zipfile

folder = pathlib.Path(sys.argv[1])
saved = [int(one.stem[5:]) for one in folder.glob("step_*.pt")] if folder.is_dir() else []
step = max(saved, default=0)
while not (folder.parent / "stop").exists():
    step += 1
    print(f"step {step}", flush=True)
    if step % 10 == 0 and step <= 20:
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / f"step_{step}.pt.part", "w") as file:
            file.writestr("archive/data.pkl", b"x" * 1000)
        (folder / f"step_{step}.pt.part").rename(folder / f"step_{step}.pt")
    time.sleep(0.5)
"""


async def test_a_checkpoint_in_the_folder_says_what_a_fault_undid(world: World) -> None:
    folder = world.folder / "jobs" / "seen-checkpoints"
    folder.mkdir(parents=True)
    program = folder / "train.py"
    program.write_text(PROGRAM)
    job = await world.submit(
        name="seen-checkpoints",
        nodes=1,
        command=[world.python, "-S", str(program), str(folder / "out")],
        workdir=str(folder),
        progress={"log_pattern": r"step (?P<step>\d+)"},
        checkpoint={"directory": "out", "pattern": "step_{step}.pt"},
        policy=chaos_policy(max_restarts=5),
    )
    await job.until_phase("RUNNING", generation=1)

    async def find() -> bool:
        progress = (await job.look()).watch
        return progress is not None and progress.checkpoint == 20

    await eventually(find, "the checkpoint of step 20 is not found", 180.0)
    at = os.stat(folder / "out" / "step_20.pt").st_mtime
    killed = datetime.now(UTC).timestamp()
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    state = await job.state()
    assert state.ledger.newest_checkpoint == 20 and state.ledger.reports_checkpoints
    state = settle(state, datetime.now(UTC))
    lost = state.ledger.totals[Account.LOST_WORK]
    # Both are times of this machine; the end of the rank is seen a little later.
    assert abs(lost - timedelta(seconds=killed - at)) < timedelta(seconds=2), (lost, killed - at)
    job.let_end()
    await job.until_phase("SUCCEEDED")
    await world.tidy(job)
