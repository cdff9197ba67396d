"""SIGUSR1 to `run` reaches the ranks that handle it, and ends none of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relaunch.cli import rank_signals
from relaunch.temporal import read_start_time
from tests.console.test_run_alone import Shell, wait_for

HANDLES = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda number, frame: os.write(1, b"got it\\n"))
print("ready", flush=True)
sys.stdin.read()
"""
RENAMED = "import ctypes; ctypes.CDLL(None).prctl(15, (14 * 'x' + 'ä').encode(), 0, 0, 0)"
"""Has the kernel cut the process's name after 15 bytes, in the middle of a letter."""
IGNORES = "import sys; print('ready', flush=True); sys.stdin.read()"


@contextmanager
def record_rank(
    state: Path, rank: int, code: str, **more: object
) -> Iterator[subprocess.Popen[str]]:
    """Start a process, with the record that an agent writes of a rank."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        record = {
            "token": {"job": "llama"},
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "rank": rank,
            "pid": process.pid,
            "started": read_start_time(process.pid),
            **more,
        }
        path = state / "nodes" / "n1" / "jobs" / "ab" / "1-1" / "running" / f"rank_{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
        yield process


def test_only_ranks_that_handle_a_signal_get_it(tmp_path: Path) -> None:
    def send(number: signal.Signals = signal.SIGUSR1) -> str:
        return rank_signals.pass_on(tmp_path, "llama", number)

    assert send() == "SIGUSR1 has no effect: no rank runs"
    other = {"token": {"job": "other"}}
    reused = {"started": 1}
    with (
        record_rank(tmp_path, 1, IGNORES) as silent,
        record_rank(tmp_path, 2, HANDLES, **other),
        record_rank(tmp_path, 3, HANDLES, **reused),
    ):
        none = "SIGUSR1 has no effect: no rank handles it, and it would end them"
        assert send() == none
        with record_rank(tmp_path, 0, HANDLES) as rank:
            assert send() == (
                "SIGUSR1 passed on to 1 rank; rank 1 does not handle it, and did not get it"
            )
            assert rank.stdout is not None and rank.stdout.readline() == "got it\n"
            assert send(signal.SIGUSR2) == none.replace("1", "2")
            assert (rank.poll(), silent.poll()) == (None, None)
        assert send() == none, "the record of a rank that has ended"


def test_a_rank_whose_name_is_cut_in_a_letter_gets_it(tmp_path: Path) -> None:
    with record_rank(tmp_path, 0, RENAMED + HANDLES) as rank:
        assert Path(f"/proc/{rank.pid}/comm").read_bytes() == b"xxxxxxxxxxxxxx\xc3\n"
        assert rank_signals.pass_on(tmp_path, "llama", signal.SIGUSR1) == (
            "SIGUSR1 passed on to 1 rank"
        )
        assert rank.stdout is not None and rank.stdout.readline() == "got it\n"


@pytest.mark.long
def test_run_goes_on_after_the_signal_of_a_batch_system(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANDLES.replace("sys.stdin.read()", "signal.pause()"))
    shell = Shell(tmp_path)
    with subprocess.Popen(
        shell.command,
        cwd=tmp_path,
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "[rank 0] ready\n"
        os.kill(process.pid, signal.SIGUSR1)
        assert process.stdout.readline() == "[rank 0] got it\n"
        process.wait()
        assert process.returncode == 0
        assert "SIGUSR1 passed on to 1 rank" in process.stderr.read()
    wait_for(lambda: not shell.state.exists(), "the state folder of a success is left")
