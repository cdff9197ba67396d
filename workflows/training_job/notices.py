"""Notify people that a job waits for a person or for nodes, that it cannot stop its ranks, that it
has failed, or that nodes are slow.

A notice is posted to the fleet's notifier, which sends it: no receiver delays a job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.evidence.stragglers import describe_slow_node
    from relaunch.job.failure import describe_failure, find_failure, list_commands
    from relaunch.job.next_step import NAMED, explain_unstopped
    from relaunch.job.slow_nodes import list_slow
    from relaunch.job.state import JobState, Phase
    from relaunch.messages.notices import Notice
    from relaunch.spec.fleet import NoticeEvent
    from relaunch.text import count_noun, join_names
    from relaunch.workflows.notifier.tell import NOTICE_TIMEOUT, tell_people
    from relaunch.workflows.patches import RepeatedPatch
    from relaunch.workflows.training_job.session import Session

MAX_CARRIED = 20
"""Notices that the next run is given to post, some KB each."""
MAX_NODES = 16
"""Nodes that a notice names."""
CARRIED_AFTER = timedelta(minutes=2)
"""How long a job that is to continue as new waits for a notice. Then the next run posts it; if this
one's post arrives later still, it may open again what is resolved meanwhile."""


class Notices:
    """The notices of one job."""

    def __init__(self, session: Session, last: str) -> None:
        self._session = session
        self.last = last
        """The key of the last notice that was sent; empty if what it was about is resolved."""
        self.sending: asyncio.Task[None] | None = None
        self._unposted: list[Notice] = []
        """On their way to the notifier, the oldest first."""
        self._carries = RepeatedPatch("carried-notices")
        self.is_carried = True
        """Whether the last notice, if the run ends before it is posted, is left to the next run or
        given up. 0.1.0 waited for it."""

    def post_again(self, notices: Sequence[Notice]) -> None:
        """Post what the run before could not."""
        for notice in notices:
            self._send(notice)

    @property
    def carried(self) -> tuple[Notice, ...]:
        """What the next run has to post: the newest notice of each matter."""
        newest: dict[str, Notice] = {}
        for one in self._unposted:
            newest.pop(one.key, None)  # in the order of the newest ones
            newest[one.key] = one
        return tuple(newest.values())[-MAX_CARRIED:]

    def send_news(self) -> None:
        """Send a notice if there is news, after the one that is being sent."""
        job = self._session.job
        if self.last.startswith(ASKED) and job.phase is not Phase.WAITING_FOR_PERSON:
            self.last = ""
            subject = f"job {job.name} waits for no person any more"
            self._send(_resolve(job, "question", job.submission, subject, job.reason))
        is_stuck = _cannot_stop(job)
        if self.last.startswith(WAITS) and (job.phase is not Phase.WAITING_FOR_NODES or is_stuck):
            self.last = ""
            what = "not only for nodes" if is_stuck else "for no nodes any more"
            subject = f"job {job.name} waits {what}"
            self._send(_resolve(job, "waiting", job.submission, subject, job.reason))
        is_asked = job.phase is Phase.WAITING_FOR_PERSON  # the same matter, in other words
        if self.last.startswith(UNPROVEN) and not (is_asked or is_stuck):
            self.last = ""
            subject = f"job {job.name} waits for no proof any more"
            reason = "its ranks are proven stopped, or their node was declared dead"
            self._send(_resolve(job, "question", job.submission, subject, reason))
        if (news := _news_key(job)) is None or news == self.last:
            return
        self.last = news
        self._send(_describe_news(job, news))

    def resolve_failure(self, before: JobState | None) -> None:
        """Send that a job which has failed was submitted again."""
        if before is not None and before.phase is Phase.FAILED:
            job = self._session.job
            subject, reason = f"job {job.name} runs again", f"submitted by {_submitter(job)}"
            self._send(_resolve(job, "failed", before.submission, subject, reason))

    def report_slow_nodes(self) -> None:
        """Send a notice of the nodes that were recorded as slow just now, after the one before."""
        job = self._session.job
        new = [one for one in list_slow(job) if one.at == job.slow_nodes[-1].at]
        count = count_noun(len(new), "slow node")
        lines = [describe_slow_node(one.slow) for one in new]
        info = workflow.info()
        self._send(
            Notice(
                "slow_node",
                f"{_key(job, 'slow_node', job.submission)}/{new[0].at:%Y-%m-%dT%H:%M:%S}",
                f"job {job.name} has {count}",
                lines[0],
                workflow.now(),
                done="nothing: the job goes on",
                command=f"relaunch show {job.name}",
                details=(*lines[1:], f"generation {job.generation}"),
                job=job.name,
                nodes=tuple(one.slow.node for one in new)[:MAX_NODES],
                workflow=info.workflow_id,
                run=info.run_id,
            )
        )

    def _send(self, notice: Notice) -> None:
        tasks = self._session.tasks
        self._unposted.append(notice)
        self.is_carried = self._carries.is_reached()
        within = None if self.is_carried else NOTICE_TIMEOUT
        self.sending = tasks.start("notify people", self._send_after(self.sending, notice, within))
        if self.is_carried:
            tasks.mark_pausable(self.sending, CARRIED_AFTER)

    async def _send_after(
        self, before: asyncio.Task[None] | None, notice: Notice, within: timedelta | None
    ) -> None:
        if before is not None:
            await workflow.wait([before])
        await tell_people(self._session.job.spec.fleet, (notice,), within)
        self._unposted.remove(notice)
        self._session.tasks.mark_busy(asyncio.current_task())


ASKED, WAITS, UNPROVEN = "asked ", "waits for nodes ", "stop not proven "
"""What the keys of news begin with that is resolved when the job is in another state."""


def _news_key(job: JobState) -> str | None:
    """Return a key that identifies the current news; None if there is nothing to notify."""
    if job.phase is Phase.FAILED:
        return "failed"
    if job.phase is Phase.WAITING_FOR_PERSON:
        return None if job.snoozed else f"{ASKED}{job.generation} {job.next.at}"
    if _cannot_stop(job):
        return f"{UNPROVEN}{job.generation} {job.stop_reminders}"
    if job.phase is Phase.WAITING_FOR_NODES and job.reminders:
        return f"{WAITS}{job.generation} {job.reminders}"
    return None


def _cannot_stop(job: JobState) -> bool:
    return bool(job.unstopped) and not job.phase.is_final


def _key(job: JobState, event: NoticeEvent, submission: int) -> str:
    return f"{job.spec.fleet}/{event}/{job.name}/{submission}"


def _submitter(job: JobState) -> str:
    return job.submitted_by or "unknown"


def _resolve(
    job: JobState, event: NoticeEvent, submission: int, subject: str, reason: str
) -> Notice:
    info = workflow.info()
    return Notice(
        event,
        _key(job, event, submission),
        subject,
        reason or "it was answered",
        workflow.now(),
        state="resolved",
        job=job.name,
        workflow=info.workflow_id,
        run=info.run_id,
    )


def _describe_news(job: JobState, key: str) -> Notice:
    if key.startswith(UNPROVEN):
        return _describe_unproven(job)
    match job.phase:
        case Phase.FAILED:
            return _describe_end(job)
        case Phase.WAITING_FOR_NODES:
            return _describe_wait(job)
        case _:
            return _describe_question(job)


def _describe_wait(job: JobState) -> Notice:
    return _describe_job(
        job,
        "waiting",
        f"job {job.name} still waits for nodes",
        done="its ranks are stopped; it goes on by itself when it gets nodes",
        wanted=f"free or add nodes, or cancel it. Next: {job.next.what}",
        command=f"relaunch nodes show --fleet {job.spec.fleet}",
        more=(
            f"who has the nodes: relaunch nodes list --fleet {job.spec.fleet}",
            f"to end it: relaunch cancel {job.name} --reason …",
        ),
        reminders=job.reminders - 1,  # the first time it waits that long is no reminder
    )


def _describe_unproven(job: JobState) -> Notice:
    nodes = tuple(one.node for one in job.unstopped)
    then = "it ends" if job.ending is not None else "it goes on"
    again = "still cannot" if job.stop_reminders else "cannot"
    return _describe_job(
        job,
        "question",
        f"job {job.name} {again} prove its ranks stopped",
        reason=explain_unstopped(job),
        nodes=nodes,
        done=f"they are asked again every few seconds; {then} as soon as that is proven",
        wanted=f"end what hangs on {join_names(nodes, NAMED)}, or reboot it",
        command=f"relaunch show {job.name}",
        more=(
            "if you know that it is off, so that nothing runs there: "
            f"relaunch nodes declare-dead {nodes[0]} --fleet {job.spec.fleet} --reason …",
        ),
        reminders=job.stop_reminders,
    )


def _describe_question(job: JobState) -> Notice:
    return _describe_job(
        job,
        "question",
        f"job {job.name} {'still waits' if job.reminders else 'waits'} for a person",
        done=_describe_stop(job),
        wanted=f"an answer. Without an answer: {job.next.what}",
        command=f"relaunch answer {job.name} approve|deny|snooze|take-over --reason …",
        reminders=job.reminders,
    )


def _describe_stop(job: JobState) -> str:
    if job.lost:
        return "nothing was stopped: ranks may still run"
    if job.unstopped:
        return explain_unstopped(job)
    return "its ranks are stopped, or are being stopped"


def _describe_end(job: JobState) -> Notice:
    commands = list_commands(job)
    return _describe_job(
        job,
        "failed",
        f"job {job.name} has failed",
        done="nothing of it runs any more",
        wanted="see what failed, and run it again",
        command=f'relaunch retry {job.name} --reason "…"',
        more=tuple(commands),
    )


def _describe_job(
    job: JobState,
    event: NoticeEvent,
    subject: str,
    *,
    done: str,
    wanted: str,
    command: str,
    reason: str = "",
    nodes: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    reminders: int = 0,
) -> Notice:
    failure, info = find_failure(job), workflow.info()
    nodes = nodes or tuple(slot.node for slot in job.slots)
    return Notice(
        event,
        _key(job, event, job.submission),
        subject,
        reason or job.reason,
        workflow.now(),
        done=done,
        wanted=wanted,
        command=command,
        details=(
            *describe_failure(job),
            *more,
            f"generation {job.generation}",
            f"submitted by {_submitter(job)}",
        ),
        job=job.name,
        nodes=nodes[:MAX_NODES],
        cause=failure.fault.cause if failure else None,
        workflow=info.workflow_id,
        run=info.run_id,
        reminders=reminders,
    )
