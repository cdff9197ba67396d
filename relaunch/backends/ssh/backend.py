"""The backend `ssh`: nodes that are machines of their own, each with an sshd and a Python.

A node that could not be reached is left in peace for a moment: calls that come meanwhile fail at once with the same sentence, so that
neither a watch that connects again nor twenty calls at once become a storm of logins. A call that comes later tries.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import paramiko

from relaunch.backends.base import Unreachable
from relaunch.backends.session import ANSWER_WITHIN
from relaunch.backends.sessions import SessionBackend
from relaunch.backends.ssh.channel import ChannelPipe
from relaunch.backends.ssh.connection import AUTHENTICATION, BANNER, IDLE_LOOK, KEY_EXCHANGE, LOGINS, TCP, Connection, Failed, connect
from relaunch.backends.ssh.route import Hop, SshConfigError, check, read_config, route
from relaunch.backends.ssh.ship import Artifact, NotStarted, remote_command, start_agent
from relaunch.spec.fleet import FleetNode, FleetSpec

CONNECTS = 32
"""At once: each is a thread, and the arithmetic of a key exchange."""
WRITERS = 32
"""Threads in which something is sent to a node that does not take it at once; there are as many as are needed at a time."""
BACKOFF = (0.5, 15.0)
"""Seconds in which a node is left in peace after a failure: the first, and the most."""
QUICK = 1.0
"""Seconds: who fails sooner holds up nobody, and is left in peace for at most twice that. A node that has just booted closes or refuses a
few connections, and the launch that needs it tries for three seconds before it takes it for lost."""
JITTER = 0.25
"""Of it, either way: a switch that comes back must not meet all logins in the same instant."""
SHORT_LIFE = 3.0
"""Seconds. A session that has lived for longer has worked, and what ended it is news."""
STARTED_WITHIN = 20.0
"""Seconds for the agent to be there once we are logged in. It is 1.4 MB, once for each version."""

log = logging.getLogger("relaunch.ssh")


class NeedsPerson(Unreachable):
    """No retry mends it: a host key, a login that is refused, a name that nobody knows. Of the ranks it says as little as the others."""


class NoAgent(Unreachable):
    """We are logged in, and the agent does not run there: its Python, its folder, or the shell."""


@dataclass(slots=True)
class Backoff:
    """After a failure: until when a node is not tried again, and what is said instead."""

    until: float
    delay: float
    error: Unreachable


class SshBackend(SessionBackend):
    silence_breaks = True

    def __init__(self, spec: FleetSpec, agent: Path, answer_within: float = ANSWER_WITHIN) -> None:
        """Raises ConfigError: what the fleet file or the SSH configuration names cannot be used."""
        super().__init__(spec, answer_within)
        check(spec.ssh, spec.nodes)
        self._options = spec.ssh
        self._artifact = Artifact.read(agent)
        self.shipped: dict[str, int] = {}
        """Bytes of the agent that were sent to a node when it was last connected to."""
        config = read_config(spec.ssh)
        for node in spec.nodes:
            self._nodes[node.name] = node.model_copy(update={"network": node.network or route(spec.ssh, node, config).node.host})
        self._connects = ThreadPoolExecutor(CONNECTS, thread_name_prefix="ssh-connect")
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="ssh-write")
        self._peace: dict[str, Backoff] = {}
        self._newest: dict[str, ChannelPipe] = {}
        self._under_way: set[Connection] = set()
        self._gates: dict[tuple[str, int], threading.Semaphore] = {}
        self._gates_lock = threading.Lock()
        # What paramiko logs as errors, with tracebacks, are failures that are raised here as sentences.
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)

    async def close(self) -> None:
        for connection in self._under_way:
            connection.abort("the worker ends")
        await super().close()
        self._connects.shutdown(wait=False, cancel_futures=True)
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
        except Failed as failed:
            kind = NeedsPerson if failed.lasting else NoAgent if isinstance(failed, NotStarted) else Unreachable
            error = kind(name, failed.reason)
            self._leave_in_peace(name, loop.time(), error, quick=kind is Unreachable and loop.time() - began < QUICK)
            log.info("node %s cannot be reached: %s", name, failed.reason)
            raise error from failed
        return self._newest[name]

    def _count_short_life(self, name: str) -> None:
        """A session that ended as soon as it was there is a failure as well: its node is not to be logged in to all the time."""
        before = self._newest.pop(name, None)
        if before is None or before.life is None:
            return
        died, lived = before.life
        if lived < SHORT_LIFE:
            self._leave_in_peace(name, died, Unreachable(name, before.ended or "the session has ended"), quick=before.lost)
        else:
            self._peace.pop(name, None)

    def _leave_in_peace(self, name: str, since: float, error: Unreachable, *, quick: bool) -> None:
        before = self._peace.get(name)
        delay = min(BACKOFF[1], before.delay * 2) if before is not None else BACKOFF[0]
        if quick:
            delay = min(delay, 2 * QUICK)
        self._peace[name] = Backoff(since + delay * random.uniform(1 - JITTER, 1 + JITTER), delay, error)

    async def _open(self, node: FleetNode) -> ChannelPipe:
        connection = Connection()
        self._under_way.add(connection)
        try:
            channel = await self._in_thread(connection, node)
            pipe = ChannelPipe(connection, channel, self._writers)
            async with asyncio.timeout(STARTED_WITHIN):
                self.shipped[node.name] = await start_agent(pipe, self._artifact, self._environment(), self._options.python)
        except TimeoutError:
            connection.abort()
            raise NotStarted(f"the agent could not be started within {STARTED_WITHIN:g} s: the node is logged in to, and silent") from None
        except ConnectionError as error:
            connection.abort()
            raise Failed(str(error)) from error
        except BaseException:
            connection.abort()
            raise
        finally:
            self._under_way.discard(connection)
        return pipe

    async def _in_thread(self, connection: Connection, node: FleetNode) -> paramiko.Channel:
        """Log in and open the channel, in a thread that cannot be stuck for longer than the steps together may take."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._connects, partial(self._log_in, connection, node))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Nobody waits for it any more, and what it comes to is nobody's.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    def _log_in(self, connection: Connection, node: FleetNode) -> paramiko.Channel:
        try:
            # Read anew each time: it is small, and whoever mends it is not to start the worker again.
            way = route(self._options, node, read_config(self._options))
        except SshConfigError as error:
            raise Failed(str(error), lasting=True) from error
        within = len(way.hops) * (TCP + BANNER + KEY_EXCHANGE + AUTHENTICATION) + TCP
        watchdog = threading.Timer(within, connection.abort, (f"it took more than {within:g} s to log in",))
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
            raise Failed(f"{way.node.user} is logged in, and may run no command: {error}") from error
        except Failed:
            connection.abort()
            raise
        finally:
            watchdog.cancel()

    def _gate(self, hop: Hop) -> threading.Semaphore:
        with self._gates_lock:
            return self._gates.setdefault((hop.host, hop.port), threading.BoundedSemaphore(LOGINS))

    def _environment(self) -> dict[str, str]:
        return {"RELAUNCH_SUDO": "1"} if self._options.sudo else {}
