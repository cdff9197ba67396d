"""What a worker does with messages and answers without a key where keys are required: the real
server, workflows, and clients and workers with and without keys."""

from __future__ import annotations

import asyncio
import base64
import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, ChildWorkflowError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import (
    ActivityInboundInterceptor,
    ActivityOutboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    Replayer,
    UnsandboxedWorkflowRunner,
    Worker,
)

from relaunch.activities.repairs import FollowRepairInput, RepairActivities
from relaunch.builds import RunningWorkflow
from relaunch.cli.upgrade import read_task_failure
from relaunch.config import ConfigError, Settings
from relaunch.converter import shared_converter
from relaunch.job.state import Phase
from relaunch.temporal import check_required, data_converter, read_first_key
from relaunch.worker import _leave_unreadable_activities
from relaunch.workflows.runner import TaskRunner
from relaunch.workflows.sealing import SealedRunner
from tests.fakes.nodes import Exit, Script, error_file
from tests.workflows.rig import policy, rig
from tests.workflows.test_access import until

pytestmark = [pytest.mark.asyncio(loop_scope="session")]
STARTED: list[str] = []


@workflow.defn
class Collector:
    """Collects messages, as our workflows do: also a signal without a message."""

    def __init__(self) -> None:
        self._messages: list[Any] = []

    @workflow.run
    async def run(self, _: str) -> list[Any]:
        await workflow.wait_condition(lambda: "end" in self._messages)
        return self._messages

    @workflow.signal
    def tell(self, message: Any = None) -> None:
        self._messages.append(message)

    @workflow.update
    async def ask(self, message: Any = None) -> int:
        self._messages.append(message)
        return len(self._messages)

    @workflow.query
    def messages(self) -> list[Any]:
        return self._messages


@activity.defn
async def act(name: str) -> str:
    STARTED.append(name)
    return name


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    (folder / "first").touch(mode=0o600)
    (folder / "first").write_text(base64.b64encode(os.urandom(32)).decode())
    return folder


def make_client(server: Client, keys: Path | None, required: bool = False) -> Client:
    chosen = Settings()
    if keys is not None:
        chosen = Settings(
            encryption_keys=keys, encryption_key="first", encryption_required=required
        )
    config = server.config()
    config["data_converter"] = data_converter(chosen)
    return Client(**config)


def make_worker(client: Client, queue: str, required: bool = True) -> Worker:
    runner = TaskRunner(required)
    # Nothing is kept, so each task replays all that came before.
    worker = Worker(
        client,
        task_queue=queue,
        workflows=[Collector],
        activities=[act],
        workflow_runner=runner,
        max_cached_workflows=0,
    )
    _leave_unreadable_activities(worker, client)
    return runner.attach(worker)


async def test_messages_without_a_key_are_refused_and_stop_nothing(
    server: Client, keys: Path
) -> None:
    ours, stranger = make_client(server, keys, required=True), make_client(server, None)
    queue = f"sealed-{uuid.uuid4()}"
    async with make_worker(ours, queue):
        mine = await ours.start_workflow(Collector.run, "x", id=f"{queue}/1", task_queue=queue)
        forged = stranger.get_workflow_handle(mine.id)
        await mine.signal("tell", "one")
        for arguments in ({}, {"arg": "forged"}):
            await forged.signal("tell", **arguments)
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await forged.execute_update("ask", "forged")
        assert "is not encrypted" in str(refused.value.cause)
        assert await mine.execute_update("ask", "two") == 2
        assert await mine.query("messages") == ["one", "two"]
        # Metadata that a stranger writes proves nothing.
        payload = stranger.data_converter.payload_converter.to_payload("forged")
        payload.metadata["relaunch-sealed"] = payload.metadata["relaunch-required"] = b"1"
        await forged.signal("tell", RawValue(payload))
        # An activity of theirs is not done, a workflow of theirs not begun, and each says why.
        wrong = await stranger.start_activity(
            act,
            "forged",
            id=f"{queue}/act",
            task_queue=queue,
            start_to_close_timeout=timedelta(seconds=1),
            schedule_to_close_timeout=timedelta(seconds=3),
        )
        other = await stranger.start_workflow(Collector.run, "x", id=f"{queue}/2", task_queue=queue)

        run = RunningWorkflow(other.id, other.first_execution_run_id or "", "Collector")

        async def has_failed() -> bool:
            return "its input is not encrypted" in await read_task_failure(ours, run)

        await until(has_failed, "refused")
        with pytest.raises(Exception, match=r"ctivity"):
            await wrong.result()
        assert STARTED == []
        await other.terminate()
        await mine.signal("tell", "end")
        assert await mine.result() == ["one", "two", "end"]
    # It is replayed so by every worker, also where nothing is required any more.
    history = await mine.fetch_history()
    for converter in (ours.data_converter, make_client(server, keys).data_converter):
        replayer = Replayer(
            workflows=[Collector], data_converter=converter, workflow_runner=SealedRunner()
        )
        await replayer.replay_workflow(history)


async def test_what_began_before_goes_on_and_stops_a_start(server: Client, keys: Path) -> None:
    plain, ours = make_client(server, None), make_client(server, keys)
    required = make_client(server, keys, required=True)
    queue = f"sealed-{uuid.uuid4()}"
    async with make_worker(ours, queue, required=False):
        began = [
            await one.start_workflow(Collector.run, "x", id=f"{queue}/{number}", task_queue=queue)
            for number, one in enumerate((plain, ours, required))
        ]
        await plain.get_workflow_handle(began[1].id).signal("tell", "plain")
        assert await began[1].execute_update("ask", "sealed") == 2
    running = [(one.id, one.first_execution_run_id or "") for one in began]
    found = [await read_first_key(required, *one) for one in running]
    assert [(one.id, one.is_required) for one in found if one] == [
        (None, False),
        ("first", False),
        ("first", True),
    ]
    with pytest.raises(ConfigError, match=rf"{queue}/0 began without a key, so nothing is done"):
        await check_required(required, running)
    await check_required(required, running[1:])
    async with make_worker(required, queue):
        # Its history has a plain message that was obeyed: it takes them until it continues as new.
        await plain.get_workflow_handle(began[1].id).signal("tell", "end")
        assert await began[1].result() == ["plain", "sealed", "end"]
    for one in (began[0], began[2]):
        await one.terminate()


@workflow.defn
class Asker:
    """Has activities and a child workflow answer, which a stranger's worker may do."""

    @workflow.run
    async def run(self, child: str) -> dict[str, str]:
        order = partial(workflow.execute_activity, start_to_close_timeout=timedelta(minutes=1))
        once, short = RetryPolicy(maximum_attempts=1), timedelta(minutes=1)
        dropped = workflow.start_activity(
            "cancelled",
            "",
            start_to_close_timeout=timedelta(minutes=1),
            heartbeat_timeout=timedelta(seconds=30),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        asked: dict[str, Awaitable[str]] = {
            "completed": order("completed", "", result_type=str),
            "failed": order("failed", "", result_type=str),
            "beaten": order("beaten", "", result_type=str, heartbeat_timeout=timedelta(seconds=30)),
            "once": order("once", "", result_type=str, retry_policy=once),
            "short": order("short", "", result_type=str, schedule_to_close_timeout=short),
            "launch_ranks": order("launch_ranks", "", result_type=str),
            "child": workflow.execute_child_workflow(
                "Child", "", id=child, result_type=str, task_queue=child
            ),
            "cancelled": dropped,
        }
        tasks = {name: asyncio.ensure_future(one) for name, one in asked.items()}
        await workflow.sleep(0.1)
        dropped.cancel()
        return {name: await self._read(task) for name, task in tasks.items()}

    async def _read(self, asked: Awaitable[str]) -> str:
        try:
            return await asked
        except (ActivityError, ChildWorkflowError) as error:
            cause = error.cause
            found = cause.type if isinstance(cause, ApplicationError) else type(cause).__name__
            return f"{type(error).__name__} {found}"
        except asyncio.CancelledError:
            return "CancelledError"


def make_stranger(answered: list[str]) -> Callable[[Sequence[RawValue]], Any]:
    """Return an activity that answers all that a worker without keys can poll."""

    @activity.defn(dynamic=True)
    async def answer(_: Sequence[RawValue]) -> str:
        name, is_second = activity.info().activity_type, activity.info().attempt > 1
        if name == "cancelled":
            while not activity.is_cancelled():
                activity.heartbeat()
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    break
        if name == "beaten" and not is_second:
            activity.heartbeat("forged progress")
            answered.append(name)
            # For the attempt of ours that the server offers next.
            raise ApplicationError("forged", next_retry_delay=timedelta(seconds=3))
        answered.append(name)
        if name == "failed":
            raise ApplicationError("forged", type="JobFailed", non_retryable=True)
        return "forged"

    return answer


@workflow.defn(dynamic=True)
class ForgedChild:
    @workflow.run
    async def run(self, _: Sequence[RawValue]) -> str:
        return "forged"


def make_ours(name: str, seen: list[Any]) -> Callable[[str], Any]:
    @activity.defn(name=name)
    async def ours(_: str) -> str:
        seen.append((name, list(activity.info().heartbeat_details)))
        return "ours"

    return ours


async def test_answers_without_a_key_count_as_none(server: Client, keys: Path) -> None:
    ours = make_client(server, keys, required=True)
    stranger = Client(**{**server.config(), "data_converter": shared_converter})
    queue, answered, seen = f"sealed-{uuid.uuid4()}", list[str](), list[Any]()
    child = f"{queue}-child"
    names = ("completed", "failed", "beaten", "once", "short", "launch_ranks", "cancelled")
    runner = TaskRunner(True)
    workflows = runner.attach(
        Worker(
            ours,
            task_queue=queue,
            workflows=[Asker],
            workflow_runner=runner,
            max_cached_workflows=0,
        )
    )
    forger = Worker(
        stranger,
        task_queue=queue,
        activities=[make_stranger(answered)],
        max_heartbeat_throttle_interval=timedelta(milliseconds=50),
    )
    children = Worker(
        stranger,
        task_queue=child,
        workflows=[ForgedChild],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with workflows, children:
        async with forger:
            asker = await ours.start_workflow(Asker.run, child, id=queue, task_queue=queue)

            async def are_answered() -> bool:
                return set(names) <= set(answered)

            await until(are_answered, "answered by the stranger")
        # Not before: the SDK takes one worker of a queue on a connection.
        real = Worker(ours, task_queue=queue, activities=[make_ours(name, seen) for name in names])
        _leave_unreadable_activities(real, ours)
        async with real:
            found = await asker.result()
    assert found == {
        "completed": "ours",
        "failed": "ours",
        "beaten": "ours",
        "once": "ActivityError PlainPayload",
        "short": "ActivityError PlainPayload",
        "launch_ranks": "ActivityError PlainPayload",
        "child": "ChildWorkflowError PlainPayload",
        "cancelled": "ActivityError CancelledError",
    }
    assert ("beaten", []) in seen
    # As a worker reads the result of a repair that an earlier run of its job has begun.
    follow = RepairActivities(ours).follow_repair
    followed = await ActivityEnvironment().run(follow, FollowRepairInput("n1", child, ""))
    assert (followed.outcome, "is not encrypted" in followed.reason) == ("ambiguous", True)
    assert not any(details for _, details in seen)
    replayer = Replayer(
        workflows=[Asker], data_converter=ours.data_converter, workflow_runner=SealedRunner()
    )
    await replayer.replay_workflow(await asker.fetch_history())


class Forger(Interceptor, ActivityInboundInterceptor):
    """Answers one activity of each kind in the place of the worker that did it, without a key.

    It has the token of the task, as a worker that polls the queue has.
    """

    def __init__(self, stranger: Client) -> None:
        self._stranger = stranger
        self.forged: list[str] = []

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        self.next = next
        return self

    def init(self, outbound: ActivityOutboundInterceptor) -> None:
        self.next.init(outbound)

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        info = activity.info()
        result = await self.next.execute_activity(input)
        if info.activity_type not in self.forged:
            self.forged.append(info.activity_type)
            handle = self._stranger.get_async_activity_handle(task_token=info.task_token)
            if info.activity_type == "check_order":
                await handle.fail(ApplicationError("forged", type="JobFailed", non_retryable=True))
            else:
                await handle.complete({"forged": True})
        return result


@pytest.mark.long
async def test_a_job_with_a_fault_goes_on_whatever_a_stranger_answers(
    server: Client, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("KEYS", str(keys)), ("KEY", "first"), ("REQUIRED", "true")):
        monkeypatch.setenv(f"RELAUNCH_ENCRYPTION_{name}", value)
    ours = Client(**{**server.config(), "data_converter": data_converter()})
    stranger = Client(**{**server.config(), "data_converter": shared_converter})
    forger = Forger(stranger)
    script = Script((Exit(generation=1, rank=3, exit_code=1, error=error_file("mine")),))
    async with rig(ours, tmp_path, script, interceptors=[forger]) as made:
        job = await made.submit(policy())
        await stranger.get_workflow_handle(job.handle.id).signal("cancel", {"by": "stranger"})
        state = await job.until_phase(Phase.RUNNING, 2)
        await ours.get_workflow_handle(job.handle.id).signal("cancel", {"by": "alice"})
        result = await job.result()
    assert (result.phase, "alice" in result.reason) == (Phase.CANCELLED, True)
    assert [one.cause for one in result.incidents] == ["APPLICATION"], state
    assert {"tell_fleet", "launch_ranks", "watch_ranks", "stop_ranks"} <= set(forger.forged)
