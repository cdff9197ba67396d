"""Charge each second of a job to one account, and each lost second to one incident.

Part of `step`: time is charged when an event or a decision ends what it went into. Training is
charged only when it ends, since only then it is known what was kept of it. Nothing here chooses
what a job does.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from relaunch.job.accounts import (
    Account,
    Ledger,
    LedgerEntry,
    RunFigures,
    RunningTime,
)
from relaunch.job.copies import replace
from relaunch.job.events import (
    CheckpointSaved,
    Event,
    FaultObserved,
    Launched,
    ProgressSeen,
    RanksHung,
    RanksStopped,
    RanksSucceeded,
    StepReached,
    Submitted,
)
from relaunch.job.state import Decision, Incident, JobState, Phase, Stop

NONE = timedelta(0)
MAX_ENTRIES = 40
"""Entries kept of one incident, as many as decisions: a relaunch loop must not fill the state."""


def is_training(job: JobState) -> bool:
    """Return whether ranks run, as far as is known: also where a node does not answer.

    What that time went into is known only when it ends.
    """
    if job.launched_at is None or job.ending is not None or job.deferred_fault is not None:
        return False
    waits = job.phase in (Phase.NODE_LOST, Phase.WAITING_FOR_PERSON)
    return job.phase is Phase.RUNNING or (waits and bool(job.lost))


def name_account(job: JobState) -> Account:
    """Return what the time goes into while a job does not train."""
    match job.phase:
        case Phase.WAITING_FOR_NODES:
            return Account.WAITING_FOR_NODES
        case Phase.WAITING_FOR_PERSON:
            return Account.WAITING_FOR_PERSON
        case Phase.STOPPING | Phase.NODE_LOST:
            return Account.STOPPING
        case Phase.QUEUED | Phase.LAUNCHING if not job.slots:
            return Account.QUEUED
        case _ if job.maybe_alive or job.lost:
            return Account.STOPPING
        case Phase.EXAMINING:
            return Account.EXAMINING
        case Phase.REPAIRING if job.recovering is not None and job.recovering.questions:
            return Account.WAITING_FOR_PERSON
        case Phase.REPAIRING:
            return Account.REPAIRING
        case _:
            return Account.LAUNCHING


# --- what an event says about the time before it


def charge_before(job: JobState, event: Event, now: datetime) -> JobState:
    """Charge the time that ends with an event, before the event is recorded.

    It belongs to the incident that is open until then.
    """
    if isinstance(event, Submitted) and not job.generation:
        return _with_ledger(job, charged_until=job.submitted_at)
    if not is_training(job):
        match event:
            case RanksStopped() if name_account(job) is Account.STOPPING:
                return _charge(job, min(event.at, now), Account.STOPPING)
            case Launched():
                account = name_account(job)
                if account is Account.STOPPING:
                    job = _charge(job, min(event.stopped_at, now), account)
                    account = Account.LAUNCHING
                job = _charge(job, min(event.started_at, now), account)
                return _with_ledger(job, running=RunningTime())
        return job
    match event:
        case Launched():
            job = _charge_training(job, min(event.started_at, now), now)
            return _with_ledger(job, running=RunningTime())
        case ProgressSeen() | StepReached():
            if isinstance(event, ProgressSeen) and event.figures is not None:
                job = _charge_start(_learn(job, event.figures, now), min(event.at, now))
            due = job.report_at_step
            return job if due is None or event.step < due else _charge_regained(job, event, now)
        case CheckpointSaved():
            return _learn(job, RunFigures(checkpoint=event.step, checkpoint_at=event.at), now)
        case RanksSucceeded():
            return _with_ledger(_charge_training(job, now, now, kept=True), at_risk=NONE)
        case _:
            return job


def charge_after(before: JobState, after: JobState, event: Event, now: datetime) -> JobState:
    """Charge the time that ended with an event which is recorded.

    What a fault undid belongs to the incident that it opened.
    """
    if isinstance(event, FaultObserved | RanksHung) and is_training(before):
        found = min(event.opened_at, now)
        end = found
        if isinstance(event, RanksHung):
            advanced = before.progress.at if before.progress is not None else before.launched_at
            end = min(found, advanced) if advanced is not None else found
        after = _charge_training(after, end, now)
        if isinstance(event, RanksHung):
            after = _charge(after, found, Account.DETECTING)
            return _charge(after, now, Account.DECIDING)
        return _charge(after, now, Account.DETECTING)
    if not is_training(before) and not isinstance(event, RanksStopped | Launched):
        is_other_incident = (before.incident is None) != (after.incident is None)
        if is_other_incident or name_account(before) is not name_account(after):
            after = _charge_state(after, before, now)
    ledger = after.ledger
    if ledger.regains and after.incident is None and after.unpassed_step is None:
        # The counter starts again while ranks live, so its step never says what was kept.
        after = _give_up_regaining(after)
    return after


def charge_decision(job: JobState, after: JobState, decision: Decision, now: datetime) -> JobState:
    """Return `after` with the time charged that a decision ends.

    Args:
        job: The state in which it was taken.
        after: That state with the decision recorded.
        decision: What was decided.
        now: The time of the workflow.
    """
    if is_training(after):
        return after
    if is_training(job):
        end = _find_last_sign(job, now)
        ended = isinstance(decision, Stop) and job.incident is None
        charged = _charge_training(job, end, now, kept=ended)
        waited = job.phase is Phase.WAITING_FOR_PERSON
        charged = _charge(charged, now, Account.WAITING_FOR_PERSON if waited else Account.DETECTING)
    elif name_account(job) is not name_account(after):
        charged = _charge(job, now, name_account(job))
    else:
        return after
    incident = after.incident
    if incident is not None and charged.incident is not None:
        incident = replace(incident, costs=charged.incident.costs, entries=charged.incident.entries)
    return replace(after, ledger=charged.ledger, incident=incident)


def charge_end(job: JobState, now: datetime) -> JobState:
    """Charge the rest of a job's time at its end, before its open incident is closed."""
    job = _charge(job, now, name_account(job))
    assert job.ending is not None
    if job.ending.phase is Phase.SUCCEEDED:
        return _with_ledger(job, regains=False, at_risk=NONE)
    return _give_up_regaining(job)


def carry_over(ledger: Ledger, now: datetime) -> Ledger:
    """Return the ledger with which a new submission begins. Time between two is in no account."""
    return replace(
        ledger,
        charged_until=now,
        earlier=sum(ledger.totals.values(), NONE),
        running=RunningTime(),
        regains=False,
        at_risk=NONE,
    )


def settle(job: JobState, now: datetime) -> JobState:
    """Return a job's state with all its time charged up to `now`, for a report.

    Training that still goes on counts as kept, and as unknown where it reports no step.
    """
    if job.phase.is_final:
        return job
    if is_training(job):
        return _charge_training(job, now, now, kept=True)
    return _charge(job, now, name_account(job))


def measure_wall(job: JobState) -> timedelta:
    """Return the time between submission and end, or `charged_until`, of all submissions."""
    until = job.ledger.charged_until
    return job.ledger.earlier + (NONE if until is None else until - job.submitted_at)


# --- charging


def _with_ledger(job: JobState, **changes: Any) -> JobState:
    return replace(job, ledger=replace(job.ledger, **changes))


def _charge(
    job: JobState, until: datetime, account: Account, *, to_incident: bool = True
) -> JobState:
    """Charge the time up to `until` to an account and, if it is a loss, to the open incident."""
    ledger = job.ledger
    if ledger.charged_until is None:
        # A build that kept no ledger submitted the job: what the time until now went into is in
        # its history alone.
        account = Account.UNKNOWN
    since = ledger.charged_until or job.submitted_at
    span = until - since
    if span <= NONE:
        return job
    totals = {**ledger.totals, account: ledger.totals.get(account, NONE) + span}
    incident = job.incident
    if incident is not None and account.is_loss and to_incident:
        incident = _charge_incident(incident, LedgerEntry(account, since, until))
    return replace(
        job, incident=incident, ledger=replace(ledger, totals=totals, charged_until=until)
    )


def _charge_incident(incident: Incident, entry: LedgerEntry) -> Incident:
    span = entry.end - entry.begin
    costs = {**incident.costs, entry.account: incident.costs.get(entry.account, NONE) + span}
    entries = incident.entries
    if entries and (entries[-1].account, entries[-1].end) == (entry.account, entry.begin):
        entries = (*entries[:-1], replace(entries[-1], end=entry.end))
    else:
        entries = (*entries, entry)
    if len(entries) > MAX_ENTRIES:
        half = MAX_ENTRIES // 2
        entries = (*entries[:half], *entries[half + 1 :])
    return replace(incident, costs=costs, entries=entries)


def _charge_state(job: JobState, before: JobState, now: datetime) -> JobState:
    """Charge the time until now to the account of the state before, and to its incident."""
    return _charge(job, now, name_account(before), to_incident=before.incident is not None)


def _charge_training(
    job: JobState, end: datetime, now: datetime, *, kept: bool = False
) -> JobState:
    """Charge training that ended.

    Args:
        job: The state in which it ended; its incident is that of the fault which ended it.
        end: When it ended.
        now: The time of the workflow.
        kept: Whether no fault ended it: all of it counts.
    """
    ledger = job.ledger
    if ledger.charged_until is not None and end <= ledger.charged_until:
        return job
    if job.progress is None:
        # Where no step is reported at all, it is not known whether training had begun.
        reports = job.furthest_step is not None or job.spec.progress.pattern is not None
        return _charge(job, end, Account.LAUNCHING if reports else Account.UNKNOWN)
    running = ledger.running
    saved = running.checkpoint_at
    if ledger.regains:
        return _charge(job, end, Account.LOST_WORK)
    if kept:
        return _charge_kept(job, end)
    if running.reported_at == now and ledger.reports_checkpoints:
        if saved is not None:
            job = _charge_kept(job, min(saved, end))
        return _charge(job, end, Account.LOST_WORK)
    if saved is not None:
        job = _charge_kept(job, min(saved, end))
    if job.incident is None:
        return _charge(job, end, Account.UNKNOWN)
    before = job.ledger.totals.get(Account.PRODUCTIVE, NONE)
    job = _charge_kept(job, end)
    risked = job.ledger.totals.get(Account.PRODUCTIVE, NONE) - before
    return _with_ledger(job, regains=True, at_risk=job.ledger.at_risk + risked)


def _charge_start(job: JobState, end: datetime) -> JobState:
    """Charge the time from the start of the ranks to their first step, if that is known.

    It is in the price of an incident for which they were started, not of one that began later.
    """
    first, since = job.ledger.running.first_step_at, job.ledger.charged_until
    if first is None or since is None:
        return job
    caused = job.incident is not None and job.incident.opened <= since
    return _charge(job, min(first, end), Account.LAUNCHING, to_incident=caused)


def _charge_kept(job: JobState, until: datetime) -> JobState:
    """Charge training that counts, without the time in it that ranks spent on saving."""
    running, since = job.ledger.running, job.ledger.charged_until
    if since is None or until <= since:
        return _charge(job, until, Account.PRODUCTIVE)
    saving = min(running.saving, until - since)
    away = min(running.away, until - since - saving)
    job = _charge(job, since + saving, Account.SAVING, to_incident=False)
    job = _charge(job, since + saving + away, Account.CONTROLLER_AWAY)
    left = replace(running, saving=running.saving - saving, away=running.away - away)
    return _charge(_with_ledger(job, running=left), until, Account.PRODUCTIVE)


def _charge_regained(job: JobState, event: ProgressSeen | StepReached, now: datetime) -> JobState:
    """Charge what it took to reach again the step before the fault.

    Where no checkpoint was known when the fault came, the loss is what was done again.
    """
    if not job.ledger.regains:
        return job
    job = _charge(job, min(event.at, now), Account.LOST_WORK)
    running = replace(job.ledger.running, saving=NONE, away=NONE)
    return _with_ledger(job, running=running, regains=False, at_risk=NONE)


def _give_up_regaining(job: JobState) -> JobState:
    """Charge as unknown what was charged as productive though it may have been lost."""
    totals, risked = job.ledger.totals, job.ledger.at_risk
    moved = {
        **totals,
        Account.PRODUCTIVE: totals.get(Account.PRODUCTIVE, NONE) - risked,
        Account.UNKNOWN: totals.get(Account.UNKNOWN, NONE) + risked,
    }
    totals = {account: span for account, span in moved.items() if span}
    return _with_ledger(job, totals=totals, regains=False, at_risk=NONE)


def _learn(job: JobState, figures: RunFigures, now: datetime) -> JobState:
    """Record what a watch has learned about the generation that runs."""
    ledger, running = job.ledger, job.ledger.running
    running = replace(
        running,
        first_step_at=running.first_step_at or figures.first_step_at,
        saving=running.saving + figures.saving,
        away=running.away + figures.away,
        reported_at=now,
    )
    saved = figures.checkpoint_at
    if saved is not None and (running.checkpoint_at is None or saved > running.checkpoint_at):
        running = replace(running, checkpoint_at=saved)
    longest = [one for one in (ledger.longest_step, figures.longest_step) if one is not None]
    return _with_ledger(
        job,
        running=running,
        newest_checkpoint=ledger.newest_checkpoint
        if figures.checkpoint is None
        else figures.checkpoint,
        reports_checkpoints=ledger.reports_checkpoints or figures.checkpoint is not None,
        checkpoints=ledger.checkpoints + figures.checkpoints,
        checkpointed=ledger.checkpointed + figures.watched,
        saving=ledger.saving + figures.saving,
        longest_step=max(longest, default=None),
    )


def _find_last_sign(job: JobState, now: datetime) -> datetime:
    """Return until when training is known to have gone on that a decision ends.

    While a node is lost that is until it was last heard, or until the others last advanced.
    """
    if not job.lost:
        return now
    signs = [min(lost.last_heard_at for lost in job.lost)]
    if job.progress is not None:
        signs.append(job.progress.at)
    return min(now, max(signs))
