"""Children that begin as forks of this process: they need not import again what it has.

Only for a process with a single thread, before it runs an event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from relaunch.interpreter import leave

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
DEFAULT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PIDFD_OPEN = 434
"""The number of pidfd_open(2), the same on all processors that relaunch runs on."""
LOOK_INTERVAL_S = 0.05
"""Seconds between two looks at whether a child has ended, where the kernel does not tell."""


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor of a process, which is readable once it has ended.

    Return None where there is none: the kernel is older than 5.3, or a container forbids it. A
    Python that was built with headers of such a kernel has no `os.pidfd_open`, whatever kernel it
    runs on; uv's were until July 2026.
    """
    if hasattr(os, "pidfd_open"):
        try:
            return os.pidfd_open(pid)
        except OSError:
            return None
    handle: int = ctypes.CDLL(None).syscall(_PIDFD_OPEN, pid, 0)
    return handle if handle >= 0 else None


class Fork:
    """A child, with the part of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int, stdin: int | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._stdin = stdin
        """The other end of the child's standard input, which ends with this process."""
        self._handle = _open_pidfd(pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Args:
            timeout: Seconds.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._handle is not None:
            select.select([self._handle], [], [], timeout)
        while (code := self.poll()) is None:
            left = LOOK_INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(min(LOOK_INTERVAL_S, left))
        return code

    async def wait_async(self) -> int:
        """Wait for the end; return the exit code."""
        if self._handle is None:
            while (code := self.poll()) is None:  # noqa: ASYNC110 - no event tells of the end
                await asyncio.sleep(LOOK_INTERVAL_S)
            return code
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        # A descriptor for each who waits: a loop knows one reader of a descriptor.
        handle = os.dup(self._handle)
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return self.wait(0)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)  # not reaped yet, so the pid is still this child's


def fork(name: str, log: Path, act: Callable[[], int], *, is_attended: bool) -> Fork:
    """Start a child in a new session, with its output in a log.

    Args:
        name: What the kernel calls it, up to 15 characters.
        log: The file that its output is appended to.
        act: What it does; returns its exit code.
        is_attended: Whether its standard input ends with this process. Otherwise it is empty, and
            the kernel kills the child when this process ends.

    Raises:
        OSError: The log cannot be written, or there is no process left.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    reading, writing = os.pipe() if is_attended else (os.open(os.devnull, os.O_RDONLY), None)
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _become(name, reading, output, act, None if is_attended else parent)
    except OSError:
        if writing is not None:
            os.close(writing)
        raise
    finally:
        os.close(reading)
        os.close(output)
    return Fork(pid, writing)


def _become(
    name: str, stdin: int, output: int, act: Callable[[], int], parent: int | None
) -> NoReturn:
    """Be the child. Whatever happens, it does not return into what the parent was doing."""
    code = 1
    try:
        os.setsid()
        if parent is not None:
            die_with_parent(parent)()
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        for number in DEFAULT_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == 2 else signal.SIG_DFL)
        for source, target in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        random.seed()
        code = act()
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return what a child has to call so that the kernel kills it when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)

    def set_death_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return set_death_signal
