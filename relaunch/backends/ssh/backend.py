"""The backend `ssh`: nodes that are separate machines, each with an sshd and a Python.

After a failed connection, a node is in backoff. Calls made during the backoff fail at once with the
same error, so that neither a watch that reconnects nor twenty calls at once cause a storm of
logins. A later call tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import paramiko

from relaunch.backends.base import Unreachable
from relaunch.backends.session import ANSWER_TIMEOUT
from relaunch.backends.sessions import SessionBackend
from relaunch.backends.ssh.channel import ChannelPipe
from relaunch.backends.ssh.connection import (
    AUTHENTICATION,
    BANNER,
    IDLE_LOOK,
    KEY_EXCHANGE,
    LOGINS,
    TCP,
    ConnectError,
    Connection,
    connect,
    describe,
)
from relaunch.backends.ssh.identities import LISTING
from relaunch.backends.ssh.route import (
    Hop,
    Route,
    SshConfigError,
    check,
    parse_config,
    read_config,
    read_config_text,
    route,
)
from relaunch.backends.ssh.ship import Artifact, NotStarted, remote_command, start_agent
from relaunch.spec.fleet import FleetNode, FleetSpec

CONNECTS = 32
"""Connections opened at once, and over each jump host as many more. Each takes a thread and the
arithmetic of a key exchange."""
WRITERS = 32
"""Most threads that send to nodes which do not take the data at once. They are created as
needed."""
BACKOFF = (0.5, 15.0)
"""Seconds of backoff after a failure: the first and the longest."""
QUICK = 1.0
"""Seconds. A failure that took less time than this holds up no caller, so its backoff is at most
twice this value. A node that has just booted closes or refuses a few connections, and the launch
that needs it tries for only three seconds before it counts the node as lost."""
JITTER = 0.25
"""Fraction of the backoff, in either direction: when a switch comes back, the logins must not all
arrive at the same instant."""
SHORT_LIFE = 3.0
"""Seconds. A session that lived longer than this worked, so its end does not continue the
backoff."""
LOG_DELAYS = (60.0, 6 * 3600.0)
"""Seconds before it is logged again that a node cannot be reached, doubling from the first to the
second."""
CONFIG_INTERVAL = 1.0
"""Seconds between two looks at the SSH configuration for the addresses of nodes."""
START_TIMEOUT = 20.0
"""Seconds for the agent to start after the login. It is 1.4 MB, sent once for each version."""

log = logging.getLogger("relaunch.ssh")


class NeedsPerson(Unreachable):
    """An error that a retry cannot fix.

    Examples are a host key, a refused login, and a host name that does not resolve. Like the other
    errors, it says nothing about the ranks.
    """


class NoAgent(Unreachable):
    """The login worked, but the agent does not run: its Python, its folder or the shell fails."""


@dataclass(slots=True)
class Backoff:
    """The backoff of a node after a failure: its end, and the error that callers get until then."""

    until: float
    delay: float
    error: Unreachable


@dataclass(frozen=True, slots=True)
class LoggedFailure:
    """Why a node could not be reached, as it was logged last."""

    reason: str
    delay: float
    until: float
    """When the same is logged again, by the monotonic clock."""


class SshBackend(SessionBackend):
    silence_breaks = True

    def __init__(self, spec: FleetSpec, agent: Path, answer_within: float = ANSWER_TIMEOUT) -> None:
        """Create the backend.

        Raises:
            SshConfigError: the fleet file or the SSH configuration names something that cannot be
                used.
        """
        super().__init__(spec, answer_within)
        check(spec.ssh, spec.nodes)
        self._options = spec.ssh
        self._given_nodes = spec.nodes
        self._artifact = Artifact.read(agent)
        self.shipped: dict[str, int] = {}
        """Bytes of the agent that were sent to each node at its last connection."""
        self._config_text: str | None = None
        self._config_read_at = -math.inf
        self._resolve_networks()
        self._connects = ThreadPoolExecutor(CONNECTS, thread_name_prefix="ssh-connect")
        self._jump_connects: dict[tuple[str, int], ThreadPoolExecutor] = {}
        """By jump host: the logins that wait for one that hangs must not hold up any others."""
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="ssh-write")
        self._peace: dict[str, Backoff] = {}
        self._failures: dict[str, LoggedFailure] = {}
        self._newest: dict[str, ChannelPipe] = {}
        self._under_way: set[Connection] = set()
        self._gates: dict[tuple[str, int], threading.Semaphore] = {}
        self._gates_lock = threading.Lock()

    def node(self, name: str) -> FleetNode:
        """Return the node as it is reached now: its address may have changed in the SSH
        configuration, which each login reads again."""
        if time.monotonic() >= self._config_read_at + CONFIG_INTERVAL:
            with contextlib.suppress(SshConfigError):  # the next login says it
                self._resolve_networks()
        return super().node(name)

    def _resolve_networks(self) -> None:
        """Resolve the nodes' addresses for each other, if the SSH configuration has changed.

        Raises:
            SshConfigError: it cannot be used.
        """
        self._config_read_at = time.monotonic()
        text = read_config_text(self._options)
        if text == self._config_text:
            return
        config = parse_config(self._options, text)
        for node in self._given_nodes:
            if node.network is None:
                host = route(self._options, node, config).node.host
                self._nodes[node.name] = node.model_copy(update={"network": host})
        self._config_text = text

    async def close(self) -> None:
        for connection in self._under_way:
            connection.abort("the worker ends")
        await super().close()
        for pool in (self._connects, *self._jump_connects.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False)

    async def _connect(self, name: str) -> ChannelPipe:
        if name not in self._nodes:
            raise NeedsPerson(name, "it is in the fleet file no more")
        loop = asyncio.get_running_loop()
        self._count_short_life(name)
        peace = self._peace.get(name)
        if peace is not None and loop.time() < peace.until:
            raise type(peace.error)(name, peace.error.reason)
        began = loop.time()
        try:
            self._newest[name] = await self._open(self._nodes[name])
        except ConnectError as failed:
            kind = (
                NeedsPerson
                if failed.lasting
                else NoAgent
                if isinstance(failed, NotStarted)
                else Unreachable
            )
            error = kind(name, failed.reason)
            self._leave_in_peace(
                name, loop.time(), error, quick=kind is Unreachable and loop.time() - began < QUICK
            )
            self._log_failure(name, failed.reason)
            raise error from failed
        if self._failures.pop(name, None) is not None:
            log.info("node %s is reached again", name)
        return self._newest[name]

    def _log_failure(self, name: str, reason: str) -> None:
        """Log that a node cannot be reached: at first, with each new reason, and ever more rarely.

        A node that is away for weeks is tried once a minute.
        """
        now, delay, before = time.monotonic(), LOG_DELAYS[0], self._failures.get(name)
        if before is not None and before.reason == reason:
            if now < before.until:
                return
            delay = min(LOG_DELAYS[1], before.delay * 2)
        self._failures[name] = LoggedFailure(reason, delay, now + delay)
        log.info("node %s cannot be reached: %s", name, reason)

    def _count_short_life(self, name: str) -> None:
        """Count a session that ended soon after its start as a failure: its node enters backoff."""
        before = self._newest.pop(name, None)
        if before is None or before.life is None or before.is_finished:
            return
        died, lived = before.life
        if lived < SHORT_LIFE:
            self._leave_in_peace(
                name,
                died,
                Unreachable(name, before.ended or "the session has ended"),
                quick=before.lost,
            )
        else:
            self._peace.pop(name, None)

    def _leave_in_peace(self, name: str, since: float, error: Unreachable, *, quick: bool) -> None:
        before = self._peace.get(name)
        delay = min(BACKOFF[1], before.delay * 2) if before is not None else BACKOFF[0]
        if quick:
            delay = min(delay, 2 * QUICK)
        self._peace[name] = Backoff(
            since + delay * random.uniform(1 - JITTER, 1 + JITTER), delay, error
        )

    async def _open(self, node: FleetNode) -> ChannelPipe:
        connection = Connection()
        self._under_way.add(connection)
        try:
            channel = await self._log_in_threaded(connection, node)
            pipe = ChannelPipe(connection, channel, self._writers)
            async with asyncio.timeout(START_TIMEOUT):
                self.shipped[node.name] = await start_agent(
                    pipe, self._artifact, self._environment(), self._options.python
                )
        except TimeoutError:
            connection.abort()
            raise NotStarted(
                f"the agent could not be started within {START_TIMEOUT:g} s: "
                "the login succeeded, and the node is silent"
            ) from None
        except ConnectionError as error:
            connection.abort()
            raise ConnectError(str(error)) from error
        except BaseException:
            connection.abort()
            raise
        finally:
            self._under_way.discard(connection)
        return pipe

    async def _log_in_threaded(self, connection: Connection, node: FleetNode) -> paramiko.Channel:
        """Log in and open the channel in a thread, within the sum of the steps' time limits."""
        loop = asyncio.get_running_loop()
        # Where the caller is cancelled, what waits in a pool is discarded with its future.
        way = await loop.run_in_executor(self._connects, partial(self._find_route, node))
        if connection.aborted is not None:
            raise ConnectError(connection.aborted)
        pool = self._connects
        if len(way.hops) > 1:
            jump = (way.hops[0].host, way.hops[0].port)
            if jump not in self._jump_connects:
                self._jump_connects[jump] = ThreadPoolExecutor(
                    CONNECTS, thread_name_prefix="ssh-connect"
                )
            pool = self._jump_connects[jump]
        return await loop.run_in_executor(pool, partial(self._log_in, connection, way))

    def _find_route(self, node: FleetNode) -> Route:
        try:
            # Read the configuration again each time: it is small, and a fix must not require a
            # restart of the worker.
            return route(self._options, node, read_config(self._options))
        except SshConfigError as error:
            raise ConnectError(str(error), lasting=True) from error

    def _log_in(self, connection: Connection, way: Route) -> paramiko.Channel:
        each = TCP + BANNER + KEY_EXCHANGE + LISTING + AUTHENTICATION
        within = len(way.hops) * each + TCP
        watchdog = threading.Timer(
            within, connection.abort, (f"it took more than {within:g} s to log in",)
        )
        watchdog.daemon = True
        watchdog.start()
        try:
            connect(connection, way, self._gate)
            channel = connection.transport.open_session(timeout=TCP)
            channel.exec_command(remote_command(self._options.python))
            connection.calm(IDLE_LOOK)
            return channel
        except (paramiko.SSHException, EOFError, OSError) as error:
            connection.abort()
            raise ConnectError(
                f"{way.node.user} is logged in, and may run no command: {error}"
            ) from error
        except ConnectError:
            connection.abort()
            raise
        except Exception as error:
            # One node's login must not fail what is asked of all nodes.
            connection.abort()
            log.exception(
                "the login to node %s failed in a way that relaunch does not know", way.name
            )
            raise ConnectError(describe(error)) from error
        finally:
            watchdog.cancel()

    def _gate(self, hop: Hop) -> threading.Semaphore:
        with self._gates_lock:
            return self._gates.setdefault((hop.host, hop.port), threading.BoundedSemaphore(LOGINS))

    def _environment(self) -> dict[str, str]:
        return {"RELAUNCH_SUDO": "1"} if self._options.sudo else {}
