"""What key a node has, whether it is known, and how it becomes known. Trusts nothing by itself: that is a person's decision.

It is for whoever asks about one node; a backend checks the same keys by itself, at each connection.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import paramiko

from relaunch.backends.base import Unreachable
from relaunch.backends.ssh import known_hosts
from relaunch.backends.ssh.connection import LOGINS, Connection, Failed, look, refuse
from relaunch.backends.ssh.known_hosts import KeyStatus
from relaunch.backends.ssh.route import Hop, Route, SshConfigError, read_config, route
from relaunch.spec.fleet import FleetNode, FleetSpec


@dataclass(frozen=True, slots=True)
class HostKey:
    node: str
    algorithm: str
    """As people call it: ED25519, RSA, ECDSA."""
    fingerprint: str
    standing: KeyStatus
    reason: str
    """Why nobody logs in there; empty where the key is known."""
    file: str
    """The known_hosts file that `line` belongs into."""
    line: str
    known_as: str
    """What known_hosts calls the host, and `ssh-keygen -R` with it."""
    told_by: str
    """The known_hosts file that has another key of it, or this one; empty where none has."""


class Gates:
    """How many logins go over one jump host at once, where several nodes are asked side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[tuple[str, int], threading.Semaphore] = {}

    def __call__(self, hop: Hop) -> threading.Semaphore:
        with self._lock:
            return self._gates.setdefault((hop.host, hop.port), threading.BoundedSemaphore(LOGINS))


async def host_key(spec: FleetSpec, node: FleetNode, gates: Gates | None = None) -> HostKey:
    """Ask a node for its key, over its jump hosts if it has any. Nothing is sent to the node but the exchange of keys.

    Args:
        spec: Of its fleet.
        node: Whose key.
        gates: Shared by those who ask at the same time.

    Raises:
        Unreachable: it does not answer, or a jump host refuses us.
        ValueError: the SSH configuration cannot be used.
    """
    connection = Connection()
    asked = asyncio.ensure_future(asyncio.to_thread(_host_key, connection, spec, node, gates or Gates()))
    try:
        return await asyncio.shield(asked)
    except Failed as failed:
        raise Unreachable(node.name, failed.reason) from failed
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise Unreachable(node.name, str(error)) from error
    finally:
        connection.abort()
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())


def _host_key(connection: Connection, spec: FleetSpec, node: FleetNode, gates: Gates) -> HostKey:
    way = route(spec.ssh, node, read_config(spec.ssh))
    key = look(connection, way, gates)
    reason = ""
    try:
        refuse(way.node, key, f"relaunch nodes trust {node.name}")
    except Failed as failed:
        reason = failed.reason
    line = known_hosts.line_for(way.node.known_as, way.node.port, key.algorithm, key.blob, way.node.hash_known_hosts)
    return HostKey(
        node=node.name,
        algorithm=known_hosts.kind(key.blob),
        fingerprint=known_hosts.fingerprint(key.blob),
        standing=key.standing,
        reason=reason,
        file=_file(way),
        line=line,
        known_as=known_hosts.name_of(way.node.known_as, way.node.port),
        told_by=key.entry.file if key.entry is not None else "",
    )


def _file(way: Route) -> str:
    if not way.node.known_hosts:
        raise SshConfigError(f"the SSH configuration has no known_hosts file for {way.node.name}: expected UserKnownHostsFile to name one")
    return way.node.known_hosts[0]


def remember(key: HostKey) -> None:
    """Make a key known that a person has compared.

    Raises:
        ValueError: another one is known, or this one is revoked: a person has to look at that line first.
        OSError: the file cannot be written.
    """
    if key.standing in (KeyStatus.CHANGED, KeyStatus.REVOKED):
        raise ValueError(f"{key.node}: {key.reason}")
    if key.standing is KeyStatus.UNKNOWN:
        known_hosts.append(key.file, key.line)
