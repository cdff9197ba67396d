"""Polls the tasks of running ranks together, and keeps the newest observation of each.

It draws no conclusions from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from relaunch.backends.ecs.aws import AwsError
from relaunch.backends.ecs.batch import GATHER
from relaunch.backends.ecs.tasks import Instance, Task

AT_ONCE = 100
"""Tasks per poll that fail or succeed together: as many as one call describes."""


class TaskReader(Protocol):
    """Calls to ECS that a follower makes."""

    async def describe_tasks(self, arns: Iterable[str]) -> Mapping[str, Task | None]: ...

    async def describe_instances(self, arns: Iterable[str]) -> Mapping[str, Instance | None]: ...


class FollowedTask:
    """Newest observation of one task."""

    def __init__(self, arn: str) -> None:
        self.arn = arn
        self.task: Task | None = None
        """None if not seen yet. If the task is missing, its last known state."""
        self.missing = False
        """Whether ECS does not know the task."""
        self.instance: Instance | None = None
        """None if not seen yet, or if the cluster does not know it any more."""
        self.looked_at: float | None = None
        """Time of the newest successful poll, by CLOCK_MONOTONIC."""
        self.failing: AwsError | None = None
        """Error of the newest poll; None if it succeeded."""
        self._broken: Exception | None = None
        self._news = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Wait until a poll or `nudge` follows the previous call.

        Raise an unexpected error of the poll.
        """
        await self._news.wait()
        self._news.clear()
        if self._broken is not None:
            raise self._broken

    def nudge(self) -> None:
        """Wake the task that waits in `wait_for_change`, so that it checks its other inputs."""
        self._news.set()

    def record_poll(self, task: Task | None, instance: Instance | None) -> None:
        self.looked_at, self.failing, self.missing = time.monotonic(), None, task is None
        if task is not None:
            self.task = task
        self.instance = instance
        self._news.set()

    def record_error(self, error: AwsError) -> None:
        self.failing = error
        self._news.set()

    def record_crash(self, error: Exception) -> None:
        self._broken = error
        self._news.set()


class Follower:
    def __init__(self, looks: TaskReader, poll: float) -> None:
        self._looks = looks
        self._poll = poll
        self._followed: dict[str, list[FollowedTask]] = {}
        self._hinted: dict[str, None] = {}
        self._woken = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def add(self, arn: str) -> FollowedTask:
        followed = FollowedTask(arn)
        self._followed.setdefault(arn, []).append(followed)
        self.hint(arn)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return followed

    def remove(self, followed: FollowedTask) -> None:
        several = self._followed[followed.arn]
        several.remove(followed)
        if not several:
            del self._followed[followed.arn]
            self._hinted.pop(followed.arn, None)
            self._woken.set()

    def hint(self, arn: str) -> bool:
        if arn not in self._followed:
            return False
        self._hinted[arn] = None
        self._woken.set()
        return True

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def _run(self) -> None:
        due = time.monotonic() + self._poll
        while self._followed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._woken.wait()
            self._woken.clear()
            if time.monotonic() >= due:
                arns, due = list(self._followed), time.monotonic() + self._poll
            else:
                await asyncio.sleep(GATHER)
                arns = list(self._hinted)
            self._hinted = {arn: None for arn in self._hinted if arn not in arns}
            await asyncio.gather(
                *(
                    self._look(arns[first : first + AT_ONCE])
                    for first in range(0, len(arns), AT_ONCE)
                )
            )

    async def _look(self, arns: list[str]) -> None:
        try:
            tasks = await self._looks.describe_tasks(arns)
            living = {
                task.instance_arn
                for task in tasks.values()
                if task is not None and not task.stopped and task.instance_arn
            }
            instances = await self._looks.describe_instances(sorted(living)) if living else {}
        except AwsError as error:
            for followed in self._list_followed(arns):
                followed.record_error(error)
            return
        except Exception as error:  # raised in `wait_for_change`
            for followed in self._list_followed(arns):
                followed.record_crash(error)
            return
        for followed in self._list_followed(arns):
            task = tasks[followed.arn]
            followed.record_poll(
                task, instances.get(task.instance_arn) if task is not None else None
            )

    def _list_followed(self, arns: list[str]) -> list[FollowedTask]:
        return [followed for arn in arns for followed in self._followed.get(arn, ())]
