"""Two virtual machines under `relaunch up`, and the command line as a person types it.

The fleet file names the machines.

Nothing here speaks to relaunch but through starter.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.doubles.install import build_nvml, tell_nvml
from tests.fakes.nodes import Sick
from tests.fakes.nodes.health import diagnosed
from tests.vm.image import ROOT, image
from tests.vm.machine import ENDS_WITH_US, Machine

FLEET = "lab"
RANK = ["/usr/bin/python3", "-S", "/opt/doubles/rank.py", "/home/train/run", "--step-time", "1"]
"""Steps of a second: a processor that is emulated beside others is not for more."""
POLICY = {
    "extends": "ecs-reboot-once",
    "causes": {
        "UNKNOWN": [
            {"strategy": "REBOOT_NODE", "when": "UNHEALTHY", "tries": 1},
            {"strategy": "FAIL"},
        ]
    },
    # An emulated machine that shares its core with a build needs seconds for what a real one does
    # in milliseconds.
    "timeouts": {
        "heartbeat": "5s",
        "lease": "60s",
        "lost_after": "60s",
        "fence_after": "30s",
        "reboot": "10m",
    },
}
ANSWER_TIMEOUT = 60
"""Seconds that the worker gives a node for an answer, for the same reason."""

LOOKED_EVERY = 3.0
"""Seconds: a command of relaunch takes as much of the processor as the machines have too little of.
"""

Found = TypeVar("Found")


def eventually(
    what: Callable[[], Found | None], why: str, within: float, pause: float = LOOKED_EVERY
) -> Found:
    deadline = time.monotonic() + within
    while not (found := what()):
        assert time.monotonic() < deadline, f"{why} within {within:g} s"
        time.sleep(pause)
    return found


class Lab:
    def __init__(self) -> None:
        # Short: sockets lie in it.
        self.folder = Path(tempfile.mkdtemp(prefix="relaunch-vm-"))
        doubles, key = self.folder / "doubles", self.folder / "key"
        build_nvml(doubles)
        tell_nvml(doubles, "driver 570.124.06\ngpus 1\n")
        for name, sick in (("sick", (Sick(remap_pending=0),)), ("healthy", ())):
            exit_code, stdout = diagnosed(1, 2, sick)
            (doubles / f"{name}.json").write_text(
                json.dumps({"exit_code": exit_code, "stdout": stdout})
            )
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        self.machines = [
            Machine(f"vm{number}", number, self.folder, image(), key, doubles) for number in (1, 2)
        ]
        self.state = self.folder / "state"
        self.times: list[tuple[str, list[tuple[str, float]]]] = []
        self._up: subprocess.Popen[bytes] | None = None
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RELAUNCH_", "TEMPORAL_"))
        }
        self._environment.update(
            RELAUNCH_STATE=str(self.state), RELAUNCH_ANSWER_WITHIN=str(ANSWER_TIMEOUT)
        )

    def __enter__(self) -> Lab:
        try:
            began = time.monotonic()
            for machine in self.machines:
                machine.start()
            booted = [(machine.name, machine.until(True) - began) for machine in self.machines]
            self.times.append(("both machines boot, at once", booted))
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.end()
        if self._up is not None:
            self._up.send_signal(signal.SIGTERM)
            self._up.wait(30)
        if "RELAUNCH_VM_KEEP" not in os.environ:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        nodes = [
            {
                "name": machine.name,
                "address": machine.address,
                "port": machine.port,
                "network": machine.network,
                "gpus": 1,
                "power": {"cycle": machine.cycle_command},
            }
            for machine in self.machines
        ]
        first = self.machines[0]
        ssh = {
            "user": "train",
            "key": str(first.key),
            "known_hosts": str(first.known_hosts),
            "sudo": True,
        }
        # One node of two is half of them: the default of a quarter would open the breaker.
        fleet = {
            "name": FLEET,
            "backend": "ssh",
            "repairs": "act",
            "nodes": nodes,
            "ssh": ssh,
            "limits": {"nodes_out": 2},
        }
        file = self.folder / "lab.yaml"
        file.write_text(yaml.safe_dump(fleet, sort_keys=False))
        words = [
            *ENDS_WITH_US,
            sys.executable,
            str(ROOT / "starter.py"),
            "up",
            "--port",
            "0",
            "--ui-port",
            "0",
            "--fleet",
            str(file),
        ]
        with (self.folder / "up.log").open("wb") as log:
            self._up = subprocess.Popen(
                words,
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually(
            lambda: self.starter("jobs", "--json")[0] == 0,
            f"`up` does not come up: see {log.name}",
            60,
        )

    def starter(self, *words: str) -> tuple[int, str]:
        ran = subprocess.run(
            [sys.executable, str(ROOT / "starter.py"), *words],
            env=self._environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        return ran.returncode, ran.stdout if ran.returncode == 0 else ran.stdout + ran.stderr

    def run_json(self, *words: str) -> Any:
        """What a command answers as JSON."""
        status, text = self.starter(*words, "--json")
        assert status == 0, text
        return json.loads(text)

    def submit(self, name: str, policy: dict[str, Any]) -> None:
        job = {
            "name": name,
            "command": RANK,
            "nodes": len(self.machines),
            "fleet": FLEET,
            "policy": policy,
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(job))
        for machine in self.machines:
            machine.ssh("rm -rf run sick dcgmi.calls; mkdir run")
        status, text = self.starter("submit", str(file))
        assert status == 0, text

    def until(self, job: str, generation: int, steps: int, within: float) -> dict[str, Any]:
        """Wait until this generation has trained so many steps more than the one before it."""
        known: list[int] = []

        def advanced() -> dict[str, Any] | None:
            now = self.run_json("show", job)
            assert now["phase"] not in ("FAILED", "WAITING_FOR_PERSON"), now
            if (
                now["phase"] != "RUNNING"
                or now["generation"] < generation
                or now["progress"] is None
            ):
                return None
            known.append(now["progress"]["step"])
            return now if known[-1] >= known[0] + steps else None

        return eventually(
            advanced,
            f"{job} does not train in generation {generation}: {self.run_json('show', job)}",
            within,
        )

    def machine_of(self, job: str, rank: int) -> Machine:
        name = self.run_json("show", job)["nodes"][rank]
        return next(machine for machine in self.machines if machine.name == name)


class Sight:
    """Sees from outside when a machine's sshd answers and when it does not, by the host's clock."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.seen: list[tuple[bool, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Sight:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            at = time.time()
            self.seen.append((self.machine.greets(), at))

    def find_loss(self, since: float) -> float:
        return next(at for there, at in self.seen if not there and at >= since)

    def back(self, since: float) -> float:
        return next(at for there, at in self.seen if there and at >= self.find_loss(since))
