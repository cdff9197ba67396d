"""Measure a job for metrics: its incidents, how long each stage of one took, and what is left.

It reads the state that decisions are made of, and no decision depends on it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from relaunch.job.accounts import Account, Ledger
from relaunch.job.ladder import list_used_budgets
from relaunch.job.state import FaultRecord, Incident, JobState, Phase


class IncidentStage(StrEnum):
    """A part of an incident, in the order in which they follow each other."""

    DETECT = "detect"
    """From the fault until the job knew of it."""
    DECIDE = "decide"
    """Until the first decision."""
    RELAUNCH = "relaunch"
    """Until all ranks of the last launch had started: ranks are stopped, nodes are examined,
    repaired or waited for, and so are people."""
    REGAIN = "regain"
    """Until training had passed the step that it had reached before the fault."""


class Budget(StrEnum):
    """A count that ends the job, or makes it ask a person, when nothing is left of it."""

    RESTARTS = "restarts"
    """The policy's `max_restarts`."""
    NO_PROGRESS = "no_progress"
    """Generations without progress: the policy's `no_progress_stop`."""
    LADDER = "ladder"
    """Tries of the used rung that has the fewest left."""


def find_closed_incidents(before: JobState, after: JobState) -> tuple[Incident, ...]:
    """Return the incidents that closed between two states of one run, oldest first."""
    count = count_closed_incidents(after) - count_closed_incidents(before)
    return after.incidents[-count:] if count > 0 else ()


def count_closed_incidents(job: JobState) -> int:
    """Return how many incidents of the job have closed, archived ones included."""
    return len(job.incidents) + job.incidents_archived


def find_new_faults(
    before: JobState, after: JobState
) -> tuple[tuple[tuple[int, int], FaultRecord], ...]:
    """Return the faults that were recorded between two states of one run, oldest first.

    With each comes which one it is of the job: the number of its incident, and its own within that,
    both from 0.
    """
    found: list[tuple[tuple[int, int], FaultRecord]] = []
    known = 0 if before.incident is None else _count_faults(before.incident)
    still_open = () if after.incident is None else (after.incident,)
    incidents = (*find_closed_incidents(before, after), *still_open)
    for number, incident in enumerate(incidents, start=count_closed_incidents(before)):
        if (new := _count_faults(incident) - known) > 0:
            faults = enumerate(incident.faults[-new:], start=known)
            found += [((number, one), fault) for one, fault in faults]
        known = 0
    return tuple(found)


def _count_faults(incident: Incident) -> int:
    return len(incident.faults) + incident.dropped_faults


def measure_stages(incident: Incident) -> tuple[tuple[IncidentStage, float], ...]:
    """Return how many seconds each stage took whose begin and end are known.

    Only an incident that recovered has all of them. The times are by clocks of several machines: a
    stage that would be negative counts as 0.
    """
    times = (
        incident.opened,
        incident.detected,
        incident.decided,
        incident.launched,
        incident.recovered,
    )
    return tuple(
        (stage, max(0.0, (end - begin).total_seconds()))
        for stage, begin, end in zip(IncidentStage, times, times[1:], strict=False)
        if begin is not None and end is not None
    )


def measure_accounts(ledger: Ledger) -> dict[Account, int]:
    """Return the whole seconds of each account that stay in it: none falls within a submission.

    What may still have been lost is left out, until it is known.
    """
    second = timedelta(seconds=1)
    seconds = {account: span // second for account, span in ledger.totals.items()}
    if ledger.at_risk:
        kept = ledger.totals.get(Account.PRODUCTIVE, timedelta(0)) - ledger.at_risk
        seconds[Account.PRODUCTIVE] = kept // second
    return seconds


def find_last_strategy(incident: Incident) -> str:
    """Return the strategy that was tried last; NONE if none was."""
    return next((one.strategy for one in reversed(incident.decisions) if one.strategy), "NONE")


def find_budgets_left(job: JobState, now: datetime) -> dict[Budget, int]:
    """Return what is left of each budget that the job has, the least where it has several."""
    left = {Budget.RESTARTS: max(0, job.policy.max_restarts - job.restarts_spent)}
    if job.policy.no_progress_stop != "off":
        left[Budget.NO_PROGRESS] = max(0, job.policy.no_progress_stop - job.flat_generations)
    tries = [
        max(0, used.rung.tries - used.used)
        for used in list_used_budgets(job, now)
        if used.rung.tries is not None
    ]
    if tries:
        left[Budget.LADDER] = min(tries)
    return left


def find_question_time(job: JobState) -> datetime | None:
    """Return since when the job's question waits for a person; None if no person has to answer.

    A question that a person snoozed or took over is not waiting.
    """
    if job.phase is not Phase.WAITING_FOR_PERSON or job.snoozed or job.asked is None:
        return None
    if job.asked.waits:
        return None
    if job.incident is not None:
        for one in reversed(job.incident.decisions):
            if one.decision == "Ask":
                return one.at
    return None if job.next.at is None else job.next.at - job.policy.timeouts.answer_within
