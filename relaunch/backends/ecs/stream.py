"""Reports a rank's task as an agent's `watch` does: see docs/reference/agent-protocol.md.

The absence of an answer from AWS is not reported as a failure of the rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from relaunch.backends.base import Unreachable
from relaunch.backends.ecs.aws import AwsError
from relaunch.backends.ecs.cluster import GONE, Cluster
from relaunch.backends.ecs.container import Feed
from relaunch.backends.ecs.follow import FollowedTask
from relaunch.backends.ecs.tasks import Task, is_ours
from relaunch.generation import Token

AGENT_FLAPS = 30.0
"""Seconds for which the ECS agent of an instance may be disconnected: ECS closes its connection
several times an hour, and it reconnects within seconds.
"""
STALE_POLLS = 3
"""Number of polls that may fail before the watch counts as broken."""
FRESH_POLLS = 1.5
"""Number of poll intervals after which the last observation is too old to send heartbeats from."""
USER = "UserInitiated"
BY_ITSELF = ("EssentialContainerExited", None)
"""Stop codes of a task that ended by itself: only then is exit code 0 a success."""
SETTLES = 5.0
"""Seconds after which a task that was run must be visible to every caller: ECS is eventually
consistent. AWS gives no number; its own tools wait from two seconds upwards.
"""
LOOK_AGAIN = 0.5
ECS_SEQ = 1_000_000
"""Sequence number of the first observation from ECS: higher than any that an agent in the container
may have used before.
"""
NO_KERNEL_LOG = "ECS does not tell what the kernel of a node said"

Line = Mapping[str, Any]
Tail = Callable[[Task], Awaitable[list[str]]]
"""Reads the last lines that a rank printed."""


class TaskStream:
    """Watch of one task that runs ranks."""

    def __init__(
        self,
        cluster: Cluster,
        followed: FollowedTask,
        node: str,
        ec2_id: str,
        token: Token,
        after_seq: int,
        heartbeat: float,
        tail: Tail,
        settles: float,
        feed: Feed,
    ) -> None:
        """Create a watch. `feed` delivers the lines of the agent in the task, if it has one."""
        self._feed = feed
        self._cluster = cluster
        self._followed = followed
        self._node = node
        self._ec2_id = ec2_id
        self._token = token
        self._after_seq = after_seq
        self._heartbeat = heartbeat
        self._tail = tail
        self._settles = settles
        self._opened = time.monotonic()
        self._unregistered: float | None = None
        self._machine: tuple[float | None, str | None] = (None, None)
        """When the task was last polled, and the EC2 state of its machine read after that poll."""

    async def lines(self) -> AsyncIterator[Line]:
        followed, greeted, due = self._followed, False, 0.0
        while True:
            seen = followed.looked_at if followed.looked_at is not None else self._opened
            stale_at = wake = seen + STALE_POLLS * self._cluster.poll
            if self._feed.speaks:
                # A rank whose agent is heard is alive, whatever AWS reports.
                wake = max(wake, time.monotonic() + self._heartbeat)
            elif time.monotonic() >= stale_at:
                raise Unreachable(
                    self._node,
                    followed.failing.reason if followed.failing else "AWS does not answer",
                )
            if (
                followed.missing
                and followed.task is None
                and time.monotonic() - self._opened < self._settles
            ):
                wake = time.monotonic() + LOOK_AGAIN
                self._cluster.hint(followed.arn)
            elif followed.looked_at is not None:
                if followed.task is not None:
                    self._feed.begin(followed.task)
                ends = await self._ends()
                if not ends and not self._feed.speaks:
                    self._check_agent()
                if not greeted:
                    yield {"hello": self._hello()}
                    greeted = True
                if ends:
                    await self._feed.finish()
                while (line := self._feed.next()) is not None:
                    yield line
                    if "end" in line:
                        return
                for seq, end in enumerate(ends, ECS_SEQ):
                    if self._after_seq < seq:
                        yield {
                            "observation": {
                                "seq": seq,
                                "at": time.time(),
                                "stamp": time.monotonic(),
                                **end,
                            }
                        }
                if ends:
                    yield {"end": {}}
                    return
                if (waits := self._feed.waits_until) is not None:
                    wake = min(wake, waits)
                elif (
                    not self._feed.connected
                    and time.monotonic() - seen <= FRESH_POLLS * self._cluster.poll
                ):
                    if time.monotonic() >= due:
                        due = time.monotonic() + self._heartbeat
                        yield {"heartbeat": self._beat()}
                    wake = min(wake, due)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wake - time.monotonic())):
                    await followed.wait_for_change()

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        """A task holds no lease."""

    def _hello(self) -> Line:
        task = self._followed.task
        ended = task is None or task.stopped
        state = (
            "ended"
            if ended
            else "running"
            if task is not None and task.last_status == "RUNNING"
            else "prepared"
        )
        ranks = [] if task is None else list(task.ranks)
        token = self._token
        named = {
            "namespace": token.namespace,
            "job": token.job,
            "submission": token.submission,
            "generation": token.generation,
        }
        return {
            "token": named,
            "boot_id": "",
            "state": state,
            "ranks": ranks,
            "stamp": time.monotonic(),
        }

    def _beat(self) -> Line:
        task = self._followed.task
        alive = list(task.ranks) if task is not None and task.last_status == "RUNNING" else []
        return {"stamp": time.monotonic(), "alive": alive, "lease_left": None, "progress": {}}

    async def _ends(self) -> list[Line]:
        """Return the observations of how the task ended; none if it has not ended.

        A failure yields one observation, for the first rank, because ECS does not know which of
        several ranks failed; a success yields one per rank.
        """
        followed = self._followed
        if followed.missing:
            return [
                make_vanished(
                    f"ECS does not know task {short(followed.arn)} any more: "
                    "it ended more than an hour ago, and how it ended is not known"
                )
            ]
        task = followed.task
        if task is None:
            return []
        if task.stopped:
            end = ending(task)
            if end["kind"] == "RankExited" and end["exit_code"] == 0:
                return [
                    {**end, "rank": rank, "local_rank": number}
                    for number, rank in enumerate(task.ranks or (0,))
                ]
            failed = end["kind"] == "RankExited" and not end["stopped"]
            return [
                {**end, "log_tail": await self._tail(task)}
                if failed and self._after_seq < ECS_SEQ
                else end
            ]
        state = await self._state()
        if state is not None and (state in GONE or not state):
            return [
                make_vanished(
                    f"{self._ec2_id} is {state or 'not known to EC2 any more'}: "
                    "the task that ran there has ended with it"
                )
            ]
        return []

    async def _state(self) -> str | None:
        """Return the EC2 state of a machine whose ECS agent is disconnected.

        Return None if the agent is connected or EC2 did not answer.
        """
        instance = self._followed.instance
        if instance is not None and instance.agent_connected:
            return None
        if self._machine[0] != self._followed.looked_at:
            try:
                self._machine = (
                    self._followed.looked_at,
                    await self._cluster.ec2_state(self._ec2_id),
                )
            except AwsError:
                # Try again after the next poll; until then the state of the machine is unknown.
                self._machine = self._followed.looked_at, None
        return self._machine[1]

    def _check_agent(self) -> None:
        instance = self._followed.instance
        if instance is not None:
            self._unregistered = None
            if (silent := self._cluster.silent_for(instance.arn)) > AGENT_FLAPS:
                raise Unreachable(
                    self._node,
                    f"the ECS agent of {self._ec2_id} has not been connected for {silent:.0f} s",
                )
            return
        self._unregistered = (
            self._unregistered if self._unregistered is not None else time.monotonic()
        )
        if time.monotonic() - self._unregistered > AGENT_FLAPS:
            raise Unreachable(
                self._node,
                f"{self._ec2_id} runs, but is not registered with ECS cluster "
                f"{self._cluster.name} any more",
            )


class EndedStream:
    """Watch of a rank that ECS does not know."""

    def __init__(self, token: Token, after_seq: int, reason: str) -> None:
        self._token = token
        self._after_seq = after_seq
        self._reason = reason

    async def lines(self) -> AsyncIterator[Line]:
        if self._after_seq < ECS_SEQ:
            yield {
                "observation": {
                    "seq": ECS_SEQ,
                    "at": time.time(),
                    "stamp": time.monotonic(),
                    **make_vanished(self._reason),
                }
            }
        yield {"end": {}}

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        """A task holds no lease."""


def ending(task: Task) -> dict[str, Any]:
    """Return how a task ended, as an observation without its sequence number."""
    ours = is_ours(task.stopped_reason)
    is_machine = task.stopped_reason.startswith("Host EC2") or task.is_deregistered
    if task.stop_code == USER and not ours and not is_machine:
        said = f": {task.stopped_reason}" if task.stopped_reason else ""
        return {
            "kind": "StoppedByUser",
            "reason": f"task {task.short} of rank {task.rank} was stopped by a user{said}",
            "by": "ECS",
        }
    trainer = next((one for one in task.containers if one.name == task.trainer), None)
    code = trainer.exit_code if trainer is not None else None
    if code == 0 and task.stop_code not in BY_ITSELF:
        code = None
    failed = code != 0 and not ours
    reasons = (task.stopped_reason, *(one.reason for one in task.containers))
    return {
        "kind": "RankExited",
        "rank": task.rank if task.rank is not None else 0,
        "local_rank": 0,
        "pid": None,
        "exit_code": code,
        "signal": None,
        "stopped": ours,
        "error": None,
        "log_tail": [],
        "kernel": [],
        "kernel_unreadable": NO_KERNEL_LOG if failed else None,
        "ecs": {
            "stop_code": task.stop_code,
            "reason": "; ".join(dict.fromkeys(reason for reason in reasons if reason)),
        },
    }


def make_vanished(reason: str) -> dict[str, Any]:
    return {
        "kind": "RanksVanished",
        "reason": reason,
        "rebooted": False,
        "kernel": [],
        "kernel_unreadable": NO_KERNEL_LOG,
    }


def short(arn: str) -> str:
    """Return the id of a task, without account and cluster."""
    return arn.rpartition("/")[2]
