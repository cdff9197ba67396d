"""When the dead man's switch of a fleet is requested: a real HTTP server, and a double of the
Temporal server that says how the fleet is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities import channels, pings
from relaunch.activities.pings import Pinger
from relaunch.spec.fleet import DeadManSwitch
from tests.activities.harness import eventually
from tests.receivers import Webhook, find_port, webhook

TOKEN = "s3cret-uuid"


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


class Server:
    """What the server says of every fleet."""

    def __init__(self) -> None:
        self.status = WorkflowExecutionStatus.RUNNING
        self.raw_description = DescribeWorkflowExecutionResponse()
        self.refuses: RPCError | None = None
        self.watch_beats(0)

    def watch_beats(self, age: float) -> None:
        """Have a pending watch whose last heartbeat is so many seconds old."""
        watch = PendingActivityInfo(attempt=1)
        watch.activity_type.name = "watch_fleet"
        began = datetime.now(UTC) - timedelta(hours=1)
        watch.scheduled_time.FromDatetime(began)
        watch.last_started_time.FromDatetime(began)
        watch.last_heartbeat_time.FromDatetime(datetime.now(UTC) - timedelta(seconds=age))
        self.raw_description.ClearField("pending_activities")
        self.raw_description.pending_activities.append(watch)

    def task_waits(self, age: float) -> None:
        task = self.raw_description.pending_workflow_task
        task.original_scheduled_time.FromDatetime(datetime.now(UTC) - timedelta(seconds=age))

    def get_workflow_handle(self, id: str) -> Server:
        assert id.startswith("fleet/")
        return self

    async def describe(self, rpc_timeout: timedelta) -> Server:
        if self.refuses is not None:
            raise self.refuses
        return self


class Stand:
    """A pinger whose clock stands still, with one switch a receiver."""

    def __init__(self, **urls: str) -> None:
        self.server, self.now = Server(), 1000.0
        self.heartbeats = {
            fleet: DeadManSwitch.model_validate({"url": url, "every": "5m"})
            for fleet, url in urls.items()
        }
        self.pinger = Pinger(
            cast(Client, self.server), lambda: self.heartbeats, clock=lambda: self.now
        )

    async def look(self, after: float = 0.0) -> None:
        """Begin what is due after so many seconds, and wait for its end."""
        self.now += after
        self.pinger.begin_due()
        await self.settle()

    async def settle(self, *fleets: str) -> None:
        """Wait for the requests of these fleets, or of all."""
        switches = self.pinger._switches
        tasks = [switches[fleet].task for fleet in fleets or switches]
        await asyncio.gather(*(task for task in tasks if task is not None))

    def reason(self, fleet: str = "lab") -> str:
        (found,) = (one for one in self.pinger.list_status() if one.fleet == fleet)
        assert (found.failing_since is None) == (found.reason == "")
        return found.reason


@pytest.fixture
def received() -> Iterator[Webhook]:
    with webhook() as made:
        yield made


async def test_a_watched_fleet_is_pinged_at_its_interval(received: Webhook) -> None:
    stand = Stand(lab=received.url)
    await stand.look()
    assert received.requests == [], "this worker has not watched it yet"
    stand.pinger.note_round("lab")
    await stand.look()
    assert [body for _, body in received.requests] == [b""]
    for _ in range(4):
        stand.pinger.note_round("lab")
        await stand.look(after=74.0)
    assert len(received.requests) == 1
    stand.pinger.note_round("lab")
    await stand.look(after=5.0)
    assert len(received.requests) == 2
    (found,) = stand.pinger.list_status()
    assert found.accepted_at is not None and found.name == "127.0.0.1"


async def test_pings_end_with_the_rounds(received: Webhook) -> None:
    stand = Stand(lab=received.url)
    stand.pinger.note_round("lab")
    await stand.look(after=pings.ROUND_TIMEOUT_S)
    assert len(received.requests) == 1
    await stand.look(after=300.0)
    assert len(received.requests) == 1 and stand.reason() == ""


async def test_a_changed_interval_counts_at_once(received: Webhook) -> None:
    stand = Stand(lab=received.url)
    stand.pinger.note_round("lab")
    await stand.look()
    stand.heartbeats["lab"] = DeadManSwitch.model_validate({"url": received.url, "every": "1m"})
    await stand.look(after=61.0)
    assert len(received.requests) == 2


@pytest.mark.parametrize("fault", ["away", "unknown", "ended", "wedged", "unwatched"])
async def test_without_the_servers_word_there_is_no_ping(fault: str, received: Webhook) -> None:
    stand = Stand(lab=received.url)
    server = stand.server
    match fault:
        case "away":
            server.refuses = RPCError("the server is away", RPCStatusCode.UNAVAILABLE, b"")
            expected = "does not say"
        case "unknown":
            server.refuses = RPCError("no such workflow", RPCStatusCode.NOT_FOUND, b"")
            expected = "does not run"
        case "ended":
            server.status = WorkflowExecutionStatus.TERMINATED
            expected = "does not run"
        case "wedged":
            server.task_waits(90.0)
            expected = "workflow task"
        case _:
            server.watch_beats(90.0)
            expected = "heartbeat of its watch"
    stand.pinger.note_round("lab")
    await stand.look()
    assert received.requests == [] and expected in stand.reason()
    server.refuses, server.status = None, WorkflowExecutionStatus.RUNNING
    server.task_waits(1.0)
    server.watch_beats(1.0)
    await stand.look(after=pings.RETRY_DELAY_S)
    assert len(received.requests) == 1 and stand.reason() == ""


async def test_while_a_job_waits_the_fleet_has_no_watch(received: Webhook) -> None:
    stand = Stand(lab=received.url)
    stand.server.raw_description.ClearField("pending_activities")
    stand.pinger.note_round("lab")
    await stand.look()
    assert len(received.requests) == 1


async def test_a_refused_ping_is_shown_and_tried_again() -> None:
    with webhook(500) as received:
        stand = Stand(lab=received.url, far=f"http://localhost:{find_port()}/{TOKEN}")
        for fleet in ("lab", "far"):
            stand.pinger.note_round(fleet)
        await stand.look()
        assert stand.reason() == "127.0.0.1: it answered 500"
        assert "cannot be reached" in stand.reason("far") and TOKEN not in stand.reason("far")
        received.status = 200
        await stand.look(after=pings.RETRY_DELAY_S)
        assert len(received.requests) == 2 and stand.reason() == ""


async def test_a_service_that_hangs_delays_no_other(
    received: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SEND_TIMEOUT_S", 30.0)
    with webhook(hangs=True) as silent:
        stand = Stand(lab=silent.url, far=received.url)
        for fleet in ("lab", "far"):
            stand.pinger.note_round(fleet)
        stand.pinger.begin_due()
        await stand.settle("far")
        stand.now += 300.0
        for fleet in ("lab", "far"):
            stand.pinger.note_round(fleet)
        stand.pinger.begin_due()
        await stand.settle("far")
        assert len(received.requests) == 2
        await eventually(lambda: len(silent.requests) == 1, "requested")
        silent.hangs.clear()
        await stand.settle()
        assert stand.reason() == "", "the answer came within the limit"


async def test_the_loop_ends_its_requests(received: Webhook) -> None:
    with webhook(hangs=True) as silent:
        stand = Stand(lab=silent.url)
        stand.pinger.note_round("lab")
        loop = asyncio.create_task(stand.pinger.run())
        await eventually(lambda: len(silent.requests) == 1, "requested")
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        task = cast(Any, stand.pinger)._switches["lab"].task
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
