"""What a fleet asks of nodes and of the server, and how it stops ranks without a job.

The nodes are simulated, the server is scripted.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from pydantic_core import to_json
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.common import RawValue, WorkflowIDConflictPolicy
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

import relaunch.activities.fleet
import relaunch.activities.readings
from relaunch.activities.fleet import (
    FLEET_UNKNOWN,
    MAX_RUNS,
    ClosedJobsInput,
    FleetActivities,
    LookInput,
    ReclaimInput,
    TellFleetInput,
)
from relaunch.activities.launch import LaunchRanksOutput
from relaunch.backends.base import Preparation, PrepareOrder, StartedRanks, StartOrder
from relaunch.converter import make_converter, shared_converter
from relaunch.encryption import EncryptionCodec
from relaunch.generation import Token
from relaunch.messages.fleets import (
    FleetFile,
    FleetInput,
    FleetNews,
    ReadFleetInput,
    WatchFleetInput,
)
from relaunch.pool.events import FleetFileContent
from relaunch.pool.inventory import Inventory
from relaunch.pool.messages import Claim, Place
from relaunch.pool.rounds import KnownNode, digest_inventory, digest_probe
from relaunch.pool.state import (
    ClaimRecord,
    FleetState,
    LiveGeneration,
    NodeProbe,
    NodeRecord,
    NodeStatus,
)
from relaunch.spec.fleet import FleetLimits
from tests.activities.harness import PATIENCE, TOKEN, Stand, environment, eventually, stand
from tests.fakes.nodes import Lingers, ManualClock, Script, Sick, SimulatedBackend, Stranger, Takes
from tests.workflows.rig import fleet as fleet_of

RUNNING, TERMINATED = WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.TERMINATED
RUNS = Script(then="run")


@dataclass
class Info:
    first_run_id: str

    @property
    def workflow_execution_info(self) -> Info:
        return self


@dataclass
class Run:
    id: str
    submission: int
    status: WorkflowExecutionStatus = RUNNING
    fleet: str | None = None
    run_id: str = "run-1"
    first: str = "run-1"
    task_queue: str = "test"
    knew: FleetState | Exception | None = None
    """What it answers, or the error that it is."""

    @property
    def start_time(self) -> datetime:
        return datetime.fromtimestamp(self.submission / 1000, UTC)

    @property
    def raw_description(self) -> Info:
        return Info(self.first)

    async def memo(self) -> dict[str, Any]:
        return {} if self.fleet is None else {"fleet": self.fleet}


@dataclass
class FakeClient:
    """A server that knows some workflows, newest run last."""

    runs: list[Run] = field(default_factory=list)
    namespace: str = "default"
    listed_still: tuple[str, ...] = ()
    unlisted: int = 0
    """How many times the list is empty."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    queries: list[str] = field(default_factory=list)
    described: list[str] = field(default_factory=list)
    started: list[tuple[Any, ...]] = field(default_factory=list)
    data_converter: DataConverter = shared_converter

    def get_workflow_handle(self, id_: str, *, run_id: str | None = None) -> Handle:
        return Handle(self, id_, run_id)

    async def list_workflows(self, query: str, limit: int | None = None) -> AsyncIterator[Run]:
        """A list that is a moment behind."""
        self.queries.append(query)
        if self.unlisted:
            self.unlisted -= 1
            return
        assert limit is None or len(self.runs) <= limit
        for run in self.runs:
            if run.status is RUNNING or run.id in self.listed_still:
                yield run

    async def start_workflow(self, *arguments: Any, **options: Any) -> None:
        self.started.append((*arguments, options))


@dataclass
class Handle:
    client: FakeClient
    id: str
    run_id: str | None

    async def describe(self) -> Run:
        self.client.described.append(self.id)
        found = [
            run
            for run in self.client.runs
            if run.id == self.id and self.run_id in (None, run.run_id)
        ]
        if not found:
            raise RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")
        return found[-1]

    async def query(self, name: str, **_: Any) -> Any:
        assert name == "state"
        if self.run_id is None:
            return self.client.states[self.id]
        known = (await self.describe()).knew
        if isinstance(known, Exception):
            raise known
        return RawValue(self.client.data_converter.payload_converter.to_payload(known))


def of(fleet: Stand, *runs: Run) -> tuple[FleetActivities, FakeClient]:
    client = FakeClient(list(runs))
    return FleetActivities(fleet.fleets, cast(Client, client), "queue-7"), client


async def look(fleet: Stand, *nodes: str, namespace: str = "default") -> dict[str, NodeProbe]:
    asked, client = of(fleet)
    client.namespace = namespace
    looks = await environment().run(asked.probe_nodes, LookInput("default", nodes))
    assert tuple(one.node for one in looks) == nodes
    return {one.node: one for one in looks}


async def launched(script: Script = RUNS, *, nodes: int = 2, generation: int = 1) -> Stand:
    fleet = stand(script, nodes=nodes)
    for number in range(1, generation + 1):
        output = await fleet.launch(token=Token("default", "llama", 1000, number))
        assert isinstance(output, LaunchRanksOutput) and output.started_at is not None, output
    return fleet


async def reclaim(
    fleet: Stand,
    *runs: Run,
    nodes: tuple[str, ...] = ("n1", "n2"),
    submission: int = 1000,
    generation: int | None = None,
) -> tuple[str, ...]:
    asked, _ = of(fleet, *runs)
    order = ReclaimInput("default", "llama", submission, nodes, generation)
    running = environment().run(asked.reclaim, order)
    return cast(tuple[str, ...], await asyncio.wait_for(running, PATIENCE))


def stopped(fleet: Stand) -> list[tuple[str, int]]:
    return sorted(
        (call.node, call.token.generation)
        for call in fleet.backend.calls
        if call.command == "stop" and call.token is not None
    )


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.activities.fleet, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(relaunch.activities.fleet, "GIVE_BACK_DELAY", timedelta(seconds=0.3))
    monkeypatch.setattr(relaunch.activities.fleet, "RECLAIM_TIMEOUT", timedelta(seconds=0.6))


# --- looks


async def test_a_look_says_whose_ranks_live_where_and_which_boot_it_is() -> None:
    fleet = await launched(nodes=2, generation=2)
    looks = await look(fleet, "n2", "n1")
    assert looks["n1"].generations == (LiveGeneration("llama", 1000, 2),), (
        "ranks of generation 1 are gone"
    )
    assert looks["n1"].boot_id and looks["n1"].boot_id != looks["n2"].boot_id
    assert (looks["n1"].silent, looks["n1"].busy) == ("", "")


async def test_a_node_that_does_not_answer_is_silent_and_says_why() -> None:
    fleet = stand()
    fleet.backend.cut("n2")
    looks = await look(fleet, "n1", "n2")
    assert looks["n1"].silent == ""
    assert "no answer" in looks["n2"].silent


async def test_a_node_gone_from_the_fleet_file_is_silent_and_not_asked() -> None:
    fleet = stand()
    looks = await look(fleet, "n1", "n9")
    assert "file default " in looks["n9"].silent
    assert [call.node for call in fleet.backend.calls] == ["n1"]


async def test_a_busy_node_is_held_and_says_who_works_on_it() -> None:
    fleet = stand()
    fleet.fleets.known = with_gpus = fleet_of(2, gpus=1)
    script = Script((Takes(node="n2", command="diagnose", seconds=600.0),))
    fleet.fleets.simulated = fleet.backend = SimulatedBackend(with_gpus, script)
    checking = asyncio.create_task(fleet.backend.diagnose("n2", "grace", 1, 600.0))
    await eventually(lambda: any(one.kind == "began" for one in fleet.backend.upkeep), "began")
    looks = await look(fleet, "n1", "n2")
    assert looks["n1"].busy == "" and "diagnose (grace)" in looks["n2"].busy
    checking.cancel()


async def test_ranks_of_another_namespace_keep_a_node_and_run_on() -> None:
    fleet = await launched()
    looks = await look(fleet, "n1", namespace="other")
    assert looks["n1"].generations == ()
    assert "job llama" in looks["n1"].busy and "namespace default" in looks["n1"].busy


# --- and at GPUs


def with_gpus(fleet: Stand, *happenings: Any) -> None:
    fleet.fleets.known = spec = fleet_of(2, gpus=2)
    fleet.fleets.simulated = fleet.backend = SimulatedBackend(spec, Script(happenings))


async def read_gpus(
    asked: FleetActivities, *nodes: str, read: tuple[str, ...] | None = None
) -> dict[str, NodeProbe]:
    looks = await environment().run(
        asked.probe_nodes, LookInput("default", nodes, nodes if read is None else read)
    )
    return {one.node: one for one in looks}


async def test_s2_10_gpus_are_read_with_a_look_where_that_is_wanted() -> None:
    fleet = stand()
    with_gpus(fleet, Stranger(node="n1", gpu=1), Sick(node="n2", gpu_lost=0))
    asked, _ = of(fleet)
    looks = await read_gpus(asked, "n1", "n2")
    first, second = (looks[node].inventory for node in ("n1", "n2"))
    assert first is not None and second is not None
    assert first.model.startswith("NVIDIA H100") and first.count == 2
    (used,) = first.used
    assert used.gpus == (1,) and "alice" in used.who and "4242" in used.who
    assert (second.count, second.lost) == (1, ("0000:1b:00.0",))
    assert (looks["n1"].inventory_age, looks["n1"].inventory_pending) == (timedelta(0), False)
    fleet.backend.cut("n2")
    looks = await read_gpus(asked, "n1", "n2", read=("n2",))
    assert (looks["n1"].inventory, looks["n2"].inventory, looks["n2"].inventory_pending) == (
        None,
        None,
        False,
    )
    assert "no answer" in looks["n2"].silent


async def test_a_look_tells_what_makes_a_node_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = stand(RUNS)
    spec = fleet_of(3, gpus=2)
    last = spec.nodes[2].model_copy(update={"unused_ports": ("mlx5_0",)})
    fleet.fleets.known = spec = spec.model_copy(update={"nodes": (*spec.nodes[:2], last)})
    sick = Script((Sick(node="n1", disk_read_only=True), Sick(node="n1", remap_pending=1)))
    fleet.fleets.simulated = fleet.backend = SimulatedBackend(spec, sick)
    listed = fleet.backend.list
    gone = {
        **{"name": "mlx5_0 port 1", "kind": "rdma", "model": "MT", "place": "0/1", "gone": True},
        "before": {"ago": 60, "rate": 400.0},
    }

    async def list_without_card(node: str, gpus: bool = False) -> Any:
        answer = await listed(node, gpus)
        return {**answer, "links": {"ports": [gone]}} if gpus and node != "n1" else answer

    monkeypatch.setattr(fleet.backend, "list", list_without_card)
    looks = await read_gpus(of(fleet)[0], "n1", "n2", "n3")
    first, second, third = (looks[node].inventory for node in ("n1", "n2", "n3"))
    assert first is not None and second is not None and third is not None
    assert "cannot be written to: it is mounted read-only" in first.fault
    assert "waits for a reset to be remapped" in first.reset_wanted
    assert "mlx5_0 port 1 is not there" in second.fault and not second.reset_wanted
    assert (third.fault, third.reset_wanted) == ("", ""), "the fleet file calls it unused"


async def test_gpus_of_a_busy_node_are_not_read() -> None:
    fleet = stand()
    with_gpus(fleet, Takes(node="n2", command="diagnose", seconds=600.0))
    checking = asyncio.create_task(fleet.backend.diagnose("n2", "grace", 1, 600.0))
    await eventually(lambda: any(one.kind == "began" for one in fleet.backend.upkeep), "began")
    look = (await read_gpus(of(fleet)[0], "n2"))["n2"]
    assert (look.inventory, look.inventory_pending) == (None, False)
    assert "diagnose (grace)" in look.busy
    checking.cancel()


async def test_a_hanging_driver_delays_its_own_node_and_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.readings, "READING_TIMEOUT_S", 0.05)
    clock = ManualClock()
    fleet = stand()
    fleet.fleets.known = spec = fleet_of(2, gpus=2)
    fleet.fleets.simulated = fleet.backend = SimulatedBackend(
        spec, Script((Takes(node="n1", command="gpus", seconds=99.0),)), clock
    )
    asked, _ = of(fleet)
    for _ in range(2):
        looks = await read_gpus(asked, "n1", "n2")
        assert (looks["n1"].inventory, looks["n1"].inventory_pending, looks["n1"].silent) == (
            None,
            True,
            "",
        )
        assert looks["n2"].inventory is not None
    assert sum(call.node == "n1" for call in fleet.backend.calls) == 3, (
        "one reading, and a look each time"
    )
    await clock.advance(10.0)
    looks = await read_gpus(asked, "n1")
    unread = looks["n1"].inventory
    assert unread is not None and unread == Inventory(unreadable=unread.unreadable)
    assert "NVML" in unread.unreadable and "10 s" in unread.unreadable
    assert looks["n1"].inventory_age < timedelta(seconds=PATIENCE)


async def test_a_reading_that_is_long_overdue_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.readings, "READING_TIMEOUT_S", 0.05)
    monkeypatch.setattr(relaunch.activities.readings, "MAX_READING_AGE_S", 0.0)
    clock = ManualClock()
    fleet = stand()
    fleet.fleets.known = spec = fleet_of(1, gpus=2)
    fleet.fleets.simulated = fleet.backend = SimulatedBackend(
        spec, Script((Takes(node="n1", command="gpus", seconds=5.0),)), clock
    )
    asked, _ = of(fleet)
    assert (await read_gpus(asked, "n1"))["n1"].inventory_pending
    await clock.advance(10.0)
    assert (await read_gpus(asked, "n1"))["n1"].inventory_pending, "another one"


async def test_an_agent_without_gpu_reading_leaves_them_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = stand()
    with_gpus(fleet)
    old = fleet.backend.list
    monkeypatch.setattr(fleet.backend, "list", lambda node, gpus=False: old(node))
    unread = (await read_gpus(of(fleet)[0], "n1"))["n1"].inventory
    assert unread is not None and unread.unreadable
    assert unread == Inventory(unreadable=unread.unreadable)


# --- the file


async def test_the_fleet_file_is_read_as_it_is_now_or_its_mistake_said() -> None:
    fleet = stand()
    asked, _ = of(fleet)
    known = fleet.fleets.known
    found = await environment().run(asked.read_fleet, ReadFleetInput("default"))
    assert found == FleetFile(
        FleetFileContent("act", known.nodes, FleetLimits()), digest=found.digest
    )
    again = await environment().run(asked.read_fleet, ReadFleetInput("default", found.digest))
    assert again == FleetFile(None, digest=found.digest), "it is as it was"
    unknown = await environment().run(asked.read_fleet, ReadFleetInput("elsewhere"))
    assert unknown.applied is None
    assert "'elsewhere'" in unknown.wrong and "default" in unknown.wrong
    wrong = fleet.fleets.wrong = "fleet.yaml:3: nodes: missing"
    bad = await environment().run(asked.read_fleet, ReadFleetInput("default", found.digest))
    assert bad == FleetFile(None, wrong)
    first = await environment().run(asked.read_fleet, ReadFleetInput("default"))
    assert first == replace(found, wrong=wrong), "a fleet that knows no nodes gets those of before"


# --- jobs


async def test_the_jobs_of_a_fleet_name_it_or_name_none() -> None:
    runs = (
        Run("job/b", 1),
        Run("job/a", 2, fleet="default"),
        Run("job/c", 3, fleet="elsewhere"),
        Run("job/d", 4, TERMINATED),
    )
    asked, client = of(stand(), *runs)
    client.listed_still = ("job/d",)
    assert await environment().run(asked.find_jobs, "default") == ("a", "b")
    assert client.queries == ["WorkflowType = 'TrainingJob' AND ExecutionStatus = 'Running'"]


@pytest.mark.parametrize(
    ("runs", "closed"),
    [
        pytest.param([], True, id="there is no such workflow any more"),
        pytest.param([Run("job/llama", 1000, TERMINATED)], True, id="it was terminated"),
        pytest.param([Run("job/llama", 1000)], False, id="it runs"),
        pytest.param(
            [Run("job/llama", 1000, TERMINATED), Run("job/llama", 2000, run_id="b", first="b")],
            True,
            id="a later one runs",
        ),
        pytest.param(
            [Run("job/llama", 1000), Run("job/llama", 5000, run_id="b", first="run-1")],
            False,
            id="it continued as new",
        ),
    ],
)
async def test_a_submission_is_closed_when_no_run_continues_it(
    runs: list[Run], closed: bool
) -> None:
    asked, _ = of(stand(), *runs)
    found = await environment().run(
        asked.find_closed_jobs, ClosedJobsInput("default", (("llama", 1000),))
    )
    assert found == ((("llama", 1000),) if closed else ())


async def test_a_job_whose_first_run_is_forgotten_names_its_submission() -> None:
    asked, client = of(stand(), Run("job/llama", 9000, run_id="run-7", first="run-1"))
    client.states["job/llama"] = {"submission": 1000}
    assert await environment().run(
        asked.find_closed_jobs, ClosedJobsInput("default", (("llama", 1000), ("llama", 900)))
    ) == (("llama", 900),)


async def test_only_jobs_missing_from_the_list_are_asked_about_singly() -> None:
    runs = [Run(f"job/j{number}", number) for number in range(40)]
    asked, client = of(stand(), *runs, Run("job/gone", 50, TERMINATED))
    claims = (*((f"j{number}", number) for number in range(40)), ("gone", 50))
    assert await environment().run(asked.find_closed_jobs, ClosedJobsInput("default", claims)) == (
        ("gone", 50),
    )
    assert client.described == ["job/gone"]


# --- two fleets


async def launched_by_another(fleet: Stand, node: str, generation: int) -> None:
    token = Token("default", "llama", 1000, generation)
    order = PrepareOrder(token, "10.0.0.1", (0,), 20.0, 1.0, 0.2, 60.0, 0.2, fleet="default/other")
    prepared = await fleet.backend.prepare(node, order)
    assert isinstance(prepared, Preparation)
    started = await fleet.backend.start(
        node,
        StartOrder(
            token, node, ("train",), None, {}, ({},), (), prepared.stamp, "c0ffee", fences=False
        ),
    )
    assert isinstance(started, StartedRanks)


async def test_ranks_of_another_fleet_are_in_the_way_and_not_stopped() -> None:
    fleet = await launched(nodes=2)
    await launched_by_another(fleet, "n1", 2)
    looks = await look(fleet, "n1", "n2")
    assert looks["n1"].generations == ()
    assert "job llama" in looks["n1"].busy and "fleet other" in looks["n1"].busy
    assert (looks["n2"].generations, looks["n2"].busy) == ((LiveGeneration("llama", 1000, 1),), "")


async def test_each_of_two_fleets_stops_only_the_ranks_it_launched() -> None:
    fleet = await launched(nodes=2)
    await launched_by_another(fleet, "n1", 2)
    assert await reclaim(fleet) == ("n1", "n2")
    assert stopped(fleet) == [("n1", 1), ("n2", 1)], "generation 2 on n1 is the other's"
    busy = (await look(fleet, "n1"))["n1"].busy
    assert "job llama" in busy and "fleet other" in busy


async def test_nothing_is_stopped_of_a_job_only_another_fleet_launched() -> None:
    fleet = stand(RUNS)
    await launched_by_another(fleet, "n1", 1)
    assert await reclaim(fleet, nodes=("n1",)) == ("n1",)
    assert stopped(fleet) == []


# --- two servers


async def test_ranks_of_another_server_are_in_the_way_and_not_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await launched(nodes=2)
    listed = fleet.backend.list

    async def of_another(node: str, gpus: bool = False) -> Any:
        found = dict(await listed(node, gpus))
        return {**found, "jobs": [{**job, "server": "0f9d2c77"} for job in found["jobs"]]}

    monkeypatch.setattr(fleet.backend, "list", of_another)
    fleet.backend.server = "6c1e9ba4"
    busy = (await look(fleet, "n1"))["n1"].busy
    assert "job llama" in busy and "Temporal server" in busy
    assert await reclaim(fleet) == ("n1", "n2")
    assert stopped(fleet) == [], "its namesake is nothing of ours"


# --- reclaiming


async def test_a_terminated_jobs_ranks_are_stopped_and_its_nodes_freed() -> None:
    fleet = await launched(generation=2)
    assert await reclaim(fleet, Run("job/llama", 1000, TERMINATED)) == ("n1", "n2")
    assert stopped(fleet) == [("n1", 2), ("n2", 2)]
    assert (await look(fleet, "n1", "n2"))["n1"].generations == ()
    again = await fleet.launch(token=Token("default", "llama", 1000, 2))
    assert again.refusals and again.refusals[0].why == "stopped", (
        "a worker that was frozen meanwhile does not start it again"
    )


async def test_a_prepared_launch_cannot_start_once_its_nodes_are_back() -> None:
    fleet = stand(RUNS)
    prepared = (await fleet.launch(prepare_only=True)).prepared
    assert await reclaim(fleet) == ("n1", "n2")
    assert stopped(fleet) == [("n1", 1), ("n2", 1)]
    late = await fleet.launch(prepared=prepared)
    assert late.refusals and late.started_at is None


async def test_nodes_without_anything_of_the_job_come_back_at_once() -> None:
    fleet = stand()
    assert await reclaim(fleet) == ("n1", "n2")
    assert stopped(fleet) == []


async def test_later_submissions_of_the_same_name_are_left_alone() -> None:
    fleet = stand(RUNS)
    await fleet.launch(token=replace(TOKEN, submission=2000))
    assert await reclaim(fleet, Run("job/llama", 2000), submission=1000) == ("n1", "n2")
    assert stopped(fleet) == []
    assert (await look(fleet, "n1"))["n1"].generations == (LiveGeneration("llama", 2000, 1),)


async def test_a_running_jobs_ranks_are_stopped_where_it_has_no_nodes() -> None:
    runs = Run("job/llama", 1000)
    fleet = await launched(generation=2)
    assert await reclaim(fleet, runs, nodes=("n2",), generation=2) == ("n2",)
    assert stopped(fleet) == [("n2", 2)]
    looks = await look(fleet, "n1", "n2")
    assert [looks[node].generations for node in ("n1", "n2")] == [
        (LiveGeneration("llama", 1000, 2),),
        (),
    ]


async def test_a_launch_since_the_node_was_seen_goes_on() -> None:
    fleet = await launched(generation=3)
    assert await reclaim(fleet, Run("job/llama", 1000), generation=2) == ("n1", "n2")
    assert (await look(fleet, "n1"))["n1"].generations == (LiveGeneration("llama", 1000, 3),)


@pytest.mark.usefixtures("hurried")
async def test_ranks_of_a_submission_that_runs_are_never_stopped() -> None:
    fleet = await launched()
    assert await reclaim(fleet, Run("job/llama", 1000)) == ()
    assert stopped(fleet) == []


@pytest.mark.usefixtures("hurried")
async def test_a_silent_node_is_not_clean_and_delays_no_other() -> None:
    fleet = await launched()
    fleet.backend.cut("n2")
    assert await reclaim(fleet) == ("n1",)
    assert await reclaim(fleet, nodes=("n2",)) == ()
    fleet.backend.heal("n2")
    assert await reclaim(fleet, nodes=("n2",)) == ("n2",)
    assert (await look(fleet, "n1", "n2"))["n2"].generations == ()


@pytest.mark.usefixtures("hurried")
async def test_a_node_with_ranks_that_cannot_be_ended_stays_away() -> None:
    fleet = stand(Script((Lingers(node="n2", seconds=math.inf),), then="run"))
    await fleet.launch()
    stopping = asyncio.create_task(reclaim(fleet))
    await eventually(lambda: ("n1", 1) in stopped(fleet), "stopped")
    stopping.cancel()
    await asyncio.wait([stopping])
    assert (await look(fleet, "n2"))["n2"].generations == (LiveGeneration("llama", 1000, 1),)


# --- remembering


NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
OWN = Run("fleet/default", 9000, run_id="test-run")


def knew(node: str, *, remembered: bool = True) -> FleetState:
    spec = next(one for one in fleet_of(3).nodes if one.name == node)
    record = NodeRecord(spec, NodeStatus.QUARANTINED, "a fan", "grace", NOW)
    return FleetState("default", nodes=(record,), is_file_read=True, is_restored=remembered)


def ended(at: int, known: FleetState | Exception, **more: Any) -> Run:
    # The list may be so old that it has it as running still.
    return Run("fleet/default", at, run_id=f"run-{at}", knew=known, **more)


async def last_state(*runs: Run, unlisted: int = 0) -> tuple[set[str], FakeClient]:
    asked, client = of(stand(), *runs, OWN)
    client.unlisted = unlisted
    known = await environment().run(asked.read_last_state, "default")
    return {node.name for node in known.nodes}, client


async def test_a_fleet_that_begins_for_the_first_time_knew_nothing() -> None:
    nodes, client = await last_state(unlisted=2)
    assert nodes == set()
    assert client.queries == ["WorkflowId = 'fleet/default'"] * 3, (
        "until the server lists the run that asks, and so those before it"
    )


async def test_the_newest_run_that_took_over_says_what_there_was() -> None:
    assert (await last_state(ended(1000, knew("n1")), ended(2000, knew("n2"))))[0] == {"n2"}
    n3 = knew("n3", remembered=False)
    short = ended(3000, replace(n3, nodes=(NodeRecord(fleet_of(3).nodes[1]), *n3.nodes)))
    assert (await last_state(ended(1000, knew("n1")), short, ended(2000, knew("n2"))))[0] == {
        "n2",
        "n3",
    }


async def test_holders_are_known_from_runs_before_one_not_yet_restored() -> None:
    held = replace(
        knew("n1"), claims=(ClaimRecord(Claim("llama", 1000, 1, 1), granted=(Place("n1"),)),)
    )
    failed = replace(knew("n2"), restore_error="no answer")
    asked, _ = of(stand(), ended(1000, held), ended(2000, failed), OWN)
    known = await environment().run(asked.read_last_state, "default")
    assert [(record.claim.job, record.is_restored) for record in known.claims] == [("llama", True)]
    assert ({node.name for node in known.nodes}, known.lost) == ({"n2"}, "")


async def test_a_series_of_runs_without_a_restore_has_lost_the_state() -> None:
    runs = [ended(1000 + number, knew("n1", remembered=False)) for number in range(MAX_RUNS + 1)]
    asked, _ = of(stand(), *runs, OWN)
    known = await environment().run(asked.read_last_state, "default")
    assert f" {MAX_RUNS} runs" in known.lost


async def test_runs_that_continued_as_new_are_not_asked() -> None:
    """The run that asks has what they knew. A fleet that cannot read a run continues, too."""
    handed_on = RPCError("no answer", RPCStatusCode.DEADLINE_EXCEEDED, b"")
    series = [
        ended(2000 + number, handed_on, status=WorkflowExecutionStatus.CONTINUED_AS_NEW)
        for number in range(2 * MAX_RUNS)
    ]
    asked, client = of(stand(), ended(1000, knew("n1")), *series, OWN)
    client.listed_still = ("fleet/default",)
    known = await environment().run(asked.read_last_state, "default")
    assert ({node.name for node in known.nodes}, known.lost) == ({"n1"}, "")


async def test_a_run_whose_next_one_never_began_is_asked() -> None:
    never = RPCError("closed before WorkflowTaskStarted", RPCStatusCode.FAILED_PRECONDITION, b"")
    continued = WorkflowExecutionStatus.CONTINUED_AS_NEW
    runs = ended(1000, knew("n1")), ended(2000, knew("n2"), status=continued), ended(3000, never)
    asked, client = of(stand(), *runs, OWN)
    client.listed_still = ("fleet/default",)
    known = await environment().run(asked.read_last_state, "default")
    assert {node.name for node in known.nodes} == {"n2"}


@pytest.mark.parametrize(
    ("error", "nodes"),
    [
        pytest.param(
            RPCError("closed before WorkflowTaskStarted", RPCStatusCode.FAILED_PRECONDITION, b""),
            {"n1"},
            id="it never began",
        ),
        pytest.param(
            RPCError("no answer", RPCStatusCode.DEADLINE_EXCEEDED, b""), set(), id="no answer"
        ),
        pytest.param(
            WorkflowQueryFailedError("it went another way then"), set(), id="it cannot be replayed"
        ),
        pytest.param(TimeoutError(), set(), id="it takes too long"),
    ],
)
async def test_a_run_that_cannot_say_what_it_knew_fails_nothing(
    error: Exception, nodes: set[str]
) -> None:
    assert (await last_state(ended(1000, knew("n1")), ended(2000, error)))[0] == nodes


async def test_a_plain_state_is_lost_where_keys_are_required() -> None:
    codec = EncryptionCodec(required=True)
    asked, client = of(stand(), ended(1000, knew("n1")), OWN)
    client.data_converter = make_converter(codec, encrypts=False)
    known = await environment().run(asked.read_last_state, "default")
    assert (known.nodes, "is not encrypted" in known.lost) == ((), True)


async def test_a_run_of_other_workers_is_not_asked() -> None:
    assert (await last_state(ended(1000, knew("n1"), task_queue="elsewhere")))[0] == set()


async def test_a_server_that_lists_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.fleet, "RESTORE_TIMEOUT", timedelta(seconds=0.2))
    assert (await last_state(unlisted=10**6))[0] == set()


# --- telling


async def test_a_signal_to_a_fleet_begins_it_where_there_is_none() -> None:
    asked, client = of(stand())
    claim = Claim("llama", 1000, 1, 2)
    await environment().run(asked.tell_fleet, TellFleetInput("default", "claim", claim))
    [(workflow, argument, options)] = client.started
    assert (workflow, argument, options["id"], options["task_queue"]) == (
        "Fleet",
        FleetInput("default"),
        "fleet/default",
        "queue-7",
    )
    assert (options["start_signal"], options["start_signal_args"]) == ("claim", [claim])
    assert options["id_conflict_policy"] is WorkflowIDConflictPolicy.USE_EXISTING


async def test_a_fleet_that_no_file_names_is_not_begun_and_it_is_said() -> None:
    asked, client = of(stand())
    with pytest.raises(ApplicationError) as refused:
        await environment().run(asked.tell_fleet, TellFleetInput("elsewhere", "claim", {}))
    assert (refused.value.type, refused.value.non_retryable, client.started) == (
        FLEET_UNKNOWN,
        True,
        [],
    )
    assert "'elsewhere'" in refused.value.message and "default" in refused.value.message


# --- the watch over a fleet while nothing happens


def know(fleet: Stand, looks: dict[str, NodeProbe], read_in: int | None = None) -> WatchFleetInput:
    """What a fleet knows that has just probed these nodes."""
    nodes = tuple(
        KnownNode(node, digest_probe(probe), digest_inventory(probe.inventory), read_in)
        for node, probe in looks.items()
    )
    digest = hashlib.sha256(to_json(FleetFileContent(**content(fleet)))).hexdigest()
    return WatchFleetInput("default", digest, "", (), nodes, timedelta(0), timedelta(0))


def content(fleet: Stand) -> dict[str, Any]:
    spec = fleet.fleets.known
    return {"repairs": spec.repairs, "nodes": tuple(spec.nodes), "limits": spec.limits}


async def test_a_watch_reports_nothing_but_news(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await launched()
    asked, _ = of(fleet, Run("job/llama", 1000))
    input = replace(know(fleet, await look(fleet, "n1", "n2")), claims=(("llama", 1000),))
    watch = asyncio.create_task(environment().run(asked.watch_fleet, input))
    listed = [call for call in fleet.backend.calls if call.command == "list"]
    await eventually(
        lambda: sum(call.command == "list" for call in fleet.backend.calls) > len(listed) + 20,
        "ten rounds",
    )
    assert not watch.done()
    fleet.backend.cut("n2")
    news = await asyncio.wait_for(watch, PATIENCE)
    assert (news.file, news.closed, [probe.node for probe in news.probes]) == (None, (), ["n2"])
    assert "no answer" in news.probes[0].silent


async def test_a_watch_reports_what_the_fleet_does_not_know_yet() -> None:
    fleet = await launched()
    asked, _ = of(fleet)
    looks = await look(fleet, "n1", "n2")
    now = know(fleet, looks)
    unknown = replace(now, nodes=(now.nodes[0], replace(now.nodes[1], probe="")))
    news = await environment().run(asked.watch_fleet, unknown)
    assert news == FleetNews(probes=(looks["n2"],))
    ended = replace(now, claims=(("llama", 1000),))
    assert await environment().run(asked.watch_fleet, ended) == FleetNews(closed=ended.claims)
    other = await environment().run(asked.watch_fleet, replace(now, file_digest="of another"))
    assert other.file is not None and other.file.digest == now.file_digest
    wrong = await environment().run(asked.watch_fleet, replace(now, file_wrong="no such key"))
    assert wrong.file == FleetFile(None, digest=now.file_digest)


async def test_a_slow_reading_of_gpus_is_reported_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.readings, "READING_TIMEOUT_S", 0.05)
    fleet = stand()
    with_gpus(fleet, Takes(node="n1", command="gpus", seconds=0.3))
    asked, _ = of(fleet)
    input = know(fleet, await look(fleet, "n1", "n2"), read_in=0)
    input = replace(input, interval=timedelta(seconds=0.5))
    first = await environment().run(asked.watch_fleet, input)
    assert [(one.node, one.inventory_pending) for one in first.probes] == [("n2", False)]
    nodes = (input.nodes[0], replace(input.nodes[1], read_in=None))
    second = await environment().run(asked.watch_fleet, replace(input, nodes=nodes))
    assert [(one.node, one.inventory_pending) for one in second.probes] == [("n1", False)]
    assert second.probes[0].inventory is not None


async def test_a_watch_hands_over_when_its_worker_shuts_down() -> None:
    fleet = stand()
    asked, _ = of(fleet)
    input = replace(know(fleet, await look(fleet, "n1")), first_in=timedelta(hours=1))
    here = environment()
    watch = asyncio.create_task(here.run(asked.watch_fleet, input))
    await asyncio.sleep(0)
    here.worker_shutdown()
    with pytest.raises(ApplicationError, match="shuts down") as handed_over:
        await asyncio.wait_for(watch, PATIENCE)
    assert not handed_over.value.non_retryable
