"""An order is for one node, one session with it, and some of them for some seconds."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_node import Json, Node, boottime, expect_done, refusal, token

from relaunch.agent.session import BOUND
from relaunch.backends.base import PrepareOrder
from relaunch.backends.link import Link
from relaunch.backends.pipe import ProcessPipe
from relaunch.backends.session import BOUND_COMMANDS, AgentSession
from relaunch.generation import Token


def record(node: Node) -> list[Json]:
    """Have a node carry out an order of each kind; return the lines of its session that said so."""
    sent: list[Json] = []
    send = node.send

    def note(line: Json) -> None:
        sent.append(json.loads(json.dumps(line)))
        send(line)

    node.send = note  # type: ignore[method-assign]
    node.run(1, ranks=1)
    expect_done(node.stop())
    program = {"command": [sys.executable, "x.py"], "workdir": None, "env": {}, "rank_env": [{}]}
    expect_done(node.order("warm", token=token(2), keep=60.0, warm=["json"], **program))
    expect_done(node.order("diagnose", id="d1", level=1, within=5.0))
    reset = {"id": "x1", "boot_id": node.make_reboot_order()["boot_id"], "gpus": []}
    expect_done(node.order("reset-gpus", **reset, within=5.0))
    assert refusal(node.order("reboot", **node.make_reboot_order())) == "cannot_reboot"
    node.send = send  # type: ignore[method-assign]
    return [line for line in sent if line.get("command") in BOUND]


def replay(node: Node, line: Json) -> Json | None:
    order = dict(line["order"])
    return node.order(line["command"], **{name: order[name] for name in order})


def list_traces(node: Node) -> list[str]:
    return [path.name for path in node.state.iterdir() if path.name not in ("links.json",)]


def test_recorded_orders_are_worth_nothing_elsewhere_or_later(
    make_node: Callable[..., Node], agent: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "tools").mkdir()
    for name in ("dcgmi", "nvidia-smi"):
        (tmp_path / "tools" / name).write_text(f"#!/bin/sh\necho $0 >> {tmp_path}/calls\n")
        (tmp_path / "tools" / name).chmod(0o755)
    first, other = make_node("n1"), make_node("n2")
    lines = record(first)
    assert {line["command"] for line in lines} == set(BOUND)
    before = (tmp_path / "calls").read_text()
    first.end_session()
    expect_done(first.order("list"))  # the next session with the same node
    rebooted = (first.state / "reboots.jsonl").read_bytes()
    for node in (other, first):
        for line in lines:
            assert refusal(replay(node, line)) == "other_session", line["command"]
    assert list_traces(other) == []
    assert (first.state / "reboots.jsonl").read_bytes() == rebooted
    assert [one.generation for one in first_generations(first)] == [1]
    # nor as the order of a call that has no session
    for line in (lines[0], lines[-1]):
        done = subprocess.run(
            [other.interpreter, "-S", str(agent), line["command"]],
            input=json.dumps(line["order"]), env=other.environment,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert refusal(json.loads(done.stdout)) == "other_session"
    assert list_traces(other) == []
    assert (tmp_path / "calls").read_text() == before


def first_generations(node: Node) -> list[Token]:
    jobs = expect_done(node.order("list"))["jobs"]
    return [
        Token(job["namespace"], job["job"], each["submission"], each["generation"])
        for job in jobs
        for each in job["generations"]
    ]


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("session", [None, "c0ffee", 7])
def test_an_order_without_the_key_of_its_session_is_refused(node: Node, session: object) -> None:
    expect_done(node.order("list"))
    for command in BOUND:
        assert refusal(node.order(command, session=session)) == "other_session"
    assert list_traces(node) == []


def test_an_order_that_comes_too_late_is_not_carried_out(node: Node) -> None:
    for command, order in (
        ("reboot", node.make_reboot_order()),
        ("prepare", {"token": token(1), "address": "127.0.0.1"}),
    ):
        answer = node.order(command, **order, until=boottime() - 0.5)
        assert refusal(answer) == "late"
        assert answer is not None and abs(answer["stamp"] - boottime()) < 60
    assert list_traces(node) == []
    assert refusal(node.order("reboot", **node.make_reboot_order(), until=boottime() + 60)) == (
        "cannot_reboot"
    )


def test_both_sides_bind_the_same_commands() -> None:
    assert BOUND_COMMANDS == BOUND


async def test_a_node_whose_clock_has_drifted_away_gets_its_orders(node: Node, agent: Path) -> None:
    async def connect() -> ProcessPipe:
        return await ProcessPipe.start(
            node.interpreter, "-S", str(agent), "session", env=node.environment
        )

    session = AgentSession("n1", connect)
    await session.list()
    link = session._link
    assert isinstance(link, Link)
    link.binder.set_clock(boottime() - 3600)  # as if the node's had gained an hour
    order = PrepareOrder(
        Token("default", "j", 1, 1), "127.0.0.1", (0,), 30.0, 1.0, 1.0, 3.0, 30.0, 0.2
    )
    prepared = await session.prepare(order)
    assert getattr(prepared, "nonce", None), prepared
    await session.close()
    await asyncio.sleep(0)
