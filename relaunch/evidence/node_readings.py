"""Read a probe's facts about a node other than GPUs: disks, memory, kernel log, clock, scheduler.

Each reader returns its findings and what could not be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relaunch.evidence.catalog import Catalog
from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import LATEST, MOST, count, fields, text, unreadable
from relaunch.evidence.findings import Finding, Role
from relaunch.evidence.kernel_log import read_kernel_log
from relaunch.evidence.nvml import GpuReading, bus_id

MAX_DISKS = 8
MAX_LINES = 200
"""Maximum number of kernel log lines, the newest: as many as agents send."""
MAX_RESETS = 64
MIN_FREE = 1 << 20
"""Bytes on the disk of the agent's state.

The files of one launch (orders, journals, exit codes) do not fit into less.
"""
MIN_MEMORY = 0.01
"""Share of the memory; with less available, the kernel is about to kill a process."""
CLOCK_SHOWN, CLOCK_NAMED = 5.0, 60.0
"""Seconds of certain clock offset above which it is a finding, and named beside the verdict.

It never decides the verdict, because relaunch's own rules use each node's CLOCK_BOOTTIME. An offset
of seconds mixes up the logs of two nodes; one of minutes breaks certificates, tokens and Kerberos,
which refuses at five minutes (RFC 4120).
"""


def read_ecs_health(facts: Mapping[str, Any], _: Catalog) -> tuple[list[Finding], list[str]]:
    if facts.get("ecs_health") != "IMPAIRED":
        return [], []
    # ECS does not say why: containers that cannot be started for a while, or accelerators.
    return [
        Finding(
            "ecs",
            "container instance impaired",
            Role.SYMPTOM,
            "ECS calls its container instance IMPAIRED",
        )
    ], []


def read_disks(facts: Mapping[str, Any], _: Catalog) -> tuple[list[Finding], list[str]]:
    rows = facts.get("disks")
    if not isinstance(rows, list) or not rows:
        return [], [
            f"disks: {unreadable(rows)}" if not isinstance(rows, list) else "disks: none is listed"
        ]
    findings, unread = [], []
    for position, row in enumerate(rows[:MAX_DISKS]):
        of_state = position == 0  # the disk of the agent's state comes first
        row = fields(row)  # noqa: PLW2901 (None where it is no object)
        named = text(row.get("path"), 80) if row else ""
        path = named or f"disk {position}"
        free, writable = (count(row.get("free")), row.get("writable")) if row else (None, None)
        inodes = row.get("inodes_free", "") if row else ""
        if (
            row is None
            or free is None
            or not isinstance(writable, bool)
            or (inodes is not None and count(inodes) is None)
        ):
            unread.append(f"disk {named or position} cannot be read")
        role, cause = (Role.ROOT, Cause.NODE_FAULT) if of_state else (Role.SYMPTOM, None)
        if row is not None and writable is False:
            words = f"{path} cannot be written to: {text(row.get('reason')) or 'no reason given'}"
            # On a healthy node, too, an ordinary user may not write to `/`.
            findings.append(
                Finding("node", "disk", role if of_state else Role.INFORMATION, words, cause)
            )
        elif free is not None and free < MIN_FREE:
            findings.append(
                Finding("node", "disk", role, f"{path} is full: less than 1 MiB is free", cause)
            )
        elif inodes == 0 and not isinstance(inodes, bool):
            findings.append(
                Finding("node", "disk", role, f"{path} is full: no inode is free", cause)
            )
    return findings, unread


def read_memory(facts: Mapping[str, Any], _: Catalog) -> tuple[list[Finding], list[str]]:
    found = fields(facts.get("memory"))
    total = count(found.get("total")) if found else None
    available = count(found.get("available")) if found else None
    if not total or available is None:
        return [], [f"memory: {unreadable(facts.get('memory'))}"]
    if available >= MIN_MEMORY * total:
        return [], []
    words = f"{available >> 20} of {total >> 20} MiB of its memory are available"
    return [Finding("node", "memory", Role.SYMPTOM, words)], []


def read_kernel(
    facts: Mapping[str, Any], catalog: Catalog, gpus: GpuReading
) -> tuple[list[Finding], list[str]]:
    log = facts.get("kernel")
    lines = log.get("lines") if isinstance(log, Mapping) else None
    kept = [
        _make_encodable(line)
        for line in (lines[-MAX_LINES:] if isinstance(lines, list) else ())
        if isinstance(line, str)
    ]
    healed, counting = _split_healed(kept, _find_healed(facts, gpus), catalog, gpus)
    findings = [_close_healed(found) for found in read_kernel_log(healed, catalog)]
    findings += read_kernel_log(counting, catalog)
    findings = [_bound_finding(found) for found in findings]
    if fields(log) is None or not isinstance(lines, list):
        # On many hosts only root may read it, and those nodes must be repairable, too.
        words = (
            f"its kernel log cannot be read: {unreadable(log if fields(log) is None else lines)}"
        )
        findings.append(Finding("node", "kernel log unreadable", Role.INFORMATION, words))
    return findings, []


_ALL_GPUS = ""
"""Stands for all GPUs, and with them the NVSwitches."""


def _find_healed(facts: Mapping[str, Any], gpus: GpuReading) -> dict[str, float]:
    """Return the GPUs that were reset on this boot and work now, with the uptime of the reset.

    What healed a GPU is confirmed by each examination again: one that NVML cannot read in full may
    still have the fault that it was reset for.
    """
    rows = facts.get("resets")
    healed: dict[str, float] = {}
    for row in rows[-MAX_RESETS:] if isinstance(rows, list) else ():
        uptime = seconds(row.get("uptime")) if isinstance(row, Mapping) else None
        named = row.get("gpus") if isinstance(row, Mapping) else None
        if uptime is None or not isinstance(named, list):
            continue
        names = [bus_id(gpu, gpus.seen) if isinstance(gpu, str) else None for gpu in named]
        is_all_read = bool(gpus.read_in_full) and len(gpus.read_in_full) == gpus.working
        if not named and is_all_read and not gpus.unread:
            names = [_ALL_GPUS, *gpus.read_in_full]
        elif not named:
            names = list(gpus.read_in_full)
        healed.update({gpu: uptime for gpu in names if gpu in (_ALL_GPUS, *gpus.read_in_full)})
    return healed


def _split_healed(
    lines: list[str], healed: Mapping[str, float], catalog: Catalog, gpus: GpuReading
) -> tuple[list[str], list[str]]:
    """Return the lines about a GPU from before the reset that healed it, and all others."""
    if not healed:
        return [], lines
    before: list[str] = []
    counting: list[str] = []
    for line in lines:
        found = next(iter(read_kernel_log([line], catalog)), None)
        gpu = bus_id(found.gpu, gpus.seen) if found is not None and found.gpu else None
        reset_at = healed.get(gpu, healed.get(_ALL_GPUS)) if gpu is not None else None
        at = found.at if found is not None else None
        is_healed = at is not None and reset_at is not None and at < reset_at
        (before if is_healed else counting).append(line)
    return before, counting


def _close_healed(found: Finding) -> Finding:
    """Return what a reset healed as information; one that needs more than a reset stays."""
    if found.cause is Cause.GPU_FATAL:
        return found
    return replace(
        found,
        role=Role.INFORMATION,
        cause=None,
        reason=f"{found.reason}; the GPU was reset since and works",
    )


def clock_offset(facts: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return how many seconds the node's clock is ahead of the controller's, and the error bound.

    The bound is half of the round trip, as in RFC 5905, section 8. None: not known.
    """
    exchange = facts.get("exchange")
    sent, received = (
        (seconds(exchange.get(name)) for name in ("sent", "received"))
        if isinstance(exchange, Mapping)
        else (None, None)
    )
    arrived, answered = seconds(facts.get("wall")), seconds(facts.get("answered"))
    answered = arrived if answered is None else answered
    if sent is None or received is None or arrived is None or answered is None:
        return None
    return ((arrived - sent) + (answered - received)) / 2, max(
        0.0, (received - sent) - (answered - arrived)
    ) / 2


def read_clock(facts: Mapping[str, Any], _: Catalog) -> tuple[list[Finding], list[str]]:
    known = clock_offset(facts)
    if known is None:
        return [], []
    offset, within = known
    if abs(offset) - within <= CLOCK_SHOWN:
        return [], []
    words = (
        f"its clock is {abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'} (±{within:.1f} s)"
    )
    role = Role.SYMPTOM if abs(offset) - within > CLOCK_NAMED else Role.INFORMATION
    return [Finding("node", "clock", role, words)], []


def seconds(value: object) -> float | None:
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LATEST
        else None
    )


def _make_encodable(line: str) -> str:
    return line.encode("utf-8", "replace").decode()


def _bound_finding(found: Finding) -> Finding:
    """Return a finding with bounded values: a line may have a thousand digits for a number."""
    at = found.at if found.at is not None and found.at < MOST else None
    return replace(
        found,
        reason=text(found.reason),
        gpu=found.gpu and found.gpu[:40],
        pid=count(found.pid),
        at=at,
    )
