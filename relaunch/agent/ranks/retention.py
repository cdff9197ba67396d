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
from relaunch.agent.locks import try_lock
from relaunch.agent.state import Generation, JobState

MAX_BUDGET_BYTES = 10 * 1024**3
"""Maximum budget in bytes: what eight very verbose ranks write in a few nights of failures."""
MAX_BUDGET_SHARE = 0.1
"""Maximum budget as a fraction of the file system.

On a small disk the space for the next checkpoint matters more than the output of the last failure.
"""
BUDGET_VARIABLE = "RELAUNCH_LOG_BUDGET"
"""Environment variable of the agent that sets the budget in bytes and overrides both limits."""
SCAN_STAMP = "log_scan"
SCAN_INTERVAL = 60.0
"""Seconds between two scans. A launch waits for a scan, 0.1 ms for each generation."""
MIN_KEPT_BYTES = 64 * 1024
"""Bytes to keep at the end of a log in use: as much as is read of a failed launcher's log."""
PAGE_BYTES = 4096
REMOVAL_TIMEOUT = 1.0
"""Seconds for removing generations; the next launch continues with the rest."""


class GenerationLogs(NamedTuple):
    since: float
    size: int
    """Bytes that its logs and flight records take on the disk."""
    generation: Generation
    job: Path
    newest: bool
    """Whether it is the newest generation of its job."""


def compute_budget(state: Path) -> int:
    configured = os.environ.get(BUDGET_VARIABLE, "")
    if configured.isdigit():
        return int(configured)
    usage = os.statvfs(state)
    return min(MAX_BUDGET_BYTES, int(usage.f_blocks * usage.f_frsize * MAX_BUDGET_SHARE))


def make_room(state: Path, own: Path) -> None:
    """Remove the oldest ended generations of all jobs until the logs of those left fit the budget.

    Does nothing if the last scan was less than PAUSE seconds ago. Errors are ignored.

    Args:
        state: The node's state folder.
        own: The folder of the job whose lock the caller holds.
    """
    if _has_recent_scan(state):
        return
    try:
        if _remove_oldest(state, own):
            (state / SCAN_STAMP).touch(mode=0o600)
    except OSError:  # a launch must not fail because of old generations
        return


def remove_older(job: JobState, kept: int) -> None:
    """Remove all but the newest generations of a job, of whose older ones nothing is alive.

    A launch must not fail because of them: in a folder of logs there may be a mount, or what ranks
    have made as another user.
    """
    for old in job.list_generations()[:-kept]:
        try:
            shutil.rmtree(old.path)
        except OSError as error:
            shutil.rmtree(old.path, ignore_errors=True)  # as much of it as possible
            disk.log(f"the folder of an old generation cannot be removed: {error}")


def _has_recent_scan(state: Path) -> bool:
    try:
        return (
            0 <= time.time() - (state / SCAN_STAMP).stat().st_mtime < SCAN_INTERVAL
            and BUDGET_VARIABLE not in os.environ
        )
    except OSError:
        return False


def _remove_oldest(state: Path, own: Path) -> bool:
    """Remove generations; return whether this is finished, or False if PATIENCE ran out first."""
    budget, deadline = compute_budget(state), time.monotonic() + REMOVAL_TIMEOUT
    generations = _list_generations(state)
    # Includes living generations, because asking whether one lives costs a lock.
    if sum(entry.size for entry in generations) <= budget:
        return True
    ended = [entry for entry in generations if not entry.generation.has_live_shim()]
    total = sum(entry.size for entry in ended)
    locks: Dict[Path, Optional[int]] = {}
    try:
        for entry in sorted(ended, key=lambda entry: (entry.since, entry.generation.order)):
            if total <= budget:
                return True
            if entry.newest:
                continue
            if entry.job != own and entry.job not in locks:
                locks[entry.job] = try_lock(entry.job / "lock")
            # Another command is changing that job: skip it this time.
            if entry.job != own and locks[entry.job] is None:
                continue
            if not entry.generation.has_live_shim():
                shutil.rmtree(entry.generation.path, ignore_errors=True)
                total -= entry.size
                # Checked after a removal: even if the scan alone uses up the time, each launch
                # removes at least one generation.
                if time.monotonic() > deadline:
                    return total <= budget
        return True
    finally:
        for lock in locks.values():
            if lock is not None:
                os.close(lock)


def _list_generations(state: Path) -> List[GenerationLogs]:
    """Return all generations of all jobs, with the size of their logs."""
    logs = []
    with os.scandir(state / "jobs") as jobs:
        folders = [Path(job.path) for job in jobs if job.is_dir(follow_symlinks=False)]
    for folder in folders:
        job = JobState(state, "", "")
        job.path = folder
        generations = job.list_generations()
        for generation in generations:
            since = generation.path.stat().st_mtime
            logs.append(
                GenerationLogs(
                    since,
                    _measure(generation.path / "logs") + _measure(generation.flight_folder),
                    generation,
                    folder,
                    generation is generations[-1],
                )
            )
    return logs


def _measure(folder: Path) -> int:
    try:
        with os.scandir(folder) as files:
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
        share = compute_budget(generation.state) // max(1, len(logs))
    except OSError:  # the folder was removed; the shim creates it again
        return
    kept_bytes = max(MIN_KEPT_BYTES, share // 2)
    for path, status in logs:
        if status.st_blocks * 512 > 2 * kept_bytes:
            _cut(path, (status.st_size - kept_bytes) // PAGE_BYTES * PAGE_BYTES)


def _cut(path: str, end: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        disk.punch_hole(handle, 0, end)
    finally:
        os.close(handle)


def find_data(handle: int, offset: int) -> int:
    """Return where to read a log: at `offset`, or after the freed part if that is later."""
    try:
        return max(offset, os.lseek(handle, 0, os.SEEK_DATA))
    except OSError:  # it is empty, or the file system does not support SEEK_DATA
        return offset
