"""Cuts and failpoints: the only fault injection in the agent. What is not in the state folder never happens."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def cut(state: Path, way: str) -> bool:
    """Whether this node is cut off in the given way: controller-in, controller-out or peers. Read afresh each time."""
    try:
        return way in (state / "cut").read_text().split()
    except FileNotFoundError:
        return False


def reach_failpoint(state: Path, name: str) -> None:
    """Die here by SIGKILL if the failpoint of this name is set; it is spent by that."""
    try:
        os.unlink(state / "failpoints" / name)
    except (FileNotFoundError, NotADirectoryError):
        return
    os.kill(os.getpid(), signal.SIGKILL)
