"""The power switch of a local node: ends its processes and gives it a new boot id, and never touches the machine.

Also the command that such a node is rebooted with: a script of the standard library only, so that it starts in no time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

ANSWERED = 0.2
"""Seconds for the answer to the order to leave: what gave it dies with the node."""


def reboot(folder: Path) -> None:
    """Kill every process of the node at once and give it a new boot id. What is on its disk stays."""
    # All stand still before any dies: a power cut leaves nobody to write down how the others ended.
    stopped: set[int] = set()
    while (pids := processes_of(folder, b"RELAUNCH_NODE_STATE") | processes_of(folder, b"RELAUNCH_AGENT_STATE")) - stopped:
        signal_all(pids - stopped, signal.SIGSTOP)
        stopped |= pids
    while pids := processes_of(folder, b"RELAUNCH_NODE_STATE") | processes_of(folder, b"RELAUNCH_AGENT_STATE"):
        signal_all(pids, signal.SIGKILL)
    temporary = folder / f".boot_id.{uuid.uuid4().hex}"
    temporary.write_text(uuid.uuid4().hex + "\n")
    temporary.replace(folder / "boot_id")  # whole: an agent that reads half of it takes that for a boot of its own


def processes_of(folder: Path, variable: bytes) -> set[int]:
    """Living processes that carry `variable=<folder>` in their environment."""
    wanted = variable + b"=" + os.fsencode(folder.resolve())
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
            stat = Path("/proc", entry, "stat").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
        if wanted in environment.split(b"\0") and stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
            found.add(int(entry))
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def command(folder: Path) -> list[str]:
    """What a node's agent runs to reboot it."""
    return [sys.executable, "-S", str(Path(__file__).resolve()), "order", str(folder.resolve())]


def _main(verb: str, folder: Path) -> None:
    if verb == "order":
        # Not of the node: what carries its name in the environment dies with it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAUNCH_")}
        subprocess.Popen(
            [sys.executable, "-S", __file__, "carry-out", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    else:
        time.sleep(ANSWERED)
        reboot(folder)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
