"""A pipe to an agent over an SSH channel. The event loop never waits for the node here.

paramiko's thread signals that data has arrived, and the loop takes it. Calls that may block
(writing into a full window or socket, and telling the node that its window is open again) run in
threads that all pipes share, each for a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Executor
from functools import partial
from typing import Any

import paramiko

from relaunch.backends.pipe import LINE_LIMIT
from relaunch.backends.ssh.connection import Connection

CHUNK = 65536
AHEAD = 256 * 1024
"""Bytes taken from the channel before a line of them is read. Beyond that the channel's window
closes, and the node waits."""
QUEUE = 8 * 1024 * 1024
"""Most bytes waiting to be sent. The longest order is 4 MiB, so a node behind which more piles up
is not reading."""
PIECE = 32768
SEND_TIMEOUT = 10.0
"""Seconds within which a node must take the next piece of data sent to it."""
WORDS = 4096
FAREWELL = 0.5
"""Seconds to wait between the end of a command's output and the end of its channel. A process that
the command left behind may hold the channel open for ever."""


class _Wake:
    """The event object of paramiko's buffers.

    They call it when data has arrived or ended, in paramiko's thread and under the buffer's lock.
    """

    def __init__(self, pipe: ChannelPipe) -> None:
        self._pipe = pipe

    def set(self) -> None:
        self._pipe.wake()

    def clear(self) -> None:
        pass


class ChannelPipe:
    def __init__(
        self, connection: Connection, channel: paramiko.Channel, threads: Executor
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._searched = 0
        self._stderr = bytearray()
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        """Set when no more data can arrive: all of it is in `_data`."""
        self._reason: str | None = None
        self.lost = False
        """Whether the connection ended the session, rather than the agent or this side."""
        self.is_finished = False
        """Whether this side has ended the session, with nothing wrong."""
        self._woken = False
        self._receiving = False
        self._lock = threading.Lock()
        self._queue: list[bytes] = []
        self._queued = 0
        self._ending = False
        self._writing = False
        self._looking = False
        self._sending_since: float | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._left = False
        self._born = self._loop.time()
        self._died: float | None = None
        # Do not use the channel's fileno(): there, the stdout and stderr buffers share one state,
        # and change it without a common lock.
        wake: Any = _Wake(self)
        channel.in_buffer.set_event(wake)
        channel.in_stderr_buffer.set_event(wake)

    # --- the pipe

    @property
    def ended(self) -> str | None:
        return self._reason

    @property
    def last_words(self) -> str:
        return self._stderr.decode(errors="replace").strip()

    @property
    def exit_status(self) -> int | None:
        """The exit status of the command, if it has ended and the node has reported it."""
        return (
            self._channel.exit_status
            if self._channel.status_event.is_set() and self._channel.exit_status >= 0
            else None
        )

    @property
    def life(self) -> tuple[float, float] | None:
        """The loop time at which it ended, and its lifetime in seconds; None while open."""
        return None if self._died is None else (self._died, self._died - self._born)

    async def readline(self) -> bytes:
        while True:
            end = self._data.find(b"\n", self._searched)
            if end >= 0:
                return self._cut(end + 1)
            self._searched = len(self._data)
            if self._searched > LINE_LIMIT:
                raise ValueError(f"a line of more than {LINE_LIMIT} bytes")
            if self._over.is_set():
                return self._cut(len(self._data))
            self._news.clear()
            await self._news.wait()

    def _cut(self, size: int) -> bytes:
        line = bytes(self._data[:size])
        del self._data[:size]
        self._searched = 0
        self._pump()
        return line

    async def write(self, data: bytes) -> None:
        if self._reason is not None:
            raise ConnectionResetError(self._reason)
        with self._lock:
            full = self._queued + len(data) > QUEUE
            if not full:
                self._queue.append(data)
                self._queued += len(data)
        if full:
            self._break(f"the node takes no orders: {self._queued} bytes wait to be sent")
            raise ConnectionResetError(self._reason)
        self._begin_writing()

    def end(self) -> None:
        self._ending = self.is_finished = True
        self._begin_writing()

    def kill(self, reason: str | None = None) -> None:
        self._reason = reason or self._reason
        self._break("the session was given up")

    async def wait(self) -> None:
        await self._over.wait()
        if self._reason is None:
            self._reason = self._why()
        self._connection.abort(self._reason)

    # --- what comes

    def wake(self) -> None:
        """Schedule a read on the event loop. Called by paramiko's thread."""
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no reader is left
                self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        self._woken = False
        self._pump()

    def _pump(self) -> None:
        """Take one chunk of the data that arrived. Other nodes get their turn in between."""
        channel = self._channel
        if self._receiving or self._over.is_set():
            return
        # Read the end flag first: data that came before the end is then in the buffer already.
        ended = channel.eof_received or channel.closed
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > 2 * channel.in_window_size:
            self._break("the node sends more than it was allowed to")
        for ready, receive, take in (
            (channel.recv_stderr_ready, channel.recv_stderr, self._take_words),
            (channel.recv_ready, channel.recv, self._take),
        ):
            if not ready() or (
                take == self._take and len(self._data) >= AHEAD and b"\n" in self._data
            ):
                continue
            room = channel.in_window_threshold - channel.in_window_sofar
            if room <= 0 and not ended:
                # This read tells the node that its window is open again, and sending that message
                # may block.
                self._receiving = True
                future = self._loop.run_in_executor(self._threads, receive, CHUNK)
                future.add_done_callback(partial(self._finish_receive, take=take))
                return
            take(receive(CHUNK if ended else min(CHUNK, room)))
            self._loop.call_soon(self._pump)
            return
        if ended and not channel.recv_ready():
            self._farewell()

    def _finish_receive(self, done: asyncio.Future[bytes], take: Any) -> None:
        self._receiving = False
        if not done.cancelled() and (error := done.exception()) is not None:
            # What it had taken from the channel is lost, and the lines after it are torn.
            loss = self._connection.find_loss()
            self.lost = loss is not None
            self._break(loss or f"what the node says cannot be read: {error}")
        elif not done.cancelled():
            take(done.result())
        self._pump()

    def _take(self, data: bytes) -> None:
        self._data += data
        self._news.set()

    def _take_words(self, data: bytes) -> None:
        self._stderr += data
        del self._stderr[:-WORDS]

    def _farewell(self) -> None:
        """Handle the end of the output.

        The exit status arrives after it and before the channel closes, so wait up to FAREWELL
        seconds.
        """
        if self._channel.closed or self._left:
            self._end()
        elif self._leaving is None:
            self._leaving = self._loop.call_later(FAREWELL, self._leave)

    def _leave(self) -> None:
        self._left = True
        self._pump()

    def _end(self) -> None:
        if self._reason is None:
            self._reason = self._why()
        self._is_over()
        self._connection.abort(self._reason)

    def _why(self) -> str:
        if (lost := self._connection.find_loss()) is not None:
            self.lost = True
            return lost
        status = self.exit_status
        return "the agent's session has ended" + ("" if status is None else f" with {status}")

    def _break(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
        self._connection.abort(reason)
        # Discard the data that came before: it is not needed, and its sender may send without end.
        self._data.clear()
        self._is_over()

    def _is_over(self) -> None:
        self._died = self._died or self._loop.time()
        self._over.set()
        self._news.set()

    # --- what goes

    def _begin_writing(self) -> None:
        with self._lock:
            if self._writing or not (self._queue or self._ending):
                return
            self._writing = True
        self._loop.run_in_executor(self._threads, self._write_out)
        if not self._looking:
            self._looking = True
            self._loop.call_later(SEND_TIMEOUT, self._look)

    def _write_out(self) -> None:
        """Send the queued data until the queue is empty. Runs in a thread."""
        while True:
            with self._lock:
                data, ending = b"".join(self._queue), self._ending
                self._queue.clear()
                if not data and not ending:
                    self._writing, self._sending_since = False, None
                    return
                self._ending = False
            try:
                for start in range(0, len(data), PIECE):
                    self._sending_since = time.monotonic()
                    self._channel.sendall(data[start : start + PIECE])
                if ending:
                    self._channel.shutdown_write()
            except (OSError, EOFError, paramiko.SSHException) as error:
                self._sending_since = None
                with contextlib.suppress(RuntimeError):  # the loop is closed, and no reader is left
                    self._loop.call_soon_threadsafe(self._fail_writing, error)
                return
            with self._lock:
                self._queued -= len(data)

    def _fail_writing(self, error: Exception) -> None:
        """Break the pipe, unless its reader learns of the failure from the end of the channel.

        The reader then knows the reason, and takes what came before. But paramiko gives up sending
        where an exchange of new keys takes long, and leaves the channel open: what is heard over it
        would hide that nothing is said any more.
        """
        if not (isinstance(error, EOFError) or self._channel.closed):
            self._break(f"nothing can be sent to the node: {error}")

    def _look(self) -> None:
        """Check that the node takes the data being sent, and break the pipe if it does not."""
        since = self._sending_since
        self._looking = self._writing and not self._over.is_set()
        if not self._looking:
            return
        if since is not None and time.monotonic() - since >= SEND_TIMEOUT:
            self._break(f"the node has taken nothing for {SEND_TIMEOUT:g} s")
            return
        self._loop.call_later(SEND_TIMEOUT / 2, self._look)
