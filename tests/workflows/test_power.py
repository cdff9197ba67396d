"""Power cycles of local nodes, whose processes and power switch are real.

They happen once, with leave, and proven, or it is said why not.
"""

from __future__ import annotations

import asyncio
import errno
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import relaunch.repair.conditions
import relaunch.repair.machine
from relaunch.activities.examine import NodeActivities
from relaunch.backends import local_power
from relaunch.backends.local import LocalBackend, cut, heal
from relaunch.evidence.findings import Verdict
from relaunch.messages.jobs import NodeRepairInput, NodeRepairResult
from relaunch.repair.state import RepairState, Stage
from relaunch.spec.fleet import FleetNode, FleetSpec, Power
from relaunch.spec.policy import Strategy
from relaunch.workflows.node_repair.workflow import NodeRepair
from tests.workflows.rig import replay
from tests.workflows.test_escalation import Told, allows

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATIENCE = 180.0
SOON = timedelta(seconds=2)


@dataclass
class OneNode:
    known: FleetSpec
    local: LocalBackend

    def spec(self, fleet: str) -> FleetSpec:
        if fleet != self.known.name:
            raise KeyError(f"fleet {fleet!r} is not known to this worker")
        return self.known

    def backend(self, fleet: str) -> LocalBackend:
        self.spec(fleet)
        return self.local


@dataclass
class World:
    client: Client
    queue: str
    fleet: str
    state: Path
    backend: LocalBackend
    told: Told
    repairs: list[WorkflowHandle[Any, NodeRepairResult]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.backend.folder("n1")

    @property
    def cycles(self) -> int:
        """How often the power command was run."""
        ran = self.state / "ran"
        return len(ran.read_text().splitlines()) if ran.exists() else 0

    @property
    def permit_requests(self) -> list[tuple[str, bool]]:
        """What the fleet was asked for: its step, and whether it is by power."""
        return [
            (message["step"], message["power"])
            for signal_, message in self.told.messages
            if signal_ == "repair_wanted"
        ]

    async def order(
        self, strategy: Strategy | None = Strategy.REBOOT_NODE, **changes: Any
    ) -> WorkflowHandle[Any, NodeRepairResult]:
        values = {
            "fleet": self.fleet,
            "node": "n1",
            "strategy": strategy,
            "reason": "it hangs",
            "by": "ada",
            "deadline": datetime.now(UTC) + timedelta(minutes=5),
            "level": 0,
            **changes,
        }
        handle: WorkflowHandle[Any, NodeRepairResult] = await self.client.start_workflow(
            "NodeRepair",
            NodeRepairInput(**values),
            id=f"repair/{self.fleet}/n1",
            task_queue=self.queue,
            result_type=NodeRepairResult,
            task_timeout=timedelta(seconds=2),
        )
        self.repairs.append(handle)
        return handle

    async def ended(
        self, strategy: Strategy | None = Strategy.REBOOT_NODE, **changes: Any
    ) -> NodeRepairResult:
        return await asyncio.wait_for((await self.order(strategy, **changes)).result(), PATIENCE)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not holds():
            assert asyncio.get_running_loop().time() < deadline, f"never: {what}"
            await asyncio.sleep(0.05)

    async def until_state(
        self,
        repair: WorkflowHandle[Any, NodeRepairResult],
        holds: Callable[[RepairState], bool],
        what: str,
    ) -> RepairState:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            state = await repair.query(NodeRepair.state)
            if state is not None and holds(state):
                return state
            assert asyncio.get_running_loop().time() < deadline, f"never: {what}: {state}"
            await asyncio.sleep(0.1)

    async def boot(self) -> str:
        return str((await self.backend.probe("n1", 20.0, None))["boot_id"])


def switch(state: Path, folder: Path, *before: str) -> tuple[str, ...]:
    """A power command as people have them: a script.

    It writes down that it ran, and then cuts the power and gives it back.
    """
    words = " ".join(f"'{word}'" for word in local_power.command(folder))
    lines = "\n".join((f"echo $$ >> '{state / 'ran'}'", *before, f"exec {words}"))
    return ("/bin/sh", "-c", lines, "--password", "hunter2")


@asynccontextmanager
async def made(
    client: Client,
    state: Path,
    agent: Path,
    *,
    power: Callable[[Path, Path], tuple[str, ...]] | None = switch,
    reboots: list[str] | None = None,
    answers: Callable[[dict[str, Any]], Awaitable[bool | None]] = allows,
    repairs: str = "act",
) -> AsyncIterator[World]:
    """A node without GPUs, its worker, and a stand-in for its fleet.

    Leaving it replays each history.
    """
    name = f"f-{uuid.uuid4().hex[:8]}"
    folder = state / "nodes" / "n1"
    given = None if power is None else Power(cycle=power(state, folder))
    node = FleetNode(name="n1", address="127.0.0.1", power=given)
    spec = FleetSpec.model_validate(
        {"name": name, "backend": "local", "repairs": repairs, "nodes": [node]}
    )
    backend, kept = LocalBackend(spec, state, agent, answer_within=10.0), local_power.command
    if reboots is not None:
        local_power.command = lambda folder: reboots
    one = World(
        client, f"q-{uuid.uuid4().hex[:8]}", name, state, backend, Told(client, name, answers)
    )
    try:
        await one.boot()
        nodes = NodeActivities(OneNode(spec, backend))
        async with Worker(
            client,
            task_queue=one.queue,
            workflows=[NodeRepair],
            activities=[
                nodes.read_terms,
                nodes.check_nodes,
                nodes.order_repair,
                one.told.tell_fleet,
                one.told.tell_people,
            ],
            workflow_runner=UnsandboxedWorkflowRunner(),  # as the real worker does
            debug_mode=True,  # without a limit of 2 s for a task
            max_cached_workflows=0,
            max_heartbeat_throttle_interval=timedelta(milliseconds=100),
            graceful_shutdown_timeout=timedelta(seconds=5),
        ):
            yield one
            for repair in one.repairs:
                await replay(await repair.fetch_history())
    finally:
        local_power.command = kept
        heal(folder)
        await backend.close()
        local_power.reboot(folder)


@pytest.mark.long
async def test_a_persons_power_cycle_is_proven_and_the_node_examined(
    server: Client, tmp_path: Path, agent: Path
) -> None:
    async with made(server, tmp_path, agent) as world:
        before = await world.boot()
        ended = await world.ended(power=True, approved_by="ada")
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY)
        assert "power-cycled" in ended.reason
        assert await world.boot() != before
        assert (world.cycles, world.permit_requests) == (1, [("reboot", True)])
        history = str((await world.repairs[0].fetch_history()).to_json())
        assert "hunter2" not in history, "what the command is given may be a password"


async def test_a_node_that_cannot_reboot_has_its_power_cycled(
    server: Client, tmp_path: Path, agent: Path
) -> None:
    async with made(server, tmp_path, agent, reboots=["false"]) as world:
        ended = await world.ended()
        assert (ended.outcome, ended.verdict, world.cycles) == ("done", Verdict.HEALTHY, 1), ended
        assert world.permit_requests == [("reboot", False), ("reboot", True)]


@pytest.mark.long
async def test_a_silent_node_is_power_cycled_only_if_its_fleet_agrees(
    server: Client, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaunch.repair.conditions, "SILENCE_TIMEOUT", SOON)
    seen: list[dict[str, Any]] = []

    async def once(request: dict[str, Any]) -> bool | None:
        seen.append(request)
        return len(seen) > 1

    def heals(state: Path, folder: Path) -> tuple[str, ...]:
        return switch(state, folder, f"rm -f '{folder / 'cut'}'")

    async with made(server, tmp_path, agent, power=heals, answers=once) as world:
        before = await world.boot()
        cut(world.folder)
        refused = await world.ended(power=True, approved_by="ada")
        assert (refused.outcome, world.cycles) == ("refused", 0)
        assert refused.reason.startswith(f"fleet {world.fleet} ")
        assert "not permit" in refused.reason
        # No boot id had been read, and the uptime of a local node is its machine's: the answer
        # after it proves nothing by itself.
        repair = await world.order(power=True, approved_by="ada")
        await world.until(lambda: world.cycles == 1, "its power was cycled")
        await world.until_state(
            repair, lambda state: state.boot_id not in ("", before), "its boot id was read"
        )
        await repair.cancel()
        assert [request["power"] for request in seen] == [True, True]
        await repair.terminate("it would look until its deadline")


@pytest.mark.long
async def test_a_reboot_that_fails_is_followed_by_a_power_cycle(
    server: Client, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    margin = timedelta(seconds=40)
    monkeypatch.setattr(relaunch.repair.conditions, "FINAL_PROBE_MARGIN", margin)
    async with made(server, tmp_path, agent, reboots=["true"]) as world:
        # It probes last one margin after the reboot was ordered, which takes seconds, and one
        # before its deadline: that is what a busy machine has for the power cycle.
        ended = await world.ended(deadline=datetime.now(UTC) + 2 * margin + timedelta(seconds=5))
        assert (ended.outcome, ended.verdict, world.cycles) == ("done", Verdict.HEALTHY, 1), ended
        assert world.permit_requests == [("reboot", False), ("reboot", True)]
        assert [
            message["restarts"]
            for signal, message in world.told.messages
            if signal == "repair_wanted"
        ] == [0, 1]


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(
    ("power", "named"),
    [
        pytest.param(
            (
                "/bin/sh",
                "-c",
                "echo Error: Unable to establish IPMI v2 session >&2; exit 1",
                "hunter2",
            ),
            ("n1", "exit code 1: Error: Unable to"),
            id="it fails",
        ),
        pytest.param(
            ("/nowhere/ipmitool", "hunter2"),
            ("n1", "ipmitool", os.strerror(errno.ENOENT)),
            id="there is none",
        ),
    ],
)
async def test_a_power_command_that_fails_is_said_in_a_sentence(
    server: Client, tmp_path: Path, agent: Path, power: tuple[str, ...], named: tuple[str, ...]
) -> None:
    async with made(server, tmp_path, agent, power=lambda state, folder: power) as world:
        ended = await world.ended(power=True, approved_by="ada")
        assert ended.outcome == "refused"
        assert all(word in ended.reason for word in named), ended.reason
        assert "hunter2" not in str((await world.repairs[0].fetch_history()).to_json())


async def test_a_node_without_a_power_command_is_refused_one(
    server: Client, tmp_path: Path, agent: Path
) -> None:
    async with made(server, tmp_path, agent, power=None) as world:
        ended = await world.ended(power=True, approved_by="ada")
        assert ended.outcome == "refused"
        assert all(word in ended.reason for word in ("n1", world.fleet, "power: {cycle: "))


@pytest.mark.long
async def test_a_power_command_that_hangs_is_ended_and_not_repeated(
    server: Client, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaunch.repair.machine, "POWER_CYCLE_TIMEOUT", timedelta(seconds=1))

    def hangs(state: Path, folder: Path) -> tuple[str, ...]:
        return ("/bin/sh", "-c", f"echo $$ >> '{state / 'ran'}'; sleep 600 & wait")

    async with made(server, tmp_path, agent, power=hangs) as world:
        repair = await world.order(power=True, approved_by="ada")
        await world.until_state(repair, lambda state: bool(state.attempts), "it was given up")
        state = await world.until_state(
            repair,
            lambda state: state.log[-1].reason == f"n1 still runs boot id {state.boot_id}",
            "looked at",
        )
        assert any("sh did not" in one.reason for one in state.log)
        (pid,) = (tmp_path / "ran").read_text().split()
        assert not Path("/proc", pid).exists()
        local_power.reboot(world.folder)  # it happens after all
        ended = await asyncio.wait_for(repair.result(), PATIENCE)
        assert (ended.outcome, world.cycles) == ("done", 1)
        assert "rebooted" in ended.reason  # by its power or not: the node cannot tell


@pytest.mark.long
async def test_where_repairs_need_approval_a_power_cycle_needs_its_own(
    server: Client, tmp_path: Path, agent: Path
) -> None:
    async with made(server, tmp_path, agent, reboots=["false"], repairs="ask") as world:
        repair = await world.order(approved_by="ada")
        await world.until_state(
            repair, lambda state: state.stage is Stage.ASKING and state.power, "a question"
        )
        assert world.cycles == 0
        await repair.execute_update(
            "answer", {"decision": "approve", "by": "bo", "reason": "do it"}
        )
        ended = await asyncio.wait_for(repair.result(), PATIENCE)
        assert (ended.outcome, world.cycles) == ("done", 1)
