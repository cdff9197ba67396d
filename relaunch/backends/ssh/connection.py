"""Opens a connection to a node, over jump hosts if necessary.

The steps are TCP, key exchange, host key and authentication. An error says which step failed, and
why. Everything here blocks, each step for a bounded time, and is meant to run in a separate thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import paramiko

from relaunch.backends.ssh import known_hosts
from relaunch.backends.ssh.identities import Identity, SshAgentError, identities
from relaunch.backends.ssh.known_hosts import Entry, KeyStatus, fingerprint, kind
from relaunch.backends.ssh.route import Hop, Route

TCP = 5.0
"""Seconds. A lost packet is sent again after 1 s and after 3 s."""
BANNER = 5.0
"""Seconds. A loaded sshd forks for each login before it sends its banner."""
KEY_EXCHANGE = 10.0
AUTHENTICATION = 15.0
"""Seconds. PAM may query a remote directory service."""
STEP = 0.1
"""Seconds between two checks whether a login that waits for its turn was given up."""
KEEPALIVE = 15
"""Seconds without outgoing traffic after which a keepalive is sent. Without it, the loss of a node
to which nothing is sent would go unnoticed."""
UNACKNOWLEDGED = 30_000
"""Milliseconds that sent data may stay unacknowledged by the node's kernel: three heartbeats at
their default interval."""
IDLE_LOOK = 5.0
"""Seconds between two checks of a silent connection by paramiko's thread. Its default is 0.1 s,
which for 200 nodes would cost a tenth of a core."""
PACKET = 256 * 1024
"""Bytes: the packet limit of OpenSSH. paramiko has no limit, and would allocate as much as a node
announces."""
LOGINS = 6
"""Logins at once over one jump host. sshd begins to turn away connections at 10 (MaxStartups), and
counts a login for slightly longer than it takes."""


class ConnectError(Exception):
    """A connection could not be made. `reason` is a clause for a person."""

    def __init__(self, reason: str, lasting: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting
        """Whether the failure persists until a person changes something."""


class BoundedSocket(socket.socket):
    """A socket that refuses packets larger than PACKET."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        if size > PACKET:
            raise paramiko.SSHException(f"the node announces a packet of {size} bytes")
        return super().recv(size, flags)


class HopStream:
    """A stream through the connection to the previous hop, with paramiko's socket interface."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def recv(self, size: int) -> bytes:
        if size > PACKET:
            raise paramiko.SSHException(f"the node announces a packet of {size} bytes")
        return self._channel.recv(size)

    def send(self, data: bytes) -> int:
        return self._channel.send(data)

    def settimeout(self, timeout: float | None) -> None:
        self._channel.settimeout(timeout)

    def close(self) -> None:
        # A channel sends a close message, and the connection below it may be gone already.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()

    @property
    def _closed(self) -> bool:
        return self._channel.closed


class Transport(paramiko.Transport):
    """A transport that remembers what broke it: paramiko's forgets an error that was asked for."""

    broken_by: EOFError | OSError | None = None
    """None as well where the other side has said that it disconnects."""

    def get_exception(self) -> Exception | None:
        error = super().get_exception()
        if isinstance(error, EOFError | OSError):
            self.broken_by = error
        return error


@dataclass(frozen=True, slots=True)
class ServerKey:
    algorithm: str
    blob: bytes
    standing: KeyStatus
    entry: Entry | None
    known_as: str
    """The host's name in known_hosts."""

    @property
    def text(self) -> str:
        return f"{kind(self.blob)} {fingerprint(self.blob)}"


class Connection:
    """A chain of transports, each through the one before. The last one leads to the node."""

    def __init__(self) -> None:
        # paramiko logs as errors, with tracebacks, the failures that are raised here as sentences.
        # Where nothing configures logging, as on the command line, Python prints them.
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
        self._sockets: list[socket.socket] = []
        self._streams: list[socket.socket | HopStream] = []
        self._transports: list[Transport] = []
        self._aborted: str | None = None
        self._lock = threading.Lock()

    @property
    def transport(self) -> Transport:
        return self._transports[-1]

    def add_socket(self, raw: socket.socket) -> None:
        with self._lock:
            self._sockets.append(raw)
            if self._aborted is not None:
                _shut(raw)

    def drop_socket(self, raw: socket.socket) -> None:
        with self._lock:
            self._sockets.remove(raw)
        raw.close()

    def add(self, transport: Transport, stream: socket.socket | HopStream) -> None:
        with self._lock:
            self._transports.append(transport)
            self._streams.append(stream)

    def calm(self, look: float) -> None:
        """Let paramiko's threads sleep up to `look` seconds while nothing arrives.

        Data and `abort` wake them at once.
        """
        for stream in self._streams:
            stream.settimeout(look)

    def abort(self, reason: str = "it was closed") -> None:
        """Break the connection, whatever it is doing.

        Never blocks: the threads of its transports notice the break and clean up.
        """
        with self._lock:
            if self._aborted is None:
                self._aborted = reason
            for raw in self._sockets:
                _shut(raw)

    @property
    def aborted(self) -> str | None:
        return self._aborted

    def find_loss(self) -> str | None:
        """Return why the connection is lost, or None if it is up."""
        if self._aborted is not None:
            return self._aborted
        for transport in self._transports:
            which = "the node" if transport is self.transport else "the jump host"
            error = transport.get_exception()
            if error is not None:
                return f"the connection was lost: {_how(error, which)}"
            if not transport.is_active():
                return f"the connection was lost: {which} closed it"
        return None


def describe(error: Exception) -> str:
    """Return a clause for a person about an error that nothing here expects."""
    return f"the login failed in a way that relaunch does not know: {type(error).__name__}: {error}"


def _how(error: BaseException, which: str) -> str:
    if isinstance(error, EOFError):
        return f"{which} closed it"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return f"{which} reset it"
    if isinstance(error, TimeoutError):
        return f"{which} acknowledged nothing for {UNACKNOWLEDGED / 1000:g} s"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _shut(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is not connected, or not any more
        raw.shutdown(socket.SHUT_RDWR)


def connect(
    connection: Connection, route: Route, gate: Callable[[Hop], threading.Semaphore]
) -> None:
    """Connect and log in to each host in turn.

    Raises:
        Failed: a host cannot be reached, has the wrong key, or refuses the login.
    """
    _pass(connection, route, gate)
    _log_in(connection, route.node, f"relaunch nodes trust {route.name}")


def look(
    connection: Connection, route: Route, gate: Callable[[Hop], threading.Semaphore]
) -> ServerKey:
    """Connect until the node has proven its key, and return the key with its known_hosts status.

    Logs in to the jump hosts only.
    """
    _pass(connection, route, gate)
    return _exchange_keys(connection, route.node, _entries(route.node))


def _pass(connection: Connection, route: Route, gate: Callable[[Hop], threading.Semaphore]) -> None:
    """Log in to the jump hosts."""
    for hop in route.hops[:-1]:
        turn = gate(hop)
        while not turn.acquire(timeout=STEP):
            if connection.aborted is not None:
                raise ConnectError(
                    f"{connection.aborted}: it waited for its turn at the jump host {hop.name}"
                )
        try:
            _log_in(connection, hop, f"ssh {hop.name}")
        except ConnectError as failed:
            raise ConnectError(
                f"the jump host {hop.name} failed: {failed.reason}", failed.lasting
            ) from failed
        finally:
            turn.release()


def _log_in(connection: Connection, hop: Hop, trusted_by: str) -> None:
    entries = _entries(hop)
    key = _exchange_keys(connection, hop, entries)
    refuse(hop, key, trusted_by)
    _authenticate(connection, hop)
    connection.transport.set_keepalive(KEEPALIVE)


def _entries(hop: Hop) -> tuple[Entry, ...]:
    try:
        return known_hosts.read(hop.known_hosts)
    except OSError as error:
        raise ConnectError(
            f"{error.filename} cannot be read: {error.strerror}", lasting=True
        ) from error


# --- TCP


def _reach(connection: Connection, hop: Hop) -> socket.socket | HopStream:
    """Return a stream to a host, directly or through the previous hop."""
    if not connection._transports:
        return _dial(connection, hop)
    before = connection.transport
    try:
        return HopStream(
            before.open_channel("direct-tcpip", (hop.host, hop.port), ("127.0.0.1", 0), timeout=TCP)
        )
    except paramiko.ChannelException as error:
        raise ConnectError(f"the jump host cannot reach {hop.place}: {error.text}") from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        if not before.is_active():
            raise ConnectError(connection.find_loss() or "the connection was lost") from error
        raise ConnectError(
            f"{hop.place} gave the jump host no answer to TCP within {TCP:g} s"
        ) from error


def _dial(connection: Connection, hop: Hop) -> socket.socket:
    try:
        found = socket.getaddrinfo(hop.host, hop.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        lasting = error.errno != socket.EAI_AGAIN
        raise ConnectError(
            f"the name {hop.host!r} does not resolve: {error.strerror}", lasting
        ) from error
    except UnicodeError as error:
        raise ConnectError(
            f"the name {hop.host!r} does not resolve: it is no name of a host", lasting=True
        ) from error
    until = time.monotonic() + TCP
    failed = ConnectError(f"{hop.place} gave no answer to TCP within {TCP:g} s")
    for position, (family, kind_, protocol, _, address) in enumerate(found):
        # An address that does not answer must not use up the time of those after it.
        within = (until - time.monotonic()) / (len(found) - position)
        if within <= 0 or connection.aborted is not None:
            break
        raw = BoundedSocket(family, kind_, protocol)
        try:
            raw.settimeout(within)
            connection.add_socket(raw)
            raw.connect(address)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED)
        except OSError as error:
            connection.drop_socket(raw)
            failed = _not_reached(hop, error)
        else:
            return raw
    raise failed if connection.aborted is None else ConnectError(connection.aborted)


def _not_reached(hop: Hop, error: OSError) -> ConnectError:
    if isinstance(error, ConnectionRefusedError):
        return ConnectError(f"{hop.place} refused the connection: nothing listens there")
    if isinstance(error, TimeoutError):
        return ConnectError(f"{hop.place} gave no answer to TCP within {TCP:g} s")
    return ConnectError(f"there is no way to {hop.place}: {error.strerror or error}")


# --- key exchange and host key


def _exchange_keys(connection: Connection, hop: Hop, entries: tuple[Entry, ...]) -> ServerKey:
    stream = _reach(connection, hop)
    transport = Transport(cast(socket.socket, stream))
    transport.banner_timeout, transport.handshake_timeout, transport.auth_timeout = (
        BANNER,
        KEY_EXCHANGE,
        AUTHENTICATION,
    )
    transport.channel_timeout = TCP
    transport.clear_to_send_timeout = KEY_EXCHANGE
    port = _known_port(hop, entries)
    known_as = known_hosts.name_of(hop.known_as, port)
    options = transport.get_security_options()
    options.key_types = _order_key_types(
        tuple(options.key_types),
        known_hosts.algorithms(entries, known_as),
    )
    connection.add(transport, stream)
    done = threading.Event()
    transport.start_client(event=done)
    ended = done.wait(BANNER + KEY_EXCHANGE)
    if connection.aborted is not None:
        raise ConnectError(connection.aborted)
    if not ended or not transport.is_active():
        failed = _no_exchange(hop, transport)
        transport.close()
        raise failed
    key = transport.get_remote_server_key()
    found = known_hosts.judge(entries, hop.known_as, port, key.asbytes())
    return ServerKey(key.get_name(), key.asbytes(), found.standing, found.entry, known_as)


def _known_port(hop: Hop, entries: tuple[Entry, ...]) -> int:
    """Return the port that is part of the host's name in known_hosts."""
    with_port = known_hosts.name_of(hop.known_as, hop.port)
    is_named = known_hosts.algorithms(entries, known_hosts.name_of(hop.known_as, hop.known_port))
    # `nodes trust` of release 0.1.0 wrote a HostKeyAlias with the port.
    return (
        hop.port if not is_named and known_hosts.algorithms(entries, with_port) else hop.known_port
    )


def _order_key_types(offered: tuple[str, ...], known: Iterable[str]) -> tuple[str, ...]:
    """Return the key algorithms by preference: those of known keys first, as in OpenSSH."""
    wanted = [
        name
        for kind_ in known
        for name in (("rsa-sha2-512", "rsa-sha2-256") if kind_ == "ssh-rsa" else (kind_,))
        if name in offered
    ]
    return (*wanted, *(name for name in offered if name not in wanted))


def _no_exchange(hop: Hop, transport: paramiko.Transport) -> ConnectError:
    error = transport.get_exception()
    if transport.remote_version:
        if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
            return ConnectError(
                f"its sshd and we have no algorithm in common: {error}", lasting=True
            )
        if error is None or isinstance(error, EOFError):
            return ConnectError(
                f"{hop.place} said that it speaks SSH and nothing more: "
                "the exchange of keys did not end"
            )
        return ConnectError(f"the exchange of keys with {hop.place} failed: {error}")
    if error is not None and isinstance(error.__context__, EOFError | ConnectionResetError):
        why = "too many logins at once (MaxStartups), not allowed, or it only begins to run"
        return ConnectError(f"{hop.place} closed the connection before it said who it is: {why}")
    if error is not None and error.__context__ is None:
        return ConnectError(f"what listens at {hop.place} is no SSH server")
    return ConnectError(
        f"{hop.place} answers to TCP but says nothing: its sshd hangs, "
        f"or something else listens there (waited {BANNER:g} s)"
    )


def refuse(hop: Hop, key: ServerKey, trusted_by: str) -> None:
    """Raise Failed unless the key is known.

    `trusted_by`: the command by which a person trusts the key.
    """
    where = f"{key.entry.file}:{key.entry.line}" if key.entry is not None else ""
    if key.standing is KeyStatus.UNKNOWN:
        file = (
            hop.known_hosts[0] if hop.known_hosts else "any known_hosts"
        )  # the first is the user's
        reason = (
            f"its host key ({key.text}) is not in {file}: "
            f"compare it with the machine's own, then `{trusted_by}`"
        )
        raise ConnectError(reason, lasting=True)
    if key.standing is KeyStatus.CHANGED and key.entry is not None:
        expected = fingerprint(key.entry.blob)
        if kind(key.entry.blob) != kind(key.blob):
            expected = f"{kind(key.entry.blob)} {expected}"
        reason = (
            f"its host key has CHANGED ({key.text}, expected {expected} from {where}): "
            "the connection may be intercepted, or the machine was reinstalled; "
            f"if you know that it was, remove that line, then `{trusted_by}`"
        )
        raise ConnectError(reason, lasting=True)
    if key.standing is KeyStatus.REVOKED:
        raise ConnectError(f"its host key ({key.text}) is revoked by {where}", lasting=True)


# --- authentication


def _authenticate(connection: Connection, hop: Hop) -> None:
    transport = connection.transport
    offered: list[Identity] = []
    allowed: list[str] = []
    found = identities(hop)
    try:
        for identity in found.usable:
            offered.append(identity)
            try:
                rest = transport.auth_publickey(hop.user, identity.key)
            except paramiko.BadAuthenticationType as error:
                allowed = error.allowed_types
                break
            except paramiko.AuthenticationException as error:
                if _silent(transport, error):
                    raise ConnectError(
                        f"no answer to the authentication of {hop.user} within {AUTHENTICATION:g} s"
                    ) from error
                if not transport.is_active():
                    raise
                continue
            if not rest:
                return
            raise ConnectError(
                f"{hop.user} is asked for {' and '.join(rest)} after the key: "
                "expected a login by key alone",
                lasting=True,
            )
        if transport.is_active() and not allowed:
            # Some servers authenticate by source (none) and need no key. The others answer with the
            # types that they accept.
            try:
                transport.auth_none(hop.user)
                return
            except paramiko.BadAuthenticationType as error:
                allowed = error.allowed_types
    except SshAgentError as error:
        raise ConnectError(f"{error}: it was asked to sign the login", lasting=True) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        if connection.aborted is not None:
            raise ConnectError(connection.aborted) from error
        transport.get_exception()  # what broke it, if nothing has asked for that
        cause = transport.broken_by or error
        if isinstance(cause, EOFError | OSError) or not (
            offered or isinstance(error, paramiko.AuthenticationException)
        ):
            raise ConnectError(
                f"the connection was lost during the authentication: {_how(cause, 'the node')}"
            ) from error
    finally:
        found.close()
    tried = ", ".join(identity.text for identity in offered) or "no key"
    unusable = [found.agent_failure] if found.agent_failure is not None else []
    if hop.chosen or not offered:
        unusable += found.unusable
    beside = "".join(f"; {one}" for one in unusable)
    takes = f"; it takes {', '.join(allowed)}" if allowed and "publickey" not in allowed else ""
    raise ConnectError(
        f"the login of {hop.user} was refused: offered {tried}{beside}{takes}", lasting=True
    )


def _silent(transport: paramiko.Transport, error: paramiko.AuthenticationException) -> bool:
    """Return whether the server did not answer.

    paramiko has no separate exception for that, and leaves no other exception behind when no answer
    comes.
    """
    return (
        transport.is_active()
        and type(error) is paramiko.AuthenticationException
        and str(error) == "Authentication timeout."
    )
