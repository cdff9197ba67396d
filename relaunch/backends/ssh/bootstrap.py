"""What runs on a node before the agent is there: looks whether it is, takes it if not, and becomes it. Never run where it is written.

Python 3.8, standard library only. It is given `REQUEST` and speaks over its own stdin and stdout; what it says first is on a marked line,
for a login shell may have printed before.
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
"""Seconds without a start after which another version is removed: a controller that was away may come back with it."""


class Cannot(Exception):
    pass


def candidates() -> list[str]:
    """The folders that may hold the state of this user, as relaunch/agent/folders.py lists them."""
    name = f"relaunch-{os.geteuid()}"
    return [
        f"/var/lib/{name}",
        f"/var/tmp/{name}",
        *(f"/var/tmp/{name}.{number}" for number in range(1, 10)),
    ]


def own(folder: str) -> None:
    """Make a folder that only we can enter, or refuse one that somebody else has put there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise Cannot(f"{folder} is no folder")
    if found.st_uid != os.geteuid():
        raise Cannot(f"the folder {folder} belongs to uid {found.st_uid}; expected uid {os.geteuid()}")
    if found.st_mode & 0o077:
        os.chmod(folder, 0o700)


def place() -> str:
    """The folder of the agents: beside the state folder of this node, or in the one that its environment names."""
    given = os.environ.get("RELAUNCH_AGENT_STATE")
    if given:
        os.makedirs(os.path.dirname(os.path.abspath(given)), exist_ok=True)
        if os.path.islink(given) and os.lstat(given).st_uid not in (0, os.geteuid()):
            raise Cannot(f"{given} is a link that uid {os.lstat(given).st_uid} made")
        parent = os.path.realpath(given)
    else:
        parent = choose()
    own(parent)
    folder = os.path.join(parent, "agents")
    own(folder)
    return folder


def choose() -> str:
    """Return the first candidate that is ours already, else the first that can be made."""
    found = [path for path in candidates() if is_own(path)]
    last: Exception | None = None
    for path in found or candidates():
        try:
            own(path)
            return path
        except (Cannot, OSError) as error:
            last = error
    raise Cannot(f"no folder for the agent can be made on this node: {last}")


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
    """Take the agent from stdin, exactly: what follows it there is for the agent."""
    partial = os.path.join(os.path.dirname(path), f".agent-{os.getpid()}-{time.monotonic_ns()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left, digest = size, hashlib.sha256()
        while left:
            data = os.read(0, min(left, 65536))
            if not data:
                raise Cannot("the connection ended while the agent was sent")
            digest.update(data)
            left -= len(data)
            while data:
                data = data[os.write(handle, data) :]
        os.fsync(handle)
        if digest.hexdigest() != sha256:
            raise Cannot(f"the agent came broken: sha256 {digest.hexdigest()}, expected {sha256}")
        os.rename(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    finally:
        os.close(handle)


def sweep(folder: str, kept: str) -> None:
    """Remove agents that nobody has started for long and that no process is. What cannot be removed stays."""
    used: set[str] = set()
    for pid in os.listdir("/proc"):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                used.update(os.path.basename(word).decode(errors="replace") for word in file.read().split(b"\0"))
        except OSError:
            continue
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        try:
            if path != kept and name not in used and os.lstat(path).st_mtime < time.time() - UNUSED_FOR:
                os.unlink(path)
        except OSError:
            continue


def main(name: str, size: int, sha256: str, environment: dict[str, str], unset: tuple[str, ...]) -> None:
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
    except Cannot as error:
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
