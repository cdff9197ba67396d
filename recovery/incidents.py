"""The story of a fault, as people read it: it opens with the diagnosis, takes each decision, and closes when training got further."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from recovery.events import ProgressSeen, StepReached
from recovery.model import Decision, DecisionRecord, Diagnosis, Incident, JobState, Phase, Relaunch, Repair, Wait

KEPT_DECISIONS = 40
"""Of one incident; a loop of relaunches must not fill the state."""
NAMED = 16
"""Suspects kept in an incident: when a rack of hundreds goes, a person needs to see that, not each name ten times over."""
TRACEBACK_LIMIT = 4096
"""Characters kept of the root cause's traceback, from its end, where the error stands."""


def open_incident(job: JobState, diagnosis: Diagnosis, opened: datetime, now: datetime) -> JobState:
    if job.incident is not None:
        return job
    reached = job.furthest_step
    if job.progress is not None:
        reached = max(job.progress.step, reached if reached is not None else job.progress.step)
    incident = Incident(
        opened=min(opened, now),
        generation=job.generation,
        cause=diagnosis.cause,
        because=diagnosis.because,
        nodes=diagnosis.nodes[:NAMED],
        ranks=diagnosis.ranks[:NAMED],
        gpus=diagnosis.gpus[:NAMED],
        code=diagnosis.code,
        certainty=diagnosis.certainty,
        traceback=diagnosis.traceback[-TRACEBACK_LIMIT:],
        reached=reached,
        detected=now,
    )
    return replace(job, incident=incident)


def close_incident(job: JobState, at: datetime, outcome: str) -> JobState:
    if job.incident is None:
        return job
    recovered = at if job.ending is None or job.ending.phase is Phase.SUCCEEDED else None
    closed = replace(job.incident, closed=at, recovered=recovered, outcome=outcome)
    return replace(job, incident=None, incidents=(*job.incidents, closed))


def pass_step(job: JobState, event: ProgressSeen | StepReached, now: datetime) -> JobState:
    if job.report_at_step is None or event.step < job.report_at_step:
        return job
    return progressed(close_incident(job, event.at, f"training passed step {event.step - 1}"), now)


def progressed(job: JobState, now: datetime) -> JobState:
    job = replace(job, progressed_at=now, flat_generations=0)
    return job if job.policy.renewal == "never" else replace(job, restarts_spent=0, renewed_at=now)


def record_decision(job: JobState, decision: Decision, now: datetime) -> JobState:
    if job.incident is None:
        return job
    incident = job.incident
    if isinstance(decision, Wait) and decision.phase in (Phase.LAUNCHING, Phase.RUNNING):
        return job  # what follows from a decision already written down
    strategy, spent, left = None, False, ""
    if isinstance(decision, Relaunch | Repair):
        strategy, spent, left = decision.strategy, decision.spent, decision.left
    record = DecisionRecord(now, decision.kind, strategy, decision.because, spent, left)
    decisions, dropped = (*incident.decisions, record), incident.dropped_decisions
    if len(decisions) > KEPT_DECISIONS:
        decisions, dropped = (*decisions[: KEPT_DECISIONS // 2], *decisions[-(KEPT_DECISIONS // 2) + 1 :]), dropped + 2
    return replace(job, incident=replace(incident, decisions=decisions, dropped_decisions=dropped, decided=incident.decided or now))
