"""Judge the health of one node from its probe and its `dcgmi diag`, the gravest findings first.

A node is healthy only if everything required was read. What to do about the verdict is not decided
here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from relaunch.evidence.catalog import Catalog
from relaunch.evidence.causes import HARDWARE_CAUSES, Cause
from relaunch.evidence.dcgm import Examination, read_diag
from relaunch.evidence.fields import count, fields, moment, text, unreadable
from relaunch.evidence.findings import Finding, Role, Verdict
from relaunch.evidence.links import read_links, read_present_faults
from relaunch.evidence.node_readings import (
    CLOCK_NAMED,
    CLOCK_SHOWN,
    clock_offset,
    read_clock,
    read_disks,
    read_ecs_health,
    read_kernel,
    read_memory,
    seconds,
)
from relaunch.evidence.nvml import LOST, bus_id, read_gpus
from relaunch.text import count_noun, join_clauses

__all__ = [
    "CLOCK_NAMED",
    "CLOCK_SHOWN",
    "LONGEST_ID",
    "MAX_FINDINGS",
    "SICK",
    "Condition",
    "Health",
    "Reboot",
    "add_diag",
    "clock_offset",
    "read_condition",
    "read_health",
]

SICK = (Cause.GPU_FATAL, Cause.GPU_RESET, Cause.NODE_FAULT)
"""Causes that make a node unhealthy.

Networks, file servers and programs fail on healthy nodes, and a transient fault is already over.
A dead network card or link of the node itself is a NODE_FAULT.
"""
NOT_DIAGNOSED = "dcgmi diag was not run"
NOT_PROBED = "nothing reads it from within, and its health check was not run"
"""For a node without an agent, of which only the exit code of a health check can be known."""
NO_GPUS = "no GPUs (`gpus: 0` in the fleet file)"
"""Of a node whose GPUs were not examined."""
MAX_FINDINGS = 64
LONGEST_ID = 200
"""Characters of the id of a repair or examination: the longest fleet and node names, and a run."""
MAX_NAMED = 8
"""Maximum number of named users of a node; the others are counted."""
MAX_REBOOTS = 20
"""Maximum number of entries of a node's reboot journal, the newest: as many as agents send."""

RESET_ONLY = ("row remap pending", "page retirement pending")
"""Findings about a GPU that works: new programs may be started on it, and the reset is for when
it is free. https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/, "Error Recovery and Response
Flags"."""

_ROLES = tuple(Role)
_BOOT_ID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Reboot:
    """An entry of the reboot journal that a node keeps."""

    at: datetime
    """By the node's clock."""
    reason: str
    id: str = ""
    """Id of the repair that ordered it."""
    boot_id: str = ""
    """Id of the boot that it ended."""


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one node, with its evidence."""

    verdict: Verdict
    reason: str
    """The reasons for the verdict, the gravest first; for a healthy node, what was examined."""
    findings: tuple[Finding, ...] = ()
    """The gravest first."""
    gpus: tuple[str, ...] = ()
    """Bus ids of the GPUs that make the node unhealthy."""
    boot_id: str = ""
    """Empty: not read."""
    busy: tuple[str, ...] = ()
    """Known users of the node; empty: it is free.

    For example `job llama generation 3`, `pid 4242 uses GPU 0000:05:00`.
    """
    reboots: tuple[Reboot, ...] = ()
    """Entries of the node's reboot journal, the oldest first."""
    journal_unread: str = ""
    """Why its reboot journal cannot be read (not the same as no reboots); empty: it was read."""
    held: str = ""
    """Id of the examination or repair that holds the node now; it is also in `busy`."""
    clock: datetime | None = None
    """The time by the node's clock."""
    uptime: float | None = None
    """Seconds since boot, by the node's CLOCK_BOOTTIME; None: not read."""
    working: int | None = None
    """Number of GPUs that NVML can read; None: NVML could not be queried."""
    seen: tuple[str, ...] = ()
    """Bus id of each GPU by its index; empty where it is not known."""
    examined: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """What could not be read, which prevents the verdict HEALTHY."""


def read_health(
    facts: Mapping[str, Any] | None,
    diag: Mapping[str, Any] | None,
    *,
    expected_gpus: int,
    level: int,
    catalog: Catalog,
    unread: str = "",
) -> Health:
    """Return the health of a node from its answers.

    Args:
        facts: The answer to a probe; None where there was none.
        diag: The answer to diagnose, a refusal as `{"refused": why, "reason": …}`; None where it
            was not requested. From a health check that reports by its exit code alone:
            `{"contract": "healthy" | "faulty" | "inconclusive", "reason": …}`.
        expected_gpus: The number of GPUs in the fleet file.
        level: The level of `dcgmi diag`; 0: it is not required.
        catalog: The catalog with the user's overrides.
        unread: Why there is no answer to the probe.
    """
    if not isinstance(facts, Mapping) or facts.get("outcome") != "done":
        said = text(facts.get("reason")) if isinstance(facts, Mapping) else ""
        why = text(unread) or said or "it did not answer a probe"
        return Health(
            Verdict.UNKNOWN,
            why,
            busy=("who uses it is not known",),
            journal_unread=why,
            unread=(why,),
        )
    health = _read_probe(facts, expected_gpus, catalog)
    if diag is not None:
        return add_diag(health, diag, level=level, catalog=catalog)
    if expected_gpus and level:
        health = replace(health, unread=(*health.unread, NOT_DIAGNOSED))
    return _judge(health)


@dataclass(frozen=True, slots=True)
class Condition:
    """What a look at a node, without a job's fault, says about it."""

    fault: str = ""
    """Why it is not fit for jobs; empty: nothing is known to be wrong with it."""
    reset_wanted: str = ""
    """Why its GPUs should be reset, although they work."""


def read_condition(answer: Mapping[str, Any], catalog: Catalog) -> Condition:
    """Return what a node's look at itself shows, by the rules of an examination.

    Only what is so now counts. What is of the past (the kernel log, links that were lost, errors
    that were counted) was judged with the job of its time. What could not be read is no fault here.
    GPUs that are lost or missing are left out, because the inventory has them. The sentences stay
    the same as long as the fault does: no ages, no counts.

    Args:
        answer: The node's answer to `list` with `gpus`; from an older agent it has GPUs only.
        catalog: The catalog.
    """
    findings = (
        *(one for one in read_gpus(answer.get("gpus"), 0, catalog).findings if one.code != LOST),
        *read_disks(answer, catalog)[0],
        *read_present_faults(answer),
    )
    sick = [one for one in sorted(findings, key=_rank_gravity) if _is_sick(one)]
    return Condition(
        text(_join_clauses([one.reason for one in sick if one.code not in RESET_ONLY])),
        text(_join_clauses([one.reason for one in sick if one.code in RESET_ONLY])),
    )


def add_diag(health: Health, diag: Mapping[str, Any], *, level: int, catalog: Catalog) -> Health:
    """Return the health of a probed node with the result of `dcgmi diag` added."""
    health = replace(
        health, unread=tuple(clause for clause in health.unread if clause != NOT_DIAGNOSED)
    )
    if diag.get("outcome") == "done" and "contract" in diag:
        return _add_contract(health, diag)
    stdout, exit_code = diag.get("stdout"), diag.get("exit_code", "")
    missing = ""
    if "refused" in diag:
        missing = f"dcgmi diag was refused ({text(diag['refused'])}): {text(diag.get('reason'))}"
    elif diag.get("outcome") != "done":
        missing = f"dcgmi diag: {unreadable(diag.get('outcome'))}"
    elif "missing" in diag:
        missing = f"dcgmi diag: {text(diag['missing']) or 'a tool is missing'}"
    elif diag.get("boot_id") != health.boot_id or not health.boot_id:
        missing = "it is not the same boot that was probed and diagnosed"
    elif (
        not isinstance(stdout, str)
        or isinstance(exit_code, bool)
        or not isinstance(exit_code, int | None)
    ):
        missing = "what dcgmi diag printed and how it ended cannot be read"
    if missing:
        return _judge(replace(health, unread=(*health.unread, missing)))
    examination = read_diag(stdout or "", exit_code, catalog.dcgm, level=level)
    if (
        examination.verdict is Verdict.HEALTHY
        and diag.get("cut") is not None
        and diag["cut"] is not False
    ):
        return _judge(
            replace(health, unread=(*health.unread, "the output of dcgmi diag is cut short"))
        )
    return _judge(
        replace(health, findings=(*health.findings, *examination.findings)), examination, level
    )


def _add_contract(health: Health, diag: Mapping[str, Any]) -> Health:
    """Return the health with a health check's exit code added.

    0: healthy, 1: faulty, any other: inconclusive.
    """
    reason = text(diag.get("reason")) or "no reason given"
    unread = tuple(clause for clause in health.unread if clause != NOT_PROBED)
    # A health check reports no boot id, or only that of EC2. If the node goes down during it, the
    # check is killed, which is inconclusive.
    if diag.get("boot_id", health.boot_id) != health.boot_id:
        return _judge(
            replace(
                health, unread=(*unread, "it is not the same boot that was probed and diagnosed")
            )
        )
    match diag["contract"]:
        case "healthy":
            return _judge(
                replace(health, unread=unread, examined=(*health.examined, "its health check"))
            )
        case "faulty":
            finding = Finding(
                "dcgm",
                "health check",
                Role.ROOT,
                f"its health check found a fault: {reason}",
                Cause.GPU_FATAL,
            )
            return _judge(replace(health, unread=unread, findings=(*health.findings, finding)))
        case _:
            return _judge(
                replace(health, unread=(*unread, f"its health check says nothing: {reason}"))
            )


# --- reading the probe


def _read_probe(facts: Mapping[str, Any], expected: int, catalog: Catalog) -> Health:
    if facts.get("unprobed") is True:
        return _read_unprobed(facts, expected, catalog)
    gpus = read_gpus(facts.get("gpus"), expected, catalog)
    findings, unread, examined = list(gpus.findings), list[str](), list[str]()
    if expected:
        unread += gpus.unread
    if gpus.working:
        examined.append(f"{count_noun(gpus.working, 'GPU')} by NVML")
    boot_id = facts.get("boot_id")
    if not isinstance(boot_id, str) or not _BOOT_ID.fullmatch(boot_id):
        boot_id = ""
        unread.append(f"boot id: {unreadable(facts.get('boot_id'))}")
    links = read_links(facts)
    for found, missing in (
        read_disks(facts, catalog),
        read_memory(facts, catalog),
        (links.findings, links.unread),
        read_kernel(facts, catalog, gpus),
        read_clock(facts, catalog),
        read_ecs_health(facts, catalog),
    ):
        findings += found
        unread += missing
    examined += ["disk", "memory"]
    if links.working:
        examined.append(count_noun(links.working, "network link"))
    if not expected and fields(facts.get("kernel")) is not None:
        examined.append("kernel log")
    if not expected and not gpus.working:
        examined.append(NO_GPUS)
    return replace(
        _read_common(facts, boot_id, gpus.users),
        findings=tuple(findings),
        working=gpus.working,
        seen=gpus.seen,
        examined=tuple(examined),
        unread=tuple(unread),
    )


def _read_unprobed(facts: Mapping[str, Any], expected: int, catalog: Catalog) -> Health:
    """Return the health of a node without a probe, from its scheduler and its machine's owner."""
    boot_id = facts.get("boot_id")
    known = isinstance(boot_id, str) and _BOOT_ID.fullmatch(boot_id)
    registered = count(facts.get("ecs_gpus"))
    unread = [NOT_PROBED]
    if not known:
        unread.append(f"boot id: {unreadable(boot_id)}")
    if expected and (registered or 0) < expected:
        unread.append(f"ECS has registered {registered or 0} of {expected} GPUs")
    findings, _ = read_ecs_health(facts, catalog)
    return replace(
        _read_common(facts, str(boot_id) if known else "", ()),
        findings=tuple(findings),
        working=registered,
        unread=tuple(unread),
    )


def _read_common(facts: Mapping[str, Any], boot_id: str, users: tuple[str, ...]) -> Health:
    """Return the part common to all nodes: users of the node and its reboots, without a verdict."""
    reboots = _read_reboots(facts.get("reboots"))
    held = facts.get("held", "")
    busy = (*_list_jobs(facts.get("jobs")), *_list_holder(held), *users)
    if len(busy) > MAX_NAMED:
        busy = (*busy[:MAX_NAMED], f"{len(busy) - MAX_NAMED} more")
    return Health(
        Verdict.UNKNOWN,
        "",
        boot_id=boot_id,
        busy=busy,
        reboots=reboots or (),
        journal_unread=f"its journal of reboots: {unreadable(facts.get('reboots'))}"
        if reboots is None
        else "",
        held=text(held.get("id"), LONGEST_ID) if isinstance(held, Mapping) else "",
        clock=moment(facts.get("wall")),
        uptime=seconds(facts.get("stamp")),
    )


def _list_jobs(rows: object) -> Iterator[str]:
    if not isinstance(rows, list):
        yield "which jobs run on it cannot be read"
        return
    for row in rows:
        name = text(row.get("job"), 80) if isinstance(row, Mapping) else ""
        generation = count(row.get("generation")) if isinstance(row, Mapping) else None
        yield f"job {name or 'without a name'}" + (
            f" generation {generation}" if generation is not None else ""
        )


def _list_holder(held: object) -> Iterator[str]:
    if isinstance(held, Mapping):
        holder = text(held.get("by"), 40) or "another user"
        yield f"{holder} of {text(held.get('id'), 128) or 'no id'} holds it"
    elif held is not None:
        yield "who holds it cannot be read"


def _read_reboots(rows: object) -> tuple[Reboot, ...] | None:
    if not isinstance(rows, list):
        return None
    reboots = []
    for row in rows:
        at = moment(row.get("at")) if isinstance(row, Mapping) else None
        if at is None:
            return None
        boot_id = row.get("boot_id")
        known = isinstance(boot_id, str) and _BOOT_ID.fullmatch(boot_id)
        reboots.append(
            Reboot(
                at,
                text(row.get("reason"), 120),
                text(row.get("id"), LONGEST_ID),
                boot_id if known else "",
            )
        )
    return tuple(sorted(reboots, key=lambda one: one.at)[-MAX_REBOOTS:])


# --- the verdict


def _judge(health: Health, diag: Examination | None = None, level: int = 0) -> Health:
    findings = tuple(sorted(health.findings, key=_rank_gravity))[:MAX_FINDINGS]
    sick = [finding for finding in findings if _is_sick(finding)]
    gpus = dict.fromkeys(
        known for finding in sick if finding.gpu and (known := bus_id(finding.gpu, health.seen))
    )
    unread, examined = health.unread, health.examined
    if diag is not None:
        examined = (*examined, f"dcgmi diag -r {level}")
        if diag.verdict is Verdict.UNKNOWN:
            unread = (*unread, f"dcgmi diag -r {level}: {diag.reason}")
    if sick or (diag is not None and diag.verdict is Verdict.UNHEALTHY):
        verdict, reason = Verdict.UNHEALTHY, _join_clauses(_list_reasons(sick, diag, level))
    elif unread:
        verdict, reason = Verdict.UNKNOWN, _join_clauses([*unread, *_list_symptoms(findings)])
    else:
        symptoms = _list_symptoms(findings)
        summary = f"nothing broken; {_join_clauses(symptoms)}" if symptoms else "nothing found"
        verdict, reason = Verdict.HEALTHY, f"{', '.join(examined)}: {summary}"
    return replace(
        health,
        verdict=verdict,
        reason=reason,
        findings=findings,
        gpus=tuple(gpus),
        examined=examined,
        unread=tuple(dict.fromkeys(unread)),
    )


def _list_reasons(sick: list[Finding], diag: Examination | None, level: int) -> list[str]:
    """Return the reasons of an unhealthy node, with one clause for all of DCGM's findings together.

    DCGM orders its own findings by gravity.
    """
    said = f"dcgmi diag -r {level}: {diag.reason}" if diag is not None else ""
    reasons = [said if finding.source == "dcgm" and said else finding.reason for finding in sick]
    return reasons or [said]


def _list_symptoms(findings: tuple[Finding, ...]) -> list[str]:
    shown = [
        finding
        for finding in findings
        if finding.role in (Role.ROOT, Role.SYMPTOM) or finding.code == "kernel log unreadable"
    ]
    return [finding.reason for finding in shown if finding.source != "dcgm"]


def _join_clauses(clauses: list[str]) -> str:
    """Return the first two clauses and the number of the others.

    A node with eight faulty GPUs reports everything eight times.
    """
    different = list(dict.fromkeys(clauses))
    return join_clauses(different)


def _is_sick(finding: Finding) -> bool:
    return finding.role is Role.ROOT and finding.cause in SICK


def _rank_gravity(finding: Finding) -> tuple[int, int]:
    if finding.cause is not None and _is_sick(finding):
        return 0, HARDWARE_CAUSES.index(finding.cause)
    return 1, _ROLES.index(finding.role)
