"""Looks at nodes, and reads the GPUs of some. A hanging driver delays the results of one node only.

A slow reading continues in the background, and a later look returns its result. If the worker dies,
the reading is lost and the next worker reads again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from relaunch.backends.answers import parse_list
from relaunch.backends.base import Backend, BackendError

READING_TIMEOUT_S = 1.0
"""Seconds that a look waits for a reading. A node with persistence mode needs a fifth of a
second."""
MAX_READING_AGE_S = 300.0
"""Seconds for which the result of a background reading may be returned: the interval at which GPUs
are read when no caller waits for a node."""

Listing = Mapping[str, Any] | str
"""A node's answer to `list`, or why it does not answer."""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    listing: Listing
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Its answer with the reading of its GPUs, its disk and its network ports."""
    age: timedelta = timedelta(0)
    was_read: bool = False
    unread: bool = False
    """Whether the GPUs were to be read and the reading is still running."""


@dataclass(slots=True)
class _ReadingTask:
    task: asyncio.Task[Listing]
    ended: float | None = None

    def note_end(self, task: asyncio.Task[Listing]) -> None:
        self.ended = asyncio.get_running_loop().time()


class NodeReader:
    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], _ReadingTask] = {}

    async def take_snapshot(self, backend: Backend, fleet: str, node: str) -> NodeSnapshot:
        """Look at a node and its GPUs. A node that does not answer is returned with the reason."""
        key, now = (fleet, node), asyncio.get_running_loop().time()
        reading = self._under_way.pop(key, None)
        if reading is None or (
            reading.ended is not None and now - reading.ended > MAX_READING_AGE_S
        ):
            reading = _ReadingTask(
                asyncio.create_task(list_node(backend, node, gpus=True), name=f"reading of {node}")
            )
            reading.task.add_done_callback(reading.note_end)
        # Ask separately: the list that comes with the reading is from another moment, and may come
        # as late as the reading.
        listing = await list_node(backend, node)
        if isinstance(listing, str):
            if not reading.task.done():
                self._under_way[key] = reading
            return NodeSnapshot(listing)
        done, _ = await asyncio.wait({reading.task}, timeout=READING_TIMEOUT_S)
        if not done:
            self._under_way[key] = reading
            return NodeSnapshot(listing, unread=True)
        read = reading.task.result()
        if isinstance(read, str) or ("gpus" not in read and read.get("held") is not None):
            return NodeSnapshot(listing)
        age = 0.0 if reading.ended is None else asyncio.get_running_loop().time() - reading.ended
        return NodeSnapshot(listing, read, timedelta(seconds=int(max(0.0, age))), was_read=True)


async def list_node(backend: Backend, node: str, gpus: bool = False) -> Listing:
    try:
        return parse_list(node, await backend.list(node, gpus))
    except BackendError as error:
        return error.reason
