"""The disk of a state folder becomes read-only after an error: a real one, as ext4 does it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_node import Node, is_alive, refusal


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
    pids = node.run(1, ["sh", "-c", 'trap "" TERM; sleep 1000; sleep 1000'], stop_grace=60.0)
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
