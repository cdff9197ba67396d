"""Processes of the agent that crash leave no core file: their memory has the secrets of jobs."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_node import Node, is_alive, wait_for
from test_warm import await_standby, begin

PROGRAM = "import time; print('runs', flush=True); time.sleep(1000)"
HARD = resource.getrlimit(resource.RLIMIT_CORE)[1]
UNUSUAL = 1 << 40
"""Bytes: a limit that nothing else sets."""
GIVEN = UNUSUAL if HARD == resource.RLIM_INFINITY else min(UNUSUAL, HARD)
"""What ranks are given: the hard limit is not ours to raise."""
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern").read_text().strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start what a test starts in another folder, with a limit that allows cores."""
    monkeypatch.setenv("RELAUNCH_WARM_DELAY", "0")
    path = tmp_path / "cores"
    path.mkdir()
    monkeypatch.chdir(path)
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (GIVEN, HARD))
    yield path
    resource.setrlimit(resource.RLIMIT_CORE, before)


def read_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_CORE)[0]


def crash(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    wait_for(lambda: not is_alive(pid))


def test_no_process_of_an_agent_leaves_a_core(node: Node, folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    # A core is written before its process is reaped, and into the folder of the process.
    writes_files = (
        resource.getpagesize() < GIVEN
        and "/" not in CORE_PATTERN
        and not CORE_PATTERN.startswith(("|", "@"))
    )
    cold = begin(node, 1, command, workdir=str(folder))
    assert list(map(read_limit, cold["pids"].values())) == [GIVEN, GIVEN]
    # It proves that a core would be seen.
    crash(cold["pids"]["0"], signal.SIGSEGV)
    cores = list(folder.glob("core*"))
    assert len(cores) == writes_files
    for path in cores:
        path.unlink()
    await_standby(node)
    warm = begin(node, 2, command, workdir=str(folder))
    assert warm["warm"] == {"forked": True, "reason": ""}
    wait_for(lambda: "runs" in node.log(0, 2) and "runs" in node.log(1, 2))
    assert list(map(read_limit, warm["pids"].values())) == [GIVEN, GIVEN]
    begin(node, 3, command, workdir=str(folder))
    waiting = await_standby(node)
    victims = {
        "Python that imported ahead": waiting["python"],
        "standby": waiting["pid"],
        "supervisor": node.pid("supervisor", 3),
        "session": node.session().pid,
        "shim": node.pid("shim", 3),
    }
    assert {name: read_limit(pid) for name, pid in victims.items()} == dict.fromkeys(
        victims, min(1, GIVEN)
    )
    folders = {Path(f"/proc/{pid}/cwd").resolve() for pid in victims.values()}
    for number, pid in enumerate(victims.values()):
        crash(pid, (signal.SIGSEGV, signal.SIGABRT)[number % 2])
    assert [path for where in folders for path in where.glob("core*")] == []
