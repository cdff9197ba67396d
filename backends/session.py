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

ENDING = 0.2
"""Seconds for a process whose output has ended to end by itself."""

Answers = asyncio.Queue[Mapping[str, Any] | None]
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
        self._answers: dict[int, Answers] | None = None
        """Who waits for what on the session that is open; None: none is."""

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

    async def probe(self, within: float, kernel_since: float | None) -> Mapping[str, Any]:
        answer = await self._call("probe", {"within": within, "kernel_since": kernel_since}, within + self._within)
        if answer["outcome"] == "refused":
            raise ProtocolError(self._node, f"probe changes nothing and was refused: {answer.get('because')}")
        return self._has_boot_id("probe", answer)

    async def diagnose(self, id: str, level: int, within: float) -> Mapping[str, Any] | Refused:
        order = {"id": id, "level": level, "within": within}
        answer = await self._call("diagnose", order, within + self._within)
        return self._refused(answer) if answer["outcome"] == "refused" else self._ran("diagnose", answer, "stdout")

    async def reset_gpus(self, id: str, boot_id: str, gpus: tuple[str, ...], within: float) -> Mapping[str, Any] | Refused:
        order = {"id": id, "boot_id": boot_id, "gpus": gpus, "within": within}
        answer = await self._call("reset-gpus", order, within + self._within)
        return self._refused(answer) if answer["outcome"] == "refused" else self._ran("reset-gpus", answer, "output")

    async def reboot(self, id: str, boot_id: str, because: str) -> Mapping[str, Any] | Refused:
        answer = await self._call("reboot", {"id": id, "boot_id": boot_id, "because": because}, 2 * self._within)
        return self._refused(answer) if answer["outcome"] == "refused" else self._has_boot_id("reboot", answer)

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
            await _end(process)
        if self._reader is not None:
            await self._reader

    async def send(self, message: Mapping[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None or self._answers is None:
            raise Unreachable(self._node, "the session has ended")
        try:
            process.stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            await process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise Unreachable(self._node, f"the session broke: {error}") from error

    async def receive(self, answers: Answers, within: float, doing: str) -> Mapping[str, Any]:
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

    async def _answer(self, answers: Answers, within: float, command: str) -> Mapping[str, Any]:
        last: Mapping[str, Any] | None = None
        while True:
            message = await self.receive(answers, within, command)
            if "line" in message:
                last = message["line"]
            elif last is None:
                raise Unreachable(self._node, f"{command} ended without an answer")
            else:
                break
        if not isinstance(last, Mapping) or last.get("outcome") not in ("done", "refused"):
            raise ProtocolError(self._node, f"{command} answered {str(last)[:200]!r}, expected an outcome")
        if last["outcome"] == "refused" and last.get("why") in ("bad_order", "protocol"):
            raise ProtocolError(self._node, str(last.get("because")))
        return last

    @asynccontextmanager
    async def _command(self, command: str, order: Mapping[str, Any]) -> AsyncIterator[tuple[int, Answers]]:
        await self._open()
        id_ = next(self._ids)
        answers: Answers = asyncio.Queue()
        waiting = self._answers
        if waiting is None:
            raise Unreachable(self._node, f"the session ended before {command}")
        waiting[id_] = answers
        try:
            await self.send({"id": id_, "command": command, "order": {"protocol": PROTOCOL, **order}})
            yield id_, answers
        finally:
            waiting.pop(id_, None)
            if command in ("watch", "diagnose"):
                # A broken session has closed the watch already.
                with contextlib.suppress(Unreachable):
                    await self.send({"id": id_, "close": True})

    async def _open(self) -> None:
        async with self._opening:
            if self._process is not None and self._process.returncode is None and self._answers is not None:
                return
            process = await self._connect()
            assert process.stdout is not None
            try:
                async with asyncio.timeout(2 * self._within):
                    hello = json.loads(await process.stdout.readline())
                version = hello["session"]["protocol"]
            except (TimeoutError, ValueError, KeyError, TypeError) as error:
                await _end(process)
                raise Unreachable(self._node, "the agent could not be started") from error
            if version != PROTOCOL:
                await _end(process)
                raise ProtocolError(self._node, f"the agent speaks protocol {version}, expected {PROTOCOL}")
            self._process = process
            waiting: dict[int, Answers] = {}
            self._answers = waiting
            self._reader = asyncio.create_task(self._read(process, waiting), name=f"session {self._node}")

    async def _read(self, process: asyncio.subprocess.Process, waiting: dict[int, Answers]) -> None:
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                message = json.loads(line)
                if b"\\ud" in line or b"\\uD" in line:
                    message = _writable(message)
                if (answers := waiting.get(message["id"])) is not None:
                    answers.put_nowait(message)
        except asyncio.CancelledError:
            _kill(process)
            raise
        except (ValueError, KeyError, TypeError):
            # A torn line (its writer was killed): what else is on this stream cannot be trusted.
            _kill(process)
        finally:
            # From here on nobody sends an order into it: its process may be gone before that is known of its exit code.
            if self._answers is waiting:
                self._answers = None
            for answers in waiting.values():
                answers.put_nowait(None)
            await process.wait()

    def _has_boot_id(self, command: str, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(answer.get("boot_id"), str) or not answer["boot_id"]:
            raise ProtocolError(self._node, f"{command} answered with boot_id {answer.get('boot_id')!r}, expected a text")
        return answer

    def _ran(self, command: str, answer: Mapping[str, Any], output: str) -> Mapping[str, Any]:
        """Check the answer to what runs a program of the node: that it is missing there, or how it ended and what it said."""
        code = answer.get("exit_code", "none")
        if isinstance(answer.get("missing"), str):
            return answer
        if isinstance(code, bool) or not isinstance(code, int | None):
            raise ProtocolError(self._node, f"{command} answered with exit_code {code!r}, expected a number or null")
        if not isinstance(answer.get(output), str):
            raise ProtocolError(self._node, f"{command} answered with {output} {str(answer.get(output))[:200]!r}, expected a text")
        return answer

    def _refused(self, answer: Mapping[str, Any]) -> Refused:
        try:
            highest, boot_id, holder = answer.get("highest"), answer.get("boot_id"), answer.get("held")
            return Refused(
                self._node,
                str(answer["why"]),
                str(answer["because"]),
                (int(highest[0]), int(highest[1])) if highest else None,
                None if boot_id is None else str(boot_id),
                None if holder is None else str(holder["id"]),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError(self._node, f"a refusal says {str(answer)[:200]!r}, expected why and because") from error


def _writable(value: Any) -> Any:
    """Replace halves of surrogate pairs, which stand for bytes that are no text: JSON can say them, and nothing can store them."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_writable(one) for one in value]
    if isinstance(value, dict):
        return {_writable(key): _writable(one) for key, one in value.items()}
    return value


class AgentWatch:
    """One `watch` in a session."""

    def __init__(self, session: AgentSession, id_: int, answers: Answers, first: float, silence: float) -> None:
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


def _kill(process: asyncio.subprocess.Process) -> None:
    # Its node may have gone down a moment ago, and every process with it.
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENDING):
            await process.wait()
    if process.returncode is None:
        _kill(process)
        await process.wait()


def _token(token: Token) -> dict[str, Any]:
    return asdict(token)
