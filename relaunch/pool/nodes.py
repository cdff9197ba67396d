"""Update the fleet's nodes from the fleet file, probes, repairs, and what people order for a
node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.evidence.fields import text
from relaunch.evidence.findings import Verdict
from relaunch.pool.claims import (
    RELAUNCH,
    declare_ranks_dead,
    explain_marks,
    record_moves,
    retract_marks,
)
from relaunch.pool.events import (
    DeathDeclaration,
    FleetFileContent,
    QuarantineCommand,
    ReleaseCommand,
    RepairResult,
    RepairStart,
)
from relaunch.pool.inventory import Inventory
from relaunch.pool.messages import DrainRequest, Healing
from relaunch.pool.state import (
    FleetState,
    LiveGeneration,
    NodeProbe,
    NodeRecord,
    NodeStatus,
    RemovedNode,
)
from relaunch.pool.status import put_in_service, quarantine, set_status
from relaunch.text import count_noun, format_time

FLEET_FILE = "fleet file"
"""The `by` of a quarantine of a node that the file no longer names."""
NOT_IN_FILE = "it is no longer in the fleet file"
FLEET = "fleet "
"""Prefix of the `by` of a repair that a fleet orders, not a person: `fleet gpus`."""
REPAIR_TIMEOUT = timedelta(hours=3)
"""A repair has two hours and reports its end itself: one that has not reported by then never
will."""
MAX_NOTICES = 50
MAX_HEALED = 9
"""Repairs that healed a node, kept of it: a reset of each of eight GPUs, and a reboot."""
MAX_MOVES_NAMED = 4
REMOVED_LIFETIME = timedelta(days=30)
MAX_REMOVED, MAX_REMOVED_MARKS = 500, 3
"""Nodes that left the file and are known if they return, and marks kept of each: the state of a
fleet is one payload."""


def add_notice(state: FleetState, notice: str, now: datetime) -> FleetState:
    return replace(
        state,
        notices=(*state.notices, f"{format_time(now)}: {text(notice)}")[-MAX_NOTICES:],
    )


def find_node(state: FleetState, name: str) -> NodeRecord | None:
    return next((node for node in state.nodes if node.name == name), None)


def put_node(state: FleetState, record: NodeRecord) -> FleetState:
    return replace(
        state, nodes=tuple(record if node.name == record.name else node for node in state.nodes)
    )


def is_awaiting(state: FleetState, now: datetime) -> bool:
    """Return whether jobs may still claim nodes that look free."""
    return state.awaited_jobs is None or (
        bool(state.awaited_jobs) and (state.awaited_until is None or now < state.awaited_until)
    )


# --- the file


def apply_fleet_file(state: FleetState, fact: FleetFileContent, now: datetime) -> FleetState:
    if not fact.nodes and state.nodes:
        return add_notice(
            state,
            f"the file of fleet {state.name} names no node: "
            f"it keeps its {count_noun(len(state.nodes), 'node')}",
            now,
        )
    removed = [one for one in state.removed if now - one.at < REMOVED_LIFETIME]
    gone = {one.record.name: one.record for one in removed}
    present = {node.name: node for node in state.nodes}
    known = {**gone, **present}
    returned = []
    nodes = []
    for spec in fact.nodes:
        record = known.pop(spec.name, None) or NodeRecord(spec)
        record = (
            replace(record, spec=spec, is_removed=False)
            if record.spec != spec or record.is_removed
            else record
        )
        if record.status is NodeStatus.QUARANTINED and record.by == FLEET_FILE:
            record = _return_to_file(record, now)
        if spec.name in gone and record.status is not NodeStatus.IN_SERVICE:
            returned.append(record)
        nodes.append(record)
    # A node that has left the file while a job is on it is kept until it is free: see
    # `forget_removed_nodes`.
    nodes += [_remove_from_file(known[name], now) for name in present if name in known]
    named = {node.name for node in nodes}
    removed = [one for one in removed if one.record.name not in named]
    for notice in (*_describe_moves(state, fact), *_describe_returns(returned)):
        state = add_notice(state, notice, now)
    logins = {node.name: node.spec.login for node in state.nodes}
    state = replace(
        state,
        repairs=fact.repairs,
        limits=fact.limits,
        nodes=tuple(nodes),
        is_file_read=True,
        access=fact.access,
        removed=tuple(removed),
    )
    return record_moves(state, logins)


def _describe_moves(state: FleetState, fact: FleetFileContent) -> list[str]:
    """Return notices of nodes whose address or user changed in the file while a job may have ranks
    there."""
    before = {node.name: node.spec for node in state.nodes}
    jobs = {place.node: record.claim.job for record in state.claims for place in record.places}
    found = []
    for spec in fact.nodes:
        was = before.get(spec.name)
        if was is None or spec.name not in jobs or was.login == spec.login:
            continue
        found.append(
            f"{spec.name} is {spec.login} now and was {was.login}, "
            f"while job {jobs[spec.name]} has it: "
            f"if its ranks were not started there, the job takes {spec.name} for lost; "
            "write the old one again, or end its ranks there and `nodes declare-dead` it"
        )
    more = [f"and {len(found) - MAX_MOVES_NAMED} more nodes moved while jobs have them"]
    return found[:MAX_MOVES_NAMED] + (more if len(found) > MAX_MOVES_NAMED else [])


def _describe_returns(returned: Sequence[NodeRecord]) -> list[str]:
    """Return notices of nodes that are in the file again and out of service as before."""
    found = [
        f"{record.name} is in the fleet file again and {record.status}, as before: "
        f"{record.by}{f' at {format_time(record.since)}' if record.since else ''}: {record.reason}"
        for record in returned
    ]
    more = [f"and {len(found) - MAX_MOVES_NAMED} more nodes are out of service as before"]
    return found[:MAX_MOVES_NAMED] + (more if len(found) > MAX_MOVES_NAMED else [])


def returns_known(state: FleetState, fact: FleetFileContent) -> bool:
    """Return whether the file names a node again of which something is known from before."""
    gone = {one.record.name for one in state.removed}
    return bool(gone) and any(spec.name in gone for spec in fact.nodes)


def _remove_from_file(record: NodeRecord, now: datetime) -> NodeRecord:
    if record.status in (NodeStatus.REPAIRING, NodeStatus.QUARANTINED):
        return replace(record, is_removed=True)
    return quarantine(replace(record, is_removed=True), FLEET_FILE, NOT_IN_FILE, now)


def _return_to_file(record: NodeRecord, now: datetime) -> NodeRecord:
    end = "it was in the fleet file again"
    reason, by = explain_marks(record)
    if reason:
        return set_status(record, NodeStatus.SUSPECT, now, reason=reason, by=by, end=end)
    return put_in_service(record, now, end)


def forget_removed_nodes(
    state: FleetState, now: datetime, notable: Sequence[NodeRecord]
) -> FleetState:
    """Remove the nodes that the file no longer names, once no job has them and no repair runs on
    them. Quarantines and what speaks against them is kept for a while."""
    if not any(node.is_removed for node in notable):
        return state
    held = {place.node for record in state.claims for place in record.places}
    nodes = tuple(
        node for node in state.nodes if not node.is_removed or node.repair or node.name in held
    )
    if len(nodes) == len(state.nodes):
        return state
    left = {node.name for node in nodes}
    forgotten = [node for node in state.nodes if node.name not in left]
    return keep_removed(replace(state, nodes=nodes), forgotten, now)


def keep_removed(state: FleetState, forgotten: Sequence[NodeRecord], now: datetime) -> FleetState:
    """Keep what is to be known of nodes if they return to the file."""
    kept = [
        RemovedNode(record, now)
        for record in map(_strip_record, forgotten)
        if record.by not in ("", FLEET_FILE) or record.marks or record.healed or record.power_cycles
    ]
    names = {one.record.name for one in kept}
    older = (one for one in state.removed if one.record.name not in names)
    return replace(state, removed=(*older, *kept)[-MAX_REMOVED:])


def _strip_record(record: NodeRecord) -> NodeRecord:
    counted = tuple(mark for mark in record.marks if not mark.retracted)
    return NodeRecord(
        record.spec,
        record.status,
        reason=record.reason,
        by=record.by,
        since=record.since,
        marks=counted[-MAX_REMOVED_MARKS:],
        healed=record.healed,
        power_cycles=record.power_cycles,
        cleared_at=record.cleared_at,
        released_at=record.released_at,
        vouched_fault=record.vouched_fault,
    )


# --- status


def is_taken_by_relaunch(record: NodeRecord) -> bool:
    """Return whether relaunch, and not a person, took the node out of service."""
    return record.by == RELAUNCH or record.by.startswith("job ")


def is_out(record: NodeRecord) -> bool:
    match record.status:
        case NodeStatus.SUSPECT | NodeStatus.REPAIRING:
            return True
        case NodeStatus.QUARANTINED:
            return is_taken_by_relaunch(record)
        case _:
            return False


# --- probes


def record_probes(state: FleetState, probes: tuple[NodeProbe, ...], now: datetime) -> FleetState:
    by_name = {probe.node: probe for probe in probes}
    return replace(
        state, nodes=tuple(_record_probe(node, by_name.get(node.name), now) for node in state.nodes)
    )


def _record_probe(record: NodeRecord, probe: NodeProbe | None, now: datetime) -> NodeRecord:
    if probe is None:
        return record
    if probe.inventory is not None:
        record = _record_inventory(record, probe.inventory, now - probe.inventory_age)
    probe = replace(probe, inventory=None, inventory_age=timedelta(0))
    record = replace(
        record,
        last_generations=_last_generations(record) if probe.silent else (),
        has_answered=record.has_answered or not probe.silent,
    )
    return replace(
        record,
        probe=probe,
        probed_at=now,
        silent_since=(record.silent_since or now) if probe.silent else None,
    )


def _record_inventory(record: NodeRecord, inventory: Inventory, at: datetime) -> NodeRecord:
    before = record.inventory if record.inventory_at is not None else None
    known = before.fault if before else ""
    is_vouched_for = inventory.fault == record.vouched_fault
    is_new = before is None or (
        bool(inventory.fault) and not is_vouched_for and known in ("", record.vouched_fault)
    )
    since = at if is_new or record.fault_since is None else record.fault_since
    # A reading that failed does not show that the fault has ended.
    keeps_vouching = is_vouched_for or (bool(inventory.unreadable) and not inventory.fault)
    return replace(
        record,
        inventory=inventory,
        inventory_at=at,
        fault_since=since if inventory.fault or inventory.reset_wanted else None,
        vouched_fault=record.vouched_fault if keeps_vouching else "",
    )


def _last_generations(record: NodeRecord) -> tuple[LiveGeneration, ...]:
    return (
        record.last_generations
        if record.probe is None or record.probe.silent
        else record.probe.generations
    )


def suspect_faulty_nodes(
    state: FleetState, now: datetime, notable: Sequence[NodeRecord]
) -> FleetState:
    """Make nodes that lack GPUs, or have a fault by their own account, suspects once unused.

    A node in use is left to the fault handling of its job. Until a second reading has confirmed a
    fault, and while nothing is repaired, the node is only not granted: a fault that ends meanwhile,
    with the work on a switch, takes no node out.
    """
    if not state.is_probed or is_awaiting(state, now):
        return state
    can_repair = not state.breaker.is_open and not state.breaker.paused
    faulty = [
        node
        for node in notable
        if node.missing_gpus or (node.fault and can_repair and not node.is_fault_unconfirmed)
    ]
    if not faulty:
        return state
    held = {place.node for record in state.claims for place in record.places}
    suspects = {
        node.name: set_status(node, NodeStatus.SUSPECT, now, reason=node.fault, by=RELAUNCH, end="")
        for node in faulty
        if is_idle(node, held)
    }
    if not suspects:
        return state
    return replace(state, nodes=tuple(suspects.get(node.name, node) for node in state.nodes))


def is_idle(record: NodeRecord, held: set[str]) -> bool:
    """Return whether a node in service can be examined now. `held` has the nodes that jobs have."""
    if (
        record.status is not NodeStatus.IN_SERVICE
        or record.repair
        or record.is_removed
        or record.name in held
    ):
        return False
    if (
        record.foreign_processes
    ):  # an examination would be refused, and the node would stay out of service for that
        return False
    return record.probe is not None and not (
        record.probe.silent or record.probe.busy or record.probe.generations
    )


# --- repairs


def record_repair_start(state: FleetState, fact: RepairStart, now: datetime) -> FleetState:
    record = find_node(state, fact.node)
    if record is None:
        return add_notice(
            state, f"{fact.by} repairs {fact.node}, which is not in fleet {state.name}", now
        )
    return put_node(state, mark_repair(record, fact.workflow, fact.run, now))


def mark_repair(record: NodeRecord, workflow: str, run: str, now: datetime) -> NodeRecord:
    repair = f"{workflow}/{run}"
    if repair in (record.repair, record.repair_ended):
        return record
    # One that was ordered is under way since then.
    since = record.repair_since if record.repair == workflow else now
    return replace(record, repair=repair, repair_since=since, repair_acts=False)


def record_repair_result(state: FleetState, fact: RepairResult, now: datetime) -> FleetState:
    requests = tuple(
        one for one in state.requests if (one.workflow, one.run) != (fact.workflow, fact.run)
    )
    state = replace(state, requests=requests)
    record = find_node(state, fact.node)
    repair = f"{fact.workflow}/{fact.run}"
    if (
        record is None
        or record.repair not in ("", repair, fact.workflow)
        or record.repair_ended == repair
    ):
        return state
    is_released = is_released_since(record)
    # An inventory from before the repair is no longer valid.
    record = replace(
        record,
        repair="",
        repair_since=None,
        repair_acts=False,
        repair_ended=repair,
        inventory_at=None,
    )
    if fact.verdict is not Verdict.UNKNOWN:
        record = replace(
            record, verdict=fact.verdict, verdict_at=now, verdict_reason=text(fact.reason)
        )
    if fact.healing is not None:
        record = _record_healing(record, fact.healing)
    if fact.job and record.status is not NodeStatus.REPAIRING:
        return put_node(state, record)
    if _proves_nothing(record, fact) or (is_released and fact.outcome != "done"):
        return add_notice(
            put_node(state, record),
            f"{record.name} stays in service, its repair was refused: {fact.reason}",
            now,
        )
    return put_node(state, _apply_repair(record, fact, now, stale=_was_stale(state, fact)))


def _record_healing(record: NodeRecord, healing: Healing) -> NodeRecord:
    """Record what healed the node, and retract the marks of faults that this healed."""
    older = (one for one in record.healed if not _repeats(healing, one))
    healed = (*older, healing)[-MAX_HEALED:]
    marks = tuple(
        replace(mark, retracted=f"{healing.strategy} healed it")
        if not mark.retracted
        and mark.at <= healing.at
        and (not healing.gpus or (mark.gpus and set(mark.gpus) <= set(healing.gpus)))
        else mark
        for mark in record.marks
    )
    return replace(record, healed=healed, marks=marks)


def _repeats(healing: Healing, older: Healing) -> bool:
    """Return whether this is what was done before, to the same GPUs or to more."""
    is_covered = not healing.gpus or (bool(older.gpus) and {*older.gpus} <= {*healing.gpus})
    return older.strategy is healing.strategy and is_covered


def list_recent_repairs(
    state: FleetState, record: NodeRecord, now: datetime
) -> tuple[Healing, ...]:
    """Return what healed the node within the fleet's cool-down, and since a person released it."""
    return tuple(
        one
        for one in record.healed
        if now - one.at < state.limits.cool_down
        and (record.released_at is None or one.at > record.released_at)
    )


def is_released_since(record: NodeRecord) -> bool:
    """Return whether a person has released the node since its repair began, and nothing was done
    to it."""
    return (
        record.released_at is not None
        and record.repair_since is not None
        and record.released_at > record.repair_since
        and not record.repair_acts
    )


def _proves_nothing(record: NodeRecord, fact: RepairResult) -> bool:
    """Return whether a person's repair of a node in service was refused, for example because it is
    in use.

    Such a repair says nothing against the node.
    """
    ordered = not fact.by.startswith(FLEET)
    refused = fact.outcome == "refused" and fact.verdict is not Verdict.UNHEALTHY
    return ordered and refused and record.status is NodeStatus.IN_SERVICE


def _was_stale(state: FleetState, fact: RepairResult) -> bool:
    """Return whether the last answer to this repair was that it had asked before a person resumed
    repairs."""
    permits = [
        one.permit
        for one in state.permits
        if (one.workflow, one.permit.run) == (fact.workflow, fact.run)
    ]
    return bool(permits) and permits[-1].stale


def _apply_repair(
    record: NodeRecord, fact: RepairResult, now: datetime, *, stale: bool
) -> NodeRecord:
    done = fact.outcome == "done"
    if done:
        record = retract_marks(record, "examined healthy after a repair")
        record = replace(record, cleared_at=now)
    if record.is_removed:
        return quarantine(record, FLEET_FILE, NOT_IN_FILE, now)
    if record.status is NodeStatus.QUARANTINED and not is_taken_by_relaunch(record):
        # A person's quarantine holds until a person releases the node: ordering a repair says
        # nothing about why it is quarantined.
        return record
    if done:
        return put_in_service(record, now, f"examined healthy: {text(fact.reason)}")
    if stale and record.status is NodeStatus.REPAIRING:
        # The repair proved nothing: the next one examines the current state.
        return replace(record, status=NodeStatus.SUSPECT)
    return quarantine(record, RELAUNCH, text(f"repair {fact.outcome}: {fact.reason}"), now)


def give_up_overdue_repairs(
    state: FleetState, now: datetime, notable: Sequence[NodeRecord]
) -> FleetState:
    """Give up repairs that have not reported their end within `REPAIR_TIMEOUT`."""
    for record in [
        one
        for one in notable
        if one.repair_since is not None and now - one.repair_since >= REPAIR_TIMEOUT
    ]:
        after = replace(record, repair="", repair_since=None, repair_acts=False)
        if record.status is NodeStatus.REPAIRING:
            after = quarantine(after, RELAUNCH, "how its repair ended was not reported", now)
        state = add_notice(
            put_node(state, after),
            f"{record.name}: how {record.repair} ended was not reported within 3 h",
            now,
        )
    return state


# --- orders of people


def quarantine_node(state: FleetState, fact: QuarantineCommand, now: datetime) -> FleetState:
    by, reason = text(fact.by, 80) or "a person", text(fact.reason) or "no reason given"
    record = find_node(state, fact.node)
    if record is None:
        return add_notice(
            state, f"{by} asked to quarantine {fact.node}, which is not in fleet {state.name}", now
        )
    drain = (
        None
        if fact.drain_within is None
        else DrainRequest(record.name, reason, by, now + fact.drain_within)
    )
    record = replace(
        record, drain=drain, asked_jobs=record.asked_jobs if drain in (None, record.drain) else ()
    )
    how = "" if drain is None else f", to be left by {format_time(drain.until)}"
    return add_notice(
        put_node(state, quarantine(record, by, reason, now)),
        f"{by} quarantined {record.name}{how}: {reason}",
        now,
    )


def release_node(state: FleetState, fact: ReleaseCommand, now: datetime) -> FleetState:
    by, reason = text(fact.by, 80) or "a person", text(fact.reason) or "no reason given"
    record = find_node(state, fact.node)
    if record is None and any(one.record.name == fact.node for one in state.removed):
        removed = tuple(one for one in state.removed if one.record.name != fact.node)
        return add_notice(
            replace(state, removed=removed),
            f"{by} released {fact.node}, which is not in the file of fleet {state.name}: {reason}",
            now,
        )
    if record is None or record.is_removed:
        return add_notice(
            state,
            f"{by} asked to release {fact.node}, which is not in the file of fleet {state.name}",
            now,
        )
    record = replace(
        put_in_service(record, now, f"{by} released it: {reason}"),
        inventory_at=None,
        vouched_fault=record.inventory.fault if record.inventory else "",
        cleared_at=now,
        released_at=now,
    )
    record = retract_marks(record, f"{by} released it: {reason}")
    return add_notice(put_node(state, record), f"{by} released {record.name}: {reason}", now)


def declare_dead(state: FleetState, fact: DeathDeclaration, now: datetime) -> FleetState:
    by, reason = text(fact.by, 80) or "a person", text(fact.reason) or "no reason given"
    if find_node(state, fact.node) is None:
        return add_notice(
            state, f"{by} declared {fact.node} dead, which is not in fleet {state.name}", now
        )
    state = declare_ranks_dead(state, fact.node, now)
    return add_notice(
        state, f"{by} declared that nothing of ended jobs runs on {fact.node}: {reason}", now
    )


PROBE_LIFETIME = timedelta(seconds=10)
"""How long an answer of a node counts as current: a launch follows a grant within a second or
two."""
SWEEP_INTERVAL = timedelta(seconds=60)
"""Time between two probes of all nodes: how long ranks of no known job may go unseen."""
FAULT_INTERVAL = timedelta(seconds=60)
"""Shortest time between two readings of a node with a fault that is not confirmed, while a job
waits: it may be over. The fleet looks once a minute then."""
INVENTORY_INTERVAL = timedelta(minutes=5)
"""Time between two readings of the GPUs of a node that no claim waits for: foreign processes stay
for hours."""
MAX_INVENTORIES = 512
"""Nodes whose GPUs are read with one probe: their answers, with foreign processes on each, are half
a megabyte of history."""
PROBE_INTERVAL = timedelta(seconds=2)
"""Time between probes of a node that is silent or busy while a claim waits for it."""


def probe_delay(record: NodeRecord, now: datetime) -> timedelta:
    """Return how long to wait after a probe that found the node silent. A node that has been silent
    for long may be back at any time."""
    silent = now - record.silent_since if record.silent_since else timedelta(0)
    return max(PROBE_INTERVAL, silent / 10)


def is_probe_due(record: NodeRecord, now: datetime) -> bool:
    """Return whether to probe the node again for a waiting claim.

    Not while the answer to the last probe may still come.
    """
    if _lacks_only_inventory(record, now):
        return True
    gap = probe_delay(record, now)
    times = (record.probed_at, record.probe_ordered_at)
    return all(at is None or now - at >= gap for at in times)


def can_read_inventory(record: NodeRecord, now: datetime, gap: timedelta) -> bool:
    """Return whether to read the GPUs with a probe. Not during a repair: no process may have them
    open for a reset."""
    if (
        not record.spec.gpus
        or record.is_removed
        or record.repair
        or record.status is NodeStatus.REPAIRING
    ):
        return False
    return record.inventory_at is None or now - record.inventory_at >= gap


def _lacks_only_inventory(record: NodeRecord, now: datetime) -> bool:
    """Return whether the last probe was not to read the GPUs, so that the next one need not wait
    for anything."""
    probe, at, asked = record.probe, record.probed_at, record.probe_ordered_at
    if (
        probe is None
        or at is None
        or probe.silent
        or probe.busy
        or probe.inventory_pending
        or (asked is not None and asked > at)
    ):
        return False
    return can_read_inventory(record, now, PROBE_LIFETIME) and (
        record.inventory_at is None or record.inventory_at < at
    )
