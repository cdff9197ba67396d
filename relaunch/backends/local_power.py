"""The power switch of a local node: ends its processes and gives it a new boot id.

Never affects the machine.

Also the reboot command of such a node: a script that uses only the standard library, so that it
starts fast.
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
"""Seconds for the answer to the reboot order to be sent, before the agent that gives it is killed
with the node."""


def reboot(folder: Path) -> None:
    """Kill every process of the node at once and give it a new boot id.

    The content of its disk stays.
    """
    # Stop all processes before killing any: in a power cut, no process is left to record how the
    # others ended.
    stopped: set[int] = set()
    while (
        pids := processes_of(folder, b"RELAUNCH_NODE_STATE")
        | processes_of(folder, b"RELAUNCH_AGENT_STATE")
    ) - stopped:
        signal_all(pids - stopped, signal.SIGSTOP)
        stopped |= pids
    while pids := processes_of(folder, b"RELAUNCH_NODE_STATE") | processes_of(
        folder, b"RELAUNCH_AGENT_STATE"
    ):
        signal_all(pids, signal.SIGKILL)
    temporary = folder / f".boot_id.{uuid.uuid4().hex}"
    temporary.write_text(uuid.uuid4().hex + "\n")
    # Replace it atomically: an agent that reads half of it would take that for another boot id.
    temporary.replace(folder / "boot_id")


def processes_of(folder: Path, variable: bytes) -> set[int]:
    """Return the live processes that have `variable=<folder>` in their environment."""
    wanted = variable + b"=" + os.fsencode(folder.resolve())
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
            stat = Path("/proc", entry, "stat").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
        if wanted in environment.split(b"\0") and stat.rpartition(b")")[2].split()[0] not in (
            b"Z",
            b"X",
        ):
            found.add(int(entry))
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def command(folder: Path) -> list[str]:
    """Return the command with which a node's agent reboots the node."""
    return [sys.executable, "-S", str(Path(__file__).resolve()), "order", str(folder.resolve())]


def _main(verb: str, folder: Path) -> None:
    if verb == "order":
        # Run outside the node: a process with the node's variables in its environment is killed
        # with it.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RELAUNCH_")
        }
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
