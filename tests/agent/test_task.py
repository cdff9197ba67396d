"""One command of the agent in a container.

What it prints, and the exit code that a health check by exit code goes by.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, is_alive, wait_for

from relaunch.agent.container import task
from relaunch.agent.state import read_boot_id
from tests.doubles.install import calls, install_tool, pids

SAMPLES = Path(__file__).parent.parent / "recovery" / "samples" / "dcgm"
PASS = next(SAMPLES.rglob("v4_r1_pass_8gpu.json")).read_text()
FAULTY = next(SAMPLES.rglob("v4_r2_gpu6_faulty_memory_isolate.json")).read_text()
SETTING = next(SAMPLES.rglob("*persistence*.json")).read_text()
PROBE = {"protocol": 1, "within": 10.0, "kernel_since": None}
DIAGNOSE = {"protocol": 1, "id": "r1", "level": 2, "within": 20.0}


def start(node: Node, kind: str, order: Any, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    environment = {**os.environ, "RELAUNCH_AGENT_STATE": str(node.state)}
    words = [
        *before,
        sys.executable,
        "-S",
        str(node.agent),
        "task",
        kind,
        order if isinstance(order, str) else json.dumps(order),
    ]
    return subprocess.Popen(
        words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(node: Node, kind: str, order: Any) -> tuple[int, str]:
    with start(node, kind, order) as process:
        out, _ = process.communicate(timeout=100)
    return process.returncode, out


def answer(said: str) -> dict[str, Any]:
    """Put the answer together, as a reader of the log does."""
    parts = [line.partition(": ")[2] for line in said.splitlines()]
    return dict(json.loads("".join(parts)))


def test_a_probe_answers_on_one_line_and_ends_with_0(node: Node) -> None:
    code, said = run(node, "probe", PROBE)
    assert code == task.HEALTHY
    assert said.count("\n") == 1 and said.startswith("relaunch-answer: {")
    found = answer(said)
    assert (found["outcome"], found["boot_id"]) == ("done", read_boot_id(node.state))
    assert found["disks"][0]["path"] == str(node.state)


def test_a_senseless_order_is_refused_without_a_word_on_the_node(
    node: Node,
) -> None:
    for order in (
        "{",
        json.dumps({**PROBE, "within": "long"}),
        json.dumps({**PROBE, "protocol": 9}),
    ):
        code, said = run(node, "probe", order)
        assert (code, answer(said)["outcome"]) == (task.INCONCLUSIVE, "refused")


@pytest.mark.parametrize("arguments", [[], ["reboot", "{}"], ["probe"], ["probe", "{}", "more"]])
def test_a_task_does_nothing_but_look(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert task.main(arguments) == task.MISUSED
    assert "task probe|diagnose ORDER" in capsys.readouterr().err


def test_a_diagnosis_gives_the_nodes_health_by_its_exit_code(node: Node, programs: Path) -> None:
    for stdout, exit_code, expected in ((PASS, 0, task.HEALTHY), (FAULTY, 226, task.FAULTY)):
        install_tool(programs, "dcgmi", stdout=stdout, exit_code=exit_code)
        code, said = run(node, "diagnose", DIAGNOSE)
        assert (code, answer(said)["exit_code"], answer(said)["stdout"]) == (
            expected,
            exit_code,
            stdout,
        )
    assert calls(programs, "dcgmi") == [["diag", "-r", "2", "-j"]] * 2


def test_a_diagnosis_that_crashes_finds_no_fault(node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", stdout=PASS)
    record = node.state / "held.json"
    record.mkdir(parents=True)  # it cannot be read, as on a disk that fails
    with start(node, "diagnose", DIAGNOSE) as process:
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (task.INCONCLUSIVE, "")
    assert err == f"no answer: IsADirectoryError: [Errno 21] Is a directory: {str(record)!r}\n"


def test_an_answer_that_cannot_be_printed_is_inconclusive(node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", stdout=PASS)
    with start(node, "diagnose", DIAGNOSE, ["sh", "-c", 'exec "$@" > /dev/full', "sh"]) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == task.INCONCLUSIVE
    assert err == "no answer: OSError: [Errno 28] No space left on device\n"


def test_a_stopped_diagnosis_ends_its_tool_and_is_inconclusive(node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", seconds=1000, children=1)
    with start(node, "diagnose", {**DIAGNOSE, "within": 1000.0}) as process:
        tool = wait_for(lambda: len(found := pids(programs, "dcgmi")) == 2 and found)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=100)
    assert (process.returncode, answer(said)["exit_code"]) == (task.INCONCLUSIVE, None)
    wait_for(lambda: not any(map(is_alive, tool)))


# --- the contract of the exit code, and long answers


def make_answer(stdout: str = PASS, exit_code: Any = 0, **more: Any) -> dict[str, Any]:
    return {
        "outcome": "done",
        "boot_id": "b",
        "exit_code": exit_code,
        "stdout": stdout,
        "stderr": "",
        "took": 1.0,
        **more,
    }


V3_FAIL = {
    "DCGM GPU Diagnostic": {
        "test_categories": [
            {"category": "Hardware", "tests": [{"name": "M", "results": [{"status": "Fail"}]}]}
        ]
    }
}
V3_SKIP = {
    "DCGM GPU Diagnostic": {
        "test_categories": [
            {"category": "Hardware", "tests": [{"name": "M", "results": [{"status": "Skip"}]}]}
        ]
    }
}

CONTRACT = {
    "all passed": (make_answer(), task.HEALTHY),
    "all passed after other lines": (make_answer("{warning\n" + PASS), task.HEALTHY),
    "a test of the hardware failed": (make_answer(FAULTY, 205), task.FAULTY),
    "it failed and dcgmi was killed afterwards": (make_answer(FAULTY, None), task.FAULTY),
    "it failed in the words of version 3": (make_answer(json.dumps(V3_FAIL), 226), task.FAULTY),
    "a setting is not as DCGM wants it": (make_answer(SETTING, 226), task.INCONCLUSIVE),
    "nothing was run": (make_answer(json.dumps(V3_SKIP)), task.INCONCLUSIVE),
    "it passed and dcgmi says error": (make_answer(exit_code=226), task.INCONCLUSIVE),
    "it was killed": (make_answer("", None), task.INCONCLUSIVE),
    "it printed something else": (make_answer('{"status": "pass"}'), task.INCONCLUSIVE),
    "the output is cut": (make_answer(cut=True), task.INCONCLUSIVE),
    "brackets without end": (make_answer("{" + '"DCGM Diagnostic": {'), task.INCONCLUSIVE),
    "dcgmi is missing": (
        {"outcome": "done", "boot_id": "b", "missing": "dcgmi is not on this node's PATH"},
        task.INCONCLUSIVE,
    ),
    "the node is in use": (
        {"outcome": "refused", "why": "busy", "reason": "pid 1 uses GPU 0"},
        task.INCONCLUSIVE,
    ),
}


@pytest.mark.parametrize("case", CONTRACT)
def test_the_exit_code_of_a_diagnosis_when(case: str) -> None:
    found, expected = CONTRACT[case]
    assert task.exit_code("diagnose", found) == expected


def test_a_long_answer_comes_in_numbered_parts() -> None:
    long = make_answer("x" * 30_000)
    lines = list(task.format_answer(long))
    assert [line.partition(": ")[0] for line in lines] == [
        f"relaunch-answer {number}/3" for number in (1, 2, 3)
    ]
    assert max(map(len, lines)) < 16 * 1024
    assert answer("\n".join(lines)) == long


def test_an_answer_without_end_is_cut_and_said_to_be() -> None:
    printed = answer("\n".join(task.format_answer(make_answer("\n" * 2**20))))
    assert printed["cut"] is True and len(printed["stdout"]) > 10_000
    lines = [f"[{number:>5}.000000] {'x' * 2000}" for number in range(200)]
    kernel = answer("\n".join(task.format_answer({"outcome": "done", "kernel": {"lines": lines}})))[
        "kernel"
    ]
    assert kernel["lines"] == lines[-len(kernel["lines"]) :] and "left out" in kernel["unreadable"]
    for found in (make_answer("\n" * 2**20), {"outcome": "done", "kernel": {"lines": lines}}):
        assert sum(map(len, task.format_answer(found))) < 205 * 1024


def test_a_diagnosis_that_is_only_indented_widely_is_not_cut() -> None:
    wide = json.dumps(json.loads(FAULTY), indent=150)
    assert len(wide) > task.LONGEST
    found = answer("\n".join(task.format_answer(make_answer(wide, 205))))
    assert json.loads(found["stdout"]) == json.loads(FAULTY) and "cut" not in found
