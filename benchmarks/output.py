"""What it costs ranks that each line is written at once, and not collected in a buffer.

    python -m benchmarks.output

That is PYTHONUNBUFFERED=1 for Python, and for a program in C (it needs gcc) `stdbuf -oL` or a
pseudo-terminal, which util-linux's `script` makes.
Counted is the processor time of ranks that print lines of 100 bytes into a file, as under the
agent: all that they use, less what they use when they print nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
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


IN_C = f"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double now(void) {{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}}

int main(int count, char **words) {{
    double began = now();
    for (int turn = 0; turn < atoi(words[1]); turn++) {{
        for (int line = 0; line < atoi(words[2]); line++)
            printf("%0{LINE_BYTES - 1}d\\n", line);
        double left = began + (turn + 1) * {TURN_S} - now();
        if (left > 0)
            usleep(left * 1e6);
    }}
}}
"""


@dataclass(frozen=True)
class Kind:
    """One way to run the program."""

    name: str
    command: tuple[str, ...]
    unbuffered: str = ""
    """The value of PYTHONUNBUFFERED."""


def make_kinds(folder: Path) -> list[Kind]:
    python = (sys.executable, "-S", "-c", RANK)
    kinds = [Kind("Python", python), Kind("Python, PYTHONUNBUFFERED=1", python, "1")]
    if shutil.which("gcc") is not None:
        program = folder / "rank"
        compiled = ["gcc", "-O2", "-x", "c", "-o", program, "-"]
        subprocess.run(compiled, input=IN_C.encode(), check=True)
        kinds += [
            Kind("C", (str(program),)),
            Kind("C, stdbuf -oL", ("stdbuf", "-oL", str(program))),
        ]
        if shutil.which("script") is not None:
            below = ("sh", "-c", 'exec script -qec "$0 $1 $2" /dev/null', str(program))
            kinds.append(Kind("C, pseudo-terminal", below))
    return kinds


def measure(kind: Kind, ranks: int, seconds: float, lines: int) -> float:
    """Return the processor time of all ranks in seconds."""
    environment = {**os.environ, "PYTHONUNBUFFERED": kind.unbuffered}
    command = [*kind.command, str(round(seconds / TURN_S)), str(lines)]
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = []
        for rank in range(ranks):
            with Path(folder, f"rank_{rank}.log").open("ab") as log:
                started.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log)
                )
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
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 100):
            for kind in make_kinds(Path(folder)):
                found = sorted(
                    measure(kind, ranks, options.seconds, lines)
                    - measure(kind, ranks, options.seconds, 0)
                    for _ in range(options.rounds)
                )
                shares = [100 * value / options.seconds / ranks for value in found]
                print(
                    f"{ranks:4} ranks, each 10 MB a minute, {kind.name}:"
                    f" {shares[len(shares) // 2]:.2f} % of a core for each"
                    f" ({shares[0]:.2f} to {shares[-1]:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
