"""How `run` ends when it is interrupted while the server does not answer.

Real signals to this process; what the server answers is played.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli import cancellation, run
from relaunch.config import ConfigError

AWAY = RPCError("connection refused", RPCStatusCode.UNAVAILABLE, b"")
PATIENCE = 60.0
SOON, NEVER = 0.01, 100 * PATIENCE
CANCELLING = "cancelling job train; press ctrl-C again to exit at once"
NOT_YET = "job train is not cancelled yet, and this is tried again: "
NOT_CONFIRMED = (
    "the server did not say that it cancels job train: `relaunch cancel train` asks it again"
)
TAKEN = "the server has taken the cancellation of job train"


@dataclass
class Server:
    answer: Exception | None
    """To an order to cancel the job; None: it takes it."""
    ended: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The job's exit code, or what ends the following of it."""
    asked: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    is_closed: bool = False
    """Whether the terminal is closed after the first sentence."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def run(self) -> tuple[asyncio.Queue[run.Interruption], asyncio.Task[int | None]]:
        """Return the queue of interruptions, and the waiting for the job."""
        interruptions, outlives = run._watch_signals()
        waiting = run._wait_for_job(
            self._follow, interruptions, self._cancel, outlives, "train", self._say
        )
        return interruptions, asyncio.create_task(waiting)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def has_failed(self) -> bool:
        return any(NOT_YET in text and "connection refused" in text for text in self.said)

    async def _follow(self) -> int:
        return await asyncio.shield(self.ended)

    async def _cancel(self, reason: str) -> None:
        self.asked.append(reason)
        self._news.set()
        if self.answer is not None:
            raise self.answer

    def _say(self, text: str) -> None:
        self.said.append(text)
        self._news.set()
        if self.is_closed and text != CANCELLING:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "RETRY_INTERVAL_S", SOON)
    monkeypatch.setattr(run, "EXIT_TIMEOUT_S", 0.1)


async def test_a_cancellation_is_tried_until_the_server_takes_it() -> None:
    server = Server(AWAY)
    _, waiting = server.run()
    os.kill(os.getpid(), signal.SIGTERM)
    await server.until(lambda: server.has_failed() and len(server.asked) > 3)
    server.answer = None
    await server.until(lambda: TAKEN in server.said)
    server.ended.set_result(7)
    assert await waiting == 7
    assert set(server.asked) == {"SIGTERM to `relaunch run`"}
    assert server.said[0] == CANCELLING and NOT_YET in server.said[1]
    assert server.said[2:] == [TAKEN], "an error is said once"


async def test_a_closed_terminal_ends_no_tries() -> None:
    server = Server(AWAY, is_closed=True)
    _, waiting = server.run()
    os.kill(os.getpid(), signal.SIGTERM)
    await server.until(lambda: len(server.asked) > 3)
    server.answer = None
    await server.until(lambda: TAKEN in server.said)
    server.ended.set_result(7)
    assert await waiting == 7


async def test_the_next_interruption_tries_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "RETRY_INTERVAL_S", NEVER)
    server = Server(AWAY)
    interruptions, waiting = server.run()
    interruptions.put_nowait(run.OUTPUT_CLOSED)
    await server.until(server.has_failed)
    server.answer = None
    interruptions.put_nowait(run.OUTPUT_CLOSED)
    await server.until(lambda: TAKEN in server.said)
    server.ended.set_result(1)
    assert await waiting == 1
    assert len(server.asked) == 2


@pytest.mark.parametrize("error", [AWAY, ValueError("connection refused")])
async def test_a_second_ctrl_c_leaves_after_one_more_try(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "RETRY_INTERVAL_S", NEVER)
    server = Server(error)
    _, waiting = server.run()
    os.kill(os.getpid(), signal.SIGINT)
    await server.until(server.has_failed)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(waiting, PATIENCE) is None
    assert server.asked == ["ctrl-C", "ctrl-C"]
    assert server.said[2:] == [
        "exiting; the cancellation of job train is tried once more",
        NOT_CONFIRMED,
    ]


async def test_a_second_ctrl_c_leaves_after_a_refusal() -> None:
    server = Server(ConfigError("job train has ended (SUCCEEDED)"))
    _, waiting = server.run()
    os.kill(os.getpid(), signal.SIGINT)
    await server.until(lambda: len(server.said) > 1)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(waiting, PATIENCE) is None
    assert server.said == [CANCELLING, "job train has ended (SUCCEEDED)", "exiting"]


async def test_a_job_is_cancelled_though_it_is_followed_no_more() -> None:
    server = Server(AWAY)
    _, waiting = server.run()
    os.kill(os.getpid(), signal.SIGTERM)
    await server.until(server.has_failed)
    server.ended.set_exception(AWAY)
    tries = len(server.asked)
    await server.until(lambda: len(server.asked) > tries + 3)
    server.answer = None
    assert await asyncio.wait_for(waiting, PATIENCE) is None
    assert server.said[2] == TAKEN
    assert "the cancellation of job train continues" in server.said[3]
    assert "it is followed no more" in server.said[3] and "refused" in server.said[3]


async def test_a_server_that_stays_away_ends_run_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "CANCEL_TIMEOUT_S", 0.1)
    server = Server(AWAY)
    _, waiting = server.run()
    os.kill(os.getpid(), signal.SIGTERM)
    await server.until(server.has_failed)
    server.ended.set_exception(AWAY)
    with pytest.raises(RPCError, match="connection refused"):
        await asyncio.wait_for(waiting, PATIENCE)
    assert server.said[-1] == NOT_CONFIRMED
