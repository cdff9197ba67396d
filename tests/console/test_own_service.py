"""The service of a lone `run`, where it cannot be kept."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relaunch.cli.own_service import UP_LOG, OwnService
from relaunch.cli.service import Keeper, choose_port, list_stopping_signals
from relaunch.config import ConfigError

KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def end_with(code: int) -> subprocess.Popen[bytes]:
    ended = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"])
    ended.wait()
    return ended


async def test_a_service_that_ended_by_itself_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / UP_LOG).write_text("relaunch: started\nrelaunch: the disk is full\n")
    service = OwnService(tmp_path, "train", end_with(2))
    said: list[str] = []
    with pytest.raises(ConfigError, match="the server of job train ended: the disk is full"):
        await asyncio.wait_for(service.keep(said.append), 60)
    assert said == []


async def test_a_child_that_ends_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaunch.cli.service.FIRST_BACKOFF", 0.01)
    said: list[str] = []
    command = ["sh", "-c", "echo broken; exit 7"]
    keeper = Keeper("server", command, {}, tmp_path / "log", said.append, max_failures=3)
    with pytest.raises(ConfigError) as error:
        await asyncio.wait_for(keeper.keep(), 60)
    assert str(error.value) == (
        "the server ended 3 times in a row, the last time with exit code 7: broken"
    )
    assert len(said) == 2


async def test_no_write_and_no_lack_of_processes_ends_a_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it would end the server and all workers."""
    monkeypatch.setattr("relaunch.cli.service.FIRST_BACKOFF", 0.01)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keeper = Keeper("worker", ["sh", "-c", "sleep 1000"], {}, tmp_path / "log", say)
    start, left = keeper._start, [errno.EAGAIN, errno.ENOSPC]

    async def fail() -> Any:
        if left:
            number = left.pop()
            raise OSError(number, os.strerror(number))
        return await start()

    monkeypatch.setattr(keeper, "_start", fail)
    keeping = asyncio.create_task(keeper.keep())
    try:
        while keeper._process is None:
            assert not keeping.done(), keeping.exception()
            await asyncio.sleep(0.01)
        assert ["could not be started (" in text for text in said] == [True, True]
    finally:
        keeping.cancel()
        await keeper.end()


async def test_settings_that_turned_bad_end_no_service_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaunch.cli.service.FIRST_BACKOFF", 0.01)
    monkeypatch.setattr("relaunch.cli.service.LONGEST_BACKOFF", 0.01)
    said: list[str] = []
    command = ["sh", "-c", "echo a typo; exit 2"]
    with pytest.raises(ConfigError, match="the worker cannot start: a typo"):
        await Keeper("worker", command, {}, tmp_path / "log", said.append).keep()
    monkeypatch.setattr("relaunch.cli.service.STEADY_AFTER", 0.0)  # as after a minute
    keeping = asyncio.create_task(
        Keeper("worker", command, {}, tmp_path / "log", said.append).keep()
    )
    while len(said) < 3:
        assert not keeping.done(), keeping.exception()
        await asyncio.sleep(0.01)
    keeping.cancel()
    assert said[0].startswith("the worker ended (exit code 2: a typo); restarting it in ")


async def test_the_log_of_a_child_that_runs_on_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaunch.cli.service.MAX_LOG_BYTES", 10_000)
    monkeypatch.setattr("relaunch.cli.service.LOG_INTERVAL", 0.01)
    log, said = tmp_path / "log", list[str]()
    script = "printf '%020000d\n' 7; while sleep 0.02; do echo more; done"
    keeper = Keeper("server", ["sh", "-c", script], {}, log, said.append)
    keeping = asyncio.create_task(keeper.keep())
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "log.1").exists() or keeper.last_words() != "more":
            assert time.monotonic() < deadline, log.stat()
            await asyncio.sleep(0.01)
        assert log.stat().st_size < 10_000 < (tmp_path / "log.1").stat().st_size
        assert not said, "it is the same child"
    finally:
        keeping.cancel()
        await keeper.end()


@pytest.mark.parametrize(("before", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_stops_no_service_under_nohup(before: Any, stops: bool) -> None:
    own = signal.signal(signal.SIGHUP, before)
    try:
        assert (signal.SIGHUP in list_stopping_signals()) == stops
    finally:
        signal.signal(signal.SIGHUP, own)


def test_a_free_port_is_not_one_of_connections() -> None:
    first, last = map(int, KERNEL_PORTS.read_text().split())
    for _ in range(20):
        assert not first <= choose_port("--port", 0) <= last
