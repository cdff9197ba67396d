"""What speaks against an order that acts on a node, whoever approves it."""

from __future__ import annotations

from datetime import datetime

from recovery.causes import Cause
from recovery.facts import text
from recovery.health import LONGEST_ID, Health
from recovery.nvml import bus_id
from recovery.policy import Strategy
from recovery.repair_state import RepairState
from recovery.spec import duration


def against(state: RepairState, health: Health, now: datetime) -> str:
    """A clause; empty: nothing does."""
    if health.busy:
        return f"{state.node} is in use: {', '.join(health.busy)}"
    if state.strategy is Strategy.RESET_GPU:
        unknown = [gpu for gpu in state.gpus if bus_id(gpu, health.seen) is None]
        if unknown:
            return f"no GPU of {state.node} is known as {', '.join(unknown)}"
        asked = [one for one in health.findings if one.source == "nvml" and one.code.startswith("recovery action")]
        return next((f"a reset does not help {state.node}: {one.because}" for one in asked if one.cause is Cause.GPU_FATAL), "")
    if health.journal_unread:
        return f"how often {state.node} was rebooted is not known: {health.journal_unread}"
    rules = state.rules
    since = min(health.clock or now, now) - rules.reboot_window  # a clock that is ahead forgets nothing
    recent = [one for one in health.reboots if one.at > since and one.id != text(state.id, LONGEST_ID)]
    if len(recent) < rules.max_reboots:
        return ""
    return f"{state.node} was rebooted {len(recent)} times within {duration(rules.reboot_window)}: a person should look at its hardware"
