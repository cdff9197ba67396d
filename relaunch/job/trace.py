"""Describe a closed incident as the spans of one trace.

Its times are those that the job recorded. Identifiers follow from the incident, so a trace that is
sent twice is the same trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from relaunch.job.accounts import Account
from relaunch.job.ledger import MAX_ENTRIES
from relaunch.job.measures import count_closed_incidents, find_last_strategy
from relaunch.job.state import Incident, JobState

REPEAT_WITHIN = timedelta(hours=1)
"""How long after an incident has closed another worker that takes the job over sends its trace
again: the one before may have been killed with it."""
MAX_REASON = 500
"""Characters kept of a reason."""

ROOT = "incident"
REGAINING = "regaining"
"""Ranks train again, and have not passed the step that they had reached."""
NOT_KEPT = "not_kept"
"""Of a very long incident, the time whose entries the job's state had no room for."""

Value = str | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClosedIncident:
    """An incident that has closed, with where it belongs."""

    namespace: str
    workflow: str
    """The id of the job's workflow."""
    run: str
    """The run of the workflow in which it closed, or the one after it."""
    job: str
    submission: int
    fleet: str
    number: int
    """Which incident of the job it is, from 0, over all its submissions."""
    incident: Incident

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the incident: its number alone may come again after a reset or a restore."""
        opened = self.incident.opened.isoformat()
        return (self.namespace, self.job, str(self.number), opened)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at: datetime
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    begin: datetime
    end: datetime
    attributes: dict[str, Value]
    events: tuple[SpanEvent, ...] = ()
    error: str = ""
    """A clause that says how it failed; empty: it did not."""


def find_traced(job: JobState, now: datetime) -> Iterator[tuple[int, Incident]]:
    """Yield the incidents of this submission that closed lately, with their numbers."""
    for number in range(job.incidents_archived, count_closed_incidents(job)):
        incident = job.incidents[number - job.incidents_archived]
        closed = incident.closed
        is_late = closed is None or closed < now - REPEAT_WITHIN
        if not is_late and incident.opened >= job.submitted_at:
            yield number, incident


def make_trace_id(closed: ClosedIncident) -> int:
    return int.from_bytes(_digest(closed)[:16]) or 1


def make_span_id(closed: ClosedIncident, index: int) -> int:
    """Return the identifier of one of the trace's spans; 0 is the root."""
    return int.from_bytes(_digest(closed, str(index))[:8]) or 1


def _digest(closed: ClosedIncident, *more: str) -> bytes:
    return hashlib.sha256("\0".join((*closed.key, *more)).encode()).digest()


def build_spans(closed: ClosedIncident) -> tuple[Span, ...]:
    """Return the spans of a closed incident: the root, then its children in their order.

    The children follow each other without a gap, from the fault until the incident closed.
    """
    incident = closed.incident
    # A hang begins with the last step, before it could be known that it was one.
    hung = [one.begin for one in incident.entries if one.account is Account.DETECTING][:1]
    begin = min([incident.opened, *hung])
    end = max(begin, incident.recovered or incident.closed or begin)
    root = Span(
        ROOT,
        begin,
        end,
        _describe(closed),
        tuple(sorted(_list_events(incident), key=lambda one: one.at)),
        "" if incident.recovered is not None else incident.outcome or "the job ended",
    )
    return (root, *_list_children(incident, begin, end))


def _list_children(incident: Incident, begin: datetime, end: datetime) -> Iterator[Span]:
    kept = sum((one.end - one.begin for one in incident.entries), timedelta(0))
    is_cut = kept != sum(incident.costs.values(), timedelta(0))
    at = begin
    for index, entry in enumerate(incident.entries):
        since, until = max(at, entry.begin), min(end, entry.end)
        if until <= since:
            continue  # work that the fault undid was done before it
        if since > at:
            yield Span(
                NOT_KEPT if is_cut and index == MAX_ENTRIES // 2 else REGAINING, at, since, {}
            )
        yield Span(entry.account.value, since, until, {})
        at = until
    if end > at:
        yield Span(REGAINING, at, end, {})


def _describe(closed: ClosedIncident) -> dict[str, Value]:
    incident = closed.incident
    attributes: dict[str, Value] = {
        "relaunch.job": closed.job,
        "relaunch.fleet": closed.fleet,
        "relaunch.namespace": closed.namespace,
        "relaunch.submission": closed.submission,
        "relaunch.generation": incident.generation,
        "relaunch.incident": closed.number,
        "relaunch.cause": incident.cause.value,
        "relaunch.reason": incident.reason[:MAX_REASON],
        "relaunch.strategy": find_last_strategy(incident),
        "relaunch.nodes": incident.nodes,
        "relaunch.recovered": "yes" if incident.recovered is not None else "no",
        "relaunch.outcome": incident.outcome or "",
        # As temporalio.contrib.opentelemetry names them.
        "temporalWorkflowID": closed.workflow,
        "temporalRunID": closed.run,
    }
    if incident.gpus:
        attributes["relaunch.gpus"] = incident.gpus
    if incident.code:
        attributes["relaunch.code"] = incident.code
    if incident.reached is not None:
        attributes["relaunch.step"] = incident.reached
    for account, span in incident.costs.items():
        attributes[f"relaunch.seconds.{account.value}"] = span.total_seconds()
    return attributes


def _list_events(incident: Incident) -> Iterator[SpanEvent]:
    for fault in incident.faults:
        yield SpanEvent(
            "fault",
            fault.at,
            {
                "relaunch.generation": fault.generation,
                "relaunch.cause": fault.cause.value,
                "relaunch.reason": fault.reason[:MAX_REASON],
                "relaunch.nodes": fault.nodes,
                "relaunch.withdrawn": fault.withdrawn,
            },
        )
    for one in incident.decisions:
        yield SpanEvent(
            "decision",
            one.at,
            {
                "relaunch.decision": one.decision,
                "relaunch.strategy": one.strategy or "NONE",
                "relaunch.reason": one.reason[:MAX_REASON],
            },
        )
