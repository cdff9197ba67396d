"""TLS connection to the agent inside a rank's container.

Both sides present a certificate and accept only those in their own secret: see
relaunch/agent/container/tls.py, and docs/reference/agent-protocol.md, `container`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from relaunch.agent.container.tls import AuthenticationError, Secret
from relaunch.backends.base import Unreachable
from relaunch.backends.pipe import LINE_LIMIT

CONNECT_TIMEOUT = 3.0
"""Seconds. A closed security group does not answer at all, and no caller blocks on this."""
HANDSHAKE_TIMEOUT = 3.0
"""Seconds for the whole handshake."""
_NOT_YET_VALID, _EXPIRED = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
_OTHER_PROTOCOLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


class WirePipe:
    """Pipe to an agent in a container, for use by an agent session."""

    last_words = ""
    """Always empty: the agent's last output goes to the log of its task."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expires: float
    ) -> None:
        self._reader, self._writer = reader, writer
        self.expires = expires
        """Unix time at which the agent's certificate ends to be valid."""
        self._ended: str | None = None
        self._gone = asyncio.Event()

    @property
    def ended(self) -> str | None:
        return self._ended

    async def readline(self) -> bytes:
        try:
            line = await self._reader.readline()
        except ssl.SSLError as error:
            self._over(_explain_end(error))
            return b""
        except ConnectionError as error:
            self._over(f"the connection broke: {error}")
            return b""
        if not line.endswith(b"\n"):
            self._over("the agent in the container has closed the connection")
            return b""
        return line

    async def write(self, data: bytes) -> None:
        if self._ended is not None:
            raise ConnectionError(self._ended)
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ssl.SSLError as error:
            raise ConnectionError(_reason(error)) from error
        # asyncio raises this for a transport that was closed meanwhile
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def end(self) -> None:
        # TLS here closes both directions: what the agent still sends is dropped.
        self._close()

    def kill(self, reason: str | None = None) -> None:
        self._over(reason or "the connection was closed")
        self._writer.transport.abort()

    async def wait(self) -> None:
        await self._gone.wait()
        self._close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _close(self) -> None:
        # In Python 3.11.2, that of Debian 12, `abort` fails after a second `close`.
        if not self._writer.is_closing():
            self._writer.close()

    def _over(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._gone.set()


async def connect(node: str, address: str, port: int, secret: Secret) -> WirePipe:
    """Connect to the agent in a container, and authenticate both sides.

    Raises:
        SecretError: The secret cannot be used.
        Unreachable: No agent answers there, or it does not have the same secret.
    """
    context = secret.client_context()
    where = f"{address}:{port}"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            connection = await _connect_tcp(address, port)
    except TimeoutError:
        raise Unreachable(
            node,
            f"{where} did not answer within {CONNECT_TIMEOUT:g} s: "
            "is the port open in its security group?",
        ) from None
    except OSError as error:
        raise Unreachable(node, f"{where}: {error.strerror or error}") from error
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            # The handshake comes before the reader exists, so that nothing sent in plain text can
            # be read as if it had been authenticated.
            reader, writer = await asyncio.open_connection(
                sock=connection, limit=LINE_LIMIT, ssl=context, server_hostname=""
            )
    except TimeoutError:
        raise Unreachable(
            node,
            f"what listens at {where} did not finish the TLS handshake "
            f"within {HANDSHAKE_TIMEOUT:g} s",
        ) from None
    except ssl.SSLError as error:
        raise Unreachable(node, _explain(where, error)) from error
    except OSError as error:
        raise Unreachable(
            node,
            f"what listens at {where} broke off the TLS handshake: "
            f"{str(error) or type(error).__name__}",
        ) from error
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    try:
        secret.check_peer(tls.getpeercert(binary_form=True))
    except AuthenticationError as error:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        raise Unreachable(node, _explain_foreign(where)) from error
    expires = (tls.getpeercert() or {})["notAfter"]
    return WirePipe(reader, writer, ssl.cert_time_to_seconds(str(expires)))


async def _connect_tcp(address: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure = OSError(f"{address} has no address")
    for family, kind, protocol, _, target in await loop.getaddrinfo(
        address, port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, target)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure


def _explain(where: str, error: ssl.SSLError) -> str:
    """Say why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return f"the certificate of the agent at {where} has expired: exchange the agent key"
        if error.verify_code == _NOT_YET_VALID:
            return (
                f"the certificate of the agent at {where} is not valid yet: "
                "is the clock of this worker right?"
            )
        return _explain_foreign(where)
    if error.reason in _OTHER_PROTOCOLS:
        return f"what listens at {where} does not speak TLS: is it the agent?"
    return f"the TLS handshake with what listens at {where} failed: {_reason(error)}"


def _explain_end(error: ssl.SSLError) -> str:
    """Say why a connection ended after its handshake."""
    if "ALERT" in (error.reason or ""):
        # In TLS 1.3 the agent checks this side's certificate when the handshake is over here.
        return (
            f"the agent refused the certificate of this worker, or what came from it: "
            f"{_reason(error)}"
        )
    return f"what came is not from the agent, or was changed on its way: {_reason(error)}"


def _explain_foreign(where: str) -> str:
    return (
        f"what listens at {where} presents a certificate that is not in ecs.agent_key: "
        "it has another key, or is not the agent"
    )


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
