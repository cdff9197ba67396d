"""Fleets to hold the contract against.

What ranks shall do is said once, and each kind of backend is made to do it.
"""

from __future__ import annotations

import getpass
import json
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from relaunch.backends import local_power
from relaunch.backends.base import Backend
from relaunch.backends.local import LIBRARIES, LocalBackend, cut, heal, reboot
from relaunch.backends.ssh.backend import SshBackend
from relaunch.generation import Token
from relaunch.spec.fleet import FleetSpec
from tests.backends.sshd import DEFAULT, Kind, Sshd, make_key
from tests.doubles.install import build_nvml, install_nvml, tell_nvml
from tests.fakes.nodes import (
    DiagHangs,
    Exit,
    Prints,
    Progress,
    Refuse,
    ResetFails,
    Script,
    SimulatedBackend,
    Stranger,
    Takes,
    error_file,
)
from tests.fakes.nodes.health import diagnosed
from tests.fakes.nodes.script import Happening


@dataclass(frozen=True)
class Does:
    """What every rank of a generation does, in this order; it runs for ever unless it exits."""

    prints: str = ""
    step: int | None = None
    error: str | None = None
    """Written into the error file of the ranks that exit."""
    exits: Mapping[int, int] | None = None
    """Exit code by rank; a negative one is a signal."""
    refused: str | None = None
    """Its start is refused for this."""


RUNS = Does()
PATIENT = 30.0
"""Seconds within which a node answers, however busy the machine is."""


@dataclass(frozen=True)
class Tools:
    """What the programs for GPUs do on every node, which has one GPU then.

    Where there are no `Tools`, a node has neither.
    """

    diag: Literal["passes", "hangs"] = "passes"
    diag_takes: float = 0.0
    reset: int = 0
    """Exit code of `nvidia-smi --gpu-reset`."""


class Fleet(Protocol):
    backend: Backend
    stamps: dict[tuple[str, Token], float]
    """What each node answered when it was prepared, for `start`."""

    def command(self, generation: int) -> tuple[str, ...]: ...

    def workdir(self, generation: int) -> str | None: ...

    def cut(self, node: str) -> None: ...

    def heal(self, node: str) -> None: ...

    def reboot(self, node: str) -> None: ...

    def visit(self, node: str) -> int:
        """Have a foreign program compute on GPU 0 before the node is asked; return its pid."""
        ...

    def leave(self, node: str) -> None:
        """Let it end."""
        ...

    def again(self, answer_within: float = PATIENT) -> Backend:
        """Return another controller's backend for the same nodes.

        Args:
            answer_within: Seconds for an answer, where a real node is asked.
        """
        ...

    async def close(self) -> None: ...


def spec(kind: str, nodes: int, gpus: int = 0) -> FleetSpec:
    named = [
        {"name": f"n{number}", "address": f"127.0.0.{number}", "gpus": gpus}
        for number in range(1, nodes + 1)
    ]
    return FleetSpec.model_validate({"name": "contract", "backend": kind, "nodes": named})


class SimulatedFleet:
    def __init__(self, does: Mapping[int, Does], nodes: int, tools: Tools | None = None) -> None:
        self.stamps: dict[tuple[str, Token], float] = {}
        self.spec = spec("simulated", nodes, 0 if tools is None else 1)
        script = Script(
            (*self._happenings(does), *(() if tools is None else self._of_tools(tools)))
        )
        self.simulated = SimulatedBackend(self.spec, script)
        self.backend: Backend = self.simulated

    @staticmethod
    def _of_tools(tools: Tools) -> list[Happening]:
        found: list[Happening] = [Takes(command="diagnose", seconds=tools.diag_takes)]
        if tools.diag == "hangs":
            found.append(DiagHangs())
        if tools.reset:
            found.append(ResetFails(exit_code=tools.reset))
        return found

    @staticmethod
    def _happenings(does: Mapping[int, Does]) -> list[Happening]:
        found: list[Happening] = []
        for generation, one in does.items():
            if one.prints:
                found.append(Prints(generation=generation, text=one.prints))
            if one.step is not None:
                found.append(Progress(generation=generation, steps=((0.0, one.step),)))
            if one.refused is not None:
                found.append(Refuse(generation=generation, command="start", why=one.refused))
            for rank, code in (one.exits or {}).items():
                error = None if one.error is None else error_file(one.error)
                signal = -code if code < 0 else None
                found.append(
                    Exit(
                        generation=generation, rank=rank, exit_code=code, signal=signal, error=error
                    )
                )
        return found

    def command(self, generation: int) -> tuple[str, ...]:
        return ("train",)

    def workdir(self, generation: int) -> str | None:
        return None

    def cut(self, node: str) -> None:
        self.simulated.cut(node)

    def heal(self, node: str) -> None:
        self.simulated.heal(node)

    def reboot(self, node: str) -> None:
        self.simulated.lose_power(node)

    def visit(self, node: str) -> int:
        self.simulated.visit(
            node, Stranger(gpu=0, pid=4242, user=getpass.getuser(), program="sleep")
        )
        return 4242

    def leave(self, node: str) -> None:
        self.simulated.leave(node)

    def again(self, answer_within: float = PATIENT) -> Backend:
        return SimulatedBackend(self.spec, other=self.simulated)

    async def close(self) -> None:
        await self.backend.close()


class RealRanks:
    """What a rank does, as a program of the shell."""

    does: Mapping[int, Does]
    state: Path
    visitors: list[subprocess.Popen[bytes]]

    def libraries(self, node: str) -> Path:
        """Where the node finds its libnvidia-ml.so.1."""
        raise NotImplementedError

    def visit(self, node: str) -> int:
        self.visitors.append(subprocess.Popen(["sleep", "600"]))
        pid = self.visitors[-1].pid
        install_nvml(
            self.libraries(node),
            build_nvml(self.state / "nvml"),
            f"driver 570\ngpus 1\nprocess 0 {pid} 1000\n",
        )
        return pid

    def leave(self, node: str) -> None:
        tell_nvml(self.libraries(node), "driver 570\ngpus 1\n")
        self.send_visitors_away()

    def send_visitors_away(self) -> None:
        for one in self.visitors:
            one.kill()
            one.wait()
        self.visitors.clear()

    def command(self, generation: int) -> tuple[str, ...]:
        does = self.does[generation]
        if does.refused == "command_not_found":
            return ("no-such-program-anywhere",)
        lines = []
        if does.prints:
            lines.append(f"printf %s {shlex.quote(does.prints)}")
        if does.step is not None:
            lines.append(f'echo {does.step} > "$RELAUNCH_PROGRESS_FILE"')
        for rank, code in (does.exits or {}).items():
            end = f"kill -{-code} $$" if code < 0 else f"exit {code}"
            if does.error is not None:
                end = (
                    f"printf %s {shlex.quote(json.dumps(error_file(does.error)))} > "
                    f'"$TORCHELASTIC_ERROR_FILE"; {end}'
                )
            lines.append(f'if [ "$RANK" = {rank} ]; then {end}; fi')
        return ("/bin/sh", "-c", "\n".join([*lines, "exec sleep 600"]))

    def workdir(self, generation: int) -> str | None:
        return (
            str(self.state / "nowhere")
            if self.does[generation].refused == "workdir_missing"
            else None
        )


class LocalFleet(RealRanks):
    def __init__(
        self,
        does: Mapping[int, Does],
        nodes: int,
        folder: Path,
        agent: Path,
        tools: Tools | None = None,
    ) -> None:
        self.does = does
        self.stamps: dict[tuple[str, Token], float] = {}
        self.spec = spec("local", nodes, 0 if tools is None else 1)
        self.state = folder
        self.agent = agent
        self.opened: list[LocalBackend] = []
        self.visitors = []
        self.local = self.again()
        self.backend: Backend = self.local
        if tools is not None:
            for node in self.spec.nodes:
                _install(tools, self.local.folder(node.name) / "bin")

    def again(self, answer_within: float = PATIENT) -> LocalBackend:
        self.opened.append(LocalBackend(self.spec, self.state, self.agent, answer_within))
        return self.opened[-1]

    def libraries(self, node: str) -> Path:
        return self.local.folder(node) / LIBRARIES

    def cut(self, node: str) -> None:
        cut(self.local.folder(node))

    def heal(self, node: str) -> None:
        heal(self.local.folder(node))

    def reboot(self, node: str) -> None:
        reboot(self.local.folder(node))

    async def close(self) -> None:
        self.send_visitors_away()
        for node in self.spec.nodes:
            if self.local.folder(node.name).is_dir():
                heal(self.local.folder(node.name))
                reboot(self.local.folder(node.name))
        for backend in self.opened:
            await backend.close()


class SshFleet(RealRanks):
    """Nodes that are SSH servers on loopback.

    They share a kernel, so that a reboot ends their processes and changes their boot id.
    """

    def __init__(
        self,
        does: Mapping[int, Does],
        nodes: int,
        folder: Path,
        agent: Path,
        tools: Tools | None = None,
        server: Kind = DEFAULT,
    ) -> None:
        self.does = does
        self.stamps: dict[tuple[str, Token], float] = {}
        self.state = folder
        self.agent = agent
        self.opened: list[SshBackend] = []
        self.visitors = []
        key = make_key(folder / "key")
        self.hosts = {
            f"n{number}": Sshd(folder / f"n{number}", f"127.0.0.{number}", key, server=server)
            for number in range(1, nodes + 1)
        }
        for host in self.hosts.values():
            if tools is not None:
                _install(tools, host.bin)
            order = local_power.command(host.state)
            host.program_named(
                "systemctl", f'#!/bin/sh\n[ "$*" = reboot ] && exec {shlex.join(order)}\nexit 1\n'
            )
            host.start()
        known = folder / "known_hosts"
        known.write_text("".join(host.known_hosts for host in self.hosts.values()))
        named = [
            {
                "name": name,
                "address": host.address,
                "port": host.port,
                "gpus": 0 if tools is None else 1,
            }
            for name, host in self.hosts.items()
        ]
        # Not the keys and configuration of the user who runs the tests.
        config = folder / "ssh_config"
        config.touch()
        ssh = {"key": str(key), "known_hosts": str(known), "config": str(config)}
        self.spec = FleetSpec.model_validate(
            {"name": "contract", "backend": "ssh", "nodes": named, "ssh": ssh}
        )
        self.backend: Backend = self.again()

    def again(self, answer_within: float = PATIENT) -> SshBackend:
        self.opened.append(SshBackend(self.spec, self.agent, answer_within))
        return self.opened[-1]

    def libraries(self, node: str) -> Path:
        return self.state / node / "lib"

    def cut(self, node: str) -> None:
        self.hosts[node].signal(signal.SIGSTOP)

    def heal(self, node: str) -> None:
        self.hosts[node].signal(signal.SIGCONT)

    def reboot(self, node: str) -> None:
        self.hosts[node].kill()
        reboot(self.hosts[node].state)
        self.hosts[node].start()

    async def close(self) -> None:
        self.send_visitors_away()
        for node in self.hosts:
            self.heal(node)
        for backend in self.opened:
            await backend.close()
        for host in self.hosts.values():
            host.close()


SSH_FLEETS: dict[str, Callable[..., SshFleet]] = {"ssh": SshFleet}
"""Fleets by the parameter that names them: with both servers where OpenSSH's is installed."""
if DEFAULT != "asyncssh":
    SSH_FLEETS["ssh-asyncssh"] = partial(SshFleet, server="asyncssh")


def _install(tools: Tools, folder: Path) -> None:
    """Write programs that take the place of NVIDIA's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "passed.json").write_text(diagnosed(1, 1, ())[1])
    wait = "exec sleep 600" if tools.diag == "hangs" else f"sleep {tools.diag_takes}"
    said = "All done." if tools.reset == 0 else "GPU Reset couldn't run because GPU is in use"
    lines = {
        "dcgmi": f"{wait}\ncat {shlex.quote(str(folder / 'passed.json'))}",
        "nvidia-smi": f'echo "{said}"\nexit {tools.reset}',
    }
    for name, text in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
