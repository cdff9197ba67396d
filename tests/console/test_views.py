"""What `show` and `history` print: the keys are a promise."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.cli.job_views import (
    budgets,
    checkpoint_lines,
    history_entry,
    history_lines,
    merge_watches,
    show,
    show_lines,
)
from relaunch.cli.rank_output import Printer
from relaunch.evidence.causes import Cause
from relaunch.job.state import DecisionRecord, FaultRecord, NodeDrain, Progress, Try
from relaunch.spec.job import NodeRange, ProgressSpec
from relaunch.spec.policy import Strategy
from tests.console.fake_job import T0, TRACEBACK, incident, job_state
from tests.pages import sections

SHOW_KEYS = {
    "name",
    "phase",
    "generation",
    "nodes",
    "ranks",
    "progress",
    "budgets",
    "incidents",
    "reason",
    "next",
}
FEWER = "2 of 4 nodes: n9 is quarantined"
HISTORY_KEYS = {"opened", "closed", "generation", "cause", "nodes", "reason", "decisions", "times"}


def test_show_has_the_promised_keys(page: SnapshotAssertion) -> None:
    view = json.loads(
        json.dumps(
            show(
                job_state(
                    incident=incident(), incidents=(incident(closed=T0),), incidents_archived=3
                ),
                None,
                T0,
            )
        )
    )
    assert view.keys() >= SHOW_KEYS
    assert (view["nodes"], view["ranks"], view["incidents"], view["progress"]) == (
        ["local-1", "local-2"],
        4,
        5,
        None,
    )
    assert view["next"]["at"] is None
    assert view["incident"]["traceback"] == TRACEBACK
    assert "\n".join(show_lines(view, T0)) == page


def test_a_job_that_has_fewer_nodes_than_it_would_take_says_so(page: SnapshotAssertion) -> None:
    spec = job_state().spec.model_copy(update={"nodes": NodeRange(min=1, max=4)})
    view = json.loads(json.dumps(show(job_state(spec=spec, fewer=FEWER), None, T0)))
    assert view["ranks"] == 4, "of this generation"
    assert view["size"] == {"nodes": 2, "min": 1, "max": 4, "reason": FEWER}
    assert "\n".join(show_lines(view, T0)) == page
    all_of_them = show(job_state(), None, T0)
    assert all_of_them["size"] == {"nodes": 2, "min": 2, "max": 2, "reason": None}
    assert not any(line.startswith("fewer") for line in show_lines(all_of_them, T0))


def test_progress_is_the_watchers_newest_or_else_the_states() -> None:
    state = job_state(progress=Progress(7, T0))
    assert show(state, None, T0)["progress"] == {"step": 7, "at": "2026-03-01T12:00:00Z"}
    fresh = merge_watches(
        [
            {"generation": 1, "step": 9, "at": "x", "rate": 2, "values": {"loss": 3.5}},
            {"generation": 1, "step": 12, "at": "y"},
        ]
    )
    assert show(state, fresh, T0)["progress"] == {
        "step": 9,
        "at": "x",
        "rate": 2.0,
        "values": {"loss": 3.5},
        "checkpoint": None,
    }
    stale = merge_watches([{"generation": 0, "step": 99, "at": "x"}])
    assert show(state, stale, T0)["progress"] == {"step": 7, "at": "2026-03-01T12:00:00Z"}


def test_a_checkpoint_is_shown_as_far_as_all_watches_saw_it(page: SnapshotAssertion) -> None:
    told = {"generation": 1, "step": 130}
    seen = merge_watches(
        [{**told, "checkpoint": 120}, {**told, "checkpoint": 100}, {**told, "checkpoint": "x"}]
    )
    view = show(job_state(), seen, T0)
    assert view["progress"]["checkpoint"] == 100
    assert "\n".join(show_lines(view, T0)) == page


def test_a_step_that_is_not_found_is_explained(page: SnapshotAssertion) -> None:
    cases: dict[str, tuple[Any, str, tuple[str, ...]]] = {
        "a preset fits": ({}, "", ("loading", "iter 10: loss 2.3, time 12.3ms")),
        "another preset fits": ("megatron", "", ("iter 10: loss 2.3, time 12.3ms",)),
        "a pattern fits": ({"log_pattern": r"it (?P<step>\d+)"}, "", ("x" * 200, "Step: 7 of 9")),
        "nothing fits": ("lightning", "", ("GPU available: False", "0 | model | Linear | 66")),
        "nothing was printed": ("hf", "", ()),
        "the progress file is wrong": ({}, "neither a step nor JSON: 'x'", ()),
    }
    shown = {}
    for title, (progress, unreadable, lines) in cases.items():
        told = {"node": "n1", "rank": 0, "lines": lines, "unreadable": unreadable}
        seen = merge_watches(
            [{"generation": 1, "at": "2026-03-01T11:55:30+00:00", "step": None, "missing": told}]
        )
        spec = job_state().spec.model_copy(
            update={"progress": ProgressSpec.model_validate(progress)}
        )
        view = show(job_state(spec=spec), seen, T0)
        assert view["progress"] is None and "\n" not in view["progress_hint"]
        [shown[title]] = [line for line in show_lines(view, T0) if line.startswith("progress ")]
    assert sections(shown) == page


@pytest.mark.parametrize(
    "change",
    [
        {"at": "2026-03-01T11:57:01+00:00"},
        {"at": "soon"},
        {"generation": 0},
        {"step": 3},
        {"missing": {"node": "n1"}},
        {"missing": {"node": "n1", "rank": "0", "lines": ["a"], "unreadable": ""}},
    ],
)
def test_a_step_that_is_not_found_is_no_news_yet(change: dict[str, Any]) -> None:
    told = {"node": "n1", "rank": 0, "lines": ["a"], "unreadable": ""}
    at = "2026-03-01T11:55:30+00:00"
    seen = merge_watches([{"generation": 1, "at": at, "step": None, "missing": told, **change}])
    assert show(job_state(), seen, T0)["progress_hint"] is None


def test_a_wanted_node_is_shown_with_the_time_and_the_commands(page: SnapshotAssertion) -> None:
    wanted = NodeDrain("local-2", "swap its PSU", "carol", T0 + timedelta(hours=2))
    view = json.loads(json.dumps(show(job_state(drains=(wanted,)), None, T0)))
    assert view["drains"] == [
        {
            "node": "local-2",
            "by": "carol",
            "reason": "swap its PSU",
            "until": "2026-03-01T14:00:00Z",
            "denied": None,
        }
    ]
    no = "alice said no: evaluation ends at noon"
    denied = show(job_state(drains=(replace(wanted, denied=no),)), None, T0)
    assert denied["drains"][0]["denied"] == no
    pages = {"wanted": show_lines(view, T0), "denied": show_lines(denied, T0)}
    assert sections(pages) == page


def test_a_node_that_cannot_tell_of_exits_is_shown(page: SnapshotAssertion) -> None:
    view = show(job_state(), merge_watches([{"step": 3, "stalled": ["n2"]}, {"step": 3}]), T0)
    assert view["stalled"] == ["n2"]
    assert "\n".join(show_lines(view, T0)) == page


def test_heartbeats_of_another_version_are_read_where_they_fit() -> None:
    assert merge_watches([]) is None
    odd = merge_watches(
        [
            {"step": None, "rate": "fast", "values": [1], "reachable": 3},
            {"unreachable": ["n9"], "reachable": 4},
        ]
    )
    assert odd is not None
    assert (odd.step, odd.rate, odd.values, odd.reachable, odd.unreachable) == (
        None,
        None,
        {},
        7,
        ("n9",),
    )


def test_history_has_the_promised_keys_and_seconds_since_opening(page: SnapshotAssertion) -> None:
    entry = json.loads(
        json.dumps(
            history_entry(
                incident(stopped=T0 + timedelta(seconds=2.5), closed=T0 + timedelta(seconds=9)),
                job_state(),
            )
        )
    )
    assert entry.keys() >= HISTORY_KEYS
    assert entry["times"] == {
        "detected": 0.25,
        "decided": 1.0,
        "stopped": 2.5,
        "launched": None,
        "recovered": None,
    }
    assert entry["decisions"] == [
        {
            "at": "2026-03-01T12:00:01Z",
            "decision": "Relaunch",
            "strategy": "RESTART_IN_PLACE",
            "reason": incident().decisions[0].reason,
            "spent": True,
            "left": "",
        }
    ]
    assert entry["traceback"] == TRACEBACK
    lines = history_lines(entry, T0 + timedelta(minutes=3))
    assert [line.split("  ")[2] for line in lines if line.lstrip().startswith("+")] == [
        "+1.0s",
        "+9.0s",
    ]
    assert "\n".join(lines) == page


def test_history_tells_faults_and_decisions_in_turn_and_once(page: SnapshotAssertion) -> None:
    """As a program fails that finds its file system lost, three times in different ways."""
    lost = "rank 0 on n1 exited with code 1: OSError: [Errno 116] Stale file handle: '/data'"
    slow = "rank 3 on n2 exited with code 1: TimeoutError: /data"
    reasons = (lost, lost, slow)
    faults = tuple(
        FaultRecord(T0 + timedelta(seconds=20.5 * n), n + 1, Cause.STORAGE, reason, ("n1",))
        for n, reason in enumerate(reasons)
    )
    decisions = tuple(
        DecisionRecord(
            fault.at + timedelta(seconds=0.1 * n),
            "Relaunch",
            "RESTART_IN_PLACE",
            f"{fault.reason}; RESTART_IN_PLACE {n + 1} of 5 for STORAGE",
            False,
        )
        for n, fault in enumerate(faults)
    )
    one = incident(
        cause=Cause.STORAGE, reason=lost, nodes=("n1",), faults=faults, decisions=decisions
    )
    lines = history_lines(history_entry(one, job_state()), T0, with_tracebacks=False)
    assert sum(lost in line for line in lines) == 1
    assert "\n".join(lines) == page


def test_budgets_count_only_tries_that_still_count() -> None:
    old = Try(
        T0 - timedelta(hours=30), Cause.NODE_LOST, Strategy.REPLACE_NODE, "REPLACE_NODE", False
    )
    tries = (
        old,
        *(
            Try(T0, cause, s, s.value, True)
            for cause, s in [
                (Cause.NODE_LOST, Strategy.REPLACE_NODE),
                (Cause.HANG, Strategy.RESTART_IN_PLACE),
            ]
        ),
    )
    view = budgets(
        job_state(
            tries=tries,
            restarts_spent=2,
            flat_generations=1,
            renewed_at=T0 - timedelta(hours=20),
        ),
        T0 + timedelta(minutes=1),
    )
    assert view["max_restarts"] == {"spent": 2, "limit": 8}
    assert view["no_progress"] == {"spent": 1, "limit": 3}
    assert view["causes"].keys() == {"NODE_LOST", "HANG"}
    assert view["causes"]["NODE_LOST"][0] == {
        "strategy": "REPLACE_NODE",
        "when": [],
        "codes": [],
        "used": 1,
        "allowed": 6,
        "by": {},
        "window": 86400.0,
    }
    assert view["causes"]["NODE_LOST"][1]["allowed"] is None


def test_log_lines_are_printed_whole_and_aligned(
    capsys: pytest.CaptureFixture[str], page: SnapshotAssertion
) -> None:
    printer = Printer(world_size=12, colour=False)
    printer.feed(3, "one\ntw")
    printer.feed(11, "eleven\n")
    printer.feed(3, "o\nend")
    printer.flush()
    assert capsys.readouterr().out == page


def test_lines_of_a_launcher_are_marked_apart_from_its_ranks(
    capsys: pytest.CaptureFixture[str], page: SnapshotAssertion
) -> None:
    printer = Printer(world_size=16, colour=False)
    printer.feed(15, "a step\n")
    printer.feed(17, "failed (exitcode: -9) local_rank: 7 (pid: 4242) of binary: python\n")
    assert capsys.readouterr().out == page


def test_checkpoints_have_their_age_and_what_is_missing(page: SnapshotAssertion) -> None:
    saved = {"name": "step-20", "format": "dcp", "step": 20, "age": 200.0, "incomplete": ""}
    torn = {"name": "checkpoint-\n30", "format": "hf", "age": 5.0, "incomplete": "it is empty"}
    view = {"directory": "out/", "node": "n1", "newest": saved, "incomplete": [], "unreadable": ""}
    pages = {
        "complete": view,
        "a later one is torn": {**view, "incomplete": [torn]},
        "a file": {**view, "newest": {**saved, "name": "ckpt.pt", "step": None, "format": "torch"}},
        "the folder itself": {**view, "newest": {**saved, "name": ".", "step": None}},
        "none": {**view, "newest": None},
        "no answer": {**view, "newest": None, "unreadable": "no worker answers"},
    }
    assert checkpoint_lines(None) == []
    assert sections({title: checkpoint_lines(one) for title, one in pages.items()}) == page
