"""Stops ranks and proves them gone.

For nodes that do not answer, it waits until they must have stopped their ranks by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from relaunch.activities.clocks import read_boot_clock
from relaunch.backends.base import Backend, BackendError, StopOrder, StopProof
from relaunch.generation import LaunchedGeneration, Token
from relaunch.job.fencing import safe_launch_at, unknown_generation
from relaunch.job.places import StartedPlaces, find_doubt
from relaunch.job.state import UnstoppedNode
from relaunch.spec.policy import Timeouts
from relaunch.text import count_noun

RETRY_INTERVAL_S = 2.0
"""Seconds between two attempts to stop a node that does not answer."""
MAX_NAMED = 8
MAX_REASON = 300
"""Maximum number of characters of a reason that a notice gives for a node."""
NO_ANSWER_YET = "no answer yet"
UNPROVEN = "StopUnproven"
"""Type of the error of a stop that no time will prove. Its details are an `UnprovenStop`."""


@dataclass(frozen=True, slots=True)
class StopRanksInput:
    token: Token
    fleet: str
    nodes: tuple[str, ...]
    timeouts: Timeouts
    gang_size: int
    unheard_for: tuple[tuple[str, timedelta], ...] = ()
    """Time since nodes known to be lost were last heard, at the time of this order. These are ages
    because the clocks of controllers differ."""
    fences: bool = True
    once: bool = False
    """Whether to try each node only once: the ranks are known to have exited."""
    witnesses: tuple[str, ...] | None = None
    """If `generations` is empty, the nodes of the only gang. None: all of `nodes`."""
    generations: tuple[LaunchedGeneration, ...] = ()
    """The launches whose ranks may be alive. Silent nodes are judged by the times of these
    launches, not by the current policy. Empty (an order of an older version): one launch, described
    by the fields above."""
    places: tuple[StartedPlaces, ...] = ()
    """Where the generations were started, as far as that is known. An answer from another place
    counts as silence."""
    log_pattern: str | None = None
    """How steps are read from a rank's log."""
    kills: bool = False
    """Whether ranks are killed without `stop_grace`."""
    ask_after: timedelta | None = None
    """How long to go on, beyond `stop_grace`, where no wait is long enough to prove the stop of a
    node. None (as in an order of an older version): for ever."""


@dataclass(frozen=True, slots=True)
class StopRanksOutput:
    at: datetime
    nodes: tuple[str, ...]
    fenced: tuple[str, ...]
    step: int | None = None
    """The step that all ranks of the token had reached, as far as nodes answered."""


@dataclass(frozen=True, slots=True)
class UnprovenStop:
    """How far a stop has come that no time will prove."""

    unstopped: tuple[UnstoppedNode, ...]
    """All nodes without a proof. The first have their reason."""
    stopped: tuple[str, ...]
    """The nodes that are proven stopped."""


async def stop_everywhere(backend: Backend, input: StopRanksInput) -> StopRanksOutput:
    """Stop every node, and ask each again until it is proven gone or must have fenced itself.

    A silent node stops its own ranks once no node of its gang can vouch for it any more, so the
    wait for it starts at the last proven stop of its gang, or at the end of the last lease there. A
    retried attempt proves everything again, and its clock starts again, too. Waits and ages are
    measured by one clock of this process, which is never stepped.

    Raises:
        ApplicationError: `UNPROVEN`: after `ask_after` there is still a node of which neither an
            answer nor time is a proof. An error and no result, because a workflow of 0.1.0 takes
            any result for the proof.
    """
    since = read_boot_clock()
    last_heard = {node: since - age.total_seconds() for node, age in input.unheard_for}
    generations = list_launches(input)
    order = StopOrder(
        input.token,
        stop_grace=input.timeouts.stop_grace.total_seconds(),
        log_pattern=input.log_pattern,
        kills=input.kills,
    )
    asks_at = since + _find_time_to_ask(input)
    stopped_at: dict[str, float] = {}
    silent: dict[str, str] = {}
    steps: list[int] = []
    news = asyncio.Event()

    async def stop(node: str) -> None:
        while True:
            answer = await _try_to_stop(backend, node, order, input.places)
            if isinstance(answer, StopProof):
                stopped_at[node] = read_boot_clock()
                if answer.step is not None:
                    steps.append(answer.step)
                silent.pop(node, None)
                news.set()
                return
            silent[node] = answer
            news.set()
            if input.once:
                return
            await asyncio.sleep(RETRY_INTERVAL_S)

    def find_safe_time() -> float | None:
        if not backend.fences:
            return None
        return safe_launch_at(generations, since, stopped_at, last_heard)

    async with send_heartbeats() as shown:
        tasks = {node: asyncio.create_task(stop(node)) for node in input.nodes}
        try:
            while True:
                news.clear()
                for task in tasks.values():
                    if task.done():
                        task.result()  # an error that is no answer fails the attempt
                waiting = tuple(node for node in input.nodes if node not in stopped_at)
                safe, now = find_safe_time(), read_boot_clock()
                fenced = waiting if safe is not None and now >= safe else ()
                done = input.once and all(task.done() for task in tasks.values())
                if len(fenced) == len(waiting) or done:
                    nodes = (*stopped_at, *fenced)
                    step = min(steps, default=None)
                    return StopRanksOutput(datetime.now(UTC), nodes, fenced, step)
                named = {node: silent.get(node, NO_ANSWER_YET) for node in waiting[:MAX_NAMED]}
                shown[:] = [{"waiting for": named, "nodes": len(waiting)}]
                # Each try ends within a time: it is waited for, to say why.
                if safe is None and now >= asks_at and all(node in silent for node in waiting):
                    raise _make_error(waiting, silent, tuple(stopped_at))
                pause = (
                    RETRY_INTERVAL_S
                    if safe is None
                    else max(0.0, min(RETRY_INTERVAL_S, safe - now))
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await news.wait()
        finally:
            for task in tasks.values():
                task.cancel()


def _find_time_to_ask(input: StopRanksInput) -> float:
    """Return after how many seconds a stop that is not proven is reported."""
    if input.ask_after is None or input.once:
        return math.inf
    return (input.timeouts.stop_grace + input.ask_after).total_seconds()


def _make_error(
    waiting: tuple[str, ...], silent: dict[str, str], stopped: tuple[str, ...]
) -> ApplicationError:
    named = [
        UnstoppedNode(node, silent.get(node, NO_ANSWER_YET)[:MAX_REASON])
        for node in waiting[:MAX_NAMED]
    ]
    rest = [UnstoppedNode(node, "") for node in waiting[MAX_NAMED:]]
    clauses = [f"{one.node}: {one.reason}" for one in named]
    if rest:
        clauses.append(f"and {count_noun(len(rest), 'more node')}")
    return ApplicationError(
        f"no proof that the ranks have stopped: {'; '.join(clauses)}",
        UnprovenStop((*named, *rest), stopped),
        type=UNPROVEN,
        non_retryable=True,
        category=ApplicationErrorCategory.BENIGN,  # the worker has no fault to log
    )


def list_launches(input: StopRanksInput) -> tuple[LaunchedGeneration, ...]:
    """Return the launches by which the silent nodes are judged; each node is in one of them."""
    known = input.generations
    if not known:
        times, nodes = input.timeouts, input.nodes if input.witnesses is None else input.witnesses
        known = (
            LaunchedGeneration(
                submission=input.token.submission,
                generation=input.token.generation,
                nodes=nodes,
                size=max(input.gang_size, len(nodes)),
                fences=input.fences,
                lease=times.lease,
                fence_after=times.fence_after,
                stop_grace=times.stop_grace,
                valid_for=times.valid_for,
                complete=True,
            ),
        )
    covered = {node for one in known for node in one.nodes if node not in one.stopped}
    strange = tuple(node for node in input.nodes if node not in covered)
    return (*known, unknown_generation(strange)) if strange else known


async def _try_to_stop(
    backend: Backend, node: str, order: StopOrder, places: tuple[StartedPlaces, ...]
) -> StopProof | str:
    """Try to stop the ranks of a node. Return the proof that they are gone, or why not."""
    try:
        answer = await backend.stop(node, order)
    except BackendError as error:
        return error.reason
    if not isinstance(answer, StopProof):
        return answer.reason
    return find_doubt(places, node, answer.place) or answer


@asynccontextmanager
async def send_heartbeats() -> AsyncIterator[list[Any]]:
    """Heartbeat while the body runs, so that a dead worker is noticed within seconds.

    The server then starts the next attempt. Yields the list of details that each heartbeat carries:
    empty, for the body to fill. A heartbeat without details would erase those of the previous one.
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
