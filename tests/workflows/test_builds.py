"""A build that has just started is made current, on a real server."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio import activity, workflow
from temporalio.api.deployment.v1 import WorkerDeploymentVersion
from temporalio.api.workflowservice.v1 import DescribeWorkerDeploymentVersionRequest
from temporalio.client import Client, WorkflowHistory
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from relaunch.builds import (
    Build,
    Builds,
    RunningWorkflow,
    deployment,
    list_running,
    make_current,
    read_builds,
)
from relaunch.cli import upgrade as upgrades
from relaunch.cli.upgrade import MISSING_QUEUES, PendingTask, rollback, upgrade
from relaunch.job.state import Phase
from tests.chaos.world import eventually
from tests.workflows.rig import Job, Rig, rig, worker


@activity.defn
async def work() -> None: ...


@workflow.defn(sandboxed=False)
class Works:
    @workflow.run
    async def run(self, times: int) -> None:
        for _ in range(times):
            await workflow.execute_activity(work, schedule_to_close_timeout=timedelta(minutes=5))


async def count_kinds(client: Client, queue: str, build: str) -> int:
    """Return of how many kinds of tasks the server knows that a build polls for them."""
    version = WorkerDeploymentVersion(deployment_name=queue, build_id=build)
    request = DescribeWorkerDeploymentVersionRequest(
        namespace=client.namespace, deployment_version=version
    )
    try:
        found = await client.workflow_service.describe_worker_deployment_version(request)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return 0
        raise
    return len(found.version_task_queues)


async def connect(server: Client) -> Client:
    """A client whose workers the server hears each second."""
    runtime = Runtime(telemetry=TelemetryConfig(), worker_heartbeat_interval=timedelta(seconds=1))
    return await Client.connect(
        server.service_client.config.target_host,
        runtime=runtime,
        data_converter=server.data_converter,
    )


@pytest.mark.long
async def test_an_upgrade_waits_until_a_new_worker_polls_for_all(server: Client) -> None:
    queue = f"builds-{uuid.uuid4().hex}"
    said: list[str] = []
    heard = await connect(server)

    def make(build: str, **what: Any) -> Worker:
        return Worker(
            heard,
            task_queue=queue,
            deployment_config=deployment(queue, build),
            disable_eager_activity_execution=True,  # such do not pass the queue
            **what,
        )

    async def is_known(build: str, kinds: int) -> bool:
        return await count_kinds(server, queue, build) == kinds

    async with make("first", workflows=[Works], activities=[work]):
        await eventually(lambda: is_known("first", 2), "first is not known")
        await make_current(server, queue, "first", (await read_builds(server, queue)).token)
        # The server insists only on queues that are used.
        await server.execute_workflow(Works.run, 20, id=queue, task_queue=queue)
        async with make("second", workflows=[Works]):
            await eventually(lambda: is_known("second", 1), "second is not known")
            token = (await read_builds(server, queue)).token
            with pytest.raises(RPCError, match=MISSING_QUEUES):
                await make_current(server, queue, "second", token)
            within = timedelta(seconds=60)
            upgrading = asyncio.create_task(upgrade(server, queue, "second", said.append, within))
            await asyncio.sleep(2.0)
            assert not upgrading.done()
            async with make("second", activities=[work]):
                assert await upgrading == 0
    assert said[0] == "build second is current, first was"


@pytest.mark.long
async def test_two_jobs_move_to_another_build_and_back_untouched(
    server: Client, tmp_path: Path
) -> None:
    """As tests/e2e/test_upgrade.py, without real ranks and different code."""
    said: list[str] = []
    within = timedelta(seconds=60)

    async def are_on(rig: Rig, build: str, *jobs: Job) -> bool:
        running = {one.id for one in await list_running(rig.client, rig.queue, build)}
        return {job.handle.id for job in jobs} <= running

    async def is_known(rig: Rig) -> bool:
        return await count_kinds(rig.client, rig.queue, "first") == 2

    async with rig(await connect(server), tmp_path, build="first") as made:
        await eventually(lambda: is_known(made), "first is not known")
        token = (await read_builds(made.client, made.queue)).token
        await make_current(made.client, made.queue, "first", token)
        jobs = [await made.submit() for _ in range(2)]
        for job in jobs:
            await job.until_phase(Phase.RUNNING)
        launched = made.launches()
        async with worker(made.client, made.queue, made.fleets, made.archive, build="second"):
            assert await upgrade(made.client, made.queue, "second", said.append, within) == 0, said
            assert await are_on(made, "second", *jobs)
            assert await rollback(made.client, made.queue, None, said.append, within) == 0, said
            assert await are_on(made, "first", *jobs)
        for job in jobs:
            assert (await job.state()).phase is Phase.RUNNING
            await job.handle.signal("cancel", {"reason": "enough"})
            assert (await job.result()).generation == 1
        assert made.launches() == launched
    assert [line for line in said if "is current" in line] == [
        "build second is current, first was",
        "build first is current, second was",
    ]


@pytest.mark.long
async def test_a_job_whose_server_learns_late_of_a_build_still_moves(
    server: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first task after the upgrade is made where the older build is still the current one."""
    real, late = upgrades._make_current, list[asyncio.Task[None]]()

    async def learn_late(client: Client, queue: str, target: str, builds: Any) -> None:
        async def learn() -> None:
            await asyncio.sleep(2.0)
            await real(client, queue, target, builds)

        late.append(asyncio.create_task(learn()))

    async def is_known(rig: Rig) -> bool:
        return await count_kinds(rig.client, rig.queue, "first") == 2

    said: list[str] = []
    async with rig(await connect(server), tmp_path, build="first") as made:
        await eventually(lambda: is_known(made), "first is not known")
        token = (await read_builds(made.client, made.queue)).token
        await make_current(made.client, made.queue, "first", token)
        job = await made.submit()
        await job.until_phase(Phase.RUNNING)
        monkeypatch.setattr(upgrades, "_make_current", learn_late)
        async with worker(made.client, made.queue, made.fleets, made.archive, build="second"):
            within = timedelta(seconds=30)
            assert await upgrade(made.client, made.queue, "second", said.append, within) == 0, said
            await asyncio.gather(*late)
            await job.handle.signal("cancel", {"reason": "enough"})
            await job.result()


async def test_advice_after_a_rollback_does_not_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One workflow stays where it is; the command that is printed is typed again."""
    now = datetime.now(UTC)
    builds = [Build("new", True, now, now), Build("old", False, now - timedelta(days=1), now)]
    said: list[str] = []

    async def read(client: Client, queue: str) -> Builds:
        return Builds(tuple(builds))

    async def make(client: Client, queue: str, target: str, token: bytes) -> None:
        builds[:] = [replace(one, is_current=one.id == target) for one in builds]

    async def list_stuck(client: Client, queue: str, build: str) -> list[RunningWorkflow]:
        return [RunningWorkflow("repair/a/n1", "r1", "NodeRepair")] if build == "new" else []

    monkeypatch.setattr(upgrades, "read_builds", read)
    monkeypatch.setattr(upgrades, "make_current", make)
    monkeypatch.setattr(upgrades, "list_running", list_stuck)
    server, within = cast(Client, None), timedelta(0)
    assert await rollback(server, "q", None, said.append, within) == 1
    assert "`relaunch rollback old` shows again" in said[-1], said
    assert await rollback(server, "q", "old", said.append, within) == 1
    assert "build old is current already" in said, said
    builds[:] = [replace(one, is_current=not one.is_current) for one in builds]
    monkeypatch.setattr(upgrades, "build_id", lambda: "old")
    assert await upgrade(server, "q", "", said.append, within) == 1
    assert "`relaunch upgrade` shows again" in said[-1], said


async def test_a_workflow_whose_tasks_fail_later_is_still_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal that wakes it begins a new task, which has not failed yet when it is looked at."""
    stuck = RunningWorkflow("job/a", "r1", "TrainingJob")
    attempts, done = iter((1, 1, 3)), list[str]()

    async def list_stuck(client: Client, queue: str, build: str) -> list[RunningWorkflow]:
        return [] if "handed over" in done else [stuck]

    async def read_task(client: Client, workflow: RunningWorkflow) -> PendingTask:
        return PendingTask(next(attempts))

    async def note_wake(client: Client, workflow: RunningWorkflow) -> None:
        done.append("woken")

    async def note_hand_over(client: Client, workflow: RunningWorkflow, *to: str) -> None:
        assert to == ("q", "second")
        done.append("handed over")

    class Handle:
        async def fetch_history(self) -> WorkflowHistory:
            return WorkflowHistory("job/a", [])  # no task of this run was completed

    class Server:
        def get_workflow_handle(self, id: str, *, run_id: str) -> Handle:
            return Handle()

    monkeypatch.setattr(upgrades, "list_running", list_stuck)
    monkeypatch.setattr(upgrades, "read_task", read_task)
    monkeypatch.setattr(upgrades, "wake", note_wake)
    monkeypatch.setattr(upgrades, "hand_over", note_hand_over)
    monkeypatch.setattr(upgrades, "STUCK_AFTER_S", 0.01)
    moving = upgrades._Move(cast(Client, Server()), "q", "second", ("first",))
    assert await moving.wait(timedelta(seconds=60)) == []
    assert done[:4] == ["woken", "woken", "woken", "handed over"] and moving.count == 1
