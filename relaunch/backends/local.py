"""The backend for nodes on this machine, for laptops, tests and the demo.

Each node is a state folder, a loopback address and a name.

The nodes share a kernel and a network, so `cut`, `heal` and `reboot` here simulate the loss of a
node's network, a freeze or a reboot.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relaunch.backends import cores, local_power, py_spy
from relaunch.backends.base import PROTOCOL
from relaunch.backends.local_power import processes_of, reboot, signal_all
from relaunch.backends.pipe import ProcessPipe
from relaunch.backends.session import ANSWER_TIMEOUT
from relaunch.backends.sessions import SessionBackend
from relaunch.spec.fleet import FleetSpec

__all__ = [
    "CUTS",
    "KERNEL_LOG",
    "LIBRARIES",
    "PROGRAMS",
    "SYSTEM",
    "LocalBackend",
    "cut",
    "heal",
    "reboot",
]

CUTS = ("controller-in", "controller-out", "peers")
CUT = "cut"
"""The file in a node's folder that exists while the node is cut off. It lists which of `CUTS`
apply, one on each line."""

KERNEL_LOG = "kernel.log"
"""The file in a node's folder that the node reads as its kernel log, if it exists. All nodes of one
machine share one kernel, whose log cannot say which of them a line concerns."""

SYSTEM = "sys/class"
"""The folder in a node's folder in which the node looks for network cards, if it exists."""


PROGRAMS, LIBRARIES = "bin", "lib"
"""The folders in a node's folder that the node searches first, if they exist, for its tools (dcgmi,
nvidia-smi) and for libnvidia-ml.so.1."""


START_TIMEOUT = 30.0
"""Seconds for an agent to start. It is a process of this machine, so a slow start means that the
machine is busy, unless the node is cut off."""


class LocalBackend(SessionBackend):
    silence_breaks = False
    """A session that lost a line to a cut breaks by itself when the cut is healed. A new process
    would be cut off as well."""

    def __init__(
        self, spec: FleetSpec, state: Path, agent: Path, answer_within: float = ANSWER_TIMEOUT
    ) -> None:
        super().__init__(spec, answer_within)
        self._state = state.resolve()
        self._agent = agent.resolve()

    def folder(self, node: str) -> Path:
        """Return the node's state folder."""
        return self._state / "nodes" / node

    async def list(self, node: str, gpus: bool = False) -> Mapping[str, Any]:
        if (
            not gpus
            and node not in self._sessions
            and not any((self.folder(node) / name).exists() for name in ("jobs", CUT, "held.json"))
        ):
            # Nothing ever ran there. Starting a session to learn that costs 0.2 s of a core,
            # sixteen times on a new laptop.
            return {
                "outcome": "done",
                "protocol": PROTOCOL,
                "boot_id": "",
                "jobs": [],
                "held": None,
            }
        return await super().list(node, gpus)

    def _start_timeout(self, name: str) -> float:
        usual = super()._start_timeout(name)
        return usual if (self.folder(name) / CUT).exists() else max(usual, START_TIMEOUT)

    async def _connect(self, name: str) -> ProcessPipe:
        folder = self.folder(name)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("RELAUNCH_", "TEMPORAL_"))
        }
        kernel_log = folder / KERNEL_LOG
        if kernel_log.exists():
            environment["RELAUNCH_KERNEL_LOG"] = str(kernel_log)
        system = folder / SYSTEM
        if system.is_dir():
            environment["RELAUNCH_SYS_CLASS"] = str(system)
        environment["RELAUNCH_REBOOT_COMMAND"] = json.dumps(local_power.command(folder))
        for own, variable in ((folder / PROGRAMS, "PATH"), (folder / LIBRARIES, "LD_LIBRARY_PATH")):
            if own.is_dir():
                environment[variable] = os.pathsep.join(
                    filter(None, (str(own), environment.get(variable)))
                )
        program = py_spy.find_program()
        if program is not None:  # on this machine, so that it need not be sent to each node
            environment["RELAUNCH_PY_SPY"] = str(program)
        if (limit := cores.read_given_limit()) is not None:
            environment["RELAUNCH_CORE_LIMIT"] = str(limit)
        environment["RELAUNCH_AGENT_STATE"] = str(folder)
        # The worker's own folder, where people want it: it is as safe as the worker itself.
        environment["RELAUNCH_AGENT_TRUSTED_FOLDER"] = str(self._state)
        return await ProcessPipe.start(sys.executable, str(self._agent), "session", env=environment)


# --- faults that separate machines have by themselves -------------------------------------------


def cut(folder: Path, what: Iterable[str] = CUTS, *, freeze_ranks: bool = False) -> None:
    """Cut off the node whose state is in `folder`, until `heal`.

    Args:
        what: Any of `CUTS`; only one of the controller's two directions is a one-way cut.
        freeze_ranks: Also stop (SIGSTOP) its ranks: their sockets stay open and silent, as behind a
            dead switch.
    """
    words = tuple(what)
    if unknown := set(words) - set(CUTS):
        raise ValueError(
            f"{', '.join(sorted(unknown))}: not a cut; one or more of {', '.join(CUTS)}"
        )
    temporary = folder / f".cut.{uuid.uuid4().hex}"
    temporary.write_text("\n".join(words) + "\n")
    temporary.rename(folder / CUT)
    if freeze_ranks:
        signal_all(processes_of(folder, b"RELAUNCH_NODE_STATE"), signal.SIGSTOP)


def heal(folder: Path) -> None:
    (folder / CUT).unlink(missing_ok=True)
    signal_all(processes_of(folder, b"RELAUNCH_NODE_STATE"), signal.SIGCONT)
