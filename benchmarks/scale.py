"""One service under more and more jobs, and one fleet with more and more nodes.

    python -m benchmarks.scale [--jobs 100 300 1000] [--idle-nodes 1000 10000] [--output FILE]

The server is the real one with its database in a file, synced as under `up`; one real worker; nodes
are simulated, two for each job, within the worker's process, so its figures include them. For each
number of jobs: how long until all run; what server and worker use while nothing happens; twenty
faults of one job each, one after the other (a node loses its power for a moment), from the fault to
the end of the launch that follows; then one fault of each job at once; then how often a workflow
task timed out, and how long the longest history and the largest payload became. Where no further
job begins to run for ten minutes, it gives up and says what jobs wait for. This program shares the
cores with what it measures. With `--output`, rows that are in the file already are not measured
again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import EventType, TaskQueueType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client, WorkflowHandle

from benchmarks.contenders import ROOT
from benchmarks.many import cpu_seconds, peak_mib, server_for
from relaunch.cli.client import TASK_TIMEOUT
from relaunch.config import Settings
from relaunch.messages.fleets import FleetInput
from relaunch.messages.ids import FLEET_ID_PREFIX, TASK_QUEUE
from relaunch.messages.jobs import TrainingJobInput
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import resolve
from relaunch.temporal import connect
from relaunch.worker import WorkerFleets, make_worker
from relaunch.workflows.fleet.workflow import Fleet
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.fakes.nodes import Script, SimulatedBackend

FLEET = "pool"
STARTING = 50
"""Jobs on their way from submitted to running. Together they need longer than one, so none is
waited for by itself."""
QUIET_S = 40.0
"""Seconds over which the use of processors is measured while nothing happens: more than the longest
pause between two heartbeats, and most of that between two sweeps of the fleet."""
SINGLE_FAULTS = 20
PATIENCE = 3600.0
NEWS_TIMEOUT = 600.0
"""Seconds without one more job that runs, after which this gives up and says what jobs wait for."""


def fleet(nodes: int) -> FleetSpec:
    named = [
        {"name": f"n{i}", "address": f"10.{i >> 16}.{(i >> 8) & 255}.{i & 255}", "gpus": 8}
        for i in range(1, nodes + 1)
    ]
    return FleetSpec.model_validate({"name": FLEET, "backend": "simulated", "nodes": named})


# --- the worker, a separate process


async def work(address: str, nodes: int, jobs: int, state: Path) -> None:
    """Be the worker. A line on standard input names a job whose node loses its power; the moment is
    printed."""
    # The SDK's log goes to standard output. It is a pipe that is read only
    # for answers: once it was full, the SDK's threads waited for it, and the worker stood still.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = fleet(nodes)
    backend = SimulatedBackend(spec, Script(then="run"))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    client = await connect(state, address)
    fleets = WorkerFleets({FLEET: spec}, {FLEET: backend})
    settings = Settings(state=state, jobs=jobs + 10)
    async with make_worker(client, settings, fleets, is_near=True):
        print("ready", file=answers, flush=True)
        while line := (await reader.readline()).decode().strip():
            used = {life.token.job: life.node for life in backend.lives if life.kind == "started"}
            for job in used if line == "all" else [line]:
                backend.lose_power(used[job])
            print(datetime.now(UTC).timestamp(), file=answers, flush=True)


@dataclass(frozen=True, slots=True)
class Service:
    client: Client
    server: int
    worker: subprocess.Popen[str]

    def break_node(self, job: str) -> float:
        """Have a node of a job lose its power; return the time."""
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        self.worker.stdin.write(job + "\n")
        self.worker.stdin.flush()
        return float(self.worker.stdout.readline())

    def cpu_seconds(self) -> tuple[float, float]:
        return cpu_seconds(self.server), cpu_seconds(self.worker.pid)


@contextmanager
def start_service(nodes: int, jobs: int, state: Path) -> Iterator[tuple[str, int, Any]]:
    with (
        server_for(state, state / "temporal.db") as server,
        (state / "worker.log").open("wb") as log,
    ):
        words = [sys.executable, "-m", "benchmarks.scale", "--work", server.address]
        words += ["--state", str(state), "--size", f"{nodes},{jobs}"]
        worker = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n", (state / "worker.log").read_text()
            yield server.address, server.pid, worker
        finally:
            worker.kill()
            worker.wait()


# --- jobs


async def count_running(client: Client, generation: int) -> int:
    query = f"WorkflowType = 'TrainingJob' AND Phase = 'RUNNING' AND Generation >= {generation}"
    return (await client.count_workflows(query)).count


class StallError(Exception):
    """No more jobs have begun to run for long; its message says what they wait for."""


class Watchdog:
    """Gives up when a number has not grown for `NEWS_TIMEOUT`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._most = -1
        self._at = time.monotonic()

    async def note(self, running: int) -> None:
        """Raises:
        StallError: The number has not grown for too long.
        """
        now = time.monotonic()
        if running > self._most:
            self._most, self._at = running, now
        elif now - self._at > NEWS_TIMEOUT:
            found = await describe_waiting(self._client)
            raise StallError(f"{running} jobs for {NEWS_TIMEOUT:g} s, and no more:\n{found}")


async def describe_waiting(client: Client) -> str:
    """Return what jobs wait for, and whether fleet, worker and server still do anything."""
    phases: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    attempts: Counter[str] = Counter()
    async for job in client.list_workflows("WorkflowType = 'TrainingJob'"):
        memo = await job.memo()
        phases[str(memo.get("phase"))] += 1
        if memo.get("phase") != "RUNNING":
            reasons[re.sub(r"\d+", "#", f"{memo.get('reason')}; next: {memo.get('next')}")] += 1
        described = (await client.get_workflow_handle(job.id).describe()).raw_description
        for pending in described.pending_activities:
            attempts[f"{pending.activity_type.name}, attempt {pending.attempt}"] += 1
    lines = [f"load: {' '.join(f'{load:.1f}' for load in os.getloadavg())}"]
    for title, counts in (("phases", phases), ("wait", reasons), ("activities", attempts)):
        lines += [f"{title}: {count} × {what}" for what, count in counts.most_common(8)]
    task = (
        await client.get_workflow_handle(f"{FLEET_ID_PREFIX}{FLEET}").describe()
    ).raw_description.pending_workflow_task
    if task.state:
        since = task.scheduled_time.ToDatetime(UTC)
        lines.append(f"the fleet's workflow task: attempt {task.attempt}, waits since {since}")
    for kind in (TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY):
        queue = await client.workflow_service.describe_task_queue(
            DescribeTaskQueueRequest(
                namespace=client.namespace,
                task_queue=TaskQueue(name=TASK_QUEUE),
                task_queue_type=kind,
                report_stats=True,
            )
        )
        polls = [poller.last_access_time.ToDatetime(UTC) for poller in queue.pollers]
        lines.append(
            f"{TaskQueueType.Name(kind)}: backlog {queue.stats.approximate_backlog_count}, last"
            f" poll {max(polls, default=None)}, now {datetime.now(UTC)}"
        )
    return "\n".join(lines)


async def submit_all(client: Client, jobs: int) -> None:
    policy = resolve({"no_progress_stop": "off"})

    async def submit(number: int) -> None:
        spec = JobSpec.model_validate(
            {"name": f"j{number}", "command": ["train"], "nodes": 2, "gpus_per_node": 8}
            | {"fleet": FLEET}
        )
        await client.start_workflow(
            TrainingJob.run,
            TrainingJobInput(spec=spec, policy=policy),
            id=f"job/{spec.name}",
            task_queue=TASK_QUEUE,
            task_timeout=TASK_TIMEOUT,
        )

    started = 0
    watchdog = Watchdog(client)
    async with asyncio.timeout(PATIENCE):
        while (running := await count_running(client, 1)) < jobs:
            await watchdog.note(running)
            more = min(jobs - started, STARTING - (started - running))
            await asyncio.gather(*(submit(started + number) for number in range(more)))
            started += max(0, more)
            await asyncio.sleep(0.25)


async def find_launch_end(job: WorkflowHandle[Any, Any], after: float) -> float | None:
    """Return when the first launch that began after a moment had ended; None: it has not."""
    scheduled = None
    async for event in job.fetch_history_events():
        if event.event_time.ToDatetime(UTC).timestamp() < after:
            continue
        attributes = event.activity_task_scheduled_event_attributes
        if attributes.activity_type.name == "launch_ranks":
            scheduled = event.event_id
        completed = event.activity_task_completed_event_attributes
        if scheduled is not None and completed.scheduled_event_id == scheduled:
            return event.event_time.ToDatetime(UTC).timestamp()
    return None


async def break_one(service: Service, number: int) -> float:
    """Break a node of one job; return the seconds until its ranks are launched again."""
    job = service.client.get_workflow_handle(f"job/j{number}")
    at = service.break_node(f"j{number}")
    async with asyncio.timeout(PATIENCE):
        while (ended := await find_launch_end(job, at)) is None:  # noqa: ASYNC110 -- only polled
            await asyncio.sleep(0.1)
    return ended - at


async def histories(client: Client, id_: str) -> list[list[HistoryEvent]]:
    """Return the events of each run of a workflow."""
    found = []
    runs = [run async for run in client.list_workflows(f"WorkflowId = '{id_}'")]
    for run in runs:
        handle = client.get_workflow_handle(id_, run_id=run.run_id)
        found.append([event async for event in handle.fetch_history_events()])
    return found


async def look_back(client: Client, jobs: int) -> dict[str, object]:
    counts: Counter[int] = Counter()
    longest, largest = 0, 0
    for id_ in [f"{FLEET_ID_PREFIX}{FLEET}", *(f"job/j{number}" for number in range(jobs))]:
        for events in await histories(client, id_):
            longest = max(longest, len(events))
            largest = max(largest, *(event.ByteSize() for event in events))
            counts.update(event.event_type for event in events)
    return {
        "workflow_tasks_failed": counts[EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED],
        "workflow_tasks_timed_out": counts[EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT],
        "longest_history": longest,
        "largest_event_kib": round(largest / 1024),
    }


@contextmanager
def measure_span(service: Service, row: dict[str, object], name: str) -> Iterator[None]:
    """Add to a row how long something takes, the processor time for it, and the load after it."""
    begun, before = time.monotonic(), service.cpu_seconds()
    yield
    row[f"{name}_s"] = round(time.monotonic() - begun, 1)
    used = zip(("server", "worker"), before, service.cpu_seconds(), strict=True)
    row |= {f"{name}_{of}_cpu_s": round(now - was, 1) for of, was, now in used}
    row[f"{name}_load"] = round(os.getloadavg()[0], 1)


async def measure_jobs(service: Service, jobs: int) -> dict[str, object]:
    client = service.client
    row: dict[str, object] = {"jobs": jobs}
    with measure_span(service, row, "all_run"):
        await submit_all(client, jobs)
    await asyncio.sleep(15)
    before = service.cpu_seconds()
    await asyncio.sleep(QUIET_S)
    after = service.cpu_seconds()
    for name, was, now in zip(("server", "worker"), before, after, strict=True):
        row[f"quiet_{name}_core_percent"] = round(100 * (now - was) / QUIET_S, 1)
    step = max(1, jobs // SINGLE_FAULTS)
    broken = list(range(0, jobs, step))[:SINGLE_FAULTS]
    times = sorted([await break_one(service, number) for number in broken])
    row["one_fault_p50_s"] = round(statistics.median(times), 2)
    row["one_fault_worst_s"] = round(times[-1], 2)
    with measure_span(service, row, "all_recovered"):
        service.break_node("all")
        async with asyncio.timeout(PATIENCE):
            for generation, count in ((2, jobs), (3, len(broken))):
                watchdog = Watchdog(client)
                while (running := await count_running(client, generation)) < count:
                    await watchdog.note(running)
                    await asyncio.sleep(0.5)
    row["server_peak_mib"] = round(peak_mib(service.server))
    row["worker_peak_mib"] = round(peak_mib(service.worker.pid))
    for name, seconds in zip(("server", "worker"), service.cpu_seconds(), strict=True):
        row[f"{name}_cpu_s"] = round(seconds, 1)
    return row | await look_back(client, jobs)


# --- nodes


async def measure_nodes(service: Service, nodes: int) -> dict[str, object]:
    client = service.client
    begun = time.monotonic()
    handle = await client.start_workflow(
        Fleet.run, FleetInput(FLEET), id=f"{FLEET_ID_PREFIX}{FLEET}", task_queue=TASK_QUEUE
    )
    async with asyncio.timeout(PATIENCE):
        while not (await handle.query(Fleet.state)).is_probed:  # noqa: ASYNC110 -- only polled
            await asyncio.sleep(0.5)
    row: dict[str, object] = {"idle_nodes": nodes, "probed_s": round(time.monotonic() - begun, 1)}
    before = service.cpu_seconds()
    await asyncio.sleep(150)
    after = service.cpu_seconds()
    for name, was, now in zip(("server", "worker"), before, after, strict=True):
        row[f"quiet_{name}_core_percent"] = round(100 * (now - was) / 150, 1)
    row["worker_peak_mib"] = round(peak_mib(service.worker.pid))
    return row | await look_back(client, 0)


def measure(nodes: int, jobs: int) -> dict[str, object]:
    async def run(address: str, server: int, worker: subprocess.Popen[str]) -> dict[str, object]:
        service = Service(await connect(Path(folder), address), server, worker)
        row = await (measure_jobs(service, jobs) if jobs else measure_nodes(service, nodes))
        files = sum(path.stat().st_size for path in Path(folder).glob("temporal.db*"))
        return row | {"database_mib": round(files / 2**20, 1)}

    with (
        tempfile.TemporaryDirectory(prefix="relaunch-scale-") as folder,
        start_service(nodes, jobs, Path(folder)) as started,
    ):
        return asyncio.run(run(*started))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, nargs="*", default=[10, 100, 300, 1000])
    parser.add_argument("--idle-nodes", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        nodes, jobs = map(int, arguments.size.split(","))
        asyncio.run(work(arguments.work, nodes, jobs, arguments.state))
        return 0
    output: Path | None = arguments.output
    rows = json.loads(output.read_text()) if output and output.exists() else []
    sizes = [(2 * jobs, jobs) for jobs in arguments.jobs]
    sizes += [(nodes, 0) for nodes in arguments.idle_nodes]
    for nodes, jobs in sizes:
        if any(
            (row.get("jobs"), row.get("idle_nodes")) == (jobs or None, None if jobs else nodes)
            for row in rows
        ):
            continue
        rows.append(measure(nodes, jobs))
        print(json.dumps(rows[-1]), flush=True)
        if output:
            output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
