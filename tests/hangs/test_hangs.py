"""How a hang is judged and counted, and one real one without torch; the others: docs/testing.md."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.hangs.cost import PAIR
from tests.hangs.kinds import BY_NAME, CONTROLS, KINDS, find_mistakes, make_case
from tests.hangs.play import (
    Settings,
    environment_of,
    find_hang_events,
    find_report,
    judge,
    list_launchers,
    prepare,
    run_job,
)
from tests.hangs.run import Rows
from tests.hangs.table import render
from tests.programs.service import Service

MARK = {"at": 1_800_000_000.0, "rank": 2, "node": "h1n2", "kind": "stopped", "step": 130}
SUSPECT = {"rank": 2, "node": "h1n2", "where": "rank 2 on h1n2 is stopped"}
INCIDENT: dict[str, Any] = {
    "opened": "2027-01-15T08:00:04+00:00",
    "times": {"decided": 0.5},
    "cause": "HANG",
    "code": "",
    "reason": "step 129 has not changed",
    "nodes": [],
    "ranks": [0],
    "faults": [{}],
}
SETTINGS = Settings("python3", 60.0, 10.0)


def make_row(kind: str = "stopped", event: Any = None, **found: Any) -> dict[str, Any]:
    row = {"case": f"{kind}-4-0", "kind": kind, "ranks": 4, "phase": "FAILED", "generations": 1}
    return row | judge(MARK, [INCIDENT | found], [event] if event else [])


def test_ranks_of_a_hang_that_accuses_no_node_are_not_named() -> None:
    row = make_row()
    assert (row["named"], row["listed"]) == ([], [0])
    assert find_mistakes(row, BY_NAME["stopped"]) == ["no rank named"]


def test_suspects_and_rule_are_those_of_the_event() -> None:
    event = {"kind": "RanksHung", "suspects": [SUSPECT], "rule": "stopped"}
    answers = [{"step": 3}, {"events": [event], "cursor": None}]
    row = make_row(event=next(find_hang_events(answers)))
    assert (row["named"], row["rule"], row["right_node"]) == ([2], "stopped", True)
    assert row["seconds"] == 4.5
    assert find_mistakes(row, BY_NAME["stopped"]) == []


def test_accused_nodes_count_where_there_are_no_suspects() -> None:
    row = make_row(nodes=["h1n2"], ranks=[2, 3])
    assert (row["named"], row["named_nodes"]) == ([2, 3], ["h1n2"])
    assert find_mistakes(row, BY_NAME["stopped"]) == ["wrong rank"]


def test_what_is_decided_before_the_hang_is_wrong() -> None:
    row = make_row(opened="2027-01-15T07:59:00+00:00", event={"suspects": [SUSPECT]})
    assert find_mistakes(row, BY_NAME["stopped"]) == ["restarted before it hung"]


def test_a_hang_without_incident_is_not_seen() -> None:
    row = {**make_row(), **judge(MARK, []), "phase": "CANCELLED"}
    assert find_mistakes(row, BY_NAME["stopped"]) == ["not seen"]


def test_a_healthy_run_has_no_incident_and_succeeds() -> None:
    healthy = BY_NAME["eval_rank0"]
    assert find_mistakes({**judge(MARK, []), "phase": "SUCCEEDED"}, healthy) == []
    assert find_mistakes(make_row("eval_rank0"), healthy) == ["restarted"]
    assert find_mistakes({**judge(None, []), "phase": "SUCCEEDED"}, healthy) == ["did not happen"]


def test_seeds_choose_the_same_step_and_rank_again() -> None:
    cases = [make_case(kind, seed, 4) for kind in (*KINDS, *CONTROLS) for seed in range(20)]
    again = [make_case(case.kind, case.seed, 4) for case in cases]
    assert cases == again and len({case.name for case in cases}) == len(cases)
    assert {case.rank for case in cases if case.kind.hangs} == {0, 1, 2, 3}
    pairs = {(case.variant, case.loop) for case in cases[:4]}
    assert pairs == {(0, "all_reduce"), (1, "all_reduce"), (0, "ddp"), (1, "ddp")}


def test_the_twelve_kinds_have_their_place() -> None:
    assert len(KINDS) == 12 and [one.name for one in KINDS if not one.hangs] == ["slow_rank"]
    assert not any(one.hangs for one in CONTROLS)


def test_a_default_time_out_is_not_given_to_torch() -> None:
    (default,) = list_launchers(SETTINGS, 1.0, "")
    (scaled,) = list_launchers(SETTINGS, 60.0, "")
    assert (dict(default.env), default.default_s) == ({}, 1800.0)
    assert scaled.env == {"COLLECTIVE_TIMEOUT_S": "30.0"}


def test_torchrun_names_the_rank_that_it_saw_first() -> None:
    begun = datetime(2027, 1, 15, 23, 59, 50).astimezone().timestamp()
    said = "E0116 00:00:20.500000 12 api.py:988] failed (exitcode: 1) local_rank: 3 (pid: 12)"
    assert find_report(said + "\nE0116 00:00:21.0 failed (exitcode: 1) local_rank: 1", begun) == (
        begun + 30.5,
        [3],
    )
    assert find_report("", begun) == (None, [])


def test_tables_count_what_was_named(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add(make_row(event={"suspects": [SUSPECT], "rule": "stopped"}))
    beside = {"named": [1], "seconds": 31.0, "default_s": 1800.0, "scale": 60.0}
    rows.add({**make_row("order"), "torchrun": beside})
    rows.add({**make_row("eval_all"), **judge(MARK, []), "phase": "SUCCEEDED"})
    again = Rows(tmp_path / "rows.jsonl")
    assert again.known == rows.known
    lines = render(list(again.known.values())).splitlines()
    cells = {line.split(" | ")[0]: line.split(" | ")[1:4] for line in lines if line[:2] == "| "}
    assert cells["| stopped"] == ["1/1", "1/1", "0"]
    assert cells["| order"] == ["1/1", "0/1", "0"]
    assert "31.0 → 1801 (0/1) | not run |" in next(one for one in lines if "| order |" in one)
    assert cells["| eval_all"][1:] == ["1", "0"]


@pytest.mark.long
def test_a_stopped_rank_is_a_hang_and_no_other_rank_is_named(tmp_path: Path) -> None:
    case = replace(make_case(BY_NAME["stopped"], 0, 4), rank=1, ranks=2, step=150)
    folder = tmp_path / "job"
    folder.mkdir()
    job = {
        "name": "pair",
        "fleet": "h1",
        "command": [sys.executable, "-S", "-E", str(PAIR)],
        "workdir": str(folder),
        "nodes": 2,
        "progress": {"log_pattern": r"step (?P<step>\d+)"},
        "env": environment_of(case, SETTINGS) | {"STOP_AT": f"{case.step}:{case.rank}"},
        # The rule takes three looks, of 1.5 heartbeats each. A limit that passes before decides by
        # itself; this one passes after the end of the test.
        "policy": {
            "timeouts": {"heartbeat": "2s"},
            "hang": {"after": "5m"},
            "causes": {"HANG": [{"strategy": "FAIL"}]},
        },
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    with Service(tmp_path / "service", *prepare(tmp_path / "service", 1)) as service:
        settings = replace(SETTINGS, limit=200.0)
        row = run_job(service, "pair", case, folder, settings, None)
    assert (row["phase"], row["cause"], row["early"]) == ("FAILED", "HANG", False)
    assert (row["rule"], row["named"]) == ("stopped", [case.rank])
