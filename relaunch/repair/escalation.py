"""Choose the strategies for a node of unknown health, the weakest first.

The node is examined, then reset or rebooted for what was found, and for nothing else. A node that
cannot be examined is examined again and then left to a person: it is never called healthy, and
nothing is done to it. Two exceptions: a node that is silent after a reboot by relaunch is
power-cycled where that is possible, and one whose NVML does not answer, three times, is reset and
then rebooted. What only a person can mend (a cable, a power plug) is examined twice more, and left.

    examine -> RESET_GPU, where a reset fixes all that was found -> REBOOT_NODE -> power cycle

Where the backend of the node resets no GPUs, that begins with REBOOT_NODE.

What healed the node within its fleet's cool-down is not done again: the next step is.

`machine` carries out one strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, assert_never

from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import text
from relaunch.evidence.findings import Finding, Role, Verdict
from relaunch.evidence.health import SICK, Health
from relaunch.evidence.nvml import NVML_HANGS
from relaunch.repair.explain import MAX_SENTENCE
from relaunch.repair.state import FinishRepair, LogEntry, RepairOutcome, RepairState
from relaunch.spec.policy import Strategy
from relaunch.text import format_time

EXAMINATION_DELAYS = (timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=15))
"""Delays after an inconclusive examination: an agent needs seconds, DCGM's service minutes, a host
of eight GPUs ten minutes to boot."""
LINK_DELAYS = EXAMINATION_DELAYS[:2]
"""Delays after an examination that found only faults that a person has to mend: a link whose switch
restarts comes back within minutes, and leptonai/gpud waits four."""
MAX_HANGS = 3
"""Examinations in a row after which NVML that does not answer is taken for a driver that hangs. A
busy host answers by then; one that was silent before may only have booted."""


@dataclass(frozen=True, slots=True)
class PastRepair:
    """A strategy that was carried out on the node earlier, after which it was found healthy."""

    strategy: Strategy
    at: datetime
    gpus: tuple[str, ...] = ()
    """Bus ids of the GPUs that were reset; empty: the whole node."""


@dataclass(frozen=True, slots=True)
class Escalation:
    node: str
    reason: str
    """Why the node is examined."""
    health: Health | None = None
    """Result of the last examination."""
    unknown: int = 0
    """Number of inconclusive examinations in a row."""
    tried: tuple[Strategy, ...] = ()
    last_end: FinishRepair | None = None
    """How the last strategy ended."""
    acted: bool = False
    """The last strategy did something to the node."""
    kernel_from: datetime | None = None
    """Kernel messages before this time no longer count: the node was rebooted since. None: all of
    this boot counts, except what a reset has healed, which the node reports."""
    unmendable: int = 0
    """Number of examinations in a row that found only faults that a person has to mend."""
    cancel_reason: str = ""
    """Why the repair was cancelled; empty if it was not."""
    can_reset: bool = True
    """The node's backend can reset GPUs; if not, a reboot takes the place of each reset."""
    can_power_cycle: bool = False
    """A command that cycles the node's power exists and has not been used yet."""
    after_reboot: bool = False
    """The node has been silent since an earlier reboot, which this repair did not order."""
    log: tuple[LogEntry, ...] = ()
    hangs: int = 0
    """Number of inconclusive examinations in a row in which NVML did not answer, and the node
    did."""
    healed: tuple[PastRepair, ...] = ()
    """What healed the node a short time ago: it is not done again, but what comes after it."""


@dataclass(frozen=True, slots=True)
class ExamineNode:
    delay: timedelta
    reason: str
    kind: Literal["ExamineNode"] = "ExamineNode"


@dataclass(frozen=True, slots=True)
class StartStrategy:
    strategy: Strategy
    gpus: tuple[str, ...]
    """GPUs to reset, by bus id; empty: all of them."""
    reason: str
    power: bool = False
    """Reboot by a power cycle, because the node does not answer."""
    kind: Literal["StartStrategy"] = "StartStrategy"


EscalationDecision = ExamineNode | StartStrategy | FinishRepair


# --- what has happened


def cancel(escalation: Escalation, reason: str) -> Escalation:
    """Start nothing more; the first reason counts."""
    return replace(escalation, cancel_reason=escalation.cancel_reason or reason)


def apply_examination(escalation: Escalation, health: Health, now: datetime) -> Escalation:
    unknown = escalation.unknown + 1 if health.verdict is Verdict.UNKNOWN else 0
    after_reboot = escalation.after_reboot and not health.boot_id
    unmendable = escalation.unmendable + 1 if _needs_person(health) else 0
    hangs = escalation.hangs + 1 if unknown and _does_driver_hang(health) else 0
    escalation = replace(
        escalation,
        health=health,
        unknown=unknown,
        unmendable=unmendable,
        after_reboot=after_reboot,
        hangs=hangs,
    )
    return _log(escalation, now, "Examined", f"{health.verdict}: {health.reason}")


def apply_strategy_end(
    escalation: Escalation, state: RepairState, end: FinishRepair, now: datetime
) -> Escalation:
    """Record how a strategy ended; what it found of the node afterwards counts as an
    examination. One that the node no longer needs was not tried: the node is examined again."""
    if state.recovered:
        cancelled = state.cancel_reason or escalation.cancel_reason
        escalation = replace(escalation, health=None, cancel_reason=cancelled)
        return _log(escalation, now, str(state.strategy), end.reason)
    acted = state.attempts > 0 or state.proven_at is not None
    health = escalation.health
    if acted and state.health is not None:
        health = replace(state.health, verdict=end.verdict, reason=end.reason)
    is_unknown = acted and end.verdict is Verdict.UNKNOWN
    # An order that may not have been carried out has fixed nothing.
    is_rebooted = state.strategy is Strategy.REBOOT_NODE and state.proven_at is not None
    kernel_from = state.ordered_at if is_rebooted else escalation.kernel_from
    escalation = replace(
        escalation,
        tried=(*escalation.tried, state.strategy),
        last_end=end,
        acted=acted,
        health=health,
        unknown=int(is_unknown),
        unmendable=int(acted and health is not None and _needs_person(health)),
        hangs=int(is_unknown and health is not None and _does_driver_hang(health)),
        kernel_from=kernel_from,
        cancel_reason=state.cancel_reason or escalation.cancel_reason,
        can_power_cycle=escalation.can_power_cycle and not state.power,
    )
    return _log(escalation, now, str(state.strategy), f"{end.outcome}: {end.reason}")


# --- what is next


def choose_next(escalation: Escalation, left: timedelta) -> EscalationDecision:
    """Return the next step, given the time left until the whole repair has to end."""
    end = escalation.last_end
    if end is not None and not escalation.acted:
        # The strategy was not allowed, or the node was in use: do not bypass that by another one.
        return _finish(escalation, end.outcome, end.reason)
    health = escalation.health
    if health is None:
        return _begin(escalation, left)
    match health.verdict:
        case Verdict.HEALTHY:
            return _finish_healthy(escalation, health)
        case Verdict.UNHEALTHY:
            return _repair_unhealthy(escalation, health, left)
        case Verdict.UNKNOWN:
            return _examine_again(escalation, health, left)
        case _:
            assert_never(health.verdict)


def _begin(escalation: Escalation, left: timedelta) -> EscalationDecision:
    if escalation.cancel_reason:
        return _finish(escalation, "refused", f"cancelled: {escalation.cancel_reason}")
    if left <= timedelta(0):
        late = f"the deadline passed before {escalation.node} was examined"
        return _finish(escalation, "refused", late)
    return ExamineNode(timedelta(0), escalation.reason)


def _finish_healthy(escalation: Escalation, health: Health) -> FinishRepair:
    node, end = escalation.node, escalation.last_end
    if end is None:
        reason = f"{node} is healthy; no repair was needed: {health.reason}"
        return _finish(escalation, "done", reason)
    if end.outcome == "done":
        return end
    reason = f"{end.reason}; a later examination found {node} healthy: {health.reason}"
    return _finish(escalation, "done", reason)


def _repair_unhealthy(
    escalation: Escalation, health: Health, left: timedelta
) -> EscalationDecision:
    node = escalation.node
    reason = health.reason  # after a strategy it says what was done to the node
    if escalation.last_end is None:
        reason = f"{node} is unhealthy: {health.reason}"
    if Strategy.REBOOT_NODE in escalation.tried:
        # A link may come up later than the node answers.
        if _needs_person(health) and not escalation.cancel_reason:
            return _await_person(escalation, reason, left)
        return _finish(escalation, "refused", reason)
    if escalation.cancel_reason:
        return _finish(escalation, "refused", f"cancelled: {escalation.cancel_reason}; {reason}")
    if left <= timedelta(0):
        late = f"the deadline passed before {node} was repaired"
        return _finish(escalation, "refused", f"{late}: {reason}")
    if _needs_person(health):
        return _await_person(escalation, reason, left)
    faults = [finding for finding in health.findings if _is_fault(finding)]
    is_fixed_by_reset = bool(faults) and all(one.cause is Cause.GPU_RESET for one in faults)
    # A fault that names no GPU (for example of an NVSwitch) is fixed by a reset of all GPUs.
    is_named = all(one.gpu is not None for one in faults)
    return _reset_or_reboot(escalation, is_fixed_by_reset, health.gpus if is_named else (), reason)


def _reset_or_reboot(
    escalation: Escalation, is_fixed_by_reset: bool, gpus: tuple[str, ...], reason: str
) -> EscalationDecision:
    """Return the weakest strategy that was not tried, and that has not healed the node a short
    time ago: a person is next after a reboot."""
    reset = None
    if is_fixed_by_reset and escalation.can_reset and not escalation.tried:
        reset = _find_past_repair(escalation, Strategy.RESET_GPU, gpus)
        if reset is None:
            return StartStrategy(Strategy.RESET_GPU, gpus, reason)
    rebooted = _find_past_repair(escalation, Strategy.REBOOT_NODE)
    if rebooted is not None:
        repeats = f"it was rebooted {_describe_end(rebooted)}"
        person = f"{repeats}, so a person should look at its hardware (limits.cool_down)"
        return _finish(escalation, "refused", f"{person}; {reason}")
    if reset is not None:
        gpu = f"GPU {', '.join(reset.gpus)} was" if reset.gpus else "its GPUs were"
        repeats = f"{gpu} reset {_describe_end(reset)}, so it is rebooted (limits.cool_down)"
        reason = f"{repeats}; {reason}"
    return StartStrategy(Strategy.REBOOT_NODE, (), reason)


def _find_past_repair(
    escalation: Escalation, strategy: Strategy, gpus: tuple[str, ...] = ()
) -> PastRepair | None:
    """Return when the node was healed in this way: a reset of any of these GPUs, or of all."""
    return next(
        (
            one
            for one in reversed(escalation.healed)
            if one.strategy is strategy
            and (not gpus or not one.gpus or not {*gpus}.isdisjoint(one.gpus))
        ),
        None,
    )


def _describe_end(one: PastRepair) -> str:
    return f"at {format_time(one.at)} and was healthy then"


def _await_person(escalation: Escalation, reason: str, left: timedelta) -> EscalationDecision:
    """Examine the node again after a delay, twice; then leave it to a person."""
    tried = max(1, escalation.unmendable)
    if tried > len(LINK_DELAYS) or LINK_DELAYS[tried - 1] >= left:
        mend = "neither a reset nor a reboot mends that: a person has to"
        return _finish(escalation, "refused", f"{reason}; {mend}")
    return ExamineNode(LINK_DELAYS[tried - 1], reason)


def _examine_again(escalation: Escalation, health: Health, left: timedelta) -> EscalationDecision:
    """Examine the node again after a delay, three times; then power-cycle it or leave it."""
    node, unknown, end = escalation.node, escalation.unknown, escalation.last_end
    outcome: RepairOutcome = "refused" if end is None else end.outcome
    reason = health.reason
    if end is None or unknown > 1:
        examinations = f"{unknown} examination{'s' * (unknown > 1)}"
        reason = f"the health of {node} is unknown after {examinations}: {reason}"
    if escalation.cancel_reason:
        return _finish(escalation, outcome, f"cancelled: {escalation.cancel_reason}; {reason}")
    may_act = left > timedelta(0) and Strategy.REBOOT_NODE not in escalation.tried
    if escalation.hangs >= MAX_HANGS and may_act:
        return _reset_or_reboot(escalation, True, (), f"{reason}; its driver hangs")
    is_last = unknown > len(EXAMINATION_DELAYS)
    if is_last and _may_power_cycle(escalation, health) and left > timedelta(0):
        return StartStrategy(Strategy.REBOOT_NODE, (), reason, power=True)
    if is_last or EXAMINATION_DELAYS[unknown - 1] >= left:
        return _finish(escalation, outcome, reason)
    return ExamineNode(EXAMINATION_DELAYS[unknown - 1], reason)


def _may_power_cycle(escalation: Escalation, health: Health) -> bool:
    """Return whether the node is silent since a reboot, and its power can be cycled."""
    is_rebooted = Strategy.REBOOT_NODE in escalation.tried or (
        escalation.after_reboot and not escalation.tried
    )
    return is_rebooted and not health.boot_id and escalation.can_power_cycle


def _does_driver_hang(health: Health) -> bool:
    """Return whether the node answers and NVML does not, as where a GPU's firmware (GSP) hangs.

    For that, NVIDIA's catalog names a reset (Xids 119 and 120).
    """
    return any(finding.code == NVML_HANGS for finding in health.findings)


def _needs_person(health: Health) -> bool:
    faults = [finding for finding in health.findings if _is_fault(finding)]
    return bool(faults) and all(finding.needs_person for finding in faults)


def _is_fault(finding: Finding) -> bool:
    return finding.role is Role.ROOT and finding.cause in SICK


def _finish(escalation: Escalation, outcome: RepairOutcome, reason: str) -> FinishRepair:
    verdict = Verdict.UNKNOWN if escalation.health is None else escalation.health.verdict
    return FinishRepair(outcome, verdict, text(reason, MAX_SENTENCE))


def _log(escalation: Escalation, now: datetime, what: str, reason: str) -> Escalation:
    return replace(escalation, log=(*escalation.log, LogEntry(now, what, text(reason))))
