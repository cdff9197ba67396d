"""Connects to nodes from the command line, without a server or a worker.

This is the only part of the command line that does so, for users who have no server or worker yet.
It examines nodes before they are used, and reads their host keys. All later operations on a node
are done by a worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaunch.config import ConfigError
from relaunch.spec.fleet import FleetNode, FleetSpec

if TYPE_CHECKING:
    from relaunch.backends.sessions import SessionBackend
    from relaunch.backends.ssh.trust import HostKey

MAX_CONCURRENT_LOGINS = 32
"""Nodes examined concurrently: the number of concurrent logins that the backend allows."""
EXAMINE_TIMEOUT_S = 20.0
"""Seconds for a node to examine itself: NVML and two tools that may each hang."""
LOGOUT_WAIT_S = 2.0
"""Seconds to wait after a logout for the test process to be killed, if a logout kills processes.
logind stops a session's scope at once."""
TEST_PROCESS_STAY_S = 60.0
"""Seconds that the test process left on a node keeps listening, plus the same again for every
`MAX_CONCURRENT_LOGINS` nodes."""
NO_CONTACT: Mapping[str, Any] = {"left": None, "peer": None, "wait": 0.0}
"""A `meet` request that does nothing, so it measures the round trip."""


class PreflightStep(StrEnum):
    """The step at which the examination of a node ended."""

    KEY = "key"
    LOGIN = "login"
    AGENT = "agent"
    LOOK = "look"
    DONE = "done"


@dataclass(slots=True)
class NodePreflight:
    """The results of examining one node."""

    node: FleetNode
    step: PreflightStep = PreflightStep.KEY
    reason: str = ""
    """Why the examination did not get past `step`."""
    key: HostKey | None = None
    """None if nodes have no host keys because they are on this machine."""
    connected: float = 0.0
    """Seconds until the agent's first answer."""
    round_trip: float = 0.0
    shipped: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The answer to `preflight`."""
    probe: Mapping[str, Any] = field(default_factory=dict)
    """The answer to `probe`, with the local send and receive times in `exchange`, and
    `unused_ports` of the fleet file."""
    second_login: Mapping[str, Any] | None = None
    """The answer to `meet` in a second login; None if there was no second login, for the reason in
    `reason`."""
    neighbour: str = ""
    """Name of the node that this node was to connect to."""

    @property
    def test_process(self) -> Mapping[str, Any]:
        found = self.facts.get("left")
        return (
            found
            if isinstance(found, Mapping) and "pid" in found and found.get("started") is not None
            else {}
        )


@dataclass(frozen=True, slots=True)
class FleetPreflight:
    """The nodes examined together, with the fleet, its file and the version of the agent."""

    spec: FleetSpec
    file: Path
    version: str
    """Version of the agent."""
    nodes: tuple[NodePreflight, ...]


def select_nodes(spec: FleetSpec, file: Path, names: Sequence[str]) -> tuple[FleetNode, ...]:
    """Return the nodes with these names, or all nodes if `names` is empty.

    Raises:
        ConfigError: A name is not in the file, or the backend is neither local nor ssh.
    """
    if spec.backend == "ecs":
        instead = (
            f"use `relaunch nodes check NODE --fleet {spec.name}`, which examines them through a "
            "running worker"
        )
        raise ConfigError(
            f"{file}: this command does not log in to container instances of ECS: {instead}"
        )
    if spec.backend not in ("local", "ssh"):
        raise ConfigError(
            f"{file}: nodes of the backend {spec.backend!r} cannot be reached from this machine: "
            "expected local or ssh"
        )
    known = {node.name: node for node in spec.nodes}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{file} has no node {name!r}: it has "
                f"{', '.join(list(known)[:8])}{', …' if len(known) > 8 else ''}"
            )
    return tuple(node for node in spec.nodes if node.name in names or not names)


async def run_preflight(
    spec: FleetSpec, file: Path, names: Sequence[str], state: Path
) -> FleetPreflight:
    """Examine nodes concurrently, with two logins each.

    The first login queries the node and leaves a test process running there. The second login
    reports whether that process survived the logout, and whether the node can connect to its
    neighbour.

    Raises:
        ConfigError: Something that the fleet file names cannot be used.
    """
    from relaunch.backends.artifact import build_agent

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_CONCURRENT_LOGINS))
    nodes = select_nodes(spec, file, names)
    agent = build_agent(state / "agent")
    gate = asyncio.Semaphore(MAX_CONCURRENT_LOGINS)
    seen = tuple(NodePreflight(node) for node in nodes)
    stay = TEST_PROCESS_STAY_S * (1 + len(nodes) // MAX_CONCURRENT_LOGINS)

    async def each(work: Callable[[NodePreflight], Awaitable[None]]) -> None:
        async def one(node: NodePreflight) -> None:
            async with gate:
                await work(node)

        await asyncio.gather(*(one(node) for node in seen))

    backend = _open(spec, file, state, agent)
    try:
        if spec.backend == "ssh":
            await _read_keys(spec, each)
        await each(lambda node: _run_first_login(backend, spec, node, stay))
    finally:
        await backend.close()
    ring = [node for node in seen if node.test_process]
    followers = dict(zip((node.node.name for node in ring), [*ring[1:], *ring[:1]], strict=True))
    backend = _open(spec, file, state, agent)
    try:
        await each(lambda node: _run_second_login(backend, node, followers.get(node.node.name)))
        # In a second pass: each test process must listen until all nodes have tried to connect.
        await each(lambda node: _end_test_process(backend, node))
    finally:
        await backend.close()
    return FleetPreflight(spec, file, agent.stem, seen)


def _open(spec: FleetSpec, file: Path, state: Path, agent: Path) -> SessionBackend:
    if spec.backend == "local":
        from relaunch.backends.local import LocalBackend

        return LocalBackend(spec, state, agent)
    from relaunch.backends.ssh.backend import SshBackend

    known = spec.ssh.known_hosts
    if known is not None and not Path(known).expanduser().exists():
        raise ConfigError(
            f"{file}: ssh: known_hosts: {known} does not exist: create it with `relaunch nodes "
            f"trust --file {file}`"
        )
    try:
        return SshBackend(spec, agent)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


async def _run_first_login(
    backend: SessionBackend, spec: FleetSpec, seen: NodePreflight, stay: float
) -> None:
    from relaunch.backends.base import BackendError

    name = seen.node.name
    if seen.reason:
        return
    try:
        seen.step = PreflightStep.LOGIN
        began = time.monotonic()
        await backend.meet(name, NO_CONTACT, EXAMINE_TIMEOUT_S)
        seen.connected = time.monotonic() - began
        seen.step = PreflightStep.LOOK
        began = time.monotonic()
        await backend.meet(name, NO_CONTACT, EXAMINE_TIMEOUT_S)
        seen.round_trip = time.monotonic() - began
        listen = backend.node(name).network or seen.node.address
        seen.facts = await backend.preflight(
            name, {"listen": listen, "stay": stay, "gpus": seen.node.gpus > 0}, EXAMINE_TIMEOUT_S
        )
        sent = time.time()
        seen.probe = await backend.probe(name, EXAMINE_TIMEOUT_S, None)
        seen.probe = {
            **seen.probe,
            "exchange": {"sent": sent, "received": time.time()},
            "unused_ports": list(seen.node.unused_ports),
        }
        seen.step = PreflightStep.DONE
    except BackendError as error:
        seen.reason = error.reason
        if spec.backend == "ssh":
            _record_missing_agent(error, seen)
    if spec.backend == "ssh":
        seen.shipped = _count_shipped_bytes(backend, name)


async def _read_keys(
    spec: FleetSpec, each: Callable[[Callable[[NodePreflight], Awaitable[None]]], Awaitable[None]]
) -> None:
    from relaunch.backends.base import Unreachable
    from relaunch.backends.ssh.trust import Gates, host_key

    gates = Gates()

    async def ask(seen: NodePreflight) -> None:
        try:
            seen.key = await host_key(spec, seen.node, gates)
            seen.reason = seen.key.reason
        except Unreachable as error:
            seen.reason = error.reason
        except ValueError as error:
            seen.reason = str(error)

    await each(ask)


def _record_missing_agent(error: Exception, seen: NodePreflight) -> None:
    from relaunch.backends.ssh.backend import NoAgent

    if isinstance(error, NoAgent):
        seen.step = PreflightStep.AGENT


def _count_shipped_bytes(backend: SessionBackend, name: str) -> int:
    from relaunch.backends.ssh.backend import SshBackend

    return backend.shipped.get(name, 0) if isinstance(backend, SshBackend) else 0


async def _run_second_login(
    backend: SessionBackend, seen: NodePreflight, neighbour: NodePreflight | None
) -> None:
    from relaunch.backends.base import BackendError

    if seen.step is not PreflightStep.DONE:
        return
    order: dict[str, Any] = {
        "left": _identify_test_process(seen),
        "peer": None,
        "wait": LOGOUT_WAIT_S,
    }
    if neighbour is not None and neighbour is not seen:
        seen.neighbour = neighbour.node.name
        order["peer"] = {name: neighbour.test_process[name] for name in ("address", "port", "word")}
    try:
        seen.second_login = await backend.meet(seen.node.name, order, EXAMINE_TIMEOUT_S)
    except BackendError as error:
        seen.reason = error.reason


async def _end_test_process(backend: SessionBackend, seen: NodePreflight) -> None:
    from relaunch.backends.base import BackendError

    if seen.second_login is not None and seen.test_process:
        try:
            await backend.meet(
                seen.node.name,
                {"left": _identify_test_process(seen), "peer": None, "wait": 0.0, "end": True},
                EXAMINE_TIMEOUT_S,
            )
        except BackendError:
            return  # the test process ends by itself


def _identify_test_process(seen: NodePreflight) -> dict[str, int] | None:
    return (
        {"pid": int(seen.test_process["pid"]), "started": int(seen.test_process["started"])}
        if seen.test_process
        else None
    )


# --- host keys


@dataclass(frozen=True, slots=True)
class MissingKey:
    """A node that could not be asked for its host key."""

    node: str
    reason: str


async def read_host_keys(
    spec: FleetSpec, file: Path, names: Sequence[str]
) -> tuple[HostKey | MissingKey, ...]:
    """Ask nodes for their host keys, concurrently. Only the key exchange is sent to them.

    Raises:
        ConfigError: The backend has no host keys, or something that the fleet file names cannot be
            used.
    """
    from relaunch.backends.base import Unreachable
    from relaunch.backends.ssh.route import SshConfigError, check
    from relaunch.backends.ssh.trust import Gates, host_key

    if spec.backend != "ssh":
        raise ConfigError(
            f"{file}: nodes of the backend {spec.backend!r} have no host keys: expected the "
            "backend ssh"
        )
    nodes = select_nodes(spec, file, names)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_CONCURRENT_LOGINS))
    gate, gates = asyncio.Semaphore(MAX_CONCURRENT_LOGINS), Gates()

    async def one(node: FleetNode) -> HostKey | MissingKey:
        async with gate:
            try:
                return await host_key(spec, node, gates)
            except Unreachable as error:
                return MissingKey(node.name, error.reason)

    try:
        # known_hosts is not checked: it may not exist yet, because `nodes trust` writes it.
        check(spec.ssh.model_copy(update={"known_hosts": None, "key": None}), nodes)
        return tuple(await asyncio.gather(*(one(node) for node in nodes)))
    except SshConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def remember(key: HostKey) -> None:
    """Record a host key that a person has vouched for.

    Raises:
        ConfigError: The file cannot be written.
    """
    from relaunch.backends.ssh import trust

    try:
        trust.remember(key)
    except OSError as error:
        raise ConfigError(f"{key.file} cannot be written: {error.strerror}") from None
