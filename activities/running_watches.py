"""Records what a worker has in hand, so that its successor takes it over as soon as it starts.

The server gives a watch to another worker when no heartbeat has come for long. A worker that was
killed and has been started again knows better: it reports the watches of its predecessor as failed,
and the server offers them again at once. A report of a watch that is not the newest attempt is
refused by the server, so it may come late, twice or from two workers.

The server also keeps the tasks of a workflow for the worker that has it in its cache, for 10 s. The
successor has it forget this for each workflow that its predecessor had, before it reports any
watch: what follows from the report is then decided at once. A workflow that another worker has
taken meanwhile only loses its place there, and is read again from its history.

A watch that the server had just given to the predecessor when that was killed has no record. The
successor asks the server for it, for each workflow of which no watch was recorded.
docs/decisions/0077-a-killed-worker-and-a-lone-run.md.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionRequest,
    ResetStickyTaskQueueRequest,
)
from temporalio.client import AsyncActivityHandle, Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

Answer = TypeVar("Answer")

log = logging.getLogger("relaunch.watches")

MAX_REPORTS = 16
"""Most reports to the server at once: more would be a burst on one that has other work."""
RESET_TIMEOUT = timedelta(seconds=5)
LOCK = "lock"
"""The file that is locked, with the name by which the server knows the worker."""
WATCH = "watch_ranks"
"""The activity that is recorded."""
RUN_ID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A task token has the id of its run, beside others of this form."""
RUNS_SUFFIX = "-runs"
"""Of the folder of runs, beside that of watches: a worker of 0.1.0 that takes over takes each file
of the latter for a watch."""


class RunningWatches:
    """The watches of this process, each a file in a folder that is locked while it lives.

    Beside them, in another folder, are the runs of workflows that it has in its cache.
    """

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: Where every worker on this state folder keeps its own.
        """
        self._folder = folder
        self._runs_folder = folder.with_name(folder.name + RUNS_SUFFIX)
        self._own: Path | None = None
        self._own_runs: Path | None = None
        self._lock: int | None = None
        self.count = 0
        self.others = 0
        """How many other workers lived on this state folder at the last look."""
        self._acknowledged: dict[bytes, tuple[str, float]] = {}
        """By task token: the fleet, and when the server last acknowledged a heartbeat."""

    def open(self, identity: str = "") -> None:
        """Begin to record. If the folder cannot be written, say so and go on without: a successor
        then waits for the time-outs of the watches.

        Args:
            identity: The name by which the server knows this worker.
        """
        own = self._folder / uuid.uuid4().hex
        runs = self._runs_folder / own.name
        try:
            own.mkdir(parents=True, mode=0o700)
            self._lock = os.open(own / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (own / LOCK).write_text(identity)
            runs.mkdir(parents=True, mode=0o700)
        except OSError as error:
            log.warning(
                "watches are not recorded in %s, and are taken over later if this worker dies: %s",
                own,
                error,
            )
            return
        self._own, self._own_runs = own, runs

    @contextmanager
    def record(self, task_token: bytes, fleet: str) -> Iterator[None]:
        """Record a watch for as long as it runs."""
        file = None if self._own is None else self._own / sha256(task_token).hexdigest()
        self.count += 1
        self._acknowledged[task_token] = fleet, time.monotonic()
        try:
            if file is not None:
                _write(file, task_token)
            yield
        finally:
            self.count -= 1
            del self._acknowledged[task_token]
            if file is not None:
                file.unlink(missing_ok=True)

    def add_run(self, workflow_id: str, run_id: str) -> None:
        """Record that the server keeps the tasks of a workflow for this worker. From any thread."""
        if self._own_runs is not None:
            _write(self._own_runs / run_id, workflow_id.encode())

    def drop_run(self, run_id: str) -> None:
        """Forget a run that has left the cache. From any thread."""
        if self._own_runs is not None:
            with suppress(OSError):
                (self._own_runs / run_id).unlink()

    def acknowledge(self, task_token: bytes) -> None:
        """Note that the server has acknowledged a heartbeat of a watch just now."""
        fleet, _ = self._acknowledged[task_token]
        self._acknowledged[task_token] = fleet, time.monotonic()

    def list_lags(self) -> Mapping[str, list[float]]:
        """Return, by fleet, how many seconds ago each watch had a heartbeat acknowledged.

        One that has had none yet counts from its begin.
        """
        now, lags = time.monotonic(), dict[str, list[float]]()
        for fleet, at in self._acknowledged.values():
            lags.setdefault(fleet, []).append(now - at)
        return lags

    async def take_over(self, client: Client) -> int:
        """Report the watches of dead workers to the server as failed. Return their number.

        Before that the server ceases to keep tasks of workflows for them. Of several workers one
        does this: it holds the locks of the dead meanwhile.
        """
        folders = [folder for folder in self._folder.glob("*") if folder != self._own]
        locks = {folder: lock for folder in folders if (lock := _lock_dead(folder)) is not None}
        self.others = len(folders) - len(locks)
        try:
            # One without a folder of watches: a worker of 0.1.0 has taken over the watches.
            runs = [
                folder
                for folder in self._runs_folder.glob("*")
                if (watches := self._folder / folder.name) in locks or not watches.exists()
            ]
            return await _take_over(client, list(locks), runs)
        finally:
            for lock in locks.values():
                os.close(lock)


async def _take_over(client: Client, folders: Sequence[Path], runs: Sequence[Path]) -> int:
    """Take over from the workers that had these folders, and remove them."""
    # A full disk or a loss of power leaves empty records, which name nothing.
    tokens = [
        token
        for folder in folders
        for file in folder.iterdir()
        if file.name != LOCK and (token := file.read_bytes())
    ]
    cached = [
        (id, file.name) for folder in runs for file in folder.iterdir() if (id := file.read_text())
    ]
    gate = asyncio.Semaphore(MAX_REPORTS)

    async def call(report: Callable[[], Coroutine[None, None, Answer]]) -> Answer:
        async with gate:
            return await report()

    await asyncio.gather(*(call(partial(_release, client, *run)) for run in cached))
    taken = await asyncio.gather(*(call(partial(_report_death, client, one)) for one in tokens))
    # The server reads a workflow from the database again when it has refused a call for it, and so
    # finds there for whom it kept the tasks.
    refused = [token for token, is_taken in zip(tokens, taken, strict=True) if not is_taken]
    again = [run for run in cached if any(run[1].encode() in token for token in refused)]
    await asyncio.gather(*(call(partial(_release, client, *run)) for run in again))
    dead = {(folder / LOCK).read_text() for folder in folders}
    recorded = {found.decode() for token in tokens for found in RUN_ID.findall(token)}
    unrecorded = [run for run in cached if run[1] not in recorded]
    found = await asyncio.gather(
        *(call(partial(_report_unrecorded, client, dead, *run)) for run in unrecorded)
    )
    for folder in (*runs, *folders):
        shutil.rmtree(folder, ignore_errors=True)
    return sum(taken) + sum(found)


def _write(file: Path, content: bytes) -> None:
    """Write a record. On a full disk the work goes on without it: it is taken over later."""
    try:
        file.write_bytes(content)
    except OSError as error:
        log.warning("%s cannot be written, which is taken over later: %s", file, error.strerror)


def _lock_dead(folder: Path) -> int | None:
    """Return the lock of a folder whose worker has ended: the kernel has released it then.

    None: the worker lives, or another one takes over from it.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None  # it is being made, or is removed by another worker
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


async def _report_unrecorded(
    client: Client, dead: Collection[str], workflow_id: str, run_id: str
) -> int:
    """Report the watch of a workflow as failed if a dead worker has it; return 1 then, else 0."""
    request = DescribeWorkflowExecutionRequest(
        namespace=client.namespace,
        execution=WorkflowExecution(workflow_id=workflow_id, run_id=run_id),
    )
    try:
        described = await client.workflow_service.describe_workflow_execution(
            request, timeout=RESET_TIMEOUT
        )
    except RPCError as refusal:
        if refusal.status is not RPCStatusCode.NOT_FOUND:  # it has ended, and is gone
            log.warning("a watch of %s is taken over later: %s", workflow_id, refusal)
        return 0
    for pending in described.pending_activities:
        if (
            pending.activity_type.name == WATCH
            and pending.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
            and pending.last_worker_identity in dead
        ):
            handle = client.get_async_activity_handle(
                workflow_id=workflow_id, run_id=run_id, activity_id=pending.activity_id
            )
            return int(await _fail(handle))
    return 0


async def _report_death(client: Client, token: bytes) -> bool:
    """Report a watch as failed; return whether the server knew it as running."""
    return await _fail(client.get_async_activity_handle(task_token=token))


async def _fail(watch: AsyncActivityHandle) -> bool:
    error = ApplicationError(
        "the worker that watched was killed",
        type="HandOver",
        next_retry_delay=timedelta(milliseconds=1),
    )
    try:
        await watch.fail(error)
        return True
    except RPCError as refusal:
        # It has ended, was taken over, or the server has missed its heartbeats for too long; or
        # the record was cut.
        if refusal.status not in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT):
            raise
        return False


async def _release(client: Client, workflow_id: str, run_id: str) -> None:
    """Have the server give the next task of a workflow to any worker."""
    request = ResetStickyTaskQueueRequest(
        namespace=client.namespace,
        execution=WorkflowExecution(workflow_id=workflow_id, run_id=run_id),
    )
    try:
        await client.workflow_service.reset_sticky_task_queue(request, timeout=RESET_TIMEOUT)
    except RPCError as refusal:
        if refusal.status is not RPCStatusCode.NOT_FOUND:  # it has ended
            log.warning("the tasks of %s are taken over later: %s", workflow_id, refusal)
