"""The times of steps that ranks report, and the nodes that are slow by them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from relaunch.activities.stragglers import StepTimes
from relaunch.evidence.stragglers import SlowNode
from relaunch.job.events import NodesSlow
from relaunch.spec.policy import StragglerLimits
from tests.activities.harness import stand
from tests.fakes.nodes import Progress, Script

T0 = datetime(2026, 11, 23, tzinfo=UTC)
BEAT = 10.0
LIMITS = StragglerLimits()


class Gang:
    """Simulated ranks, whose heartbeats come every 10 s with some delay."""

    def __init__(self, chance: random.Random, nodes: int, ranks: int, limits: Any = LIMITS) -> None:
        self.chance, self.ranks = chance, ranks
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.times = StepTimes(limits, BEAT, 0.0)
        self.found: list[SlowNode] = []

    def play(
        self,
        minutes: float,
        report: Callable[[str, int, float], tuple[int, float, dict[str, Any]]],
    ) -> list[str]:
        """Play for some minutes; return the nodes that were found to be slow.

        Args:
            minutes: How long.
            report: Returns what a rank of a node reports at a second: its step, when it reached
                that, and the rest.
        """
        for beat in range(int(minutes * 60 / BEAT)):
            now = beat * BEAT
            for place, node in enumerate(self.nodes):
                late = self.chance.uniform(0.0, 0.3)
                for local in range(self.ranks):
                    rank = place * self.ranks + local
                    step, at, value = report(node, rank, now)
                    moment = T0 + timedelta(seconds=at + late)
                    self.times.add(node, rank, step, moment, value)
            if self.times.close_window(now):
                self.found += self.times.find()
        return sorted({one.node for one in self.found})


def work(busy: float, phase: str | None = None) -> dict[str, Any]:
    return {"phase": phase, "values": {"busy_s": busy}}


def _factor(gang: Gang) -> float:
    return 1.5 if len(gang.nodes) > 2 else 2.0


def play_lockstep(seed: int, slow: str | None) -> list[str]:
    """Ranks in lockstep: jitter, warm-up, evaluations, batches of different lengths."""
    chance = random.Random(seed)
    gang = Gang(chance, chance.choice((2, 3, 4, 8, 16)), chance.choice((1, 2)))
    usual = chance.choice((0.02, 0.3, 4.0))
    jitter, batches = chance.uniform(0.0, 0.1), chance.choice((0.0, 0.1, 0.3))
    warm_up = chance.uniform(0.0, 120.0)
    evaluates = chance.choice((math.inf, 300.0))
    is_announced = chance.random() < 0.5
    kinds = {node: chance.uniform(0.97, 1.03) for node in gang.nodes}

    def report(node: str, rank: int, now: float) -> tuple[int, float, dict[str, Any]]:
        step = int(now / (1.5 * usual))
        if now % evaluates < 60.0:
            step = int((now - now % evaluates) / (1.5 * usual))
            phase = "evaluation" if is_announced and rank == 0 else None
        else:
            phase = None
        busy = usual * kinds[node] * chance.lognormvariate(0.0, math.hypot(jitter, batches))
        busy *= 3.0 if now < warm_up and chance.random() < 0.5 else 1.0
        busy *= _factor(gang) if node == slow else 1.0
        return step, step * 1.5 * usual, work(busy, phase)

    return gang.play(90 if slow else 20, report)


def play_apart(seed: int, slow: str | None) -> list[str]:
    """Ranks that do not wait for each other, and report nothing but their step."""
    chance = random.Random(seed)
    gang = Gang(chance, chance.choice((2, 3, 4, 8, 16)), 1)
    usual = chance.choice((0.1, 0.5, 4.0))
    reached = dict.fromkeys(range(len(gang.nodes)), (0, 0.0))
    batches = chance.choice((0.02, 0.1, 0.3))

    def report(node: str, rank: int, now: float) -> tuple[int, float, dict[str, Any]]:
        step, at = reached[rank]
        each = usual * (_factor(gang) if node == slow else 1.0)
        count = max(1, int(10.0 / each))
        # The mean of so many steps varies less than one does.
        each *= chance.lognormvariate(0.0, batches / math.sqrt(count))
        while at + each <= now:
            step, at = step + 1, at + each
        if now % 300.0 < 60.0 and rank == 0:
            at = now  # it saves a checkpoint and says nothing of it
        reached[rank] = step, at
        return step, at, {"phase": None, "values": {}}

    return gang.play(90 if slow else 20, report)


SEEDS = 40
SLOW_SEEDS = 8
LONG_SEEDS = 1000


@pytest.mark.parametrize("play", [play_lockstep, play_apart])
def test_no_node_of_a_healthy_job_is_named(play: Callable[[int, str | None], list[str]]) -> None:
    assert {seed: found for seed in range(SEEDS) if (found := play(seed, None))} == {}


@pytest.mark.parametrize("play", [play_lockstep, play_apart])
def test_a_slow_node_is_named_alone(play: Callable[[int, str | None], list[str]]) -> None:
    found = {seed: play(seed, "n2") for seed in range(SLOW_SEEDS)}
    assert [one for one in found.values() if one != ["n2"]] == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("play", [play_lockstep, play_apart])
def test_a_thousand_healthy_jobs_name_no_node(play: Callable[[int, str | None], list[str]]) -> None:
    assert {seed: found for seed in range(LONG_SEEDS) if (found := play(seed, None))} == {}


def test_what_is_no_time_is_left_out() -> None:
    gang = Gang(random.Random(1), 3, 1)

    def report(node: str, rank: int, now: float) -> tuple[int, float, dict[str, Any]]:
        wrong = ("x", None, math.nan, math.inf, -1.0)[int(now / BEAT) % 5]
        return 7, 0.0, {"values": {"busy_s": wrong if node == "n2" else 0.2}}

    assert gang.play(20, report) == []


def test_nothing_is_collected_where_it_is_off() -> None:
    gang = Gang(random.Random(1), 3, 1, StragglerLimits(action="off"))
    found = gang.play(20, lambda node, rank, now: (7, 0.0, work(2.0 if node == "n2" else 1.0)))
    assert found == [] and gang.times._ranks == {}


async def test_a_watch_reports_a_slow_node_once() -> None:
    busy = {"n1": 0.25, "n2": 0.4, "n3": 0.25}
    script = Script(tuple(Progress(node=n, busy=s, hangs=True) for n, s in busy.items()))
    fleet = stand(script, nodes=3, timeouts={"heartbeat": "40ms", "lost_after": "30s"})
    await fleet.launch()
    limits = StragglerLimits.model_validate({"over": "1s"})
    event = (await fleet.watch(stragglers=limits)).events[-1]
    assert isinstance(event, NodesSlow)
    assert [(one.node, one.ranks, one.measure) for one in event.slow] == [("n2", 6, "busy")]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await fleet.watch(stragglers=limits, slow=("n2",))
