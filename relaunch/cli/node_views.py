"""Formats a fleet's state for people and scripts.

Pure: values in, plain mappings and lines out. The keys of `row` are a stable interface for scripts:
keys may be added, never renamed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from relaunch.cli import gpu_views
from relaunch.cli.job_views import age, names
from relaunch.cli.terminal import make_console, print_columns
from relaunch.evidence.findings import Verdict
from relaunch.pool.state import FleetState, Mark, NodeRecord, NodeStatus
from relaunch.pool.tenants import Tenant, is_claimed, jobs_on, node_state, tenants
from relaunch.text import count_noun, format_time, printable

TITLES = ("NODE", "STATE", "JOB", "GPUS", "HEALTH", "HISTORY", "REASON")
RECENT = timedelta(hours=24)
"""The period in which marks of several jobs together make a node suspect."""


def gpus_used(record: NodeRecord, here: Sequence[Tenant]) -> int:
    """Return the number of GPUs of a node that are in use or reserved.

    A place without a share counts as all GPUs, and so does a job without a claim: no other job is
    given any of them.
    """
    shares = [
        set(tenant.place.gpus)
        if tenant.place and tenant.place.gpus
        else set(range(record.spec.gpus))
        for tenant in here
    ]
    return len(set[int]().union(*shares))


def health(record: NodeRecord) -> tuple[Verdict, str]:
    """Return the result of the last examination and its reason; UNKNOWN if a fault has followed it.

    A mark is not a verdict, and neither is a quarantine: only an examination gives one.
    """
    if record.verdict is Verdict.UNHEALTHY and _is_vouched_for(record):
        return Verdict.UNKNOWN, "not examined since it was released"
    if record.verdict is Verdict.UNHEALTHY:
        return Verdict.UNHEALTHY, record.verdict_reason
    if record.status in (NodeStatus.SUSPECT, NodeStatus.REPAIRING):
        return Verdict.UNKNOWN, "suspected"
    if record.status is NodeStatus.QUARANTINED and record.by == "relaunch":
        return Verdict.UNKNOWN, "not proven"
    examined = record.verdict_at
    if record.verdict is None or examined is None:
        return Verdict.UNKNOWN, "not examined"
    if any(not mark.retracted and mark.at >= examined for mark in record.marks):
        return Verdict.UNKNOWN, "not examined since the last fault"
    return Verdict.HEALTHY, record.verdict_reason


def _is_vouched_for(record: NodeRecord) -> bool:
    """Return whether a person has put the node into service since its last examination."""
    since, examined = record.since, record.verdict_at
    is_in_service = record.status is NodeStatus.IN_SERVICE
    return is_in_service and since is not None and examined is not None and since >= examined


def health_text(record: NodeRecord, now: datetime) -> str:
    """Return the health and its age, such as `HEALTHY 3h ago`."""
    verdict, reason = health(record)
    if verdict is Verdict.UNKNOWN or record.verdict_at is None:
        return reason
    return f"{verdict} {age(now - record.verdict_at)} ago"


def history_text(marks: Sequence[Mark], now: datetime) -> str:
    """Return a summary of marks, such as `2 faults in 24h, the last 3h ago: Xid 79`."""
    counted = [mark for mark in marks if not mark.retracted]
    if not marks:
        return ""
    last = max(counted or marks, key=lambda mark: mark.at)
    what = f"{age(now - last.at)} ago: {last.code or last.cause}"
    if not counted:
        return f"{count_noun(len(marks), 'fault')}, retracted, the last {what}"
    recent = sum(now - mark.at <= RECENT for mark in counted)
    if recent == 0:
        return f"{count_noun(len(counted), 'fault')}, the last {what}"
    more = f" ({len(counted)} in all)" if len(counted) > recent else ""
    return (
        f"{count_noun(recent, 'fault')} in {RECENT // timedelta(hours=1)}h{more}, the last {what}"
    )


def find_reason(
    record: NodeRecord, state: str, here: Sequence[Tenant]
) -> tuple[str, str | None, datetime | None]:
    """Return why a node is in that state, who put it there, and since when."""
    probe = record.probe
    if state == "draining" and record.drain is not None:
        return record.drain.reason, record.drain.by, record.since
    if record.status is not NodeStatus.IN_SERVICE:
        return record.reason, record.by or None, record.since
    if state == "repairing":
        return f"{repair_ids(record.repair)[0]} is running", None, record.repair_since
    if state == "silent":
        return (probe.silent if probe else "not probed yet"), None, record.silent_since
    if state == "held" and probe is not None:
        return probe.busy, None, None
    if unclaimed := [tenant.job for tenant in here if tenant.place is None]:
        return (
            f"ranks of {names(unclaimed)} run there without a claim that the fleet knows",
            None,
            None,
        )
    offers = [
        f"offered to job {tenant.job} until {format_time(tenant.offered)}"
        for tenant in here
        if tenant.offered is not None
    ]
    return "; ".join(offers), None, None


def repair_ids(repair: str) -> tuple[str, str]:
    """Return the ID of the repair's workflow, repair/FLEET/NODE, and its run ID, empty before it
    starts."""
    parts = repair.split("/")
    return "/".join(parts[:3]), "".join(parts[3:])


def row(record: NodeRecord, here: Sequence[Tenant]) -> dict[str, Any]:
    """Return an entry of `nodes list --json`; its keys are a stable interface."""
    state = node_state(record, here)
    reason, by, since = find_reason(record, state, here)
    verdict, says = health(record)
    probe, drain = record.probe, record.drain
    jobs = jobs_on(here)
    return {
        "name": record.name,
        "state": state,
        "job": jobs[0] if jobs else None,
        "gpus": record.spec.gpus,
        "health": str(verdict),
        "reason": reason,
        "by": by,
        "history": [_entry(mark) for mark in record.marks],
        "findings": [
            {
                "code": mark.code,
                "role": "root",
                "gpu": next(iter(mark.gpus), None),
                "reason": mark.reason,
            }
            for mark in record.marks
            if not mark.retracted
        ],
        "past": [
            {
                "reason": one.reason,
                "by": one.by,
                "since": iso(one.since),
                "until": iso(one.until),
                "end": one.end,
            }
            for one in record.past
        ],
        "healed": [
            {"strategy": str(one.strategy), "at": iso(one.at), "gpus": list(one.gpus)}
            for one in record.healed
        ],
        "boot_id": probe.boot_id if probe else "",
        "since": iso(since),
        "jobs": jobs,
        "gpus_used": gpus_used(record, here),
        "health_reason": says,
        "examined_at": iso(record.verdict_at),
        "status": str(record.status),
        "spare": record.spec.spare,
        "address": record.spec.address,
        "silent": probe.silent or None if probe else "not probed yet",
        "silent_since": iso(record.silent_since),
        "held": probe.busy or None if probe else None,
        "removed": record.is_removed,
        "probed_at": iso(record.probed_at),
        "repair": repair_ids(record.repair)[0] if record.repair else None,
        "drain": {"reason": drain.reason, "by": drain.by, "until": iso(drain.until)}
        if drain
        else None,
        "inventory": gpu_views.as_json(record, iso(record.inventory_at)),
    }


def _entry(mark: Mark) -> dict[str, Any]:
    return {
        "at": iso(mark.at),
        "what": "fault",
        "reason": mark.reason,
        "job": mark.job,
        "submission": mark.submission,
        "generation": mark.generation,
        "cause": str(mark.cause),
        "code": mark.code,
        "gpus": list(mark.gpus),
        "retracted": mark.retracted or None,
    }


def rows(state: FleetState) -> list[dict[str, Any]]:
    known = tenants(state)
    return [row(record, known.get(record.name, ())) for record in state.nodes]


def table_row(
    record: NodeRecord, here: Sequence[Tenant], now: datetime
) -> tuple[str, str, str, str, str, str, str]:
    """Return the cells of a node for the columns TITLES."""
    state = node_state(record, here)
    gpus = gpu_views.cell(record, gpus_used(record, here))
    jobs = names(jobs_on(here))
    return (
        record.name,
        state,
        jobs,
        gpus,
        health_text(record, now),
        history_text(record.marks, now),
        _reason(record, state, here, now),
    )


def print_nodes(state: FleetState, now: datetime) -> None:
    known = tenants(state)
    lines = [
        tuple(map(printable, table_row(record, known.get(record.name, ()), now)))
        for record in state.nodes
    ]
    if not sys.stdout.isatty():  # rich takes seconds for 2,000
        print_columns(TITLES, lines)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in TITLES:
        table.add_column(
            title,
            no_wrap=title in ("NODE", "STATE", "GPUS"),
            justify="right" if title == "GPUS" else "left",
        )
    for line in lines:
        table.add_row(*line)
    make_console().print(table)


def _reason(record: NodeRecord, state: str, here: Sequence[Tenant], now: datetime) -> str:
    reason, by, since = find_reason(record, state, here)
    who = ", ".join(part for part in (by, f"{age(now - since)} ago" if since else "") if part)
    parts = [f"{reason} ({who})" if who else reason]
    if record.drain is not None and jobs_on(here):
        parts.append(
            f"jobs must leave within {age(record.drain.until - now)}"
            if is_claimed(here)
            else "its jobs have given it back; the next probe shows whether ranks are left"
        )
    if state != "silent" and record.probe is not None and record.probe.silent:
        parts.append(
            f"does not answer{format_since(record.silent_since, now)}: {record.probe.silent}"
        )
    parts += gpu_views.remarks(record)
    return "; ".join(part for part in parts if part)


def format_since(moment: datetime | None, now: datetime) -> str:
    return "" if moment is None else f" since {format_time(moment)} ({age(now - moment)} ago)"


def iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds").replace("+00:00", "Z")
