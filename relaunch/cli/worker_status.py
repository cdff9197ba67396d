"""Asks the workers of a task queue what is wrong with their fleet files and dead man's switches."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

from temporalio.client import ActivityFailureError, Client
from temporalio.common import RetryPolicy
from temporalio.service import RPCError, RPCStatusCode

from relaunch.builds import POLLS_WITHIN
from relaunch.messages.workers import WorkerStatus

ANSWER_TIMEOUT = timedelta(seconds=3)
"""For a worker to take the question: milliseconds, and a busy one is not waited for."""
MAX_ROUNDS = 4
"""The server chooses who answers. Of two workers one stays unheard once in some ten thousand
times; one that has ended is remembered by the server for a minute, and never answers."""
QUESTIONS_PER_WORKER = 4


async def read_statuses(client: Client, task_queue: str) -> list[WorkerStatus]:
    """Return what the workers say that answer; one may be missing, as the server chooses.

    A server without activities that belong to no workflow asks none.

    Raises:
        RPCError: the server refuses.
    """
    expected = await list_pollers(client, task_queue)
    heard: dict[str, WorkerStatus] = {}
    for _ in range(MAX_ROUNDS if expected else 0):
        answers = await asyncio.gather(
            *(_ask(client, task_queue) for _ in range(QUESTIONS_PER_WORKER * len(expected)))
        )
        heard |= {one.worker: one for one in answers if one is not None}
        if expected <= heard.keys() or not any(answers):
            break
    return [heard[worker] for worker in sorted(heard)]


async def list_pollers(client: Client, task_queue: str) -> set[str]:
    """Return the identities of the workers that have asked for activities lately."""
    from temporalio.api.enums.v1 import TaskQueueType
    from temporalio.api.taskqueue.v1 import TaskQueue
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

    queue = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=task_queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        )
    )
    now = datetime.now(UTC)
    return {
        poller.identity
        for poller in queue.pollers
        if now - poller.last_access_time.ToDatetime(UTC) < POLLS_WITHIN
    }


async def _ask(client: Client, task_queue: str) -> WorkerStatus | None:
    try:
        status: WorkerStatus = await client.execute_activity(
            "read_worker_status",
            id=f"read_worker_status/{uuid.uuid4().hex}",
            task_queue=task_queue,
            result_type=WorkerStatus,
            schedule_to_close_timeout=ANSWER_TIMEOUT,
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary="what is wrong with this worker, for relaunch doctor",
        )
    except ActivityFailureError:  # an older build does not know it
        return None
    except RPCError as error:
        if error.status is RPCStatusCode.UNIMPLEMENTED:  # a server without such activities
            return None
        raise
    return status
