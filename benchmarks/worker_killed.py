"""How long a fault waits for a decision when the worker was killed before it.

    python -m benchmarks.worker_killed [--jobs 1 10] [--rounds 5] [--output FILE]

The server is that of `up --workers 0`, the workers are processes of this program, all jobs have one
rank on a node of this machine. In each round the worker that has all jobs is killed by SIGKILL,
then the rank of each job. Either another worker starts then, or one is there before. Measured is
the time until the server has the order to launch the next generation, by its history: from the
moment in which the other worker polls, or in which the rank is killed, whichever is later.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from temporalio.client import Client, WorkflowHandle

from benchmarks.contenders import ROOT, Start, alive, rank_command
from relaunch.cli.service import write_local_fleet
from relaunch.cli.submit import submit
from relaunch.messages.ids import TASK_QUEUE
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import resolve
from relaunch.temporal import connect, find_running_up

PATIENCE_S = 120.0
SETTLE_S = 3.0
"""Seconds between two rounds: the watches have had heartbeats since."""
BEFORE_FAULT_S = 0.3
"""Seconds between the death of a worker and that of the ranks."""
POLICY = {
    "max_restarts": 1000,
    "no_progress_stop": "off",
    "causes": {"UNKNOWN": [{"strategy": "RESTART_IN_PLACE"}]},
}
READY = "serves task queue"
"""What a worker logs when it polls."""
_NUMBERS = itertools.count(1)


class BenchWorker:
    """A worker with its log."""

    def __init__(self, state: Path) -> None:
        self.log = state / f"bench-worker-{next(_NUMBERS)}.log"
        fleet = state / "fleets" / "default.yaml"
        ours = {key: value for key, value in os.environ.items() if not key.startswith("TEMPORAL_")}
        ours |= {"RELAUNCH_STATE": str(state), "RELAUNCH_FLEETS": str(fleet)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "worker.py"), "--near"],
                env=ours,
                stdout=log,
                stderr=log,
            )

    async def wait_until_it_polls(self) -> float:
        """Return when it did, or within 5 ms after, by the clock of the server's histories."""
        while READY not in self.log.read_text():
            if self.process.poll() is not None:
                raise RuntimeError(f"the worker ended: {self.log.read_text()}")
            await asyncio.sleep(0.005)
        return time.time()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


async def find_order(job: WorkflowHandle[object, object], after: float) -> float | None:
    """Return when the first launch after a moment was ordered; None: it was not."""
    async for event in job.fetch_history_events():
        at = event.event_time.ToDatetime(UTC).timestamp()
        ordered = event.activity_task_scheduled_event_attributes
        if at >= after and ordered.activity_type.name == "launch_ranks":
            return at
    return None


def newest_ranks(starts: Path, count: int) -> dict[str, int] | None:
    """Return the pid of each job's rank, by the file it reports to; None: not all run."""
    found = {}
    for path in starts.glob("*"):
        lines = path.read_text().splitlines()
        if lines:
            start = max((Start(*map(int, line.split())) for line in lines), key=lambda one: one.at)
            if alive(start.pid):
                found[path.name] = start.pid
    return found if len(found) == count else None


async def wait_for_ranks(starts: Path, count: int) -> dict[str, int]:
    async with asyncio.timeout(PATIENCE_S):
        while (found := newest_ranks(starts, count)) is None:  # noqa: ASYNC110 -- only polled
            await asyncio.sleep(0.05)
    return found


async def measure(state: Path, jobs: int, rounds: int, beside: bool) -> dict[str, object]:
    up = find_running_up(state)
    assert up is not None
    client: Client = await connect(state, up.address)
    starts = state / f"starts-{jobs}-{beside}"
    starts.mkdir()
    worker = BenchWorker(state)
    await worker.wait_until_it_polls()
    handles = {}
    for number in range(jobs):
        name = f"killed-{jobs}-{'beside' if beside else 'after'}-{number}"
        spec = JobSpec.model_validate(
            {
                "name": name,
                "command": list(rank_command()),
                "nodes": 1,
                "workdir": str(state),
                "env": {"BENCH_STARTS": str(starts / name)},
            }
        )
        handles[name] = await submit(client, TASK_QUEUE, spec, resolve(POLICY), has_fleet=True)
    waits: list[float] = []
    try:
        for _ in range(rounds):
            ranks = await wait_for_ranks(starts, jobs)
            other = BenchWorker(state) if beside else None
            if other is not None:
                await other.wait_until_it_polls()
            await asyncio.sleep(SETTLE_S)
            # As `relaunch jobs` does. Then the server has just seen the worker ask for tasks of
            # the jobs that it knows, and keeps those to come for it.
            await asyncio.gather(*(one.query("__stack_trace") for one in handles.values()))
            worker.kill()
            await asyncio.sleep(BEFORE_FAULT_S)
            begun = killed = time.time()
            for pid in ranks.values():
                os.kill(pid, signal.SIGKILL)
            if other is None:
                other = BenchWorker(state)
                begun = await other.wait_until_it_polls()
            worker = other
            for handle in handles.values():
                async with asyncio.timeout(PATIENCE_S):
                    while (at := await find_order(handle, killed)) is None:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                waits.append(at - begun)
            print(f"{jobs} jobs, {beside=}: {waits[-1]:.2f} s", file=sys.stderr, flush=True)
    finally:
        for handle in handles.values():
            await handle.cancel()
        for handle in handles.values():
            await asyncio.wait([asyncio.ensure_future(handle.result())], timeout=PATIENCE_S)
        worker.kill()
    return {
        "jobs": jobs,
        "other_worker": "runs already" if beside else "starts after",
        "median_s": round(statistics.median(waits), 2),
        "worst_s": round(max(waits), 2),
        "waits_s": [round(wait, 2) for wait in waits],
        "load": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, nargs="*", default=[1, 10])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="relaunch-killed-") as folder:
        state = Path(folder) / "state"
        state.mkdir()
        fleet = write_local_fleet(state, max(arguments.jobs))
        command = [sys.executable, str(ROOT / "starter.py"), "up", "--workers", "0", "--port", "0"]
        command += ["--state", str(state), "--ui-port", "0", "--fleet", str(fleet)]
        with (state / "up.log").open("wb") as log:
            up = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while find_running_up(state) is None:
                time.sleep(0.05)
            for jobs, beside in itertools.product(arguments.jobs, (False, True)):
                row = asyncio.run(measure(state, jobs, arguments.rounds, beside))
                print(json.dumps(row), flush=True)
                rows.append(row)
        finally:
            up.terminate()
            up.wait()
    if arguments.output:
        report = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
