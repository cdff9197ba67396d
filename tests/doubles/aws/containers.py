"""A container as a process of this machine.

Its leader gets the SIGTERM, all of it gets the SIGKILL, nothing of it stays.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

MARK = "AWS_DOUBLE_CONTAINER"
"""In the environment of all that a container runs: what left its session is found by that, as a PID
namespace would have it."""
_READS_EVERY = 0.05
"""Seconds between two looks at the output of a container whose lines go to CloudWatch Logs."""


class CannotStart(Exception):
    """Docker's words."""


class Process(Protocol):
    """What runs in a container, really or by a script."""

    ended: bool
    exit_code: int | None
    reason: str | None
    pid: int | None

    def ask(self) -> None: ...

    def kill(self) -> None: ...

    def lose_power(self) -> None: ...


class Spawner:
    """Starts processes from a thread that lives as long as the double.

    The kernel kills them with it (PR_SET_PDEATHSIG).
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aws-double-spawner")
        setpriv = shutil.which("setpriv")
        self._before = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []

    def spawn(self, argv: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        # Looked for here: setpriv would start, and then end with 127 as if the container had run.
        if shutil.which(argv[0], path=how["env"].get("PATH")) is None:
            raise CannotStart(f'exec: "{argv[0]}": executable file not found in $PATH')
        words = [*self._before, *argv]
        return self._thread.submit(lambda: subprocess.Popen(words, **how)).result()

    def close(self) -> None:
        self._thread.shutdown()


class ContainerProcess:
    """One run of one container, from its start."""

    def __init__(
        self,
        spawner: Spawner,
        argv: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        name: str,
        said: Callable[[list[str]], None] | None,
        ended: Callable[[], None],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._output = folder / f"{name}.log"
        self._said, self._ended = said, ended
        self._mark = f"{MARK}={folder.name}/{name}"
        self.ended = False
        self.exit_code: int | None = None
        self.reason: str | None = None
        with self._output.open("wb") as output:
            self._process = spawner.spawn(
                argv,
                env={**environment, MARK: f"{folder.name}/{name}"},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid: int | None = self._process.pid
        self._read = 0
        self._watcher = threading.Thread(target=self._watch, name=f"aws-double-{name}", daemon=True)
        self._watcher.start()

    def ask(self) -> None:
        # Docker tells the first process only; the image's init would tell the rest.
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for pid in (self._process.pid, *self._strays()):
            for one in (os.killpg, os.kill):
                try:
                    one(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue

    def lose_power(self) -> None:
        self._said = None
        self.kill()
        self._watcher.join()

    def _watch(self) -> None:
        while True:
            try:
                code = self._process.wait(_READS_EVERY if self._said else None)
                break
            except subprocess.TimeoutExpired:
                self._tell(whole_lines=True)
        self.kill()
        self._tell(whole_lines=False)
        self.exit_code = 128 - code if code < 0 else code
        self.ended = True
        self._ended()

    def _strays(self) -> list[int]:
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue
            if self._mark.encode() in environment.split(b"\0"):
                found.append(int(entry))
        return found

    def _tell(self, whole_lines: bool) -> None:
        said = self._said
        if said is None:
            return
        with self._output.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        if whole_lines:
            data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        if data:
            said(data.decode(errors="replace").splitlines())


def container_environment(
    instance: Mapping[str, str], given: Mapping[str, str], gpu_ids: Sequence[str], task_id: str
) -> dict[str, str]:
    """A container has only what the agent and the GPU runtime put there of its machine."""
    own = {
        "PATH": (
            f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin"
            ":/usr/sbin:/usr/bin:/sbin:/bin"
        ),
        "HOME": "/tmp",
        "AWS_EXECUTION_ENV": "AWS_ECS_EC2",
        "ECS_CONTAINER_METADATA_URI_V4": f"http://169.254.170.2/v4/{task_id}",
    }
    gpus = {"NVIDIA_VISIBLE_DEVICES": ",".join(gpu_ids)} if gpu_ids else {}
    return own | dict(instance) | dict(given) | gpus
