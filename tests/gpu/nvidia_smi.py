"""Stands before nvidia-smi on a node's PATH: it hands queries on, and never resets a GPU.

A call with `--gpu-reset` fails. It is written down, with the processes that live at that moment and
those that have the GPU open, which a reset would need closed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REAL, CALLS = "@REAL@", "@CALLS@"


def list_living() -> list[int]:
    """Return the pids of all processes that have a program: neither the kernel's nor zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/exe"):
        try:
            os.readlink(path)
        except OSError:
            continue
        found.append(int(path.parts[2]))
    return sorted(found)


def list_users() -> dict[str, str]:
    """Return the command of each process that has a device of the driver open, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(path).startswith("/dev/nvidia"):
                pid = path.parts[2]
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
        except OSError:  # it has ended, or closed it
            continue
    return found


if "--gpu-reset" not in sys.argv:
    os.execv(REAL, [REAL, *sys.argv[1:]])
query = [REAL, "--query-compute-apps=pid", "--format=csv,noheader"]
call = {
    "arguments": sys.argv[1:],
    "alive": list_living(),
    "have a device open": list_users(),
    "known to the driver": subprocess.run(query, capture_output=True, text=True).stdout.split(),
}
with open(CALLS, "a") as file:
    file.write(json.dumps(call) + "\n")
print("this test resets no GPU")
sys.exit(3)
