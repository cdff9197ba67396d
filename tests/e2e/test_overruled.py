"""What people do to workflows without their job: terminate them, reset them.

The ranks are still found.
"""

from __future__ import annotations

import os
import signal

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from relaunch.cli import jobs
from tests.chaos.world import World, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]


async def test_a_later_submission_first_stops_a_terminated_jobs_ranks(
    world: World,
) -> None:
    job = await world.submit(name="terminated")
    await job.until_phase("RUNNING")
    await job.until_steps()
    old = job.rank_pids()
    await jobs.handle_of(world.client, job.name).terminate("a test")
    assert job.rank_pids() == old
    again = await world.submit(name="terminated")
    await again.until_phase("RUNNING")
    await again.until_steps()
    assert again.lines("violations") == []
    assert not set(again.rank_pids()) & set(old)
    assert len(again.rank_pids()) == 2
    assert [line["rank"] for line in again.starts()] in (
        [0, 1, 0, 1],
        [0, 1, 1, 0],
        [1, 0, 0, 1],
        [1, 0, 1, 0],
    )
    state = await again.state()
    assert (state.generation, state.tries, await again.incidents()) == (1, (), [])
    again.let_end()
    await again.until_phase("SUCCEEDED")
    await world.tidy(again)


async def test_after_a_reset_a_job_goes_on_above_its_nodes_tokens(
    world: World,
) -> None:
    job = await world.submit()
    await job.until_phase("RUNNING")
    await job.until_steps()
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    handle = jobs.handle_of(world.client, job.name)
    events = (await handle.fetch_history()).events
    first = next(
        event.event_id
        for event in events
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    )
    await world.client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=world.client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=handle.id, run_id=job.run_id),
            reason="a test",
            workflow_task_finish_event_id=first,
            request_id="reset",
        )
    )
    await job.until_phase("RUNNING", generation=3)
    await job.until_steps()
    assert job.lines("violations") == []
    tokens = {line["token"] for line in job.starts()}
    assert [int(token.rpartition("/")[2]) for token in sorted(tokens)] == [1, 2, 3]
    assert len({token.rpartition("/")[0] for token in tokens}) == 1, "a reset is no new submission"
    assert len(job.starts()) == 6
    job.let_end()
    await job.until_phase("SUCCEEDED")

    async def has_no_ranks() -> bool:
        return not job.rank_pids()

    await eventually(has_no_ranks, "ranks are left")
    await world.tidy(job)
