"""Measure what watching costs healthy training, in steps of 10 ms of two ranks on two nodes.

    python -m tests.hangs.cost [--rounds N] [--steps N]

Each round runs `pair.py` alone and then as a job, and compares the median step. Meanwhile every
process of this machine is looked at, ten times a second: whether something traces a rank
(`TracerPid`), and whether py-spy or another program was started with the number of a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.hangs.play import NODES, prepare
from tests.programs.service import Service

PAIR = Path(__file__).with_name("pair.py")
LOOK_INTERVAL = 0.1
STEP_SECONDS = 0.01
RUN_TIMEOUT = 300.0


@dataclass
class Lookout(threading.Thread):
    """Looks for what is attached to the ranks that work in a folder, until `stop` is set."""

    folder: Path
    looks: int = 0
    ranks_seen: set[int] = field(default_factory=set)
    traced: int = 0
    readers: set[str] = field(default_factory=set)
    """Commands of processes that were started with the number of a rank."""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.stop.wait(LOOK_INTERVAL):
            self.look()

    def look(self) -> None:
        self.looks += 1
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if any(word.isdigit() and int(word) in self.ranks_seen for word in words):
                    self.readers.add(" ".join(words)[:200])
                if (entry / "cwd").readlink() != self.folder:
                    continue
                self.ranks_seen.add(int(entry.name))
                status = (entry / "status").read_text()
                tracer = status.partition("TracerPid:")[2].split()[0]
                self.traced += tracer != "0"


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1]) - 1


def run_alone(folder: Path, env: dict[str, str]) -> list[float]:
    folder.mkdir(parents=True)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-S", "-E", str(PAIR)],
            cwd=folder,
            env={**env, **place, "RANK": str(rank)},
            stdout=(folder / f"rank{rank}.txt").open("wb"),
        )
        for rank in range(NODES)
    ]
    if [rank.wait(RUN_TIMEOUT) for rank in ranks] != [0] * NODES:
        raise RuntimeError(f"{folder}: a rank failed")
    times: list[float] = json.loads((folder / "times.json").read_text())
    return times


def run_watched(service: Service, name: str, folder: Path, env: dict[str, str]) -> list[float]:
    folder.mkdir(parents=True)
    spec = {
        "name": name,
        "fleet": "h1",
        "command": [sys.executable, "-S", "-E", str(PAIR)],
        "workdir": str(folder),
        "nodes": NODES,
        "progress": {"log_pattern": r"step (?P<step>\d+)"},
        "env": env,
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    code, out, errors = service.call(
        "submit", str(folder / "job.yaml"), "--follow", timeout=RUN_TIMEOUT
    )
    if code:
        raise RuntimeError(f"{name}: submit exits with {code}: {(out + errors)[-500:]}")
    times: list[float] = json.loads((folder / "times.json").read_text())
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hangs.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--steps", type=int, default=3000, help="of each run (default: 3000)")
    options = parser.parse_args()
    env = {"STEPS": str(options.steps), "STEP_SECONDS": str(STEP_SECONDS)}
    work = Path(tempfile.mkdtemp(prefix="relaunch-hangs-cost-")).resolve()
    alone, watched, looks, ranks, traced = [], [], 0, 0, 0
    readers: set[str] = set()
    with Service(work / "service", *prepare(work / "service", 1)) as service:
        for number in range(options.rounds):
            alone.append(median(run_alone(work / f"alone{number}", env)) * 1000)
            folder = work / f"watched{number}"
            lookout = Lookout(folder)
            lookout.start()
            begun = time.monotonic()
            watched.append(median(run_watched(service, f"cost{number}", folder, env)) * 1000)
            lookout.stop.set()
            lookout.join()
            looks, ranks = looks + lookout.looks, ranks + len(lookout.ranks_seen)
            traced, readers = traced + lookout.traced, readers | lookout.readers
            print(
                f"round {number + 1}: alone {alone[-1]:.3f} ms, as a job {watched[-1]:.3f} ms"
                f" ({time.monotonic() - begun:.0f} s)",
                flush=True,
            )
    print(
        f"median step: alone {median(alone):.3f} ms, as a job {median(watched):.3f} ms;"
        f" {looks} looks at {ranks} processes of ranks: traced {traced} times;"
        f" processes started for one: {', '.join(sorted(readers)) or 'none'}"
    )
    return 1 if traced or readers else 0


if __name__ == "__main__":
    sys.exit(main())
