"""What the server does with the tasks of a worker from which another one takes over."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import activity, workflow
from temporalio.api.enums.v1 import EventType, TaskQueueKind
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    PollActivityTaskQueueRequest,
    PollActivityTaskQueueResponse,
)
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from relaunch.activities.running_watches import RUN_ID, RunningWatches
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


@workflow.defn
class Watched:
    @workflow.run
    async def run(self, name: str) -> str:
        return await workflow.execute_activity(
            name,
            result_type=str,
            start_to_close_timeout=timedelta(hours=1),
            heartbeat_timeout=timedelta(hours=1),
        )


@activity.defn
async def watch_ranks() -> str:
    return f"attempt {activity.info().attempt}"


async def poll_watch(server: Client, queue: str, identity: str) -> PollActivityTaskQueueResponse:
    """Take the watch from the server, as a worker does that dies before it begins the watch."""
    return await server.workflow_service.poll_activity_task_queue(
        PollActivityTaskQueueRequest(
            namespace=server.namespace, task_queue=TaskQueue(name=queue), identity=identity
        )
    )


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


@pytest.mark.parametrize(
    ("name", "holder", "is_taken"),
    [
        ("watch_ranks", "7@node", True),
        pytest.param("watch_ranks", "8@node", False, id="another worker has it, and lives"),
        pytest.param("stop_ranks", "7@node", False, id="it is no watch"),
    ],
)
async def test_a_watch_that_was_just_given_to_the_dead(
    server: Client, tmp_path: Path, name: str, holder: str, is_taken: bool
) -> None:
    dead, follower = RunningWatches(tmp_path / "watches"), RunningWatches(tmp_path / "watches")
    dead.open("7@node")
    follower.open("9@node")
    queue = f"q-{uuid.uuid4().hex[:8]}"
    runner = TaskRunner(running=dead)
    worker = Worker(server, task_queue=queue, workflows=[Watched], workflow_runner=runner)
    async with runner.attach(worker):
        handle = await server.start_workflow(Watched.run, name, id=queue, task_queue=queue)
        task = await poll_watch(server, queue, holder)
        assert task.activity_type.name == name
        assert str(handle.first_execution_run_id).encode() in RUN_ID.findall(task.task_token)
        assert dead._lock is not None
        os.close(dead._lock)
        assert await follower.take_over(server) == is_taken
    async with Worker(server, task_queue=queue, workflows=[Watched], activities=[watch_ranks]):
        if not is_taken:
            await server.get_async_activity_handle(task_token=task.task_token).complete("done")
        assert await handle.result() == ("attempt 2" if is_taken else "done")
