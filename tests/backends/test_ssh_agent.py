"""Keys that cannot be used, and an SSH agent that hangs: each is one sentence, and no more."""

from __future__ import annotations

import asyncio
import base64
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relaunch.backends.base import Unreachable
from relaunch.backends.ssh import backend as ssh_backend
from relaunch.backends.ssh import connection, identities
from relaunch.backends.ssh.trust import host_key
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


def make_token_key(file: Path) -> Path:
    """Make the private key file of a hardware token, as `ssh-keygen -t ed25519-sk` does."""
    kind, key, place = text(b"sk-ssh-ed25519@openssh.com"), text(bytes(range(32))), text(b"ssh:")
    held = b"7777" * 2 + kind + key + place + b"\1" + text(b"handle") + text(b"") + text(b"mine")
    held += bytes(range(1, 1 + -len(held) % 8))
    none = text(b"none")
    head = b"openssh-key-v1\0" + none + none + text(b"") + struct.pack(">I", 1)
    body = base64.encodebytes(head + text(kind + key + place) + text(held)).decode()
    file.write_text(
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{body}-----END OPENSSH PRIVATE KEY-----\n"
    )
    file.chmod(0o600)
    if shutil.which("ssh-keygen") is not None:
        run = subprocess.run(["ssh-keygen", "-yf", str(file)], capture_output=True, check=True)
        assert run.stdout.startswith(b"sk-ssh-ed25519@openssh.com "), "OpenSSH reads it"
    return file


async def test_a_key_of_a_hardware_token_is_passed_over(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    host, token = site.host(), make_token_key(site.folder / "token")
    said = await reason(site.backend(host, {"key": str(token)}))
    assert f"; {token} is of a kind that relaunch cannot use: " in said
    site.config.write_text(f"Host *\n  IdentityFile {token}\n  IdentityFile {site.key}\n")
    assert (await site.backend(host, {"key": None}).list("n1"))["outcome"] == "done"


async def test_an_error_that_nothing_expects_is_of_one_node(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(hop: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(connection, "identities", fail)
    monkeypatch.setattr(ssh_backend, "BACKOFF", (600.0, 600.0))
    monkeypatch.setattr(ssh_backend, "QUICK", 600.0)
    host, jump = site.host(), site.host()
    said = "the login failed in a way that relaunch does not know: ZeroDivisionError: a defect"
    backend = site.backend(host)
    assert await reason(backend) == said
    assert await reason(backend) == said, "the node is in backoff"
    spec = site.spec(host, {"proxy_jump": f"{jump.address}:{jump.port}"})
    with pytest.raises(Unreachable) as refused:
        await host_key(spec, spec.nodes[0])
    assert refused.value.reason == said
    assert caplog.text.count("ZeroDivisionError: a defect") == 2
