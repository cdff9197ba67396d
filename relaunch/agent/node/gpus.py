"""Reads this node's GPUs through NVML in a separate process: only that can hang in the driver."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from relaunch.agent import tools
from relaunch.agent.loop import parse
from relaunch.agent.protocol import Json

READ_TIMEOUT = 10.0
"""Seconds. Without persistence mode the driver initialises every GPU first: seconds on a node with
eight."""


def read(state: Path, timeout: float = READ_TIMEOUT, inventory_only: bool = False) -> Json:
    """Return {"driver", "nvml", "gpus"} or {"unreadable": reason}, with "hangs" if it timed out."""
    command = [
        sys.executable,
        "-S",
        os.path.abspath(sys.argv[0]),
        "nvml",
        "inventory" if inventory_only else "all",
        str(state),
    ]
    result = tools.run(command, timeout)
    if result.exit_code is None:
        stuck = " and does not die" if result.survives else ""
        return {"unreadable": f"NVML did not answer within {timeout:g} s{stuck}", "hangs": True}
    lines = result.stdout.splitlines()
    answer = parse(lines[-1].encode()) if lines else None
    if result.exit_code == 0 and answer is not None:
        return answer
    how = (
        f"by signal {-result.exit_code}"
        if result.exit_code < 0
        else f"with exit code {result.exit_code}"
    )
    errors = result.stderr.strip().splitlines()
    return {
        "unreadable": f"the process that asked NVML ended {how}"
        + (f": {errors[-1][:200]}" if errors else "")
    }
