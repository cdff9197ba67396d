"""A full disk under the state folder: room that is kept for what must be written, and what people are told.

Three kinds of room: blocks behind the end of a journal, a spare beside a file that must be replaced
whole, and a ballast that is given up when an order to stop finds neither.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from relaunch.agent.protocol import Refused

MIN_FREE_BYTES = 1024 * 1024
"""What a generation needs beside its logs, several times over."""
MIN_FREE_INODES = 64
BALLAST_NAME = "ballast"
BALLAST_BYTES = 64 * 1024
SPARE_BYTES = 4096
FULL = (errno.ENOSPC, errno.EDQUOT)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
# Python 3.8 knows posix_fallocate alone, which changes the size.
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def log(text: str) -> None:
    """Write a line to stderr, which is the log of a keeper. A disk that does not take it loses it."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:  # nothing else could say so
        pass


def is_full(error: OSError) -> bool:
    return error.errno in FULL


def refuse(state: Path, what: str) -> Refused:
    """Return the refusal of an order for which there is no room; `what` was not done."""
    free = _describe_free(state)
    return Refused(
        "disk_full",
        f"the disk of the state folder {state} is full ({free}): {what}. relaunch repeats the order; "
        f"remove files there, or give that file system more room",
    )


def _describe_free(state: Path) -> str:
    try:
        found = os.statvfs(state)
    except OSError as error:
        return f"free space unknown: {error.strerror}"
    inodes = f", {found.f_favail} inodes" if found.f_files else ""
    return f"{_count_free_bytes(found)} bytes{inodes} free"


def _count_free_bytes(found: os.statvfs_result) -> int:
    blocks = found.f_bavail if os.geteuid() else found.f_bfree
    return blocks * found.f_frsize


def refuse_if_full(state: Path, what: str) -> None:
    """Refuse an order that needs room before it has changed anything."""
    found = os.statvfs(state)
    inodes = found.f_favail if found.f_files else MIN_FREE_INODES
    if _count_free_bytes(found) < MIN_FREE_BYTES or inodes < MIN_FREE_INODES:
        raise refuse(state, what)


def preallocate(handle: int, size: int) -> bool:
    """Reserve blocks for a file up to this size and leave its length as it is. Not every file system can."""
    return bool(_libc.fallocate(handle, _KEEP_SIZE, 0, size) == 0)


def punch_hole(handle: int, start: int, end: int) -> bool:
    """Give up the blocks between two offsets; what is read there from now on is zeros."""
    return bool(_libc.fallocate(handle, _KEEP_SIZE | _PUNCH_HOLE, start, end - start) == 0)


# --- a spare beside a file ---


def _spare_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.spare")


def _second_spare_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.spare2")


def make_spare(path: Path, size: int = SPARE_BYTES) -> None:
    """Have allocated blocks beside a file, so that it can be replaced on a full disk.

    Where the file is not there yet, its first writing takes one spare, and leaves none behind.
    """
    _allocate(_spare_of(path), size)
    if not path.exists():
        _allocate(_second_spare_of(path), size)


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
    """Replace a file by its spare, which needs no block; return whether there was one that is large enough.

    The file that was replaced is the next spare. Data is padded with spaces, which JSON allows.
    """
    spare = _spare_of(path)
    try:
        handle = os.open(spare, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(handle)
        if max(found.st_blocks * 512, 0) < len(data):
            return False
        padded = data.ljust(found.st_size, b" ")
        if os.pwrite(handle, padded, 0) < len(padded):
            return False
        if durable:
            os.fsync(handle)
    except OSError as error:
        if is_full(error):  # a file system that writes each block to another place
            return False
        raise
    finally:
        os.close(handle)
    previous = path.with_name(f".{path.name}.previous")
    try:
        os.link(path, previous)
    except OSError:  # there is none yet, or no room for its name: the spare is used up
        os.replace(spare, path)
        with suppress(FileNotFoundError):
            os.replace(_second_spare_of(path), spare)
        return True
    os.replace(spare, path)
    os.replace(previous, spare)
    return True


# --- the ballast of a node ---


def make_ballast(state: Path) -> None:
    """Keep room on the disk that `release_ballast` can give up."""
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
    """Give up the ballast; return whether there was one."""
    try:
        os.unlink(state / BALLAST_NAME)
    except FileNotFoundError:
        return False
    return True
