"""A job whose container hides the GPUs of every node says so on two nodes, then asks."""

from __future__ import annotations

import pytest

from relaunch.cli.jobs import handle_of
from tests.chaos.world import World, chaos_policy

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

# The last words of torch 2.11 on an H200 with CUDA_VISIBLE_DEVICES= (tests/gpu/recorded).
PROGRAM = """
import os, sys
if os.path.exists(sys.argv[1]):
    sys.exit()
sys.exit('''Traceback (most recent call last):
  File "train.py", line 97, in main
    torch.cuda.set_device(0)
  File "/opt/torch/lib/python3.12/site-packages/torch/cuda/__init__.py", line 638, in set_device
    torch._C._cuda_setDevice(device)
  File "/opt/torch/lib/python3.12/site-packages/torch/cuda/__init__.py", line 478, in _lazy_init
    torch._C._cuda_init()
RuntimeError: No CUDA GPUs are available''')
"""


async def test_hidden_gpus_ask_on_the_second_node(world: World) -> None:
    folder = world.folder / "jobs" / "hidden-gpus"
    folder.mkdir(parents=True)
    program = folder / "train.py"
    program.write_text(PROGRAM)
    job = await world.submit(
        name="hidden-gpus",
        nodes=1,
        command=[world.python, "-S", str(program), str(folder / "image-is-mended")],
        policy=chaos_policy(max_restarts=1),
    )
    await job.until_phase("WAITING_FOR_PERSON")
    state = await job.state()
    assert state.generation == 4, state.reason
    assert (state.restarts_spent, state.avoided) == (0, ())
    assert "which was not found unhealthy either" in state.reason
    (incident,) = state.incidents or (state.incident,)
    assert incident is not None
    assert len(incident.nodes) == 2

    (folder / "image-is-mended").touch()
    answer = {"decision": "approve", "reason": "the image has CUDA now", "by": "ada"}
    await handle_of(world.client, job.name).execute_update("answer", answer)
    await job.until_phase("SUCCEEDED")
    await world.tidy(job)
