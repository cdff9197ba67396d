"""Nodes on this machine: each is a state folder, an address on loopback and a name. For laptops, tests and the demo.

They share a kernel and a network, so a cut, a freeze or a reboot of one of them is made by `cut`, `heal` and `reboot` here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from backends.base import PROTOCOL, Gone, Logs, Prepared, PrepareOrder, Refused, Started, StartOrder, StopOrder, WatchStream
from backends.session import ANSWER_WITHIN, LINE_LIMIT, AgentSession
from recovery.model import Token
from recovery.spec import FleetNode, FleetSpec

CUTS = ("controller-in", "controller-out", "peers")


KERNEL_LOG = "kernel.log"
"""In a node's folder: where it is there, the node takes it for its kernel's log. All nodes of one machine have one kernel, and its log
cannot say which of them it means."""


class LocalBackend:
    def __init__(self, spec: FleetSpec, state: Path, agent: Path, answer_within: float = ANSWER_WITHIN) -> None:
        self._nodes = {node.name: node for node in spec.nodes}
        self._state = state.resolve()
        self._agent = agent.resolve()
        self._answer_within = answer_within
        self._sessions: dict[str, AgentSession] = {}

    def node(self, name: str) -> FleetNode:
        return self._nodes[name]

    def folder(self, node: str) -> Path:
        """The node's state folder."""
        return self._state / "nodes" / node

    async def prepare(self, node: str, order: PrepareOrder) -> Prepared | Refused:
        return await self._session(node).prepare(order)

    async def start(self, node: str, order: StartOrder) -> Started | Refused:
        return await self._session(node).start(order)

    async def stop(self, node: str, order: StopOrder) -> Gone | Refused:
        return await self._session(node).stop(order)

    def watch(self, node: str, token: Token, after_seq: int, heartbeat: float) -> AbstractAsyncContextManager[WatchStream]:
        return self._session(node).watch(token, after_seq, heartbeat)

    async def list(self, node: str) -> Mapping[str, Any]:
        if node not in self._sessions and not (self.folder(node) / "jobs").exists() and not (self.folder(node) / "cut").exists():
            # Nothing ever ran there. To start a session only to hear that costs 0.2 s of a core, sixteen times on a new laptop.
            return {"outcome": "done", "protocol": PROTOCOL, "boot_id": "", "jobs": []}
        return await self._session(node).list()

    async def logs(
        self, node: str, token: Token, offsets: Mapping[int, int] | None, max_bytes: int, wait: float, tail: int | None
    ) -> Logs | Refused:
        return await self._session(node).logs(token, offsets, max_bytes, wait, tail)

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()))

    def _session(self, name: str) -> AgentSession:
        if name not in self._sessions:
            self._sessions[name] = AgentSession(name, lambda: self._connect(name), self._answer_within)
        return self._sessions[name]

    async def _connect(self, name: str) -> asyncio.subprocess.Process:
        folder = self.folder(name)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("RELAUNCH_", "TEMPORAL_"))}
        kernel_log = folder / KERNEL_LOG
        if kernel_log.exists():
            environment["RELAUNCH_KERNEL_LOG"] = str(kernel_log)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            str(self._agent),
            "session",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**environment, "RELAUNCH_AGENT_STATE": str(folder)},
            limit=LINE_LIMIT,
            # A Ctrl-C in the worker's terminal is for the worker; it decides what becomes of its sessions.
            start_new_session=True,
        )


# --- faults that machines of their own have by themselves ---------------------------------------------------------------


def cut(folder: Path, what: Iterable[str] = CUTS, *, freeze_ranks: bool = False) -> None:
    """Cut the node whose state is in `folder` off, until `heal`.

    Args:
        what: any of `CUTS`; one of the controller's two directions alone is a one-way cut.
        freeze_ranks: also stop (SIGSTOP) its ranks: their sockets stay open and silent, as they would behind a dead switch.
    """
    words = tuple(what)
    if unknown := set(words) - set(CUTS):
        raise ValueError(f"{', '.join(sorted(unknown))}: not a cut; one or more of {', '.join(CUTS)}")
    temporary = folder / f".cut.{uuid.uuid4().hex}"
    temporary.write_text("\n".join(words) + "\n")
    temporary.rename(folder / "cut")
    if freeze_ranks:
        _signal_all(_processes(folder, b"RELAUNCH_NODE_STATE"), signal.SIGSTOP)


def heal(folder: Path) -> None:
    (folder / "cut").unlink(missing_ok=True)
    _signal_all(_processes(folder, b"RELAUNCH_NODE_STATE"), signal.SIGCONT)


def reboot(folder: Path) -> None:
    """Kill every process of the node at once and give it a new boot id. What is on its disk stays."""
    # All stand still before any dies: a power cut leaves nobody to write down how the others ended.
    stopped: set[int] = set()
    while (pids := _processes(folder, b"RELAUNCH_NODE_STATE") | _processes(folder, b"RELAUNCH_AGENT_STATE")) - stopped:
        _signal_all(pids - stopped, signal.SIGSTOP)
        stopped |= pids
    while pids := _processes(folder, b"RELAUNCH_NODE_STATE") | _processes(folder, b"RELAUNCH_AGENT_STATE"):
        _signal_all(pids, signal.SIGKILL)
    (folder / "boot_id").write_text(uuid.uuid4().hex + "\n")


def _processes(folder: Path, variable: bytes) -> set[int]:
    """Living processes that carry `variable=<folder>` in their environment."""
    wanted = variable + b"=" + os.fsencode(folder.resolve())
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
            stat = Path("/proc", entry, "stat").read_bytes()
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
        if wanted in environment.split(b"\0") and stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
            found.add(int(entry))
    return found


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
