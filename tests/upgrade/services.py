"""A service as a person runs it, by the programs of this checkout or of a released wheel.

Everything is done and read through the command line, so it holds whatever changes behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relaunch.backends import local_power
from tests.chaos.places import environments
from tests.installed import TIMEOUT_S, install, search_path

ROOT = Path(__file__).resolve().parents[2]
RANK_PROGRAM = ROOT / "tests" / "chaos" / "rank.py"
WHEELS = ROOT / "tests" / "releases" / "wheels"
FLEET = "lab"
NODES = 5
PATIENCE_S = 240.0
"""Until a wait gives up: a build takes over half a minute after the other one was killed."""
PAUSE_S = 0.5
TIMEOUTS = {"heartbeat": "1s", "lease": "10m", "stop_grace": "1s"}
"""The lease is longer than a test may be without a worker on a busy machine."""
SERVER_LINE = re.compile(r"server (127\.0\.0\.1:\d+), web UI")


@dataclass(frozen=True)
class Installation:
    """Programs of one version of relaunch."""

    version: str
    command: tuple[str, ...]
    worker: tuple[str, ...]
    path: str


def checkout() -> Installation:
    return Installation(
        "this checkout",
        (sys.executable, str(ROOT / "starter.py")),
        (sys.executable, str(ROOT / "worker.py")),
        search_path(Path(sys.executable).parent),
    )


def list_wheels() -> dict[str, Path]:
    """Return the kept wheels by version, the oldest first."""
    found = {path.name.split("-")[1]: path for path in WHEELS.glob("relaunch-*.whl")}
    return dict(sorted(found.items(), key=lambda one: [int(n) for n in one[0].split(".")]))


def release(version: str, folder: Path) -> Installation:
    """Install the kept wheel of a release into a new environment."""
    programs = install(list_wheels()[version], folder)
    return Installation(
        version,
        (str(programs / "relaunch"),),
        (str(programs / "relaunch-worker"),),
        search_path(programs),
    )


@dataclass
class Job:
    """One job of a service, and the folder that its ranks share."""

    service: Service
    name: str
    folder: Path

    def show(self, by: Installation | None = None) -> dict[str, Any]:
        shown: dict[str, Any] = self.service.read("show", self.name, by=by)
        return shown

    def until(self, phase: str, generation: int = 1) -> None:
        """Wait until a worker, and not only the server, says so."""

        def reached() -> bool:
            now = self.show()
            found = (now["source"], now["phase"], now["generation"])
            return found == ("worker", phase, generation)

        eventually(reached, lambda: f"{self.name} is not {phase} {generation}: {self.show()}")

    def until_ended(self, phase: str) -> None:
        def has_ended() -> bool:
            now = self.show()
            return (now["phase"], now["ended"] is not None) == (phase, True)

        eventually(has_ended, lambda: f"{self.name} did not end as {phase}: {self.show()}")

    def until_steps(self, more: int = 3) -> None:
        """Wait until training has advanced by so many steps, and a worker has seen it."""
        path = self.folder / "checkpoint"

        def step() -> int:
            return int(path.read_text()) if path.exists() else 0

        def read_step() -> int:
            return int((self.show()["progress"] or {}).get("step", 0))

        wanted = step() + more
        eventually(
            lambda: read_step() >= wanted, lambda: f"no step {wanted} of {self.name} is seen"
        )

    def ranks(self) -> dict[int, int]:
        """Living ranks: the process of each, and its generation."""
        marker = b"RELAUNCH_TOKEN="
        found = {}
        for pid, variables in environments():
            if f"RELAUNCH_JOB={self.name}".encode() in variables and any(
                str(self.folder).encode() in word for word in words_of(pid)
            ):
                # A Python that imports ahead has none.
                for token in (one for one in variables if one.startswith(marker)):
                    found[pid] = int(token.rpartition(b"/")[2])
        return found

    def until_ranks(self, generation: int, count: int) -> dict[int, int]:
        """Wait until these and no other ranks live."""
        wanted = [generation] * count
        eventually(
            lambda: sorted(self.ranks().values()) == wanted,
            lambda: f"ranks of {self.name} are {self.ranks()}, expected {wanted}",
        )
        return self.ranks()

    def kill_rank(self) -> None:
        os.kill(min(self.ranks()), signal.SIGKILL)

    def fail_rank(self, message: str) -> None:
        """Have the first rank raise an error."""
        (self.folder / "fail.0").write_text(message)

    def let_end(self) -> None:
        (self.folder / "stop").touch()

    def violations(self) -> list[str]:
        """What the ranks themselves saw of a generation beside their own."""
        path = self.folder / "violations"
        return path.read_text().splitlines() if path.exists() else []


@dataclass
class Service:
    """A state folder, a fleet on this machine, and what runs on them."""

    folder: Path
    number: int
    """Services side by side have addresses of their own."""
    commands: Installation
    """Whose command line is typed where none is named."""
    address: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    variables: dict[Installation, dict[str, str]] = field(default_factory=dict)
    """More variables of the programs of an installation."""

    def __post_init__(self) -> None:
        self.state = self.folder / "state"
        self.state.mkdir(parents=True, mode=0o700)
        self.fleet_file = self.folder / "lab.yaml"
        lines = [
            f"  - {{name: n{n}, address: 127.{80 + self.number}.0.{n}}}"
            for n in range(1, NODES + 1)
        ]
        head = (f"name: {FLEET}", "backend: local", "repairs: act", "nodes:")
        self.fleet_file.write_text("\n".join((*head, *lines)) + "\n")

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.kill()
            process.wait(TIMEOUT_S)
        for node in (self.state / "nodes").glob("*"):
            local_power.reboot(node)

    def environment(self, by: Installation) -> dict[str, str]:
        return {
            "PATH": by.path,
            "HOME": os.environ.get("HOME", "/"),
            "RELAUNCH_STATE": str(self.state),
            "RELAUNCH_FLEETS": str(self.fleet_file),
            "RELAUNCH_ANSWER_WITHIN": "20",
            **{key: os.environ[key] for key in ("GOMAXPROCS", "GOGC") if key in os.environ},
            **self.variables.get(by, {}),
        }

    def start_up(self, by: Installation, workers: int = 1) -> subprocess.Popen[bytes]:
        """Start `up` and wait until its server and workers are started."""
        log = self.folder / f"up-{len(self.processes)}.log"
        words = ("up", "--port", "0", "--ui-port", "0", "--workers", str(workers))
        process = self._start((*by.command, *words), by, log)

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            said = log.read_text()
            return SERVER_LINE.search(said) is not None and ("started" in said or not workers)

        eventually(is_up, log.read_text)
        (self.address,) = SERVER_LINE.findall(log.read_text())
        return process

    def start_worker(self, by: Installation) -> subprocess.Popen[bytes]:
        """Start a worker beside the server that `up` runs."""
        log = self.folder / f"worker-{len(self.processes)}.log"
        return self._start(by.worker, by, log, TEMPORAL_ADDRESS=self.address)

    def _start(
        self, words: tuple[str, ...], by: Installation, log: Path, **more: str
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env={**self.environment(by), **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def run(self, *words: str, by: Installation | None = None) -> subprocess.CompletedProcess[str]:
        """Type a command."""
        by = by or self.commands
        return subprocess.run(
            (*by.command, *words),
            cwd=self.folder,
            env=self.environment(by),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def do(self, *words: str, by: Installation | None = None) -> str:
        """Type a command that has to succeed; return what it prints."""
        done = self.run(*words, by=by)
        assert done.returncode == 0, (by or self.commands, done)
        return done.stdout

    def read(self, *words: str, by: Installation | None = None) -> Any:
        return json.loads(self.do(*words, "--json", by=by))

    def submit(
        self,
        name: str,
        nodes: int = 1,
        policy: dict[str, Any] | None = None,
        by: Installation | None = None,
        warm: tuple[str, ...] = (),
    ) -> Job:
        folder = self.folder / "jobs" / name
        folder.mkdir(parents=True)
        options = [] if warm else ["-S"]  # what waits in `sitecustomize` needs `site`
        spec = {
            "name": name,
            "command": [sys.executable, *options, str(RANK_PROGRAM), str(folder)],
            "nodes": nodes,
            "fleet": FLEET,
            "policy": {"timeouts": TIMEOUTS, **(policy or {})},
            **({"warm": list(warm)} if warm else {}),
        }
        path = folder / "job.yaml"
        path.write_text(json.dumps(spec))  # which is YAML too
        self.do("submit", str(path), by=by)
        job = Job(self, name, folder)
        self.jobs.append(job)
        return job

    def until_well(self) -> None:
        """Wait until `doctor` finds nothing: the build whose command it is works for every job."""

        def is_well() -> bool:
            return self.run("doctor").returncode == 0

        eventually(is_well, lambda: self.run("doctor").stdout)


def words_of(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def eventually(what: Callable[[], bool], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, why()
        time.sleep(PAUSE_S)
