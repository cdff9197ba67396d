"""What the server does with the tasks of a worker from which another one takes over."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType, TaskQueueKind
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from relaunch.activities.running_watches import RunningWatches
from relaunch.workflows.runner import TaskRunner

pytestmark = pytest.mark.asyncio(loop_scope="session")


@workflow.defn
class Counter:
    def __init__(self) -> None:
        self._count = 0

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: self._count == 3)

    @workflow.update
    def count(self) -> None:
        self._count += 1


async def list_queues(handle: WorkflowHandle[Counter, None]) -> list[TaskQueueKind.ValueType]:
    """Return the kind of the queue of each workflow task."""
    return [
        event.workflow_task_scheduled_event_attributes.task_queue.kind
        async for event in handle.fetch_history_events()
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_SCHEDULED
    ]


async def test_the_next_task_waits_for_no_dead_worker(server: Client, tmp_path: Path) -> None:
    dead, follower = RunningWatches(tmp_path / "watches"), RunningWatches(tmp_path / "watches")
    dead.open()
    follower.open()
    runner = TaskRunner(running=dead)
    queue = f"q-{uuid.uuid4().hex[:8]}"
    worker = Worker(server, task_queue=queue, workflows=[Counter], workflow_runner=runner)
    runs = tmp_path / "watches-runs"
    async with runner.attach(worker):
        handle = await server.start_workflow(Counter.run, id=queue, task_queue=queue)
        await handle.execute_update(Counter.count)
        assert [run.read_text() for run in runs.glob("*/*")] == [queue]
        # Its process is this one, which goes on: only the lock is released, as if by the kernel.
        assert dead._lock is not None
        os.close(dead._lock)
        await follower.take_over(server)
        assert not list(runs.glob("*/*"))
        await handle.execute_update(Counter.count)
        await handle.execute_update(Counter.count)
        await handle.result()
    normal, sticky = TaskQueueKind.TASK_QUEUE_KIND_NORMAL, TaskQueueKind.TASK_QUEUE_KIND_STICKY
    kinds = await list_queues(handle)
    # The first task and the first update may come together.
    assert kinds in ([normal, sticky, normal, sticky], [normal, normal, sticky])


async def test_a_run_that_leaves_the_cache_is_forgotten(server: Client, tmp_path: Path) -> None:
    running = RunningWatches(tmp_path / "watches")
    running.open()
    runner = TaskRunner(running=running)
    queue = f"q-{uuid.uuid4().hex[:8]}"
    worker = Worker(server, task_queue=queue, workflows=[Counter], workflow_runner=runner)
    async with runner.attach(worker):
        handle = await server.start_workflow(Counter.run, id=queue, task_queue=queue)
        for _ in range(3):
            await handle.execute_update(Counter.count)
        await handle.result()
    assert not list((tmp_path / "watches-runs").glob("*/*"))
