"""What the console reads through a worker, where the server or the reader's pipe fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli import checkpoints, jobs, logs
from relaunch.cli.rank_output import Printer
from relaunch.config import ConfigError
from relaunch.job.generation_nodes import record_nodes
from relaunch.job.state import JobState, Phase
from relaunch.messages.logs import LogPiece, ReadLogsInput, ReadLogsOutput
from tests.recovery.builders import T0, running

REFUSED = RPCError("Standalone activity is disabled", RPCStatusCode.UNIMPLEMENTED, b"")
WHERE = logs.Generation("default", ("n1",), "default", "llama", 1, 1)


class FakeServer:
    """Answers each activity in the same way."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def execute_activity(self, *rest: Any, **more: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class ClosedPipe(Printer):
    """A printer of `relaunch logs | head`, whose reader has ended."""

    def feed(self, rank: int, data: str) -> None:
        raise BrokenPipeError


async def test_a_server_that_refuses_hides_only_the_checkpoints() -> None:
    state = running(checkpoint={"directory": "out"})
    server: Any = FakeServer(REFUSED)
    view = await checkpoints.read(server, "q", state)
    assert view is not None
    assert view["unreadable"] == (
        "the Temporal server refused: Standalone activity is disabled (UNIMPLEMENTED)"
    )
    assert (view["newest"], view["directory"]) == (None, "out")


class Nodes:
    """Notes which generations are read, and of how many nodes."""

    def __init__(self) -> None:
        self.read: set[tuple[int, int]] = set()

    async def execute_activity(self, name: str, input: ReadLogsInput, **more: Any) -> Any:
        self.read.add((input.generation, len(input.nodes)))
        return ReadLogsOutput(ended=True)


async def print_logs(
    monkeypatch: pytest.MonkeyPatch,
    state: JobState,
    generation: int | None = None,
    rank: int | None = None,
) -> tuple[set[tuple[int, int]], list[str]]:
    async def load_job(client: Any, name: str) -> jobs.JobSnapshot:
        return jobs.JobSnapshot(name, "r1", True, "RUNNING", 1, state, "worker", {})

    monkeypatch.setattr(jobs, "load_job", load_job)
    nodes: Any = Nodes()
    said: list[str] = []
    selection = logs.Selection(rank=rank)
    code = await logs.print_job_logs(
        nodes, "q", state.name, generation, selection, False, said.append
    )
    assert code == 0
    return nodes.read, said


async def test_logs_are_of_the_newest_generation_that_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the next one is launched, what the last one printed is of interest."""
    launching = replace(running(), generation=4, phase=Phase.LAUNCHING, launched_at=None)
    read, said = await print_logs(monkeypatch, launching)
    assert ({one for one, _ in read}, len(said)) == ({3}, 1)
    assert "generation 4 has not started" in said[0]
    for state, generation in (
        (launching, 4),
        (replace(launching, generation=1), None),
        (replace(launching, phase=Phase.CANCELLED), None),
        (replace(launching, launched_at=T0), None),
    ):
        read, said = await print_logs(monkeypatch, state, generation)
        assert ({one for one, _ in read}, said) == ({state.generation}, [])


async def test_a_rank_that_a_generation_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic job that had two nodes, and has one now."""
    state = running(nodes={"min": 1, "max": 2}, nproc_per_node=8)
    nodes = record_nodes(record_nodes((), 1, ("n1", "n2")), 2, ("n1",))
    state = replace(state, generation=2, generation_nodes=nodes, slots=state.slots[:1])
    with pytest.raises(ConfigError, match="generation 2 has no rank 12: expected 0 to 7"):
        await print_logs(monkeypatch, state, rank=12)
    assert await print_logs(monkeypatch, state, rank=7) == ({(2, 1)}, [])
    assert await print_logs(monkeypatch, state, 1, rank=12) == ({(1, 1)}, [])


async def follow(answer: Any, printer: Printer) -> None:
    printers: Any = {"stdout": printer, "stderr": Printer(1, is_stderr=True)}
    server: Any = FakeServer(answer)
    await logs.print_streams(
        server, "q", WHERE, printers, lambda text: None, lambda: True, logs.EVERYTHING
    )


async def test_a_closed_pipe_of_followed_logs_is_a_broken_pipe() -> None:
    piece = ReadLogsOutput(chunks=(LogPiece(0, 3, "hi\n"),), ended=True)
    with pytest.raises(BrokenPipeError):
        await follow(piece, ClosedPipe(1))


async def test_what_the_server_refuses_of_followed_logs_is_its_error() -> None:
    with pytest.raises(RPCError, match="Standalone activity is disabled"):
        await follow(REFUSED, Printer(1))
