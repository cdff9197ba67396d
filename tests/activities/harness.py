"""Activities without a server, over simulated nodes; answers to heartbeats are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from relaunch.activities.launch import JobActivities, LaunchRanksInput
from relaunch.activities.reports import WatchRanksInput, WatchReport
from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.watch import WatchActivities
from relaunch.generation import Token
from relaunch.job.state import Slot
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import HangLimits, Timeouts
from tests.fakes.nodes import Script, SimulatedBackend
from tests.workflows.rig import SimulatedFleets, fleet, policy

TOKEN = Token("default", "llama", 1000, 1)
PATIENCE = 240.0
"""Seconds. A watch allows a multiple of the longest step that it saw, and on a machine that stood
still for some seconds that is minutes."""


@dataclass
class FakeServer:
    """Acknowledges heartbeats, or answers what a test puts into `fails`."""

    beats: list[Any] = field(default_factory=list)
    fails: Exception | None = None
    refused: int = 0

    def get_async_activity_handle(self, *, task_token: bytes) -> FakeServer:
        return self

    async def heartbeat(self, *details: Any, rpc_timeout: timedelta | None = None) -> None:
        if self.fails is not None:
            self.refused += 1
            raise self.fails
        self.beats.append(details)


@dataclass
class Stand:
    backend: SimulatedBackend
    fleets: SimulatedFleets
    server: FakeServer
    spec: JobSpec
    timeouts: Timeouts

    @property
    def jobs(self) -> JobActivities:
        return JobActivities(self.fleets, cast(Client, self.server))

    def launch_input(self, **changes: Any) -> LaunchRanksInput:
        slots = tuple(
            Slot(node.name, node.address, 1, 1)
            for node in self.fleets.known.nodes[: self.spec.node_count]
        )
        return replace(LaunchRanksInput(TOKEN, self.spec, slots, self.timeouts, 8, True), **changes)

    async def launch(self, attempt: int = 1, **changes: Any) -> Any:
        return await environment(attempt=attempt).run(
            self.jobs.launch_ranks, self.launch_input(**changes)
        )

    def watch_input(self, **changes: Any) -> WatchRanksInput:
        nodes = tuple(node.name for node in self.fleets.known.nodes[: self.spec.node_count])
        hang = HangLimits(after="off")
        given = WatchRanksInput(
            TOKEN,
            "default",
            nodes,
            self.spec.processes_per_node,
            datetime.now(UTC),
            self.timeouts,
            hang,
        )
        return replace(given, **changes)

    async def watch(
        self, running: ActivityEnvironment | None = None, **changes: Any
    ) -> WatchReport:
        unrecorded = RunningWatches(Path("not opened"))
        activities = WatchActivities(self.fleets, cast(Client, self.server), unrecorded)
        watching = (running or environment()).run(
            activities.watch_ranks, self.watch_input(**changes)
        )
        return cast(WatchReport, await asyncio.wait_for(watching, PATIENCE))

    def renewals(self) -> int:
        return sum(call.command == "renew" for call in self.backend.calls)


def stand(
    script: Script | None = None,
    *,
    nodes: int = 2,
    ranks: int = 2,
    spares: int = 0,
    timeouts: dict[str, str] | None = None,
    launcher: str = "none",
) -> Stand:
    spec = fleet(nodes, spares)
    backend = SimulatedBackend(spec, script)
    job = JobSpec.model_validate(
        {
            "name": "llama",
            "command": ["train"],
            "nodes": nodes,
            "nproc_per_node": ranks,
            "launcher": launcher,
        }
    )
    return Stand(
        backend, SimulatedFleets(spec, backend), FakeServer(), job, policy(timeouts).timeouts
    )


def environment(attempt: int = 1, details: tuple[Any, ...] = ()) -> ActivityEnvironment:
    made = ActivityEnvironment()
    made.info = replace(made.info, attempt=attempt, heartbeat_details=details)
    return made


async def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"never {what}"
        await asyncio.sleep(0.01)


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)
