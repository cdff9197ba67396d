"""Restore the state of the previous run when a fleet is restarted.

Restores what people ordered, what faults and examinations said of nodes, and which jobs held which
nodes: a node that does not answer cannot report whose ranks live there, nor can a terminated job.
What jobs and nodes report to the new run takes precedence.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.pool.claims import (
    BEFORE_CLEARING,
    explain_marks,
    export_claims,
    record_moves,
    restore_claims,
)
from relaunch.pool.events import PreviousRun
from relaunch.pool.nodes import FLEET_FILE, MAX_HEALED, add_notice, is_out, keep_removed
from relaunch.pool.state import Breaker, FleetState, Mark, NodeRecord, NodeStatus
from relaunch.pool.status import MAX_PAST, put_in_service
from relaunch.text import count_noun

RESTORE_TIMEOUT = timedelta(seconds=15)
"""How long nothing is granted or repaired meanwhile: a worker asks the previous run for ten seconds
at most."""


def export_state(*runs: FleetState) -> PreviousRun:
    """Return what to restore from runs that have ended, newest first.

    Args:
        runs: All runs back to the newest one that had restored its predecessor's state.
    """
    state, *older = runs
    if older and not has_restored(state):
        before = export_state(*older)
        if not state.nodes:
            return before
        state = _take_over(state, before)
    held = {place.node for record in state.claims for place in record.places}
    records = (_export_node(node) for node in state.nodes if node.by != FLEET_FILE)
    nodes = tuple(record for record in records if record != NodeRecord(record.spec))
    logins = {node.name: node.spec.login for node in state.nodes if node.name in held}
    return PreviousRun(
        nodes, export_claims(state.claims), state.breaker, logins=logins, removed=state.removed
    )


def _export_node(record: NodeRecord) -> NodeRecord:
    # The node has to be examined again: the end of a repair under way may never be reported to the
    # new run.
    standing = NodeStatus.SUSPECT if record.status is NodeStatus.REPAIRING else record.status
    out = standing is not NodeStatus.IN_SERVICE
    return NodeRecord(
        record.spec,
        standing,
        reason=record.reason if out else "",
        by=record.by if out else "",
        since=record.since if out else None,
        drain=record.drain,
        repair_drain=record.repair_drain,
        power_cycles=record.power_cycles,
        marks=record.marks,
        verdict=record.verdict,
        verdict_at=record.verdict_at,
        verdict_reason=record.verdict_reason,
        healed=record.healed,
        cleared_at=record.cleared_at,
        released_at=record.released_at,
        vouched_fault=record.vouched_fault,
        past=record.past,
    )


def has_restored(state: FleetState) -> bool:
    """Return whether the run has restored everything that its predecessor knew."""
    return state.is_restored and not state.restore_error


def is_restoring(state: FleetState, now: datetime) -> bool:
    """Return whether the previous run may still report that a node that looks good is bad."""
    return not state.is_restored and (state.restore_until is None or now < state.restore_until)


def start_restore_timeout(state: FleetState, now: datetime) -> FleetState:
    """Start the timeout for restoring: the nodes are known now."""
    if state.restore_until is not None or not state.nodes:
        return state
    return replace(state, restore_until=now + RESTORE_TIMEOUT)


def give_up_restoring(state: FleetState, now: datetime) -> FleetState:
    if state.is_restored or is_restoring(state, now):
        return state
    state = replace(
        state,
        is_restored=True,
        restore_error=f"it did not say so within {RESTORE_TIMEOUT.total_seconds():.0f} s",
    )
    return add_notice(
        state,
        "the state of the run before could not be read: "
        "quarantines, pauses and faults of before are forgotten",
        now,
    )


def restore_state(state: FleetState, fact: PreviousRun, now: datetime) -> FleetState:
    """Restore the state where nothing newer is known. Done once, or again if parts could not be
    read at first."""
    if (state.is_restored and not state.restore_error) or not state.nodes:
        return state
    is_news = fact.lost != state.restore_error
    is_first, was_open = not state.is_restored, state.breaker.is_open
    state = replace(_take_over(state, fact), restore_error=fact.lost)
    state = _clear_suspects(state, fact, now, can_close=is_first)
    present = {record.name for record in state.nodes}
    gone = [record for record in fact.nodes if record.name not in present]
    state = keep_removed(state, gone, now) if gone else state
    if fact.lost and is_news:
        state = add_notice(
            state,
            f"what a run before this one knew of nodes is not to be had, "
            f"and has to be said again: {fact.lost}",
            now,
        )
    if not was_open:
        # As many nodes were out before without opening the breaker, or a person knew of it.
        out = sum(is_out(node) and not node.is_removed for node in state.nodes)
        state = replace(state, out_when_resumed=max(state.out_when_resumed, out))
    known = {record.name for record in fact.nodes}
    out = sum(
        node.status is not NodeStatus.IN_SERVICE and node.name in known for node in state.nodes
    )
    parts = [f"{count_noun(out, 'node')} out of service"] if out else []
    parts += ["an open breaker"] if fact.breaker.is_open and state.breaker.is_open else []
    parts += ["a pause of repairs"] if fact.breaker.paused and state.breaker.paused else []
    return (
        add_notice(state, f"remembers {' and '.join(parts)} from the run before", now)
        if parts
        else state
    )


def _take_over(state: FleetState, fact: PreviousRun) -> FleetState:
    known = {
        **{one.record.name: one.record for one in fact.removed if one.record.by != FLEET_FILE},
        **{record.name: record for record in fact.nodes},
    }
    here = {record.name for record in (*state.nodes, *(one.record for one in state.removed))}
    removed = (*(one for one in fact.removed if one.record.name not in here), *state.removed)
    nodes = tuple(_restore_node(node, known.get(node.name)) for node in state.nodes)
    state = record_moves(restore_claims(state, fact.claims), fact.logins)
    return replace(
        state,
        nodes=nodes,
        breaker=_restore_breaker(state.breaker, fact.breaker),
        is_restored=True,
        removed=removed,
    )


def _clear_suspects(
    state: FleetState, fact: PreviousRun, now: datetime, can_close: bool
) -> FleetState:
    """Put nodes in service that are suspects by what jobs repeat of the time before they were
    found healthy or released.

    A claim may come before what the run before knew.

    Args:
        can_close: Whether the breaker, if it is open, can only be open for the number of nodes that
            are out: until the first restore no reboot is permitted. It opens again if too many
            others are out.
    """
    known = {one.name: one for one in fact.nodes if one.status is NodeStatus.IN_SERVICE}
    nodes = tuple(
        _clear_suspect(node, known[node.name].cleared_at, now) if node.name in known else node
        for node in state.nodes
    )
    if nodes == state.nodes:
        return state
    state = replace(state, nodes=nodes)
    if can_close and not fact.breaker.is_open:
        state = replace(state, breaker=replace(state.breaker, reason="", since=None))
    return state


def _clear_suspect(record: NodeRecord, cleared_at: datetime | None, now: datetime) -> NodeRecord:
    by_marks = explain_marks(record)
    is_suspect = record.status is NodeStatus.SUSPECT and (record.reason, record.by) == by_marks
    if cleared_at is None or not is_suspect:
        return record
    marks = tuple(
        replace(mark, retracted=BEFORE_CLEARING)
        if mark.at <= cleared_at and not mark.retracted
        else mark
        for mark in record.marks
    )
    cleared = replace(record, marks=marks)
    return record if explain_marks(cleared)[0] else put_in_service(cleared, now, BEFORE_CLEARING)


def _restore_node(record: NodeRecord, known: NodeRecord | None) -> NodeRecord:
    if known is not None:
        record = replace(
            record,
            power_cycles=tuple(dict.fromkeys((*known.power_cycles, *record.power_cycles))),
            healed=tuple(dict.fromkeys((*known.healed, *record.healed)))[-MAX_HEALED:],
            cleared_at=_newest(known.cleared_at, record.cleared_at),
            released_at=_newest(known.released_at, record.released_at),
            vouched_fault=record.vouched_fault or known.vouched_fault,
            past=tuple(dict.fromkeys((*known.past, *record.past)))[-MAX_PAST:],
        )
    if known is None:
        return record
    # A release or a quarantine that a person ordered since takes precedence, but a job's suspicion
    # does not replace a quarantine.
    is_news = record.status is not NodeStatus.IN_SERVICE or record.since is not None
    if is_news and not (
        record.status is NodeStatus.SUSPECT and known.status is NodeStatus.QUARANTINED
    ):
        # The deadline by which other jobs must leave a suspect was already announced.
        return (
            replace(record, repair_drain=known.repair_drain)
            if record.status is known.status is NodeStatus.SUSPECT
            else record
        )
    old = {_name(mark) for mark in known.marks}
    new = tuple(mark for mark in record.marks if _name(mark) not in old)
    return replace(
        record,
        status=known.status,
        reason=known.reason,
        by=known.by,
        since=known.since,
        drain=known.drain,
        repair_drain=known.repair_drain,
        marks=tuple(sorted((*known.marks, *new), key=lambda mark: mark.at)),
        verdict=record.verdict or known.verdict,
        verdict_at=record.verdict_at or known.verdict_at,
        verdict_reason=record.verdict_reason or known.verdict_reason,
    )


def _newest(*times: datetime | None) -> datetime | None:
    return max((at for at in times if at is not None), default=None)


def _name(mark: Mark) -> tuple[str, int, int]:
    return mark.job, mark.submission, mark.generation


def _restore_breaker(now: Breaker, before: Breaker) -> Breaker:
    if now.resumed_at is not None:
        return now
    if not now.is_open:
        now = replace(now, reason=before.reason, since=before.since)
    if not now.paused:
        now = replace(now, paused=before.paused, paused_since=before.paused_since)
    return now
