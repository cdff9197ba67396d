"""Runs one command of the agent as a container task.

The order is an argument, the answer is lines on stdout, the result is an exit code.

    python3 <agent> task probe '{"protocol": 1, …}'

Exit codes: 0, it answered and a diagnosis found nothing; 1, a diagnosis found a hardware fault; 2,
wrong usage; 3, inconclusive, also after an error of the agent itself. A reader of the answer should
judge by the answer: the exit code is for programs that cannot read logs. Python ends with 1, too,
where it cannot even begin.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from typing import Any, Iterator, List, Optional

from relaunch.agent.children import COMMANDS, write
from relaunch.agent.loop import parse
from relaunch.agent.protocol import Fields, Json, NoAnswer, Refusal, check_version, line
from relaunch.agent.state import open_state

KINDS = ("probe", "diagnose")
HOST_STATE = "/var/tmp/relaunch"
"""The state folder, unless RELAUNCH_AGENT_STATE names another: a folder of the host that the task
mounts at this path. State in the container alone would be lost with it."""
HEALTHY, FAULTY, MISUSED, INCONCLUSIVE = 0, 1, 2, 3
ANSWER = "relaunch-answer"
LONGEST = 200 * 1024
"""Bytes of a whole answer: it becomes part of a workflow's history, where the limit is two
megabytes."""
LINE = 12 * 1024
"""Bytes of one line. Docker splits lines at 16 KiB for most of its log drivers, CloudWatch Logs at
256 KiB."""
ROOTS = ("DCGM GPU Diagnostic", "DCGM Diagnostic", "iterations")
SOFTWARE = "Deployment"
"""DCGM's category of checks that do not touch the hardware. It also fails because of settings such
as persistence mode."""


def main(arguments: List[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in KINDS:
        sys.stderr.write(f"usage: python3 <agent> task {'|'.join(KINDS)} ORDER\n")
        return MISUSED
    os.environ.setdefault("RELAUNCH_AGENT_STATE", HOST_STATE)
    try:
        answer = _carry_out(arguments[0], arguments[1])
        for text in format_answer(answer):
            write(1, text.encode() + b"\n")
        return exit_code(arguments[0], answer)
    except BaseException as error:  # Python would end with 1, which means a faulty GPU
        if isinstance(error, (NoAnswer, TimeoutError)):
            reason = str(error)
        else:
            reason = traceback.format_exception_only(type(error), error)[-1].strip()
        with contextlib.suppress(OSError):
            sys.stderr.write(f"no answer: {reason}\n")
            sys.stderr.flush()
        return INCONCLUSIVE


def _carry_out(command: str, text: str) -> Json:
    caller, ends_it = os.pipe()

    def end(number: int, frame: Any) -> None:
        # Same as when the caller disconnects: the tool is ended in order before ECS kills
        # everything in the container.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(ends_it)

    # The first process of a container has no default action for SIGTERM.
    signal.signal(signal.SIGTERM, end)
    try:
        answer = COMMANDS[command](open_state(), _order(text), caller, 1)
        assert isinstance(answer, dict)  # neither of these two commands returns a Becoming
        return answer
    except Refusal as refused:
        return refused.answer


def _order(text: str) -> Fields:
    order = parse(text.encode())
    if order is None:
        raise Refusal("bad_order", "the order is no JSON object")
    return check_version(order)


# --- the answer on stdout


def format_answer(answer: Json) -> Iterator[str]:
    """Yield the lines of the answer; numbered if there is more than one."""
    whole = _short_enough(answer)
    parts = [whole[start : start + LINE] for start in range(0, len(whole), LINE)]
    for number, part in enumerate(parts, 1):
        yield f"{ANSWER}: {part}" if len(parts) == 1 else f"{ANSWER} {number}/{len(parts)}: {part}"


def _short_enough(answer: Json) -> str:
    """Return the answer as text, shortened to `LONGEST`; parts that were cut are marked as cut."""
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
        answer = {
            **answer,
            "kernel": {
                "unreadable": "its oldest lines are left out: it is too long",
                **answer["kernel"],
                "lines": lines,
            },
        }
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
    """Return the exit code of a diagnosis, without knowledge of DCGM's error codes.

    A result that is neither passed nor a hardware failure is inconclusive.
    """
    found = None if answer.get("cut") else diagnosis(answer.get("stdout", ""))
    results = [] if found is None else list(_results(found, ""))
    if any(status == "fail" and category != SOFTWARE for category, status in results):
        return FAULTY
    # dcgmi exits with 226 both for a broken GPU and for a wrong setting.
    passed = answer.get("exit_code") == 0 and any(status == "pass" for _, status in results)
    return HEALTHY if passed and all(status != "fail" for _, status in results) else INCONCLUSIVE


def diagnosis(stdout: str) -> Optional[Json]:
    """Return the document that `dcgmi diag -j` printed; other lines may precede it."""
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
    """Yield (category, status) of every result at any depth: DCGM 3 and 4 nest differently."""
    if isinstance(value, dict):
        category = value["category"] if isinstance(value.get("category"), str) else category
        if isinstance(value.get("status"), str):
            yield category, value["status"].lower()
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _results(inner, category)
