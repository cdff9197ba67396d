"""Nodes that are slower than the others: which are named, and what a job does about one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.evidence.stragglers import (
    WINDOWS,
    SlowNode,
    describe_slow_node,
    find_slow_nodes,
)
from relaunch.job.apply import finish, resubmit
from relaunch.job.events import CancelRequested, DeadlinePassed, NodesExamined, NodesSlow
from relaunch.job.slow_nodes import (
    KEPT,
    MAX_EXAMINATIONS,
    MAX_OF_GENERATION,
    SLOW_NODE,
    list_slow,
)
from relaunch.job.state import Examine, ExaminedNode, Ignore, JobState, LostNode, Phase, Relaunch
from relaunch.spec.policy import Strategy, preset, resolve
from tests.recovery.builders import T0, at, exited, fault, policy, record, running, step

SLOW = SlowNode("n2", 0.412, 0.258, 4, 64, 600.0)


def windows(*rows: dict[str, float]) -> list[dict[str, float]]:
    """Ten equal windows, or those given."""
    return list(rows) if len(rows) > 1 else [*rows] * WINDOWS


def list_named(*rows: dict[str, float], slower_by: float = 1.2) -> list[str]:
    return [one.node for one in find_slow_nodes(windows(*rows), slower_by)]


def times(*seconds: float) -> dict[str, float]:
    return {f"n{number}": each for number, each in enumerate(seconds, start=1)}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((times(0.25, 0.25, 0.4, 0.26),), ["n3"]),
        ((times(0.25, 0.25, 0.29, 0.26),), []),  # within 1.2
        ((times(0.25),), []),
        ((times(0.25, 0.36),), []),  # one of two: 1.5
        ((times(0.25, 0.38),), ["n2"]),
        ((times(0.2, 0.25, 0.3, 0.35, 0.45),), []),  # all differ: stages of a pipeline
        ((times(0.2, 0.2, 0.4, 0.4),), []),  # two kinds of nodes
        ((times(0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.4, 0.5),), ["n8", "n7"]),
        ((*[times(0.2, 0.2, 0.4)] * 9, times(0.2, 0.2, 0.2)), []),  # not in each window
        ((*[times(0.2, 0.2, 0.4)] * 9, times(0.2, 0.2)), []),  # it was silent in one
        ((*[times(0.2, 0.2, 0.4)] * 9,), []),  # not for long enough
        ((times(0.2, 0.2, 0.2), *[times(0.2, 0.2, 0.4)] * 10), ["n3"]),
    ],
)
def test_a_node_is_named_that_is_slower_for_long(
    rows: tuple[dict[str, float], ...], expected: list[str]
) -> None:
    assert list_named(*rows) == expected


def test_the_limit_is_that_of_the_policy() -> None:
    row = times(0.25, 0.25, 0.25, 0.4)
    assert list_named(row, slower_by=1.5) == ["n4"] and list_named(row, slower_by=1.7) == []
    (found,) = find_slow_nodes(windows(row), 1.2)
    assert (found.seconds, found.others, found.nodes) == (0.4, 0.25, 4)


def test_a_report_has_the_numbers() -> None:
    assert describe_slow_node(SLOW) == (
        "node n2 is 1.6 times slower than the others: 412 ms of work a step, "
        "median 258 ms (of 64 ranks on 4 nodes, over the last 10 min)"
    )
    slow = SlowNode("n2", 30.0, 15.0, 2, 2, 90.0, "step")
    assert describe_slow_node(slow).endswith(
        ": 30.0 s a step, median 15.0 s (of 2 ranks on 2 nodes, over the last 90 s)"
    )


# --- what a job does about it


def job(action: str = "report", **changes: object) -> JobState:
    return running(policy=policy(stragglers={"action": action}), nodes=4, **changes)


def slow(job: JobState, *nodes: str) -> NodesSlow:
    return NodesSlow(job.generation, tuple(replace(SLOW, node=node) for node in nodes))


def test_by_default_a_slow_node_is_reported_once() -> None:
    before = job()
    after, decision = step(before, slow(before, "n2", "n9"), at(600))
    assert isinstance(decision, Ignore)
    assert [(one.slow.node, one.place, one.examined) for one in after.slow_nodes] == [
        ("n2", 1, False)
    ]
    assert after.notices == (describe_slow_node(SLOW),)
    assert replace(after, slow_nodes=(), notices=()) == before
    assert step(after, slow(after, "n2"), at(1200))[0] == after


def test_so_many_slow_nodes_are_kept() -> None:
    before = running(nodes=MAX_OF_GENERATION + 4)
    for generation in range(1, 5):
        before = replace(before, generation=generation)
        names = (f"n{number}" for number in range(1, MAX_OF_GENERATION + 4))
        before = record(before, slow(before, *names))
        assert len(list_slow(before)) == MAX_OF_GENERATION
    assert len(before.slow_nodes) == KEPT


@pytest.mark.parametrize(
    ("node", "place", "said"),
    [
        ("n2", 3, "speaks against the node"),
        ("n4", 1, "speaks for a difference of work"),
        ("n2", 1, None),
        ("n3", 0, None),
    ],
)
def test_a_report_says_whether_slowness_follows_the_node(
    node: str, place: int, said: str | None
) -> None:
    """Node n2 was slow in the second place."""
    before = record(job(), slow(job(), "n2"))
    slots = list(before.slots)
    old = next(index for index, slot in enumerate(slots) if slot.node == node)
    slots[old], slots[place] = slots[place], slots[old]
    moved = replace(before, generation=2, slots=tuple(slots))
    moved = record(moved, slow(moved, node, "n1"))
    sentence = next(one for one in moved.notices[1:] if one.startswith(f"node {node} "))
    assert (said in sentence) if said else sentence.endswith(")")


def test_a_slow_node_is_examined_where_the_policy_says_so() -> None:
    before = job("examine")
    after, decision = step(before, slow(before, "n2", "n3"), at(600))
    assert isinstance(decision, Examine) and decision.nodes == ("n2",)
    assert (after.phase, [one.examined for one in after.slow_nodes]) == (
        Phase.EXAMINING,
        [True, False],
    )
    assert after.incident is not None
    assert (after.incident.cause, after.incident.code) == (Cause.NODE_FAULT, SLOW_NODE)


def examine(before: JobState, node: str, verdict: Verdict | None) -> tuple[JobState, Relaunch]:
    """A slow node is examined; without a verdict within the time."""
    after, decision = step(before, slow(before, node), at(600))
    assert isinstance(decision, Examine)
    if verdict is None:
        after, then = step(after, DeadlinePassed(), decision.until)
    else:
        after, then = step(
            after,
            NodesExamined(after.generation, (ExaminedNode(node, verdict, "so it is"),)),
            at(700),
        )
    assert isinstance(then, Relaunch)
    return after, then


@pytest.mark.parametrize("preset_name", ["default", "ecs-reboot-once", "gputasker", "modelarts"])
@pytest.mark.parametrize("verdict", [Verdict.HEALTHY, Verdict.UNKNOWN, None])
def test_a_node_that_is_only_slow_is_kept(verdict: Verdict | None, preset_name: str) -> None:
    rules = resolve({"extends": preset_name, "stragglers": {"action": "examine"}})
    after, decision = examine(running(policy=rules, nodes=4), "n2", verdict)
    assert decision.strategy is Strategy.RESTART_IN_PLACE
    assert (decision.without, decision.avoid, decision.spent) == ((), (), False)
    assert (after.avoided, after.restarts_spent) == ((), 0)


def test_a_slow_node_that_is_unhealthy_is_replaced() -> None:
    after, decision = examine(job("examine"), "n2", Verdict.UNHEALTHY)
    assert decision.strategy is Strategy.REPLACE_NODE
    assert (decision.without, decision.avoid, decision.spent) == (("n2",), ("n2",), False)
    assert [one.node for one in after.avoided if one.isolated] == ["n2"]


@pytest.mark.parametrize("verdict", [Verdict.HEALTHY, Verdict.UNKNOWN, None])
def test_the_policy_can_replace_a_slow_node(verdict: Verdict | None) -> None:
    after, decision = examine(job("replace"), "n2", verdict)
    assert decision.strategy is Strategy.REPLACE_NODE
    assert (decision.without, decision.avoid, decision.spent) == (("n2",), (), False)
    assert (after.avoided, after.restarts_spent) == ((), 0)
    _, decision = examine(job("replace"), "n2", Verdict.UNHEALTHY)
    assert decision.avoid == ("n2",)


def test_examinations_of_slow_nodes_are_few() -> None:
    now = job("examine")
    for number in range(1, MAX_EXAMINATIONS + 1):
        now, _ = examine(now, f"n{number}", Verdict.HEALTHY)
        now = replace(now, phase=Phase.RUNNING, incident=None, recovering=None)
        again, decision = step(now, slow(now, f"n{number}"), at(9000))
        assert isinstance(decision, Ignore) and again.phase is Phase.RUNNING
    _, decision = step(now, slow(now, "n4"), at(9000))
    assert isinstance(decision, Ignore)


def test_the_next_submission_knows_no_slow_node() -> None:
    before, _ = step(job("examine"), slow(job(), "n2"), at(5))
    ended, _ = step(before, CancelRequested("", "ada"), at(6))
    assert [one.examined for one in ended.slow_nodes] == [True]
    assert resubmit(finish(ended, at(7)), 2000, "ada", at(8), False, ()).slow_nodes == ()


def test_no_node_is_examined_for_that_beside_another_fault() -> None:
    now = job("examine")
    lost = replace(now, phase=Phase.NODE_LOST, lost=(LostNode("n1", T0, "cut"),))
    assert isinstance(step(lost, slow(lost, "n2"))[1], Ignore)
    open_, _ = step(now, fault(now, exited(code=1)))
    open_ = replace(open_, phase=Phase.RUNNING)
    assert isinstance(step(open_, slow(open_, "n2"))[1], Ignore)
    gone = slow(now, "n9")
    assert isinstance(step(now, gone)[1], Ignore)
    assert isinstance(step(now, replace(slow(now, "n2"), generation=7))[1], Ignore)


def test_the_policy_takes_off_as_yaml_reads_it() -> None:
    assert preset("default").stragglers.action == "report"
    rules = resolve({"stragglers": {"action": False}})
    assert rules.stragglers.action == "off"
