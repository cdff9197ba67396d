"""Keys that cannot be used, and an SSH agent that hangs: each is one sentence, and no more."""

from __future__ import annotations

import asyncio
import base64
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relaunch.backends.ssh import identities
from tests.backends.ssh_site import Site, reason, site
from tests.backends.sshd import make_key

__all__ = ["site"]
pytestmark = pytest.mark.asyncio

PATIENCE = 60.0


@contextmanager
def agent_double(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """An SSH agent at `path` that serves each caller, then hangs until the test has ended."""
    callers: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def accept() -> None:
            while True:
                try:
                    callers.append(server.accept()[0])
                except OSError:  # closed: the test has ended
                    return
                serve(callers[-1])

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for caller in callers:
                caller.close()


def text(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def say_nothing(caller: socket.socket) -> None:
    pass


def use_any_key(site: Site, file: Path) -> dict[str, None]:
    """Have the SSH configuration name a key, and return the options of a fleet that names none."""
    site.config.write_text(f"Host *\n  IdentityFile {file}\n")
    return {"key": None}


async def test_an_ssh_agent_that_hangs_holds_up_no_login(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "LISTING", 0.3)
    host, other, path = site.host(), make_key(site.folder / "other"), site.folder / "a.sock"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    with agent_double(path, say_nothing):
        async with asyncio.timeout(PATIENCE):
            options = use_any_key(site, site.key)
            assert (await site.backend(host, options).list("n1"))["outcome"] == "done"
            said = await reason(site.backend(host, use_any_key(site, other)))
    assert said.endswith(f"; the SSH agent at {path} does not answer")


async def test_an_ssh_agent_that_takes_no_caller_holds_up_no_login(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, path = site.host(), site.folder / "a.sock"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as caller:
        full.bind(str(path))
        full.listen(0)
        caller.connect(str(path))
        async with asyncio.timeout(PATIENCE):
            options = use_any_key(site, site.key)
            assert (await site.backend(host, options).list("n1"))["outcome"] == "done"


async def test_a_key_that_can_be_read_needs_no_ssh_agent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, path = site.host(), site.folder / "a.sock"
    asked = threading.Event()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    with agent_double(path, lambda caller: asked.set()):
        async with asyncio.timeout(PATIENCE):
            assert (await site.backend(host).list("n1"))["outcome"] == "done"
    assert not asked.is_set()


async def test_an_ssh_agent_that_never_signs_is_named_and_not_the_node(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "SIGNING", 0.3)
    host, path = site.host(), site.folder / "a.sock"
    locked = make_key(site.folder / "locked", passphrase="open sesame")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    public = locked.with_suffix(".pub").read_text().split()[1]
    listed = b"\x0c" + struct.pack(">I", 1) + text(base64.b64decode(public)) + text(b"a key")
    with agent_double(path, lambda caller: caller.sendall(text(listed))):
        async with asyncio.timeout(PATIENCE):
            said = await reason(site.backend(host, {"key": str(locked)}))
    assert said == f"the SSH agent at {path} does not answer: it was asked to sign the login"
