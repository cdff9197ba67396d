"""Watches: what a node reports, when, to how many at once, and where it resumes after a break."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from real_node import PATIENCE, Node, Stream, expect_done, is_alive, python_command, token, wait_for

REPORT = (
    "import os,sys,time\n"
    "path = os.environ['RELAUNCH_PROGRESS_FILE']\n"
    "def report(text):\n"
    "    open(path + '.new', 'w').write(text); os.replace(path + '.new', path)\n"
)


def test_a_generation_that_was_never_here(node: Node) -> None:
    answer = node.order("watch", token=token(1), after_seq=0, heartbeat=1.0)
    assert answer is not None
    assert answer["why"] == "no_such_generation"
    answer = node.order("logs", token=token(1))
    assert answer is not None
    assert answer["why"] == "no_such_generation"


def test_states_from_prepared_to_gone(node: Node) -> None:
    node.prepare(1)
    watch = node.watch()
    hello = watch.read_until("hello")
    assert (hello["state"], hello["ranks"], hello["token"]) == ("prepared", [0, 1], token(1))
    assert watch.read_until("heartbeat")["lease_left"] is None
    node.start(1)
    assert (
        25
        < watch.read_until("heartbeat", lambda beat: beat["lease_left"] is not None)["lease_left"]
        <= 30
    )
    assert node.watch().read_until("hello")["state"] == "running"
    node.stop()
    lines = watch.read_rest()
    kinds = [line["observation"]["kind"] for line in lines if "observation" in line]
    assert kinds == ["Stopped", "RankExited", "RankExited"]
    assert all(
        line["observation"]["stopped"]
        for line in lines
        if line.get("observation", {}).get("kind") == "RankExited"
    )
    assert "end" in lines[-1]
    assert node.watch().read_until("hello")["state"] == "gone"


def test_s3_1_an_agent_starts_ranks_and_watches_each_of_them(node: Node) -> None:
    pids = node.run(1, ranks=4, rank_env=[{"RANK": str(rank)} for rank in range(4)])
    assert [*pids] == ["0", "1", "2", "3"] and len(set(pids.values())) == 4
    for rank, pid in pids.items():
        assert f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    watch = node.watch()
    assert watch.read_until("heartbeat")["alive"] == [0, 1, 2, 3]
    os.kill(pids["2"], signal.SIGKILL)
    ends = [watch.read_observation("RankExited") for _ in pids]
    assert [(end["rank"], end["signal"]) for end in ends if not end["stopped"]] == [(2, 9)]
    assert sorted(end["rank"] for end in ends if end["stopped"]) == [0, 1, 3]


def test_s3_4_exits_are_reported_by_global_rank(node: Node) -> None:
    node.prepare(1, ranks=[5, 2])
    started = expect_done(node.start(1, rank_env=[{"RANK": "5"}, {"RANK": "2"}]))
    assert b"RANK=2" in Path(f"/proc/{started['pids']['2']}/environ").read_bytes().split(b"\0")
    watch = node.watch()
    os.kill(started["pids"]["2"], signal.SIGKILL)
    ends = [watch.read_observation("RankExited") for _ in range(2)]
    assert [(end["rank"], end["local_rank"], end["stopped"]) for end in ends] == [
        (2, 1, False),
        (5, 0, True),
    ]


def test_s2_6_each_line_of_a_watch_names_its_sender(node: Node) -> None:
    node.run(1, ["sh", "-c", "read stop"])
    record = json.loads((node.folder() / "shim.json").read_text())
    sender = {"token": token(1), "node": "n1", "shim": record}
    watch = node.watch()
    watch.read_until("heartbeat")
    node.stop()
    watch.read_rest()
    # The second comes from the disk: the shim and its supervisor are gone.
    for lines in (watch.seen, node.watch().read_rest()):
        assert {next(iter(line)) for line in lines} >= {"hello", "observation", "end"}
        assert [line["sender"] for line in lines] == [sender] * len(lines)
    refused = node.order("watch", token=token(7), after_seq=0, heartbeat=1.0)
    assert refused is not None
    assert refused["sender"] == {"token": token(7), "node": None, "shim": None}


def test_a_record_of_ports_that_cannot_be_read_ends_no_watch(node: Node) -> None:
    node.prepare(1)
    (node.state / "links.json").mkdir()
    assert node.watch().read_until("hello")["state"] == "prepared"


def numbers(watch: Stream) -> list[int]:
    return [line["observation"]["seq"] for line in watch.seen if "observation" in line]


def test_a_watcher_goes_on_after_what_it_acknowledged(node: Node) -> None:
    node.run(1, ["sh", "-c", "exit 1"], ranks=3, rank_env=[{}, {}, {}])
    wait_for(lambda: len(node.journal()) == 3)
    for after in range(4):
        watch = node.watch(after_seq=after)
        while len(numbers(watch)) < 3 - after:
            watch.read_until("observation")
        watch.read_until("heartbeat")
        assert numbers(watch) == list(range(after + 1, 4))
        watch.close()
    node.stop()
    assert [
        line["observation"]["seq"]
        for line in node.watch(after_seq=2).read_rest()
        if "observation" in line
    ] == [3]


def test_two_watchers_see_the_same(node: Node) -> None:
    pids = node.run(1)
    watches = [node.watch(), node.watch()]
    for watch in watches:
        watch.read_until("heartbeat")
    os.kill(pids["0"], signal.SIGKILL)
    assert watches[0].read_observation("RankExited") == watches[1].read_observation("RankExited")


def test_a_watcher_that_does_not_read_delays_no_other(node: Node) -> None:
    tail = """import os, sys, time
print('x' * 200, flush=True)
open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{"message":"' + 'y' * 200000 + '"}')
time.sleep(float(sys.argv[1]))
sys.exit(1)"""
    frozen = subprocess.Popen(
        [sys.executable, str(node.agent), "watch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=node.environment,
    )
    assert frozen.stdin is not None
    assert frozen.stdout is not None
    node.run(
        1,
        ["sh", "-c", 'exec "$@" $S', "sh", *python_command(tail)],
        ranks=4,
        rank_env=[{"S": "1"}] * 4,
    )
    order = {"protocol": 1, "token": token(1), "after_seq": 0, "heartbeat": 0.2}
    frozen.stdin.write(json.dumps(order).encode() + b"\n")
    frozen.stdin.flush()
    assert b"hello" in frozen.stdout.readline()
    watch = node.watch()
    assert sorted(watch.read_observation("RankExited")["rank"] for _ in range(4)) == [0, 1, 2, 3]
    supervisor = node.pid("supervisor")
    for _ in range(8):
        watch.read_until("heartbeat")
    assert node.pid("supervisor") == supervisor
    assert is_alive(supervisor)
    found = b"".join(frozen.stdout.readline() for _ in range(12))
    assert found.count(b'"seq"') == 4  # it reads again: nothing was lost
    frozen.kill()
    frozen.communicate()


def test_progress_by_file(node: Node) -> None:
    code = (
        REPORT
        + """report('7')
time.sleep(.3)
report('{"step": 8, "loss": 3.5, "bad": NaN, "phase": "eval", "checkpoint": 6}')
time.sleep(1000)"""
    )
    node.run(1, python_command(code), ranks=1)
    watch = node.watch(heartbeat=30.0)
    beat = watch.read_until(
        "heartbeat", lambda beat: beat["progress"].get("0", {}).get("step") == 8
    )
    progress = beat["progress"]["0"]
    assert progress["values"] == {"loss": 3.5, "bad": "NaN"}
    assert (progress["phase"], progress["checkpoint"]) == ("eval", 6)
    assert 0 <= progress["age"] < 5


def test_unreadable_progress_is_not_zero_nor_silence_a_reading(node: Node) -> None:
    node.run(
        1,
        python_command(
            REPORT + "report(os.environ['SAY']) if 'SAY' in os.environ else 0; time.sleep(1000)"
        ),
        rank_env=[{"SAY": "step ten"}, {}],
    )
    beat = node.watch().read_until("heartbeat", lambda beat: beat["progress"])
    assert "step ten" in beat["progress"]["0"]["unreadable"]
    assert "1" not in beat["progress"]


def test_progress_by_a_pattern_over_the_log(node: Node) -> None:
    code = """import time
print('step 1 loss 9', flush=True)
time.sleep(.2)
print('noise\\nstep 12 loss 2.5', flush=True)
time.sleep(1000)"""
    node.run(1, python_command(code), ranks=1, log_pattern=r"step (?P<step>\d+) loss (?P<loss>\S+)")
    watch = node.watch(heartbeat=30.0)
    beat = watch.read_until(
        "heartbeat", lambda beat: beat["progress"].get("0", {}).get("step") == 12
    )
    assert beat["progress"]["0"]["values"] == {"loss": 2.5}


def test_the_last_steps_are_reported_before_the_exit(node: Node) -> None:
    go = node.state / "go"
    code = f"""import os, time
while not os.path.exists({str(go)!r}): time.sleep(.01)
print('step 12')"""
    node.run(1, python_command(code), ranks=1, log_pattern=r"step (?P<step>\d+)")
    watch = node.watch(heartbeat=1000.0)
    assert watch.read_until("heartbeat")["progress"] == {}
    go.touch()
    assert watch.read_until("heartbeat")["progress"]["0"]["step"] == 12
    assert not [line for line in watch.seen if "observation" in line]
    watch.read_observation("RankExited")


def test_a_stop_answers_with_the_last_step_of_all_ranks(node: Node) -> None:
    code = """import os, sys, time
for step in range(1, 12 + int(os.environ['RANK'])): print('step', step)
print('ready', flush=True)
time.sleep(1000)"""
    ranks, pattern = [{"RANK": str(rank)} for rank in range(2)], r"step (?P<step>\d+)"
    node.run(1, python_command(code), rank_env=ranks, log_pattern=pattern)
    for rank in range(2):
        wait_for(lambda rank=rank: "ready" in node.log(rank))  # type: ignore[misc]
    assert node.stop(log_pattern=pattern)["step"] == 11
    assert node.stop(log_pattern=pattern)["step"] == 11
    assert node.stop()["step"] is None
    [folder] = node.state.glob("jobs/*/*/progress")
    (folder / "rank_0").write_text("7")
    assert node.stop()["step"] == 7
    assert node.stop(generation=2, log_pattern=pattern)["step"] is None


def test_a_preparation_answers_with_the_last_step_before(node: Node) -> None:
    pattern = r"step (?P<step>\d+)"
    code = "import time; print('step', 12, flush=True); time.sleep(1000)"
    assert node.prepare(1, ranks=[0], log_pattern=pattern)["step"] is None
    node.start(1, python_command(code), ranks=1, log_pattern=pattern)
    wait_for(lambda: "12" in node.log())
    prepared = node.prepare(2, ranks=[0], log_pattern=pattern)
    assert prepared["step"] == 12
    assert node.prepare(2, ranks=[0], log_pattern=pattern) == prepared


def test_the_last_step_outlasts_launches_that_were_not_completed(node: Node) -> None:
    pattern = r"step (?P<step>\d+)"
    code = "import time; print('step', 12, flush=True); time.sleep(1000)"
    node.run(1, python_command(code), ranks=1, log_pattern=pattern)
    wait_for(lambda: "12" in node.log())
    # Another node refuses generation 2. Generation 3 is started, but on this node only.
    node.prepare(2, ranks=[0], log_pattern=pattern)
    prepared = expect_done(node.prepare(3, ranks=[0], log_pattern=pattern))
    assert (prepared["step"], prepared["step_generation"]) == (12, 1)
    node.start(3, ranks=1, log_pattern=pattern)
    prepared = expect_done(node.prepare(4, ranks=[0], log_pattern=pattern))
    assert (prepared["step"], prepared["step_generation"]) == (12, 1)
    again = expect_done(
        node.prepare(1, ranks=[0], token=token(1, submission=2), log_pattern=pattern)
    )
    assert (again["step"], again["step_generation"]) == (None, None)


def test_a_pattern_that_never_matches_comes_with_what_is_printed(node: Node) -> None:
    code = """import os, time
if os.environ['RANK'] == '1': print('iter 10: loss 2.5', flush=True)
time.sleep(1000)"""
    ranks = [{"RANK": "0"}, {"RANK": "1"}]
    node.run(1, python_command(code), rank_env=ranks, log_pattern=r"step (?P<step>\d+)")
    printed = node.watch(heartbeat=0.1).read_until(
        "heartbeat", lambda beat: beat.get("unmatched", {}).get("lines")
    )
    assert printed["unmatched"] == {"rank": 1, "lines": ["iter 10: loss 2.5"]}
    [folder] = node.state.glob("jobs/*/*/progress")
    (folder / "rank_1").write_text("7")
    node.watch().read_until("heartbeat", lambda beat: "unmatched" not in beat)


def test_an_exit_carries_its_error_and_the_end_of_its_log(node: Node) -> None:
    error = {
        "message": {
            "message": "ValueError: no",
            "extraInfo": {"py_callstack": "…", "timestamp": "1785571200"},
        }
    }
    code = (
        "import os,sys\n"
        "for n in range(100): print('line', n)\n"
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(os.environ['E'])\n"
        "sys.exit(1)"
    )
    node.run(1, python_command(code), rank_env=[{"E": json.dumps(error)}, {"E": "{torn"}])
    watch = node.watch()
    seen = {
        found["rank"]: found
        for found in (watch.read_observation("RankExited") for _ in range(2))
        if not found["stopped"]
    }
    if 0 in seen:
        assert seen[0]["error"] == error
        assert seen[0]["log_tail"] == [f"line {number}" for number in range(100)]
    if 1 in seen:
        assert "not JSON" in seen[1]["error"]["unreadable"]
    assert seen


def test_list_logs_and_stacks(node: Node) -> None:
    pids = node.run(
        1, ["sh", "-c", 'printf "one\\ntwo\\nthree \\303\\244\\377\\n"; exec sleep 1000'], ranks=1
    )
    wait_for(lambda: "three" in node.log())
    chunk = {"rank": 0, "offset": 0, "next": 18, "data": "one\ntwo\nthree ä\ufffd\n"}
    read = node.order("logs", token=token(1), offsets=None, max_bytes=65536, wait=0.0, tail=None)
    assert read == {
        "outcome": "done",
        "chunks": [{**chunk, "next": len(b"one\ntwo\nthree \xc3\xa4\xff\n")}],
        "ended": False,
        "begins": {"0": 0},
        "sizes": {"0": 18},
        "missing": [],
    }
    last = node.order("logs", token=token(1), offsets=None, max_bytes=65536, wait=0.0, tail=1)
    assert last is not None
    assert last["chunks"][0]["data"].startswith("three")
    first = node.order("logs", token=token(1), offsets={"0": 0}, max_bytes=15, wait=0.0, tail=None)
    assert first is not None
    assert first["chunks"][0]["next"] == 14
    waiting = node.begin(
        "logs", token=token(1), offsets={"0": 18}, max_bytes=65536, wait=100 * PATIENCE, tail=None
    )
    stacks = node.order("stacks", token=token(1), rank=None)
    assert stacks is not None
    assert stacks["stacks"][0]["pid"] == pids["0"]
    assert stacks["stacks"][0]["processes"][0]["state"] == "S"
    listed = node.order("list")
    assert listed is not None
    job = listed["jobs"][0]
    assert (job["namespace"], job["job"], job["prepared"], job["stopped"]) == (
        "default",
        "j",
        [1, 1],
        None,
    )
    ranks = [{"rank": 0, "pid": pids["0"], "alive": True}]
    assert job["generations"] == [
        {"submission": 1, "generation": 1, "state": "running", "ranks": ranks}
    ]
    node.stop()
    ended = waiting.read_rest()[-1]
    assert ended["ended"] is True
    assert ended["chunks"] == []
    # The shim ends a moment after its ranks.
    wait_for(lambda: node.order("list")["jobs"][0]["generations"][0]["state"] == "gone")  # type: ignore[index]


def test_logs_are_followed_with_the_offsets_of_a_whole_job(node: Node) -> None:
    node.run(1, ["sh", "-c", 'printf "one\\ntwo\\nthree\\n"; exec sleep 1000'])
    wait_for(lambda: "three" in node.log(0) and "three" in node.log(1))

    def read(offsets: dict[str, Any], tail: int | None) -> Any:
        answer = node.order(
            "logs", token=token(1), offsets=offsets, max_bytes=65536, wait=0.0, tail=tail
        )
        assert answer is not None
        return (
            {chunk["rank"]: chunk["data"] for chunk in answer["chunks"]}
            if answer["outcome"] == "done"
            else answer["why"]
        )

    assert read({"7": 99, "0": 4}, None) == {0: "two\nthree\n", 1: "one\ntwo\nthree\n"}
    assert read({"7": 99, "0": 4}, 1) == {0: "two\nthree\n", 1: "three\n"}
    assert read({"7": 99}, 2) == {0: "two\nthree\n", 1: "two\nthree\n"}
    assert read({"7": -1}, None) == "bad_order"
    assert read({"x": 1}, None) == "bad_order"
