"""What a session with an agent is spoken over: lines in both directions, however far away the agent is.

Knows nothing of what the lines say.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

LINE_LIMIT = 8 * 1024 * 1024
"""A `logs` answer is the longest line; asyncio's own limit is 64 KiB."""


class Pipe(Protocol):
    @property
    def ended(self) -> str | None:
        """Why nothing can be said over it any more, for a person; None: something can."""
        ...

    @property
    def last_words(self) -> str:
        """The end of what was printed beside the lines, where that is known."""
        ...

    async def readline(self) -> bytes:
        """Return a line with its end; at the end what is left of one, then nothing.

        Raises:
            ValueError: a line is longer than LINE_LIMIT.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Raises ConnectionError when it is broken."""
        ...

    def end(self) -> None:
        """Say that nothing more will be said: what listens may finish and go."""
        ...

    def kill(self) -> None: ...

    async def wait(self) -> None:
        """Wait until it is gone."""
        ...


class ProcessPipe:
    """An agent that is a child of ours."""

    last_words = ""
    """They went to our own stderr."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError(f"process {process.pid} has no pipes: expected stdin and stdout to be pipes")
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
        except RuntimeError as error:  # asyncio's word for a transport that was closed meanwhile
            raise ConnectionError(str(error)) from error

    def end(self) -> None:
        self._stdin.close()

    def kill(self) -> None:
        # Its node may have gone down a moment ago, and every process with it.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()
