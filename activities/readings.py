"""Looks at nodes, some with their GPUs: a driver that hangs delays what is told of its own node, and of no other.

A reading that takes long goes on by itself and is told with a later look. A worker that dies forgets it, and the next one reads anew.
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
"""Seconds that a look waits for a reading; a node with persistence mode needs a fifth of one."""
KEPT = 300.0
"""Seconds for which one that nobody waited for any more is worth telling: as often as they are read where nobody waits for a node."""

Listed = Mapping[str, Any] | str
"""What a node says of itself, or why it does not answer."""


@dataclass(frozen=True, slots=True)
class Seen:
    listed: Listed
    gpus: object = None
    """What was read of its GPUs."""
    ago: timedelta = timedelta(0)
    was_read: bool = False
    unread: bool = False
    """They were to be read, and the reading goes on."""


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
        """Look at a node and its GPUs. A node that does not answer is looked at too."""
        key, now = (fleet, node), asyncio.get_running_loop().time()
        reading = self._under_way.pop(key, None)
        if reading is None or (reading.ended is not None and now - reading.ended > KEPT):
            reading = _Reading(asyncio.create_task(ask(backend, node, gpus=True), name=f"reading of {node}"))
            reading.task.add_done_callback(reading.over)
        # What it says beside the reading is of another moment, and would come as late as that.
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
