"""The watch of a fleet leaves out only what the fleet knows, and no time of the fleet passes by."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaunch.pool.events import ProbeOrder, ProbeResults, QuarantineCommand
from relaunch.pool.inventory import GpuUse
from relaunch.pool.nodes import INVENTORY_INTERVAL, SWEEP_INTERVAL
from relaunch.pool.rounds import is_news
from relaunch.pool.scheduler import WATCH
from relaunch.pool.state import LiveGeneration, NodeProbe
from tests.recovery.fleet_builders import Desk, began, gpus, nodes
from tests.recovery.generated import searched

NAMES = ("n1", "n2", "n3")
FREE = gpus(8)
INVENTORIES = (None, FREE, replace(FREE, used=(GpuUse((1,), "alice (python, pid 7)"),)))
ANSWERS = st.builds(
    NodeProbe,
    node=st.just(""),
    silent=st.sampled_from(("", "no answer", "connection refused")),
    boot_id=st.sampled_from(("a", "b")),
    busy=st.sampled_from(("", "grace (diagnose) works on it")),
    generations=st.sampled_from(((), (LiveGeneration("llama", 1, 1),))),
    inventory=st.sampled_from(INVENTORIES),
    inventory_age=st.sampled_from((timedelta(0), timedelta(seconds=7))),
)


def make_desk() -> Desk:
    return Desk(*nodes(*NAMES, gpus=8))


@searched(400)
@given(st.lists(st.tuples(ANSWERS, ANSWERS, ANSWERS), min_size=1, max_size=4))
def test_a_fleet_that_learns_only_news_misses_no_answer(
    rounds: list[tuple[NodeProbe, ...]],
) -> None:
    desk = make_desk()
    for answers in rounds:
        probes = [replace(one, node=name) for one, name in zip(answers, NAMES, strict=True)]
        known = desk.scheduler.list_known(desk.state, desk.now)
        news = tuple(
            probe
            for one, probe in zip(known, probes, strict=True)
            if is_news(one, probe, was_pending=False)
        )
        before = desk.state
        desk.learn(ProbeResults(news, is_sweep=True))
        for node, old, probe in zip(desk.state.nodes, before.nodes, probes, strict=True):
            assert node.probe == replace(probe, inventory=None, inventory_age=timedelta(0))
            assert node.inventory == (probe.inventory or old.inventory)
        # What was reported is no news again, but for ranks that no job accounts for.
        again = desk.scheduler.list_known(desk.state, desk.now)
        for one, probe in zip(again, probes, strict=True):
            assert is_news(one, probe, was_pending=False) == bool(probe.generations)


def test_a_reading_that_does_not_end_is_news_the_second_time() -> None:
    desk = make_desk()
    (known, *_) = desk.scheduler.list_known(desk.state, desk.now)
    pending = replace(desk.probe_node("n1", False), inventory_pending=True)
    assert not is_news(known, pending, was_pending=False)
    assert is_news(known, pending, was_pending=True)


def test_gpus_are_news_whenever_they_are_not_as_last_read() -> None:
    desk = make_desk()
    same = desk.probe_node("n1", True)
    used = replace(same, inventory=gpus(8, (1, "alice (python, pid 7)")))
    known = {one.node: one for one in desk.scheduler.list_known(desk.state, desk.now)}
    assert not is_news(known["n1"], same, was_pending=False)
    assert is_news(known["n1"], used, was_pending=False)
    desk.learn(ProbeResults((used,)))
    later = {one.node: one for one in desk.scheduler.list_known(desk.state, desk.now)}
    assert is_news(later["n1"], same, was_pending=False)
    assert not is_news(later["n1"], used, was_pending=False)
    assert later["n2"] == known["n2"]


def test_gpus_in_a_repair_or_in_full_use_are_not_read() -> None:
    desk = make_desk()
    desk.claim("llama", 1)
    (job,) = desk.granted()["llama"]
    free = next(name for name in NAMES if name != job)
    desk.learn(began(free))
    desk.now += timedelta(seconds=90)
    known = {one.node: one.read_in for one in desk.scheduler.list_known(desk.state, desk.now)}
    other = next(name for name in NAMES if name not in (job, free))
    assert (known[job], known[free]) == (None, None)
    assert known[other] == INVENTORY_INTERVAL.total_seconds() - 90


def test_a_watched_fleet_neither_sweeps_nor_wakes_by_itself() -> None:
    desk = make_desk()
    watched = frozenset({WATCH})
    assert desk.scheduler.next_wake(desk.state, desk.now, watched) is None
    desk.now += timedelta(hours=3)
    assert desk.scheduler.schedule(desk.state, desk.now, watched).orders == ()
    assert desk.scheduler.schedule(desk.state, desk.now, frozenset()).orders != ()
    # The end of a watch counts as a sweep: all nodes have been probed.
    desk.learn(ProbeResults((), is_sweep=True))
    assert desk.go() == [] and desk.of(ProbeOrder) == []
    assert desk.scheduler.next_wake(desk.state, desk.now) == desk.now + SWEEP_INTERVAL
    desk.now += SWEEP_INTERVAL
    (probe,) = desk.settle()
    assert isinstance(probe, ProbeOrder) and probe.nodes == NAMES


@pytest.mark.parametrize("unsettled", ["waits", "drain"])
def test_a_watched_fleet_wakes_where_time_alone_may_decide(unsettled: str) -> None:
    desk = make_desk()
    if unsettled == "waits":
        desk.claim("llama", 3)
        desk.claim("gpt", 1)
    else:
        desk.claim("llama", 1)
        desk.learn(QuarantineCommand("n1", "loud", "grace", drain_within=timedelta(minutes=30)))
        desk.settle()
    wake = desk.scheduler.next_wake(desk.state, desk.now, frozenset({WATCH}))
    assert wake is not None and wake <= desk.now + SWEEP_INTERVAL


def test_a_driver_that_hangs_is_left_to_the_watch() -> None:
    desk = make_desk()
    desk.now += INVENTORY_INTERVAL
    desk.unread.add("n1")
    desk.look()
    desk.busy = {WATCH}
    desk.now += timedelta(seconds=10)
    assert desk.settle() == []
    assert desk.scheduler.next_wake(desk.state, desk.now, frozenset(desk.busy)) is None
    desk.busy = set()
    (probe,) = desk.settle()
    assert isinstance(probe, ProbeOrder) and probe.inventories == ("n1",)
    desk.busy = {WATCH}
    desk.claim("llama", 3)
    wake = desk.scheduler.next_wake(desk.state, desk.now, frozenset(desk.busy))
    assert wake is not None and wake - desk.now <= timedelta(seconds=2)
