"""Runs on a node before the agent: receives the agent if it is missing, and executes it.

It is only shipped as source, and never run where it is stored. Needs Python 3.8 and the standard
library only. It is given `REQUEST` and talks over its own stdin and stdout. Its own lines begin
with a marker, because a login shell may have printed something before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import time

MARK = "relaunch-agent "
UNUSED_FOR = 30 * 24 * 3600
"""Seconds without a start after which another version of the agent is removed. A controller that
was away may come back and need its version."""


class BootstrapError(Exception):
    pass


def candidates() -> list[str]:
    """Return the folders that may hold this user's state, as in relaunch/agent/folders.py."""
    name = f"relaunch-{os.geteuid()}"
    return [
        f"/var/lib/{name}",
        f"/var/tmp/{name}",
        *(f"/var/tmp/{name}.{number}" for number in range(1, 10)),
    ]


def own(folder: str) -> None:
    """Create a folder that only this user can enter, or refuse one that belongs to another user."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise BootstrapError(f"{folder} is no folder")
    if found.st_uid != os.geteuid():
        raise BootstrapError(
            f"the folder {folder} belongs to uid {found.st_uid}; expected uid {os.geteuid()}"
        )
    if found.st_mode & 0o077:
        os.chmod(folder, 0o700)


def place() -> str:
    """Return the folder of the agents, in the node's state folder.

    The state folder is the one that the environment names, or the one that `choose` returns.
    """
    given = os.environ.get("RELAUNCH_AGENT_STATE")
    if given:
        os.makedirs(os.path.dirname(os.path.abspath(given)), exist_ok=True)
        if os.path.islink(given) and os.lstat(given).st_uid not in (0, os.geteuid()):
            raise BootstrapError(f"{given} is a link that uid {os.lstat(given).st_uid} made")
        parent = os.path.realpath(given)
    else:
        parent = choose()
    own(parent)
    folder = os.path.join(parent, "agents")
    own(folder)
    return folder


def choose() -> str:
    """Return the first candidate that this user owns, else the first that can be created."""
    found = [path for path in candidates() if is_own(path)]
    last: Exception | None = None
    for path in found or candidates():
        try:
            own(path)
            return path
        except (BootstrapError, OSError) as error:
            last = error
    raise BootstrapError(f"no folder for the agent can be made on this node: {last}")


def is_own(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def is_whole(path: str, sha256: str) -> bool:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest() == sha256
    except OSError:
        return False


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
    except BootstrapError as error:
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
