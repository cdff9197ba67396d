"""Whether the power of a node may be cycled: nobody has it who was not told, and it did not happen too often.

A power cycle asks nobody on the node. A silent node cannot say who lives there, and whoever said so last may have said it long ago:
what counts is who has it by the claims, which nobody gets back before ranks are proven gone.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.pool.messages import PermitRequest
from relaunch.pool.state import FleetState, NodeRecord

RESTARTS_WITHIN = timedelta(days=3)
MOST_RESTARTS = 2
"""Within that time, as for reboots: then a person has to look."""
GOES_DOWN_WITHIN = timedelta(minutes=10)
"""systemd gives a service 90 s to stop, and some have several of them in a row; it is looked for once a minute."""


def restarted(state: FleetState, record: NodeRecord, request: PermitRequest, now: datetime) -> tuple[NodeRecord, str]:
    """Count what is asked for, or say why it must not be."""
    if request.step != "reboot":
        return record, ""
    if request.power and (why := in_use(state, record, request.job)):
        return record, why
    recent = tuple(at for at in record.power_cycles if now - at < RESTARTS_WITHIN)
    times = len(recent) + request.restarts
    if recent and times >= MOST_RESTARTS:
        cycles = f"{len(recent)} of them by its power"
        return record, f"{record.name} was rebooted {times} times within 3d, {cycles}: a person should look at its hardware"
    return replace(record, power_cycles=(*recent, now) if request.power else recent, rebooted_at=now), ""


def is_silent_since_reboot(record: NodeRecord) -> bool:
    """Whether it went silent as it was rebooted, by whatever order, and has not been seen since."""
    if record.look is None or not record.look.silent or record.silent_since is None or record.rebooted_at is None:
        return False
    return timedelta(0) <= record.silent_since - record.rebooted_at < GOES_DOWN_WITHIN


def in_use(state: FleetState, record: NodeRecord, job: str) -> str:
    """Why nobody but this job may have the node treated, a clause; empty: nobody else has it."""
    others = [one.claim.job for one in state.claims if one.claim.job != job and any(place.node == record.name for place in one.places)]
    others += [one.job for one in (record.look.living if record.look else ()) if one.job != job]
    if not others:
        return ""
    return f"job {others[0]} has {record.name}, and ranks of it may live there: cancel it, drain the node, or let that job order it"
