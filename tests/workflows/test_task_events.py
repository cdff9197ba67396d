"""Hints that come through a queue: which job gets them, and when they are taken off it.

Here the queue is a list; SQS is in tests/backends.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest
from temporalio.client import Client

from relaunch.activities.task_events import TaskEvents
from relaunch.backends.base import TaskEvent, TaskMessage, Unreachable
from relaunch.generation import Token
from relaunch.job.state import Phase
from tests.backends.slow_link import Way, slow_links
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Job

pytestmark = pytest.mark.asyncio(loop_scope="session")


class ListQueue:
    """Gives each batch once, and what was not deleted again."""

    def __init__(
        self, *events: TaskEvent | None, follows: tuple[str, ...] = (), fails: int = 0
    ) -> None:
        self.left = {str(number): event for number, event in enumerate(events)}
        self.follows = follows
        self.fails = fails
        self.hinted: list[str] = []
        self.received = 0

    async def receive(self) -> Sequence[TaskMessage]:
        await asyncio.sleep(0.01)
        self.received += 1
        if self.received <= self.fails:
            raise Unreachable("default", "throttled")
        return [TaskMessage(receipt, event) for receipt, event in self.left.items()]

    async def delete(self, messages: Sequence[TaskMessage]) -> None:
        for message in messages:
            del self.left[message.receipt]

    def hint(self, what: str) -> bool:
        self.hinted.append(what)
        return what in self.follows


async def run(client: Client, queue: ListQueue, rounds: int = 1) -> None:
    running = asyncio.create_task(TaskEvents(client, lambda: queue).run())
    try:
        async with asyncio.timeout(60):
            while queue.left and queue.received <= rounds:
                await asyncio.sleep(0.01)
                assert not running.done(), running.exception()
    finally:
        running.cancel()


async def hints(job: Job) -> list[str]:
    signals = [
        e.workflow_execution_signaled_event_attributes
        async for e in job.handle.fetch_history_events()
    ]
    return [signal.signal_name for signal in signals if signal.signal_name == "hint"]


async def test_s1_9_an_event_leaves_the_queue_when_its_job_has_it(
    make_rig: MakeRig,
) -> None:
    async with make_rig() as rig:
        job = await rig.submit()
        token = (await job.until_phase(Phase.RUNNING)).token
        ended = TaskEvent("task/1", 4, token, ended=True)
        queue = ListQueue(ended, ended, replace(ended, version=3), None, fails=1)
        await run(rig.client, queue, rounds=2)
        assert queue.left == {} and queue.hinted == ["task/1"] * 3
        await job.handle.signal("cancel")
        await job.result()
        assert len(await hints(job)) == 3, "the job knows which of them are news"


async def test_s1_9_events_of_followed_or_unknown_tasks_reach_no_job(
    make_rig: MakeRig,
) -> None:
    async with make_rig() as rig:
        job = await rig.submit()
        token = (await job.until_phase(Phase.RUNNING)).token
        ours = TaskEvent("task/1", 4, token, ended=True)
        others = (
            replace(ours, token=None),
            replace(ours, token=replace(token, namespace="elsewhere")),
            replace(ours, ended=False),
        )
        nobodys = replace(
            ours, what="task/2", token=Token(rig.client.namespace, "no-such-job", 1, 1)
        )
        queue = ListQueue(ours, *others, nobodys, follows=("task/1",))
        await run(rig.client, queue)
        assert queue.left == {} and queue.hinted == ["task/1", "task/2"]
        assert await hints(job) == []
        await job.handle.signal("cancel")
        await job.result()


async def test_s1_9_an_event_stays_queued_while_the_server_is_away(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaunch.activities.task_events.SIGNAL_TIMEOUT_S", 0.5)
    host, _, port = server.service_client.config.target_host.rpartition(":")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        near = free.getsockname()
    with slow_links([Way(near, (host, int(port)))], 0.0):
        client = await Client.connect(f"{near[0]}:{near[1]}")
    queue = ListQueue(TaskEvent("task/1", 4, Token(client.namespace, "llama", 1, 1), ended=True))
    await run(client, queue, rounds=2)
    assert list(queue.left) == ["0"]
