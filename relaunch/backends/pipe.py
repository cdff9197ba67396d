"""Carries the lines of a session in both directions, whether the agent is local or remote.

Does not interpret the lines.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import Mapping
from typing import Protocol

LINE_LIMIT = 8 * 1024 * 1024
"""Bytes. A `logs` answer is the longest line; asyncio's default limit is 64 KiB."""

DRAIN_DELAY = 0.2
"""Seconds to read what a process has left in its pipe when it ends."""


class Pipe(Protocol):
    @property
    def ended(self) -> str | None:
        """Why the pipe can carry nothing more, for a person; None while it is open."""
        ...

    @property
    def last_words(self) -> str:
        """The end of the agent's output outside the lines (stderr), if that is known."""
        ...

    async def readline(self) -> bytes:
        """Return a line with its newline; at the end of the stream the rest of a line, then b"".

        Raises:
            ValueError: a line is longer than LINE_LIMIT.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Write data.

        Raises:
            ConnectionError: the pipe is broken.
        """
        ...

    def end(self) -> None:
        """Close the sending side, so that the reader may finish and exit."""
        ...

    def kill(self, reason: str | None = None) -> None:
        """End it at once.

        `reason`: why it is of no use, where the caller knows that better than the pipe.
        """
        ...

    async def wait(self) -> None:
        """Wait until the other end is gone."""
        ...


class _Protocol(SubprocessStreamProtocol):
    """Ends the pipe soon after its process.

    While a child of the process has the pipe open, its reader would wait for that child, and each
    command under way for its whole timeout.
    """

    _subprocess: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._subprocess = transport

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        super().pipe_connection_lost(fd, exc)
        # The Python 3.11.2 of Debian 12 logs a broken pipe that no one asks for as an error, with a
        # traceback. Who writes learns of it from `drain`.
        closed: asyncio.Future[None] = self._stdin_closed  # type: ignore[attr-defined]
        if closed.done():
            closed.exception()

    def process_exited(self) -> None:
        super().process_exited()
        if self._subprocess is not None:
            asyncio.get_running_loop().call_later(DRAIN_DELAY, self._subprocess.close)


class ProcessPipe:
    """A pipe to an agent that is a child process of this one."""

    last_words = ""
    """Empty: the agent's stderr goes to this process's stderr."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        process: asyncio.subprocess.Process,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
    ) -> None:
        self._transport = transport
        self._process = process
        self._stdin = stdin
        self._stdout = stdout

    @classmethod
    async def start(cls, *command: str, env: Mapping[str, str]) -> ProcessPipe:
        """Start a command with this environment, in a new session.

        A Ctrl-C in the terminal of this process is for this process, which decides when its agents
        end.
        """
        # As `create_subprocess_exec` does, which keeps the transport to itself.
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: _Protocol(limit=LINE_LIMIT, loop=loop),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            env=env,
            start_new_session=True,
        )
        process = asyncio.subprocess.Process(transport, protocol, loop)
        if process.stdin is None or process.stdout is None:
            raise RuntimeError(f"process {process.pid} has no pipes, which were asked for")
        return cls(transport, process, process.stdin, process.stdout)

    @property
    def ended(self) -> str | None:
        return None if self._process.returncode is None else "the session has ended"

    async def readline(self) -> bytes:
        return await self._stdout.readline()

    async def write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            await self._stdin.drain()
        except RuntimeError as error:  # asyncio raises it for a transport that was closed meanwhile
            raise ConnectionError(str(error)) from error

    def end(self) -> None:
        self._stdin.close()

    def kill(self, reason: str | None = None) -> None:
        # To kill the process is not enough: while one of its children has the pipe open, its reader
        # and `wait` would wait for that child.
        self._transport.close()

    async def wait(self) -> None:
        await self._process.wait()
