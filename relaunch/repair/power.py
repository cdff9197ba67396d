"""When a repair cycles a node's power instead of asking the node to reboot, and what proves that it did.

The node is not asked and cannot refuse. One that answers says who uses it; of a silent one only its fleet can say that nobody has it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.evidence.health import Health
from relaunch.repair.state import RepairState, Stage
from relaunch.spec.policy import Strategy

SILENT_FOR = timedelta(minutes=3)
"""As long as a job takes to call a node lost: a connection that broke, or a service that restarts, is back by then."""
POWER_WITHIN = timedelta(minutes=1)
"""ipmitool gives a controller up after some twenty seconds; a command that asks a cloud needs a few."""
LAST_LOOK = timedelta(minutes=1)
"""Before the end of a repair: so that a look at the node falls between what was not proven and what comes after it."""


def may_follow(state: RepairState) -> bool:
    """Whether the power is the next way to reboot this node."""
    return state.strategy is Strategy.REBOOT_NODE and state.rules.power and not state.power and not state.cancelled


def is_overdue(state: RepairState, now: datetime) -> bool:
    """Whether a reboot was not proven in time and there is as much time again for a power cycle."""
    if state.stage is not Stage.PROVING or state.ordered_at is None or not may_follow(state):
        return False
    if state.rules.waited_for:
        return now - state.ordered_at >= state.rules.repair_within and state.deadline - now >= state.rules.repair_within
    return now >= max(min(state.ordered_at + state.rules.repair_within, state.deadline - LAST_LOOK), state.ordered_at + LAST_LOOK)


def is_silent(state: RepairState, now: datetime) -> bool:
    return state.unseen_since is not None and now - state.unseen_since >= SILENT_FOR


def instead(state: RepairState, now: datetime) -> RepairState:
    """From here on it is the power that is to be cycled: looked at anew, and asked for anew."""
    # Whoever has approved a reboot has not approved this.
    approved_by = "" if state.rules.mode == "ask" else state.approved_by
    state = replace(state, power=True, stage=Stage.LOOKING, approved_by=approved_by, wait=timedelta(0))
    return with_time_to_prove(state, now)


def with_time_to_prove(state: RepairState, now: datetime) -> RepairState:
    if state.rules.waited_for:
        return state
    return replace(state, deadline=max(state.deadline, now + state.rules.repair_within))


def has_booted(state: RepairState, health: Health, now: datetime) -> bool:
    """Whether a node whose boot id nobody had read runs a boot that began after it was found silent. An uptime needs no clock."""
    since = state.unseen_since or state.started_at
    return health.uptime is not None and timedelta(seconds=health.uptime) < now - since
