"""When each rank's log had which length, so that its output since a time can be found.

Log lines carry no time. The supervisor writes down the length of each log every few seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Dict

from relaunch.agent.state import Generation

MARK_INTERVAL = 10.0
"""Seconds between two marks of a log that grows."""
MAX_BYTES = 64 * 1024
"""Bytes of marks of one log: a growing log fills half of it in four hours. Then every second mark
of the older half is dropped."""


class LogTimes:
    """Writes the marks of one generation. Errors are ignored: a full disk must not end anything."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._marked_at = -MARK_INTERVAL
        self._sizes: Dict[str, int] = {}

    def mark(self) -> None:
        """Write down the length of each log that has grown, at most once an interval."""
        if time.monotonic() < self._marked_at + MARK_INTERVAL:
            return
        self._marked_at = time.monotonic()
        try:
            with os.scandir(self._generation.path / "logs") as files:
                # Followed: the log of a living rank may have been replaced by a link to it.
                sizes = {file.name: file.stat().st_size for file in files}
            for name, size in sizes.items():
                if self._sizes.get(name) != size:
                    _append(self._generation.log_times / name, f"{time.time():.0f} {size}\n")
                    self._sizes[name] = size
        except OSError:
            return


def _append(path: Path, mark: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, mark.encode())
        is_long = os.fstat(handle).st_size > MAX_BYTES
    finally:
        os.close(handle)
    if is_long:
        lines = path.read_bytes().splitlines(keepends=True)
        half = len(lines) // 2
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(b"".join([*lines[:half:2], *lines[half:]]))
        os.replace(partial, path)


def find_offset(generation: Generation, log: Path, moment: float) -> int:
    """Return an offset of a log before which everything was printed before a moment.

    It is at most one interval of output too early.

    Args:
        generation: The generation of the log.
        log: Its path.
        moment: Unix time by this node's clock.
    """
    try:
        status = os.stat(log)
    except OSError:
        return 0
    if status.st_mtime < moment:
        return status.st_size
    offset = 0
    try:
        marks = (generation.log_times / log.name).read_text(errors="replace")
    except OSError:
        return 0
    for line in marks.splitlines():
        at, _, size = line.partition(" ")
        # A line may be torn where the disk was full.
        if at.isdigit() and size.isdigit() and int(at) <= moment:
            offset = max(offset, int(size))
    return min(offset, status.st_size)
