"""`run` without `up` where its server cannot start, or is gone at once: one sentence.

No process is left. The programs in place of Temporal's are small scripts; one runs the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relaunch.cli.service import find_server

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
PORT = 'while [ "$1" != --port ]; do shift; done; port=$2\n'
LISTENS = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(1000)
"""
PROGRAMS = {
    "ends": ("echo no such table >&2; exit 1", "the server ended 5 times in a row"),
    "refuses": ("echo unknown flag >&2; exit 2", "the server cannot start: unknown flag"),
    "is stuck": ("exec sleep 1000", "the server did not start within 30 s"),
    # as one that is stopped by SIGSTOP: the kernel takes connections for it
    "says nothing": (f"{PORT} exec '{sys.executable}' listens.py $port", "did not answer within"),
}


def list_processes(folder: Path) -> list[bytes]:
    """Return the commands of all processes that began in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.joinpath("cwd").readlink() == folder:
                found.append((entry / "cmdline").read_bytes())
        except OSError:
            continue
    return found


def run(folder: Path, program: str, *words: str) -> tuple[int, str]:
    """Run a job beside a program in place of the server; return its exit code and what it says."""
    path = folder / "temporal"
    path.write_text(f"#!/bin/sh\ncd '{folder}'\n{program}\n")
    path.chmod(0o755)
    (folder / "listens.py").write_text(LISTENS)
    command = [sys.executable, str(ROOT / "starter.py"), "run", "--name", "alone"]
    command += words or ("--", "true")
    ours = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "xterm"}
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**ours, "RELAUNCH_TEMPORAL_BIN": str(path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    deadline = time.monotonic() + PATIENCE
    while left := list_processes(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_server_that_does_not_start_is_one_sentence(tmp_path: Path, program: str) -> None:
    script, expected = PROGRAMS[program]
    code, said = run(tmp_path, script)
    assert code == 2, said
    first, last = said.splitlines()
    assert first.startswith("relaunch: no server is running")
    assert expected in last


def test_a_server_that_dies_again_and_again_is_one_sentence(tmp_path: Path) -> None:
    # Each one may live for as long as the job needs to be submitted, and the job outlives them all.
    (tmp_path / "policy.yaml").write_text("timeouts: {heartbeat: 1s, lease: 3s}\n")
    script = f"timeout -s KILL 3 '{find_server()}' \"$@\"; echo broken >&2; exit 1"
    code, said = run(tmp_path, script, "--policy", "policy.yaml", "--", "sleep", "1000")
    assert code == 2, said
    first, *told, last = said.splitlines()
    assert first.startswith("relaunch: no server is running")
    assert [line for line in told if not line.startswith("relaunch: ")] == []
    assert last.startswith("relaunch: ")
    assert last.endswith("ended 5 times in a row, the last time with exit code 1: broken")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / ".relaunch").write_text("")
    code, said = run(tmp_path, "exit 1")
    assert code == 2
    assert "state folder .relaunch/runs/alone cannot be written" in said
