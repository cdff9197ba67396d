"""A test message through all channels of a fleet: real HTTP servers; the server is a double that
runs the activity at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from temporalio.client import ActivityFailureError, Client
from temporalio.exceptions import ApplicationError, TimeoutType
from temporalio.exceptions import TimeoutError as ActivityTimeout

from relaunch.activities.notify import PeopleActivities
from relaunch.cli import channel_test
from relaunch.config import ConfigError
from relaunch.messages.notices import SendTestInput, SendTestResult
from tests.activities.harness import environment, stand
from tests.fakes.nodes import SimulatedBackend
from tests.receivers import webhook
from tests.workflows.rig import SimulatedFleets, fleet


class Server:
    identity, namespace = "4711@head", "default"

    def __init__(self, *channels: dict[str, Any]) -> None:
        fleets = SimulatedFleets(fleet(2, notify=list(channels)), stand().backend)
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
