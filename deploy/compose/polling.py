"""The health check of a worker's container: exit code 0 if the server sees this host's worker poll.

It does not check how the worker's tasks end, nor workers of other hosts. A poll from before the
container started is one of its predecessor, which had the same name: it says nothing of this one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from relaunch.config import ConfigError, read_settings
from relaunch.interpreter import leave
from relaunch.temporal import connect

FRESH = timedelta(seconds=90)
"""A worker renews an empty poll after a minute; the server lists a poller for five minutes."""
UNHEALTHY = 1


async def last_poll(client: Client, task_queue: str, host: str) -> datetime | None:
    """Return when a worker on `host` last polled for workflow tasks; None if the server lists none.

    Polls for activities do not count: a healthy worker whose slots are all taken makes none.
    """
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=task_queue),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
    )
    described = await client.workflow_service.describe_task_queue(request)
    # An identity is <process>@<host> unless it is configured.
    return max(
        (
            one.last_access_time.ToDatetime(UTC)
            for one in described.pollers
            if one.identity.rpartition("@")[2] == host
        ),
        default=None,
    )


def read_start(process: int = 1) -> datetime:
    """Return when a process of this machine or container began; 1 began with the container.

    Raises:
        OSError: there is no such process.
    """
    # After the name, which may contain anything: the 20th field is the start, since boot.
    fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    return datetime.now(UTC) - timedelta(seconds=age)


def judge(last: datetime | None, now: datetime, start: datetime) -> str | None:
    """Return what speaks against the worker of a container that began at `start`; None: nothing."""
    if last is None:
        return "no worker of this host polls for workflow tasks"
    if last < start:
        return (
            f"the worker of this host has not polled for workflow tasks since its start "
            f"{(now - start).total_seconds():.0f} s ago"
        )
    ago = now - last
    if ago > FRESH:
        return (
            f"the worker of this host last polled for workflow tasks "
            f"{ago.total_seconds():.0f} s ago, expected {FRESH.seconds} or less"
        )
    return None


async def main() -> int:
    try:
        settings = read_settings()
        client = await connect(settings.state)
        last = await last_poll(client, settings.task_queue, socket.gethostname())
    except ConfigError as mistake:
        against: str | None = str(mistake)
    except RPCError as error:
        against = f"the Temporal server does not answer: {error.message} ({error.status.name})"
    else:
        against = judge(last, datetime.now(UTC), read_start())
    if against is None:
        sys.stdout.write("polling\n")
        return 0
    sys.stderr.write(f"polling.py: {against}\n")
    return UNHEALTHY


if __name__ == "__main__":
    leave(asyncio.run(main()))
