"""A worker that follows one that was killed offers its watches again at once, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities.running_watches import RunningWatches

WORKER = """
import sys, time
from pathlib import Path
from relaunch.activities.running_watches import RunningWatches
running = RunningWatches(Path(sys.argv[1]))
running.open()
with running.record(b"first", "lab"), running.record(b"second", "lab"):
    with running.record(b"ended", "lab"):
        pass
    print("watches", flush=True)
    time.sleep(1000)
"""


class Server:
    """Notes which watches are reported as failed."""

    def __init__(self, superseded: bytes = b"") -> None:
        self.failed: dict[bytes, BaseException] = {}
        self.superseded = superseded

    def get_async_activity_handle(self, *, task_token: bytes) -> Any:
        server = self

        class Handle:
            async def fail(self, error: BaseException) -> None:
                if task_token == server.superseded:
                    raise RPCError("no such activity", RPCStatusCode.NOT_FOUND, b"")
                server.failed[task_token] = error

        return Handle()


def start_worker(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(folder)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "watches\n"
    return worker


async def take_over(folder: Path, server: Server) -> int:
    running = RunningWatches(folder)
    running.open()
    return await running.take_over(cast(Client, server))


@pytest.mark.parametrize("superseded", [b"", b"second"])
async def test_watches_of_a_killed_worker_are_offered_again(
    tmp_path: Path, superseded: bytes
) -> None:
    with start_worker(tmp_path) as worker:
        server = Server(superseded)
        assert await take_over(tmp_path, server) == 0, "it lives"
        worker.send_signal(signal.SIGSTOP)
        assert await take_over(tmp_path, server) == 0, "it may go on"
        worker.kill()
        worker.wait()
        assert await take_over(tmp_path, server) == 2
        assert set(server.failed) == {b"first", b"second"} - {superseded}
        assert await take_over(tmp_path, server) == 0, "once"


async def test_without_a_folder_watches_run_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    running = RunningWatches(blocked)
    running.open()
    assert "watches are not recorded" in caplog.text
    with running.record(b"one", "lab"):
        assert running.count == 1
    assert await running.take_over(cast(Client, Server())) == 0
    assert os.listdir(tmp_path) == ["file"]
