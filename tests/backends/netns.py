"""Nodes and their controller in separate network namespaces; needs root.

Links go down, and packets get lost.

Nothing of it touches the machine's own network: the switch between them is in a namespace, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
COUNTED = itertools.count()
"""Each network of a process has unique names."""
CONTROL, TRAINING = "10.99.0", "10.98.0"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def run_in_network(namespace: Path, call: Callable[[], T]) -> T:
    """Call where the network is that of `namespace`.

    In a thread, whose network is separate, and that of those it starts.
    """
    done: Future[T] = Future()

    def enter() -> None:
        handle = os.open(namespace, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)
        finally:
            os.close(handle)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return done.result()


class Network:
    """Controllers at 10.99.0.1 and on, and `nodes` from 10.99.0.11 on.

    Those are at 10.98.0.11 and on for each other as well.
    """

    def __init__(self, nodes: int, controllers: int = 1) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and iproute2")
        self.tag = f"rl{os.getpid()}x{next(COUNTED)}"
        self.nodes = [f"{self.tag}n{number}" for number in range(1, nodes + 1)]
        self.controllers = [f"{self.tag}c{number}" for number in range(1, controllers + 1)]
        self.controller, self.switch = self.controllers[0], f"{self.tag}s"
        self.made: list[str] = []
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"no network namespaces can be made here: {error.stderr.strip()}")

    def _make(self) -> None:
        for name in (self.switch, *self.controllers, *self.nodes):
            ip("netns", "add", name)
            self.made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        for bridge in ("control", "training"):
            ip("-n", self.switch, "link", "add", "name", bridge, "type", "bridge")
            ip("-n", self.switch, "link", "set", bridge, "up")
        for number, name in enumerate(self.controllers, 1):
            self._plug(name, "control", f"{CONTROL}.{number}", f"d{number}")
        for number, name in enumerate(self.nodes, 1):
            self._plug(name, "control", f"{CONTROL}.{10 + number}", f"c{number}")
            self._plug(name, "training", f"{TRAINING}.{10 + number}", f"t{number}")

    def _plug(self, name: str, bridge: str, address: str, port: str) -> None:
        ip(
            "-n",
            self.switch,
            "link",
            "add",
            "name",
            port,
            "type",
            "veth",
            "peer",
            "name",
            bridge,
            "netns",
            name,
        )
        ip("-n", self.switch, "link", "set", port, "master", bridge, "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", bridge)
        ip("-n", name, "link", "set", bridge, "up")

    def inside(self, number: int) -> tuple[str, ...]:
        """What a program is started by to be on a node."""
        return self.at(self.nodes[number - 1])

    @staticmethod
    def at(name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", name)

    def lose(self, number: int, network: str = "control") -> None:
        """Every packet of the node's control (or training) network silently gets lost from now."""
        ip("-n", self.switch, "link", "set", f"{network[0]}{number}", "nomaster")

    def heal(self, number: int, network: str = "control") -> None:
        ip("-n", self.switch, "link", "set", f"{network[0]}{number}", "master", network, "up")
        subprocess.run(
            [
                "ip",
                "-n",
                self.nodes[number - 1],
                "neigh",
                "flush",
                "dev",
                network,
                "nud",
                "permanent",
            ],
            capture_output=True,
        )

    def lose_answers(self, number: int) -> None:
        """What the node sends to the controller gets lost; what it is sent arrives."""
        ip(
            "-n",
            self.nodes[number - 1],
            "neigh",
            "replace",
            f"{CONTROL}.1",
            "lladdr",
            "02:00:00:00:00:99",
            "nud",
            "permanent",
            "dev",
            "control",
        )

    def part(self, number: int, other: int) -> None:
        """What a node sends to another over the training network gets lost, and nothing else."""
        inside = ("-n", self.nodes[number - 1])
        wrong = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "training")
        ip(*inside, "neigh", "replace", f"{TRAINING}.{10 + other}", *wrong)

    def unplug(self, number: int) -> None:
        ip("-n", self.switch, "link", "set", f"c{number}", "down")

    def plug(self, number: int) -> None:
        ip("-n", self.switch, "link", "set", f"c{number}", "up")

    def unplug_controller(self, number: int = 1) -> None:
        """Take its machine away without notice: no connection of it ends."""
        ip("-n", self.switch, "link", "set", f"d{number}", "down")

    def plug_controller(self, number: int = 1) -> None:
        ip("-n", self.switch, "link", "set", f"d{number}", "up")

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine where the controller is."""
        return self._there(lambda: asyncio.run(work()))

    def listener(self, port: int, controller: int = 1) -> socket.socket:
        """A socket on loopback where a controller is. Any process may accept."""
        return self._there(lambda: socket.create_server(("127.0.0.1", port)), controller)

    def _there(self, call: Callable[[], T], controller: int = 1) -> T:
        return run_in_network(Path("/run/netns", self.controllers[controller - 1]), call)

    def close(self) -> None:
        for name in self.made:
            ip("netns", "del", name)
