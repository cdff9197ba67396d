"""Passes SIGUSR1 and SIGUSR2 of `run` on to the ranks on this machine.

Batch systems send them before a time limit (`sbatch --signal=B:USR1@90`). They end a process that
does not handle them, so only ranks that do get them.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from relaunch.temporal import read_start_time
from relaunch.text import count_noun, join_ranges

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
RECORDS = "nodes/*/jobs/*/*/running/rank_*.json"
"""The records of running ranks, in the state folder of a service on this machine."""


def pass_on(state: Path, job: str, number: signal.Signals) -> str:
    """Send a signal to all ranks of a job that handle it; return a sentence that says so.

    Args:
        state: The state folder of the job's service.
        job: The name of the job.
        number: The signal.
    """
    given: list[int] = []
    unhandled: list[int] = []
    for rank, pid, started in _list_ranks(state, job):
        try:
            is_handled = _handles(pid, number)
            if read_start_time(pid) != started:
                continue
            if is_handled:
                os.kill(pid, number)
        except OSError:  # it has ended
            continue
        (given if is_handled else unhandled).append(rank)
    if not given and not unhandled:
        return f"{number.name} has no effect: no rank runs"
    if not given:
        return f"{number.name} has no effect: no rank handles it, and it would end them"
    one, does = ("rank", "does") if len(unhandled) == 1 else ("ranks", "do")
    rest = (
        f"; {one} {join_ranges(unhandled)} {does} not handle it, and did not get it"
        if unhandled
        else ""
    )
    return f"{number.name} passed on to {count_noun(len(given), 'rank')}{rest}"


def _list_ranks(state: Path, job: str) -> list[tuple[int, int, int]]:
    """Return the running ranks of a job by rank, pid and start time in clock ticks."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found = []
    for path in state.glob(RECORDS):
        try:
            record = json.loads(path.read_text())
            if record["token"]["job"] == job and record["boot_id"] == boot:
                found.append((int(record["rank"]), int(record["pid"]), int(record["started"])))
        except (OSError, ValueError, KeyError, TypeError):  # removed, or not ours
            continue
    return sorted(found)


def _handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has installed a handler of a signal."""
    # The name in it may end in the middle of a letter.
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
