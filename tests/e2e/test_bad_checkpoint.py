"""A program that resumes from a torn checkpoint: a person is asked, and the job goes on."""

from __future__ import annotations

import pytest

from relaunch.cli.jobs import handle_of
from tests.chaos.world import World, chaos_policy

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

PROGRAM = """
import os, pickle, re, signal, sys, time

folder, last, torn = sys.argv[1], 12, 8

def load_newest():
    saved = [int(name[5:-4]) for name in os.listdir(folder) if re.fullmatch(r"step_\\d+.pkl", name)]
    if not saved:
        return 0
    with open(f"{folder}/step_{max(saved)}.pkl", "rb") as file:
        return pickle.load(file)["step"]

first = load_newest() + 1
for step in range(first, last + 1):
    data = pickle.dumps({"step": step, "weights": list(range(1000))})
    is_torn = step == torn and first == 1
    with open(f"{folder}/step_{step}.pkl", "wb") as file:
        file.write(data[: len(data) // 2] if is_torn else data)
    if is_torn:
        os.kill(os.getpid(), signal.SIGKILL)  # while it saves
    print(f"step {step}", flush=True)
    time.sleep(0.2)
"""


async def test_a_torn_checkpoint_asks_and_the_job_goes_on_without_it(world: World) -> None:
    folder = world.folder / "jobs" / "torn-checkpoint"
    saved = folder / "out"
    saved.mkdir(parents=True)
    program = folder / "train.py"
    program.write_text(PROGRAM)
    job = await world.submit(
        name="torn-checkpoint",
        nodes=1,
        command=[world.python, "-S", str(program), str(saved)],
        progress={"log_pattern": r"step (?P<step>\d+)"},
        policy=chaos_policy(max_restarts=44),
    )
    await job.until_phase("WAITING_FOR_PERSON")
    state = await job.state()
    # The first is the kill, the others fail at the checkpoint.
    assert (state.generation, state.restarts_spent) == (3, 2)
    assert state.furthest_step == 7
    assert "UnpicklingError: pickle data was truncated" in state.reason
    assert "2 resumed generations in a row" in state.reason
    assert state.asked is not None and "the newest checkpoint" in state.asked.question

    (saved / "step_8.pkl").rename(saved / "step_8.torn")
    answer = {"decision": "approve", "reason": "step 8 is moved away", "by": "ada"}
    await handle_of(world.client, job.name).execute_update("answer", answer)
    await job.until_phase("SUCCEEDED")
    state = await job.state()
    assert state.generation == 4
    # Its last step may come with its end, which counts no failed resume but keeps the last error.
    assert state.failed_resume is None or state.failed_resume.count == 0
    assert state.incidents[-1].recovered is not None
    await world.tidy(job)
