"""A test message through all channels of a fleet: real HTTP servers; the server is a double that
runs the activity at once.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from temporalio.client import ActivityFailureError, Client
from temporalio.exceptions import ApplicationError, TimeoutType
from temporalio.exceptions import TimeoutError as ActivityTimeout

from relaunch.activities.notify import PeopleActivities
from relaunch.cli import channel_test
from relaunch.config import ConfigError
from relaunch.evidence.causes import Cause
from relaunch.messages.notices import (
    AddressedNotice,
    DeliverInput,
    Delivery,
    Notice,
    SendTestInput,
    SendTestResult,
    UnknownDelivery,
)
from relaunch.spec.fleet import name_channels
from tests.activities.harness import environment, stand
from tests.fakes.nodes import SimulatedBackend
from tests.receivers import webhook
from tests.workflows.rig import SimulatedFleets, fleet


class Server:
    identity, namespace = "4711@head", "default"

    def __init__(self, *channels: dict[str, Any]) -> None:
        fleets = SimulatedFleets(fleet(2, notify=list(channels)), stand().backend)
        self.channels = name_channels(fleets.known.notify)
        self.people = PeopleActivities(fleets, cast(Client, self), "relaunch")
        self.lost = False

    async def execute_activity(self, name: str, given: SendTestInput, **options: Any) -> Any:
        assert name == "send_test" and options["retry_policy"].maximum_attempts == 1
        if self.lost:
            late = ActivityTimeout(
                "late", type=TimeoutType.SCHEDULE_TO_START, last_heartbeat_details=[]
            )
            raise ActivityFailureError(cause=late) from late
        made = environment()
        made.info = replace(made.info, activity_id=options["id"])
        try:
            return await made.run(self.people.send_test, given)
        except ApplicationError as error:
            raise ActivityFailureError(cause=error) from error


async def send(server: Server, fleet: str = "default") -> SendTestResult:
    return await channel_test.send(cast(Client, server), "relaunch", fleet)


async def test_each_channel_gets_one_message_whatever_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with webhook() as received, webhook(404) as refusing:
        channels = [
            {"webhook": received.url, "events": ["failed"], "causes": ["HANG"]},
            {"webhook": refusing.url},
        ]
        sent = await send(Server(*channels))
        (notice,) = received.notices
    assert (notice["event"], notice["state"], notice["key"]) == ("test", "open", "default/test")
    assert received.bodies[0]["subject"] == "relaunch: this is a test of fleet default"
    assert channel_test.lines("default", sent) == [
        "webhook 127.0.0.1    delivered",
        "webhook 127.0.0.1 2  FAILED: it answered 404",
        "topic                delivered",
        "sent by worker 4711@head for fleet default; another worker may read other secrets",
    ]
    assert [one["outcome"] for one in channel_test.view("default", sent)["channels"]] == [
        "done",
        "refused",
        "done",
    ]


async def test_without_a_channel_a_fleet_or_a_worker_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SimulatedBackend, "has_topic", False)
    with pytest.raises(ConfigError, match=r"fleet default has no channel.*`notify:`"):
        await send(Server())
    with pytest.raises(ConfigError, match="'nosuch' is not known to this worker"):
        await send(Server(), "nosuch")
    server = Server()
    server.lost = True
    with pytest.raises(ConfigError, match="no worker answers for fleet default"):
        await send(server)


async def test_each_channel_gets_the_matters_that_its_keys_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    about = {"reason": "it broke", "at": datetime(2026, 11, 26, tzinfo=UTC)}
    notices = (
        Notice("question", "ask", "a", **about, job="llama-7b", cause=Cause.GPU_FATAL),
        Notice("failed", "end", "b", **about, job="llama-7b", cause=Cause.HANG),
        Notice("failed", "other", "c", **about, job="bert"),
        Notice("breaker", "breaker", "d", **about),
        Notice("waiting", "wait", "e", **about, job="bert", cause=Cause.NODE_LOST),
        Notice("waiting", "wait 1", "f", **about, job="bert", cause=Cause.HANG, reminders=1),
        Notice("question", "ask 2", "g", **about, job="bert", cause=Cause.HANG, reminders=2),
    )
    every = ["ask", "end", "other", "breaker", "wait", "wait 1", "ask 2"]
    chosen: dict[str, tuple[dict[str, Any], list[str]]] = {
        "everything": ({}, every),
        "pager": ({"severities": ["critical"]}, ["ask", "breaker", "wait 1", "ask 2"]),
        "chat": ({"severities": ["warning"]}, ["end", "other", "wait", "wait 1"]),
        "second": ({"from_reminder": 1}, ["wait 1", "ask 2"]),
        "third": ({"from_reminder": 2}, ["ask 2"]),
        "second for nodes": ({"from_reminder": 1, "events": ["waiting", "failed"]}, ["wait 1"]),
        "team": ({"jobs": ["llama-*", "x"]}, ["ask", "end"]),
        "hangs of the team": ({"jobs": ["llama-*"], "causes": ["HANG"]}, ["end"]),
        "hangs": ({"causes": ["HANG"]}, ["end", "other", "breaker", "wait 1", "ask 2"]),
        "one letter": ({"jobs": ["ber[st]", "LLAMA-?b"]}, ["other", *every[4:]]),
    }
    with ExitStack() as stack:
        hooks = {name: stack.enter_context(webhook()) for name in chosen}
        server = Server(*({"webhook": hooks[one].url, **chosen[one][0]} for one in chosen))
        message = Delivery(1, tuple(AddressedNotice(one) for one in notices))
        await environment().run(server.people.deliver_notices, DeliverInput("default", message))
        got = {name: [one["key"] for one in hook.notices] for name, hook in hooks.items()}
        told = [(one["severity"], one["reminders"]) for one in hooks["everything"].notices]
        subject = hooks["third"].bodies[0]["subject"]
    assert got == {name: keys for name, (_, keys) in chosen.items()}
    grave, lesser = ("critical", 0), ("warning", 0)
    assert told == [grave, lesser, lesser, grave, lesser, ("critical", 1), ("critical", 2)]
    assert subject == "relaunch: g (reminder 2)"


async def test_what_may_have_arrived_is_resolved_where_it_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    at = datetime(2026, 11, 26, tzinfo=UTC)
    ended = Notice("waiting", "wait", "a", "it has its nodes", at, "resolved", job="bert")
    unknown = UnknownDelivery(Cause.HANG, 1)
    chosen: dict[str, dict[str, Any]] = {
        "had it before": {"events": ["failed"]},
        "pager": {"severities": ["critical"]},
        "second": {"from_reminder": 1},
        "hangs": {"causes": ["HANG"]},
        "third": {"from_reminder": 2},
        "networks": {"causes": ["NETWORK"]},
        "failures": {"events": ["failed"]},
    }
    with ExitStack() as stack:
        hooks = {name: stack.enter_context(webhook()) for name in chosen}
        server = Server(*({"webhook": hooks[one].url, **chosen[one]} for one in chosen))
        (first, *_) = server.channels
        message = Delivery(1, (AddressedNotice(ended, (first,), unknown),))
        await environment().run(server.people.deliver_notices, DeliverInput("default", message))
        got = [name for name, hook in hooks.items() if hook.notices]
    assert got == ["had it before", "pager", "second", "hangs"]


@pytest.mark.parametrize(("attempt", "outcome"), [(1, "refused"), (2, "ambiguous")])
async def test_what_an_earlier_attempt_may_have_sent_is_ambiguous(
    attempt: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of the first attempt may have ended after the receiver took the message."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(SimulatedBackend, "has_topic", False)
    notice = Notice("breaker", "k", "a", "b", datetime(2026, 11, 26, tzinfo=UTC))
    made = environment()
    made.info = replace(made.info, attempt=attempt)
    with webhook(404) as refusing:
        message = DeliverInput("default", Delivery(1, (AddressedNotice(notice),)))
        people = Server({"webhook": refusing.url}).people
        (result,) = (await made.run(people.deliver_notices, message)).results
    assert (result.outcome, result.reason, result.keys) == (outcome, "it answered 404", ("k",))
