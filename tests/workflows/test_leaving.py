"""Jobs that are asked for a node, with their fleet.

They leave it at a checkpoint, or say no to that until it is time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowUpdateFailedError

from relaunch.cli.jobs import load_job
from relaunch.job.state import JobState, Phase
from relaunch.pool.state import FleetState, NodeStatus
from tests.fakes.nodes import Exit, Progress, Script, Sick
from tests.fakes.nodes.health import bus_id
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Job, Rig, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
XID_79 = (
    f"[  100.0] NVRM: Xid (PCI:{bus_id(0)[4:-2]}): 79, pid=4711, name=python, "
    "GPU has fallen off the bus.",
)
DRAIN = {"node": "n2", "reason": "swap its PSU", "by": "carol", "drain": True, "within": "2h"}


def saving(every: float = 0.5, **more: Any) -> Progress:
    """Rank 0 finishes a checkpoint of ten more steps each time."""
    return Progress(
        rank=0,
        steps=((0.0, 5),),
        checkpoints=tuple((every * n, 10 * n) for n in range(1, 200)),
        hangs=True,
        **more,
    )


def make(make_rig: MakeRig, *happenings: Any, **options: Any) -> AbstractAsyncContextManager[Rig]:
    return make_rig(
        Script(happenings, then="run"), name=f"f-{uuid.uuid4().hex[:8]}", gpus=8, **options
    )


def nodes_of(state: JobState) -> list[str]:
    return [slot.node for slot in state.slots]


def standing(node: str, wanted: NodeStatus) -> Callable[[FleetState], bool]:
    return lambda state: any(
        record.name == node and record.status is wanted for record in state.nodes
    )


async def ended(*jobs: Job) -> None:
    for job in jobs:
        await job.handle.signal("cancel")
    for job in jobs:
        await job.result()


async def checkpoint_seen(job: Job, least: int) -> None:
    """Wait until the watch of the job shows people a checkpoint of at least this step."""

    async def read_checkpoint() -> int:
        watch = (await load_job(job.client, job.handle.id.removeprefix("job/"))).watch
        return -1 if watch is None or watch.checkpoint is None else watch.checkpoint

    while await read_checkpoint() < least:
        assert (await job.state()).phase is Phase.RUNNING


async def test_a_drained_node_is_left_after_the_checkpoint(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, saving(generation=1), nodes=2, spares=1) as rig:
        job = await rig.submit(gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await rig.fleet.signal("quarantine", DRAIN)
        state = await job.until_phase(Phase.RUNNING, 2)
        assert nodes_of(state) == ["n1", "n3"]
        assert (
            state.restarts_spent,
            state.tries,
            state.incidents,
            state.incident,
            state.drains,
        ) == (0, (), (), None, ())
        told = [
            event.workflow_execution_signaled_event_attributes.signal_name
            async for event in job.handle.fetch_history_events()
        ]
        assert told.count("drain_node") == 1
        launched = await job.until(
            lambda s: any("checkpoint of step" in notice for notice in s.notices), "told why"
        )
        assert any(
            all(word in notice for word in ("carol", "n2", "swap its PSU", "checkpoint"))
            for notice in launched.notices
        )
        watches = [
            event
            async for event in job.handle.fetch_history_events()
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
            and event.activity_task_scheduled_event_attributes.activity_type.name == "watch_ranks"
        ]
        assert len(watches) == 3, "one of generation 1 was exchanged, one watches generation 2"
        await ended(job)


@pytest.mark.long
async def test_a_denial_outlasts_checkpoints_and_relaunches_until_now(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, saving(0.2, generation=2), nodes=2, spares=1) as rig:
        job = await rig.submit(gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await rig.fleet.signal("quarantine", DRAIN)
        await job.until(lambda s: bool(s.drains), "asked to leave")
        said = await job.handle.execute_update(
            "answer", {"decision": "deny", "node": "n2", "reason": "evaluation", "by": "alice"}
        )
        assert "n2" in said
        await job.handle.signal("force_retry")
        state = await job.until_phase(Phase.RUNNING, 2)
        denied = state.drains[0].denied
        assert nodes_of(state) == ["n1", "n2"]
        assert "alice" in denied and "evaluation" in denied
        await checkpoint_seen(job, 30)
        assert nodes_of(await job.state()) == ["n1", "n2"], "checkpoints pass"
        assert denied in (await job.handle.query("next"))["what"]
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await job.handle.execute_update("answer", {"decision": "approve", "node": "n1"})
        assert "n1" in str(refused.value.cause)
        said = await job.handle.execute_update(
            "answer", {"decision": "approve", "node": "n2", "by": "alice"}
        )
        assert "n2" in said
        state = await job.until_phase(Phase.RUNNING, 3)
        assert (nodes_of(state), state.drains, state.restarts_spent) == (["n1", "n3"], (), 0)
        await ended(job)


@pytest.mark.long
async def test_a_job_that_says_no_is_moved_when_the_time_is_over(make_rig: MakeRig) -> None:
    async with make(make_rig, saving(0.2, generation=1), nodes=2, spares=1) as rig:
        job = await rig.submit(gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await rig.fleet.signal("quarantine", {**DRAIN, "within": "4s"})
        await job.until(lambda s: bool(s.drains) or s.generation > 1, "asked to leave")
        await job.handle.execute_update("answer", {"decision": "deny", "node": "n2"})
        state = await job.until_phase(Phase.RUNNING, 2)
        assert nodes_of(state) == ["n1", "n3"]
        await ended(job)


@pytest.mark.long
async def test_a_drain_that_is_taken_back_leaves_the_job_where_it_is(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2, spares=1) as rig:
        job = await rig.submit(gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await rig.fleet.signal("quarantine", DRAIN)
        await job.until(lambda s: bool(s.drains), "asked to leave")
        await rig.fleet.signal("release", {"node": "n2", "by": "carol"})
        state = await job.until(lambda s: not s.drains, "not wanted any more")
        assert "n2" in state.notices[-1] and "in service" in state.notices[-1]
        assert (state.phase, state.generation, nodes_of(state)) == (Phase.RUNNING, 1, ["n1", "n2"])
        await ended(job)


async def test_a_job_that_waits_takes_a_released_node_again(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2) as rig:
        job = await rig.submit(gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await rig.fleet.signal("quarantine", {**DRAIN, "within": "0.5s"})
        await job.until_phase(Phase.WAITING_FOR_NODES, 2)
        await rig.fleet.signal("release", {"node": "n2", "by": "carol"})
        state = await job.until_phase(Phase.RUNNING, 2)
        assert (nodes_of(state), state.drains) == (["n1", "n2"], ())
        await ended(job)


@pytest.mark.long
async def test_jobs_leave_a_shared_suspect_before_its_examination(
    make_rig: MakeRig,
) -> None:
    """Both jobs have half of n1. The first to break is the one whose rank 1 exits."""
    breaks = Exit(
        generation=1, node="n1", rank=1, exit_code=None, signal=6, after=1.0, kernel=XID_79
    )
    sick = Sick(node="n1", remap_pending=0, until="reboot", when="running")
    async with make(make_rig, breaks, saving(0.5, generation=1), sick, nodes=2) as rig:
        one = await rig.submit(nodes=1, ranks=2, gpus_per_node=4)
        other = await rig.submit(nodes=1, ranks=1, gpus_per_node=4)
        moved = await other.until_phase(Phase.RUNNING, 2)
        assert nodes_of(moved) == ["n2"] and (moved.restarts_spent, moved.incidents) == (0, ())
        assert any(
            "fleet f-" in notice and "wants n1" in notice and "checkpoint of step" in notice
            for notice in moved.notices
        )
        assert nodes_of(await one.until_phase(Phase.RUNNING, 2)) == ["n2"]
        await until_fleet(rig, standing("n1", NodeStatus.IN_SERVICE), "n1 back")
        began = [
            upkeep
            for upkeep in rig.backend.upkeep
            if upkeep.kind == "began" and upkeep.node == "n1"
        ]
        left = max(life.number for life in rig.backend.lives if life.node == "n1")
        assert began and all(upkeep.number > left for upkeep in began), (
            "nothing was done to it while ranks lived there"
        )
        await ended(one, other)


@pytest.mark.long
async def test_a_job_waits_for_a_checkpoint_across_continue_as_new(
    make_short_rig: MakeRig,
) -> None:
    async with make_short_rig(
        Script((saving(1.0, generation=1),), then="run"),
        gpus=8,
        spares=1,
        name=f"f-{uuid.uuid4().hex[:8]}",
    ) as rig:
        job = await rig.submit(policy(), gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await rig.fleet.signal("quarantine", DRAIN)
        for number in range(12):
            await job.handle.signal("report", {"reason": f"number {number}"})
        state = await job.until_phase(Phase.RUNNING, 2)
        assert nodes_of(state) == ["n1", "n3"]
        assert len(await job.runs()) >= 2
        await ended(job)
