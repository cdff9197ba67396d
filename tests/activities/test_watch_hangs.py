"""A watch looks at ranks whose step stays the same, and says which one hangs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from relaunch.activities import clocks, hangs
from relaunch.activities import gang as gang_of_watch
from relaunch.activities.gang import WatchedShard
from relaunch.backends.base import Refusal, Unreachable
from relaunch.job.events import RanksHung
from relaunch.job.hang import Pace
from relaunch.spec.policy import HangLimits
from tests.activities.harness import Stand, ago, environment, eventually, stand
from tests.fakes.nodes import Progress, Script
from tests.fakes.nodes.script import Stack

BEAT = "80ms"
C10D = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"
WAITS = (("barrier", C10D, 5356), ("train", "/home/u/train.py", 27))
LOADER = (
    ("__next__", "/usr/lib/python3/dist-packages/torch/utils/data/dataloader.py", 725),
    ("train", "/home/u/train.py", 20),
)
STEPS = tuple((0.2 * index, index) for index in range(3))
PROGRESS = tuple(Progress(rank=rank, steps=STEPS, each_read=True, hangs=True) for rank in range(4))


def gang(*stacks: Stack, **known: Any) -> Stand:
    """Four ranks on two nodes: they take three steps, then none."""
    quick = {"heartbeat": BEAT, "lease": "60s", "lost_after": "30s"}
    waits = tuple(Stack(rank=rank, frames=WAITS, state="S", cpu=1.0) for rank in range(4))
    return stand(Script((*PROGRESS, *stacks, *waits)), timeouts={**quick, **known})


async def watch(fleet: Stand, **hang: Any) -> RanksHung:
    await fleet.launch()
    report = await fleet.watch(hang=HangLimits.model_validate(hang))
    found = report.events[-1]
    assert isinstance(found, RanksHung)
    return found


def calls(fleet: Stand) -> int:
    return sum(call.command == "stacks" for call in fleet.backend.calls)


@pytest.mark.parametrize(
    ("odd", "rule"),
    [
        (Stack(rank=3, frames=LOADER, state="T", cpu=0.0), "stopped"),
        (Stack(rank=3, frames=LOADER, state="D", cpu=0.0), "blocked"),
        (Stack(rank=3, frames=LOADER, state="S", cpu=0.0), "odd_one_out"),
    ],
)
async def test_a_rank_that_hangs_is_named_long_before_the_limit(odd: Stack, rule: str) -> None:
    hang = await watch(gang(odd))
    assert (hang.rule, hang.ranks[0]) == (rule, 3)
    assert [(one.rank, one.node) for one in hang.suspects] == [(3, "n2")]
    assert len(hang.groups) == 2 and hang.groups[0].startswith("ranks 0-2 on n1, n2 (3): ")
    assert "step 2 has not changed" in hang.reason


def connected(*stuck: tuple[int, int]) -> tuple[Stack, ...]:
    """All ranks wait in `barrier`, and some pairs of them acknowledge nothing to each other."""
    ends = {rank: [two for pair in stuck for two in pair if rank in pair] for rank in range(4)}
    return tuple(
        Stack(
            rank=rank,
            frames=WAITS,
            state="S",
            address=f"10.0.0.{rank}",
            stuck=tuple(f"10.0.0.{other}" for other in ends[rank] if other != rank),
        )
        for rank in range(4)
    )


@pytest.mark.parametrize(
    ("stuck", "named"),
    [(((3, 0), (3, 2)), [3]), (((3, 0),), []), (((3, 0), (1, 2)), [])],
)
async def test_ranks_with_silent_connections_hang_before_the_limit(
    stuck: tuple[tuple[int, int], ...], named: list[int]
) -> None:
    hang = await watch(gang(*connected(*stuck)))
    assert (hang.rule, hang.is_cut_off) == ("cut_off", True)
    assert [one.rank for one in hang.suspects] == named
    assert "no packet passes between 10.0.0." in hang.reason


async def test_a_limit_says_that_ranks_reach_each_other_no_more() -> None:
    stopped = Stack(rank=3, frames=LOADER, state="T", cpu=0.0)
    hang = await watch(gang(*connected((3, 0))), after="0.6s", rules={"cut_off": False})
    assert (hang.rule, hang.is_cut_off) == ("limit", True)
    hang = await watch(gang(stopped))
    assert not hang.is_cut_off


async def test_a_stated_limit_acts_as_written_and_names_the_rank() -> None:
    busy = Stack(rank=3, frames=LOADER, state="R", cpu=1.0, written=10**6)
    hang = await watch(gang(busy), after="0.6s", rules={"odd_one_out": False})
    assert hang.rule == "limit" and [one.rank for one in hang.suspects] == [3]


class WallClock:
    """A wall clock that jumps while a watch runs, as when the machine is suspended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = self.jumped = timedelta()
        real = clocks.read_wall_offset()
        monkeypatch.setattr(gang_of_watch, "read_wall_clock", self.read)
        monkeypatch.setattr(
            gang_of_watch, "read_wall_offset", lambda: real + self.jumped.total_seconds()
        )

    def read(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def jump(self, by: timedelta) -> None:
        self.jumped += by
        self.ahead += by

    def go_on(self, by: timedelta) -> None:
        """CLOCK_MONOTONIC goes on as well."""
        self.ahead += by


@pytest.mark.parametrize("jump", [timedelta(hours=1), timedelta(hours=-1)])
@pytest.mark.parametrize("in_lockstep", [True, False])
async def test_a_jump_of_the_wall_clock_is_no_standstill(
    jump: timedelta, in_lockstep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = WallClock(monkeypatch)
    limits = HangLimits.model_validate({"after": "20m"})
    input = stand().watch_input(hang=limits, in_lockstep=in_lockstep)
    watched = WatchedShard(input, Pace(wall.read(), expected=True))

    def hear(step: int, age: float) -> None:
        ranks = {"n1": "01", "n2": "23"}
        for node, own in ranks.items():
            progress = {
                rank: {"step": step, "values": {}, "phase": None, "checkpoint": None, "age": age}
                for rank in own
            }
            watched.process_line(node, {"heartbeat": {"stamp": 1.0, "progress": progress}})

    def is_overdue() -> bool:
        watched._find_hang()  # a tick
        return watched._find_overdue(wall.read()) is not None

    asleep = max(0.0, jump.total_seconds())
    hear(1, 0.0)
    wall.jump(jump)
    assert not is_overdue(), "on a tick after it"
    hear(1, asleep)
    assert not is_overdue(), "the same step"
    wall.jump(jump)
    hear(2, asleep)  # reached before, reported after
    assert not is_overdue(), "a new step"
    assert max(watched.heartbeat().pace.intervals) < 300, "what is learned of it"

    # The next attempt knows the jump from what this one has sent.
    before = watched.heartbeat()
    wall.jump(jump)
    pace = replace(before.pace, step=None, position=None, advanced_at=None)
    watched = WatchedShard(input, pace, before)
    hear(2, asleep + 5)
    assert not is_overdue(), "in the next attempt"
    watched = WatchedShard(input, pace, replace(before, boot="another"))
    hear(2, asleep)
    assert is_overdue() == (asleep > 0.0), "on another machine it is unknown"

    watched = WatchedShard(input, Pace(wall.read(), expected=True))
    hear(3, 0.0)
    wall.jump(jump)
    wall.go_on(timedelta(minutes=19))
    assert not is_overdue()
    wall.go_on(timedelta(minutes=2))
    assert is_overdue(), "a standstill is one, whatever the clock says"


async def test_a_stated_limit_does_not_wait_for_a_silent_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hangs, "LOOK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(hangs, "ANSWER_MARGIN_S", 0.1)
    fleet = gang()

    async def silence(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(fleet.backend, "stacks", silence)
    hang = await watch(fleet, after="0.6s")
    assert hang.suspects == () and hang.groups == ()


@pytest.mark.parametrize(
    "answer", [Refusal("n1", "no_such_generation", "none"), Unreachable("n1", "cut")]
)
async def test_ranks_that_cannot_be_seen_hang_after_at_most(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = silent_gang()

    async def stacks(*_: Any) -> Any:
        if isinstance(answer, Refusal):
            return answer
        raise answer

    monkeypatch.setattr(fleet.backend, "stacks", stacks)
    hang = await learned(fleet, at_most="61s")
    assert hang.rule == "at_most" and hang.reason.endswith(hangs.UNPROVEN)


async def learned(fleet: Stand, **hang: Any) -> RanksHung:
    """Watch a gang whose first step is a minute overdue."""
    await fleet.launch()
    report = await fleet.watch(
        hang=HangLimits.model_validate(hang), launched_at=ago(31 * 60), progress_expected=True
    )
    found = report.events[-1]
    assert isinstance(found, RanksHung)
    return found


def silent_gang(*stacks: Stack) -> Stand:
    """As `gang`, but no rank reports a step in this generation: the first one is overdue."""
    quick = {"heartbeat": BEAT, "lease": "60s", "lost_after": "30s"}
    waits = tuple(Stack(rank=rank, frames=WAITS, state="S", cpu=1.0) for rank in range(4))
    return stand(Script((*stacks, *waits)), timeouts=quick)


async def test_a_learned_limit_counts_once_no_rank_works() -> None:
    hang = await learned(silent_gang(), rules={"odd_one_out": False})
    assert hang.rule == "limit" and hang.suspects == ()
    assert "4 ranks wait in barrier" in hang.reason


async def test_a_rank_that_works_postpones_a_learned_limit() -> None:
    busy = Stack(rank=0, frames=LOADER, state="R", cpu=1.0, written=10**6)
    hang = await learned(silent_gang(busy), at_most="66s")  # enough for two looks
    assert hang.rule == "at_most" and "rank 0 still works" in hang.reason


async def test_ranks_of_a_node_that_was_not_heard_may_work() -> None:
    """Nothing is known of them for a moment, and they are no proof of a standstill."""
    fleet = silent_gang()
    await fleet.launch()
    hang = {"at_most": "4s", "rules": {"odd_one_out": False}}
    watching = asyncio.create_task(
        fleet.watch(
            hang=HangLimits.model_validate(hang),
            launched_at=ago(30 * 60 - 1.5),
            progress_expected=True,
        )
    )
    await eventually(lambda: fleet.renewals() > 0, "watched")
    fleet.backend.cut("n1")
    found = (await watching).events[-1]
    assert isinstance(found, RanksHung) and found.rule == "at_most"
    assert found.reason.endswith(hangs.UNPROVEN)


async def test_ranks_of_a_lost_node_are_waited_for() -> None:
    fleet = silent_gang()
    await fleet.launch()
    fleet.backend.cut("n1")
    report = await fleet.watch(
        hang=HangLimits.model_validate({"rules": {"odd_one_out": False}}),
        launched_at=ago(31 * 60),
        progress_expected=True,
        lost=("n1",),
    )
    found = report.events[-1]
    assert isinstance(found, RanksHung) and found.rule == "limit"


async def test_stacks_that_cannot_be_read_leave_cpu_and_io() -> None:
    odd = Stack(rank=3, state="S", cpu=0.0, unreadable="ptrace is refused")
    hang = await learned(silent_gang(odd))
    assert hang.rule == "limit" and "not all stacks could be read" in hang.reason


async def test_nothing_is_looked_at_while_training_advances() -> None:
    fleet = stand(
        Script(tuple(Progress(rank=rank, rate=20.0) for rank in range(4))),
        timeouts={"heartbeat": "200ms"},
    )
    await fleet.launch()
    running = environment()
    watching = asyncio.create_task(fleet.watch(running, hang=HangLimits()))
    await eventually(lambda: fleet.renewals() > 0 and len(fleet.server.beats) > 1, "watched")
    await asyncio.sleep(0)
    assert calls(fleet) == 0
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_a_shard_that_does_not_judge_leaves_it_to_the_first() -> None:
    fleet = silent_gang()
    await fleet.launch()
    hang = HangLimits.model_validate({"at_most": "1s"})
    shard = {"nodes": ("n2",), "judges": False, "first_rank": 2, "world_size": 4}
    report = await fleet.watch(
        hang=hang, launched_at=ago(30 * 60 + 2), progress_expected=True, **shard
    )
    found = report.events[-1]
    assert isinstance(found, RanksHung) and found.rule == "at_most"


async def test_the_first_shard_sees_a_rank_that_works_in_another() -> None:
    busy = Stack(rank=3, frames=LOADER, state="R", cpu=1.0, written=10**6)
    fleet = silent_gang(busy)
    await fleet.launch()
    hang = HangLimits.model_validate({"at_most": "66s"})
    report = await fleet.watch(
        hang=hang,
        launched_at=ago(31 * 60),
        progress_expected=True,
        nodes=("n1",),
        others=("n2",),
    )
    found = report.events[-1]
    assert isinstance(found, RanksHung) and "rank 3 still works" in found.reason
