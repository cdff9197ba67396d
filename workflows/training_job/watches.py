"""The watches of a job's newest generation, one per shard, and how far they have reported what its
nodes saw."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from relaunch.activities.reports import WatchReport
    from relaunch.job.diagnose import Fault
    from relaunch.job.drain import drains_at_checkpoint
    from relaunch.job.events import NodeUnreachable, RanksSucceeded, WorkflowReset
    from relaunch.job.state import Phase
    from relaunch.messages.jobs import HintMessage
    from relaunch.workflows.training_job import commands
    from relaunch.workflows.training_job.session import Session

HINT_TIMEOUT_S = 1.0
"""Seconds that a watch gets to report a hinted change by itself: a probe takes a tenth of one."""
REPLACE = "replace watches"
ENDING_PATCH = "no-faults-while-ending"
"""Recorded by jobs that record no fault of ranks which are stopped because the job ends."""
RENEW_PATCH = "renew-watches-after-a-question"
"""Recorded by jobs whose watches are replaced when a lost node has answered a question."""


class Watches:
    def __init__(
        self,
        session: Session,
        after_seq: Mapping[str, int],
        exited: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._session = session
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._reporting: set[int] = set()
        """Shards whose watch reports a checkpoint."""
        self.after_seq = dict(after_seq)
        self.exited = dict(exited)
        self._hints: dict[str, int] = {}
        """The newest version of each subject of a hint, in this generation."""

    @property
    def running(self) -> list[asyncio.Task[None]]:
        return [watch for watch in self._watches.values() if not watch.done()]

    def start(self) -> None:
        """Start the missing watches, one per shard, while there is something to watch."""
        job = self._session.job
        # Not while the job waits for a person and its ranks are gone: their old exits would be
        # reported again.
        if not (
            job.phase in (Phase.RUNNING, Phase.NODE_LOST)
            or (job.phase is Phase.WAITING_FOR_PERSON and job.lost)
        ):
            return
        for index, nodes in enumerate(commands.shards(tuple(slot.node for slot in job.slots))):
            running = self._watches.get(index)
            if (running is None or running.done()) and not self._has_succeeded(nodes):
                self._watches[index] = self._session.tasks.start(
                    f"watch shard {index}", self._watch(nodes), waits=True
                )
                self._reporting = (
                    {*self._reporting, index}
                    if drains_at_checkpoint(job)
                    else self._reporting - {index}
                )

    def stop(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        self._watches, self.after_seq, self.exited, self._reporting, self._hints = (
            {},
            {},
            {},
            set(),
            {},
        )

    def report_checkpoints(self) -> None:
        """If nodes are drained at a checkpoint, replace the watches that do not report one."""
        others = tuple(
            watch
            for index, watch in self._watches.items()
            if index not in self._reporting and not watch.done()
        )
        tasks = self._session.tasks
        if others and drains_at_checkpoint(self._session.job) and not tasks.is_running(REPLACE):
            tasks.start(REPLACE, self._replace(others))

    def renew(self, watches: list[asyncio.Task[None]]) -> None:
        """Replace watches that began while a person was asked: they detect no hang."""
        tasks, left = self._session.tasks, tuple(one for one in watches if one in self.running)
        if left and not tasks.is_running(REPLACE) and workflow.patched(RENEW_PATCH):
            tasks.start(REPLACE, self._replace(left))

    def probe_now(self, hint: HintMessage) -> None:
        """Have the watches probe now. A new watch does that first; the running one may be in
        another process, out of reach."""
        job = self._session.job
        is_ours = (hint.submission, hint.generation) == (job.submission, job.generation)
        if not is_ours or self._hints.get(hint.what, -1) >= hint.version:
            return
        self._hints[hint.what] = hint.version
        if self.running and not self._session.tasks.is_running(REPLACE):
            self._session.tasks.start(REPLACE, self._replace_soon(tuple(self.running)))

    async def _replace_soon(self, watches: tuple[asyncio.Task[None], ...]) -> None:
        await workflow.sleep(HINT_TIMEOUT_S, summary="whether the watch reports what was hinted at")
        if left := tuple(watch for watch in watches if not watch.done() and watch in self.running):
            await self._replace(left)

    async def _replace(self, watches: tuple[asyncio.Task[None], ...]) -> None:
        for watch in watches:
            watch.cancel()
        await workflow.wait_condition(lambda: all(watch.done() for watch in watches))
        # Resumes after the last report: what the old watches saw and did not report comes again.
        self.start()

    def _has_succeeded(self, nodes: tuple[str, ...]) -> bool:
        return all(
            len(self.exited.get(node, ())) == self._session.job.spec.processes_per_node
            for node in nodes
        )

    async def _watch(self, nodes: tuple[str, ...]) -> None:
        generation = self._session.job.generation
        try:
            report = await commands.watch(self._session.job, nodes, self.after_seq, self.exited)
        except ActivityError as error:
            if is_cancelled_exception(error):
                return
            raise
        if generation == self._session.job.generation:
            self._take(report)

    def _take(self, report: WatchReport) -> None:
        job = self._session.job
        self.after_seq.update(report.after_seq)
        self.exited.update(report.exited)
        was_reset = self._session.was_reset(report.run)
        if was_reset and any(isinstance(event, Fault) for event in report.events):
            # Its nodes may have been given to another job, which is no reason to restart there.
            submission = int(workflow.now().timestamp() * 1000)
            self._session.post(WorkflowReset(max(submission, job.submission + 1)))
            return
        events = report.events
        if job.ending is not None:
            # What is seen of ranks that are being stopped is no fault. A watch that was cancelled
            # may have seen it first.
            kept = tuple(one for one in events if not isinstance(one, Fault | NodeUnreachable))
            if len(kept) < len(events) and workflow.patched(ENDING_PATCH):
                events = kept
        for event in events:
            self._session.post(event)
        if report.all_succeeded and self._has_succeeded(tuple(slot.node for slot in job.slots)):
            self._session.post(RanksSucceeded(job.generation))
