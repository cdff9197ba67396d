"""What the parts of a job's workflow share: the job's state, its inbox and its background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.job.events import Event
    from relaunch.job.state import JobState


Result = TypeVar("Result")
STOP_PAUSABLE_AFTER = timedelta(minutes=5)
"""How long an attempt to prove ranks stopped goes on before the workflow may continue as new: the
next run begins it again."""


class Session:
    """A job that runs. Only the workflow changes `job`; each part may post events, start tasks."""

    def __init__(self, job: JobState, inbox: Iterable[Event]) -> None:
        self.job = job
        self.inbox = list(inbox)
        self.tasks = Tasks()
        self.run = ""
        """The run of the workflow for which its ranks were watched last, or launched first; empty:
        not known."""

    def note_run(self, run: str) -> None:
        """Note which run of the workflow launched ranks, if none is known yet."""
        self.run = self.run or run

    def was_reset(self, run: str) -> bool:
        """Return whether the workflow was reset between the last result that named a run and this
        one.

        A workflow that is reset is another run with the same first results, and is not told. Only
        results are compared with results: what a run is called itself differs between replays.

        Args:
            run: The run that ordered the watch or the launch, as its result says; empty: not known.
        """
        before, self.run = self.run, run or self.run
        return bool(run and before and run != before)

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
    only waits (a watch, a timer) may be cancelled then; the next run starts it again. So may one
    that is at a point where it can be paused.
    """

    def __init__(self) -> None:
        self._tasks: list[BackgroundTask] = []
        self._pausable: dict[asyncio.Task[Any], datetime] = {}
        """Since when, or from when on, a task is at a point where it can be paused."""

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

    async def wait(
        self, waiting: Awaitable[Result], *, pausable_after: timedelta = timedelta(0)
    ) -> Result:
        """Wait for something that the next run of the workflow can wait for again.

        Args:
            waiting: What the current task waits for.
            pausable_after: How long it has to have waited. What begins again from the start with
                each run would never end if runs were shorter.
        """
        task = asyncio.current_task()
        self.mark_pausable(task, pausable_after)
        try:
            return await waiting
        finally:
            self.mark_busy(task)

    def mark_pausable(
        self, task: asyncio.Task[Any] | None, after: timedelta = timedelta(0)
    ) -> None:
        """From now on, or after a while, the task can be paused."""
        assert task is not None
        self._pausable[task] = workflow.now() + after

    def mark_busy(self, task: asyncio.Task[Any] | None) -> None:
        """The task cannot be paused."""
        assert task is not None
        self._pausable.pop(task, None)

    def can_pause(self, task: asyncio.Task[None]) -> bool:
        at = self._pausable.get(task)
        return at is not None and workflow.now() >= at

    def find_error(self) -> BaseException | None:
        """Return the error of the oldest task that failed, or None."""
        return next((error for one in self._tasks if (error := _error(one.task))), None)


def _error(task: asyncio.Task[None]) -> BaseException | None:
    if not task.done() or task.cancelled() or task.cancelling():
        return None
    return task.exception()
