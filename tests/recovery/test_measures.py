"""What metrics show of a job: new faults, closed incidents and their stages, budgets, questions."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from relaunch.evidence.causes import Cause
from relaunch.job.apply import apply_decision
from relaunch.job.events import IncidentsArchived, Launched, StepReached
from relaunch.job.measures import (
    Budget,
    IncidentStage,
    find_budgets_left,
    find_closed_incidents,
    find_last_strategy,
    find_new_faults,
    find_question_time,
    measure_stages,
)
from relaunch.job.state import Ask, DecisionRecord, Incident, JobState, Phase
from tests.recovery.builders import (
    T0,
    at,
    died,
    fallen,
    lose,
    new_job,
    play,
    raised,
    relaunched,
    rungs,
    running,
    step,
)

TIMES = {
    "opened": at(0),
    "detected": at(2),
    "decided": at(3),
    "launched": at(33),
    "recovered": at(93),
}


def incident(**changes: Any) -> Incident:
    known: dict[str, Any] = {"generation": 1, "cause": Cause.HANG, "reason": "it hangs", **TIMES}
    return Incident(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"detect": 2, "decide": 1, "relaunch": 30, "regain": 60}),
        ({"recovered": None}, {"detect": 2, "decide": 1, "relaunch": 30}),
        ({"launched": None, "recovered": at(9)}, {"detect": 2, "decide": 1}),
        ({"launched": at(1)}, {"detect": 2, "decide": 1, "relaunch": 0, "regain": 92}),
        ({"detected": None, "decided": None, "launched": None, "recovered": None}, {}),
    ],
)
def test_a_stage_is_measured_where_its_begin_and_end_are_known(
    changes: dict[str, Any], expected: dict[str, float]
) -> None:
    measured = measure_stages(incident(**changes))
    assert {str(stage): seconds for stage, seconds in measured} == expected


def test_stages_of_a_recovery_add_up_to_it() -> None:
    job = running()
    before = job
    job, _ = step(job, died()(job), at(10))
    job, _ = step(job, Launched(job.generation, at(11), at(14)), at(15))
    job, _ = step(job, StepReached(job.generation, 5, at(20)), at(20))
    (closed,) = find_closed_incidents(before, job)
    assert find_last_strategy(closed) == "RESTART_IN_PLACE"
    stages = dict(measure_stages(closed))
    assert list(stages) == list(IncidentStage)
    assert closed.recovered is not None
    assert sum(stages.values()) == (closed.recovered - closed.opened).total_seconds()


def test_faults_and_incidents_are_found_once() -> None:
    job = running()
    seen: list[tuple[list[tuple[int, int, str]], int]] = []

    def take(event: Any, seconds: float) -> JobState:
        after, _ = step(job, event, at(seconds))
        faults = [(*number, str(one.cause)) for number, one in find_new_faults(job, after)]
        seen.append((faults, len(find_closed_incidents(job, after))))
        return after

    job = take(died()(job), 1)
    job = take(Launched(job.generation, at(2), at(2)), 2)
    job = take(fallen()(job), 3)
    job = take(Launched(job.generation, at(4), at(4)), 4)
    job = take(StepReached(job.generation, 5, at(5)), 5)
    job = take(IncidentsArchived(1), 6)
    job = take(raised()(job), 7)
    assert seen == [
        ([(0, 0, "UNKNOWN")], 0),
        ([], 0),
        ([(0, 1, "NODE_FAULT")], 0),
        ([], 0),
        ([], 1),
        ([], 0),
        ([(1, 0, "APPLICATION")], 0),
    ]


def test_an_incident_that_nothing_was_tried_in_has_no_strategy() -> None:
    assert find_last_strategy(incident()) == "NONE"
    waited = DecisionRecord(T0, "Wait", None, "it may come back", False)
    assert find_last_strategy(incident(decisions=(waited,))) == "NONE"


def test_budgets_left_are_those_of_the_policy() -> None:
    ladder = rungs(
        {"strategy": "RESTART_IN_PLACE", "tries": 2},
        {"strategy": "RESCHEDULE_JOB"},
        max_restarts=5,
        no_progress_stop=3,
    )
    job = running(policy=ladder)
    assert find_budgets_left(job, T0) == {Budget.RESTARTS: 5, Budget.NO_PROGRESS: 3}
    job, _ = step(job, raised()(job))
    assert find_budgets_left(job, T0)[Budget.RESTARTS] == 4
    assert find_budgets_left(job, T0)[Budget.LADDER] == 1
    spent = replace(job, restarts_spent=9, flat_generations=4)
    assert find_budgets_left(spent, T0)[Budget.RESTARTS] == 0
    assert find_budgets_left(spent, T0)[Budget.NO_PROGRESS] == 0


def test_a_budget_that_the_policy_has_not_is_not_there() -> None:
    job = running(policy=rungs({"strategy": "RESTART_IN_PLACE"}))
    job, _ = step(job, raised()(job))
    assert set(find_budgets_left(job, T0)) == {Budget.RESTARTS}


def test_a_question_waits_since_it_was_asked() -> None:
    job = running(policy=rungs({"strategy": "ASK"}))
    assert find_question_time(job) is None
    job, decision = step(job, raised()(job), at(7))
    assert isinstance(decision, Ask)
    assert find_question_time(job) == at(7)
    assert find_question_time(replace(job, snoozed=True)) is None
    taken = replace(job, asked=replace(decision, waits=True))
    assert find_question_time(taken) is None


def test_a_question_without_an_incident_is_dated_by_its_deadline() -> None:
    job = apply_decision(new_job(), Ask("no nodes", question="add some?"), at(5))
    assert job.phase is Phase.WAITING_FOR_PERSON and job.incident is None
    assert find_question_time(job) == at(5)
    assert find_question_time(replace(job, next=replace(job.next, at=None))) is None
    # The incident knows of no question: its decisions were dropped, or it began afterwards.
    waited = DecisionRecord(T0, "Wait", None, "it may come back", False)
    for decisions in ((), (waited,)):
        assert find_question_time(replace(job, incident=incident(decisions=decisions))) == at(5)


def test_a_lost_node_that_comes_back_is_one_fault() -> None:
    job = running()
    after, _ = play(job, lose()(job), now=at(1))
    assert [one.cause for _, one in find_new_faults(job, after)] == [Cause.NODE_LOST]
    again = relaunched(replace(after, lost=()), at(2) + timedelta(seconds=1))
    assert find_new_faults(after, again) == ()
