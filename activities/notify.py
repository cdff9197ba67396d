"""Notifies people of events that cannot wait until they look.

`tell_people` posts notices to the fleet's notifier, a workflow that bounds how many messages there
are; `deliver_notices` sends one message to the fleet's channels. `send_test` proves that they work.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote

from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError

from relaunch.activities.channels import SEND_TIMEOUT_S, ChannelError, ChannelSender, Message
from relaunch.activities.fleet import FLEET_UNKNOWN
from relaunch.backends.base import BackendError, Fleets, TellsPeople
from relaunch.messages.ids import NOTIFIER_ID_PREFIX
from relaunch.messages.notices import (
    AddressedNotice,
    ChannelResult,
    DeliverInput,
    DeliveryResult,
    Notice,
    NotifierInput,
    SendTestInput,
    SendTestResult,
    TellPeopleInput,
    find_grade,
    format_json,
    format_subject,
    format_text,
    make_test_notice,
)
from relaunch.spec.fleet import Channel, name_channels

TOPIC = "topic"
"""Name of the channel of a backend that notifies people itself."""


MAX_UNKNOWN = 6
"""Workers that do not know the fleet of a notice, half a minute, until it is given up."""


class PeopleActivities:
    def __init__(self, fleets: Fleets, client: Client, task_queue: str, web_ui: str = "") -> None:
        self._fleets = fleets
        self._client = client
        self._task_queue = task_queue
        self._web_ui = web_ui.rstrip("/")
        """Address of the web UI; empty: not known."""
        self._sender = ChannelSender()

    @activity.defn
    async def tell_people(self, input: TellPeopleInput) -> str:
        """Post notices for people. Return the outcome as a clause.

        The first one starts the notifier of the fleet.

        Raises:
            ApplicationError: this worker has no such fleet; another one may. After `MAX_UNKNOWN`
                attempts it is final: the end of a job may wait for it.
        """
        try:
            channels = self._find_channels(input.fleet)
        except KeyError as error:
            is_last = activity.info().attempt >= MAX_UNKNOWN
            raise ApplicationError(
                str(error.args[0]), type=FLEET_UNKNOWN, non_retryable=is_last
            ) from None
        if not channels:
            return f"fleet {input.fleet} has no way to notify people"
        await self._client.start_workflow(
            "Notifier",
            NotifierInput(input.fleet),
            id=f"{NOTIFIER_ID_PREFIX}{input.fleet}",
            task_queue=self._task_queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            start_signal="post",
            start_signal_args=[input.notices],
            static_summary=f"notices of fleet {input.fleet} to people"[:200],
        )
        return f"posted to {', '.join(channels)}"

    @activity.defn
    async def deliver_notices(self, input: DeliverInput) -> DeliveryResult:
        """Send a message to the channels that it is for, to all at once.

        Raises:
            ApplicationError: this worker has no such fleet; another one may.
        """
        delivery = input.delivery
        try:
            channels = self._find_channels(input.fleet)
        except KeyError as error:
            raise ApplicationError(str(error.args[0]), type=FLEET_UNKNOWN) from None
        chosen: dict[str, tuple[Notice, ...]] = {}
        for name, channel in channels.items():
            if delivery.channels is None or name in delivery.channels:
                notices = _select(name, channel, delivery.notices)
                if notices:
                    chosen[name] = notices
        id = f"{activity.info().workflow_id}/{delivery.number}"
        results = await asyncio.gather(
            *(
                self._send(input.fleet, id, name, channels[name], notices)
                for name, notices in chosen.items()
            )
        )
        if activity.info().attempt > 1:
            # The worker of an earlier attempt may have ended after the channel took the message.
            results = [
                replace(one, outcome="ambiguous") if one.outcome == "refused" else one
                for one in results
            ]
        return DeliveryResult(tuple(channels), tuple(results))

    @activity.defn
    async def send_test(self, input: SendTestInput) -> SendTestResult:
        """Send a test message to every channel of a fleet, whatever it takes, to all at once.

        Raises:
            ApplicationError: this worker has no such fleet.
        """
        try:
            channels = self._find_channels(input.fleet)
        except KeyError as error:
            raise ApplicationError(str(error.args[0]), non_retryable=True) from None
        worker, now = self._client.identity, datetime.now(UTC)
        notices = (make_test_notice(input.fleet, input.by, worker, now),)
        id = activity.info().activity_id
        results = await asyncio.gather(
            *(
                self._send(input.fleet, id, name, channel, notices)
                for name, channel in channels.items()
            )
        )
        return SendTestResult(worker, tuple(results))

    def _find_channels(self, fleet: str) -> dict[str, Channel | None]:
        """Return the channels of a fleet by name; None: its backend notifies people itself.

        Raises:
            KeyError: there is no such fleet; its message is one sentence.
        """
        channels: dict[str, Channel | None] = {**name_channels(self._fleets.spec(fleet).notify)}
        backend = self._fleets.backend(fleet)
        if isinstance(backend, TellsPeople) and backend.has_topic:
            channels[TOPIC] = None
        return channels

    async def _send(
        self,
        fleet: str,
        id: str,
        name: str,
        channel: Channel | None,
        notices: tuple[Notice, ...],
    ) -> ChannelResult:
        linked = [(notice, self._find_link(notice)) for notice in notices]
        message = Message(
            format_subject(fleet, notices),
            format_text(linked),
            format_json(fleet, id, datetime.now(UTC), linked),
            find_grade(notices),
        )
        keys = tuple(one.key for one in notices if one.state == "open")
        try:
            if channel is None:
                backend = self._fleets.backend(fleet)
                assert isinstance(backend, TellsPeople)
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await backend.tell_people(message.subject, message.text)
            else:
                await self._sender.send(name, channel, message)
        except TimeoutError:
            reason = f"no answer within {SEND_TIMEOUT_S:g} s"
            return ChannelResult(name, "ambiguous", reason, keys)
        except BackendError as error:
            activity.logger.warning("fleet %s: %s: %s", fleet, name, error.reason)
            return ChannelResult(name, "ambiguous", error.reason, keys)
        except ChannelError as error:
            activity.logger.warning("fleet %s: %s: %s", fleet, name, error.reason)
            return ChannelResult(
                name, "ambiguous" if error.is_ambiguous else "refused", error.reason, keys
            )
        return ChannelResult(name, "done", "", keys)

    def _find_link(self, notice: Notice) -> str:
        if not self._web_ui or not notice.workflow:
            return ""
        page = f"{self._web_ui}/namespaces/{self._client.namespace}/workflows"
        return f"{page}/{quote(notice.workflow, safe='')}/{notice.run}".rstrip("/")


def _select(
    name: str, channel: Channel | None, notices: tuple[AddressedNotice, ...]
) -> tuple[Notice, ...]:
    """Return the notices that a channel takes."""
    return tuple(one.notice for one in notices if _is_for(name, channel, one))


def _is_for(name: str, channel: Channel | None, addressed: AddressedNotice) -> bool:
    notice = addressed.notice
    if addressed.channels is None:
        cause, reminders = notice.cause, notice.reminders
    elif name in addressed.channels:
        return True
    elif (unknown := addressed.unknown) is not None:
        cause, reminders = unknown.cause, unknown.reminders
    else:
        return False
    return channel is None or channel.takes(notice.event, cause, notice.job, reminders)
