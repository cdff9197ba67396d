"""The port of an agent inside a container: clients with its key can read, and no client can order.

Each connection is TLS in which both sides present a certificate (see tls.py), and is served by
a separate process from before its first byte is read: no client can delay the agent itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import socket
import ssl
import struct
import termios
import time
from pathlib import Path
from typing import Callable, List, Optional

from relaunch.agent import processes
from relaunch.agent.children import write
from relaunch.agent.container.tls import AuthenticationError, Secret, SecretError
from relaunch.agent.loop import parse, take_line
from relaunch.agent.protocol import Json, Refusal, line
from relaunch.agent.session import Session

TELLS = ("watch", "list", "logs", "stacks", "last-words", "probe")
HANDSHAKE_TIMEOUT = 5.0
"""Seconds for the whole handshake, however its bytes arrive."""
LONGEST_ORDER = 64 * 1024
"""Bytes. A watch or a read of logs has some hundred bytes, and some thousand with the offsets of a
thousand ranks."""
SEND_TIMEOUT = 60.0
"""Seconds that a watcher may be unreachable before its connection is closed: as long as a lease."""
DELIVERY_TIMEOUT = 1.0
LISTEN_AGAIN = 5.0
RECORD_BYTES = 65536
"""More than one record of TLS can carry."""
CONNECTIONS = 16
"""Maximum number of concurrent connections; a controller has one."""
_END = re.compile(rb'\{"id":[^,]{1,40},"line":\{"end"')


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A container that ended a moment ago may have used the same port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("0.0.0.0", port))
        listener.listen(16)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class Listener:
    """The listening socket, and one process for each connection."""

    def __init__(
        self, number: int, key: str, state: Path, told: int, say: Callable[[str], None]
    ) -> None:
        """Make a listener for a port and a secret.

        Args:
            key: The PEM text of the secret.
            told: See `serve`.
            say: Prints a line to the output of the container.
        """
        self.number = number
        self.key = key
        self.state = state
        self.told = told
        self.say = say
        self.listener: Optional[socket.socket] = None
        self.secret: Optional[Secret] = None
        self.context: Optional[ssl.SSLContext] = None
        self.again_at: Optional[float] = 0.0
        """CLOCK_MONOTONIC, when `open` should be called again; None: never."""
        self.complained = False
        self.connections: List[int] = []

    def open(self) -> None:
        if self.again_at is None or time.monotonic() < self.again_at:
            return
        self.again_at = None
        try:
            self.secret = Secret(self.key)
            self.context = self.secret.server_context()
        except SecretError as error:
            self.say(
                f"RELAUNCH_AGENT_KEY {error}: no port is opened, and only exit codes are reported"
            )
            return
        try:
            self.listener = _listen(self.number)
        except (OSError, OverflowError) as error:
            self.again_at = time.monotonic() + LISTEN_AGAIN
            if not self.complained:
                self.complained = True
                self.say(
                    f"port {self.number} cannot be opened ({error}): until it can, "
                    "only exit codes are reported"
                )

    def accept(self) -> None:
        secret, context = self.secret, self.context
        assert self.listener is not None
        assert secret is not None
        assert context is not None
        try:
            connection, _ = self.listener.accept()
        except OSError:  # the client disconnected before it was accepted
            return
        with connection:
            connection.setblocking(True)
            if len(self.connections) < CONNECTIONS:
                own = os.getpid()
                try:
                    pid = processes.fork(
                        lambda: serve(self.state, connection, secret, context, self.told, own)
                    )
                except OSError:  # no process is left for it; the client connects again
                    return
                self.connections.append(pid)

    def forget_connection(self, pid: int) -> None:
        if pid in self.connections:
            self.connections.remove(pid)


def serve(
    state: Path,
    connection: socket.socket,
    secret: Secret,
    context: ssl.SSLContext,
    told: int,
    parent: int,
) -> None:
    """Run the process of one connection; write a byte to `told` when the end was delivered."""
    signal.set_wakeup_fd(-1)
    processes.reset_signals()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    processes.die_with(parent)
    processes.set_name("relaunch-port")
    processes.close_all_but([connection.fileno(), told])
    try:
        # An answer is two short lines: the second must not wait for a delayed ACK (40 ms).
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(HANDSHAKE_TIMEOUT)
        secured = context.wrap_socket(connection, server_side=True)
        secret.check_peer(secured.getpeercert(binary_form=True))
        secured.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        secured.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT * 1000))
        _Relay(state, secured, told).run()
        secured.settimeout(0.0)
        secured.unwrap()
    except (AuthenticationError, OSError, RecursionError):
        # A client without the key, one that disconnected, or one that did not wait for the end of
        # TLS: it gets no answer.
        pass


class _Relay:
    """Relay between a connection and an ordinary session, which is a separate process."""

    def __init__(self, state: Path, connection: ssl.SSLSocket, told: int) -> None:
        self.connection = connection
        self.told = told
        self.heard, self.said = bytearray(), bytearray()
        reading, self.orders = os.pipe()
        self.answers, writing = os.pipe()
        relay = os.getpid()

        def session() -> None:
            processes.die_with(relay)
            os.dup2(reading, 0)
            os.dup2(writing, 1)
            processes.close_all_but([])
            Session(state).run()

        processes.fork(session)
        os.close(reading)
        os.close(writing)

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self.connection.fileno(), self.answers], [], [])
            if self.answers in ready:
                data = os.read(self.answers, 65536)
                if not data:
                    return
                self.said += data
                self._tell()
            if self.connection.fileno() in ready:
                received = self._receive()
                if received == b"":
                    return
                self.heard += received or b""
                self._hear()

    def _receive(self) -> Optional[bytes]:
        """Return what arrived; b"" if the client has closed, None if no record is complete yet.

        A record is at most 16 KiB, so no part of one stays behind in OpenSSL.
        """
        self.connection.settimeout(0.0)
        try:
            return self.connection.recv(RECORD_BYTES)
        except ssl.SSLWantReadError:
            return None

    def _send(self, text: bytes) -> None:
        self.connection.settimeout(SEND_TIMEOUT)
        self.connection.sendall(text + b"\n")

    def _tell(self) -> None:
        while True:
            text = take_line(self.said)
            if text is None:
                return
            self._send(text)
            if _END.match(text):
                self._await_delivery()

    def _hear(self) -> None:
        while True:
            text = take_line(self.heard)
            if text is None:
                break
            value = parse(text)
            if value is None:
                raise AuthenticationError
            refusal = _refusal(value)
            if refusal is None:
                # The parsed value is passed on, not the received bytes, so that no later reader can
                # parse them differently.
                write(self.orders, line(value))
                continue
            for answer in (
                {"id": value.get("id"), "line": refusal},
                {"id": value.get("id"), "exit": 0},
            ):
                self._send(line(answer).rstrip(b"\n"))
        if len(self.heard) > LONGEST_ORDER:
            raise AuthenticationError

    def _await_delivery(self) -> None:
        """Wait until the other machine has received all: the network may end with the container."""
        until = time.monotonic() + DELIVERY_TIMEOUT
        while time.monotonic() < until:
            (left,) = struct.unpack(
                "i", fcntl.ioctl(self.connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
            )
            if not left:
                os.write(self.told, b".")
                return
            time.sleep(0.01)


def _refusal(value: Json) -> Optional[Json]:
    command = value.get("command")
    if "command" not in value or command in TELLS:
        return None
    return Refusal(
        "bad_order",
        f"an agent in a container only answers questions: {str(command)[:40]!r} is none of "
        f"{', '.join(TELLS)}",
    ).answer
