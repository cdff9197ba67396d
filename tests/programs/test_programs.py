"""The program that needs no library, and one with torch, with two faults, as a new user runs them.

`make programs` has the other programs and faults: docs/programs.md.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import cases
from tests.programs.cases import (
    FAULTS,
    NANOGPT,
    PROGRAMS,
    PURE,
    Known,
    find_deviations,
    has_place,
)
from tests.programs.run import PYTHON, Row, run_cell
from tests.programs.service import (
    Service,
    command_of,
    find_missing,
    find_unread_end,
    read_outcome,
)

SHORT = ("kill", "keyerror")
RIGHT: Row = {
    "program": "pure",
    "fault": "kill",
    "phase": "SUCCEEDED",
    "generations": 2,
    "cause": "UNKNOWN",
    "same": True,
    "traceback": "",
    "step": PURE.last_step,
    "unreadable": [],
}


def run_alone(folder: Path) -> dict[str, str]:
    """Run both ranks without relaunch and without a fault, and return their outcome."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1] - 1
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command_of(PURE, sys.executable),
            cwd=folder,
            env={"RANK": str(rank), **world},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    outcome = read_outcome(folder)
    assert outcome is not None
    return outcome


@pytest.mark.long
def test_a_program_resumes_bit_for_bit_and_says_its_bug(tmp_path: Path) -> None:
    untouched = run_alone(tmp_path / "alone")
    faults = {fault.name: fault for fault in FAULTS}
    with Service(tmp_path / "service") as service:
        rows = {
            name: run_cell(service, PURE, faults[name], tmp_path, None, untouched, False)
            for name in SHORT
        }
        incident = json.loads((tmp_path / "cells/pure-keyerror/relaunch/show.json").read_text())[
            "incident"
        ]
    found = {name: find_deviations(row) for name, row in rows.items()}
    assert found == {name: [] for name in SHORT}, rows
    assert (rows["kill"]["exit_code"], rows["keyerror"]["exit_code"]) == (0, 1)
    # Rank 1 fails, and it is rank 0 that prints the steps.
    assert incident["reached"] == 8
    # What was printed before the kill, by a plain `print`.
    log = (tmp_path / "cells/pure-kill/relaunch/logs-1.txt").read_text()
    assert "[rank 0] step 7: loss " in log and "[rank 0] saving checkpoint 5\n" in log


@pytest.mark.timeout(600)
def test_a_program_of_torch_resumes_and_says_its_bug(tmp_path: Path) -> None:
    if missing := find_missing(PYTHON, NANOGPT):
        pytest.skip(f"{missing}: RELAUNCH_TORCH_PYTHON names one that has")
    faults = {fault.name: fault for fault in FAULTS}
    with Service(tmp_path / "service") as service:
        untouched = run_cell(service, NANOGPT, faults["none"], tmp_path, None, None, False)
        rows = {
            name: run_cell(
                service, NANOGPT, faults[name], tmp_path, None, untouched["outcome"], False
            )
            for name in SHORT
        }
    rows["none"] = untouched
    found = {name: find_deviations(row) for name, row in rows.items()}
    assert found == {name: [] for name in rows}, rows


def test_a_follower_that_does_not_say_the_end_is_named() -> None:
    row = {**RIGHT, "job": "a", "exit_code": 0}
    assert find_unread_end(row, "job a SUCCEEDED: all ranks exited with 0") == []
    failed = {**row, "phase": "FAILED", "cause": "HANG", "traceback": "KeyError: 'x'"}
    assert find_unread_end(failed, "job a FAILED: no step\n  | KeyError: 'x'") == [
        "submit --follow exits with 0 for a job that is FAILED",
        "submit --follow does not say 'root cause: HANG in generation 2'",
    ]


def test_a_row_that_differs_is_named() -> None:
    assert find_deviations(RIGHT) == []
    assert find_deviations({**RIGHT, "cause": "HANG"}) == [
        "cause is 'HANG', expected 'UNKNOWN': a SIGKILL does not say who sent it"
    ]
    assert find_deviations({**RIGHT, "unreadable": ["show exits with 1"]}) == ["show exits with 1"]


def test_a_known_fault_must_stay_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {("pure", "kill"): (Known("cause", "NETWORK", "a later change"),)}
    monkeypatch.setattr(cases, "KNOWN", known)
    assert find_deviations({**RIGHT, "cause": "NETWORK"}) == []
    assert find_deviations(RIGHT) == ["cause is 'UNKNOWN', which is right: remove it from KNOWN"]


def test_every_exception_names_a_row_that_is_run() -> None:
    rows = {(program.name, fault.name) for program in PROGRAMS for fault in FAULTS}
    possible = {
        (program.name, fault.name)
        for program in PROGRAMS
        for fault in FAULTS
        if has_place(program, fault)
    }
    assert {*cases.EXCEPTIONS, *cases.KNOWN} <= possible <= rows
    fields = {"step", *(field.name for field in dataclasses.fields(cases.Expected))}
    assert {one.field for known in cases.KNOWN.values() for one in known} <= fields
