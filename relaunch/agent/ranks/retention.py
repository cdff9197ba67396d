"""Log retention: remove ended generations when their logs exceed this node's budget.

Of a living generation, only the beginning of a log that exceeds its share is removed. A living
generation and the newest generation of a job are never removed, nor is the record of the tokens
that this node has seen: that is in highest.json, outside the generations' folders.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from relaunch.agent import disk
from relaunch.agent.state import Generation, JobState, try_lock

MOST = 10 * 1024**3
"""Maximum budget in bytes: what eight very verbose ranks write in a few nights of failures."""
SHARE = 0.1
"""Maximum budget as a fraction of the file system.

On a small disk the space for the next checkpoint matters more than the output of the last failure.
"""
VARIABLE = "RELAUNCH_LOG_BUDGET"
"""Environment variable of the agent that sets the budget in bytes and overrides both limits."""
LOOKED = "tidied"
PAUSE = 60.0
"""Seconds between two scans. A launch waits for a scan, 0.1 ms for each generation."""
MIN_KEPT_BYTES = 64 * 1024
"""Bytes to keep at the end of a log in use: as much as is read of a failed launcher's log."""
PAGE_BYTES = 4096
PATIENCE = 1.0
"""Seconds for removing generations; the next launch continues with the rest."""


class Old(NamedTuple):
    since: float
    size: int
    """Bytes that its logs take on the disk."""
    generation: Generation
    job: Path
    newest: bool
    """Whether it is the newest generation of its job."""


def budget(state: Path) -> int:
    given = os.environ.get(VARIABLE, "")
    if given.isdigit():
        return int(given)
    found = os.statvfs(state)
    return min(MOST, int(found.f_blocks * found.f_frsize * SHARE))


def make_room(state: Path, own: Path) -> None:
    """Remove the oldest ended generations of all jobs until the logs of those left fit the budget.

    Does nothing if the last scan was less than PAUSE seconds ago. Errors are ignored.

    Args:
        state: The node's state folder.
        own: The folder of the job whose lock the caller holds.
    """
    if _looked_lately(state):
        return
    try:
        if _tidied(state, own):
            (state / LOOKED).touch(mode=0o600)
    except OSError:  # a launch must not fail because of old generations
        return


def _looked_lately(state: Path) -> bool:
    try:
        return (
            0 <= time.time() - (state / LOOKED).stat().st_mtime < PAUSE
            and VARIABLE not in os.environ
        )
    except OSError:
        return False


def _tidied(state: Path, own: Path) -> bool:
    """Remove generations; return whether this is finished, or False if PATIENCE ran out first."""
    most, deadline = budget(state), time.monotonic() + PATIENCE
    found = _generations(state)
    # Includes living generations, because asking whether one lives costs a lock.
    if sum(one.size for one in found) <= most:
        return True
    ended = [one for one in found if not one.generation.shim_lives()]
    total = sum(one.size for one in ended)
    locks: Dict[Path, Optional[int]] = {}
    try:
        for one in sorted(ended, key=lambda one: (one.since, one.generation.order)):
            if total <= most:
                return True
            if one.newest:
                continue
            if one.job != own and one.job not in locks:
                locks[one.job] = try_lock(one.job / "lock")
            # Another command is changing that job: skip it this time.
            if one.job != own and locks[one.job] is None:
                continue
            if not one.generation.shim_lives():
                shutil.rmtree(one.generation.path, ignore_errors=True)
                total -= one.size
                # Checked after a removal: even if the scan alone uses up the time, each launch
                # removes at least one generation.
                if time.monotonic() > deadline:
                    return total <= most
        return True
    finally:
        for lock in locks.values():
            if lock is not None:
                os.close(lock)


def _generations(state: Path) -> List[Old]:
    """Return all generations of all jobs, with the size of their logs."""
    found = []
    with os.scandir(state / "jobs") as jobs:
        folders = [Path(job.path) for job in jobs if job.is_dir(follow_symlinks=False)]
    for folder in folders:
        job = JobState(state, "", "")
        job.path = folder
        generations = job.generations()
        for generation in generations:
            since = generation.path.stat().st_mtime
            found.append(
                Old(
                    since,
                    _size(generation.path / "logs"),
                    generation,
                    folder,
                    generation is generations[-1],
                )
            )
    return found


def _size(logs: Path) -> int:
    try:
        with os.scandir(logs) as files:
            return sum(file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
    except FileNotFoundError:
        return 0


# --- logs in use ---


def cut_live_logs(generation: Generation) -> None:
    """Free the beginning of each log that exceeds its share of the budget; keep half of the share.

    This punches a hole: blocks are freed, but the length and all offsets stay the same, and the
    rank keeps writing. On file systems without hole punching (NFS, ext3) the whole log stays.
    """
    try:
        with os.scandir(generation.path / "logs") as files:
            logs = [
                (file.path, file.stat(follow_symlinks=False))
                for file in files
                if file.is_file(follow_symlinks=False)
            ]
        share = budget(generation.state) // max(1, len(logs))
    except OSError:  # the folder was removed; the shim creates it again
        return
    kept = max(MIN_KEPT_BYTES, share // 2)
    for path, found in logs:
        if found.st_blocks * 512 > 2 * kept:
            _cut(path, (found.st_size - kept) // PAGE_BYTES * PAGE_BYTES)


def _cut(path: str, end: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        disk.punch_hole(handle, 0, end)
    finally:
        os.close(handle)


def find_kept(handle: int, offset: int) -> int:
    """Return where to read a log: at `offset`, or after the freed part if that is later."""
    try:
        return max(offset, os.lseek(handle, 0, os.SEEK_DATA))
    except OSError:  # it is empty, or the file system does not support SEEK_DATA
        return offset
