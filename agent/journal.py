"""The journal of a generation: numbered observations, on disk before anybody is told of them. One writer at a time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from agent.protocol import Json, line, now


def read(path: Path) -> list[Json]:
    """Return every whole observation; a torn last line is one that never came to be."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return _parse(data)[0]


def _parse(data: bytes) -> tuple[list[Json], int]:
    found: list[Json] = []
    good = 0
    while True:
        end = data.find(b"\n", good)
        if end < 0:
            return found, good
        try:
            found.append(json.loads(data[good:end]))
        except ValueError:
            return found, good
        good = end + 1


def exited(observations: list[Json]) -> set[int]:
    return {seen["rank"] for seen in observations if seen["kind"] == "RankExited"}


def told_of_the_end(observations: list[Json]) -> bool:
    """Whether the journal already says why ranks have no exit of their own in it."""
    return any(seen["kind"] in ("KeeperDied", "RanksVanished") for seen in observations)


class Journal:
    """Appends observations, going on after the last whole one."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self.handle).st_size
        data = os.pread(self.handle, size, 0)
        found, good = _parse(data)
        if good < size:
            os.ftruncate(self.handle, good)
        self.seq = len(found)
        self.synced = 0
        """The last that a loss of power would not take back. Nobody hears of a later one, lest its number be given twice."""

    def append(self, *observations: tuple[str, dict[str, Any]]) -> None:
        """Write (kind, fields). From here on they outlive every process, and after `sync` the machine."""
        lines = []
        for kind, fields in observations:
            self.seq += 1
            lines.append(line({"seq": self.seq, "kind": kind, "at": time.time(), "stamp": now(), **fields}))
        os.write(self.handle, b"".join(lines))

    def sync(self) -> None:
        if self.synced < self.seq:
            os.fsync(self.handle)
            self.synced = self.seq

    def close(self) -> None:
        self.sync()
        os.close(self.handle)
