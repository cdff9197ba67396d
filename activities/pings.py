"""Requests the dead man's switches of fleets, in a loop beside the worker.

A request states that a fleet is really watched: this worker has just finished a round of its
nodes, the server says that the fleet's workflow runs and is not stuck, and that it has the
heartbeats of the fleet's watch. Otherwise there is none, and the outside service raises the alarm.
No watch waits for a request, and nothing is added to a history.
docs/decisions/0062-a-ping-states-a-watch.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities.channels import ChannelError, ChannelSender
from relaunch.activities.clocks import read_boot_clock
from relaunch.messages.ids import FLEET_ID_PREFIX
from relaunch.messages.workers import HeartbeatStatus
from relaunch.spec.fleet import DeadManSwitch
from relaunch.text import format_time

log = logging.getLogger("relaunch.pings")

LOOK_INTERVAL_S = 1.0
RETRY_DELAY_S = 15.0
"""After a request that was not accepted, or that could not be made: four in a minute, which is what
services take."""
ROUND_TIMEOUT_S = 180.0
"""How long ago the last round may be: there is one a minute, and one over thousands of nodes that
do not answer takes longer."""
WATCH_TIMEOUT = timedelta(seconds=60)
"""How old the newest heartbeat of a watch may be: the server gives it to another worker after
20 s."""
TASK_TIMEOUT = timedelta(seconds=60)
"""How long a workflow task may be pending, retries included. A worker that starts replays fleets
for some seconds."""
ANSWER_TIMEOUT = timedelta(seconds=10)
WATCH = "watch_fleet"


class NotWatchedError(Exception):
    """The server does not confirm that the fleet is watched."""


@dataclass(slots=True)
class _Switch:
    tried_at: float | None = None
    """When the last request began, or was withheld, by the boot clock."""
    accepted_at: datetime | None = None
    failing_since: datetime | None = None
    reason: str = ""
    task: asyncio.Task[None] | None = None


class Pinger:
    def __init__(
        self,
        client: Client,
        heartbeats: Callable[[], Mapping[str, DeadManSwitch]],
        clock: Callable[[], float] = read_boot_clock,
    ) -> None:
        """Create the loop.

        Args:
            client: The client of the server.
            heartbeats: Returns the dead man's switches of this worker's fleets, as they are now.
            clock: Returns seconds that do not jump.
        """
        self._client = client
        self._heartbeats = heartbeats
        self._clock = clock
        self._sender = ChannelSender()
        self._rounds: dict[str, float] = {}
        self._switches: dict[str, _Switch] = {}

    def note_round(self, fleet: str) -> None:
        """Note that the nodes of a fleet were probed for its workflow just now, by this worker."""
        self._rounds[fleet] = self._clock()

    async def run(self) -> None:
        """Request what is due until cancelled."""
        try:
            while True:
                self.begin_due()
                await asyncio.sleep(LOOK_INTERVAL_S)
        finally:
            for switch in self._switches.values():
                if switch.task is not None:
                    switch.task.cancel()

    def begin_due(self) -> None:
        """Begin the requests that are due, each in its own task."""
        now = self._clock()
        for fleet, heartbeat in self._heartbeats().items():
            switch = self._switches.setdefault(fleet, _Switch())
            if switch.task is not None and not switch.task.done():
                continue
            if not self._has_fresh_round(fleet):
                switch.failing_since, switch.reason = None, ""  # another worker watches it, or none
            elif switch.tried_at is None or now - switch.tried_at >= _delay(switch, heartbeat):
                switch.task = asyncio.create_task(self._ping(fleet, heartbeat, switch))

    def list_status(self) -> tuple[HeartbeatStatus, ...]:
        """Return each dead man's switch as this worker knows it."""
        found = []
        for fleet, heartbeat in self._heartbeats().items():
            known = self._switches.get(fleet, _Switch())
            found.append(
                HeartbeatStatus(
                    fleet, heartbeat.name, known.accepted_at, known.failing_since, known.reason
                )
            )
        return tuple(found)

    def _has_fresh_round(self, fleet: str) -> bool:
        at = self._rounds.get(fleet)
        return at is not None and self._clock() - at <= ROUND_TIMEOUT_S

    async def _ping(self, fleet: str, heartbeat: DeadManSwitch, switch: _Switch) -> None:
        switch.tried_at = self._clock()
        try:
            await self._prove_watched(fleet)
            await self._sender.ping(f"heartbeat of {fleet}", heartbeat.url)
        except NotWatchedError as error:
            reason = str(error)
        except ChannelError as error:
            reason = f"{heartbeat.name}: {error.reason}"
        except RPCError as error:
            reason = f"the server does not say whether it is watched: {error.message}"
        except Exception as error:  # a bug here must not end the worker, and the alarm is raised
            log.exception("the dead man's switch of fleet %s is not requested", fleet)
            reason = f"unexpected error: {type(error).__name__}"
        else:
            if switch.failing_since is not None:
                log.info("the dead man's switch of fleet %s is requested again", fleet)
            switch.accepted_at, switch.failing_since = datetime.now(UTC), None
            switch.reason = ""
            return
        if switch.reason != reason:
            log.warning("the dead man's switch of fleet %s is not requested: %s", fleet, reason)
        switch.failing_since = switch.failing_since or datetime.now(UTC)
        switch.reason = reason

    async def _prove_watched(self, fleet: str) -> None:
        """Ask the server whether the fleet decides, and has a watch that lives.

        Raises:
            NotWatchedError: it does not, or its watch does not.
            RPCError: the server does not answer.
        """
        handle = self._client.get_workflow_handle(f"{FLEET_ID_PREFIX}{fleet}")
        try:
            found = await handle.describe(rpc_timeout=ANSWER_TIMEOUT)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise NotWatchedError("its workflow does not run") from None
            raise
        check_watched(found, datetime.now(UTC))


def _delay(switch: _Switch, heartbeat: DeadManSwitch) -> float:
    """Return the seconds between two tries. The fleet file may have changed since the last one."""
    every = heartbeat.every.total_seconds()
    return every if switch.failing_since is None else min(RETRY_DELAY_S, every)


def check_watched(fleet: WorkflowExecutionDescription, now: datetime) -> None:
    """Check that a fleet decides, and that its watch lives, if it has one now.

    While a job waits for nodes, the fleet probes them itself, without a watch.

    Raises:
        NotWatchedError: it does not, or its watch does not.
    """
    if fleet.status is not WorkflowExecutionStatus.RUNNING:
        raise NotWatchedError("its workflow does not run")
    described = fleet.raw_description
    if described.HasField("pending_workflow_task"):
        since = described.pending_workflow_task.original_scheduled_time.ToDatetime(UTC)
        if now - since > TASK_TIMEOUT:
            raise NotWatchedError(f"its workflow task is not done since {format_time(since)}")
    for one in described.pending_activities:
        if one.activity_type.name == WATCH:
            _check_watch(one, now)


def _check_watch(watch: PendingActivityInfo, now: datetime) -> None:
    times = [watch.last_heartbeat_time, watch.last_started_time]
    if watch.attempt <= 1:
        times.append(watch.scheduled_time)  # of a later attempt it may be in the future
    newest = max(one.ToDatetime(UTC) for one in times)
    if now - newest > WATCH_TIMEOUT:
        raise NotWatchedError(
            f"the server has no heartbeat of its watch since {format_time(newest)}"
        )
