"""py-spy on its way to a node: sent once, when stacks are first asked for, and where it can run."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import struct
from pathlib import Path

import pytest

from relaunch.backends import py_spy
from relaunch.backends.base import Refusal
from relaunch.backends.py_spy import NoProgramError, Program
from tests.backends.fleets import RUNS, SshFleet
from tests.backends.test_contract import launch, token

DATA = b"#!/bin/sh\n" + bytes(range(256)) * 5000
PROGRAM = Program(DATA, hashlib.sha256(DATA).hexdigest(), platform.machine())


async def ask(fleet: SshFleet, frames: bool = True) -> None:
    answer = await fleet.backend.stacks("n1", token(1), None, frames)
    assert not isinstance(answer, Refusal)
    assert [row["rank"] for row in answer["stacks"]] == [0, 1]


@pytest.mark.long
async def test_a_node_gets_py_spy_once_and_only_for_frames(
    tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [PROGRAM]
    monkeypatch.setattr(py_spy, "read_program", lambda: read[0])
    fleet = SshFleet({1: RUNS}, 1, tmp_path, agent)
    try:
        await launch(fleet)
        tools = fleet.hosts["n1"].state / "tools"
        await ask(fleet, frames=False)
        assert not tools.exists()
        await ask(fleet)
        (path,) = tools.iterdir()
        assert path.read_bytes() == DATA and path.stat().st_mode & 0o777 == 0o700
        first = path.stat().st_ino
        fleet.backend = fleet.again()
        await ask(fleet)
        assert path.stat().st_ino == first, "another controller finds it there"
        other = DATA + b"2"
        read[0] = dataclasses.replace(
            PROGRAM, data=other, sha256=hashlib.sha256(other).hexdigest(), machine="vax"
        )
        fleet.backend = fleet.again()
        await ask(fleet)
        assert [one.name for one in tools.iterdir()] == [path.name]
    finally:
        await fleet.close()


def test_the_program_of_the_installation_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "py-spy"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(NoProgramError):
        py_spy.read_program()
    py_spy._read.cache_clear()
    path.write_bytes(b"\xcf\xfa\xed\xfe")  # a program for macOS
    with pytest.raises(NoProgramError):
        py_spy.read_program()
    path.write_bytes(b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", 183) + b"x" * 600_000)
    program = py_spy.read_program()
    assert program.machine == "aarch64"
    assert [offset for offset, _ in program.pack()] == [0, 512 * 1024]
    path.unlink()
    with pytest.raises(NoProgramError):
        py_spy.read_program()
    py_spy._read.cache_clear()
