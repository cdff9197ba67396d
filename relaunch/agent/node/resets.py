"""The resets of GPUs that nvidia-smi reported as done on this boot.

What the kernel said of these GPUs before is healed if they work now, which the controller judges.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import List

from relaunch.agent.protocol import Json
from relaunch.agent.state import read_boot_id, read_json, write_json

JOURNAL_FILE = "resets.json"
MAX_RESETS = 32
"""Newest entries to keep: twice as many as a node has GPUs, each reset alone."""


def list_resets(state: Path) -> List[Json]:
    """Return the resets of this boot, oldest first: {"uptime", "id", "gpus"}; no gpus: all."""
    journal = read_json(state / JOURNAL_FILE)
    if journal is None or journal.get("boot_id") != read_boot_id(state):
        return []
    return list(journal.get("resets", ()))


def record_reset(state: Path, id: str, gpus: List[str], reason: str = "", by: str = "") -> None:
    """Record a reset that is done. `uptime` is the clock of the kernel's log, CLOCK_MONOTONIC.

    `reason` and `by`, who ordered it, are for people; an older controller does not say them.
    """
    entry: Json = {"uptime": time.monotonic(), "id": id, "gpus": gpus}
    entry.update({key: text for key, text in (("reason", reason), ("by", by)) if text})
    earlier = [] if not gpus else list_resets(state)
    resets = [*earlier, entry][-MAX_RESETS:]
    try:
        write_json(state / JOURNAL_FILE, {"boot_id": read_boot_id(state), "resets": resets})
    except OSError:  # the kernel's messages of before then count until the next boot
        pass
