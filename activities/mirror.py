"""Copies the state of jobs and fleets to external mirrors, in a loop beside the worker.

It adds nothing to a workflow history. Each mirror defines the form of its copy. The copy may be
some seconds old, and no decision depends on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol

from pydantic import ValidationError
from temporalio.client import (
    Client,
    WorkflowExecution,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.service import RPCError, RPCStatusCode

from relaunch.backends.base import BackendError
from relaunch.job.state import JobState
from relaunch.messages.ids import FLEET_ID_PREFIX
from relaunch.messages.jobs import JobResult
from relaunch.pool.state import FleetState

COPY_INTERVAL_S = 5.0
"""Seconds between the end of a round and the next."""
MAX_ENDED_AGE = timedelta(hours=1)
"""How long ago a job may have ended to be still copied by a worker that starts: longer than the
replacement of a worker takes."""
MAX_CONCURRENT_JOBS = 8
"""Most jobs queried at once: a worker that has other work may have to replay each of them."""
ANSWER_TIMEOUT = timedelta(seconds=10)
MAX_EVENTS = 10**6
"""More than the events of any run: a server ends a run at 51,200."""
ENDED_STATUSES = (
    WorkflowExecutionStatus.COMPLETED,
    WorkflowExecutionStatus.FAILED,
    WorkflowExecutionStatus.CANCELED,
    WorkflowExecutionStatus.TERMINATED,
    WorkflowExecutionStatus.TIMED_OUT,
)
RETRYABLE_ERRORS = (
    RPCError,
    BackendError,
    WorkflowFailureError,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
    ValidationError,
)
"""Errors that end one look, and that may not recur in the next round."""

log = logging.getLogger("relaunch.mirror")


class FleetMirror(Protocol):
    """The copy of one fleet.

    `seq` orders the states that it is given: higher is newer, whichever worker sends it.
    """

    wants_jobs: bool
    """Whether it copies jobs too, and not only nodes."""

    async def job(self, state: JobState, seq: int, terminated: bool) -> bool:
        """Copy a job. Return False if it must be sent again even if it does not change.

        Raises:
            BackendError: it could not be written.
        """
        ...

    async def nodes(self, state: FleetState, seq: int) -> None: ...


class MirrorLoop:
    def __init__(
        self, client: Client, mirrors: Mapping[str, FleetMirror], every: float = COPY_INTERVAL_S
    ) -> None:
        """Create the loop.

        Args:
            client: The client of the namespace whose jobs are copied.
            mirrors: The mirrors by fleet; jobs of other fleets are skipped.
            every: Seconds between two rounds.
        """
        self._client = client
        self._mirrors = mirrors
        self._every = every
        self._shown: dict[str, Hashable] = {}
        """The state of each job and fleet when it was last copied, by workflow id."""
        self._failing: dict[str, str] = {}

    async def run(self) -> None:
        """Copy changes until cancelled."""
        while True:
            await self.copy_changes()
            await asyncio.sleep(self._every)

    async def copy_changes(self) -> None:
        """Copy everything that has changed, once.

        Failures are logged and retried in the next round.
        """
        await self._try_copy("fleets", self._copy_fleets)
        await self._try_copy("jobs", self._copy_jobs)

    async def _copy_fleets(self) -> None:
        for name, mirror in sorted(self._mirrors.items()):
            await self._try_copy(
                f"{FLEET_ID_PREFIX}{name}", partial(self._copy_fleet, name, mirror)
            )

    async def _copy_fleet(self, name: str, mirror: FleetMirror) -> None:
        id = f"{FLEET_ID_PREFIX}{name}"
        try:
            description = await self._client.get_workflow_handle(id).describe(
                rpc_timeout=ANSWER_TIMEOUT
            )
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return
            raise
        now = (description.run_id, _length(description))
        if description.status is not WorkflowExecutionStatus.RUNNING or self._shown.get(id) == now:
            return
        handle = self._client.get_workflow_handle(id, run_id=description.run_id)
        state: FleetState = await handle.query(
            "state", result_type=FleetState, rpc_timeout=ANSWER_TIMEOUT
        )
        await mirror.nodes(state, _seq(description))
        self._shown[id] = now

    async def _copy_jobs(self) -> None:
        if not any(mirror.wants_jobs for mirror in self._mirrors.values()):
            return
        changed, listed = [], set()
        for run in _select_newest(
            [run async for run in self._client.list_workflows(_make_query(datetime.now(UTC)))]
        ):
            memo = await run.memo()
            fleet = str(memo.get("fleet", ""))  # unknown before its first workflow task
            now = (
                run.run_id,
                run.status,
                run.history_length,
                tuple(sorted((name, str(value)) for name, value in memo.items())),
            )
            listed.add(run.id)
            if (
                fleet in self._mirrors
                and self._mirrors[fleet].wants_jobs
                and self._shown.get(run.id) != now
            ):
                changed.append((run, self._mirrors[fleet], now))
        for id in [
            id for id in self._shown if id not in listed and not id.startswith(FLEET_ID_PREFIX)
        ]:
            del self._shown[id]
        gate = asyncio.Semaphore(MAX_CONCURRENT_JOBS)

        async def one(run: WorkflowExecution, mirror: FleetMirror, now: Hashable) -> None:
            async with gate:
                await self._try_copy(run.id, partial(self._copy_job, run, mirror, now))

        await asyncio.gather(*(one(*each) for each in changed))

    async def _copy_job(self, run: WorkflowExecution, mirror: FleetMirror, now: Hashable) -> None:
        handle = self._client.get_workflow_handle(run.id, run_id=run.run_id, result_type=JobResult)
        # Describe before querying the state: the state is then at least as new as this description,
        # and the next look is newer than both.
        description = await handle.describe(rpc_timeout=ANSWER_TIMEOUT)
        state: JobState
        if description.status is WorkflowExecutionStatus.COMPLETED:
            result: JobResult = await handle.result(follow_runs=False, rpc_timeout=ANSWER_TIMEOUT)
            state = result.state
        else:
            state = await handle.query("state", result_type=JobState, rpc_timeout=ANSWER_TIMEOUT)
        if await mirror.job(
            state,
            _seq(description),
            description.status in ENDED_STATUSES and not state.phase.is_final,
        ):
            self._shown[run.id] = now

    async def _try_copy(self, what: str, copy: Callable[[], Awaitable[None]]) -> None:
        try:
            await copy()
        except RETRYABLE_ERRORS as error:
            failure = f"{type(error).__name__}: {error}"
            if self._failing.get(what) != failure:
                log.warning(
                    "%s: the copy could not be updated, and is retried: %s",
                    what,
                    failure,
                )
            self._failing[what] = failure
        else:
            self._failing.pop(what, None)


def _make_query(now: datetime) -> str:
    since = (now - MAX_ENDED_AGE).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        f"WorkflowType = 'TrainingJob' AND (ExecutionStatus = 'Running' OR CloseTime > '{since}')"
    )


def _select_newest(runs: Iterable[WorkflowExecution]) -> list[WorkflowExecution]:
    """Return the last run of each job, without runs that were continued by another run."""
    last: dict[str, WorkflowExecution] = {}
    for run in runs:
        if run.id not in last or run.start_time > last[run.id].start_time:
            last[run.id] = run
    return [
        run
        for run in last.values()
        if run.status is WorkflowExecutionStatus.RUNNING or run.status in ENDED_STATUSES
    ]


def _length(run: WorkflowExecutionDescription) -> int:
    return run.raw_description.workflow_execution_info.history_length


def _seq(run: WorkflowExecutionDescription) -> int:
    """Return a number that orders the states of a workflow, from start time and history length.

    The start time is by the server's clock. A later run is newer, and so is a longer history of the
    same run.
    """
    return int(run.start_time.timestamp() * 1000) * MAX_EVENTS + _length(run)
