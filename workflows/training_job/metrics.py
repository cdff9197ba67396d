"""Count a job's faults and incidents, and measure how long they took, as the job records them.

The SDK's meter records nothing on replay, and none of this is an order or a state. A worker counts
nothing twice. Two workers may, if one is killed before the server has what it did.
"""

from __future__ import annotations

import threading

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.job.accounts import Account
    from relaunch.job.measures import (
        count_closed_incidents,
        find_closed_incidents,
        find_last_strategy,
        find_new_faults,
        measure_accounts,
        measure_stages,
    )
    from relaunch.job.state import JobState

FAULTS = "relaunch_faults_total"
INCIDENTS = "relaunch_incidents_total"
STAGE_SECONDS = "relaunch_recovery_seconds"
INCIDENT_SECONDS = "relaunch_incident_seconds"
ENDED_JOBS = "relaunch_ended_jobs_total"
JOB_SECONDS = "relaunch_job_seconds_total"

BUCKETS_S = (
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14_400.0, 86_400.0),
)
"""Upper bounds in seconds: from a rank that restarts in place (0.16 s) to a question that waits for
a person for a day. The SDK's own are milliseconds, from 50 to 10,000."""
BUCKETS = {STAGE_SECONDS: BUCKETS_S, INCIDENT_SECONDS: BUCKETS_S}
MAX_RECORDED = 10_000
"""What a worker remembers to have recorded: some megabytes, and more than come within hours."""

_recorded: dict[tuple[object, ...], None] = {}
"""What this worker has recorded, oldest first. A workflow task may be repeated, and a query may
bring events before the task that they belong to, which then brings them again (decision 49)."""
_charged: dict[tuple[object, ...], dict[Account, int]] = {}
"""The seconds of each job up to which this worker has counted them; the job that was counted least
lately is the first. A repeated task charges the same time, up to another end."""
_recording = threading.Lock()
"""Workflow tasks run in several threads."""


def _is_new(job: JobState, *what: object) -> bool:
    """Return whether this worker has not recorded that of a job, and remember it."""
    key = (job.namespace, job.name, job.submission, *what)
    with _recording:
        if key in _recorded:
            return False
        _recorded[key] = None
        if len(_recorded) > MAX_RECORDED:
            del _recorded[next(iter(_recorded))]
        return True


def _find_new_seconds(before: JobState, after: JobState) -> dict[Account, int]:
    """Return the seconds charged between two states that this worker has not counted, and note
    them as counted."""
    if before.ledger == after.ledger:
        return {}
    known, charged = measure_accounts(before.ledger), measure_accounts(after.ledger)
    key = (after.namespace, after.name, after.submission)
    with _recording:
        known = _charged.pop(key, known)
        _charged[key] = {
            account: max(seconds, known.get(account, 0)) for account, seconds in charged.items()
        }
        if len(_charged) > MAX_RECORDED:
            del _charged[next(iter(_charged))]
    return {
        account: seconds - known.get(account, 0)
        for account, seconds in charged.items()
        if seconds > known.get(account, 0)
    }


def record_changes(before: JobState, after: JobState) -> None:
    """Record the faults, the closed incidents and the charged seconds between two states of one
    run."""
    if workflow.unsafe.is_replaying():
        return  # the meter would record nothing, and this would only cost time
    charged = _find_new_seconds(before, after)
    closed = [
        incident
        for number, incident in enumerate(
            find_closed_incidents(before, after), start=count_closed_incidents(before)
        )
        if _is_new(after, "incident", number)
    ]
    faults = [
        fault
        for number, fault in find_new_faults(before, after)
        if _is_new(after, "fault", *number)
    ]
    if not (closed or faults or charged):
        return
    meter = workflow.metric_meter().with_additional_attributes({"fleet": after.spec.fleet})
    fault_counter = meter.create_counter(FAULTS, "Faults by cause.")
    for fault in faults:
        fault_counter.add(1, {"cause": fault.cause.value})
    for account, count in charged.items():
        meter.create_counter(JOB_SECONDS, "Seconds of jobs, by what they went into.").add(
            count, {"account": account.value}
        )
    for incident in closed:
        cause = {"cause": incident.cause.value}
        outcome = "recovered" if incident.recovered is not None else "ended"
        meter.create_counter(INCIDENTS, "Closed incidents by cause and last strategy.").add(
            1, {**cause, "strategy": find_last_strategy(incident), "outcome": outcome}
        )
        stages = meter.create_histogram_float(
            STAGE_SECONDS, "Seconds that each stage of a closed incident took."
        )
        for stage, seconds in measure_stages(incident):
            stages.record(seconds, {**cause, "stage": stage.value})
        if incident.recovered is not None:
            whole = max(0.0, (incident.recovered - incident.opened).total_seconds())
            meter.create_histogram_float(
                INCIDENT_SECONDS, "Seconds from the fault until training had recovered."
            ).record(whole, cause)


def record_end(job: JobState) -> None:
    """Record that a job has ended, and how."""
    if workflow.unsafe.is_replaying() or not _is_new(job, "end"):
        return
    meter = workflow.metric_meter()
    meter.create_counter(ENDED_JOBS, "Jobs that have ended, by their last phase.").add(
        1, {"fleet": job.spec.fleet, "phase": job.phase.value}
    )
