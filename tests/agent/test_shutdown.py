"""A node shuts down, or its unit, login or container is stopped: all processes get SIGTERM at once.

Ranks have their grace, and the node says why it stopped them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from real_node import Node, is_alive, python_command, wait_for

SAVES = """import os, signal, sys, time
def save(*_):
    print('saving', flush=True)
    while not os.path.exists(os.environ['GO']):
        time.sleep(0.02)
    print('saved', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print('up', flush=True)
while True:
    time.sleep(1)"""
ROLES = ("guard", "supervisor", "shim")


def run_that_saves(node: Node, go: Path) -> dict[str, int]:
    pids = node.run(
        1, python_command(SAVES), rank_env=[{"GO": str(go)}] * 2, stop_grace=60.0, lease=60.0
    )
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    return pids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ranks_have_their_grace_where_the_node_stops(
    node: Node, tmp_path: Path, number: signal.Signals
) -> None:
    run_that_saves(node, tmp_path / "go")
    own = {role: node.pid(role) for role in ROLES}
    watch = node.watch()
    watch.read_until("heartbeat")
    for pid in own.values():
        os.kill(pid, number)
    fenced = watch.read_observation("Fenced")
    assert fenced["why"] == "terminated"
    assert number.name in fenced["reason"]
    wait_for(lambda: "saving" in node.log(0) and "saving" in node.log(1))
    assert watch.read_until("heartbeat")["alive"] == [0, 1]
    assert {role: node.pid(role) for role in ROLES} == own, "one of them did not outlive it"
    (tmp_path / "go").touch()
    ends = [watch.read_observation("RankExited") for _ in range(2)]
    assert [(end["exit_code"], end["stopped"]) for end in ends] == [(0, True), (0, True)]
    assert watch.read_until("end") == {"seq": 3}
    wait_for(lambda: not node.list_leftovers(), "what has nothing left to do keeps the node up")


def test_a_rank_that_ends_of_it_first_hides_nothing(node: Node, tmp_path: Path) -> None:
    pids = node.run(
        1,
        ["sh", "-c", '[ "$R" = 0 ] && exec sleep 1000; exec "$@"', "sh", *python_command(SAVES)],
        rank_env=[{"R": "0"}, {"R": "1", "GO": str(tmp_path / "go")}],
        stop_grace=60.0,
        lease=60.0,
    )
    wait_for(lambda: "up" in node.log(1))
    watch = node.watch()
    os.kill(pids["0"], signal.SIGTERM)
    assert watch.read_observation("RankExited")["signal"] == signal.SIGTERM
    os.kill(node.pid("shim"), signal.SIGTERM)
    assert watch.read_observation("Fenced")["why"] == "terminated"
    (tmp_path / "go").touch()
    assert watch.read_observation("RankExited")["exit_code"] == 0


def test_a_supervisor_without_a_shim_ends_with_its_node(node: Node) -> None:
    node.run(1, lease=1000.0)
    supervisor = node.pid("supervisor")
    watch = node.watch()
    os.kill(node.pid("shim"), signal.SIGKILL)
    watch.read_until("end")
    os.kill(supervisor, signal.SIGTERM)
    wait_for(lambda: not is_alive(supervisor))
