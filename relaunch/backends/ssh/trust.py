"""Reads a node's host key, compares it with known_hosts, and adds it there.

Trusts nothing by itself: that is a person's decision.

For commands that ask about one node. A backend checks the same keys by itself, at each connection.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass

import paramiko

from relaunch.backends.base import Unreachable
from relaunch.backends.ssh import known_hosts
from relaunch.backends.ssh.connection import (
    LOGINS,
    ConnectError,
    Connection,
    describe,
    look,
    refuse,
)
from relaunch.backends.ssh.known_hosts import KeyStatus
from relaunch.backends.ssh.route import Hop, Route, SshConfigError, read_config, route
from relaunch.spec.fleet import FleetNode, FleetSpec

log = logging.getLogger("relaunch.ssh")


@dataclass(frozen=True, slots=True)
class HostKey:
    node: str
    algorithm: str
    """The common name: ED25519, RSA, ECDSA."""
    fingerprint: str
    standing: KeyStatus
    reason: str
    """Why logins to the node are refused; empty if the key is known."""
    file: str
    """The known_hosts file to which `line` belongs."""
    line: str
    known_as: str
    """The host's name in known_hosts, and for `ssh-keygen -R`."""
    told_by: str
    """The known_hosts file that holds this key or another key of the host; empty if there is
    none."""


class Gates:
    """Bounds the logins at once over one jump host, where several nodes are asked in parallel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[tuple[str, int], threading.Semaphore] = {}

    def __call__(self, hop: Hop) -> threading.Semaphore:
        with self._lock:
            return self._gates.setdefault((hop.host, hop.port), threading.BoundedSemaphore(LOGINS))


async def host_key(spec: FleetSpec, node: FleetNode, gates: Gates | None = None) -> HostKey:
    """Ask a node for its key, over its jump hosts if it has any.

    Only the key exchange is done with the node: there is no login to it.

    Args:
        spec: Its fleet.
        node: The node.
        gates: Shared by calls that run at the same time.

    Raises:
        Unreachable: it does not answer, or a jump host refuses the login.
        ValueError: the SSH configuration cannot be used.
    """
    connection = Connection()
    asked = asyncio.ensure_future(
        asyncio.to_thread(_host_key, connection, spec, node, gates or Gates())
    )
    try:
        return await asyncio.shield(asked)
    except ConnectError as failed:
        raise Unreachable(node.name, failed.reason) from failed
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise Unreachable(node.name, str(error)) from error
    except SshConfigError:
        raise
    except Exception as error:
        log.exception("the key of node %s could not be read", node.name)
        raise Unreachable(node.name, describe(error)) from error
    finally:
        connection.abort()
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())


def _host_key(connection: Connection, spec: FleetSpec, node: FleetNode, gates: Gates) -> HostKey:
    way = route(spec.ssh, node, read_config(spec.ssh))
    key = look(connection, way, gates)
    reason = ""
    try:
        refuse(way.node, key, f"relaunch nodes trust {node.name}")
    except ConnectError as failed:
        reason = failed.reason
    line = known_hosts.line_for(
        way.node.known_as, way.node.known_port, key.algorithm, key.blob, way.node.hash_known_hosts
    )
    return HostKey(
        node=node.name,
        algorithm=known_hosts.kind(key.blob),
        fingerprint=known_hosts.fingerprint(key.blob),
        standing=key.standing,
        reason=reason,
        file=_file(way),
        line=line,
        known_as=key.known_as,
        told_by=key.entry.file if key.entry is not None else "",
    )


def _file(way: Route) -> str:
    if not way.node.known_hosts:
        raise SshConfigError(
            f"the SSH configuration has no known_hosts file for {way.node.name}: "
            "expected UserKnownHostsFile to name one"
        )
    return way.node.known_hosts[0]


def remember(key: HostKey) -> None:
    """Add a key that a person has compared to known_hosts.

    Raises:
        ValueError: another key is known, or this one is revoked: a person must look at that line
            first.
        OSError: the file cannot be written.
    """
    if key.standing in (KeyStatus.CHANGED, KeyStatus.REVOKED):
        raise ValueError(f"{key.node}: {key.reason}")
    if key.standing is KeyStatus.UNKNOWN:
        known_hosts.append(key.file, key.line)
