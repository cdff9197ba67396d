"""Examinations and repairs as a job orders them, on simulated nodes.

Tested is what the verdict changes, and what is never done twice.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.client import WorkflowHandle, WorkflowUpdateFailedError

from relaunch.cli import answers
from relaunch.config import ConfigError
from relaunch.evidence.findings import Verdict
from relaunch.job.state import Phase
from relaunch.messages.bounds import MAX_REASON, bound_message
from relaunch.messages.jobs import NodeRepairInput, NodeRepairResult
from relaunch.spec.policy import Policy, Strategy
from relaunch.workflows.node_repair.workflow import join_question
from tests.backends.upkeep_invariants import assert_upkeep
from tests.fakes.nodes import (
    DiagHangs,
    Exit,
    Fault,
    Progress,
    RebootFails,
    RebootHangs,
    Script,
    Sick,
    Takes,
)
from tests.fakes.nodes.health import bus_id
from tests.payloads import decrypt
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import PATIENCE, Job, Rig, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
FAILS = Exit(generation=1, node="n2", rank=2, exit_code=1, after=0.2)
RUNS = Progress(generation=1, steps=((0.0, 5),), hangs=True)
TRAINS = Progress(generation=2, steps=((0.0, 6),))
GPU_0 = bus_id(0)[4:-2]
"""As the kernel writes it."""
XID_119 = (
    f"[  100.0] NVRM: Xid (PCI:{GPU_0}): 119, pid=4711, name=python, "
    "Timeout after 6s of waiting for RPC response from GPU0 GSP!",
)
GPU_HANGS = Exit(
    generation=1, node="n2", rank=2, exit_code=None, signal=6, after=0.2, kernel=XID_119
)


def reboot_once(**changes: Any) -> Policy:
    """Exit 1 on an unhealthy node reboots it once, on a healthy one fails the job."""
    return policy(extends="ecs-reboot-once", **changes)


def make(
    make_rig: MakeRig, *happenings: Any, faults: tuple[Fault, ...] = (), **options: Any
) -> AbstractAsyncContextManager[Rig]:
    """Return a rig whose fleet has a unique name.

    Repairs are named after fleet and node, and the server outlives the test.
    """
    return make_rig(
        Script((RUNS, TRAINS, *happenings), faults, then="succeed"),
        gpus=1,
        name=f"f-{uuid.uuid4().hex[:8]}",
        **options,
    )


def did(rig: Rig, *kinds: str) -> list[tuple[str, str]]:
    return [(one.node, one.command) for one in rig.backend.upkeep if one.kind in kinds]


def decided(state: Any) -> list[tuple[str, str | None]]:
    return [
        (d.decision, d.strategy)
        for incident in (*state.incidents, state.incident)
        if incident
        for d in incident.decisions
    ]


async def repair_of(rig: Rig, job: Job, node: str = "n2") -> WorkflowHandle[Any, Any]:
    await job.until_phase(Phase.REPAIRING)
    return rig.client.get_workflow_handle(
        f"repair/{rig.fleets.known.name}/{node}", result_type=NodeRepairResult
    )


async def test_s1_5_an_unhealthy_node_is_rebooted_once_and_examined(
    make_rig: MakeRig,
) -> None:
    async with make(
        make_rig, FAILS, Sick(node="n2", remap_pending=0, until="reboot", when="running")
    ) as rig:
        job = await rig.submit(reboot_once())
        result = await job.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)
        assert decided(result.state) == [
            ("Examine", None),
            ("Repair", "REBOOT_NODE"),
            ("Relaunch", None),
        ]
        assert did(rig, "rebooted") == [("n2", "reboot")]
        order = [one.command for one in rig.backend.upkeep if one.kind == "began"]
        assert order == ["diagnose", "reboot", "diagnose"]
        assert_upkeep(rig.backend)


async def test_s1_5_a_healthy_node_is_not_rebooted_and_the_job_fails(make_rig: MakeRig) -> None:
    async with make(make_rig, FAILS) as rig:
        result = await (await rig.submit(reboot_once())).result()
        assert (result.phase, result.generation) == (Phase.FAILED, 1)
        assert "-r 2" in str([one.reason for one in result.incidents[0].decisions])
        assert did(rig, "rebooted") == []


async def test_s1_4_an_examination_that_never_ends_is_inconclusive(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, FAILS, DiagHangs(node="n2")) as rig:
        result = await (await rig.submit(reboot_once(timeouts={"examination": "12s"}))).result()
        assert result.phase is Phase.FAILED
        assert did(rig, "rebooted") == []
        assert "UNKNOWN" in str(result.incidents[0].decisions)


async def test_s4_1_a_gpu_that_a_reset_heals_keeps_the_job_in_place(
    make_rig: MakeRig,
) -> None:
    async with make(
        make_rig, GPU_HANGS, Sick(node="n2", remap_pending=0, until="reset", when="running")
    ) as rig:
        result = await (await rig.submit(policy())).result()
        assert (result.phase, result.generation, result.state.restarts_spent) == (
            Phase.SUCCEEDED,
            2,
            0,
        )
        assert [slot.node for slot in result.state.slots] == ["n1", "n2"]
        assert [one for one in did(rig, "began") if one[1] != "diagnose"] == [("n2", "reset-gpus")]


async def test_s4_2_a_node_is_replaced_where_its_reset_does_not_help(
    make_rig: MakeRig,
) -> None:
    async with make(
        make_rig, GPU_HANGS, Sick(node="n2", remap_failed=0, when="running"), spares=1
    ) as rig:
        result = await (await rig.submit(policy())).result()
        assert (result.phase, [slot.node for slot in result.state.slots]) == (
            Phase.SUCCEEDED,
            ["n1", "n3"],
        )
        assert decided(result.state) == [("Repair", "RESET_GPU"), ("Relaunch", "REPLACE_NODE")]
        assert [avoided.node for avoided in result.state.avoided] == ["n2"]


async def test_s1_6_a_reboot_whose_answer_is_lost_happens_once(
    make_rig: MakeRig,
) -> None:
    sick = Sick(node="n2", remap_pending=0, until="reboot", when="running")
    async with make(
        make_rig, FAILS, sick, faults=(Fault(kind="lose_answer", command="reboot", node="n2"),)
    ) as rig:
        result = await (await rig.submit(reboot_once())).result()
        assert result.phase is Phase.SUCCEEDED
        assert did(rig, "rebooted") == [("n2", "reboot")]


@pytest.mark.long
async def test_an_examination_whose_answer_is_lost_is_asked_for_again(
    make_rig: MakeRig,
) -> None:
    sick = Sick(node="n2", remap_pending=0, until="reboot", when="running")
    async with make(
        make_rig, FAILS, sick, faults=(Fault(kind="lose_answer", command="diagnose", node="n2"),)
    ) as rig:
        result = await (await rig.submit(reboot_once())).result()
        assert result.phase is Phase.SUCCEEDED
        assert decided(result.state)[:2] == [("Examine", None), ("Repair", "REBOOT_NODE")]


@pytest.mark.parametrize(
    ("happening", "reason", "deadlines"),
    [
        pytest.param(
            RebootFails(node="n2"),
            "sudo: a password is required",
            ("90s",),
            id="the command fails",
        ),
        pytest.param(
            RebootHangs(node="n2", answers=True),
            "boot id",
            ("25s", "90s"),
            id="it goes on running with the old boot id",
        ),
        pytest.param(
            RebootHangs(node="n2"),
            "no answer to probe",
            ("25s", "90s"),
            id="it does not come back",
            marks=pytest.mark.long,
        ),
    ],
)
async def test_s1_4_a_futile_reboot_ends_and_the_ladder_goes_on(
    make_rig: MakeRig, happening: Any, reason: str, deadlines: tuple[str, ...]
) -> None:
    """Only its deadline ends a reboot that hangs.

    On a busy machine an early one may pass before the reboot has begun; then a later one is tried.
    """
    sick = Sick(node="n2", remap_pending=0, until="reboot", when="running")
    said = []
    for deadline in deadlines:
        async with make(make_rig, FAILS, sick, happening) as rig:
            job = await rig.submit(reboot_once(timeouts={"reboot": deadline}))
            result = await job.result()
            assert result.phase is Phase.FAILED
            assert did(rig, "rebooted") == []
            said.append(result.reason)
        if reason in result.reason:
            return
    pytest.fail(f"expected {reason!r}: {said}")


async def test_a_repair_that_needs_approval_waits_and_the_job_says_so(
    make_rig: MakeRig,
) -> None:
    async with make(
        make_rig,
        FAILS,
        Sick(node="n2", remap_pending=0, until="reboot", when="running"),
        repairs="ask",
    ) as rig:
        job = await rig.submit(reboot_once())
        repair = await repair_of(rig, job)
        state = await job.until(
            lambda s: "n2" in s.next.what and "?" in s.next.what, "a question on the job's page"
        )
        assert state.phase is Phase.REPAIRING
        assert did(rig, "rebooted") == []
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await repair.execute_update("answer", {"decision": "perhaps"})
        assert "decision" in str(refused.value.cause)
        # A person who has read another question approves that one, not this reboot.
        approve = f"relaunch nodes answer n2 approve --reboot --fleet {rig.fleets.known.name}"
        assert approve in state.next.what
        for other in ("reset-gpus", "power-cycle"):
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await repair.execute_update("answer", {"decision": "approve", "repair": other})
            assert other in str(refused.value.cause)
        await refuse_by_command(rig, job, approve)
        assert (await job.state()).phase is Phase.REPAIRING and did(rig, "rebooted") == []
        await answers.for_node(
            rig.client, rig.fleets.known.name, "n2", "approve", "no other job is on it", "reboot"
        )
        assert (await job.result()).phase is Phase.SUCCEEDED
        assert did(rig, "rebooted") == [("n2", "reboot")]
        with pytest.raises(ConfigError, match="asks nothing now"):
            await answers.for_node(rig.client, rig.fleets.known.name, "n2", "approve", "go on")
        assert await questions(job) == ["asked", ""], (
            "its page asks no longer once there is an answer"
        )


@pytest.mark.long
@pytest.mark.parametrize("then", ["approved", "cancelled", "terminated"])
async def test_a_job_that_continues_as_new_follows_its_repair(
    make_short_rig: MakeRig, then: str
) -> None:
    sick = Sick(node="n2", remap_pending=0, until="reboot", when="running")
    async with make(make_short_rig, FAILS, sick, repairs="ask") as rig:
        job = await rig.submit(reboot_once())
        repair = await repair_of(rig, job)
        await job.until(lambda s: "?" in s.next.what, "a question")
        before, deadline = len(await job.runs()), asyncio.get_running_loop().time() + PATIENCE
        while len(await job.runs()) < before + 3:
            assert asyncio.get_running_loop().time() < deadline, "it does not continue as new"
            await job.handle.signal("report", {"reason": "something"})
            await asyncio.sleep(0.05)
        state = await job.state()
        assert (state.phase, "?" in state.next.what) == (Phase.REPAIRING, True)
        assert did(rig, "rebooted") == []
        if then == "approved":
            await repair.execute_update("answer", {"decision": "approve", "by": "grace"})
            assert (await job.result()).phase is Phase.SUCCEEDED
            assert did(rig, "rebooted") == [("n2", "reboot")]
        elif then == "cancelled":
            await job.handle.signal("cancel", {"reason": "enough"})
            assert (await job.result()).phase is Phase.CANCELLED
            ended = await asyncio.wait_for(repair.result(), PATIENCE)
            assert (ended.outcome, did(rig, "rebooted")) == ("refused", [])
        else:
            await repair.terminate("mine")
            result = await job.result()
            assert (result.phase, did(rig, "rebooted")) == (Phase.FAILED, [])
            assert "ended from outside" in result.reason


async def test_a_long_question_does_not_cost_its_commands() -> None:
    answers = "Answer with `relaunch nodes answer n2 approve --reboot --fleet lab --reason …`"
    joined = join_question("why? " * 200, answers)
    assert len(joined) <= MAX_REASON and joined.startswith("why? why?")
    assert bound_message({"question": joined})["question"].endswith(answers)


async def refuse_by_command(rig: Rig, job: Job, approve: str) -> None:
    """Commands that a person typed for another question approve no reboot of n2."""
    name, fleet = job.handle.id.removeprefix("job/"), rig.fleets.known.name
    for decision in ("approve", "deny"):
        with pytest.raises(ConfigError) as refused:
            await answers.for_job(rig.client, name, decision, "go on")
        assert f"`{approve} --reason …`" in str(refused.value)
    with pytest.raises(ConfigError, match="asks for --reboot now"):
        await answers.for_node(rig.client, fleet, "n2", "approve", "go on")
    with pytest.raises(ConfigError, match="asks for --reboot now, and"):
        await answers.for_node(rig.client, fleet, "n2", "approve", "go on", "power-cycle")
    with pytest.raises(ConfigError, match="no repair"):
        await answers.for_node(rig.client, fleet, "n1", "approve", "go on", "reboot")


async def questions(job: Job) -> list[str]:
    """What repairs have told the job that they ask, in order."""
    signals = [
        event.workflow_execution_signaled_event_attributes for event in (await job.history()).events
    ]
    told = [one.input.payloads for one in signals if one.signal_name == "repair_asks"]
    messages = [json.loads(decrypt(payloads[0]).data) for payloads in told]
    return ["asked" if "?" in message["question"] else message["question"] for message in messages]


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(("repairs", "reason"), [("ask", "grace"), ("observe", "observe")])
async def test_a_repair_denied_or_only_observed_moves_the_ladder_on(
    make_rig: MakeRig, repairs: str, reason: str
) -> None:
    async with make(
        make_rig,
        FAILS,
        Sick(node="n2", remap_pending=0, until="reboot", when="running"),
        repairs=repairs,
    ) as rig:
        job = await rig.submit(reboot_once())
        if repairs == "ask":
            repair = await repair_of(rig, job)
            await job.until(lambda s: "?" in s.next.what, "a question")
            await repair.execute_update(
                "answer", {"decision": "deny", "by": "grace", "reason": "mine"}
            )
        result = await job.result()
        assert result.phase is Phase.FAILED
        assert reason in result.reason
        assert did(rig, "began")[1:] == []


@pytest.mark.long
async def test_a_cancel_stops_a_repair_only_before_its_order(
    make_rig: MakeRig,
) -> None:
    sick = Sick(node="n2", remap_pending=0, until="reboot", when="running")
    async with make(make_rig, FAILS, sick, repairs="ask") as rig:
        job = await rig.submit(reboot_once())
        repair = await repair_of(rig, job)
        await job.until(lambda s: "?" in s.next.what, "a question")
        await job.handle.signal("cancel", {"reason": "enough"})
        assert (await job.result()).phase is Phase.CANCELLED
        ended = await asyncio.wait_for(repair.result(), PATIENCE)
        assert (ended.outcome, did(rig, "rebooted")) == ("refused", [])
    async with make(make_rig, FAILS, sick, Takes(node="n2", command="reboot", seconds=4.0)) as rig:
        job = await rig.submit(reboot_once())
        repair = await repair_of(rig, job)
        await job.until(lambda _: ("n2", "reboot") in did(rig, "began"), "an order to reboot")
        await job.handle.signal("cancel", {"reason": "enough"})
        assert (await job.result()).phase is Phase.CANCELLED
        ended = await asyncio.wait_for(repair.result(), PATIENCE)
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY)
        assert did(rig, "rebooted") == [("n2", "reboot")]


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("others", [0, 1])
async def test_a_job_that_meets_a_busy_node_takes_another_or_waits(
    make_rig: MakeRig, others: int
) -> None:
    examined = Takes(node="n2", command="diagnose", seconds=600.0)
    async with make_rig(
        Script((examined,), then="run"), gpus=1, name=f"f-{uuid.uuid4().hex[:8]}", nodes=2 + others
    ) as rig:
        checking = asyncio.create_task(rig.backend.diagnose("n2", "a person", 2, 600.0))
        while not did(rig, "began"):  # noqa: ASYNC110  (a simulated node sends no event)
            await asyncio.sleep(0.01)
        job = await rig.submit(policy())
        if others:
            state = await job.until_phase(Phase.RUNNING)
            assert [slot.node for slot in state.slots] == ["n1", "n3"]
        else:
            state = await job.until(
                lambda s: s.phase is Phase.QUEUED and "a person" in s.reason, "told who works at n2"
            )
        checking.cancel()
        if not others:
            state = await job.until_phase(Phase.RUNNING)
            assert [slot.node for slot in state.slots] == ["n1", "n2"]
        await job.handle.signal("cancel")
        await job.result()


async def test_a_node_is_never_repaired_twice_at_once_nor_under_ranks(make_rig: MakeRig) -> None:
    async with make(make_rig) as rig:
        job = await rig.submit(policy())
        await job.until_phase(Phase.RUNNING)
        fleet = rig.fleets.known.name
        order = NodeRepairInput(
            fleet=fleet,
            node="n2",
            strategy=Strategy.REBOOT_NODE,
            reason="a person wants it",
            by="grace",
            deadline=datetime.now(UTC) + timedelta(minutes=1),
            approved_by="grace",
        )
        ended = await rig.client.execute_workflow(
            "NodeRepair",
            order,
            id=f"repair/{fleet}/n2",
            task_queue=rig.queue,
            result_type=NodeRepairResult,
        )
        assert ended.outcome == "refused"
        assert job.handle.id.removeprefix("job/") in ended.reason, "it names who uses the node"
        assert did(rig, "began", "rebooted") == []
        await job.handle.signal("cancel")
        await job.result()
