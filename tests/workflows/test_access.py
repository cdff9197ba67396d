"""Role by command by proof, each cell given to the real workflows: allowed, or refused with its
sentence."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowHistory,
    WorkflowUpdateFailedError,
)
from temporalio.worker import Worker

from relaunch.access.orders import REFUSED, Proof
from relaunch.activities.examine import RepairOrder
from relaunch.cli import sign
from relaunch.cli.sign import sign_message
from relaunch.evidence.findings import Verdict
from relaunch.job.state import Phase
from relaunch.messages.jobs import NodeRepairInput, NodeRepairResult, TrainingJobInput
from relaunch.pool.state import FleetState, NodeStatus
from relaunch.spec.access import Access
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Strategy
from tests.access.keys import make_key, read_public, sign_order
from tests.fakes.nodes import Exit, Script, Sick
from tests.payloads import decrypt
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import PATIENCE, Job, Rig, policy
from tests.workflows.test_repair import make, reboot_once, repair_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"),
]
PEOPLE = {"ada": "admin", "olaf": "operator", "rita": "researcher", "rob": "researcher"}
ASK = {"APPLICATION": [{"strategy": "ASK"}], "UNKNOWN": [{"strategy": "ASK"}]}


@dataclass(frozen=True)
class Caller:
    name: str
    key: Path | None = None

    @property
    def by(self) -> str:
        """What the caller says to be: a proven one says to be another."""
        return "root@node" if self.key else f"{self.name}@laptop" if self.name else ""

    @property
    def shown(self) -> str:
        if self.key:
            return self.name
        return f"{self.by} (claimed)" if self.by else "an unnamed caller"

    async def sign(
        self, rig: Rig, handle: WorkflowHandle[Any, Any], order: str, fields: Any
    ) -> Any:
        message = {**fields, "by": self.by}
        if self.key is None:
            return message
        described = await handle.describe()
        first = described.raw_description.workflow_execution_info.first_run_id
        proof = self.prove(rig, f"{handle.id}/{first}", order, fields)
        return {**message, "proof": proof.model_dump(mode="json")}

    def prove(self, rig: Rig, receiver: str, order: str, fields: Any) -> Proof:
        assert self.key is not None
        nonce, namespace = uuid.uuid4().hex, rig.client.namespace
        return sign_order(self.key, receiver, order, fields, nonce=nonce, namespace=namespace).proof


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: make_key(folder, name) for name in PEOPLE}


def write_access(keys: dict[str, Path], **more: Any) -> dict[str, Any]:
    people = {
        name: {"role": role, "keys": [read_public(keys[name])]} for name, role in PEOPLE.items()
    }
    return {"people": people, **more}


def list_callers(keys: dict[str, Path]) -> list[Caller]:
    """Every person, proven and claimed; one whom the file does not name; and the web UI."""
    proven = [Caller(name, key) for name, key in keys.items()]
    return [*proven, *(Caller(name) for name in PEOPLE), Caller("mallory"), Caller("")]


async def read_fleet(rig: Rig) -> FleetState:
    state: FleetState = await rig.fleet.query("state", result_type=FleetState)
    return state


async def until(holds: Callable[[], Awaitable[Any]], what: str) -> Any:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not (found := await holds()):
        assert asyncio.get_running_loop().time() < deadline, f"never {what}"
        await asyncio.sleep(0.05)
    return found


async def order_fleet(rig: Rig, caller: Caller, name: str, fields: dict[str, Any]) -> str:
    """Give an order to the fleet; return its refusal, or an empty text."""
    before = (await read_fleet(rig)).notices
    await rig.fleet.signal(name, await caller.sign(rig, rig.fleet, name, fields))

    async def look() -> str:
        state = await read_fleet(rig)
        return state.notices[-1] if state.notices != before else "shown" if shows(state) else ""

    def shows(state: FleetState) -> bool:
        node = next(one for one in state.nodes if one.name == fields.get("node", "n1"))
        match name:
            case "quarantine":
                return node.status is NodeStatus.QUARANTINED and node.by == caller.shown
            case "release":
                return node.status is NodeStatus.IN_SERVICE
            case _:
                return False

    notice = str(await until(look, f"an effect of {name} by {caller}"))
    return notice.partition(REFUSED)[2]


async def submit(rig: Rig, caller: Caller, policy_: Any = None, **spec: Any) -> Job:
    """Submit a job as a person does, who signs it if they have a key."""
    name = f"job-{uuid.uuid4().hex[:8]}"
    job = JobSpec.model_validate(
        {
            "name": name,
            "command": ["train"],
            "nodes": 2,
            "nproc_per_node": 2,
            "fleet": rig.fleets.known.name,
            **spec,
        }
    )
    start = TrainingJobInput(spec=job, policy=policy_ or policy(), submitted_by=caller.by)
    id_ = f"job/{name}"
    if caller.key is not None:
        fields = start.describe_submission()
        start = replace(start, proof=caller.prove(rig, id_, "TrainingJob", fields))
    handle = await rig.client.start_workflow(
        "TrainingJob", start, id=id_, task_queue=rig.queue, task_timeout=timedelta(seconds=10)
    )
    return rig.adopt(handle)


async def order_job(rig: Rig, job: Job, caller: Caller, name: str, fields: dict[str, Any]) -> str:
    """Send a job a signal; return its refusal, or an empty text."""

    async def read_outcomes() -> list[dict[str, Any]]:
        return list(await job.handle.query("orders"))

    known = max((one["number"] for one in await read_outcomes()), default=0)
    await job.handle.signal(name, await caller.sign(rig, job.handle, name, fields))

    async def look() -> dict[str, Any] | None:
        return next((one for one in await read_outcomes() if one["number"] > known), None)

    outcome = await until(look, f"an outcome of {name} by {caller}")
    assert outcome["name"] == name and outcome["by"] == caller.by
    return str(outcome["refusal"])


async def update(
    rig: Rig, handle: WorkflowHandle[Any, Any], caller: Caller, name: str, fields: dict[str, Any]
) -> str:
    """Send an update; return its refusal, or an empty text."""
    try:
        await handle.execute_update(name, await caller.sign(rig, handle, name, fields))
    except WorkflowUpdateFailedError as error:
        return str(getattr(error.cause, "message", error.cause))
    return ""


def may(caller: Caller, wanted: set[str], unproven: set[str]) -> bool:
    """What docs/access.md says, written down once more in other words."""
    researcher = {"submit", "cancel-own", "retry-own", "answer-own", "policy-own"}
    operator = {"submit", "cancel", "retry", "answer", "policy", "drain", "pause"}
    rights = (
        {
            "researcher": researcher,
            "operator": operator,
            "admin": operator | {"repair", "declare-dead"},
        }[PEOPLE[caller.name]]
        if caller.name in PEOPLE
        else set()
    )
    return bool(rights & wanted) and (caller.key is not None or bool(unproven & wanted))


RESEARCHER = {"submit", "cancel-own", "retry-own", "answer-own", "policy-own"}


async def test_orders_to_a_build_without_a_name_are_signed(
    make_rig: MakeRig, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its workflows answer tells that they take a proof."""
    monkeypatch.setenv("RELAUNCH_SSH_KEY", str(keys["ada"]))
    async with make_rig(Script(then="hang"), access=write_access(keys)) as rig:
        job = await submit(rig, Caller("ada", keys["ada"]))
        await job.until_phase(Phase.RUNNING)
        for workflow_id, order in ((rig.fleet.id, "pause"), (job.handle.id, "cancel")):
            message = await sign_message(rig.client, workflow_id, order, {"by": "ada@laptop"})
            assert "proof" in message
            await rig.client.get_workflow_handle(workflow_id).signal(order, message)
        assert (await job.result()).phase is Phase.CANCELLED
        assert (await read_fleet(rig)).breaker.paused


@workflow.defn(name="Fleet", sandboxed=False)
class FleetWithoutProofs:
    """As 0.1.0 answers: it has no query that tells that it takes a proof."""

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.query
    def state(self) -> str:
        return ""


async def test_orders_to_a_fleet_of_an_older_build_are_unsigned(
    server: Client, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no worker answers, a newer one may get the order."""
    monkeypatch.setenv("RELAUNCH_SSH_KEY", str(keys["ada"]))
    queue = f"older-{uuid.uuid4().hex[:8]}"
    async with Worker(server, task_queue=queue, workflows=[FleetWithoutProofs]):
        fleet = await server.start_workflow("Fleet", id=queue, task_queue=queue)
        order = {"by": "ada@laptop"}
        assert await sign_message(server, fleet.id, "pause", order) == order
    monkeypatch.setattr(sign, "ASK_TIMEOUT", timedelta(seconds=1))
    assert "proof" in await sign_message(server, fleet.id, "pause", order)
    await fleet.terminate("the test is over")


async def test_only_a_proven_caller_quarantines_or_cancels(
    make_rig: MakeRig, keys: dict[str, Path]
) -> None:
    async with make_rig(Script(then="hang"), access=write_access(keys)) as rig:
        job = await submit(rig, Caller("rita", keys["rita"]))
        state = await job.until_phase(Phase.RUNNING)
        assert state.submitted_by == "rita"
        refusal = await order_job(rig, job, Caller("rob", keys["rob"]), "cancel", {})
        assert refusal.startswith("rob may not cancel job")
        assert (await job.state()).phase is Phase.RUNNING
        assert await order_job(rig, job, Caller("rita", keys["rita"]), "cancel", {}) == ""
        assert (await job.result()).phase is Phase.CANCELLED
        refusal = await order_fleet(rig, Caller("ada"), "quarantine", {"node": "n1"})
        assert refusal.startswith("ada@laptop (claimed) may not quarantine n1 without proof")
        ada = Caller("ada", keys["ada"])
        assert await order_fleet(rig, ada, "quarantine", {"node": "n1"}) == ""
        # The same signed message again, as a person who reads the history could send it.
        message = await ada.sign(rig, rig.fleet, "release", {"node": "n1"})
        await rig.fleet.signal("release", message)
        await rig.fleet.signal(
            "quarantine", await ada.sign(rig, rig.fleet, "quarantine", {"node": "n1"})
        )
        await rig.fleet.signal("release", message)

        async def look() -> str:
            found = [one for one in (await read_fleet(rig)).notices if "used before" in one]
            return found[0] if found else ""

        await until(look, "a refusal of the repeated order")
        assert (await read_fleet(rig)).nodes[0].status is NodeStatus.QUARANTINED


async def test_orders_to_a_job_that_was_taken_over_are_checked(
    make_uncached_rig: MakeRig, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task is replayed from the beginning, also what 0.1.0 did, which had no patches."""
    ada = Caller("ada", keys["ada"])
    fails = Exit(generation=1, rank=0, exit_code=1)
    async with make_uncached_rig(Script((fails,), then="hang"), is_patched=True) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(workflow, "patched", lambda *_, **__: False)
            job = await submit(rig, Caller("rita"), policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            change: dict[str, Any] = {"policy": {"max_restarts": 7}}
            assert await update(rig, job.handle, Caller("rob"), "change_policy", change) == ""
            answer = {"decision": "approve"}
            assert await update(rig, job.handle, Caller("rob"), "answer", answer) == ""
            await job.until_phase(Phase.RUNNING, 2)
            await job.until_idle()
        rig.fleets.known = rig.fleets.known.model_copy(
            update={"access": Access.model_validate(write_access(keys))}
        )
        await job.handle.signal("cancel", {"by": "rob@laptop"})
        refused = "rob@laptop (claimed) may not cancel job"
        state = await job.until(lambda s: s.ending is not None or refused in s.notices[-1])
        assert state.ending is None
        refusal = await update(rig, job.handle, Caller("rob"), "change_policy", change)
        assert refusal.startswith("rob@laptop (claimed) may not change the policy of job")
        assert await order_job(rig, job, ada, "cancel", {}) == ""
        assert (await job.result()).phase is Phase.CANCELLED
        orders = [one for one in list_patches(await job.history()) if "check-orders" in one]
        assert orders == ["check-orders-2"]


@pytest.mark.long
async def test_orders_to_a_fleet(make_rig: MakeRig, keys: dict[str, Path]) -> None:
    commands: list[tuple[str, dict[str, Any], str]] = [
        ("quarantine", {"node": "n1", "reason": "a fan"}, "drain"),
        ("release", {"node": "n1", "reason": "mended"}, "drain"),
        ("declare_dead", {"node": "n2", "reason": "burnt"}, "declare-dead"),
        ("pause", {"reason": "an outage"}, "pause"),
        ("resume", {"reason": "over"}, "pause"),
    ]
    cells = 0
    async with make_rig(access=write_access(keys)) as rig:
        await rig.tell_fleet("apply", {})
        await until(lambda: is_read(rig), "read")
        for name, fields, permission in commands:
            for caller in list_callers(keys):
                refusal = await order_fleet(rig, caller, name, fields)
                wanted = may(caller, {permission}, RESEARCHER)
                assert (refusal == "") is wanted, (name, caller, refusal)
                assert not refusal or refusal.startswith(f"{caller.shown} may not ")
                cells += 1
    assert cells == 5 * 10


def list_patches(history: WorkflowHistory) -> list[str]:
    markers = [event.marker_recorded_event_attributes for event in history.events]
    patches = [one.details["patch-data"].payloads[0] for one in markers if one.marker_name]
    return [json.loads(decrypt(one).data)["id"] for one in patches]


async def is_read(rig: Rig) -> bool:
    return (await read_fleet(rig)).is_file_read


@pytest.mark.long
async def test_orders_to_a_job(make_rig: MakeRig, keys: dict[str, Path]) -> None:
    rita = Caller("rita", keys["rita"])
    script = Script((Exit(rank=0, exit_code=1),))
    cells = 0
    async with make_rig(script, access=write_access(keys)) as rig:
        job = await submit(rig, rita, policy(causes=ASK))
        for caller in list_callers(keys):
            for name, fields, permission in (
                ("answer", {"decision": "snooze", "within": "1h"}, "answer"),
                ("change_policy", {"policy": {"max_restarts": 5 + cells}}, "policy"),
                ("report", {"node": "n1", "force": True}, "declare-dead"),
                ("force_retry", {}, "retry"),
                ("cancel", {}, "cancel"),
            ):
                await job.until_phase(Phase.WAITING_FOR_PERSON)
                is_own = caller.name == "rita" and permission != "declare-dead"
                wanted = {permission} | ({f"{permission}-own"} if is_own else set())
                if name in ("answer", "change_policy"):
                    refusal = await update(rig, job.handle, caller, name, fields)
                else:
                    refusal = await order_job(rig, job, caller, name, fields)
                expected = may(caller, wanted, RESEARCHER)
                assert (refusal == "") is expected, (name, caller, refusal)
                cells += 1
                if not expected:
                    assert refusal.startswith(f"{caller.shown} may not "), refusal
                    state = await job.until(lambda s, r=refusal: any(r in n for n in s.notices))
                    assert state.phase is Phase.WAITING_FOR_PERSON
                elif name == "force_retry":
                    generation = (await job.state()).generation
                    await job.until(lambda s, g=generation: s.generation >= g)
                elif name == "cancel":
                    assert (await job.result()).phase is Phase.CANCELLED
                    job = await submit(rig, rita, policy(causes=ASK))
        await job.handle.cancel()  # as the button of the web UI: it names no one
        state = await job.until(lambda s: any("unnamed caller" in n for n in s.notices))
        assert state.phase is not Phase.CANCELLED
    assert cells == 10 * 5


@pytest.mark.long
async def test_submissions(make_rig: MakeRig, keys: dict[str, Path]) -> None:
    async with make_rig(Script(then="succeed"), access=write_access(keys)) as rig:
        for caller in list_callers(keys):
            job = await submit(rig, caller)
            result = await job.result()
            assert result.state.submitted_by in (caller.shown, caller.by)
            if may(caller, {"submit"}, RESEARCHER):
                assert result.phase is Phase.SUCCEEDED
                assert result.state.submitted_by == caller.shown
            else:
                assert result.phase is Phase.FAILED and result.generation <= 1
                assert result.reason.startswith(f"{caller.shown} may not submit job")
        # What was signed is that job alone.
        signed = await submit(rig, Caller("ada", keys["ada"]))
        start = (await signed.history()).events[0].workflow_execution_started_event_attributes
        (given,) = await rig.client.data_converter.decode(
            list(start.input.payloads), [TrainingJobInput]
        )
        other = replace(given, spec=given.spec.model_copy(update={"command": ("rm", "-r", "/")}))
        await signed.result()
        handle = await rig.client.start_workflow(
            "TrainingJob", other, id=signed.handle.id, task_queue=rig.queue
        )
        copied = rig.adopt(handle)
        assert (await copied.result()).reason.startswith("root@node (claimed) may not submit")
        assert rig.launches()


@pytest.mark.long
async def test_orders_of_repairs(make_rig: MakeRig, keys: dict[str, Path]) -> None:
    async with make(make_rig, access=write_access(keys)) as rig:
        await rig.tell_fleet("apply", {})
        await until(lambda: is_read(rig), "read")
        fleet = rig.fleets.known.name
        for caller in list_callers(keys):
            for strategy, power in (
                (Strategy.RESET_GPU, False),
                (Strategy.REBOOT_NODE, False),
                (Strategy.REBOOT_NODE, True),
            ):
                order = NodeRepairInput(
                    fleet=fleet,
                    node="n2",
                    strategy=strategy,
                    reason="it is slow",
                    by=caller.by,
                    deadline=datetime.now(UTC) + timedelta(minutes=5),
                    approved_by="the pope",
                    power=power,
                )
                id_ = f"repair/{fleet}/n2"
                if caller.key is not None:
                    proof = caller.prove(rig, id_, "NodeRepair", order.describe_repair())
                    order = replace(order, proof=proof)
                before = len(rig.backend.upkeep)
                result = await repair(rig, order, id_)
                did = [one.kind for one in rig.backend.upkeep[before:]]
                if may(caller, {"repair"}, RESEARCHER) and not power:
                    assert result.outcome == "done", result
                    assert did
                else:
                    assert result.outcome == "refused"
                    is_allowed = may(caller, {"repair"}, RESEARCHER)
                    start = "cannot power-cycle" if is_allowed else f"{caller.shown} may not "
                    assert result.reason.startswith(start), result
                    assert did == []
        # The order of ada's reboot once more, by a person who has read it in the history.
        ada = Caller("ada", keys["ada"])
        order = replace(order, strategy=Strategy.RESET_GPU, power=False, by=ada.by)
        order = replace(order, proof=ada.prove(rig, id_, "NodeRepair", order.describe_repair()))
        assert (await repair(rig, order, id_)).outcome == "done"
        again = await repair(rig, order, id_)
        assert again.outcome == "refused" and "was used for another repair" in again.reason
        # What a stranger claims to be called is text on the page.
        hostile = replace(order, by="[bob](http://evil)", proof=None)
        assert (await repair(rig, hostile, id_)).outcome == "refused"
        page = str(await rig.client.get_workflow_handle(id_).query("__temporal_workflow_metadata"))
        assert "bob" in page and "[bob](" not in page, page
        # An activity that is started by itself asks no fleet for a permit.
        with pytest.raises(Exception, match=r"Activity task failed|failed") as failed:
            await rig.client.execute_activity(
                "order_repair",
                RepairOrder(fleet, "n2", "x", "reboot", timedelta(seconds=5), "boot"),
                id=f"order/{fleet}",
                task_queue=rig.queue,
                schedule_to_close_timeout=timedelta(seconds=20),
            )
        assert "only a repair orders that" in str(failed.value.__cause__ or failed.value)


@workflow.defn(name="NodeRepair", sandboxed=False)
class ForgedRepair:
    """A workflow of a stranger's own worker, under the name and id of a repair."""

    @workflow.run
    async def run(self, order: RepairOrder, queue: str) -> Any:
        return await workflow.execute_activity(
            "order_repair", order, task_queue=queue, schedule_to_close_timeout=timedelta(seconds=20)
        )


@pytest.mark.long
async def test_a_worker_checks_itself_what_a_person_has_signed(
    make_rig: MakeRig, keys: dict[str, Path]
) -> None:
    async with make(make_rig, repairs="ask", access=write_access(keys)) as rig:
        fleet = rig.fleets.known.name
        id_ = f"repair/{fleet}/n2"
        forged = RepairOrder(fleet, "n2", "x", "reboot", timedelta(seconds=5), "boot")
        queue = f"stranger-{fleet}"
        async with Worker(rig.client, task_queue=queue, workflows=[ForgedRepair]):
            said = await rig.client.execute_workflow(
                "NodeRepair", args=[forged, rig.queue], id=id_, task_queue=queue
            )
        assert said["why"] == "not_proven" and "no signed order" in said["reason"]
        assert rig.backend.upkeep == []
        # The same by the real workflow, with a signature.
        await rig.tell_fleet("apply", {})
        await until(lambda: is_read(rig), "read")
        ada = Caller("ada", keys["ada"])
        order = NodeRepairInput(
            fleet=fleet,
            node="n2",
            strategy=Strategy.REBOOT_NODE,
            reason="it is slow",
            by=ada.by,
            deadline=datetime.now(UTC) + timedelta(minutes=5),
        )
        order = replace(order, proof=ada.prove(rig, id_, "NodeRepair", order.describe_repair()))
        assert (await repair(rig, order, id_)).outcome == "done"
        assert [one.kind for one in rig.backend.upkeep].count("rebooted") == 1


async def repair(rig: Rig, order: NodeRepairInput, id_: str) -> NodeRepairResult:
    result: NodeRepairResult = await rig.client.execute_workflow(
        "NodeRepair", order, id=id_, task_queue=rig.queue, result_type=NodeRepairResult
    )
    assert isinstance(result.verdict, Verdict)
    return result


@pytest.mark.long
async def test_approvals_of_a_repair_that_a_job_orders(
    make_rig: MakeRig, keys: dict[str, Path]
) -> None:
    fails = Exit(generation=1, node="n2", rank=2, exit_code=1, after=0.2)
    sick = Sick(node="n2", remap_pending=0, until="reboot", when="running")
    access = write_access(keys)
    async with make(make_rig, fails, sick, repairs="ask", access=access) as rig:
        job = await submit(rig, Caller("rita", keys["rita"]), reboot_once())
        handle = await repair_of(rig, job)
        await job.until(lambda s: "n2" in s.next.what and "?" in s.next.what)
        allowed = Caller("ada", keys["ada"])
        approval = {"decision": "approve", "repair": "reboot"}
        for caller in list_callers(keys):
            if caller == allowed:
                continue
            refusal = await update(rig, handle, caller, "answer", approval)
            assert refusal.startswith(f"{caller.shown} may not approve the repair of n2"), refusal
        for other, words in (("", "repair: missing"), ("power-cycle", "approved is power-cycle")):
            refusal = await update(rig, handle, allowed, "answer", {**approval, "repair": other})
            assert words in refusal, refusal
        assert [one for one in rig.backend.upkeep if one.kind == "rebooted"] == []
        assert await update(rig, handle, allowed, "answer", approval) == ""
        assert (await job.result()).phase is Phase.SUCCEEDED
        reboots = [one for one in rig.backend.upkeep if one.kind == "rebooted"]
        assert len(reboots) == 1


@pytest.mark.long
async def test_a_job_that_is_started_by_hand_brings_no_state_along(
    make_rig: MakeRig, keys: dict[str, Path]
) -> None:
    async with make_rig(Script(then="hang"), access=write_access(keys)) as rig:
        job = await submit(rig, Caller("rita", keys["rita"]))
        state = await job.until_phase(Phase.RUNNING)
        assert await order_job(rig, job, Caller("ada", keys["ada"]), "cancel", {}) == ""
        await job.result()
        forged = TrainingJobInput(spec=state.spec, policy=state.policy, resume=state)
        handle = await rig.client.start_workflow(
            "TrainingJob", forged, id=job.handle.id, task_queue=rig.queue
        )
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
        assert "only a run that continues another" in str(failed.value.cause)


@pytest.mark.long
async def test_a_used_signature_stays_used_in_a_continued_run(
    make_short_rig: MakeRig, keys: dict[str, Path]
) -> None:
    rita = Caller("rita", keys["rita"])
    script = Script((Exit(rank=0, exit_code=1),))
    async with make_short_rig(script, access=write_access(keys)) as rig:
        job = await submit(rig, rita, policy(causes=ASK))
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        message = await rita.sign(rig, job.handle, "force_retry", {})
        first = (await job.handle.describe()).run_id
        await job.handle.signal("force_retry", message)

        async def look() -> bool:
            for fields in ({"policy": {"max_restarts": 7}}, {"policy": {"max_restarts": 8}}):
                await update(rig, job.handle, rita, "change_policy", fields)
            return (await job.handle.describe()).run_id != first

        await until(look, "another run of the job")
        await job.handle.signal("force_retry", message)
        await job.until(lambda s: any("was used before" in n for n in s.notices))
