"""A workflow task that takes longer than the SDK's 2 s, as on a busy machine."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHistory
from temporalio.worker import Worker

from relaunch.temporal import data_converter
from relaunch.workflows.replay import find_difference
from relaunch.workflows.runner import TaskRunner
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.workflows.test_histories import HISTORIES

SLOW_S = 2.6


@workflow.defn
class SlowOnce:
    """Takes long over its first task, between the start of an action and its first step."""

    has_been_slow = False

    @workflow.run
    async def run(self) -> str:
        async def act() -> str:
            await asyncio.sleep(0)
            return "done"

        action = asyncio.create_task(act())
        await asyncio.sleep(0)
        if not SlowOnce.has_been_slow:
            SlowOnce.has_been_slow = True
            time.sleep(SLOW_S)  # noqa: ASYNC251 - it is to block
        return await action


async def test_a_task_that_took_long_is_done_again(server: Client) -> None:
    """With the SDK's own runner it never is: its worker does not let go of the workflow."""
    SlowOnce.has_been_slow = False
    queue = f"slow-{uuid.uuid4().hex}"
    runner = TaskRunner()
    worker = Worker(server, task_queue=queue, workflows=[SlowOnce], workflow_runner=runner)
    async with runner.attach(worker), asyncio.timeout(60):
        assert await server.execute_workflow(SlowOnce.run, id=queue, task_queue=queue) == "done"


async def test_a_slow_replay_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker of another build would refuse to continue what it could continue."""
    publish, slow = TrainingJob._publish, [SLOW_S]

    def publish_slowly(self: TrainingJob, *known: Any) -> Any:
        while slow:
            time.sleep(slow.pop())
        return publish(self, *known)

    monkeypatch.setattr(TrainingJob, "_publish", publish_slowly)
    path = min(HISTORIES.glob("*.json"))
    history = WorkflowHistory.from_json(f"job/{path.stem}", path.read_text())
    assert await find_difference(history, "default", data_converter()) == ""
    assert not slow
