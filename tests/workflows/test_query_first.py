"""A query that a new worker gets before the workflow task that its predecessor left behind."""

from __future__ import annotations

import asyncio
import sys
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import activity, workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

from relaunch.temporal import data_converter
from relaunch.workflows.runner import TaskRunner

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROOT = Path(__file__).parents[2]
PATIENCE = 120.0
QUERY_TIMEOUT = timedelta(seconds=PATIENCE)
DUE = timedelta(seconds=6)
"""Less than the server remembers that a dead worker polled (10 s): until then what comes waits for
that worker first."""
LEFT = timedelta(seconds=8)
"""How long it waits. The query comes before the timer, so it waits no longer for it: the new worker
gets it some five seconds before the workflow task."""


@activity.defn
async def sweep() -> None:
    pass


@workflow.defn
class Sweeper:
    """Does something once it is time, as a fleet probes its nodes."""

    def __init__(self) -> None:
        self._is_called = False
        self._swept = 0

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: self._is_called)
        due = workflow.now() + DUE
        while (left := due - workflow.now()) > timedelta(0):
            await workflow.sleep(left)
        await workflow.execute_activity(sweep, start_to_close_timeout=DUE)
        self._swept += 1

    @workflow.signal
    def call(self) -> None:
        self._is_called = True

    @workflow.query
    def swept(self) -> int:
        return self._swept


def make_worker(client: Client, queue: str) -> Worker:
    runner = TaskRunner()
    worker = Worker(
        client,
        task_queue=queue,
        workflows=[Sweeper],
        activities=[sweep],
        workflow_runner=runner,
        debug_mode=True,  # without a limit of 2 s for a task
        sticky_queue_schedule_to_start_timeout=LEFT,
    )
    return runner.attach(worker)


async def serve(address: str, queue: str) -> None:
    async with make_worker(await Client.connect(address, data_converter=data_converter()), queue):
        await asyncio.Event().wait()


async def until_event(handle: WorkflowHandle[Sweeper, None], kind: EventType.ValueType) -> None:
    async with asyncio.timeout(PATIENCE):
        async for event in handle.fetch_history_events(wait_new_event=True):
            if event.event_type == kind:
                return


@pytest.mark.long
async def test_a_query_before_its_task_leaves_a_replayable_history(
    server: Client,
) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    address = server.service_client.config.target_host
    program = "import asyncio, sys; from tests.workflows.test_query_first import serve; "
    program += "asyncio.run(serve(*sys.argv[1:]))"
    first = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, address, queue, cwd=ROOT
    )
    try:
        handle = await server.start_workflow(Sweeper.run, id=queue, task_queue=queue)
        await until_event(handle, EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED)
        await handle.signal(Sweeper.call)
        await until_event(handle, EventType.EVENT_TYPE_TIMER_STARTED)
    finally:
        first.kill()
        await first.wait()
    asked = asyncio.create_task(handle.query(Sweeper.swept, rpc_timeout=QUERY_TIMEOUT))
    await until_event(handle, EventType.EVENT_TYPE_TIMER_FIRED)
    async with make_worker(server, queue):
        assert await asked == 0
        await asyncio.wait_for(handle.result(), PATIENCE)
    history = await handle.fetch_history()
    replayer = Replayer(
        workflows=[Sweeper],
        workflow_runner=UnsandboxedWorkflowRunner(),
        data_converter=data_converter(),
    )
    await replayer.replay_workflow(history)
