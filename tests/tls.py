"""Certificates of a CA of the tests, and what listens with them in place of a proxy.

The listeners are doubles of a server or proxy that refuses: TLS is Python's own and real, and what
follows it is one answer at most. `tests/deploy/test_nginx.py` has the real nginx and server.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
HOST = "temporal.lab"


class Authority:
    """A CA. Its certificate is `<name>.pem` in the folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name(name)
        certificate = self._build(name, self._key, ca=True).sign(self._key, hashes.SHA256())
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        begins: timedelta = -DAY,
        ends: timedelta = 30 * DAY,
        hosts: tuple[str, ...] = (HOST, "127.0.0.1"),
        passphrase: bytes | None = None,
        file: str = "",
    ) -> Path:
        """Write `<file or name>.pem` and `.key`; return the path of the certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [
            x509.DNSName(one) if one[:1].isalpha() else x509.IPAddress(ipaddress.ip_address(one))
            for one in hosts
        ]
        builder = self._build(name, key, begins=begins, ends=ends)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        path = self.folder / f"{file or name}.pem"
        certificate = builder.sign(self._key, hashes.SHA256())
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        path.with_suffix(".key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(passphrase)
                if passphrase
                else serialization.NoEncryption(),
            )
        )
        return path

    def _build(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        ca: bool = False,
        begins: timedelta = -DAY,
        ends: timedelta = 30 * DAY,
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def use_tls(
    folder: Path, client: str = "", *, key: str = "", ca: str = "ca", **more: str
) -> dict[str, str]:
    """Return the variables of a client: its certificate, and the CA of the server."""
    found = {"TEMPORAL_TLS_SERVER_CA_CERT_PATH": str(folder / f"{ca}.pem")}
    if client:
        found["TEMPORAL_TLS_CLIENT_CERT_PATH"] = str(folder / f"{client}.pem")
        found["TEMPORAL_TLS_CLIENT_KEY_PATH"] = str(folder / f"{key or client}.key")
    return {**found, **more}


def answer_http(status: int, reason: str) -> bytes:
    """Return how nginx answers a call of gRPC that it refuses itself: a page of HTML, in HTTP/2."""
    settings = _frame(4, 0, 0, b"")
    headers = b"\x08\x03" + str(status).encode() + b"\x0f\x10\x09text/html"
    page = f"<html>{reason}</html>".encode()
    return settings + _frame(1, 4, 1, headers) + _frame(0, 1, 1, page)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _wait_for_call(connection: socket.socket) -> None:
    """Read HTTP/2 up to the headers of the first call."""
    stream = connection.makefile("rb")
    stream.read(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
    while len(head := stream.read(9)) == 9:
        stream.read(int.from_bytes(head[:3], "big"))
        if head[3] == 1:
            return


@contextlib.contextmanager
def listen(
    certificate: Path | None, *, client_ca: Path | None = None, answer: bytes = b"", **tls: Any
) -> Iterator[str]:
    """Listen with a certificate, or without TLS, and yield the address.

    With `client_ca`, a client certificate of that CA is demanded by TLS itself. Who gets that far
    gets `answer` to the first call, and then the end of the connection.
    """
    context: ssl.SSLContext | None = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        context.set_alpn_protocols(["h2"])
        for name, value in tls.items():
            setattr(context, name, value)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                raw = listener.accept()[0]
            except OSError:  # closed below
                return
            with contextlib.suppress(OSError), raw:
                connection = context.wrap_socket(raw, server_side=True) if context else raw
                with connection:
                    if context is None:
                        connection.sendall(_frame(4, 0, 0, b""))  # as a server without TLS does
                    _wait_for_call(connection)
                    if answer:
                        connection.sendall(answer)
                        while connection.recv(4096):
                            pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)
