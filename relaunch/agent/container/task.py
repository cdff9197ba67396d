"""One command of the agent as a container task: its order is an argument, its answer lines on stdout, its end an exit code.

    python3 <agent> task probe '{"protocol": 1, …}'

Exit code 0: it answered, and a diagnosis found nothing; 1: a diagnosis found a fault of the hardware; 3: nothing can be said; 2: misused.
Whoever has the answer judges by that: the exit code is for those who cannot read logs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, Iterator, List, Optional

from relaunch.agent.children import COMMANDS, write
from relaunch.agent.loop import parse
from relaunch.agent.protocol import Fields, Json, NoAnswer, Refused, check_version, line
from relaunch.agent.state import open_state

KINDS = ("probe", "diagnose")
HOST_STATE = "/var/tmp/relaunch"
"""The state folder, unless RELAUNCH_AGENT_STATE says another: a folder of the host that the task mounts there. What lay in the container
alone would be forgotten with it."""
HEALTHY, FAULTY, MISUSED, INCONCLUSIVE = 0, 1, 2, 3
ANSWER = "relaunch-answer"
LONGEST = 200 * 1024
"""Bytes of a whole answer: it becomes part of a workflow's history, where two megabytes are the end."""
LINE = 12 * 1024
"""Bytes of one line. Docker cuts lines of 16 KiB for most of its log drivers, CloudWatch Logs those of 256 KiB."""
ROOTS = ("DCGM GPU Diagnostic", "DCGM Diagnostic", "iterations")
SOFTWARE = "Deployment"
"""DCGM's category of what is checked without touching the hardware. It fails for a setting such as persistence mode, too."""


def main(arguments: List[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in KINDS:
        sys.stderr.write(f"usage: python3 <agent> task {'|'.join(KINDS)} ORDER\n")
        return MISUSED
    os.environ.setdefault("RELAUNCH_AGENT_STATE", HOST_STATE)
    answer = _carried_out(arguments[0], arguments[1])
    if answer is None:
        return INCONCLUSIVE
    for text in told(answer):
        write(1, text.encode() + b"\n")
    return exit_code(arguments[0], answer)


def _carried_out(command: str, text: str) -> Optional[Json]:
    caller, ends_it = os.pipe()

    def end(number: int, frame: Any) -> None:
        # As if its caller had gone: the tool is ended in good order before ECS kills all that is in the container.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(ends_it)

    # A container's first process, which has no default way to end by SIGTERM.
    signal.signal(signal.SIGTERM, end)
    try:
        answer = COMMANDS[command](open_state(), _order(text), caller, 1)
        assert isinstance(answer, dict)  # neither of these two becomes something else
        return answer
    except Refused as refused:
        return refused.answer
    except (NoAnswer, TimeoutError) as error:
        sys.stderr.write(f"no answer: {error}\n")
        return None


def _order(text: str) -> Fields:
    order = parse(text.encode())
    if order is None:
        raise Refused("bad_order", "the order is no JSON object")
    return check_version(order)


# --- the answer on stdout


def told(answer: Json) -> Iterator[str]:
    """Its lines; numbered, where it is more than one."""
    whole = _short_enough(answer)
    parts = [whole[start : start + LINE] for start in range(0, len(whole), LINE)]
    for number, part in enumerate(parts, 1):
        yield f"{ANSWER}: {part}" if len(parts) == 1 else f"{ANSWER} {number}/{len(parts)}: {part}"


def _short_enough(answer: Json) -> str:
    """The answer as one text: what a node may print without end is cut, and said to be."""
    text = _text(answer)
    if len(text) > LONGEST and "stdout" in answer:
        found = diagnosis(answer["stdout"])
        if found is not None:  # most of what DCGM prints is indentation
            answer = {**answer, "stdout": json.dumps(found, separators=(",", ":"))}
            text = _text(answer)
    while len(text) > LONGEST and answer.get("stdout"):
        keep = len(answer["stdout"]) * LONGEST // (len(text) + LONGEST // 8)
        answer = {**answer, "stdout": answer["stdout"][:keep], "cut": True}
        text = _text(answer)
    lines = answer["kernel"]["lines"] if isinstance(answer.get("kernel"), dict) else []
    while len(text) > LONGEST and lines:
        lines = lines[(len(lines) + 1) // 2 :]
        answer = {**answer, "kernel": {"unreadable": "its oldest lines are left out: it is too long", **answer["kernel"], "lines": lines}}
        text = _text(answer)
    return text


def _text(answer: Json) -> str:
    return line(answer).decode().rstrip("\n")


# --- the exit code


def exit_code(command: str, answer: Json) -> int:
    if answer.get("outcome") != "done":
        return INCONCLUSIVE
    return HEALTHY if command == "probe" else _contract(answer)


def _contract(answer: Json) -> int:
    """Judge a diagnosis as far as that goes without knowing DCGM's errors: what is neither passed nor broken is inconclusive."""
    found = None if answer.get("cut") else diagnosis(answer.get("stdout", ""))
    results = [] if found is None else list(_results(found, ""))
    if any(status == "fail" and category != SOFTWARE for category, status in results):
        return FAULTY
    # dcgmi ends with 226 for a GPU that is broken and for a setting alike.
    passed = answer.get("exit_code") == 0 and any(status == "pass" for _, status in results)
    return HEALTHY if passed and all(status != "fail" for _, status in results) else INCONCLUSIVE


def diagnosis(stdout: str) -> Optional[Json]:
    """The document that `dcgmi diag -j` printed; other lines may come before it."""
    start = stdout.find("{")
    while start >= 0:
        try:
            found, _ = json.JSONDecoder().raw_decode(stdout, start)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and any(root in found for root in ROOTS):
            return found
        start = stdout.find("\n{", start)
        start += start >= 0
    return None


def _results(value: Any, category: str) -> Iterator[Any]:
    """(category, status) of every result, wherever it stands: versions 3 and 4 nest them in different ways."""
    if isinstance(value, dict):
        category = value["category"] if isinstance(value.get("category"), str) else category
        if isinstance(value.get("status"), str):
            yield category, value["status"].lower()
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _results(inner, category)
