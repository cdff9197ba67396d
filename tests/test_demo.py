"""The demo, as a newcomer runs it; nothing stays behind.

On a terminal it is interrupted after the first of its three faults, into a pipe it runs to its
end. The first is part of `make test`: README's first command must not break unseen.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.py"
PATIENCE = 600.0
"""Seconds: the demo promises 90 on a machine that does nothing else; tests run side by side."""


def left_of(folder: Path) -> list[str]:
    """Command lines of living processes of the demo with its temporary files in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            about = command + (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if os.fsencode(folder / "relaunch-demo-") in about:
            found.append(command.decode(errors="replace").replace("\0", " "))
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(**streams: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "TMPDIR": str(tmp_path),
            "TERM": "xterm",
            "COLUMNS": "140",
            "LINES": "40",
        }
        # A shell starts background jobs with SIGINT ignored, and a process that inherits that would
        # not see a Ctrl-C.
        ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(DEMO)], env=environment, start_new_session=True, **streams
                )
            )
        finally:
            signal.signal(signal.SIGINT, ignored)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(2 * PATIENCE)
def test_three_faults_change_no_bit_and_leave_nothing_behind(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    demo = start(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = demo.communicate(timeout=PATIENCE)[0].decode()
    assert demo.returncode == 0, out
    assert "\x1b" not in out
    told = [
        "web UI, as long as this runs: http://127.0.0.1:",
        "1. SIGKILL to rank 3",
        "Relaunch RESTART_IN_PLACE",
        "2. SIGKILL to the worker",
        "a new worker watches the same ranks",
        "3. node-2 is cut off",
        "next: once node-2 must have stopped its ranks by itself, generation 3 is launched without "
        "it (in ",
        "generation 3 runs on node-1, node-3",
        "NODE_LOST  node-2",
        "\nthe same bits\n",
        "nothing is left running",
    ]
    at = [out.find(text) for text in told]
    assert -1 not in at and at == sorted(at), out
    assert (left_of(tmp_path), list(tmp_path.glob("relaunch-demo-*"))) == ([], [])


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
def test_ctrl_c_on_a_terminal_ends_everything(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    ours, theirs = pty.openpty()
    demo = start(stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    out = b""
    deadline = time.monotonic() + PATIENCE / 2
    while b"incident closed" not in out:
        assert time.monotonic() < deadline, out.decode()
        out += os.read(ours, 65536)
    os.kill(demo.pid, signal.SIGINT)
    while True:
        try:
            out += os.read(ours, 65536)
        except OSError:  # Linux says EIO once no process has the terminal open
            break
    os.close(ours)
    assert demo.wait() == 130, out.decode()
    shown = out.decode()
    assert "interrupted; nothing is" in shown
    assert "━" in shown and "of 270" in shown and "next " in shown
    assert (left_of(tmp_path), list(tmp_path.glob("relaunch-demo-*"))) == ([], [])
