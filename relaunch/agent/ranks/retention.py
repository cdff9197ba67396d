"""What this node forgets: generations that have ended, when their logs take more of the disk than they may.

Of one that lives it gives up the beginning of a log that has outgrown its share, and nothing else.
It never removes one that lives, the newest of a job, or which tokens were seen: that is in
highest.json, above all generations.
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
"""Bytes; what a few bad nights of eight ranks that print all they know have left."""
SHARE = 0.1
"""Of the file system: on a small disk the next checkpoint matters more than the last fault's output."""
VARIABLE = "RELAUNCH_LOG_BUDGET"
"""Bytes, in the environment of the agent: another budget than these two."""
LOOKED = "tidied"
PAUSE = 60.0
"""Seconds between two looks: a launch waits for each, a tenth of a millisecond for each generation."""
MIN_KEPT_BYTES = 64 * 1024
"""Of the end of a log that lives: what a launcher that fails has printed last is as long."""
PAGE_BYTES = 4096
PATIENCE = 1.0
"""Seconds for removing; what is left then is for the next launch."""


class Old(NamedTuple):
    since: float
    size: int
    """Bytes on the disk, of its logs."""
    generation: Generation
    job: Path
    newest: bool
    """Of its job."""


def budget(state: Path) -> int:
    given = os.environ.get(VARIABLE, "")
    if given.isdigit():
        return int(given)
    found = os.statvfs(state)
    return min(MOST, int(found.f_blocks * found.f_frsize * SHARE))


def make_room(state: Path, own: Path) -> None:
    """Remove the oldest ended generations of all jobs until the logs of the ended ones fit. `own`: a job whose lock we hold."""
    if _looked_lately(state):
        return
    try:
        if _tidied(state, own):
            (state / LOOKED).touch(mode=0o600)
    except OSError:  # a launch does not fail because of what was launched before it
        return


def _looked_lately(state: Path) -> bool:
    try:
        return 0 <= time.time() - (state / LOOKED).stat().st_mtime < PAUSE and VARIABLE not in os.environ
    except OSError:
        return False


def _tidied(state: Path, own: Path) -> bool:
    """Return whether all that may go has gone, as far as it had to."""
    most, deadline = budget(state), time.monotonic() + PATIENCE
    found = _generations(state)
    if sum(one.size for one in found) <= most:  # also with those that live, which each cost a lock to ask
        return True
    ended = [one for one in found if not one.generation.keeper_lives()]
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
            # Somebody changes that job at this moment; there are others, and there is a next time.
            if one.job != own and locks[one.job] is None:
                continue
            if not one.generation.keeper_lives():
                shutil.rmtree(one.generation.path, ignore_errors=True)
                total -= one.size
                # Asked after one was removed: where looking alone takes longer, each launch still removes one.
                if time.monotonic() > deadline:
                    return total <= most
        return True
    finally:
        for lock in locks.values():
            if lock is not None:
                os.close(lock)


def _generations(state: Path) -> List[Old]:
    """All generations of all jobs, and how much their logs take."""
    found = []
    with os.scandir(state / "jobs") as jobs:
        folders = [Path(job.path) for job in jobs if job.is_dir(follow_symlinks=False)]
    for folder in folders:
        job = JobState(state, "", "")
        job.path = folder
        generations = job.generations()
        for generation in generations:
            since = generation.path.stat().st_mtime
            found.append(Old(since, _size(generation.path / "logs"), generation, folder, generation is generations[-1]))
    return found


def _size(logs: Path) -> int:
    try:
        with os.scandir(logs) as files:
            return sum(file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
    except FileNotFoundError:
        return 0


# --- logs that are still written ---


def cut_live_logs(generation: Generation) -> None:
    """Give up the older half of each log that has outgrown its share of the budget.

    Its blocks go, its length stays: offsets mean what they meant, and the rank writes on. File
    systems that cannot do this (NFS, ext3) keep all of it.
    """
    try:
        with os.scandir(generation.path / "logs") as files:
            logs = [(file.path, file.stat(follow_symlinks=False)) for file in files if file.is_file(follow_symlinks=False)]
        share = budget(generation.state) // max(1, len(logs))
    except OSError:  # a folder that was removed; the keeper makes it again
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
    """Return where a log goes on at or after an offset: further on where its beginning was given up."""
    try:
        return max(offset, os.lseek(handle, 0, os.SEEK_DATA))
    except OSError:  # it is empty, or the file system cannot say
        return offset
