"""What a job says to its fleet: what it wants and has, and what it knows against its nodes. Read off the job's state, nothing more."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from relaunch.evidence.causes import HARDWARE_CAUSES
from relaunch.generation import LaunchedGeneration
from relaunch.job.fencing import plan_generation, will_fence
from relaunch.job.incidents import is_acted_on
from relaunch.job.state import FaultRecord, Incident, JobState, Phase
from relaunch.pool.messages import Claim, Place, Suspect

SUSPECTS_TOLD = 8
"""The newest: a job of many faults says each of them again with every claim."""
SUSPECTS_OF_ONE = 4
"""When a rack goes as a whole, the fleet sees for itself that it does not answer."""


def claim(job: JobState, seq: int, *, keep: tuple[str, ...] = (), avoid: tuple[str, ...] = (), queue: bool = False) -> Claim:
    """The job wants its nodes, goes on with `keep`, and has whatever its ranks may still live on."""
    return _claim(job, seq, job.spec.fewest_nodes, keep, avoid, running=not queue and bool(job.slots), most=job.spec.node_count)


def as_it_is(job: JobState, seq: int, keep: tuple[str, ...]) -> Claim:
    """The job goes on with what it has, and says when it would take more."""
    if not job.spec.is_elastic:
        return claim(job, seq, keep=keep)
    at = more_at(job)
    avoid = tuple(one.node for one in job.avoided) if at is not None else ()
    most = job.spec.node_count if at is not None else len(keep)
    return _claim(job, seq, len(keep), keep, avoid, running=bool(job.slots), most=most, at=at)


def more_at(job: JobState) -> datetime | None:
    """When more nodes are worth a restart to it. None: it needs no more, or something else comes first."""
    after = job.policy.grow_after
    if after == "off" or job.launched_at is None or len(job.slots) >= job.spec.node_count:
        return None
    if job.phase is not Phase.RUNNING or job.incident is not None or job.leaving:
        return None
    closed = job.incidents[-1].closed if job.incidents else None
    return max(job.launched_at, closed or job.launched_at) + after


def give_back(job: JobState, seq: int) -> Claim:
    """The job wants nothing for now, or for ever; it has what its ranks may still live on."""
    return _claim(job, seq, 0, (), (), running=False, most=0)


def _claim(
    job: JobState,
    seq: int,
    nodes: int,
    keep: tuple[str, ...],
    avoid: tuple[str, ...],
    *,
    running: bool,
    most: int,
    at: datetime | None = None,
) -> Claim:
    shares = {slot.node: slot for slot in job.slots}
    wanted = {one.node for one in job.leaving}
    held = tuple(dict.fromkeys((*keep, *job.maybe_alive)))
    return Claim(
        job=job.name,
        submission=job.submission,
        seq=seq,
        nodes=nodes,
        # As they always were for a job of one size.
        most=most if job.spec.is_elastic else 0,
        had=len(job.slots) if job.spec.is_elastic else 0,
        more_at=at,
        gpus=job.spec.gpus_per_node,
        priority=job.spec.priority,
        since=job.submitted_at,
        running=running,
        keep=keep,
        holds=tuple(Place(node, shares[node].address, shares[node].gpus) if node in shares else Place(node) for node in held),
        avoid=avoid,
        suspects=suspects(job),
        stays=tuple(node for node in keep if node in wanted),
        launched=_launched(job, nodes),
    )


def _launched(job: JobState, nodes: int) -> tuple[LaunchedGeneration, ...]:
    """Return the launches whose ranks may be alive, and the one that may follow without a word.

    How far each has come is left out: the fleet may hear nothing of the next one on these nodes.
    """
    living = tuple(replace(one, complete=False, stopped=()) for one in job.launched)
    if nodes <= 0:
        return living
    planned = replace(plan_generation(job, job.generation, ()), size=nodes, fences=will_fence(job, nodes))
    return (*living, planned)


def is_known_by(told: tuple[LaunchedGeneration, ...], launch: LaunchedGeneration) -> bool:
    """Return whether who judges ranks of a launch by what the fleet was told waits long enough."""
    planned = next((one for one in told if not one.nodes), None)
    if planned is None or (planned.fences and not launch.fences):
        return False
    return not planned.fences or (
        planned.lease >= launch.lease
        and planned.fence_after >= launch.fence_after
        and planned.stop_grace >= launch.stop_grace
        and planned.valid_for >= launch.valid_for
    )


def suspects(job: JobState) -> tuple[Suspect, ...]:
    """Return the nodes that the faults of this job's newest incidents name, each with the evidence.

    A node that was lost is named once ranks were stopped for that: where it came back before, or the job
    ended otherwise, the link to it may as well have been the controller's own.
    """
    isolated = {avoided.node for avoided in job.avoided if avoided.isolated}
    incidents = (*job.incidents, job.incident) if job.incident else job.incidents
    found = [
        Suspect(
            node=node,
            at=fault.at,
            generation=fault.generation,
            cause=fault.cause,
            reason=fault.reason,
            code=fault.code,
            gpus=fault.gpus if index == 0 else (),
            isolate=node in isolated or _is_left_broken(job, incident, fault),
        )
        for incident in incidents
        for fault in incident.faults
        if not fault.withdrawn and (is_acted_on(incident, fault) or _ended_job(job, incident))
        for index, node in enumerate(fault.nodes[:SUSPECTS_OF_ONE])
    ]
    newest = found[-SUSPECTS_TOLD:]
    # Those that have to be examined are told however many came after them.
    older = [one for one in found[:-SUSPECTS_TOLD] if one.isolate and one.node not in {each.node for each in newest}]
    return (*{one.node: one for one in older}.values(), *newest)


def _ended_job(job: JobState, incident: Incident) -> bool:
    return job.ending is not None and job.ending.phase is Phase.FAILED and incident.closed is None


def _is_left_broken(job: JobState, incident: Incident, fault: FaultRecord) -> bool:
    """Return whether the job ended by it, with nothing repaired: the next job would meet the same."""
    return _ended_job(job, incident) and fault.cause in HARDWARE_CAUSES
