"""One node in two fleets: the first one holds it until nothing of it lives there any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_node import TIMES, Node, expect_done, is_alive, refusal, token, wait_for

from relaunch.agent.state import read_boot_id
from tests.doubles.install import calls, install_tool

LAB, OTHER = "default/lab", "default/other"
GPU = "00000000:05:00.0"


def prepare(node: Node, fleet: str | None, job: str = "k", **more: Any) -> Any:
    return node.prepare(
        token=token(1, job=job), **({} if fleet is None else {"fleet": fleet}), **more
    )


def repair(node: Node, command: str, fleet: str) -> Any:
    order = {
        "id": "r1",
        "boot_id": read_boot_id(node.state),
        "reason": "x",
        "gpus": [GPU],
        "within": 20.0,
        "level": 1,
        "fleet": fleet,
    }
    return node.order(command, **order)


def runs(node: Node, fleet: str = LAB) -> list[int]:
    """Ranks of job j, launched by this fleet."""
    expect_done(node.prepare(fleet=fleet))
    return list(expect_done(node.start())["pids"].values())


def test_a_launch_is_refused_where_ranks_of_another_fleet_live(
    node: Node,
) -> None:
    pids = runs(node)
    answer = prepare(node, OTHER)
    assert refusal(answer) == "other_fleet"
    assert answer["fleet"] == LAB and "fleet lab" in answer["reason"]
    # Two namespaces may have fleets of one name.
    assert "namespace default" in prepare(node, "prod/other")["reason"]
    assert all(map(is_alive, pids))
    assert expect_done(prepare(node, LAB))["stopped"] == [], (
        "another job of the same fleet shares the node"
    )


def test_what_was_only_prepared_counts_as_living(node: Node) -> None:
    expect_done(node.prepare(fleet=LAB))
    assert refusal(prepare(node, OTHER)) == "other_fleet"
    expect_done(node.start())
    assert refusal(prepare(node, OTHER)) == "other_fleet"


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("way", ["stop", "end", "reboot"])
def test_no_owner_goes_stale(node: Node, way: str) -> None:
    if way == "end":
        expect_done(node.prepare(fleet=LAB))
        expect_done(node.start(command=["true"]))
    else:
        runs(node)
    if way == "stop":
        expect_done(node.stop())
    if way == "reboot":
        node.kill_everything()
        (node.state / "boot_id").write_text("another\n")
    wait_for(lambda: prepare(node, OTHER)["outcome"] == "done")
    assert refusal(node.prepare(2, fleet=LAB)) == "other_fleet", "and now it is the other's"


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(("first", "second"), [(None, OTHER), (LAB, None), (None, None)])
def test_orders_that_name_no_fleet_block_no_other(
    node: Node, first: str | None, second: str | None
) -> None:
    expect_done(node.prepare(**({} if first is None else {"fleet": first})))
    expect_done(node.start())
    assert prepare(node, second)["outcome"] == "done"


def test_a_later_submission_replaces_the_one_of_any_fleet(
    node: Node,
) -> None:
    pids = runs(node)
    answer = expect_done(node.prepare(token=token(1, submission=2), fleet=OTHER))
    assert answer["stopped"] == [[1, 1]]
    assert not any(map(is_alive, pids))


def test_a_repeated_launch_is_answered_as_before(node: Node) -> None:
    first = expect_done(node.prepare(fleet=LAB))
    assert node.prepare(fleet=LAB) == first


@pytest.mark.parametrize("command", ["diagnose", "reset-gpus", "reboot"])
def test_no_other_fleet_examines_or_repairs_under_its_ranks(
    node: Node, programs: Path, command: str
) -> None:
    install_tool(programs, "dcgmi")
    install_tool(programs, "nvidia-smi")
    pids = runs(node)
    answer = repair(node, command, OTHER)
    assert refusal(answer) == "other_fleet"
    assert "fleet lab" in answer["reason"] and "(pids " in answer["reason"]
    assert refusal(repair(node, command, LAB)) == "busy"
    assert (calls(programs, "dcgmi"), calls(programs, "nvidia-smi")) == ([], [])
    assert all(map(is_alive, pids)) and not (node.state / "reboots.jsonl").exists()


def test_a_node_held_by_another_fleet_is_refused_by_its_name(node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", stdout="{}", seconds=30)
    diagnosing = node.begin("diagnose", id="r1", level=1, within=60.0, fleet=LAB)
    # the lock comes before the record that says whose it is
    wait_for((node.state / "held.json").exists)
    assert expect_done(node.order("list"))["held"]["fleet"] == LAB
    assert json.loads((node.state / "held.json").read_text())["fleet"] == LAB
    for answer in (prepare(node, OTHER), repair(node, "reboot", OTHER)):
        assert refusal(answer) == "other_fleet"
        assert answer["reason"].endswith("lab (diagnose, r1)")
    assert refusal(prepare(node, LAB)) == "held"
    assert refusal(prepare(node, None)) == "held"
    diagnosing.close()


def test_the_node_says_whose_ranks_live_there(node: Node) -> None:
    runs(node)
    (job,) = expect_done(node.order("list"))["jobs"]
    assert [one["fleet"] for one in job["generations"]] == [LAB]
    assert [one["fleet"] for one in expect_done(node.order("probe", within=5.0))["jobs"]] == [LAB]


def test_of_two_fleets_that_come_at_once_one_is_refused(node: Node) -> None:
    node.session()
    for round_ in range(1, 6):
        streams = [
            node.begin(
                "prepare",
                token=token(round_, job=fleet[8:]),
                address="127.0.0.1",
                ranks=[0],
                fleet=fleet,
                **TIMES,
            )
            for fleet in (LAB, OTHER)
        ]
        answers = [stream.read_rest()[-1] for stream in streams]
        outcomes = sorted(answer["outcome"] for answer in answers)
        assert outcomes == ["done", "refused"], answers
        assert {answer.get("why") for answer in answers} <= {None, "other_fleet"}
        for fleet in (LAB, OTHER):
            expect_done(
                node.order(
                    "stop", token=token(round_, job=fleet[8:]), stop_grace=1.0, stuck_after=3.0
                )
            )


@pytest.mark.parametrize("fleet", [1, "a\0b", ["x"]])
def test_a_fleet_that_is_no_text_is_refused(node: Node, fleet: Any) -> None:
    assert refusal(node.prepare(fleet=fleet)) == "bad_order"
