"""The deadline at which a job continues although nothing has happened: a timer, set again by each
decision that waits."""

from __future__ import annotations

import asyncio
from datetime import datetime

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.job.events import DeadlinePassed
    from relaunch.workflows.training_job.session import Session


class Deadline:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._timer: asyncio.Task[None] | None = None
        self.at: datetime | None = None

    def set(self, until: datetime | None) -> None:
        """Replace the deadline. None: the job waits for events only."""
        if until == self.at and self._timer is not None and not self._timer.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self.at, self._timer = until, None
        if until is not None:
            summary = f"if nothing happens: {self._session.job.next.what}"[:200]
            self._timer = self._session.tasks.start(
                "deadline", self._wait(until, summary), waits=True
            )

    async def _wait(self, until: datetime, summary: str) -> None:
        await workflow.sleep(max(0.0, (until - workflow.now()).total_seconds()), summary=summary)
        if self.at == until:
            self.at = None
            self._session.post(DeadlinePassed(until))
