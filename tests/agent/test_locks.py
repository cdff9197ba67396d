"""Orders that wait for a lock which another process holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_node import Node, expect_done, python_command, token, wait_for
from test_guard import STUBBORN, are_gone, frozen, hold_stopped, state_of

from relaunch.agent.locks import HeldLock, find_holder, try_lock, wait_for_lock
from tests.doubles.cards import Cards

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1000)
"""


@contextmanager
def stranger(path: Path) -> Iterator[int]:
    """Have a process that is none of the agent's hold a lock; yields its pid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as one:
        assert one.stdout is not None and one.stdout.readline() == b"held\n"
        try:
            yield one.pid
        finally:
            one.kill()


def test_who_holds_a_lock_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    named = r"process \d+, in state S, holds "
    with stranger(path) as pid, pytest.raises(HeldLock, match=named) as raised:
        wait_for_lock(path, 0.1)
    assert str(pid) in str(raised.value)
    wait_for(lambda: (lock := try_lock(path)) is not None and os.close(lock) is None)


def test_a_stopped_process_of_others_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with stranger(path) as pid, hold_stopped(pid):
        with pytest.raises(HeldLock, match=f"process {pid}, in state T"):
            wait_for_lock(path, 2.5)
        assert state_of(pid) == "T"


def test_a_stopped_order_keeps_no_other_from_its_lock(node: Node) -> None:
    """The first order to stop is stopped itself; the second one continues it and is carried out."""
    pids = node.run(1, python_command(STUBBORN))
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    lock = node.folder().parent / "lock"
    first = node.begin("stop", token=token(1), stop_grace=1000.0, stuck_after=3.0)
    holder = wait_for(lambda: find_holder(lock))
    os.kill(holder.pid, signal.SIGSTOP)
    wait_for(lambda: state_of(holder.pid) == "T")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    assert expect_done(node.stop(1, stop_grace=30.0))
    assert are_gone(pids)
    assert first.read_rest()[-1]["outcome"] == "done"


def test_a_stop_says_who_holds_its_lock(node: Node) -> None:
    node.run(1, ["sleep", "1000"])
    with stranger(node.folder().parent / "lock") as pid:
        answer = node.stop(1, stop_grace=0.1, stuck_after=1.0)
        assert answer is not None
        assert (answer["outcome"], answer["why"]) == ("refused", "stuck")
        assert f"process {pid}" in answer["reason"]
    expect_done(node.stop(1))


def test_a_watch_begins_on_a_disk_that_hangs(
    disk: Path, agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes down how the network ports are, which waits for as long as the disk hangs."""
    monkeypatch.setenv("RELAUNCH_SYS_CLASS", str(tmp_path / "sys" / "class"))
    Cards(tmp_path / "sys").add_rdma("mlx5_0")
    node = Node(disk / "n1", agent)
    node.state.mkdir(mode=0o700)
    try:
        node.run(1, ["sleep", "1000"])
        first = node.watch()
        first.read_until("hello")
        first.close()
        with frozen(disk):
            second = node.watch()
            second.read_until("hello")
            second.read_until("heartbeat")
    finally:
        node.kill_everything()
