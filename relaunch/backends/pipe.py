"""Carries the lines of a session in both directions, whether the agent is local or remote.

Does not interpret the lines.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

LINE_LIMIT = 8 * 1024 * 1024
"""Bytes. A `logs` answer is the longest line; asyncio's default limit is 64 KiB."""


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

    def kill(self) -> None: ...

    async def wait(self) -> None:
        """Wait until the other end is gone."""
        ...


class ProcessPipe:
    """A pipe to an agent that is a child process of this one."""

    last_words = ""
    """Empty: the agent's stderr goes to this process's stderr."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError(
                f"process {process.pid} has no pipes: expected stdin and stdout to be pipes"
            )
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

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

    def kill(self) -> None:
        # The node may have just gone down, with all its processes.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()
