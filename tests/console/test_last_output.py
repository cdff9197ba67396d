"""The end of a job's output: it is printed as long as it arrives, and what is missing is said.
What ends the reading of it before the job ends is said as well.

The event loop's time jumps to what is waited for, so a minute costs nothing.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import selectors
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from temporalio.client import ActivityFailureError
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli import follow, jobs, logs
from relaunch.cli.follow import LogReader
from relaunch.cli.rank_output import RunOutput
from relaunch.job.state import JobState
from relaunch.messages.logs import LogPiece, ReadLogsInput, ReadLogsOutput
from tests.recovery.builders import running

LINE = "x" * 99 + "\n"
NO_WORKER = ActivityFailureError(cause=TimeoutError())
KILLED_SERVER = RPCError("transport error", RPCStatusCode.UNKNOWN, b"")
REFUSED = RPCError("Standalone activity is disabled", RPCStatusCode.UNIMPLEMENTED, b"")


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop without real waits: its clock goes on by what it would have waited."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            assert timeout is not None, "it would wait for ever"
            self.now += max(0.0, timeout)
            return select(0)

        selector.select = jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


@dataclass
class SlowWorker:
    """Answers each `read_logs` with one line of rank 0, 20 s after it was asked."""

    lines: int
    answers: int = 10**9
    """How often it answers; then its node or it is gone, and calls end without an answer."""
    asked: list[int] = field(default_factory=list)

    async def execute_activity(self, name: str, input: ReadLogsInput, **options: Any) -> Any:
        size = self.lines * len(LINE)
        if input.tail == 0:
            return ReadLogsOutput(begins={0: size}, sizes={0: size, 1: 0})
        self.asked.append(1)
        await asyncio.sleep(20)
        if len(self.asked) > self.answers:
            raise NO_WORKER
        begin = (input.offsets or {}).get(0, 0)
        left = begin < size
        chunks = (LogPiece(0, begin + len(LINE), LINE),) if left else ()
        return ReadLogsOutput(chunks=chunks, ended=not left)


def print_all(worker: SlowWorker, until: Callable[[asyncio.Task[None]], None]) -> list[str]:
    """Read the logs of a job that has ended; return what is said to be missing."""
    said: list[str] = []

    async def work() -> None:
        client: Any = worker
        reader = LogReader(client, "q", lambda text: None, output=RunOutput())
        reading = asyncio.create_task(reader.run())
        reader.see(running(nodes=1, nproc_per_node=2))
        printing = asyncio.create_task(reader.print_rest(reading, said.append))
        until(printing)
        await asyncio.wait({printing})

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(work())
    return said


def test_a_long_backlog_is_printed_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_all(SlowWorker(lines=50), lambda printing: None) == []
    assert capsys.readouterr().out == f"[rank 0] {LINE}" * 50


def test_output_that_no_worker_brings_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    said = print_all(SlowWorker(lines=50, answers=3), lambda printing: None)
    assert said == ["not printed of generation 1: 4700 bytes of rank 0"]
    assert capsys.readouterr().out == f"[rank 0] {LINE}" * 3


@pytest.mark.parametrize("error", [NO_WORKER, KILLED_SERVER], ids=["worker", "server"])
def test_who_is_back_in_time_loses_nothing(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    class Worker(SlowWorker):
        async def execute_activity(self, name: str, input: ReadLogsInput, **more: Any) -> Any:
            if len(self.asked) == 5:
                self.asked.append(1)
                raise error
            return await super().execute_activity(name, input, **more)

    assert print_all(Worker(lines=9), lambda printing: None) == []
    assert capsys.readouterr().out == f"[rank 0] {LINE}" * 9


def test_who_does_not_wait_for_the_end_hears_what_is_missing() -> None:
    def interrupt(printing: asyncio.Task[None]) -> None:
        asyncio.get_running_loop().call_later(70, printing.cancel)

    said = print_all(SlowWorker(lines=50), interrupt)
    assert said == ["not printed of generation 1: 4700 bytes of rank 0"]


def test_full_answers_are_asked_for_without_a_pause() -> None:
    """A pause after each call would make a backlog of 300 MB take minutes more."""

    class Worker(SlowWorker):
        async def execute_activity(self, name: str, input: ReadLogsInput, **more: Any) -> Any:
            at.append(asyncio.get_running_loop().time())
            begin = (input.offsets or {}).get(0, 0)
            data = "x" * (200_000 if len(at) < 10 else 1)
            return ReadLogsOutput(
                chunks=(LogPiece(0, begin + 1, data),) if len(at) < 20 else (), ended=len(at) >= 20
            )

    at: list[float] = []

    async def work() -> None:
        client: Any = Worker(lines=0)
        where = logs.Generation("default", ("n1",), "default", "llama", 1, 1)
        hidden = RunOutput(hidden=frozenset({"stdout"}))
        printer = hidden.make_printer(1, 1, 1, ("stdout",), "stdout")
        await logs.print_logs(client, "q", where, printer, lambda text: None, lambda: False)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(work())
    pauses = [after - before for before, after in itertools.pairwise(at)]
    assert [pause > 0 for pause in pauses] == [False] * 9 + [True] * 10


class FailingWorker(SlowWorker):
    """Answers once, and from then on with an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(lines=9)
        self.error = error

    async def execute_activity(self, name: str, input: ReadLogsInput, **more: Any) -> Any:
        if self.asked and input.tail is None:
            raise self.error
        return await super().execute_activity(name, input, **more)


@dataclass
class HourJob:
    """A job that runs for an hour more, and how it is followed."""

    worker: SlowWorker
    said: list[str] = field(default_factory=list)

    def follow(self, command: str) -> float:
        """Follow it as `logs` or `run` does; return after how many seconds that ended."""
        client: Any = self.worker

        async def work() -> None:
            if command == "logs":
                await follow.follow_logs(client, "q", "llama", logs.EVERYTHING, self.said.append)
            else:
                await follow.follow_with_logs(client, "q", "llama", self.said.append)

        async def load_checked(*given: Any) -> tuple[jobs.JobSnapshot, JobState]:
            return self._look(), running()

        with (
            pytest.MonkeyPatch.context() as patch,
            asyncio.Runner(loop_factory=JumpingLoop) as runner,
        ):
            patch.setattr(follow, "watch", self._watch)
            patch.setattr(logs, "load_checked", load_checked)
            runner.run(work())
            return runner.get_loop().time()

    def _look(self) -> jobs.JobSnapshot:
        return jobs.JobSnapshot("llama", "r1", True, "RUNNING", 1, running(), "worker", {})

    async def _watch(self, *given: Any, **more: Any) -> AsyncIterator[jobs.JobSnapshot]:
        yield self._look()
        await asyncio.sleep(3600)
        yield self._look()


class BrokenOutput:
    """Where nothing can be written. `| head` that has read its lines leaves EPIPE."""

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize("command", ["logs", "run"])
def test_a_closed_pipe_ends_the_reading_at_once(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(sys, "stdout", BrokenOutput(errno.EPIPE))
    job = HourJob(SlowWorker(lines=9))
    with pytest.raises(BrokenPipeError):
        job.follow(command)
    assert not [text for text in job.said if "printed" in text]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_file_that_takes_no_output_ends_no_job(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Where `run` ends, its own server cancels the job: training is worth more than its log."""
    monkeypatch.setattr(sys, "stdout", BrokenOutput(number))
    job = HourJob(SlowWorker(lines=9))
    assert job.follow("run") >= 3600
    begin, missing = (text for text in job.said if "printed" in text)
    assert os.strerror(number) in begin and missing.startswith("not printed of generation 1")


def test_an_error_ends_logs_that_are_followed() -> None:
    with pytest.raises(RPCError, match="Standalone activity is disabled"):
        HourJob(FailingWorker(REFUSED)).follow("logs")


@pytest.mark.parametrize("error", [REFUSED, ValueError("no number")], ids=["server", "defect"])
def test_what_ends_the_output_of_run_is_said_once(error: Exception) -> None:
    job = HourJob(FailingWorker(error))
    assert job.follow("run") >= 3600
    begin, missing = (text for text in job.said if "printed" in text)
    assert begin.startswith("the output of ranks is printed no more: ") and str(error) in begin
    assert missing == "not printed of generation 1: 800 bytes of rank 0"
