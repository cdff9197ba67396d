"""Posts notices of a workflow to the notifier of its fleet."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from relaunch.activities.notify import PeopleActivities
    from relaunch.messages.notices import Notice, TellPeopleInput

NOTICE_TIMEOUT = timedelta(minutes=2)
"""After this a notice is given up: no worker took it, or the server was busy. The job's page and
its result say the same."""
ATTEMPT_TIMEOUT = timedelta(seconds=20)
NOTICE_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=20),
)


async def tell_people(fleet: str, notices: tuple[Notice, ...]) -> None:
    """Post notices to the notifier of a fleet."""
    subject = notices[0].subject
    try:
        await workflow.execute_activity_method(
            PeopleActivities.tell_people,
            TellPeopleInput(fleet, notices),
            start_to_close_timeout=ATTEMPT_TIMEOUT,
            schedule_to_close_timeout=NOTICE_TIMEOUT,
            retry_policy=NOTICE_RETRY,
            summary=f"tell people: {subject}"[:200],
        )
    except ActivityError as error:
        workflow.logger.warning("no notice was sent: %s: %s", subject, error.cause or error)
