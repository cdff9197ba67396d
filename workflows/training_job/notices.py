"""Notify people that a job waits for a person, or that it has failed.

Each event gives one notice, delivered at least once.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from relaunch.activities.notify import Notice, PeopleActivities
    from relaunch.evidence.stragglers import describe_slow_node
    from relaunch.job.failure import describe_failure, list_commands
    from relaunch.job.slow_nodes import list_slow
    from relaunch.job.state import JobState, Phase
    from relaunch.text import count_noun
    from relaunch.workflows.training_job.session import Session

NOTICE_TIMEOUT = timedelta(minutes=2)
"""After this a job ends without having notified anyone: its page and its result say the same."""
ATTEMPT_TIMEOUT = timedelta(seconds=20)
NOTICE_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=20),
)


async def notify_people(fleet: str, subject: str, text: str) -> None:
    try:
        await workflow.execute_activity_method(
            PeopleActivities.tell_people,
            Notice(fleet, subject, text),
            start_to_close_timeout=ATTEMPT_TIMEOUT,
            schedule_to_close_timeout=NOTICE_TIMEOUT,
            retry_policy=NOTICE_RETRY,
            summary=f"tell people: {subject}"[:200],
        )
    except ActivityError as error:
        workflow.logger.warning("no notice was sent: %s: %s", subject, error.cause or error)


class Notices:
    """The notices of one job."""

    def __init__(self, session: Session, last: str) -> None:
        self._session = session
        self.last = last
        """The key of the last notice that was sent."""
        self.sending: asyncio.Task[None] | None = None

    def send_news(self) -> None:
        """Send a notice if there is news, after the one that is being sent."""
        job = self._session.job
        if (news := _news_key(job)) is None or news == self.last:
            return
        self.last = news
        self.sending = self._session.tasks.start(
            "notify people", self._send(self.sending, job, _subject(job), _text(job))
        )

    def report_slow_nodes(self) -> None:
        """Send a notice of the nodes that were recorded as slow just now, after the one before."""
        job = self._session.job
        new = [one for one in list_slow(job) if one.at == job.slow_nodes[-1].at]
        subject = f"relaunch: job {job.name} has {count_noun(len(new), 'slow node')}"
        lines = [describe_slow_node(one.slow) for one in new]
        lines += ["", f"generation {job.generation}", f"Details: relaunch show {job.name}"]
        self.sending = self._session.tasks.start(
            "notify people of slow nodes",
            self._send(self.sending, job, subject, "\n".join(lines)),
        )

    async def _send(
        self, before: asyncio.Task[None] | None, job: JobState, subject: str, text: str
    ) -> None:
        if before is not None:
            await workflow.wait([before])
        await notify_people(job.spec.fleet, subject, text)


def _news_key(job: JobState) -> str | None:
    """Return a key that identifies the current news; None if there is nothing to notify."""
    if job.phase is Phase.FAILED:
        return "failed"
    if job.phase is Phase.WAITING_FOR_PERSON and not job.snoozed:
        return f"asked {job.generation} {job.next.at}"
    if job.phase is Phase.WAITING_FOR_NODES and job.reminders:
        return f"waits for nodes {job.generation} {job.reminders}"
    return None


def _subject(job: JobState) -> str:
    if job.phase is Phase.FAILED:
        return f"relaunch: job {job.name} has failed"
    still = "still waits" if job.reminders else "waits"
    whom = "nodes" if job.phase is Phase.WAITING_FOR_NODES else "a person"
    return f"relaunch: job {job.name} {still} for {whom}"


def _text(job: JobState) -> str:
    lines = [f"{_subject(job).removeprefix('relaunch: ')}: {job.reason}", ""]
    if failure := describe_failure(job):
        lines += [*failure, ""]
    if job.phase is Phase.FAILED:
        lines += ["Nothing of it runs any more.", *list_commands(job)]
    elif job.phase is Phase.WAITING_FOR_NODES:
        lines += [f"Next: {job.next.what}", "Who has the nodes: relaunch nodes list"]
        lines += [f"To end it: relaunch cancel {job.name} --reason …"]
    else:
        answer = f"relaunch answer {job.name} approve|deny|snooze|take-over --reason …"
        lines += [f"Without an answer: {job.next.what}", f"To answer: {answer}"]
    nodes = ", ".join(slot.node for slot in job.slots[:16])
    lines += [
        "",
        f"generation {job.generation}" + (f" on {nodes}" if nodes else ""),
        f"submitted by {job.submitted_by or 'unknown'}",
    ]
    return "\n".join(lines)
