"""Many jobs at once on one worker: the same fault hits all in the same moment, all must recover.

    python -m benchmarks.many [--jobs 200] [--on-disk] [--output FILE]

The server is the real one, with its database in memory: the worker is measured, not how often a
disk can be synced. With `--on-disk` it writes as under `up`. Nodes are simulated and of one fleet,
two for each job; one of each job reboots when the worker process gets SIGUSR1. The result has the
time until all jobs run and until all have recovered, failed workflow tasks (there should be none),
and the peak memory of worker and server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowHandle

from benchmarks.contenders import ROOT
from relaunch.cli.client import TASK_TIMEOUT
from relaunch.cli.service import (
    EMBEDDED_OPTIONS,
    HOST,
    ONE_PARTITION,
    SERVER_OPTIONS,
    SHARED_RUNTIME,
    choose_port,
    find_server,
)
from relaunch.config import Settings
from relaunch.messages.jobs import JobResult, TrainingJobInput
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import resolve
from relaunch.temporal import connect, ensure_namespace
from relaunch.worker import WorkerFleets, make_worker
from relaunch.workflows.search_attributes import PHASE
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.fakes.nodes import Progress, Script, SimulatedBackend

AT_ONCE = 50
"""Calls of this program in flight, and jobs on their way from submitted to running.

It is limited because this program shares the two cores with what it measures. A thousand jobs
submitted in one second do not work: the last of them waited for more than a lease between their
launch and their watch, were fenced, and started again.
"""
PATIENCE = 1200.0


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    pid: int


FLEET = "pool"


def fleet(jobs: int) -> FleetSpec:
    nodes = [
        {"name": f"n{i}", "address": f"10.0.{i >> 8}.{i & 255}", "gpus": 8}
        for i in range(1, 2 * jobs + 1)
    ]
    return FleetSpec.model_validate({"name": FLEET, "backend": "simulated", "nodes": nodes})


async def work(address: str, jobs: int, state: Path) -> None:
    """Be the worker, until SIGTERM. SIGUSR1 reboots a node of every job."""
    spec = fleet(jobs)
    script = Script(
        happenings=(
            Progress(generation=1, steps=((0.0, 1),), hangs=True),
            Progress(generation=2, steps=((0.0, 2),)),
        ),
        then="succeed",
    )
    backend = SimulatedBackend(spec, script)

    def reboot() -> None:
        for node in {
            life.token.job: life.node for life in backend.lives if life.kind == "started"
        }.values():
            backend.lose_power(node)

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, reboot)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    client = await connect(state, address)
    async with make_worker(
        client, Settings(state=state, jobs=2 * jobs), WorkerFleets({FLEET: spec}, {FLEET: backend})
    ):
        await ended.wait()


async def each(jobs: int, act: Callable[[int], Awaitable[None]]) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with room:
            await act(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(jobs):
            tasks.create_task(one(number))


async def running(job: WorkflowHandle[TrainingJob, JobResult]) -> None:
    async with asyncio.timeout(PATIENCE):
        while (  # noqa: ASYNC110 -- search attributes can only be polled
            await job.describe()
        ).typed_search_attributes.get(PHASE) != "RUNNING":
            await asyncio.sleep(1)


def peak_mib(pid: int) -> float:
    """The most memory a process ever had resident."""
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process; other load affects it less than wall time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def drive(
    address: str, jobs: int, worker: int, server: int, state: Path
) -> dict[str, object]:
    client = await connect(state, address)
    policy = resolve({"no_progress_stop": "off"})
    handles: list[WorkflowHandle[TrainingJob, JobResult]] = []

    async def start(number: int) -> None:
        spec = JobSpec.model_validate(
            {
                "name": f"j{number}",
                "command": ["train"],
                "nodes": 2,
                "gpus_per_node": 8,
                "fleet": FLEET,
            }
        )
        argument = TrainingJobInput(spec=spec, policy=policy)
        handle = await client.start_workflow(
            TrainingJob.run,
            argument,
            id=f"job/{spec.name}",
            task_queue="relaunch",
            task_timeout=TASK_TIMEOUT,
        )
        handles.append(handle)
        await running(handle)

    begun = time.monotonic()
    await each(jobs, start)
    launched = time.monotonic() - begun
    before, launched_cpu = peak_mib(worker), cpu_seconds(worker)
    begun = time.monotonic()
    os.kill(worker, signal.SIGUSR1)
    phases: Counter[str] = Counter()
    generations: Counter[int] = Counter()

    async def result(number: int) -> None:
        outcome = await handles[number].result()
        phases[outcome.phase] += 1
        generations[outcome.generation] += 1

    async with asyncio.timeout(PATIENCE):
        await each(jobs, result)
    recovered, recovered_cpu = time.monotonic() - begun, cpu_seconds(worker)
    failed: Counter[str] = Counter()

    async def look(number: int) -> None:
        async for event in handles[number].fetch_history_events():
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED:
                failed["failed"] += 1
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT:
                failed["timed out"] += 1

    await each(jobs, look)
    return {
        "jobs": jobs,
        "all_running_after_s": round(launched, 1),
        "all_recovered_after_s": round(recovered, 1),
        "phases": dict(phases),
        "generations": {str(key): count for key, count in generations.items()},
        "worker_cpu_s_running": round(launched_cpu, 1),
        "worker_cpu_s_recovering": round(recovered_cpu - launched_cpu, 1),
        "workflow_tasks_failed": failed["failed"],
        "workflow_tasks_timed_out": failed["timed out"],
        "worker_peak_mib_running": round(before),
        "worker_peak_mib": round(peak_mib(worker)),
        "server_peak_mib": round(peak_mib(server)),
    }


@contextmanager
def server_for(state: Path, database: Path | None = None) -> Iterator[Server]:
    """Run a separate server: that of `up`, or with its database in memory."""
    port, ui = choose_port("--port", 0), choose_port("--ui-port", 0)
    options = [
        word
        for pair in (*SERVER_OPTIONS, *EMBEDDED_OPTIONS, *ONE_PARTITION)
        if database or "--sqlite-pragma" not in pair
        for word in pair
    ]
    ports = ["--ip", HOST, "--port", str(port), "--ui-port", str(ui)]
    file = ["--db-filename", str(database)] if database else []
    command = [
        str(find_server()),
        "server",
        "start-dev",
        *ports,
        *file,
        "--log-level",
        "error",
        *options,
    ]
    with (state / "server.log").open("wb") as log:
        environment = {**SHARED_RUNTIME, **os.environ}
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        asyncio.run(_up(f"{HOST}:{port}", state))
        yield Server(f"{HOST}:{port}", server.pid)
    finally:
        server.kill()
        server.wait()


def measure_many(jobs: int, on_disk: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="relaunch-many-") as folder:
        state = Path(folder)
        with (
            server_for(state, state / "temporal.db" if on_disk else None) as server,
            (state / "worker.log").open("wb") as log,
        ):
            words = [
                sys.executable,
                "-m",
                "benchmarks.many",
                "--jobs",
                str(jobs),
                "--work",
                server.address,
                "--state",
                str(state),
            ]
            worker = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
            try:
                return asyncio.run(drive(server.address, jobs, worker.pid, server.pid, state))
            finally:
                worker.kill()
                worker.wait()


async def _up(address: str, state: Path) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                client = await connect(state, address)
                await ensure_namespace(client)
                # A server that has just started does not find its namespace for a moment.
                await client.count_workflows()
            except (
                Exception
            ) as error:  # any error of a server that is not up yet, until the timeout
                print(f"waiting for the server: {str(error)[:80]}", file=sys.stderr)
                await asyncio.sleep(0.5)
            else:
                return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument(
        "--on-disk",
        action="store_true",
        help="with the server's database in a file, synced as under `up`",
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        asyncio.run(work(arguments.work, arguments.jobs, arguments.state))
        return 0
    result = {
        "database": "file" if arguments.on_disk else "memory",
        **measure_many(arguments.jobs, arguments.on_disk),
    }
    print(json.dumps(result, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
