"""Where each second of a job went, by tables; and over every stream of events."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaunch.evidence.findings import Verdict
from relaunch.job.accounts import Account, Ledger, RunFigures
from relaunch.job.apply import finish, resubmit
from relaunch.job.events import (
    Answered,
    CancelRequested,
    CheckpointSaved,
    DeadlinePassed,
    DrainDue,
    DrainRequested,
    Event,
    FaultObserved,
    Launched,
    NodeReturned,
    NodesAcquired,
    NodesExamined,
    NodesMissing,
    NodeUnreachable,
    ProgressSeen,
    RanksHung,
    RanksStopped,
    RanksSucceeded,
    RepairAsks,
    RepairEnded,
    RetryRequested,
    StepReached,
    Submitted,
)
from relaunch.job.ledger import MAX_ENTRIES, measure_wall, settle
from relaunch.job.measures import measure_accounts
from relaunch.job.replay import Step, restore
from relaunch.job.state import ExaminedNode, Incident, JobState, Phase, Slot
from relaunch.job.step import step
from relaunch.spec.policy import Policy, Strategy
from tests.recovery.builders import T0, at, error, exited, new_job, policy, xid
from tests.recovery.generated import anything, likely, policies, searched
from tests.recovery.streams import Move, Run

NONE = timedelta(0)
SLOTS = (Slot("n1", "10.0.0.1", 1, 1), Slot("n2", "10.0.0.2", 1, 1))
Turn = tuple[float, Event]
"""An event, and the second at which the job takes it."""


def play(job: JobState, *turns: Turn) -> JobState:
    for seconds, event in turns:
        before = job
        job, _ = step(job, event, at(seconds))
        check_counts(before, job)
        check_sums(job, at(seconds))
    return job


def check_sums(job: JobState, now: datetime) -> None:
    """All accounts are the wall clock; what incidents cost is no more than what was charged."""
    wall = job.ledger.earlier + (job.ended_at or now) - job.submitted_at
    settled = settle(job, now)
    assert sum(settled.ledger.totals.values(), NONE) == measure_wall(settled) == wall
    assert all(span > NONE for account, span in settled.ledger.totals.items()), settled.ledger
    incidents = [*settled.incidents, *([settled.incident] if settled.incident else [])]
    for account in Account:
        cost = sum((one.costs.get(account, NONE) for one in incidents), NONE)
        assert not cost or account.is_loss
        assert cost <= settled.ledger.totals.get(account, NONE) + NONE, account
    for one in incidents:
        check_entries(one)


def check_counts(before: JobState, after: JobState) -> None:
    """What a metric has counted is never taken back, and is all time that is charged for good."""
    counted, more = measure_accounts(before.ledger), measure_accounts(after.ledger)
    assert all(more.get(account, 0) >= seconds for account, seconds in counted.items())
    charged = sum(after.ledger.totals.values(), NONE) - after.ledger.at_risk
    assert 0 <= charged.total_seconds() - sum(more.values()) < len(Account)


def check_entries(incident: Incident) -> None:
    """The entries of an incident are in order, and are what it cost if none was dropped."""
    entries = incident.entries
    assert len(entries) <= MAX_ENTRIES
    assert all(one.begin < one.end for one in entries)
    assert all(one.end <= other.begin for one, other in pairwise(entries)), entries
    if len(entries) < MAX_ENTRIES:
        spent: dict[Account, timedelta] = {}
        for one in entries:
            spent[one.account] = spent.get(one.account, NONE) + one.end - one.begin
        assert spent == incident.costs


def begun(*, start: float = 10.0, **changes: Any) -> JobState:
    """A job that was queued for 4 s, and whose ranks run since `start`."""
    job = new_job(**changes)
    return play(
        job,
        (0, Submitted("", "ada")),
        (4, NodesAcquired(SLOTS[: job.spec.node_count])),
        (start, Launched(1, at(start), at(start))),
    )


def report(
    generation: int, step: int, seconds: float, figures: RunFigures | None = None
) -> ProgressSeen:
    return ProgressSeen(generation, step, at(seconds), figures=figures)


def failed(generation: int, seconds: float) -> FaultObserved:
    rank = exited(3, "n2", code=1, error=error(), seconds=seconds)
    return FaultObserved(generation, (rank,), 0, at(seconds))


def totals(job: JobState) -> dict[str, float]:
    return {
        account.value: span.total_seconds() for account, span in sorted(job.ledger.totals.items())
    }


def costs(job: JobState) -> dict[str, float]:
    incident = job.incident or job.incidents[-1]
    return {account.value: span.total_seconds() for account, span in sorted(incident.costs.items())}


CHECKPOINT = RunFigures(first_step_at=at(20), checkpoint=5, checkpoint_at=at(70))


def test_a_fault_costs_the_work_since_the_checkpoint_and_a_start() -> None:
    job = play(
        begun(),
        (101, report(1, 9, 99, CHECKPOINT)),
        (101, failed(1, 100)),
        (106, Launched(2, at(103), at(106))),
        (130, report(2, 10, 130, RunFigures(first_step_at=at(116)))),
    )
    assert totals(job) == {
        "queued": 4,
        "launching": 6 + 10 + 3 + 10,  # to the ranks' start, to the first step; twice
        "productive": 50,
        "lost_work": 30,
        "detecting": 1,
        "stopping": 2,
    }
    assert costs(job) == {"lost_work": 30, "detecting": 1, "stopping": 2, "launching": 13}
    assert job.incidents[-1].recovered == at(130)
    assert [(one.account.value, one.begin, one.end) for one in job.incidents[-1].entries] == [
        ("lost_work", at(70), at(100)),
        ("detecting", at(100), at(101)),
        ("stopping", at(101), at(103)),
        ("launching", at(103), at(116)),
    ]
    assert totals(settle(job, at(200)))["productive"] == 50 + 84


def test_without_checkpoints_a_fault_costs_what_is_done_again() -> None:
    job = play(
        begun(),
        (101, report(1, 9, 99, RunFigures(first_step_at=at(20)))),
        (101, failed(1, 100)),
        (106, Launched(2, at(103), at(106))),
        (150, report(2, 10, 150, RunFigures(first_step_at=at(116)))),
    )
    assert totals(job)["productive"] == 80
    assert costs(job) == {"lost_work": 34, "detecting": 1, "stopping": 2, "launching": 13}
    assert job.ledger.at_risk == NONE


def test_a_second_fault_costs_all_that_was_done_again() -> None:
    job = play(
        begun(),
        (101, report(1, 9, 99)),
        (101, failed(1, 100)),
        (106, Launched(2, at(103), at(106))),
        (120, report(2, 7, 119)),
        (120, failed(2, 120)),
        (126, Launched(3, at(122), at(126))),
        (160, StepReached(3, 10, at(160))),
    )
    assert costs(job) == {
        "lost_work": 14 + 34,
        "detecting": 1,
        "stopping": 2 + 2,
        "launching": 3 + 4,
    }


def test_a_generation_that_saves_no_checkpoint_is_lost() -> None:
    job = play(
        begun(),
        (101, report(1, 9, 99, CHECKPOINT)),
        (101, failed(1, 100)),
        (106, Launched(2, at(103), at(106))),
        (140, report(2, 8, 140, RunFigures(first_step_at=at(116), checkpoint=5))),
        (140, failed(2, 140)),
    )
    assert costs(job)["lost_work"] == 30 + 24


def test_figures_of_an_earlier_report_do_not_tell_the_loss() -> None:
    """Here a watch of another shard reports the fault."""
    job = play(
        begun(),
        (80, report(1, 9, 80, CHECKPOINT)),
        (101, failed(1, 100)),
    )
    assert totals(job)["productive"] == 80
    assert "lost_work" not in totals(job)
    assert job.ledger.regains and job.ledger.at_risk == timedelta(seconds=30)


def test_training_that_reports_no_step_is_unknown() -> None:
    job = play(
        begun(),
        (101, failed(1, 100)),
        (106, Launched(2, at(103), at(106))),
        (4000, DeadlinePassed()),
    )
    assert totals(job) == {
        "queued": 4,
        "launching": 6 + 3,
        "unknown": 90,
        "detecting": 1,
        "stopping": 2,
    }
    assert totals(settle(job, at(4000)))["unknown"] == 90 + 3894


def test_a_start_that_failed_is_no_training() -> None:
    job = play(begun(progress={"log_pattern": r"step (?P<step>\d+)"}), (101, failed(1, 100)))
    assert totals(job)["launching"] == 6 + 90


def test_a_hang_is_detected_from_the_last_step_on() -> None:
    hang = RanksHung(1, (0,), "step 9 has not changed for 900 s", at(1000))
    job = play(begun(), (1001, report(1, 9, 99, CHECKPOINT)), (1001, hang))
    assert costs(job) == {"lost_work": 29, "detecting": 901, "deciding": 1}


def test_a_hang_without_a_step_is_detected_from_the_start_on() -> None:
    hang = RanksHung(1, (0,), "no step was reported for 1800 s", at(1810))
    job = play(begun(), (1810, hang))
    assert costs(job) == {"detecting": 1800}


def test_a_lost_node_that_comes_back_costs_nothing() -> None:
    job = play(
        begun(),
        (300, NodeUnreachable(1, "n2", timedelta(seconds=180), "no answer within 5 s")),
        (900, report(1, 9, 899, CHECKPOINT)),
        (900, NodeReturned(1, "n2")),
    )
    assert job.phase is Phase.RUNNING
    assert job.incidents[-1].costs == {}
    assert totals(settle(job, at(1000)))["productive"] == 980


def test_the_wait_for_a_person_begins_with_the_last_sign_of_life() -> None:
    job = play(
        begun(nodes=1, nproc_per_node=4),
        (100, report(1, 9, 99, CHECKPOINT)),
        (300, NodeUnreachable(1, "n1", timedelta(seconds=180), "no answer within 5 s")),
    )
    assert job.phase is Phase.NODE_LOST and job.next.at is not None
    asked = (job.next.at - T0).total_seconds()
    job = play(job, (asked, DeadlinePassed()))
    assert job.phase is Phase.WAITING_FOR_PERSON
    job = play(job, (asked + 50, Answered("deny", "", "ada")))
    assert totals(job)["waiting_for_person"] == asked + 50 - 120
    assert job.phase is Phase.STOPPING


def test_stopping_repairing_and_questions_have_an_account_each() -> None:
    fatal = exited(3, "n2", code=1, kernel=(xid(95),))
    rules = policy(
        causes={"GPU_RESET": [{"strategy": "RESET_GPU", "tries": 1}, {"strategy": "FAIL"}]}
    )
    job = play(
        begun(policy=rules),
        (101, report(1, 9, 99, CHECKPOINT)),
        (101, FaultObserved(1, (replace(fatal, at=at(100)),), 0, at(100))),
    )
    assert job.phase is Phase.REPAIRING, job.reason
    job = play(
        job,
        (111, RanksStopped(1, ("n1", "n2"), at(111))),
        (120, RepairAsks("n2", "reset GPU 5 of n2?", at(9000))),
        (150, RepairAsks("n2", "")),
        (160, RepairEnded(1, Strategy.RESET_GPU, ("n2",), "done", "GPU 5 answers")),
        (165, Launched(2, at(160), at(165))),
        (200, StepReached(2, 10, at(200))),
    )
    assert costs(job) == {
        "lost_work": 30,
        "detecting": 1,
        "stopping": 10,
        "repairing": 9 + 10,
        "waiting_for_person": 30,
        "launching": 5,
    }


def test_an_examination_begins_when_the_ranks_are_gone() -> None:
    rules = policy(
        causes={
            "APPLICATION": [{"strategy": "REPLACE_NODE", "when": "UNHEALTHY"}, {"strategy": "FAIL"}]
        }
    )
    job = play(begun(policy=rules), (101, report(1, 9, 99, CHECKPOINT)), (101, failed(1, 100)))
    assert job.phase is Phase.EXAMINING
    examined = NodesExamined(1, (ExaminedNode("n2", Verdict.UNHEALTHY, "DBE"),))
    job = play(job, (104, RanksStopped(1, ("n1", "n2"), at(104))), (124, examined))
    assert costs(job) == {"lost_work": 30, "detecting": 1, "stopping": 3, "examining": 20}


def test_training_goes_on_while_the_other_nodes_advance() -> None:
    lost = NodeUnreachable(1, "n2", timedelta(seconds=180), "no answer within 5 s")
    job = play(
        begun(),
        (300, lost),
        (500, report(1, 9, 480, RunFigures(first_step_at=at(20)))),
        (510, RetryRequested("", "ada")),
    )
    assert totals(job)["productive"] == 460
    assert costs(job) == {"detecting": 30}
    silent = play(begun(), (300, lost), (510, RetryRequested("", "ada")))
    assert totals(silent)["unknown"] == 110
    assert costs(silent) == {"detecting": 390}


def test_the_wait_for_nodes_is_in_the_price_of_the_incident() -> None:
    job = play(
        begun(),
        (101, report(1, 9, 99, CHECKPOINT)),
        (101, failed(1, 100)),
        (102, RanksStopped(2, ("n1", "n2"), at(102))),
        (102, NodesMissing("no free node")),
        (400, NodesAcquired(SLOTS)),
        (410, Launched(2, at(401), at(410))),
        (450, StepReached(2, 10, at(450))),
    )
    assert costs(job) == {
        "lost_work": 30,
        "detecting": 1,
        "stopping": 1,
        "waiting_for_nodes": 298,
        "launching": 10,
    }


def test_saving_and_time_without_controller_are_part_of_training() -> None:
    figures = replace(CHECKPOINT, saving=timedelta(seconds=8), away=timedelta(seconds=12))
    job = play(begun(), (101, report(1, 9, 99, figures)), (101, failed(1, 100)))
    assert {name: totals(job)[name] for name in ("saving", "controller_away", "productive")} == {
        "saving": 8,
        "controller_away": 12,
        "productive": 30,
    }
    assert "saving" not in costs(job)


def test_a_drain_at_a_checkpoint_loses_no_work() -> None:
    asked = DrainRequested("n2", "new driver", "ada", at(500))
    job = play(begun(), (50, asked), (90, report(1, 9, 90)), (90, CheckpointSaved(1, 9, at(90))))
    assert job.phase is Phase.LAUNCHING
    assert totals(job) == {"queued": 4, "launching": 6, "productive": 80}
    job = play(begun(), (50, asked), (90, report(1, 9, 90)), (500, DrainDue("n2")))
    assert job.phase is Phase.LAUNCHING
    assert totals(job) == {"queued": 4, "launching": 6, "unknown": 490}
    first = (60, report(1, 5, 60, RunFigures(checkpoint=5, checkpoint_at=at(60))))
    job = play(begun(), (50, asked), first, (500, DrainDue("n2")))
    assert totals(job) == {"queued": 4, "launching": 6, "productive": 50, "unknown": 440}


def ended(job: JobState, seconds: float) -> JobState:
    """The ranks of a job that ends are gone."""
    assert job.ending is not None
    before, job = job, finish(job, at(seconds))
    check_counts(before, job)
    check_sums(job, at(seconds))
    return job


def test_success_and_a_cancel_undo_no_training() -> None:
    progress = (100, report(1, 9, 99, CHECKPOINT))
    for event in (RanksSucceeded(1), CancelRequested("", "ada")):
        job = ended(play(begun(), progress, (110, event)), 112)
        assert totals(job) == {"queued": 4, "launching": 16, "productive": 90, "stopping": 2}


def test_what_a_failed_job_kept_is_unknown_without_checkpoints() -> None:
    rules = policy(causes={"APPLICATION": [{"strategy": "FAIL"}]})
    job = play(begun(policy=rules), (101, report(1, 9, 99)), (101, failed(1, 100)))
    assert totals(job)["productive"] == 90
    assert measure_accounts(job.ledger)[Account.PRODUCTIVE] == 0, "it is not known yet"
    job = ended(job, 103)
    assert totals(job)["unknown"] == 90 and "productive" not in totals(job)


def test_success_before_the_step_is_passed_again_ends_the_loss() -> None:
    job = play(
        begun(),
        (101, report(1, 9, 99)),
        (101, failed(1, 100)),
        (106, Launched(2, at(103), at(106))),
        (120, report(2, 9, 119)),
        (120, RanksSucceeded(2)),
    )
    assert costs(job)["lost_work"] == 14
    assert ended(job, 121).ledger.totals[Account.PRODUCTIVE] == timedelta(seconds=90)


def test_a_counter_that_starts_again_cannot_say_what_was_kept() -> None:
    job = play(
        begun(),
        (101, ProgressSeen(1, 9, at(99), restarts=True)),
        (101, failed(1, 100)),
        (106, Launched(2, at(103), at(106))),
        (300, report(2, 3, 299)),
    )
    assert job.ledger.regains
    job = play(job, (106 + 3600, DeadlinePassed()))
    assert not job.ledger.regains
    assert totals(job)["unknown"] == 90


def test_an_incident_that_time_closes_is_regained_later() -> None:
    job = play(
        begun(),
        (101, report(1, 9, 99)),
        (101, failed(1, 100)),
        (106, Launched(2, at(103), at(106))),
        (300, report(2, 3, 299, RunFigures(first_step_at=at(116)))),
        (3706, DeadlinePassed()),
    )
    assert job.incident is None and job.ledger.regains
    job = play(job, (4000, StepReached(2, 10, at(4000))))
    assert totals(job)["lost_work"] == 4000 - 116
    assert "lost_work" not in costs(job)


def test_a_new_submission_goes_on_with_the_same_ledger() -> None:
    job = ended(play(begun(), (100, report(1, 9, 99)), (110, RanksSucceeded(1))), 110)
    again = resubmit(job, 2000, "ada", at(1000), renew_budgets=False, avoid=())
    again = play(
        again,
        (1000, Submitted("", "ada")),
        (1007, NodesAcquired(SLOTS)),
        (1010, Launched(1, at(1010), at(1010))),
    )
    assert totals(again) == {"queued": 4 + 7, "launching": 6 + 3, "productive": 100}
    assert measure_wall(again) == timedelta(seconds=120)


def test_what_an_older_build_did_not_charge_is_unknown() -> None:
    job = replace(begun(), ledger=Ledger())
    job = play(job, (101, report(1, 9, 99)), (101, failed(1, 100)))
    assert totals(job) == {"unknown": 100, "detecting": 1}


def test_a_launch_that_no_decision_asked_for_is_charged() -> None:
    job = play(begun(), (90, report(1, 9, 90)), (100, Launched(1, at(95), at(95))))
    assert totals(job) == {"queued": 4, "launching": 6, "unknown": 85}


@searched(100)
@given(policies, anything, st.tuples(policies), st.sampled_from((1, 2, 3)))
def test_the_accounts_of_every_job_add_up_to_its_time(
    policy: Policy, stream: list[Move], others: tuple[Policy], nodes: int
) -> None:
    run = Run(policy, nodes=nodes, others=others)
    for move in stream:
        move.do(run)
        check_sums(run.job, run.now)
    for turn in run.turns:
        until, before = turn.after.ledger.charged_until, turn.before.ledger.charged_until
        assert until is not None and until <= turn.now
        assert before is None or before <= until
        check_counts(turn.before, turn.after)


@searched(60)
@given(policies, likely, st.tuples(policies))
def test_the_ledger_is_computed_again_from_recorded_steps(
    policy: Policy, stream: list[Move], others: tuple[Policy]
) -> None:
    run = Run(policy, others=others)
    for move in stream:
        move.do(run)
    steps = [Step(turn.now, turn.event, turn.decision) for turn in run.turns]
    again = restore(run.turns[0].before, steps, run.job.ended_at)
    assert again.ledger == run.job.ledger
    assert again.incident == run.job.incident
    kept = len(run.job.incidents)
    assert again.incidents[len(again.incidents) - kept :] == run.job.incidents
    assert len(again.incidents) == kept + run.job.incidents_archived


@pytest.mark.parametrize("account", Account)
def test_a_second_is_effective_or_a_loss_or_unknown(account: Account) -> None:
    kinds = (account.is_effective, account.is_loss, account is Account.UNKNOWN)
    assert sum(kinds) == 1


def test_a_long_incident_keeps_its_first_and_last_entries() -> None:
    rules = policy(
        causes={"APPLICATION": [{"strategy": "RESTART_IN_PLACE"}]},
        max_restarts=MAX_ENTRIES,
        no_progress_stop="off",
        startup_stop="off",
    )
    turns: list[Turn] = []
    for generation in range(1, MAX_ENTRIES):
        began = 100.0 * generation
        turns += [
            (began, failed(generation, began - 1)),
            (began + 20, Launched(generation + 1, at(began + 10), at(began + 20))),
        ]
    job = play(begun(policy=rules), *turns)
    assert job.incident is not None
    entries = job.incident.entries
    assert len(entries) == MAX_ENTRIES
    half = MAX_ENTRIES // 2
    assert entries[0].begin < at(100) and entries[half - 1].end < at(100 * half)
    assert entries[half].begin > at(100 * half) and entries[-1].end == at(began + 20)
