"""Handling of a full disk under the state folder: reserved space and the messages to people.

There are three kinds of reserve: blocks behind the end of a journal, a spare file beside a file
that must be replaced as a whole, and a ballast that is released when an order to stop finds
neither.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from relaunch.agent.protocol import Refusal

MIN_FREE_BYTES = 1024 * 1024
"""Several times what a generation needs in addition to its logs."""
MIN_FREE_INODES = 64
BALLAST_NAME = "ballast"
BALLAST_BYTES = 64 * 1024
SPARE_BYTES = 4096
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
FAILED_ERRNOS = (
    *FULL_ERRNOS,
    errno.EROFS,
    errno.EIO,
    errno.EUCLEAN,
    errno.EBADMSG,
    errno.ENXIO,
    errno.ENODEV,
    errno.ESTALE,
)
"""Errors by which a disk takes no write: full, read-only, broken, damaged, gone."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
# Python 3.8 has only posix_fallocate, which changes the file size.
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def log(text: str) -> None:
    """Write a line to stderr, the log of a shim; it is lost if the disk does not accept it."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:  # there is no other place to report it
        pass


def is_full(error: OSError) -> bool:
    return error.errno in FULL_ERRNOS


def has_failed(error: OSError) -> bool:
    """Return whether this is an error of the disk, such as that it is full or read-only."""
    return error.errno in FAILED_ERRNOS


def make_refusal(state: Path, consequence: str) -> Refusal:
    """Return the refusal of an order for which there is no space.

    `consequence` says what was not done.
    """
    free = _describe_free(state)
    return Refusal(
        "disk_full",
        f"the disk of the state folder {state} is full ({free}): {consequence}. "
        f"relaunch repeats the order; remove files there, or give that file system more room",
    )


def _describe_free(state: Path) -> str:
    try:
        status = os.statvfs(state)
    except OSError as error:
        return f"free space unknown: {error.strerror}"
    inodes = f", {status.f_favail} inodes" if status.f_files else ""
    return f"{_count_free_bytes(status)} bytes{inodes} free"


def _count_free_bytes(status: os.statvfs_result) -> int:
    blocks = status.f_bavail if os.geteuid() else status.f_bfree
    return blocks * status.f_frsize


def refuse_if_full(state: Path, consequence: str) -> None:
    """Refuse an order that needs space before it has changed anything."""
    status = os.statvfs(state)
    inodes = status.f_favail if status.f_files else MIN_FREE_INODES
    if _count_free_bytes(status) < MIN_FREE_BYTES or inodes < MIN_FREE_INODES:
        raise make_refusal(state, consequence)


def preallocate(handle: int, size: int) -> bool:
    """Reserve blocks for a file up to this size without changing its length.

    Return False if the file system does not support it or has no space.
    """
    return bool(_libc.fallocate(handle, _KEEP_SIZE, 0, size) == 0)


def punch_hole(handle: int, start: int, end: int) -> bool:
    """Release the blocks between two offsets, which then read as zeros; return success."""
    return bool(_libc.fallocate(handle, _KEEP_SIZE | _PUNCH_HOLE, start, end - start) == 0)


# --- a spare beside a file ---


def _spare_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.spare")


def _second_spare_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.spare2")


def make_spare(path: Path, size: int = SPARE_BYTES) -> None:
    """Allocate blocks beside a file, so that it can be replaced on a full disk.

    If the file does not exist yet, a second spare is made: the first write uses one up without
    leaving a replaced file as the next spare.
    """
    _allocate(_spare_path(path), size)
    if not path.exists():
        _allocate(_second_spare_path(path), size)


def _allocate(spare: Path, size: int) -> None:
    try:
        if os.stat(spare).st_blocks * 512 >= size:
            return
    except FileNotFoundError:
        pass
    handle = os.open(spare, os.O_RDWR | os.O_CREAT, 0o1600)
    try:
        os.posix_fallocate(handle, 0, size)
    finally:
        os.close(handle)


def write_into_spare(path: Path, data: bytes, durable: bool) -> bool:
    """Replace a file by its spare, which needs no new blocks.

    Return False if there is no spare that is large enough. The replaced file becomes the next
    spare. Data is padded with spaces, which JSON allows.
    """
    spare = _spare_path(path)
    try:
        handle = os.open(spare, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        status = os.fstat(handle)
        if max(status.st_blocks * 512, 0) < len(data):
            return False
        padded = data.ljust(status.st_size, b" ")
        if os.pwrite(handle, padded, 0) < len(padded):
            return False
        if durable:
            os.fsync(handle)
    except OSError as error:
        if is_full(error):  # a copy-on-write file system needs new blocks
            return False
        raise
    finally:
        os.close(handle)
    previous = path.with_name(f".{path.name}.previous")
    try:
        os.link(path, previous)
    except OSError:
        # the file does not exist yet, or there is no space for its name: the spare is used up
        os.replace(spare, path)
        with suppress(FileNotFoundError):
            os.replace(_second_spare_path(path), spare)
        return True
    os.replace(spare, path)
    os.replace(previous, spare)
    return True


# --- the ballast of a node ---


def make_ballast(state: Path) -> None:
    """Reserve disk space that `release_ballast` can release."""
    path = state / BALLAST_NAME
    try:
        if os.stat(path).st_size >= BALLAST_BYTES:
            return
    except FileNotFoundError:
        pass
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o1600)
    try:
        os.posix_fallocate(handle, 0, BALLAST_BYTES)
    finally:
        os.close(handle)


def release_ballast(state: Path) -> bool:
    """Release the ballast; return whether there was one."""
    try:
        os.unlink(state / BALLAST_NAME)
    except FileNotFoundError:
        return False
    return True
