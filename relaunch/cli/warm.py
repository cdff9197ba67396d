"""Runs commands that `warm_client` hands over, in forks of a process with everything imported.

A running fork does not depend on this process: `up` may end or start again without effect on it, as
with a command that was started cold.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from relaunch.cli.warm_client import ANSWER_TIMEOUT, GO, PASSED_ON, PROTOCOL, SOCKET, namespaces
from relaunch.config import ConfigError
from relaunch.spec.job import LIMITS

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    "relaunch.cli.answers",
    "relaunch.cli.documents",
    "relaunch.cli.files",
    "relaunch.cli.fleets",
    "relaunch.cli.follow",
    "relaunch.cli.job_views",
    "relaunch.cli.jobs",
    "relaunch.cli.logs",
    "relaunch.cli.run",
    "relaunch.cli.stacks",
    "relaunch.cli.submit",
    "relaunch.cli.tables",
    "relaunch.job.drain",
    "relaunch.job.ladder",
    "relaunch.messages.jobs",
    "relaunch.messages.logs",
    "relaunch.temporal",
    "temporalio.client",
    "temporalio.contrib.pydantic",
    "temporalio.envconfig",
    "rich.console",
    "rich.live",
    "rich.table",
    "yaml",
)
BACKLOG = 64
"""Commands that may wait at once, such as from scripts; further ones run without this process."""


def serve(state: Path, main: Callable[[], int]) -> NoReturn:
    """Serve the state folder's socket until the process ends.

    `main` runs one command line in a fork.

    Raises:
        ConfigError: The socket cannot be created, or an import has started a thread.
    """
    loaded = code_stamp()
    for name in PRELOADED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise ConfigError(
            f"{len(threads)} threads run after the imports: expected 1, because a fork keeps only "
            "one"
        )
    listener = _listen(state)
    # Every fork shares the present objects; the collector must not touch them, or it would copy
    # their pages.
    gc.freeze()
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        ready.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _reap(running)
                    continue
                try:
                    connection = listener.accept()[0]
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                if code_stamp() != loaded:
                    # exec closes the connection: the client then runs the command itself, with the
                    # new code.
                    os.execv(sys.executable, [sys.executable, *sys.argv])
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    # The fork must not hold these open: a client would wait for an end or an answer
                    # that never comes.
                    for other in (listener, woken, wake, *running.values()):
                        other.close()
                    _run(connection, main)
                running[pid] = connection


def code_stamp() -> tuple[int, int, int]:
    """Return a stamp that changes with any source file of relaunch, and with the installed
    packages."""
    package = ROOT / "relaunch"
    # In a checkout the last two are symbolic links, which rglob does not follow.
    places = [
        path.stat()
        for folder in (package, package / "workflows", package / "activities")
        for path in folder.rglob("*.py")
    ]
    installed = [
        Path(folder).stat()
        for folder in sys.path
        if folder.endswith("-packages") and os.path.isdir(folder)
    ]
    found = (*places, *installed)
    return len(found), sum(one.st_size for one in places), sum(one.st_mtime_ns for one in found)


def _listen(state: Path) -> socket.socket:
    try:
        folder = state.stat()
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            raise ConfigError(
                f"state folder {state} is writable by other users: expected one that only you can "
                f"write, because it holds {SOCKET}"
            )
        # By its name alone: the path of a socket may have at most 107 bytes.
        os.chdir(state)
        Path(SOCKET).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        listener.bind(SOCKET)
        os.umask(before)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"the socket {SOCKET} cannot be created in state folder {state}: {error.strerror}"
        ) from None
    listener.setblocking(False)
    return listener


def _reap(running: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        # None: forked before this process started again with new code.
        connection = running.pop(pid, None)
        if connection is None:
            continue
        if os.WIFSIGNALED(status):
            connection.settimeout(ANSWER_TIMEOUT)
            _tell(connection, f"signal {os.WTERMSIG(status)}")
        connection.close()


def _tell(connection: socket.socket, word: str) -> None:
    try:
        connection.sendall(word.encode())
    except OSError:
        return  # the client has gone


def _run(connection: socket.socket, main: Callable[[], int]) -> NoReturn:
    """Run, in the fork, the command that was typed."""
    code = 1
    try:
        os.setpgid(0, 0)
        if not _take_over(connection):
            os._exit(0)
        threading.Thread(target=_end_with_client, args=(connection,), daemon=True).start()
        code = main()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BrokenPipeError:
        pass  # the reader of the output has gone; the exit code stands
    except BaseException:
        # Report it as the interpreter does for an uncaught exception; the exception must not reach
        # the server's frames.
        sys.excepthook(*sys.exc_info())
    finally:
        _tell(connection, f"exit {code}")
        os._exit(code)


def _take_over(connection: socket.socket) -> bool:
    """Read the request and take over the client's environment; return False if it is refused."""
    connection.settimeout(ANSWER_TIMEOUT)
    client, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    if uid != os.geteuid():
        return False
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
        if len(head) != 4 or len(descriptors) != 4:
            return False
        request = _read(connection, int.from_bytes(head, "big"))
        if (request["protocol"], request["root"], request["namespaces"]) != (
            PROTOCOL,
            str(ROOT),
            namespaces(),
        ):
            return False
        connection.sendall(str(os.getpid()).encode())
        if connection.recv(len(GO)) != GO:
            return False
    except OSError:  # the client gave up, or is another program
        return False
    connection.settimeout(None)
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
    os.fchdir(descriptors[3])
    for descriptor in descriptors:
        os.close(descriptor)
    os.umask(request["umask"])
    _take_limits(client)
    os.environ.clear()
    os.environb.update(request["environment"])
    time.tzset()
    sys.argv[:] = [os.fsdecode(word) for word in request["argv"]]
    # Open new streams: the present ones assume that they write to a file, and seek in it.
    sys.stdin, sys.stdout, sys.stderr = (
        _stream(number, mode, *how)
        for (number, mode), how in zip(
            ((0, "r"), (1, "w"), (2, "w")), request["streams"], strict=True
        )
    )
    # `up` itself may run with some signals ignored.
    for number in (*PASSED_ON, signal.SIGCHLD, signal.SIGTSTP):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    return True


def _take_limits(client: int) -> None:
    """Take the soft limits of the client, as far as the hard ones of this process allow."""
    for name in LIMITS:
        kind = getattr(resource, f"RLIMIT_{name.upper()}")
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(OSError):  # the client has just ended
            wanted = resource.prlimit(client, kind)[0]
            is_above = hard >= 0 and not 0 <= wanted <= hard
            resource.setrlimit(kind, (hard if is_above else wanted, hard))


def _stream(
    number: int, mode: str, encoding: str, errors: str, by_line: bool, at_once: bool
) -> TextIOWrapper:
    stream = open(  # noqa: SIM115
        number,
        mode,
        buffering=1 if by_line else -1,
        encoding=encoding,
        errors=errors,
        closefd=False,
    )
    assert isinstance(stream, TextIOWrapper)
    if mode == "w":
        stream.reconfigure(write_through=at_once)
    return stream


def _read(connection: socket.socket, size: int) -> dict[str, Any]:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise ConnectionResetError
        data += piece
    request: dict[str, Any] = ast.literal_eval(data.decode())
    return request


def _end_with_client(connection: socket.socket) -> None:
    """End like a process that was killed, when the client disappears without notice."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(128 + signal.SIGKILL)  # not by a signal that the command handles: `run` would cancel
