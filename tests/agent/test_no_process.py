"""No process is left to the user of a node: ranks need what ends them at their fence."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_node import (
    PATIENCE,
    TIMES,
    Node,
    boottime,
    expect_done,
    is_alive,
    read_name,
    refusal,
    wait_for,
)
from test_container import FOR_EVER, Container, in_shell, watched
from test_lease import find_fence, renewing

from relaunch.agent import processes
from relaunch.agent.container.container import ASKED_TO_GO
from relaunch.backends.local_power import processes_of, signal_all

USER = 65534
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
SYSTEM_PYTHON = "/usr/bin/python3"
"""One that every user can run."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can have an agent of another user"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
    pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason=f"there is no {SYSTEM_PYTHON}"),
]


def make_folder(agent: Path, state: str) -> tuple[Path, Path]:
    """Return a folder with a state folder of the other user, and the agent's file in it."""
    # Not tmp_path: its parents are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="relaunch-user-"))
    folder.chmod(0o755)
    archive = Path(shutil.copy(agent, folder / "agent.pyz"))
    archive.chmod(0o644)
    (folder / state).mkdir(mode=0o700)
    os.chown(folder / state, USER, USER)
    return folder, archive


@pytest.fixture
def node(agent: Path) -> Iterator[Node]:
    """A node whose agent is not root: the kernel never counts root's processes."""
    folder, archive = make_folder(agent, "n1")
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


def list_named_children(node: Node, session: int) -> dict[int, str] | None:
    """Return the names of a session's children by pid; None while one has just been forked."""
    found = [processes.read_process(pid) for pid in node.list_processes()]
    own = [one.pid for one in found if one is not None and one.parent == session]
    names = {pid: read_name(pid) for pid in own}
    return names if all(name.startswith("relaunch-") for name in names.values()) else None


def test_a_session_that_cannot_fork_refuses_and_goes_on(node: Node) -> None:
    pids = node.run(1)
    watch = node.watch()
    watch.read_until("heartbeat")
    session = node.session().pid
    set_forks(session, allowed=False)
    children = wait_for(lambda: list_named_children(node, session))
    idle = [pid for pid, name in children.items() if name == "relaunch-idle"]
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


# --- in a container, at its limit of processes


Make = Callable[..., Container]


@pytest.fixture
def make(agent: Path) -> Iterator[Make]:
    folder, archive = make_folder(agent, "state")
    made: list[Container] = []

    def make(command: list[str], program: str = "", **order: object) -> Container:
        path = archive
        if program:
            path = folder / "agent.py"
            path.write_text(program.format(agent=str(archive), folder=str(folder)))
        made.append(Container(folder, path, command, 1, {}, AS_USER, SYSTEM_PYTHON, **order))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()
        while left := processes_of(one.state, b"RELAUNCH_AGENT_STATE"):
            signal_all(left, signal.SIGKILL)
    shutil.rmtree(folder)


def find_watch(container: Container) -> int:
    """Return the process that tells the container of exits."""

    def find() -> int:
        own = container.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        names = {int(pid): read_name(int(pid)) for pid in children}
        copier = next((pid for pid, name in names.items() if name == "relaunch-copy"), 1 << 30)
        # Those before are of the orders to prepare and start.
        later = (pid for pid, name in names.items() if pid > copier and name == "relaunch-order")
        return next(later, 0)

    return int(wait_for(find))


async def test_a_connection_without_a_process_is_dropped(make: Make) -> None:
    container = make(FOR_EVER)
    pids = container.pids()
    wait_for(container.listens)
    find_watch(container)
    set_forks(container.process.pid, allowed=False)
    with socket.create_connection(("127.0.0.1", container.port), PATIENCE) as caller:
        assert caller.recv(1) == b""
    set_forks(container.process.pid, allowed=True)
    lines = await watched(container, lambda line: "heartbeat" in line)
    assert lines[-1]["heartbeat"]["alive"] == [4]
    assert all(map(is_alive, pids))


WAITS = """
trap 'echo saved; exit 0' TERM
echo ready
while [ ! -e "$RELAUNCH_NODE_STATE/go" ]; do sleep 0.05; done
echo went
exit 7
"""


def test_a_watch_that_gets_no_process_is_begun_again(make: Make) -> None:
    container = make(in_shell(WAITS), port=None)
    watch = find_watch(container)
    set_forks(container.process.pid, allowed=False)
    os.kill(watch, signal.SIGKILL)
    wait_for(lambda: "the ranks are not watched until" in container.printed)
    set_forks(container.process.pid, allowed=True)
    (container.state / "go").touch()
    assert container.ended() == 7
    assert "went" in container.printed


STUBBORN = """
import runpy, sys
sys.path.insert(0, {agent!r})
from relaunch.agent.container import container
container.STOP_TIMEOUT = 6000.0
sys.argv[0] = {agent!r}
runpy.run_path({agent!r}, run_name="__main__")
"""
"""Starts the agent so that it tries to stop ranks for longer than any test waits."""


WITHOUT_COPIER = """
import resource, runpy, sys
sys.path.insert(0, {agent!r})
from relaunch.agent.container import container
own = container._Container._copy

def copy(self):
    container._Container._copy = own
    resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    own(self)

container._Container._copy = copy
sys.argv[0] = {agent!r}
runpy.run_path({agent!r}, run_name="__main__")
"""
"""Starts the agent so that its limit is reached once the ranks run."""


def test_output_that_gets_no_process_is_copied_later(make: Make) -> None:
    container = make(in_shell(WAITS), WITHOUT_COPIER, port=None)
    wait_for(lambda: "the ranks are not watched until" in container.printed)
    assert "ready" not in container.printed
    set_forks(container.process.pid, allowed=True)
    wait_for(lambda: "ready" in container.printed)
    (container.state / "go").touch()
    assert container.ended() == 7
    assert container.printed.count("ready") == container.printed.count("went") == 1


def test_an_exit_code_stays_where_no_process_is_left(make: Make) -> None:
    container = make(in_shell(WAITS), port=None)
    wait_for(lambda: "ready" in container.printed)
    find_watch(container)
    set_forks(container.process.pid, allowed=False)
    (container.state / "go").touch()
    assert container.ended() == 7
    assert "could not be stopped: Resource temporarily unavailable" in container.printed


def test_ranks_are_stopped_once_there_is_a_process_again(make: Make) -> None:
    container = make(in_shell(WAITS), STUBBORN, port=None)
    wait_for(lambda: "ready" in container.printed)
    find_watch(container)
    set_forks(container.process.pid, allowed=False)
    container.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "the ranks cannot be stopped yet: Resource" in container.printed)
    set_forks(container.process.pid, allowed=True)
    assert container.ended() == ASKED_TO_GO
    assert "saved" in container.printed
