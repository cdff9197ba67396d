"""What the trace of an incident says, by tables."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from relaunch.evidence.causes import Cause
from relaunch.job.accounts import Account, LedgerEntry
from relaunch.job.ledger import MAX_ENTRIES
from relaunch.job.state import DecisionRecord, FaultRecord, Incident
from relaunch.job.trace import (
    REPEAT_WITHIN,
    ClosedIncident,
    build_spans,
    find_traced,
    make_span_id,
    make_trace_id,
)
from tests.recovery.builders import at, new_job

Entry = tuple[str, float, float]


def closed(*entries: Entry, **changes: Any) -> ClosedIncident:
    made = tuple(LedgerEntry(Account(name), at(begin), at(end)) for name, begin, end in entries)
    costs: dict[Account, timedelta] = {}
    for one in made:
        costs[one.account] = costs.get(one.account, timedelta(0)) + one.end - one.begin
    known: dict[str, Any] = {
        "opened": at(100),
        "generation": 1,
        "cause": Cause.HANG,
        "reason": "it hangs",
        "closed": at(200),
        "recovered": at(200),
        "entries": made,
        "costs": costs,
    }
    incident = Incident(**{**known, **changes})
    return ClosedIncident("default", "job/a", "r1", "a", 7, "lab", 2, incident)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), [("regaining", 100, 200)]),
        (
            (("lost_work", 70, 100), ("detecting", 100, 101), ("stopping", 101, 103)),
            [("detecting", 100, 101), ("stopping", 101, 103), ("regaining", 103, 200)],
        ),
        (
            (("stopping", 100, 110), ("launching", 120, 130), ("lost_work", 130, 200)),
            [
                ("stopping", 100, 110),
                ("regaining", 110, 120),
                ("launching", 120, 130),
                ("lost_work", 130, 200),
            ],
        ),
        (
            (("detecting", 40, 100), ("deciding", 100, 200)),
            [("detecting", 40, 100), ("deciding", 100, 200)],
        ),
        ((("stopping", 100, 250),), [("stopping", 100, 200)]),
    ],
    ids=[
        "nothing charged",
        "what a fault undid was before it",
        "a second fault",
        "a hang began with the last step",
        "charged beyond its end",
    ],
)
def test_the_children_follow_each_other_without_a_gap(
    entries: tuple[Entry, ...], expected: list[tuple[str, float, float]]
) -> None:
    root, *children = build_spans(closed(*entries))
    assert [(one.name, one.begin, one.end) for one in children] == [
        (name, at(begin), at(end)) for name, begin, end in expected
    ]
    assert (root.name, root.begin, root.end) == ("incident", children[0].begin, at(200))


def test_a_very_long_incident_says_where_entries_are_missing() -> None:
    half = MAX_ENTRIES // 2
    first = [("stopping", 100.0 + 2 * one, 101.0 + 2 * one) for one in range(half)]
    newest = [("stopping", 1000.0 + 2 * one, 1001.0 + 2 * one) for one in range(half)]
    short = closed(*first, *newest, recovered=at(1200), closed=at(1200))
    longer = dict(short.incident.costs)
    longer[Account.STOPPING] += timedelta(seconds=100)
    cut = replace(short, incident=replace(short.incident, costs=longer))
    assert "not_kept" not in {one.name for one in build_spans(short)}
    (missing,) = (one for one in build_spans(cut) if one.name == "not_kept")
    assert (missing.begin, missing.end) == (at(101 + 2 * (half - 1)), at(1000))


def test_the_root_says_what_and_where() -> None:
    fault = FaultRecord(at(100), 1, Cause.HANG, "it hangs", nodes=("n1",))
    decision = DecisionRecord(at(102), "Relaunch", "RESTART_IN_PLACE", "a restart", True)
    made = closed(
        ("stopping", 100, 110),
        nodes=("n1", "n2"),
        reached=41,
        faults=(fault,),
        decisions=(decision,),
        outcome="training passed step 41",
    )
    root = build_spans(made)[0]
    expected = {
        "relaunch.job": "a",
        "relaunch.fleet": "lab",
        "relaunch.generation": 1,
        "relaunch.submission": 7,
        "relaunch.cause": "HANG",
        "relaunch.strategy": "RESTART_IN_PLACE",
        "relaunch.nodes": ("n1", "n2"),
        "relaunch.seconds.stopping": 10.0,
        "temporalWorkflowID": "job/a",
        "temporalRunID": "r1",
    }
    assert {name: root.attributes[name] for name in expected} == expected
    assert [(one.name, one.at) for one in root.events] == [
        ("fault", at(100)),
        ("decision", at(102)),
    ]
    assert root.error == ""


def test_what_an_incident_does_not_have_its_root_does_not_say() -> None:
    known = build_spans(closed(gpus=("n1:3",), code="XID_79", reached=41))[0].attributes
    unknown = build_spans(closed(reached=None))[0].attributes
    optional = {"relaunch.gpus": ("n1:3",), "relaunch.code": "XID_79", "relaunch.step": 41}
    assert known == {**unknown, **optional}
    assert not unknown.keys() & optional.keys()


def test_a_job_that_ended_with_it_is_an_error() -> None:
    made = closed(recovered=None, outcome="the budget is spent")
    assert build_spans(made)[0].error == "the budget is spent"


def test_identifiers_are_those_of_the_incident_not_of_its_run() -> None:
    made = closed()
    again = replace(made, run="r2", submission=8)
    assert make_trace_id(made) == make_trace_id(again)
    assert make_span_id(made, 1) == make_span_id(again, 1) != make_span_id(made, 0)
    others = (
        replace(made, job="b"),
        replace(made, namespace="other"),
        replace(made, number=3),
        closed(opened=at(101)),  # the number comes again after a reset, or a restore of a backup
    )
    assert len({make_trace_id(one) for one in (made, *others)}) == 5


def test_only_what_closed_lately_in_this_submission_is_traced() -> None:
    def made(opened: datetime, end: datetime) -> Incident:
        return replace(closed().incident, opened=opened, closed=end)

    earlier, old, new = made(at(-50), at(50)), made(at(10), at(20)), made(at(30), at(60))
    job = replace(
        new_job(), submitted_at=at(0), incidents=(earlier, old, new), incidents_archived=4
    )
    assert list(find_traced(job, at(21) + REPEAT_WITHIN)) == [(6, new)]
    assert [number for number, _ in find_traced(job, at(60))] == [5, 6]
