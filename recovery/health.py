"""The verdict on one node: what its probe and its `dcgmi diag` say together, the gravest first.

Healthy is only a node of which everything was read that had to be. It says nothing of what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from recovery.catalog import Catalog
from recovery.causes import HARDWARE_CAUSES, Cause
from recovery.dcgm import Examination, read_diag
from recovery.evidence import Finding, Role, Verdict
from recovery.facts import LATEST, MOST, count, fields, moment, text, unreadable
from recovery.kernel_log import read_kernel_log
from recovery.nvml import bus_id, read_gpus

SICK = (Cause.GPU_FATAL, Cause.GPU_RESET, Cause.NODE_FAULT)
"""Causes that a node is unhealthy for. Networks, file servers and programs fail on healthy nodes, and what is transient is over."""
NOT_DIAGNOSED = "dcgmi diag was not run"
MAX_FINDINGS = 64
LONGEST_ID = 200
"""Of a repair or an examination: the longest names of a fleet and a node, and a run."""
MAX_LINES = 200
"""Of a kernel log, the newest: what agents send."""
MAX_NAMED = 8
"""Of those who hold a node; the rest are counted."""
MAX_REBOOTS = 20
"""Of a node's journal, the newest: what agents send."""
MIN_FREE = 1 << 20
"""Bytes on the disk of the agent's state: what one launch writes there (orders, journals, exit codes) no longer fits into less."""
MIN_MEMORY = 0.01
"""Of the memory; with less available, the kernel is about to kill something."""
CLOCK_SHOWN, CLOCK_NAMED = 5.0, 60.0
"""Seconds that a node's clock may be off, for certain, before that is among its findings, and before it is named beside its verdict. It is
never a verdict: relaunch's own rules count on each node's CLOCK_BOOTTIME. Seconds mix up the logs of two nodes; minutes break certificates,
tokens and Kerberos, which refuses at five (RFC 4120)."""

_ROLES = tuple(Role)
_BOOT_ID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Reboot:
    """An entry of a node's own journal."""

    at: datetime
    """By the node's clock."""
    because: str
    id: str = ""
    """Of the repair that ordered it."""
    boot_id: str = ""
    """The boot it ended."""


@dataclass(frozen=True, slots=True)
class Health:
    verdict: Verdict
    because: str
    """What made it so, the gravest first; of a healthy node what was examined."""
    findings: tuple[Finding, ...] = ()
    """The gravest first."""
    gpus: tuple[str, ...] = ()
    """Bus ids of the GPUs it is unhealthy for."""
    boot_id: str = ""
    """Empty: not read."""
    busy: tuple[str, ...] = ()
    """Who holds the node, as far as can be told: `job llama generation 3`, `pid 4242 uses GPU 0000:05:00`; empty: it is free."""
    reboots: tuple[Reboot, ...] = ()
    """The oldest first, of the node's own journal."""
    journal_unread: str = ""
    """Why its journal of reboots cannot be read, which is not the same as no reboots; empty: it was."""
    held: str = ""
    """Id of the examination or repair that holds the node now; it is among `busy`, too."""
    clock: datetime | None = None
    """The node's own."""
    uptime: float | None = None
    """Seconds that this boot has lasted, by the node's CLOCK_BOOTTIME; None: not read."""
    working: int | None = None
    """GPUs that NVML reads; None: it could not be asked."""
    seen: tuple[str, ...] = ()
    """Bus id of each GPU by its index; empty where it is not known."""
    examined: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """What is in the way of calling it healthy."""


def read_health(
    facts: Mapping[str, Any] | None,
    diag: Mapping[str, Any] | None,
    *,
    expected_gpus: int,
    level: int,
    catalog: Catalog,
    unread: str = "",
) -> Health:
    """Judge a node by what it answered.

    Args:
        facts: The answer to a probe; None where there was none.
        diag: The answer to diagnose, a refusal as `{"refused": why, "because": …}`; None where it was not asked.
        expected_gpus: What the fleet file says.
        level: Of `dcgmi diag`; 0: it is not asked for.
        catalog: With the user's overrides.
        unread: Why there is no answer to the probe.
    """
    if not isinstance(facts, Mapping) or facts.get("outcome") != "done":
        said = text(facts.get("because")) if isinstance(facts, Mapping) else ""
        why = text(unread) or said or "it did not answer a probe"
        return Health(Verdict.UNKNOWN, why, busy=("who uses it is not known",), journal_unread=why, unread=(why,))
    health = _probed(facts, expected_gpus, catalog)
    if diag is not None:
        return with_diag(health, diag, level=level, catalog=catalog)
    if expected_gpus and level:
        health = replace(health, unread=(*health.unread, NOT_DIAGNOSED))
    return _judged(health)


def with_diag(health: Health, diag: Mapping[str, Any], *, level: int, catalog: Catalog) -> Health:
    """The verdict with what `dcgmi diag` says besides."""
    health = replace(health, unread=tuple(clause for clause in health.unread if clause != NOT_DIAGNOSED))
    stdout, exit_code = diag.get("stdout"), diag.get("exit_code", "")
    missing = ""
    if "refused" in diag:
        missing = f"dcgmi diag was refused ({text(diag['refused'])}): {text(diag.get('because'))}"
    elif diag.get("outcome") != "done":
        missing = f"dcgmi diag: {unreadable(diag.get('outcome'))}"
    elif "missing" in diag:
        missing = f"dcgmi diag: {text(diag['missing']) or 'a tool is missing'}"
    elif diag.get("boot_id") != health.boot_id or not health.boot_id:
        missing = "it is not the same boot that was probed and diagnosed"
    elif not isinstance(stdout, str) or isinstance(exit_code, bool) or not isinstance(exit_code, int | None):
        missing = "what dcgmi diag printed and how it ended cannot be read"
    if missing:
        return _judged(replace(health, unread=(*health.unread, missing)))
    examination = read_diag(stdout or "", exit_code, catalog.dcgm, level=level)
    if examination.verdict is Verdict.HEALTHY and diag.get("cut") is not None and diag["cut"] is not False:
        return _judged(replace(health, unread=(*health.unread, "the output of dcgmi diag is cut short")))
    return _judged(replace(health, findings=(*health.findings, *examination.findings)), examination, level)


# --- what the probe says


def _probed(facts: Mapping[str, Any], expected: int, catalog: Catalog) -> Health:
    gpus = read_gpus(facts.get("gpus"), expected, catalog)
    findings, unread, examined = list(gpus.findings), list[str](), list[str]()
    if expected:
        unread += gpus.unread
    else:
        examined.append("no GPU expected")
    if gpus.working:
        examined.append(f"{gpus.working} GPU{'s' * (gpus.working > 1)} by NVML")
    boot_id = facts.get("boot_id")
    if not isinstance(boot_id, str) or not _BOOT_ID.fullmatch(boot_id):
        boot_id = ""
        unread.append(f"boot id: {unreadable(facts.get('boot_id'))}")
    for read in (_disks, _memory, _kernel, _clock):
        found, missing = read(facts, catalog)
        findings += found
        unread += missing
    examined += ["disk", "memory"]
    if not expected and fields(facts.get("kernel")) is not None:
        examined.append("kernel log")
    reboots = _reboots(facts.get("reboots"))
    held = facts.get("held", "")
    busy = (*_jobs(facts.get("jobs")), *_holder(held), *gpus.users)
    if len(busy) > MAX_NAMED:
        busy = (*busy[:MAX_NAMED], f"{len(busy) - MAX_NAMED} more")
    return Health(
        Verdict.UNKNOWN,
        "",
        findings=tuple(findings),
        boot_id=boot_id,
        busy=busy,
        reboots=reboots or (),
        journal_unread=f"its journal of reboots: {unreadable(facts.get('reboots'))}" if reboots is None else "",
        held=text(held.get("id"), LONGEST_ID) if isinstance(held, Mapping) else "",
        clock=moment(facts.get("wall")),
        uptime=_seconds(facts.get("stamp")),
        working=gpus.working,
        seen=gpus.seen,
        examined=tuple(examined),
        unread=tuple(unread),
    )


def _disks(facts: Mapping[str, Any], _: Catalog) -> tuple[list[Finding], list[str]]:
    rows = facts.get("disks")
    if not isinstance(rows, list) or not rows:
        return [], [f"disks: {unreadable(rows)}" if not isinstance(rows, list) else "disks: none is listed"]
    findings, unread = [], []
    for position, row in enumerate(rows[:MAX_NAMED]):
        of_state = position == 0  # the one that the agent works on comes first
        row = fields(row)  # noqa: PLW2901 (None where it is no object)
        path = (text(row.get("path"), 80) if row else "") or f"disk {position}"
        free, writable = (count(row.get("free")), row.get("writable")) if row else (None, None)
        inodes = row.get("inodes_free", "") if row else ""
        if row is None or free is None or not isinstance(writable, bool) or (inodes is not None and count(inodes) is None):
            unread.append(f"disk {path} cannot be read")
        role, cause = (Role.ROOT, Cause.NODE_FAULT) if of_state else (Role.SYMPTOM, None)
        if row is not None and writable is False:
            words = f"{path} cannot be written to: {text(row.get('because')) or 'no reason given'}"
            # An ordinary user may not write to `/`, on the best of nodes.
            findings.append(Finding("node", "disk", role if of_state else Role.INFORMATION, words, cause))
        elif free is not None and free < MIN_FREE:
            findings.append(Finding("node", "disk", role, f"{path} is full: {free} bytes free", cause))
        elif inodes == 0 and not isinstance(inodes, bool):
            findings.append(Finding("node", "disk", role, f"{path} is full: no inode is free", cause))
    return findings, unread


def _memory(facts: Mapping[str, Any], _: Catalog) -> tuple[list[Finding], list[str]]:
    memory = fields(facts.get("memory"))
    total = count(memory.get("total")) if memory else None
    available = count(memory.get("available")) if memory else None
    if not total or available is None:
        return [], [f"memory: {unreadable(facts.get('memory'))}"]
    if available >= MIN_MEMORY * total:
        return [], []
    words = f"{available >> 20} of {total >> 20} MiB of its memory are available"
    return [Finding("node", "memory", Role.SYMPTOM, words)], []


def _kernel(facts: Mapping[str, Any], catalog: Catalog) -> tuple[list[Finding], list[str]]:
    log = facts.get("kernel")
    lines = log.get("lines") if isinstance(log, Mapping) else None
    kept = lines[-MAX_LINES:] if isinstance(lines, list) else []
    findings = [_kept(found) for found in read_kernel_log([_encodable(line) for line in kept if isinstance(line, str)], catalog)]
    if fields(log) is None or not isinstance(lines, list):
        # Many hosts let nobody but root read it, and those are to be repaired, too.
        words = f"its kernel log cannot be read: {unreadable(log if fields(log) is None else lines)}"
        findings.append(Finding("node", "kernel log unreadable", Role.INFORMATION, words))
    return findings, []


def clock_offset(facts: Mapping[str, Any]) -> tuple[float, float] | None:
    """Seconds that the node's clock is ahead of the controller's, and within how many, as RFC 5905 (section 8) tells it: half of the round
    trip."""
    exchange = facts.get("exchange")
    sent, received = (_seconds(exchange.get(name)) for name in ("sent", "received")) if isinstance(exchange, Mapping) else (None, None)
    arrived, answered = _seconds(facts.get("wall")), _seconds(facts.get("answered"))
    answered = arrived if answered is None else answered
    if sent is None or received is None or arrived is None or answered is None:
        return None
    return ((arrived - sent) + (answered - received)) / 2, max(0.0, (received - sent) - (answered - arrived)) / 2


def _clock(facts: Mapping[str, Any], _: Catalog) -> tuple[list[Finding], list[str]]:
    known = clock_offset(facts)
    if known is None:
        return [], []
    offset, within = known
    if abs(offset) - within <= CLOCK_SHOWN:
        return [], []
    words = f"its clock is {abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'} (±{within:.1f} s)"
    role = Role.SYMPTOM if abs(offset) - within > CLOCK_NAMED else Role.INFORMATION
    return [Finding("node", "clock", role, words)], []


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LATEST else None


def _encodable(line: str) -> str:
    return line.encode("utf-8", "replace").decode()


def _kept(found: Finding) -> Finding:
    """A line may hold a thousand digits where a number belongs."""
    at = found.at if found.at is not None and found.at < MOST else None
    return replace(found, because=text(found.because), gpu=found.gpu and found.gpu[:40], pid=count(found.pid), at=at)


def _jobs(rows: object) -> Iterator[str]:
    if not isinstance(rows, list):
        yield "which jobs run on it cannot be read"
        return
    for row in rows:
        name = text(row.get("job"), 80) if isinstance(row, Mapping) else ""
        generation = count(row.get("generation")) if isinstance(row, Mapping) else None
        yield f"job {name or 'without a name'}" + (f" generation {generation}" if generation is not None else "")


def _holder(held: object) -> Iterator[str]:
    if isinstance(held, Mapping):
        yield f"{text(held.get('by'), 40) or 'somebody'} of {text(held.get('id'), 128) or 'no id'} holds it"
    elif held is not None:
        yield "who holds it cannot be read"


def _reboots(rows: object) -> tuple[Reboot, ...] | None:
    if not isinstance(rows, list):
        return None
    reboots = []
    for row in rows:
        at = moment(row.get("at")) if isinstance(row, Mapping) else None
        if at is None:
            return None
        boot_id = row.get("boot_id")
        known = isinstance(boot_id, str) and _BOOT_ID.fullmatch(boot_id)
        reboots.append(Reboot(at, text(row.get("because"), 120), text(row.get("id"), LONGEST_ID), boot_id if known else ""))
    return tuple(sorted(reboots, key=lambda one: one.at)[-MAX_REBOOTS:])


# --- the verdict


def _judged(health: Health, diag: Examination | None = None, level: int = 0) -> Health:
    findings = tuple(sorted(health.findings, key=_gravity))[:MAX_FINDINGS]
    sick = [finding for finding in findings if _is_sick(finding)]
    gpus = dict.fromkeys(known for finding in sick if finding.gpu and (known := bus_id(finding.gpu, health.seen)))
    unread, examined = health.unread, health.examined
    if diag is not None:
        examined = (*examined, f"dcgmi diag -r {level}")
        if diag.verdict is Verdict.UNKNOWN:
            unread = (*unread, f"dcgmi diag -r {level}: {diag.because}")
    if sick or (diag is not None and diag.verdict is Verdict.UNHEALTHY):
        verdict, because = Verdict.UNHEALTHY, _clauses(_reasons(sick, diag, level))
    elif unread:
        verdict, because = Verdict.UNKNOWN, _clauses([*unread, *_symptoms(findings)])
    else:
        said = _symptoms(findings)
        verdict, because = Verdict.HEALTHY, f"{', '.join(examined)}: {f'nothing broken; {_clauses(said)}' if said else 'nothing found'}"
    return replace(
        health,
        verdict=verdict,
        because=because,
        findings=findings,
        gpus=tuple(gpus),
        examined=examined,
        unread=tuple(dict.fromkeys(unread)),
    )


def _reasons(sick: list[Finding], diag: Examination | None, level: int) -> list[str]:
    """One clause for all that DCGM found, in its own order of gravity, among those of the others."""
    said = f"dcgmi diag -r {level}: {diag.because}" if diag is not None else ""
    reasons = [said if finding.source == "dcgm" else finding.because for finding in sick]
    return reasons or [said]


def _symptoms(findings: tuple[Finding, ...]) -> list[str]:
    shown = [finding for finding in findings if finding.role in (Role.ROOT, Role.SYMPTOM) or finding.code == "kernel log unreadable"]
    return [finding.because for finding in shown if finding.source != "dcgm"]


def _clauses(clauses: list[str]) -> str:
    """The first two, the rest counted: a node with eight GPUs in trouble says everything eight times."""
    different = list(dict.fromkeys(clauses))
    return "; ".join(different[:2]) + (f"; {len(different) - 2} more" if len(different) > 2 else "")


def _is_sick(finding: Finding) -> bool:
    return finding.role is Role.ROOT and finding.cause in SICK


def _gravity(finding: Finding) -> tuple[int, int]:
    if finding.cause is not None and _is_sick(finding):
        return 0, HARDWARE_CAUSES.index(finding.cause)
    return 1, _ROLES.index(finding.role)
