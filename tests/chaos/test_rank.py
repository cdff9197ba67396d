"""A rank that starts while one of another generation lives says so, even if that is frozen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.world import RANK_PROGRAM

Start = Callable[[int], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def starting(generation: int) -> subprocess.Popen[bytes]:
        ours = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "RELAUNCH_TOKEN": f"default/j/1/{generation}",
            "RELAUNCH_GENERATION": str(generation),
            "RELAUNCH_NODE": "n1",
            "RELAUNCH_PROGRESS_FILE": str(tmp_path / "progress"),
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error"),
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-S", str(RANK_PROGRAM), str(tmp_path)], env={**os.environ, **ours}
            )
        )
        return started[-1]

    yield starting
    for process in started:
        process.kill()
        process.wait()


def until_started(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while (
        not (folder / "starts").exists()
        or len((folder / "starts").read_text().splitlines()) < count
    ):
        assert time.monotonic() < deadline, "it does not start"
        time.sleep(0.01)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_living_rank_of_another_generation_is_reported(
    start: Start, tmp_path: Path, frozen: bool
) -> None:
    old = start(1)
    until_started(tmp_path, 1)
    if frozen:
        old.send_signal(signal.SIGSTOP)
    start(2)
    until_started(tmp_path, 2)
    (line,) = (tmp_path / "violations").read_text().splitlines()
    assert json.loads(line)["started"] == "default/j/1/2"
    assert json.loads(line)["alive"] == f"default_j_1_1.0.{old.pid}"


def test_a_rank_of_another_generation_that_is_dead_is_not(start: Start, tmp_path: Path) -> None:
    old = start(1)
    until_started(tmp_path, 1)
    old.kill()
    old.wait()
    start(2)
    until_started(tmp_path, 2)
    assert not (tmp_path / "violations").exists()
