"""Locates the output of ranks in CloudWatch Logs and reads its last lines.

CloudWatch Logs has it only if the task definition uses the awslogs driver.
"""

from __future__ import annotations

import asyncio
import time

from relaunch.backends.ecs.aws import AwsError
from relaunch.backends.ecs.cluster import Cluster
from relaunch.backends.ecs.tasks import Task

TAIL_LINES, TAIL_BYTES = 200, 16 * 1024
"""The same limits as an agent uses."""
DELIVERY_TIMEOUT = 6.0
"""Seconds to wait for a rank's first line, which its log driver may send when the container ends.

Only a rank that printed nothing delays its relaunch by that. Without its output, a rank that lost
its connection to the failed rank looks like the one that failed.
"""
LOOK_AGAIN = 0.5


class RankLogs:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def where(self, task: Task) -> tuple[str, str] | None:
        """Return the log group and stream of a rank; None if its output is not in CloudWatch Logs.

        Raises:
            AwsError: The call failed.
        """
        if not task.definition or not task.trainer:
            return None
        log = (await self._cluster.definition(task.definition)).logs.get(task.trainer)
        return None if log is None else (log.group, log.stream(task.trainer, task.short))

    async def tail(self, task: Task) -> list[str]:
        """Return the last lines of a rank that has ended; an empty list if they cannot be read.

        The exit code is then reported without them.
        """
        until = time.monotonic() + DELIVERY_TIMEOUT
        try:
            where = await self.where(task)
            lines: list[str] = []
            while where is not None and not lines:
                lines = await self._newest(*where)
                if time.monotonic() >= until:
                    break
                await asyncio.sleep(0.0 if lines else LOOK_AGAIN)
        except AwsError:
            return []
        return lines

    async def _newest(self, group: str, stream: str) -> list[str]:
        try:
            answer = await self._cluster.aws.call(
                "logs",
                "GetLogEvents",
                logGroupName=group,
                logStreamName=stream,
                limit=TAIL_LINES,
                startFromHead=False,
            )
        except AwsError as error:
            if error.code == "ResourceNotFoundException":
                return []  # the driver creates the stream with the first line
            raise
        told: list[str] = []
        left = TAIL_BYTES
        for event in reversed(answer.get("events") or ()):
            message = str(event.get("message") or "")
            left -= len(message.encode())
            if left < 0:
                break
            told.append(message.rstrip("\n"))
        return told[::-1]
