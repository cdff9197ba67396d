"""Conditions that the transitions of a repair check. Each answers one question about a state.

A power cycle is the last way to reboot a node. The node is not asked and cannot refuse: a node that
answers reports what uses it, and for a silent one only its fleet knows that no job has it.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import text
from relaunch.evidence.findings import Role
from relaunch.evidence.health import LONGEST_ID, SICK, Health
from relaunch.evidence.links import LINK_FAULTS
from relaunch.evidence.nvml import bus_id
from relaunch.fields import duration
from relaunch.repair.state import RepairState, Stage
from relaunch.spec.policy import Strategy

SILENCE_TIMEOUT = timedelta(minutes=3)
"""As long as a job takes to declare a node lost: a broken connection or a restarting service is
back by then."""
FINAL_PROBE_MARGIN = timedelta(minutes=1)
"""Kept free before the end of a repair, so that a probe of the node falls between an unproven
reboot and the power cycle."""
DRIVER_START_TIMEOUT = timedelta(minutes=3)
"""After a boot: agents answer before the driver has found eight GPUs, and before the driver of the
network cards has started and their links are trained."""


def find_objection(state: RepairState, health: Health | None, now: datetime) -> str:
    """Return what forbids the order, approved or not; empty if nothing does.

    Without `health` the node does not answer, and its fleet has to know which jobs have it.
    """
    if health is not None and health.busy:
        return f"{state.node} is in use: {', '.join(health.busy)}"
    if health is not None and state.strategy is Strategy.RESET_GPU:
        return _find_objection_to_reset(state, health)
    if health is not None and health.journal_unread:
        return f"the number of recent reboots of {state.node} is unknown: {health.journal_unread}"
    reboots = count_reboots(state, now)
    if reboots < state.rules.max_reboots:
        return ""
    window = duration(state.rules.reboot_window)
    return (
        f"{state.node} was already rebooted {reboots} times within {window}; inspect its hardware"
    )


def _find_objection_to_reset(state: RepairState, health: Health) -> str:
    unknown = [gpu for gpu in state.gpus if bus_id(gpu, health.seen) is None]
    if unknown:
        return f"{state.node} has no GPU {', '.join(unknown)}"
    for finding in health.findings:
        asked_by_driver = finding.source == "nvml" and finding.code.startswith("recovery action")
        if asked_by_driver and finding.cause is Cause.GPU_FATAL:
            return f"a GPU reset cannot fix {state.node}: {finding.reason}"
    return ""


def count_reboots(state: RepairState, now: datetime) -> int:
    """Return how often the node was rebooted within the reboot window.

    Counts the reboots in the node's journal as last read, and the one that this repair ordered
    before a power cycle.
    """
    health = state.health
    own = int(state.power and state.attempts > 0)
    if health is None:
        return own
    # A clock of the node that is ahead must not drop reboots.
    since = min(health.clock or now, now) - state.rules.reboot_window
    return own + sum(one.at > since and not is_own_id(state, one.id) for one in health.reboots)


def is_own_id(state: RepairState, id: str | None) -> bool:
    """Return whether the node reports this id of an order, shortened as it may be, for this
    repair."""
    return bool(id) and id == text(state.id, LONGEST_ID)


def can_switch_to_power(state: RepairState) -> bool:
    """Return whether a power cycle is the next way to reboot this node."""
    return (
        state.strategy is Strategy.REBOOT_NODE
        and state.rules.has_power_command
        and not state.power
        and not state.cancel_reason
    )


def is_reboot_overdue(state: RepairState, now: datetime) -> bool:
    """Return whether a reboot was not proven in time and as much time is left for a power cycle."""
    if state.stage is not Stage.PROVING or state.ordered_at is None:
        return False
    if not can_switch_to_power(state):
        return False
    timeout = state.rules.repair_timeout
    if state.rules.job_waits:
        return now - state.ordered_at >= timeout and state.deadline - now >= timeout
    latest = min(state.ordered_at + timeout, state.deadline - FINAL_PROBE_MARGIN)
    return now >= max(latest, state.ordered_at + FINAL_PROBE_MARGIN)


def is_silent(state: RepairState, now: datetime) -> bool:
    """Return whether the node has been silent long enough for a power cycle."""
    return state.silent_since is not None and now - state.silent_since >= SILENCE_TIMEOUT


def has_booted_since_silence(state: RepairState, health: Health, now: datetime) -> bool:
    """Return whether a node of unknown earlier boot id runs a boot that began after it fell silent.

    Judged by the uptime, which needs no synchronized clock.
    """
    since = state.silent_since or state.started_at
    return health.uptime is not None and timedelta(seconds=health.uptime) < now - since


def has_just_booted(state: RepairState, health: Health, now: datetime) -> bool:
    """Return whether the drivers and DCGM may still be starting after the reboot."""
    return (
        health.boot_id != state.boot_id
        and state.proven_at is not None
        and now - state.proven_at < DRIVER_START_TIMEOUT
    )


def lacks_gpus(state: RepairState, health: Health) -> bool:
    return bool(state.rules.expected_gpus) and (health.working or 0) < state.rules.expected_gpus


def lacks_only_links(health: Health) -> bool:
    """Return whether all faults of the node are of its network cards and their links."""
    faults = [one for one in health.findings if one.role is Role.ROOT and one.cause in SICK]
    return bool(faults) and all(one.code in LINK_FAULTS for one in faults)
