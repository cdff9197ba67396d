"""Runs on a node before the agent: receives the agent if it is missing, and executes it.

It is only shipped as source, and never run where it is stored. Needs Python 3.8 and the standard
library only. It is given `REQUEST` and, as `folders`, the module relaunch/agent/folders.py, and
talks over its own stdin and stdout. Its own lines begin with a marker, because a login shell may
have printed something before.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from typing import Any

folders: Any = globals().get("folders")
"""relaunch/agent/folders.py, as `ship.first_line` has loaded it."""
MARK = "relaunch-agent "
UNUSED_FOR = 30 * 24 * 3600
"""Seconds without a start after which another version of the agent is removed. A controller that
was away may come back and need its version."""


class BootstrapError(Exception):
    pass


def place() -> str:
    """Return the folder of the agents, in the node's state folder.

    The state folder is the one that the environment names, or one of the candidates. Each part of
    its path is checked, and its owner.
    """
    given = os.environ.get("RELAUNCH_AGENT_STATE")
    if given:
        return str(folders.secure_folder(folders.open_configured_folder(given) / "agents"))
    return str(folders.choose_folder("agents"))


def is_whole(path: str, sha256: str) -> bool:
    """Return whether this very agent is there, in a file that only this user can write."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        return not found.st_mode & 0o022 and hashlib.sha256(file.read()).hexdigest() == sha256


def say(what: dict[str, object]) -> None:
    data = ("\n" + MARK + json.dumps(what) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]


def receive(path: str, size: int, sha256: str) -> None:
    """Read exactly the agent's bytes from stdin. What follows them is meant for the agent."""
    partial = os.path.join(os.path.dirname(path), f".agent-{os.getpid()}-{time.monotonic_ns()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left, digest = size, hashlib.sha256()
        while left:
            data = os.read(0, min(left, 65536))
            if not data:
                raise BootstrapError("the connection ended while the agent was sent")
            digest.update(data)
            left -= len(data)
            while data:
                data = data[os.write(handle, data) :]
        os.fsync(handle)
        if digest.hexdigest() != sha256:
            raise BootstrapError(
                f"the agent came broken: sha256 {digest.hexdigest()}, expected {sha256}"
            )
        os.rename(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    finally:
        os.close(handle)


def sweep(folder: str, kept: str) -> None:
    """Remove agents that were not started for UNUSED_FOR seconds and that no process runs.

    Agents that cannot be removed stay.
    """
    used: set[str] = set()
    for pid in os.listdir("/proc"):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                used.update(
                    os.path.basename(word).decode(errors="replace")
                    for word in file.read().split(b"\0")
                )
        except OSError:
            continue
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            if (
                path != kept
                and name not in used
                and os.lstat(path).st_mtime < time.time() - UNUSED_FOR
            ):
                os.unlink(path)
        except OSError:
            continue


def main(
    name: str, size: int, sha256: str, environment: dict[str, str], unset: tuple[str, ...]
) -> None:
    path = name
    try:
        folder = place()
        path = os.path.join(folder, name)
        if not is_whole(path, sha256):
            say({"want": size})
            receive(path, size, sha256)
        os.utime(path)
        if os.listdir(folder) != [name]:
            sweep(folder, path)
    except (BootstrapError, folders.FolderError) as error:
        say({"cannot": str(error)})
        return
    except OSError as error:
        say({"cannot": f"{error.filename or path}: {error.strerror}"})
        return
    say({"have": path})
    given = {variable: value for variable, value in os.environ.items() if variable not in unset}
    python = sys.executable or "/proc/self/exe"
    os.execve(python, [python, "-I", "-S", path, "session"], {**given, **environment})


if "REQUEST" in globals():
    main(**REQUEST)  # type: ignore[name-defined]  # noqa: F821
