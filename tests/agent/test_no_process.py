"""No process is left to the user of a node: ranks need what ends them at their fence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_node import (
    TIMES,
    Node,
    boottime,
    expect_done,
    is_alive,
    read_name,
    refusal,
    wait_for,
)
from test_lease import find_fence, renewing

USER = 65534
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
SYSTEM_PYTHON = "/usr/bin/python3"
"""One that every user can run."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can have an agent of another user"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
    pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason=f"there is no {SYSTEM_PYTHON}"),
]


@pytest.fixture
def node(agent: Path) -> Iterator[Node]:
    """A node whose agent is not root: the kernel never counts root's processes."""
    # Not tmp_path: its parents are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="relaunch-user-"))
    folder.chmod(0o755)
    archive = Path(shutil.copy(agent, folder / "agent.pyz"))
    archive.chmod(0o644)
    (folder / "n1").mkdir(mode=0o700)
    os.chown(folder / "n1", USER, USER)
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(AS_USER)} {SYSTEM_PYTHON} "$@"\n')
    wrapper.chmod(0o755)
    found = Node(folder / "n1", archive, interpreter=str(wrapper))
    yield found
    found.kill_everything()
    shutil.rmtree(folder)


def set_forks(shim: int, allowed: bool) -> None:
    """Have each fork of this process fail with EAGAIN, or succeed again."""
    code = (
        "import resource as r, sys; kind, pid = r.RLIMIT_NPROC, int(sys.argv[1]); "
        "hard = r.prlimit(pid, kind)[1]; r.prlimit(pid, kind, (hard if sys.argv[2:] else 0, hard))"
    )
    words = [*AS_USER, SYSTEM_PYTHON, "-c", code, str(shim), *(["allowed"] if allowed else [])]
    subprocess.run(words, check=True)


def end_guard(node: Node) -> int:
    """Kill the guard and wait until the shim has noticed; return its pid."""
    guard = node.pid("guard")
    os.kill(guard, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{guard}").exists())
    return guard


def count_attempts(node: Node) -> int:
    return (node.folder() / "shim.log").read_text().count("the guard cannot be started")


def test_no_rank_is_started_without_a_guard(node: Node) -> None:
    expect_done(node.prepare())
    shim = node.pid("shim")
    node.pid("guard")
    set_forks(shim, allowed=False)
    end_guard(node)
    answer = node.start()
    assert answer is not None
    assert refusal(answer) == "cannot_start"
    assert "guard" in answer["reason"]
    assert "temporarily unavailable" in answer["reason"]
    assert not (node.folder() / "started.json").exists(), "it counts as launched"
    set_forks(shim, allowed=True)
    assert all(map(is_alive, expect_done(node.start())["pids"].values()))


def test_a_session_that_cannot_fork_refuses_and_goes_on(node: Node) -> None:
    pids = node.run(1)
    watch = node.watch()
    watch.read_until("heartbeat")
    session = node.session().pid
    set_forks(session, allowed=False)
    idle = [pid for pid in node.list_processes() if read_name(pid) == "relaunch-idle"]
    for pid in idle:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, idle)))
    answer = node.stop()
    assert answer is not None
    assert refusal(answer) == "cannot_start"
    assert "temporarily unavailable" in answer["reason"]
    assert node.watch().read_rest() == [], "a refusal would mean that nothing runs here"
    began = boottime()
    beat = watch.read_until("heartbeat", lambda beat: beat["stamp"] > began)
    assert beat["alive"] == [0, 1] and all(map(is_alive, pids.values()))
    set_forks(session, allowed=True)
    expect_done(node.stop())


def test_ranks_are_fenced_that_get_no_guard_for_a_lease(node: Node) -> None:
    pids = node.run(1, lease=2.0, fence_after=60.0)
    with renewing(node.watch()):
        set_forks(node.pid("shim"), allowed=False)
        began = boottime()
        end_guard(node)
        wait_for(lambda: not any(map(is_alive, pids.values())), "ranks run without a guard")
        assert boottime() - began >= 2.0, "renewed leases count until then"
    fence = wait_for(lambda: find_fence(node))
    assert fence["why"] == "unguarded"
    assert "temporarily unavailable" in fence["reason"]


def test_a_guard_that_is_missing_for_less_ends_no_rank(node: Node) -> None:
    pids = node.run(1, lease=TIMES["lease"])
    watch = node.watch()
    watch.read_until("heartbeat")
    watch.renew()
    set_forks(node.pid("shim"), allowed=False)
    first = end_guard(node)
    wait_for(lambda: count_attempts(node) >= 2)
    set_forks(node.pid("shim"), allowed=True)
    wait_for(lambda: node.pid("guard") != first, "the guard is not replaced")
    assert all(map(is_alive, pids.values()))
    assert not find_fence(node)
