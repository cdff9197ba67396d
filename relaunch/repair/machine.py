"""State machine of one repair: state and fact give the next state, state and time give a step.

An order that acts on the node is bound to the boot that was last probed. It is never given while
the node is in use, and never repeated without a probe. A repair is done only when the node was
examined afterwards and found healthy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, assert_never

from relaunch.evidence.catalog import Catalog
from relaunch.evidence.fields import last_line, text
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import LONGEST_ID, Health, read_health
from relaunch.evidence.nvml import bus_id
from relaunch.repair.examined import LOOK_AGAIN, diagnosed, examined, not_diagnosed
from relaunch.repair.explain import done_to, order_of, overdue, power_failed, question, verb_of
from relaunch.repair.guard import against
from relaunch.repair.power import (
    POWER_WITHIN,
    has_booted,
    instead,
    is_overdue,
    is_silent,
    may_follow,
    with_time_to_prove,
)
from relaunch.repair.record import again, ended, noted, with_health
from relaunch.repair.state import (
    Answered,
    AskPerson,
    CancelAsked,
    DeadlinePassed,
    Diagnose,
    Diagnosed,
    Fact,
    Finish,
    LookAgain,
    NoAnswer,
    OrderDone,
    OrderRefused,
    Permitted,
    PowerCycle,
    Probe,
    Probed,
    Reboot,
    RepairRules,
    RepairState,
    ResetGpus,
    Slept,
    Stage,
    Step,
)
from relaunch.spec.policy import Strategy

__all__ = [
    "Answered",
    "AskPerson",
    "CancelAsked",
    "DeadlinePassed",
    "Diagnose",
    "Diagnosed",
    "Fact",
    "Finish",
    "LookAgain",
    "NoAnswer",
    "OrderDone",
    "OrderRefused",
    "Permitted",
    "PowerCycle",
    "Probe",
    "Probed",
    "Reboot",
    "RepairRules",
    "RepairState",
    "ResetGpus",
    "Slept",
    "Stage",
    "Step",
    "begin",
    "learn",
    "next_step",
]

ARRIVES_WITHIN = timedelta(seconds=60)
"""A node writes an order to reboot into its journal within seconds. If it answers a minute later
without such an entry, the order never arrived."""
PROBE_WITHIN = timedelta(seconds=20)
"""A healthy node needs less than one second; a driver that hangs is given up after ten."""
RESET_WITHIN = timedelta(minutes=2)
"""nvidia-smi takes some seconds for each of eight GPUs."""
MAX_ORDERS = 2


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
        now + rules.repair_within if deadline is None else deadline,
        boot_id=boot_id,
        approved_by=text(approved_by, 80),
        power=power,
    )


def next_step(state: RepairState, now: datetime) -> Step:
    if state.outcome is not None:
        return Finish(state.outcome, state.verdict or Verdict.UNKNOWN, state.conclusion)
    if state.cancelled and not state.attempts:
        return Finish("refused", Verdict.UNKNOWN, f"cancelled: {state.cancelled}")
    if now >= _ends(state):
        return overdue(state)
    left = state.deadline - now
    if state.wait:
        return LookAgain(min(state.wait, left), state.waiting)
    match state.stage:
        case Stage.ASKING:
            return AskPerson(question(state), _ends(state), "repairs: ask")
        case Stage.LOOKING:
            return Probe(
                min(PROBE_WITHIN, left), None, f"whether one may {order_of(state)}: {state.reason}"
            )
        case Stage.PROVING:
            return Probe(
                min(PROBE_WITHIN, left),
                _since_order(state, now),
                f"whether the order to {order_of(state)} was carried out",
            )
        case Stage.EXAMINING:
            return Probe(
                min(PROBE_WITHIN, left),
                _since_order(state, now),
                f"{state.node} was {done_to(state)}: whether it is healthy now",
            )
        case Stage.DIAGNOSING:
            level = state.rules.level
            reason = (
                f"{state.node} was {done_to(state)}: whether it is healthy by dcgmi diag -r {level}"
            )
            return Diagnose(level, min(state.rules.examine_within, left), reason)
        case Stage.ORDERING:
            reason = state.reason + (
                f" (approved by {state.approved_by})" if state.approved_by else ""
            )
            if state.strategy is Strategy.RESET_GPU:
                return ResetGpus(state.boot_id, state.gpus, min(RESET_WITHIN, left), reason)
            if state.power:
                return PowerCycle(min(POWER_WITHIN, left), reason)
            return Reboot(state.boot_id, reason)
        case _:
            assert_never(state.stage)


def learn(state: RepairState, fact: Fact, catalog: Catalog, now: datetime) -> RepairState:
    """Apply the result of a step. A fact that answers no open step changes nothing."""
    if state.outcome is not None:
        return state
    ordered = state.stage in (Stage.ORDERING, Stage.PROVING)
    match fact:
        case Slept():
            return replace(state, wait=timedelta(0))
        case CancelAsked():
            # The cancel may have come while an order was on its way: `next_step` obeys it once
            # every known fact has been applied.
            reason = text(fact.reason) or "no reason given"
            if state.attempts and state.stage in (Stage.LOOKING, Stage.ASKING, Stage.ORDERING):
                state = replace(state, stage=Stage.PROVING, ask_until=None)
            return noted(replace(state, cancelled=reason), now, fact.kind, reason)
        case DeadlinePassed() if state.stage is Stage.ASKING or now >= state.deadline:
            return _out_of_time(state, now)
        case Answered() if state.stage is Stage.ASKING:
            return _answered(state, fact, now)
        case Permitted() if state.stage is Stage.ORDERING:
            return _permitted(state, fact, now)
        case Probed() if state.stage in (Stage.LOOKING, Stage.PROVING, Stage.EXAMINING):
            return _probed(state, fact, catalog, now)
        case NoAnswer() if state.stage is Stage.DIAGNOSING:
            return not_diagnosed(state, text(fact.reason), now)
        case NoAnswer() if state.stage is not Stage.ASKING:
            return _silent(state, text(fact.reason) or "no reason given", now)
        case Diagnosed() if state.stage is Stage.DIAGNOSING:
            return diagnosed(state, fact.answer, catalog, now)
        case OrderRefused() if state.stage is Stage.DIAGNOSING:
            return diagnosed(state, {"refused": fact.why, "reason": fact.reason}, catalog, now)
        case OrderDone() if ordered and fact.answer.get("outcome") != "done":
            return _silent(
                state, f"what {state.node} answered to the order cannot be read", now, unseen=False
            )
        case OrderDone() if ordered:
            return _done(_sent(state, now), fact.answer, now)
        case OrderRefused() if ordered:
            return _refused(_sent(state, now), fact, now)
        case (
            DeadlinePassed()
            | Answered()
            | Permitted()
            | Probed()
            | NoAnswer()
            | Diagnosed()
            | OrderDone()
            | OrderRefused()
        ):
            return state
        case _:
            assert_never(fact)


# --- before the order


def _probed(state: RepairState, fact: Probed, catalog: Catalog, now: datetime) -> RepairState:
    health = read_health(
        fact.facts,
        None,
        expected_gpus=state.rules.expected_gpus,
        level=state.rules.level,
        catalog=catalog,
    )
    if not health.boot_id:
        return _silent(state, f"its answer cannot be read: {health.reason}", now, unseen=False)
    if (
        state.power
        and state.stage is Stage.PROVING
        and not state.boot_id
        and not has_booted(state, health, now)
    ):
        state = replace(state, boot_id=health.boot_id)  # the boot that was to end is still running
    state = replace(
        noted(with_health(state, health), now, fact.kind, health.reason),
        silent="",
        unseen_since=None,
    )
    if health.held and health.held == text(state.id, LONGEST_ID):
        # An earlier order of this repair still runs there, and its answer was lost.
        return again(
            state,
            LOOK_AGAIN,
            now,
            f"what was ordered for this repair is still at work on {state.node}",
        )
    if state.stage is Stage.LOOKING:
        return _looked(state, health, now)
    if state.stage is Stage.PROVING:
        return _proven(state, health, now)
    return examined(state, health, now)


def _looked(state: RepairState, health: Health, now: datetime) -> RepairState:
    mine = next(
        (one for one in health.reboots if one.id == text(state.id, LONGEST_ID) and one.boot_id),
        None,
    )
    if state.strategy is Strategy.REBOOT_NODE and mine is not None and not state.power:
        # This repair was started before and lost its state (its workflow was reset) after it gave
        # the order.
        state = replace(
            state,
            stage=Stage.PROVING,
            boot_id=mine.boot_id,
            attempts=1,
            ordered_at=now,
            arrived=True,
        )
        return _proven(state, health, now)
    if state.boot_id and health.boot_id != state.boot_id:
        return _proven(state, health, now)
    state = replace(
        state,
        boot_id=health.boot_id,
        gpus=tuple(dict.fromkeys(bus_id(gpu, health.seen) or gpu for gpu in state.gpus)),
    )
    return _may_be_ordered(state, health, now)


def _may_be_ordered(state: RepairState, health: Health | None, now: datetime) -> RepairState:
    if reason := against(state, health, now):
        return ended(state, now, "refused", reason)
    if state.rules.mode == "observe":
        return ended(
            state,
            now,
            "refused",
            f"repairs: observe; it would have been allowed to {order_of(state)}: {state.reason}",
        )
    if state.rules.mode == "ask" and not state.approved_by:
        until = min(now + state.rules.answer_within, state.deadline)
        return noted(
            replace(state, stage=Stage.ASKING, ask_until=until), now, "Asked", question(state)
        )
    return replace(state, stage=Stage.ORDERING)


def _answered(state: RepairState, fact: Answered, now: datetime) -> RepairState:
    who = text(fact.by, 80) or "a person"
    why = f": {text(fact.reason)}" if text(fact.reason) else ""
    if now >= _ends(state):
        return _out_of_time(state, now)
    if not fact.approve:
        return ended(state, now, "refused", f"{who} said no{why}")
    # Hours may have passed since the node was last probed.
    state = replace(state, approved_by=who, stage=Stage.LOOKING, ask_until=None)
    return noted(state, now, fact.kind, f"{who} approved{why}")


def _permitted(state: RepairState, fact: Permitted, now: datetime) -> RepairState:
    reason = text(fact.reason) or "no reason given"
    if not fact.allowed:
        return ended(
            state,
            now,
            "refused",
            f"fleet {state.fleet} does not let it {order_of(state)}: {reason}",
        )
    # The answer took time, and a job may have begun to use the node.
    stage = Stage.PROVING if state.attempts else Stage.LOOKING
    return noted(
        replace(state, stage=stage),
        now,
        fact.kind,
        f"fleet {state.fleet} lets it {order_of(state)}: {reason}",
    )


# --- from the order to its proof


def _sent(state: RepairState, now: datetime) -> RepairState:
    if state.stage is not Stage.ORDERING:
        return state  # already counted: this answer is late
    silent = "it was not asked again since it was ordered"
    state = replace(
        state, stage=Stage.PROVING, attempts=state.attempts + 1, ordered_at=now, silent=silent
    )
    return with_time_to_prove(state, now) if state.power else state


def _silent(state: RepairState, reason: str, now: datetime, *, unseen: bool = True) -> RepairState:
    """Handle a missing or unusable answer. `unseen`: there was no answer at all, as far as is
    known."""
    ordered = state.stage is Stage.ORDERING
    since = state.unseen_since if ordered else (state.unseen_since or now) if unseen else None
    state = replace(_sent(state, now), silent=reason, unseen_since=since)
    said = f"{state.node} does not answer: {reason}"
    if state.power and ordered:
        return again(
            state,
            LOOK_AGAIN,
            now,
            f"whether the power of {state.node} was cycled is to be seen: {reason}",
        )
    if is_overdue(state, now):
        return _by_power(state, now, f"its reboot was not proven: {said}")
    if state.stage is Stage.LOOKING and is_silent(state, now):
        if may_follow(state):
            state = _by_power(state, now, said)
        if state.power:
            return _may_be_ordered(state, None, now)
    return again(state, LOOK_AGAIN, now, said)


def _by_power(state: RepairState, now: datetime, reason: str) -> RepairState:
    return noted(instead(state, now), now, "ByPower", f"{reason}; its power is cycled instead")


def _done(state: RepairState, answer: Mapping[str, Any], now: datetime) -> RepairState:
    state = replace(state, arrived=True)
    if state.power and (failed := power_failed(state.node, answer)):
        return ended(state, now, "refused", failed)
    if state.power:
        return again(state, LOOK_AGAIN, now, f"the power of {state.node} was cycled")
    if state.strategy is Strategy.REBOOT_NODE:
        return again(state, LOOK_AGAIN, now, f"{state.node} was told to reboot")
    if "missing" in answer:
        return ended(
            state,
            now,
            "refused",
            f"{state.node} cannot reset GPUs: {text(answer['missing']) or 'a tool is missing'}",
        )
    exit_code, said = (
        answer.get("exit_code"),
        last_line(answer.get("output")) or "it printed nothing",
    )
    if isinstance(exit_code, bool) or not isinstance(exit_code, int):
        return ended(
            state, now, "refused", f"nvidia-smi --gpu-reset on {state.node} did not finish: {said}"
        )
    if exit_code != 0:
        return ended(
            state,
            now,
            "refused",
            f"nvidia-smi --gpu-reset on {state.node} ended with {exit_code}: {said}",
        )
    state = replace(state, stage=Stage.EXAMINING, proven_at=now)
    return noted(state, now, "OrderDone", f"{state.node} was {done_to(state)}: {said}")


def _refused(state: RepairState, fact: OrderRefused, now: datetime) -> RepairState:
    if fact.why == "boot_changed":
        # The next probe shows which boot it is: the claim of a refusal does not count.
        return noted(
            state, now, fact.kind, f"{state.node} says that it has rebooted since that was decided"
        )
    reason = f"{state.node} refused to {verb_of(state)} ({text(fact.why, 40)}): {text(fact.reason) or 'no reason given'}"
    if fact.why == "cannot_reboot" and may_follow(state):
        return _by_power(replace(state, attempts=state.attempts - 1), now, reason)
    return ended(state, now, "refused", reason)


def _proven(state: RepairState, health: Health, now: datetime) -> RepairState:
    if health.boot_id != state.boot_id:
        state = replace(state, stage=Stage.EXAMINING, proven_at=now)
        before = state.boot_id or "one that nobody had read, and longer ago than it runs now"
        state = noted(
            state,
            now,
            "Proven",
            f"{state.node} has rebooted: boot id {health.boot_id}, before {before}",
        )
        return examined(state, health, now)
    if state.power:
        return again(state, LOOK_AGAIN, now, f"{state.node} still runs on boot id {state.boot_id}")
    if is_overdue(state, now):
        return _by_power(state, now, f"{state.node} still runs on boot id {state.boot_id}")
    if state.strategy is Strategy.RESET_GPU:
        if state.attempts >= MAX_ORDERS or state.cancelled:
            end = f"cancelled: {state.cancelled}; " if state.cancelled else ""
            times = f"{state.attempts} order{'s' * (state.attempts > 1)}"
            return ended(
                state,
                now,
                "ambiguous",
                f"{end}{times} to {order_of(state)} got no answer, and nobody knows whether it happened",
            )
    else:
        taken = state.arrived or any(one.id == text(state.id, LONGEST_ID) for one in health.reboots)
        state = replace(state, arrived=taken)
        early = state.ordered_at is not None and now - state.ordered_at < ARRIVES_WITHIN
        if taken or early or health.journal_unread:
            return again(
                state, LOOK_AGAIN, now, f"{state.node} still runs on boot id {state.boot_id}"
            )
        if state.cancelled:
            return ended(
                state,
                now,
                "refused",
                f"cancelled: {state.cancelled}; the order to {order_of(state)} never arrived",
            )
        if state.attempts >= MAX_ORDERS:
            return again(
                state,
                LOOK_AGAIN,
                now,
                f"{state.attempts} orders to {order_of(state)} have not arrived",
            )
    if reason := against(state, health, now):
        return ended(state, now, "refused", reason)
    return noted(
        replace(state, stage=Stage.ORDERING),
        now,
        "Again",
        f"the order to {order_of(state)} is given once more: no answer came",
    )


def _out_of_time(state: RepairState, now: datetime) -> RepairState:
    end = overdue(state)
    return ended(state, now, end.outcome, end.reason)


def _ends(state: RepairState) -> datetime:
    """Return when the wait for a person ends, or else the whole repair."""
    return state.deadline if state.ask_until is None else min(state.ask_until, state.deadline)


def _since_order(state: RepairState, now: datetime) -> timedelta | None:
    return None if state.ordered_at is None else max(timedelta(0), now - state.ordered_at)
