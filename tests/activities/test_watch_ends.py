"""A watch that has something to report ends, whatever arrives in the very same moment."""

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
from relaunch.activities.reports import WatchRanksInput
from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.watch import WatchActivities
from relaunch.generation import Token
from relaunch.job.hang import Pace
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
