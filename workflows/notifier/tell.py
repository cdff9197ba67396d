"""Posts notices of a workflow to the notifier of its fleet."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from relaunch.activities.notify import PeopleActivities
    from relaunch.messages.notices import Notice, TellPeopleInput

NOTICE_TIMEOUT = timedelta(minutes=2)
"""After this 0.1.0 gave a notice up."""
END_TIMEOUT = timedelta(minutes=10)
"""How long a run that ends for good waits until its notices are posted."""
AWAY = timedelta(minutes=1)
"""A timer that is seen to have ended this long ago shows that no worker ran meanwhile."""
ATTEMPT_TIMEOUT = timedelta(seconds=20)
NOTICE_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=20),
)


async def tell_people(
    fleet: str, notices: tuple[Notice, ...], within: timedelta | None = None
) -> None:
    """Post notices to the notifier of a fleet, however long no worker can do so, or within a time.

    Nothing posts them again: who calls this has noted that people know. It takes a worker that
    knows the fleet, and a signal, so it waits for no receiver.
    """
    subject = notices[0].subject
    try:
        await workflow.execute_activity_method(
            PeopleActivities.tell_people,
            TellPeopleInput(fleet, notices),
            start_to_close_timeout=ATTEMPT_TIMEOUT,
            schedule_to_close_timeout=within,
            retry_policy=NOTICE_RETRY,
            summary=f"tell people: {subject}"[:200],
        )
    except ActivityError as error:
        workflow.logger.warning("no notice was sent: %s: %s", subject, error.cause or error)


async def finish_telling(telling: asyncio.Task[None]) -> None:
    """Wait at the end of a workflow until its notices are posted, despite cancels.

    For a limited time, in which a worker has run: else none could have posted them.
    """
    until = workflow.now() + END_TIMEOUT
    while not telling.done():
        try:
            await workflow.wait_condition(
                telling.done,
                timeout=max(timedelta(0), until - workflow.now()),
                timeout_summary="until notices that cannot be posted are given up",
            )
        except asyncio.CancelledError:
            continue  # it ends anyway
        except TimeoutError:
            if workflow.now() < until + AWAY:
                workflow.logger.warning("the last notices were not sent: nothing could post them")
                return
            until = workflow.now() + END_TIMEOUT
