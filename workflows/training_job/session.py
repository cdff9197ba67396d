"""What the parts of a job's workflow share: the job's state, its inbox and its background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.job.events import Event
    from relaunch.job.state import JobState


class Session:
    """A job that runs. Only the workflow changes `job`; each part may post events, start tasks."""

    def __init__(self, job: JobState, inbox: Iterable[Event]) -> None:
        self.job = job
        self.inbox = list(inbox)
        self.tasks = Tasks()

    def post(self, event: Event) -> None:
        """Put an event into the inbox. It is taken after the events that came before it."""
        self.inbox.append(event)


@dataclass(frozen=True, slots=True)
class BackgroundTask:
    name: str
    task: asyncio.Task[None]
    waits: bool


class Tasks:
    """The background tasks of a job's workflow.

    Errors: the error of a task that was not cancelled is a bug, whichever task it is. Ignored, the
    job would stall without showing why.

    Busy: a task that gives orders is completed before the workflow continues as new. A task that
    only waits (a watch, a timer) may be cancelled then; the next run starts it again.
    """

    def __init__(self) -> None:
        self._tasks: list[BackgroundTask] = []

    def start(
        self, name: str, work: Coroutine[Any, Any, None], *, waits: bool = False
    ) -> asyncio.Task[None]:
        """Run `work` in the background.

        Args:
            name: What it does. Several tasks may have the same name.
            work: The coroutine.
            waits: It gives no orders and may be cancelled at any time.
        """
        task = asyncio.create_task(work)
        self._tasks = [one for one in self._tasks if not one.task.done() or _error(one.task)]
        self._tasks.append(BackgroundTask(name, task, waits))
        return task

    def is_running(self, name: str) -> bool:
        return any(one.name == name and not one.task.done() for one in self._tasks)

    @property
    def busy(self) -> list[asyncio.Task[None]]:
        """The running tasks that give orders, the oldest first."""
        return [one.task for one in self._tasks if not one.waits and not one.task.done()]

    def find_error(self) -> BaseException | None:
        """Return the error of the oldest task that failed, or None."""
        return next((error for one in self._tasks if (error := _error(one.task))), None)


def _error(task: asyncio.Task[None]) -> BaseException | None:
    if not task.done() or task.cancelled() or task.cancelling():
        return None
    return task.exception()
