"""Build a job's claim to its fleet from the job's state: the nodes it wants, holds and suspects."""

from __future__ import annotations

from datetime import datetime

from relaunch.evidence.causes import HARDWARE_CAUSES
from relaunch.generation import LaunchedGeneration
from relaunch.job.copies import replace
from relaunch.job.fencing import plan_generation, will_fence
from relaunch.job.incidents import is_acted_on
from relaunch.job.state import FaultRecord, Incident, JobState, Phase
from relaunch.pool.messages import Claim, Place, Suspect

MAX_SUSPECTS = 8
"""Maximum number of suspects in a claim, the newest: every claim repeats all of them."""
MAX_SUSPECTS_PER_FAULT = 4
"""Maximum number of suspects of one fault: when a whole rack fails, the fleet sees that itself."""


def build_claim(
    job: JobState,
    seq: int,
    *,
    keep: tuple[str, ...] = (),
    avoid: tuple[str, ...] = (),
    queue: bool = False,
) -> Claim:
    """Return the claim of a job that wants its nodes and continues with `keep`.

    It also holds every node on which its ranks may still be alive.
    """
    return _claim(
        job,
        seq,
        job.spec.fewest_nodes,
        keep,
        avoid,
        running=not queue and bool(job.slots),
        most=job.spec.node_count,
    )


def build_current_claim(job: JobState, seq: int, keep: tuple[str, ...]) -> Claim:
    """Return the claim of a job that continues with its nodes, and says when it would take more."""
    if not job.spec.is_elastic:
        return replace(build_claim(job, seq, keep=keep), is_current=True)
    at = more_at(job)
    avoid = tuple(one.node for one in job.avoided) if at is not None else ()
    most = job.spec.node_count if at is not None else len(keep)
    claim = _claim(job, seq, len(keep), keep, avoid, running=bool(job.slots), most=most, at=at)
    return replace(claim, is_current=True)


def more_at(job: JobState) -> datetime | None:
    """Return when more nodes are worth a restart.

    None: the job needs no more, or something else comes first.
    """
    after = job.policy.grow_after
    if after == "off" or job.launched_at is None or len(job.slots) >= job.spec.node_count:
        return None
    if job.phase is not Phase.RUNNING or job.incident is not None or job.drains:
        return None
    closed = job.incidents[-1].closed if job.incidents else None
    return max(job.launched_at, closed or job.launched_at) + after


def build_empty_claim(job: JobState, seq: int) -> Claim:
    """Return the claim of a job that wants no nodes.

    It still holds every node on which its ranks may be alive.
    """
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
    drained = {one.node for one in job.drains}
    held = tuple(dict.fromkeys((*keep, *job.maybe_alive)))
    return Claim(
        job=job.name,
        submission=job.submission,
        seq=seq,
        nodes=nodes,
        # 0 for a job of fixed size, as in earlier versions.
        most=most if job.spec.is_elastic else 0,
        had=len(job.slots) if job.spec.is_elastic else 0,
        more_at=at,
        gpus=job.spec.gpus_per_node,
        priority=job.spec.priority,
        since=job.submitted_at,
        running=running,
        keep=keep,
        holds=tuple(
            Place(node, shares[node].address, shares[node].gpus) if node in shares else Place(node)
            for node in held
        ),
        avoid=avoid,
        suspects=suspects(job),
        stays=tuple(node for node in keep if node in drained),
        launched=_list_launched(job, nodes),
        has_run=job.has_run,
    )


def _list_launched(job: JobState, nodes: int) -> tuple[LaunchedGeneration, ...]:
    """Return the launches whose ranks may be alive, and the next one possible without a new claim.

    Their progress (complete, stopped) is left out: the fleet may not be informed of the next
    launch on these nodes.
    """
    living = tuple(replace(one, complete=False, stopped=()) for one in job.launched)
    if nodes <= 0:
        return living
    planned = replace(
        plan_generation(job, job.generation, ()), size=nodes, fences=will_fence(job, nodes)
    )
    return (*living, planned)


def is_known_by(sent: tuple[LaunchedGeneration, ...], launch: LaunchedGeneration) -> bool:
    """Return whether the fence times in a claim are long enough for the ranks of `launch`.

    `sent` are the claim's launches; the one without nodes is the planned launch.
    """
    planned = next((one for one in sent if not one.nodes), None)
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

    A lost node is named only after ranks were stopped for its loss: where it came back before, or
    the job ended otherwise, the controller's own link may have been at fault.
    """
    isolated = {avoided.node: avoided for avoided in job.avoided if avoided.isolated}
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
            isolate=_is_left_broken(job, incident, fault),
        )
        for incident in incidents
        for fault in incident.faults
        if not fault.withdrawn and (is_acted_on(incident, fault) or _has_ended_job(job, incident))
        for index, node in enumerate(fault.nodes[:MAX_SUSPECTS_PER_FAULT])
    ]
    for index in range(len(found) - 1, -1, -1):
        # Only the fault for which the job left the node: faults before it were not the reason.
        one = found[index]
        if (left := isolated.get(one.node)) is not None and one.at <= left.at:
            del isolated[one.node]
            reason = one.reason if left.reason.startswith(one.reason) else left.reason
            found[index] = replace(one, reason=reason, isolate=True)
    newest = found[-MAX_SUSPECTS:]
    # Suspects that have to be examined are included no matter how many newer ones there are.
    older = [
        one
        for one in found[:-MAX_SUSPECTS]
        if one.isolate and one.node not in {each.node for each in newest}
    ]
    return (*{one.node: one for one in older}.values(), *newest)


def _has_ended_job(job: JobState, incident: Incident) -> bool:
    return job.ending is not None and job.ending.phase is Phase.FAILED and incident.closed is None


def _is_left_broken(job: JobState, incident: Incident, fault: FaultRecord) -> bool:
    """Return whether this hardware fault ended the job unrepaired, to be met by the next job."""
    return _has_ended_job(job, incident) and fault.cause in HARDWARE_CAUSES and not fault.by_program
