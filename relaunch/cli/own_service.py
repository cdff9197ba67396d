"""The server and the worker of a single `run`: started with it, and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from relaunch.cli import environment
from relaunch.cli.forks import Fork, fork
from relaunch.cli.service import (
    HOST,
    READY_TIMEOUT,
    RELAUNCH,
    STOP_TIMEOUT,
    Service,
    choose_port,
    fork_worker,
    prepare_state,
    serve,
    write_local_fleet,
)
from relaunch.config import ConfigError, Settings
from relaunch.temporal import UP_FILE, find_running_up
from relaunch.text import printable

UP_LOG = "up.log"
CHILD_CHECK_INTERVAL_S = 0.5
ADDRESS_INTERVAL_S = 0.01
ADDRESS_TIMEOUT_S = READY_TIMEOUT + 5
"""Seconds: the child gives up first, and its log says why."""
RESTART_TIMEOUT_S = 60.0
"""Seconds for which a child is started again that cannot start. Without one, ranks stop by
themselves when their lease has ended: by default after 60 s."""
END_TIMEOUT_S = 10.0
"""Seconds in which the end of the job should be seen after its server has ended in order."""
ASK_TIMEOUT_S = 5.0
AGENT_FOLDER = "agent"


@dataclass
class OwnService:
    """A child process `relaunch up` for one job.

    It holds the other end of the child's standard input. However this process ends, the child
    notices, cancels the job if it still runs, and ends when the ranks have stopped.
    """

    state: Path
    job: str
    process: subprocess.Popen[bytes] | Fork

    @property
    def log(self) -> Path:
        return self.state / UP_LOG

    async def address(self) -> str:
        """Return the server's address once it listens.

        Raises:
            ConfigError: The child has ended, or does not start.
        """
        deadline = time.monotonic() + ADDRESS_TIMEOUT_S
        while time.monotonic() < deadline:
            if up := find_running_up(self.state):
                return up.address
            if self.process.poll() is not None:
                raise ConfigError(self.read_last_words())
            await asyncio.sleep(ADDRESS_INTERVAL_S)
        raise ConfigError(
            f"the server did not start within {ADDRESS_TIMEOUT_S:g} s: see {self.log}"
        )

    def read_last_words(self) -> str:
        """Return the last line of the child's log."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].removeprefix("relaunch: ") if lines else "the server's start said nothing"

    async def keep(self, say: Callable[[str], None]) -> None:
        """Start the child again at the same address whenever it is killed, to have ranks watched.

        Raises:
            ConfigError: It cannot be started again, or has ended by itself and the end of the job
                was not seen. It cancels the job first.
        """
        failing_since: float | None = None
        while (code := self.process.poll()) != 0:
            await asyncio.sleep(CHILD_CHECK_INTERVAL_S)
            if code is None:
                failing_since = None if find_running_up(self.state) else failing_since
                continue
            up = self.state / UP_FILE  # stays behind where the child was killed
            failing_since = failing_since or time.monotonic()
            if not up.exists() or time.monotonic() - failing_since > RESTART_TIMEOUT_S:
                raise ConfigError(f"the server of job {self.job} ended: {self.read_last_words()}")
            port = json.loads(up.read_text())["address"].rpartition(":")[2]
            say("the server of this job was killed: starting it again; ranks keep running")
            self.process = start_child(self.state, ["--attended-job", self.job], port)
        await asyncio.sleep(END_TIMEOUT_S)
        raise ConfigError(f"the server of job {self.job} was stopped, which cancelled the job")

    def stop(self) -> None:
        """Stop the child; no job may run.

        At a first signal it asks its server about the job, which may not answer; not at a second.
        """
        for patience in (ASK_TIMEOUT_S, 3 * STOP_TIMEOUT):
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                return
        self.process.kill()


def start_child(state: Path, attended: list[str], port: str = "0") -> subprocess.Popen[bytes]:
    fleet = state / "fleets" / "default.yaml"
    options = ["--state", str(state), "--port", port, "--ui-port", "0", "--fleet", str(fleet)]
    with (state / UP_LOG).open("ab") as log:
        return subprocess.Popen(
            [*RELAUNCH, "up", *attended, *options],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def start_own(settings: Settings, name: str, nodes: int) -> OwnService:
    """Start the server and the worker of a job, as forks of this process.

    Raises:
        ConfigError: Its folder cannot be written.
    """
    runs = settings.state / "runs"
    state = runs / name
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        fleet = write_local_fleet(state, nodes)
        _copy_agents(settings.state / AGENT_FOLDER, state / AGENT_FOLDER)
        own = settings.model_copy(update={"state": state})
        serve_job = partial(_serve, own, name, fleet)
        child = fork("relaunch-up", state / UP_LOG, serve_job, is_attended=True)
    except OSError as error:
        raise ConfigError(
            f"state folder {state} cannot be written: {error.strerror}; choose another with "
            "RELAUNCH_STATE"
        ) from None
    environment.remove_expired(runs)
    return OwnService(state, name, child)


def keep_agents(settings: Settings, own: OwnService) -> None:
    """Keep the agent that this run's worker has compiled, for the next run."""
    try:
        _copy_agents(own.state / AGENT_FOLDER, settings.state / AGENT_FOLDER)
    except OSError:
        return  # it is compiled again, in half a second


def _copy_agents(source: Path, target: Path) -> None:
    """Copy the newest agent of a folder, unless it is there. Who uses one compares its content."""
    agents = sorted(source.glob("*.pyz"), key=lambda path: path.stat().st_mtime)
    if not agents or (target / agents[-1].name).exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    partial = target / f".{agents[-1].name}.{os.getpid()}"
    shutil.copy(agents[-1], partial)
    partial.replace(target / agents[-1].name)


def _serve(settings: Settings, job: str, fleet: Path) -> int:
    """Be the child; return its exit code."""

    def say(text: str) -> None:
        print(f"relaunch: {printable(text, 4000)}", file=sys.stderr, flush=True)

    try:
        with prepare_state(settings.state):
            service = Service(
                state=settings.state,
                port=choose_port("--port", 0, HOST),
                ui_port=choose_port("--ui-port", 0, HOST),
                fleets=(fleet,),
                backends={"default": "local"},
                metrics=settings.metrics,
                temporal=settings.temporal_bin,
            )
            worker = fork_worker(service)
            asyncio.run(serve(service, say, attended_job=job, first_worker=worker))
    except ConfigError as error:
        say(str(error))
        return 2
    except OSError as error:
        say(f"state folder {settings.state} cannot be used: {error}")
        return 2
    return 0
