"""When a node is worth another look, and when the GPUs of it are read with that look."""

from __future__ import annotations

from datetime import datetime, timedelta

from relaunch.pool.state import NodeRecord, NodeStatus

FRESH = timedelta(seconds=10)
"""How long a node that answered counts as answering: a launch follows a grant within a second or two."""
READ_AGAIN = timedelta(minutes=5)
"""Between two readings of the GPUs of a node for which nobody waits: who sits there sits for hours."""
MOST_READ = 512
"""Nodes whose GPUs are read with one look: what they say of them, with strangers on each, is half a megabyte of history."""
LOOK_AGAIN = timedelta(seconds=2)
"""At a node that did not answer, or is at work, while somebody waits for it."""


def look_gap(record: NodeRecord, now: datetime) -> timedelta:
    """How long after a look that found it silent the next one is worth it: a node that has been away for long is back at any time."""
    silent = now - record.silent_since if record.silent_since else timedelta(0)
    return max(LOOK_AGAIN, silent / 10)


def is_due(record: NodeRecord, now: datetime) -> bool:
    """Whether to look at it again for somebody who waits; not while the answer to the last look may still come."""
    if _lacks_only_a_reading(record, now):
        return True
    gap = look_gap(record, now)
    times = (record.looked_at, record.asked_at)
    return all(at is None or now - at >= gap for at in times)


def may_be_read(record: NodeRecord, now: datetime, gap: timedelta) -> bool:
    """Whether to read its GPUs with a look: not while it is repaired, for a reset wants nobody to have them open."""
    if not record.spec.gpus or record.gone or record.repair or record.standing is NodeStatus.REPAIRING:
        return False
    return record.read_at is None or now - record.read_at >= gap


def _lacks_only_a_reading(record: NodeRecord, now: datetime) -> bool:
    """Whether the last look was not to read its GPUs, so that nothing is to be waited for before the next one is."""
    look, at, asked = record.look, record.looked_at, record.asked_at
    if look is None or at is None or look.silent or look.held or look.unread or (asked is not None and asked > at):
        return False
    return may_be_read(record, now, FRESH) and (record.read_at is None or record.read_at < at)
