"""Disks of nodes that fill up, hang and lose everything.

Separate file systems, in files (root, loop devices).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

SIZE_MB = 32
TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
KEPT = ("boot_id", "cut", "failpoints")
"""Files by which nodes on one machine are separate machines, and faults: real nodes have none of
them."""


def find_obstacle() -> str | None:
    """Return why nodes cannot have separate disks here; None: they can."""
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"a disk for each node needs {', '.join(missing)}"
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        return "a disk for each node needs root and loop devices"
    return None


class Disk:
    """An ext4 file system, mounted on a node's state folder."""

    def __init__(self, image: Path, place: Path) -> None:
        self._place = place
        self._is_frozen = False
        image.parent.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(SIZE_MB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
        place.chmod(0o700)
        (place / "lost+found").rmdir()

    def fill(self) -> None:
        """Leave no space for another byte."""
        handle = os.open(self._place / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(handle, bytes(size))
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(handle)

    def free(self) -> None:
        (self._place / "filler").unlink(missing_ok=True)

    def freeze(self) -> None:
        """Let every write wait until `thaw`."""
        subprocess.run(["fsfreeze", "-f", str(self._place)], check=True)
        self._is_frozen = True

    def thaw(self) -> None:
        if self._is_frozen:
            subprocess.run(["fsfreeze", "-u", str(self._place)], check=True)
            self._is_frozen = False

    def empty(self) -> None:
        """Delete what the agent keeps there."""
        for entry in self._place.iterdir():
            if entry.name in KEPT:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)  # what is written meanwhile may stay
            else:
                entry.unlink(missing_ok=True)

    def close(self) -> None:
        self.thaw()
        subprocess.run(["umount", "-l", str(self._place)], check=True)
