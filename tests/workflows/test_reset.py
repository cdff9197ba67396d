"""A job whose workflow was reset, as the web UI can: no rank runs twice, no node is used twice."""

from __future__ import annotations

import uuid
from typing import Literal

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from relaunch.job.state import JobState, Phase
from relaunch.pool.state import FleetState
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.fakes.nodes import Exit, Script, error_file
from tests.workflows.claimants import fleet_state, until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Job, Rig, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
Where = Literal["first", "last"]


async def reset(rig: Rig, job: Job, where: Where) -> Job:
    """Reset the workflow of a job to its first or last workflow task, and return the new run."""
    tasks = [
        event.event_id
        for event in (await job.history()).events
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    ]
    done = await rig.client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=rig.client.namespace,
            workflow_execution=WorkflowExecution(
                workflow_id=job.handle.id, run_id=job.handle.first_execution_run_id or ""
            ),
            reason="a test",
            workflow_task_finish_event_id=tasks[0 if where == "first" else -1],
            request_id=uuid.uuid4().hex,
        )
    )
    handle = rig.client.get_workflow_handle_for(TrainingJob.run, job.handle.id, run_id=done.run_id)
    rig.jobs.append(Job(handle, rig.client))
    return rig.jobs[-1]


def nodes_of(state: JobState | FleetState, job: str = "") -> set[str]:
    """Return the nodes that a job uses, or that the fleet has recorded for it."""
    if isinstance(state, JobState):
        return {slot.node for slot in state.slots}
    return {
        place.node for record in state.claims if record.claim.job == job for place in record.places
    }


async def end(*jobs: Job) -> None:
    for job in jobs:
        await job.handle.signal("cancel")
    for job in jobs:
        assert (await job.result()).phase is Phase.CANCELLED


@pytest.mark.long
async def test_a_job_reset_to_its_begin_is_a_later_submission(
    make_rig: MakeRig,
) -> None:
    """It has replaced a node: the fleet knows a newer claim than the run after the reset has."""
    name = f"f-{uuid.uuid4().hex[:8]}"
    async with make_rig(Script((), then="run"), nodes=3, gpus=8, name=name) as rig:
        job = await rig.submit(gpus_per_node=8)
        await job.until_phase(Phase.RUNNING)
        await job.handle.signal("force_retry", {"avoid_nodes": ["n2"]})
        before = await job.until(
            lambda s: s.phase is Phase.RUNNING and nodes_of(s) == {"n1", "n3"}, "on other nodes"
        )
        again = await reset(rig, job, "first")
        after = await again.until(
            lambda s: s.phase is Phase.RUNNING and s.submission > before.submission, "again"
        )
        assert any("was reset" in notice for notice in after.notices)
        assert nodes_of(await fleet_state(rig), after.name) >= nodes_of(after)
        await end(again)
        await until_fleet(rig, lambda state: not state.claims, "no claim")


async def test_a_job_reset_to_its_last_task_goes_on_with_its_ranks(make_rig: MakeRig) -> None:
    name = f"f-{uuid.uuid4().hex[:8]}"
    script = Script((), then="run")
    async with make_rig(script, nodes=2, gpus=8, name=name) as rig:
        job = await rig.submit(gpus_per_node=8)
        before = await job.until_phase(Phase.RUNNING)
        await job.until_idle()
        started = len(rig.backend.lives)
        again = await reset(rig, job, "last")
        await again.handle.signal("cancel")
        result = await again.result()
        assert (result.phase, result.generation) == (Phase.CANCELLED, 1)
        assert result.state.submission == before.submission
        assert [one.kind for one in rig.backend.lives[started:]] == ["ended"] * 4


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("where", ["first", "last"])
async def test_nodes_of_a_terminated_job_stay_with_their_new_job(
    make_rig: MakeRig, where: Where
) -> None:
    name = f"f-{uuid.uuid4().hex[:8]}"
    script = Script((), then="run")
    async with make_rig(script, nodes=4, gpus=8, name=name) as rig:
        job = await rig.submit(gpus_per_node=8)
        before = await job.until_phase(Phase.RUNNING)
        await job.handle.terminate("by mistake")
        await rig.tell_fleet("apply")  # it looks then, and not only once a minute
        await until_fleet(rig, lambda state: not state.claims, "no claim")
        other = await rig.submit(gpus_per_node=8)
        taken = nodes_of(await other.until_phase(Phase.RUNNING))
        assert taken == nodes_of(before)
        again = await reset(rig, job, where)
        after = await again.until(
            lambda s: s.phase is Phase.RUNNING and s.submission > before.submission, "again"
        )
        assert nodes_of(after) == {"n1", "n2", "n3", "n4"} - taken
        assert nodes_of(await fleet_state(rig), after.name) == nodes_of(after)
        assert (await other.state()).incident is None
        await end(again, other)


@pytest.mark.long
async def test_an_answer_after_a_reset_is_no_restart_on_lost_nodes(make_rig: MakeRig) -> None:
    """The job was terminated while it waited for a person, and has no report of a watch since."""
    name = f"f-{uuid.uuid4().hex[:8]}"
    bug = error_file("ValueError: boom", "Traceback")
    script = Script((Exit(generation=1, rank=0, exit_code=1, error=bug),), then="run")
    asks = policy(causes={"APPLICATION": [{"strategy": "ASK"}]})
    async with make_rig(script, nodes=4, gpus=8, name=name) as rig:
        job = await rig.submit(asks, gpus_per_node=8)
        before = await job.until_phase(Phase.WAITING_FOR_PERSON)
        await job.until_idle()  # its last workflow task then begins with the question
        await job.handle.terminate("by mistake")
        await rig.tell_fleet("apply")
        await until_fleet(rig, lambda state: not state.claims, "no claim")
        other = await rig.submit(gpus_per_node=8)
        taken = nodes_of(await other.until_phase(Phase.RUNNING, 2))
        assert taken == nodes_of(before)
        again = await reset(rig, job, "last")
        await again.handle.execute_update("answer", {"decision": "approve", "by": "ada"})
        after = await again.until(
            lambda s: s.phase is Phase.RUNNING and s.submission > before.submission, "again"
        )
        assert nodes_of(after) == {"n1", "n2", "n3", "n4"} - taken
        assert (await other.state()).generation == 2, "nothing has touched its ranks"
        await end(again, other)


async def test_a_job_that_had_ended_runs_once_more_and_ends(make_rig: MakeRig) -> None:
    name = f"f-{uuid.uuid4().hex[:8]}"
    async with make_rig(Script((), then="succeed"), nodes=2, gpus=8, name=name) as rig:
        job = await rig.submit(gpus_per_node=8)
        first = await job.result()
        again = await reset(rig, job, "first")
        second = await again.result()
        assert (first.phase, second.phase) == (Phase.SUCCEEDED, Phase.SUCCEEDED)
        assert second.state.submission > first.state.submission
        assert len(rig.launches()[1]) == 2
        ended = await reset(rig, again, "last")  # it only ends again
        assert (await ended.result()).state.submission == second.state.submission
