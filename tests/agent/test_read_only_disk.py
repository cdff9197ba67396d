"""The disk of a state folder becomes read-only after an error: a real one, as ext4 does it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_node import Node, is_alive, refusal, token, wait_for

from relaunch.agent.locks import try_lock
from relaunch.agent.protocol import Fields, Refusal
from relaunch.agent.ranks import orders
from relaunch.agent.state import JobState


@pytest.fixture
def node(disk: Path, agent: Path) -> Iterator[Node]:
    """A node whose state is on a disk of its test, which `fail` makes read-only."""
    found = Node(disk / "n1", agent)
    found.state.mkdir(mode=0o700)
    yield found
    found.kill_everything()


def fail(node: Node) -> None:
    """Let the kernel find an error in the file system."""
    device = os.stat(node.state).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    trigger = Path(f"/sys/fs/ext4/{block}/trigger_fs_error")
    if not trigger.exists():
        pytest.skip("this kernel triggers no error of a file system")
    trigger.write_text("1")
    with pytest.raises(OSError, match="Read-only"):
        (node.state / "file").touch()


def test_a_stop_on_a_read_only_disk_stops_and_says_so(node: Node) -> None:
    pids = node.run(1)
    fail(node)
    answer = node.stop(1)
    assert answer is not None
    assert refusal(answer) == "disk_failed"
    assert "Read-only file system" in answer["reason"]
    assert not any(map(is_alive, pids.values()))
    assert refusal(node.stop(1)) == "disk_failed"


def test_exits_on_a_read_only_disk_are_reported(node: Node) -> None:
    ignores = 'trap "" TERM; echo ignores; sleep 1000; sleep 1000'
    pids = node.run(1, ["sh", "-c", ignores], stop_grace=60.0)
    wait_for(lambda: all("ignores" in node.log(rank) for rank in (0, 1)))
    watch = node.watch()
    watch.read_until("heartbeat")
    fail(node)
    os.kill(pids["1"], signal.SIGKILL)
    exited = watch.read_observation("RankExited")
    assert (exited["seq"], exited["rank"], exited["signal"]) == (1, 1, 9)
    os.kill(node.pid("shim"), signal.SIGKILL)
    died = watch.read_observation("ShimDied")
    assert died["seq"] == 2
    assert "ranks [0]" in died["reason"]
    assert watch.read_until("end") == {"seq": 2}


def stop_where_writes_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> tuple[Exception, list[bool]]:
    """Stop in this process; return the error, and of each stop of ranks whether the lock was held.

    Only so can an error come at one moment, and the lock be looked at in the next.
    """
    held: list[bool] = []
    (folder / "jobs").mkdir(parents=True)
    job = JobState(folder, "default", "j")

    def fail_to_write(self: JobState, **tokens: object) -> None:
        raise OSError(code, os.strerror(code))

    def look(*given: object) -> list[object]:
        held.append(try_lock(job.path / "lock") is None)
        return []

    monkeypatch.setattr(JobState, "reserve", fail_to_write)
    monkeypatch.setattr(orders, "stop_all", look)
    monkeypatch.setattr(orders, "_find_covered", lambda job, token: [])
    order = {"token": token(1), "stop_grace": 1.0, "stuck_after": 1.0}
    with pytest.raises((OSError, Refusal)) as raised:
        orders.stop(folder, Fields(order))
    return raised.value, held


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_a_stop_that_cannot_be_recorded_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Otherwise a launch on this node may come between its look for ranks and its answer."""
    error, held = stop_where_writes_fail(tmp_path, monkeypatch, code)
    assert isinstance(error, Refusal)
    assert error.answer["why"] in ("disk_failed", "disk_full")
    assert held == [True]


def test_an_error_that_is_not_of_the_disk_ends_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no answer, and is repeated: a refusal would say that the disk has failed."""
    error, held = stop_where_writes_fail(tmp_path, monkeypatch, errno.EMFILE)
    assert isinstance(error, OSError)
    assert error.errno == errno.EMFILE
    assert held == []
