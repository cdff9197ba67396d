"""A single-threaded poll loop, and line-based channels over descriptors that never block.

Buffers are bounded in both directions: a peer that does not read is dropped, not waited for.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from typing import Callable

from relaunch.agent.protocol import Json, line, now

MAX_LINE_BYTES = 4 * 1024 * 1024
"""A start order with long environments for 16 ranks is far below this."""


def is_from_this_user(caller: socket.socket) -> bool:
    """Return whether the other end of a unix socket is a process of this user or of root.

    The folder of the sockets is closed to others. This holds also where it was opened.
    """
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (0, os.geteuid())


class Loop:
    def __init__(self) -> None:
        self._poll = select.poll()
        self._ready: dict[int, Callable[[int], None]] = {}

    def watch(self, handle: int, ready: Callable[[int], None], events: int = select.POLLIN) -> None:
        self._ready[handle] = ready
        self._poll.register(handle, events)

    def forget(self, handle: int) -> None:
        if self._ready.pop(handle, None) is not None:
            self._poll.unregister(handle)

    def run_once(self, until: float) -> None:
        """Wait until a descriptor is ready or until `until` (CLOCK_BOOTTIME); handle events."""
        for handle, events in self._poll.poll(max(0, int((until - now()) * 1000 + 0.999))):
            ready = self._ready.get(handle)
            if ready is not None:  # an earlier handler of this turn may have closed it
                ready(events)


class Channel:
    """Lines over a descriptor that it owns."""

    def __init__(
        self,
        loop: Loop,
        handle: int,
        handle_message: Callable[[Json], None],
        handle_end: Callable[[], None],
        limit: int = MAX_LINE_BYTES,
    ) -> None:
        os.set_blocking(handle, False)
        self.loop = loop
        self.handle = handle
        self.handle_message = handle_message
        self.handle_end = handle_end
        self.limit = limit
        self.closed = False
        self.closing = False
        self.last_write_at = now()
        self.error: int | None = None
        """The errno that ended it, if one did."""
        self._in = bytearray()
        self._out = bytearray()
        loop.watch(handle, self._handle_ready)

    @property
    def has_unsent(self) -> bool:
        """Whether the other side has not read everything yet."""
        return bool(self._out)

    def send(self, value: Json) -> None:
        self.send_bytes(line(value))

    def send_bytes(self, data: bytes) -> None:
        if self.closed:
            return
        if not self._out:
            self.last_write_at = now()
        self._out += data
        if len(self._out) > self.limit:
            self.drop()
        else:
            self._flush()

    def read_pending(self) -> None:
        """Process input that has already arrived."""
        if not self.closed:
            self._read()

    def finish(self) -> None:
        """Close once everything has been sent."""
        self.closing = True
        if not self._out:
            self.drop()

    def drop(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.forget(self.handle)
            os.close(self.handle)
            self.handle_end()

    def _handle_ready(self, events: int) -> None:
        if events & select.POLLOUT:
            self._flush()
        if not self.closed and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            self._read()

    def _flush(self) -> None:
        while self._out:
            try:
                sent = os.write(self.handle, self._out)
            except BlockingIOError:
                break
            except OSError as error:  # whatever the errno, the other side is gone
                self.error = error.errno
                self.drop()
                return
            del self._out[:sent]
            self.last_write_at = now()
        if self.closing and not self._out:
            self.drop()
            return
        self.loop.watch(
            self.handle, self._handle_ready, select.POLLIN | (select.POLLOUT if self._out else 0)
        )

    def _read(self) -> None:
        try:
            data = os.read(self.handle, 65536)
            is_open = bool(data)
        except BlockingIOError:  # a handler that reads more may find it was read already
            data, is_open = b"", True
        except OSError as error:  # whatever the errno, the other side is gone
            self.error = error.errno
            data, is_open = b"", False
        self._in += data
        while not self.closed:
            text = take_line(self._in)
            if text is None:
                break
            value = parse(text)
            if value is not None:
                self.handle_message(value)
        if not is_open or len(self._in) > self.limit:
            self.drop()


def take_line(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\n")
    if end < 0:
        return None
    text = bytes(buffer[:end])
    del buffer[: end + 1]
    return text


def parse(text: bytes) -> Json | None:
    """Return the JSON object in a line, or None: other lines are noise."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
