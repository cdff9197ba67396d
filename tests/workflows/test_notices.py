"""Notices of jobs and fleets, from what happens to real receivers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import WorkflowHistory
from temporalio.exceptions import ApplicationError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ActivityOutboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
)

from relaunch.activities import channels
from relaunch.activities.notify import PeopleActivities
from relaunch.evidence.causes import Cause
from relaunch.job.state import Phase
from relaunch.messages.ids import NOTIFIER_ID_PREFIX
from relaunch.messages.notices import Notice, Outbox, TellPeopleInput
from relaunch.pool.messages import Suspect
from relaunch.pool.state import NodeStatus
from relaunch.workflows.notifier.outbox import MAX_MESSAGES
from relaunch.workflows.patches import RepeatedPatch
from tests.fakes.nodes import Exit, Script, Sick
from tests.receivers import Webhook, webhook
from tests.workflows.claimants import claimants, fleet_state, until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import PATIENCE, Rig, policy, replay
from tests.workflows.test_fleet import standing
from tests.workflows.test_fleet_details import NOW

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASK = {"APPLICATION": [{"strategy": "ASK"}], "UNKNOWN": [{"strategy": "ASK"}]}


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def make(
    make_rig: MakeRig, script: Script, *channels: dict[str, Any], **options: Any
) -> AbstractAsyncContextManager[Rig]:
    """Return a rig whose fleet has a unique name: the server outlives the test."""
    name = f"f-{uuid.uuid4().hex[:8]}"
    return make_rig(script, name=name, notify=list(channels), **options)


async def until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, what()
        await asyncio.sleep(0.05)


def events(received: Webhook) -> list[tuple[str, str]]:
    return [(one["event"], one["state"]) for one in received.notices]


async def until_events(received: Webhook, *expected: tuple[str, str]) -> list[dict[str, Any]]:
    await until(lambda: len(received.notices) >= len(expected), lambda: received.notices)
    assert events(received) == list(expected)
    return received.notices


async def test_a_question_and_a_failure_are_open_and_resolved(make_rig: MakeRig) -> None:
    script = Script((Exit(rank=0, exit_code=1, generation=1),))
    with webhook() as received:
        async with make(make_rig, script, {"webhook": received.url}) as rig:
            job = await rig.submit(policy(causes=ASK))
            state = await job.until_phase(Phase.WAITING_FOR_PERSON)
            (asked,) = await until_events(received, ("question", "open"))
            known = rig.fleets.known.name
            assert asked["key"] == f"{known}/question/{state.name}/{state.submission}"
            assert (asked["job"], asked["cause"]) == (state.name, "APPLICATION")
            assert asked["reason"] == state.reason
            assert asked["command"].startswith(f"relaunch answer {state.name} approve|deny")
            page = f"http://ui.example.com/namespaces/default/workflows/job%2F{state.name}/"
            assert asked["link"].startswith(page)
            await job.handle.execute_update("answer", {"decision": "deny", "by": "ada"})
            result = await job.result()
            found = await until_events(
                received, ("question", "open"), ("question", "resolved"), ("failed", "open")
            )
            assert found[1]["key"] == asked["key"] != found[2]["key"]
            again = await rig.submit(
                policy(causes=ASK), name=result.name, start={"previous": result.state}
            )
            await again.until_phase(Phase.WAITING_FOR_PERSON)
            await again.handle.signal("cancel")
            assert (await again.result()).phase is Phase.CANCELLED
            found = await until_events(
                received,
                ("question", "open"),
                ("question", "resolved"),
                ("failed", "open"),
                ("failed", "resolved"),
                ("question", "open"),
                ("question", "resolved"),
            )
            assert found[3]["key"] == found[2]["key"]
            assert found[4]["key"] == found[5]["key"] != asked["key"]
        assert len({body["id"] for body in received.bodies}) == len(received.requests)


async def test_a_receiver_that_hangs_delays_no_recovery(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SEND_TIMEOUT_S", 3600.0)
    script = Script((Exit(rank=0, exit_code=1, generation=1),))
    with webhook(hangs=True) as hung, webhook() as well:
        async with make(make_rig, script, {"webhook": hung.url}, {"webhook": well.url}) as rig:
            job = await rig.submit(policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            await until(lambda: len(hung.requests) >= 1, lambda: hung.requests)
            await until_events(well, ("question", "open"))
            await job.handle.execute_update("answer", {"decision": "approve", "by": "ada"})
            await job.until_phase(Phase.RUNNING, 2)
            await job.handle.signal("cancel")
            assert (await job.result()).phase is Phase.CANCELLED
            hung.hangs.clear()
            await until(lambda: ("question", "resolved") in events(hung), lambda: hung.notices)
            await until(lambda: len(well.notices) == 2, lambda: well.notices)
        assert events(well) == [("question", "open"), ("question", "resolved")]


async def test_a_message_without_an_answer_is_sent_again(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SEND_TIMEOUT_S", 0.5)
    script = Script((Exit(rank=0, exit_code=1, generation=1),))
    with webhook(hangs=True) as hung:
        async with make(make_rig, script, {"webhook": hung.url}) as rig:
            job = await rig.submit(policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            await until(lambda: len(hung.requests) >= 1, lambda: hung.requests)
            outbox: Outbox = await rig.notifier.query("state", result_type=Outbox)
            while not outbox.failing:
                await asyncio.sleep(0.2)
                outbox = await rig.notifier.query("state", result_type=Outbox)
            (failing,) = outbox.failing
            assert (failing.channel, failing.reason) == (
                "webhook 127.0.0.1",
                "no answer within 0.5 s",
            )
            before = len(hung.requests)
            hung.hangs.clear()
            await until(lambda: len(hung.requests) > before, lambda: hung.requests)
            assert hung.bodies[-1]["id"] == hung.bodies[0]["id"]
            await job.handle.signal("cancel")
            assert (await job.result()).phase is Phase.CANCELLED


# apprise imports it where Python still has it.
@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")
async def test_what_apprise_may_have_delivered_is_resolved(make_rig: MakeRig) -> None:
    """The receiver takes each message, and answers too late for apprise."""
    script = Script((Exit(rank=0, exit_code=1, generation=1),))
    with webhook(hangs=True) as late:
        address = f"{late.url.replace('http://', 'json://')}?rto=0.5"
        async with make(make_rig, script, {"apprise": address}) as rig:
            job = await rig.submit(policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            await until(lambda: len(late.requests) >= 1, lambda: late.requests)
            await job.handle.signal("cancel")
            assert (await job.result()).phase is Phase.CANCELLED
            await until(lambda: late.bodies[-1]["type"] == "success", lambda: late.bodies)
        assert {body["type"] for body in late.bodies[:-1]} == {"failure"}


async def test_no_message_stops_a_notifier(make_rig: MakeRig) -> None:
    with webhook() as received:
        async with make(make_rig, Script(), {"webhook": received.url}) as rig:
            name = rig.fleets.known.name
            people = PeopleActivities(rig.fleets, rig.client, rig.queue)
            known = Notice("breaker", "known", "it is open", "why", NOW)
            await people.tell_people(TellPeopleInput(name, (known,)))
            await until(lambda: len(received.notices) == 1, lambda: received.notices)
            bare = {"event": "breaker", "subject": "s", "reason": "r", "at": "2020-01-01T00:00:00"}
            for stranger in (
                [{**bare, "key": "known"}, {**bare, "key": "new"}],
                [{**bare, "key": "known", "at": "2099-01-01T00:00:00"}],
                [{**bare, "key": "other", "event": "nosuch"}],
                [{**bare, "key": "other", "at": "yesterday"}],
                {"at": 10**400},
            ):
                await rig.notifier.signal("post", stranger)
            await until(lambda: len(received.notices) == 3, lambda: received.notices)
            again, last = replace(known, key="new"), replace(known, key="last")
            await people.tell_people(TellPeopleInput(name, (again, last)))
            await until(lambda: len(received.notices) == 5, lambda: received.notices)
        sent = [one["key"] for one in received.notices]
        assert sent[0] == "known" and sorted(sent[1:]) == ["known", "last", "new", "new"]


class EndsAfterSending(Interceptor, ActivityInboundInterceptor):
    """Loses what came of each message, as a worker does that ends after it was sent."""

    def __init__(self) -> None:
        """There is no next one yet."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        self.next = next
        return self

    def init(self, outbound: ActivityOutboundInterceptor) -> None:
        self.next.init(outbound)

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        result = await self.next.execute_activity(input)
        if activity.info().activity_type == "deliver_notices":
            raise ApplicationError("the worker has ended", non_retryable=True)
        return result


async def send_and_lose(make_rig: MakeRig, received: Webhook) -> WorkflowHistory:
    """Have a matter sent and resolved by workers that end. Return the notifier's history."""
    channel, lossy = {"webhook": received.url}, (EndsAfterSending(),)
    async with make(make_rig, Script(), channel, interceptors=lossy) as rig:
        name = rig.fleets.known.name
        people = PeopleActivities(rig.fleets, rig.client, rig.queue)
        opened = Notice("breaker", f"{name}/breaker", "it is open", "why", NOW)
        await people.tell_people(TellPeopleInput(name, (opened,)))
        await until_outbox(rig, lambda outbox: any(one.due for one in outbox.deliveries))
        ended = replace(opened, state="resolved")
        await people.tell_people(TellPeopleInput(name, (ended,)))
        await until_outbox(rig, lambda outbox: not (outbox.open or outbox.pending))
        return await rig.notifier.fetch_history()


async def until_outbox(rig: Rig, holds: Callable[[Outbox], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not holds(outbox := await rig.notifier.query("state", result_type=Outbox)):
        assert asyncio.get_running_loop().time() < deadline, outbox
        await asyncio.sleep(0.05)


async def test_what_a_worker_sent_before_it_ended_is_resolved(make_rig: MakeRig) -> None:
    with webhook() as received:
        await send_and_lose(make_rig, received)
        await until(lambda: ("breaker", "resolved") in events(received), lambda: received.notices)


async def test_a_notifier_of_0_1_0_that_lost_an_outcome_goes_on(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not resolve what may have arrived: the history has no such message."""
    with webhook() as received:
        with monkeypatch.context() as older:
            older.setattr(RepeatedPatch, "is_reached", lambda _: False)
            history = await send_and_lose(make_rig, received)
        await replay(history)
        assert ("breaker", "resolved") not in events(received)


@pytest.mark.long
async def test_channels_take_their_events_and_causes(make_rig: MakeRig) -> None:
    script = Script((Exit(rank=0, exit_code=1, generation=1),))
    with webhook() as failures, webhook() as networks, webhook() as every:
        channels: tuple[dict[str, Any], ...] = (
            {"webhook": failures.url, "events": ["failed"]},
            {"webhook": networks.url, "causes": ["NETWORK"]},
            {"webhook": every.url, "causes": ["APPLICATION"]},
        )
        async with make(make_rig, script, *channels) as rig:
            job = await rig.submit(policy(causes=ASK))
            await job.until_phase(Phase.WAITING_FOR_PERSON)
            await job.handle.execute_update("answer", {"decision": "deny", "by": "ada"})
            await job.result()
            await until_events(
                every, ("question", "open"), ("question", "resolved"), ("failed", "open")
            )
            await until_events(failures, ("failed", "open"))
        assert networks.requests == []


@pytest.mark.long
async def test_a_fleet_tells_of_quarantine_and_breaker(make_rig: MakeRig) -> None:
    sick = (Sick(node="n1", dcgm_error=(0, 52)),)
    with webhook() as received:
        async with (
            make(
                make_rig,
                Script(sick, then="run"),
                {"webhook": received.url},
                nodes=3,
                gpus=1,
                limits={"nodes_out": 1},
            ) as rig,
            claimants(rig) as begin,
        ):
            job = await begin()

            def blame(name: str) -> Suspect:
                at = datetime.now(UTC)
                reason = f"Xid 79 on {name}"
                return Suspect(name, at, 1, Cause.GPU_FATAL, reason, code="Xid 79", isolate=True)

            await job.claim(0, suspects=(blame("n1"),))
            await until_fleet(
                rig, lambda state: standing(state, "n1") is NodeStatus.QUARANTINED, "n1 out"
            )
            (first,) = await until_events(received, ("quarantine", "open"))
            assert (first["nodes"], first["cause"]) == (["n1"], "GPU_FATAL")
            await rig.fleet.signal("quarantine", {"node": "n3", "reason": "a fan", "by": "ada"})
            await job.claim(0, suspects=(blame("n1"), blame("n2")))
            await until_events(received, ("quarantine", "open"), ("breaker", "open"))
            await rig.fleet.signal("release", {"node": "n1", "reason": "reseated", "by": "ada"})
            await until_fleet(
                rig, lambda state: standing(state, "n1") is NodeStatus.IN_SERVICE, "n1 back"
            )
            await rig.fleet.signal("resume", {"reason": "seen", "by": "ada"})
            await until_fleet(rig, lambda state: not state.breaker.is_open, "closed")
            found = await until_events(
                received,
                ("quarantine", "open"),
                ("breaker", "open"),
                ("quarantine", "resolved"),
                ("breaker", "resolved"),
                *[("quarantine", "open")] * (len(received.notices) > 4),
            )
            assert (found[2]["key"], found[3]["key"]) == (found[0]["key"], found[1]["key"])
            assert "ada" in found[2]["reason"]
            assert standing(await fleet_state(rig), "n3") is NodeStatus.QUARANTINED
        assert not any("n3" in one["nodes"] for one in received.notices), "ada knows that"


@pytest.mark.long
async def test_500_incidents_in_a_minute_are_ten_messages(make_rig: MakeRig) -> None:
    """Of 500 jobs that ask, 250 are answered before the minute is over."""
    with webhook() as received:
        async with make(make_rig, Script(), {"webhook": received.url}) as rig:
            name = rig.fleets.known.name
            people = PeopleActivities(rig.fleets, rig.client, rig.queue)

            async def tell(number: int, state: Any) -> None:
                at = datetime.now(UTC)
                key = f"{name}/question/j{number}/1"
                notice = Notice("question", key, f"job j{number} waits", "why", at, state)
                await people.tell_people(TellPeopleInput(name, (notice,)))

            def sent(state: str) -> list[str]:
                return sorted(one["key"] for one in received.notices if one["state"] == state)

            def late() -> list[str]:
                """Those that were sent before they were answered."""
                return [key for key in sent("open") if int(key.split("/")[2][1:]) % 2]

            began = time.monotonic()
            for number in range(500):
                await tell(number, "open")
                if number % 2:
                    await tell(number, "resolved")
            await until(
                lambda: len(sent("open")) == 250 + len(late()) and sent("resolved") == late(),
                lambda: len(received.notices),
            )
            minutes = 1 + int((time.monotonic() - began) / 60)
            assert len(received.requests) <= minutes * MAX_MESSAGES
            assert len(late()) <= minutes * MAX_MESSAGES
            assert len(set(sent("open"))) == len(sent("open"))


async def test_a_notifier_that_continues_as_new_forgets_nothing(make_short_rig: MakeRig) -> None:
    with webhook() as received:
        async with make(make_short_rig, Script(), {"webhook": received.url}) as rig:
            name = rig.fleets.known.name
            people = PeopleActivities(rig.fleets, rig.client, rig.queue)

            async def tell(key: str, state: Any) -> None:
                notice = Notice("breaker", key, key, "why", NOW, state)
                await people.tell_people(TellPeopleInput(name, (notice,)))

            for number in range(4):
                await tell(f"k{number}", "open")
                await tell(f"k{number}", "open")
                await until(lambda n=number: len(received.notices) > n, lambda: received.notices)  # type: ignore[misc]
            described = await rig.notifier.describe()
            assert described.id == f"{NOTIFIER_ID_PREFIX}{name}"
            first = described.raw_description.workflow_execution_info.first_run_id
            assert described.run_id != first, "it has continued as new"
            await tell("k0", "resolved")
            await until(lambda: len(received.notices) == 5, lambda: received.notices)
            assert [one["key"] for one in received.notices] == ["k0", "k1", "k2", "k3", "k0"]
