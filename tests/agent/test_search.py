"""The search for ranks beside a process whose environment cannot be read.

The long tests have a real one: a thread of it waits for a frozen file system, and another one to
map memory. They are not among the others, because every agent of this machine meets it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, expect_done, is_alive, refusal, wait_for
from test_clients import HANDED_OVER, Engine, daemon
from test_guard import frozen

from relaunch.agent import processes, search, tools
from relaunch.agent.protocol import parse_token
from relaunch.agent.ranks import stop

__all__ = ["daemon"]

HANGS = """
import ctypes, mmap, sys, threading, time
file = open(sys.argv[1], "r+b")
pages = mmap.mmap(file.fileno(), mmap.PAGESIZE)
start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
libc = ctypes.CDLL(None)
print("mapped", flush=True)
sys.stdin.readline()
writer = threading.Thread(target=libc.memset, args=[start, 1, 1])
writer.start()
while ") D " not in open(f"/proc/self/task/{writer.native_id}/stat").read():
    time.sleep(0.01)
libc.mprotect(start, ctypes.c_size_t(mmap.PAGESIZE), 1)
"""
"""A program that holds the lock of its memory while the disk of a file hangs."""


def can_read_environment(pid: int) -> bool:
    command = ["timeout", "-s", "KILL", "0.5", "cat", f"/proc/{pid}/environ"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Hanging:
    """Processes that hang while a disk is frozen."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.programs: list[subprocess.Popen[bytes]] = []

    def add(self, **environment: str) -> int:
        """Start one that is to hang; return its pid."""
        path = self.disk / f"file-{len(self.programs)}"
        path.write_bytes(bytes(mmap.PAGESIZE))
        program = subprocess.Popen(
            [sys.executable, "-S", "-c", HANGS, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        assert program.stdout is not None
        program.stdout.readline()
        self.programs.append(program)
        return program.pid

    @contextmanager
    def hang(self) -> Iterator[None]:
        with frozen(self.disk):
            for program in self.programs:
                assert program.stdin is not None
                program.stdin.write(b"\n")
                program.stdin.flush()
            for program in self.programs:
                wait_for(lambda pid=program.pid: not can_read_environment(pid))
            yield

    def end(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate()


@pytest.fixture
def hanging(disk: Path) -> Iterator[Hanging]:
    processes = Hanging(disk)
    yield processes
    processes.end()


def leave_container(node: Node, daemon: Engine) -> int:
    """Run a rank whose container only a search finds; return its pid."""
    node.run(1, daemon.run(*HANDED_OVER), ranks=1)
    return daemon.await_container()


@pytest.mark.long
def test_a_stop_kills_and_names_what_it_cannot_read(
    node: Node, daemon: Engine, hanging: Hanging
) -> None:
    container = leave_container(node, daemon)
    pid = hanging.add()
    with hanging.hang():
        answer = node.stop(stuck_after=2.0)
        assert not is_alive(container), "what hangs hides what could be killed"
    assert refusal(answer) == "stuck"
    assert answer is not None
    assert pid in answer["pids"]
    assert "cannot be read" in answer["reason"]
    expect_done(node.stop())


@pytest.mark.long
def test_what_hangs_since_before_the_launch_is_no_rank(
    node: Node, daemon: Engine, hanging: Hanging
) -> None:
    hanging.add()
    container = leave_container(node, daemon)
    with hanging.hang():
        expect_done(node.stop())
        assert not is_alive(container)


@pytest.mark.long
@pytest.mark.parametrize("has_guard", [True, False], ids=["guard", "session"])
def test_what_a_killed_shim_left_is_killed_beside_it(
    node: Node, hanging: Hanging, tmp_path: Path, has_guard: bool
) -> None:
    note = tmp_path / "pid"
    script = f"setsid sleep 1000 & echo $! > {shlex.quote(str(note))}; exec sleep 1000"
    node.run(1, ["sh", "-c", script], ranks=1)
    wait_for(lambda: note.exists() and note.read_text().endswith("\n"))
    left = int(note.read_text())
    pid = hanging.add()
    with hanging.hang():
        if not has_guard:
            os.kill(node.pid("guard"), signal.SIGKILL)
        os.kill(node.pid("shim"), signal.SIGKILL)
        if has_guard:
            wait_for(lambda: not is_alive(left), "the guard waits for what hangs")
        answer = node.prepare(2, [0], stuck_after=2.0)
        assert not is_alive(left)
    assert refusal(answer) == "stuck"
    assert answer is not None
    assert pid in answer["pids"]
    expect_done(node.prepare(2, [0]))


@pytest.mark.long
def test_a_killed_shim_leaves_no_doubt_of_what_is_older(node: Node, hanging: Hanging) -> None:
    hanging.add()
    node.run(1)
    with hanging.hang():
        os.kill(node.pid("shim"), signal.SIGKILL)
        expect_done(node.prepare(2))


@pytest.mark.long
def test_a_node_where_a_process_hangs_is_probed(node: Node, hanging: Hanging) -> None:
    hanging.add()
    with hanging.hang():
        expect_done(node.order("probe", within=10.0, kernel_since=None))


@pytest.mark.long
def test_a_first_launch_does_not_wait_for_what_hangs(node: Node, hanging: Hanging) -> None:
    hanging.add()
    with hanging.hang():
        node.run(1)


@pytest.fixture
def carriers(tmp_path: Path) -> Iterator[list[int]]:
    """Three processes with a token, in the order of their start."""
    mine = {"RELAUNCH_TOKEN": "one", "RELAUNCH_NODE_STATE": str(tmp_path)}
    started = [subprocess.Popen(["sleep", "1000"], env={**os.environ, **mine}) for _ in range(3)]
    for each in started:
        environ = Path(f"/proc/{each.pid}/environ")
        wait_for(lambda path=environ: b"RELAUNCH_TOKEN=one\0" in path.read_bytes())
    yield [each.pid for each in started]
    for each in started:
        each.kill()
        each.wait()


def find(state: Path, *own: int, **more: Any) -> tuple[list[int], list[int]]:
    """Return the pids of what a search finds, and of our own which it cannot read."""
    arguments: dict[str, Any] = {"groups": {}, **more}
    found = search.find_by_token("o", lambda rest: rest == "ne", str(state), **arguments)
    assert set(found.tokens.values()) <= {"ne"}
    return (
        [each.pid for each in found.processes],
        [each.pid for each in found.unread if each.pid in own],
    )


def block(monkeypatch: pytest.MonkeyPatch, *blocked: int) -> None:
    """Have the reading of these environments block, as in the kernel."""

    def read(pid: int) -> bytes:
        while pid in blocked:
            signal.pause()
        return real(pid)

    real = search.read_environment
    monkeypatch.setattr(search, "read_environment", read)


def test_a_search_goes_on_beside_each_that_hangs(
    carriers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = sorted(carriers)
    assert find(tmp_path) == ([first, second, third], [])
    block(monkeypatch, first, third)
    assert find(tmp_path, *carriers) == ([second], [first, third])
    assert find(tmp_path, *carriers, without=[third]) == ([second], [first])


def test_what_hangs_is_known_by_its_group_and_its_age(
    carriers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = carriers[0]
    process = processes.read_process(pid)
    assert process is not None
    block(monkeypatch, pid)
    assert find(tmp_path, pid, since=process.started)[1] == [pid]
    assert find(tmp_path, pid, since=process.started + 1)[1] == []
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as rank:
        block(monkeypatch, rank.pid)
        started = wait_for(lambda: processes.read_process(rank.pid)).started
        wait_for(lambda: os.getpgid(rank.pid) == rank.pid)
        assert rank.pid in find(tmp_path, groups={rank.pid: started})[0]
        rank.kill()


def test_what_forks_and_ends_while_it_is_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that forks and ends is never there when it is looked at."""
    fifo, note = tmp_path / "fifo", tmp_path / "pid"
    os.mkfifo(fifo)
    script = f"read go < {fifo}; sleep 1000 & echo $! > {note}"
    mine = {"RELAUNCH_TOKEN": "one", "RELAUNCH_NODE_STATE": str(tmp_path)}
    real = search.read_environment
    with subprocess.Popen(["sh", "-c", script], env={**os.environ, **mine}) as first:
        wait_for(lambda: b"RELAUNCH_TOKEN=one\0" in real(first.pid))

        def read(pid: int) -> bytes:
            if pid == first.pid and not note.exists():
                fifo.write_text("go\n")
                wait_for(lambda: not is_alive(pid))
            return real(pid)

        monkeypatch.setattr(search, "read_environment", read)
        found, _ = find(tmp_path)
    assert found == [int(note.read_text())]
    os.kill(found[0], signal.SIGKILL)


def test_a_search_that_no_other_process_can_make_is_made_here(
    carriers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(work: object) -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(processes, "fork", refuse)
    assert find(tmp_path) == (sorted(carriers), [])


def test_a_reader_that_dies_is_replaced_by_the_caller(
    carriers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = os.getpid()
    real = search.read_environment

    def read(pid: int) -> bytes:
        if pid == carriers[1] and os.getpid() != caller:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(pid)

    monkeypatch.setattr(search, "read_environment", read)
    assert find(tmp_path) == (sorted(carriers), [])


def test_what_cannot_be_read_of_a_hold_is_named_and_not_killed(
    carriers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = {"RELAUNCH_HOLD": "diagnose", "RELAUNCH_NODE_STATE": str(tmp_path)}
    stranger, old = carriers[:2]
    times = {pid: process.started for pid in carriers if (process := processes.read_process(pid))}
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, **hold}) as tool:
        wait_for(lambda: search.find_leftovers(tmp_path, since=0)[0])
        block(monkeypatch, stranger)
        monkeypatch.setattr(tools, "KILL_TIMEOUT", 0.0)
        assert stranger in search.kill_leftovers(tmp_path, times[stranger])
        assert tool.wait() == -signal.SIGKILL
    assert is_alive(stranger)
    assert stranger not in search.kill_leftovers(tmp_path, times[stranger] + 1)
    assert is_alive(old)


def test_a_process_is_read_again_while_it_executes(
    carriers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two programs it has memory and no environment."""
    real, empty = search._read_file, {f"/proc/{carriers[0]}/environ"}

    def read(path: str) -> bytes:
        if path in empty:
            empty.remove(path)
            return b""
        return real(path)

    monkeypatch.setattr(search, "_read_file", read)
    assert find(tmp_path) == (sorted(carriers), [])


def test_an_environment_that_is_not_in_memory_is_none(tmp_path: Path) -> None:
    """As of a process that was restored from a checkpoint: else it would be in doubt for ever."""
    program = """
import ctypes, mmap, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = (int(fields[n]) // mmap.PAGESIZE * mmap.PAGESIZE for n in (47, 48))
size = ctypes.c_size_t(end - begin + mmap.PAGESIZE)
print(ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin), size, 0), flush=True)
time.sleep(1000)
"""
    mine = {"RELAUNCH_TOKEN": "one", "RELAUNCH_NODE_STATE": str(tmp_path)}
    # The long argument lies between the environment and the stack that the program runs on: in one
    # page with that, it would end by SIGSEGV.
    command = [sys.executable, "-S", "-c", program, "x" * 64 * 1024]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=mine) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"0\n"
            assert find(tmp_path, stranger.pid) == ([], [])
        finally:
            stranger.kill()


def test_a_process_whose_first_thread_has_ended_is_found(tmp_path: Path) -> None:
    program = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=[1000]).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    mine = {"RELAUNCH_TOKEN": "one", "RELAUNCH_NODE_STATE": str(tmp_path)}
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(command, env={**os.environ, **mine}) as rank:
        try:
            wait_for(lambda: (found := processes.read_process(rank.pid)) and found.state == "Z")
            assert find(tmp_path) == ([rank.pid], [])
        finally:
            rank.kill()


def test_a_token_with_other_digits_is_no_token(tmp_path: Path) -> None:
    for token in ("one/²/1", "one/1/" + "9" * 5000):
        mine = {"RELAUNCH_TOKEN": token, "RELAUNCH_NODE_STATE": str(tmp_path)}
        with subprocess.Popen(["sleep", "1000"], env={**os.environ, **mine}) as stranger:
            wait_for(lambda: "RELAUNCH_TOKEN" in read_environment(stranger.pid))
            found = search.find_by_token(
                "one/", lambda rest: stop._parse_order(rest) is not None, str(tmp_path), {}
            )
            assert found == ([], [], {})
            assert parse_token(f"server/{token}") is None
            stranger.kill()


def read_environment(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


@pytest.mark.parametrize("victim", ["relay", "reader"])
def test_a_search_goes_on_after_sigstop(
    carriers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    caller, real = os.getpid(), processes.close_all_but

    def stop_here(handles: Iterable[int]) -> None:
        real(handles)
        note = tmp_path / "stopped"
        if (os.getppid() == caller) == (victim == "relay") and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(processes, "close_all_but", stop_here)
    assert find(tmp_path) == (sorted(carriers), [])


def test_what_blocked_a_failed_try_is_left_out_of_the_next(
    carriers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that the caller would block, once no other process can read."""
    caller, fork = os.getpid(), processes.fork
    first = min(carriers)
    note = tmp_path / "second"

    def refuse_second_reader(work: Callable[[], None]) -> int:
        if os.getpid() != caller:
            if note.exists():
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            note.touch()
        return fork(work)

    monkeypatch.setattr(processes, "fork", refuse_second_reader)
    block(monkeypatch, first)
    found, unread = find(tmp_path, *carriers)
    assert (found, set(unread)) == (sorted(set(carriers) - {first}), {first})
