"""What people are notified of by a fleet: its breaker, nodes that stay out of service, and jobs
that wait long for nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.messages.ids import FLEET_ID_PREFIX, WORKFLOW_ID_PREFIX
from relaunch.messages.notices import Notice
from relaunch.pool.nodes import find_node, is_taken_by_relaunch
from relaunch.pool.state import ClaimRecord, FleetState, NodeRecord, NodeStatus
from relaunch.text import count_noun

WAITS_LONG = timedelta(hours=24)
"""How long a job that has not started waits for nodes until people are notified."""


def list_notices(
    state: FleetState, notable: Sequence[NodeRecord], now: datetime
) -> dict[str, Notice]:
    """Return the open matters of a fleet by key.

    Args:
        state: All that the fleet knows.
        notable: The nodes of which there is more to say than that they are in service and answer.
        now: Time by the workflow's clock.
    """
    found = [_describe_breaker(state, now)] if state.breaker.is_open else []
    found += [
        _describe_quarantine(state.name, node, now)
        for node in notable
        if node.status is NodeStatus.QUARANTINED and is_taken_by_relaunch(node)
    ]
    found += [
        _describe_wait(state.name, record, now)
        for record in state.claims
        if record.is_waiting
        and not record.claim.running  # such a job notifies people itself
        and now - (record.waiting_since or now) >= WAITS_LONG
    ]
    return {one.key: one for one in found}


def resolve_notice(state: FleetState, key: str, now: datetime) -> Notice:
    """Return the notice that a matter, which was open, is resolved."""
    fleet, event, *rest = key.split("/")
    notice = Notice(
        "breaker",
        key,
        f"the breaker of fleet {fleet} is closed",
        "a person closed it",
        now,
        state="resolved",
        workflow=f"{FLEET_ID_PREFIX}{fleet}",
    )
    match event:
        case "quarantine":
            record = find_node(state, rest[0])
            how = "is out of quarantine"
            reason = record.past[-1].end if record is not None and record.past else ""
            if record is not None and record.status is NodeStatus.QUARANTINED:
                how, reason = f"is quarantined by {record.by} now", record.reason
            return replace(
                notice,
                event="quarantine",
                subject=f"node {rest[0]} of fleet {fleet} {how}",
                reason=reason or "the fleet does not have it any more",
                nodes=(rest[0],),
            )
        case "waiting":
            claim = next((one for one in state.claims if one.claim.job == rest[0]), None)
            has_nodes = claim is not None and bool(claim.granted)
            return replace(
                notice,
                event="waiting",
                subject=f"job {rest[0]} waits for no nodes any more",
                reason="it has its nodes" if has_nodes else "it wants none",
                job=rest[0],
                workflow=f"{WORKFLOW_ID_PREFIX}{rest[0]}",
            )
        case _:
            return notice


def _describe_breaker(state: FleetState, now: datetime) -> Notice:
    return Notice(
        "breaker",
        f"{state.name}/breaker",
        f"the breaker of fleet {state.name} is open",
        state.breaker.reason,
        state.breaker.since or now,
        done="nothing is granted and nothing is repaired; jobs that run go on",
        wanted="find out what takes nodes out of service, then close the breaker",
        command=f'relaunch nodes resume --fleet {state.name} --reason "…"',
        workflow=f"{FLEET_ID_PREFIX}{state.name}",
    )


def _describe_quarantine(fleet: str, node: NodeRecord, now: datetime) -> Notice:
    marks = [mark for mark in node.marks if not mark.retracted]
    return Notice(
        "quarantine",
        f"{fleet}/quarantine/{node.name}",
        f"node {node.name} of fleet {fleet} is quarantined",
        node.reason,
        node.since or now,
        done="no job gets it",
        wanted="look at its hardware; then release it, or remove it from the fleet file",
        command=f'relaunch nodes release {node.name} --fleet {fleet} --reason "…"',
        nodes=(node.name,),
        cause=marks[-1].cause if marks else None,
        workflow=f"{FLEET_ID_PREFIX}{fleet}",
    )


def _describe_wait(fleet: str, record: ClaimRecord, now: datetime) -> Notice:
    claim = record.claim
    return Notice(
        "waiting",
        f"{fleet}/waiting/{claim.job}/{claim.submission}",
        f"job {claim.job} has waited a day for {count_noun(claim.nodes, 'node')}",
        record.wait_reason or "the reason is not known",
        record.waiting_since or now,
        done="it goes on waiting, and starts by itself when it gets them",
        wanted="free or add nodes, let it start with fewer, or cancel it",
        command=f"relaunch nodes show --fleet {fleet}",
        job=claim.job,
        workflow=f"{WORKFLOW_ID_PREFIX}{claim.job}",
    )
