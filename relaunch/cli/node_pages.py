"""Formats a fleet as a whole, a single node in full, and what a fleet file would change.

Pure: values in, lines out.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import quote

from relaunch.cli import gpu_views
from relaunch.cli.job_views import age, names
from relaunch.cli.node_views import (
    find_reason,
    format_since,
    health,
    health_text,
    iso,
    repair_ids,
    rows,
)
from relaunch.evidence.findings import Verdict
from relaunch.fields import duration
from relaunch.pool.events import FleetFileContent
from relaunch.pool.messages import Healing
from relaunch.pool.nodes import SWEEP_INTERVAL
from relaunch.pool.state import (
    ClaimRecord,
    FleetState,
    Mark,
    NodeRecord,
    PastReason,
    WarmPython,
)
from relaunch.pool.tenants import STATES, Tenant, is_claimed, jobs_on, node_state, tenants
from relaunch.spec.fleet import FleetLimits, FleetNode
from relaunch.text import count_noun, format_time

Spec = TypeVar("Spec", FleetNode, FleetLimits)


def fleet_notes(state: FleetState, now: datetime) -> list[str]:
    """Return notes on the fleet as a whole for a person who looks at its nodes.

    Empty if nothing is out of the ordinary.
    """
    breaker, resume = state.breaker, f"`relaunch nodes resume --fleet {state.name} --reason …`"
    notes = []
    if breaker.is_open:
        notes.append(
            f"the breaker is open{format_since(breaker.since, now)}, so no node is given to jobs "
            f"or repaired: {breaker.reason}; to close it: {resume}"
        )
    if breaker.paused:
        how = "the same command again" if breaker.is_open else resume
        notes.append(
            f"repairs are paused{format_since(breaker.paused_since, now)} by {breaker.paused}; to "
            f"resume: {how}"
        )
    if state.awaited_jobs:
        notes.append(
            f"the fleet was restarted and waits for the claims of {names(list(state.awaited_jobs))}"
        )
    for record in _waiting(state):
        claim = record.claim
        fewest = f"{claim.nodes} to " if claim.nodes < claim.max_nodes else ""
        wanted = f"{claim.job} waits for {fewest}{count_noun(claim.max_nodes, 'node')}"
        notes.append(
            f"{wanted}{format_since(record.waiting_since, now)}: "
            f"{record.wait_reason or 'it has just claimed them'}"
        )
    for record in state.claims:
        claim = record.claim
        if claim.more_at is not None and claim.more_at > now:
            notes.append(
                f"{claim.job} runs on {count_noun(len(claim.keep), 'node')} and takes up to "
                f"{claim.most} from {format_time(claim.more_at)} on"
            )
        elif claim.more_at is not None:
            notes.append(
                f"{claim.job} runs on {count_noun(len(claim.keep), 'node')} and takes up to "
                f"{claim.most}, when no job waits for them"
            )
    notes += [
        f"{request.workflow} waits for a permit to {request.step} {request.node}: {request.reason}"
        for request in state.requests
    ]
    return notes


def _waiting(state: FleetState) -> list[ClaimRecord]:
    return [record for record in state.claims if record.is_waiting and record.claim.nodes]


def fleet_view(state: FleetState) -> dict[str, Any]:
    """Return the value of `nodes show --json` without a node: the fleet itself."""
    breaker, limits, every = state.breaker, state.limits, rows(state)
    return {
        "name": state.name,
        "repairs": state.repairs,
        "limits": {
            "repairs_at_once": limits.repairs_at_once,
            "nodes_out": limits.nodes_out,
            "reboots_per_hour": limits.reboots_per_hour,
            "replacement_wait": limits.replacement_wait.total_seconds(),
            "drain_within": limits.drain_within.total_seconds(),
            "cool_down": limits.cool_down.total_seconds(),
        },
        "breaker": {
            "open": breaker.is_open,
            "reason": breaker.reason or None,
            "since": iso(breaker.since),
            "paused": breaker.paused or None,
            "paused_since": iso(breaker.paused_since),
        },
        "nodes": {word: sum(one["state"] == word for one in every) for word in STATES},
        "waiting": [
            {
                "job": r.claim.job,
                "nodes": r.claim.nodes,
                "gpus": r.claim.gpus,
                "since": iso(r.waiting_since),
                "reason": r.wait_reason,
            }
            for r in _waiting(state)
        ],
        "requests": [
            {"repair": r.workflow, "node": r.node, "step": r.step, "reason": r.reason}
            for r in state.requests
        ],
        "reboots": [iso(at) for at in state.reboots],
        "awaited_jobs": list(state.awaited_jobs or ()),
        "offers": [
            {"job": one.job, "nodes": [place.node for place in one.places], "until": iso(one.until)}
            for one in state.offers
            if one.places
        ],
        "notices": list(state.notices),
    }


def fleet_lines(state: FleetState, now: datetime) -> list[str]:
    limits, view = state.limits, fleet_view(state)
    counts = ", ".join(f"{count} {word}" for word, count in view["nodes"].items() if count)
    of = len(state.nodes)
    return [
        f"fleet       {state.name}: {count_noun(of, 'node')}" + (f", {counts}" if counts else ""),
        f"repairs     {state.repairs}, {limits.resolve('repairs_at_once', of)} at once; "
        f"{len(state.reboots)} of {limits.reboots_per_hour}"
        " reboots within this hour",
        f"breaker     opens when more than {count_noun(limits.resolve('nodes_out', of), 'node')} "
        f"of {of} are out ({limits.nodes_out})",
        *(f"note        {note}" for note in fleet_notes(state, now)),
        *(f"notice      {notice}" for notice in state.notices),
    ]


def _probe_age(since: timedelta) -> str:
    """Return when a node was probed. Each is, once a minute, and the fleet learns what changes."""
    return f"no change for {age(since)}" if since >= 2 * SWEEP_INTERVAL else f"{age(since)} ago"


def node_lines(
    record: NodeRecord,
    here: Sequence[Tenant],
    fleet: str,
    now: datetime,
    web: str | None,
    warm: Sequence[WarmPython] = (),
) -> list[str]:
    """Return the lines of `nodes show NODE`.

    Args:
        record: What the fleet knows of the node.
        here: The jobs that have it.
        fleet: The fleet's name.
        now: The present time.
        web: The URL of workflows, up to their IDs.
        warm: What imports ahead there.
    """
    spec, probe, drain = record.spec, record.probe, record.drain
    state = node_state(record, here)
    reason, by, since = find_reason(record, state, here)
    what = ", ".join(
        [spec.address, count_noun(spec.gpus, "GPU"), *(["spare"] if spec.spare else [])]
    )
    why = f"{f' by {by}' if by else ''}{format_since(since, now)}{f': {reason}' if reason else ''}"
    verdict, said = health(record)
    found = "" if verdict is Verdict.UNKNOWN else f": {said}"
    lines = [
        f"node        {record.name} of fleet {fleet} ({what})",
        f"state       {state}{why}",
        f"health      {health_text(record, now)}{found}; `relaunch nodes check {record.name} "
        f"--fleet {fleet}` examines it now",
    ]
    if probe is None or record.probed_at is None:
        lines.append("probe       not probed yet")
    else:
        answer = f"it answered, boot id {probe.boot_id}" if probe.boot_id else "it answered"
        if probe.silent:
            answer = f"no answer{format_since(record.silent_since, now)}: {probe.silent}"
        lines.append(f"probe       {_probe_age(now - record.probed_at)}: {answer}")
        lines += [f"held by     {probe.busy}"] if probe.busy else []
        lines += [
            f"running     job {one.job}, submission {one.submission}, generation {one.generation}"
            for one in probe.generations
        ]
    for tenant in here:
        has = "has it " if tenant.offered is None else "offered"
        lines.append(
            f"{has}     job {tenant.job}, submission {tenant.submission}: {_share(record, tenant)}"
        )
    lines += [f"warm        {_warm_line(one)}" for one in warm]
    lines += gpu_views.lines(record, _jobs_by_gpu(record, here), now)
    if drain is not None:
        left = (
            f"jobs must leave by {format_time(drain.until)}"
            if is_claimed(here)
            else "no job has it any more"
        )
        lines.append(f"drain       {left}, requested by {drain.by}: {drain.reason}")
    elif record.repair_drain is not None:
        lines.append(
            f"shared      {names(list(record.asked_jobs))} must leave by "
            f"{format_time(record.repair_drain.until)}, so that the node can be examined"
        )
    lines.append(
        f"repair      {_address(*repair_ids(record.repair), web)}"
        if record.repair
        else "repair      none"
    )
    lines += [f"fault       {_mark_line(mark)}" for mark in record.marks]
    lines += [f"healed      {_healing_line(one)}" for one in record.healed]
    lines += [f"past        {_past_line(one)}" for one in record.past]
    return lines


def _jobs_by_gpu(record: NodeRecord, here: Sequence[Tenant]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for tenant in here:
        share = tenant.place.gpus if tenant.place else ()
        for gpu in (share or range(record.spec.gpus)) if tenant.offered is None else ():
            found.setdefault(gpu, []).append(tenant.job)
    return found


def _warm_line(one: WarmPython) -> str:
    has = "has imported" if one.state == "ready" else "is to import"
    if one.state == "cold":
        has = "cannot import"
    memory = f", {one.bytes / 1e6:.0f} MB of memory" if one.bytes else ""
    return f"a Python of job {one.job} {has} {', '.join(one.modules)}{memory}"


def workflow_address(ui: str, namespace: str) -> str:
    """Return the URL under which the web UI shows workflows, up to their IDs."""
    return f"{ui}/namespaces/{namespace}/workflows"


def _address(id_: str, run: str, web: str | None) -> str:
    if not run:
        return f"{id_}, ordered but not started"
    return f"{id_}: {web}/{quote(id_, safe='')}/{run}" if web else f"{id_} in the web UI, run {run}"


def _share(record: NodeRecord, tenant: Tenant) -> str:
    if tenant.place is None:
        return "its ranks run there without a claim that the fleet knows"
    if tenant.place.gpus:
        return f"GPU {', '.join(map(str, tenant.place.gpus))}"
    return "all GPUs" if record.spec.gpus else "shared with other jobs"


def _mark_line(mark: Mark) -> str:
    code = f"{mark.code} ({mark.cause})" if mark.code else str(mark.cause)
    gpus = f" of GPU {names(list(mark.gpus))}" if mark.gpus else ""
    where = f"job {mark.job} generation {mark.generation}"
    line = f"{format_time(mark.at)} {code}{gpus}, {where}: {mark.reason}"
    return f"{line} [does not count: {mark.retracted}]" if mark.retracted else line


def _healing_line(one: Healing) -> str:
    of = f" of GPU {names(list(one.gpus))}" if one.gpus else ""
    return (
        f"{format_time(one.at)} {one.strategy}{of}, then examined healthy: faults before it do not"
        " count"
    )


def _past_line(one: PastReason) -> str:
    since = f"{format_time(one.since)} to " if one.since else "until "
    return f"{since}{format_time(one.until)} by {one.by}: {one.reason} [then {one.end}]"


def changes(fleet: FleetState, file: FleetFileContent) -> list[str]:
    """Return the changes in a fleet file: new, gone and changed nodes, repairs and limits."""
    known = {node.name: node.spec for node in fleet.nodes if not node.is_removed}
    told = {spec.name: spec for spec in file.nodes}
    lines = [f"new: {name}" for name in told if name not in known]
    lines += [f"gone: {name}" for name in known if name not in told]
    lines += [
        f"changed: {name}: {_difference(known[name], spec)}"
        for name, spec in told.items()
        if known.get(name, spec) != spec
    ]
    if file.repairs != fleet.repairs:
        lines.append(f"changed: repairs: {fleet.repairs}, now {file.repairs}")
    if file.limits != fleet.limits:
        lines.append(f"changed: limits: {_difference(fleet.limits, file.limits)}")
    return lines


def _difference(old: Spec, new: Spec) -> str:
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in type(old).model_fields}
    return ", ".join(
        f"{name} {_value(before)}, now {_value(after)}"
        for name, (before, after) in pairs.items()
        if before != after
    )


def _value(value: Any) -> str:
    return duration(value) if isinstance(value, timedelta) else str(value)


def node_more(
    record: NodeRecord, here: Sequence[Tenant], warm: Sequence[WarmPython] | None = None
) -> dict[str, Any]:
    """Return the keys that `nodes show NODE --json` adds to those of `nodes list`.

    Args:
        record: What the fleet knows of the node.
        here: The jobs that have it.
        warm: What imports ahead there; None: the node was not asked, or did not answer.
    """
    living = record.probe.generations if record.probe else ()
    return {
        "tenants": [
            {
                "job": one.job,
                "submission": one.submission,
                "claimed": one.place is not None,
                "gpus": list(one.place.gpus) if one.place else [],
            }
            for one in here
            if one.offered is None
        ],
        "offered": [
            {"job": one.job, "until": iso(one.offered)} for one in here if one.offered is not None
        ],
        "generations": [
            {"job": one.job, "submission": one.submission, "generation": one.generation}
            for one in living
        ],
        "warm": [
            {"job": one.job, "modules": list(one.modules), "state": one.state, "bytes": one.bytes}
            for one in warm
        ]
        if warm is not None
        else None,
    }


def describe_quarantine(fleet: FleetState, node: str) -> str:
    record = next(record for record in fleet.nodes if record.name == node)
    jobs = sorted(jobs_on(tenants(fleet).get(node, ())))
    if not jobs:
        stays = "no job has it"
    elif record.drain is None:
        stays = f"{names(jobs)} may keep it"
    else:
        stays = (
            f"{names(jobs)} {'has' if len(jobs) == 1 else 'have'} to leave it by "
            f"{format_time(record.drain.until)}"
        )
    return (
        f"node {node} is quarantined: {record.reason}; {stays}; no other job gets it until "
        f"`relaunch nodes release {node}`"
    )


def describe_release(fleet: FleetState, node: str) -> str:
    record = next(record for record in fleet.nodes if record.name == node)
    but = (
        ", but it does not answer"
        if record.probe and record.probe.silent
        else ", when its repair has ended"
        if record.repair
        else ""
    )
    was = record.past[-1] if record.past and record.past[-1].until == record.since else None
    at = f" at {format_time(was.since)}" if was and was.since else ""
    before = f"; {was.by} had taken it out of service{at}: {was.reason}" if was else ""
    return f"node {node} is in service: jobs can get it{but}{before}"


def describe_resume(fleet: FleetState) -> str:
    breaker = fleet.breaker
    if not breaker.paused:
        return f"fleet {fleet.name} gives nodes to jobs and repairs them again"
    since = f" since {format_time(breaker.paused_since)}" if breaker.paused_since else ""
    return (
        f"fleet {fleet.name} gives nodes to jobs again; repairs stay paused{since} by "
        f"{breaker.paused}; to end that, too, run this again"
    )


def describe_removed_nodes(fleet: FleetState) -> list[str]:
    """Return the nodes that are gone from the file but still used by a job or a repair."""
    known = tenants(fleet)
    return [
        f"{record.name} stays until it is free: "
        f"{names(jobs_on(known[record.name])) or 'a repair'} is on it"
        for record in fleet.nodes
        if record.is_removed
    ]
