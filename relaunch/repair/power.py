"""Decide when a repair power-cycles a node instead of asking it to reboot, and what proves success.

The node is not asked and cannot refuse. A node that answers reports what uses it; for a silent one
only its fleet can say that no job has it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.evidence.health import Health
from relaunch.repair.state import RepairState, Stage
from relaunch.spec.policy import Strategy

SILENT_FOR = timedelta(minutes=3)
"""As long as a job takes to declare a node lost: a broken connection or a restarting service is
back by then."""
POWER_WITHIN = timedelta(minutes=1)
"""ipmitool gives up on a controller after some twenty seconds; a command that calls a cloud API
needs a few."""
LAST_LOOK = timedelta(minutes=1)
"""Kept free before the end of a repair, so that a probe of the node falls between an unproven
reboot and the power cycle."""


def may_follow(state: RepairState) -> bool:
    """Return whether a power cycle is the next way to reboot this node."""
    return (
        state.strategy is Strategy.REBOOT_NODE
        and state.rules.power
        and not state.power
        and not state.cancelled
    )


def is_overdue(state: RepairState, now: datetime) -> bool:
    """Return whether a reboot was not proven in time and as much time is left for a power cycle."""
    if state.stage is not Stage.PROVING or state.ordered_at is None or not may_follow(state):
        return False
    if state.rules.waited_for:
        return (
            now - state.ordered_at >= state.rules.repair_within
            and state.deadline - now >= state.rules.repair_within
        )
    return now >= max(
        min(state.ordered_at + state.rules.repair_within, state.deadline - LAST_LOOK),
        state.ordered_at + LAST_LOOK,
    )


def is_silent(state: RepairState, now: datetime) -> bool:
    return state.unseen_since is not None and now - state.unseen_since >= SILENT_FOR


def instead(state: RepairState, now: datetime) -> RepairState:
    """Switch the repair to a power cycle: the node is probed again and approval is asked for
    again."""
    # Approval of a reboot does not cover a power cycle.
    approved_by = "" if state.rules.mode == "ask" else state.approved_by
    state = replace(
        state, power=True, stage=Stage.LOOKING, approved_by=approved_by, wait=timedelta(0)
    )
    return with_time_to_prove(state, now)


def with_time_to_prove(state: RepairState, now: datetime) -> RepairState:
    if state.rules.waited_for:
        return state
    return replace(state, deadline=max(state.deadline, now + state.rules.repair_within))


def has_booted(state: RepairState, health: Health, now: datetime) -> bool:
    """Return whether a node of unknown earlier boot id runs a boot that began after it was found
    silent.

    It goes by the uptime, which needs no synchronized clock.
    """
    since = state.unseen_since or state.started_at
    return health.uptime is not None and timedelta(seconds=health.uptime) < now - since
