"""Watches the ranks of one generation on up to 256 nodes, and reports what needs a decision.

It decides nothing and stops nothing. All facts come from the nodes: a watch may die, be repeated or
run twice without any effect on ranks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from temporalio import activity
from temporalio.client import AsyncActivityCancelledError, Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities.clocks import read_boot_clock
from relaunch.activities.gang import WatchedShard
from relaunch.activities.reports import WatchHeartbeat, WatchRanksInput, WatchReport
from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.spares import SpareKeeper
from relaunch.backends.answers import WatchParser
from relaunch.backends.base import (
    Backend,
    Fleets,
    ProtocolError,
    ReportsLate,
    SeesPeople,
    Unreachable,
)
from relaunch.evidence.observations import RanksVanished
from relaunch.job.hang import Pace
from relaunch.job.places import explain_forgotten, find_doubt, parse_place
from relaunch.spec.policy import Timeouts

log = logging.getLogger("relaunch.watches")

MAX_HEARTBEAT_TIMEOUT = timedelta(seconds=30)
BEAT_INTERVAL_S = 3.0
"""Seconds between two heartbeats of a watch: how old the progress is that people see, and how long
a cancellation takes on a server that does not push it."""
MAX_BEATS_PER_S = 30
"""Heartbeats of all watches of one worker per second, as long as their time-outs allow. Each costs
the server some 4 ms of a core, and one synced SQLite file takes 370 writes a second."""
SHOWN_AFTER = 2 / 3
"""Part of the time-out of a watch after which the SDK is given a heartbeat, which is one more write
to the server's database. With the longest interval between heartbeats, that is within the time-out.
"""
RECONNECT_DELAYS_S = (0.1, 2.0)
"""Seconds between two attempts to reach a node: the first and the longest delay."""
KNOWN_REFUSAL_DELAY_S = 60.0
"""Seconds after which a watch reports a node that refuses to be watched, where the job has a fault
or a question already and watches on. Otherwise a watch would follow the other without a pause."""


class WatchActivities:
    def __init__(self, fleets: Fleets, client: Client, running: RunningWatches) -> None:
        self._fleets = fleets
        self._client = client
        self._running = running

    @activity.defn
    async def watch_ranks(self, input: WatchRanksInput) -> WatchReport:
        """Watch ranks until there is something to decide.

        That is a fault, an end, a loss, a return, a hang, the passing of `report_at_step`, or a
        finished checkpoint if one is waited for.
        """
        info = activity.info()
        pace = Pace(started_at=input.launched_at, expected=input.progress_expected)
        before = _read_previous(info.heartbeat_details)
        if before is not None and before.generation != input.token.generation:
            before = None
        if before is not None:
            # Keep the learned pace and how far training has come: ranks that print no step now may
            # end before one does. The current step is not known until a node reports it, and the
            # gap between the two watches must not count as an interval.
            pace = replace(before.pace, step=None, position=None, advanced_at=None)
        gang = WatchedShard(input, pace, before)
        try:
            with self._running.record(info.task_token, input.fleet):
                report = await self._watch(gang, info.task_token)
                return replace(report, run=info.workflow_run_id or "")
        except ExceptionGroup as group:
            # Not `except*`: in Python 3.11.2, that of Debian 12, it wraps what its body raises.
            ours, others = group.split(ApplicationError)
            if ours is None or others is not None:
                raise
            raise ours.exceptions[0] from None

    def _reach(self, fleet: str, node: str, before: Backend | None) -> Backend:
        """Return the backend that reaches the node by the current fleet file.

        A node that is no longer in the file is reached as before.
        """
        now = self._fleets.backend(fleet)
        try:
            now.node(node)
        except KeyError:
            return before or now
        return now

    async def _watch(self, gang: WatchedShard, task_token: bytes) -> WatchReport:
        input = gang.input
        backend = self._fleets.backend(input.fleet)
        if isinstance(backend, ReportsLate):
            gang.exit_delay = backend.exit_delay
        async with asyncio.TaskGroup() as tasks:
            watchers = [
                tasks.create_task(_follow(partial(self._reach, input.fleet, node), gang, node))
                for node in input.nodes
            ]
            lease = tasks.create_task(self._keep_leases(gang, task_token))
            reporting = tasks.create_task(gang.report())
            looking = tasks.create_task(
                gang.keep_looking(lambda node: self._reach(input.fleet, node, None))
            )
            reading = tasks.create_task(
                gang.keep_reading_checkpoints(lambda node: self._reach(input.fleet, node, None))
            )
            words = tasks.create_task(
                gang.keep_reading_words(lambda node: self._reach(input.fleet, node, None))
            )
            leaving = tasks.create_task(activity.wait_for_worker_shutdown())
            # Not one of these tasks: whatever becomes of it, the watch goes on.
            warming = asyncio.create_task(self._keep_spares(input))
            warming.add_done_callback(_report_failure)
            try:
                await asyncio.wait({reporting, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not reporting.done():
                    # Hand over now rather than at the end of the graceful period: the successor
                    # attaches in a few milliseconds.
                    raise ApplicationError(
                        "this worker shuts down",
                        type="HandOver",
                        next_retry_delay=timedelta(milliseconds=1),
                    )
                return await reporting
            finally:
                for task in (
                    *watchers,
                    lease,
                    reporting,
                    looking,
                    reading,
                    words,
                    leaving,
                    warming,
                ):
                    task.cancel()

    async def _keep_spares(self, input: WatchRanksInput) -> None:
        """Have spares import ahead for as long as this watch lives."""
        if input.warm is not None:
            used = {*input.nodes, *input.others}
            await SpareKeeper(self._fleets, input.token, input.timeouts, input.warm, used).keep()

    async def _keep_leases(self, gang: WatchedShard, task_token: bytes) -> None:
        """Heartbeat with the current progress, and renew leases.

        Only after the server acknowledged that this attempt is the current one: each renewal needs
        such an acknowledgement. A watch that was superseded, or that cannot reach the server,
        renews nothing: nodes then ask their peers.

        The SDK does not see these heartbeats. It is given one now and then: an activity of which it
        has seen none for the time-out and 5 s more is cancelled, and the server is not informed.
        """
        handle = self._client.get_async_activity_handle(task_token=task_token)
        renewed_at = shown_at = -math.inf
        limit = heartbeat_timeout(gang.input.timeouts)
        while True:
            interval = beat_interval(gang.input.timeouts, self._running.count)
            stamps = gang.stamps()
            details = gang.heartbeat()
            if time.monotonic() >= shown_at + limit.total_seconds() * SHOWN_AFTER:
                activity.heartbeat(details)
                shown_at = time.monotonic()
            try:
                await handle.heartbeat(details, rpc_timeout=limit / 3)
            except AsyncActivityCancelledError:
                activity.heartbeat(details)  # its answer tells the SDK, which cancels this
                await asyncio.sleep(interval)
                continue
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    raise SupersededWatchError(
                        f"another watch has taken over generation {gang.generation}"
                    ) from error
                activity.logger.warning(
                    "generation %s: the server does not answer, leases are not renewed: %s",
                    gang.generation,
                    error,
                )
            else:
                self._running.acknowledge(task_token)
                due = renewed_at + renewal_interval(gang.input.timeouts) - interval / 2
                if stamps and read_boot_clock() >= due:
                    await gang.renew(stamps)
                    renewed_at = read_boot_clock()
            await gang.wait_for_beat(interval)


def _report_failure(warming: asyncio.Task[None]) -> None:
    if not warming.cancelled() and (error := warming.exception()) is not None:
        log.error("no spare imports ahead any more, because of a bug", exc_info=error)


class SupersededWatchError(Exception):
    """The server has given this watch to another worker."""


@cache
def _make_heartbeat_adapter() -> TypeAdapter[WatchHeartbeat]:
    """Return the adapter, made once.

    It takes 5 ms, and a worker that starts may take over hundreds of watches.
    """
    return TypeAdapter(WatchHeartbeat)


def _read_previous(details: Sequence[Any]) -> WatchHeartbeat | None:
    """Return the state that the previous watch left, or None if it cannot be read.

    It cannot be read if another version wrote it in another form.
    """
    if not details:
        return None
    try:
        # The SDK decodes details without knowing their type: nested values come as plain mappings.
        return _make_heartbeat_adapter().validate_python(details[0])
    except ValidationError:
        return None


def heartbeat_timeout(timeouts: Timeouts) -> timedelta:
    """Return after how long without a heartbeat another worker watches.

    Within half of a lease, so that no node notices. A worker that is started again takes over at
    once what it had before (`RunningWatches`).
    """
    return max(timedelta(seconds=3), min(MAX_HEARTBEAT_TIMEOUT, timeouts.lease))


def beat_interval(timeouts: Timeouts, watches: int) -> float:
    """Return the seconds between two heartbeats to the server.

    Three may be lost before another worker takes over. Each heartbeat is a write to the server's
    database: the more watches a worker has, the more rarely each of them sends one.

    Args:
        timeouts: Those of the generation.
        watches: How many this worker has.
    """
    least = min(BEAT_INTERVAL_S, renewal_interval(timeouts))
    most = heartbeat_timeout(timeouts).total_seconds() / 3
    return min(most, max(least, watches / MAX_BEATS_PER_S))


def renewal_interval(timeouts: Timeouts) -> float:
    """Return the seconds between two renewals of a lease. Several fit into the rest of one."""
    return timeouts.lease.total_seconds() / 6


async def _follow(
    reach: Callable[[Backend | None], Backend], gang: WatchedShard, node: str
) -> None:
    """Keep a connection to one node and pass all its lines to the gang.

    Return when the node has nothing more to report.

    Each connection uses the fleet file of that moment, so a node whose address changed is found
    again.
    """
    token = gang.input.token
    backend: Backend | None = None
    delay = RECONNECT_DELAYS_S[0]
    while True:
        backend = reach(backend)
        is_platform = isinstance(backend, SeesPeople) and backend.sees_people
        parser = WatchParser(node, token, is_platform=is_platform)
        try:
            doubt = None
            async with backend.watch(
                node, token, gang.last_seq(node), gang.input.timeouts.heartbeat.total_seconds()
            ) as stream:
                async for text in stream.lines():
                    line = parser.parse(text)
                    if (doubt := _find_doubt(gang, node, line)) is not None:
                        break
                    if line.get("outcome") == "refused":
                        was_lost = gang.note_refusal(node)
                        if gang.awaits_others(node):
                            # This watch ends when another one of them returns.
                            await asyncio.Event().wait()
                        if gang.input.hang_known and not was_lost:
                            # The job has a fault or a question already, and watches on: the next
                            # watch is refused as well.
                            await asyncio.sleep(KNOWN_REFUSAL_DELAY_S)
                        _report_unknown_generation(gang, node, line)
                        return
                    if "hello" in line:
                        gang.note_connection(node, stream)
                        delay = RECONNECT_DELAYS_S[0]
                    gang.process_line(node, line)
                    if "end" in line:
                        return
            reason = "the connection was closed" if doubt is None else doubt
        except ProtocolError as error:
            if gang.note_invalid_data(node, error.reason):
                activity.logger.warning(
                    "generation %s: node %s: %s", gang.generation, node, error.reason
                )
            delay = RECONNECT_DELAYS_S[1]
            await asyncio.sleep(delay)
            continue
        except Unreachable as error:
            reason = error.reason
        gang.note_disconnection(node, reason, is_elsewhere=doubt is not None)
        await asyncio.sleep(delay)
        delay = min(RECONNECT_DELAYS_S[1], delay * 2)


def _find_doubt(gang: WatchedShard, node: str, line: Mapping[str, Any]) -> str | None:
    """Return why an answer says nothing about the node's ranks, or None.

    It says nothing if it is not from where they were started.
    """
    places, hello = gang.input.places, line.get("hello")
    if isinstance(hello, Mapping):
        return find_doubt(places, node, parse_place(hello.get("place")))
    if line.get("outcome") == "refused":
        return explain_forgotten(places, node, gang.generation, parse_place(line.get("place")))
    return None


def _report_unknown_generation(gang: WatchedShard, node: str, line: Mapping[str, Any]) -> None:
    """Report the ranks as gone.

    The place where they were started, or where none ever were, does not know the generation.
    """
    gang.add_observation(
        node,
        RanksVanished(
            node, datetime.now(UTC), f"the node refuses to be watched: {line.get('reason')}"
        ),
    )
