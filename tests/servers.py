"""Temporal's servers for tests, also on a machine that has much else to do."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from temporalio.testing import WorkflowEnvironment

from relaunch.cli.service import find_server

START_TIMEOUT = 120.0
"""Seconds. The SDK itself gives a server 5, which a busy machine may need for the first page of
its program."""


async def start_dev_server(**options: Any) -> WorkflowEnvironment:
    """Start the real server that `up` starts; `options` are those of the SDK's `start_local`."""
    database = Path(options.get("dev_server_database_filename") or "")
    is_new = not database.exists()

    def remove_unfinished() -> None:
        # A server creates its tables in a new file only: on one whose server was killed before it
        # had created all of them, none starts.
        for suffix in ("-wal", "-shm", "-journal", ""):
            if is_new:
                database.with_name(f"{database.name}{suffix}").unlink(missing_ok=True)

    return await _start(
        lambda: WorkflowEnvironment.start_local(
            dev_server_existing_path=str(find_server()), dev_server_log_level="error", **options
        ),
        remove_unfinished,
    )


async def start_time_skipping_server(program: Path, **options: Any) -> WorkflowEnvironment:
    """Start the server that skips time while workflows sleep."""
    return await _start(
        lambda: WorkflowEnvironment.start_time_skipping(
            test_server_existing_path=str(program), **options
        )
    )


async def _start(
    start: Callable[[], Awaitable[WorkflowEnvironment]],
    clean_up: Callable[[], None] = lambda: None,
) -> WorkflowEnvironment:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            return await start()
        except RuntimeError as error:
            if "did not start within" not in str(error) or time.monotonic() > deadline:
                raise
            clean_up()
