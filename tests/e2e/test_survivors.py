"""Ranks that SIGTERM does not end, after a fault of their gang: killed at once, or not."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.chaos.world import Job, World, chaos_policy

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]

STUCK = ("--stubborn", "--stand-still")
"""A rank that waits in a collective and has a handler of SIGTERM, which is never run."""


async def recover(job: Job) -> float:
    """Kill a rank on a node that others are on, too; return the seconds to the next generation."""
    await job.until_phase("RUNNING")
    await job.until_watched()
    survivors = set(job.rank_pids())
    begun = time.monotonic()
    os.kill(job.rank_pids("n1")[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    took = time.monotonic() - begun
    await job.until_steps()
    assert not survivors & set(job.rank_pids())
    assert job.lines("violations") == []
    return took


async def end(job: Job) -> None:
    job.let_end()
    await job.until_phase("SUCCEEDED")
    await job.world.tidy(job)


async def test_survivors_are_killed_once_a_checkpoint_is_safe(
    world: World,
) -> None:
    policy = chaos_policy({"stop_grace": "10m"}, kill_survivors="checkpointed")  # no test waits it
    job = await world.submit(name="killed", nproc=2, rank=(*STUCK, "--saves"), policy=policy)
    took = await recover(job)
    print(f"{took:.1f} s with a checkpoint, of a stop_grace of 600 s")
    await end(job)


async def test_without_a_checkpoint_they_have_their_time(world: World) -> None:
    policy = chaos_policy({"stop_grace": "4s"}, kill_survivors="checkpointed")
    job = await world.submit(name="spared", nproc=2, rank=STUCK, policy=policy)
    took = await recover(job)
    print(f"{took:.1f} s without a checkpoint, of a stop_grace of 4 s")
    assert took >= 4.0
    await end(job)
