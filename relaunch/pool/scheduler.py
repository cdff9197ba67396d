"""Scheduler of one pool of nodes: events change its state, and scheduling it gives orders.

`apply_event` takes in what jobs, nodes, repairs and people say; `schedule` runs every pass once, in
an order that it explains. A scheduled state gives no order twice, and every step is repeatable:
equal states, events and times give equal results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import assert_never

from relaunch.access.orders import REFUSED, PersonOrder, check_order
from relaunch.pool import breaker, claims, nodes, restore
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
    PersonCommand,
    PreviousRun,
    ProbeOrder,
    ProbeResults,
    QuarantineCommand,
    ReclaimOrder,
    ReclaimResult,
    ReleaseCommand,
    RepairResult,
    RepairStart,
    ResumeCommand,
    RunningJobs,
    ScheduleResult,
)
from relaunch.pool.grants import PROBE_WAIT, grant_nodes, offer_nodes, offer_times, yield_time
from relaunch.pool.messages import Claim, Grant
from relaunch.pool.nodes import (
    FAULT_INTERVAL,
    INVENTORY_INTERVAL,
    MAX_INVENTORIES,
    PROBE_LIFETIME,
    SWEEP_INTERVAL,
    can_read_inventory,
    is_probe_due,
    probe_delay,
)
from relaunch.pool.placement import NodeUse, Placement
from relaunch.pool.rounds import Digests, KnownNode, list_known
from relaunch.pool.state import (
    ClaimRecord,
    FleetState,
    LiveGeneration,
    NodeRecord,
    NodeStatus,
    RecentReclaim,
)
from relaunch.spec.access import Permission
from relaunch.text import join_names

CLAIMS_TIMEOUT = timedelta(seconds=30)
"""How long a restarted fleet waits for jobs to claim what they hold: restarting a worker meanwhile
takes ten seconds."""
RECLAIM_INTERVAL = timedelta(seconds=10)
"""Delay after an order to stop ranks that ended without success."""
MAX_PROBED = 2048
"""Nodes probed with one order: their answers are half a megabyte of JSON, and a claim that waits
for a probe waits for those under way."""
MIN_WAKE_DELAY = timedelta(seconds=1)
"""Shortest time between two wakes without news."""
PROBE, WATCH = "probe", "watch"
"""Keys of what may be under way."""


def apply_event(state: FleetState, event: FleetEvent, now: datetime) -> FleetState:
    """Apply one event. Applying it again changes nothing."""
    if isinstance(event, PersonCommand):
        return _apply_command(state, event, now)
    match event:
        case FleetFileContent():
            return restore.start_restore_timeout(nodes.apply_fleet_file(state, event, now), now)
        case RunningJobs():
            return _record_running_jobs(state, event, now)
        case PreviousRun():
            return restore.restore_state(state, event, now)
        case ClaimEvent():
            return claims.record_claim(state, event.claim, now)
        case FaultReportEvent():
            return claims.record_faults(state, event.report, now)
        case ProbeResults():
            state = nodes.record_probes(state, event.probes, now)
            return replace(state, watched_at=now) if event.is_sweep else state
        case EndedJobs():
            return claims.close_claims(state, event.jobs, now)
        case ReclaimResult():
            return claims.free_stopped_nodes(state, event, now)
        case RepairStart():
            return nodes.record_repair_start(state, event, now)
        case PermitRequestEvent():
            return breaker.record_permit_request(state, event, now)
        case RepairResult():
            return nodes.record_repair_result(state, event, now)
        case MalformedMessage():
            return nodes.add_notice(state, f"{event.name}: {event.reason}", now)
        case _:
            assert_never(event)


def _apply_command(state: FleetState, command: PersonCommand, now: datetime) -> FleetState:
    """Apply what a person orders, or note that they may not."""
    permission, what = _describe_command(command)
    order = PersonOrder(permission, what, command.by, command.signed)
    verdict = check_order(state.access, state.name, order, now, state.used_proofs)
    if verdict.used != state.used_proofs:
        state = replace(state, used_proofs=verdict.used)
    if verdict.refusal:
        return nodes.add_notice(state, f"{REFUSED}{verdict.refusal}", now)
    command = replace(command, by=verdict.by)
    match command:
        case QuarantineCommand():
            return nodes.quarantine_node(state, command, now)
        case ReleaseCommand():
            return nodes.release_node(state, command, now)
        case DeathDeclaration():
            return nodes.declare_dead(state, command, now)
        case PauseCommand():
            return breaker.pause_repairs(state, command, now)
        case ResumeCommand():
            return breaker.resume_repairs(state, command, now)
        case _:
            assert_never(command)


def _describe_command(command: PersonCommand) -> tuple[Permission, str]:
    """Return which permission a command takes, and what it does, as it follows `may not`."""
    match command:
        case QuarantineCommand():
            return "drain", f"{'drain' if command.drain_within else 'quarantine'} {command.node}"
        case ReleaseCommand():
            return "drain", f"release {command.node}"
        case DeathDeclaration():
            return "declare-dead", f"declare {command.node} dead"
        case PauseCommand():
            return "pause", "pause repairs"
        case ResumeCommand():
            return "pause", "resume repairs"
        case _:
            assert_never(command)


def schedule(state: FleetState, now: datetime, under_way: frozenset[str]) -> ScheduleResult:
    """Schedule a state as `Scheduler` does, without one that has followed the fleet."""
    return Scheduler().schedule(state, now, under_way)


def next_wake(
    state: FleetState, now: datetime, under_way: frozenset[str] = frozenset()
) -> datetime | None:
    return Scheduler().next_wake(state, now, under_way)


class Scheduler:
    """Schedules one fleet again and again.

    Its results depend on its arguments only. It keeps the placement of the last time, so that a
    fleet of ten thousand nodes is not gone through for each message: `docs/decisions/0050`.
    """

    def __init__(self, spares_renamed: Callable[[], bool] = lambda: True) -> None:
        """Initialize.

        Args:
            spares_renamed: Asked where ranks seem misplaced that may be on a node by another name
                or login: whether they are left alone. Release 0.1.0 stopped them.
        """
        self._spares_renamed = spares_renamed
        self._placement = Placement(FleetState(""), datetime.min.replace(tzinfo=UTC))
        self._digests = Digests()

    def schedule(
        self, state: FleetState, now: datetime, under_way: frozenset[str]
    ) -> ScheduleResult:
        """Run every pass once, in this order. A pass sees what those before it have changed.

        First what is known is brought up to date, then nodes are taken out of service and repaired,
        then nodes are granted, and last the fleet asks for what it does not know.

        Args:
            state: The state with all events applied.
            now: Time by the workflow's clock.
            under_way: Keys of what is under way: `probe`, `reclaim/JOB/SUBMISSION`, and `watch`,
                which probes all nodes every `SWEEP_INTERVAL` and reports what has changed.
        """
        orders: list[Order] = []

        def notable() -> list[NodeRecord]:
            return self.list_notable(state, now)

        # What has waited too long is given up first: other passes wait for it.
        state = restore.give_up_restoring(state, now)
        state = nodes.give_up_overdue_repairs(state, now, notable())
        # Nodes go that no job and no repair needs any more, so that they count nowhere below.
        state = nodes.forget_removed_nodes(state, now, notable())
        # Before every node was probed it is unknown which ranks live where: nothing is granted.
        state = _note_first_probes(state)

        # New suspects come before the breaker, which counts them. While it is open, the passes
        # below neither repair nor grant.
        state = nodes.suspect_faulty_nodes(state, now, notable())
        state = breaker.open_if_too_many_out(state, now, notable())

        # Needs nothing and hinders nothing: a job with a number that is too low has to submit
        # again.
        state, late_answers = _answer_late_submissions(state)
        orders += late_answers

        # Permits come before new repairs: a repair under way is finished first. A permit that is
        # refused because jobs share the node makes the node a suspect, so the breaker counts again.
        state, permits = breaker.answer_permit_requests(state, now)
        state = breaker.open_if_too_many_out(state, now, notable())
        orders += permits
        # Repairs come before grants: an unused suspect is repaired now, and is no node to wait for.
        state = breaker.suspect_node_to_reset(state, now, notable())
        state, repairs = breaker.start_repairs(state, now, notable())
        orders += repairs
        # A suspect that jobs share is drained first. After the repairs, so that only suspects are
        # asked for that no repair could take.
        state, drains = request_drains(state, now, notable())
        orders += drains

        # Waiting claims come before offers: running jobs are offered only what no claim waits for.
        granted = grant_nodes(state, now, under_way, self._placement)
        orders += granted.messages
        offered = offer_nodes(granted.state, self._placement, now)
        orders += offered.messages
        state = offered.state

        # What the fleet does not know it asks for, and what belongs to no job it stops. After the
        # grants: a claim that waits says whether the fleet or its job stops ranks before it, and
        # which nodes have to be probed.
        state, reminders = _remind_jobs(state)
        orders += reminders
        state, reclaims = _reclaim_nodes(
            state, now, under_way, self._placement, self._spares_renamed
        )
        orders += reclaims
        wanted = [*granted.probes, *offered.probes]
        state, probes = _order_probes(state, self._placement, wanted, now, under_way)
        orders += probes
        return ScheduleResult(state, tuple(orders))

    def next_wake(
        self, state: FleetState, now: datetime, under_way: frozenset[str] = frozenset()
    ) -> datetime | None:
        """Return when to schedule even if no fact arrives; None: only then."""
        times: list[datetime] = []
        if WATCH not in under_way:
            times.append((_last_sweep(state) or now) + SWEEP_INTERVAL)
        elif self._is_unsettled(state, now):
            times.append(now + SWEEP_INTERVAL)
        later = [one.at + RECLAIM_INTERVAL for one in state.recent_reclaims]
        later += [
            record.reason_due_at for record in state.claims if record.reason_due_at is not None
        ]
        notable = self.list_notable(state, now)
        later += [
            node.repair_since + nodes.REPAIR_TIMEOUT
            for node in notable
            if node.repair_since is not None
        ]
        if state.awaited_jobs and state.awaited_until is not None:
            later.append(state.awaited_until)
        if not state.is_restored and state.restore_until is not None:
            later.append(state.restore_until)
        if not _is_reread_by_watch(state, under_way):
            later += [
                node.probed_at + probe_delay(node, now)
                for node in notable
                if node.probed_at is not None and node.probe and node.probe.inventory_pending
            ]
        later += offer_times(state)
        waiting = [record for record in state.claims if record.is_waiting]
        later += [
            record.waiting_since + PROBE_WAIT
            for record in waiting
            if record.waiting_since is not None and record.claim.nodes < record.claim.max_nodes
        ]
        if (stuck := yield_time(state)) is not None:
            later.append(stuck)
        if not state.is_probed or waiting:
            watched = [use.record for use in self._placement.watched]
            later += [
                max(at for at in (node.probed_at, node.probe_ordered_at) if at is not None)
                + probe_delay(node, now)
                for node in watched
            ]
            # Foreign processes on these GPUs may be gone by now.
            later += [
                use.record.inventory_at + PROBE_LIFETIME
                for use in self._placement.foreign
                if use.record.inventory_at is not None
            ]
        # Times in the past were handled by `schedule`, are no longer needed, or have news on the
        # way.
        times += [at for at in later if at > now]
        return max(min(times), now + MIN_WAKE_DELAY) if times else None

    def list_known(self, state: FleetState, now: datetime) -> tuple[KnownNode, ...]:
        """Return what the fleet knows of its nodes, for its watch."""
        self._placement.update(state, now)
        return list_known(self._placement.nodes, now, self._digests)

    def _is_unsettled(self, state: FleetState, now: datetime) -> bool:
        """Return whether anything may be decided in another way just because time passes: a limit
        of reboots an hour, a job that has waited long, a time by which jobs must leave a node."""
        return (
            bool(state.requests)
            or any(record.is_waiting for record in state.claims)
            or any(
                node.status in (NodeStatus.SUSPECT, NodeStatus.REPAIRING)
                or node.drain is not None
                or node.repair_drain is not None
                for node in self.list_notable(state, now)
            )
        )

    def count_free(self, state: FleetState, now: datetime, claim: Claim) -> int:
        """Return how many free nodes a claim could have beside those that it avoids."""
        self._placement.update(state, now)
        return self._placement.count_free(claim)

    def list_notable(self, state: FleetState, now: datetime) -> list[NodeRecord]:
        """Return the nodes of which there is more to say than that they are in service and
        answer, in the order of the fleet file."""
        self._placement.update(state, now)
        return [use.record for use in self._placement.list_notable()]


# --- a restarted fleet


def _record_running_jobs(state: FleetState, event: RunningJobs, now: datetime) -> FleetState:
    """Wait for the claims of the jobs that run, except those that have claimed since."""
    known = {record.claim.job for record in state.claims if not record.is_restored}
    known |= {one.job for one in state.last_claims}
    awaited = tuple(job for job in dict.fromkeys(event.jobs) if job not in known)
    until = state.awaited_until or now + CLAIMS_TIMEOUT
    return replace(state, awaited_jobs=awaited, awaited_until=until)


def _note_first_probes(state: FleetState) -> FleetState:
    """Note when every node has been probed since this run of the fleet began."""
    if state.is_probed or not state.nodes:
        return state
    if any(node.probed_at is None for node in state.nodes):
        return state
    return replace(state, is_probed=True)


def _remind_jobs(state: FleetState) -> tuple[FleetState, list[ClaimReminder]]:
    """Ask running jobs what they hold, each once."""
    jobs = tuple(job for job in state.awaited_jobs or () if job not in state.asked_jobs)
    if jobs:
        state = replace(state, asked_jobs=(*state.asked_jobs, *jobs))
    return state, [ClaimReminder(job) for job in jobs]


def _answer_late_submissions(state: FleetState) -> tuple[FleetState, list[GrantMessage]]:
    """Notify jobs that know less than the fleet of what they did, so that they take a higher
    submission."""
    clock = (
        "a submission of this job that was numbered higher is known: "
        "the server's clock was set back in between"
    )
    reset = "a later claim of this submission is known: its workflow was reset"
    messages = [
        GrantMessage(
            one.job,
            Grant(
                one.submission,
                one.seq,
                "behind",
                reason=clock if one.above > one.submission else reset,
                above=one.above,
            ),
        )
        for one in state.behind
    ]
    return (replace(state, behind=()) if messages else state), messages


# --- ranks that no running job answers for


def _reclaim_nodes(
    state: FleetState,
    now: datetime,
    under_way: frozenset[str],
    placement: Placement,
    spares_renamed: Callable[[], bool],
) -> tuple[FleetState, list[ReclaimOrder]]:
    """Stop the ranks that no running job stops, each submission again after `RECLAIM_INTERVAL`."""
    orphaned = _find_orphaned_ranks(state, placement)
    found = [ReclaimOrder(*key, tuple(sorted(orphaned[key]))) for key in sorted(orphaned)]
    found += _find_misplaced_ranks(state, placement, spares_renamed)
    recent = tuple(one for one in state.recent_reclaims if now - one.at < RECLAIM_INTERVAL)
    ordered = {(one.job, one.submission, one.generation) for one in recent}
    due = [
        order
        for order in found
        if (order.job, order.submission, order.generation) not in ordered
        and order.key not in under_way
    ]
    for order in due:
        recent += (RecentReclaim(order.job, order.submission, now, order.generation),)
        if order.generation is not None:
            state = nodes.add_notice(state, _describe_misplaced(order), now)
    if recent != state.recent_reclaims:
        state = replace(state, recent_reclaims=recent)
    return state, due


def _find_misplaced_ranks(
    state: FleetState, placement: Placement, spares_renamed: Callable[[], bool]
) -> list[ReclaimOrder]:
    """Return orders to stop ranks of running jobs on nodes that their claims do not hold.

    A job launches only on nodes that it was granted, and gives a node back only when its ranks
    there are proven gone, so there are none unless what the server knows is older than what the
    nodes do: its database was restored from a backup (`docs/decisions/0059`). Only the generation
    that was seen, and those below it, are stopped: the job may be granted the node meanwhile.

    A node that was renamed in the fleet file shows ranks that the job has by the name of before.
    """
    if state.awaited_jobs is None:
        return []
    running = {record.claim.job: record for record in state.claims if not record.is_closed}
    found: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for use in placement.orphaned:
        node = use.record
        newest: dict[str, LiveGeneration] = {}
        for one in node.probe.generations if node.probe else ():
            other = newest.get(one.job)
            if other is None or (other.submission, other.generation) < (
                one.submission,
                one.generation,
            ):
                newest[one.job] = one
        for job, one in newest.items():
            record = running.get(job)
            if (
                record is not None
                and job not in state.awaited_jobs
                and one.submission == record.claim.submission
                and _is_known_elsewhere(record, node)
            ):
                found[job, one.submission, one.generation].add(node.name)
    if found:
        in_file = {node.name for node in state.nodes if not node.is_removed}
        doubtful = {key for key in found if _has_renamed(running[key[0]], in_file)}
        if doubtful and spares_renamed():
            found = {key: names for key, names in found.items() if key not in doubtful}
    return [
        ReclaimOrder(job, submission, tuple(sorted(names)), generation)
        for (job, submission, generation), names in sorted(found.items())
    ]


def _has_renamed(record: ClaimRecord, in_file: set[str]) -> bool:
    """Return whether a node of the claim may show its ranks by another name."""
    return bool(record.old_logins) or any(place.node not in in_file for place in record.places)


def _is_known_elsewhere(record: ClaimRecord, node: NodeRecord) -> bool:
    """Return whether a claim certainly does not hold the node, and its last probe knew."""
    if record.is_restored or any(place.node == node.name for place in record.places):
        return False
    if record.answer and node.name in record.answer.holding:
        return False
    # A probe that was under way when the job gave back the node still shows its ranks.
    return record.claimed_at is None or (
        node.probed_at is not None and node.probed_at - record.claimed_at >= PROBE_LIFETIME
    )


def _describe_misplaced(order: ReclaimOrder) -> str:
    return (
        f"generation {order.generation} of job {order.job} lives on {join_names(order.nodes)},"
        " which the job does not have; relaunch stops it there. Was the server's database restored?"
    )


def _find_orphaned_ranks(
    state: FleetState, placement: Placement
) -> dict[tuple[str, int], set[str]]:
    """Return by (job, submission) the nodes on which ranks of it, or of earlier ones, may live and
    no running job stops them."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for record in state.claims:
        if record.is_closed:
            key, places = record.key, record.places
        elif record.is_waiting and record.wait_reason and record.inherited:
            # A claim that comes before this one may wait for just these nodes.
            key, places = (record.claim.job, record.claim.submission - 1), record.inherited
        else:
            continue
        # The host that answers for a moved node never saw the ranks.
        if nodes := {place.node for place in places if place.node not in record.old_logins}:
            found[key].update(nodes)
    if state.awaited_jobs is None:
        return found
    if not placement.orphaned:
        return found
    records = {record.claim.job: record for record in state.claims}
    last_claims = {one.job: one for one in state.last_claims}
    for node in (use.record for use in placement.orphaned):
        for one in node.probe.generations if node.probe else ():
            if one.job in state.awaited_jobs:
                continue
            known, last = records.get(one.job), last_claims.get(one.job)
            if known is not None:
                if known.is_closed and one.submission <= known.claim.submission:
                    found[known.key].add(node.name)
                elif one.submission < known.claim.submission and _is_forgotten(known, node.name):
                    found[one.job, known.claim.submission - 1].add(node.name)
            elif (
                last is None or node.probed_at is None or node.probed_at - last.at >= PROBE_LIFETIME
            ):
                # A probe that was under way when the job gave back its nodes still shows its ranks:
                # ignore those.
                found[one.job, one.submission].add(node.name)
    return found


def _is_forgotten(record: ClaimRecord, node: str) -> bool:
    """Return whether the job itself does not stop ranks of an earlier submission there.

    Its grant names such nodes, but a grant may be long in coming.
    """
    if record.is_waiting:
        return bool(record.wait_reason)
    named = record.answer.holding if record.answer else ()
    return node not in named and all(place.node != node for place in record.places)


# --- probes


def _order_probes(
    state: FleetState,
    placement: Placement,
    wanted: Sequence[NodeUse],
    now: datetime,
    under_way: frozenset[str],
) -> tuple[FleetState, list[ProbeOrder]]:
    """Probe the nodes that claims and offers wait for, those of which nothing is known, and once in
    `SWEEP_INTERVAL` all, unless they are watched; one order at a time, and `MAX_PROBED` nodes with
    each."""
    if PROBE in under_way or not placement.nodes:
        return state, []
    swept_at, last = state.swept_at, _last_sweep(state)
    if swept_at is None or last is None or _is_sweep_due(last, now, under_way):
        swept_at = now
        state = replace(state, swept_at=now)
    is_reread = _is_reread_by_watch(state, under_way)
    waits = any(record.is_waiting for record in state.claims)
    unknown = (use for use in placement.list_notable() if _is_unknown(use, now, is_reread, waits))
    unswept = (use for use in placement.nodes if _is_unswept(use, swept_at))
    uses = tuple(dict.fromkeys((*wanted, *unknown, *unswept)))[:MAX_PROBED]
    if not uses:
        return state, []
    to_read = _choose_inventories(uses, wanted, now, waits)
    probed = frozenset(use.name for use in uses)
    records = tuple(
        replace(node, probe_ordered_at=now) if node.name in probed else node for node in state.nodes
    )
    order = ProbeOrder(
        tuple(use.name for use in uses), tuple(use.name for use in uses if use in to_read)
    )
    return replace(state, nodes=records, probe_count=state.probe_count + 1), [order]


def _last_sweep(state: FleetState) -> datetime | None:
    """Return when all nodes were last probed."""
    return max((at for at in (state.swept_at, state.watched_at) if at is not None), default=None)


def _is_sweep_due(last: datetime, now: datetime, under_way: frozenset[str]) -> bool:
    return WATCH not in under_way and now - last >= SWEEP_INTERVAL


def _is_unswept(use: NodeUse, swept_at: datetime) -> bool:
    at = use.record.probe_ordered_at
    return at is None or at < swept_at


def _is_reread_by_watch(state: FleetState, under_way: frozenset[str]) -> bool:
    """Return whether it is early enough for the watch to find that a reading has ended: no job
    waits, and a driver that hangs would otherwise be asked every two seconds for as long."""
    return WATCH in under_way and not any(record.is_waiting for record in state.claims)


def _is_unknown(use: NodeUse, now: datetime, is_reread: bool, waits: bool) -> bool:
    """Return whether something waits for a probe of the node: the whole fleet, a repair that cannot
    start before it is known which ranks live there, a reading that may have ended, or a job, for a
    node whose fault may be over."""
    node = use.record
    is_unknown = (
        node.probed_at is None
        or (node.probe is not None and node.probe.inventory_pending and not is_reread)
        or (node.status is NodeStatus.SUSPECT and not use.holders and use.has_ranks())
        or (waits and _is_fault_due(use, now))
    )
    return is_unknown and is_probe_due(node, now)


def _is_fault_due(use: NodeUse, now: datetime) -> bool:
    return (
        bool(use.record.fault)
        and use.record.is_fault_unconfirmed
        and not use.is_full()
        and can_read_inventory(use.record, now, FAULT_INTERVAL)
    )


def _choose_inventories(
    uses: Sequence[NodeUse], wanted: Sequence[NodeUse], now: datetime, waits: bool
) -> set[NodeUse]:
    """Return the nodes whose GPUs are read with the probe: all that are wanted, and of a large
    fleet some others, those not read for longest first."""
    to_read = {use for use in wanted if can_read_inventory(use.record, now, PROBE_LIFETIME)}
    old = [
        use
        for use in uses
        if (
            can_read_inventory(use.record, now, INVENTORY_INTERVAL)
            or (waits and _is_fault_due(use, now))
        )
        and not use.is_full()
        and use not in to_read
    ]
    old.sort(key=lambda use: (at := use.record.inventory_at) is not None and at.timestamp())
    return to_read | set(old[: max(0, MAX_INVENTORIES - len(to_read))])
