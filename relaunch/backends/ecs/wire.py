"""Authenticated TCP connection to the agent inside a rank's container.

Each side proves that it has the key, and every line carries a MAC. The connection is NOT encrypted:
a user who can read the network can read it, but cannot change or replay anything. The protocol is
described in docs/reference/agent-protocol.md, `container`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import secrets
from typing import Any

from relaunch.backends.base import Unreachable
from relaunch.backends.pipe import LINE_LIMIT

CONNECTED_WITHIN = 3.0
"""Seconds. A closed security group does not answer at all, and no caller blocks on this."""
LEAST_KEY = 16
"""Bytes; the same minimum as in the agent."""
_MAC = 64
_CHALLENGE = re.compile("[0-9a-f]{64}")


class _Sealed:
    """Computes the MACs of the lines in one direction of one connection."""

    def __init__(self, key: bytes, direction: str) -> None:
        self._key = key
        self._direction = direction
        self._count = 0

    def mac(self, text: bytes) -> bytes:
        self._count += 1
        return _mac(self._key, b"%s %d %s" % (self._direction.encode(), self._count, text)).encode()


class WirePipe:
    """Pipe to an agent in a container, for use by an agent session."""

    last_words = ""
    """Always empty: the agent's last output goes to the log of its task."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes
    ) -> None:
        self._reader, self._writer = reader, writer
        self._outgoing, self._incoming = _Sealed(key, "client"), _Sealed(key, "agent")
        self._ended: str | None = None
        self._gone = asyncio.Event()

    @property
    def ended(self) -> str | None:
        return self._ended

    async def readline(self) -> bytes:
        try:
            line = await self._reader.readline()
        except ConnectionError as error:
            self._over(f"the connection broke: {error}")
            return b""
        mac, space, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n"):
            self._over("the agent in the container has closed the connection")
            return b""
        if not space or not hmac.compare_digest(mac, self._incoming.mac(text)):
            self._over("a line came that is not of the agent in the container, or not in its turn")
            return b""
        return text + b"\n"

    async def write(self, data: bytes) -> None:
        if self._ended is not None:
            raise ConnectionError(self._ended)
        for text in data.splitlines():
            self._writer.write(b"%s %s\n" % (self._outgoing.mac(text), text))
        try:
            await self._writer.drain()
        # asyncio raises this for a transport that was closed meanwhile
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def end(self) -> None:
        # The connection may be closed already.
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    def kill(self) -> None:
        self._over("the connection was closed")
        self._writer.transport.abort()

    async def wait(self) -> None:
        await self._gone.wait()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _over(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._gone.set()


async def connect(node: str, address: str, port: int, key: bytes) -> WirePipe:
    """Connect to the agent in a container, and authenticate both sides.

    Raises:
        Unreachable: No agent answers there, or it does not accept the key.
    """
    where = f"{address}:{port}"
    try:
        async with asyncio.timeout(CONNECTED_WITHIN):
            reader, writer = await asyncio.open_connection(
                address, port, limit=LINE_LIMIT + _MAC + 2
            )
    except TimeoutError:
        raise Unreachable(
            node,
            f"{where} did not answer within {CONNECTED_WITHIN:g} s: is the port open in its security group?",
        ) from None
    except OSError as error:
        raise Unreachable(node, f"{where}: {error.strerror or error}") from error
    own: bytes | None = None
    try:
        async with asyncio.timeout(CONNECTED_WITHIN):
            own = await _greeted(node, where, reader, writer, key)
    except TimeoutError:
        raise Unreachable(
            node, f"what listens at {where} did not greet within {CONNECTED_WITHIN:g} s"
        ) from None
    except (ConnectionError, ValueError) as error:
        raise Unreachable(
            node, f"what listens at {where} speaks another protocol, or broke off: {error}"
        ) from error
    finally:
        if own is None:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return WirePipe(reader, writer, own)


async def _greeted(
    node: str, where: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes
) -> bytes:
    challenge = _text(await reader.readline(), "challenge")
    if not _CHALLENGE.fullmatch(challenge):
        raise ValueError(f"its challenge is {challenge[:80]!r}")
    nonce = secrets.token_hex(32)
    answer = {"mac": _mac(key, f"{challenge}client{nonce}".encode()), "nonce": nonce}
    writer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
    await writer.drain()
    line = await reader.readline()
    if not line:
        raise Unreachable(node, f"the agent at {where} has another key")
    if not hmac.compare_digest(
        _text(line, "mac").encode(), _mac(key, f"{nonce}agent{challenge}".encode()).encode()
    ):
        raise Unreachable(node, f"what listens at {where} does not have the key")
    return hmac.new(key, f"{challenge}session{nonce}".encode(), hashlib.sha256).digest()


def _text(line: bytes, name: str) -> str:
    try:
        found: Any = json.loads(line)[name]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it said {line[:80]!r}") from error
    if not isinstance(found, str):
        raise ValueError(f"its {name} is {str(found)[:80]!r}")
    return found


def _mac(key: bytes, text: bytes) -> str:
    return hmac.new(key, text, hashlib.sha256).hexdigest()
