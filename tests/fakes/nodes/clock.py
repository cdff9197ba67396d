"""The time that simulated nodes live by: the loop's own, or one that only a test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

SETTLE = 10
"""Turns of the loop that the longest chain from a timer to the task that awaits its effect needs,
doubled."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def time(self) -> float:
        """Seconds from any beginning; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since 1970."""
        ...

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer: ...


class RealClock:
    def time(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(delay, callback)


class _ManualTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Stands still until `advance`."""

    def __init__(self, begin: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = 0.0
        self._begin = begin.timestamp()
        self._timers: list[tuple[float, int, _ManualTimer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._begin + self._now

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        timer = _ManualTimer(callback)
        heapq.heappush(self._timers, (self._now + max(0.0, delay), next(self._numbers), timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Let time pass; what falls due happens in order, and what waits for it runs in between."""
        end = self._now + seconds
        await self._settle()
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            if timer.callback is None:
                continue
            self._now = max(self._now, due)
            timer.callback()
            await self._settle()
        self._now = end
        await self._settle()

    async def _settle(self) -> None:
        for _ in range(SETTLE):
            await asyncio.sleep(0)


async def sleep(clock: Clock, seconds: float) -> None:
    if seconds <= 0:
        return
    over = asyncio.Event()
    timer = clock.call_later(seconds, over.set)
    try:
        await over.wait()
    finally:
        timer.cancel()


async def wait_for(clock: Clock, event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set or the time is over.

    Which of them is for the caller to look up.
    """
    if seconds == float("inf"):
        await event.wait()
        return
    timer = clock.call_later(max(0.0, seconds), event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
