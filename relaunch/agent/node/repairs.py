"""Orders that affect a whole node: diagnose its GPUs, reset them, reboot it.

Each holds the node exclusively, and only while no ranks run there. The controller decides which of
them are ordered, when, and how often; the findings of DCGM are not interpreted here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import List, Optional

from relaunch.agent import tools
from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.node import gpu_users, gpus, hold, reboots, resets
from relaunch.agent.protocol import (
    Fields,
    Json,
    NoAnswer,
    Refusal,
    now,
    refuse_field,
    refuse_if_late,
)
from relaunch.agent.ranks import standby
from relaunch.agent.state import read_boot_id

REBOOT_NVML_TIMEOUT = 3.0
"""Seconds. The caller of a reboot waits a few seconds for the answer, and a hung driver is a reason
for a reboot."""
REBOOT_COMMAND_TIMEOUT = 15.0
"""Seconds. `systemctl reboot` returns at once; if it asks and waits, the result is unknown."""
REPEAT_INTERVAL = 60.0
"""Seconds after the command in which the same reboot is not ordered again: services take that long
to stop."""
BUS_ID = re.compile("[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\\.[0-7]")


def diagnose(state: Path, order: Fields, caller: int) -> Json:
    """Run `dcgmi diag`; it is killed when the caller disconnects.

    No other process would read its findings, and a caller that retries must not find the node held.
    """
    id, level, fleet = order.text("id"), order.whole("level"), order.fleet()
    if level not in (1, 2, 3):
        refuse_field("level", level, "1, 2 or 3")
    until = time.monotonic() + order.number("within", least=0.1)
    with hold.hold_exclusive(state, "diagnose", id, fleet) as left:
        reach_failpoint(state, "diagnose.held")
        _refuse_if_used(state, left, until, fleet)
        words = _find_tool("dcgmi", ["diag", "-r", str(level), "-j"])
        if words is None:
            return {
                "outcome": "done",
                "boot_id": read_boot_id(state),
                "missing": "dcgmi is not on this node's PATH",
            }
        standby.end_all(state)  # only here: an order that is refused costs no job its warm restart
        result = _run_tool(state, "diagnose", words, until, caller)
        answer = {
            "outcome": "done",
            "boot_id": read_boot_id(state),
            "exit_code": result.exit_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
        }
        return {**answer, **({"cut": True} if result.is_truncated else {}), "took": result.duration}


def reset_gpus(state: Path, order: Fields) -> Json:
    id, expected, ids, fleet = (
        order.text("id"),
        order.text("boot_id"),
        order.strings("gpus"),
        order.fleet(),
    )
    for each in ids:
        if not BUS_ID.fullmatch(each):
            refuse_field("gpus", each, "bus ids like 00000000:05:00.0")
    until = time.monotonic() + order.number("within", least=0.1)
    with hold.hold_exclusive(state, "reset-gpus", id, fleet) as left:
        _refuse_another_boot(state, expected)
        _refuse_if_used(state, left, until, fleet)
        words = _find_tool(
            "nvidia-smi", ["--gpu-reset", *(["-i", ",".join(sorted(set(ids)))] if ids else [])]
        )
        if words is None:
            return {
                "outcome": "done",
                "boot_id": expected,
                "missing": "nvidia-smi is not on this node's PATH",
            }
        refuse_if_late("reset-gpus", order.order.get("until"))
        standby.end_all(state)
        reboots.record_log_position(state)
        result = _run_tool(state, "reset-gpus", [*choose_root_prefix(), *words], until)
        if result.exit_code == 0:
            resets.record_reset(state, id, list(ids), order.note("reason"), order.note("by"))
        return {
            "outcome": "done",
            "boot_id": expected,
            "exit_code": result.exit_code,
            "output": result.output_tail,
            "took": result.duration,
        }


def reboot(state: Path, order: Fields) -> Json:
    """End this boot. A repeated order for the same boot cannot cause a second reboot."""
    id, expected, reason, fleet = (
        order.text("id"),
        order.text("boot_id"),
        order.text("reason"),
        order.fleet(),
    )
    command = reboot_command()
    with hold.hold_exclusive(state, "reboot", id, fleet):
        _refuse_another_boot(state, expected)
        answer: Json = {"outcome": "done", "boot_id": expected}
        current = reboots.read_current(state)
        if (
            current is not None
            and current["ran"] is not None
            and now() - current["ran"] < REPEAT_INTERVAL
        ):
            if current["id"] == id:
                return {**answer, "already": True}
            raise Refusal("held", f"this node is being rebooted (reboot, {current['id']})")
        hold.refuse_if_busy(state, include_doomed=False, fleet=fleet)
        gpu_users.refuse_if_used(
            gpu_users.list_users(gpus.read(state, REBOOT_NVML_TIMEOUT), living_only=True)
        )
        refuse_if_late("reboot", order.order.get("until"))
        try:
            reboots.record(state, id, reason, order.note("by"))
        except OSError as error:
            raise Refusal(
                "cannot_reboot",
                f"the journal of reboots cannot be written: {error.strerror or error}",
            ) from error
        reach_failpoint(state, "reboot.recorded")
        failed = _order_reboot(command)
        if failed is not None:
            reboots.cancel(state, id, failed)
            raise Refusal("cannot_reboot", failed)
        reboots.record_run(state, id)
        return answer


def _find_tool(name: str, arguments: List[str]) -> Optional[List[str]]:
    path = shutil.which(name)
    return None if path is None else [path, *arguments]


def _run_tool(
    state: Path, name: str, words: List[str], until: float, caller: Optional[int] = None
) -> tools.ToolResult:
    try:
        return tools.run(
            words,
            max(0.1, until - time.monotonic()),
            tools.make_environment(state, name),
            caller,
        )
    except OSError as error:
        raise Refusal("cannot_start", f"{words[0]} cannot be run: {error.strerror}") from error


def _refuse_another_boot(state: Path, expected: str) -> None:
    boot_id = read_boot_id(state)
    if boot_id != expected:
        reason = f"this node runs boot {boot_id}; the order was decided on boot {expected}"
        raise Refusal("boot_changed", reason, boot_id=boot_id)


def _refuse_if_used(state: Path, left: List[int], until: float, fleet: str) -> None:
    """Refuse while ranks live here or a GPU is in use; without NVML, the tool decides."""
    hold.refuse_if_busy(state, fleet=fleet)
    if left:
        raise Refusal(
            "busy",
            f"processes {left[: hold.MAX_NAMED_PIDS]}, it seems of a killed examination, "
            "do not end",
            pids=left,
        )
    gpu_users.refuse_if_used(
        gpu_users.list_users(
            gpus.read(state, min(gpus.READ_TIMEOUT, max(0.1, (until - time.monotonic()) / 2)))
        )
    )


def reboot_command() -> List[str]:
    configured = os.environ.get("RELAUNCH_REBOOT_COMMAND")
    if configured:
        try:
            words = json.loads(configured)
        except ValueError:
            words = None
        if (
            not isinstance(words, list)
            or not words
            or not all(isinstance(word, str) and word for word in words)
        ):
            raise Refusal(
                "cannot_reboot",
                f"RELAUNCH_REBOOT_COMMAND is {configured[:120]!r}; expected a JSON list of words",
            )
        return list(words)
    if os.geteuid() != 0 and not choose_root_prefix():
        name = f"uid {os.geteuid()}"
        raise Refusal(
            "cannot_reboot",
            f"the agent runs as {name}, which may not reboot this node: "
            "log in as root, or write sudo: true under ssh: in the fleet file",
        )
    return [*choose_root_prefix(), "systemctl", "reboot"]


def choose_root_prefix() -> List[str]:
    """Return the prefix of a command that needs root.

    Only the fleet's operator can permit sudo, never the node.
    """
    return ["sudo", "-n"] if os.geteuid() != 0 and os.environ.get("RELAUNCH_SUDO") == "1" else []


def _order_reboot(words: List[str]) -> Optional[str]:
    """Run the command; return why it failed, or None."""
    try:
        result = tools.run(words, REBOOT_COMMAND_TIMEOUT)
    except OSError as error:
        return f"{words[0]} cannot be run: {error.strerror}"
    if result.exit_code is None:
        raise NoAnswer(f"{' '.join(words)} did not end within {REBOOT_COMMAND_TIMEOUT:g} s")
    if result.exit_code != 0:
        return f"{' '.join(words)} ended with {result.exit_code}: {result.output_tail[-400:]}"
    return None
