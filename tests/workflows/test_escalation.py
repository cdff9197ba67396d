"""Repairs as a fleet orders them, on simulated nodes.

They are what an examination calls for, and nothing without the fleet's permission.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import relaunch.activities.examine
from relaunch.activities.examine import NodeActivities, RepairOrder
from relaunch.activities.fleet import FLEET_UNKNOWN, TellFleetInput
from relaunch.evidence.findings import Verdict
from relaunch.messages.jobs import NodeRepairInput, NodeRepairResult
from relaunch.messages.notices import Notice, TellPeopleInput
from relaunch.pool.messages import Permit
from relaunch.repair.state import RepairEvent, Stage
from relaunch.spec.fleet import FleetNode, FleetSpec
from relaunch.spec.policy import Strategy
from relaunch.workflows.node_repair.workflow import NodeRepair
from tests.backends.upkeep_invariants import assert_upkeep
from tests.fakes.nodes import Cut, Fault, ResetFails, Script, Sick, SimulatedBackend, Takes
from tests.fakes.nodes.script import Happening
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import replay

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATIENCE = 120.0
BY_RESET = Sick(node="n1", remap_pending=0, until="reset")
BY_REBOOT = Sick(node="n1", remap_pending=0, until="reboot")
BY_NOTHING = Sick(node="n1", remap_failed=0)
Repair = WorkflowHandle[Any, NodeRepairResult]


@dataclass
class Told:
    """A stand-in for a fleet: it writes down what it receives, and answers as it is made to."""

    client: Client
    fleet: str
    answers: Callable[[dict[str, Any]], Awaitable[bool | None]]
    """To a request: whether it is allowed; None: no answer."""
    deaf: bool = False
    permit_at: datetime | None = None
    """When its permits say that they were given."""
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    """What people would get."""

    @activity.defn
    async def tell_people(self, input: TellPeopleInput) -> str:
        assert input.fleet == self.fleet
        self.notices += input.notices
        return "kept"

    @activity.defn
    async def tell_fleet(self, input: TellFleetInput) -> None:
        if input.fleet != self.fleet:
            raise ApplicationError(
                f"there is no fleet {input.fleet}", type=FLEET_UNKNOWN, non_retryable=True
            )
        if self.deaf:
            raise ApplicationError("the fleet cannot be told")
        self.messages.append((input.signal, input.message))
        if (
            input.signal == "repair_wanted"
            and (allowed := await self.answers(input.message)) is not None
        ):
            await self.answer(input.message, allowed)

    async def answer(self, request: dict[str, Any], allowed: bool) -> None:
        permit = Permit(
            request["run"],
            request["seq"],
            allowed,
            "1 of 2 repairs" if allowed else "its breaker is open",
            at=self.permit_at,
        )
        await self.client.get_workflow_handle(request["workflow"]).signal("permitted", permit)

    @property
    def requests(self) -> list[tuple[int, str]]:
        return [
            (message["seq"], message["step"])
            for signal, message in self.messages
            if signal == "repair_wanted"
        ]

    @property
    def signals(self) -> list[str]:
        return [signal for signal, _ in self.messages]


@dataclass
class OneNode:
    known: FleetSpec
    simulated: SimulatedBackend

    def spec(self, fleet: str) -> FleetSpec:
        if fleet != self.known.name:
            raise KeyError(f"fleet {fleet!r} is not known to this worker")
        return self.known

    def backend(self, fleet: str) -> SimulatedBackend:
        self.spec(fleet)
        return self.simulated


@dataclass
class World:
    client: Client
    queue: str
    fleet: str
    backend: SimulatedBackend
    told: Told
    repairs: list[Repair] = field(default_factory=list)
    worker: Worker | None = None
    make_worker: Callable[..., Worker] | None = None
    """Returns another worker; without `activities`, one that decides only."""

    async def order(self, strategy: Strategy | None = None, **changes: Any) -> Repair:
        values = {
            "fleet": self.fleet,
            "node": "n1",
            "strategy": strategy,
            "reason": "3 jobs failed on it",
            "by": f"fleet {self.fleet}",
            "deadline": datetime.now(UTC) + timedelta(hours=2),
            **changes,
        }
        handle: Repair = await self.client.start_workflow(
            "NodeRepair",
            NodeRepairInput(**values),
            id=f"repair/{self.fleet}/{values['node']}",
            task_queue=self.queue,
            result_type=NodeRepairResult,
        )
        self.repairs.append(handle)
        return handle

    async def ended(self, strategy: Strategy | None = None, **changes: Any) -> NodeRepairResult:
        return await self.end_of(await self.order(strategy, **changes))

    async def end_of(self, repair: Repair) -> NodeRepairResult:
        result = await asyncio.wait_for(repair.result(), PATIENCE)
        signal, message = (
            self.told.messages[-1]
            if self.told.messages
            else ("repair_ended", {**asdict(result), "job": ""})
        )
        assert signal == "repair_ended", "whatever the end, the fleet gets a message"
        assert (message["node"], message["outcome"], message["verdict"]) == (
            result.node,
            result.outcome,
            result.verdict,
        )
        assert message["reason"] == result.reason
        return result

    @property
    def did(self) -> list[str]:
        """What began on the node, in order."""
        return [one.command for one in self.backend.upkeep if one.kind == "began"]

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not await holds():
            assert asyncio.get_running_loop().time() < deadline, (
                f"never {what}: {self.told.messages} {self.did}"
            )
            await asyncio.sleep(0.02)

    async def until_next(self, repair: Repair, words: str) -> None:
        async def says() -> bool:
            return words in str(await repair.query("next"))

        await self.until(says, words)

    async def until_asked(self, repair: Repair, strategy: Strategy) -> None:
        async def asks() -> bool:
            state = await repair.query(NodeRepair.state)
            return state is not None and (state.strategy, state.stage) == (strategy, Stage.ASKING)

        await self.until(asks, f"asked for {strategy}")


async def allows(_: dict[str, Any]) -> bool | None:
    return True


async def forbids(_: dict[str, Any]) -> bool | None:
    return False


async def says_nothing(_: dict[str, Any]) -> bool | None:
    return None


@asynccontextmanager
async def world(
    client: Client,
    *happenings: Happening,
    answers: Callable[[dict[str, Any]], Awaitable[bool | None]] = allows,
    faults: tuple[Fault, ...] = (),
    repairs: str = "act",
    deaf: bool = False,
    kind: type[SimulatedBackend] = SimulatedBackend,
    order_repair: Callable[..., Any] | None = None,
) -> AsyncIterator[World]:
    """One node with one GPU, its worker, and a stand-in for its fleet.

    Leaving it replays each history and checks the records.
    """
    name = f"f-{uuid.uuid4().hex[:8]}"
    spec = FleetSpec(
        name=name,
        backend="simulated",
        repairs=repairs,
        nodes=(FleetNode(name="n1", address="10.0.0.1", gpus=1),),
    )
    backend = kind(spec, Script(happenings, faults))
    queue, told = f"q-{uuid.uuid4().hex[:8]}", Told(client, name, answers, deaf)
    nodes = NodeActivities(OneNode(spec, backend))

    def make_worker(*, activities: bool = True) -> Worker:
        all_activities = [
            nodes.read_terms,
            nodes.check_nodes,
            order_repair or nodes.order_repair,
            told.tell_fleet,
            told.tell_people,
        ]
        return Worker(
            client,
            task_queue=queue,
            workflows=[NodeRepair],
            activities=all_activities if activities else [],
            workflow_runner=UnsandboxedWorkflowRunner(),  # as the real worker does
            debug_mode=True,  # without a limit of 2 s for a task
            max_cached_workflows=0,  # each task replays the repair from its beginning
            max_heartbeat_throttle_interval=timedelta(milliseconds=100),
            graceful_shutdown_timeout=timedelta(seconds=5),
        )

    made = World(client, queue, name, backend, told, make_worker=make_worker)
    async with make_worker() as made.worker:
        yield made
        for repair in made.repairs:
            await replay(await repair.fetch_history())
    assert_upkeep(backend)


# --- what an examination calls for


class Unresettable(SimulatedBackend):
    """Nodes as on ECS: every order to reset GPUs would be refused."""

    no_reset = "their platform holds the GPUs open"


async def test_s1_5_no_person_is_asked_for_a_reset_that_is_refused(server: Client) -> None:
    async with world(server, BY_REBOOT, repairs="ask", kind=Unresettable) as one:
        ended = await one.ended(Strategy.RESET_GPU, job="llama")
        assert ended.outcome == "refused" and ended.reason.endswith(Unresettable.no_reset)
        assert (one.did, one.told.requests) == ([], [])
        repair = await one.order()
        await one.until_asked(repair, Strategy.REBOOT_NODE)
        assert one.did == ["diagnose"]
        await repair.execute_update("answer", {"decision": "approve", "by": "grace"})
        ended = await one.end_of(repair)
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY), ended.reason
        assert [command for command in one.did if command != "diagnose"] == ["reboot"]
        assert one.told.requests == [(1, "reboot")]
        asked, answered = one.told.notices
        assert (asked.event, asked.state, answered.state) == ("question", "open", "resolved")
        assert asked.key == answered.key == f"{one.told.fleet}/question/repair/n1"
        assert asked.command.startswith("relaunch nodes answer n1 approve --reboot")


@pytest.mark.parametrize("repairs", ["act", "ask", "observe"])
async def test_a_healthy_node_is_examined_and_left_as_it_is(server: Client, repairs: str) -> None:
    async with world(server, repairs=repairs) as one:
        repair = await one.order()
        ended = await one.end_of(repair)
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY)
        assert "Examination of n1" in str(await repair.query("__temporal_workflow_metadata"))
        assert ended.reason.startswith("n1 is healthy")
        assert one.did == ["diagnose"]
        assert one.told.signals == ["repair_began", "repair_ended"]
        assert one.told.messages[0][1]["workflow"] == f"repair/{one.fleet}/n1"


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(
    ("sick", "did", "requests", "outcome", "verdict"),
    [
        pytest.param(
            BY_RESET, ["reset-gpus"], [(1, "reset")], "done", Verdict.HEALTHY, id="a reset heals it"
        ),
        pytest.param(
            BY_REBOOT,
            ["reset-gpus", "reboot"],
            [(1, "reset"), (2, "reboot")],
            "done",
            Verdict.HEALTHY,
            id="the reset was not enough",
        ),
        pytest.param(
            Sick(node="n1", recovery_action=(0, 2), until="reboot"),
            ["reboot"],
            [(1, "reboot")],
            "done",
            Verdict.HEALTHY,
            id="a reboot",
        ),
        pytest.param(
            BY_NOTHING,
            ["reboot"],
            [(1, "reboot")],
            "refused",
            Verdict.UNHEALTHY,
            id="nothing heals it",
        ),
    ],
)
async def test_a_node_gets_the_repair_its_verdict_asks_then_the_next(
    skipping: WorkflowEnvironment,
    sick: Sick,
    did: list[str],
    requests: list[tuple[int, str]],
    outcome: str,
    verdict: Verdict,
) -> None:
    async with world(skipping.client, sick) as one:
        ended = await one.ended()
        assert (ended.outcome, ended.verdict) == (outcome, verdict), ended.reason
        assert [command for command in one.did if command != "diagnose"] == did
        assert one.did[0] == "diagnose"
        assert one.told.requests == requests


async def test_a_hung_gsp_is_reset_once_and_its_xid_is_over(skipping: WorkflowEnvironment) -> None:
    xid = "NVRM: Xid (PCI:0000:1b:00): 119, pid=7, name=python, Timeout after 6s of GSP"
    hung = Sick(node="n1", nvml_unreadable="NVML: UNKNOWN", kernel=(xid,), until="reset")
    async with world(skipping.client, hung) as one:
        ended = await one.ended()
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY), ended.reason
        assert one.did == ["diagnose", "reset-gpus", "diagnose"]
        later = await skipping.get_current_time() + timedelta(hours=2)
        ended = await one.ended(deadline=later)
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY), ended.reason
        assert one.did == ["diagnose", "reset-gpus", "diagnose", "diagnose"]
        assert one.told.requests == [(1, "reset")]


@pytest.mark.parametrize(
    ("happening", "reason"),
    [
        pytest.param(Cut(node="n1", when="first_call"), "n1 does not answer", id="it is silent"),
        pytest.param(
            Sick(node="n1", nvml_unreadable="NVML did not answer"),
            "NVML did not answer",
            id="NVML is",
        ),
    ],
)
async def test_nothing_is_done_to_a_node_that_can_never_be_examined(
    skipping: WorkflowEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    happening: Happening,
    reason: str,
) -> None:
    monkeypatch.setattr(relaunch.activities.examine, "PROBE_INTERVAL_S", 0.01)
    async with world(skipping.client, happening) as one:
        begun = await skipping.get_current_time()
        ended = await one.ended()
        assert (ended.outcome, ended.verdict) == ("refused", Verdict.UNKNOWN)
        assert "after 4 examinations" in ended.reason and reason in ended.reason
        assert await skipping.get_current_time() - begun >= timedelta(minutes=6)
        assert set(one.did) <= {"diagnose"} and one.told.signals == ["repair_began", "repair_ended"]


async def test_a_node_that_answers_the_second_time_is_judged_by_that(
    skipping: WorkflowEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaunch.activities.examine, "PROBE_INTERVAL_S", 0.01)
    lost = tuple(Fault(kind="lose_answer", command="probe", nth=number) for number in (1, 2, 3))
    async with world(skipping.client, faults=lost) as one:
        assert (await one.ended()).outcome == "done"
        assert one.did == ["diagnose"]


async def test_observe_only_reports_the_verdict_and_the_omitted_repair(
    server: Client,
) -> None:
    async with world(server, BY_RESET, repairs="observe") as one:
        ended = await one.ended()
        assert (ended.outcome, ended.verdict) == ("refused", Verdict.UNHEALTHY)
        assert ended.reason.startswith("repairs: observe")
        assert one.did == ["diagnose"] and one.told.requests == []


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(
    "sick", [BY_RESET, BY_REBOOT], ids=["a reset heals it", "the reset was not enough"]
)
async def test_each_thing_that_acts_is_asked_for_by_itself(server: Client, sick: Sick) -> None:
    async with world(server, sick, repairs="ask") as one:
        repair = await one.order()
        await one.until_asked(repair, Strategy.RESET_GPU)
        assert one.did == ["diagnose"]
        await repair.execute_update("answer", {"decision": "approve", "by": "grace"})
        if sick is BY_REBOOT:
            await one.until_asked(repair, Strategy.REBOOT_NODE)
            await repair.execute_update(
                "answer", {"decision": "deny", "by": "grace", "reason": "mine"}
            )
            ended = await one.end_of(repair)
            assert (ended.outcome, ended.verdict) == ("refused", Verdict.UNHEALTHY)
            assert ended.reason.startswith("grace denied ") and ended.reason.endswith(": mine")
        else:
            ended = await one.end_of(repair)
            assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY)
        assert [command for command in one.did if command != "diagnose"] == ["reset-gpus"]


@pytest.mark.parametrize(
    "strategy",
    [None, Strategy.REBOOT_NODE],
    ids=["chosen by an examination", "ordered"],
)
async def test_a_reboot_by_hand_withdraws_the_question(
    skipping: WorkflowEnvironment, strategy: Strategy | None
) -> None:
    sick = Sick(node="n1", recovery_action=(0, 2), until="reboot")
    async with world(skipping.client, sick, repairs="ask") as one:
        repair = await one.order(strategy)
        await one.until_asked(repair, Strategy.REBOOT_NODE)
        one.backend.lose_power("n1")
        ended = await one.end_of(repair)
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY), ended.reason
        assert "rebooted, but not by this repair" in ended.reason
        assert one.told.requests == [] and "reboot" not in one.did
        opened, resolved = one.told.notices
        assert (opened.state, resolved.state) == ("open", "resolved")
        assert resolved.reason == "n1 was rebooted meanwhile"
        assert resolved.at - opened.at < timedelta(minutes=2)


async def test_a_question_is_withdrawn_once_the_fault_is_gone(
    skipping: WorkflowEnvironment,
) -> None:
    """A person has reset the GPU; what a reset cures here is as if it never was."""
    async with world(skipping.client, BY_RESET, repairs="ask") as one:
        repair = await one.order()
        await one.until_asked(repair, Strategy.RESET_GPU)
        one.backend.recover("n1")
        ended = await one.end_of(repair)
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY), ended.reason
        assert "no repair was needed" in ended.reason
        assert one.did == ["diagnose", "diagnose"] and one.told.requests == []
        assert one.told.notices[-1].reason == "a probe finds no fault of n1 any more"


@pytest.mark.long
async def test_a_persons_order_is_asked_about_to_its_end(
    skipping: WorkflowEnvironment,
) -> None:
    """They know why; the node stays sick or healthy, and the question open to its end."""
    async with world(skipping.client, BY_RESET, repairs="ask") as one:
        repair = await one.order(Strategy.REBOOT_NODE)
        await one.until_asked(repair, Strategy.REBOOT_NODE)
        one.backend.recover("n1")
        ended = await one.end_of(repair)
        assert (ended.outcome, ended.verdict) == ("refused", Verdict.UNKNOWN)
        assert one.did == []
        assert one.told.notices[-1].reason == "there was no answer in time"


async def test_a_refused_reset_is_followed_by_an_examination_first(
    skipping: WorkflowEnvironment,
) -> None:
    lost = Sick(
        node="n1",
        kernel=("[ 1.0] NVRM: Xid (PCI:0000:1b:00): 119, pid=1, name=python, Timeout",),
        until="reboot",
    )

    async with world(skipping.client, lost, ResetFails(node="n1")) as one:
        ended = await one.ended()
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY), ended.reason
        assert one.did == ["diagnose", "reset-gpus", "diagnose", "reboot", "diagnose"]


async def test_a_cancelled_examination_ends_at_once(server: Client) -> None:
    async with world(server, Takes(node="n1", command="diagnose", seconds=600.0)) as one:
        repair = await one.order()

        async def examines() -> bool:
            return one.did == ["diagnose"]

        await one.until(examines, "an examination")
        await repair.cancel()
        ended = await one.end_of(repair)
        assert (ended.outcome, ended.verdict) == ("refused", Verdict.UNKNOWN)
        assert ended.reason.startswith("cancelled: ")


# --- the fleet's permission


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("strategy", [None, Strategy.RESET_GPU, Strategy.REBOOT_NODE])
async def test_what_the_fleet_does_not_permit_is_not_done(
    server: Client, strategy: Strategy | None
) -> None:
    async with world(server, BY_RESET, answers=forbids) as one:
        ended = await one.ended(strategy)
        assert ended.outcome == "refused"
        assert one.fleet in ended.reason and "breaker" in ended.reason
        assert not {"reset-gpus", "reboot"} & set(one.did)


async def test_only_the_answer_to_the_question_asked_counts(
    server: Client,
) -> None:
    async with world(server, BY_RESET, answers=says_nothing) as one:
        repair = await one.order(Strategy.RESET_GPU)
        await repair.signal("permitted", Permit(repair.result_run_id or "", 1, True, "too early"))
        await one.until_next(
            repair, f"waiting for a permit of fleet {one.fleet} to reset all GPUs on n1"
        )

        async def is_asked() -> bool:
            return bool(one.told.requests)

        await one.until(is_asked, "asked")
        request = next(
            message for signal, message in one.told.messages if signal == "repair_wanted"
        )
        assert (request["seq"], request["node"], request["run"]) == (1, "n1", repair.result_run_id)
        metadata = await repair.query("__temporal_workflow_metadata")
        assert f"Waiting for `fleet/{one.fleet}`" in str(metadata)
        for message in (
            None,
            "",
            "yes",
            7,
            [],
            {},
            {"allowed": True},
            {**request},
            Permit("another", 1, True, ""),
            [[[]]],
        ):
            await repair.signal("permitted", message)
        await repair.signal("permitted", args=[])
        await repair.signal("permitted", args=[1, 2, 3])
        await one.told.answer({**request, "seq": 2}, True)
        await one.told.answer({**request, "seq": 0}, False)
        await one.until_next(repair, "waiting for a permit")
        assert one.did == []
        await one.told.answer(request, True)
        await one.told.answer(request, False)
        ended = await one.end_of(repair)
        assert (ended.outcome, one.did) == ("done", ["reset-gpus", "diagnose"])


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("strategy", [Strategy.RESET_GPU, Strategy.REBOOT_NODE])
async def test_a_silent_fleet_is_asked_to_the_deadline_without_repair(
    skipping: WorkflowEnvironment, strategy: Strategy
) -> None:
    async with world(skipping.client, BY_RESET, answers=says_nothing) as one:
        deadline = await skipping.get_current_time() + timedelta(minutes=18)
        ended = await one.ended(strategy, deadline=deadline)
        assert (ended.outcome, ended.verdict) == ("refused", Verdict.UNKNOWN)
        assert f"by {deadline:%H:%M} UTC" in ended.reason
        assert [seq for seq, _ in one.told.requests] == [1, 1, 1, 1]
        assert one.did == []


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("used", [False, True])
async def test_after_a_late_permission_the_node_is_looked_at_again(
    skipping: WorkflowEnvironment, used: bool
) -> None:
    async with world(
        skipping.client,
        BY_RESET,
        Takes(node="n1", command="diagnose", seconds=600.0),
        answers=says_nothing,
    ) as one:
        holding: list[asyncio.Task[Any]] = []

        async def the_second_time(_: dict[str, Any]) -> bool | None:
            if len(one.told.requests) < 2:
                return None
            if used:
                holding.append(
                    asyncio.create_task(one.backend.diagnose("n1", "a person", 1, 600.0))
                )
                await one.until(is_held, "held")
            return True

        async def is_held() -> bool:
            return "diagnose" in one.did

        one.told.answers = the_second_time
        ended = await one.ended(Strategy.RESET_GPU, level=0)
        assert one.told.requests == [(1, "reset"), (1, "reset")]
        probes = [
            call.command for call in one.backend.calls if call.command in ("probe", "reset-gpus")
        ]
        if used:
            assert ended.outcome == "refused"
            assert "n1 is in use: diagnose" in ended.reason
            assert probes == ["probe", "probe"]
        else:
            assert (ended.outcome, probes) == ("done", ["probe", "probe", "reset-gpus", "probe"])
        for task in holding:
            task.cancel()


async def test_each_order_needs_a_permission_also_a_repeated_one(
    skipping: WorkflowEnvironment,
) -> None:
    async with world(
        skipping.client, BY_RESET, faults=(Fault(kind="lose_order", command="reset-gpus"),)
    ) as one:
        ended = await one.ended(Strategy.RESET_GPU)
        assert ended.outcome == "done"
        assert one.told.requests == [(1, "reset"), (2, "reset")]


async def test_a_repair_that_waits_for_its_fleet_can_be_cancelled(server: Client) -> None:
    async with world(server, BY_RESET, answers=says_nothing) as one:
        repair = await one.order()
        await one.until_next(repair, "waiting for a permit")
        await repair.cancel()
        ended = await one.end_of(repair)
        assert ended.outcome == "refused" and ended.reason.startswith("cancelled: ")
        assert one.did == ["diagnose"]


async def test_a_repair_ends_safely_with_its_fleet_unreachable(
    skipping: WorkflowEnvironment,
) -> None:
    async with world(skipping.client, deaf=True) as one:
        assert (await one.ended()).outcome == "done"
    async with world(skipping.client, BY_RESET, deaf=True) as one:
        deadline = await skipping.get_current_time() + timedelta(minutes=12)
        ended = await one.ended(deadline=deadline)
        assert ended.outcome == "refused" and "not permit" in ended.reason
        assert one.did == ["diagnose"]


async def test_a_failed_repair_is_reported_to_the_fleet_too(server: Client) -> None:
    @activity.defn
    async def order_repair(_: RepairOrder) -> RepairEvent:
        raise ApplicationError("this worker cannot", non_retryable=True)

    async with world(server, BY_RESET, order_repair=order_repair) as one:
        with pytest.raises(WorkflowFailureError):
            await one.ended()
        signal, message = one.told.messages[-1]
        assert (signal, message["outcome"], message["verdict"]) == (
            "repair_ended",
            "ambiguous",
            "UNKNOWN",
        )


async def test_an_unknown_node_is_not_repaired(server: Client) -> None:
    async with world(server) as one:
        for changes in ({"node": "n9"}, {"fleet": "another"}):
            repair = await one.order(**changes)
            ended = await asyncio.wait_for(repair.result(), PATIENCE)
            assert (ended.outcome, ended.verdict) == ("refused", Verdict.UNKNOWN)
            assert changes.popitem()[1] in ended.reason
        assert one.told.signals == ["repair_ended"], "who ordered it waits for its end"
        assert one.did == []


async def test_a_repair_waits_for_a_paused_fleet_and_then_asks_again(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((BY_RESET,)), gpus=1, name=f"f-{uuid.uuid4().hex[:8]}") as rig:
        one = World(
            rig.client,
            rig.queue,
            rig.fleets.known.name,
            rig.backend,
            Told(rig.client, rig.fleets.known.name, says_nothing),
        )
        await rig.tell_fleet("pause", {"reason": "an audit", "by": "grace"})
        repair = await one.order(by="ada")
        await one.until_next(repair, f"waiting for a permit of fleet {one.fleet} to reset GPU")
        await until_fleet(rig, lambda fleet: bool(fleet.requests), "was asked for the permission")
        assert one.did == ["diagnose"]
        await rig.tell_fleet("resume", {"reason": "it is over", "by": "grace"})
        ended = await asyncio.wait_for(repair.result(), PATIENCE)
        assert ended.outcome == "refused" and f"fleet {one.fleet} did not" in ended.reason
        assert one.did == ["diagnose"]
        ended = await asyncio.wait_for((await one.order(by="ada")).result(), PATIENCE)
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY)
        assert one.did[-2:] == ["reset-gpus", "diagnose"]
        for each in one.repairs:
            await replay(
                await rig.client.get_workflow_handle(
                    each.id, run_id=each.result_run_id
                ).fetch_history()
            )
