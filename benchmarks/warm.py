"""Compare how long ranks with torch need to train again after one of them was killed.

    python -m benchmarks.warm --torch PYTHON [--rounds 10] [--output FILE]
    python -m benchmarks.warm --torch PYTHON --cuda [--nccl] [--step] [--output FILE]
    python -m benchmarks.warm --torch PYTHON --ssh [--rounds 3] [--output FILE]

PYTHON can import torch. A recovery lasts from the SIGKILL of a rank to the end of the first
all-reduce (gloo) of all four new ones. Contenders: a bare loop that starts them again, torchrun,
relaunch, and relaunch with `--warm torch`; each with one node of four ranks, and with two of two.
A warm contender gets time to import before each kill, as it has in a job of hours.

With --cuda the tensors of all ranks are on the first GPU; with --nccl there is one rank, since NCCL
wants a GPU for each. With --step each takes a step of training (DDP, AdamW) after its first
all-reduce, which is no part of the recovery, and another contender has imported torch._dynamo, too:
torch's optimizers and DDP import it when they are first used. What follows a kill in relaunch is
given part by part, as in `benchmarks.split`.

With --ssh, two nodes of two ranks and a spare, each with its own sshd on this machine. Each round
kills a rank, and then cuts off a node whose ranks stand still: that recovery lasts from the moment
in which its ranks are proven to be gone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import (
    DEADLINE,
    ROOT,
    SETTLE,
    WORLD_SIZE,
    Contender,
    Start,
    await_gang,
    gang_since,
    measure_start,
)
from benchmarks.floor import Floor
from benchmarks.machine import describe_machine
from benchmarks.relaunch import Relaunch
from benchmarks.split import read_history, read_nodes
from benchmarks.torchrun import Torchrun, version

if TYPE_CHECKING:
    from temporalio.client import WorkflowHandle

MODULES = "torch,torch.distributed"
WITH_DYNAMO = f"{MODULES},torch._dynamo"
PARTS = ("import", "join", "CUDA", "first tensor", "all-reduce", "first step")
"""What a rank spends its start on. On CPUs, CUDA takes no time."""
PATH = ("journaled", "reported", "ordered", "begun", "prepared", "forked", "began")
"""The moments between a kill and the first line of the last rank, as `benchmarks.split` has them.
"""


class Warm(Relaunch):
    """relaunch with one or two nodes, with or without modules that are imported ahead."""

    def __init__(self, state: Path, nodes: int, warm: str) -> None:
        super().__init__(state)
        self.nodes = nodes
        self.warm = warm
        self.name = f"relaunch, {nodes} node{'s' if nodes > 1 else ''}{', warm' if warm else ''}"
        if warm:
            self.options = ("--warm", warm)
        if warm == WITH_DYNAMO:
            self.name += " with torch._dynamo"

    def read_path(self, kills: list[int]) -> list[dict[str, float]]:
        """Return the moments of each recovery in milliseconds since its kill."""
        offset = time.time() - time.monotonic()
        history = asyncio.run(read_history(self._state, self.job))
        found = []
        for number, (killed, launch) in enumerate(zip(kills, history, strict=False)):
            moments = launch | read_nodes(self._state, self.job, number + 2)
            found.append(
                {name: 1000 * (at - offset) - killed / 1e6 for name, at in moments.items()}
            )
        return found

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
        # Those of a job before are kept for some time after its end.
        own = [record for record in records if record["names"]["job"] == self.job]
        alive = [record for record in own if Path(f"/proc/{record['pid']}").exists()]
        return sum(record["state"] == "ready" for record in alive)


def measure_recovery(contender: Contender, rounds: int) -> tuple[list[int], list[float]]:
    """Kill one rank after the other; return when, and the milliseconds to the all-reduce of all."""
    moment = random.Random(1)
    kills, times = [], []
    for number in range(rounds):
        if isinstance(contender, Warm) and contender.warm:
            contender.await_ready()
        time.sleep(moment.uniform(*SETTLE))
        killed = contender.kill_a_rank(number % contender.ranks)
        kills.append(killed)
        times.append((await_gang(contender, killed) - killed) / 1e6)
        print(f"{contender.name}: {times[-1]:.0f} ms", file=sys.stderr, flush=True)
    return kills, times


def read_ranks(path: Path, ranks: int) -> list[list[list[float]]]:
    """Return the moments of each rank, by start, without those of the first one."""
    rows = [[float(part) for part in line.split()[2:]] for line in path.read_text().splitlines()]
    return [rows[at : at + ranks] for at in range(ranks, len(rows), ranks)]


def read_split(starts: list[list[list[float]]]) -> dict[str, float]:
    """Return the medians of what ranks spent on a start after the first one, in seconds."""
    rows = [row for start in starts for row in start]
    return {
        name: statistics.median(row[index + 1] - row[index] for row in rows)
        for index, name in enumerate(PARTS)
        if rows and len(rows[0]) > index + 1
    }


def split_path(
    kills: list[int], starts: list[list[list[float]]], path: list[dict[str, float]]
) -> dict[str, float]:
    """Return the median milliseconds of each part of relaunch's own way."""
    for killed, start, moments in zip(kills, starts, path, strict=True):
        moments["began"] = 1000 * max(row[0] for row in start) - killed / 1e6
    return {
        name: statistics.median(one[name] - one.get(before, 0.0) for one in path)
        for before, name in itertools.pairwise(("killed", *PATH))
    }


def measure(contender: Contender, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-") as folder:
        split = Path(folder) / "split"
        os.environ["BENCH_SPLIT"] = str(split)
        try:
            started = measure_start(contender, Path(folder))
            kills, times = measure_recovery(contender, rounds)
            time.sleep(SETTLE[1])
            starts = read_ranks(split, contender.ranks)
            path = contender.read_path(kills) if isinstance(contender, Warm) else []
        finally:
            contender.stop()
        return {
            "name": contender.name,
            "ranks": contender.ranks,
            "start_s": started,
            "recovery_ms": times,
            "path_ms": split_path(kills, starts, path) if path else {},
            "split_s": read_split(starts),
        }


@dataclass(frozen=True, slots=True)
class Recovery:
    """One round over SSH, in milliseconds to the first all-reduce."""

    in_place: float
    on_spare: float


async def measure_over_ssh(torch: str, warm: bool, number: int) -> Recovery:
    """Measure one round in a new world: server, worker, three nodes."""
    from tests.chaos.rounds import CUTS
    from tests.chaos.world import World, chaos_policy

    policy = chaos_policy(
        {"lease": "10s", "lost_after": "6s", "fence_after": "5s"},
        hang={"after": "20s", "first_step": "90s"},
        max_restarts=10,
    )
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-") as folder:
        starts = Path(folder) / "starts"
        starts.touch()
        async with World(
            Path(folder) / "world", number, spares=1, backend="ssh", answer_within=5.0
        ) as world:
            job = await world.submit(
                name="train",
                nodes=2,
                nproc_per_node=2,
                command=[torch, str(ROOT / "benchmarks" / "torch_rank.py")],
                env={"BENCH_STARTS": str(starts), "BENCH_LOCKSTEP": "1", "OMP_NUM_THREADS": "1"},
                warm=MODULES.split(",") if warm else (),
                policy=policy,
            )
            await _await_gang_of(starts, 0)
            await _settle(job, ("n1", "n2", "n3") if warm else ())
            killed = time.monotonic_ns()
            os.kill(_newest(starts, 3).pid, signal.SIGKILL)
            in_place = await _await_gang_of(starts, killed) - killed
            await _settle(job, ("n1", "n2", "n3") if warm else ())
            cut = time.monotonic_ns()
            world.places.cut("n2", CUTS["cut both"], freeze_ranks=True)
            again = await _await_gang_of(starts, cut)
            await job.until_phase("RUNNING", generation=3)
            proven = await _find_proof(world.client.get_workflow_handle("job/train"))
            return Recovery(in_place / 1e6, (again - proven) / 1e6)


async def _settle(job: Any, warm: tuple[str, ...]) -> None:
    """Wait until the job trains, its leases are renewed and these nodes have imported."""
    await job.until_phase("RUNNING")
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        records = [job.on(node) / "warm" / "standby.json" for node in warm]
        if all(path.exists() and '"ready"' in path.read_text() for path in records):
            break
        await asyncio.sleep(0.2)
    else:
        raise TimeoutError(f"not all of {warm} are warm")
    await asyncio.sleep(5.0)


def _read_starts(path: Path) -> list[Start]:
    return [Start(*map(int, line.split())) for line in path.read_text().splitlines()]


def _newest(path: Path, rank: int) -> Start:
    return max((one for one in _read_starts(path) if one.rank == rank), key=lambda one: one.at)


async def _await_gang_of(path: Path, since: int) -> int:
    deadline = time.monotonic() + 2 * DEADLINE
    while (at := gang_since(_read_starts(path), since)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no gang of {WORLD_SIZE} ranks")
        await asyncio.sleep(0.05)
    return at


async def _find_proof(job: WorkflowHandle[Any, Any]) -> int:
    """Return when the ranks before the newest launch were proven gone, by CLOCK_MONOTONIC in ns.

    That is when the last activity that stops ranks had ended before it; both clocks are of this
    machine.
    """
    names: dict[int, str] = {}
    proof = launched = 0
    async for event in job.fetch_history_events():
        if event.HasField("activity_task_scheduled_event_attributes"):
            name = event.activity_task_scheduled_event_attributes.activity_type.name
            names[event.event_id] = name
            launched = proof if name == "launch_ranks" else launched
        elif event.HasField("activity_task_completed_event_attributes"):
            done = event.activity_task_completed_event_attributes.scheduled_event_id
            if names.get(done) == "stop_ranks":
                proof = event.event_time.ToNanoseconds()
    if not launched:
        raise ValueError("no ranks were proven gone")
    return launched - (time.time_ns() - time.monotonic_ns())


def run_over_ssh(torch: str, rounds: int, only: str) -> list[dict[str, Any]]:
    results = []
    for name, warm in (("relaunch over SSH", False), ("relaunch over SSH, warm", True)):
        if only not in name:
            continue
        found = []
        for number in range(rounds):
            found.append(asyncio.run(measure_over_ssh(torch, warm, 140 + number)))
            print(f"{name}: {found[-1]}", file=sys.stderr, flush=True)
        for what in ("in_place", "on_spare"):
            times = [getattr(one, what) for one in found]
            text = {"in_place": "a rank killed", "on_spare": "a node lost, on a spare"}[what]
            results.append({"name": f"{name}: {text}", "recovery_ms": times, "split_s": {}})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--torch", required=True, help="a Python that can import torch")
    parser.add_argument("--cuda", action="store_true", help="tensors on the first GPU")
    parser.add_argument("--nccl", action="store_true", help="one rank, with NCCL on the GPU")
    parser.add_argument("--step", action="store_true", help="ranks take a step of training")
    parser.add_argument("--only", default="", help="a pattern of the contenders' names")
    parser.add_argument("--ssh", action="store_true", help="measure nodes over SSH, with a spare")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch = version(arguments.torch)
    if not torch:
        parser.error(f"{arguments.torch} cannot import torch")
    # With the store that torchrun shares with its ranks, those of torch 2.13 take addresses of dead
    # ranks from it after a restart, and fail (gloo: connectFullMesh).
    if arguments.cuda:
        os.environ["BENCH_CUDA"] = "1"
    if arguments.nccl:
        os.environ["BENCH_BACKEND"] = "nccl"
    if arguments.step:
        os.environ["BENCH_STEP"] = "1"
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = (arguments.torch, str(ROOT / "benchmarks" / "torch_rank.py"))
    results = []
    if arguments.ssh:
        results = run_over_ssh(arguments.torch, arguments.rounds, arguments.only)
        return finish(arguments, torch, results)
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-up-") as folder:
        state = Path(folder) / "state"
        service = Warm(state, 1, warm="")
        nodes = (1,) if arguments.nccl else (1, 2)
        contenders: list[Contender] = [
            Floor(),
            *(Torchrun(arguments.torch, each) for each in nodes),
            *(Warm(state, each, warm) for warm in ("", MODULES) for each in nodes),
            *([Warm(state, 1, WITH_DYNAMO)] if arguments.step else []),
        ]
        service.bring_up()
        try:
            for contender in contenders:
                if not re.search(arguments.only, contender.name):
                    continue
                contender.command = command
                if arguments.nccl:
                    contender.ranks = 1
                if isinstance(contender, Warm):
                    contender.share_service(service)
                results.append(measure(contender, arguments.rounds))
        finally:
            service.take_down()
    return finish(arguments, torch, results)


def finish(arguments: argparse.Namespace, torch: str, results: list[dict[str, Any]]) -> int:
    """Print and keep the results."""
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "torch": torch,
        "cuda": arguments.cuda,
        "contenders": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print("| ranks with torch | SIGKILL of a rank → first all-reduce, ms | of it, a rank's own |")
    print("|---|---|---|")
    for result in results:
        times = sorted(result["recovery_ms"])
        split = ", ".join(f"{name} {part:.2f} s" for name, part in result["split_s"].items())
        if result.get("path_ms"):
            ways = (f"{name} {part:.0f}" for name, part in result["path_ms"].items())
            split = f"{', '.join(ways)} ms; {split}"
        print(
            f"| {result['name']} | {statistics.median(times):.0f} "
            f"({times[0]:.0f}–{times[-1]:.0f}) | {split} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
