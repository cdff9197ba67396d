"""Tells of changes to files in some folders, so that a reader need not look all the time.

By inotify, so only of changes by this machine. What is missed is found by the next regular look.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Iterable, Optional

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_MASK = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE
_EVENT = struct.calcsize("iIII") + 256
"""Bytes of the longest event: a fixed part, and the name of a file."""


class FileChanges:
    """The changes to files in some folders since it was made."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.handle: Optional[int] = _open(folders)
        """Readable once something has changed; None: the kernel tells nothing, for example because
        this user has used up its instances."""

    def clear(self) -> None:
        """Forget the changes so far."""
        if self.handle is None:
            return
        try:
            while os.read(self.handle, 64 * _EVENT):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


def _open(folders: Iterable[Path]) -> Optional[int]:
    handle = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if handle < 0:
        return None
    for folder in folders:
        if _libc.inotify_add_watch(handle, os.fsencode(folder), ctypes.c_uint32(_MASK)) < 0:
            os.close(handle)
            return None
    return handle
