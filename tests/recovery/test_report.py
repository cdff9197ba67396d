"""What a report says of a job: its figures, its tables and its advice."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import cache

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.job.accounts import Account, Ledger, LedgerEntry
from relaunch.job.report import (
    JobRecord,
    Report,
    describe_trend,
    estimate_ettr,
    format_span,
    make_report,
    summarize,
)
from relaunch.job.state import DecisionRecord, FaultRecord, Incident, JobState, Phase
from tests.recovery.builders import T0, at, running
from tests.recovery.simulated_training import Training, draw_faults, train

LLAMA_FAULTS, LLAMA_TIME = 419, timedelta(days=54)
"""Llama 3 405B, arXiv 2407.21783, Table 5."""
MTBF = LLAMA_TIME / LLAMA_FAULTS
MINUTE = 60.0
HOUR = timedelta(hours=1)


def report_on(job: JobState) -> Report:
    return make_report([JobRecord(job, job.incidents)], job.ended_at or T0)


@cache
def train_llama(interval: float, seed: int) -> Report:
    training = Training(interval, cost=MINUTE)
    lives = draw_faults(LLAMA_FAULTS, LLAMA_TIME, training.restart, seed)
    record = train(training, lives)
    return make_report([record], record.state.ended_at or T0)


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("seed", range(3))
def test_the_share_of_llama_3_agrees_with_the_closed_formula(seed: int) -> None:
    interval = timedelta(minutes=30)
    report = train_llama(interval.total_seconds(), seed)
    assert report.interruptions == LLAMA_FAULTS
    assert abs(report.wall - LLAMA_TIME) < timedelta(hours=1)
    assert sum(report.totals.values(), timedelta(0)) == report.wall
    assert report.unknown == timedelta(0) and report.mtbf is not None and report.mttr is not None
    assert abs(report.mtbf / MTBF - 1) < 0.01
    assert abs(report.mttr - Training(1, 1).restart) < timedelta(seconds=1)
    restart = Training(1, 1).restart
    expected = (1 - (restart + interval / 2) / MTBF) / (1 + timedelta(minutes=1) / interval)
    assert report.ettr is not None and abs(report.ettr - expected) < 0.005


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("bad", [3 * MINUTE, 180 * MINUTE])
def test_the_advised_interval_recovers_most_of_the_optimum(bad: float) -> None:
    def measure(interval: float) -> float:
        return train_llama(interval, seed=1).ettr or 0.0

    before = train_llama(bad, seed=1)
    best = before.checkpoints.best
    assert best is not None and before.ettr is not None
    followed = measure(best.total_seconds())
    optimum = max(measure(minutes * MINUTE) for minutes in (17, 19, 22))
    assert (followed - before.ettr) / (optimum - before.ettr) >= 0.9
    advice = next(one for one in before.advice if "checkpoint" in one.what)
    gained = (followed - before.ettr) * before.wall
    assert advice.saves is not None and 0.7 < advice.saves / gained < 1.4


# --- tables


def priced(
    number: int, cause: Cause = Cause.GPU_FATAL, node: str = "n2", asked: bool = False, **costs: int
) -> Incident:
    start = at(10_000 * number)
    decisions = (DecisionRecord(start, "Ask", None, "tries are used up", False),) if asked else ()
    return Incident(
        start,
        number,
        cause,
        "boom",
        nodes=(node,) if node else (),
        detected=start,
        launched=start + timedelta(seconds=100),
        recovered=start + timedelta(seconds=160),
        closed=start + timedelta(seconds=160),
        decisions=decisions,
        costs={Account(name): timedelta(seconds=span) for name, span in costs.items()},
    )


INCIDENTS = (
    priced(1, detecting=4, launching=100, lost_work=600),
    priced(2, detecting=6, launching=200, repairing=50, stopping=10),
    priced(3, Cause.HANG, "n3", detecting=1800, launching=60),
    priced(4, Cause.HANG, "n4", True, detecting=900, waiting_for_person=7200, launching=50),
    priced(5, Cause.NODE_LOST, "n5", waiting_for_nodes=3600, launching=50),
    priced(6, Cause.NODE_LOST, "n6"),
)


def make_job(**ledger: object) -> JobState:
    totals = {Account.PRODUCTIVE: timedelta(seconds=85_000), Account.QUEUED: timedelta(seconds=60)}
    for one in INCIDENTS:
        for account, span in one.costs.items():
            totals[account] = totals.get(account, timedelta(0)) + span
    end = T0 + sum(totals.values(), timedelta(0))
    made = Ledger(charged_until=end, totals=totals)
    job = replace(running(), phase=Phase.SUCCEEDED, ended_at=end, ledger=replace(made, **ledger))
    return replace(job, incidents=INCIDENTS)


def test_causes_have_a_price_and_medians() -> None:
    report = report_on(make_job())
    rows = {row.cause: row for row in report.causes}
    assert [row.cause for row in report.causes] == [Cause.HANG, Cause.NODE_LOST, Cause.GPU_FATAL]
    fatal = rows[Cause.GPU_FATAL]
    assert (fatal.count, fatal.price) == (2, timedelta(seconds=970))
    medians = {"detect": 5, "decide": 0, "repair": 50, "relaunch": 155, "regain": 60}
    assert fatal.medians == {one: timedelta(seconds=span) for one, span in medians.items()}
    assert rows[Cause.HANG].medians["repair"] is None
    assert rows[Cause.NODE_LOST].count == 2


def test_nodes_and_waits_are_sorted_by_what_they_cost() -> None:
    report = report_on(make_job())
    assert [(row.node, row.count) for row in report.nodes[:3]] == [("n4", 1), ("n5", 1), ("n3", 1)]
    assert [(row.whom, row.span.total_seconds(), row.count) for row in report.waits] == [
        ("a person", 7200, 1),
        ("free nodes", 3600, 1),
        ("free nodes for its first launch", 60, 0),
        ("the repair of n2", 50, 1),
    ]


def test_a_node_that_came_back_by_itself_is_no_interruption() -> None:
    report = report_on(make_job())
    assert len(report.incidents) == 6 and report.interruptions == 5


def test_a_node_that_only_a_program_accuses_is_not_named() -> None:
    fault = FaultRecord(T0, 1, Cause.APPLICATION, "exit 1", nodes=("n2",), by_program=True)
    bug = replace(INCIDENTS[0], cause=Cause.APPLICATION, faults=(fault,))
    assert report_on(replace(make_job(), incidents=(bug,))).nodes == ()
    proven = replace(bug, faults=(replace(fault, by_program=False),))
    nodes = report_on(replace(make_job(), incidents=(proven,))).nodes
    assert [row.node for row in nodes] == ["n2"]


def test_a_node_on_which_three_jobs_failed_is_named() -> None:
    fault = FaultRecord(T0, 1, Cause.APPLICATION, "exit 1", nodes=("n2",), by_program=True)
    bug = replace(INCIDENTS[0], cause=Cause.APPLICATION, faults=(fault,))

    def list_rows(count: int) -> list[tuple[str, int, tuple[str, ...]]]:
        jobs = [replace(make_job(), name=f"j{one}", incidents=(bug,)) for one in range(count)]
        report = make_report([JobRecord(job, job.incidents) for job in jobs], T0)
        return [(row.node, row.count, row.jobs) for row in report.nodes]

    assert list_rows(2) == []
    assert list_rows(3) == [("n2", 3, ("j0", "j1", "j2"))]
    lost_shim = replace(bug, cause=Cause.NODE_FAULT)  # no program says so, and none is sure
    job = replace(make_job(), incidents=(lost_shim,))
    assert [row.node for row in report_on(job).nodes] == ["n2"]
    assert [one.setting for one in report_on(job).advice if "quarantine" in one.what] == []


def test_jobs_are_listed_by_what_they_lost() -> None:
    worse, better = make_job(), replace(make_job(), name="other", incidents=())
    totals = {Account.PRODUCTIVE: timedelta(hours=1)}
    better = replace(better, ledger=replace(better.ledger, totals=totals))
    report = make_report([JobRecord(better, ()), JobRecord(worse, INCIDENTS)], T0)
    assert [(row.job, row.interruptions) for row in report.by_job] == [("llama", 5), ("other", 0)]
    assert report.by_job[1].ettr == 1.0
    assert sum((row.lost for row in report.by_job), timedelta(0)) == report.loss


def test_interruptions_are_counted_by_generation() -> None:
    faults = [FaultRecord(T0, number, Cause.HANG, "hung") for number in (1, 1, 2, 3)]
    faults[3] = replace(faults[3], withdrawn="it answers again")
    one = replace(INCIDENTS[0], faults=tuple(faults), dropped_faults=4)
    assert report_on(replace(make_job(), incidents=(one,))).interruptions == 2 + 4


def test_advice_says_what_each_change_would_have_saved() -> None:
    report = report_on(make_job(longest_step=timedelta(seconds=40)))
    assert [(one.what, one.saves) for one in report.advice] == [
        (
            "give the ladder of HANG more tries, or answer sooner",
            timedelta(seconds=7200),
        ),
        ("keep 1 spare node in the fleet", timedelta(seconds=3600)),
        ("shorten the hang limit", timedelta(seconds=1800 - 200 + 900 - 200)),
        ("quarantine n2 after its first fault", timedelta(seconds=266)),
    ]
    assert "hang: {after: 4m}" in [one.setting for one in report.advice]


def test_a_cost_of_checkpoints_that_is_not_reported_can_be_given() -> None:
    job = make_job(checkpoints=10, checkpointed=timedelta(hours=20), reports_checkpoints=True)
    unknown = report_on(job)
    assert [one.what for one in unknown.advice if one.saves is None] == [
        "have the ranks report the phase `checkpoint` while they save"
    ]
    given = make_report([JobRecord(job, INCIDENTS)], T0, checkpoint_cost=timedelta(seconds=30))
    assert given.checkpoints.best is not None
    assert given.advice[0].what == "save a checkpoint more often"


def test_unknown_time_makes_the_share_a_range() -> None:
    job = make_job()
    totals = {Account.PRODUCTIVE: timedelta(hours=1), Account.UNKNOWN: timedelta(hours=1)}
    job = replace(
        job,
        incidents=(),
        ended_at=T0 + timedelta(hours=2),
        ledger=Ledger(T0 + timedelta(hours=2), totals),
    )
    report = report_on(job)
    assert summarize(report) == "50.0 % to 100.0 % effective; lost 0 s of 2 h; 1 h unknown"
    assert [one.what for one in report.advice] == [
        "have the ranks report their steps and checkpoints"
    ]
    assert report.mtbf is None and report.mttr is None


@pytest.mark.parametrize("interval", [timedelta(minutes=10), timedelta(minutes=30)])
def test_the_estimate_agrees_with_the_closed_formula(interval: timedelta) -> None:
    restart, cost = timedelta(minutes=10), timedelta(minutes=1)
    formula = (1 - (restart + interval / 2) / MTBF) / (1 + cost / interval)
    assert abs(estimate_ettr(MTBF, restart, interval, cost) - formula) < 0.005
    assert estimate_ettr(MTBF, MTBF, interval, cost) == 0.0
    assert estimate_ettr(MTBF, restart, timedelta(days=900), cost) < 1e-9


def test_generations_run_between_incidents() -> None:
    earlier = replace(INCIDENTS[0], launched=None, recovered=None, closed=at(10_100))
    asking = replace(INCIDENTS[2], launched=None, recovered=None, closed=None)
    job = replace(make_job(), submitted_at=at(12_000))
    report = make_report([JobRecord(job, (earlier, INCIDENTS[1], asking))], T0)
    assert [(run.generation, run.start, run.end) for run in report.runs] == [
        (2, at(12_000), at(20_000)),
        (3, at(20_100), at(30_000)),
    ]
    whole = report_on(make_job()).runs
    assert len(whole) == 6 and whole[-1].end == make_job().ended_at
    assert report.causes[0].medians["regain"] is None


def test_a_hang_that_was_found_soon_needs_no_other_limit() -> None:
    report = report_on(make_job(longest_step=timedelta(minutes=10)))
    assert "shorten the hang limit" not in [one.what for one in report.advice]


def test_a_report_is_one_sentence() -> None:
    assert summarize(report_on(make_job())) == (
        "85.3 % effective; lost 4 h 4 m of 1 d 3 h; worst: n4, 1 fault, 2 h 15 m"
    )


def test_incidents_before_the_period_are_left_out() -> None:
    job = make_job()
    report = make_report([JobRecord(job, INCIDENTS)], T0, since=at(45_000))
    assert [one.incident.generation for one in report.incidents] == [5, 6]


def test_a_period_has_its_own_accounts_and_figures(snapshot: SnapshotAssertion) -> None:
    record = train(Training(interval=1800.0, cost=60.0), [6 * 3600.0] * 8)
    job, end = record.state, record.state.ended_at
    assert end is not None
    whole = make_report([record], end)
    since = end - timedelta(hours=15)
    part = make_report([record], end, since=since)
    assert (part.wall, part.start, part.interruptions) == (timedelta(hours=15), since, 3)
    assert sum(part.totals.values(), timedelta(0)) == pytest.approx(
        part.wall, abs=timedelta(milliseconds=1)
    )
    # what these faults took is exact
    costs = sum((one.price for one in part.incidents), timedelta(0))
    saving, rest = part.total(Account.SAVING), part.total(Account.LAUNCHING)
    assert part.loss - saving - costs < timedelta(minutes=5), (rest, whole.totals)
    assert part.mtbf == timedelta(hours=5)
    assert part.ettr is not None and whole.ettr is not None and abs(part.ettr - whole.ettr) < 0.02
    assert part.missing == snapshot
    # nothing before it: the same as without
    assert make_report([record], end, since=job.submitted_at) == whole


def test_an_incident_that_lasts_into_a_period_counts_there() -> None:
    entry = LedgerEntry(Account.WAITING_FOR_PERSON, at(100), at(7300))
    asked = replace(priced(0, waiting_for_person=7200), entries=(entry,))
    queued = {Account.QUEUED: timedelta(seconds=100)}
    totals = {**queued, Account.WAITING_FOR_PERSON: 2 * HOUR}
    ended = replace(running(), phase=Phase.FAILED, ended_at=at(7300))
    job = replace(ended, incidents=(asked,), ledger=Ledger(at(7300), totals))
    report = make_report([JobRecord(job, (asked,))], T0, since=at(3700))
    assert (report.wall, report.totals) == (HOUR, {Account.WAITING_FOR_PERSON: HOUR})
    nothing = replace(ended, ledger=Ledger(at(7300), queued))
    unknown = make_report([JobRecord(nothing, ())], T0, since=at(3700))
    assert unknown.totals == {Account.UNKNOWN: HOUR}


def test_a_period_that_begins_in_the_queue_has_part_of_the_wait() -> None:
    totals = {Account.QUEUED: 2 * HOUR, Account.PRODUCTIVE: HOUR}
    ended = replace(running(), phase=Phase.SUCCEEDED, ended_at=at(3 * 3600))
    job = replace(ended, ledger=Ledger(at(3 * 3600), totals))
    report = make_report([JobRecord(job, ())], T0, since=at(5400))
    assert (report.wall, set(report.totals)) == (1.5 * HOUR, set(totals))
    report = make_report([JobRecord(job, ())], T0, since=at(7200))
    assert report.totals == {Account.PRODUCTIVE: HOUR}


def test_a_terminated_job_is_charged_until_its_workflow_ended() -> None:
    job = replace(running(), ledger=Ledger(at(0), {}))
    record = JobRecord(job, (), closed_at=at(600))
    report = make_report([record], at(600) + timedelta(days=5))
    assert (report.wall, report.end, report.is_over) == (timedelta(seconds=600), at(600), True)
    assert [one.is_over for one in make_report([record, JobRecord(job, ())], at(900)).by_job] == [
        True,
        False,
    ]


def test_an_open_incident_is_charged_up_to_now() -> None:
    job = running()
    job = replace(
        job,
        phase=Phase.WAITING_FOR_PERSON,
        incident=priced(0, lost_work=60),
        maybe_alive=(),
    )
    report = make_report([JobRecord(job, (priced(0, lost_work=60),))], at(600))
    assert [one.price for one in report.incidents] == [timedelta(seconds=660)]
    assert not report.is_over


def test_a_job_that_was_just_submitted_has_no_share() -> None:
    job = replace(running(), ledger=Ledger(T0))
    assert summarize(make_report([JobRecord(job, ())], T0)) == (
        "no time has passed since the submission"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0, "0 s"), (4.26, "4.3 s"), (59.7, "1 m"), (90, "1 m 30 s"), (11_520, "3 h 12 m")],
        *[(54 * 86_400, "54 d"), (54 * 86_400 + 3600, "54 d 1 h"), (3600 + 5, "1 h")],
    ],
)
def test_times_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert format_span(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("hours", "sentence", "summary"),
    [
        pytest.param((), "", "", id="no faults"),
        pytest.param((3, 9), "no clear change: 1 interruption (MTBF 5 h) since ", "", id="few"),
        pytest.param(
            (6, 6.5, 7, 7.5, 8, 8.5, 9),
            "getting worse: 7 interruptions (MTBF 42 m 51 s) since ",
            "; getting worse",
            id="more and more",
        ),
        pytest.param(
            (1, 1.5, 2, 2.5, 3, 3.5, 4),
            "getting better: 0 interruptions since ",
            "; getting better",
            id="less and less",
        ),
    ],
)
def test_a_trend_is_a_sentence(hours: tuple[float, ...], sentence: str, summary: str) -> None:
    faults = tuple(
        replace(priced(number, launching=1), opened=at(hour * 3600))
        for number, hour in enumerate(hours, start=1)
    )
    end = at(10 * 3600)
    job = replace(running(), phase=Phase.SUCCEEDED, ended_at=end)
    totals = {Account.PRODUCTIVE: 10 * HOUR}
    job = replace(job, incidents=faults, ledger=Ledger(end, totals))
    report = make_report([JobRecord(job, faults)], end)
    assert describe_trend(report).startswith(sentence)
    assert bool(describe_trend(report)) is bool(hours)
    said = summarize(report)
    assert said.endswith(summary) and ("getting" in said) is bool(summary)


def test_jobs_without_time_have_no_trend_to_describe() -> None:
    job = replace(running(), ledger=Ledger(T0))
    assert describe_trend(make_report([JobRecord(job, ())], T0)) == ""
