"""A node's state is removed while its ranks run.

Their shim makes it again, as the place where they were started:
docs/decisions/0025-state-that-outlives-tmpfiles.md.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from relaunch.evidence.causes import Cause
from tests.chaos.world import RANK_PROGRAM, Job, World, chaos_policy

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
LEASE = 3.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with World(
        tmp_path_factory.mktemp("e2e") / "world", 125, nodes=2, spares=1, answer_within=5.0
    ) as made:
        yield made


async def forget(world: World, node: str) -> None:
    """Delete a node's state, as a person does who tidies up, and the session that knows of it."""
    shutil.rmtree(world.node(node))
    for pid in world.sessions(node):
        os.kill(pid, signal.SIGKILL)


async def running(world: World, times: dict[str, str], **spec: Any) -> Job:
    """Start a job whose ranks write nothing into the node's state, and so live on without it."""
    name = f"j{uuid.uuid4().hex[:8]}"
    folder = world.folder / "jobs" / name
    words = " ".join(map(shlex.quote, (world.python, "-S", str(RANK_PROGRAM), str(folder))))
    command = ["sh", "-c", f"RELAUNCH_PROGRESS_FILE={folder}/progress.$RANK exec {words}"]
    job = await world.submit(name=name, policy=chaos_policy(times), command=command, **spec)
    await job.until_phase("RUNNING", generation=1)
    await asyncio.sleep(LEASE + 1.0)  # who still lives then has been renewed
    assert job.rank_pids()
    return job


async def finish(world: World, job: Job) -> None:
    job.let_end()
    await job.until_phase("SUCCEEDED")
    await world.tidy(job)


@pytest.mark.long
async def test_a_gang_whose_state_was_removed_restarts_in_place(
    world: World,
) -> None:
    job = await running(world, {})
    left = job.rank_pids("n2")
    assert left
    await forget(world, "n2")
    os.kill(job.rank_pids("n1")[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    assert job.lines("violations") == []
    assert not set(left) & set(job.rank_pids())
    state = await job.state()
    assert [slot.node for slot in state.slots] == ["n1", "n2"]
    assert [one.generation for one in await job.incidents()] == [1]
    await finish(world, job)


@pytest.mark.long
async def test_lone_ranks_whose_state_was_removed_train_on(world: World) -> None:
    job = await running(world, {"ask_after": "1s", "lost_after": "1s"}, nodes=1)
    (node,) = [slot.node for slot in (await job.state()).slots]
    left = job.rank_pids(node)
    await forget(world, node)
    await asyncio.sleep(LEASE + 1.0)  # who still lives then was renewed since
    await job.until_steps()
    # On a busy machine it may be silent for a second, and come back: that stops nothing.
    await job.until_phase("RUNNING", generation=1)
    assert job.rank_pids() == left
    assert {one.cause for one in await job.incidents()} <= {Cause.NODE_LOST}
    assert job.lines("violations") == []
    await finish(world, job)
