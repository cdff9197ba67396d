"""Jobs as a fleet sees them: workflows that keep what they receive and say what a test wants."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter
from temporalio import workflow
from temporalio.client import WorkflowHandle
from temporalio.worker import Worker

from relaunch.activities.launch import JobActivities, LaunchRanksInput, LaunchRanksOutput
from relaunch.generation import Token
from relaunch.job.state import Slot
from relaunch.messages.ids import WORKFLOW_ID_PREFIX
from relaunch.pool.messages import Claim, Grant, Place
from relaunch.pool.state import FleetState
from relaunch.spec.job import JobSpec
from relaunch.workflows.fleet.workflow import Fleet
from tests.activities.harness import environment
from tests.workflows.rig import PATIENCE, TASKS, Rig, policy, until_changed

GRANT: TypeAdapter[Grant] = TypeAdapter(Grant)


@workflow.defn(name="TrainingJob", sandboxed=False)
class StandIn:
    def __init__(self) -> None:
        self._messages: list[tuple[str, Any]] = []
        self._ended = False

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: self._ended)

    @workflow.signal
    def granted(self, message: Any) -> None:
        self._messages.append(("granted", message))

    @workflow.signal
    def nodes_offered(self, message: Any) -> None:
        self._messages.append(("nodes_offered", message))

    @workflow.signal
    def drain_node(self, message: Any) -> None:
        self._messages.append(("drain_node", message))

    @workflow.signal
    def claim_again(self, message: Any) -> None:
        self._messages.append(("claim_again", message))

    @workflow.signal
    def end(self) -> None:
        self._ended = True

    @workflow.query
    def messages(self) -> list[tuple[str, Any]]:
        return self._messages


@dataclass
class Claimant:
    rig: Rig
    name: str
    handle: WorkflowHandle[Any, Any]
    submission: int
    claimed: Claim = field(init=False)

    def __post_init__(self) -> None:
        self.claimed = Claim(self.name, self.submission, 0, 0)

    async def claim(self, nodes: int, **changes: Any) -> Claim:
        self.claimed = replace(self.claimed, nodes=nodes, seq=self.claimed.seq + 1, **changes)
        await self.rig.tell_fleet("claim", self.claimed)
        return self.claimed

    async def give_back(self) -> None:
        await self.claim(0, keep=(), holds=())

    async def messages(self) -> list[tuple[str, Any]]:
        return [(name, message) for name, message in await self.handle.query(StandIn.messages)]

    async def grants(self) -> list[Grant]:
        """Answers to what was claimed last, without the news while it waits."""
        grants = [
            GRANT.validate_python(message)
            for name, message in await self.messages()
            if name == "granted"
        ]
        return [
            grant for grant in grants if grant.seq == self.claimed.seq and grant.kind != "waiting"
        ]

    async def until_answered(self) -> Grant:
        await eventually(
            self.grants, f"an answer to job {self.name}, seq {self.claimed.seq}", self.rig
        )
        return (await self.grants())[-1]

    async def nodes(self) -> list[str]:
        """Wait for the grant."""
        grant = await self.until_answered()
        assert grant.kind == "granted", grant
        return [place.node for place in grant.places]

    async def until_told(self, name: str) -> Any:
        async def find() -> list[Any]:
            return [message for sent, message in await self.messages() if sent == name]

        await eventually(find, f"{name} sent to job {self.name}", self.rig)
        return (await find())[-1]

    async def launch(self, places: tuple[Place, ...]) -> None:
        """Have ranks of generation 1 live on them."""
        rig = self.rig
        spec = JobSpec.model_validate(
            {
                "name": self.name,
                "command": ["train"],
                "nodes": len(places),
                "nproc_per_node": 1,
                "fleet": rig.fleets.known.name,
            }
        )
        token = Token(rig.client.namespace, self.name, self.submission, 1)
        slots = tuple(Slot(place.node, place.address, 1, 1) for place in places)
        order = LaunchRanksInput(token, spec, slots, policy().timeouts, 8, False)
        output: LaunchRanksOutput = await environment().run(
            JobActivities(rig.fleets, None).launch_ranks, order
        )
        assert output.started_at is not None, output


@asynccontextmanager
async def claimants(rig: Rig) -> AsyncIterator[Callable[..., Any]]:
    """Gives a function that begins a job's stand-in. They end with the test.

    The fleet has begun before them: one that begins asks every job that runs what it holds, and
    waits for the answers.
    """
    await rig.tell_fleet("apply")
    await until_fleet(rig, lambda state: state.awaited_jobs == (), "that no job is waited for")
    queue = f"jobs-{uuid.uuid4().hex[:8]}"
    begun: list[WorkflowHandle[Any, Any]] = []

    async def begin(name: str = "") -> Claimant:
        name = name or f"j-{uuid.uuid4().hex[:8]}"
        memo = {"fleet": rig.fleets.known.name}
        handle = await rig.client.start_workflow(
            StandIn.run, id=f"{WORKFLOW_ID_PREFIX}{name}", task_queue=queue, memo=memo
        )
        begun.append(handle)
        return Claimant(
            rig, name, handle, int((await handle.describe()).start_time.timestamp() * 1000)
        )

    async with Worker(rig.client, task_queue=queue, workflows=[StandIn]):
        yield begin
        for handle in begun:
            if (await handle.describe()).close_time is None:
                await handle.terminate("the test is over")


async def fleet_state(rig: Rig) -> FleetState:
    return await rig.fleet.query(Fleet.state)


async def until_fleet(rig: Rig, holds: Callable[[FleetState], bool], what: str) -> FleetState:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        tasks = TASKS[rig.fleet.id]
        state = await fleet_state(rig)
        if holds(state):
            return state
        assert asyncio.get_running_loop().time() < deadline, f"never {what}: {state}"
        await until_changed(rig.fleet.id, tasks)


async def eventually(holds: Callable[[], Any], what: str, rig: Rig) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        tasks = TASKS[rig.fleet.id]
        if await holds():
            return
        assert asyncio.get_running_loop().time() < deadline, (
            f"never {what}: {await fleet_state(rig)}"
        )
        # What jobs get, the fleet has sent in one of its tasks.
        await until_changed(rig.fleet.id, tasks)
