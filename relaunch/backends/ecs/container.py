"""Client side of the relaunch agent inside a rank's container, for images that have one.

It composes the order that the agent runs and reads the observations that the agent reports. Losing
the connection to the agent is not treated as a failure of the rank: ECS reports how the container
ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relaunch.agent.container.tls import Secret, SecretError
from relaunch.backends.answers import WatchParser
from relaunch.backends.base import BackendError, StartOrder, Unreachable
from relaunch.backends.ecs import wire
from relaunch.backends.ecs.follow import FollowedTask
from relaunch.backends.ecs.tasks import Definition, Task
from relaunch.backends.session import SILENT_BEATS, AgentSession
from relaunch.generation import Token
from relaunch.spec.job import SecretReference

logger = logging.getLogger(__name__)

PORT = "RELAUNCH_AGENT_PORT"
"""Environment variable that a task definition sets on a container whose entry point is the agent;
its value is the port on which the agent listens.
"""
ORDER = "RELAUNCH_ORDER"
GRACE, HEARTBEAT = 15.0, 10.0
"""Seconds. Used when another worker prepared the node and its order is therefore not known here;
the values are those of the default policy.
"""
RETRY = (0.5, 20.0)
"""Seconds between two connection attempts: the first value while the container starts, the second
as the upper bound of the backoff, for a container whose port is closed.
"""
COMPLAIN_AFTER = 15.0
"""Seconds for which the agent of a running task may be unreachable before a warning is logged.
Starting Python and the first `prepare` take one or two.
"""
DRAIN_TIMEOUT = 1.0
"""Seconds to wait for the last lines of a container that ECS reports as stopped. They were sent
before it stopped.
"""
EXPIRY_WARNING = 30 * 86400.0
"""Seconds before the end of a certificate at which a warning is logged."""
AT_FIRST = 2.0
"""Seconds for which the first heartbeat of a watch waits for one from the agent, which reports the
progress that a rank has already made.
"""

Line = Mapping[str, Any]
Reach = Callable[[Task], AbstractAsyncContextManager[AgentSession]]


def port_of(definition: Definition, container: str) -> int | None:
    """Return the port of the agent in a container; None if it has no agent.

    Raises:
        ValueError: The value of the variable is not a valid port.
    """
    written = definition.variables.get(container, {}).get(PORT)
    if written is None:
        return None
    if not written.isdecimal() or not 1024 <= int(written) <= 65535:
        raise ValueError(
            f"{PORT} of container {container} of {definition.arn} is {written!r}, "
            "expected a port from 1024 to 65535"
        )
    return int(written)


def order(start: StartOrder, port: int, stop_grace: float, heartbeat: float) -> str:
    """Return the value of `RELAUNCH_ORDER`, which tells the agent what to run.

    It omits variables that the container's environment already sets for the first rank.
    """
    token, first = start.token, start.rank_env[0]
    own = [
        {
            name: value
            for name, value in env.items()
            if first.get(name) != value and name != "CUDA_VISIBLE_DEVICES"
        }
        for env in start.rank_env
    ]
    said = {
        "token": {
            "namespace": token.namespace,
            "job": token.job,
            "submission": token.submission,
            "generation": token.generation,
        },
        "node": start.node,
        "ranks": [int(env["RANK"]) for env in start.rank_env],
        "rank_env": own,
        "log_pattern": start.log_pattern,
        **({"redact": start.redact} if start.redact else {}),
        "stop_grace": stop_grace,
        "heartbeat": heartbeat,
        "port": port,
    }
    return json.dumps(said, separators=(",", ":"))


class Agents:
    """Agent sessions of one fleet: one per task, open as long as it has a user."""

    def __init__(
        self, key: SecretReference | None, address: Callable[[str], Awaitable[str]]
    ) -> None:
        self._key = key
        self._address = address
        self._sessions: dict[tuple[str, str], tuple[AgentSession, int]] = {}
        self._complained: dict[str, None] = {}
        self._expiring: set[float] = set()
        """Ends of certificates, in Unix time, that were warned of."""

    @asynccontextmanager
    async def session(self, node: str, task: Task) -> AsyncIterator[AgentSession]:
        """Open or share the session with the agent in a task.

        Raises:
            Unreachable: Here or at the first use: the task has no agent, or the agent does not
                accept the key.
        """
        name = node, task.arn
        port = task.port
        if port is None:
            raise Unreachable(node, f"task {task.short} has no agent in it")
        if self._key is None:
            raise Unreachable(node, "the fleet file names no ecs.agent_key")
        if name not in self._sessions:

            async def connect() -> wire.WirePipe:
                return await self._connect(node, await self._address(node), port)

            self._sessions[name] = AgentSession(node, connect, silence_breaks=True), 0
        session, users = self._sessions[name]
        self._sessions[name] = session, users + 1
        try:
            yield session
        finally:
            session, users = self._sessions[name]
            if users > 1:
                self._sessions[name] = session, users - 1
            else:
                del self._sessions[name]
                await session.close()

    def complain(self, node: str, task: Task, reason: str) -> None:
        """Log once per task, which may have several watches, that its agent is unreachable."""
        if task.arn not in self._complained:
            self._complained[task.arn] = None
            logger.warning(
                "node %s: the agent in task %s is unreachable (%s): "
                "exit codes will be known, but neither progress nor error files",
                node,
                task.short,
                reason,
            )

    async def _connect(self, node: str, address: str, port: int) -> wire.WirePipe:
        """Connect with the secret as it is now: it may have been exchanged since the last time."""
        assert self._key is not None  # `session` has checked it
        where = f"file {self._key.file}" if self._key.file else f"variable {self._key.env}"
        try:
            text = (
                Path(self._key.file).expanduser().read_text()
                if self._key.file
                else os.environ[self._key.env or ""]
            )
        except (OSError, KeyError, UnicodeDecodeError) as error:
            raise Unreachable(
                node, f"ecs.agent_key: {where} cannot be read by the worker"
            ) from error
        try:
            pipe = await wire.connect(node, address, port, Secret(text))
        except SecretError as error:
            raise Unreachable(node, f"ecs.agent_key: {where} {error}") from error
        if pipe.expires - time.time() < EXPIRY_WARNING and pipe.expires not in self._expiring:
            self._expiring.add(pipe.expires)
            logger.warning(
                "ecs.agent_key: the certificate that the agents present expires at %s: exchange "
                "it before, or running jobs will have neither progress nor error files",
                datetime.fromtimestamp(pipe.expires, UTC).strftime("%Y-%m-%d %H:%M UTC"),
            )
        return pipe


class Feed:
    """Feed of the lines that the agent in one task reports to one watch."""

    def __init__(
        self,
        agents: Agents,
        followed: FollowedTask,
        node: str,
        token: Token,
        after_seq: int,
        heartbeat: float,
    ) -> None:
        self._agents = agents
        self._followed = followed
        self._node = node
        self._token = token
        self._after_seq = after_seq
        self._heartbeat = heartbeat
        self._lines: deque[Line] = deque()
        self._task: asyncio.Task[None] | None = None
        self._begun = 0.0
        self._heard_at: float | None = None
        self._finishing = asyncio.Event()
        self._tried = False
        self._hushed = False
        """Whether the agent has reported that it was asked to stop. The request came through ECS,
        which knows its origin and reason.
        """
        self.connected = False
        self._over = False

    def begin(self, task: Task) -> None:
        """Start connecting to the agent in a task.

        Called as soon as the task is known, so that a rank that fails immediately is observed too.
        """
        if self._task is None and task.port is not None and not task.stopped:
            self._begun = time.monotonic()
            self._task = asyncio.create_task(self._run(task), name=f"agent of {self._node}")

    @property
    def speaks(self) -> bool:
        """Return whether the agent was heard recently.

        That proves that the container runs, regardless of what AWS reports.
        """
        return (
            self.connected
            and self._heard_at is not None
            and time.monotonic() - self._heard_at < SILENT_BEATS * self._heartbeat
        )

    @property
    def waits_until(self) -> float | None:
        """Return until when to wait for the agent's first line; None if not waiting."""
        until = self._begun + AT_FIRST
        return (
            until
            if self._task is not None and not self._tried and time.monotonic() < until
            else None
        )

    def next(self) -> Line | None:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()  # re-raise an unexpected error to the reader of the feed
        return self._lines.popleft() if self._lines else None

    async def finish(self) -> None:
        """Read the lines that were already sent, then stop reading."""
        self._finishing.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=DRAIN_TIMEOUT if self.connected else 0.0)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, task: Task) -> None:
        pause = RETRY[0]
        while not self._over and not self._finishing.is_set():
            try:
                async with (
                    self._agents.session(self._node, task) as session,
                    session.watch(self._token, self._after_seq, self._heartbeat) as stream,
                ):
                    parser = WatchParser(self._node, self._token)
                    async for line in stream.lines():
                        # This rejects observations that only ECS or a user may report.
                        self._hear(parser.parse(line), task)
                        pause = RETRY[0]
                        if self._over:
                            break
                reason = "it has closed the connection"
            except BackendError as error:
                reason = error.reason
            finally:
                self.connected, self._tried = False, True
                self._followed.nudge()
            running = (
                self._followed.task is not None and self._followed.task.last_status == "RUNNING"
            )
            if (
                not self._over
                and running
                and time.monotonic() - max(self._begun, self._heard_at or 0.0) >= COMPLAIN_AFTER
            ):
                self._agents.complain(self._node, task, reason)
            try:
                async with asyncio.timeout(0.0 if self._over else pause):
                    await self._finishing.wait()
            except TimeoutError:
                pause = min(RETRY[1], pause * 1.5)

    def _hear(self, line: Line, task: Task) -> None:
        if line.get("outcome") == "refused":
            raise Unreachable(self._node, str(line.get("reason")))
        if (hello := line.get("hello")) is not None and list(hello.get("ranks") or ()) != list(
            task.ranks
        ):
            raise Unreachable(
                self._node,
                f"the agent there has ranks {hello.get('ranks')}, expected {list(task.ranks)}: "
                "is it another node's?",
            )
        self._heard_at, self.connected, self._tried = time.monotonic(), True, True
        if (observation := line.get("observation")) is not None:
            self._after_seq = int(observation["seq"])
            self._hushed = self._hushed or observation.get("kind") == "Stopped"
        self._over = "end" in line
        if "hello" not in line and not self._hushed:
            # Report no lease: the rank can be stopped through ECS.
            self._lines.append(
                {"heartbeat": {**line["heartbeat"], "lease_left": None}}
                if "heartbeat" in line
                else line
            )
        self._followed.nudge()
