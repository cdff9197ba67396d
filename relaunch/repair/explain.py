"""Sentences of a repair for people: what it orders, what it asks, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, assert_never

from relaunch.evidence.fields import last_line, text
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health
from relaunch.evidence.nvml import short
from relaunch.repair.state import MAX_ORDERS, FinishRepair, RepairState, Stage
from relaunch.spec.policy import RepairKind, Strategy
from relaunch.text import join_names

MAX_NAMED_GPUS = 8
MAX_SENTENCE = 600


# --- the order


def describe_order(state: RepairState) -> str:
    """Return the order as an infinitive: `reboot n2`, `reset GPU 0000:05:00 on n2`."""
    if state.strategy is Strategy.REBOOT_NODE:
        return f"{'power-cycle' if state.power else 'reboot'} {state.node}"
    return f"reset {_name_gpus(state)} on {state.node}"


def kind_of_order(state: RepairState) -> RepairKind:
    if state.strategy is Strategy.RESET_GPU:
        return "reset-gpus"
    return "power-cycle" if state.power else "reboot"


def explain_other_approval(state: RepairState, approved: RepairKind | Literal[""]) -> str:
    """Return why an approval is not of the order that is asked about; an empty string if it is.

    A person answers minutes after having read the question. By then the repair may ask another.
    """
    if approved in ("", kind_of_order(state)):
        return ""
    return f"it asks whether to {describe_order(state)} now; what was approved is {approved}"


def explain_order(state: RepairState) -> str:
    """Return why the order is given, what it does, and which attempt it is."""
    if state.strategy is Strategy.RESET_GPU:
        doing = f"Resetting {_name_gpus(state)} on {state.node}"
    else:
        doing = f"{'Power-cycling' if state.power else 'Rebooting'} {state.node}"
    attempt = "" if state.power else f"; attempt {state.attempts + 1} of {MAX_ORDERS}"
    approval = f" (approved by {state.approved_by})" if state.approved_by else ""
    return text(f"{state.reason.rstrip('.')}. {doing}{attempt}{approval}", MAX_SENTENCE)


def describe_result(state: RepairState) -> str:
    """Return what was done to the node, as the beginning of a sentence: `n2 was rebooted`."""
    if state.strategy is Strategy.REBOOT_NODE and state.attempts:
        by_power = state.power and state.acknowledged
        return f"{state.node} was {'power-cycled' if by_power else 'rebooted'}"
    if state.strategy is Strategy.REBOOT_NODE or state.examined_boot_id not in ("", state.boot_id):
        return f"{state.node} was rebooted, but not by this repair,"
    return f"{state.node} had {_name_gpus(state)} reset"


def _name_gpus(state: RepairState) -> str:
    if not state.gpus:
        return "all GPUs"
    names = join_names(map(short, state.gpus), MAX_NAMED_GPUS)
    return f"GPU{'s' * (len(state.gpus) > 1)} {names}"


# --- questions and answers


def ask_approval(state: RepairState) -> str:
    order = describe_order(state)
    before = ""
    if state.health is not None and state.strategy is Strategy.REBOOT_NODE:
        before = f" ({_count(len(state.health.reboots), 'reboot')} in its journal)"
    question = f"{order[0].upper()}{order[1:]}{before}?"
    return text(f"{question} Requested by {state.by}: {state.reason}", MAX_SENTENCE)


# --- what the node's tools returned


def explain_failed_power_cycle(node: str, answer: Mapping[str, Any]) -> str:
    """Return why the power command did nothing, as a sentence; empty if it reports success.

    The text never quotes the command itself, which may hold a password.
    """
    if "missing" in answer:
        missing = text(answer["missing"]) or "a program is missing"
        return f"cannot power-cycle {node}: {missing}"
    program = text(answer.get("program"), 80) or "the power command"
    exit_code = _read_exit_code(answer)
    if exit_code is None:
        return f"the exit code of {program}, which power-cycles {node}, cannot be read"
    if exit_code == 0:
        return ""
    return f"{program} failed to power-cycle {node}: exit code {exit_code}: {read_output(answer)}"


def explain_failed_reset(node: str, answer: Mapping[str, Any]) -> str:
    """Return why no GPU was reset, as a sentence; empty if nvidia-smi reports success."""
    if "missing" in answer:
        return f"{node} cannot reset GPUs: {text(answer['missing']) or 'a tool is missing'}"
    command = f"nvidia-smi --gpu-reset on {node}"
    exit_code = _read_exit_code(answer)
    if exit_code is None:
        return f"{command} did not finish: {read_output(answer)}"
    if exit_code == 0:
        return ""
    return f"{command} failed with exit code {exit_code}: {read_output(answer)}"


def read_output(answer: Mapping[str, Any]) -> str:
    """Return the last line that the tool printed."""
    return last_line(answer.get("output")) or "no output"


def _read_exit_code(answer: Mapping[str, Any]) -> int | None:
    exit_code = answer.get("exit_code")
    return exit_code if isinstance(exit_code, int) and not isinstance(exit_code, bool) else None


# --- the end


def explain_verdict(state: RepairState, health: Health) -> str:
    """Return what was done to the node, and how it is now."""
    did = describe_result(state)
    match health.verdict:
        case Verdict.HEALTHY:
            return f"{did} and is healthy: {health.reason}"
        case Verdict.UNHEALTHY:
            return f"{did} and is still unhealthy: {health.reason}"
        case Verdict.UNKNOWN:
            return explain_unknown_health(state, health.reason)
        case _:
            assert_never(health.verdict)


def explain_unknown_health(state: RepairState, reason: str) -> str:
    return f"{describe_result(state)} but its health is unknown: {reason}"


def explain_timeout(state: RepairState) -> FinishRepair:
    """Return how the repair ends when its time, or the time for a person's answer, is over."""
    node, order = state.node, describe_order(state)
    match state.stage:
        case Stage.ASKING:
            until = f" by {state.ask_until:%H:%M} UTC" if state.ask_until else ""
            return _end("refused", f"the request to {order} was not answered{until}")
        case Stage.CHECKING | Stage.ORDERING if state.missing_answer or state.health is None:
            missing = state.missing_answer or "no probe was sent"
            return _end("ambiguous", f"{node} did not answer: {missing}")
        case Stage.CHECKING | Stage.ORDERING:
            return _end("refused", f"the deadline passed before the order to {order}")
        case Stage.PROVING if state.strategy is Strategy.REBOOT_NODE and not state.missing_answer:
            orders = "the order" if state.power else _count(state.attempts, "order")
            had = f"{orders} to {order} had no effect"
            return _end("refused", f"{had}: it still runs boot id {state.boot_id}")
        case Stage.PROVING:
            missing = state.missing_answer or "the order was not answered"
            unknown = f"whether the order to {order} was carried out is unknown"
            return _end("ambiguous", f"{unknown}: {missing}")
        case Stage.EXAMINING | Stage.DIAGNOSING:
            last = state.missing_answer or state.wait_reason or "it was not examined"
            late = f"{describe_result(state)} but its examination did not end in time"
            return _end("refused", f"{late}: {last}")
        case _:
            assert_never(state.stage)


def _end(outcome: Literal["refused", "ambiguous"], reason: str) -> FinishRepair:
    return FinishRepair(outcome, Verdict.UNKNOWN, reason)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
