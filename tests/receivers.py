"""Real receivers of notices: an HTTP server, and a mail server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller

from tests import planted


@dataclass
class Webhook:
    """An HTTP server that keeps what it gets."""

    url: str = ""
    status: int = 200
    hangs: threading.Event = field(default_factory=threading.Event)
    """Set: it answers no request until it is cleared or the receiver ends."""
    over: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    """Headers and body, in the order of their arrival; of a GET the body is empty."""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]

    @property
    def notices(self) -> list[dict[str, Any]]:
        return [notice for body in self.bodies for notice in body["notices"]]


@contextmanager
def webhook(status: int = 200, hangs: bool = False) -> Iterator[Webhook]:
    received = Webhook(status=status)
    if hangs:
        received.hangs.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            received.requests.append((dict(self.headers), body))
            while received.hangs.is_set() and not received.over.wait(0.05):
                pass
            if not received.over.is_set():
                self.send_response(received.status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield received
    finally:
        received.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
    for headers, body in received.requests:
        planted.check("a notice", str(headers).encode() + body)


def find_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class _Mailbox:
    def __init__(self, refused: str, together: threading.Barrier | None) -> None:
        self.mails: list[bytes] = []
        self._refused = refused
        self._together = together

    async def handle_RCPT(
        self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
    ) -> str:
        if address == self._refused:
            if self._together is not None:
                await asyncio.to_thread(self._together.wait)
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 go on"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:
        self.mails.append(envelope.content)
        return "250 kept"


@contextmanager
def mail_server(
    port: int, refused: str = "", together: threading.Barrier | None = None
) -> Iterator[list[bytes]]:
    """Serve SMTP on a port; yield the mails, as they arrive.

    Args:
        port: The port.
        refused: The address of a mailbox that it does not have.
        together: It says so once others that share this do so, too.
    """
    mailbox = _Mailbox(refused, together)
    controller = Controller(mailbox, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield mailbox.mails
    finally:
        controller.stop()
    for mail in mailbox.mails:
        planted.check("a mail", mail)
