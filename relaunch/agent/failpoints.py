"""Cuts and failpoints: the only fault injection in the agent.

Both are files in the state folder; without them nothing is injected.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def is_cut(state: Path, direction: str) -> bool:
    """Return whether this node is cut off in a direction: controller-in, controller-out or peers.

    The file is read on each call.
    """
    try:
        return direction in (state / "cut").read_text().split()
    except FileNotFoundError:
        return False


def reach_failpoint(state: Path, name: str) -> None:
    """Kill this process with SIGKILL if the named failpoint is set, and clear the failpoint."""
    try:
        os.unlink(state / "failpoints" / name)
    except (FileNotFoundError, NotADirectoryError):
        return
    os.kill(os.getpid(), signal.SIGKILL)
