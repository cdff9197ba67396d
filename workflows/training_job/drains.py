"""One timer per node that a job was asked to leave. When it expires, the job has to leave as soon
as it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.job.events import DrainDue, Event
    from relaunch.job.state import JobState, Leaving, Phase


class Leaves:
    def __init__(self, job: Callable[[], JobState], tell: Callable[[Event], None]) -> None:
        self._job = job
        self._tell = tell
        self._timers: dict[tuple[str, datetime], asyncio.Task[None]] = {}
        """By node and deadline."""

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        return tuple(self._timers.values())

    def keep(self) -> None:
        job = self._job()
        wanted = {(one.node, one.until): one for one in job.leaving} if job.ending is None else {}
        for key in [key for key in self._timers if key not in wanted]:
            self._timers.pop(key).cancel()
        for key, leaving in wanted.items():
            if key not in self._timers:
                self._timers[key] = asyncio.create_task(self._leave(leaving))

    async def _leave(self, leaving: Leaving) -> None:
        left = max(0.0, (leaving.until - workflow.now()).total_seconds())
        await workflow.sleep(
            left, summary=f"until {leaving.node} has to be left: {leaving.reason}"[:200]
        )
        while True:  # repeat until it has left: another event of the same moment may be taken first
            await workflow.wait_condition(lambda: self._job().phase is Phase.RUNNING)
            self._tell(DrainDue(leaving.node))
            await workflow.wait_condition(lambda: self._job().phase is not Phase.RUNNING)
