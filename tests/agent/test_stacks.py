"""The order `stacks`: what the processes of real ranks do, and where their Python code is."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, expect_done, python_command, refusal, token, wait_for

from relaunch.agent import py_spy, stacks
from relaunch.backends.py_spy import find_program

PROGRAM = find_program()
ROOT = Path(__file__).parents[2]

TRAIN = """
import os, threading, time
def load():
    time.sleep(1000)
def train():
    print("ready", flush=True)
    time.sleep(1000)
if os.fork() == 0:
    load()
threading.Thread(target=load, name="loader", daemon=True).start()
train()
"""
ALLOWING = """
import os, sys, time
sys.path.insert(0, {root!r})
from relaunch import callbacks
callbacks.allow_stacks()
def load():
    time.sleep(1000)
def train():
    print("ready", flush=True)
    time.sleep(1000)
if os.fork() == 0:
    load()
train()
"""
BLOCKED = """
import os
def save():
    print("ready", flush=True)
    # The caller of vfork cannot be interrupted until its child runs its program, and the child
    # waits for a writer of this FIFO.
    action = (os.POSIX_SPAWN_OPEN, 0, {fifo!r}, os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {{}}, file_actions=[action])
save()
"""


def ask(node: Node, **more: Any) -> list[dict[str, Any]]:
    answer = expect_done(node.order("stacks", **{"token": token(1), "rank": None, **more}))
    rows: list[dict[str, Any]] = answer["stacks"]
    return rows


def run(node: Node, code: str, ranks: int = 1, **more: Any) -> list[int]:
    pids = node.run(1, python_command(code), ranks=ranks, **more)
    wait_for(lambda: all("ready" in node.log(rank) for rank in range(ranks)))
    return [pids[str(rank)] for rank in range(ranks)]


def functions(process: dict[str, Any]) -> list[list[str]]:
    return [[function for function, _, _ in one["frames"]] for one in process["threads"]]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROGRAM is not None, "py-spy is installed with relaunch"
    monkeypatch.setenv(py_spy.PROGRAM_VARIABLE, str(PROGRAM))


@pytest.mark.usefixtures("real")
def test_each_process_of_a_rank_is_read_with_its_threads(node: Node) -> None:
    pids = run(node, TRAIN, 2, rank_env=[{"RANK": "0"}, {"RANK": "1"}])
    rows = ask(node)
    assert [(row["rank"], row["pid"]) for row in rows] == [(0, pids[0]), (1, pids[1])]
    for row in rows:
        own, worker = row["processes"]
        assert (own["pid"], own["rank"], own["state"]) == (row["pid"], row["rank"], "S")
        assert functions(own)[0] == ["train", "<module>"]
        assert [one["name"] for one in own["threads"]] == ["MainThread", "loader"]
        assert own["command"].startswith(f"{sys.executable} -S -c")
        assert own["read_bytes"] > 0 and own["wchan"]
        assert (worker["parent"], worker["source"]) == (own["pid"], "py-spy")
        assert functions(worker) == [["load", "<module>"]]
    (alone,) = ask(node, rank=1, frames=False)
    assert [one["threads"] for one in alone["processes"]] == [[], []]
    assert {(one["source"], one["unreadable"]) for one in alone["processes"]} == {(None, None)}


@pytest.mark.usefixtures("real")
def test_a_stopped_rank_is_read_and_stays_stopped(node: Node) -> None:
    (pid,) = run(node, TRAIN)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state_of(pid) == "T")
    own = ask(node)[0]["processes"][0]
    assert (own["state"], functions(own)[0]) == ("T", ["train", "<module>"])
    assert state_of(pid) == "T", "a tracer would have let it run on"


@pytest.mark.usefixtures("real")
def test_a_rank_blocked_in_the_kernel_is_read(node: Node, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (pid,) = run(node, BLOCKED.format(fifo=str(fifo)))
    children = Path(f"/proc/{pid}/task/{pid}/children")  # D alone may be a wait for the disk
    wait_for(lambda: state_of(pid) == "D" and children.read_text())
    own = ask(node)[0]["processes"][0]
    assert (own["state"], own["blocked"]) == ("D", 1)
    assert functions(own)[0] == ["save", "<module>"]
    if os.geteuid() == 0:
        assert "kernel_clone" in own["kernel"]


def make_py_spy(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_py_spy_that_hangs_delays_no_other_rank(
    make_node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = {"name": "train", "filename": "train.py", "line": 3}
    found = json.dumps([{"os_thread_id": 7, "thread_name": "MainThread", "frames": [frame]}])
    stuck = tmp_path / "stuck"
    script = f"grep -qx \"$5\" {stuck} && exec sleep 1000; echo '{found}'"
    monkeypatch.setenv(py_spy.PROGRAM_VARIABLE, str(make_py_spy(tmp_path / "py-spy", script)))
    node = make_node()
    pids = run(node, "print('ready', flush=True); import time; time.sleep(1000)", 8)
    stuck.write_text("".join(f"{pid}\n" for pid in pids[:5]))
    for within in (6.0, 20.0, 60.0):  # a busy machine starts few programs in 6 s
        rows = ask(node, within=within)
        if all(row["processes"][0]["threads"] for row in rows[5:]):
            break
    assert [functions(row["processes"][0]) for row in rows[5:]] == [[["train"]]] * 3
    assert all(row["processes"][0]["unreadable"] for row in rows[:5])
    assert not [pid for pid in node.list_leftovers() if read_command(pid).startswith("sleep")]


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_rank_says_why_it_has_no_python_stack(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    node.run(1, ["/bin/sleep", "1000"], ranks=1)
    (row,) = ask(node)
    assert row["processes"][0]["unreadable"] == "it is not a Python program"
    node.stop(1)
    node.run(2, python_command("import time; time.sleep(1000)"), ranks=1)
    (row,) = ask(node, token=token(2), py_spy={"missing": "it is too large"})
    assert "it is too large" in row["processes"][0]["unreadable"]
    node.stop(2)
    (row,) = ask(node, token=token(2))
    assert row["unreadable"] == "the rank does not run"
    assert refusal(node.order("stacks", token=token(2), rank=5)) == "bad_order"
    assert refusal(node.order("stacks", token=token(2), rank=0, within=0.1)) == "bad_order"


def test_a_rank_that_allows_it_writes_its_stacks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(py_spy.PROGRAM_VARIABLE, "/nowhere/py-spy")
    (pid,) = run(node, ALLOWING.format(root=str(ROOT)))
    wait_for(lambda: len(list(node.folder().glob("progress/*.stacks.*"))) == 2)
    own, worker = ask(node)[0]["processes"]
    assert (own["source"], own["threads"][0]["tid"]) == ("faulthandler", pid)
    assert functions(own) == [["train", "<module>"]]
    assert functions(worker) == [["load", "<module>"]]
    again = ask(node)[0]["processes"][0]
    assert functions(again) == [["train", "<module>"]]
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state_of(pid) == "T")
    assert "state T" in ask(node)[0]["processes"][0]["unreadable"]


def test_a_process_that_allows_nothing_gets_no_signal(node: Node, tmp_path: Path) -> None:
    (pid,) = run(node, "print('ready', flush=True); import time; time.sleep(1000)")
    path = tmp_path / "stacks"
    for head in ("", "x", "[]", '{"signal": 9}', json.dumps({"signal": 60, "started": 1})):
        path.write_text(head + "\n")
        assert isinstance(py_spy._find_permission(pid, path), str)
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    path.write_text(json.dumps({"signal": 60, "started": started}) + "\n")
    assert isinstance(py_spy._find_permission(pid, path), str), "it has no handler for it"


def send(node: Node, program: bytes, **more: Any) -> Any:
    order = {
        "sha256": hashlib.sha256(program).hexdigest(),
        "size": len(program),
        "machine": platform.machine(),
    }
    return node.order("py-spy", **{**order, **more})


def pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def test_py_spy_is_received_in_parts_and_used(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    data = b"#!/bin/sh\necho '[{\"name\": 1}]' >&2; exit 3\n"
    assert expect_done(send(node, data))["complete"] is False
    first, rest = pack(data[:9]), pack(data[9:])
    assert expect_done(send(node, data, offset=0, data=first))["complete"] is False
    assert expect_done(send(node, data, offset=9, data=rest))["complete"] is True
    assert expect_done(send(node, data))["complete"] is True
    run(node, "print('ready', flush=True); import time; time.sleep(1000)")
    sha256 = hashlib.sha256(data).hexdigest()
    (row,) = ask(node, py_spy={"sha256": sha256})
    assert row["processes"][0]["unreadable"].startswith('py-spy: [{"name": 1}]')
    assert refusal(send(node, data, machine="vax")) == "other_machine"
    other = "0" * 64
    assert refusal(send(node, data, sha256=other, offset=0, data=pack(data))) == "broken"
    for wrong in (
        {"sha256": "../x"},
        {"size": 0},
        {"sha256": other, "offset": 1, "data": pack(data)},
        {"sha256": other, "offset": 0, "data": "!"},
    ):
        assert refusal(send(node, data, **wrong)) == "bad_order"
    assert [path.name for path in (node.state / "tools").iterdir()] == [f"py-spy-{sha256[:16]}"]


def make_row(rank: int) -> dict[str, Any]:
    threads = [{"frames": [["f" * 20, "x" * 80, 7]] * 64} for _ in range(4)]
    return {"rank": rank, "processes": json.loads(json.dumps([{"threads": threads}] * 3))}


@pytest.mark.parametrize(
    ("limit", "processes", "threads", "frames"),
    [
        (10**6, [4, 4, 4], 4, 64),
        (100_000, [4, 1, 1], 4, 64),
        (30_000, [1, 1, 1], 1, 64),
        (14_000, [1, 1, 1], 1, 16),
        (7_000, [1], 1, 16),
    ],
)
def test_a_large_answer_is_shortened_from_the_outside(
    limit: int, processes: list[int], threads: int, frames: int
) -> None:
    rows = [make_row(0), make_row(1), {"rank": 2, "unreadable": "the rank does not run"}]
    stacks.shorten(rows, limit)
    assert len(json.dumps(rows)) < limit * 1.1
    assert [len(process["threads"]) for process in rows[0]["processes"]] == processes
    own = rows[0]["processes"][0]["threads"]
    assert (len(own), len(own[0]["frames"])) == (threads, frames)
    assert list(rows[2]) == ["rank", "unreadable"]


DUMP = """Thread 0x00007f1 [loader] (most recent call first):
  File "/a b/x.py", line 3 in load

Current thread 0x00007f2 (most recent call first):
  File "/x.py", line ??? in step
  File "/x.py", line 9 in <module>
Thread 0x00007f3 (most recent call first):
  <no Python frame>
"""


def test_what_faulthandler_wrote_is_understood() -> None:
    main, loader, other = py_spy.parse_dump(7, DUMP)
    assert (main["tid"], main["name"]) == (7, "MainThread")
    assert main["frames"] == [["step", "/x.py", 0], ["<module>", "/x.py", 9]]
    assert (loader["name"], loader["frames"]) == ("loader", [["load", "/a b/x.py", 3]])
    assert other["frames"] == []
    assert py_spy.parse_dump(7, "nothing") == []
