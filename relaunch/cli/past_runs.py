"""Reads jobs of `run` that had a server of their own.

`run` keeps the state folder of such a server if the job did not succeed. To read the job again, the
server is started for as long as the command takes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaunch.cli.terminal import Value, check_name, run_with_client, say
from relaunch.config import Settings, read_settings
from relaunch.temporal import (
    connect,
    find_running_up,
    make_embedded_environment,
    read_configured_address,
)

if TYPE_CHECKING:
    from temporalio.client import Client

WORKER_TIMEOUT = 120.0
"""Seconds for a worker to start: one or two, and a minute on a machine that is busy with others."""


def run_with_job(
    job: str,
    work: Callable[[Client, Settings], Coroutine[Any, Any, Value]],
    *,
    with_worker: bool = False,
) -> Value:
    """Connect to the server of a job that is only read, and run `work`; return its result.

    Args:
        job: The name of the job.
        work: What the command does.
        with_worker: Whether it needs a worker.
    """
    settings = read_settings()
    folder = find_folder(settings, job)
    if folder is None:
        return run_with_client(work)

    async def run_connected() -> Value:
        async with open_run(folder, job, with_worker=with_worker) as client:
            return await work(client, settings)

    return asyncio.run(run_connected())


def find_folder(settings: Settings, job: str) -> Path | None:
    """Return the state folder that `run` kept of a job; None: it kept none, or a server is named.

    Raises:
        ConfigError: No job can have that name.
    """
    folder = settings.state / "runs" / check_name("job", job)
    is_shared = read_configured_address() is not None or find_running_up(settings.state)
    return folder if not is_shared and (folder / "temporal.db").exists() else None


@asynccontextmanager
async def open_run(folder: Path, job: str, *, with_worker: bool) -> AsyncIterator[Client]:
    """Connect to the server of a past `run`, and start it if it does not run.

    Args:
        folder: Its state folder.
        job: The name of the job.
        with_worker: Whether a worker is needed. It would go on with a job that has not ended, so
            it is started only for one that has.

    Raises:
        ConfigError: The server cannot be started, or the job is not there.
    """
    from relaunch.cli.own_service import OwnService, start_child

    if up := find_running_up(folder):
        yield await connect(folder, up.address)
        return
    say(f"no server is running; reading what `relaunch run` kept in {folder}")
    fleet = folder / "fleets" / "default.yaml"
    server = OwnService(folder, job, start_child(folder, ["--attended", "--workers", "0"]))
    try:
        address = await server.address()
        client = await connect(folder, address)
        is_open = await _is_open(client, job)
        if is_open:
            say(
                f"job {job} has not ended, and nothing watches it since its `relaunch run` ended: "
                f"`relaunch up --state {folder}` takes it over"
            )
        if with_worker and not is_open:
            with _run_worker(folder, address, fleet) as worker:
                await _wait_for_worker(client, worker)
                yield client
        else:
            yield client
    finally:
        server.stop()


@contextmanager
def _run_worker(folder: Path, address: str, fleet: Path) -> Iterator[subprocess.Popen[bytes]]:
    from relaunch.cli.forks import die_with_parent
    from relaunch.cli.service import RELAUNCH, STOP_TIMEOUT

    settings = {
        "RELAUNCH_STATE": str(folder.resolve()),
        "RELAUNCH_FLEETS": str(fleet.resolve()),
    }
    with (folder / "worker.log").open("ab") as log:
        worker = subprocess.Popen(
            [*RELAUNCH, "worker"],
            env={**make_embedded_environment(address), **settings},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - one call of the kernel
        )
    try:
        yield worker
    finally:
        worker.terminate()
        try:
            worker.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            worker.kill()


async def _wait_for_worker(client: Client, worker: subprocess.Popen[bytes]) -> None:
    """Wait until the worker asks for work, has ended, or needs longer than any machine should.

    What it is asked has a time limit that is for a worker that runs.
    """
    from relaunch.cli.worker_status import list_pollers

    task_queue = read_settings().task_queue
    deadline = time.monotonic() + WORKER_TIMEOUT
    while worker.poll() is None and time.monotonic() < deadline:
        if await list_pollers(client, task_queue):
            return
        await asyncio.sleep(0.05)


async def _is_open(client: Client, job: str) -> bool:
    from temporalio.client import WorkflowExecutionStatus

    from relaunch.cli.jobs import describe

    return (await describe(client, job)).status == WorkflowExecutionStatus.RUNNING
