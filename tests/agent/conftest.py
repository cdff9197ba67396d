"""Fixtures: nodes that are real processes, and gone when the test ends."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, wait_for

from relaunch.backends import local_power
from tests.doubles.install import build_nvml


@pytest.fixture
def make_node(tmp_path: Path, agent: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(name: str = "n1", **more: Any) -> Node:
        node = Node(tmp_path / name, **{"agent": agent, **more})
        node.state.mkdir(parents=True, mode=0o700)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.kill_everything()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system, on which a test can block every write, or cause a real error."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(16 * 1024 * 1024)
    for command in (
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not installed")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    umount = ["umount", str(folder)]
    wait_for(lambda: subprocess.run(umount, capture_output=True, check=False).returncode == 0)


@pytest.fixture(scope="session")
def nvml_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A double of libnvidia-ml.so.1, to be installed where a node finds it."""
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def programs(tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the node finds its tools first. It reboots as local nodes do."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "libraries"))
    monkeypatch.setenv("RELAUNCH_REBOOT_COMMAND", json.dumps(local_power.command(node.state)))
    return folder
