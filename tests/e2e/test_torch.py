"""The torch example under the preset `torchelastic`, on real ranks.

It runs where there is a Python with torch.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.chaos.world import ROOT, World, chaos_policy, eventually
from tests.torch_python import PYTHON

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.needs_module("torch.distributed"),
]


async def test_s3_2_ddp_resumes_from_a_checkpoint_after_a_killed_rank(
    world: World,
) -> None:
    checkpoint = world.folder / "ddp.pt"
    example = str(ROOT / "examples/train_ddp.py")
    command = [PYTHON, example, "--checkpoint", str(checkpoint), "--steps", "60", "--pause", "0.2"]
    # A rank imports torch for seconds before its first step, and an idle machine is not promised.
    policy = chaos_policy(extends="torchelastic", hang={}, times={"stop_grace": "2s"})
    job = await world.submit(command=command, policy=policy)
    await job.until_phase("RUNNING", generation=1)

    async def advanced() -> bool:
        return checkpoint.exists()

    await eventually(advanced, "no checkpoint is written", 120.0)
    await job.until_watched()
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    await job.until_phase("SUCCEEDED", patience=120.0)
    state = await job.state()
    assert (state.generation, state.restarts_spent) == (2, 1)
    assert state.progress is not None and state.progress.step == 60
    await world.tidy(job)
