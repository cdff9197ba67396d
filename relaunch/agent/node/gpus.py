"""Reads this node's GPUs through NVML in a separate process: only that can hang in the driver."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from relaunch.agent import tools
from relaunch.agent.loop import parse
from relaunch.agent.protocol import Json

WITHIN = 10.0
"""Seconds. Without persistence mode the driver initialises every GPU first: seconds on a node with
eight."""


def read(state: Path, within: float = WITHIN, inventory_only: bool = False) -> Json:
    """Return {"driver", "nvml", "gpus"} or {"unreadable": reason}."""
    words = [
        sys.executable,
        "-S",
        os.path.abspath(sys.argv[0]),
        "nvml",
        "inventory" if inventory_only else "all",
        str(state),
    ]
    ran = tools.run(words, within)
    if ran.exit_code is None:
        stuck = " and does not die" if ran.left else ""
        return {"unreadable": f"NVML did not answer within {within:g} s{stuck}"}
    said = ran.stdout.splitlines()
    answer = parse(said[-1].encode()) if said else None
    if ran.exit_code == 0 and answer is not None:
        return answer
    how = f"by signal {-ran.exit_code}" if ran.exit_code < 0 else f"with exit code {ran.exit_code}"
    words_of = ran.stderr.strip().splitlines()
    return {
        "unreadable": f"the process that asked NVML ended {how}"
        + (f": {words_of[-1][:200]}" if words_of else "")
    }
