"""Jobs on Amazon ECS: how many calls to AWS they cost, as a share of an account's budget.

    python -m benchmarks.ecs [--jobs 100] [--nodes 8] [--minutes 2] [--recoveries 20]
                             [--output FILE]

The worker is worker.py and the server the real one, with its database in memory. AWS is
tests/doubles/aws in a separate process, whose tasks run nothing and for ever; no node is examined.
The benchmark counts the calls that arrive there: for the launch of all jobs, a minute in which
nothing happens, the recovery from a rank that ended with exit code 1, and a worker that takes
over; with a queue of events and without. It does not measure the speed of AWS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from temporalio.client import WorkflowHandle

from benchmarks.contenders import ROOT
from benchmarks.ecs_account import FAMILY, Account
from benchmarks.many import AT_ONCE, PATIENCE, cpu_seconds, each, server_for
from relaunch.backends.ecs.aws import MODIFIES, READS
from relaunch.cli.client import TASK_TIMEOUT
from relaunch.messages.jobs import JobResult, TrainingJobInput
from relaunch.spec.fleet import EcsOptions
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import resolve
from relaunch.temporal import connect
from relaunch.workflows.search_attributes import GENERATION, PHASE
from relaunch.workflows.training_job.workflow import TrainingJob

BUDGETS = {"reads": (20.0, 100), "modifies": (40.0, 100)}
"""Calls a second, and in a burst, that ECS allows an account in a region for its cluster resources
(Amazon ECS API Reference, request throttling)."""
FLEET = "training"
QUIET = 15.0
"""Seconds after a launch until the poll that follows it, and its answers, are over."""


@dataclass(frozen=True, slots=True)
class Window:
    """The calls to AWS during some time."""

    seconds: float
    calls: tuple[tuple[float, str], ...]

    def summarize(self, per: float = 1.0, unit: str = "") -> dict[str, object]:
        """Return counts, each divided by `per`, and how far the account's budgets were used."""
        by_operation = Counter(operation for _, operation in self.calls)
        counts = {
            kind: sum(by_operation[one] for one in operations) for kind, operations in KINDS.items()
        }
        return {
            "seconds": round(self.seconds, 1),
            **{f"{kind}{unit}": _rounded(count / per) for kind, count in counts.items()},
            f"calls{unit}": {
                one: _rounded(count / per) for one, count in sorted(by_operation.items())
            },
            "share_of_account": {
                kind: round(counts[kind] / self.seconds / BUDGETS[kind][0], 4) for kind in KINDS
            },
            "least_left_of_burst": {kind: round(self._least_left(kind)) for kind in KINDS},
        }

    def _least_left(self, kind: str) -> float:
        """How empty the account's bucket became; below zero, AWS would have refused."""
        rate, burst = BUDGETS[kind]
        left, before, least = float(burst), None, float(burst)
        for at, operation in self.calls:
            if operation not in KINDS[kind]:
                continue
            left = min(burst, left + rate * (at - (at if before is None else before))) - 1
            before, least = at, min(least, left)
        return least


KINDS = {"reads": {f"ecs.{one}" for one in READS}, "modifies": {f"ecs.{one}" for one in MODIFIES}}


class Bench:
    def __init__(self, account: Account, client: Any, jobs: int, nodes: int) -> None:
        self._account, self._client, self._jobs, self._nodes = account, client, jobs, nodes
        self._handles: dict[int, WorkflowHandle[TrainingJob, JobResult]] = {}

    async def measured(self, what: Any) -> Window:
        begun = time.monotonic()
        await what
        ended = time.monotonic()
        return self.between(begun, ended)

    def between(self, begun: float, ended: float) -> Window:
        return Window(
            ended - begun, tuple(one for one in self._account.calls() if begun <= one[0] < ended)
        )

    async def launch(self) -> None:
        policy = resolve({"no_progress_stop": "off"})

        async def one(number: int) -> None:
            given = {
                "name": f"j{number}",
                "command": ["train"],
                "nodes": self._nodes,
                "gpus_per_node": 8,
                "fleet": FLEET,
            }
            spec = JobSpec.model_validate(given)
            argument = TrainingJobInput(spec=spec, policy=policy)
            self._handles[number] = await self._client.start_workflow(
                TrainingJob.run,
                argument,
                id=f"job/{spec.name}",
                task_queue="relaunch",
                task_timeout=TASK_TIMEOUT,
            )
            await self.running(number, 1)

        await each(self._jobs, one)

    async def running(self, number: int, generation: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                known = (await self._handles[number].describe()).typed_search_attributes
                if known.get(PHASE) == "RUNNING" and (known.get(GENERATION) or 0) >= generation:
                    return
                await asyncio.sleep(0.2)

    async def generations(self) -> Counter[int]:
        """More than one, where nothing was ended, is a launch that did not hold."""
        found: Counter[int] = Counter()
        for handle in self._handles.values():
            found[(await handle.describe()).typed_search_attributes.get(GENERATION) or 0] += 1
        return found

    async def recover(self, numbers: Sequence[int]) -> list[Window]:
        """One job after the other loses a rank; what is asked until it runs again."""
        windows = []
        for number in numbers:
            begun = time.monotonic()
            self._account.end(f"j{number}")
            await self.running(number, 2)
            windows.append(self.between(begun, time.monotonic()))
        return windows


class Results(dict[str, Any]):
    """What was measured. Each value is also printed at once, so that an aborted run has output."""

    def __setitem__(self, name: str, value: Any) -> None:
        print(f"{name}: {json.dumps(value)}", file=sys.stderr, flush=True)
        super().__setitem__(name, value)


async def drive(
    account: Account,
    address: str,
    state: Path,
    jobs: int,
    nodes: int,
    minutes: float,
    recoveries: int,
) -> Results:
    client = await connect(state, address)
    bench = Bench(account, client, jobs, nodes)
    recoveries = min(recoveries, jobs // 2)
    results = Results(
        jobs=jobs,
        nodes_of_a_job=nodes,
        poll_s=EcsOptions().poll.total_seconds(),
        submitted_at_once=AT_ONCE,
        cores=os.cpu_count(),
    )
    with worker(address, state, account, queue=True) as process:
        launched = await bench.measured(bench.launch())
        busy = account.cpu_seconds(), cpu_seconds(process.pid)
        cores = dict(
            zip(
                ("cores_of_double", "cores_of_worker"),
                (round(one / launched.seconds, 2) for one in busy),
                strict=True,
            )
        )
        results["launch_of_all"] = launched.summarize() | cores
        results["launch_of_one"] = launched.summarize(jobs, "_of_a_job")
        account.drain()
        await asyncio.sleep(QUIET)
        results["generations_after_launch"] = {
            str(key): count for key, count in (await bench.generations()).items()
        }
        results["a_minute_with_queue"] = (
            steady := await bench.measured(asyncio.sleep(60 * minutes))
        ).summarize(minutes, "_a_minute")
        results["recovery_with_queue"] = recovery(await bench.recover(range(recoveries)), steady)
    with worker(address, state, account, queue=False):
        # This worker takes over each watch when the server misses its heartbeats; it has taken over
        # all of them when the only call left is the poll.
        results["another_worker_takes_over"] = (await bench.measured(asyncio.sleep(60))).summarize()
        results["a_minute_without_queue"] = (
            steady := await bench.measured(asyncio.sleep(60 * minutes))
        ).summarize(minutes, "_a_minute")
        results["recovery_without_queue"] = recovery(
            await bench.recover(range(recoveries, 2 * recoveries)), steady
        )
    return results


def recovery(windows: Sequence[Window], steady: Window) -> dict[str, object]:
    """What one recovery costs more than a quiet time of the same length."""
    calls = Counter(operation for window in windows for _, operation in window.calls)
    quiet = Counter(operation for _, operation in steady.calls)
    lasted = sum(window.seconds for window in windows)
    more = {one: count - quiet[one] * lasted / steady.seconds for one, count in calls.items()}
    rounded = {one: _rounded(count / len(windows)) for one, count in sorted(more.items())}
    return {
        "recoveries": len(windows),
        "median_s": round(statistics.median(window.seconds for window in windows), 1),
        "worst_s": round(max(window.seconds for window in windows), 1),
        **{
            kind: _rounded(sum(more.get(one, 0.0) for one in operations) / len(windows))
            for kind, operations in KINDS.items()
        },
        "calls": rounded,
    }


@contextmanager
def worker(
    address: str, state: Path, account: Account, queue: bool
) -> Iterator[subprocess.Popen[bytes]]:
    fleet = state / "fleet.yaml"
    nodes = [{"name": f"n{i}", "address": one, "gpus": 8} for i, one in enumerate(account.ids, 1)]
    ecs = {
        "cluster": account.cluster,
        "task_definition": FAMILY,
        "queue": account.queue if queue else None,
    }
    # JSON, which is YAML too.
    fleet.write_text(json.dumps({"name": FLEET, "backend": "ecs", "nodes": nodes, "ecs": ecs}))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RELAUNCH_", "TEMPORAL_", "AWS_"))
    }
    set_ = {
        "TEMPORAL_ADDRESS": address,
        "RELAUNCH_STATE": str(state),
        "RELAUNCH_FLEETS": str(fleet),
        "RELAUNCH_JOBS": "500",
    }
    with (state / "worker.log").open("ab") as log:
        words = [sys.executable, str(ROOT / "worker.py")]
        process = subprocess.Popen(
            words, cwd=state, env={**kept, **set_, **account.environment}, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def measure(jobs: int, nodes: int, minutes: float, recoveries: int) -> Results:
    with tempfile.TemporaryDirectory(prefix="relaunch-ecs-") as folder:
        state = Path(folder)
        with Account(jobs * nodes, state) as account, server_for(state) as server:
            try:
                return asyncio.run(
                    drive(account, server.address, state, jobs, nodes, minutes, recoveries)
                )
            except BaseException:
                print((state / "worker.log").read_text()[-4000:], file=sys.stderr)
                raise


def _rounded(number: float) -> float:
    return round(number, 1) if number < 100 else round(number)


def table(results: dict[str, Any]) -> Table:
    shown = Table(
        title=f"{results['jobs']} jobs of {results['nodes_of_a_job']} nodes on Amazon ECS, "
        "as calls to its double"
    )
    for column in (
        "",
        "seconds",
        "reads",
        "modifies",
        "reads' share",
        "modifies' share",
        "least left of 100",
    ):
        shown.add_column(column, justify="left" if not column else "right")
    for name, row in results.items():
        if not isinstance(row, dict) or not any(key.startswith("reads") for key in row):
            continue
        reads, modifies = (
            next(value for key, value in row.items() if key.startswith(kind)) for kind in KINDS
        )
        share, left = row.get("share_of_account"), row.get("least_left_of_burst")
        shares = (
            [f"{share[kind]:.1%} of {BUDGETS[kind][0]:g}/s" for kind in KINDS]
            if share
            else ["", ""]
        )
        lowest = f"{left['reads']}, {left['modifies']}" if left else ""
        shown.add_row(
            name.replace("_", " "),
            str(row.get("seconds", row.get("median_s"))),
            str(reads),
            str(modifies),
            *shares,
            lowest,
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=2.0, help="of quiet, each time")
    parser.add_argument(
        "--recoveries", type=int, default=20, help="with a queue, and as many without"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "ecs.json")
    arguments = parser.parse_args()
    results = measure(arguments.jobs, arguments.nodes, arguments.minutes, arguments.recoveries)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    Console(width=150).print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
