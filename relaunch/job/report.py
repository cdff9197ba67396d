"""Compute what a job's time went into, what its faults cost, and what would have helped.

Pure, over the ledger and the incidents. Definitions, as in Kokolis et al., "Revisiting Reliability
in Large-Scale Machine Learning Research Clusters" (arXiv 2410.21680):

- ETTR, the effective share: productive time / time between submission and end, queueing included.
- MTBF: time for which the job was scheduled (all but queued) / interruptions.
- MTTR: from the fault to the first step after it, the mean over interruptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median

from relaunch.evidence.causes import HARDWARE_CAUSES, Cause
from relaunch.job.accounts import Account, Ledger
from relaunch.job.copies import replace
from relaunch.job.hang import SAFETY_FACTOR
from relaunch.job.ledger import measure_wall, settle
from relaunch.job.state import Incident, JobState
from relaunch.job.trend import JobFault, Period, Trend, find_trend
from relaunch.text import count_noun, format_time, join_names

NONE = timedelta(0)
WORST_NODES = 5
ACCUSING_JOBS = 3
"""So many jobs make a suspect of a node that no kernel and no driver accuses, as in a fleet."""
NODE_CAUSES = (*HARDWARE_CAUSES, Cause.NODE_LOST)
MIN_GAIN = 0.001
"""Recommendation that would have saved a smaller share of the time is left out."""
MIN_UNKNOWN = 0.01
"""From this share of the time on, the report says how to make it known."""
MIN_HANG_LIMIT = timedelta(minutes=1)
"""A shorter limit is not advised: heartbeats that report the step come every 10 s."""
MAX_EXPONENT = 100.0
"""Of e: beyond it nothing is kept."""
REPAIRING = (Account.EXAMINING, Account.REPAIRING)
RELAUNCHING = (Account.STOPPING, Account.LAUNCHING)
STAGES = ("detect", "decide", "repair", "relaunch", "regain")
"""Of an incident, in their order; a cause has the median of each."""


@dataclass(frozen=True, slots=True)
class PricedIncident:
    job: str
    incident: Incident

    @property
    def price(self) -> timedelta:
        """The time that it took from training."""
        return sum(self.incident.costs.values(), NONE)

    @property
    def interruptions(self) -> int:
        """How often it stopped the ranks: a fault may come before the last one is recovered from.

        A node that came back by itself has not stopped them.
        """
        if not self.incident.costs:
            return 0
        faults = self.incident.faults
        stopped = {fault.generation for fault in faults if not fault.withdrawn}
        return max(1, len(stopped)) + self.incident.dropped_faults

    @property
    def node(self) -> str | None:
        """The likeliest suspect; None: no node is suspected, or only a program accuses it."""
        faults = self.incident.faults
        if faults and all(fault.by_program for fault in faults):
            return None
        return self.incident.nodes[0] if self.incident.nodes else None

    @property
    def is_of_node(self) -> bool:
        """Whether it counts as a fault of the node that it names, by itself."""
        return self.node is not None or self.incident.cause in NODE_CAUSES

    def cost(self, *accounts: Account) -> timedelta:
        return sum((self.incident.costs.get(one, NONE) for one in accounts), NONE)

    def find_stages(self) -> dict[str, timedelta]:
        """Return how long each of STAGES took; without those that it had not, or that are not
        known.

        Regain: from the last launch until training had passed the step before the fault.
        """
        one, found = self.incident, dict[str, timedelta]()
        if one.costs:
            found |= {"detect": self.cost(Account.DETECTING), "decide": self.cost(Account.DECIDING)}
        for stage, accounts in (("repair", REPAIRING), ("relaunch", RELAUNCHING)):
            if span := self.cost(*accounts):
                found[stage] = span
        if one.launched is not None and one.recovered is not None:
            found["regain"] = max(NONE, one.recovered - one.launched)
        return found


@dataclass(frozen=True, slots=True)
class CauseCost:
    cause: Cause
    count: int
    price: timedelta
    medians: dict[str, timedelta | None]
    """Of each of STAGES, over those of its incidents that had it; None: none had."""
    incidents: tuple[PricedIncident, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeCost:
    node: str
    count: int
    price: timedelta
    causes: tuple[Cause, ...]
    jobs: tuple[str, ...]
    recent: int = 0
    """Those in the newer half of the time."""
    incidents: tuple[PricedIncident, ...] = ()


@dataclass(frozen=True, slots=True)
class JobCost:
    job: str
    is_over: bool
    wall: timedelta
    effective: timedelta
    lost: timedelta
    interruptions: int

    @property
    def ettr(self) -> float | None:
        return self.effective / self.wall if self.wall else None


@dataclass(frozen=True, slots=True)
class JobWait:
    job: str
    account: Account
    whom: str
    span: timedelta
    count: int
    """Incidents in which it waited; 0: it waited without one."""
    incidents: tuple[PricedIncident, ...] = ()


@dataclass(frozen=True, slots=True)
class Recommendation:
    what: str
    """What to change: an imperative clause."""
    reason: str
    """The figures from which it follows."""
    setting: str = ""
    """The key of a file of the user's, with its value; empty: there is none."""
    saves: timedelta | None = None
    """What it would have saved; None: not known."""
    incidents: tuple[PricedIncident, ...] = ()
    """Those that its figures are computed of."""
    account: Account | None = None
    """What of their time; None: all."""


@dataclass(frozen=True, slots=True)
class CheckpointFigures:
    """How a job saved, as far as its ranks report it."""

    interval: timedelta | None
    """Mean time between two finished checkpoints."""
    cost: timedelta | None
    """Mean time in which ranks save one and do not train."""
    best: timedelta | None
    """sqrt(2 · cost · MTBF), by Young (1974) and Daly (2006)."""


@dataclass(frozen=True, slots=True)
class RunSpan:
    """For how long one generation ran, as far as incidents tell."""

    job: str
    generation: int
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Report:
    jobs: tuple[str, ...]
    start: datetime
    end: datetime
    is_over: bool
    wall: timedelta
    totals: dict[Account, timedelta]
    incidents: tuple[PricedIncident, ...]
    """Oldest first."""
    causes: tuple[CauseCost, ...]
    """The most expensive first."""
    nodes: tuple[NodeCost, ...]
    """The most expensive first, at most WORST_NODES."""
    waits: tuple[JobWait, ...]
    advice: tuple[Recommendation, ...]
    """What would have saved most first."""
    checkpoints: CheckpointFigures
    runs: tuple[RunSpan, ...]
    missing: tuple[str, ...] = ()
    """Sentences about what could not be read."""
    by_job: tuple[JobCost, ...] = ()
    """The one that lost most first."""
    trend: Trend | None = None
    """None: no time has passed."""

    def total(self, *accounts: Account) -> timedelta:
        return sum((self.totals.get(one, NONE) for one in accounts), NONE)

    @property
    def effective(self) -> timedelta:
        return self.total(*(one for one in Account if one.is_effective))

    @property
    def loss(self) -> timedelta:
        return self.total(*(one for one in Account if one.is_loss))

    @property
    def unknown(self) -> timedelta:
        return self.total(Account.UNKNOWN)

    @property
    def ettr(self) -> float | None:
        """The share that is known to be effective; None: no time has passed."""
        return self.effective / self.wall if self.wall else None

    @property
    def interruptions(self) -> int:
        return sum(one.interruptions for one in self.incidents)

    @property
    def scheduled(self) -> timedelta:
        return self.wall - self.total(Account.QUEUED)

    @property
    def mtbf(self) -> timedelta | None:
        return self.scheduled / self.interruptions if self.interruptions else None

    @property
    def mttr(self) -> timedelta | None:
        spans = (one.price - one.cost(Account.LOST_WORK) for one in self.incidents)
        return sum(spans, NONE) / self.interruptions if self.interruptions else None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What is known of one job: its state, and all its incidents, the open one included."""

    state: JobState
    incidents: tuple[Incident, ...]
    missing: tuple[str, ...] = ()
    closed_at: datetime | None = None
    """When its workflow was ended from outside (terminated), of which its state knows nothing."""


def make_report(
    records: Sequence[JobRecord],
    now: datetime,
    *,
    since: datetime | None = None,
    checkpoint_cost: timedelta | None = None,
) -> Report:
    """Report on the time of one job, or of several together.

    Args:
        records: The jobs; at least one.
        now: Until when jobs that have not ended are counted.
        since: Only time and incidents after this; an incident that opened before is not listed.
        checkpoint_cost: How long ranks do not train when they save; None: as they report it.
    """
    settled = [_settle(one, now) for one in records]
    cut, notes = [], []
    if since is not None:
        for index, record in enumerate(records):
            job = settled[index]
            if _find_start(job, record.incidents) < since:
                settled[index] = _cut(job, _with_open(record.incidents, job), since, now)
                cut.append(job.name)
    if cut:
        notes.append(
            f"{join_names(cut, 4)} began before {format_time(since or now)}: what faults took "
            "since then is exact, the rest is divided as over the whole job"
        )
    ledgers = [one.ledger for one in settled]
    totals: dict[Account, timedelta] = {}
    for account in Account:
        if span := sum((one.totals.get(account, NONE) for one in ledgers), NONE):
            totals[account] = span
    priced = [
        PricedIncident(job.name, incident)
        for job, record in zip(settled, records, strict=True)
        for incident in _with_open(record.incidents, job)
        if since is None or incident.opened >= since
    ]
    priced.sort(key=lambda one: one.incident.opened)
    ends = [one.ended_at or now for one in settled]
    starts = [
        max(_find_start(job, record.incidents), since or _find_start(job, record.incidents))
        for job, record in zip(settled, records, strict=True)
    ]
    faults = [
        JobFault(one.incident.opened, one.interruptions, one.price)
        for one in priced
        if one.interruptions
    ]
    trend = find_trend(tuple(zip(starts, ends, strict=True)), faults)
    report = Report(
        jobs=tuple(one.name for one in settled),
        start=min(starts),
        end=max(ends),
        is_over=all(map(_is_over, settled)),
        wall=sum((measure_wall(one) for one in settled), NONE),
        totals=totals,
        incidents=tuple(priced),
        causes=_list_causes(priced),
        nodes=_list_nodes(priced, trend),
        waits=tuple(
            sorted(
                (
                    row
                    for job in settled
                    for row in _list_waits(job, [one for one in priced if one.job == job.name])
                ),
                key=lambda row: -row.span,
            )
        ),
        advice=(),
        checkpoints=CheckpointFigures(None, None, None),
        runs=tuple(
            run
            for job, record in zip(settled, records, strict=True)
            for run in _list_runs(job, _with_open(record.incidents, job), now)
        ),
        missing=(*(sentence for one in records for sentence in one.missing), *notes),
        by_job=_list_jobs(settled, priced),
        trend=trend,
    )
    figures = _measure_checkpoints(ledgers, report.mtbf, checkpoint_cost)
    advice = _advise(report, figures, ledgers)
    return _with_advice(report, figures, advice)


def _with_open(incidents: Iterable[Incident], job: JobState) -> tuple[Incident, ...]:
    """Return the incidents with the settled open one in the place of that which was read."""
    if job.incident is None:
        return tuple(incidents)
    opened = job.incident.opened
    return (*(one for one in incidents if one.opened != opened), job.incident)


def _with_advice(
    report: Report, figures: CheckpointFigures, advice: Sequence[Recommendation]
) -> Report:
    ordered = sorted(advice, key=lambda one: -(one.saves or NONE))
    return replace(report, checkpoints=figures, advice=tuple(ordered))


# --- tables


def _list_causes(priced: Sequence[PricedIncident]) -> tuple[CauseCost, ...]:
    by_cause: dict[Cause, list[PricedIncident]] = {}
    for one in priced:
        by_cause.setdefault(one.incident.cause, []).append(one)
    rows = [
        CauseCost(
            cause,
            len(found),
            sum((one.price for one in found), NONE),
            {
                stage: _median(took[stage] for one in found if stage in (took := one.find_stages()))
                for stage in STAGES
            },
            tuple(found),
        )
        for cause, found in by_cause.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.price, row.cause)))


def _median(spans: Iterable[timedelta]) -> timedelta | None:
    seconds = [span.total_seconds() for span in spans]
    return timedelta(seconds=median(seconds)) if seconds else None


def _list_nodes(priced: Sequence[PricedIncident], trend: Trend | None) -> tuple[NodeCost, ...]:
    by_node: dict[str, list[PricedIncident]] = {}
    for one in priced:
        if one.incident.nodes and one.price:
            by_node.setdefault(one.incident.nodes[0], []).append(one)
    rows = []
    for node, named in by_node.items():
        is_accused = len({one.job for one in named}) >= ACCUSING_JOBS
        found = [one for one in named if is_accused or one.is_of_node]
        if not found:
            continue
        rows.append(
            NodeCost(
                node,
                len(found),
                sum((one.price for one in found), NONE),
                tuple(dict.fromkeys(one.incident.cause for one in found)),
                tuple(dict.fromkeys(one.job for one in found)),
                sum(trend is not None and one.incident.opened > trend.newer.start for one in found),
                tuple(found),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.price, -row.count, row.node))[:WORST_NODES])


def _list_jobs(
    settled: Sequence[JobState], priced: Sequence[PricedIncident]
) -> tuple[JobCost, ...]:
    rows = []
    for job in settled:
        totals = job.ledger.totals
        rows.append(
            JobCost(
                job.name,
                _is_over(job),
                sum(totals.values(), NONE),
                sum((span for one, span in totals.items() if one.is_effective), NONE),
                sum((span for one, span in totals.items() if one.is_loss), NONE),
                sum(one.interruptions for one in priced if one.job == job.name),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.lost, row.job)))


def _settle(record: JobRecord, now: datetime) -> JobState:
    if record.closed_at is None or record.state.phase.is_final:
        return settle(record.state, now)
    # The fleet stops its ranks a minute or two later.
    return replace(settle(record.state, record.closed_at), ended_at=record.closed_at)


def _is_over(job: JobState) -> bool:
    return job.phase.is_final or job.ended_at is not None


# --- a part of a job's time


def _find_start(job: JobState, incidents: Iterable[Incident]) -> datetime:
    """Return when a job began: its first submission, as far as it is known."""
    return min([job.submitted_at - job.ledger.earlier, *(one.opened for one in incidents)])


def _cut(job: JobState, incidents: Sequence[Incident], since: datetime, now: datetime) -> JobState:
    """Return a job with the accounts of its time after `since` only.

    What incidents took is known by the second. The rest is divided as over the whole job.
    """
    end = job.ended_at or now
    wall = min(measure_wall(job), max(NONE, end - since))
    lost: dict[Account, timedelta] = {}
    rest = dict(job.ledger.totals)
    for one in incidents:
        for account, span in one.costs.items():
            rest[account] = rest.get(account, NONE) - span
        for entry in one.entries:
            if entry.end > since:
                span = entry.end - max(since, entry.begin)
                lost[entry.account] = lost.get(entry.account, NONE) + span
    left = max(NONE, wall - sum(lost.values(), NONE))
    queued = rest.get(Account.QUEUED, NONE)
    if _find_start(job, incidents) + queued <= since:
        rest[Account.QUEUED] = NONE  # a job queues before it is launched
    rest = {account: span for account, span in rest.items() if span > NONE}
    whole = sum(rest.values(), NONE)
    totals = dict(lost)
    for account, span in rest.items():
        totals[account] = totals.get(account, NONE) + left * (span / whole)
    if not whole and left:
        totals[Account.UNKNOWN] = totals.get(Account.UNKNOWN, NONE) + left
    ledger = replace(job.ledger, totals=totals, earlier=NONE, charged_until=end)
    return replace(job, submitted_at=end - wall, ledger=ledger)


WAITS = {
    Account.QUEUED: "free nodes for its first launch",
    Account.WAITING_FOR_NODES: "free nodes",
    Account.WAITING_FOR_PERSON: "a person",
}


def _list_waits(job: JobState, priced: Sequence[PricedIncident]) -> list[JobWait]:
    rows = []
    for account, whom in WAITS.items():
        if span := job.ledger.totals.get(account, NONE):
            found = tuple(one for one in priced if one.cost(account))
            rows.append(JobWait(job.name, account, whom, span, len(found), found))
    by_node: dict[tuple[Account, str], list[PricedIncident]] = {}
    for one in priced:
        for account in REPAIRING:
            if one.cost(account):
                names = join_names(one.incident.nodes, 2) or "all its nodes"
                by_node.setdefault((account, names), []).append(one)
    verbs = {Account.EXAMINING: "the examination of", Account.REPAIRING: "the repair of"}
    for (account, node), named in by_node.items():
        whom, span = f"{verbs[account]} {node}", sum((one.cost(account) for one in named), NONE)
        rows.append(JobWait(job.name, account, whom, span, len(named), tuple(named)))
    return sorted(rows, key=lambda row: -row.span)


def _list_runs(job: JobState, incidents: Sequence[Incident], now: datetime) -> tuple[RunSpan, ...]:
    """Return when generations ran, from the incidents between them.

    Those that ended without one are not told apart.
    """
    runs = []
    start: datetime | None = job.submitted_at
    if incidents and incidents[0].opened < job.submitted_at:
        start = incidents[0].opened  # of an earlier submission, whose start is not kept
    for one in sorted(incidents, key=lambda one: one.opened):
        if not one.costs:
            continue  # it stopped nothing
        if start is not None and one.opened > start:
            runs.append(RunSpan(job.name, one.generation, start, one.opened))
        start = one.launched
        if start is None and one.closed is not None and one.closed <= job.submitted_at:
            start = job.submitted_at  # it ended an earlier submission
    if start is not None and job.launched_at is not None:
        runs.append(RunSpan(job.name, job.generation, start, job.ended_at or now))
    return tuple(runs)


# --- what would have helped


def _measure_checkpoints(
    ledgers: Sequence[Ledger], mtbf: timedelta | None, given: timedelta | None
) -> CheckpointFigures:
    count = sum(one.checkpoints for one in ledgers)
    spans = sum((one.checkpointed for one in ledgers), NONE)
    saving = sum((one.saving for one in ledgers), NONE)
    interval = spans / count if count else None
    cost = given if given is not None else saving / count if count and saving else None
    best = None
    if cost is not None and mtbf is not None:
        best = timedelta(seconds=math.sqrt(2 * cost.total_seconds() * mtbf.total_seconds()))
    return CheckpointFigures(interval, cost, best)


def estimate_ettr(
    mtbf: timedelta, restart: timedelta, interval: timedelta, cost: timedelta
) -> float:
    """Return the effective share to expect where faults come at random times.

    Between two faults ranks train for `life`, of which the finished intervals are kept. For short
    intervals this is the formula of arXiv 2410.21680,
    (1 - (restart + interval / 2) / MTBF) / (1 + cost / interval); that one has no meaning where the
    interval is about as long as the MTBF.

    Args:
        mtbf: As above.
        restart: From a fault to the first step after it.
        interval: Training time between two checkpoints.
        cost: For how long saving one keeps ranks from training.
    """
    life = mtbf - restart
    if life <= NONE or not interval:
        return 0.0
    periods = min((interval + cost) / life, MAX_EXPONENT)
    kept = interval / math.expm1(periods)
    return kept / mtbf


def _advise(
    report: Report, figures: CheckpointFigures, ledgers: Sequence[Ledger]
) -> list[Recommendation]:
    advice = [
        *_advise_checkpoints(report, figures),
        *_advise_spares(report),
        *_advise_hang_limit(report, ledgers),
        *_advise_budget(report),
        *_advise_quarantine(report),
    ]
    least = MIN_GAIN * report.wall
    advice = [one for one in advice if one.saves is None or one.saves >= least]
    if report.unknown > MIN_UNKNOWN * report.wall:
        reason = "what this time went into was not reported"
        known = any(one.reports_checkpoints for one in ledgers)
        what = "have the ranks report their steps" + ("" if known else " and checkpoints")
        advice.append(Recommendation(what, reason, "progress"))
    return advice


def _advise_checkpoints(report: Report, figures: CheckpointFigures) -> list[Recommendation]:
    interval, cost, best, mtbf = figures.interval, figures.cost, figures.best, report.mtbf
    if interval is None or mtbf is None:
        return []
    if cost is None or best is None:
        what = "have the ranks report the phase `checkpoint` while they save"
        return [Recommendation(what, "then this report can say how often to save", "progress")]

    def expect(interval: timedelta) -> float:
        return estimate_ettr(mtbf, report.mttr or NONE, interval, cost)

    # What is measured from one finished checkpoint to the next includes the saving.
    trained = max(interval - cost, timedelta(seconds=1))
    each, every = format_span(cost), format_span(mtbf)
    return [
        Recommendation(
            "save a checkpoint more often" if best < trained else "save checkpoints less often",
            f"each costs {each}, and a fault comes every {every}: sqrt(2 · {each} · {every}) = "
            f"{format_span(best)}; now one every {format_span(trained)}",
            f"every {format_span(best)}, in the training program",
            max(NONE, (expect(best) - expect(trained)) * report.scheduled),
            report.incidents,
            Account.LOST_WORK,
        )
    ]


def _advise_spares(report: Report) -> list[Recommendation]:
    waited = [one for one in report.incidents if one.cost(Account.WAITING_FOR_NODES)]
    if not waited:
        return []
    nodes = max(len(one.incident.nodes) for one in waited) or 1
    span = sum((one.cost(Account.WAITING_FOR_NODES) for one in waited), NONE)
    return [
        Recommendation(
            f"keep {nodes} spare {'node' if nodes == 1 else 'nodes'} in the fleet",
            f"{count_noun(len(waited), 'incident')} waited {format_span(span)} for free nodes",
            "spare: true, in the fleet file",
            span,
            tuple(waited),
            Account.WAITING_FOR_NODES,
        )
    ]


def _advise_hang_limit(report: Report, ledgers: Sequence[Ledger]) -> list[Recommendation]:
    longest = max(
        (one.longest_step for one in ledgers if one.longest_step is not None), default=None
    )
    hangs = [one for one in report.incidents if one.incident.cause is Cause.HANG]
    if longest is None or not hangs:
        return []
    limit = max(MIN_HANG_LIMIT, SAFETY_FACTOR * longest)
    saves = sum((max(NONE, one.cost(Account.DETECTING) - limit) for one in hangs), NONE)
    if not saves:
        return []
    minutes = math.ceil(limit / timedelta(minutes=1))
    took = sum((one.cost(Account.DETECTING) for one in hangs), NONE)
    longest_text = format_span(longest)
    return [
        Recommendation(
            "shorten the hang limit",
            f"{count_noun(len(hangs), 'hang')} took {format_span(took)} to detect; the longest "
            f"step took {longest_text}, and {SAFETY_FACTOR} times that is {format_span(limit)}",
            f"hang: {{after: {minutes}m}}",
            saves,
            tuple(hangs),
            Account.DETECTING,
        )
    ]


def _advise_budget(report: Report) -> list[Recommendation]:
    advice = []
    for row in report.causes:
        asked = [
            one
            for one in report.incidents
            if one.incident.cause is row.cause
            and one.cost(Account.WAITING_FOR_PERSON)
            and any(decision.decision == "Ask" for decision in one.incident.decisions)
        ]
        if not asked:
            continue
        span = sum((one.cost(Account.WAITING_FOR_PERSON) for one in asked), NONE)
        advice.append(
            Recommendation(
                f"give the ladder of {row.cause} more tries, or answer sooner",
                f"{count_noun(len(asked), 'incident')} had no tries left and waited "
                f"{format_span(span)} for a person",
                f"causes.{row.cause}, in the policy",
                span,
                tuple(asked),
                Account.WAITING_FOR_PERSON,
            )
        )
    return advice


def _advise_quarantine(report: Report) -> list[Recommendation]:
    advice = []
    for row in report.nodes:
        found = [one for one in report.incidents if one.node == row.node and one.price]
        saves = sum((one.price for one in found[1:]), NONE)
        if saves:
            advice.append(
                Recommendation(
                    f"quarantine {row.node} after its first fault",
                    f"it had {count_noun(len(found), 'fault')}; those after the first cost "
                    f"{format_span(saves)}",
                    f"relaunch nodes quarantine {row.node} --reason …",
                    saves,
                    tuple(found),
                )
            )
    return advice


# --- sentences


def format_span(span: timedelta) -> str:
    """Format a time with its two largest units: `54 d`, `3 h 12 m`, `4.5 s`."""
    seconds = span.total_seconds()
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    left = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
        if len(parts) == 2:
            break
    if len(parts) == 2 and parts[1].startswith("0 "):
        parts.pop()
    return " ".join(parts)


def summarize(report: Report) -> str:
    """Return the whole report in one sentence."""
    share = report.ettr
    if share is None:
        return "no time has passed since the submission"
    # An unknown second may have been effective: the share is between two figures.
    most = (report.effective + report.unknown) / report.wall
    known = f"{share:.1%}".replace("%", " %")
    if report.unknown:
        known = f"{known} to {f'{most:.1%}'.replace('%', ' %')}"
    parts = [f"{known} effective", f"lost {format_span(report.loss)} of {format_span(report.wall)}"]
    if report.unknown:
        parts.append(f"{format_span(report.unknown)} unknown")
    if report.nodes and report.nodes[0].price:
        worst = report.nodes[0]
        parts.append(
            f"worst: {worst.node}, {count_noun(worst.count, 'fault')}, {format_span(worst.price)}"
        )
    if report.trend is not None and report.trend.direction != "unchanged":
        parts.append(f"getting {report.trend.direction}")
    return "; ".join(parts)


def describe_trend(report: Report) -> str:
    """Return whether faults become more frequent, in one sentence; empty if there were none."""
    trend = report.trend
    if trend is None or not report.interruptions:
        return ""
    verdict = {
        "worse": "getting worse",
        "better": "getting better",
        "unchanged": "no clear change",
    }[trend.direction]
    older, newer = (_describe_half(one) for one in (trend.older, trend.newer))
    return f"{verdict}: {newer} since {format_time(trend.newer.start)}, {older} before"


def _describe_half(half: Period) -> str:
    mtbf = f" (MTBF {format_span(half.mtbf)})" if half.mtbf is not None else ""
    return f"{count_noun(half.interruptions, 'interruption')}{mtbf}"
