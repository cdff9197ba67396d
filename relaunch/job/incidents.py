"""Maintain a job's incidents, the history of each fault for people.

An incident opens with the diagnosis, records each decision, and closes when training advances.
"""

from __future__ import annotations

from datetime import datetime

from relaunch.evidence.causes import Cause
from relaunch.fields import duration
from relaunch.job.copies import replace
from relaunch.job.events import ProgressSeen, StepReached
from relaunch.job.state import (
    Decision,
    DecisionRecord,
    Diagnosis,
    FaultRecord,
    Incident,
    JobState,
    Phase,
    Relaunch,
    Repair,
    Wait,
)

KEPT_DECISIONS = 40
"""Maximum number of decisions kept in one incident: a relaunch loop must not fill the state."""
NAMED = 16
"""Maximum number of suspects kept in an incident.

When hundreds of nodes fail at once, a person needs to see that, not all names ten times.
"""
MAX_FAULTS = 16
"""Fault records kept in an incident: the first half and the newest half."""
MAX_REASON = 500
"""Characters kept of a fault's reason; the incident itself keeps the first fault's whole reason."""
ACTING = ("Relaunch", "Examine", "Repair")
"""Decisions that stop ranks because of a fault."""
TRACEBACK_LIMIT = 4096
"""Characters kept from the end of a traceback, where the error is."""


def open_incident(job: JobState, diagnosis: Diagnosis, opened: datetime, now: datetime) -> JobState:
    """Open an incident with a fault, or add the fault to the incident that is open."""
    fault = FaultRecord(
        at=min(opened, now),
        generation=job.generation,
        cause=diagnosis.cause,
        reason=diagnosis.reason[:MAX_REASON],
        nodes=diagnosis.nodes[:NAMED],
        gpus=diagnosis.gpus[:NAMED],
        code=diagnosis.code,
        ranks=diagnosis.ranks[:NAMED],
        by_program=diagnosis.by_program,
    )
    traceback = diagnosis.traceback[-TRACEBACK_LIMIT:]
    if job.incident is not None:
        # Faults of ranks that are being stopped because the job ends are not recorded.
        return (
            job
            if job.ending is not None
            else replace(
                job, incident=_add_fault(job.incident, replace(fault, traceback=traceback))
            )
        )
    reached = job.furthest_step
    if job.progress is not None:
        reached = max(job.progress.step, reached if reached is not None else job.progress.step)
    incident = Incident(
        opened=min(opened, now),
        generation=job.generation,
        cause=diagnosis.cause,
        reason=diagnosis.reason,
        nodes=diagnosis.nodes[:NAMED],
        ranks=diagnosis.ranks[:NAMED],
        gpus=diagnosis.gpus[:NAMED],
        code=diagnosis.code,
        certainty=diagnosis.certainty,
        traceback=traceback,
        faults=(fault,),
        reached=reached,
        detected=now,
    )
    return replace(job, incident=incident)


def add_unhealthy_nodes(
    job: JobState, fault: Diagnosis, unhealthy: tuple[str, ...], reason: str, now: datetime
) -> JobState:
    """Add the examined unhealthy nodes to the open incident, as a fault.

    Nodes that a fault of this generation already names are left out.
    """
    if job.incident is None:
        return job
    # What the program accused and an examination confirms is no longer the program's word alone.
    confirmed = tuple(
        replace(one, by_program=False) if one.nodes and {*one.nodes} <= {*unhealthy} else one
        for one in job.incident.faults
    )
    job = replace(job, incident=replace(job.incident, faults=confirmed))
    assert job.incident is not None
    known = {
        node
        for one in job.incident.faults
        if one.generation == job.generation
        for node in one.nodes
    }
    nodes = tuple(node for node in unhealthy if node not in known)
    if not nodes:
        return job
    found = FaultRecord(
        now,
        job.generation,
        fault.cause,
        reason[:MAX_REASON],
        nodes=nodes[:NAMED],
        code=fault.code,
        ranks=fault.ranks[:NAMED],
        traceback=fault.traceback[-TRACEBACK_LIMIT:],
    )
    return replace(job, incident=_add_fault(job.incident, found))


def name_foreign_processes(job: JobState, fault: Diagnosis, reason: str) -> JobState:
    """Give a fault the reason that names foreign processes. Its node is no suspect any more."""
    incident = job.incident
    if incident is None:
        return job

    def is_it(one: FaultRecord) -> bool:
        return (one.generation, one.cause, one.code) == (job.generation, fault.cause, fault.code)

    faults = tuple(
        replace(one, reason=reason[:MAX_REASON], nodes=()) if is_it(one) else one
        for one in incident.faults
    )
    first = reason if is_it(incident.faults[0]) else incident.reason
    return replace(job, incident=replace(incident, faults=faults, reason=first))


def withdraw_loss(job: JobState, node: str) -> JobState:
    """Withdraw the loss of a node that answers again, if no ranks were stopped since then."""
    if job.incident is None:
        return job
    reason = f"{node} answers again, and nothing was stopped"
    faults = tuple(
        replace(fault, withdrawn=reason)
        if fault.nodes == (node,) and not is_acted_on(job.incident, fault)
        else fault
        for fault in job.incident.faults
    )
    return replace(job, incident=replace(job.incident, faults=faults))


def is_acted_on(incident: Incident, fault: FaultRecord) -> bool:
    """Return whether ranks were stopped since the fault was detected.

    Any fault other than a lost node stops the ranks itself.
    """
    if fault.cause is not Cause.NODE_LOST:
        return True
    half = KEPT_DECISIONS // 2
    return any(
        one.decision in ACTING
        and (index if index < half else index + incident.dropped_decisions)
        >= fault.decisions_before
        for index, one in enumerate(incident.decisions)
    )


def _add_fault(incident: Incident, fault: FaultRecord) -> Incident:
    if any(_is_same(one, fault) for one in incident.faults):
        return incident
    fault = replace(fault, decisions_before=len(incident.decisions) + incident.dropped_decisions)
    # A state has room for the traceback that began an incident and for the newest.
    older = tuple(replace(one, traceback="") for one in incident.faults)
    faults, dropped = (*older, fault), incident.dropped_faults
    if len(faults) > MAX_FAULTS:
        half = MAX_FAULTS // 2
        faults, dropped = (*faults[:half], *faults[half + 1 :]), dropped + 1
    nodes = tuple(dict.fromkeys((*incident.nodes, *fault.nodes)))[:NAMED]
    return replace(incident, faults=faults, dropped_faults=dropped, nodes=nodes)


def _is_same(one: FaultRecord, other: FaultRecord) -> bool:
    return not one.withdrawn and (one.generation, one.cause, one.nodes, one.code) == (
        other.generation,
        other.cause,
        other.nodes,
        other.code,
    )


def close_incident(job: JobState, at: datetime, outcome: str) -> JobState:
    if job.incident is None:
        return job
    recovered = at if job.ending is None or job.ending.phase is Phase.SUCCEEDED else None
    closed = replace(job.incident, closed=at, recovered=recovered, outcome=outcome)
    return replace(job, incident=None, incidents=(*job.incidents, closed))


def pass_step(job: JobState, event: ProgressSeen | StepReached, now: datetime) -> JobState:
    if job.report_at_step is None or event.step < job.report_at_step:
        return job
    return record_progress(
        close_incident(job, event.at, f"training passed step {event.step - 1}"), now
    )


def close_by_time(job: JobState, incident: Incident, now: datetime) -> JobState:
    """Close an incident after `healthy_for` without a fault.

    That counts as progress only where no step says how far training has come: none was ever
    reported, or the counter starts again. A job that runs for hours from an old checkpoint, and
    fails before it is past what it had reached, has not advanced.
    """
    job = close_incident(job, now, f"no fault for {duration(job.policy.healthy_for)}")
    if incident.reached is None or job.counter_restarts:
        return record_progress(job, now)
    return replace(job, unpassed_step=incident.reached)


def record_restarting_counter(job: JobState, now: datetime) -> JobState:
    """Record that the job's step counter starts again while its ranks live.

    It may have been known only by the report of a fault: an incident that closed by time before
    then was progress.
    """
    is_new = not job.counter_restarts
    job = replace(job, counter_restarts=True)
    has_been_healthy = is_new and job.incident is None and job.unpassed_step is not None
    return record_progress(job, now) if has_been_healthy else job


def record_progress(job: JobState, now: datetime) -> JobState:
    job = replace(
        job,
        progressed_at=now,
        flat_generations=0,
        startup_error="",
        startup_failures=0,
        startup_nodes=(),
        failed_resume=None,
        unpassed_step=None,
        broken_links=(),
    )
    return job if job.policy.renewal == "never" else replace(job, restarts_spent=0, renewed_at=now)


def record_decision(job: JobState, decision: Decision, now: datetime) -> JobState:
    if job.incident is None:
        return job
    incident = job.incident
    if isinstance(decision, Wait) and decision.phase in (Phase.LAUNCHING, Phase.RUNNING):
        return job  # it follows from a decision that is already recorded
    strategy, spent, left = None, False, ""
    if isinstance(decision, Relaunch | Repair):
        strategy, spent, left = decision.strategy, decision.spent, decision.left
    record = DecisionRecord(now, decision.kind, strategy, decision.reason, spent, left)
    decisions, dropped = (*incident.decisions, record), incident.dropped_decisions
    if len(decisions) > KEPT_DECISIONS:
        decisions, dropped = (
            (*decisions[: KEPT_DECISIONS // 2], *decisions[-(KEPT_DECISIONS // 2) + 1 :]),
            dropped + 2,
        )
    return replace(
        job,
        incident=replace(
            incident,
            decisions=decisions,
            dropped_decisions=dropped,
            decided=incident.decided or now,
        ),
    )
