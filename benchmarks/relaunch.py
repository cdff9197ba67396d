"""relaunch as a contender: `relaunch run` with a running `up`, two local nodes of two ranks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.contenders import ROOT, Contender, free_port

READY_TIMEOUT = 120.0
_NUMBERS = itertools.count(1)
"""Of the jobs of all contenders, which may share a service."""
POLICY = """\
max_restarts: 1000
no_progress_stop: off
causes: {UNKNOWN: [{strategy: RESTART_IN_PLACE}]}
"""
"""Every other value is the default's: a benchmark kills more often than a job fails."""


class Relaunch(Contender):
    name = "relaunch, 2 nodes"
    nodes = 2
    options: tuple[str, ...] = ()
    """Further options of `run`."""
    job: str = ""
    """The name of the job that it runs."""

    def __init__(self, state: Path) -> None:
        super().__init__()
        self._state = state
        self._environment: dict[str, str] = {}
        self._policy = state / "policy.yaml"
        self._up: subprocess.Popen[bytes] | None = None

    def bring_up(self) -> None:
        """Start the service, unmeasured: users have it running before they type commands."""
        self._environment = {**os.environ, "RELAUNCH_STATE": str(self._state)}
        self._state.mkdir(parents=True, exist_ok=True)
        self._policy.write_text(POLICY)
        ports = [str(free_port()), str(free_port())]
        command = [
            sys.executable,
            str(ROOT / "starter.py"),
            "up",
            "--state",
            str(self._state),
            "--port",
            ports[0],
            "--ui-port",
            ports[1],
        ]
        with (self._state / "up.log").open("wb") as log:
            self._up = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_TIMEOUT
        jobs = [sys.executable, str(ROOT / "starter.py"), "jobs"]
        while (
            subprocess.run(jobs, env=self._environment, capture_output=True, check=False).returncode
            != 0
        ):
            log_text = (self._state / "up.log").read_text()
            if self._up.poll() is not None:
                raise RuntimeError(f"`up` ended with exit code {self._up.returncode}: {log_text}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"`up` is not ready within {READY_TIMEOUT:g} s: {log_text}")
        # The first job finds the worker still importing; that is no part of any other job's start.
        subprocess.run(
            [*self._run("warm-up"), "true"], env=self._environment, capture_output=True, check=True
        )

    def share_service(self, other: Relaunch) -> None:
        """Use the service of another contender, which brings it up and takes it down."""
        self._environment = other._environment

    def launch(self, folder: Path) -> None:
        os.environ["RELAUNCH_STATE"] = str(self._state)
        self.job = f"bench-{next(_NUMBERS)}"
        command = [
            *self._run(self.job, "--env", f"BENCH_STARTS={self.starts_file}"),
            *self.command,
        ]
        self.spawn(command, folder / "run.log")

    def _run(self, name: str, *options: str) -> list[str]:
        per_node = str(self.ranks // self.nodes)
        shape = ["--nodes", str(self.nodes), "--nproc", per_node, *self.options]
        shape += ["--policy", str(self._policy), "--name", name]
        return [sys.executable, str(ROOT / "starter.py"), "run", *shape, *options, "--"]

    def take_down(self) -> None:
        if self._up is not None:
            self._up.terminate()
            self._up.wait()
            self._up = None
