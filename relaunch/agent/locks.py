"""Lock files: flocks, which the kernel releases when the last process that holds one dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from pathlib import Path

from relaunch.agent import processes
from relaunch.agent.ranks import find_shims

RETRY_INTERVAL = 0.005
LOOK_INTERVAL = 1.0
"""Seconds between two looks at who holds a lock that is waited for."""


class HeldLock(TimeoutError):
    """A lock was not free in time. The text names its holder."""


def try_lock(path: Path) -> int | None:
    """Take a lock file without waiting, or return None if it is held.

    The kernel releases it when the last process that holds it dies.
    """
    return take(open_lock(path, os.O_RDWR | os.O_CREAT))


def open_lock(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o1600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # Ranks are stopped on a disk that became read-only, too.
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise error from None


def take(handle: int) -> int | None:
    """Lock an open file and return it, or close it and return None if it is held."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def wait_for_lock(path: Path, timeout: float) -> int:
    """Take a lock file.

    Raises:
        HeldLock: It is not free within `timeout` seconds.
    """
    waiting = LockWait(path, timeout)
    while (lock := try_lock(path)) is None:
        waiting.pause()
    return lock


class LockWait:
    """The wait for a lock that another command holds.

    If something has stopped that one (SIGSTOP), it is continued: no other process would, and
    every order that needs the lock would wait for it.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._deadline = time.monotonic() + timeout
        self._look_at = time.monotonic() + LOOK_INTERVAL

    def pause(self) -> None:
        """Wait for a moment.

        Raises:
                HeldLock: The time is over.
        """
        if time.monotonic() > self._look_at:
            self._look_at += LOOK_INTERVAL
            holder = find_holder(self._path)
            if holder is not None and holder.state == "T" and find_shims.is_agent(holder.pid):
                processes.kill(holder, signal.SIGCONT)
        if time.monotonic() > self._deadline:
            holder = find_holder(self._path)
            who = f"process {holder.pid}, in state {holder.state}" if holder else "another command"
            raise HeldLock(f"{who}, holds {self._path}")
        time.sleep(RETRY_INTERVAL)


def find_holder(path: Path) -> processes.Process | None:
    """Return the process that has locked a file, by /proc/locks; None: it is not known.

    The lock may be held by a child of the one that took it, which has ended. Its number there may
    be another process's by now, and some file systems (btrfs) have another device there than stat
    says: so the file has to be open in that process.
    """
    try:
        status = os.stat(path)
        with open("/proc/locks", "rb") as file:
            rows = [line.split() for line in file.read().splitlines()]
    except OSError:
        return None
    inode = b"%d" % status.st_ino
    for words in rows:
        if words[1:2] == [b"FLOCK"] and words[5].rpartition(b":")[2] == inode:
            pid = int(words[4])
            if _has_open(pid, status):
                return processes.read_process(pid)
    return None


def _has_open(pid: int, status: os.stat_result) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.path.samestat(os.stat(f"{folder}/{name}"), status):
                    return True
    except OSError:  # it has ended, or is another user's
        pass
    return False
