"""What relaunch costs beside four idle ranks on one machine, part by part, and torchrun beside it.

    python -m benchmarks.footprint [--seconds 60] [--settle 60] [--step 1] [--torch PYTHON]
                                   [--output FILE]

Measured is each process but the ranks: processor time by /proc/PID/stat, with that of children that
have ended, and memory as proportional set size. Wall time is not measured, so that a busy machine
changes little. torchrun takes part where PYTHON (default: RELAUNCH_TORCH_PYTHON, else this one) can
import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.contenders import ROOT, WORLD_SIZE, Contender, measure_start, rank_command
from benchmarks.idle import MARK, TICK, marked, pss
from benchmarks.machine import describe_machine
from benchmarks.rank import STEP_VARIABLE
from benchmarks.relaunch import Relaunch
from benchmarks.torchrun import Torchrun, version

NAMES = {
    "relaunch-shim": "shims",
    "relaunch-sup": "supervisors",
    "relaunch-guard": "guards",
    "relaunch-idle": "agent sessions and their commands",
    "relaunch-order": "agent sessions and their commands",
    "relaunch-warm": "Pythons that import ahead",
    "relaunch-up": "`up` itself",
    "relaunch-worker": "worker",
}
"""The part that a process belongs to, by the name that it gives itself. `up` and worker of a `run`
without a server are forks of it, so their command is that of `run`."""
PARTS = (
    "Temporal server",
    "worker",
    "`up` itself",
    "warm command line",
    "`run` itself",
    "agent sessions and their commands",
    "shims",
    "supervisors",
    "guards",
    "Pythons that import ahead",
    "torchrun",
    "other",
)


class Submitted(Relaunch):
    """A job submitted to a running `up`; no command of relaunch stays."""

    name = "`up`, job submitted"

    def launch(self, folder: Path) -> None:
        job = {
            "name": "footprint",
            "command": list(rank_command()),
            "nodes": 2,
            "nproc_per_node": WORLD_SIZE // 2,
            "env": {
                "BENCH_STARTS": str(self.starts_file),
                STEP_VARIABLE: os.environ[STEP_VARIABLE],
            },
        }
        path = folder / "job.yaml"
        path.write_text(json.dumps(job))
        command = [sys.executable, str(ROOT / "starter.py"), "submit", str(path)]
        subprocess.run(command, env=self._environment, check=True, capture_output=True)

    def stop(self) -> None:
        command = [sys.executable, str(ROOT / "starter.py"), "cancel", "footprint"]
        subprocess.run(command, env=self._environment, check=False, capture_output=True)
        super().stop()


class Followed(Relaunch):
    name = "`up`, job by `run`"


class Alone(Contender):
    """`run` without `up`: it starts a server for the job."""

    name = "`run` alone"

    def launch(self, folder: Path) -> None:
        os.environ["RELAUNCH_STATE"] = str(folder / "state")
        shape = ["--nodes", "2", "--nproc", str(WORLD_SIZE // 2), "--name", "footprint"]
        command = [sys.executable, str(ROOT / "starter.py"), "run", *shape, "--", *rank_command()]
        self.spawn(command, folder / "run.log")


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time in ticks."""

    own: int
    of_children: int
    """Of children that have ended and were waited for."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    processes: int
    cpu_percent: float
    """Of one core."""
    memory_mib: float
    """Proportional set size."""


@dataclass(frozen=True, slots=True)
class Footprint:
    name: str
    parts: tuple[Part, ...]

    @property
    def total(self) -> Part:
        return Part(
            self.name,
            sum(part.processes for part in self.parts),
            sum(part.cpu_percent for part in self.parts),
            sum(part.memory_mib for part in self.parts),
        )


def read_usage(pid: int) -> Usage | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Usage(int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14]))


def find_part(pid: int) -> str:
    """Return the part that a process belongs to, by its name and its command."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return "other"
    if name in NAMES:
        return NAMES[name]
    if "start-dev" in words:
        return "Temporal server"
    if "torch.distributed.run" in words:
        return "torchrun"
    if words[-1:] == ["session"]:
        return "agent sessions and their commands"
    if "warm" in words:  # a fork of it is the command that was typed
        is_fork = find_part(int(parent)) == "warm command line"
        return "`run` itself" if is_fork else "warm command line"
    commands = {"worker": "worker", "up": "`up` itself", "run": "`run` itself"}
    return next((commands[word] for word in words if word in commands), "other")


def measure(name: str, mark: str, seconds: float) -> Footprint:
    before = {pid: read_usage(pid) for pid in marked(mark)}
    time.sleep(seconds)
    used: dict[str, float] = {}
    count: dict[str, int] = {}
    memory: dict[str, float] = {}
    now = marked(mark)
    for pid in now:
        part, usage = find_part(pid), read_usage(pid)
        if usage is None:
            continue
        was = before.get(pid) or Usage(0, 0)
        spent = usage.own - was.own + usage.of_children - was.of_children
        used[part] = used.get(part, 0.0) + spent
        count[part] = count.get(part, 0) + 1
        memory[part] = memory.get(part, 0.0) + pss(pid) / 1024
    # What a child had used before is in the time of its parent once it has ended.
    ended = sum(was.own for pid, was in before.items() if was is not None and pid not in now)
    if ended:
        part = "agent sessions and their commands"
        used[part] = used.get(part, 0.0) - ended
    return Footprint(
        name,
        tuple(
            Part(part, count[part], 100.0 * used[part] / TICK / seconds, memory[part])
            for part in PARTS
            if part in count
        ),
    )


def run(contender: Contender, settle: float, seconds: float) -> Footprint:
    os.environ[MARK] = contender.name
    os.environ.pop("RELAUNCH_STATE", None)
    bring_up: Callable[[], None] | None = getattr(contender, "bring_up", None)
    take_down: Callable[[], None] | None = getattr(contender, "take_down", None)
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-") as folder:
        try:
            if bring_up is not None:
                bring_up()
            measure_start(contender, Path(folder))
            time.sleep(settle)
            return measure(contender.name, contender.name, seconds)
        finally:
            contender.stop()
            if take_down is not None:
                take_down()


def format_row(label: str, part: Part) -> str:
    return f"| {label} | {part.processes} | {part.cpu_percent:.2f} % | {part.memory_mib:.0f} MiB |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long it is measured")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds from start to that")
    parser.add_argument("--step", type=float, default=1.0, help="seconds between a rank's steps")
    parser.add_argument("--torch", default=os.environ.get("RELAUNCH_TORCH_PYTHON", sys.executable))
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    os.environ[STEP_VARIABLE] = str(arguments.step)
    torch = version(arguments.torch)
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-up-") as folder:
        contenders: list[Contender] = [
            Submitted(Path(folder) / "submitted"),
            Followed(Path(folder) / "followed"),
            Alone(),
        ]
        if torch:
            contenders += [Torchrun(arguments.torch), Torchrun(arguments.torch, nodes=2)]
        found = []
        for contender in contenders:
            print(f"measuring {contender.name} …", file=sys.stderr, flush=True)
            found.append(run(contender, arguments.settle, arguments.seconds))
    print("| 2 × 2 idle ranks, which are not counted | processes | CPU, of a core | PSS |")
    print("| -- | -- | -- | -- |")
    for one in found:
        print(format_row(f"**{one.name}**", one.total))
        for part in one.parts if len(one.parts) > 1 else ():
            print(format_row(part.name, part))
    if arguments.output is not None:
        report = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "torch": torch,
            "seconds": arguments.seconds,
            "settle": arguments.settle,
            "step": arguments.step,
            "footprints": [{**asdict(one), "total": asdict(one.total)} for one in found],
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
