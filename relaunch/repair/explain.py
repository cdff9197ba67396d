"""Describe a repair in words: the question to a person, the name of an order, and how a repair ends
that ran out of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from relaunch.evidence.fields import last_line, text
from relaunch.evidence.findings import Verdict
from relaunch.evidence.nvml import short
from relaunch.repair.state import Finish, RepairState, Stage
from relaunch.spec.policy import Strategy

NAMED_GPUS = 8


def question(state: RepairState) -> str:
    so_far = ""
    if state.health is not None and state.strategy is Strategy.REBOOT_NODE:
        reboots = len(state.health.reboots)
        so_far = f" ({reboots} reboot{'s' * (reboots != 1)} in its journal)"
    return text(
        f"may relaunch {order_of(state)}{so_far}? {state.by} asks for it: {state.reason}", 600
    )


def order_of(state: RepairState) -> str:
    return (
        f"{verb_of(state)} {state.node}"
        if state.strategy is Strategy.REBOOT_NODE
        else f"{verb_of(state)} of {state.node}"
    )


def verb_of(state: RepairState) -> str:
    if state.strategy is Strategy.REBOOT_NODE:
        return "power cycle" if state.power else "reboot"
    names = ", ".join(short(gpu) for gpu in state.gpus[:NAMED_GPUS])
    more = f" and {len(state.gpus) - NAMED_GPUS} more" if len(state.gpus) > NAMED_GPUS else ""
    return f"reset GPU{'s' * (len(state.gpus) > 1)} {names}{more}" if names else "reset all GPUs"


def done_to(state: RepairState) -> str:
    if state.strategy is Strategy.REBOOT_NODE:
        by_power = state.power and state.arrived
        return (
            ("power-cycled" if by_power else "rebooted")
            if state.attempts
            else "rebooted by somebody else"
        )
    if state.examined_on not in ("", state.boot_id):
        return "rebooted by somebody else"
    return verb_of(state).replace("reset ", "given a reset of ", 1)


def power_failed(node: str, answer: Mapping[str, Any]) -> str:
    """Return why the power command did nothing, as a sentence; empty if it reports success.

    The text never quotes the command itself, which may hold a password.
    """
    program, said = (
        text(answer.get("program"), 80) or "the power command",
        last_line(answer.get("output")) or "it printed nothing",
    )
    if "missing" in answer:
        return f"the power of {node} cannot be cycled: {text(answer['missing']) or 'a program is missing'}"
    exit_code = answer.get("exit_code")
    if isinstance(exit_code, bool) or not isinstance(exit_code, int):
        return f"how {program} ended, which was to cycle the power of {node}, cannot be read"
    return (
        ""
        if exit_code == 0
        else f"{program}, which was to cycle the power of {node}, ended with {exit_code}: {said}"
    )


def overdue(state: RepairState) -> Finish:
    """Return how the repair ends when its time, or the time for a person's answer, is over."""
    unknown = Verdict.UNKNOWN
    match state.stage:
        case Stage.ASKING:
            until = f" until {state.ask_until:%H:%M} UTC" if state.ask_until else ""
            return Finish("refused", unknown, f"nobody said{until} whether to {order_of(state)}")
        case Stage.LOOKING | Stage.ORDERING if state.silent or state.health is None:
            return Finish(
                "ambiguous",
                unknown,
                f"{state.node} did not answer: {state.silent or 'it was not asked'}",
            )
        case Stage.LOOKING | Stage.ORDERING:
            return Finish(
                "refused",
                unknown,
                f"the time to {order_of(state)} was over before it could be ordered",
            )
        case Stage.PROVING if state.power and not state.silent:
            return Finish(
                "refused",
                unknown,
                f"the power of {state.node} was to be cycled, and it still runs on boot id {state.boot_id}",
            )
        case Stage.PROVING if state.strategy is Strategy.REBOOT_NODE and not state.silent:
            times = f"{state.attempts} order{'s' * (state.attempts != 1)}"
            return Finish(
                "refused",
                unknown,
                f"{times} to reboot {state.node}, and it still runs on boot id {state.boot_id}",
            )
        case Stage.PROVING:
            reason = f"whether the order to {order_of(state)} was carried out is not known: {state.silent or 'no answer came to the order'}"
            return Finish("ambiguous", unknown, reason)
        case Stage.EXAMINING | Stage.DIAGNOSING:
            last = state.silent or state.waiting or "it was not examined"
            return Finish(
                "refused",
                unknown,
                f"{state.node} was {done_to(state)}, but whether it helped was not known in time: {last}",
            )
        case _:
            assert_never(state.stage)
