"""Reads the state of jobs, and sends them requests from people.

Every refusal raises `ConfigError` with a one-sentence message and changes nothing.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from temporalio.client import (
    ActivityFailureError,
    Client,
    WorkflowExecution,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowHistory,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli.client import GENERATION, PHASE, WORKFLOW, whoami
from relaunch.cli.terminal import check_name
from relaunch.config import ConfigError
from relaunch.messages.ids import WORKFLOW_ID_PREFIX
from relaunch.text import count_noun

if TYPE_CHECKING:
    from relaunch.cli.job_views import Watch
    from relaunch.job.state import Incident, JobState
    from relaunch.messages.jobs import CancelMessage, JobResult, ReportMessage, RetryMessage

QUERY_TIMEOUT = timedelta(seconds=5)
"""Query timeout. A live worker answers in milliseconds, one that replays a long history in a second
or two; without a worker there is never an answer."""
OUTCOME_QUERY_TIMEOUT = timedelta(seconds=2)
"""An order is sent without a worker, too: this long its sender waits for one."""
OUTCOME_TIMEOUT_S = 5.0
"""Seconds to wait for what becomes of an order: one activity, which computes for a millisecond."""
OUTCOME_INTERVAL_S = 0.05
UNCONFIRMED = ", but no worker has confirmed it: it is done when one answers, so do not repeat it"
"""What is said of an order that the server has, and that no worker has taken yet."""
ACTIVITY_TIMEOUT = timedelta(seconds=10)
JOB_FAILED = "JobFailed"
"""Type of the failure with which the workflow of a failed job ends."""


@dataclass(frozen=True)
class JobSnapshot:
    """The state of a job at one moment, and its source."""

    name: str
    run_id: str
    open: bool
    status: str
    """The workflow status in Temporal."""
    history_length: int
    state: JobState | None
    source: str
    """`worker`, `result`, or `memo` if no worker answered."""
    memo: Mapping[str, Any]
    watch: Watch | None = None
    attempts: int = 0
    """Attempts at its workflow task; more than one: they fail, or no worker answered them."""
    closed_at: datetime | None = None
    """When its workflow has ended."""

    @property
    def silence(self) -> str:
        """Why there is no state but the one that the job recorded last."""
        known = "this is the last state that the job recorded"
        if self.attempts > 1:
            return f"its workflow task fails: {known}; `relaunch doctor` says why, and what to do"
        return f"no worker answers: {known}"

    @property
    def recorded_phase(self) -> str:
        """The phase that the job has recorded last."""
        return str(self.state.phase) if self.state else str(self.memo.get("phase", self.status))

    @property
    def phase(self) -> str:
        """The job's phase; the workflow's status where that was ended from outside, which the job
        could not record."""
        from relaunch.job.state import Phase

        recorded = self.recorded_phase
        ends = {str(one) for one in Phase if one.is_final}
        return recorded if self.open or recorded in ends else self.status


def handle_of(client: Client, name: str) -> WorkflowHandle[Any, Any]:
    return client.get_workflow_handle(f"{WORKFLOW_ID_PREFIX}{check_name('job', name)}")


async def describe(client: Client, name: str) -> WorkflowExecutionDescription:
    try:
        return await handle_of(client, name).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            raise ConfigError(
                f"no job {name!r} in namespace {client.namespace}: list all jobs with `relaunch "
                "jobs`"
            ) from None
        raise


async def load_job(client: Client, name: str, known: JobSnapshot | None = None) -> JobSnapshot:
    """Return the current state of a job.

    With `known`, an earlier look, the heartbeats are read again, but the workflow is queried only
    if its history has grown since.
    """
    from relaunch.cli.job_views import merge_watches

    described = await describe(client, name)
    is_open = described.status == WorkflowExecutionStatus.RUNNING
    length = described.raw_description.workflow_execution_info.history_length
    attempts = described.raw_description.pending_workflow_task.attempt  # 0: there is none
    state: JobState | None
    if (
        known
        and known.state
        and (known.run_id, known.history_length, known.open) == (described.run_id, length, is_open)
    ):
        state, source = known.state, known.source
    else:
        state, source = await _state(client, described)
    return JobSnapshot(
        name=name,
        run_id=described.run_id,
        open=is_open,
        status=described.status.name if described.status else "UNKNOWN",
        history_length=length,
        state=state,
        source=source,
        memo=await described.memo(),
        watch=merge_watches(await _heartbeats(client, described)) if is_open else None,
        attempts=attempts,
        closed_at=described.close_time,
    )


async def _state(
    client: Client, described: WorkflowExecutionDescription
) -> tuple[JobState | None, str]:
    if described.status in (WorkflowExecutionStatus.COMPLETED, WorkflowExecutionStatus.FAILED):
        ended = await _read_result(client, described)
        if ended is not None:
            return ended.state, "result"
    from relaunch.job.state import JobState

    running = client.get_workflow_handle(described.id, run_id=described.run_id)
    try:
        return await running.query(
            "state", result_type=JobState, rpc_timeout=QUERY_TIMEOUT
        ), "worker"
    except (WorkflowQueryFailedError, WorkflowQueryRejectedError):
        return None, "memo"
    except RPCError as error:
        if error.status in (
            RPCStatusCode.DEADLINE_EXCEEDED,
            RPCStatusCode.CANCELLED,
            RPCStatusCode.FAILED_PRECONDITION,
            RPCStatusCode.INVALID_ARGUMENT,
            RPCStatusCode.NOT_FOUND,
        ):
            return None, "memo"
        raise


async def _read_result(client: Client, described: WorkflowExecutionDescription) -> JobResult | None:
    """Return the result of a run that has ended; None: it failed without one."""
    from relaunch.messages.jobs import JobResult

    handle = client.get_workflow_handle(
        described.id, run_id=described.run_id, result_type=JobResult
    )
    try:
        result: JobResult = await handle.result(follow_runs=False)
    except WorkflowFailureError as error:
        # A job that failed is a workflow that failed, with the job's result in its details.
        cause = error.cause
        if not isinstance(cause, ApplicationError) or cause.type != JOB_FAILED or not cause.details:
            return None
        from pydantic import TypeAdapter

        return TypeAdapter(JobResult).validate_python(cause.details[0])
    return result


async def _heartbeats(
    client: Client, described: WorkflowExecutionDescription
) -> list[Mapping[str, Any]]:
    details: list[Mapping[str, Any]] = []
    for pending in described.raw_description.pending_activities:
        if pending.activity_type.name == "watch_ranks" and pending.heartbeat_details.payloads:
            values = await client.data_converter.decode(list(pending.heartbeat_details.payloads))
            details += [value for value in values[:1] if isinstance(value, Mapping)]
    return details


async def incidents(
    client: Client, task_queue: str, now: JobSnapshot
) -> tuple[list[Incident], str | None]:
    """Return all incidents of a job, oldest first, and a message if some could not be read."""
    if now.state is None:
        raise ConfigError(
            f"job {now.name}: no worker answers and its last run has no result, so its incidents "
            "cannot be read: start a worker (`relaunch up` or `relaunch-worker`)"
        )
    state = now.state
    kept = [*state.incidents, *([state.incident] if state.incident else [])]
    if state.incidents_archived == 0:
        return kept, None
    from relaunch.messages.logs import ReadIncidentsInput, ReadIncidentsOutput

    try:
        archived = await client.execute_activity(
            "read_incidents",
            ReadIncidentsInput(client.namespace, now.name),
            id=f"read_incidents/{now.name}/{uuid.uuid4().hex}",
            task_queue=task_queue,
            result_type=ReadIncidentsOutput,
            start_to_close_timeout=ACTIVITY_TIMEOUT,
            schedule_to_close_timeout=ACTIVITY_TIMEOUT,
            summary=f"history of {now.name}",
        )
    except ActivityFailureError:
        return (
            kept,
            f"{count_noun(state.incidents_archived, 'older incident is', 'older incidents are')} "
            "in the worker's archive and not shown: no worker answers",
        )
    opened = {incident.opened for incident in kept}
    return [
        *(incident for incident in archived.incidents if incident.opened not in opened),
        *kept,
    ], None


async def read_histories(
    client: Client, name: str, run_id: str | None
) -> tuple[list[WorkflowHistory], bool]:
    """Return the runs of one submission, oldest first, and whether its first run is among them."""
    newest = await describe(client, name)
    workflow_id = handle_of(client, name).id

    async def fetch(run: str) -> WorkflowHistory | None:
        try:
            return await client.get_workflow_handle(workflow_id, run_id=run).fetch_history()
        except RPCError as error:
            if error.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT):
                return None
            raise

    found = await fetch(run_id or newest.run_id)
    if found is None:
        raise ConfigError(f"job {name} has no run {run_id!r}: its newest is {newest.run_id}")
    runs = [found]
    while (
        after := runs[-1]
        .events[-1]
        .workflow_execution_continued_as_new_event_attributes.new_execution_run_id
    ):
        later = await fetch(after)
        if later is None:
            break
        runs.append(later)
    while (
        before := runs[0]
        .events[0]
        .workflow_execution_started_event_attributes.continued_execution_run_id
    ):
        earlier = await fetch(before)
        if earlier is None:
            return runs, False
        runs.insert(0, earlier)
    return runs, True


@dataclass(frozen=True)
class JobSummary:
    name: str
    phase: str
    generation: int | None
    submitted: datetime
    ended: datetime | None
    status: str


async def list_jobs(client: Client) -> list[JobSummary]:
    """Return the newest run of every job, newest first."""
    newest: dict[str, WorkflowExecution] = {}
    async for run in client.list_workflows(f'WorkflowType = "{WORKFLOW}"'):
        name = run.id.removeprefix(WORKFLOW_ID_PREFIX)
        before = newest.get(name)
        if run.status == WorkflowExecutionStatus.CONTINUED_AS_NEW or (
            before and before.start_time >= run.start_time
        ):
            continue
        newest[name] = run
    rows = []
    for name, run in newest.items():
        status = run.status.name if run.status else "UNKNOWN"
        ended_badly = status in (
            "TERMINATED",
            "TIMED_OUT",
            "FAILED",
        )  # not recorded by the workflow
        phase = status if ended_badly else run.typed_search_attributes.get(PHASE) or status
        rows.append(
            JobSummary(
                name,
                phase,
                run.typed_search_attributes.get(GENERATION),
                await _read_submitted(run),
                run.close_time,
                status,
            )
        )
    return sorted(rows, key=lambda row: row.submitted, reverse=True)


async def _read_submitted(run: WorkflowExecution) -> datetime:
    """Return when a job was submitted; a run that continues another has begun later."""
    began = run.start_time
    try:
        submission = await run.memo_value("submission", None)
    except Exception:  # a key is missing, or a stranger wrote it: the other jobs are listed
        return began
    # The number of a submission is its time in ms; jobs of 0.1.0 have none in their memo.
    if isinstance(submission, int) and 0 < submission < began.timestamp() * 1000:
        return datetime.fromtimestamp(submission / 1000, UTC)
    return began


async def cancel(client: Client, name: str, reason: str) -> bool:
    """Order the end of a job; return whether a worker has taken the order."""
    from relaunch.messages.jobs import CancelMessage

    return await signal_open(client, name, "cancel", CancelMessage(reason=reason, by=whoami()))


async def signal_open(
    client: Client, name: str, signal: str, message: CancelMessage | RetryMessage | ReportMessage
) -> bool:
    """Send a running job an order; return whether a worker has taken it, as far as one can say.

    Raises:
        ConfigError: The job has ended, or its fleet's rules refuse the order.
    """
    from relaunch.cli.sign import sign_message

    handle = handle_of(client, name)
    seen: list[dict[str, Any]] | None = None
    is_answered = True
    try:
        seen = await _read_outcomes(client, name)
    except RPCError:
        is_answered = False
    signed = await sign_message(client, handle.id, signal, message)
    try:
        await handle.signal(signal, signed)
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        now = await load_job(client, name)
        raise ConfigError(
            f"job {name} has ended ({now.phase}): {signal} needs a running job"
        ) from None
    if seen is None:
        return is_answered
    known = max((one["number"] for one in seen), default=0)
    return await _await_outcome(client, name, signal, message.by, known)


async def _read_outcomes(client: Client, name: str) -> list[dict[str, Any]] | None:
    """Return what became of the newest orders; None: a worker of an older build answers.

    Raises:
        RPCError: No worker answers.
    """
    try:
        found: list[dict[str, Any]] = await handle_of(client, name).query(
            "orders", result_type=list[dict[str, Any]], rpc_timeout=OUTCOME_QUERY_TIMEOUT
        )
    except (WorkflowQueryFailedError, WorkflowQueryRejectedError):
        return None
    return found


async def _await_outcome(client: Client, name: str, signal: str, by: str, known: int) -> bool:
    """Wait until an order is taken; return whether it was.

    Raises:
        ConfigError: It was refused.
    """
    deadline = time.monotonic() + OUTCOME_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            found = await _read_outcomes(client, name) or ()
        except RPCError:
            found = ()
        for one in found:
            if one["number"] > known and (one["name"], one["by"]) == (signal, by):
                if one["refusal"]:
                    raise ConfigError(one["refusal"])
                return True
        await asyncio.sleep(OUTCOME_INTERVAL_S)
    return False
