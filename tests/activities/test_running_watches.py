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
running.open("7@node")
running.add_run("job/first", "run-1")
running.add_run("job/ended", "run-2")
running.drop_run("run-2")
with running.record(b"first", "lab"), running.record(b"second", "lab"):
    with running.record(b"ended", "lab"):
        pass
    print("watches", flush=True)
    time.sleep(1000)
"""


class Server:
    """Notes which watches are reported as failed, and which workflows wait for no worker."""

    namespace = "default"

    def __init__(self, superseded: bytes = b"", has_ended: bool = False) -> None:
        self.failed: dict[bytes, BaseException] = {}
        self.superseded = superseded
        self.has_ended = has_ended
        self.released: list[tuple[str, str]] = []
        self.workflow_service = self

    async def reset_sticky_task_queue(self, request: Any, timeout: Any) -> None:
        assert not self.failed, "after a watch: what follows from it might still wait"
        self.released.append((request.execution.workflow_id, request.execution.run_id))
        if self.has_ended:
            raise RPCError("workflow has ended", RPCStatusCode.NOT_FOUND, b"")

    async def describe_workflow_execution(self, request: Any, timeout: Any) -> Any:
        raise RPCError("workflow has ended", RPCStatusCode.NOT_FOUND, b"")

    def get_async_activity_handle(self, *, task_token: bytes) -> Any:
        server = self

        class Handle:
            async def fail(self, error: BaseException) -> None:
                if task_token == server.superseded:
                    raise RPCError("no such activity", RPCStatusCode.NOT_FOUND, b"")
                if task_token in (b"", b"fir"):
                    raise RPCError("invalid TaskToken", RPCStatusCode.INVALID_ARGUMENT, b"")
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
        server = Server(superseded, has_ended=superseded != b"")
        assert await take_over(tmp_path, server) == 0, "it lives"
        worker.send_signal(signal.SIGSTOP)
        assert await take_over(tmp_path, server) == 0, "it may go on"
        worker.kill()
        worker.wait()
        assert await take_over(tmp_path, server) == len({b"first", b"second"} - {superseded})
        assert set(server.failed) == {b"first", b"second"} - {superseded}
        assert server.released == [("job/first", "run-1")]
        assert await take_over(tmp_path, server) == 0, "once"
        assert len(server.released) == 1


async def test_a_record_that_was_cut_keeps_no_watch_from_its_worker(tmp_path: Path) -> None:
    """A full disk or a loss of power leaves it so."""
    with start_worker(tmp_path) as worker:
        (own,) = (
            file.parent
            for file in tmp_path.rglob("*")
            if file.is_file() and file.read_bytes() == b"first"
        )
        (own / "empty").touch()
        (own / "cut").write_bytes(b"fir")
        worker.kill()
        worker.wait()
        server = Server()
        assert await take_over(tmp_path, server) == 2
        assert set(server.failed) == {b"first", b"second"}
        assert not own.exists()


async def test_one_of_two_workers_takes_over(tmp_path: Path) -> None:
    class Slow(Server):
        async def reset_sticky_task_queue(self, request: Any, timeout: Any) -> None:
            await super().reset_sticky_task_queue(request, timeout)
            assert await take_over(folder, other) == 0
            assert not other.released

    folder, other = tmp_path / "watches", Server()
    with start_worker(folder) as worker:
        worker.kill()
        worker.wait()
        assert await take_over(folder, Slow()) == 2


async def test_runs_of_a_worker_whose_watches_an_older_one_took_over(tmp_path: Path) -> None:
    folder, server = tmp_path / "watches", Server()
    with start_worker(folder) as worker:
        worker.kill()
        worker.wait()
        (watches,) = folder.iterdir()
        for file in watches.iterdir():
            file.unlink()
        watches.rmdir()
        assert await take_over(folder, server) == 0
        assert server.released == [("job/first", "run-1")]


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
