"""What the console reads through a worker, where the server or the reader's pipe fails."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli import checkpoints, logs
from relaunch.cli.rank_output import Printer
from relaunch.messages.logs import LogPiece, ReadLogsOutput
from tests.recovery.builders import running

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
