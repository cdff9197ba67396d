"""The command `run`: runs one job, with its own server if none is running.

Its exit code is the job's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from relaunch.cli import files
from relaunch.cli.service import READY_TIMEOUT, RELAUNCH, STOP_TIMEOUT, write_local_fleet
from relaunch.config import ConfigError, Settings
from relaunch.temporal import connect, find_running_up

INTERRUPTED = 130
PASSED_ON = (
    "PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
PASSED_ON_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "PYTORCH_", "PYTHON")
"""Variables passed on to ranks: those that decide which program runs and how its ranks communicate.
Not the whole environment: it has secrets, and a job is written into workflow history."""


def job_of(
    command: list[str],
    nodes: str,
    nproc: int,
    policy: str | None,
    name: str | None,
    env: list[str],
    fleet: str | None,
) -> dict[str, Any]:
    """Return the fields of a job file as given by the command line."""
    if not command:
        raise ConfigError(
            "no command: write it after `--`, such as `relaunch run -- python train.py`"
        )
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"command {command[0]!r} is not found: expected a program on PATH or a path to one "
            "that may be executed"
        )
    optional = {"policy": policy, "fleet": fleet}
    return {
        "name": name or default_name(command),
        "command": command,
        "nodes": nodes,
        "nproc_per_node": nproc,
        "workdir": str(Path.cwd()),
        "env": environment(os.environ, env),
        **{key: value for key, value in optional.items() if value is not None},
    }


def environment(ours: Mapping[str, str], wanted: list[str]) -> dict[str, str]:
    chosen = {
        name: value
        for name, value in ours.items()
        if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)
    }
    for item in wanted:
        name, equals, value = item.partition("=")
        if not equals and name not in ours:
            raise ConfigError(
                f"--env {name}: the variable is not set; expected NAME=VALUE or the name of a "
                "variable that is set"
            )
        chosen[name] = value if equals else ours[name]
    return chosen


def default_name(command: list[str]) -> str:
    """Return a name that says what runs, and that no other `run` has."""
    words = [word for word in command if not word.startswith("-")]
    script = next(
        (word for word in words[1:] if word.endswith((".py", ".sh"))), words[0] if words else "job"
    )
    stem = (
        "".join(
            letter if letter.isascii() and letter.isalnum() else "-" for letter in Path(script).stem
        ).strip("-")[:30]
        or "job"
    )
    return f"{stem}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"


@dataclass
class OwnService:
    """A child process `relaunch up`. It ends with this process or, if asked to drain, when the job
    has ended."""

    state: Path
    process: subprocess.Popen[bytes]
    log: Path

    async def address(self) -> str:
        deadline = time.monotonic() + READY_TIMEOUT
        while time.monotonic() < deadline:
            if up := find_running_up(self.state):
                return up.address
            if self.process.poll() is not None:
                lines = self.log.read_text(errors="replace").strip().splitlines() or [
                    "it printed nothing"
                ]
                raise ConfigError(lines[-1].removeprefix("relaunch: "))
            await asyncio.sleep(0.02)
        raise ConfigError(f"the server did not start within {READY_TIMEOUT:g} s: see {self.log}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(3 * STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def leave(self) -> None:
        """Let the child run without this process until the job has ended."""
        stdin: IO[bytes] | None = self.process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(b"drain\n")
                stdin.flush()


def start_own(settings: Settings, name: str, nodes: int) -> OwnService:
    state = settings.state / "runs" / name
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        fleet = write_local_fleet(state, nodes)
        log = state / "up.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *RELAUNCH,
                    "up",
                    "--attended",
                    "--state",
                    str(state),
                    "--port",
                    "0",
                    "--ui-port",
                    "0",
                    "--fleet",
                    str(fleet),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        raise ConfigError(
            f"state folder {state} cannot be written: {error.strerror}; choose another with "
            "RELAUNCH_STATE"
        ) from None
    return OwnService(state, process, log)


async def run(settings: Settings, values: dict[str, Any], say: Callable[[str], None]) -> int:
    """Run a job to its end and return the exit code."""
    shared = bool(os.environ.get("TEMPORAL_ADDRESS")) or find_running_up(settings.state) is not None
    own: OwnService | None = None
    spec, policy = files.job_from_flags(values)
    if not shared:
        own = start_own(settings, spec.name, spec.node_count)
        say(
            "no server is running, so relaunch starts one for this job; its state folder is "
            f"{own.state}"
        )
    kept = True
    try:
        from relaunch.cli.submit import submit

        client = await connect(settings.state, await own.address() if own else None)
        await submit(client, settings.task_queue, spec, policy)
        # From here on ctrl-C cancels the job instead of only ending this program.
        interruptions: asyncio.Queue[None] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interruptions.put_nowait, None)
        say(f"job {spec.name} submitted: {spec.size}")
        from relaunch.cli import follow, jobs  # imported while the ranks start

        following = asyncio.create_task(
            follow.follow_with_logs(
                client, settings.task_queue, spec.name, say, can_retry=own is None
            )
        )
        code = await _wait_for_job(
            following,
            interruptions,
            lambda: jobs.cancel(client, spec.name, "ctrl-C"),
            spec.name,
            say,
        )
        if code is None:
            if own:
                own.leave()
                own = None
            return INTERRUPTED
        kept = code != 0
        return code
    finally:
        if own:
            own.stop()
            if not kept:
                shutil.rmtree(own.state, ignore_errors=True)


async def _wait_for_job(
    following: asyncio.Task[int],
    interruptions: asyncio.Queue[None],
    cancel: Callable[[], Coroutine[Any, Any, Any]],
    name: str,
    say: Callable[[str], None],
) -> int | None:
    """Wait for the job and return its exit code.

    The first interruption cancels the job; the second makes this return None at once.
    """
    cancelling: asyncio.Task[Any] | None = None
    while True:
        interrupted = asyncio.create_task(interruptions.get())
        await asyncio.wait({following, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            interrupted.cancel()
            return following.result()
        if cancelling is not None:
            say(f"exiting; the cancellation of job {name} continues")
            following.cancel()
            await asyncio.wait([cancelling], timeout=2)  # the request itself must be sent
            return None
        say(f"cancelling job {name}; press ctrl-C again to exit at once")
        cancelling = asyncio.create_task(cancel())
