"""Hands a command to the process that `up` keeps ready with everything imported.

If there is no such process, it returns without any effect. It uses only the standard library, old
syntax and as few modules as possible: it runs before anything else, under whatever `python3` is
first on PATH.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

TYPE_CHECKING = False  # `typing` takes longer to import than the rest of this
if TYPE_CHECKING:
    from typing import Any

NO_WARM = "RELAUNCH_NO_WARM"
SOCKET = "cli.sock"
PROTOCOL = 1
COMMANDS = (
    "run",
    "submit",
    "jobs",
    "show",
    "next",
    "history",
    "report",
    "follow",
    "logs",
    "stacks",
    "cancel",
    "retry",
    "answer",
    "nodes",
)
ASKS = ["nodes", "trust"]
"""It reads from the terminal, and a fork of an `up` started in the same terminal would be stopped
for that (SIGTTIN)."""
SIGNS = "RELAUNCH_SSH_KEY"
"""ssh-keygen asks for a passphrase in the terminal of its session, and a fork of `up` has none."""
ANSWER_TIMEOUT = 1.0
"""Seconds for a fork and two short messages. A cold start takes about as long, so a longer wait
gains nothing."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH)
GO = b"go"


def forward() -> None:
    """Let the process of `up` run this command and exit as it does; return if it cannot."""
    if (
        len(sys.argv) < 2
        or sys.argv[1] not in COMMANDS
        or sys.argv[1:3] == ASKS
        or os.environ.get(SIGNS)
        or os.environ.get(NO_WARM)
    ):
        return
    # Try once only, also when the project's own Python starts this script again.
    os.environ[NO_WARM] = "1"
    state = _state()
    if state is None:
        return
    try:
        connection = _connect(state)
    except OSError:
        return
    sent: list[int] = []
    for number in (*PASSED_ON, signal.SIGTSTP):
        _dispositions[number] = signal.getsignal(number)
        signal.signal(number, lambda number, _: sent.append(number))
    try:
        pid = _hand_over(connection)
    except (OSError, ValueError):
        connection.close()
        for caught, before in _dispositions.items():
            signal.signal(caught, before)
        for caught in sent:
            os.kill(os.getpid(), caught)
        return
    _wait(connection, pid, sent)


_dispositions: dict[int, Any] = {}


def namespaces() -> list[str]:
    """Return the namespaces of this process: a command inside a container must not run outside of
    it."""
    return [os.readlink("/proc/self/ns/" + name) for name in ("mnt", "net", "pid", "user")]


def _state() -> str | None:
    """Return the state folder, or None if a settings file may define it: reading one is left to
    `settings`."""
    named = os.environ.get("RELAUNCH_STATE")
    if named:
        return named
    return (
        None
        if os.environ.get("RELAUNCH_SETTINGS") or os.path.exists("relaunch.toml")
        else ".relaunch"
    )


def _connect(state: str) -> socket.socket:
    folder = os.open(state, os.O_PATH | os.O_DIRECTORY)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(state)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_TIMEOUT)
        # Through its folder's descriptor: the path of a socket may have at most 107 bytes.
        connection.connect("/proc/self/fd/" + str(folder) + "/" + SOCKET)
        return connection
    finally:
        os.close(folder)


def _hand_over(connection: socket.socket) -> int:
    """Return the PID of the process that now runs the command; raise OSError or ValueError if none
    does."""
    streams = [
        (
            stream.encoding,
            stream.errors,
            stream.line_buffering,
            getattr(stream, "write_through", False),
        )
        for stream in (sys.stdin, sys.stdout, sys.stderr)
        if stream is not None
    ]
    umask = os.umask(0)
    os.umask(umask)
    # For ast.literal_eval: argv and environment are bytes, which JSON cannot express, and importing
    # json takes longer than all of this.
    request = repr(
        {
            "protocol": PROTOCOL,
            "root": os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))),
            "namespaces": namespaces(),
            "argv": [os.fsencode(word) for word in sys.argv],
            "environment": {
                name: value for name, value in os.environb.items() if name != NO_WARM.encode()
            },
            "umask": umask,
            "streams": streams,
            "ignored": [
                int(number) for number, before in _dispositions.items() if before == signal.SIG_IGN
            ],
        }
    ).encode()
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        rights = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2, here))
        # A closed descriptor among the first three raises OSError: such a command runs without
        # `up`.
        connection.sendmsg(
            [len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )
    finally:
        os.close(here)
    connection.sendall(request)
    pid = int(connection.recv(32))
    # Only now may the fork begin: if this process had given up before, the command would run twice.
    connection.sendall(GO)
    connection.settimeout(None)
    return pid


def _wait(connection: socket.socket, pid: int, sent: list[int]) -> None:
    """Pass signals on and exit as the command does."""

    def pass_on(number: int, _: object) -> None:
        # The process exists or has reported its end: it holds the other end of the connection.
        try:
            os.kill(pid, signal.SIGSTOP if number == signal.SIGTSTP else number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    for number in _dispositions:
        signal.signal(number, pass_on)
    for number in sent:
        pass_on(number, None)
    try:
        word = connection.recv(32).split()
    except OSError:
        word = []
    if len(word) == 2 and word[0] == b"exit":
        os._exit(int(word[1]))
    if len(word) == 2 and word[0] == b"signal":
        number = int(word[1])
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os.write(
        2,
        b"relaunch: the process that ran this command has died; a submitted job keeps running: "
        b"see `relaunch jobs`\n",
    )
    os._exit(1)
