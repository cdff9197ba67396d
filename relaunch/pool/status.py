"""Change whether a node may be granted to jobs, and keep the reasons that no longer hold."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from relaunch.pool.state import NodeRecord, NodeStatus, PastReason

MAX_PAST = 4
"""Reasons kept of a node that no longer hold: a fleet keeps them for 2,048 nodes."""


def set_status(
    record: NodeRecord, status: NodeStatus, now: datetime, *, reason: str, by: str, end: str
) -> NodeRecord:
    """Return the node with a status, its reason, and who gives it.

    Args:
        record: The node.
        status: The new status.
        now: Since when it holds.
        reason: Why; empty for a node in service.
        by: `job NAME`, `relaunch`, `fleet file`, or a person.
        end: A clause that says why the reason of before no longer holds. It is kept with it.
    """
    past = record.past
    if record.reason and (record.reason, record.by) != (reason, by):
        before = PastReason(record.reason, record.by, record.since, now, end)
        past = (*past, before)[-MAX_PAST:]
    return replace(record, status=status, reason=reason, by=by, since=now, past=past)


def put_in_service(record: NodeRecord, now: datetime, end: str) -> NodeRecord:
    record = set_status(record, NodeStatus.IN_SERVICE, now, reason="", by="", end=end)
    return replace(record, drain=None, repair_drain=None)


def quarantine(record: NodeRecord, by: str, reason: str, now: datetime) -> NodeRecord:
    end = f"{by} quarantined it"
    return set_status(record, NodeStatus.QUARANTINED, now, reason=reason, by=by, end=end)
