"""Finds keepers by what the kernel knows of them: what was removed from the state folder does not hide one.

A keeper holds the lock of its generation open for as long as it lives, and the name of that file,
also of a removed one, tells of which job and generation it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from relaunch.agent import processes
from relaunch.agent.folders import list_places

NAMES = b"relaunch-"
"""How the comm of a process of the agent begins."""
_LOCK = "keeper.lock"
_REMOVED = " (deleted)"


def find_keepers(state: Path, key: str) -> Dict[Tuple[int, int], processes.Process]:
    """Return the living keepers of a job, by (submission, generation).

    Args:
        state: The state folder. A keeper that was started from another one of this node counts too.
        key: Of the job: the name of its folder.
    """
    places = list_places(str(state))
    jobs = {os.path.join(place, "jobs", key) for place in places}
    found: Dict[Tuple[int, int], processes.Process] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        if pid == os.getpid() or not _is_of_the_agent(pid):
            continue
        held = [one for one in _list_held(pid) if os.path.basename(one[0]) == key]
        # What was moved before it was removed has the name of the place that it was moved to.
        moved = any(folder not in jobs for folder, _ in held) and _is_of_this_node(pid, places)
        orders = {order for folder, order in held if moved or folder in jobs}
        process = processes.look(pid) if orders else None
        if process is None or not process.lives:
            continue
        for order in orders:
            # A rank that is forked and not executed yet holds what its keeper holds, and is younger.
            known = found.get(order)
            if known is None or process.started < known.started:
                found[order] = process
    return found


def find_used_place(places: List[str]) -> Optional[str]:
    """Return the state folder among these that a living keeper was started from."""
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        for folder, _ in _list_held(pid) if _is_of_the_agent(pid) else ():
            place = os.path.dirname(os.path.dirname(folder))
            if place in places:
                return place
    return None


def _is_of_the_agent(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().startswith(NAMES)
    except OSError:
        return False


def _is_of_this_node(pid: int, places: List[str]) -> bool:
    """Return whether a process was started with the state folder in its environment, or with none where ours is the default."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    prefix = b"RELAUNCH_AGENT_STATE="
    given = [os.fsdecode(variable[len(prefix) :]) for variable in variables if variable.startswith(prefix)]
    if not given:
        return len(places) > 1
    # A relative path cannot be compared: it was relative to the working folder of the other process.
    return os.path.isabs(given[0]) and os.path.realpath(given[0]) in places


def _list_held(pid: int) -> List[Tuple[str, Tuple[int, int]]]:
    """Return (folder of the job, order) of each keeper.lock that a process has open."""
    held = []
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it ended, or is another user's
        return []
    for handle in handles:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{handle}")
        except OSError:
            continue
        if target.endswith(_REMOVED):
            target = target[: -len(_REMOVED)]
        folder, name = os.path.split(target)
        if name != _LOCK:
            continue
        job, generation = os.path.split(folder)
        submission, _, number = generation.partition("-")
        if submission.isdigit() and number.isdigit():
            held.append((job, (int(submission), int(number))))
    return held
