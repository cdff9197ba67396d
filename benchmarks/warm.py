"""Compare how long ranks with torch need to train again after one of them was killed.

    python -m benchmarks.warm --torch PYTHON [--rounds 10] [--output FILE]

PYTHON can import torch. A recovery lasts from the SIGKILL of a rank to the end of the first
all-reduce (gloo) of all four new ones. Contenders: a bare loop that starts them again, torchrun,
relaunch, and relaunch with `--warm torch`; each with one node of four ranks, and with two of two.
A warm contender gets time to import before each kill, as it has in a job of hours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import (
    DEADLINE,
    ROOT,
    SETTLE,
    WORLD_SIZE,
    Contender,
    gang_since,
    measure_start,
)
from benchmarks.floor import Floor
from benchmarks.relaunch import Relaunch
from benchmarks.torchrun import Torchrun, version

MODULES = "torch,torch.distributed"


class Warm(Relaunch):
    """relaunch with one or two nodes, with or without modules that are imported ahead."""

    def __init__(self, state: Path, nodes: int, warm: bool) -> None:
        super().__init__(state)
        self.nodes = nodes
        self.warm = warm
        self.name = f"relaunch, {nodes} node{'s' if nodes > 1 else ''}{', warm' if warm else ''}"
        if warm:
            self.options = ("--warm", MODULES)

    def await_ready(self) -> None:
        """Wait until every node has a Python that has imported the modules."""
        deadline = time.monotonic() + DEADLINE
        while (ready := self._count_ready()) < self.nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: {ready} of {self.nodes} nodes are warm")
            time.sleep(0.2)

    def _count_ready(self) -> int:
        records = []
        for path in self._state.glob("**/warm/standby.json"):
            try:
                records.append(json.loads(path.read_text()))
            except (FileNotFoundError, ValueError):
                continue
        alive = [record for record in records if Path(f"/proc/{record['pid']}").exists()]
        return sum(record["state"] == "ready" for record in alive)


def measure_recovery(contender: Contender, rounds: int) -> list[float]:
    """Kill one rank after the other; return the milliseconds to the all-reduce of all."""
    moment = random.Random(1)
    times = []
    since = 0
    for number in range(rounds):
        if isinstance(contender, Warm) and contender.warm:
            contender.await_ready()
        time.sleep(moment.uniform(*SETTLE))
        killed = contender.kill_a_rank(number % WORLD_SIZE)
        deadline = time.monotonic() + DEADLINE
        while (since_kill := gang_since(contender.starts(), killed)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{contender.name}: no gang after kill {number}")
            time.sleep(0.02)
        times.append((since_kill - killed) / 1e6)
        print(f"{contender.name}: {times[-1]:.0f} ms", file=sys.stderr, flush=True)
        since = since_kill
    assert since or not rounds
    return times


def read_split(path: Path) -> dict[str, float]:
    """Return the medians of what ranks spent on a start after the first one, in seconds."""
    rows = [[float(part) for part in line.split()[2:]] for line in path.read_text().splitlines()]
    rows = rows[WORLD_SIZE:]
    if not rows:
        return {}
    names = ("import", "join", "all-reduce")
    return {
        name: statistics.median(row[index + 1] - row[index] for row in rows)
        for index, name in enumerate(names)
    }


def measure(contender: Contender, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-") as folder:
        split = Path(folder) / "split"
        os.environ["BENCH_SPLIT"] = str(split)
        try:
            started = measure_start(contender, Path(folder))
            times = measure_recovery(contender, rounds)
        finally:
            contender.stop()
        return {
            "name": contender.name,
            "start_s": started,
            "recovery_ms": times,
            "split_s": read_split(split),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--torch", required=True, help="a Python that can import torch")
    parser.add_argument("--cuda", action="store_true", help="tensors on the first GPU")
    parser.add_argument("--only", default="", help="a part of the contenders' names")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch = version(arguments.torch)
    if not torch:
        parser.error(f"{arguments.torch} cannot import torch")
    # With the store that torchrun shares with its ranks, those of torch 2.13 take addresses of dead
    # ranks from it after a restart, and fail (gloo: connectFullMesh).
    if arguments.cuda:
        os.environ["BENCH_CUDA"] = "1"
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = (arguments.torch, str(ROOT / "benchmarks" / "torch_rank.py"))
    results = []
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-up-") as folder:
        state = Path(folder) / "state"
        service = Warm(state, 1, warm=False)
        contenders: list[Contender] = [
            Floor(),
            *(Torchrun(arguments.torch, nodes) for nodes in (1, 2)),
            *(Warm(state, nodes, warm) for warm in (False, True) for nodes in (1, 2)),
        ]
        service.bring_up()
        try:
            for contender in contenders:
                if arguments.only not in contender.name:
                    continue
                contender.command = command
                if isinstance(contender, Warm):
                    contender.share_service(service)
                results.append(measure(contender, arguments.rounds))
        finally:
            service.take_down()
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "load": os.getloadavg(),
        },
        "torch": torch,
        "cuda": arguments.cuda,
        "contenders": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print("| 4 ranks with torch | SIGKILL of a rank → first all-reduce, ms | of it, a rank's own |")
    print("|---|---|---|")
    for result in results:
        times = sorted(result["recovery_ms"])
        split = ", ".join(f"{name} {part:.2f} s" for name, part in result["split_s"].items())
        print(
            f"| {result['name']} | {statistics.median(times):.0f} "
            f"({times[0]:.0f}–{times[-1]:.0f}) | {split} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
