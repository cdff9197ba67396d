"""How long `run` needs to its first rank where no server runs.

    python -m benchmarks.cold [--runs 10] [--other CHECKOUT] [--torch PYTHON] [--output FILE]

The environment has PATH, HOME and TERM only. The state folder is kept from run to run, and the
first run in it is not counted: it compiles the agent. With `--other`, another checkout of relaunch
takes turns, run by this Python; with `--torch`, torchrun, run by that one. A rank's first act is to
read the kernel's clock, in steps of 10 ms.
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
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.contenders import ROOT
from benchmarks.torchrun import version


def make_relaunch(checkout: Path) -> list[str]:
    return [sys.executable, str(checkout / "starter.py"), "run", "--nproc", "1", "--"]


def make_torchrun(python: str) -> list[str]:
    module = [python, "-m", "torch.distributed.run"]
    return [*module, "--standalone", "--nproc-per-node", "1", "--no-python"]


def measure(words: Sequence[str], folder: Path) -> tuple[float, float]:
    """Return the seconds from the command to the first act of its rank, and to its end."""
    folder.mkdir(exist_ok=True)
    first = folder / "first"
    command = [*words, "sh", "-c", f"cat /proc/uptime > '{first}'"]
    ours = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "xterm"}
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**ours, "RELAUNCH_STATE": str(folder / "state")},
        capture_output=True,
        text=True,
        check=False,
    )
    end = time.clock_gettime(time.CLOCK_BOOTTIME)
    if ended.returncode:
        raise RuntimeError(f"{words}: exit code {ended.returncode}: {ended.stderr}")
    return float(first.read_text().split()[0]) - began, end - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--other", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--torch", help="a Python with torch: torchrun is measured in turn")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    contenders = {"this": make_relaunch(ROOT)}
    if arguments.other:
        contenders["other"] = make_relaunch(arguments.other.resolve())
    if arguments.torch:
        contenders[f"torchrun {version(arguments.torch)}"] = make_torchrun(arguments.torch)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(prefix="relaunch-cold-") as folder:
        for number in range(arguments.runs + 1):
            for index, (name, words) in enumerate(contenders.items()):
                took = measure(words, Path(folder, str(index)))
                if number:
                    times[name].append(took)
    rows = []
    for name, taken in times.items():
        ranks = sorted(first for first, _ in taken)
        row = {
            "checkout": name,
            "first_rank_s": [round(one, 2) for one in ranks],
            "median_s": round(statistics.median(ranks), 2),
            "whole_median_s": round(statistics.median(whole for _, whole in taken), 2),
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
