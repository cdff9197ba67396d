"""What a node answers, against the bounds of docs/reference/agent-protocol.md.

Each lie is that node's fault, in one sentence.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from relaunch.backends.answers import (
    MAX_OBSERVATIONS,
    MAX_PROBE_BYTES,
    MAX_VALUES,
    ListAnswer,
    PrepareAnswer,
    check_output,
    check_size,
    has_too_many_values,
    parse,
    parse_last_words,
    parse_list,
    parse_stacks,
    parse_watch_line,
)
from relaunch.backends.base import ProtocolError, Unreachable
from relaunch.generation import Token

TOKEN = Token("default", "llama", 1000, 3)
NAMED = {"namespace": "default", "job": "llama", "submission": 1000, "generation": 3}
HELLO = {"token": NAMED, "boot_id": "b1", "state": "running", "ranks": [0, 1], "stamp": 12.5}
BEAT = {"stamp": 12.5, "alive": [0], "lease_left": 3.0, "progress": {"0": {"step": 4, "age": 0.1}}}
EXITED = {
    "seq": 1,
    "kind": "RankExited",
    "rank": 0,
    "local_rank": 0,
    "exit_code": 1,
    "signal": None,
}
PREPARED = {
    "outcome": "done",
    "boot_id": "b1",
    "master_port": 1,
    "peer_port": 2,
    "stamp": 1,
    "nonce": "ab",
}
GENERATION = {
    "submission": 1,
    "generation": 1,
    "state": "running",
    "ranks": [{"rank": 0, "pid": 7, "alive": True}],
}


def said_of(line: object, **options: bool) -> str:
    with pytest.raises(ProtocolError) as refused:
        parse_watch_line("n2", TOKEN, line, **options)
    assert isinstance(refused.value, Unreachable), (
        "else no caller takes it for a node that does not answer"
    )
    assert refused.value.node == "n2"
    assert len(refused.value.reason) < 400
    return refused.value.reason


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ([1, 2], "[1, 2], expected"),
        ("hello", "'hello', expected"),
        ({"hello": 1}, "its hello"),
        (
            {"hello": {**HELLO, "token": {**NAMED, "job": "other"}}},
            "expected generation default/llama/1000/3",
        ),
        ({"hello": {**HELLO, "token": {**NAMED, "generation": 4}}}, "its hello is of"),
        ({"hello": {**HELLO, "token": None}}, "its hello is of None"),
        ({"hello": {**HELLO, "stamp": "soon"}}, "stamp is 'soon'"),
        ({"hello": {**HELLO, "ranks": list(range(5000))}}, "ranks"),
        ({"heartbeat": "x"}, "its heartbeat"),
        ({"heartbeat": {**BEAT, "stamp": None}}, "stamp is None"),
        (
            {"heartbeat": {key: value for key, value in BEAT.items() if key != "stamp"}},
            "stamp is missing",
        ),
        ({"heartbeat": {**BEAT, "stamp": 1e300}}, "stamp is 1e+300"),
        ({"heartbeat": {**BEAT, "stamp": float("nan")}}, "expected finite numbers"),
        ({"heartbeat": {**BEAT, "progress": {"zero": {"step": 3}}}}, "progress.zero"),
        ({"heartbeat": {**BEAT, "progress": {"0": {"step": 10**18}}}}, "progress.0.step"),
        ({"heartbeat": {**BEAT, "progress": {"0": {"step": 3, "age": 1e300}}}}, "progress.0.age"),
        ({"heartbeat": {**BEAT, "progress": {"0": {"step": 3, "age": -1e6}}}}, "progress.0.age"),
        (
            {
                "heartbeat": {
                    **BEAT,
                    "progress": {"0": {"values": {f"v{n}": 1.0 for n in range(99)}}},
                }
            },
            "values",
        ),
        ({"observation": 7}, "7, expected an object"),
        (
            {"observation": {key: value for key, value in EXITED.items() if key != "seq"}},
            "seq is missing",
        ),
        ({"observation": {**EXITED, "seq": "abc"}}, "seq is 'abc'"),
        (
            {"observation": {**EXITED, "seq": MAX_OBSERVATIONS + 1}},
            "at most 10000",
        ),
        ({"observation": {**EXITED, "rank": "r"}}, "rank is 'r'"),
        ({"observation": {**EXITED, "rank": 2**63}}, "rank is 9223372036854775808"),
        ({"observation": {**EXITED, "rank": 10**30}}, "of 100 bits"),
        (
            {"observation": {**EXITED, "exit_code": "boom"}},
            "exit_code is 'boom'",
        ),
        ({"observation": {**EXITED, "exit_code": True}}, "exit_code is True"),
        ({"observation": {**EXITED, "exit_code": 256}}, "exit_code is 256"),
        ({"observation": {**EXITED, "signal": 9.5}}, "signal is 9.5"),
        ({"observation": {**EXITED, "log_tail": [1]}}, "log_tail.0"),
        ({"observation": {**EXITED, "launched": [{"rank": 0}]}}, "launched.0.pid is missing"),
        ({"observation": {"seq": 1, "kind": "Fenced", "why": ["x"]}}, "why is ['x']"),
        (
            {"observation": {"seq": 1, "kind": "StoppedByUser", "reason": "evil", "by": "boss"}},
            "what people did",
        ),
        ({"outcome": "refused", "why": "z" * 100_000, "reason": "y"}, "why"),
        ({"hello": json.loads("[" * 40 + "]" * 40)}, "nested deeper than 16"),
    ],
)
def test_a_line_that_does_not_fit_is_the_fault_of_its_node(line: object, named: str) -> None:
    assert named in said_of(line)


@pytest.mark.parametrize(
    "line",
    [
        {"hello": HELLO},
        {
            "heartbeat": {
                **BEAT,
                "progress": {
                    "0": {"unreadable": "no step"},
                    "1": {"step": None, "values": {"loss": "NaN"}},
                },
            }
        },
        {
            "observation": {
                "seq": 1,
                "kind": "Fenced",
                "why": "isolated",
                "reason": "no peer answers",
            }
        },
        {"observation": {**EXITED, "exit_code": None, "signal": 9}},
        {"observation": {"seq": 2, "kind": "SomethingOfTomorrow", "of": [1]}},
        {"observation": {"seq": 2, "kind": "ShimDied", "reason": "killed", "launched": [1, [2]]}},
        {"end": {"seq": 3}},
        {"of tomorrow": {}},
    ],
)
def test_a_line_that_fits_keeps_what_it_says(line: dict[str, Any]) -> None:
    kind = next(iter(line))
    parsed = parse_watch_line("n2", TOKEN, line)
    assert parsed.keys() == line.keys()
    assert {key: parsed[kind][key] for key in line[kind] if key != "progress"} == {
        key: value for key, value in line[kind].items() if key != "progress"
    }


def test_fields_of_a_newer_agent_are_passed_on() -> None:
    parsed = parse_watch_line("n2", TOKEN, {"hello": {**HELLO, "of_tomorrow": 1}})
    assert parsed["hello"]["of_tomorrow"] == 1


def test_only_a_platform_may_report_people_and_its_own_reasons() -> None:
    stopped = {
        "observation": {
            "seq": 1_000_000,
            "kind": "StoppedByUser",
            "reason": "task stopped",
            "by": "ECS",
        }
    }
    assert parse_watch_line("n2", TOKEN, stopped, is_platform=True) == stopped
    exited = {"observation": {**EXITED, "ecs": {"stop_code": "SpotInterruption", "reason": "x"}}}
    assert "ecs" in parse_watch_line("n2", TOKEN, exited, is_platform=True)["observation"]
    assert "ecs" not in parse_watch_line("n2", TOKEN, exited)["observation"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (None, None),
        (7, {"unreadable": "expected an object, found int"}),
        ({"unreadable": "it is torn"}, {"unreadable": "it is torn"}),
        ({"message": 7}, {"unreadable": "it has no message"}),
        (
            {"message": "x", "timestamp": "soon", "of": float("nan")},
            {"message": "x", "timestamp": None},
        ),
        ({"message": "x", "timestamp": "17"}, {"message": "x", "timestamp": 17.0}),
        ({"message": {"message": "x", "extraInfo": "none"}}, ("x", None)),
        ({"message": {"message": "x", "extraInfo": {"timestamp": "17"}}}, ("x", 17.0)),
        ({"message": {"message": "x", "extraInfo": {"timestamp": 10**400}}}, ("x", None)),
    ],
)
def test_what_a_rank_wrote_is_no_fault_of_its_node(written: object, read: object) -> None:
    if isinstance(read, tuple):
        read = {
            "message": {"message": read[0], "extraInfo": {"timestamp": read[1], "py_callstack": ""}}
        }
    below = {"rank": 0, "local_rank": 0, "pid": 7, "error": written, "log_tail": []}
    line = {"observation": {**EXITED, "launcher": True, "error": written, "launched": [below]}}
    parsed = parse_watch_line("n2", TOKEN, line)["observation"]
    assert (parsed["error"], parsed["launched"][0]["error"]) == (read, read)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"master_port": "abc"}, "master_port is 'abc'"),
        ({"peer_port": 0}, "peer_port is 0"),
        ({"stamp": float("inf")}, "it holds inf"),
        ({"nonce": "a\nb"}, "nonce"),
        ({"boot_id": None}, "boot_id is None"),
        ({"reason": [10**30]}, "of 100 bits"),
    ],
)
def test_an_answer_that_does_not_fit_names_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError, match="its answer to prepare") as refused:
        parse("n2", "prepare", PrepareAnswer, {**PREPARED, **change})
    assert named in refused.value.reason


def list_of(**generation: Any) -> dict[str, Any]:
    job = {"namespace": "default", "job": "llama", "prepared": [1, 1], "stopped": None}
    return {
        "outcome": "done",
        "boot_id": "b1",
        "jobs": [{**job, "generations": [{**GENERATION, **generation}]}],
        "held": None,
    }


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"outcome": "done", "jobs": 5}, "jobs is 5"),
        ({"outcome": "done", "jobs": [{"x": 1}]}, "jobs.0.namespace is missing"),
        (list_of(generation=[1]), "generation is [1], expected a valid integer"),
        (list_of(submission=2**63), "submission"),
        (list_of(ranks=[{"rank": 0, "alive": "yes"}]), "ranks.0.alive"),
        ({**list_of(), "held": "yes"}, "held"),
        ({**list_of(), "warm": [{"job": "llama\n"}]}, "warm.0."),
        ({**list_of(), "boot_id": "b" * 6_000_000}, "boot_id"),
        (
            {**list_of(), "jobs": list_of()["jobs"] * 300},
            "ranks of 300 generations live there, expected at most 256",
        ),
    ],
)
def test_a_list_that_does_not_fit_is_the_fault_of_its_node(answer: object, named: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_list("n2", answer)
    assert named in refused.value.reason and len(refused.value.reason) < 400


def test_a_list_that_fits_is_what_the_node_said() -> None:
    answer = {**list_of(fleet="default/gpus"), "gpus": {"driver": "570"}}
    assert ListAnswer.model_validate(answer).jobs[0].generations[0].is_live
    assert parse_list("n2", answer) == {**answer, "warm": []}
    standby = {"namespace": "default", "job": "llama", "state": "ready", "modules": ["torch"]}
    rows = parse_list("n2", {**answer, "warm": [{**standby, "pid": 7, "bytes": 5}]})["warm"]
    assert rows == [{**standby, "server": "", "bytes": 5}]


def test_an_answer_that_becomes_a_payload_is_no_longer_than_one() -> None:
    printed = {"outcome": "done", "boot_id": "b1", "exit_code": 0, "stdout": "\x01" * 300_000}
    with pytest.raises(ProtocolError, match="expected at most 1500000"):  # six bytes each, as JSON
        check_output("n2", "diagnose", printed, "stdout")
    assert check_output("n2", "diagnose", {**printed, "stdout": "x" * 1_048_576}, "stdout")
    lines = {"boot_id": "b1", "kernel": {"lines": ["x" * 2_000_000]}}
    with pytest.raises(ProtocolError, match="expected at most 1500000"):
        check_size("n2", "probe", lines, MAX_PROBE_BYTES)


def test_values_are_counted_outside_of_texts() -> None:
    assert not has_too_many_values(json.dumps({"data": '",[{' * MAX_VALUES}).encode())
    assert has_too_many_values(b'{"id": 1, "line": [' + b"{}," * MAX_VALUES + b"1]}")


THREAD = {"tid": 7, "name": "MainThread", "frames": [["step", "train.py", 3]]}
PROCESS = {
    "pid": 7,
    "parent": 1,
    "rank": 0,
    "command": "python train.py",
    "state": "S",
    "cpu_s": 1.5,
    "threads": [THREAD],
    "source": "py-spy",
    "unreadable": None,
}
STACKS = {"rank": 0, "pid": 7, "processes": [PROCESS], "flight": None}


def test_stacks_that_fit_keep_what_is_named_and_nothing_else() -> None:
    lied = {**PROCESS, "command": "a\x1b[2Jb", "payload": ["x"] * 9, "kernel": ["nv_ioctl"]}
    (row,) = parse_stacks("n2", 0, {"stacks": [{**STACKS, "processes": [lied], "evil": 1}]})[
        "stacks"
    ]
    assert (row["pid"], row["unreadable"], "evil" in row) == (7, None, False)
    (process,) = row["processes"]
    assert process["command"] == "a [2Jb", "no escape sequence reaches a terminal"
    assert process["threads"] == [THREAD]
    assert (process["kernel"], process["blocked"], "payload" in process) == (["nv_ioctl"], 0, False)
    (old,) = parse_stacks("n2", 0, {"stacks": [{"rank": 0, "pid": 7, "threads": [{}]}]})["stacks"]
    assert "too old" in old["unreadable"]


def _row(**more: Any) -> dict[str, Any]:
    return {**STACKS, "processes": [{**PROCESS, **more}]}


def _threads(**more: Any) -> dict[str, Any]:
    return _row(threads=[{**THREAD, **more}])


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (None, "stacks is None"),
        ([STACKS, STACKS], "ranks [0, 0], expected rank 0 alone"),
        ([{**STACKS, "rank": 1}], "ranks [1], expected rank 0 alone"),
        ([], "ranks [], expected rank 0 alone"),
        ([{**STACKS, "rank": -1}], "stacks.0.rank is -1"),
        ([{**STACKS, "pid": "7"}], "stacks.0.pid is '7'"),
        ([{**STACKS, "processes": [PROCESS] * 33}], "stacks.0.processes"),
        ([{**STACKS, "flight": "x"}], "stacks.0.flight is 'x'"),
        ([_row(state="running")], "state is 'running'"),
        ([_row(cpu_s=-1.0)], "cpu_s is -1.0"),
        ([_row(cpu_s=float("nan"))], "expected finite numbers"),
        ([_row(command="x" * 300)], "command"),
        ([_row(rank=True)], "rank is True"),
        ([_row(written_bytes=2**65)], "of 66 bits"),
        ([_row(source="gdb")], "source is 'gdb'"),
        ([_row(kernel=["x"] * 17)], "kernel"),
        ([_row(threads=[THREAD] * 17)], "threads"),
        ([_threads(tid=-1)], "tid is -1"),
        ([_threads(frames=[["step", "train.py", 3]] * 65)], "frames"),
        ([_threads(frames=[["step", "train.py"]])], "[function, file, line]"),
        ([_threads(frames=[["step", "train.py", "3"]])], "frames.0.line is '3'"),
        ([_threads(frames=[[7, "train.py", 3]])], "frames.0.function is 7"),
        ([_threads(frames=[["s" * 300, "train.py", 3]])], "frames.0.function"),
        ([_threads(frames=["step"])], "[function, file, line]"),
    ],
)
def test_stacks_that_do_not_fit_are_the_fault_of_their_node(rows: object, named: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_stacks("n2", 0, {"outcome": "done", "stacks": rows})
    assert named in refused.value.reason
    assert len(refused.value.reason) < 400


WORDS = {"rank": 0, "local_rank": 0, "state": "exiting", "log_tail": ["x"], "log_age": 1.5}


def test_last_words_that_fit_keep_what_is_named_and_nothing_else() -> None:
    (row,) = parse_last_words("n2", {"ranks": [{**WORDS, "evil": 1}]})["ranks"]
    assert row == {**WORDS, "pid": None, "error": None, "error_age": None}


def _nest(depth: int) -> object:
    return [_nest(depth - 1)] if depth else []


@pytest.mark.parametrize("odd", [10**21, float("nan"), _nest(20)], ids=["long", "nan", "deep"])
def test_what_a_rank_wrote_is_never_its_nodes_fault(odd: object) -> None:
    """Such as the entropy of numpy's SeedSequence: whole numbers of up to 128 bits."""
    info = {"py_callstack": "train.py", "timestamp": "1700000000", "entropy": odd}
    error = {"message": {"message": "ValueError: bad batch", "extraInfo": info}, "seed": odd}
    kept = {"py_callstack": "train.py", "timestamp": 1700000000.0}
    expected = {"message": {"message": "ValueError: bad batch", "extraInfo": kept}}
    (row,) = parse_last_words("n2", {"ranks": [{**WORDS, "error": error}]})["ranks"]
    assert row["error"] == expected
    before = {"error": error, "error_age": 0.5, "log_tail": ["x"]}
    line = {"observation": {**EXITED, "stopped": True, "before_stop": before}}
    parsed = parse_watch_line("n2", TOKEN, line)["observation"]
    assert parsed["before_stop"] == {**before, "error": expected}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (None, "ranks is None"),
        ([WORDS, WORDS], "ranks [0, 0], expected each once"),
        ([{**WORDS, "log_age": -1.0}], "ranks.0.log_age is -1.0"),
        ([{**WORDS, "log_tail": "x"}], "ranks.0.log_tail is 'x'"),
    ],
)
def test_last_words_that_do_not_fit_are_their_nodes_fault(rows: object, named: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_last_words("n2", {"outcome": "done", "ranks": rows})
    assert named in refused.value.reason
