"""Reads what jobs' time went into, for `relaunch report`.

Every refusal raises `ConfigError` with a one-sentence message.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

from relaunch.config import ConfigError, Settings
from relaunch.job.ledger import NONE
from relaunch.job.report import JobRecord
from relaunch.messages.ids import WORKFLOW_ID_PREFIX
from relaunch.temporal import MAX_CALLS

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowHistory

    from relaunch.cli.jobs import JobSnapshot


@dataclass(frozen=True)
class EventLinks:
    """Finds the pages of the web UI that show a job, and an event of it."""

    page: str
    """Of the job's newest run."""
    times: tuple[datetime, ...] = ()
    """When the events happened, in their order."""
    pages: tuple[str, ...] = ()
    """The pages of these events."""

    def find(self, at: datetime) -> str:
        """Return the page of the first event at that time or later, or else of the job."""
        index = bisect_left(self.times, at)
        return self.pages[index] if index < len(self.pages) else self.page


@dataclass(frozen=True)
class ReadJob:
    record: JobRecord
    links: EventLinks | None
    """None: it is not known where the web UI is."""


async def read_job(client: Client, settings: Settings, name: str) -> ReadJob:
    """Read a job, its archive, and its history for the links.

    Raises:
        ConfigError: There is no such job, or its state cannot be read.
    """
    from relaunch.cli import jobs

    now = await jobs.load_job(client, name)
    return await _read(client, settings, now)


async def read_jobs(
    client: Client, settings: Settings, fleet: str | None, since: datetime | None
) -> list[ReadJob]:
    """Read the jobs of a fleet, or of all, that ran after `since`.

    Raises:
        ConfigError: There is none, or none can be read.
    """
    from relaunch.cli import jobs

    gate = asyncio.Semaphore(MAX_CALLS)

    async def load(name: str) -> JobSnapshot:
        async with gate:  # without a worker, each takes seconds
            return await jobs.load_job(client, name)

    names = [
        row.name
        for row in await jobs.list_jobs(client)
        if since is None or row.ended is None or row.ended >= since
    ]
    found: list[ReadJob] = []
    unread: list[str] = []
    for now in await asyncio.gather(*map(load, names)):
        if fleet is not None and now.memo.get("fleet") != fleet:
            continue
        if now.state is None:
            unread.append(f"job {now.name} is left out: {now.silence}")
            continue
        found.append(await _read(client, settings, now))
    if not found and unread:
        more = f"; and {len(unread) - 1} more" if unread[1:] else ""
        raise ConfigError(f"there is nothing to report: {unread[0]}{more}")
    if not found:
        where = f" of fleet {fleet!r}" if fleet is not None else ""
        when = f" has run since {since:%Y-%m-%d %H:%M} UTC" if since is not None else " is known"
        raise ConfigError(f"no job{where}{when}: list all jobs with `relaunch jobs`")
    first = found[0].record
    record = replace(first, missing=(*first.missing, *unread))
    return [replace(found[0], record=record), *found[1:]]


async def _read(client: Client, settings: Settings, now: JobSnapshot) -> ReadJob:
    from relaunch.cli import jobs

    incidents, missing = await jobs.incidents(client, settings.task_queue, now)
    assert now.state is not None, "else its incidents cannot be read"
    missed = (missing,) if missing else ()
    record = JobRecord(now.state, tuple(incidents), missed, now.closed_at)
    histories, complete = await jobs.read_histories(client, now.name, None)
    if now.state.ledger.charged_until is None:
        record = await _restore(client, record, histories, complete)
    return ReadJob(record, _link(client, settings, now.name, histories))


async def _restore(
    client: Client, record: JobRecord, histories: list[WorkflowHistory], complete: bool
) -> JobRecord:
    """Compute the ledger of a job that an older build has run, from its history."""
    # This imports the workflow, and with it activities and backends.
    import logging

    from relaunch.job.replay import restore
    from relaunch.workflows.training_job.recording import NotReplayable, recording

    logging.getLogger("temporalio").setLevel(logging.CRITICAL)  # would print a stack trace
    name, state = record.state.name, record.state
    why = "older runs of it are no longer on the server"
    if complete:
        try:
            recorded = await recording(histories, client.namespace, client.data_converter)
        except NotReplayable as error:
            why = str(error)
        else:
            restored = restore(recorded.job, recorded.steps, state.ended_at)
            known = {one.opened: one.costs for one in restored.incidents}
            if restored.incident is not None:
                known[restored.incident.opened] = restored.incident.costs
            incidents = tuple(
                replace(one, costs=known.get(one.opened, one.costs)) for one in record.incidents
            )
            incident = state.incident
            if incident is not None:
                incident = replace(incident, costs=known.get(incident.opened, incident.costs))
            state = replace(state, ledger=restored.ledger, incident=incident)
            return replace(record, state=state, incidents=incidents)
    sentence = f"job {name} was run by an older release, so its time is unknown: {why}"
    end = state.ended_at or datetime.now(UTC)
    unknown = _charge_unknown(record, end)
    return replace(unknown, missing=(*record.missing, sentence))


def _charge_unknown(record: JobRecord, end: datetime) -> JobRecord:
    from relaunch.job.accounts import Account, Ledger

    state = record.state
    span = end - state.submitted_at
    totals = {Account.UNKNOWN: span} if span > NONE else {}
    return replace(record, state=replace(state, ledger=Ledger(end, totals)))


def _link(
    client: Client, settings: Settings, name: str, histories: Sequence[WorkflowHistory]
) -> EventLinks | None:
    from relaunch.cli.node_pages import workflow_address
    from relaunch.cli.web_views import find_web_ui

    if (ui := find_web_ui(client, settings)) is None:
        return None
    id_ = quote(f"{WORKFLOW_ID_PREFIX}{name}", safe="")
    root = f"{workflow_address(ui, client.namespace)}/{id_}"
    times, pages = [], []
    for history in histories:
        for event in history.events:
            times.append(event.event_time.ToDatetime(UTC))
            pages.append(f"{root}/{history.run_id}/history/events/{event.event_id}")
    return EventLinks(f"{root}/{histories[-1].run_id}", tuple(times), tuple(pages))
