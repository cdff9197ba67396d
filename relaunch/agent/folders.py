"""Where the state of this node lies: which candidate folder is used, and who may own it.

Uses only the standard library and no module of the agent; knows nothing about jobs. Over SSH it is
also sent as source, ahead of the agent, which lies in such a folder.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

PERSISTENT_ROOT = Path("/var/lib")
"""No program removes old files here. Only root can create a folder in it."""
TEMPORARY_ROOT = Path("/var/tmp")
"""Every user can create a folder here. On many systems systemd-tmpfiles removes old files."""
MAX_ALTERNATIVES = 9
"""Names to try if another user has taken the first one."""
SHARED_FILE_SYSTEMS = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "9p", "panfs",
    "wekafs", "orangefs", "sshfs", "virtiofs",
)  # fmt: skip
"""Prefixes of their names. A test holds them equal to those of `nodes check`."""
FORGETFUL_FILE_SYSTEMS = ("tmpfs", "ramfs")
TRUSTED_VARIABLE = "RELAUNCH_AGENT_TRUSTED_FOLDER"
"""Names a folder whose own place is not checked: on one machine with the controller, the folder of
that, from which the agent itself was started."""
MAX_LINKS = 40
"""Links that are followed in one path, as the kernel does (path_resolution(7))."""


class FolderError(Exception):
    """A folder that cannot be used for state; the message says why."""


def list_candidates(uid: int) -> List[Path]:
    """Return the folders that may hold the state of a user, the preferred one first."""
    name = f"relaunch-{uid}"
    alternatives = [
        TEMPORARY_ROOT / f"{name}.{number}" for number in range(1, MAX_ALTERNATIVES + 1)
    ]
    return [PERSISTENT_ROOT / name, TEMPORARY_ROOT / name, *alternatives]


def list_places(state: str) -> List[str]:
    """Return every folder that may hold the state of the same node and user, including `state`.

    Ranks and shims name the folder that they were started from. After that folder was removed,
    another candidate may be the one in use.
    """
    candidates = [os.path.realpath(path) for path in list_candidates(os.geteuid())]
    parent, name = os.path.split(state)
    if parent not in candidates:
        return [state]
    return [os.path.join(candidate, name) for candidate in candidates]


def choose_folder(
    name: str, find_used: Callable[[List[str]], Optional[str]] = lambda places: None
) -> Path:
    """Return the state folder of this node among the candidates; create it if there is none yet.

    The first candidate that already holds state wins, even if a preferred one has become possible
    since: two sessions must agree, and state must not be abandoned while ranks in it may live.
    Otherwise it is the folder that a living shim was started from and that was removed since,
    otherwise the first candidate that can be created.

    Args:
        name: Name of the node, unique among those that may share the candidates.
        find_used: Given state folders, returns the one that a living shim was started from.
    """
    candidates = list_candidates(os.geteuid())
    for candidate in candidates:
        if _is_own(candidate) and _is_own(candidate / name):
            return secure_folder(secure_folder(candidate) / name)
    used = find_used(list_places(os.path.join(os.path.realpath(candidates[0]), name)))
    if used is not None:
        try:
            return secure_folder(secure_folder(Path(used).parent) / name)
        except FolderError:
            # another user has taken its place; orders look for processes in all places
            pass
    reasons = []
    for candidate in candidates:
        if candidate.parent == PERSISTENT_ROOT:
            kind = str(find_mount(PERSISTENT_ROOT)["type"])
            if is_shared_file_system(kind) or kind in FORGETFUL_FILE_SYSTEMS:
                reasons.append(f"{candidate} would lie on {kind}")
                continue
        try:
            return secure_folder(secure_folder(candidate) / name)
        except FolderError as error:
            reasons.append(str(error))
    raise FolderError(
        "no folder for the state of this node can be used: "
        + "; ".join(reasons[:3])
        + ". Set RELAUNCH_AGENT_STATE, or have root make one: "
        + f"install -d -m 700 -o {os.geteuid()} {candidates[0]}"
    )


def open_configured_folder(configured: str) -> Path:
    """Return the state folder that the environment names; create it if necessary.

    Raises:
        FolderError: It cannot be used.
    """
    path = Path(os.path.abspath(configured))
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        link = os.lstat(path)
    except FileNotFoundError:
        return secure_folder(path)
    except OSError as error:
        raise FolderError(f"the state folder {path} cannot be made: {error.strerror}") from error
    if stat.S_ISLNK(link.st_mode):
        _refuse_foreign_link(path, link, path)
        _refuse_open_way(path)
        return secure_folder(path.resolve())
    return secure_folder(path)


def restore_state_folder(state: Path) -> None:
    """Create the state folder again if it was removed since this session began.

    Raises:
        FolderError: It cannot be created, is another user's now, or another folder took its place.
    """
    if state.is_dir():
        return
    others = [place for place in list_places(str(state)) if place != str(state)]
    used = next(filter(os.path.isdir, others), None)
    if used is not None:
        raise FolderError(f"the state folder {state} was removed, and {used} took its place")
    if others:
        secure_folder(state.parent)
    secure_folder(state)


def secure_folder(path: Path) -> Path:
    """Create a folder that only this user can enter, at a path that only this user can change.

    Raises:
        FolderError: It belongs to another user, or another user could put a folder in its place.
    """
    _refuse_open_way(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise FolderError(f"the state folder {path} cannot be made: {error.strerror}") from error
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise FolderError(_explain(path, error)) from error
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise FolderError(
                f"the state folder {path} belongs to uid {status.st_uid}; "
                f"expected uid {os.geteuid()}"
            )
        if status.st_mode & 0o077:
            os.fchmod(handle, 0o700)
    except OSError as error:
        raise FolderError(_explain(path, error)) from error
    finally:
        os.close(handle)
    return path


def _explain(path: Path, error: OSError) -> str:
    try:
        status = os.lstat(path)
    except OSError:
        return f"the state folder {path} cannot be opened: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return (
            f"the state folder {path} is a link, which uid {status.st_uid} made, "
            "and is not followed"
        )
    if status.st_uid != os.geteuid():
        return (
            f"the state folder {path} belongs to uid {status.st_uid}; expected uid {os.geteuid()}"
        )
    if not stat.S_ISDIR(status.st_mode):
        return f"the state folder {path} is not a folder"
    return f"the state folder {path} cannot be opened: {error.strerror}"


def _refuse_open_way(path: Path) -> None:
    """Refuse a path of which another user can replace a part: any folder or link above its end."""
    trusted, root = Path(os.environ.get(TRUSTED_VARIABLE) or os.sep), Path(os.sep)
    base = trusted if trusted in path.parents else root
    if base == root:
        _refuse_open_folder(os.sep, path)
    at, links = str(base), 0
    parts = list(reversed(path.parts[len(base.parts) : -1]))
    while parts:
        name = parts.pop()
        if name == os.pardir:
            at = os.path.dirname(at)
            continue
        step = os.path.join(at, name)
        status = _read_status(step)
        if stat.S_ISLNK(status.st_mode):
            _refuse_foreign_link(Path(step), status, path)
            links += 1
            if links > MAX_LINKS:
                raise FolderError(f"the path of the state folder {path} has over {MAX_LINKS} links")
            target = Path(os.readlink(step))
            at = os.sep if target.is_absolute() else at
            parts.extend(reversed([part for part in target.parts if part != os.sep]))
        else:
            _refuse_open_folder(step, path)
            at = step


def _read_status(path: str) -> os.stat_result:
    try:
        return os.lstat(path)
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}") from error


def _refuse_foreign_link(link: Path, status: os.stat_result, path: Path) -> None:
    if not _is_trusted(status.st_uid):
        what = f"the state folder {path}" if link == path else f"{link}, above the state folder,"
        raise FolderError(
            f"{what} is a link that uid {status.st_uid} made; "
            f"expected uid {os.geteuid()} or root. "
            "Remove it, or set RELAUNCH_AGENT_STATE to a folder elsewhere"
        )


def _refuse_open_folder(folder: str, path: Path) -> None:
    status = _read_status(folder)
    if not _is_trusted(status.st_uid):
        raise FolderError(
            f"uid {status.st_uid}, who owns {folder}, can replace the state folder {path}. "
            f"`chown root {folder}`, or set RELAUNCH_AGENT_STATE to a folder elsewhere"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise FolderError(
            f"every user can rename what is in {folder}: "
            "it is world-writable and has no sticky bit. "
            f"`chmod +t {folder}`, or set RELAUNCH_AGENT_STATE to a folder elsewhere"
        )


def _is_trusted(uid: int) -> bool:
    """Return whether a folder of this user may lie above the state: root's, ours, the host's.

    In a container with a user namespace the host's users have no number, and all look like one.
    """
    if uid in (0, os.geteuid()):
        return True
    try:
        unmapped = int(Path("/proc/sys/kernel/overflowuid").read_text())
        is_whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    except (OSError, ValueError):
        return False
    return uid == unmapped and not is_whole


def _is_own(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def is_shared_file_system(kind: str) -> bool:
    """Return whether several machines may share a file system of this type."""
    if kind.startswith("fuse."):
        kind = kind[len("fuse.") :]
    return kind.startswith(SHARED_FILE_SYSTEMS)


def find_mount(folder: Path) -> Dict[str, Any]:
    """Return the type and the mount point of the file system that a folder is on."""
    place = os.path.realpath(folder)
    best = ""
    mount: Dict[str, Any] = {"type": None, "mounted": None}
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            for text in file:
                before, _, after = text.partition(" - ")
                point = before.split()[4].replace("\\040", " ")
                if len(point) >= len(best) and (place + "/").startswith(point.rstrip("/") + "/"):
                    best, mount = point, {"type": after.split()[0], "mounted": point}
    except (OSError, IndexError) as error:
        return {**mount, "unreadable": f"/proc/self/mountinfo: {error}"}
    if mount["mounted"] is not None:
        mount["mounted"] = os.fsencode(mount["mounted"]).decode(errors="replace")
    return mount
