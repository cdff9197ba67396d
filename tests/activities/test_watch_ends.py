"""A watch that has something to report ends, whatever arrives in the very same moment.

And a node that has nothing more to report is no reason to wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from relaunch.activities.gang import WatchedShard
from relaunch.activities.reports import WatchRanksInput, WatchReport
from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.watch import WatchActivities
from relaunch.evidence.observations import RankExited, RanksVanished
from relaunch.generation import Token
from relaunch.job.events import FaultObserved, NodeReturned
from relaunch.job.hang import Pace
from relaunch.job.places import AgentPlace, StartedPlaces
from relaunch.spec.policy import HangLimits, Timeouts

EXITED = {
    "seq": 1,
    "kind": "RankExited",
    "rank": 0,
    "local_rank": 0,
    "exit_code": 0,
    "signal": None,
    "stopped": False,
    "at": 1.0,
}


class OneNode:
    """A node whose only rank has exited before the watch begins.

    Its first heartbeat comes `pause` turns of the loop after that.
    """

    def __init__(self, pause: int) -> None:
        self.pause = pause

    def backend(self, fleet: str) -> OneNode:
        return self

    def node(self, name: str) -> None:
        return

    @asynccontextmanager
    async def watch(
        self, node: str, token: Token, after_seq: int, heartbeat: float
    ) -> AsyncIterator[OneNode]:
        yield self

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        token = {"namespace": "default", "job": "hi", "submission": 1, "generation": 1}
        yield {
            "hello": {
                "token": token,
                "boot_id": "b1",
                "state": "running",
                "ranks": [0],
                "stamp": 1.0,
            }
        }
        for _ in range(10):  # until the watch waits for the first heartbeat
            await asyncio.sleep(0)
        yield {"observation": EXITED}
        for _ in range(self.pause):
            await asyncio.sleep(0)
        yield {"heartbeat": {"stamp": 1.0}}
        await asyncio.Event().wait()

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        return

    # The client's side: a server that acknowledges every heartbeat.
    def get_async_activity_handle(self, task_token: bytes) -> OneNode:
        return self

    async def heartbeat(self, *details: Any, rpc_timeout: timedelta | None = None) -> None:
        return


@pytest.mark.parametrize("pause", range(10))
async def test_a_rank_exit_at_the_first_heartbeat_ends_the_watch(
    pause: int, tmp_path: Path
) -> None:
    node: Any = OneNode(pause)
    order = WatchRanksInput(
        Token("default", "hi", 1, 1),
        "default",
        ("n1",),
        1,
        datetime.now(UTC),
        Timeouts(),
        HangLimits(),
    )
    async with asyncio.timeout(60):
        activities = WatchActivities(node, node, RunningWatches(tmp_path))
        report = await ActivityEnvironment().run(activities.watch_ranks, order)
    assert report.all_succeeded


class Renewals:
    """A stream that notes what it is asked to renew."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        self.seen.append((stamp, age))


async def test_a_renewal_says_for_how_long_its_heartbeat_has_been_here() -> None:
    order = WatchRanksInput(
        Token("default", "hi", 1, 1),
        "default",
        ("n1",),
        1,
        datetime.now(UTC),
        Timeouts(),
        HangLimits(),
    )
    gang = WatchedShard(order, Pace(started_at=order.launched_at, expected=False))
    stream: Any = Renewals()
    gang.note_connection("n1", stream)
    gang.process_line("n1", {"heartbeat": {"stamp": 7.0}})
    stamps = gang.stamps()
    await asyncio.sleep(0.05)
    gang.process_line(
        "n1", {"heartbeat": {"stamp": 8.0}}
    )  # after the acknowledgement: not what is renewed from
    await gang.renew(stamps)
    ((stamp, age),) = stream.seen
    assert stamp == 7.0
    assert age >= 0.05


SUCCEEDED = {"n1": (0,)}
REBOOTED = {"seq": 1, "kind": "RanksVanished", "reason": "the node rebooted", "at": 1.0}


def reach_end(seq: int = 0, *lines: dict[str, Any], **known: Any) -> WatchedShard:
    """A watch of two ranks on n1, which says no more after these lines; n2 is silent."""
    order = WatchRanksInput(
        Token("default", "hi", 1, 1),
        "default",
        ("n1", "n2"),
        2,
        datetime.now(UTC),
        Timeouts(),
        HangLimits(),
        **known,
    )
    gang = WatchedShard(order, Pace(started_at=order.launched_at, expected=False))
    for line in (*lines, {"end": {"seq": seq}}):
        gang.process_line("n1", line)
    return gang


async def read_vanished(gang: WatchedShard) -> tuple[list[str], WatchReport]:
    report = await gang.report()
    (fault,) = [event for event in report.events if isinstance(event, FaultObserved)]
    return [one.reason for one in fault.observations if isinstance(one, RanksVanished)], report


async def test_an_end_without_exits_is_a_fault_told_once() -> None:
    gang = reach_end()
    reasons, report = await read_vanished(gang)
    assert reasons == ["nothing of its ranks is left; the exits of 2 of 2 are not known"]
    again = reach_end(after_seq=report.after_seq, exited=report.exited)
    with pytest.raises(TimeoutError):  # as long as nothing else happens
        await asyncio.wait_for(again.report(), 0.2)


async def test_an_end_says_so_if_its_node_has_rebooted() -> None:
    place = {"machine": "m1", "boot_id": "b1", "uid": 0, "state": "s1"}
    started = AgentPlace("m1", "b0", 0, "s1").text
    hello = {"hello": {"boot_id": "b1", "state": "gone", "ranks": [0, 1], "place": place}}
    gang = reach_end(0, hello, places=(StartedPlaces(1, 1, {"n1": started}),))
    reasons, _ = await read_vanished(gang)
    assert reasons == ["the node rebooted; the exits of 2 of 2 are not known"]


async def test_a_number_used_again_hides_no_lost_rank() -> None:
    """The disk never took the exit of rank 0: a reboot later, number 1 means something else."""
    reasons, report = await read_vanished(reach_end(1, after_seq={"n1": 1}, exited=SUCCEEDED))
    assert reasons == ["nothing of its ranks is left; the exits of 1 of 2 are not known"]
    assert (report.after_seq, report.exited) == ({"n1": 2}, SUCCEEDED)


async def test_a_lost_node_that_comes_back_with_nothing_fails() -> None:
    reasons, report = await read_vanished(reach_end(lost=("n1",)))
    assert reasons
    assert [type(event) for event in report.events] == [NodeReturned, FaultObserved]


@pytest.mark.parametrize(
    ("lines", "known"),
    [
        ([{"observation": EXITED}, {"observation": {**EXITED, "seq": 2, "rank": 1}}], {}),
        ([{"observation": {**EXITED, "seq": 2, "rank": 1}}], {"exited": SUCCEEDED}),
        ([], {"after_seq": {"n1": 1}}),
        ([], {"after_seq": {"n1": 2}, "exited": SUCCEEDED}),
        ([], {"lost": ("n2",), "launched": False}),
        ([], {"lost_in_others": True, "launched": False}),
        ([{"observation": REBOOTED}], {"lost": ("n2",), "launched": False}),
    ],
    ids=[
        "both",
        "one before",
        "failed before",
        "one failed before",
        "launch waits for another",
        "launch waits for another shard",
        "rebooted while the launch waits",
    ],
)
async def test_an_end_after_what_is_known_is_none(
    lines: list[dict[str, Any]], known: dict[str, Any]
) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reach_end(2, *lines, **known).report(), 0.2)


async def test_an_end_after_a_failure_adds_nothing_to_it() -> None:
    failed = {**EXITED, "exit_code": 1, "log_tail": ["ValueError: no"]}
    report = await reach_end(1, {"observation": failed}).report()
    (fault,) = [event for event in report.events if isinstance(event, FaultObserved)]
    assert [type(one) for one in fault.observations] == [RankExited]


async def test_a_launch_that_was_not_completed_may_end_too() -> None:
    reasons, _ = await read_vanished(reach_end(launched=False))
    assert reasons


@pytest.mark.parametrize(
    "known", [{"launched": False}, {"lost": ("n2",)}], ids=["none is lost", "it was launched"]
)
async def test_a_reboot_is_a_fault_unless_a_launch_waits(known: dict[str, Any]) -> None:
    reasons, _ = await read_vanished(reach_end(1, {"observation": REBOOTED}, **known))
    assert reasons == ["the node rebooted"]
