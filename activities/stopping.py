"""Stops ranks and proves them gone, or waits until the nodes that do not answer must have stopped them by themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio import activity

from backends.base import Backend, BackendError, Gone, StopOrder
from recovery.fencing import fence_wait
from recovery.model import Token
from recovery.places import StartedPlaces, find_doubt
from recovery.policy import Timeouts

LOOK_AGAIN = 2.0
"""Seconds between two tries to stop a node that does not answer."""
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class StopRanksInput:
    token: Token
    fleet: str
    nodes: tuple[str, ...]
    timeouts: Timeouts
    gang_size: int
    unheard_for: tuple[tuple[str, timedelta], ...] = ()
    """Of nodes known to be lost, when this was ordered: ages, because clocks of controllers differ."""
    fences: bool = True
    once: bool = False
    """Try each node once and leave it at that: the ranks are known to have exited."""
    witnesses: tuple[str, ...] | None = None
    """Nodes of the gang that the silent ones belong to: only their stop bounds how long those go on. None: all of `nodes`."""
    places: tuple[StartedPlaces, ...] = ()
    """Where the generations were started, as far as that is known: an answer from elsewhere is silence."""


@dataclass(frozen=True, slots=True)
class StopRanksOutput:
    at: datetime
    nodes: tuple[str, ...]
    fenced: tuple[str, ...]


async def stop_everywhere(backend: Backend, input: StopRanksInput) -> StopRanksOutput:
    """Stop every node at once; each is asked again until it is proven gone, or must have fenced itself.

    A node that does not answer fences itself once its lease has run out and some peer of it is not alive any more. So the clock of that
    wait starts with the first node that is proven stopped, and not before.
    """
    began = datetime.now(UTC)
    last_heard = {node: began - unheard for node, unheard in input.unheard_for}
    order = StopOrder(input.token, stop_grace=input.timeouts.stop_grace.total_seconds())
    gone: list[str] = []
    silent: dict[str, str] = {}
    witnessed_at: datetime | None = None
    news = asyncio.Event()

    async def stop(node: str) -> None:
        nonlocal witnessed_at
        while True:
            because = await _try_to_stop(backend, node, order, input.places)
            if because is None:
                gone.append(node)
                silent.pop(node, None)
                if witnessed_at is None and (input.witnesses is None or node in input.witnesses):
                    witnessed_at = datetime.now(UTC)
                news.set()
                return
            silent[node] = because
            news.set()
            if input.once:
                return
            await asyncio.sleep(LOOK_AGAIN)

    def fenced_at(node: str) -> datetime | None:
        if not (input.fences and backend.fences) or witnessed_at is None:
            return None
        leased_until = last_heard.get(node, began) + input.timeouts.lease
        return max(witnessed_at, leased_until) + fence_wait(input.timeouts, input.gang_size)

    async with beating() as shown:
        tasks = {node: asyncio.create_task(stop(node)) for node in input.nodes}
        try:
            while True:
                news.clear()
                now = datetime.now(UTC)
                waiting = [node for node in input.nodes if node not in gone]
                due = {node: at for node in waiting if (at := fenced_at(node)) is not None}
                fenced = [node for node, at in due.items() if at <= now]
                if len(fenced) == len(waiting) or (input.once and all(task.done() for task in tasks.values())):
                    return StopRanksOutput(at=now, nodes=(*gone, *fenced), fenced=tuple(fenced))
                shown[:] = [
                    {"waiting for": {node: silent.get(node, "no answer yet") for node in waiting[:MOST_NAMED]}, "nodes": len(waiting)}
                ]
                pause = min([LOOK_AGAIN, *((at - now).total_seconds() for at in due.values() if at > now)])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await news.wait()
        finally:
            for task in tasks.values():
                task.cancel()


async def _try_to_stop(backend: Backend, node: str, order: StopOrder, places: tuple[StartedPlaces, ...]) -> str | None:
    """Return None when the ranks are proven gone, else why not."""
    try:
        answer = await backend.stop(node, order)
    except BackendError as error:
        return error.because
    return find_doubt(places, node, answer.place) if isinstance(answer, Gone) else answer.because


@asynccontextmanager
async def beating() -> AsyncIterator[list[Any]]:
    """Heartbeat while the body runs, so that a dead worker is noticed within seconds and the next one goes on.

    Yields the details that each beat carries: empty, for the body to fill. A beat without them would take away those of the last.
    """
    details: list[Any] = []

    async def beat() -> None:
        while True:
            activity.heartbeat(*details)
            await asyncio.sleep(1.0)

    task = asyncio.create_task(beat())
    try:
        yield details
    finally:
        task.cancel()
