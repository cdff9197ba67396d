"""A full disk under the state folder.

Living ranks are watched and stopped, exits are reported, orders are answered.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_node import (
    Node,
    expect_done,
    is_alive,
    python_command,
    read_name,
    refusal,
    token,
    wait_for,
)

from relaunch.agent import disk
from relaunch.agent.ranks.journal import Journal, read

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
WAITS = (
    "import os, time\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.02)\n"
    "raise SystemExit(3)"
)


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self, leave: int = 0) -> None:
        """Take every block but `leave` bytes."""
        with open(self.filler, "ab", buffering=0) as file:
            while (free := self.free) > leave:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free - leave)
                except OSError as error:  # a process of the node took some of it meanwhile
                    if error.errno != errno.ENOSPC:
                        raise

    @property
    def free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bfree * found.f_frsize

    def empty(self) -> None:
        self.filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8M,mode=700", "tmpfs", str(folder)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def full_node(small_disk: SmallDisk, make_node: Callable[..., Node]) -> Node:
    """A node whose state is on the small disk, which is to be filled."""
    return make_node("disk/n1")


def run_two_that_wait(node: Node, go: Path) -> dict[str, int]:
    return node.run(
        1, python_command(WAITS), rank_env=[{"GO": str(go)}, {"GO": "/nowhere"}], lease=30.0
    )


@needs_mount
def test_an_exit_on_a_full_disk_is_reported_and_stops_the_others(
    full_node: Node, small_disk: SmallDisk, tmp_path: Path
) -> None:
    run_two_that_wait(full_node, tmp_path / "go")
    watch = full_node.watch()
    watch.read_until("heartbeat")
    small_disk.fill()
    (tmp_path / "go").touch()
    first = watch.read_observation("RankExited")
    assert (first["rank"], first["exit_code"]) == (0, 3)
    assert watch.read_observation("RankExited")["rank"] == 1
    again = full_node.watch()
    assert again.read_observation("RankExited")["rank"] == 0, (
        "a watch that begins now is served too"
    )


@needs_mount
def test_what_lives_is_stopped_for_ever_on_a_full_disk(
    full_node: Node, small_disk: SmallDisk
) -> None:
    pids = full_node.run(1)
    shim = full_node.pid("shim")
    small_disk.fill()
    assert expect_done(full_node.stop(1))["stopped"] == [[1, 1]]
    assert not any(map(is_alive, pids.values()))
    wait_for(lambda: not is_alive(shim))  # it says farewell after the answer
    assert expect_done(full_node.stop(1))["stopped"] == []
    highest = json.loads((full_node.folder().parent / "highest.json").read_text())
    assert highest["stopped"] == [1, 1]
    small_disk.empty()
    assert refusal(full_node.prepare(1)) == "stopped"


@needs_mount
def test_orders_that_need_room_say_so_and_change_nothing(
    full_node: Node, small_disk: SmallDisk
) -> None:
    pids = full_node.run(1)
    small_disk.fill()
    answer = full_node.prepare(2)
    assert refusal(answer) == "disk_full"
    assert answer is not None
    assert str(full_node.state) in answer["reason"]
    assert "0 bytes" in answer["reason"]
    assert all(map(is_alive, pids.values()))
    assert full_node.watch().read_until("heartbeat")["alive"] == [0, 1]
    small_disk.empty()
    assert expect_done(full_node.prepare(2))["stopped"] == [[1, 1]]


@needs_mount
def test_a_job_that_a_full_disk_never_took_can_be_stopped(
    full_node: Node, small_disk: SmallDisk
) -> None:
    """As a controller does on every node of a launch that one of them refused."""
    full_node.run(1)
    small_disk.fill()
    other = token(1, job="other")
    assert refusal(full_node.prepare(1, token=other)) == "disk_full"
    assert expect_done(full_node.stop(token=other))["stopped"] == []
    small_disk.empty()
    assert refusal(full_node.prepare(1, token=other)) == "stopped"


@needs_mount
def test_a_stop_that_cannot_be_written_still_stops_and_says_so(
    full_node: Node, small_disk: SmallDisk
) -> None:
    pids = full_node.run(1)
    (full_node.folder().parent / ".highest.json.spare").unlink()
    (full_node.state / disk.BALLAST_NAME).unlink()
    small_disk.fill()
    answer = full_node.stop(1)
    assert refusal(answer) == "disk_full"
    assert not any(map(is_alive, pids.values()))
    small_disk.empty()
    expect_done(full_node.stop(1))


@needs_mount
def test_the_end_of_a_killed_shim_is_reported_on_a_full_disk(
    full_node: Node, small_disk: SmallDisk
) -> None:
    full_node.run(1)
    watch = full_node.watch()
    watch.read_until("heartbeat")
    os.truncate(
        full_node.folder() / "journal.jsonl", 0
    )  # as an agent of before, which reserved nothing
    small_disk.fill()
    os.kill(full_node.pid("shim"), 9)
    died = watch.read_observation("ShimDied")
    assert died["seq"] == 1
    os.kill(full_node.pid("supervisor"), 9)
    wait_for(lambda: not full_node.list_leftovers())
    for _ in range(2):
        lines = full_node.watch().read_rest()
        assert lines[1]["observation"]["kind"] == "RanksVanished"
        assert lines[1]["observation"]["seq"] == 1
        assert lines[-1]["end"] == {"seq": 1}


@needs_mount
def test_a_launch_prepared_in_time_starts_or_is_refused_in_words(
    full_node: Node, small_disk: SmallDisk
) -> None:
    full_node.prepare(1)
    full_node.pid("supervisor")
    small_disk.fill()
    answer = full_node.start(1)
    assert answer is not None
    if answer["outcome"] == "done":
        assert full_node.watch().read_until("heartbeat")["alive"] == [0, 1]
    else:
        assert answer["why"] == "disk_full"
    assert expect_done(full_node.stop(1))


@needs_mount
@pytest.mark.parametrize("left", [0, 1])
def test_a_launch_without_reserved_space_is_refused_in_words(
    full_node: Node, small_disk: SmallDisk, left: int
) -> None:
    full_node.prepare(1)
    full_node.pid("supervisor")
    spares = sorted(full_node.folder().glob(".started.json.spare*"))
    for spare in spares[left:]:
        spare.unlink()
    small_disk.fill()
    answer = full_node.start(1)
    assert refusal(answer) == "disk_full"
    wait_for(lambda: [pid for pid in full_node.list_processes() if _is_sleep(pid)] == [])
    expect_done(full_node.stop(1))


def _is_sleep(pid: int) -> bool:
    return read_name(pid) == "sleep"


@needs_mount
def test_a_supervisor_is_replaced_on_a_full_disk(full_node: Node, small_disk: SmallDisk) -> None:
    pids = full_node.run(1)
    old = full_node.pid("supervisor")
    small_disk.fill()
    os.kill(old, 9)
    wait_for(lambda: full_node.pid("supervisor") != old)
    assert full_node.watch().read_until("heartbeat")["alive"] == [0, 1]
    assert all(map(is_alive, pids.values()))


# --- the journal itself ---


@needs_mount
def test_a_line_written_in_part_is_removed_and_written_later(
    small_disk: SmallDisk,
) -> None:
    path = small_disk.folder / "journal.jsonl"
    journal = Journal(path)
    while -os.stat(path).st_size % 4096 not in range(
        20, 60
    ):  # less room in the last page than the shortest line
        journal.append(("RankExited", {"rank": 0}))
        journal.sync()
    told = journal.synced
    small_disk.fill()
    journal.append(("RankExited", {"rank": 1}))
    journal.append(("RankExited", {"rank": 2}))
    journal.sync()
    assert journal.synced == told, "what the disk has not taken is not told"
    assert [each["seq"] for each in journal.pending] == [told + 1, told + 2]
    assert path.read_bytes().endswith(b"\n"), "no torn line hides what follows"
    small_disk.empty()
    journal.append(("RankExited", {"rank": 3}))
    journal.sync()
    assert journal.synced == told + 3
    assert [each["seq"] for each in read(path)] == list(range(1, told + 4))
    assert [each["rank"] for each in read(path)][-3:] == [1, 2, 3]
    journal.close()


@needs_mount
def test_the_exits_of_all_ranks_have_room_before_the_ranks_run(small_disk: SmallDisk) -> None:
    path = small_disk.folder / "journal.jsonl"
    journal = Journal(path, ranks=64)
    small_disk.fill()
    fields = {"local_rank": 7, "pid": 4194304, "exit_code": None, "signal": 15, "stopped": True}
    for rank in range(64):
        journal.append(("RankExited", {"rank": 100000 + rank, **fields}))
        journal.sync()
    journal.append(("Stopped", {"reason": "an order to stop came" * 10}))
    journal.sync()
    assert journal.synced == 65
    size = path.stat().st_size
    journal.close()
    assert path.stat().st_blocks * 512 < size + 4096, "what was not needed is given back"


@needs_mount
def test_a_spare_replaces_a_file_again_and_again(small_disk: SmallDisk) -> None:
    path = small_disk.folder / "highest.json"
    path.write_text('{"n": 0}')
    disk.make_spare(path)
    small_disk.fill()
    for number in range(1, 5):
        assert disk.write_into_spare(path, json.dumps({"n": number}).encode(), durable=True)
        assert json.loads(path.read_bytes()) == {"n": number}
    assert not disk.write_into_spare(path, b"x" * 5000, durable=True), "it has no room for that"
    assert json.loads(path.read_bytes()) == {"n": 4}
