"""What an agent answers about logs: since when, from where, and why there is none."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from relaunch.agent.ranks import log_times
from relaunch.agent.ranks.log_times import LogTimes, find_offset
from relaunch.agent.state import Generation, JobState
from tests.agent.real_node import Node, expect_done, python_command, refusal, token, wait_for


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    made = JobState(tmp_path, "default", "j").generation((1, 1))
    made.path.mkdir(parents=True)
    made.make_folders()
    return made


def test_output_since_a_time_begins_at_the_last_mark_before_it(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_times, "MARK_INTERVAL", 0.0)
    times, log = LogTimes(generation), generation.log_path(3)
    for now, size in ((1000, 10), (1010, 20), (1020, 20), (1030, 90)):
        log.write_bytes(b"x" * size)
        monkeypatch.setattr(time, "time", lambda now=now: float(now))
        times.mark()
    os.utime(log, (1035, 1035))
    marks = generation.log_times / log.name
    assert marks.read_text() == "1000 10\n1010 20\n1030 90\n", "only where it has grown"
    with marks.open("a") as file:
        file.write("1034 ")  # torn
    found = [find_offset(generation, log, at) for at in (990, 1000, 1009, 1025, 1030, 1036)]
    assert found == [0, 10, 10, 20, 90, 90]
    assert find_offset(generation, generation.log_path(4), 1000) == 0
    marks.unlink()
    assert find_offset(generation, log, 1025) == 0, "rather all of it than too little"


def test_marks_of_a_long_log_are_bounded_and_keep_both_ends(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_times, "MARK_INTERVAL", 0.0)
    monkeypatch.setattr(log_times, "MAX_BYTES", 400)
    times, log = LogTimes(generation), generation.log_path(0)
    for number in range(1, 201):
        log.write_bytes(b"x" * number)
        monkeypatch.setattr(time, "time", lambda number=number: 1000.0 + number)
        times.mark()
    os.utime(log, (2000, 2000))
    text = (generation.log_times / log.name).read_text()
    assert len(text) <= 400 + 20 and text.startswith("1001 1\n") and text.endswith("1200 200\n")
    assert 150 <= find_offset(generation, log, 1190) <= 190


def read(node: Node, **order: Any) -> dict[str, Any]:
    return expect_done(node.order("logs", token=token(1), **order))


def test_logs_say_where_they_begin_and_which_are_missing(node: Node) -> None:
    code = "import os; print('one'); print(os.environ['SECOND'], end='')"
    node.run(1, python_command(code), rank_env=[{"SECOND": "two\n"}, {"SECOND": ""}])
    wait_for(lambda: len(node.journal()) == 2)
    wait_for(lambda: read(node, offsets={"0": 8, "1": 4})["ended"])
    answer = read(node, tail=1)
    assert (answer["begins"], answer["missing"]) == ({"0": 4, "1": 0}, [])
    assert "begins" in answer and read(node, offsets={"0": 8, "1": 4})["begins"] == {}
    # Older than a second: nothing of the last 0.5 s.
    for rank in (0, 1):
        os.utime(node.folder() / f"logs/rank_{rank}.log", (1, 1))
    assert read(node, since=0.5)["chunks"] == []
    assert len(read(node, since=10**10)["chunks"]) == 2
    assert refusal(node.order("logs", token=token(1), since=-1)) == "bad_order"
    (node.folder() / "logs" / "rank_1.log").unlink()
    assert read(node)["missing"] == [1]


def test_half_a_letter_is_the_end_of_a_log(node: Node) -> None:
    code = "import os; os.write(1, b'a' * 9 + 'é'.encode()[:1])"
    node.run(1, python_command(code), ranks=1)
    wait_for(node.journal)
    answer = wait_for(lambda: (found := read(node))["ended"] and found)
    assert [(one["data"], one["next"]) for one in answer["chunks"]] == [("a" * 9 + "\ufffd", 10)]


def test_a_log_that_its_rank_cuts_is_read_from_its_begin(node: Node, tmp_path: Path) -> None:
    """As `echo > /dev/stderr` and `tee /dev/stderr` do: the streams of a rank are a file."""
    script = (
        'echo "step 1 of a line that is longer than all that follows"; '
        'while [ ! -e "$GO" ]; do sleep 0.02; done; echo "step 7" > /dev/stderr; exec sleep 1000'
    )
    more = {"env": {"GO": str(tmp_path / "go")}, "log_pattern": "step (?P<step>[0-9]+)"}
    node.run(1, ["sh", "-c", script], ranks=1, **more)
    watch = node.watch()
    watch.read_until("heartbeat", lambda beat: beat["progress"].get("0", {}).get("step") == 1)
    (first,) = expect_done(node.order("logs", token=token(1)))["chunks"]
    (tmp_path / "go").touch()
    watch.read_until("heartbeat", lambda beat: beat["progress"].get("0", {}).get("step") == 7)
    (cut,) = expect_done(node.order("logs", token=token(1), offsets={"0": first["next"]}))["chunks"]
    assert cut["data"] == "[relaunch: this log was cut by the job]\n"
    (rest,) = expect_done(node.order("logs", token=token(1), offsets={"0": cut["next"]}))["chunks"]
    assert rest["data"] == "step 7\n"


def test_logs_are_found_without_the_order_and_else_refused_truly(node: Node) -> None:
    node.run(1, python_command("print('one')"), ranks=2)
    wait_for(lambda: len(node.journal()) == 2)
    assert node.stop() is not None
    never = node.order("logs", token=token(2))
    (node.folder() / "order.json").unlink()
    answer = read(node)
    assert {chunk["rank"]: chunk["data"] for chunk in answer["chunks"]} == {0: "one\n", 1: "one\n"}
    node.folder().rename(node.folder().with_name("moved"))
    removed = node.order("logs", token=token(1))
    assert refusal(never) == refusal(removed) == "no_such_generation"
    assert never is not None and "never prepared" in never["reason"]
    assert removed is not None and "removed" in removed["reason"]


def test_a_read_goes_to_the_ranks_that_have_something(node: Node) -> None:
    code = "import os; print('x' * int(os.environ['LENGTH']))"
    lengths = [0, 99, 79_999, 149_999, 99]
    rank_env = [{"LENGTH": str(one)} for one in lengths]
    node.run(1, python_command(code), ranks=len(lengths), rank_env=rank_env)
    wait_for(lambda: len(node.journal()) == len(lengths))
    offsets = {"0": 1, "1": 0, "2": 0, "3": 0, "4": 100}
    first = read(node, offsets=offsets, max_bytes=200_100)
    assert {one["rank"]: one["next"] for one in first["chunks"]} == {1: 100, 2: 80_000, 3: 120_000}
    assert not first["ended"]
    offsets |= {str(one["rank"]): one["next"] for one in first["chunks"]}
    rest = read(node, offsets=offsets, max_bytes=200_100)
    assert [(one["rank"], one["next"]) for one in rest["chunks"]] == [(3, 150_000)]
    assert rest["ended"]


APART = """
import sys, time
print("printed")
for step in (1, 2):
    print("step", step, file=sys.stderr)
time.sleep(1000 if "wait" in sys.argv else 0)
raise KeyError("late")
"""


def test_stderr_of_a_rank_has_a_separate_log_if_ordered(node: Node) -> None:
    command = [*python_command(APART), "wait"]
    pattern = r"step (?P<step>\d+)"
    pids = node.run(1, command, ranks=1, separate_stderr=True, log_pattern=pattern)
    watch = node.watch()
    beat = watch.read_until("heartbeat", lambda beat: beat["progress"].get("0", {}).get("step"))
    assert beat["progress"]["0"]["step"] == 2, "bars and logging are on stderr"

    def read(stream: str) -> str:
        chunks = expect_done(node.order("logs", token=token(1), stream=stream))["chunks"]
        return "".join(chunk["data"] for chunk in chunks)

    assert (read("stdout"), read("stderr")) == ("printed\n", "step 1\nstep 2\n")
    folder = node.folder() / "logs"
    shutil.rmtree(folder)  # as tmpfiles does; what is written is read on
    wait_for(lambda: len(list(folder.glob("rank_0*.log"))) == 2)
    assert (read("stdout"), read("stderr")) == ("printed\n", "step 1\nstep 2\n")
    assert refusal(node.order("logs", token=token(1), stream="stdin")) == "bad_order"
    os.kill(pids["0"], signal.SIGTERM)
    assert watch.read_observation("RankExited")["log_tail"] == ["printed", "step 1", "step 2"]


def test_a_traceback_on_a_separate_stderr_ends_the_evidence(node: Node) -> None:
    node.run(1, python_command(APART), ranks=1, separate_stderr=True)
    tail = node.watch().read_observation("RankExited")["log_tail"]
    assert (tail[0], tail[-1]) == ("printed", "KeyError: 'late'")


def test_a_compiled_program_prints_at_once_behind_stdbuf(node: Node) -> None:
    """`cut` is written in C, and keeps what it prints in a buffer of stdio."""
    node.prepare(1, [0])
    program = "{ echo step 1; sleep 1000; } | stdbuf -oL cut -c 1-"
    expect_done(node.start(1, ["sh", "-c", program], 1))
    wait_for(lambda: node.log() == "step 1\n", "it is in the buffer of stdio")


def test_s3_10_each_rank_of_each_generation_has_its_log(node: Node) -> None:
    code = "import os; print(os.environ['GENERATION'], os.environ['RANK'])"
    for generation in (1, 2):
        rank_env = [{"GENERATION": str(generation), "RANK": str(rank)} for rank in (0, 1)]
        node.run(generation, python_command(code), rank_env=rank_env)
        wait_for(lambda generation=generation: len(node.journal(generation)) == 2)
    for generation in (1, 2):
        answer = expect_done(node.order("logs", token=token(generation)))
        said = {chunk["rank"]: chunk["data"] for chunk in answer["chunks"]}
        assert said == {rank: f"{generation} {rank}\n" for rank in (0, 1)}
