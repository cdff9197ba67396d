"""The journal of a generation: numbered observations.

An observation is on disk before it is sent to any watcher. The journal has one writer at a time.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from relaunch.agent import disk
from relaunch.agent.protocol import Json, line, now

RETRY_INTERVAL = 1.0
"""Seconds between attempts to write again after a disk error."""
UNWRITTEN_DELAY = 2.0
"""Seconds after which observations that the disk does not take are reported all the same.

After a loss of power their numbers would be used again, but the disk may never take them, such as
one that an error has made read-only, and ranks whose exits are not known would count as alive.
"""
RESERVED_BYTES, RESERVED_BYTES_PER_RANK = 8192, 512
"""Bytes preallocated before the ranks run. An exit takes one line of about 200 bytes."""
_RETRIED_ERRNOS = (
    *disk.FULL_ERRNOS,
    errno.EIO,
    errno.EROFS,
    errno.EFBIG,
    errno.EBADF,
    errno.EINVAL,
)
"""Disk errors after which the same write may succeed later.

EBADF and EINVAL are those of a journal that could only be opened for reading.
"""


def read(path: Path) -> list[Json]:
    """Return every complete observation. An incomplete last line was never committed; ignore it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return _parse(data)[0]


def _parse(data: bytes) -> tuple[list[Json], int]:
    observations: list[Json] = []
    parsed_bytes = 0
    while True:
        end = data.find(b"\n", parsed_bytes)
        if end < 0:
            return observations, parsed_bytes
        try:
            observations.append(json.loads(data[parsed_bytes:end]))
        except (ValueError, RecursionError):
            return observations, parsed_bytes
        parsed_bytes = end + 1


def list_exited(observations: list[Json]) -> set[int]:
    return {
        observation["rank"] for observation in observations if observation["kind"] == "RankExited"
    }


def explains_missing_exits(observations: list[Json]) -> bool:
    """Return whether the journal already says why the exits of some ranks are missing."""
    return any(observation["kind"] in ("ShimDied", "RanksVanished") for observation in observations)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o1600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY)  # each write fails; what is in it is read


class Journal:
    """A writer that appends observations after the last complete one.

    When the disk is full, observations stay in memory with their numbers, and are written later, in
    order.
    """

    def __init__(self, path: Path, ranks: int | None = None) -> None:
        """Open the journal, truncating an incomplete last line.

        If `ranks` is given, preallocate space for the exits of that many ranks until `close`.
        """
        self.handle = _open(path)
        size = os.fstat(self.handle).st_size
        data = os.pread(self.handle, size, 0)
        found, parsed_bytes = _parse(data)
        if parsed_bytes < size:
            try:
                os.ftruncate(self.handle, parsed_bytes)
            except OSError as error:
                if error.errno not in _RETRIED_ERRNOS:
                    raise
        self.seq = len(found)
        self.synced = 0
        """Number of the last observation that survives a loss of power.

        Later ones are not sent to watchers: after a loss of power their numbers are used again.
        """
        self.behind_since: float | None = None
        """When `sync` first did not get everything to the disk, in seconds of CLOCK_BOOTTIME."""
        self._end = parsed_bytes
        self._pending = bytearray()
        """Complete lines that are not in the file yet."""
        self._reserved = ranks is not None
        if ranks is not None:
            disk.preallocate(self.handle, RESERVED_BYTES + RESERVED_BYTES_PER_RANK * ranks)

    @property
    def pending(self) -> list[Json]:
        """Return the observations that have a number but are not in the file yet."""
        return _parse(bytes(self._pending))[0]

    @property
    def is_failing(self) -> bool:
        """Return whether observations have waited too long for the disk to wait any longer."""
        return self.behind_since is not None and now() >= self.behind_since + UNWRITTEN_DELAY

    def append(self, *observations: tuple[str, dict[str, Any]]) -> None:
        """Append observations, each given as (kind, fields).

        What was written survives the death of any process, and after `sync` a crash of the machine.
        """
        for kind, fields in observations:
            self.seq += 1
            self._pending += line(
                {"seq": self.seq, "kind": kind, "at": time.time(), "stamp": now(), **fields}
            )
        self._write_pending()

    def _write_pending(self) -> None:
        if not self._pending:
            return
        try:
            written = os.write(self.handle, self._pending)
        except OSError as error:
            if error.errno not in _RETRIED_ERRNOS:
                raise
            return
        if written < len(self._pending):  # an incomplete line would hide all lines after it
            written = self._pending.rfind(b"\n", 0, written) + 1
            os.ftruncate(self.handle, self._end + written)
        self._end += written
        del self._pending[:written]

    def sync(self) -> None:
        """Write what is still pending, then fsync the file."""
        self._sync()
        if self.synced == self.seq:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = now()

    def _sync(self) -> None:
        self._write_pending()
        written = self.seq - self._pending.count(b"\n")
        if self.synced < written:
            try:
                os.fsync(self.handle)
            except OSError as error:
                if error.errno not in _RETRIED_ERRNOS:
                    raise
                return
            self.synced = written

    def restore(self, path: Path) -> None:
        """Write the journal to a new file after its file was removed, and continue in the new file.

        Raises:
            OSError: The new file cannot be written.
        """
        partial = path.with_name(f".{path.name}.restored")
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o1600)
        try:
            data = os.pread(self.handle, self._end, 0)
            if os.write(handle, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
            os.fsync(handle)
            os.replace(partial, path)
        except BaseException:
            os.close(handle)
            raise
        os.close(self.handle)
        self.handle = handle

    def close(self) -> None:
        self.sync()
        if self._reserved:
            try:
                os.ftruncate(self.handle, self._end)
            except OSError as error:
                if error.errno not in _RETRIED_ERRNOS:
                    raise
        os.close(self.handle)
