"""A control group (v2) for the ranks of one generation: it holds whatever they fork, however that changes itself.

Used where one can be made below the agent's own, which is where the agent is root or systemd has delegated its group to it.
Elsewhere there is none, and processes are found by descent, by group and by token alone.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Iterable, List, Optional

from relaunch.agent import processes

PREFIX = "relaunch-"


def _find_own() -> Optional[Path]:
    """Return the folder of this process's own control group, if version 2 is mounted here."""
    try:
        with open("/proc/self/cgroup") as file:
            own = next((text[3:].rstrip("\n") for text in file if text.startswith("0::")), None)
        with open("/proc/self/mountinfo") as file:
            mounts = [text.split() for text in file if " - cgroup2 " in text]
    except OSError:
        return None
    for fields in mounts if own is not None else ():
        root, folder = fields[3], fields[4]
        if root in ("/", own) or str(own).startswith(f"{root}/"):
            inside = own if root == "/" else str(own)[len(root) :]
            return Path(folder + str(inside))
    return None


def make(generation: Path) -> Optional[str]:
    """Make a control group for a generation, given its folder; return its path, or None where that cannot be done."""
    own = _find_own()
    if own is None:
        return None
    name = hashlib.sha256(str(generation).encode()).hexdigest()[:16]
    folder = own / f"{PREFIX}{name}-{generation.name}"
    try:
        _remove_empty(own)
        folder.mkdir(exist_ok=True)
    except OSError:  # not ours to change, or read-only
        return None
    return str(folder) if os.access(folder / "cgroup.procs", os.W_OK) else None


def _remove_empty(own: Path) -> None:
    """Remove what ended generations have left; a group that has processes cannot be removed, and one that is needed is made again."""
    for name in os.listdir(own):
        if name.startswith(PREFIX):
            remove(str(own / name))


def remove(folder: str) -> None:
    """Remove a control group, if it is empty."""
    try:
        os.rmdir(folder)
    except OSError:
        pass


def move(folder: str, pids: Iterable[int]) -> None:
    """Move processes into a control group; those that are gone are passed over."""
    os.makedirs(folder, exist_ok=True)
    for pid in pids:
        try:
            _write(f"{folder}/cgroup.procs", str(pid))
        except OSError:
            continue


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def members(folder: str) -> List[processes.Process]:
    """Living processes of a control group and those below it."""
    found = []
    for place, _, files in os.walk(folder):
        if "cgroup.procs" in files:
            try:
                with open(f"{place}/cgroup.procs") as file:
                    pids = [int(text) for text in file]
            except OSError:  # removed meanwhile
                continue
            looked_at = map(processes.look, pids)
            found += [process for process in looked_at if process is not None and process.lives]
    return found


def kill(folder: str) -> None:
    """Send SIGKILL to all of a control group: the kernel does it whosever they are, one that is older than 5.14 has no way to."""
    try:
        _write(f"{folder}/cgroup.kill", "1")
    except OSError:  # no such group, or no such file: its members are killed one by one
        return
