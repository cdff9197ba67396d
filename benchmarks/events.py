"""How many history events one recovery costs, from the fault to the closed incident.

The nodes are simulated; there may be any number of them.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from benchmarks.contenders import ROOT
from relaunch.config import Settings
from relaunch.messages.jobs import TrainingJobInput
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import resolve
from relaunch.temporal import data_converter, ensure_namespace
from relaunch.worker import WorkerFleets, make_worker
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.fakes.nodes import Exit, Progress, Script, SimulatedBackend


@dataclass(frozen=True, slots=True)
class Recovery:
    nodes: int
    events: int
    bytes: int


async def measure_events(nodes: int, recoveries: int = 5) -> Recovery:
    """Return what one recovery of a job on `nodes` simulated nodes adds to its history."""
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(ROOT / ".venv/bin/temporal"),
        data_converter=data_converter(),
        dev_server_log_level="error",
    ) as environment:
        await ensure_namespace(environment.client)
        few = await _history(environment.client, nodes, recoveries)
        none = await _history(environment.client, nodes, 0)
    return Recovery(nodes, (few[0] - none[0]) // recoveries, (few[1] - none[1]) // recoveries)


async def _history(client: Client, nodes: int, recoveries: int) -> tuple[int, int]:
    """Events and bytes of a job that recovers so often and then succeeds."""
    named = [{"name": f"n{i}", "address": f"10.0.{i >> 8}.{i & 255}"} for i in range(1, nodes + 1)]
    fleet = FleetSpec.model_validate({"name": "default", "backend": "simulated", "nodes": named})
    faults = tuple(
        Exit(generation=g, node="n1", rank=0, exit_code=1, after=0.5)
        for g in range(1, recoveries + 1)
    )
    steps = tuple(
        Progress(generation=g, steps=((0.0, 10 * g), (0.1, 10 * g + 5)))
        for g in range(1, recoveries + 2)
    )
    script = Script(happenings=(*faults, *steps), then="succeed")
    backend = SimulatedBackend(fleet, script)
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-") as folder:
        async with make_worker(
            client,
            Settings(state=Path(folder)),
            WorkerFleets({"default": fleet}, {"default": backend}),
        ):
            spec = JobSpec.model_validate(
                {
                    "name": f"bench-{nodes}-{recoveries}",
                    "command": ["train"],
                    "nodes": nodes,
                    "nproc_per_node": 1,
                }
            )
            handle = await client.start_workflow(
                TrainingJob.run,
                TrainingJobInput(
                    spec=spec,
                    policy=resolve({"max_restarts": 1000, "timeouts": {"heartbeat": "1s"}}),
                ),
                id=f"job/{spec.name}",
                task_queue="relaunch",
                task_timeout=timedelta(seconds=10),
            )
            await asyncio.wait_for(handle.result(), 120)
            description = await handle.describe()
    await backend.close()
    return (
        description.history_length,
        description.raw_description.workflow_execution_info.history_size_bytes,
    )
