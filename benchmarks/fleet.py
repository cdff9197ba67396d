"""Many jobs of one fleet while nodes fail: how soon the fleet grants another node, at what cost.

    python -m benchmarks.fleet [--jobs 50] [--nodes 200] [--seconds 60] [--output FILE]

Every second a node that a job uses loses its power for a moment. The policy replaces it; the fleet
examines it and returns it to service. Nodes are simulated, the server is the real one with its
database in memory. The result has the time from a claim to its grant, the number of signals to the
fleet, failed workflow tasks, and how often two jobs had ranks on one node (which must be never).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle

from benchmarks.many import server_for
from relaunch.cli.client import TASK_TIMEOUT
from relaunch.config import Settings
from relaunch.messages.ids import FLEET_ID_PREFIX
from relaunch.messages.jobs import JobResult, TrainingJobInput
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import resolve
from relaunch.temporal import connect
from relaunch.worker import WorkerFleets, make_worker
from relaunch.workflows.search_attributes import PHASE
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.fakes.nodes import Script, SimulatedBackend

FLEET = "pool"
NODES_OF_A_JOB = 3
REPLACE = {"NODE_FAULT": [{"strategy": "REPLACE_NODE", "isolate": True, "spends": False}]}
PATIENCE = 300.0


def fleet(nodes: int) -> FleetSpec:
    named = [
        {"name": f"n{i}", "address": f"10.0.{i >> 8}.{i & 255}", "gpus": 8}
        for i in range(1, nodes + 1)
    ]
    limits = {"repairs_at_once": "50%", "nodes_out": "50%", "reboots_per_hour": 10_000}
    return FleetSpec.model_validate(
        {"name": FLEET, "backend": "simulated", "repairs": "act", "nodes": named, "limits": limits}
    )


async def submit(client: Client, number: int) -> WorkflowHandle[TrainingJob, JobResult]:
    spec = JobSpec.model_validate(
        {
            "name": f"j{number}",
            "command": ["train"],
            "nodes": NODES_OF_A_JOB,
            "gpus_per_node": 8,
            "fleet": FLEET,
        }
    )
    argument = TrainingJobInput(
        spec=spec, policy=resolve({"no_progress_stop": "off", "causes": REPLACE})
    )
    return await client.start_workflow(
        TrainingJob.run,
        argument,
        id=f"job/{spec.name}",
        task_queue="relaunch",
        task_timeout=TASK_TIMEOUT,
    )


async def running(job: WorkflowHandle[TrainingJob, JobResult]) -> None:
    async with asyncio.timeout(PATIENCE):
        while (  # noqa: ASYNC110 -- search attributes can only be polled
            await job.describe()
        ).typed_search_attributes.get(PHASE) != "RUNNING":
            await asyncio.sleep(0.5)


def living(backend: SimulatedBackend) -> list[str]:
    """Nodes with ranks that live."""
    alive: Counter[str] = Counter()
    for life in backend.lives:
        alive[life.node] += 1 if life.kind == "started" else -1
    return sorted(node for node, count in alive.items() if count > 0)


def shared_nodes(backend: SimulatedBackend) -> int:
    """How often ranks were started on a node while ranks of another job lived there."""
    alive: dict[str, Counter[str]] = {}
    found = 0
    for life in backend.lives:
        on = alive.setdefault(life.node, Counter())
        if life.kind == "started":
            found += any(count > 0 for job, count in on.items() if job != life.token.job)
            on[life.token.job] += 1
        else:
            on[life.token.job] -= 1
    return found


async def histories(client: Client, job: str) -> list[Any]:
    """All events of all runs of a workflow, oldest first."""
    events: list[Any] = []
    handle = client.get_workflow_handle(job)
    run_id = (await handle.describe()).raw_description.workflow_execution_info.first_run_id
    while run_id:
        history = await client.get_workflow_handle(job, run_id=run_id).fetch_history()
        events += history.events
        run_id = history.events[
            -1
        ].workflow_execution_continued_as_new_event_attributes.new_execution_run_id
    return events


def waits(events: list[Any]) -> list[float]:
    """Milliseconds from each time a job asked for nodes until it got the grant."""
    found, asked = [], {}
    for event in events:
        activity, signal = (
            event.activity_task_scheduled_event_attributes,
            event.workflow_execution_signaled_event_attributes,
        )
        if activity.activity_type.name == "tell_fleet":
            asked[json.loads(activity.input.payloads[0].data)["message"]["seq"]] = (
                event.event_time.ToDatetime()
            )
        elif signal.signal_name == "granted":
            grant = json.loads(signal.input.payloads[0].data)
            if grant["kind"] == "granted" and grant["seq"] in asked:
                found.append(
                    (event.event_time.ToDatetime() - asked[grant["seq"]])
                    / timedelta(milliseconds=1)
                )
    return found


async def measure(
    address: str, state: Path, jobs: int, nodes: int, seconds: int
) -> dict[str, object]:
    client = await connect(state, address)
    spec = fleet(nodes)
    backend = SimulatedBackend(spec, Script(then="run"))
    random_ = random.Random(1)
    async with make_worker(
        client, Settings(state=state, jobs=jobs), WorkerFleets({FLEET: spec}, {FLEET: backend})
    ):
        begun = time.monotonic()
        handles = [await submit(client, number) for number in range(jobs)]
        await asyncio.gather(*map(running, handles))
        started = time.monotonic() - begun
        for number in range(seconds):
            used = living(backend)
            if used:
                backend.lose_power(random_.choice(used))
            await asyncio.sleep(max(0.0, begun + started + number + 1 - time.monotonic()))
        await asyncio.gather(*map(running, handles))
        for handle in handles:
            await handle.signal("cancel")
        for handle in handles:
            await handle.result()
        told = await histories(client, f"{FLEET_ID_PREFIX}{FLEET}")
        of_jobs = [
            event for number in range(jobs) for event in [await histories(client, f"job/j{number}")]
        ]
    kinds = Counter(EventType.Name(event.event_type) for event in told)
    waited = sorted(wait for events in of_jobs for wait in waits(events))
    recoveries = sorted(wait for events in of_jobs for wait in waits(events)[1:])
    span = (told[-1].event_time.ToDatetime() - told[0].event_time.ToDatetime()) / timedelta(
        seconds=1
    )
    return {
        "jobs": jobs,
        "nodes": nodes,
        "faults": seconds,
        "all_running_after_s": round(started, 1),
        "grants": len(waited),
        "replacement_ms_median": round(statistics.median(recoveries), 1) if recoveries else None,
        "replacement_ms_worst": round(recoveries[-1], 1) if recoveries else None,
        "fleet_signals": kinds["EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED"],
        "fleet_events_per_s": round(len(told) / span, 1),
        "fleet_runs": kinds["EVENT_TYPE_WORKFLOW_EXECUTION_STARTED"],
        "workflow_tasks_failed": kinds["EVENT_TYPE_WORKFLOW_TASK_FAILED"],
        "workflow_tasks_timed_out": kinds["EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT"],
        "two_jobs_on_one_node": shared_nodes(backend),
    }


def measure_fleet(jobs: int, nodes: int, seconds: int) -> dict[str, object]:
    with (
        tempfile.TemporaryDirectory(prefix="relaunch-fleet-") as folder,
        server_for(Path(folder)) as server,
    ):
        return asyncio.run(measure(server.address, Path(folder), jobs, nodes, seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = measure_fleet(arguments.jobs, arguments.nodes, arguments.seconds)
    print(json.dumps(result, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
