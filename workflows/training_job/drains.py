"""One timer per node that a job is asked to drain. When it expires, the job leaves the node as soon
as it runs."""

from __future__ import annotations

import asyncio
from datetime import datetime

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.job.events import DrainDue
    from relaunch.job.state import NodeDrain, Phase
    from relaunch.text import escape_markdown
    from relaunch.workflows.training_job.session import Session


class DrainTimers:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._timers: dict[tuple[str, datetime], asyncio.Task[None]] = {}
        """By node and deadline."""

    def update(self) -> None:
        """Start a timer for each new drain request, and cancel those of requests that are over."""
        job = self._session.job
        drains = {(one.node, one.until): one for one in job.drains} if job.ending is None else {}
        for key in [key for key in self._timers if key not in drains]:
            self._timers.pop(key).cancel()
        for key, drain in drains.items():
            if key not in self._timers:
                self._timers[key] = self._session.tasks.start(
                    f"drain {drain.node}", self._wait(drain), waits=True
                )

    async def _wait(self, drain: NodeDrain) -> None:
        session = self._session
        left = max(0.0, (drain.until - workflow.now()).total_seconds())
        until = f"until {drain.node} has to be left: {drain.reason}"[:150]
        await workflow.sleep(left, summary=escape_markdown(until)[:200])
        while True:  # repeat until it has left: another event of the same moment may be taken first
            await workflow.wait_condition(lambda: session.job.phase is Phase.RUNNING)
            session.post(DrainDue(drain.node))
            await workflow.wait_condition(lambda: session.job.phase is not Phase.RUNNING)
