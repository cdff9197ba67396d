"""What the tests of the backend `ssh` share.

Servers, the files that a user has, and backends over them.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import pytest_asyncio

from relaunch.backends.base import Unreachable
from relaunch.backends.ssh.backend import SshBackend
from relaunch.spec.fleet import FleetSpec
from tests.backends.sshd import DEFAULT, Kind, Sshd, make_key


class Site:
    def __init__(self, folder: Path, agent: Path, server: Kind = DEFAULT) -> None:
        self.server = server
        self.folder = folder
        self.agent = agent
        self.key = make_key(folder / "user key" / "id")
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.touch()
        self.config = folder / "ssh_config"
        self.config.touch()
        self.hosts: list[Sshd] = []
        self.backends: list[SshBackend] = []

    def host(self, start: bool = True, known: bool = True, **more: Any) -> Sshd:
        number = len(self.hosts) + 1
        folder, address = self.folder / f"host{number}", f"127.0.0.{10 + number}"
        host = Sshd(folder, address, self.key, server=self.server, **more)
        self.hosts.append(host)
        if known:
            self.know(host.known_hosts)
        return host.start() if start else host

    def know(self, lines: str) -> None:
        with self.known_hosts.open("a") as file:
            file.write(lines)

    def spec(self, host: Sshd | None, ssh: dict[str, Any] | None = None, **node: Any) -> FleetSpec:
        place = {} if host is None else {"address": host.address, "port": host.port}
        options = {
            "key": str(self.key),
            "known_hosts": str(self.known_hosts),
            "config": str(self.config),
            **(ssh or {}),
        }
        options = {name: value for name, value in options.items() if value is not None}
        return FleetSpec.model_validate(
            {
                "name": "lab",
                "backend": "ssh",
                "nodes": [{"name": "n1", **place, **node}],
                "ssh": options,
            }
        )

    def backend(
        self,
        host: Sshd | None,
        ssh: dict[str, Any] | None = None,
        answer_within: float = 30.0,
        **node: Any,
    ) -> SshBackend:
        """A fleet with the node n1 alone, which answers within `answer_within` under load."""
        self.backends.append(SshBackend(self.spec(host, ssh, **node), self.agent, answer_within))
        return self.backends[-1]

    async def close(self) -> None:
        for backend in self.backends:
            await backend.close()
        for host in self.hosts:
            host.close()


async def reason(backend: SshBackend) -> str:
    """Why n1 does not answer."""
    with pytest.raises(Unreachable) as refused:
        await backend.list("n1")
    assert refused.value.node == "n1"
    return refused.value.reason


def own_fingerprint(public: str) -> str:
    """Return it as OpenSSH's tool prints it, or asyncssh where that is not installed."""
    if shutil.which("ssh-keygen") is None:
        return asyncssh.import_public_key(public).get_fingerprint()
    return subprocess.run(
        ["ssh-keygen", "-lf", "-"], input=public, capture_output=True, text=True, check=True
    ).stdout.split()[1]


@contextmanager
def listener(
    serve: Callable[[socket.socket], None], backlog: int = 16
) -> Iterator[tuple[str, int]]:
    """Something that listens and is no sshd.

    Each connection is served in turn, until the test ends.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)

        def accept() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:  # closed: the test has ended
                    return
                with caller:
                    serve(caller)

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


def python_double(host: Sshd, program: str) -> None:
    """A double of the node's python3: runs `program` instead of what it is given.

    With the real one.
    """
    path = host.folder / "double.py"
    path.write_text(program)
    host.program_named(
        "python3", f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(str(path))}\n"
    )


@pytest_asyncio.fixture
async def site(tmp_path: Path, agent: Path, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Servers of the default kind, or of the one that the test is parametrized with."""
    site = Site(tmp_path, agent, getattr(request, "param", DEFAULT))
    yield site
    await site.close()
