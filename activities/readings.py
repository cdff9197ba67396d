"""Looks at nodes, and reads the GPUs of some. A hanging driver delays the results of one node only.

A slow reading continues in the background, and a later look returns its result. If the worker dies,
the reading is lost and the next worker reads again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from relaunch.backends.answers import parse_list
from relaunch.backends.base import Backend, BackendError

PATIENCE = 1.0
"""Seconds that a look waits for a reading. A node with persistence mode needs a fifth of a
second."""
KEPT = 300.0
"""Seconds for which the result of a background reading may be returned: the interval at which GPUs
are read when no caller waits for a node."""

Listed = Mapping[str, Any] | str
"""A node's answer to `list`, or why it does not answer."""


@dataclass(frozen=True, slots=True)
class Seen:
    listed: Listed
    gpus: object = None
    """The reading of its GPUs."""
    ago: timedelta = timedelta(0)
    was_read: bool = False
    unread: bool = False
    """Whether the GPUs were to be read and the reading is still running."""


@dataclass(slots=True)
class _Reading:
    task: asyncio.Task[Listed]
    ended: float | None = None

    def over(self, task: asyncio.Task[Listed]) -> None:
        self.ended = asyncio.get_running_loop().time()


class Readings:
    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], _Reading] = {}

    async def look(self, backend: Backend, fleet: str, node: str) -> Seen:
        """Look at a node and its GPUs. A node that does not answer is returned with the reason."""
        key, now = (fleet, node), asyncio.get_running_loop().time()
        reading = self._under_way.pop(key, None)
        if reading is None or (reading.ended is not None and now - reading.ended > KEPT):
            reading = _Reading(
                asyncio.create_task(ask(backend, node, gpus=True), name=f"reading of {node}")
            )
            reading.task.add_done_callback(reading.over)
        # Ask separately: the list that comes with the reading is from another moment, and may come
        # as late as the reading.
        listed = await ask(backend, node)
        if isinstance(listed, str):
            if not reading.task.done():
                self._under_way[key] = reading
            return Seen(listed)
        done, _ = await asyncio.wait({reading.task}, timeout=PATIENCE)
        if not done:
            self._under_way[key] = reading
            return Seen(listed, unread=True)
        read = reading.task.result()
        if isinstance(read, str) or ("gpus" not in read and read.get("held") is not None):
            return Seen(listed)
        ago = 0.0 if reading.ended is None else asyncio.get_running_loop().time() - reading.ended
        return Seen(listed, read.get("gpus"), timedelta(seconds=int(max(0.0, ago))), was_read=True)


async def ask(backend: Backend, node: str, gpus: bool = False) -> Listed:
    try:
        return parse_list(node, await backend.list(node, gpus))
    except BackendError as error:
        return error.reason
