"""Decide when to probe a node again, and when to read its GPUs with the probe."""

from __future__ import annotations

from datetime import datetime, timedelta

from relaunch.pool.state import NodeRecord, NodeStatus

FRESH = timedelta(seconds=10)
"""How long an answer of a node counts as current: a launch follows a grant within a second or
two."""
READ_AGAIN = timedelta(minutes=5)
"""Time between two readings of the GPUs of a node that no claim waits for: foreign processes stay
for hours."""
MOST_READ = 512
"""Nodes whose GPUs are read with one probe: their answers, with foreign processes on each, are half
a megabyte of history."""
LOOK_AGAIN = timedelta(seconds=2)
"""Time between probes of a node that is silent or busy while a claim waits for it."""


def look_gap(record: NodeRecord, now: datetime) -> timedelta:
    """Return how long to wait after a probe that found the node silent. A node that has been silent
    for long may be back at any time."""
    silent = now - record.silent_since if record.silent_since else timedelta(0)
    return max(LOOK_AGAIN, silent / 10)


def is_due(record: NodeRecord, now: datetime) -> bool:
    """Return whether to probe the node again for a waiting claim.

    Not while the answer to the last probe may still come.
    """
    if _lacks_only_a_reading(record, now):
        return True
    gap = look_gap(record, now)
    times = (record.looked_at, record.asked_at)
    return all(at is None or now - at >= gap for at in times)


def may_be_read(record: NodeRecord, now: datetime, gap: timedelta) -> bool:
    """Return whether to read the GPUs with a probe. Not during a repair: no process may have them
    open for a reset."""
    if (
        not record.spec.gpus
        or record.gone
        or record.repair
        or record.standing is NodeStatus.REPAIRING
    ):
        return False
    return record.read_at is None or now - record.read_at >= gap


def _lacks_only_a_reading(record: NodeRecord, now: datetime) -> bool:
    """Return whether the last probe was not to read the GPUs, so that the next one need not wait
    for anything."""
    look, at, asked = record.look, record.looked_at, record.asked_at
    if (
        look is None
        or at is None
        or look.silent
        or look.held
        or look.unread
        or (asked is not None and asked > at)
    ):
        return False
    return may_be_read(record, now, FRESH) and (record.read_at is None or record.read_at < at)
