"""What a rank has forked is found by its control group.

That holds whatever it did to its session, parent and environment.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from real_node import Node, expect_done, is_alive, read_name, wait_for

from relaunch.agent.ranks import cgroup

STRAY = "setsid env -i setsid sleep 1000 & exec sleep 1000"


def run_with_stray(node: Node) -> tuple[dict[str, int], int, Path]:
    """Start a rank that leaves a process of another session without an environment.

    Return both and their control group.
    """
    pids = node.run(1, ["sh", "-c", STRAY], ranks=1)
    folder = json.loads((node.folder() / "started.json").read_text())["cgroup"]
    if folder is None:
        pytest.skip(
            "no control group can be made here: cgroup v2 is not mounted, or not ours to change"
        )

    def find() -> int | None:
        try:
            members = {int(text) for text in (Path(folder) / "cgroup.procs").read_text().split()}
        except (
            FileNotFoundError
        ):  # it was empty, and another agent of this machine removed it: the guard makes it again
            return None
        own = set(pids.values())
        strays = [
            pid
            for pid in members - own
            if read_name(pid) == "sleep" and pid not in node.list_processes()
        ]
        return strays[0] if own <= members and strays else None

    return pids, wait_for(find, "the guard moves nothing into the control group"), Path(folder)


def test_a_group_that_another_launch_removes_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Folders stand for control groups, which not every user may make. Both go if empty."""
    moved: list[tuple[str, bool]] = []

    def remove_before_access(path: Path, mode: int) -> bool:
        cgroup._remove_empty(tmp_path)
        return path.exists()

    def remove_before_write(path: str, text: str) -> None:
        moved.append((text, Path(path).parent.is_dir()))
        if len(moved) == 1:
            cgroup._remove_empty(tmp_path)
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(cgroup, "_find_own", lambda: tmp_path)
    monkeypatch.setattr(cgroup.os, "access", remove_before_access)
    monkeypatch.setattr(cgroup, "_write", remove_before_write)
    folder = cgroup.make_group(tmp_path / "1-1")
    assert folder is not None, "it is taken for a folder that may not be written"
    cgroup.move_processes(folder, [1, 2])
    assert moved == [("1", True), ("1", True), ("2", True)]


def test_a_killed_shim_leaves_no_process_without_an_environment(node: Node) -> None:
    pids, stray, _ = run_with_stray(node)
    os.kill(node.pid("shim"), signal.SIGKILL)
    wait_for(lambda: not is_alive(stray) and not is_alive(pids["0"]))
    wait_for(lambda: "ShimDied" in [seen["kind"] for seen in node.journal()])


def test_a_stop_finds_processes_whose_parents_were_all_killed(node: Node) -> None:
    pids, stray, folder = run_with_stray(node)
    helpers = [node.pid(of) for of in ("supervisor", "guard", "shim")]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in helpers:
            os.kill(pid, number)
    wait_for(lambda: not is_alive(pids["0"]))
    assert is_alive(stray), "something else killed it: the test shows nothing"
    assert expect_done(node.stop())["stopped"] == [[1, 1]]
    assert not is_alive(stray)
    assert not folder.exists()


def test_a_control_group_is_removed_with_its_generation(node: Node) -> None:
    _, _, folder = run_with_stray(node)
    node.stop()
    wait_for(lambda: not folder.exists())


def test_a_launch_removes_the_control_group_of_a_dead_shim(node: Node) -> None:
    _, _, folder = run_with_stray(node)
    for pid in (node.pid("supervisor"), node.pid("guard"), node.pid("shim")):
        os.kill(pid, signal.SIGSTOP)
    node.kill_everything()
    cgroup.kill(str(folder))
    wait_for(lambda: not cgroup.list_members(str(folder)))
    made = cgroup.make_group(node.state / "jobs" / "another" / "1-1")
    assert made is not None
    cgroup.remove(made)
    assert not Path(made).exists()
    assert not folder.exists()


def test_where_no_control_group_can_be_made_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "_find_own", lambda: tmp_path / "missing")
    assert cgroup.make_group(tmp_path / "1-1") is None
    monkeypatch.setattr(cgroup, "_find_own", lambda: None)
    assert cgroup.make_group(tmp_path / "1-1") is None
