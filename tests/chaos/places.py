"""The nodes of a world, and how harm comes to them.

Folders and processes of this machine, or hosts with a separate sshd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from relaunch.backends import local, local_power
from relaunch.cli.service import HOST
from relaunch.temporal import read_start_time
from tests.backends.netns import CONTROL, TRAINING, Network
from tests.backends.slow_link import Way, slow_links
from tests.backends.sshd import Sshd, make_key

Lines = list[dict[str, object]]
Prepare = Callable[[str, Path], None]
"""Called with each node's name and its new state folder, before anything runs there."""


class Places(Protocol):
    backend: str
    environment: Mapping[str, str]
    """What the worker needs to reach them, beside its own."""
    within: tuple[str, ...]
    """What the worker is started by, to be where the nodes can be reached from."""
    elsewhere: tuple[str, ...]
    """The same, of another machine that could be the controller's; where there is none, of this
    one."""

    def state(self, name: str) -> Path:
        """A node's state folder."""
        ...

    def described(self) -> tuple[Lines, dict[str, object]]:
        """Each node's own lines of the fleet file, and the file's."""
        ...

    async def serve(self, port: int) -> None:
        """Have the worker find the server at `port` of the worker's loopback."""
        ...

    def sessions(self, name: str, worker: int) -> list[int]: ...

    def cut(
        self, name: str, what: Iterable[str] = local.CUTS, *, freeze_ranks: bool = False
    ) -> None: ...

    def heal(self, name: str) -> None: ...

    def reboot(self, name: str) -> None: ...

    def keep(self, name: str, folder: Path) -> None:
        """Copy what explains a failure."""
        ...

    async def close(self) -> None:
        """End everything that runs on the nodes."""
        ...


class LocalPlaces:
    backend = "local"
    environment: Mapping[str, str] = MappingProxyType({})
    within = elsewhere = ()

    def __init__(
        self, folder: Path, addresses: dict[str, str], prepare: Prepare | None = None
    ) -> None:
        self._folder, self._addresses = folder, addresses
        for name in addresses:
            self.state(name).mkdir(parents=True, mode=0o700)
            if prepare is not None:
                prepare(name, self.state(name))

    def state(self, name: str) -> Path:
        return self._folder / "state" / "nodes" / name

    def described(self) -> tuple[Lines, dict[str, object]]:
        return [{"name": name, "address": address} for name, address in self._addresses.items()], {}

    async def serve(self, port: int) -> None:
        pass

    def sessions(self, name: str, worker: int) -> list[int]:
        wanted = b"RELAUNCH_AGENT_STATE=" + os.fsencode(self.state(name).resolve())
        return [
            pid
            for pid, variables in environments()
            if wanted in variables and parent(pid) == worker
        ]

    def cut(
        self, name: str, what: Iterable[str] = local.CUTS, *, freeze_ranks: bool = False
    ) -> None:
        local.cut(self.state(name), what, freeze_ranks=freeze_ranks)

    def heal(self, name: str) -> None:
        local.heal(self.state(name))

    def reboot(self, name: str) -> None:
        local_power.reboot(self.state(name))

    def keep(self, name: str, folder: Path) -> None:
        copy_state(self.state(name), folder)

    async def close(self) -> None:
        for name in self._addresses:
            self.heal(name)
            self.reboot(name)


class SshPlaces:
    """Hosts on loopback addresses, or each in a separate network.

    Where they share a network, a cut from the controller is an sshd that is stopped (SIGSTOP): it
    answers nothing, in either direction.
    """

    backend = "ssh"
    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        folder: Path,
        addresses: dict[str, str],
        apart: bool = False,
        delay: float = 0.0,
        prepare: Prepare | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`apart`: with a control network and one for training.

        Skips the test where no such can be made. `delay`, of nodes that share a network: each byte
        between controller and nodes comes so many seconds late. `variables`: of the environment of
        everything on a node, by the node's name.
        """
        self._prepare, self._variables = prepare, variables or {}
        self._delay = delay
        self._links = contextlib.ExitStack()
        self.key = make_key(folder / "key")
        self.network = self._make_network(folder, addresses) if apart else None
        self.within: tuple[str, ...] = (
            () if self.network is None else self.network.at(self.network.controllers[0])
        )
        self.elsewhere: tuple[str, ...] = (
            () if self.network is None else self.network.at(self.network.controllers[1])
        )
        self.hosts: dict[str, Sshd] = {}
        self._numbers = {name: number for number, name in enumerate(addresses, 1)}
        self._training: dict[str, str] = {}
        self._relays: list[asyncio.Server] = []
        self._relayed: set[asyncio.Task[None]] = set()
        try:
            for name, address in addresses.items():
                self.hosts[name] = self._host(folder / "hosts" / name, name, address)
        except BaseException:
            self._end()
            raise
        self.known_hosts, self.config = folder / "known_hosts", folder / "ssh_config"
        self.known_hosts.write_text(
            "".join(
                host.known_hosts.replace(host.address, self._near(host))
                for host in self.hosts.values()
            )
        )
        self.config.touch()  # not the configuration of the user who runs this

    def _make_network(self, folder: Path, addresses: dict[str, str]) -> Network:
        return Network(len(addresses), controllers=2)

    def _host(self, folder: Path, name: str, address: str) -> Sshd:
        host = Sshd(folder, address, self.key)
        if self.network is not None:
            number = self._numbers[name]
            host.address, host.port, host.within = (
                f"{CONTROL}.{10 + number}",
                22,
                self.network.inside(number),
            )
            self._training[name] = f"{TRAINING}.{10 + number}"
        host.state.mkdir(mode=0o700)
        if self._prepare is not None:
            self._prepare(name, host.state)
        host.environment.update(self._variables.get(name, {}))
        order = shlex.join(local_power.command(host.state))
        host.program_named("systemctl", f'#!/bin/sh\n[ "$*" = reboot ] && exec {order}\nexit 1\n')
        return host.start()

    def _near(self, host: Sshd) -> str:
        """Where the controller reaches a host."""
        return host.address.replace(".0.", ".1.") if self._delay else host.address

    def state(self, name: str) -> Path:
        return self.hosts[name].state

    def described(self) -> tuple[Lines, dict[str, object]]:
        nodes: Lines = []
        for name, host in self.hosts.items():
            training = {"network": self._training[name]} if self._training else {}
            nodes.append(
                {
                    "name": name,
                    "address": self._near(host),
                    "port": host.port,
                    "network": host.address,
                    **training,
                }
            )
        return nodes, {
            "ssh": {
                "key": str(self.key),
                "known_hosts": str(self.known_hosts),
                "config": str(self.config),
            }
        }

    async def serve(self, port: int) -> None:
        if self._delay:
            ways = [
                Way((self._near(host), host.port), (host.address, host.port))
                for host in self.hosts.values()
            ]
            self._links.enter_context(slow_links(ways, self._delay))
        if self.network is None:
            return

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._pass_on(reader, writer, port))
            self._relayed.add(task)
            task.add_done_callback(self._relayed.discard)

        for controller in (1, 2):
            self._relays.append(
                await asyncio.start_server(accept, sock=self.network.listener(port, controller))
            )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, port)
        except OSError:  # the server is away: so it is for the worker
            writer.close()
            return
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()

    def sessions(self, name: str, worker: int) -> list[int]:
        servers = set(self.hosts[name].servers())
        # What they have forked has the same words, up to the shims.
        return [
            pid
            for pid, _ in environments()
            if b"session" in words_of(pid) and parent(pid) in servers
        ]

    def cut(
        self, name: str, what: Iterable[str] = local.CUTS, *, freeze_ranks: bool = False
    ) -> None:
        ways, number = set(what), self._numbers[name]
        if self.network is not None:
            if "controller-in" in ways:
                self.network.lose(number)
            elif "controller-out" in ways:
                self.network.lose_answers(number)
            if "peers" in ways:
                self.network.lose(number, "training")
            return
        if ways & {"controller-in", "controller-out"}:
            self.hosts[name].signal(signal.SIGSTOP)
        # Ranks of one network cannot be parted otherwise: the agent drops its peers, and ranks that
        # stand still say nothing to theirs.
        local.cut(self.state(name), ways & {"peers"}, freeze_ranks=freeze_ranks)

    def heal(self, name: str) -> None:
        if self.network is not None:
            self.network.heal(self._numbers[name])
            self.network.heal(self._numbers[name], "training")
        self.hosts[name].signal(signal.SIGCONT)
        local.heal(self.state(name))
        if self.hosts[name].process is None:
            self.hosts[name].start()

    def reboot(self, name: str) -> None:
        self.hosts[name].kill()
        local_power.reboot(self.state(name))
        self.hosts[name].start()

    def keep(self, name: str, folder: Path) -> None:
        copy_state(self.state(name), folder)
        shutil.copy(self.hosts[name].log, folder / "sshd.log")

    async def close(self) -> None:
        for relay in self._relays:
            relay.close()
        for task in tuple(self._relayed):
            task.cancel()
        await asyncio.gather(*self._relayed, return_exceptions=True)
        self._end()

    def _end(self) -> None:
        self._links.close()
        for name, host in self.hosts.items():
            host.signal(signal.SIGCONT)
            local.heal(self.state(name))
            host.close()
        if self.network is not None:
            self.network.close()


def copy_state(state: Path, folder: Path) -> None:
    shutil.copytree(
        state,
        folder,
        ignore=lambda where, names: [
            name for name in names if name in ("sock", "orders", "agents")
        ],
    )


def environments() -> list[tuple[int, list[bytes]]]:
    """Living processes that we may look into, with their variables."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
                if read_start_time(int(entry)) is not None:
                    found.append((int(entry), variables))
    return found


def words_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
