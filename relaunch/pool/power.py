"""Decide whether a node may be power-cycled: no other job has it, and not too many reboots lately.

A power cycle does not ask the node. A silent node cannot report which ranks live there, and its
last report may be old. What counts is which jobs have it by their claims: a node is not freed
before its ranks are proven gone.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.pool.messages import PermitRequest
from relaunch.pool.state import FleetState, NodeRecord

RESTARTS_WITHIN = timedelta(days=3)
MOST_RESTARTS = 2
"""Within that time, as for reboots: after that a person has to look."""
GOES_DOWN_WITHIN = timedelta(minutes=10)
"""systemd gives a service 90 s to stop, and some nodes have several in a row; nodes are probed once
a minute."""


def restarted(
    state: FleetState, record: NodeRecord, request: PermitRequest, now: datetime
) -> tuple[NodeRecord, str]:
    """Count the requested reboot, or return why it is not allowed."""
    if request.step != "reboot":
        return record, ""
    if request.power and (why := in_use(state, record, request.job)):
        return record, why
    recent = tuple(at for at in record.power_cycles if now - at < RESTARTS_WITHIN)
    times = len(recent) + request.restarts
    if recent and times >= MOST_RESTARTS:
        cycles = f"{len(recent)} of them by its power"
        return (
            record,
            f"{record.name} was rebooted {times} times within 3d, {cycles}: a person should look at its hardware",
        )
    return replace(
        record, power_cycles=(*recent, now) if request.power else recent, rebooted_at=now
    ), ""


def is_silent_since_reboot(record: NodeRecord) -> bool:
    """Return whether the node went silent when it was rebooted, by any order, and has not answered
    since."""
    if (
        record.look is None
        or not record.look.silent
        or record.silent_since is None
        or record.rebooted_at is None
    ):
        return False
    return timedelta(0) <= record.silent_since - record.rebooted_at < GOES_DOWN_WITHIN


def in_use(state: FleetState, record: NodeRecord, job: str) -> str:
    """Return why only another job may have the node treated, as a clause; empty if no other job has
    it."""
    others = [
        one.claim.job
        for one in state.claims
        if one.claim.job != job and any(place.node == record.name for place in one.places)
    ]
    others += [one.job for one in (record.look.living if record.look else ()) if one.job != job]
    if not others:
        return ""
    return f"job {others[0]} has {record.name}, and ranks of it may live there: cancel it, drain the node, or let that job order it"
