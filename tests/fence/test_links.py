"""What nodes that call each other make of lines that are slow, or lose some of the packets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relaunch.backends.artifact import build_agent
from tests.backends.sshd import make_key
from tests.fence.hosts import PYTHON, Host, SwitchedNetwork, find_obstacle

WITHIN_S = 10.0
"""As long as jobs have it."""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[SwitchedNetwork]:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    made = SwitchedNetwork(tmp_path, ["n1", "n2"], make_key(tmp_path / "key"), seed=20261123)
    yield made
    made.close()


def order(host: Host, agent: Path, **more: object) -> Any:
    """Give one order to the agent on a host."""
    words = [*host.within, PYTHON, str(agent), "reach"]
    text = json.dumps({"protocol": 1, **more})
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["outcome"] == "done", answer
    return answer


def reach(network: SwitchedNetwork, agent: Path) -> str:
    """Return why n1 does not reach n2; empty: it does."""
    callers = network.hosts["n1"], network.hosts["n2"]
    listening = order(callers[1], agent, listen=callers[1].address, stay=60.0)
    found = {key: listening[key] for key in ("ports", "word")}
    peer = {"node": "n2", "address": callers[1].address, **found}
    (row,) = order(callers[0], agent, peers=[peer], within=WITHIN_S)["reached"]
    return str(row.get("cannot", ""))


@pytest.mark.long
def test_slow_lines_are_not_broken_ones(tmp_path: Path, network: SwitchedNetwork) -> None:
    agent = build_agent(tmp_path)
    assert reach(network, agent) == ""
    for _ in range(10):
        network.set_links("n1", "n2", loss=0.3, delay=0.25)
        assert reach(network, agent) == "", "500 ms and 30 % in each direction are a slow line"
    network.set_links("n1", "n2", largest=600)
    assert "full-size" in reach(network, agent)
    network.clear()
    network.set_link("n2", "n1", loss=1.0)
    assert "no answer" in reach(network, agent), "n2 hears n1, and n1 does not hear n2"
