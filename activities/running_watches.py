"""Records which watches a worker has, so that its successor takes them over as soon as it starts.

The server gives a watch to another worker when no heartbeat has come for long. A worker that was
killed and has been started again knows better: it reports the watches of its predecessor as failed,
and the server offers them again at once. A report of a watch that is not the newest attempt is
refused by the server, so it may come late, twice or from two workers.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

log = logging.getLogger("relaunch.watches")

MAX_REPORTS = 16
"""Most reports to the server at once: more would be a burst on one that has other work."""
LOCK = "lock"


class RunningWatches:
    """The watches of this process, each a file in a folder that is locked while it lives."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: Where every worker on this state folder keeps its own.
        """
        self._folder = folder
        self._own: Path | None = None
        self._lock: int | None = None
        self.count = 0
        self._acknowledged: dict[bytes, tuple[str, float]] = {}
        """By task token: the fleet, and when the server last acknowledged a heartbeat."""

    def open(self) -> None:
        """Begin to record. If the folder cannot be written, say so and go on without: a successor
        then waits for the time-outs of the watches."""
        own = self._folder / uuid.uuid4().hex
        try:
            own.mkdir(parents=True, mode=0o700)
            self._lock = os.open(own / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            log.warning(
                "watches are not recorded in %s, and are taken over later if this worker dies: %s",
                own,
                error,
            )
            return
        self._own = own

    @contextmanager
    def record(self, task_token: bytes, fleet: str) -> Iterator[None]:
        """Record a watch for as long as it runs."""
        file = None if self._own is None else self._own / sha256(task_token).hexdigest()
        self.count += 1
        self._acknowledged[task_token] = fleet, time.monotonic()
        try:
            if file is not None:
                file.write_bytes(task_token)
            yield
        finally:
            self.count -= 1
            del self._acknowledged[task_token]
            if file is not None:
                file.unlink(missing_ok=True)

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
        """Report the watches of dead workers to the server as failed. Return their number."""
        folders = [folder for folder in self._folder.glob("*") if folder != self._own]
        dead = [folder for folder in folders if _is_dead(folder)]
        tokens = [
            file.read_bytes() for folder in dead for file in folder.iterdir() if file.name != LOCK
        ]
        gate = asyncio.Semaphore(MAX_REPORTS)

        async def report(token: bytes) -> None:
            async with gate:
                await _report_death(client, token)

        await asyncio.gather(*map(report, tokens))
        for folder in dead:
            shutil.rmtree(folder, ignore_errors=True)  # another worker may remove it as well
        return len(tokens)


def _is_dead(folder: Path) -> bool:
    """Return whether the worker of a folder has ended: the kernel releases its lock then."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # it is being made, or is removed by another worker
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


async def _report_death(client: Client, token: bytes) -> None:
    error = ApplicationError(
        "the worker that watched was killed",
        type="HandOver",
        next_retry_delay=timedelta(milliseconds=1),
    )
    try:
        await client.get_async_activity_handle(task_token=token).fail(error)
    except RPCError as refusal:
        if refusal.status is not RPCStatusCode.NOT_FOUND:  # it has ended, or was taken over
            raise
