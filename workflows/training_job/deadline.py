"""The deadline at which a job continues although nothing has happened: a timer, set again by each
decision that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from temporalio import workflow


class Deadline:
    def __init__(self, what: Callable[[], str], passed: Callable[[datetime], None]) -> None:
        """Create a deadline that is not set.

        `what` returns what happens then, a clause for people; `passed` is called when the time is
        over.
        """
        self._what = what
        self._passed = passed
        self._timer: asyncio.Task[None] | None = None
        self.at: datetime | None = None

    def set(self, until: datetime | None) -> None:
        if until == self.at and self._timer is not None and not self._timer.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self.at, self._timer = until, None
        if until is not None:
            self._timer = asyncio.create_task(
                self._wait(until, f"if nothing happens: {self._what()}"[:200])
            )

    async def _wait(self, until: datetime, summary: str) -> None:
        await workflow.sleep(max(0.0, (until - workflow.now()).total_seconds()), summary=summary)
        if self.at == until:
            self.at = None
            self._passed(until)
