"""Check for reasons against an order that acts on a node, whichever person or policy approves
it."""

from __future__ import annotations

from datetime import datetime

from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import text
from relaunch.evidence.health import LONGEST_ID, Health
from relaunch.evidence.nvml import bus_id
from relaunch.fields import duration
from relaunch.repair.state import RepairState
from relaunch.spec.policy import Strategy


def against(state: RepairState, health: Health | None, now: datetime) -> str:
    """Return what speaks against the order, as a clause; empty if nothing does.

    Without `health` the node does not answer, and its fleet has to say which jobs have it.
    """
    if health is not None and health.busy:
        return f"{state.node} is in use: {', '.join(health.busy)}"
    if health is not None and state.strategy is Strategy.RESET_GPU:
        unknown = [gpu for gpu in state.gpus if bus_id(gpu, health.seen) is None]
        if unknown:
            return f"no GPU of {state.node} is known as {', '.join(unknown)}"
        asked = [
            one
            for one in health.findings
            if one.source == "nvml" and one.code.startswith("recovery action")
        ]
        return next(
            (
                f"a reset does not help {state.node}: {one.reason}"
                for one in asked
                if one.cause is Cause.GPU_FATAL
            ),
            "",
        )
    if health is not None and health.journal_unread:
        return f"how often {state.node} was rebooted is not known: {health.journal_unread}"
    times = restarts(state, now)
    if times < state.rules.max_reboots:
        return ""
    within = duration(state.rules.reboot_window)
    return f"{state.node} was rebooted {times} times within {within}: a person should look at its hardware"


def restarts(state: RepairState, now: datetime) -> int:
    """Return how often the node was rebooted within the reboot window.

    Counts the reboots in the node's journal as last read, and the one that this repair ordered
    before a power cycle.
    """
    health = state.health
    own = int(state.power and state.attempts > 0)
    if health is None:
        return own
    since = (
        min(health.clock or now, now) - state.rules.reboot_window
    )  # a clock that is ahead must not drop reboots
    return own + sum(
        one.at > since and one.id != text(state.id, LONGEST_ID) for one in health.reboots
    )
