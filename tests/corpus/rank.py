"""One rank of a played ending: it prints its lines, and then really ends as the rank did.

    rank.py FOLDER, with parts.json in FOLDER: what each rank does in generation 1

In later generations, and where it has no part in generation 1, it does what a healthy rank does:
exit with 0, or run until it is stopped. Standard library only, as a start counts.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

START_TIMEOUT = 120.0
"""Seconds that only a hang takes."""
LEAD = 0.3
"""Seconds from the start of the last rank to the first ending."""


def write_kernel_log(text: str) -> None:
    """Replace the node's kernel log, which has lines of earlier plays."""
    node = Path(os.environ["RELAUNCH_NODE_STATE"])
    (node / "kernel.new").write_text(text)
    (node / "kernel.new").rename(node / "kernel.log")


def await_all(folder: Path, rank: str, world: int) -> float:
    """Wait until all ranks have started, and return when the last one did, in Unix seconds."""
    (folder / f"started.{rank}").write_text(Path(os.environ["RELAUNCH_NODE_STATE"]).name)
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        started = list(folder.glob("started.*"))
        if len(started) == world or time.monotonic() > deadline:
            return max(path.stat().st_mtime for path in started)
        time.sleep(0.02)


def end(part: dict[str, Any]) -> None:
    """Leave the evidence of an ending where ranks and kernels leave it, and end."""
    if part["kernel"]:
        own = re.sub(rf"\b{part['pid']}\b", str(os.getpid()), part["kernel"])
        write_kernel_log(own.rstrip("\n") + "\n")
    if part["error"]:
        path = os.environ["TORCHELASTIC_ERROR_FILE"]
        message, callstack = part["error"]
        extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    sys.stdout.write(part["log"])
    sys.stdout.flush()
    if isinstance(part["exit"], int):
        os._exit(part["exit"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), getattr(signal, part["exit"]))
    time.sleep(60.0)


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    if not os.environ["RELAUNCH_TOKEN"].endswith("/1"):
        return
    write_kernel_log("")
    plan = json.loads((folder / "parts.json").read_text())
    began = await_all(folder, rank, plan["world"])
    if part := plan["parts"].get(rank):
        time.sleep(max(0.0, began + LEAD + part["after"] - time.time()))
        end(part)
    while True:
        time.sleep(3600.0)


if __name__ == "__main__":
    main()
