"""Workflow that notifies people of what happens in one fleet: it takes notices from its inbox,
decides which are sent, and has them sent.

Jobs and fleets only post notices to it, so a receiver that hangs delays none of them.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter

    from relaunch.activities.fleet import FLEET_UNKNOWN
    from relaunch.activities.notify import PeopleActivities
    from relaunch.messages.bounds import MAX_TEXT, bound_message
    from relaunch.messages.jobs import explain
    from relaunch.messages.notices import (
        DeliverInput,
        Delivery,
        Notice,
        NotifierInput,
        Outbox,
        format_subject,
    )
    from relaunch.text import count_noun, escape_markdown
    from relaunch.workflows.builds import continue_as_new, is_build_outdated
    from relaunch.workflows.notifier.outbox import find_wake, post, record_results, take
    from relaunch.workflows.patches import RepeatedPatch

    NOTICES = TypeAdapter(tuple[Notice, ...])

DELIVERY_TIMEOUT = timedelta(seconds=45)
"""For one message to all channels at once: each has 10 s, and may wait for messages before it."""
GIVE_UP_TIMEOUT = timedelta(minutes=2)
"""If no worker takes it until then, the message is tried again later."""
DELIVERY_RETRY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_attempts=3)
"""Of workers that end while they send. Channels that fail are results, and tried again by the
outbox."""


@workflow.defn
class Notifier:
    @workflow.init
    def __init__(self, start: NotifierInput) -> None:
        self._fleet = start.fleet
        self._outbox = start.outbox
        self._inbox: list[Notice] = list(start.inbox)
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._outcomes = RepeatedPatch("outcomes")

    @workflow.run
    async def run(self, start: NotifierInput) -> None:
        while True:
            while self._inbox:
                self._outbox = post(self._outbox, self._inbox.pop(0))
            self._outbox, due = take(self._outbox, workflow.now(), tuple(self._sending))
            for delivery in due:
                self._sending[delivery.number] = asyncio.create_task(self._deliver(delivery))
            workflow.set_current_details(format_page(self._fleet, self._outbox))
            await self._wait_for_news()
            self._forget_ended()
            if self._continues_as_new():
                await self._continue_as_new()

    async def _deliver(self, delivery: Delivery) -> None:
        notices, may_have_arrived = [one.notice for one in delivery.notices], True
        try:
            result = await workflow.execute_activity_method(
                PeopleActivities.deliver_notices,
                DeliverInput(self._fleet, delivery),
                start_to_close_timeout=DELIVERY_TIMEOUT,
                schedule_to_close_timeout=GIVE_UP_TIMEOUT,
                retry_policy=DELIVERY_RETRY,
                summary=escape_markdown(format_subject(self._fleet, notices)[:150])[:200],
            )
        except ActivityError as error:
            workflow.logger.warning("a message was not sent: %s", error.cause or error)
            result, may_have_arrived = None, not _was_not_sent(error)
        self._outbox = record_results(
            self._outbox,
            delivery.number,
            result,
            workflow.now(),
            self._outcomes.is_reached,
            may_have_arrived=may_have_arrived,
        )

    async def _wait_for_news(self) -> None:
        wake = find_wake(self._outbox, workflow.now(), tuple(self._sending))
        try:
            await workflow.wait_condition(
                lambda: (
                    bool(self._inbox)
                    or any(task.done() for task in self._sending.values())
                    or self._continues_as_new()
                ),
                timeout=None if wake is None else max(timedelta(0), wake - workflow.now()),
                timeout_summary="until notices are sent as a summary, or a message is tried again",
            )
        except TimeoutError:
            return

    def _forget_ended(self) -> None:
        for task in self._sending.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                # A bug. It fails the workflow task, not the workflow.
                raise RuntimeError(f"unexpected error: {error}") from error
        self._sending = {number: task for number, task in self._sending.items() if not task.done()}

    def _continues_as_new(self) -> bool:
        info = workflow.info()
        return info.is_continue_as_new_suggested() or is_build_outdated(info)

    async def _continue_as_new(self) -> None:
        await workflow.wait_condition(
            lambda: (
                all(task.done() for task in self._sending.values())
                and workflow.all_handlers_finished()
            )
        )
        self._forget_ended()
        continue_as_new(NotifierInput(self._fleet, self._outbox, tuple(self._inbox)))

    @workflow.signal(description="Notices to be sent to people. Only relaunch sends them.")
    def post(self, notices: Any = None, *_more: Any) -> None:
        try:
            self._inbox += NOTICES.validate_python(bound_message(notices, MAX_TEXT))
        except ValueError as error:
            workflow.logger.warning("notices that cannot be read: %s", explain(error))

    @workflow.signal(
        description="Another build of relaunch is to work for this workflow. Only relaunch sends"
        " it."
    )
    def upgrade(self, *_more: Any) -> None:
        """Nothing: the server tells with the task of this signal which build is to work for it."""

    @workflow.query(description="What is not delivered yet, which matters are open, what fails.")
    def state(self) -> Outbox:
        return self._outbox


def format_page(fleet: str, outbox: Outbox) -> str:
    """Return the page of the workflow in Markdown."""
    lines = [
        f"## notices of fleet {fleet}: {count_noun(outbox.count, 'message')} sent,"
        f" {count_noun(len(outbox.open), 'matter is', 'matters are')} open",
        "",
    ]
    for one in outbox.failing:
        lines.append(
            f"- **{escape_markdown(one.channel)} FAILS** since {_format_time(one.since)}"
            f" ({count_noun(one.failures, 'failure')}): {escape_markdown(one.reason)}"
        )
    if outbox.pending:
        lines.append(f"- {count_noun(len(outbox.pending), 'notice waits', 'notices wait')}")
    if retried := sum(one.due is not None for one in outbox.deliveries):
        lines.append(f"- {count_noun(retried, 'message is', 'messages are')} tried again")
    if outbox.dropped:
        lines.append(f"- {outbox.dropped} given up")
    return "\n".join(lines)


def _format_time(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")


def _was_not_sent(error: ActivityError) -> bool:
    """Return whether the last worker that was to send a message does not know the fleet.

    One before it may have died with the message sent, but that is rare, and it is sent again soon.
    """
    cause = error.cause
    return isinstance(cause, ApplicationError) and cause.type == FLEET_UNKNOWN
