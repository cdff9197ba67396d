"""How much of an account's budget the watching of running ranks takes.

AWS is a table here, and the poll is shortened.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from relaunch.activities.launch import MAX_CONCURRENT_CALLS
from relaunch.backends.ecs.aws import RATES, READS
from relaunch.backends.ecs.backend import EcsBackend
from relaunch.backends.ecs.batch import GATHER, Batch
from relaunch.backends.ecs.cluster import Cluster
from relaunch.backends.ecs.tasks import build_started_by
from relaunch.generation import Token
from relaunch.spec.fleet import EcsOptions, FleetSpec

JOBS, NODES = 100, 8
READS_A_SECOND = 20.0
"""That ECS gives an account in a region for its cluster resources, sustained (Amazon ECS API
Reference, request throttling)."""
MOST_A_MINUTE = 0.1 * READS_A_SECOND * 60
"""A tenth: services, other workers, consoles and dashboards of the same account read too, and a
launch reads as much again."""
POLL = 0.25
CALLS_OF_A_LOOK = 2 * JOBS * NODES // 100
"""At a hundred tasks, or instances, a call."""


class Table:
    """Stands where `Aws` does: instances, each with one rank of one of the jobs, for ever."""

    def __init__(self) -> None:
        self.ids = [f"i-{number:08x}" for number in range(JOBS * NODES)]
        self.asked: list[str] = []

    async def call(self, service: str, operation: str, **request: Any) -> Mapping[str, Any]:
        self.asked.append(operation)
        match operation:
            case "ListContainerInstances":
                return {
                    "containerInstanceArns": [
                        arn(number)
                        for number, one in enumerate(self.ids)
                        if f"'{one}'" in request["filter"]
                    ]
                }
            case "DescribeContainerInstances":
                return {
                    "containerInstances": [
                        self._instance(number_of(one)) for one in request["containerInstances"]
                    ]
                }
            case "ListTasks":
                first = int(request.get("nextToken", 0))
                running = (
                    range(len(self.ids)) if request["desiredStatus"] == "RUNNING" else range(0)
                )
                more = {"nextToken": str(first + 100)} if first + 100 < len(running) else {}
                return {
                    "taskArns": [f"task/{number}" for number in running[first : first + 100]],
                    **more,
                }
            case "DescribeTasks":
                return {"tasks": [_task(number_of(one)) for one in request["tasks"]]}
        raise AssertionError(f"{operation} is not needed to watch ranks that run")

    def _instance(self, number: int) -> dict[str, Any]:
        return {
            "containerInstanceArn": arn(number),
            "ec2InstanceId": self.ids[number],
            "status": "ACTIVE",
            "agentConnected": True,
        }


def arn(number: int) -> str:
    return f"instance/{number}"


def number_of(name: str) -> int:
    return int(name.rpartition("/")[2])


def token(number: int) -> Token:
    return Token("default", f"job{number // NODES}", 1763000000000, 1)


def _task(number: int) -> dict[str, Any]:
    override = {"name": "trainer", "environment": [{"name": "RANK", "value": str(number % NODES)}]}
    running = {
        "lastStatus": "RUNNING",
        "desiredStatus": "RUNNING",
        "startedBy": build_started_by(token(number)),
    }
    return {
        "taskArn": f"task/{number}",
        "containerInstanceArn": arn(number),
        "overrides": {"containerOverrides": [override]},
        **running,
    }


async def test_800_ranks_of_100_jobs_take_under_a_tenth_of_the_reads() -> None:
    table = Table()
    cluster = Cluster(table, "training", POLL)  # type: ignore[arg-type]
    found = await asyncio.gather(
        *(
            cluster.task_of(one, build_started_by(token(number)))
            for number, one in enumerate(table.ids)
        )
    )
    with ExitStack() as stack:
        followed = [
            stack.enter_context(cluster.follow(task.arn)) for task in found if task is not None
        ]
        assert len(followed) == JOBS * NODES
        async with asyncio.timeout(60):
            for one in followed:
                while one.looked_at is None:
                    await one.wait_for_change()
            begun, first = time.monotonic(), len(table.asked)
            while len(table.asked) < first + 5 * CALLS_OF_A_LOOK:
                await followed[0].wait_for_change()
        seconds, asked = time.monotonic() - begun, Counter(table.asked[first:])
        await cluster.close()
    assert set(asked) == {"DescribeTasks", "DescribeContainerInstances"} <= READS
    # As many looks as the poll allows in that time: a machine that is busy with other things makes
    # fewer, and none makes more.
    a_look = asked.total() / (seconds / POLL + 1)
    a_minute = a_look * 60 / EcsOptions().poll.total_seconds()
    assert a_minute <= MOST_A_MINUTE, (
        f"{a_minute:.0f} reads a minute, and {MOST_A_MINUTE:g} are meant to be enough"
    )


async def test_a_look_at_800_nodes_a_minute_leaves_budget_to_others() -> None:
    """Look as an activity of the fleet does.

    Each node is listed twice, once for its GPUs, and so many at once as it has room for.
    """
    table = Table()
    nodes = [
        {"name": f"n{number}", "address": one, "gpus": 8} for number, one in enumerate(table.ids)
    ]
    spec = FleetSpec.model_validate({"name": "training", "backend": "ecs", "nodes": nodes})
    backend = EcsBackend(spec, EcsOptions(cluster="training"))
    backend.cluster.aws = table  # type: ignore[assignment]
    room = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def look(node: str) -> None:
        async with room:
            first, second = await asyncio.gather(backend.list(node, gpus=True), backend.list(node))
            assert [one["state"] for job in first["jobs"] for one in job["generations"]] == [
                "running"
            ]
            assert first["jobs"] == second["jobs"]

    async with asyncio.timeout(60):
        await asyncio.gather(*(look(f"n{number}") for number in range(len(table.ids))))
    await backend.close()
    reads = sum(operation in READS for operation in table.asked)
    # 80, in groups of as many nodes as there is room for; it was 109 when each node's container
    # instance was asked for twice.
    assert reads <= 100, f"{dict(Counter(table.asked))}"


async def test_calls_during_a_call_share_the_next_one_and_its_answer() -> None:
    asked: list[tuple[int, ...]] = []
    answer = asyncio.Event()

    async def ask(keys: tuple[int, ...]) -> dict[int, int]:
        asked.append(keys)
        await answer.wait()
        return dict.fromkeys(keys, len(asked))

    batch: Batch[int, int] = Batch(ask)
    waiting = []
    for number in range(200):
        waiting.append(asyncio.create_task(batch.get(number)))
        if number < 2:
            async with asyncio.timeout(60):
                while len(asked) <= number:  # noqa: ASYNC110 -- as it is asked, in its own time
                    await asyncio.sleep(0.01)
    await asyncio.sleep(2 * GATHER)
    assert asked == [(0,), (1,)]
    answer.set()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*waiting[2:]) == [3] * 198
    assert asked[2:] == [tuple(range(2, 200))]
    await batch.close()


async def test_nodes_of_a_job_are_read_without_the_tasks_of_others() -> None:
    table = Table()
    cluster = Cluster(table, "training", 60.0)  # type: ignore[arg-type]
    for _ in range(2):
        table.asked.clear()
        found = await asyncio.gather(*(cluster.tasks_on(one) for one in table.ids[:NODES]))
        assert [len(tasks) for tasks in found] == [1] * NODES
    assert Counter(table.asked)["DescribeTasks"] == 1
    await cluster.close()


def test_a_worker_takes_at_most_half_of_what_ecs_allows() -> None:
    budgets = {"read": (READS_A_SECOND, 100), "modify": (40.0, 100)}
    for kind, (rate, burst) in RATES.items():
        assert rate <= budgets[kind][0] / 2 and burst <= budgets[kind][1] / 2, kind
