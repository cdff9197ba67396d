"""Moving a service to another build of relaunch while its jobs run, and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from temporalio.service import RPCError, RPCStatusCode

from relaunch.builds import (
    Build,
    Builds,
    RunningWorkflow,
    build_id,
    hand_over,
    list_running,
    make_current,
    read_builds,
    wake,
)
from relaunch.config import ConfigError
from relaunch.fields import duration
from relaunch.text import count_noun, join_names

if TYPE_CHECKING:
    from temporalio.client import Client

LOOK_INTERVAL_S = 0.5
START_TIMEOUT_S = 30.0
"""Seconds that the worker of a build gets to be heard: it starts in two on an idle machine."""
MISSING_QUEUES = "is missing active task queues"
"""What the server says of a build that does not poll for every kind of task that the current one
polls for."""
STUCK_AFTER_S = 4.0
"""Seconds after which a workflow that has not moved is looked at and woken again. Visibility is a
second behind."""


def parse_within(text: str) -> timedelta:
    """Parse a duration such as 90s.

    Raises:
        ConfigError: it is none.
    """
    from pydantic import TypeAdapter, ValidationError

    from relaunch.fields import Duration

    try:
        return TypeAdapter(Duration).validate_python(text)
    except ValidationError as error:
        what = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--within: {what}") from None


async def upgrade(
    client: Client, task_queue: str, build: str, say: Callable[[str], None], within: timedelta
) -> int:
    """Make a build the current one, by default that of this installation, and have everything move
    to it.

    Return an exit code: 0 once nothing is left on another build, 1 if something is after `within`.

    Raises:
        ConfigError: no worker of this build runs.
    """
    target = build or build_id()
    return await _switch(client, task_queue, target, "relaunch upgrade", say, within)


async def rollback(
    client: Client,
    task_queue: str,
    build: str | None,
    say: Callable[[str], None],
    within: timedelta,
) -> int:
    """Make an earlier build the current one again, by default the one before; as `upgrade`.

    Raises:
        ConfigError: there is no such build, or no worker of it runs.
    """
    if build is None:
        previous = (await read_builds(client, task_queue)).previous
        if previous is None:
            raise ConfigError(
                f"no build was current before on task queue {task_queue}:"
                " expected one to go back to"
            )
        build = previous.id
    # Without the name it would return to the build that was left; and so may `relaunch upgrade`.
    return await _switch(client, task_queue, build, f"relaunch rollback {build}", say, within)


async def _switch(
    client: Client,
    task_queue: str,
    target: str,
    again: str,
    say: Callable[[str], None],
    within: timedelta,
) -> int:
    """Make a build current and have everything move to it; return an exit code.

    `again` is the command that does the same once more.
    """
    builds = await _find_worker(client, task_queue, target, within)
    before = builds.current
    if before is not None and before.id == target:
        say(f"build {target} is current already")
    else:
        await _make_current(client, task_queue, target, builds)
        say(f"build {target} is current" + (f", {before.id} was" if before else ""))
    others = ("", *(one.id for one in builds.known if one.id != target))
    moving = _Move(client, task_queue, target, others)
    left = await moving.wait(within)
    idle = [one.id for one in builds.known if one.id != target and one.has_worker(_now())]
    if left:
        say(f"{count_noun(len(left), 'workflow')} still on another build after {duration(within)}:")
        for workflow, build in left:
            where = f"is still on {build}" if build else "is on no build yet"
            say(f"  {workflow.id} {where}: {await _explain(client, workflow)}")
        say(f"keep the workers of these builds; `{again}` shows again what is left")
        return 1
    say(f"{count_noun(moving.count, 'workflow')} moved; nothing is left on another build")
    if idle:
        say(f"the worker of {join_names(idle)} can be stopped; `relaunch rollback` needs it")
    return 0


async def _find_worker(client: Client, task_queue: str, target: str, within: timedelta) -> Builds:
    """Wait a little for a worker that may just be starting; return what is known of the builds.

    Raises:
        ConfigError: there is none.
    """
    deadline = time.monotonic() + min(within.total_seconds(), START_TIMEOUT_S)
    while True:
        builds = await read_builds(client, task_queue)
        found = builds.find(target)
        if found is not None and found.has_worker(_now()):
            return builds
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(1.0)
    running = [one.id for one in builds.known if one.has_worker(_now())]
    raise ConfigError(
        f"no worker of build {target} serves task queue {task_queue}"
        + (f", only of {join_names(running)}" if running else "")
        + ": start `relaunch-worker` of that build beside the others, then repeat this command"
    )


async def _make_current(client: Client, task_queue: str, target: str, builds: Builds) -> None:
    """Make a build current. A worker that has just started polls for one kind of task before the
    server knows that it polls for the other; that is waited for.

    Raises:
        RPCError: the server refuses.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            await make_current(client, task_queue, target, builds.token)
        except RPCError as error:
            if MISSING_QUEUES not in error.message or time.monotonic() > deadline:
                raise
        else:
            return
        await asyncio.sleep(LOOK_INTERVAL_S)
        now = await read_builds(client, task_queue)
        if _current_id(now) == _current_id(builds):  # else the old token makes the server refuse
            builds = now


def _current_id(builds: Builds) -> str | None:
    return builds.current.id if builds.current is not None else None


def _now() -> datetime:
    return datetime.now(UTC)


class _Move:
    """The workflows on their way to the current build."""

    def __init__(
        self, client: Client, task_queue: str, target: str, others: tuple[str, ...]
    ) -> None:
        self._client, self._queue, self._target = client, task_queue, target
        self._others = others
        """Builds that something may be on; the empty one is that of tasks which all failed."""
        self._tries: dict[str, tuple[float, float]] = {}
        """When each that was seen on another build is tried again, by its run id, and how long
        after that once more."""
        self._must_stay: set[str] = set()
        """Runs that the current build would not have decided as they are."""

    @property
    def count(self) -> int:
        return len(self._tries)

    async def wait(self, within: timedelta) -> list[tuple[RunningWorkflow, str]]:
        """Wait until all have moved; return those that have not after `within`, with their
        builds."""
        deadline = time.monotonic() + within.total_seconds()
        quiet = 0
        while True:
            left = await self._look()
            # Visibility may still miss what has just begun on another build.
            quiet = quiet + 1 if not left else 0
            if quiet > 2 or time.monotonic() > deadline:
                return left
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _look(self) -> list[tuple[RunningWorkflow, str]]:
        left = [
            (workflow, build)
            for build in self._others
            for workflow in await list_running(self._client, self._queue, build)
        ]
        for workflow, _ in left:
            await self._try(workflow)
        return left

    async def _try(self, workflow: RunningWorkflow) -> None:
        """Wake a workflow, and again after pauses that double: the server may not know yet, where
        it makes the task of the first signal, which build is current now.

        Before it is woken again its tasks are looked at: a signal begins a new task, which has not
        failed yet.
        """
        due, pause = self._tries.get(workflow.run_id, (0.0, STUCK_AFTER_S))
        if time.monotonic() < due:
            return
        is_first = workflow.run_id not in self._tries
        self._tries[workflow.run_id] = time.monotonic() + pause, 2 * pause
        if not is_first and workflow.run_id not in self._must_stay:
            await self._rescue(workflow)
        if workflow.type != "NodeRepair":  # it ends on the build that it began on
            await wake(self._client, workflow)

    async def _rescue(self, workflow: RunningWorkflow) -> None:
        """Hand a workflow over whose tasks fail on its own build, if that is safe: that build has
        not decided anything in this run, or the target would have decided the same."""
        from temporalio.api.enums.v1 import EventType

        handle = self._client.get_workflow_handle(workflow.id, run_id=workflow.run_id)
        try:
            if (await read_task(self._client, workflow)).attempt < 2:
                return
            history = await handle.fetch_history()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return
            raise
        done = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
        if any(event.event_type == done for event in history.events):
            if self._target != build_id():
                return
            from relaunch.workflows.replay import find_difference

            converter = self._client.data_converter
            if await find_difference(history, self._client.namespace, converter):
                self._must_stay.add(workflow.run_id)
                return
        await hand_over(self._client, workflow, self._queue, self._target)


class PendingTask:
    """A workflow task that was not completed."""

    def __init__(self, attempt: int = 0, since: datetime | None = None, build: str = "") -> None:
        self.attempt = attempt
        """1 for the first; 0: there is none."""
        self.since = since
        """When its first attempt was scheduled."""
        self.build = build
        """The build that has it; empty: its workflow is on none yet."""


async def read_task(client: Client, workflow: RunningWorkflow) -> PendingTask:
    """Return the workflow's pending task.

    Raises:
        RPCError: the server does not know the workflow (any more).
    """
    handle = client.get_workflow_handle(workflow.id, run_id=workflow.run_id)
    described = (await handle.describe()).raw_description
    if not described.HasField("pending_workflow_task"):
        return PendingTask()
    task = described.pending_workflow_task
    versioning = described.workflow_execution_info.versioning_info
    # On its way to a build, it has tasks there, and none of them was completed yet.
    at = versioning.version_transition if versioning.HasField("version_transition") else versioning
    since = task.original_scheduled_time.ToDatetime(UTC)
    return PendingTask(task.attempt, since, at.deployment_version.build_id)


async def read_task_failure(client: Client, workflow: RunningWorkflow) -> str:
    """Return why the last failed task of a workflow failed; empty if none did."""
    handle = client.get_workflow_handle(workflow.id, run_id=workflow.run_id)
    failure = None
    async for event in handle.fetch_history_events():
        if event.HasField("workflow_task_failed_event_attributes"):
            failure = event.workflow_task_failed_event_attributes.failure
    if failure is None:
        return ""
    # A worker that encrypts has its message in a payload.
    error = await client.data_converter.decode_failure(failure)
    message = getattr(error, "message", str(error))
    return " ".join(message.split())[:300]


async def _explain(client: Client, workflow: RunningWorkflow) -> str:
    """Return why a workflow has not moved."""
    if workflow.type == "NodeRepair":
        return "a repair ends on the build that it began on"
    if (await read_task(client, workflow)).attempt > 1:
        return f"its workflow task fails: {await read_task_failure(client, workflow)}"
    return "it moves when what it does now is done"


def describe_build(build: Build, now: datetime) -> str:
    """Return what is known of the build's workers, as in "it has a worker"."""
    if build.heard_at is None:
        return "has no worker"
    if build.has_worker(now):
        return "has a worker"
    seconds = round((now - build.heard_at).total_seconds())
    return f"has no worker since {seconds} s"
