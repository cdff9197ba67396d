"""Manage the control group (cgroup v2) that holds the ranks of one generation.

Everything that the ranks fork stays in this group, even after setsid or exec. The group is created
below the agent's own group, which requires that the agent is root or that systemd has delegated
its group to it. Otherwise no group is used, and processes are found only by parent process, by
process group and by token.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Iterable, List, Optional

from relaunch.agent import processes

PREFIX = "relaunch-"
MAX_TRIES = 3
"""Maximum number of tries to move a process, if its control group is removed each time."""


def _find_own() -> Optional[Path]:
    """Return the folder of this process's control group, or None if cgroup v2 is not mounted."""
    try:
        with open("/proc/self/cgroup", errors="surrogateescape") as file:
            own = next((text[3:].rstrip("\n") for text in file if text.startswith("0::")), None)
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            mounts = [text.split() for text in file if " - cgroup2 " in text]
    except OSError:
        return None
    for fields in mounts if own is not None else ():
        root, folder = fields[3], fields[4]
        if root in ("/", own) or str(own).startswith(f"{root}/"):
            inside = own if root == "/" else str(own)[len(root) :]
            return Path(folder + str(inside))
    return None


def make_group(generation: Path) -> Optional[str]:
    """Create a control group for the generation with this folder.

    Return the path of the group, or None if it cannot be created or is not writable.
    """
    own = _find_own()
    if own is None:
        return None
    name = hashlib.sha256(str(generation).encode()).hexdigest()[:16]
    folder = own / f"{PREFIX}{name}-{generation.name}"
    try:
        _remove_empty(own)
        folder.mkdir(exist_ok=True)
    except OSError:  # no permission, or read-only
        return None
    # Another launch may have removed it, because it is empty still: it is created again then.
    is_writable = os.access(folder / "cgroup.procs", os.W_OK) or not folder.exists()
    return str(folder) if is_writable else None


def _remove_empty(own: Path) -> None:
    """Remove the empty groups that ended generations have left behind.

    The kernel refuses to remove a group that has processes. A group that is still needed is created
    again.
    """
    for name in os.listdir(own):
        if name.startswith(PREFIX):
            remove(str(own / name))


def remove(folder: str) -> None:
    """Remove a control group if it is empty; otherwise do nothing."""
    try:
        os.rmdir(folder)
    except OSError:
        pass


def move_processes(folder: str, pids: Iterable[int]) -> None:
    """Move processes into a control group, skipping those that have exited."""
    for pid in pids:
        for _ in range(MAX_TRIES):
            try:
                os.makedirs(folder, exist_ok=True)
                _write(f"{folder}/cgroup.procs", str(pid))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENODEV):
                    continue  # another launch has removed it meanwhile, because it is empty still
            break


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def list_members(folder: str) -> List[processes.Process]:
    """Return the living processes in a control group and in the groups below it.

    Also those that /proc hides: a rank has started them as another user.
    """
    members = []
    for place, _, files in os.walk(folder):
        if "cgroup.procs" in files:
            try:
                with open(f"{place}/cgroup.procs") as file:
                    pids = [int(text) for text in file]
            except OSError:  # the group was removed in the meantime
                continue
            found_processes = map(processes.read_or_hide, pids)
            members += [
                process for process in found_processes if process is not None and process.is_alive
            ]
    return members


def kill(folder: str) -> None:
    """Send SIGKILL to every process in a control group, whichever user owns it.

    This uses cgroup.kill, which kernels older than 5.14 do not have; there it does nothing.
    """
    try:
        _write(f"{folder}/cgroup.kill", "1")
    except OSError:  # no such group or file: the caller kills the members one by one
        return
