"""Sends orders over one open session with an agent, and sorts the lines received by order id.

Trusts nothing that it receives: a line that is not of the protocol, or lines that arrive faster
than they are taken, end the session with a one-sentence reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from relaunch.backends.answers import MAX_VALUES, has_too_many_values
from relaunch.backends.base import Unreachable
from relaunch.backends.pipe import LINE_LIMIT, Pipe

WAITING_LIMIT = 4 * LINE_LIMIT
"""Most bytes of lines received and not yet taken. The longest answers come alone; a watch takes its
lines in microseconds."""
BURST = 64
"""Lines read in a row before other tasks run."""
MAX_LINES_PER_SECOND = 2000
MAX_BYTES_PER_SECOND = 4 * LINE_LIMIT
"""Limits of one node's output. A node beyond them waits, because one loop serves all nodes. A watch
sends a line a second, a log some MiB."""
MAX_LATE_LINES = 10_000
"""Most lines in a row for commands that are over. After a watch is closed, a few lines are still in
transit."""
PARTING = 2.0
"""Seconds for a session to end after it was asked to."""
ENDING = 0.2
"""Seconds for a session to end by itself once its output has ended."""


class Inbox:
    """The lines of one command that were not taken yet."""

    def __init__(self) -> None:
        self._lines: deque[tuple[Mapping[str, Any], int]] = deque()
        self._ended = False
        self._news = asyncio.Event()
        self.bytes = 0

    def put(self, message: Mapping[str, Any], size: int) -> None:
        self._lines.append((message, size))
        self.bytes += size
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def get(self) -> Mapping[str, Any] | None:
        """Return the next line, or None when no more can come."""
        while not self._lines:
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        message, size = self._lines.popleft()
        self.bytes -= size
        return message


class OrderBinder:
    """What makes an order one for this session and for some seconds.

    The node has said a key in its greeting, and where its clock stands. An agent of before says
    neither: then nothing is added to orders.
    """

    def __init__(self, greeting: Mapping[str, Any]) -> None:
        key = greeting.get("key")
        self._key = key if isinstance(key, str) else None
        self._ahead: float | None = None
        self.set_clock(greeting.get("stamp"))

    @property
    def is_before_keys(self) -> bool:
        """Whether the agent is of release 0.1.0, whose greeting has no key."""
        return self._key is None

    def set_clock(self, stamp: object) -> None:
        """Take what the node's clock showed just now. Any later moment is counted from here."""
        if isinstance(stamp, float) and math.isfinite(stamp):
            self._ahead = stamp - asyncio.get_running_loop().time()

    def make_fields(self, valid_for: float | None) -> dict[str, Any]:
        """Return the fields of an order that says who it is for.

        Args:
            valid_for: Seconds after which the node is not to carry it out; None: it may at any
                time of the session.
        """
        if self._key is None:
            return {}
        if valid_for is None or self._ahead is None:
            return {"session": self._key}
        until = asyncio.get_running_loop().time() + self._ahead + valid_for
        return {"session": self._key, "until": until}


class Link:
    def __init__(
        self,
        node: str,
        pipe: Pipe,
        within: float,
        silence_breaks: bool,
        greeting: Mapping[str, Any] | None = None,
    ) -> None:
        self.binder = OrderBinder(greeting or {})
        self._node = node
        self._pipe = pipe
        self._within = within
        self._silence_breaks = silence_breaks
        self._ids = itertools.count(1)
        self._newest = 0
        self._inboxes: dict[int, Inbox] | None = {}
        """The inbox of each running command, by id; None once the session has ended."""
        self._reason: str | None = None
        """Why this side broke the session off; None if it did not."""
        self._heard_at = 0.0
        self._late_lines = 0
        self._reader = asyncio.create_task(self._read(self._inboxes), name=f"session {node}")

    @property
    def alive(self) -> bool:
        return self._inboxes is not None and self._reason is None and self._pipe.ended is None

    @property
    def is_idle(self) -> bool:
        """Whether no command runs in it."""
        return not self._inboxes

    @property
    def reason(self) -> str:
        """Why the session has ended."""
        return self._reason or self._pipe.ended or "the session has ended"

    def begin(self) -> tuple[int, Inbox]:
        """Return an id for a command, and the inbox for its lines.

        Raises:
            Unreachable: the session has ended.
        """
        if self._inboxes is None or not self.alive:
            raise Unreachable(self._node, self.reason)
        self._newest = next(self._ids)
        inbox = self._inboxes[self._newest] = Inbox()
        return self._newest, inbox

    def over(self, number: int) -> None:
        """Drop the inbox of a command: its caller no longer waits."""
        if self._inboxes is not None:
            self._inboxes.pop(number, None)

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            Unreachable: the session has ended, or the node does not take the message.
        """
        if not self.alive:
            raise Unreachable(self._node, self.reason)
        try:
            async with asyncio.timeout(self._within):
                await self._pipe.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except TimeoutError:
            self.break_off(f"the node takes no orders since {self._within:g} s")
            raise Unreachable(self._node, self.reason) from None
        except ConnectionError as error:
            raise Unreachable(self._node, f"the session broke: {error}") from error

    async def receive(self, inbox: Inbox, within: float, doing: str) -> Mapping[str, Any]:
        began = asyncio.get_running_loop().time()
        try:
            # Not `wait_for`: until Python 3.12 it swallows a cancel that comes with a message.
            async with asyncio.timeout(within):
                message = await inbox.get()
        except TimeoutError:
            reason = f"no answer to {doing} within {within:g} s"
            if self._silence_breaks and self._heard_at < began:
                # Data in transit on this connection may take minutes; a new connection may get
                # through at once.
                self.break_off(reason)
            raise Unreachable(self._node, reason) from None
        if message is None:
            raise Unreachable(self._node, f"{self.reason} (during {doing})")
        return message

    def break_off(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
        self._pipe.kill(self._reason)

    async def close(self) -> None:
        """Close the session. Nothing on the node ends with it."""
        self._reason = self._reason or "the session was closed"
        self._pipe.end()
        await end(self._pipe, PARTING)
        await self._reader

    async def _read(self, inboxes: dict[int, Inbox]) -> None:
        clock = asyncio.get_running_loop().time
        since, lines, size = clock(), 0, 0
        try:
            for number in itertools.count(1):
                line = await self._pipe.readline()
                if not line:
                    break
                self._heard_at = now = clock()
                if (reason := self._take(line, inboxes)) is not None:
                    self.break_off(reason)
                    break
                if now - since >= 1.0:
                    since, lines, size = now, 0, 0
                lines, size = lines + 1, size + len(line)
                if lines > MAX_LINES_PER_SECOND or size > MAX_BYTES_PER_SECOND:
                    await asyncio.sleep(since + 1.0 - now)
                elif number % BURST == 0:
                    await asyncio.sleep(0)
        except ValueError:
            self.break_off(f"the agent said a line of more than {LINE_LIMIT} bytes")
        except asyncio.CancelledError:
            self._pipe.kill()
            raise
        finally:
            # Stop accepting orders now: the agent's process may be gone before its exit code is
            # known.
            self._inboxes = None
            for inbox in inboxes.values():
                inbox.end()
            await self._pipe.wait()

    def _take(self, line: bytes, inboxes: dict[int, Inbox]) -> str | None:
        """Put a line into the inbox of its command.

        Return why the session can no longer be trusted, or None.
        """
        if has_too_many_values(line):
            return f"the agent said a line of more than {MAX_VALUES} values"
        try:
            message = json.loads(line)
            number = message["id"]
            known = type(number) is int and 0 < number <= self._newest
        except (ValueError, KeyError, TypeError, RecursionError):
            # A torn line whose writer was killed, or a program that is not the agent.
            return f"the agent said {line[:120]!r}, expected a JSON object with an id"
        if not known:
            return f"the agent answered order {str(number)[:40]!r}, which was not sent"
        if (inbox := inboxes.get(number)) is None:
            self._late_lines += 1
            return (
                f"the agent sent {MAX_LATE_LINES} lines that no order waits for"
                if self._late_lines > MAX_LATE_LINES
                else None
            )
        self._late_lines = 0
        if b"\\ud" in line or b"\\uD" in line:
            message = _writable(message)
        inbox.put(message, len(line))
        if sum(each.bytes for each in inboxes.values()) > WAITING_LIMIT:
            return f"the agent sent more than {WAITING_LIMIT} bytes that are not read yet"
        return None


def _writable(value: Any) -> Any:
    """Replace lone surrogates.

    They stand for bytes that are not text: JSON can express them, but no store can keep them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_writable(one) for one in value]
    if isinstance(value, dict):
        return {_writable(key): _writable(one) for key, one in value.items()}
    return value


async def end(pipe: Pipe, within: float = ENDING) -> None:
    """Wait up to `within` seconds for the pipe to end, then kill it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            await pipe.wait()
            return
    pipe.kill()
    await pipe.wait()
