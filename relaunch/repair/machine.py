"""State machine of one strategy on one node: reset GPUs, reboot, or power-cycle, with its proof.

    CHECKING  ->  ASKING  ->  ORDERING  ->  PROVING  ->  EXAMINING  ->  DIAGNOSING  ->  end

The transitions stand in this order. An order is bound to the boot that was last probed, is never
given while the node is in use, and is never repeated without a probe. A repair is done only when
the node was examined after the order and found healthy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import assert_never

from relaunch.evidence.catalog import Catalog
from relaunch.evidence.fields import text
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import NOT_DIAGNOSED, Health, add_diag, read_health
from relaunch.evidence.nvml import bus_id
from relaunch.repair.conditions import (
    can_switch_to_power,
    find_objection,
    has_booted_since_silence,
    has_just_booted,
    is_own_id,
    is_reboot_overdue,
    is_silent,
    lacks_gpus,
    lacks_only_links,
)
from relaunch.repair.explain import (
    MAX_SENTENCE,
    ask_approval,
    describe_order,
    describe_result,
    explain_failed_power_cycle,
    explain_failed_reset,
    explain_order,
    explain_other_approval,
    explain_timeout,
    explain_unknown_health,
    explain_verdict,
    read_output,
)
from relaunch.repair.state import (
    MAX_ORDERS,
    AskPerson,
    FinishRepair,
    LogEntry,
    NoAnswer,
    NodeDiagnosed,
    NodeProbed,
    Order,
    OrderDone,
    OrderExpired,
    OrderRefused,
    PermitAnswered,
    PersonAnswered,
    PowerCycleNode,
    ProbeNode,
    RebootNode,
    RepairCancelRequested,
    RepairDecision,
    RepairEvent,
    RepairOutcome,
    RepairRules,
    RepairState,
    ResetGpus,
    RunDiag,
    Stage,
    TimeExpired,
    WaitEnded,
    WaitForNode,
)
from relaunch.spec.policy import Strategy

PROBE_INTERVAL = timedelta(seconds=5)
DRIVER_PROBE_INTERVAL = timedelta(seconds=10)
ASKING_PROBE_INTERVALS = (timedelta(minutes=1), timedelta(minutes=5))
"""Between two probes of a node about which a person is asked: the shortest at first, then a quarter
of the time that the question has been open, up to the longest."""
PROBE_TIMEOUT = timedelta(seconds=20)
"""A healthy node needs less than one second; a driver that hangs is given up after ten."""
RESET_TIMEOUT = timedelta(minutes=2)
"""nvidia-smi takes some seconds for each of eight GPUs."""
POWER_CYCLE_TIMEOUT = timedelta(minutes=1)
"""ipmitool gives up on a controller after some twenty seconds; a command that calls a cloud API
needs a few."""
ORDER_ARRIVAL_TIMEOUT = timedelta(seconds=60)
"""A node writes an order to reboot into its journal within seconds. If it answers a minute later
without such an entry, the order never arrived."""
MAX_DIAG_ATTEMPTS = 2
MAX_LOG_ENTRIES = 60
MAX_FINDINGS = 16


def begin(
    *,
    id: str,
    fleet: str,
    node: str,
    strategy: Strategy,
    gpus: tuple[str, ...],
    reason: str,
    by: str,
    rules: RepairRules,
    now: datetime,
    deadline: datetime | None = None,
    approved_by: str = "",
    power: bool = False,
    boot_id: str = "",
) -> RepairState:
    """Return the initial state of a repair.

    Args:
        power: Cycle the power without asking the node to reboot first.
        boot_id: The boot that is to end, if it is known and the node may no longer report it.

    Raises:
        ValueError: The strategy is not a repair.
    """
    if not strategy.repairs:
        raise ValueError(f"{strategy} repairs no node: expected RESET_GPU or REBOOT_NODE")
    return RepairState(
        id,
        fleet,
        node,
        strategy,
        tuple(text(gpu, 40) for gpu in gpus),
        text(reason),
        text(by, 80),
        rules,
        now,
        now + rules.repair_timeout if deadline is None else deadline,
        boot_id=boot_id,
        approved_by=text(approved_by, 80),
        power=power,
    )


def step(
    state: RepairState, events: Iterable[RepairEvent], now: datetime, catalog: Catalog
) -> tuple[RepairState, RepairDecision]:
    """Apply all events that have arrived, in order, and decide what is next.

    A cancel may arrive together with the answer to an order that was on its way: it ends the repair
    only if no order was given, which is known once every event has been applied.
    """
    for event in events:
        state = apply_event(state, event, now, catalog)
    return state, decide(state, now)


def decide(state: RepairState, now: datetime) -> RepairDecision:
    if state.outcome is not None:
        return FinishRepair(state.outcome, state.verdict or Verdict.UNKNOWN, state.conclusion)
    if state.cancel_reason and not state.attempts:
        return FinishRepair("refused", Verdict.UNKNOWN, f"cancelled: {state.cancel_reason}")
    if now >= _end_of_wait(state):
        return explain_timeout(state)
    left = state.deadline - now
    if state.wait:
        return WaitForNode(min(state.wait, left), state.wait_reason)
    since_order = None if state.ordered_at is None else max(timedelta(0), now - state.ordered_at)
    match state.stage:
        case Stage.CHECKING:
            reason = f"checking {state.node} before the order to {describe_order(state)}"
            return ProbeNode(min(PROBE_TIMEOUT, left), None, f"{reason}: {state.reason}")
        case Stage.ASKING:
            return AskPerson(ask_approval(state), _end_of_wait(state), "repairs: ask")
        case Stage.ORDERING:
            return _decide_order(state, left)
        case Stage.PROVING:
            reason = f"checking whether the order to {describe_order(state)} was carried out"
            return ProbeNode(min(PROBE_TIMEOUT, left), since_order, reason)
        case Stage.EXAMINING:
            reason = f"{describe_result(state)} and is examined"
            # A reset heals the GPUs that it was of: the node reports them, and the rest counts.
            is_reset = state.strategy is Strategy.RESET_GPU
            return ProbeNode(min(PROBE_TIMEOUT, left), None if is_reset else since_order, reason)
        case Stage.DIAGNOSING:
            level, timeout = state.rules.level, min(state.rules.diag_timeout, left)
            reason = f"{describe_result(state)} and is examined by dcgmi diag -r {level}"
            return RunDiag(level, timeout, reason)
        case _:
            assert_never(state.stage)


def _decide_order(state: RepairState, left: timedelta) -> Order:
    reason = explain_order(state)
    if state.strategy is Strategy.RESET_GPU:
        return ResetGpus(state.boot_id, state.gpus, min(RESET_TIMEOUT, left), reason)
    if state.power:
        return PowerCycleNode(min(POWER_CYCLE_TIMEOUT, left), reason)
    return RebootNode(state.boot_id, reason)


def apply_event(
    state: RepairState, event: RepairEvent, now: datetime, catalog: Catalog
) -> RepairState:
    """Apply one event. An event that answers no open decision changes nothing."""
    if state.outcome is not None:
        return state
    stage = state.stage
    is_ordered = stage in (Stage.ORDERING, Stage.PROVING)
    match event:
        case WaitEnded():
            return replace(state, wait=timedelta(0))
        case RepairCancelRequested():
            return _cancel(state, event, now)
        case TimeExpired() if stage is Stage.ASKING or now >= state.deadline:
            return _expire(state, now)
        case PersonAnswered() if stage is Stage.ASKING:
            return _apply_approval(state, event, now)
        case PermitAnswered() if stage is Stage.ORDERING:
            return _apply_permit(state, event, now)
        case OrderExpired() if stage is Stage.ORDERING:
            # A power cycle is given once. One that waits for its order was not given yet.
            state = _check_again(state, is_unused=state.power)
            return _wait(state, PROBE_INTERVAL, now, text(event.reason))
        case NodeProbed() if stage is Stage.ASKING:
            return _apply_probe_while_asked(state, event, now, catalog)
        case NodeProbed() if stage in (Stage.CHECKING, Stage.PROVING, Stage.EXAMINING):
            return _apply_probe(state, event, now, catalog)
        case NoAnswer() if stage is Stage.ORDERING:
            return _miss_answer_to_order(state, text(event.reason) or "no reason given", now)
        case NoAnswer() if stage is Stage.DIAGNOSING:
            return _miss_diag(state, text(event.reason), now)
        case NoAnswer() if stage is not Stage.ASKING:
            return _miss_answer(state, text(event.reason) or "no reason given", now)
        case OrderDone() if is_ordered:
            return _apply_order_done(state, event, now)
        case OrderRefused() if is_ordered:
            return _apply_refusal(state, event, now)
        case OrderRefused() if stage is Stage.DIAGNOSING:
            refusal = NodeDiagnosed({"refused": event.why, "reason": event.reason})
            return _apply_diag(state, refusal, now, catalog)
        case NodeDiagnosed() if stage is Stage.DIAGNOSING:
            return _apply_diag(state, event, now, catalog)
        case (
            TimeExpired()
            | PersonAnswered()
            | PermitAnswered()
            | NodeProbed()
            | NodeDiagnosed()
            | NoAnswer()
            | OrderDone()
            | OrderRefused()
            | OrderExpired()
        ):
            return state
        case _:
            assert_never(event)


# --- every probe, whatever it is for


def _apply_probe(
    state: RepairState, event: NodeProbed, now: datetime, catalog: Catalog
) -> RepairState:
    health = _read_probe(state, event, catalog)
    if not health.boot_id:
        reason = f"its answer cannot be read: {health.reason}"
        return _miss_answer(state, reason, now, silent=False)
    if _is_first_boot_id(state, health, now):
        state = replace(state, boot_id=health.boot_id)
    state = _log(_keep_health(state, health), now, event.kind, health.reason)
    state = replace(state, missing_answer="", silent_since=None)
    if is_own_id(state, health.held):
        # The answer to that order was lost; a probe will show what it did.
        running = f"an earlier order of this repair is still running on {state.node}"
        return _wait(state, PROBE_INTERVAL, now, running)
    if state.stage is Stage.CHECKING:
        return _check(state, health, now)
    if state.stage is Stage.PROVING:
        return _prove(state, health, now)
    return _examine(state, health, now)


def _is_first_boot_id(state: RepairState, health: Health, now: datetime) -> bool:
    """Return whether a power-cycled node, whose boot id was unknown, still runs the boot that was
    to end."""
    return (
        state.power
        and state.stage is Stage.PROVING
        and not state.boot_id
        and not has_booted_since_silence(state, health, now)
    )


def _miss_answer(
    state: RepairState, reason: str, now: datetime, *, silent: bool = True
) -> RepairState:
    """Apply a probe without a usable answer; `silent` if the node sent nothing at all."""
    since = (state.silent_since or now) if silent else None
    state = replace(state, missing_answer=reason, silent_since=since)
    missing = f"{state.node} does not answer: {reason}"
    if is_reboot_overdue(state, now):
        return _switch_to_power(state, now, f"the reboot was not proven in time: {missing}")
    if state.stage is Stage.CHECKING and is_silent(state, now):
        if can_switch_to_power(state):
            state = _switch_to_power(state, now, missing)
        if state.power:
            return _request_order(state, None, now)
    return _wait(state, PROBE_INTERVAL, now, missing)


# --- CHECKING: is anything against the order?


def _check(state: RepairState, health: Health, now: datetime) -> RepairState:
    ordered_boot = next(
        (one.boot_id for one in health.reboots if is_own_id(state, one.id) and one.boot_id), ""
    )
    if state.strategy is Strategy.REBOOT_NODE and ordered_boot and not state.power:
        # This repair gave the order before its workflow was reset and lost its state.
        state = replace(
            state,
            stage=Stage.PROVING,
            boot_id=ordered_boot,
            attempts=1,
            ordered_at=now,
            acknowledged=True,
        )
        return _prove(state, health, now)
    if _is_rebooted(state, health):
        return _prove(state, health, now)
    gpus = tuple(dict.fromkeys(bus_id(gpu, health.seen) or gpu for gpu in state.gpus))
    return _request_order(replace(state, boot_id=health.boot_id, gpus=gpus), health, now)


def _request_order(state: RepairState, health: Health | None, now: datetime) -> RepairState:
    """Give the order, ask a person for approval, or refuse, by the checks and the fleet's mode."""
    if objection := find_objection(state, health, now):
        return _end(state, now, "refused", objection)
    if state.rules.mode == "observe":
        reason = f"repairs: observe; otherwise relaunch would {describe_order(state)}"
        return _end(state, now, "refused", f"{reason}: {state.reason}")
    if state.rules.mode == "ask" and not state.approved_by:
        until = min(now + state.rules.answer_timeout, state.deadline)
        state = replace(state, stage=Stage.ASKING, ask_until=until)
        return _log(state, now, "Asked", ask_approval(state))
    return replace(state, stage=Stage.ORDERING)


def _switch_to_power(state: RepairState, now: datetime, reason: str) -> RepairState:
    """Cycle the power instead of rebooting: the node is probed again, and a person asked again."""
    # Approval of a reboot does not cover a power cycle.
    approved_by = "" if state.rules.mode == "ask" else state.approved_by
    state = replace(
        state, power=True, stage=Stage.CHECKING, approved_by=approved_by, wait=timedelta(0)
    )
    state = _extend_deadline(state, now)
    return _log(state, now, "PowerCycle", f"{reason}; power-cycling {state.node} instead")


# --- ASKING: a person's approval, while the node is probed


def find_asking_interval(asked_for: timedelta) -> timedelta:
    """Return the time to the next probe, given how long the question has been open."""
    shortest, longest = ASKING_PROBE_INTERVALS
    return min(longest, max(shortest, asked_for / 4))


def explain_settled(state: RepairState, event: RepairEvent, catalog: Catalog) -> str:
    """Return why a probe makes the question needless, as a clause; empty: it still stands.

    A node that a person has rebooted is examined as after a reboot that was ordered. What an
    examination has found counts no longer once a probe, which showed a fault before, reads
    everything and shows none: the node is examined again. What only DCGM shows is not looked for.
    """
    if state.stage is not Stage.ASKING or not isinstance(event, NodeProbed):
        return ""
    health = _read_probe(state, event, catalog, level=0)
    if not health.boot_id or is_own_id(state, health.held):
        return ""
    if _is_rebooted(state, health):
        return f"{state.node} was rebooted meanwhile"
    if not state.rules.by_examination:
        return ""
    if health.verdict is Verdict.HEALTHY and _did_show_fault(state):
        return f"a probe finds no fault of {state.node} any more"
    return ""


def _did_show_fault(state: RepairState) -> bool:
    """Return whether the probe before the question showed a fault, or could not read everything."""
    if state.silent_since is not None:
        return True
    health = state.health
    return health is not None and (
        health.verdict is Verdict.UNHEALTHY or any(one != NOT_DIAGNOSED for one in health.unread)
    )


def _apply_probe_while_asked(
    state: RepairState, event: NodeProbed, now: datetime, catalog: Catalog
) -> RepairState:
    settled = explain_settled(state, event, catalog)
    if not settled:
        return state
    health = _read_probe(state, event, catalog)
    state = _log(state, now, event.kind, f"{settled}; the question is withdrawn")
    state = replace(state, ask_until=None, missing_answer="", silent_since=None)
    if _is_rebooted(state, health):
        return _prove(_keep_health(state, health), health, now)
    return _end(replace(state, recovered=True), now, "refused", settled)


def _is_rebooted(state: RepairState, health: Health) -> bool:
    return bool(state.boot_id) and health.boot_id != state.boot_id


def _read_probe(
    state: RepairState, event: NodeProbed, catalog: Catalog, level: int | None = None
) -> Health:
    return read_health(
        event.answer,
        None,
        expected_gpus=state.rules.expected_gpus,
        level=state.rules.level if level is None else level,
        catalog=catalog,
    )


def _apply_approval(state: RepairState, event: PersonAnswered, now: datetime) -> RepairState:
    person = text(event.by, 80) or "a person"
    reason = f": {text(event.reason)}" if text(event.reason) else ""
    order = describe_order(state)
    if now >= _end_of_wait(state):
        return _expire(state, now)
    if not event.approve:
        return _end(state, now, "refused", f"{person} denied the request to {order}{reason}")
    if other := explain_other_approval(state, event.approved):
        return _log(state, now, event.kind, f"{person} approved another repair: {other}")
    # Hours may have passed since the node was last probed.
    state = replace(state, approved_by=person, stage=Stage.CHECKING, ask_until=None)
    return _log(state, now, event.kind, f"{person} approved the request to {order}{reason}")


# --- ORDERING: the fleet's permit, and the answer of the node


def _apply_permit(state: RepairState, event: PermitAnswered, now: datetime) -> RepairState:
    reason = f"the order to {describe_order(state)}: {text(event.reason) or 'no reason given'}"
    if not event.allowed:
        return _end(state, now, "refused", f"fleet {state.fleet} did not permit {reason}")
    state = _check_again(state, is_unused=event.is_unused)
    return _log(state, now, event.kind, f"fleet {state.fleet} permitted {reason}")


def _check_again(state: RepairState, *, is_unused: bool) -> RepairState:
    """Probe the node before the order: time has passed, and a job may have begun to use it.

    Where the same order was given before (`is_unused` is False), that may prove it.
    """
    is_proof = state.attempts > 0 and not is_unused
    return replace(state, stage=Stage.PROVING if is_proof else Stage.CHECKING)


def _count_order(state: RepairState, now: datetime) -> RepairState:
    if state.stage is not Stage.ORDERING:
        return state  # already counted: this answer is late
    state = replace(
        state,
        stage=Stage.PROVING,
        attempts=state.attempts + 1,
        ordered_at=now,
        missing_answer="it was not probed since the order",
    )
    return _extend_deadline(state, now) if state.power else state


def _miss_answer_to_order(state: RepairState, reason: str, now: datetime) -> RepairState:
    """Probe the node before anything else: the order may have been carried out."""
    state = replace(_count_order(state, now), missing_answer=reason)
    if state.power:
        unknown = f"whether {state.node} was power-cycled is not known yet: {reason}"
        return _wait(state, PROBE_INTERVAL, now, unknown)
    return _wait(state, PROBE_INTERVAL, now, f"{state.node} does not answer: {reason}")


def _apply_order_done(state: RepairState, event: OrderDone, now: datetime) -> RepairState:
    if event.answer.get("outcome") != "done":
        reason = f"the answer of {state.node} to the order cannot be read"
        if state.stage is Stage.ORDERING:
            return _miss_answer_to_order(state, reason, now)
        return _miss_answer(state, reason, now, silent=False)
    state = replace(_count_order(state, now), acknowledged=True)
    if state.strategy is Strategy.RESET_GPU:
        return _apply_reset_done(state, event, now)
    if not state.power:
        return _wait(state, PROBE_INTERVAL, now, f"waiting for {state.node} to reboot")
    if failure := explain_failed_power_cycle(state.node, event.answer):
        return _end(state, now, "refused", failure)
    return _wait(
        state, PROBE_INTERVAL, now, f"waiting for {state.node} to boot after its power cycle"
    )


def _apply_reset_done(state: RepairState, event: OrderDone, now: datetime) -> RepairState:
    """Examine the node: the exit code of nvidia-smi proves the reset."""
    if failure := explain_failed_reset(state.node, event.answer):
        return _end(state, now, "refused", failure)
    state = replace(state, stage=Stage.EXAMINING, proven_at=now)
    return _log(state, now, event.kind, f"{describe_result(state)}: {read_output(event.answer)}")


def _apply_refusal(state: RepairState, event: OrderRefused, now: datetime) -> RepairState:
    if event.is_attempt or state.stage is not Stage.ORDERING:
        state = _count_order(state, now)
    if event.why == "boot_changed":
        # The next probe shows which boot it is: the claim of a refusal does not count.
        claim = f"{state.node} refused: it has rebooted since the order was decided"
        return _log(state, now, event.kind, claim)
    why = f"({text(event.why, 40)}): {text(event.reason) or 'no reason given'}"
    reason = f"the order to {describe_order(state)} was refused {why}"
    if event.why == "cannot_reboot" and can_switch_to_power(state):
        return _switch_to_power(replace(state, attempts=state.attempts - 1), now, reason)
    return _end(state, now, "refused", reason)


# --- PROVING: was the order carried out?


def _prove(state: RepairState, health: Health, now: datetime) -> RepairState:
    """Examine a node that has rebooted; otherwise wait, repeat the order, or give up."""
    if health.boot_id != state.boot_id:
        before = f"before {state.boot_id}" if state.boot_id else "its uptime is below its silence"
        proof = f"{state.node} has rebooted: boot id {health.boot_id}, {before}"
        state = replace(state, stage=Stage.EXAMINING, proven_at=now)
        return _examine(_log(state, now, "Proven", proof), health, now)
    if state.strategy is Strategy.RESET_GPU:
        return _prove_reset(state, health, now)
    return _prove_reboot(state, health, now)


def _prove_reset(state: RepairState, health: Health, now: datetime) -> RepairState:
    """Repeat a reset without an answer: a reset leaves no trace, and a second one does no harm."""
    if state.attempts < MAX_ORDERS and not state.cancel_reason:
        return _repeat_order(state, health, now)
    cancelled = f"cancelled: {state.cancel_reason}; " if state.cancel_reason else ""
    orders = f"{state.attempts} order{'s' * (state.attempts > 1)} to {describe_order(state)}"
    unknown = "got no answer; whether the GPUs were reset is unknown"
    return _end(state, now, "ambiguous", f"{cancelled}{orders} {unknown}")


def _prove_reboot(state: RepairState, health: Health, now: datetime) -> RepairState:
    """Wait for a reboot that is under way; repeat the order only if it never arrived."""
    order = describe_order(state)
    still_runs = f"{state.node} still runs boot id {state.boot_id}"
    if state.power:
        return _wait(state, PROBE_INTERVAL, now, still_runs)
    if is_reboot_overdue(state, now):
        return _switch_to_power(state, now, still_runs)
    in_journal = any(is_own_id(state, one.id) for one in health.reboots)
    state = replace(state, acknowledged=state.acknowledged or in_journal)
    is_early = state.ordered_at is not None and now - state.ordered_at < ORDER_ARRIVAL_TIMEOUT
    if state.acknowledged or is_early or health.journal_unread:
        return _wait(state, PROBE_INTERVAL, now, still_runs)
    if state.cancel_reason:
        reason = f"cancelled: {state.cancel_reason}; the order to {order} never arrived"
        return _end(state, now, "refused", reason)
    if state.attempts >= MAX_ORDERS:
        reason = f"{state.attempts} orders to {order} have not arrived"
        return _wait(state, PROBE_INTERVAL, now, reason)
    return _repeat_order(state, health, now)


def _repeat_order(state: RepairState, health: Health, now: datetime) -> RepairState:
    if objection := find_objection(state, health, now):
        return _end(state, now, "refused", objection)
    reason = f"repeating the order to {describe_order(state)}: it got no answer"
    return _log(replace(state, stage=Stage.ORDERING), now, "OrderRepeated", reason)


# --- EXAMINING and DIAGNOSING: is the node healthy?


def _examine(state: RepairState, health: Health, now: datetime) -> RepairState:
    has_rebooted = health.boot_id != state.boot_id
    if state.strategy is Strategy.REBOOT_NODE and not has_rebooted:
        reason = f"{state.node} reports the ended boot id {health.boot_id} again"
        return _wait(replace(state, stage=Stage.PROVING), PROBE_INTERVAL, now, reason)
    if state.examined_boot_id and health.boot_id != state.examined_boot_id:
        reason = "it rebooted during its examination"
        return _end(state, now, "refused", explain_unknown_health(state, reason))
    state = replace(state, examined_boot_id=health.boot_id)
    if has_just_booted(state, health, now) and lacks_gpus(state, health):
        some = f"{health.working} of {state.rules.expected_gpus} GPUs answer"
        reason = f"{state.node} has just booted: {some if health.working else 'no GPU answers yet'}"
        return _wait(state, DRIVER_PROBE_INTERVAL, now, reason)
    if has_just_booted(state, health, now) and lacks_only_links(health):
        reason = f"{state.node} has just booted: {health.reason}"
        return _wait(state, DRIVER_PROBE_INTERVAL, now, reason)
    has_diag = state.rules.expected_gpus and state.rules.level
    if has_diag and health.verdict is not Verdict.UNHEALTHY:
        return replace(state, stage=Stage.DIAGNOSING)
    return _conclude(state, health, now)


def _apply_diag(
    state: RepairState, event: NodeDiagnosed, now: datetime, catalog: Catalog
) -> RepairState:
    assert state.health is not None  # only a probed node is diagnosed
    health = add_diag(state.health, event.answer, level=state.rules.level, catalog=catalog)
    state = _keep_health(_log(state, now, event.kind, health.reason), health)
    if health.verdict is Verdict.UNKNOWN and has_just_booted(state, health, now):
        # DCGM's own service starts after the driver.
        reason = f"{state.node} has just booted: {health.reason}"
        return _wait(replace(state, stage=Stage.EXAMINING), DRIVER_PROBE_INTERVAL, now, reason)
    return _conclude(state, health, now)


def _miss_diag(state: RepairState, reason: str, now: datetime) -> RepairState:
    attempts = state.diag_attempts + 1
    state = replace(state, diag_attempts=attempts, missing_answer=reason, stage=Stage.EXAMINING)
    missing = f"dcgmi diag on {state.node} returned no result: {reason}"
    if attempts < MAX_DIAG_ATTEMPTS:
        return _wait(state, PROBE_INTERVAL, now, missing)
    return _end(state, now, "refused", explain_unknown_health(state, missing))


def _conclude(state: RepairState, health: Health, now: datetime) -> RepairState:
    """End with the verdict of the examination: only HEALTHY is `done`."""
    outcome: RepairOutcome = "done" if health.verdict is Verdict.HEALTHY else "refused"
    return _end(state, now, outcome, explain_verdict(state, health), health.verdict)


# --- the end, at any stage


def _cancel(state: RepairState, event: RepairCancelRequested, now: datetime) -> RepairState:
    """Give no further order. After an order, go on until it is proven: the state of the node must
    be known."""
    reason = text(event.reason) or "no reason given"
    if state.attempts and state.stage in (Stage.CHECKING, Stage.ASKING, Stage.ORDERING):
        state = replace(state, stage=Stage.PROVING, ask_until=None)
    return _log(replace(state, cancel_reason=reason), now, event.kind, reason)


def _expire(state: RepairState, now: datetime) -> RepairState:
    end = explain_timeout(state)
    return _end(state, now, end.outcome, end.reason)


def _end_of_wait(state: RepairState) -> datetime:
    """Return when the wait for a person ends, or else the whole repair."""
    return state.deadline if state.ask_until is None else min(state.ask_until, state.deadline)


def _extend_deadline(state: RepairState, now: datetime) -> RepairState:
    """Leave time to prove a power cycle, unless a job waits."""
    if state.rules.job_waits:
        return state
    return replace(state, deadline=max(state.deadline, now + state.rules.repair_timeout))


def _end(
    state: RepairState,
    now: datetime,
    outcome: RepairOutcome,
    reason: str,
    verdict: Verdict = Verdict.UNKNOWN,
) -> RepairState:
    state = replace(
        state,
        outcome=outcome,
        verdict=verdict,
        conclusion=text(reason, MAX_SENTENCE),
        wait=timedelta(0),
    )
    return _log(state, now, "Ended", f"{outcome}: {reason}")


# --- what is kept


def _wait(state: RepairState, delay: timedelta, now: datetime, reason: str) -> RepairState:
    return _log(replace(state, wait=delay, wait_reason=text(reason)), now, "Waiting", reason)


def _log(state: RepairState, now: datetime, what: str, reason: str) -> RepairState:
    entry = LogEntry(now, what, text(reason))
    if any((one.what, one.reason) == (entry.what, entry.reason) for one in state.log[-2:]):
        return state  # a node that is waited for gives the same answer every few seconds
    log = (*state.log, entry)
    if len(log) > MAX_LOG_ENTRIES:
        log = (log[0], *log[-MAX_LOG_ENTRIES + 1 :])
    return replace(state, log=log)


def _keep_health(state: RepairState, health: Health) -> RepairState:
    findings, unread = health.findings[:MAX_FINDINGS], health.unread[:MAX_FINDINGS]
    return replace(state, health=replace(health, findings=findings, unread=unread))
