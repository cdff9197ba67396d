"""Open and close the fleet's breaker, and permit or refuse the steps of repairs.

While the breaker is open, nothing is repaired or granted until a person has looked. This module
only counts and compares: why a node is out of service, and whether it needs the repair, is decided
elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.access.orders import REPAIR_PROOF_LIFETIME, UsedProof
from relaunch.evidence.fields import text
from relaunch.pool.claims import RELAUNCH
from relaunch.pool.drains import drain_shared_node, find_sharers, why_in_use
from relaunch.pool.events import (
    PauseCommand,
    PermitMessage,
    PermitRequestEvent,
    RepairRequest,
    ResumeCommand,
)
from relaunch.pool.messages import Healing, Permit, PermitRequest
from relaunch.pool.nodes import (
    add_notice,
    find_node,
    is_awaiting,
    is_idle,
    is_out,
    is_released_since,
    list_recent_repairs,
    mark_repair,
    put_node,
)
from relaunch.pool.restore import is_restoring
from relaunch.pool.state import Breaker, FleetState, NodeRecord, NodeStatus, PermitRecord
from relaunch.pool.status import set_status
from relaunch.text import format_time, join_names

REBOOT_WINDOW = timedelta(hours=1)
"""The window over which `reboots_per_hour` counts."""
MAX_PERMITS = 64
"""Permits kept so that they can be sent again: more than any fleet has repairs that act at a
time."""
MAX_NAMED = 4


def count_repairs(nodes: Iterable[NodeRecord]) -> int:
    """Return the number of nodes that are being examined or repaired, by any order."""
    return sum(node.status is NodeStatus.REPAIRING or bool(node.repair) for node in nodes)


def max_repairs(state: FleetState) -> int:
    return state.limits.resolve("repairs_at_once", _size(state))


def may_repair(state: FleetState) -> bool:
    return not state.breaker.is_open and not state.breaker.paused


def open_if_too_many_out(
    state: FleetState, now: datetime, notable: Sequence[NodeRecord]
) -> FleetState:
    """Open the breaker when too many nodes are out."""
    out = [node.name for node in notable if is_out(node) and not node.is_removed]
    size = len(state.nodes) - sum(node.is_removed for node in notable)
    most = state.limits.resolve("nodes_out", size)
    if len(out) <= most and state.out_when_resumed:
        # The outage that a person knew of when they resumed is over.
        state = replace(state, out_when_resumed=0)
    if state.breaker.is_open or len(out) <= max(most, state.out_when_resumed):
        return state
    known = (
        f", and {state.out_when_resumed} were when it was resumed" if state.out_when_resumed else ""
    )
    reason = (
        f"{len(out)} of {size} nodes are out ({join_names(out, MAX_NAMED)}); "
        f"limits.nodes_out allows {most}{known}"
    )
    return _open(state, reason, now)


def answer_permit_requests(
    state: FleetState, now: datetime
) -> tuple[FleetState, list[PermitMessage]]:
    """Answer the permit requests that can be answered, and send answers again that were asked for
    twice."""
    reboots = tuple(at for at in state.reboots if now - at < REBOOT_WINDOW)
    if reboots != state.reboots:
        state = replace(state, reboots=reboots)
    if not is_restoring(
        state, now
    ):  # repairs may have been paused before, and that is not restored yet
        for request in state.requests:
            state = _answer(state, request, now)
    tells = [PermitMessage(one.workflow, one.permit) for one in state.permits if not one.is_sent]
    if tells:
        state = replace(
            state,
            permits=tuple(replace(one, is_sent=True) for one in state.permits)[-MAX_PERMITS:],
        )
    return state, tells


def _answer(state: FleetState, request: PermitRequest, now: datetime) -> FleetState:
    record = find_node(state, request.node)
    if record is None:
        return _give_answer(
            state, request, False, f"{request.node} is not in fleet {state.name}", now
        )
    if request.nonce and state.access is not None:
        used = tuple(one for one in state.used_proofs if one.until > now)
        if any(one.nonce == request.nonce and one.run != request.run for one in used):
            said = "the signature of this order was used for another repair; order it again"
            return _give_answer(state, request, False, said, now)
        if not any(one.nonce == request.nonce for one in used):
            new = UsedProof(request.nonce, now + REPAIR_PROOF_LIFETIME, request.run)
            state = replace(state, used_proofs=(*used, new))
    if is_released_since(record) and not request.job:
        said = f"{record.name} was released meanwhile; order it again"
        return _give_answer(state, request, False, said, now)
    if not may_repair(state):
        return state
    if (request.power or request.job) and is_awaiting(state, now):
        return state  # a job may still claim the node
    if request.job and (others := find_sharers(state, record, request.job)):
        if all(one.is_closed for one in others):
            return state  # their remaining ranks are being stopped
        state, refused = drain_shared_node(
            state, record, request, [one for one in others if not one.is_closed], now
        )
        return _give_answer(state, request, False, refused, now)
    # Repairs that only examine do not count here: each of them may be waiting for the same permit.
    acting = sum(node.repair_acts and node.name != request.node for node in state.nodes)
    most = max_repairs(state)
    if acting >= most:
        return state
    if request.renews is not None:
        unused = request.renews
        state = replace(state, reboots=_remove(state.reboots, unused))
        record = replace(record, power_cycles=_remove(record.power_cycles, unused))
    record, refused = count_reboot(state, record, request, now)
    if refused:
        return _give_answer(state, request, False, refused, now)
    if request.step == "reboot":
        hourly = state.limits.reboots_per_hour
        if len(state.reboots) >= hourly:
            asked = f"the reboot of {request.node} ({text(request.reason, 120)})"
            return _open(
                state,
                f"{asked} would be number {len(state.reboots) + 1} within 1h; "
                f"limits.reboots_per_hour allows {hourly}",
                now,
            )
        state = replace(state, reboots=(*state.reboots, now))
    state = put_node(state, replace(record, repair_acts=True))
    said = f"repair {acting + 1} of {most} that may act at a time"
    return _give_answer(state, request, True, said, now)


def _remove(times: tuple[datetime, ...], one: datetime) -> tuple[datetime, ...]:
    """Return the times without one of those that are equal to `one`."""
    at = times.index(one) if one in times else len(times)
    return (*times[:at], *times[at + 1 :])


def record_permit_request(state: FleetState, fact: PermitRequestEvent, now: datetime) -> FleetState:
    request = fact.request
    asked = (request.workflow, request.run, request.seq)
    again = [
        one for one in state.permits if (one.workflow, one.permit.run, one.permit.seq) == asked
    ]
    if again:
        return replace(
            state,
            permits=tuple(
                replace(one, is_sent=False) if one in again else one for one in state.permits
            ),
        )
    mine = [
        one for one in state.requests if (one.workflow, one.run) == (request.workflow, request.run)
    ]
    if any(one.seq >= request.seq for one in mine):
        return state
    if record := find_node(state, request.node):
        state = put_node(state, mark_repair(record, request.workflow, request.run, now))
    return replace(state, requests=(*(one for one in state.requests if one not in mine), request))


def pause_repairs(state: FleetState, fact: PauseCommand, now: datetime) -> FleetState:
    by, reason = text(fact.by, 80) or "a person", text(fact.reason) or "no reason given"
    breaker = replace(state.breaker, paused=f"{by}: {reason}", paused_since=now)
    return add_notice(replace(state, breaker=breaker), f"{by} paused repairs: {reason}", now)


def resume_repairs(state: FleetState, fact: ResumeCommand, now: datetime) -> FleetState:
    """Close the breaker, and keep a pause: who paused repairs had another reason. Where the breaker
    is closed, end the pause."""
    by, reason = text(fact.by, 80) or "a person", text(fact.reason) or "no reason given"
    before = state.breaker
    keeps_pause = is_doubly_stopped(state) and not fact.ends_both
    done = "closed the breaker" if keeps_pause else "resumed repairs"
    for request in state.requests:
        at = format_time(request.asked_at)
        said = f"it was asked at {at}, before {by} {done} at {format_time(now)}; ask again"
        state = _give_answer(state, request, False, said, now, stale=True)
    out = sum(is_out(node) and not node.is_removed for node in state.nodes)
    after = Breaker(resumed_at=now)
    pause = ""
    if before.paused:
        since = f" since {format_time(before.paused_since)}" if before.paused_since else ""
        pause = f"paused{since} by {before.paused}"
    if keeps_pause:
        after = replace(after, paused=before.paused, paused_since=before.paused_since)
        done += f" (repairs stay {pause})"
    elif pause:
        done += f" ({pause})"
    state = replace(state, breaker=after, reboots=(), out_when_resumed=out)
    return add_notice(state, f"{by} {done}: {reason}", now)


def is_doubly_stopped(state: FleetState) -> bool:
    """Return whether the breaker is open while a person has paused repairs."""
    return state.breaker.is_open and bool(state.breaker.paused)


def _give_answer(
    state: FleetState,
    request: PermitRequest,
    allowed: bool,
    reason: str,
    now: datetime,
    *,
    stale: bool = False,
) -> FleetState:
    answer = PermitRecord(
        request.workflow, Permit(request.run, request.seq, allowed, reason, stale, now)
    )
    return replace(
        state,
        requests=tuple(one for one in state.requests if one != request),
        permits=(*state.permits, answer),
    )


def _open(state: FleetState, reason: str, now: datetime) -> FleetState:
    return replace(state, breaker=replace(state.breaker, reason=reason, since=now))


def _size(state: FleetState) -> int:
    return sum(not node.is_removed for node in state.nodes)


RESTART_WINDOW = timedelta(days=3)
MAX_RESTARTS = 2
"""Within that time, as for reboots: after that a person has to look."""
SHUTDOWN_TIMEOUT = timedelta(minutes=10)
"""systemd gives a service 90 s to stop, and some nodes have several in a row; nodes are probed once
a minute."""


def count_reboot(
    state: FleetState, record: NodeRecord, request: PermitRequest, now: datetime
) -> tuple[NodeRecord, str]:
    """Count the requested reboot, or return why it is not allowed."""
    if request.step != "reboot":
        return record, ""
    if request.power and (why := why_in_use(state, record, request.job)):
        return record, why
    recent = tuple(at for at in record.power_cycles if now - at < RESTART_WINDOW)
    times = len(recent) + request.restarts
    if recent and times >= MAX_RESTARTS:
        cycles = f"{len(recent)} of them by its power"
        return (
            record,
            f"{record.name} was rebooted {times} times within 3d, {cycles}: "
            "a person should look at its hardware",
        )
    return replace(
        record, power_cycles=(*recent, now) if request.power else recent, rebooted_at=now
    ), ""


def is_silent_since_reboot(record: NodeRecord) -> bool:
    """Return whether the node went silent when it was rebooted, by any order, and has not answered
    since."""
    if (
        record.probe is None
        or not record.probe.silent
        or record.silent_since is None
        or record.rebooted_at is None
    ):
        return False
    return timedelta(0) <= record.silent_since - record.rebooted_at < SHUTDOWN_TIMEOUT


# --- new repairs


def suspect_node_to_reset(
    state: FleetState, now: datetime, notable: Sequence[NodeRecord]
) -> FleetState:
    """Make one unused node a suspect whose GPUs work and should be reset.

    This can wait, so it is done without a person or not at all: one node after the other, while
    relaunch has no other node out of service and no job waits for nodes. A node that could not be
    reset is so the last one until a person has looked.
    """
    wanting = [node for node in notable if node.reset_wanted and not node.is_fault_unconfirmed]
    if not wanting or state.repairs != "act" or not may_repair(state) or not state.is_probed:
        return state
    if is_awaiting(state, now) or is_restoring(state, now):
        return state
    if any(is_out(node) or node.repair for node in notable):
        return state
    if any(record.is_waiting for record in state.claims):
        return state
    held = {place.node for record in state.claims for place in record.places}
    node = next((node for node in wanting if is_idle(node, held)), None)
    if node is None:
        return state
    return put_node(
        state,
        set_status(node, NodeStatus.SUSPECT, now, reason=node.reset_wanted, by=RELAUNCH, end=""),
    )


def start_repairs(
    state: FleetState, now: datetime, notable: Sequence[NodeRecord]
) -> tuple[FleetState, list[RepairRequest]]:
    """Start repairs of unused suspects, the oldest first, as far as the limits allow.

    Not before it is known which jobs hold nodes and which ranks live on them.
    """
    suspects = [node for node in notable if node.status is NodeStatus.SUSPECT]
    if not suspects or not may_repair(state) or not state.is_probed:
        return state, []
    room = max_repairs(state) - count_repairs(notable)
    if room <= 0:
        return state, []
    if is_awaiting(state, now) or is_restoring(state, now):
        return state, []
    in_use = {place.node for record in state.claims for place in record.places}
    suspects = [
        node
        for node in suspects
        if not node.repair
        and node.name not in in_use
        and not (node.probe and node.probe.generations)
    ]
    if not suspects:
        return state, []
    suspects.sort(key=lambda node: node.since or now)
    begun = {node.name: _mark_repairing(state, node, now) for node in suspects[:room]}
    nodes = tuple(begun.get(node.name, node) for node in state.nodes)
    return replace(state, nodes=nodes), [
        _request_repair(node, list_recent_repairs(state, node, now)) for node in suspects[:room]
    ]


def _mark_repairing(state: FleetState, node: NodeRecord, now: datetime) -> NodeRecord:
    return replace(
        node,
        status=NodeStatus.REPAIRING,
        repair=f"repair/{state.name}/{node.name}",
        repair_since=now,
        repair_acts=False,
    )


def _request_repair(node: NodeRecord, healed: tuple[Healing, ...]) -> RepairRequest:
    counted = (mark for mark in node.marks if not mark.retracted)
    gpus = tuple(dict.fromkeys(gpu for mark in counted for gpu in mark.gpus))
    return RepairRequest(
        node.name,
        node.reason,
        gpus,
        after_reboot=is_silent_since_reboot(node),
        healed=healed,
    )
