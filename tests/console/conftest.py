"""One server, and one process with everything imported, for the tests of a process.

Starting them again costs more than most tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from relaunch.cli.service import find_server
from relaunch.cli.warm_client import SOCKET
from relaunch.temporal import data_converter
from tests.console.commands import STARTER, Place, bare_environment

TIMEOUT = 120.0


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of a process that runs commands in forks, as that of `up` does."""
    state = tmp_path_factory.mktemp("warm")
    process = subprocess.Popen(
        [sys.executable, STARTER, "warm", str(state)], env=bare_environment({})
    )
    deadline = time.monotonic() + TIMEOUT
    while not (state / SOCKET).exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    yield state
    process.terminate()
    process.wait(TIMEOUT)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The address of a server without a worker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [find_server(), "server", "start-dev", "--headless", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(TIMEOUT)


async def _connect(address: str) -> Client:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            client = await Client.connect(address, data_converter=data_converter())
            await client.count_workflows()  # the namespace is there
            return client
        except (RuntimeError, RPCError):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


@pytest.fixture
async def bare(address: str, warm: Path, tmp_path: Path) -> AsyncIterator[Place]:
    """A server on which nothing runs, and without a worker."""
    client = await _connect(address)
    yield Place(client, address, tmp_path, warm)
    async for found in client.list_workflows("ExecutionStatus = 'Running'"):
        with contextlib.suppress(RPCError):  # it has ended meanwhile
            await client.get_workflow_handle(found.id, run_id=found.run_id).terminate()
