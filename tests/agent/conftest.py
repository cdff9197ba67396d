"""Fixtures: nodes that are real processes, and gone when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_node import Node

from backends.artifact import build_agent


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture
def make_node(tmp_path: Path, agent: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(name: str = "n1", **more: Any) -> Node:
        node = Node(tmp_path / name, agent, **more)
        node.state.mkdir(parents=True, mode=0o700)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.kill_everything()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()
