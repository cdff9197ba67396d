"""The port of an agent inside a container: clients with its key can read, and no client can order.

Each line is authenticated and cannot be replayed. Traffic is NOT encrypted: everyone who can read
the network can read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import select
import signal
import socket
import struct
import termios
import time
from pathlib import Path
from typing import Callable, List, Optional

from relaunch.agent import processes
from relaunch.agent.children import write
from relaunch.agent.loop import parse, take_line
from relaunch.agent.protocol import Json, Refused, line
from relaunch.agent.session import Session

TELLS = ("watch", "list", "logs", "stacks", "probe")
LEAST_KEY = 16
"""Minimum length of the key in characters: an observer of one handshake can try keys against it
offline."""
GREETED_WITHIN = 5.0
LONGEST_GREETING = 1024
LONGEST_ORDER = 64 * 1024
"""Bytes. A watch or a read of logs has some hundred bytes, and some thousand with the offsets of a
thousand ranks."""
TAKEN_WITHIN = 60.0
"""Seconds that a watcher may be unreachable before its connection is closed: as long as a lease."""
DELIVERED_WITHIN = 1.0
LISTEN_AGAIN = 5.0
CONNECTIONS = 16
"""Maximum number of concurrent connections; a controller has one."""
_NONCE = re.compile("[0-9a-f]{64}")
_END = re.compile(rb'\{"id":[^,]{1,40},"line":\{"end"')


class AuthenticationError(Exception):
    """Received data that is not from an owner of the key, or is out of sequence."""


def mac(key: bytes, text: bytes) -> str:
    return hmac.new(key, text, hashlib.sha256).hexdigest()


class Sealed:
    """The authenticated lines of one direction of one connection."""

    def __init__(self, key: bytes, direction: str) -> None:
        self.key = key
        self.direction = direction
        self.count = 0

    def mac(self, text: bytes) -> bytes:
        self.count += 1
        return mac(self.key, b"%s %d %s" % (self.direction.encode(), self.count, text)).encode()

    def seal(self, text: bytes) -> bytes:
        return b"%s %s\n" % (self.mac(text), text)

    def open(self, text: bytes) -> bytes:
        found, space, inner = text.partition(b" ")
        if not space or not hmac.compare_digest(found, self.mac(inner)):
            raise AuthenticationError
        return inner


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
        """Make a listener for a port and a key.

        Args:
            told: See `serve`.
            say: Prints a line to the output of the container.
        """
        self.number = number
        self.key = key.strip().encode()
        self.state = state
        self.told = told
        self.say = say
        self.listener: Optional[socket.socket] = None
        self.again_at: Optional[float] = 0.0
        """CLOCK_MONOTONIC, when `open` should be called again; None: never."""
        self.complained = False
        self.connections: List[int] = []

    def open(self) -> None:
        if self.again_at is None or time.monotonic() < self.again_at:
            return
        self.again_at = None
        if len(self.key) < LEAST_KEY:
            found = (
                f"has {len(self.key)} bytes, expected at least {LEAST_KEY}"
                if self.key
                else "is not set"
            )
            self.say(
                f"RELAUNCH_AGENT_KEY {found}: no port is opened, and nothing but exit codes is told"
            )
            return
        try:
            self.listener = _listen(self.number)
        except (OSError, OverflowError) as error:
            self.again_at = time.monotonic() + LISTEN_AGAIN
            if not self.complained:
                self.complained = True
                self.say(
                    f"port {self.number} cannot be opened ({error}): nothing but exit codes is told until it can"
                )

    def accept(self) -> None:
        assert self.listener is not None
        try:
            connection, _ = self.listener.accept()
        except OSError:  # the client disconnected before it was accepted
            return
        with connection:
            connection.setblocking(True)
            if len(self.connections) < CONNECTIONS:
                own = os.getpid()
                self.connections.append(
                    processes.fork(lambda: serve(self.state, connection, self.key, self.told, own))
                )

    def reaped(self, pid: int) -> None:
        if pid in self.connections:
            self.connections.remove(pid)


def greet(connection: socket.socket, key: bytes) -> bytes:
    """Let each side prove that it has the key; return the key of this connection."""
    challenge = secrets.token_hex(32)
    connection.settimeout(GREETED_WITHIN)
    connection.sendall(line({"challenge": challenge}))
    answer = parse(_first_line(connection))
    nonce = answer.get("nonce") if answer is not None else None
    proof = answer.get("mac") if answer is not None else None
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce) or not isinstance(proof, str):
        raise AuthenticationError
    if not hmac.compare_digest(
        proof.encode(), mac(key, f"{challenge}client{nonce}".encode()).encode()
    ):
        raise AuthenticationError
    connection.sendall(line({"mac": mac(key, f"{nonce}agent{challenge}".encode())}))
    return hmac.new(key, f"{challenge}session{nonce}".encode(), hashlib.sha256).digest()


def _first_line(connection: socket.socket) -> bytes:
    """Read to the end of a line and not beyond: what follows is authenticated."""
    until = time.monotonic() + GREETED_WITHIN
    heard = b""
    while not heard.endswith(b"\n"):
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(LONGEST_GREETING, socket.MSG_PEEK)
        end = data.find(b"\n") + 1
        heard += connection.recv(end or len(data))
        if not data or len(heard) > LONGEST_GREETING:
            raise AuthenticationError
    return heard


def serve(state: Path, connection: socket.socket, key: bytes, told: int, parent: int) -> None:
    """Run the process of one connection; write a byte to `told` when the end was delivered."""
    signal.set_wakeup_fd(-1)
    processes.reset_signals()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    processes.die_with(parent)
    processes.set_name("relaunch-port")
    processes.close_all_but([connection.fileno(), told])
    try:
        own = greet(connection, key)
        connection.settimeout(TAKEN_WITHIN)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TAKEN_WITHIN * 1000))
        _Relay(state, connection, own, told).run()
    except (AuthenticationError, OSError, RecursionError):
        # a client without the key, or one that disconnected: it gets no answer
        pass


class _Relay:
    """Relay between a connection and an ordinary session, which is a separate process."""

    def __init__(self, state: Path, connection: socket.socket, key: bytes, told: int) -> None:
        self.connection = connection
        self.told = told
        self.heard, self.said = bytearray(), bytearray()
        self.incoming, self.outgoing = Sealed(key, "client"), Sealed(key, "agent")
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
                data = self.connection.recv(65536)
                if not data:
                    return
                self.heard += data
                self._hear()

    def _tell(self) -> None:
        while True:
            text = take_line(self.said)
            if text is None:
                return
            self.connection.sendall(self.outgoing.seal(text))
            if _END.match(text):
                self._await_delivery()

    def _hear(self) -> None:
        while True:
            text = take_line(self.heard)
            if text is None:
                break
            value = parse(self.incoming.open(text))
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
                self.connection.sendall(self.outgoing.seal(line(answer).rstrip(b"\n")))
        if len(self.heard) > LONGEST_ORDER:
            raise AuthenticationError

    def _await_delivery(self) -> None:
        """Wait until the other machine has received all: the network may end with the container."""
        until = time.monotonic() + DELIVERED_WITHIN
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
    return Refused(
        "bad_order",
        f"the agent in a container is asked and not ordered: {str(command)[:40]!r} is none of {', '.join(TELLS)}",
    ).answer
