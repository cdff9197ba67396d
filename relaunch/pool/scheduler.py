"""Scheduler of one pool of nodes: facts change its state, and settling the state gives orders.

This module only calls the others: `claims` and `nodes` apply facts, `allocate` grants nodes,
`breaker` decides when to stop. A settled state gives no order twice, and every step is repeatable:
equal states, facts and times give equal orders.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import datetime, timedelta
from typing import assert_never

from relaunch.pool import breaker
from relaunch.pool import claims as fleet_claims
from relaunch.pool import nodes as fleet_nodes
from relaunch.pool import restore as fleet_memory
from relaunch.pool.breaker import is_silent_since_reboot
from relaunch.pool.drains import request_drains
from relaunch.pool.events import (
    ClaimEvent,
    ClaimReminder,
    DeathDeclaration,
    EndedJobs,
    FaultReportEvent,
    FleetEvent,
    FleetFileContent,
    GrantMessage,
    MalformedMessage,
    Order,
    PauseCommand,
    PermitRequestEvent,
    PreviousRun,
    ProbeOrder,
    ProbeResults,
    QuarantineCommand,
    ReclaimOrder,
    ReclaimResult,
    ReleaseCommand,
    RepairRequest,
    RepairResult,
    RepairStart,
    ResumeCommand,
    RunningJobs,
    ScheduleResult,
)
from relaunch.pool.grants import (
    PROBE_WAIT,
    allocate,
    end_offers,
    make_offers,
    offer_times,
    yield_time,
)
from relaunch.pool.messages import Grant
from relaunch.pool.nodes import (
    INVENTORY_INTERVAL,
    MAX_INVENTORIES,
    PROBE_LIFETIME,
    can_read_inventory,
    is_probe_due,
    probe_delay,
)
from relaunch.pool.placement import Placement
from relaunch.pool.state import ClaimRecord, FleetState, NodeRecord, NodeStatus, RecentReclaim

SWEEP_INTERVAL = timedelta(seconds=60)
"""Time between two probes of all nodes: how long ranks of no known job may go unseen."""
CLAIMS_TIMEOUT = timedelta(seconds=30)
"""How long a restarted fleet waits for jobs to claim what they hold: restarting a worker meanwhile
takes ten seconds."""
RECLAIM_INTERVAL = timedelta(seconds=10)
"""Delay after an order to stop ranks that ended without success."""
MIN_WAKE_DELAY = timedelta(seconds=1)
"""Shortest time between two wakes without news."""


def apply_event(state: FleetState, fact: FleetEvent, now: datetime) -> FleetState:
    """Apply one fact. Applying it again changes nothing."""
    match fact:
        case FleetFileContent():
            return fleet_memory.start_restore_timeout(
                fleet_nodes.apply_fleet_file(state, fact, now), now
            )
        case RunningJobs():
            return _found(state, fact, now)
        case PreviousRun():
            return fleet_memory.restore_state(state, fact, now)
        case ClaimEvent():
            return fleet_claims.record_claim(state, fact.claim, now)
        case FaultReportEvent():
            return fleet_claims.record_faults(state, fact.report, now)
        case ProbeResults():
            return fleet_nodes.record_probes(state, fact.probes, now)
        case EndedJobs():
            return fleet_claims.close_claims(state, fact.jobs, now)
        case ReclaimResult():
            return fleet_claims.free_stopped_nodes(state, fact, now)
        case RepairStart():
            return fleet_nodes.record_repair_start(state, fact, now)
        case PermitRequestEvent():
            return breaker.record_permit_request(state, fact, now)
        case RepairResult():
            return fleet_nodes.record_repair_result(state, fact, now)
        case QuarantineCommand():
            return fleet_nodes.quarantine_node(state, fact, now)
        case ReleaseCommand():
            return fleet_nodes.release_node(state, fact, now)
        case DeathDeclaration():
            return fleet_nodes.declare_dead(state, fact, now)
        case PauseCommand():
            return breaker.pause_repairs(state, fact, now)
        case ResumeCommand():
            return breaker.resume_repairs(state, fact, now)
        case MalformedMessage():
            return fleet_nodes.add_notice(state, f"{fact.name}: {fact.reason}", now)
        case _:
            assert_never(fact)


def schedule(state: FleetState, now: datetime, busy: frozenset[str]) -> ScheduleResult:
    """Do everything that can be done now. `busy` names the orders under way: `look`,
    `reclaim/JOB/SUBMISSION`."""
    state = fleet_nodes.forget_removed_nodes(
        fleet_nodes.give_up_overdue_repairs(fleet_memory.give_up_restoring(state, now), now)
    )
    if (
        not state.is_probed
        and state.nodes
        and all(node.probed_at is not None for node in state.nodes)
    ):
        state = replace(state, is_probed=True)
    state = breaker.open_if_too_many_out(fleet_nodes.suspect_incomplete_nodes(state, now), now)
    orders: list[Order] = []
    state, numbers = _behind(state)
    orders += numbers
    state, permits = breaker.answer_permit_requests(state, now)
    state = breaker.open_if_too_many_out(
        state, now
    )  # a repair refused because jobs share the node makes it a suspect
    orders += permits
    state, repairs = _repairs(state, now)
    orders += repairs
    state, leaves = request_drains(state, now)
    orders += leaves
    wanted: list[int] = []
    before = None
    while (
        before != state.offers
    ):  # a claim may wait for just the nodes of an offer that was not taken
        state = end_offers(state, now)
        before = state.offers
        board = Placement(state, now)
        done = allocate(state, board, now, busy)
        orders += done.tells
        wanted = done.looks
        claims = tuple(done.claims[record.claim.job] for record in state.claims)
        if claims != state.claims:
            state = replace(state, claims=claims, progress_at=done.moved_at)
        state = end_offers(state, now)
    state, offers, doubtful = make_offers(state, board, now)
    orders += offers
    state, claims_again = _asked(state)
    orders += claims_again
    state, reclaims = _reclaims(state, now, busy)
    orders += reclaims
    state, looks = _looks(state, board, [*wanted, *doubtful], now, busy)
    orders += looks
    return ScheduleResult(state, tuple(orders))


def next_wake(state: FleetState, now: datetime) -> datetime:
    """Return when to settle even if no fact arrives."""
    times = [(state.swept_at or now) + SWEEP_INTERVAL]
    later = [one.at + RECLAIM_INTERVAL for one in state.recent_reclaims]
    later += [record.reason_due_at for record in state.claims if record.reason_due_at is not None]
    later += [
        node.repair_since + fleet_nodes.REPAIR_TIMEOUT
        for node in state.nodes
        if node.repair_since is not None
    ]
    if state.awaited_jobs and state.awaited_until is not None:
        later.append(state.awaited_until)
    if not state.is_restored and state.restore_until is not None:
        later.append(state.restore_until)
    later += [
        node.probed_at + probe_delay(node, now)
        for node in state.nodes
        if node.probed_at is not None and node.probe and node.probe.inventory_pending
    ]
    later += offer_times(state)
    later += [
        record.waiting_since + PROBE_WAIT
        for record in state.claims
        if record.is_waiting
        and record.waiting_since is not None
        and record.claim.nodes < record.claim.max_nodes
    ]
    if (stuck := yield_time(state)) is not None:
        later.append(stuck)
    if not state.is_probed or any(record.is_waiting for record in state.claims):
        held = {place.node for record in state.claims for place in record.places}
        later += [
            max(at for at in (node.probed_at, node.probe_ordered_at) if at is not None)
            + probe_delay(node, now)
            for node in state.nodes
            if _is_watched(node, held)
        ]
        # Foreign processes on these GPUs may be gone by now.
        later += [
            node.inventory_at + PROBE_LIFETIME
            for node in state.nodes
            if node.inventory_at is not None and node.foreign_processes
        ]
    # Times in the past were handled when the state was settled, are no longer needed, or have news
    # on the way.
    times += [at for at in later if at > now]
    return max(min(times), now + MIN_WAKE_DELAY)


def _is_watched(node: NodeRecord, held: set[str]) -> bool:
    """Return whether a probe of the node may bring news that a claim waits for."""
    if (
        node.status not in (NodeStatus.IN_SERVICE, NodeStatus.SUSPECT)
        or node.probe_ordered_at is None
    ):
        return False
    if node.probe is None or node.probed_at is None or node.probed_at < node.probe_ordered_at:
        return True
    return bool(
        node.probe.silent or node.probe.busy or (node.probe.generations and node.name not in held)
    )


# --- a restarted fleet


def _found(state: FleetState, fact: RunningJobs, now: datetime) -> FleetState:
    known = {record.claim.job for record in state.claims if not record.is_restored} | {
        one.job for one in state.last_claims
    }
    awaited = tuple(job for job in dict.fromkeys(fact.jobs) if job not in known)
    return replace(
        state, awaited_jobs=awaited, awaited_until=state.awaited_until or now + CLAIMS_TIMEOUT
    )


def _asked(state: FleetState) -> tuple[FleetState, list[ClaimReminder]]:
    """Ask jobs what they hold, each once."""
    ask = tuple(job for job in state.awaited_jobs or () if job not in state.asked_jobs)
    return (replace(state, asked_jobs=(*state.asked_jobs, *ask)) if ask else state), [
        ClaimReminder(job) for job in ask
    ]


def _behind(state: FleetState) -> tuple[FleetState, list[GrantMessage]]:
    """Notify jobs whose submission is lower than a known one, so that they take a higher number."""
    reason = "a submission of this job that was numbered higher is known: the server's clock was set back in between"
    tells = [
        GrantMessage(
            one.job, Grant(one.submission, one.seq, "behind", reason=reason, above=one.above)
        )
        for one in state.behind
    ]
    return (replace(state, behind=()) if tells else state), tells


# --- ranks that no running job answers for


def _reclaims(
    state: FleetState, now: datetime, busy: frozenset[str]
) -> tuple[FleetState, list[Order]]:
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    records = {record.claim.job: record for record in state.claims}
    given_back = {one.job: one for one in state.last_claims}
    for record in state.claims:
        if record.is_closed:
            found[record.key].update(
                place.node for place in record.places if place.node not in record.old_logins
            )
        elif record.is_waiting and record.wait_reason and record.inherited:
            # A claim that comes before this one may wait for just these nodes.
            older = record.claim.job, record.claim.submission - 1
            found[older].update(
                place.node for place in record.inherited if place.node not in record.old_logins
            )
    for node in state.nodes if state.awaited_jobs is not None else ():
        for living in node.probe.generations if node.probe else ():
            known, last = records.get(living.job), given_back.get(living.job)
            if living.job in (state.awaited_jobs or ()):
                continue
            if known is not None:
                if known.is_closed and living.submission <= known.claim.submission:
                    found[known.key].add(node.name)
                elif living.submission < known.claim.submission and _is_forgotten(known, node.name):
                    found[living.job, known.claim.submission - 1].add(node.name)
            elif (
                last is None or node.probed_at is None or node.probed_at - last.at >= PROBE_LIFETIME
            ):
                # A probe that was under way when the job gave back its nodes still shows its ranks:
                # ignore those.
                found[living.job, living.submission].add(node.name)
    recent = tuple(one for one in state.recent_reclaims if now - one.at < RECLAIM_INTERVAL)
    wait = {(one.job, one.submission) for one in recent}
    due = [
        key
        for key in sorted(found)
        if found[key] and key not in wait and f"reclaim/{key[0]}/{key[1]}" not in busy
    ]
    recent += tuple(RecentReclaim(*key, now) for key in due)
    if recent != state.recent_reclaims:
        state = replace(state, recent_reclaims=recent)
    return state, [ReclaimOrder(*key, tuple(sorted(found[key]))) for key in due]


def _is_forgotten(record: ClaimRecord, node: str) -> bool:
    """Return whether the job itself does not stop ranks of an earlier submission there.

    Its grant names such nodes, but a grant may be long in coming.
    """
    if record.is_waiting:
        return bool(record.wait_reason)
    told = record.answer.holding if record.answer else ()
    return node not in told and all(place.node != node for place in record.places)


# --- repairs and probes


def _repairs(state: FleetState, now: datetime) -> tuple[FleetState, list[Order]]:
    room = breaker.max_repairs(state) - breaker.count_repairs(state)
    if room <= 0 or not breaker.may_repair(state) or not state.is_probed:
        return state, []
    if fleet_nodes.is_awaiting(state, now) or fleet_memory.is_restoring(state, now):
        return state, []
    held = {place.node for record in state.claims for place in record.places}
    suspects = [
        (node.since or now, index)
        for index, node in enumerate(state.nodes)
        if node.status is NodeStatus.SUSPECT
        and not node.repair
        and node.name not in held
        and not (node.probe and node.probe.generations)
    ]
    orders: list[Order] = []
    nodes = list(state.nodes)
    for _, index in sorted(suspects)[:room]:
        node = nodes[index]
        gpus = tuple(
            dict.fromkeys(gpu for mark in node.marks if not mark.retracted for gpu in mark.gpus)
        )
        orders.append(
            RepairRequest(node.name, node.reason, gpus, after_reboot=is_silent_since_reboot(node))
        )
        repair = f"repair/{state.name}/{node.name}"
        nodes[index] = replace(
            node,
            status=NodeStatus.REPAIRING,
            since=now,
            repair=repair,
            repair_since=now,
            repair_acts=False,
        )
    return (replace(state, nodes=tuple(nodes)) if orders else state), orders


def _looks(
    state: FleetState, board: Placement, wanted: list[int], now: datetime, busy: frozenset[str]
) -> tuple[FleetState, list[Order]]:
    if "look" in busy or not state.nodes:
        return state, []
    reads = frozenset(
        index for index in wanted if can_read_inventory(state.nodes[index], now, PROBE_LIFETIME)
    )
    if state.swept_at is None or now - state.swept_at >= SWEEP_INTERVAL:
        nodes = list(range(len(state.nodes)))
        state = replace(state, swept_at=now)
    else:
        # Also probe where nothing can start before it is known which ranks live there (the whole
        # fleet, or one repair), and where a reading may have ended.
        unknown = [
            index
            for index, node in enumerate(state.nodes)
            if (
                node.probed_at is None
                or (node.probe is not None and node.probe.inventory_pending)
                or (
                    node.status is NodeStatus.SUSPECT
                    and board.is_free(index)
                    and board.has_living(index)
                )
            )
            and is_probe_due(node, now)
        ]
        nodes = list(dict.fromkeys((*wanted, *unknown)))
    if not nodes:
        return state, []
    old = [
        index
        for index in nodes
        if can_read_inventory(state.nodes[index], now, INVENTORY_INTERVAL)
        and not board.is_full(index)
        and index not in reads
    ]
    # With each sweep read some nodes of a large fleet, those not read for longest first.
    old.sort(
        key=lambda index: (at := state.nodes[index].inventory_at) is not None and at.timestamp()
    )
    reads |= set(old[: max(0, MAX_INVENTORIES - len(reads))])
    order = ProbeOrder(
        tuple(state.nodes[index].name for index in nodes),
        tuple(state.nodes[index].name for index in nodes if index in reads),
    )
    asked = frozenset(nodes)
    records = tuple(
        replace(node, probe_ordered_at=now) if index in asked else node
        for index, node in enumerate(state.nodes)
    )
    return replace(state, nodes=records, probe_count=state.probe_count + 1), [order]
