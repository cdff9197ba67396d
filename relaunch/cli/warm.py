"""Runs commands in forks of a process that has imported everything already: what `warm_client` hands over.

A fork owes nothing to this process once it runs: `up` may end or start again under it, as under a command that was started cold.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import os
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

from relaunch.cli.warm_client import ANSWER_WITHIN, GO, PASSED_ON, PROTOCOL, SOCKET, namespaces
from relaunch.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    "relaunch.cli.explain",
    "relaunch.cli.files",
    "relaunch.cli.follow",
    "relaunch.cli.jobs",
    "relaunch.cli.policy_views",
    "relaunch.cli.logs",
    "relaunch.cli.policies",
    "relaunch.cli.run",
    "relaunch.cli.submit",
    "relaunch.cli.tables",
    "relaunch.cli.job_views",
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
"""Commands typed at once, by scripts; one more starts without us."""


def serve(state: Path, main: Callable[[], int]) -> NoReturn:
    """Answer on the state folder's socket for as long as we live; `main` runs one command line in a fork.

    Raises:
        Mistake: there can be no such socket.
    """
    loaded = code_stamp()
    for name in PRELOADED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise ConfigError(f"{len(threads)} threads run after the imports: expected 1, a fork would have lost the others")
    listener = _listen(state)
    # What is here now is in every fork; the collector must not touch it, which would copy its pages.
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
                    # Closing comes with it: that command starts without us, from the code that is there now.
                    os.execv(sys.executable, [sys.executable, *sys.argv])
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    # Not ours: a client would wait for an end, or for an answer, that nobody gives any more.
                    for other in (listener, woken, wake, *running.values()):
                        other.close()
                    _run(connection, main)
                running[pid] = connection


def code_stamp() -> tuple[int, int, int]:
    """Return what changes with any file of ours, or with what is installed."""
    package = ROOT / "relaunch"
    # The last two are links in a checkout, into which a search does not go by itself.
    places = [path.stat() for folder in (package, package / "workflows", package / "activities") for path in folder.rglob("*.py")]
    installed = [Path(folder).stat() for folder in sys.path if folder.endswith("-packages") and os.path.isdir(folder)]
    found = (*places, *installed)
    return len(found), sum(one.st_size for one in places), sum(one.st_mtime_ns for one in found)


def _listen(state: Path) -> socket.socket:
    try:
        folder = state.stat()
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            raise ConfigError(f"state folder {state} can be written by others: expected one that is yours alone, for {SOCKET} in it")
        # By its name alone: a socket's path may have no more than 107 bytes.
        os.chdir(state)
        Path(SOCKET).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        listener.bind(SOCKET)
        os.umask(before)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"there can be no socket {SOCKET} in state folder {state}: {error.strerror}") from None
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
        # None: forked before we started again with new code.
        connection = running.pop(pid, None)
        if connection is None:
            continue
        if os.WIFSIGNALED(status):
            connection.settimeout(ANSWER_WITHIN)
            _tell(connection, f"signal {os.WTERMSIG(status)}")
        connection.close()


def _tell(connection: socket.socket, word: str) -> None:
    try:
        connection.sendall(word.encode())
    except OSError:
        return  # nobody listens any more


def _run(connection: socket.socket, main: Callable[[], int]) -> NoReturn:
    """In the fork: become the command that was typed."""
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
        pass  # whoever read our output has gone; the exit code stands
    except BaseException:
        # What the interpreter does with what nobody catches; it must not run on into the server's frames.
        sys.excepthook(*sys.exc_info())
    finally:
        _tell(connection, f"exit {code}")
        os._exit(code)


def _take_over(connection: socket.socket) -> bool:
    """Read who asks for what, and take its place; False when that is not for us."""
    connection.settimeout(ANSWER_WITHIN)
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        return False
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
        if len(head) != 4 or len(descriptors) != 4:
            return False
        request = _read(connection, int.from_bytes(head, "big"))
        if (request["protocol"], request["root"], request["namespaces"]) != (PROTOCOL, str(ROOT), namespaces()):
            return False
        connection.sendall(str(os.getpid()).encode())
        if connection.recv(len(GO)) != GO:
            return False
    except OSError:  # it gave up, or is no client of ours
        return False
    connection.settimeout(None)
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
    os.fchdir(descriptors[3])
    for descriptor in descriptors:
        os.close(descriptor)
    os.umask(request["umask"])
    os.environ.clear()
    os.environb.update(request["environment"])
    time.tzset()
    sys.argv[:] = [os.fsdecode(word) for word in request["argv"]]
    # New ones: those that are here believe to write to a file, and seek in it.
    sys.stdin, sys.stdout, sys.stderr = (
        _stream(number, mode, *how) for (number, mode), how in zip(((0, "r"), (1, "w"), (2, "w")), request["streams"], strict=True)
    )
    # `up` itself may run where some are ignored.
    for number in (*PASSED_ON, signal.SIGCHLD, signal.SIGTSTP):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    return True


def _stream(number: int, mode: str, encoding: str, errors: str, by_line: bool, at_once: bool) -> TextIOWrapper:
    stream = open(number, mode, buffering=1 if by_line else -1, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
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
    """End as a process does whose terminal was closed, when the client is gone without a word."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGHUP)
    os._exit(128 + signal.SIGHUP)  # where that is ignored, too: there is nobody to print for
