"""Notices that no worker can post for a while: they are posted in the end, and hold up no end of a
run."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio import activity, workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle, WorkflowHistory
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from relaunch.activities.notify import PeopleActivities
from relaunch.evidence.causes import Cause
from relaunch.job.state import Phase
from relaunch.messages.notices import Notice, TellPeopleInput
from relaunch.pool.messages import Suspect
from relaunch.workflows.fleet import workflow as fleet_workflow
from relaunch.workflows.notifier import tell
from relaunch.workflows.training_job import notices as job_notices
from tests.fakes.nodes import Exit, Script, Sick
from tests.receivers import Webhook, webhook
from tests.workflows.claimants import claimants
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import PATIENCE, Job, Rig, policy, replay, runs_of
from tests.workflows.test_fleet_details import NOW
from tests.workflows.test_notices import ASK, make, until, until_events

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKS = Script((Exit(rank=0, exit_code=1, generation=1),))
NOTICE = Notice("breaker", "lab/breaker", "the breaker is open", "why", NOW)


class Unknown:
    """Has the worker not know the fleet, in one kind of activity."""

    def __init__(self) -> None:
        self.kind = ""
        self.tries = 0

    async def until_tries(self, count: int) -> None:
        await until(lambda: self.tries >= count, lambda: self.tries)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Unknown:
    unknown, find = Unknown(), PeopleActivities._find_channels

    def find_channels(self: PeopleActivities, fleet: str) -> object:
        if activity.info().activity_type == unknown.kind:
            unknown.tries += 1
            raise KeyError(f"fleet {fleet!r} is not known to this worker")
        return find(self, fleet)

    monkeypatch.setattr(PeopleActivities, "_find_channels", find_channels)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return unknown


@pytest.mark.parametrize(("kind", "tries"), [("tell_people", 2), ("deliver_notices", 3)])
async def test_a_notice_waits_for_a_worker_that_knows_its_fleet(
    make_rig: MakeRig, unknown: Unknown, kind: str, tries: int
) -> None:
    with webhook() as received:
        async with make(make_rig, ASKS, {"webhook": received.url}) as rig:
            unknown.kind = kind
            job = await rig.submit(policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            await unknown.until_tries(tries)
            assert received.notices == []
            unknown.kind = ""
            await until_events(received, ("question", "open"))
            await job.handle.signal("cancel")
            assert (await job.result()).phase is Phase.CANCELLED


async def test_a_job_ends_although_its_notice_cannot_be_posted(
    make_rig: MakeRig, unknown: Unknown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tell, "END_TIMEOUT", timedelta(seconds=1))
    unknown.kind = "tell_people"
    with webhook() as received:
        async with make(make_rig, ASKS, {"webhook": received.url}, is_patched=True) as rig:
            job = await rig.submit(policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            await job.handle.execute_update("answer", {"decision": "deny", "by": "ada"})
            assert (await job.result()).phase is Phase.FAILED
    assert received.notices == [] and unknown.tries > 0


async def continue_job(rig: Rig, job: Job) -> None:
    """Have a job begin another run, while its notice is not posted."""
    first = (await job.handle.describe()).run_id
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while (await rig.client.get_workflow_handle(job.handle.id).describe()).run_id == first:
        assert asyncio.get_running_loop().time() < deadline, "it goes on in the same run"
        await job.handle.signal("report", {"reason": "one more event"})
        await asyncio.sleep(0.1)


async def test_the_next_run_of_a_job_posts_its_notice(
    make_short_rig: MakeRig, unknown: Unknown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_notices, "CARRIED_AFTER", timedelta(0))
    with webhook() as received:
        channel = {"webhook": received.url}
        async with make(make_short_rig, ASKS, channel, is_patched=True) as rig:
            unknown.kind = "tell_people"
            job = await rig.submit(policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            await unknown.until_tries(1)
            await continue_job(rig, job)
            assert received.notices == []
            unknown.kind = ""
            await until_events(received, ("question", "open"))
            await job.handle.signal("cancel")
            assert (await job.result()).phase is Phase.CANCELLED
            await until_events(received, ("question", "open"), ("question", "resolved"))


async def end_while_unposted(make_short_rig: MakeRig, unknown: Unknown) -> list[WorkflowHistory]:
    """Have a job's run get long while its notice is not posted, and the job end once it is."""
    with webhook() as received:
        channel = {"webhook": received.url}
        async with make(make_short_rig, ASKS, channel, is_patched=True) as rig:
            unknown.kind = "tell_people"
            job = await rig.submit(policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            await unknown.until_tries(1)
            run = (await job.handle.describe()).run_id
            while (described := await job.handle.describe()).history_length < 60:
                await job.handle.signal("report", {"reason": "one more event"})
            assert described.run_id == run
            unknown.kind = ""
            await until_events(received, ("question", "open"))
            await continue_job(rig, job)
            await job.handle.execute_update("answer", {"decision": "deny", "by": "ada"})
            assert (await job.result()).phase is Phase.FAILED
            return await job.runs()


async def test_a_job_of_0_1_0_that_waited_for_its_notice_replays(
    make_short_rig: MakeRig, unknown: Unknown, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(workflow, "patched", lambda _: False)
        older.setattr(job_notices, "CARRIED_AFTER", timedelta(0))
        older.setattr(tell, "END_TIMEOUT", timedelta(0))
        runs = await end_while_unposted(make_short_rig, unknown)
    assert len(runs) >= 2
    monkeypatch.setattr(job_notices, "CARRIED_AFTER", timedelta(0))
    await replay(*runs, is_sandboxed=False)


async def quarantine(rig: Rig, unknown: Unknown) -> None:
    """Have the fleet quarantine a node, without a worker that posts that."""
    unknown.kind = "tell_people"
    async with claimants(rig) as begin:
        job = await begin()
        at, reason = datetime.now(UTC), "Xid 79 on n1"
        suspect = Suspect("n1", at, 1, Cause.GPU_FATAL, reason, code="Xid 79", isolate=True)
        await job.claim(0, suspects=(suspect,))
        await unknown.until_tries(1)


async def read_run(rig: Rig) -> str:
    """Return the id of the fleet's run, after an event more."""
    await rig.fleet.signal("apply")
    await asyncio.sleep(0.1)
    return (await rig.client.get_workflow_handle(rig.fleet.id).describe()).run_id or ""


def make_sick(make_rig: MakeRig, received: Webhook) -> AbstractAsyncContextManager[Rig]:
    script = Script((Sick(node="n1", dcgm_error=(0, 52)),), then="run")
    return make(make_rig, script, {"webhook": received.url}, gpus=1, is_patched=True)


async def test_the_next_run_of_a_fleet_posts_its_notice(
    make_short_rig: MakeRig, unknown: Unknown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_workflow, "POST_TIMEOUT", timedelta(milliseconds=100))
    with webhook() as received:
        async with make_sick(make_short_rig, received) as rig:
            await quarantine(rig, unknown)
            first, deadline = await read_run(rig), asyncio.get_running_loop().time() + PATIENCE
            while await read_run(rig) == first:
                assert asyncio.get_running_loop().time() < deadline, "it goes on in the same run"
            await unknown.until_tries(unknown.tries + 1)
            assert received.notices == []
            unknown.kind = ""
            await until_events(received, ("quarantine", "open"))
            await rig.fleet.signal("release", {"node": "n1", "reason": "reseated", "by": "ada"})
            await until_events(received, ("quarantine", "open"), ("quarantine", "resolved"))


async def test_a_fleet_of_0_1_0_that_waited_for_its_notice_replays(
    make_short_rig: MakeRig, unknown: Unknown, monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook() as received, monkeypatch.context() as older:
        older.setattr(workflow, "patched", lambda _: False)
        async with make_sick(make_short_rig, received) as rig:
            await quarantine(rig, unknown)
            handle = rig.fleet
            for _ in range(20):
                run = await read_run(rig)
            assert await read_run(rig) == run
            unknown.kind = ""
            deadline = asyncio.get_running_loop().time() + PATIENCE
            while await read_run(rig) == run:
                assert asyncio.get_running_loop().time() < deadline, "it never continues"
            described = await handle.describe()
            first = described.raw_description.workflow_execution_info.first_run_id
            runs = await runs_of(rig.client, handle.id, first)
    # The last one may have done no task yet, which a replay would wait for.
    await replay(*runs[:-1], is_sandboxed=False)


@workflow.defn
class Teller:
    """Ends once its notice is posted. Says whether it was, and how long it took."""

    @workflow.run
    async def run(self) -> tuple[bool, timedelta]:
        began = workflow.now()
        telling = asyncio.create_task(tell.tell_people("lab", (NOTICE,)))
        await tell.finish_telling(telling)
        return telling.done(), workflow.now() - began


class Post:
    """The activity of a worker that cannot post, so many times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.tries = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    @activity.defn
    async def tell_people(self, given: TellPeopleInput) -> str:
        self.tries += 1
        await self.may_end.wait()
        if self.tries <= self.failures:
            raise ApplicationError("this worker has no such fleet")
        return "posted"


def serve_workflow(client: Client, queue: str) -> Worker:
    runner = UnsandboxedWorkflowRunner()
    return Worker(client, task_queue=queue, workflows=[Teller], workflow_runner=runner)


def serve_activity(client: Client, queue: str, post: Post) -> Worker:
    return Worker(client, task_queue=queue, activities=[post.tell_people])


async def test_a_notice_is_posted_however_long_none_can_post(
    skipping: WorkflowEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tell, "END_TIMEOUT", timedelta(days=2))
    client, post = skipping.client, Post(failures=100)
    async with serve_workflow(client, "q"), serve_activity(client, "q", post):
        is_posted, took = await client.execute_workflow(Teller.run, id="teller", task_queue="q")
    assert is_posted and took > timedelta(minutes=30) and post.tries == 101


async def test_a_run_ends_although_its_notice_cannot_be_posted(
    skipping: WorkflowEnvironment,
) -> None:
    client, post = skipping.client, Post(failures=10**6)
    async with serve_workflow(client, "q"), serve_activity(client, "q", post):
        handle = await client.start_workflow(Teller.run, id="teller", task_queue="q")
        await handle.cancel()
        is_posted, took = await handle.result()
    assert not is_posted and tell.END_TIMEOUT <= took < tell.END_TIMEOUT + tell.AWAY


async def until_pending(handle: WorkflowHandle[Any, Any], count: int) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while len((await handle.describe()).raw_description.pending_activities) != count:
        assert asyncio.get_running_loop().time() < deadline, "its activity neither begins nor ends"
        await asyncio.sleep(0.05)


async def until_seen(handle: WorkflowHandle[Any, Any]) -> None:
    """Wait until a workflow has been told that its timer has ended."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        kinds = [event.event_type async for event in handle.fetch_history_events()]
        fired = kinds.index(EventType.EVENT_TYPE_TIMER_FIRED)
        if EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED in kinds[fired:]:
            return
        assert asyncio.get_running_loop().time() < deadline, kinds
        await asyncio.sleep(0.05)


async def test_time_without_a_worker_gives_up_no_notice(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next worker sees first that the time is over, and can post only then."""
    monkeypatch.setattr(tell, "END_TIMEOUT", timedelta(seconds=3))
    monkeypatch.setattr(tell, "AWAY", timedelta(seconds=1))
    queue, post = f"q-{uuid.uuid4().hex[:8]}", Post()
    handle = await server.start_workflow(Teller.run, id=queue, task_queue=queue)
    async with serve_workflow(server, queue):
        await until_pending(handle, 1)
    await asyncio.sleep(5)  # more than both: the timer has ended, unseen
    post.may_end.clear()
    async with serve_activity(server, queue, post), serve_workflow(server, queue):
        await until(lambda: post.tries == 1, lambda: post.tries)
        await until_seen(handle)
        post.may_end.set()
        is_posted, _ = await asyncio.wait_for(handle.result(), PATIENCE)
    assert is_posted
