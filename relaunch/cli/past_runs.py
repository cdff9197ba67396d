"""Reads jobs of `run` that had a server of their own.

`run` keeps the state folder of such a server if the job did not succeed. To read the job again, the
server is started for as long as the command takes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from relaunch.cli.run import OwnService
from relaunch.cli.service import RELAUNCH
from relaunch.cli.terminal import check_name, say
from relaunch.config import ConfigError, Settings
from relaunch.temporal import connect, find_running_up

if TYPE_CHECKING:
    from temporalio.client import Client


def find_folder(settings: Settings, job: str) -> Path | None:
    """Return the state folder that `run` kept of a job; None: it kept none, or a server is named.

    Raises:
        ConfigError: No job can have that name.
    """
    folder = settings.state / "runs" / check_name("job", job)
    is_shared = bool(os.environ.get("TEMPORAL_ADDRESS")) or find_running_up(settings.state)
    return folder if not is_shared and (folder / "temporal.db").exists() else None


@asynccontextmanager
async def open_run(folder: Path, job: str, *, with_worker: bool) -> AsyncIterator[Client]:
    """Connect to the server of a past `run`, and start it if it does not run.

    Args:
        folder: Its state folder.
        job: The name of the job.
        with_worker: Whether a worker is needed. It would also go on with a job that has not ended,
            so it is started only for one that has.

    Raises:
        ConfigError: The server cannot be started, or a worker is needed for a job that has not
            ended.
    """
    if up := find_running_up(folder):
        yield await connect(folder, up.address)
        return
    say(f"no server is running; reading what `relaunch run` kept in {folder}")
    async with _serve(folder, with_worker=False) as client:
        if await _is_open(client, job):
            say(
                f"job {job} has not ended, and nothing watches it since its `relaunch run` ended: "
                f"`relaunch up --state {folder}` takes it over"
            )
            if with_worker:
                raise ConfigError(f"job {job} has no worker, and only a worker can read logs")
        if not with_worker:
            yield client
            return
    async with _serve(folder, with_worker=True) as client:
        yield client


@asynccontextmanager
async def _serve(folder: Path, *, with_worker: bool) -> AsyncIterator[Client]:
    log = folder / "read.log"
    ports = ["--port", "0", "--ui-port", "0"]
    fleet = ["--fleet", str(folder / "fleets" / "default.yaml")]
    worker = [] if with_worker else ["--no-worker"]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            [*RELAUNCH, "up", "--attended", "--state", str(folder), *ports, *fleet, *worker],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    own = OwnService(folder, process, log)
    try:
        yield await connect(folder, await own.address())
    finally:
        own.stop()


async def _is_open(client: Client, job: str) -> bool:
    from temporalio.client import WorkflowExecutionStatus

    from relaunch.cli.jobs import describe

    return (await describe(client, job)).status == WorkflowExecutionStatus.RUNNING
