"""Speaks the agent's protocol over one long-lived `session` process, however that process was reached.

A session holds no state: when it breaks, every order in flight is ambiguous and the next call opens another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from backends.base import (
    PROTOCOL,
    Gone,
    LogChunk,
    Logs,
    Prepared,
    PrepareOrder,
    ProtocolError,
    Refused,
    Started,
    StartOrder,
    StopOrder,
    Unreachable,
)
from recovery.model import Token

LINE_LIMIT = 8 * 1024 * 1024
"""A `logs` answer is the longest line; asyncio's own limit is 64 KiB."""
ANSWER_WITHIN = 5.0
"""Seconds for an answer that needs no waiting on the node; an unloaded node needs a few milliseconds."""
SILENT_BEATS = 3
"""Heartbeats that may fail to come before a watch counts as broken."""

Connect = Callable[[], Awaitable[asyncio.subprocess.Process]]


class AgentSession:
    """One node's connection, opened when it is first needed."""

    def __init__(self, node: str, connect: Connect, answer_within: float = ANSWER_WITHIN) -> None:
        self._node = node
        self._within = answer_within
        self._connect = connect
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[Mapping[str, Any] | None]] = {}

    async def prepare(self, order: PrepareOrder) -> Prepared | Refused:
        body = {key: value for key, value in asdict(order).items() if key != "token"}
        answer = await self._call("prepare", {"token": _token(order.token), **body}, order.stop_grace + order.stuck_after + self._within)
        if answer["outcome"] == "refused":
            return self._refused(answer)
        return Prepared(
            self._node,
            boot_id=str(answer["boot_id"]),
            master_port=int(answer["master_port"]),
            peer_port=int(answer["peer_port"]),
            stamp=float(answer["stamp"]),
            nonce=str(answer["nonce"]),
        )

    async def start(self, order: StartOrder) -> Started | Refused:
        body = {
            "node": order.node,
            "command": order.command,
            "workdir": order.workdir,
            "env": dict(order.env),
            "rank_env": [dict(env) for env in order.rank_env],
            "peers": [asdict(peer) for peer in order.peers],
            "prepared": order.prepared,
            "secret": order.secret,
            "fences": order.fences,
            "log_pattern": order.log_pattern,
        }
        answer = await self._call("start", {"token": _token(order.token), **body}, 2 * self._within)
        if answer["outcome"] == "refused":
            return self._refused(answer)
        return Started(self._node, {int(rank): int(pid) for rank, pid in answer["pids"].items()}, bool(answer["already"]))

    async def stop(self, order: StopOrder) -> Gone | Refused:
        body = {"token": _token(order.token), "stop_grace": order.stop_grace, "stuck_after": order.stuck_after}
        answer = await self._call("stop", body, order.stop_grace + order.stuck_after + self._within)
        return self._refused(answer) if answer["outcome"] == "refused" else Gone(self._node)

    async def list(self) -> Mapping[str, Any]:
        return await self._call("list", {}, self._within)

    async def logs(self, token: Token, offsets: Mapping[int, int] | None, max_bytes: int, wait: float, tail: int | None) -> Logs | Refused:
        body = {
            "token": _token(token),
            "offsets": None if offsets is None else {str(rank): offset for rank, offset in offsets.items()},
            "max_bytes": max_bytes,
            "wait": wait,
            "tail": tail,
        }
        answer = await self._call("logs", body, wait + self._within)
        if answer["outcome"] == "refused":
            return self._refused(answer)
        chunks = tuple(LogChunk(int(c["rank"]), int(c["offset"]), int(c["next"]), str(c["data"])) for c in answer["chunks"])
        return Logs(chunks, bool(answer["ended"]))

    @asynccontextmanager
    async def watch(self, token: Token, after_seq: int, heartbeat: float) -> AsyncIterator[AgentWatch]:
        order = {"token": _token(token), "after_seq": after_seq, "heartbeat": heartbeat}
        async with self._command("watch", order) as (id_, answers):
            yield AgentWatch(self, id_, answers, first=self._within, silence=SILENT_BEATS * heartbeat + self._within / 5)

    async def close(self) -> None:
        """End the session; nothing on the node ends with it."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 2.0)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader

    async def send(self, message: Mapping[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise Unreachable(self._node, "the session has ended")
        try:
            process.stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            await process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise Unreachable(self._node, f"the session broke: {error}") from error

    async def receive(self, answers: asyncio.Queue[Mapping[str, Any] | None], within: float, doing: str) -> Mapping[str, Any]:
        try:
            # Not `wait_for`: until Python 3.12 it swallows a cancel that comes together with a message.
            async with asyncio.timeout(within):
                message = await answers.get()
        except TimeoutError:
            raise Unreachable(self._node, f"no answer to {doing} within {within:g} s") from None
        if message is None:
            raise Unreachable(self._node, f"the session ended during {doing}")
        return message

    async def _call(self, command: str, order: Mapping[str, Any], within: float) -> Mapping[str, Any]:
        """Send an order and return its answer. A long wait is broken off as soon as the node answers nothing at all."""
        async with self._command(command, order) as (_, answers):
            waiting = asyncio.ensure_future(self._answer(answers, within, command))
            try:
                while command != "list":
                    done, _pending = await asyncio.wait({waiting}, timeout=self._within)
                    if done:
                        break
                    await self.list()
                return await waiting
            finally:
                waiting.cancel()
                # Its own outcome has been taken above, or does not matter any more.
                await asyncio.gather(waiting, return_exceptions=True)

    async def _answer(self, answers: asyncio.Queue[Mapping[str, Any] | None], within: float, command: str) -> Mapping[str, Any]:
        last: Mapping[str, Any] | None = None
        while True:
            message = await self.receive(answers, within, command)
            if "line" in message:
                last = message["line"]
            elif last is None:
                raise Unreachable(self._node, f"{command} ended without an answer")
            else:
                break
        if last.get("outcome") not in ("done", "refused"):
            raise ProtocolError(self._node, f"{command} answered {str(last)[:200]!r}, expected an outcome")
        if last["outcome"] == "refused" and last.get("why") in ("bad_order", "protocol"):
            raise ProtocolError(self._node, str(last.get("because")))
        return last

    @asynccontextmanager
    async def _command(self, command: str, order: Mapping[str, Any]) -> AsyncIterator[tuple[int, asyncio.Queue[Mapping[str, Any] | None]]]:
        await self._open()
        id_ = next(self._ids)
        answers: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        self._answers[id_] = answers
        try:
            await self.send({"id": id_, "command": command, "order": {"protocol": PROTOCOL, **order}})
            yield id_, answers
        finally:
            self._answers.pop(id_, None)
            if command == "watch":
                # A broken session has closed the watch already.
                with contextlib.suppress(Unreachable):
                    await self.send({"id": id_, "close": True})

    async def _open(self) -> None:
        async with self._opening:
            if self._process is not None and self._process.returncode is None and self._reader is not None and not self._reader.done():
                return
            process = await self._connect()
            assert process.stdout is not None
            try:
                async with asyncio.timeout(2 * self._within):
                    hello = json.loads(await process.stdout.readline())
                version = hello["session"]["protocol"]
            except (TimeoutError, ValueError, KeyError, TypeError) as error:
                process.kill()
                await process.wait()
                raise Unreachable(self._node, "the agent could not be started") from error
            if version != PROTOCOL:
                process.kill()
                await process.wait()
                raise ProtocolError(self._node, f"the agent speaks protocol {version}, expected {PROTOCOL}")
            self._process = process
            self._reader = asyncio.create_task(self._read(process), name=f"session {self._node}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                message = json.loads(line)
                if (answers := self._answers.get(message["id"])) is not None:
                    answers.put_nowait(message)
        except asyncio.CancelledError:
            process.kill()
            raise
        except (ValueError, KeyError, TypeError):
            # A torn line (its writer was killed): what else is on this stream cannot be trusted.
            process.kill()
        finally:
            for answers in self._answers.values():
                answers.put_nowait(None)
            await process.wait()

    def _refused(self, answer: Mapping[str, Any]) -> Refused:
        highest = answer.get("highest")
        return Refused(self._node, str(answer["why"]), str(answer["because"]), (int(highest[0]), int(highest[1])) if highest else None)


class AgentWatch:
    """One `watch` in a session."""

    def __init__(
        self, session: AgentSession, id_: int, answers: asyncio.Queue[Mapping[str, Any] | None], first: float, silence: float
    ) -> None:
        self._session = session
        self._id = id_
        self._answers = answers
        self._first = first
        self._silence = silence

    async def lines(self) -> AsyncIterator[Mapping[str, Any]]:
        within = self._first
        while True:
            message = await self._session.receive(self._answers, within, "watch")
            if "line" not in message:
                return
            yield message["line"]
            within = self._silence

    async def renew(self, stamp: float) -> None:
        await self._session.send({"id": self._id, "send": {"renew": {"stamp": stamp}}})


def _token(token: Token) -> dict[str, Any]:
    return asdict(token)
