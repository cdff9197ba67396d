"""`make bench`: every benchmark of restarts and starts, one after the other, on this machine.

    python -m benchmarks [--into FOLDER] [--only PART …] [--list]

Each part writes FOLDER/PART.json and PART.txt, what it printed. A part that is there is not
measured again, so what was interrupted is repeated and goes on; FOLDER is by default
build/bench/COMMIT. Parts with torch are measured where RELAUNCH_TORCH_PYTHON names a Python that
can import it, and left out by name otherwise. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import ROOT
from benchmarks.torchrun import version


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    words: tuple[str, ...]
    """The module of the benchmark, and its options."""
    says: str
    torch: str = "none"
    """none, needed, or used: torchrun takes part where it is there."""

    def make_command(self, output: Path, python: str) -> list[str]:
        torch = ["--torch", python] if self.torch != "none" and python else []
        return [
            sys.executable, "-m", *self.words, *torch, "--output", str(output)
        ]  # fmt: skip


PARTS = (
    Part("restarts", ("benchmarks.run",), "restarts, starts and idle cost", "used"),
    Part("split", ("benchmarks.split",), "what a restart goes into"),
    Part("cold", ("benchmarks.cold",), "`run` without a server, to its first rank", "used"),
    Part("worker-killed", ("benchmarks.worker_killed",), "a fault after a worker was killed"),
    Part("warm", ("benchmarks.warm",), "restarts with torch, warm, cold and torchrun", "needed"),
    Part(
        "warm-ssh",
        ("benchmarks.warm", "--ssh", "--rounds", "3"),
        "the same over SSH, in place and on a spare",
        "needed",
    ),
    Part("footprint", ("benchmarks.footprint",), "what runs beside idle ranks", "used"),
    Part("ssh-64", ("benchmarks.ssh",), "64 nodes over SSH"),
    Part("ssh-200", ("benchmarks.ssh", "--nodes", "200", "--round-trip", "50"), "200, far away"),
)


def find_commit() -> str:
    """Return the commit of this checkout, with a mark where files differ from it."""
    words = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--match", "-")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measure(part: Part, folder: Path, python: str) -> bool:
    """Measure one part, unless its result is there; return whether there is one."""
    output = folder / f"{part.name}.json"
    if output.exists():
        print(f"{part.name}: measured before, {output}", flush=True)
        return True
    print(f"{part.name}: {part.says}", flush=True)
    begun, partial = time.monotonic(), folder / f"{part.name}.partial"
    partial.unlink(missing_ok=True)
    with (folder / f"{part.name}.txt").open("w") as printed:
        command = part.make_command(partial, python)
        code = subprocess.run(command, cwd=ROOT, stdout=printed, check=False).returncode
    if code or not partial.exists():
        print(f"{part.name}: it failed with exit code {code}; the others go on", flush=True)
        return False
    partial.replace(output)
    print((folder / f"{part.name}.txt").read_text(), end="", flush=True)
    print(f"{part.name}: {time.monotonic() - begun:.0f} s, {output}", flush=True)
    return True


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--into", type=Path, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--list", action="store_true", help="print the parts, and measure nothing")
    arguments = parser.parse_args()
    if arguments.list:
        for part in PARTS:
            print(f"{part.name:14} {part.says}")
        return 0
    # Parts are given it as an option. In their environment `up` would refuse it: no setting.
    python = os.environ.pop("RELAUNCH_TORCH_PYTHON", "")
    if python and not version(python):
        parser.error(f"RELAUNCH_TORCH_PYTHON is {python!r}: expected a Python that imports torch")
    folder = arguments.into or ROOT / "build" / "bench" / find_commit()
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in PARTS:
        if part.name not in arguments.only:
            continue
        if part.torch == "needed" and not python:
            print(f"{part.name}: left out, because RELAUNCH_TORCH_PYTHON names no Python")
            continue
        failed += not measure(part, folder, python)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
