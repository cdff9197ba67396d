"""Killed between any two steps, the agent converges on the same orders.

Every rank is started exactly once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_node import Node, is_alive, wait_for

COUNTED = ["sh", "-c", 'echo x >> "$COUNT/$R"; exec sleep 1000']


def launch(node: Node, generation: int, count: Path) -> list[str]:
    """Give both orders until they are answered, as a controller does.

    Return the outcomes, silence in a row counted once.
    """
    outcomes: list[str] = []
    for order in ("prepare", "start"):
        for _ in range(20):
            if order == "prepare":
                answer = node.prepare(generation)
            else:
                own = [{"R": f"{generation}-0"}, {"R": f"{generation}-1"}]
                answer = node.start(generation, COUNTED, env={"COUNT": str(count)}, rank_env=own)
            if answer is not None:
                outcomes.append(answer.get("why", answer["outcome"]))
                break
            if outcomes[-1:] != ["silent"]:
                outcomes.append("silent")
    return outcomes


def list_starts(folder: Path, generation: int) -> list[str]:
    """What each rank has written: an x at each start."""
    files = [folder / f"{generation}-{rank}" for rank in (0, 1)]
    return [file.read_text() if file.exists() else "" for file in files]


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("name", ["prepare.reserved", "prepare.stopped", "prepare.forked"])
def test_prepare_again_after_it_was_killed(node: Node, tmp_path: Path, name: str) -> None:
    old = node.run(1)
    failpoint = node.set_failpoint(name)
    assert launch(node, 2, tmp_path) == ["silent", "done", "done"]
    assert not failpoint.exists()
    assert not any(map(is_alive, old.values()))
    wait_for(lambda: list_starts(tmp_path, 2) == ["x\n", "x\n"])


def test_a_shim_killed_on_receiving_the_start_can_prepare_again(node: Node, tmp_path: Path) -> None:
    node.set_failpoint("start.received")
    assert launch(node, 1, tmp_path) == ["done", "silent", "not_prepared"]
    assert launch(node, 1, tmp_path) == ["done", "done"]
    wait_for(lambda: list_starts(tmp_path, 1) == ["x\n", "x\n"])


@pytest.mark.parametrize(
    ("name", "then"), [("start.forking", "cannot_start"), ("start.forked", "done")]
)
def test_a_shim_killed_while_forking_leaves_no_rank_and_no_retry(
    node: Node, tmp_path: Path, name: str, then: str
) -> None:
    node.prepare(1)
    wait_for((node.folder() / "supervisor.json").exists)
    node.set_failpoint(name)
    assert launch(node, 1, tmp_path) == ["done", "silent", then]
    watch = node.watch()
    assert watch.read_observation("ShimDied")["seq"] == 1
    assert "end" in watch.read_rest()[-1]
    refused = node.prepare(1)
    assert refused is not None
    assert refused["why"] == "not_above"
    assert launch(node, 2, tmp_path) == ["done", "done"]
    wait_for(lambda: list_starts(tmp_path, 2) == ["x\n", "x\n"])
    assert set(list_starts(tmp_path, 1)) <= {"", "x\n"}, (
        "killed before or after it had written, but started only once"
    )


@pytest.mark.parametrize(("name", "exits"), [("shim.reaped", 0), ("shim.journaled", 1)])
def test_a_shim_killed_with_an_exit_in_hand(
    node: Node, tmp_path: Path, name: str, exits: int
) -> None:
    go = tmp_path / "go"
    waits = ["sh", "-c", 'while [ ! -e "$GO" ]; do sleep 0.02; done']
    pids = node.run(1, waits, rank_env=[{"GO": str(go)}, {"GO": "/nowhere"}])
    node.set_failpoint(name)
    watch = node.watch()
    go.touch()
    kinds = [line["observation"]["kind"] for line in watch.read_rest() if "observation" in line]
    assert kinds == ["RankExited"] * exits + ["ShimDied"]
    wait_for(lambda: not any(map(is_alive, pids.values())))


@pytest.mark.parametrize("name", ["stop.reserved", "stop.killed"])
def test_stop_again_after_it_was_killed(node: Node, name: str) -> None:
    pids = node.run(1)
    node.set_failpoint(name)
    assert node.stop() is None
    refused = node.prepare(1)
    assert refused is not None
    assert refused["why"] == "stopped"
    answer = node.stop()
    assert answer is not None
    assert answer["outcome"] == "done"
    assert not any(map(is_alive, pids.values()))


def test_a_supervisor_killed_while_sending_loses_no_observation(node: Node) -> None:
    node.run(1, ["sh", "-c", "exit $R"], rank_env=[{"R": "3"}, {"R": "4"}])
    wait_for(lambda: len(node.journal()) == 2)
    node.set_failpoint("supervisor.sending")
    watch = node.watch()
    assert [watch.read_observation("RankExited")["seq"] for _ in range(2)] == [1, 2]
