"""Ask jobs to drain nodes by a deadline, and notify them when a request is cancelled.

Either a person wants the node empty, or the fleet does because the node has to be examined and jobs
share it. Whether and when a job leaves is decided by the job and by the people who may answer for
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from relaunch.evidence.fields import text
from relaunch.pool.events import DrainMessage
from relaunch.pool.messages import DrainRequest, PermitRequest
from relaunch.pool.nodes import FLEET, is_awaiting, put_node
from relaunch.pool.restore import is_restoring
from relaunch.pool.state import ClaimRecord, FleetState, NodeRecord, NodeStatus
from relaunch.pool.status import set_status
from relaunch.text import join_names

MAX_NAMED = 4


def request_drains(
    state: FleetState, now: datetime, notable: Sequence[NodeRecord]
) -> tuple[FleetState, list[DrainMessage]]:
    """Ask the jobs on a wanted node to leave, each once; notify them once when it is no longer
    wanted."""
    wanted = [
        node
        for node in notable
        if node.drain or node.repair_drain or node.asked_jobs or node.status is NodeStatus.SUSPECT
    ]
    if not wanted:
        return state, []
    orders: list[DrainMessage] = []
    on = _group_by_node(state)
    after = {node.name: _request_drain(state, node, on[node.name], now, orders) for node in wanted}
    nodes = tuple(after.get(node.name, node) for node in state.nodes)
    return (state if nodes == state.nodes else replace(state, nodes=nodes)), orders


def _request_drain(
    state: FleetState,
    node: NodeRecord,
    here: list[ClaimRecord],
    now: datetime,
    orders: list[DrainMessage],
) -> NodeRecord:
    drain = _find_repair_drain(state, node, here, now)
    request = node.drain or drain
    if request is None:
        over = DrainRequest(
            node.name, _why_cancelled(node), f"{FLEET}{state.name}", now, cancelled=True
        )
        waiting = (
            [record for record in state.claims if record.is_waiting and record not in here]
            if node.asked_jobs
            else []
        )
        orders += [
            DrainMessage(record.claim.job, over)
            for record in (*here, *waiting)
            if record.claim.job in node.asked_jobs
        ]
        asked_jobs: tuple[str, ...] = ()
    else:
        asked = [record.claim.job for record in here if node.drain or not _isolates(node, record)]
        new = [job for job in asked if job not in node.asked_jobs]
        orders += [DrainMessage(job, request) for job in new]
        asked_jobs = (*node.asked_jobs, *new)
    return (
        node
        if (drain, asked_jobs) == (node.repair_drain, node.asked_jobs)
        else replace(node, repair_drain=drain, asked_jobs=asked_jobs)
    )


def _find_repair_drain(
    state: FleetState, node: NodeRecord, here: list[ClaimRecord], now: datetime
) -> DrainRequest | None:
    """Return the fleet's own request to leave a shared suspect; None while no repair would be
    started."""
    if node.status is not NodeStatus.SUSPECT or node.drain is not None or _are_repairs_off(state):
        return None
    if (
        node.repair_drain is not None
        or not state.is_probed
        or is_awaiting(state, now)
        or is_restoring(state, now)
    ):
        return node.repair_drain
    return (
        _make_repair_drain(state, node, now)
        if any(not _isolates(node, record) for record in here)
        else None
    )


def _make_repair_drain(state: FleetState, node: NodeRecord, now: datetime) -> DrainRequest:
    return DrainRequest(
        node.name, node.reason, f"{FLEET}{state.name}", now + state.limits.drain_within
    )


def _are_repairs_off(state: FleetState) -> bool:
    return state.breaker.is_open or bool(state.breaker.paused) or state.repairs == "observe"


def _isolates(node: NodeRecord, record: ClaimRecord) -> bool:
    """Return whether the job's own evidence isolates the node, so that it leaves unasked.

    Marks that do not isolate the node, or were retracted, do not count.
    """
    return any(
        mark.job == record.claim.job and mark.isolated and not mark.retracted for mark in node.marks
    )


def _why_cancelled(node: NodeRecord) -> str:
    match node.status:
        case NodeStatus.IN_SERVICE:
            return "it is in service again"
        case NodeStatus.SUSPECT:
            return "nothing is repaired at the moment"
        case _:
            return f"it is {node.status}, and the jobs on it may stay"


def _is_on(record: ClaimRecord, node: NodeRecord) -> bool:
    return any(place.node == node.name for place in record.places)


def _group_by_node(state: FleetState) -> defaultdict[str, list[ClaimRecord]]:
    on: defaultdict[str, list[ClaimRecord]] = defaultdict(list)
    for record in state.claims:
        for place in record.places if not record.is_closed else ():
            on[place.node].append(record)
    return on


# --- a repair that a job has ordered for a node that it shares


def find_sharers(state: FleetState, node: NodeRecord, job: str) -> list[ClaimRecord]:
    """Return the claims of other jobs that have the node or a part of it."""
    return [record for record in state.claims if record.claim.job != job and _is_on(record, node)]


def drain_shared_node(
    state: FleetState,
    node: NodeRecord,
    request: PermitRequest,
    others: list[ClaimRecord],
    now: datetime,
) -> tuple[FleetState, str]:
    """Ask the other jobs to leave where the fleet may do so; return why the repair must not act
    now."""
    if not any(record.claim.job == request.job and _is_on(record, node) for record in state.claims):
        return state, why_in_use(state, node, request.job)
    if node.status is NodeStatus.IN_SERVICE and not _are_repairs_off(state):
        reason, by = text(request.reason), f"job {request.job}"
        node = set_status(node, NodeStatus.SUSPECT, now, reason=reason, by=by, end="")
    if (
        node.status is NodeStatus.SUSPECT
        and node.repair_drain is None
        and not _are_repairs_off(state)
    ):
        node = replace(node, repair_drain=_make_repair_drain(state, node, now))
    jobs = [record.claim.job for record in others]
    many = len(jobs) > 1
    named = join_names(jobs, MAX_NAMED)
    has = f"job{'s' * many} {named} {'have' if many else 'has'} a part of {node.name} too"
    if (wish := node.drain or node.repair_drain) is None:
        return put_node(state, node), f"{has}: drain the node to have it left"
    if request.job not in node.asked_jobs:
        node = replace(
            node, asked_jobs=(*node.asked_jobs, request.job)
        )  # the refusal itself informs it
    return (
        put_node(state, node),
        f"{has}, and {'were' if many else 'was'} asked to leave it by "
        f"{wish.until:%Y-%m-%d %H:%M} UTC",
    )


def why_in_use(state: FleetState, record: NodeRecord, job: str) -> str:
    """Return why only another job may have the node treated, as a clause; empty if no other job has
    it."""
    others = [
        one.claim.job
        for one in state.claims
        if one.claim.job != job and any(place.node == record.name for place in one.places)
    ]
    others += [
        one.job for one in (record.probe.generations if record.probe else ()) if one.job != job
    ]
    if not others:
        return ""
    return (
        f"job {others[0]} has {record.name}, and ranks of it may live there: "
        "cancel it, drain the node, or let that job order it"
    )
