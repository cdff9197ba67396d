"""The worker's part in an upgrade: what it takes over from workers of other builds, and when.

A worker's build becomes the current one if there is none, or if the current build has no worker any
more: relaunch was replaced in place. Otherwise it waits for `relaunch upgrade`. The worker of the
current build has the workflows of other builds move to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from relaunch.builds import (
    GONE_AFTER,
    HEARTBEAT_INTERVAL,
    Build,
    Builds,
    RunningWorkflow,
    hand_over,
    list_running,
    make_current,
    read_builds,
    wake,
)
from relaunch.workflows.replay import find_difference

STARTING_INTERVAL_S = 0.2
"""Seconds between two looks until the server knows this worker's build and a current one. It limits
how often it answers."""
UNHEARD_AFTER = HEARTBEAT_INTERVAL + timedelta(seconds=5)
"""How long no worker of a build is heard before it counts as gone, though none was missed."""
REGISTER_TIMEOUT_S = 60.0
"""Seconds after which the server should have heard of this worker's build."""
WAITING_INTERVAL_S = 2.0
"""Seconds between two looks while another build is current."""
INTERVAL_S = 5.0
"""Seconds between two looks while this build is current and another one has workflows."""
QUIET_INTERVAL_S = 15.0
"""The same where no other build has any, as on a laptop from its second look on. Each look has the
server query one of its workflows."""
RETURN_AFTER_S = 120.0
"""Seconds without a worker of the current build after which one that was current earlier takes over
again. It may be kept beside the new one for a rollback, and the new one may only be restarting."""
REMIND_INTERVAL_S = 300.0
"""Seconds between two reminders of a workflow to move, and two attempts at one that cannot."""
REPAIR = "NodeRepair"
"""The type of the workflow that ends on the build that it began on: within hours."""

log = logging.getLogger("relaunch")


@dataclass(slots=True)
class _Silence:
    """What is seen of a build's workers."""

    heard_at: datetime | None
    since: float
    """When it was first seen so, by this machine's monotonic clock: the server's may differ."""


@dataclass(slots=True)
class Handover:
    client: Client
    task_queue: str
    build: str
    _silences: dict[str, _Silence] = field(default_factory=dict)
    _tried: dict[tuple[str, bool], float] = field(default_factory=dict)
    """When a run was last reminded to move, or tried because its build is gone (True)."""
    _others: int = 0
    """Workflows that other builds had at the last look."""

    async def run(self) -> None:
        """Look until cancelled. What the server refuses now is asked again with the next look."""
        last, began, has_warned = "", time.monotonic(), False
        while True:
            builds = Builds()
            try:
                builds = await read_builds(self.client, self.task_queue)
                await self._look(builds)
                last = ""
            except RPCError as error:
                expected = error.status in (RPCStatusCode.UNAVAILABLE, RPCStatusCode.CANCELLED)
                if not expected and str(error) != last:
                    last = str(error)
                    log.warning("the server does not say which builds it knows: %s", last)
            is_late = time.monotonic() - began > REGISTER_TIMEOUT_S
            if builds.known and builds.find(self.build) is None and is_late and not has_warned:
                has_warned = True
                log.warning(
                    "the server does not take build %s: it knows %d, which may be all it keeps;"
                    " delete old ones with `temporal worker deployment delete-version`",
                    self.build,
                    len(builds.known),
                )
            await asyncio.sleep(self._choose_interval(builds))

    def _choose_interval(self, builds: Builds) -> float:
        if builds.current is None or builds.find(self.build) is None:
            return STARTING_INTERVAL_S
        if builds.current.id != self.build:
            return WAITING_INTERVAL_S
        return INTERVAL_S if self._others else QUIET_INTERVAL_S

    async def _look(self, builds: Builds) -> None:
        current = builds.current
        ours = builds.find(self.build)
        if ours is None:
            return  # the server has not heard of this worker yet
        for one in builds.known:
            self._listen(one)
        if current is None or (current.id != self.build and self._replaces(ours, current)):
            await make_current(self.client, self.task_queue, self.build, builds.token)
            if current is None:
                log.info("build %s is current, the first one", self.build)
            else:
                log.warning("build %s is current: %s has no worker", self.build, current.id)
            # Those that no worker with a build has worked for yet move with their next task.
            for workflow in await list_running(self.client, self.task_queue, ""):
                await wake(self.client, workflow)
        elif current.id != self.build:
            return
        self._others = 0
        for one in builds.known:
            if one.id != self.build:
                self._others += await self._take_over(one)

    def _listen(self, build: Build) -> None:
        known = self._silences.get(build.id)
        if known is None or known.heard_at != build.heard_at:
            self._silences[build.id] = _Silence(build.heard_at, time.monotonic())

    def _replaces(self, ours: Build, current: Build) -> bool:
        """Return whether the current build has no worker any more, and ours is to replace it."""
        silent_s = time.monotonic() - self._silences[current.id].since
        waited = ours.was_current_at is None or silent_s > RETURN_AFTER_S
        return waited and self._is_gone(current)

    def _is_gone(self, build: Build) -> bool:
        """Return whether no worker of a build is left.

        A worker that has just started, and any worker of a server that has, is first heard after an
        interval.
        """
        seen = self._silences[build.id]
        limit = UNHEARD_AFTER if seen.heard_at is None else GONE_AFTER
        return time.monotonic() - seen.since > limit.total_seconds()

    async def _take_over(self, build: Build) -> int:
        """Have the workflows that another build works for move here; return how many there are."""
        gone = self._is_gone(build)
        running = await list_running(self.client, self.task_queue, build.id)
        for workflow in running:
            tried = self._tried.get((workflow.run_id, gone))
            if tried is not None and time.monotonic() - tried < REMIND_INTERVAL_S:
                continue
            self._tried[workflow.run_id, gone] = time.monotonic()
            if not gone:
                if workflow.type != REPAIR:
                    await wake(self.client, workflow)
            elif difference := await self._move(workflow):
                log.error(
                    "%s belongs to build %s, which has no worker, and build %s cannot continue it"
                    " (%s): start a worker of build %s beside this one, which hands it over",
                    workflow.id,
                    build.id,
                    self.build,
                    difference,
                    build.id,
                )
            else:
                log.info("build %s continues %s of build %s", self.build, workflow.id, build.id)
        return len(running)

    async def _move(self, workflow: RunningWorkflow) -> str:
        """Continue a workflow here if its history allows it; return why it does not."""
        handle = self.client.get_workflow_handle(workflow.id, run_id=workflow.run_id)
        history = await handle.fetch_history()
        difference = await find_difference(
            history, self.client.namespace, self.client.data_converter
        )
        if not difference:
            await hand_over(self.client, workflow, self.task_queue, self.build)
        return difference
