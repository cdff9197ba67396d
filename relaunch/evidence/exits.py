"""Read the end of a process: exit code or signal, last log lines, and why ECS stopped its task."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from relaunch.evidence.catalog import Catalog, ExitRow, NpuRow
from relaunch.evidence.catalog.signals import SIGNALS
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Finding, Role, Source

SIGKILL = 9
NEGATED = (4, 6, 7, 8, 9, 11, 15)
"""Signals that Python programs pass on as `sys.exit(-n)`, which the kernel turns into 256 - n.

For other signals, 256 - n is as likely to be an unrelated exit code.
"""
MAX_LINE = 2000
"""Characters of a line that are searched: faults are named near its start; matching takes time."""
EXCERPT = 200

_RANK = re.compile(r"^\s*(?:\[(?:rank|default)\d+\]:\s?|\[rank \d+\] )+")
"""The prefix with which torch, torchrun and `relaunch logs` mark a rank's line."""


def read_exit(
    exit_code: int | None,
    signal: int | None,
    *,
    stopped: bool,
    kernel: tuple[Finding, ...],
    pid: int | None,
    catalog: Catalog,
) -> Finding:
    """Return the finding of a process's exit, together with the findings of its node's kernel log.

    Args:
        exit_code: The process's exit code; negative for a signal; None: not known.
        signal: The signal that ended it, if one did.
        stopped: Whether relaunch stopped the process itself.
        kernel: Findings of the same node's kernel log since this launch.
        pid: The process's pid, if known.
        catalog: The catalog with the user's overrides.
    """
    if signal is None and exit_code is not None and exit_code < 0:
        signal = -exit_code
    inner: int | None
    if signal is not None:
        code = signal_name(signal)
        how, inner = f"killed by {code}", signal
    elif exit_code is not None:
        code, inner = f"exit {exit_code}", _decode_signal(exit_code)
        how = f"exited with code {exit_code}" + (
            f", which stands for {signal_name(inner)}" if inner is not None else ""
        )
    else:
        return Finding(
            "exit",
            "exit unknown",
            Role.SYMPTOM,
            "it is not known how it ended",
            Cause.UNKNOWN,
            pid=pid,
        )
    if exit_code == 0 and signal is None:
        return Finding("exit", code, Role.INFORMATION, "it ended well", pid=pid)
    if stopped:
        return Finding("exit", code, Role.CASCADE, f"{how}: we stopped it", pid=pid)
    if inner == SIGKILL and (killer := _find_memory_kill(kernel, pid, direct=signal is not None)):
        return Finding(
            "exit", code, Role.ROOT, f"{how}: {killer.reason}", Cause.OUT_OF_MEMORY, pid=pid
        )
    row = catalog.exits.get(code) or (
        catalog.exits.get(signal_name(inner)) if inner is not None else None
    )
    return _make_finding(row, code, how, pid, by_signal=inner is not None)


def _make_finding(
    row: ExitRow | None, code: str, how: str, pid: int | None, *, by_signal: bool
) -> Finding:
    if row is not None:
        return Finding("exit", code, row.role, f"{how}: {row.meaning}", row.cause, pid=pid)
    if by_signal:
        return Finding(
            "exit", code, Role.SYMPTOM, f"{how}: the sender is unknown", Cause.UNKNOWN, pid=pid
        )
    return Finding("exit", code, Role.WRAPPER, how, Cause.APPLICATION, pid=pid)


def _find_memory_kill(
    kernel: tuple[Finding, ...], pid: int | None, *, direct: bool
) -> Finding | None:
    """Return the kernel's finding that it killed this process for memory; None: there is none.

    Where the killed process's pid is not known, a finding about a process that looks like a rank is
    returned. A process that exits with code 137 was not killed itself: a child of it was, whose pid
    is not known here.
    """
    kills = [found for found in kernel if found.code == "oom-kill"]
    named = next((kill for kill in kills if pid is not None and kill.pid == pid), None)
    # The line that names the killed process may be missing, behind a long list of tasks.
    is_other = any(kill.pid is not None for kill in kills)
    if named or (direct and pid is not None and is_other):
        return named
    return next((kill for kill in kills if kill.role is Role.CONFIRMATION), None)


def _decode_signal(exit_code: int) -> int | None:
    """Return the signal that a shell (128 + n) or a Python program (256 - n) exits with as code."""
    if exit_code - 128 in SIGNALS:
        return exit_code - 128
    return 256 - exit_code if 256 - exit_code in NEGATED else None


def signal_name(number: int) -> str:
    return SIGNALS.get(number, f"signal {number}")


def strip_rank(line: str) -> str:
    """Return a line without the prefix with which torch, torchrun or `logs` marks its rank."""
    return _RANK.sub("", line)


def read_log(lines: Iterable[str], catalog: Catalog) -> tuple[Finding, ...]:
    """Return one finding for each line that a catalog row matches, in the order of the lines.

    Advice is dropped, because it repeats the words of faults.
    """
    found = []
    for text in lines:
        for line in text.splitlines():
            if finding := read_log_line(strip_rank(line[:MAX_LINE]), catalog):
                found.append(finding)
    return tuple(found)


def read_log_line(line: str, catalog: Catalog) -> Finding | None:
    """Return the finding of one line without its rank's prefix; None: no row matches it."""
    if not catalog.may_match(line):
        return None
    # Advice often follows the fault on the same line, as in the message of torch.OutOfMemoryError.
    starts = [found.start() for advice in catalog.advice_lines if (found := advice.search(line))]
    line = line[: min(starts, default=len(line))]
    for row in catalog.log_lines:
        if match := row.pattern.search(line):
            role, cause, meaning = row.role, row.cause, row.meaning
            if code := match.groupdict().get("npu"):
                if (npu := catalog.npu_codes.get(code.upper())) is None:
                    continue  # other programs have event ids as well
                return read_npu_code(npu, "log", line.strip()[:EXCERPT])
            number = match.groupdict().get("xid")
            if number and (xid := catalog.xids.get(int(number))):
                role, cause, meaning = xid.role, xid.cause, f"Xid {number}, {xid.meaning}"
            return Finding(
                "log",
                f"log {row.id}",
                role,
                f"{meaning}: {line.strip()[:EXCERPT]}",
                cause,
                vague=row.vague,
            )
    return None


def read_npu_code(row: NpuRow, source: Source, line: str = "") -> Finding:
    """Return the finding of a fault code of an Ascend NPU, with the line that names it."""
    code = f"NPU {row.code}"
    reason = f"{code} ({row.part}), {row.meaning}" if row.part else f"{code}, {row.meaning}"
    return Finding(source, code, row.role, f"{reason}: {line}" if line else reason, row.cause)


def read_ecs_stop(
    stop_code: str | None, reason: str, exit_code: int | None, catalog: Catalog
) -> Finding:
    """Return the finding of why ECS stopped a task.

    A task that ended by itself is read by its exit code.

    Args:
        stop_code: The stop code that ECS gives; None: none.
        reason: The reason of the task and those of its containers.
        exit_code: Exit code of the container that trains; None: it has none, and did not succeed.
        catalog: The catalog with the user's overrides.
    """
    what = f"ended (ECS: {stop_code or 'no stop code'})"
    suffix = f" ({reason[:EXCERPT]})" if reason else ""
    for row in catalog.ecs_stops:
        if row.stop_code in ("", stop_code) and (row.reason is None or row.reason.search(reason)):
            return Finding(
                "ecs",
                f"ecs {stop_code or 'unknown'}",
                row.role,
                f"{what}: {row.meaning}{suffix}",
                row.cause,
            )
    if exit_code is not None:
        read = read_exit(exit_code, None, stopped=False, kernel=(), pid=None, catalog=catalog)
        return replace(read, source="ecs", reason=f"{what}: {read.reason}{suffix}")
    why = (
        "it ended without an exit code"
        if stop_code == "EssentialContainerExited"
        else "our catalog does not know this stop"
    )
    return Finding(
        "ecs",
        f"ecs {stop_code or 'unknown'}",
        Role.SYMPTOM,
        f"{what}: {why}{suffix}",
        Cause.UNKNOWN,
    )
