"""Decrypts payloads for people who read them in Temporal's web UI: `relaunch codec-server`.

It speaks the protocol of Temporal's codec servers: POST /decode and /encode of JSON payloads. Only
pages of one web UI may call it, and only with the token: as `Authorization: Bearer TOKEN`, or as
the first part of the path, because a web UI without a login has no header to send.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import DecodeError
from temporalio.api.common.v1 import Payload, Payloads

from relaunch.config import ConfigError, Settings
from relaunch.converter import MAX_DECOMPRESSED_BYTES, expand
from relaunch.encryption import EncryptionCodec, read_codec
from relaunch.temporal import find_running_up

TOKEN_FILE = "codec-token"
"""In the state folder. People's browsers keep the token, so it outlives this process."""
MIN_TOKEN = 22
MAX_BODY_BYTES = 32 * 1024 * 1024
"""A web UI sends the payloads of a whole page at once; one is at most 2 MiB."""
MAX_REPORTED = 100
"""Kinds of unreadable payloads that are named on the terminal."""
REQUEST_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class CodecServerOptions:
    host: str
    port: int
    origin: str
    """Of the web UI, as a browser states it: `http://127.0.0.1:8233`."""
    token: str
    certificate: Path | None = None
    key: Path | None = None


def choose_options(
    settings: Settings,
    listen: str,
    ui: str | None,
    token_file: Path | None,
    certificate: Path | None,
    key: Path | None,
) -> CodecServerOptions:
    """Check what was typed; create the token file if it is the default one and is missing.

    Raises:
        ConfigError: An option or the token cannot be used.
    """
    host, colon, port = listen.rpartition(":")
    try:
        address = ip_address(host.strip("[]"))
        number = int(port)
        if not colon or not 0 <= number < 2**16:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--listen is {listen!r}: expected an IP address and a port, such as 127.0.0.1:8081"
        ) from None
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key: expected both, or none")
    if not address.is_loopback and certificate is None:
        raise ConfigError(
            f"--listen is {listen}, which others can reach without TLS: give --certificate and"
            " --key, or listen on 127.0.0.1 behind a proxy"
        )
    if ui is None:
        up = find_running_up(settings.state)
        ui = settings.web_ui or (up.ui if up is not None else None)
    if ui is None:
        raise ConfigError(
            "--ui is not given: expected the web UI's address, such as http://127.0.0.1:8233"
        )
    parts = urlsplit(ui)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--ui is {ui!r}: expected the web UI's address, such as http://127.0.0.1:8233"
        )
    origin = f"{parts.scheme}://{parts.netloc}".lower()
    return CodecServerOptions(
        str(address), number, origin, _read_token(settings, token_file), certificate, key
    )


def _read_token(settings: Settings, given: Path | None) -> str:
    path = given or settings.state / TOKEN_FILE
    try:
        if given is None and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        mode = stat.S_IMODE(path.stat().st_mode)
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path} cannot be used: {error}") from None
    if mode & 0o077:
        raise ConfigError(f"token file {path} has mode {mode:04o}, expected 0600")
    if not re.fullmatch(rf"[A-Za-z0-9_-]{{{MIN_TOKEN},200}}", token):
        raise ConfigError(
            f"token file {path}: expected {MIN_TOKEN} to 200 letters, digits, - and _, such as"
            " `openssl rand -hex 32` writes"
        )
    return token


class Converter:
    """Decrypts and encrypts the payloads of requests.

    Args:
        codec: What has the keys.
        say: Called once with each kind of payload that cannot be read.
    """

    def __init__(self, codec: EncryptionCodec, say: Callable[[str], None]) -> None:
        self._codec, self._say = codec, say
        self._reported: set[str] = set()

    def convert(self, word: str, body: bytes) -> object:
        """Return the payloads of a request to `decode` or `encode`, as JSON has them.

        Raises:
            ValueError: The request is none, or has no payloads.
        """
        try:
            payloads = ParseDict(json.loads(body), Payloads()).payloads
        except Exception as error:  # beside ParseError: TypeError of null, SystemError of "\ud800"
            raise ValueError(f"expected JSON payloads: {error}") from None
        if word == "encode":
            made = [self._codec.encrypt(one) for one in payloads]
        elif word == "decode":
            made, left = [], MAX_DECOMPRESSED_BYTES
            for one in payloads:
                made.append(self._decode(one, left))
                left = max(0, left - max(0, len(made[-1].data) - len(one.data)))
        else:
            raise ValueError(f"unknown request {word!r}")
        return MessageToDict(Payloads(payloads=made))

    def _decode(self, payload: Payload, most: int) -> Payload:
        """Return what a payload has; one that cannot be read is returned as it is, and said."""
        try:
            return expand(self._codec.decrypt(payload), most)
        except (ConfigError, ValueError, DecodeError) as error:
            if str(error) not in self._reported and len(self._reported) < MAX_REPORTED:
                self._reported.add(str(error))
                self._say(str(error))
        return payload


class CodecServer(ThreadingHTTPServer):
    """A server that listens.

    Raises:
        ConfigError: It cannot listen there, or its certificate cannot be used.
    """

    daemon_threads = True

    def __init__(
        self, codec: EncryptionCodec, options: CodecServerOptions, say: Callable[[str], None]
    ) -> None:
        self.converter, self.options = Converter(codec, say), options
        if ":" in options.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((options.host, options.port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--listen is {options.host}:{options.port}, which cannot be used: {error.strerror}"
            ) from None
        if options.certificate is not None:
            self._use_certificate(options.certificate, options.key)

    def _use_certificate(self, certificate: Path, key: Path | None) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            self.server_close()
            raise ConfigError(
                f"--certificate {certificate} and --key {key} cannot be used: {error}"
            ) from None
        # The handshake is done by the thread of its connection, which has a time-out.
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a browser that has gone, or a caller without TLS, is no error here."""


def serve(settings: Settings, options: CodecServerOptions, say: Callable[[str], None]) -> None:
    """Serve until a signal ends the process.

    Raises:
        ConfigError: There are no keys, or it cannot listen.
    """
    codec = read_codec(settings)
    if not codec.has_keys:
        raise ConfigError(
            "there are no keys here: set RELAUNCH_ENCRYPTION_KEYS to their folder, as workers have"
        )
    with CodecServer(codec, options, say) as server:
        scheme = "http" if options.certificate is None else "https"
        host = f"[{options.host}]" if ":" in options.host else options.host
        say(f"pages of {options.origin} can have payloads decrypted; in the web UI, open the codec")
        say(f"settings (glasses) and enter {scheme}://{host}:{server.server_port}/{options.token}")
        say("who has this address and the encrypted payloads can read them: treat it as a key")
        server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    server: CodecServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "relaunch-codec", ""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the path has the token."""

    def do_OPTIONS(self) -> None:
        """Answer a browser that asks whether a page may call this server."""
        if self.headers.get("Origin", "").lower() != self.server.options.origin:
            self._answer(HTTPStatus.FORBIDDEN)
            return
        self._answer(HTTPStatus.NO_CONTENT)

    def do_POST(self) -> None:
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() != self.server.options.origin:
            self._answer(HTTPStatus.FORBIDDEN)
            return
        path = urlsplit(self.path).path
        token, _, word = path.removeprefix("/").rpartition("/")
        header = self.headers.get("Authorization", "").removeprefix("Bearer ")
        expected = self.server.options.token.encode()
        # Both are compared: which of them was wrong takes the same time.
        allowed = [
            hmac.compare_digest(one.encode(errors="replace"), expected) for one in (token, header)
        ]
        if not any(allowed):
            self._answer(HTTPStatus.UNAUTHORIZED, {"message": "expected the token"})
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_BODY_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        if word not in ("decode", "encode"):
            self._answer(HTTPStatus.NOT_FOUND)
            return
        try:
            made = self.server.converter.convert(word, self.rfile.read(length))
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, {"message": "expected JSON payloads"})
            return
        self._answer(HTTPStatus.OK, made)

    def _answer(self, status: HTTPStatus, body: object = None) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        if self.headers.get("Origin", "").lower() == self.server.options.origin:
            self.send_header("Access-Control-Allow-Origin", self.headers["Origin"])
            self.send_header("Access-Control-Allow-Methods", "POST")
            self.send_header(
                "Access-Control-Allow-Headers", "Authorization, Content-Type, X-Namespace"
            )
            # Chromium asks before a page of another machine calls this one.
            self.send_header("Access-Control-Allow-Private-Network", "true")
        self.send_header("Vary", "Origin")
        self.send_header("Cache-Control", "no-store")
        if body is not None:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        # What is left of a body that was not read must not be taken for the next request.
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
