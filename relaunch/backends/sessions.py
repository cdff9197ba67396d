"""Base of the backends that hold a session with an agent on each node.

Subclasses define how a session is opened.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar

from relaunch.backends.base import (
    STACKS_WITHIN,
    LinkListener,
    Logs,
    Preparation,
    PrepareOrder,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
    WarmNode,
    WarmOrder,
    WatchStream,
)
from relaunch.backends.pipe import Pipe
from relaunch.backends.session import AgentSession
from relaunch.generation import Token
from relaunch.spec.fleet import FleetNode, FleetSpec
from relaunch.spec.job import OutputStream


class SessionBackend(ABC):
    silence_breaks: ClassVar[bool]
    """Whether a session that answers nothing is abandoned: a new connection may get through where
    this one does not."""

    fences: ClassVar[bool] = True

    def __init__(self, spec: FleetSpec, answer_within: float) -> None:
        self._nodes = {node.name: node for node in spec.nodes}
        self._answer_within = answer_within
        self._sessions: dict[str, AgentSession] = {}
        self._is_retired = False
        self.server = ""

    @abstractmethod
    async def _connect(self, name: str) -> Pipe:
        """Start an agent's `session` on the node, and return the pipe to it.

        Raises:
            Unreachable: it cannot be started or reached.
        """

    def _start_timeout(self, name: str) -> float:
        """Return the seconds that an agent started on the node has for its first line."""
        return 2 * self._answer_within

    def node(self, name: str) -> FleetNode:
        return self._nodes[name]

    async def prepare(self, node: str, order: PrepareOrder) -> Preparation | Refusal:
        return await self._session(node).prepare(order)

    async def start(self, node: str, order: StartOrder) -> StartedRanks | Refusal:
        return await self._session(node).start(order)

    async def stop(self, node: str, order: StopOrder) -> StopProof | Refusal:
        return await self._session(node).stop(order)

    async def warm(self, node: str, order: WarmOrder) -> WarmNode | Refusal:
        return await self._session(node).warm(order)

    def watch(
        self, node: str, token: Token, after_seq: int, heartbeat: float
    ) -> AbstractAsyncContextManager[WatchStream]:
        return self._session(node).watch(token, after_seq, heartbeat)

    async def list(self, node: str, gpus: bool = False) -> Mapping[str, Any]:
        return await self._session(node).list(gpus)

    async def logs(
        self,
        node: str,
        token: Token,
        offsets: Mapping[int, int] | None,
        max_bytes: int,
        wait: float,
        tail: int | None,
        since: float | None = None,
        stream: OutputStream = "stdout",
    ) -> Logs | Refusal:
        session = self._session(node)
        return await session.logs(token, offsets, max_bytes, wait, tail, since, stream)

    async def stacks(
        self,
        node: str,
        token: Token,
        rank: int | None = None,
        frames: bool = True,
        within: float = STACKS_WITHIN,
    ) -> Mapping[str, Any] | Refusal:
        return await self._session(node).stacks(token, rank, frames, within)

    async def last_words(self, node: str, token: Token) -> Mapping[str, Any] | Refusal:
        return await self._session(node).last_words(token)

    async def checkpoints(
        self, node: str, directory: str, workdir: str | None, pattern: str | None = None
    ) -> Mapping[str, Any] | Refusal:
        return await self._session(node).checkpoints(directory, workdir, pattern)

    async def probe(
        self, node: str, within: float, kernel_since: float | None
    ) -> Mapping[str, Any]:
        return await self._session(node).probe(within, kernel_since)

    async def preflight(
        self, node: str, order: Mapping[str, Any], within: float
    ) -> Mapping[str, Any]:
        return await self._session(node).preflight(order, within)

    async def meet(self, node: str, order: Mapping[str, Any], within: float) -> Mapping[str, Any]:
        return await self._session(node).meet(order, within)

    async def listen_for_peers(self, node: str, address: str, stay: float) -> LinkListener | str:
        return await self._session(node).listen_for_peers(address, stay)

    async def call_peers(
        self, node: str, peers: Sequence[LinkListener], within: float
    ) -> Mapping[str, str]:
        return await self._session(node).call_peers(peers, within)

    async def diagnose(
        self, node: str, id: str, level: int, within: float, fleet: str = ""
    ) -> Mapping[str, Any] | Refusal:
        return await self._session(node).diagnose(id, level, within, fleet)

    async def reset_gpus(
        self,
        node: str,
        id: str,
        boot_id: str,
        gpus: tuple[str, ...],
        within: float,
        fleet: str = "",
        reason: str = "",
        by: str = "",
    ) -> Mapping[str, Any] | Refusal:
        return await self._session(node).reset_gpus(id, boot_id, gpus, within, fleet, reason, by)

    async def reboot(
        self, node: str, id: str, boot_id: str, reason: str, fleet: str = "", by: str = ""
    ) -> Mapping[str, Any] | Refusal:
        return await self._session(node).reboot(id, boot_id, reason, fleet, by)

    def count_warm(self) -> int:
        """Return the number of nodes with an open session."""
        return sum(session.is_open for session in self._sessions.values())

    def retire(self) -> None:
        """Close each session as soon as no command runs in it: another backend has taken over."""
        self._is_retired = True
        for session in self._sessions.values():
            session.retire()

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()))

    def _session(self, name: str) -> AgentSession:
        if name not in self._sessions:
            connect = partial(self._connect, name)
            started = partial(self._start_timeout, name)
            session = AgentSession(
                name,
                connect,
                self._answer_within,
                self.silence_breaks,
                self.server,
                started,
                sends_py_spy=True,
            )
            if self._is_retired:
                session.retire()
            self._sessions[name] = session
        return self._sessions[name]
