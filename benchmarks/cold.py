"""How long `run` needs to its first rank where no server runs.

    python -m benchmarks.cold [--runs 10] [--other CHECKOUT] [--output FILE]

The environment has PATH, HOME and TERM only. The state folder is kept from run to run, and the
first run in it is not counted: it compiles the agent. With `--other`, another checkout of relaunch
takes turns, run by this Python. A rank's first act is to read the kernel's clock, in steps of 10
ms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.contenders import ROOT


def measure(checkout: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds from the command to the first act of its rank, and to its end."""
    folder.mkdir(exist_ok=True)
    first = folder / "first"
    command = [sys.executable, str(checkout / "starter.py"), "run", "--nproc", "1", "--"]
    command += ["sh", "-c", f"cat /proc/uptime > '{first}'"]
    ours = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "xterm"}
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    ended = subprocess.run(
        command,
        cwd=checkout,
        env={**ours, "RELAUNCH_STATE": str(folder / "state")},
        capture_output=True,
        text=True,
        check=False,
    )
    end = time.clock_gettime(time.CLOCK_BOOTTIME)
    if ended.returncode:
        raise RuntimeError(f"{checkout}: exit code {ended.returncode}: {ended.stderr}")
    return float(first.read_text().split()[0]) - began, end - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--other", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    checkouts = [ROOT, *([arguments.other.resolve()] if arguments.other else [])]
    times: dict[Path, list[tuple[float, float]]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory(prefix="relaunch-cold-") as folder:
        for number in range(arguments.runs + 1):
            for index, checkout in enumerate(checkouts):
                took = measure(checkout, Path(folder, str(index)))
                if number:
                    times[checkout].append(took)
    rows = []
    for index, checkout in enumerate(checkouts):
        ranks = sorted(first for first, _ in times[checkout])
        row = {
            "checkout": "other" if index else "this",
            "first_rank_s": [round(one, 2) for one in ranks],
            "median_s": round(statistics.median(ranks), 2),
            "whole_median_s": round(statistics.median(whole for _, whole in times[checkout]), 2),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": os.getloadavg(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
