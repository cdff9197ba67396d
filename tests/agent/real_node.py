"""A node for tests: the real zipapp as real processes in a separate state folder.

Its times are scaled down.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relaunch.agent.failpoints import is_cut
from relaunch.agent.ranks import cgroup
from relaunch.agent.session import BOUND
from relaunch.agent.state import read_boot_id, read_json

Json = dict[str, Any]
PATIENCE = 60.0
"""Seconds before a test says that something does not happen: the machine may be busy."""
TIMES: Json = {
    "lease": 30.0,
    "fence_after": 1.0,
    "stop_grace": 1.0,
    "stuck_after": 3.0,
    "valid_for": 30.0,
    "heartbeat": 0.2,
}


def wait_for(
    condition: Callable[[], Any], why: str = "it never happened", timeout: float = PATIENCE
) -> Any:
    deadline = time.monotonic() + timeout
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def python_command(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def token(generation: int, submission: int = 1, job: str = "j") -> Json:
    return {"namespace": "default", "job": job, "submission": submission, "generation": generation}


def refusal(answer: Any) -> str:
    assert answer is not None
    assert answer["outcome"] == "refused", answer
    return str(answer["why"])


def expect_done(answer: Any) -> dict[str, Any]:
    assert answer is not None
    assert answer["outcome"] == "done", answer
    return dict(answer)


def send_to_shim(node: Node, value: Json) -> None:
    """Give an order to the shim itself, as a command does, and wait only until it was received."""
    with node.connect_to_shim() as caller:
        caller.sendall(json.dumps(value).encode() + b"\n")
        assert caller.recv(4096)


class Stream:
    """The lines of one command, as they come."""

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        self.number = number
        self.lines: queue.Queue[Json | None] = queue.Queue()
        self.seen: list[Json] = []

    def read_next(self, timeout: float = PATIENCE) -> Json | None:
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            pytest.fail(f"no line came for {timeout:.0f} s: {self.node.describe()}")
        if line is not None:
            self.seen.append(line)
        return line

    def read_until(self, key: str, matches: Callable[[Any], bool] = lambda value: True) -> Any:
        """Read on to the first line of this kind, and return what it holds."""
        deadline = time.monotonic() + PATIENCE
        while True:
            line = self.read_next(max(0.01, deadline - time.monotonic()))
            assert line is not None, f"it ended before a {key} came: {self.seen}"
            if key in line and matches(line[key]):
                return line[key]

    def read_observation(self, kind: str) -> Json:
        found: Json = self.read_until(
            "observation", lambda observation: observation["kind"] == kind
        )
        return found

    def read_rest(self) -> list[Json]:
        lines = []
        while (line := self.read_next()) is not None:
            lines.append(line)
        return lines

    def renew(self, stamp: float | None = None) -> None:
        self.node.send(
            {
                "id": self.number,
                "send": {"renew": {"stamp": boottime() if stamp is None else stamp}},
            }
        )

    def close(self) -> None:
        self.node.send({"id": self.number, "close": True})
        self.read_rest()


class Node:
    def __init__(self, state: Path, agent: Path, interpreter: str = sys.executable) -> None:
        self.state = state
        self.agent = agent
        self.interpreter = interpreter
        self.streams: dict[int, Stream] = {}
        self.stamps: dict[tuple[int, int], float] = {}
        """What the last preparation of each generation answered."""
        self.hello: queue.Queue[Json] = queue.Queue()
        self.key: str | None = None
        """What orders of this session must name."""
        self.greeted = threading.Event()
        self.number = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        # No test reboots the machine that it runs on, whatever it orders.
        return {
            "RELAUNCH_REBOOT_COMMAND": '["false"]',
            **os.environ,
            "RELAUNCH_AGENT_STATE": str(self.state),
        }

    def session(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            self.greeted.clear()
            self.process = subprocess.Popen(
                [self.interpreter, "-S", str(self.agent), "session"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self.environment,
            )
            self.reader = threading.Thread(target=self._read, args=[self.process], daemon=True)
            self.reader.start()
        return self.process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            line = json.loads(text)
            if "session" in line:
                self.key = line["session"]["key"]
                self.greeted.set()
                self.hello.put(line["session"])
            elif line["id"] in self.streams:
                self.streams[line["id"]].lines.put(None if "exit" in line else line["line"])
        process.stdout.close()
        for stream in list(self.streams.values()):
            stream.lines.put(None)

    def end_session(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.await_session_end()

    def send(self, line: Json) -> None:
        process = self.session()
        assert process.stdin is not None
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()

    def begin(self, command: str, /, **order: Any) -> Stream:
        self.number += 1
        stream = self.streams[self.number] = Stream(self, self.number)
        given: Json = {"protocol": 1, **order}
        if command in BOUND and "session" not in given:
            given["session"] = self._read_key()
        self.send({"id": self.number, "command": command, "order": given})
        return stream

    def _read_key(self) -> str | None:
        """Wait for the session's first line, unless it was cut off before that came."""
        process = self.session()
        wait_for(
            lambda: (
                self.greeted.wait(0.01)
                or process.poll() is not None
                or is_cut(self.state, "controller-out")
            ),
            "the session does not begin",
        )
        return self.key

    def order(self, command: str, /, **order: Any) -> Json | None:
        """Give an order and return its answer, or None if none came."""
        lines = self.begin(command, **order).read_rest()
        return lines[-1] if lines else None

    def prepare(
        self, generation: int = 1, ranks: list[int] | None = None, **more: Any
    ) -> Json | None:
        own = [0, 1] if ranks is None else ranks
        given: Json = {
            "token": token(generation),
            "address": "127.0.0.1",
            "ranks": own,
            **TIMES,
            **more,
        }
        answer = self.order("prepare", **given)
        if answer is not None and answer["outcome"] == "done":
            self.stamps[given["token"]["submission"], generation] = answer["stamp"]
        return answer

    def start(
        self, generation: int = 1, command: list[str] | None = None, ranks: int = 2, **more: Any
    ) -> Json | None:
        lines = self.begin_start(generation, command, ranks, **more).read_rest()
        return lines[-1] if lines else None

    def begin_start(
        self, generation: int = 1, command: list[str] | None = None, ranks: int = 2, **more: Any
    ) -> Stream:
        given: Json = {
            "token": token(generation),
            "command": ["sleep", "1000"] if command is None else command,
            "workdir": None,
            "env": {},
            "rank_env": [{} for _ in range(ranks)],
            "peers": [],
            "prepared": self.stamps.get((1, generation), 0.0),
            "node": "n1",
            "secret": "c0ffee",
            "fences": True,
            "log_pattern": None,
        }
        return self.begin("start", **{**given, **more})

    def run(
        self, generation: int = 1, command: list[str] | None = None, ranks: int = 2, **more: Any
    ) -> dict[str, int]:
        """Prepare and start, and return the pids by rank."""
        times = {name: more.pop(name) for name in list(more) if name in TIMES}
        prepared = self.prepare(generation, list(range(ranks)), **times)
        assert prepared is not None
        assert prepared["outcome"] == "done", prepared
        started = self.start(generation, command, ranks, **more)
        assert started is not None
        assert started["outcome"] == "done", started
        pids: dict[str, int] = started["pids"]
        return pids

    def watch(self, generation: int = 1, after_seq: int = 0, heartbeat: float = 0.2) -> Stream:
        return self.begin(
            "watch", token=token(generation), after_seq=after_seq, heartbeat=heartbeat
        )

    def stop(self, generation: int = 1, **more: Any) -> Json | None:
        return self.order(
            "stop", **{"token": token(generation), "stop_grace": 1.0, "stuck_after": 3.0, **more}
        )

    def folder(self, generation: int = 1, submission: int = 1) -> Path:
        jobs = list((self.state / "jobs").iterdir())
        assert len(jobs) == 1
        return jobs[0] / f"{submission}-{generation}"

    def make_reboot_order(self, **more: Any) -> Json:
        """An order to reboot, decided on the present boot."""
        return {
            "id": "r1",
            "boot_id": read_boot_id(self.state),
            "reason": "Xid 79 on GPU 0000:05:00",
            **more,
        }

    def connect_to_shim(self) -> socket.socket:
        """A connection to the shim of generation 1, as a command has it."""
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.settimeout(PATIENCE)
        handle = os.open(self.folder(), os.O_RDONLY | os.O_DIRECTORY)
        try:
            caller.connect(f"/proc/self/fd/{handle}/orders")
        finally:
            os.close(handle)
        return caller

    def pid(self, role: str, generation: int = 1) -> int:
        path = self.folder(generation) / f"{role}.json"
        wait_for(path.exists, "a shim forks its supervisor after it has answered, but soon")
        record: Json = json.loads(path.read_text())
        return int(record["pid"])

    def describe(self) -> str:
        """Return the states of the processes of each generation and what its shim has logged.

        For a failure that comes once in a hundred runs: the folder is gone by then.
        """
        found = []
        for path in sorted(self.state.glob("jobs/*/*-*")):
            for role in ("shim", "supervisor", "guard"):
                record = read_json(path / f"{role}.json") or {}
                stat = Path(f"/proc/{record.get('pid')}/stat")
                state = stat.read_text().rsplit(")", 1)[1].split()[0] if stat.exists() else "gone"
                found.append(f"{path.name} {role} {record.get('pid')} {state}")
            log = path / "shim.log"
            found.append(log.read_text(errors="replace")[-2000:] if log.exists() else "no shim.log")
        return "\n".join(found)

    def log(self, rank: int = 0, generation: int = 1) -> str:
        path = self.folder(generation) / "logs" / f"rank_{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def journal(self, generation: int = 1) -> list[Json]:
        return [
            json.loads(line)
            for line in (self.folder(generation) / "journal.jsonl").read_text().splitlines()
        ]

    def set_failpoint(self, name: str) -> Path:
        folder = self.state / "failpoints"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        return folder / name

    def cut(self, *ways: str) -> None:
        """Cut the node off in these ways, or in none."""
        partial = self.state / ".cut"
        partial.write_text("\n".join(ways))
        partial.replace(self.state / "cut")

    def list_processes(self) -> list[int]:
        """Everything alive of this node: ranks and what they forked, shims and supervisors."""
        mark = f"={self.state}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    marked = mark in (entry / "environ").read_bytes()
                except OSError:
                    continue
                if marked and is_alive(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def await_session_end(self) -> None:
        """Wait for the session's own end; the next order opens another."""
        process = self.session()
        process.wait(PATIENCE)
        self.reader.join()  # it ends the streams of this session, not those of the next
        assert process.stdin is not None
        process.stdin.close()
        self.process = None

    def list_commands(self) -> list[int]:
        """The commands that the session has under way."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int(
                        (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()[1]
                    )
                except (FileNotFoundError, ProcessLookupError):
                    continue
        return [
            pid
            for pid, parent in parents.items()
            if parent == self.session().pid and read_name(pid) == "relaunch-order"
        ]

    def list_leftovers(self) -> list[int]:
        """What is there beside the session and the children that wait for its commands."""
        own = {None if self.process is None else self.process.pid}
        return [
            pid
            for pid in self.list_processes()
            if pid not in own and read_name(pid) not in ("relaunch-idle", "relaunch-order")
        ]

    def _remove_cgroups(self) -> None:
        """Remove the control groups of this node's generations once no agent is left to do so."""
        for launch in self.state.glob("jobs/*/*-*/started.json"):
            folder = (read_json(launch) or {}).get("cgroup")
            if folder is not None:
                cgroup.kill(folder)
                cgroup.remove(folder)

    def kill_everything(self) -> None:
        """Kill all, as a power cut would: no process is left to record how the others ended."""

        def all_get(number: signal.Signals, without: set[int]) -> set[int]:
            """Signal all but these; return which."""
            pids = set(self.list_processes()) - without
            for pid in pids:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            return pids

        stopped: set[int] = set()
        while more := all_get(signal.SIGSTOP, stopped):  # one may fork before it is stopped
            stopped |= more
        wait_for(lambda: not all_get(signal.SIGKILL, set()))
        self._remove_cgroups()
        if self.process is not None:
            self.await_session_end()
