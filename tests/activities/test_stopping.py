"""How long a stop waits for a node that does not answer.

It counts from the last proof, by the times of the launch, and by no wall clock.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo

import pytest
from temporalio.exceptions import ApplicationError

import relaunch.activities.clocks
import relaunch.activities.stop
import relaunch.job.fencing
from relaunch.activities.stop import UNPROVEN, StopRanksInput, StopRanksOutput, list_launches
from relaunch.generation import LaunchedGeneration
from relaunch.job.events import NodeUnreachable
from relaunch.job.fencing import fence_wait
from relaunch.spec.policy import Timeouts
from tests.activities.harness import PATIENCE, TOKEN, Stand, environment, eventually, stand
from tests.fakes.nodes import Cut, Script

SHORT = {
    "lease": "900ms",
    "heartbeat": "100ms",
    "fence_after": "300ms",
    "stop_grace": "100ms",
    "lost_after": "60s",
}
MARGIN = 1.0
"""Seconds; a loop on a busy machine may stand still for some tenths of one."""
SECONDS_OF_LEASE = 0.9


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.job.fencing, "FENCE_MARGIN", timedelta(seconds=MARGIN))
    monkeypatch.setattr(relaunch.activities.stop, "RETRY_INTERVAL_S", 0.1)


def order(fleet: Stand, *nodes: str, **changes: object) -> StopRanksInput:
    given = StopRanksInput(TOKEN, "default", nodes, fleet.timeouts, len(nodes))
    return replace(given, **changes)  # type: ignore[arg-type]


def launched(timeouts: Timeouts, *nodes: str, **changes: object) -> LaunchedGeneration:
    made = LaunchedGeneration(
        submission=TOKEN.submission,
        generation=TOKEN.generation,
        nodes=nodes,
        size=len(nodes),
        fences=True,
        lease=timeouts.lease,
        fence_after=timeouts.fence_after,
        stop_grace=timeouts.stop_grace,
        valid_for=timeouts.valid_for,
        complete=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


async def stop(fleet: Stand, given: StopRanksInput) -> StopRanksOutput:
    return await asyncio.wait_for(environment().run(fleet.jobs.stop_ranks, given), PATIENCE)


def still_alive(fleet: Stand) -> list[str]:
    started = [(life.node, life.rank) for life in fleet.backend.lives if life.kind == "started"]
    ended = [(life.node, life.rank) for life in fleet.backend.lives if life.kind == "ended"]
    return [node for node, rank in started if (node, rank) not in ended]


class SteppedClock(datetime):
    """A wall clock that a test steps."""

    step = timedelta(0)

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + cls.step


async def test_an_error_that_is_no_answer_ends_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was lost, and the stop waited for that node for ever."""
    fleet = stand(nodes=2)

    async def fail(node: str, *_: object) -> None:
        raise KeyError(node)

    monkeypatch.setattr(fleet.backend, "stop", fail)
    with pytest.raises(KeyError):
        await stop(fleet, order(fleet, "n1", "n2"))


async def test_the_wait_for_a_silent_node_starts_at_the_last_stop() -> None:
    fleet = stand(nodes=3, timeouts=SHORT)
    await fleet.launch()
    watching = asyncio.create_task(fleet.watch())
    await eventually(
        lambda: (
            {call.node for call in fleet.backend.calls if call.command == "renew"}
            == {"n1", "n2", "n3"}
        ),
        "renewed",
    )
    # n2 has lost the controller and n1. n3 is leased and vouches for it alone.
    fleet.backend.cut("n2", "controller-in", "controller-out", "peers:n1")
    lost_at = time.monotonic()
    await asyncio.sleep(SECONDS_OF_LEASE + 0.3)
    watching.cancel()
    fleet.backend.cut("n3", "controller-in", "controller-out")
    unheard = timedelta(seconds=time.monotonic() - lost_at)
    stopping = asyncio.create_task(
        stop(fleet, order(fleet, "n1", "n2", "n3", unheard_for=(("n2", unheard),)))
    )
    await eventually(lambda: "n1" not in still_alive(fleet), "n1 is stopped")
    await asyncio.sleep(0.5)
    fleet.backend.heal("n3")  # which vouched for n2 until now
    fleet.backend.cut("n2", "peers:n3")  # else n2 hears of the stop from n3, and need not wait
    answer = await stopping
    assert (answer.fenced, still_alive(fleet)) == (("n2",), [])
    ends = {life.node: life.at for life in fleet.backend.lives if life.kind == "ended"}
    assert (
        answer.at.timestamp() >= ends["n3"] + fence_wait(fleet.timeouts, 3).total_seconds() - 0.05
    )


async def test_a_step_of_the_wall_clock_shortens_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.activities.stop, "datetime", SteppedClock)
    monkeypatch.setattr(SteppedClock, "step", timedelta(0))
    fleet = stand(timeouts=SHORT)
    await fleet.launch()
    fleet.backend.cut("n2")
    began = time.monotonic()
    stopping = asyncio.create_task(stop(fleet, order(fleet, "n1", "n2")))
    await eventually(lambda: "n1" not in still_alive(fleet), "n1 is stopped")
    SteppedClock.step = timedelta(minutes=3)
    answer = await stopping
    assert (answer.fenced, still_alive(fleet)) == (("n2",), [])
    assert (
        time.monotonic() - began >= SECONDS_OF_LEASE + fence_wait(fleet.timeouts, 2).total_seconds()
    )


async def test_s2_6_a_step_of_the_wall_clock_makes_no_silence_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.clocks, "datetime", SteppedClock)
    monkeypatch.setattr(SteppedClock, "step", timedelta(0))
    fleet = stand(Script((Cut(node="n2", after=0.2),)), timeouts={"lost_after": "800ms"})
    await fleet.launch()
    began = time.monotonic()
    watching = asyncio.create_task(fleet.watch())
    await eventually(
        lambda: any(call.command == "watch" for call in fleet.backend.calls), "watched"
    )
    SteppedClock.step = timedelta(minutes=3)
    (lost,) = (await watching).events
    assert isinstance(lost, NodeUnreachable)
    assert timedelta(seconds=0.8) <= lost.unheard_for <= timedelta(seconds=time.monotonic() - began)


async def test_a_silent_node_is_judged_by_its_launch_not_by_the_order() -> None:
    fleet = stand(timeouts={**SHORT, "fence_after": "900ms"})
    await fleet.launch()
    fleet.backend.cut("n2")
    present = fleet.timeouts.model_copy(
        update={"lease": timedelta(seconds=0.3), "fence_after": timedelta(seconds=0.1)}
    )
    generations = (launched(fleet.timeouts, "n1", "n2"),)
    answer = await stop(fleet, order(fleet, "n1", "n2", timeouts=present, generations=generations))
    assert (answer.fenced, still_alive(fleet)) == (("n2",), [])


async def test_silence_of_a_node_in_no_known_launch_proves_nothing() -> None:
    fleet = stand(timeouts={**SHORT, "lease": "300ms"})
    await fleet.launch()
    fleet.backend.cut("n2")
    stopping = asyncio.create_task(
        stop(fleet, order(fleet, "n1", "n2", generations=(launched(fleet.timeouts, "n1"),)))
    )
    done, _ = await asyncio.wait(
        [stopping], timeout=0.3 + 1.5 * fence_wait(fleet.timeouts, 2).total_seconds()
    )
    assert not done
    fleet.backend.heal("n2")
    assert (await stopping).fenced == ()


async def test_a_stop_that_no_time_proves_is_reported() -> None:
    fleet = stand(timeouts=SHORT)
    await fleet.launch()
    fleet.backend.cut("n2")
    generations = (launched(fleet.timeouts, "n1", "n2", fences=False),)
    soon = timedelta(seconds=0.3)
    with pytest.raises(ApplicationError) as raised:
        await stop(fleet, order(fleet, "n1", "n2", generations=generations, ask_after=soon))
    assert (raised.value.type, raised.value.non_retryable) == (UNPROVEN, True)
    (found,) = raised.value.details
    assert ([one.node for one in found.unstopped], found.stopped) == (["n2"], ("n1",))


async def test_a_stop_that_time_proves_is_never_reported() -> None:
    fleet = stand(timeouts={**SHORT, "lease": "300ms"})
    fleet.backend.cut("n2")
    generations = (launched(fleet.timeouts, "n1", "n2", stopped=("n1",)),)
    now = timedelta(0)
    answer = await stop(fleet, order(fleet, "n2", generations=generations, ask_after=now))
    assert answer.fenced == ("n2",)


async def test_a_stop_that_is_tried_once_is_never_reported() -> None:
    fleet = stand(timeouts=SHORT)
    fleet.backend.cut("n1")
    answer = await stop(fleet, order(fleet, "n1", once=True, ask_after=timedelta(0)))
    assert answer.nodes == ()


async def test_a_node_that_was_stopped_before_is_a_witness() -> None:
    fleet = stand(timeouts={**SHORT, "lease": "300ms"})
    fleet.backend.cut("n2")
    generations = (launched(fleet.timeouts, "n1", "n2", stopped=("n1",)),)
    answer = await stop(fleet, order(fleet, "n2", generations=generations))
    assert answer.fenced == ("n2",)


def test_an_older_versions_order_is_one_launch_by_its_own_fields() -> None:
    given = StopRanksInput(
        TOKEN, "default", ("n2", "n3"), Timeouts(), 4, fences=True, witnesses=("n1", "n2")
    )
    one, unknown = list_launches(given)
    assert (one.nodes, one.size, one.fences, one.lease) == (("n1", "n2"), 4, True, Timeouts().lease)
    assert (unknown.nodes, unknown.fences) == (("n3",), False)
    (alone,) = list_launches(replace(given, witnesses=None))
    assert alone.nodes == ("n2", "n3")
