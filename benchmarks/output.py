"""What it costs ranks that Python writes each `print` at once (PYTHONUNBUFFERED=1).

    python -m benchmarks.output

Counted is the processor time of ranks that print lines of 100 bytes into a file, as under the
agent: all that they use, less what they use when they print nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

LINE_BYTES = 100
BYTES_PER_MINUTE = 10_000_000
TURN_S = 0.1
RANK = f"""
import sys, time
turns, lines = int(sys.argv[1]), int(sys.argv[2])
began = time.monotonic()
for turn in range(turns):
    for _ in range(lines):
        print("x" * {LINE_BYTES - 1})
    time.sleep(max(0.0, began + (turn + 1) * {TURN_S} - time.monotonic()))
"""


def measure(ranks: int, seconds: float, lines: int, unbuffered: bool) -> float:
    """Return the processor time of all ranks in seconds."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    command = [sys.executable, "-S", "-c", RANK, str(round(seconds / TURN_S)), str(lines)]
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = []
        for rank in range(ranks):
            with Path(folder, f"rank_{rank}.log").open("ab") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log))
        for process in started:
            if process.wait() != 0:
                raise SystemExit(f"a rank ended with {process.returncode}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="How long ranks print.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lines = round(BYTES_PER_MINUTE / 60 * TURN_S / LINE_BYTES)
    for ranks in (1, 100):
        for name, unbuffered in (("buffered", False), ("unbuffered", True)):
            found = sorted(
                measure(ranks, options.seconds, lines, unbuffered)
                - measure(ranks, options.seconds, 0, unbuffered)
                for _ in range(options.rounds)
            )
            share = 100 * found[len(found) // 2] / options.seconds / ranks
            low, high = (100 * value / options.seconds / ranks for value in (found[0], found[-1]))
            print(
                f"{ranks:4} ranks, each 10 MB a minute, {name}: {share:.2f} % of a core for each"
                f" ({low:.2f} to {high:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
