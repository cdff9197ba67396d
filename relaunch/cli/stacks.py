"""Reads, through a worker, where the ranks of a job are executing now, and prints it."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from temporalio.client import ActivityFailureError, Client
from temporalio.common import RetryPolicy

from relaunch.cli import jobs
from relaunch.config import ConfigError
from relaunch.messages.logs import ReadStacksInput, ReadStacksOutput, Stack

START_TIMEOUT = 10.0
"""Seconds for a worker to start the activity."""
READ_TIMEOUT = 60.0
"""Seconds for all nodes, which are asked in parallel. Each has 20 to read its ranks, and may have
to be reached and be sent py-spy first."""


async def read(client: Client, task_queue: str, job: str, rank: int | None) -> ReadStacksOutput:
    """Read the stacks of the ranks of a job's newest generation.

    Raises:
        ConfigError: There are no ranks, or no worker answers.
    """
    now = await jobs.load_job(client, job)
    state = now.state
    if state is None:
        raise ConfigError(
            f"job {job}: no worker answers, and only a worker can read stacks: start one "
            "(`relaunch up` or `relaunch-worker`)"
        )
    if state.generation == 0 or not state.slots:
        raise ConfigError(
            f"job {job} has no ranks at the moment: it is {now.memo.get('phase') or state.phase}"
        )
    each = state.spec.ranks_per_node
    ranks = range(each * len(state.slots)) if rank is None else (rank,)
    if rank is not None and not 0 <= rank < each * len(state.slots):
        raise ConfigError(
            f"job {job} has no rank {rank}: expected 0 to {each * len(state.slots) - 1}"
        )
    within = timedelta(seconds=READ_TIMEOUT)
    try:
        answer: ReadStacksOutput = await client.execute_activity(
            "read_stacks",
            ReadStacksInput(
                fleet=state.spec.fleet,
                places=tuple((state.slots[one // each].node, one) for one in ranks),
                namespace=state.namespace,
                job=state.name,
                submission=state.submission,
                generation=state.generation,
            ),
            id=f"read_stacks/{state.name}/{state.generation}/{uuid.uuid4().hex}",
            task_queue=task_queue,
            result_type=ReadStacksOutput,
            schedule_to_start_timeout=timedelta(seconds=START_TIMEOUT),
            start_to_close_timeout=within,
            schedule_to_close_timeout=within + timedelta(seconds=START_TIMEOUT),
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary=f"stacks of {state.name}, generation {state.generation}",
        )
    except ActivityFailureError as error:
        raise ConfigError(
            f"job {job}: no worker answers: "
            f"{getattr(error.cause, 'message', '') or error.cause or error}"
        ) from None
    return answer


def row(one: Stack) -> dict[str, Any]:
    """Return an entry of `stacks --json`; its keys are a stable interface."""
    return {
        "rank": one.rank,
        "node": one.node,
        "pid": one.pid,
        "text": one.text,
        "where": one.where,
        "group": one.group,
    }


def lines(found: ReadStacksOutput, rank: int | None) -> list[str]:
    """Return the groups of ranks, the widest first; of a single rank, all that is known."""
    if rank is None and found.groups:
        return [
            line
            for group in found.groups
            for line in (group.title, *(f"    {frame}" for frame in group.frames))
        ]
    return [line for one in found.stacks for line in _format_rank(one)]


def _format_rank(one: Stack) -> list[str]:
    pid = f", pid {one.pid}" if one.pid is not None else ""
    return [
        f"[rank {one.rank}] {one.node}{pid}",
        *(f"    {line}" for line in one.text.splitlines()),
    ]
