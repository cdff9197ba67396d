"""Ranks that are forked from a Python which has imported their modules ahead of need."""

from __future__ import annotations

import json
import os  # noqa
import sys
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, is_alive, wait_for

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAUNCH_WARM_DELAY", "0")


def standby(node: Node) -> Json:
    (record,) = node.state.glob("jobs/*/warm/standby.json")
    read: Json = json.loads(record.read_text())
    return read


def await_standby(node: Node, state: str = "ready") -> Json:
    def is_so() -> Json | None:
        for path in node.state.glob("jobs/*/warm/standby.json"):
            record: Json = json.loads(path.read_text())
            if record["state"] in (state, "cold"):
                return record
        return None

    record: Json = wait_for(is_so, "the standby never got so far")
    assert record["state"] == state, record
    return record


def begin(node: Node, generation: int, command: list[str], **more: Any) -> Json:
    prepared = node.prepare(generation, stop_grace=0.1)
    assert prepared is not None
    assert prepared["outcome"] == "done", prepared
    started = node.start(generation, command, **{"warm": ["json", "decimal"], **more})
    assert started is not None
    assert started["outcome"] == "done", started
    return started


SCRIPT = """
import sys, time
print("decimal" in sys.modules, "ran", flush=True)
time.sleep(1000)
"""


def test_the_second_generation_is_forked(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    first = begin(node, 1, command)
    assert "warm" not in first
    waiting = await_standby(node)
    second = begin(node, 2, command)
    assert second["warm"] == {"forked": True, "reason": ""}, (node.state / "x", second)
    wait_for(lambda: "True ran" in node.log(0, 2) and "True ran" in node.log(1, 2))
    assert "False ran" in node.log(0, 1)
    assert not any(map(is_alive, first["pids"].values()))
    assert node.pid("shim", 2) == waiting["pid"]
    # what a search by token finds
    for rank, pid in second["pids"].items():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert any(text.startswith(b"RELAUNCH_TOKEN=") for text in environment), rank
    stopped = node.stop(2)
    assert stopped is not None and stopped["outcome"] == "done"
    assert not any(map(is_alive, second["pids"].values()))
