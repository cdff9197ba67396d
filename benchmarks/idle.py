"""What a launcher costs while its ranks run undisturbed.

Counted are processor time and memory of all its processes but the ranks.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import rank_command

MARK = "BENCH_MARK"
"""In the environment of everything that a contender starts; it is inherited, also by daemons."""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Idle:
    processes: int
    cpu_percent: float
    """Of one core."""
    memory_mib: float
    """Proportional set size: shared pages are divided among those who share them."""


def marked(mark: str) -> set[int]:
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0") and not is_rank(
                int(entry)
            ):
                found.add(int(entry))
        except OSError:
            continue
    return found


def is_rank(pid: int) -> bool:
    """A launcher has the rank's command among its arguments, too; only a rank has it as its own."""
    return (
        tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:2]) == rank_command()
    )


def measure_idle(mark: str, seconds: float) -> Idle:
    before = {pid: ticks(pid) for pid in marked(mark)}
    time.sleep(seconds)
    used = sum(ticks(pid) - earlier for pid, earlier in before.items())
    memory = sum(pss(pid) for pid in before)
    return Idle(len(before), 100.0 * used / TICK / seconds, memory / 1024)


def ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
