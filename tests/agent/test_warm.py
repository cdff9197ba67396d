"""Ranks that are forked from a Python which has imported their modules ahead of need."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, is_alive, wait_for

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAUNCH_WARM_DELAY", "0")


def standby(node: Node) -> Json:
    (record,) = node.state.glob("jobs/*/warm/standby.json")
    read: Json = json.loads(record.read_text())
    return read


def await_standby(node: Node, state: str = "ready") -> Json:
    def is_so() -> Json | None:
        for path in node.state.glob("jobs/*/warm/standby.json"):
            record: Json = json.loads(path.read_text())
            if record["state"] in (state, "cold"):
                return record
        return None

    record: Json = wait_for(is_so, "the standby never got so far")
    assert record["state"] == state, record
    return record


def begin(node: Node, generation: int, command: list[str], **more: Any) -> Json:
    prepared = node.prepare(generation, stop_grace=0.1)
    assert prepared is not None
    assert prepared["outcome"] == "done", prepared
    started = node.start(generation, command, **{"warm": ["json", "decimal"], **more})
    assert started is not None
    assert started["outcome"] == "done", started
    return started


SCRIPT = """
import sys, time
print("decimal" in sys.modules, "ran", flush=True)
time.sleep(1000)
"""


def test_the_second_generation_is_forked(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    first = begin(node, 1, command)
    assert "warm" not in first
    waiting = await_standby(node)
    second = begin(node, 2, command)
    assert second["warm"] == {"forked": True, "reason": ""}, (node.state / "x", second)
    wait_for(lambda: "True ran" in node.log(0, 2) and "True ran" in node.log(1, 2))
    assert "False ran" in node.log(0, 1)
    assert not any(map(is_alive, first["pids"].values()))
    assert node.pid("shim", 2) == waiting["pid"]
    # what a search by token finds
    for rank, pid in second["pids"].items():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert any(text.startswith(b"RELAUNCH_TOKEN=") for text in environment), rank
    stopped = node.stop(2)
    assert stopped is not None and stopped["outcome"] == "done"
    assert not any(map(is_alive, second["pids"].values()))


LOOK = """
import gc, json, os, random, resource, signal, sys, threading, ctypes
main = sys.modules["__main__"]
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
own = os.environ
seen = {
    "environ": list(own.items()),
    "proc environ": open("/proc/self/environ").read().rstrip(chr(0)).split(chr(0)),
    "getenv": ctypes.CDLL(None).getenv is not None and [
        name for name, value in own.items() if os.environb.get(name.encode()) != value.encode()],
    "cmdline": open("/proc/self/cmdline").read().split(chr(0)),
    "comm": open("/proc/self/comm").read(),
    "exe": os.readlink("/proc/self/exe"),
    "cwd": os.getcwd(), "argv": sys.argv, "orig_argv": getattr(sys, "orig_argv", None),
    "executable": sys.executable, "prefix": [sys.prefix, sys.exec_prefix, sys.base_prefix],
    "flags": str(sys.flags), "path": sys.path, "warnoptions": sys.warnoptions,
    "xoptions": sorted(sys._xoptions.items()), "bytecode": sys.dont_write_bytecode,
    "main": {name: str(value)[:60].split(" at 0x")[0] for name, value in vars(main).items()
             if name.startswith("__")},
    "site": "sitecustomize" in sys.modules, "user": "usercustomize" in sys.modules,
    "stdio": [[stream.encoding, stream.errors, stream.isatty(), stream.line_buffering,
               stream.fileno()] for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "fds": sorted(set(os.listdir("/proc/self/fd")) - {"3"}),
    "targets": [os.readlink(f"/proc/self/fd/{n}").rpartition("/")[2] for n in range(3)],
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource)
               if name.startswith("RLIMIT_")},
    "umask": os.umask(0o22), "death": death.value,
    "signals": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")],
    "handlers": [str(signal.getsignal(n)).split(" at 0x")[0] for n in range(1, 32)],
    "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "parent": open(f"/proc/{os.getppid()}/comm").read(),
    "threads": [threading.current_thread() is threading.main_thread(), threading.active_count()],
    "gc": [gc.isenabled(), gc.get_threshold()], "meta": [str(one)[:40] for one in sys.meta_path[-3:]],
    "frames": __import__("traceback").extract_stack().format()[:-1],
    "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)),
    "id": threading.get_native_id() == os.getpid(), "timers": signal.getitimer(signal.ITIMER_REAL),
    "caught": None,
}
own = {"random": random.random(), "hash": hash("x"), "ahead": "decimal" in sys.modules}
with open(os.environ["RELAUNCH_PROGRESS_FILE"] + ".seen", "w") as file:
    json.dump([seen, own], file)
print("looked", flush=True)
import time
time.sleep(1000)
"""
GENERATIONS = ("RELAUNCH_TOKEN", "RELAUNCH_PROGRESS_FILE", "TORCHELASTIC_ERROR_FILE")


def read_seen(node: Node, generation: int, rank: int) -> tuple[Json, Json]:
    path = node.folder(generation) / "progress" / f"rank_{rank}.seen"
    wait_for(lambda: "looked" in node.log(rank, generation), node.log(rank, generation))
    text = path.read_text().replace(f"/1-{generation}/", "/1-G/")
    seen, own = json.loads(text)
    token = [f"RELAUNCH_TOKEN={value}" for name, value in seen["environ"] if name == GENERATIONS[0]]
    assert token[0] in seen["proc environ"]
    for key in ("environ", "proc environ"):
        seen[key] = [
            text for text in seen[key] if not str(text).startswith(("RELAUNCH_TOKEN", "['RELAUNCH_TOKEN"))
        ]
    return seen, own


@pytest.mark.parametrize(
    "how",
    [
        ["train.py", "--lr", "0.1"],
        ["-u", "-X", "dev", "-W", "ignore", "folder/train.py"],
        ["-OB", "-m", "package.train", "x"],
        ["-c", LOOK, "y"],
    ],
    ids=["script", "options", "module", "code"],
)
def test_a_forked_rank_sees_what_a_cold_one_sees(
    node: Node, tmp_path: Path, how: list[str]
) -> None:
    for place in ("train.py", "folder/train.py", "package/train.py"):
        path = tmp_path / "job" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LOOK)
    command = [sys.executable, *how]
    more: Json = {
        "workdir": str(tmp_path / "job"),
        "env": {"A": "1", "PYTHONPATH": str(tmp_path), "EMPTY": ""},
        "rank_env": [{"RANK": "0", "LONG": "l" * 9000}, {"RANK": "1"}],
        "umask": "027",
        "limits": {"nofile": 512},
    }
    begin(node, 1, command, **more)
    cold = [read_seen(node, 1, rank) for rank in (0, 1)]
    await_standby(node)
    second = begin(node, 2, command, **more)
    assert second["warm"] == {"forked": True, "reason": ""}
    warm = [read_seen(node, 2, rank) for rank in (0, 1)]
    for (before, was), (after, own) in zip(cold, warm, strict=True):
        differing = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
        assert differing == {}
        assert own["ahead"] and not was["ahead"]
    assert warm[0][1]["random"] != warm[1][1]["random"]
