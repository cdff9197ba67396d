"""Two Temporal servers may have a namespace, a fleet and a job of the same name.

On a node they are two jobs of two fleets.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, expect_done, is_alive, refusal, token, wait_for

from relaunch.agent.protocol import Token, parse_token

ONE, OTHER = "6c1e9ba4-1111", "0f9d2c77-2222"


def make_token(server: str, generation: int = 1, submission: int = 1) -> dict[str, Any]:
    return {**token(generation, submission), **({"server": server} if server else {})}


def prepare(node: Node, server: str, generation: int = 1, submission: int = 1) -> Any:
    fleet = f"{server}/default/gpus" if server else "default/gpus"
    return node.prepare(generation, token=make_token(server, generation, submission), fleet=fleet)


def run(node: Node, server: str) -> list[int]:
    expect_done(prepare(node, server))
    return list(expect_done(node.start(token=make_token(server)))["pids"].values())


@pytest.mark.parametrize("first", [ONE, ""])
def test_a_job_is_refused_while_ranks_of_its_namesake_live(node: Node, first: str) -> None:
    pids = run(node, first)
    answer = prepare(node, OTHER, submission=2)
    assert refusal(answer) == "other_fleet"
    assert "job j of fleet gpus" in answer["reason"]
    assert f"({first[:8]}" in answer["reason"] and "namespace default" in answer["reason"]
    assert all(map(is_alive, pids))
    assert expect_done(prepare(node, first, generation=2))["stopped"] == [[1, 1]], (
        "its own controller goes on as ever"
    )


def test_a_stop_of_a_namesake_stops_and_forbids_nothing_else(node: Node) -> None:
    pids = run(node, ONE)
    answer = expect_done(node.stop(token=make_token(OTHER, submission=9)))
    assert answer["stopped"] == []
    assert all(map(is_alive, pids))
    assert expect_done(node.stop(token=make_token(ONE)))["stopped"] == [[1, 1]]
    assert not any(map(is_alive, pids))


def test_what_the_node_lists_says_whose_it_is(node: Node) -> None:
    run(node, ONE)
    (job,) = expect_done(node.order("list"))["jobs"]
    assert (job["server"], job["namespace"], job["job"]) == (ONE, "default", "j")
    (living,) = expect_done(node.order("probe", within=5.0))["jobs"]
    assert (living["server"], living["fleet"]) == (ONE, f"{ONE}/default/gpus")
    watch = node.begin("watch", token=make_token(ONE), after_seq=0, heartbeat=0.2)
    assert watch.read_until("hello")["token"] == make_token(ONE)


def test_what_a_dead_shim_left_behind_is_found_by_its_server_too(
    node: Node, tmp_path: Path
) -> None:
    """A child with its own session outlives shim and rank.

    Only the token in its environment says whose it is.
    """
    expect_done(prepare(node, ONE))
    left = tmp_path / "left"
    script = (
        f"mkdir {left}.one 2>/dev/null && setsid sh -c 'echo $$ > {left}; exec sleep 1000' & exec "
        "sleep 1000"
    )
    expect_done(node.start(token=make_token(ONE), command=["sh", "-c", script]))
    pid = int(wait_for(lambda: left.exists() and left.read_text().strip()))
    helpers = [node.pid(of) for of in ("supervisor", "guard", "shim")]
    for number in (
        signal.SIGSTOP,
        signal.SIGKILL,
    ):  # first all stand still: each kills ranks when another is gone
        for helper in helpers:
            os.kill(helper, number)
    wait_for(lambda: not any(map(is_alive, helpers)))
    assert is_alive(pid)
    expect_done(node.stop(token=make_token(OTHER)))
    assert is_alive(pid)
    expect_done(node.stop(token=make_token(ONE)))
    assert not is_alive(pid)


@pytest.mark.parametrize("bad", ["a/b", "a\nb", 7])
def test_a_server_that_is_no_name_is_refused(node: Node, bad: Any) -> None:
    assert refusal(node.prepare(token={**token(1), "server": bad})) == "bad_order"


@pytest.mark.parametrize("made", [Token("ns", "j", 1, 2), Token("ns", "j", 1, 2, ONE)])
def test_the_text_of_a_token_is_read_back(made: Token) -> None:
    assert parse_token(made.text) == made


@pytest.mark.parametrize(
    "text", ["", "j", "ns/j/1", "ns/j/1/x", "ns/j/x/1", "s/ns/j/1/", "a/b/c/d/1/2", "//j/1/2"]
)
def test_what_is_no_token_is_none(text: str) -> None:
    assert parse_token(text) is None
