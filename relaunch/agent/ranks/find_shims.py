"""Find shims through /proc, even if their state folder was removed.

A shim keeps the lock file of its generation open for as long as it lives. The path of that file,
which /proc shows even after the file was removed, identifies the job and the generation.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from relaunch.agent import processes
from relaunch.agent.folders import list_places

NAME_PREFIX = b"relaunch-"
"""Prefix of the comm (process name) of every process of the agent."""
_LOCK_NAME = "shim.lock"
_REMOVED_SUFFIX = " (deleted)"


def find_shims(state: Path, key: str) -> Dict[Tuple[int, int], processes.Process]:
    """Return the living shims of a job, by (submission, generation).

    Args:
        state: The state folder. A shim that was started from another state folder of this node
            counts too.
        key: The name of the job's folder.
    """
    places = list_places(str(state))
    jobs = {os.path.join(place, "jobs", key) for place in places}
    shims: Dict[Tuple[int, int], processes.Process] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        if pid == os.getpid() or not is_agent(pid):
            continue
        locks = [lock for lock in _list_locks(pid) if os.path.basename(lock[0]) == key]
        # If a folder was moved before it was removed, the kernel reports the path it was moved to.
        moved = any(folder not in jobs for folder, _ in locks) and _is_on_this_node(pid, places)
        orders = {order for folder, order in locks if moved or folder in jobs}
        process = processes.read_process(pid) if orders else None
        if process is None or not process.is_alive:
            continue
        for order in orders:
            # A rank between fork and exec has the same files open as its shim; it started later.
            earlier = shims.get(order)
            if earlier is None or process.started < earlier.started:
                shims[order] = process
    return shims


def find_used_place(places: List[str]) -> Optional[str]:
    """Return the first of these state folders that a living shim was started from, or None."""
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        for folder, _ in _list_locks(pid) if is_agent(pid) else ():
            place = os.path.dirname(os.path.dirname(folder))
            if place in places:
                return place
    return None


def is_agent(pid: int) -> bool:
    """Return whether a process is one of the agent's: of this user, and named so.

    Another user can give a process this name, and have a file of any path open in a mount namespace
    of theirs: root would read that of it.
    """
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            is_named = file.read().startswith(NAME_PREFIX)
    except OSError:
        return False
    return is_named and processes.read_owner(pid) == os.geteuid()


def _is_on_this_node(pid: int, places: List[str]) -> bool:
    """Return whether a process was started with one of these state folders.

    Reads RELAUNCH_AGENT_STATE in the environment of the process. If the variable is not set, the
    process uses the default folder, and matches only if ours is the default too.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    prefix = b"RELAUNCH_AGENT_STATE="
    folders_named = [
        os.fsdecode(variable[len(prefix) :])
        for variable in variables
        if variable.startswith(prefix)
    ]
    if not folders_named:
        return len(places) > 1
    # A relative path cannot be compared: it is relative to the other process's working directory.
    return os.path.isabs(folders_named[0]) and os.path.realpath(folders_named[0]) in places


def _list_locks(pid: int) -> List[Tuple[str, Tuple[int, int]]]:
    """Return (job folder, (submission, generation)) for each shim.lock a process has open."""
    locks = []
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it ended, or belongs to another user
        return []
    for handle in handles:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{handle}")
        except OSError:
            continue
        if target.endswith(_REMOVED_SUFFIX):
            target = target[: -len(_REMOVED_SUFFIX)]
        folder, name = os.path.split(target)
        if name != _LOCK_NAME:
            continue
        job, generation = os.path.split(folder)
        submission, _, number = generation.partition("-")
        if submission.isdigit() and number.isdigit():
            locks.append((job, (int(submission), int(number))))
    return locks
