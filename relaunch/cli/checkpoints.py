"""Reads, through a worker, which checkpoints a job has."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio.client import ActivityFailureError, Client
from temporalio.common import RetryPolicy
from temporalio.service import RPCError

from relaunch.messages.logs import ReadCheckpointsInput, ReadCheckpointsOutput

if TYPE_CHECKING:
    from relaunch.job.state import JobState

START_TIMEOUT = timedelta(seconds=3)
"""How long to wait for a worker: without one, the rest is shown all the same."""
READ_TIMEOUT = timedelta(seconds=12)
ASKED_NODES = 2
"""Nodes that are asked, one after the other: the folder is usually one that all share."""


async def read(client: Client, task_queue: str, state: JobState | None) -> dict[str, Any] | None:
    """Return what `show --json` says of a job's checkpoints; None: it names no folder of them.

    An error is part of it: the rest of a page is still of use.
    """
    if state is None or state.spec.checkpoint is None:
        return None
    folder = state.spec.checkpoint
    nodes = tuple(slot.node for slot in state.slots)[:ASKED_NODES]
    found = ReadCheckpointsOutput(unreadable="the job has no nodes yet")
    if nodes:
        try:
            found = await client.execute_activity(
                "read_checkpoints",
                ReadCheckpointsInput(
                    state.spec.fleet,
                    nodes,
                    folder.directory,
                    state.spec.workdir,
                    folder.expression,
                ),
                id=f"read_checkpoints/{state.name}/{uuid.uuid4().hex}",
                task_queue=task_queue,
                result_type=ReadCheckpointsOutput,
                schedule_to_start_timeout=START_TIMEOUT,
                start_to_close_timeout=READ_TIMEOUT,
                schedule_to_close_timeout=START_TIMEOUT + READ_TIMEOUT,
                retry_policy=RetryPolicy(maximum_attempts=1),
                summary=f"checkpoints of {state.name}",
            )
        except ActivityFailureError:
            found = ReadCheckpointsOutput(unreadable="no worker answers")
        except RPCError as error:
            reason = f"the Temporal server refused: {error.message} ({error.status.name})"
            found = ReadCheckpointsOutput(unreadable=reason)
    return {"directory": folder.directory, **asdict(found)}
