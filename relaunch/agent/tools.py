"""Runs a program of the node that may hang, print endlessly or leave processes behind.

The program's time and output are bounded, and no process of it outlives the call unless it is stuck
in the driver. The meaning of the output is not interpreted here.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence

from relaunch.agent import processes
from relaunch.agent.loop import parse
from relaunch.agent.protocol import Json, line

STOP_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL, in which `dcgmi` can tell its host engine to stop. Shorter
than any caller waits for the hold."""
KILL_TIMEOUT = 2.0
"""Seconds to wait after SIGKILL. What remains is stuck in the driver and is left: only a reboot
ends it."""
POLL_INTERVAL = 0.02
"""Seconds between checks whether the program has ended: its children may hold its output open
forever."""
KILLED_TIMEOUT = 0.5
"""Seconds for a process to end that blocks in no call of the kernel."""
CONTINUE_INTERVAL = 1.0
"""Seconds without an answer until a child that may have been stopped gets SIGCONT."""
MAX_STDOUT_BYTES = 1024 * 1024
MAX_STDERR_BYTES = 4096
HOLD_VARIABLE = "RELAUNCH_HOLD"
"""Environment variable of processes that run under the hold, by which they are found after their
holder was killed."""


@dataclass(frozen=True)
class ToolResult:
    exit_code: Optional[int]
    """None: it was killed here. Negative: the number of the signal, from another sender, that
    killed it."""
    stdout: str
    """The beginning: a megabyte, unless the caller wants more."""
    stderr: str
    """At most the last 4 KiB."""
    is_truncated: bool
    duration: float
    survives: bool = False
    """Whether it could not be killed, and still runs."""

    @property
    def output_tail(self) -> str:
        """The end of its output, for people."""
        return (self.stdout + self.stderr)[-MAX_STDERR_BYTES:].strip()


def make_environment(state: Path, hold: str) -> Dict[str, str]:
    return {**os.environ, HOLD_VARIABLE: hold, "RELAUNCH_NODE_STATE": str(state)}


def run(
    command: Sequence[str],
    timeout: float,
    environment: Optional[Dict[str, str]] = None,
    caller: Optional[int] = None,
    max_stdout: int = MAX_STDOUT_BYTES,
) -> ToolResult:
    """Run a program in its own process group; kill the group when it ends or times out.

    Args:
        caller: a pipe; the program is killed when its other end closes.
        max_stdout: bytes that are kept of what it prints.

    Raises:
        OSError: it cannot be started.
    """
    started_at = time.monotonic()
    parent = os.getpid()
    program = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: processes.die_with(parent),  # noqa: PLW1509  (there is one thread)
    )
    assert program.stdout is not None
    assert program.stderr is not None
    with program.stdout, program.stderr:
        out, err = (
            _Head(program.stdout.fileno(), max_stdout),
            _Tail(program.stderr.fileno(), MAX_STDERR_BYTES),
        )
        ended = _follow(program.pid, [out, err], started_at + timeout, caller)
        if not ended:
            processes.kill_group(program.pid, signal.SIGTERM)
            _follow(program.pid, [out, err], time.monotonic() + STOP_GRACE)
        processes.kill_group(program.pid, signal.SIGKILL)
        left = not ended and not _follow(program.pid, [out, err], time.monotonic() + KILL_TIMEOUT)
        for stream in (out, err):
            stream.drain()
    code = None if left else program.wait()
    return ToolResult(
        code if ended else None,
        out.text,
        err.text,
        out.is_truncated,
        time.monotonic() - started_at,
        left,
    )


class _Stream(ABC):
    def __init__(self, handle: int, limit: int) -> None:
        os.set_blocking(handle, False)
        self.handle = handle
        self.limit = limit
        self.open = True
        self.is_truncated = False
        self.data = bytearray()

    def read(self) -> bool:
        """Read what is available; return whether there was anything."""
        try:
            data = os.read(self.handle, 65536)
        except BlockingIOError:
            return False
        self.open = bool(data)
        self.keep(data)
        return self.open

    def drain(self) -> None:
        """Read what the pipe still holds, and no more: another process may continue to write."""
        for _ in range(16):
            if not self.open or not self.read():
                return

    @abstractmethod
    def keep(self, data: bytes) -> None:
        """Add a piece of output."""

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


class _Head(_Stream):
    def keep(self, data: bytes) -> None:
        room = self.limit - len(self.data)
        self.is_truncated = self.is_truncated or len(data) > room
        self.data += data[:room]


class _Tail(_Stream):
    def keep(self, data: bytes) -> None:
        self.data += data
        del self.data[: -self.limit]


def _follow(pid: int, streams: List[_Stream], until: float, caller: Optional[int] = None) -> bool:
    """Read until the process has ended; return whether it has.

    It is not reaped: the id of its process group must not be reused. Return False at the time
    `until`, or when `caller` closes.
    """
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        left = until - time.monotonic()
        if left <= 0:
            return False
        handles = [stream.handle for stream in streams if stream.open]
        ready, _, _ = select.select(
            handles if caller is None else [*handles, caller], [], [], min(POLL_INTERVAL, left)
        )
        for stream in streams:
            if stream.handle in ready:
                stream.read()
        if caller is not None and caller in ready and not os.read(caller, 65536):
            return False
    return True


def run_bounded(
    work: Callable[[], Json], timeout: float, keep: Sequence[int] = ()
) -> Optional[Json]:
    """Run what may block in the kernel in a process; return its result, or None without an answer.

    Args:
        keep: descriptors that the work has open as long as its process lives.

    Raises:
        OSError: no child can be started.
    """
    return run_apart(lambda: _run_in_child(work, timeout, keep), keep)


def run_apart(work: Callable[[], Optional[Json]], keep: Sequence[int] = ()) -> Optional[Json]:
    """Run what may leave children behind in a child, which ends; return its result, if any.

    What it leaves behind is no child of the caller, which may become a shim and would take it for a
    rank: SIGKILL does not end all that blocks in the kernel. It is one of the nearest ancestor that
    adopts orphans, if there is any.

    Args:
        keep: as for `run_bounded`.

    Raises:
        OSError: no child can be started.
    """
    parent = os.getpid()

    def relay(writing: int) -> None:
        processes.die_with(parent)
        processes.close_all_but([writing, *keep])
        result = work()
        if result is not None:
            write(writing, line(result))

    reading, writing = os.pipe()
    try:
        pid = processes.fork(lambda: relay(writing))
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    received = bytearray()
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    with open(reading, "rb", buffering=0) as stream:
        while True:
            if not poller.poll(CONTINUE_INTERVAL * 1000):
                os.kill(pid, signal.SIGCONT)  # something has stopped it
                continue
            data = stream.read(65536)
            if not data:
                break
            received += data
    os.waitpid(pid, 0)
    return parse(bytes(received)) if received.endswith(b"\n") else None


def _run_in_child(work: Callable[[], Json], timeout: float, keep: Sequence[int]) -> Optional[Json]:
    """Run `work` in a child, which is left behind if it cannot be killed."""
    reading, writing = os.pipe()
    parent = os.getpid()

    def child() -> None:
        processes.die_with(parent)
        processes.close_all_but([writing, *keep])
        write(writing, line(work()))

    try:
        pid = processes.fork(child)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    received = b""
    deadline = time.monotonic() + timeout
    try:
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(reading, 65536) if ready else b""
            if not data:
                break
            received += data
    finally:
        os.close(reading)
        end_children([pid])
    return parse(received) if received.endswith(b"\n") else None


def end_children(pids: List[int]) -> None:
    """Kill children and reap them; leave those that the kernel does not end for now."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILLED_TIMEOUT
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)


def write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
