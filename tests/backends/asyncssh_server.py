"""An SSH server in Python (asyncssh) in place of OpenSSH's sshd where none is installed.

`asyncssh_server.py CONFIG`: CONFIG is an sshd_config, of which `Settings` knows what tests set. As
sshd does, it serves each connection in a forked process, gives each command a session and pipes,
sends no signal to a command whose connection ends, and counts the logins that have not ended
(MaxStartups).

It is a process by itself, and imports nothing of the project.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pwd
import selectors
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

CHUNK = 65536
BACKLOG = 128
PR_SET_NAME = 15
IGNORED = ("PermitRootLogin", "StrictModes", "UsePAM", "PidFile", "LogLevel")
"""Options that make OpenSSH do what this server does anyhow."""


@dataclass
class Settings:
    """What an sshd_config says. Names and defaults are those of OpenSSH."""

    address: str = "127.0.0.1"
    port: int = 22
    host_keys: list[str] = field(default_factory=list)
    authorized_keys: str = "/nonexistent"
    variables: dict[str, str] = field(default_factory=dict)
    forced_command: str | None = None
    has_publickey: bool = True
    has_password: bool = True
    max_sessions: int = 10
    max_startups: int = 100
    login_grace_time_s: float = 120.0

    @classmethod
    def read(cls, lines: Sequence[str]) -> Settings:
        """Raise ValueError for an option that this server does not know."""
        found = cls()
        for line in lines:
            name, _, value = line.strip().partition(" ")
            match name:
                case "ListenAddress":
                    found.address = value
                case "Port":
                    found.port = int(value)
                case "HostKey":
                    found.host_keys.append(value)
                case "AuthorizedKeysFile":
                    found.authorized_keys = value
                case "SetEnv":
                    found.variables |= dict(pair.split("=", 1) for pair in shlex.split(value))
                case "ForceCommand":
                    found.forced_command = value
                case "PubkeyAuthentication":
                    found.has_publickey = value == "yes"
                case "PasswordAuthentication":
                    found.has_password = value == "yes"
                case "KbdInteractiveAuthentication" if value == "no":
                    pass
                case "MaxSessions":
                    found.max_sessions = int(value)
                case "MaxStartups":
                    begin, *rate = value.split(":")
                    if rate and (rate[0] != "100" or rate[1] != begin):
                        raise ValueError(f"MaxStartups {value}: expected N or N:100:N")
                    found.max_startups = int(begin)
                case "LoginGraceTime":
                    found.login_grace_time_s = float(value)
                case _ if name not in IGNORED:
                    raise ValueError(f"the Python SSH server has no option {line.strip()!r}")
        return found


def log(text: str) -> None:
    os.write(2, f"{text}\n".encode())


def set_comm(name: str) -> None:
    """Name this process as OpenSSH names its own: tests look for servers by that."""
    # Not through /proc: the listener of a host in namespaces is not in the host's.
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


class Connection(asyncssh.SSHServer):
    """One connection: who may log in, and what they may open."""

    def __init__(self, settings: Settings, startup: int) -> None:
        """`startup`: closed when the login has succeeded."""
        self._settings = settings
        self._startup = startup
        self._user = ""
        self._sessions = 0

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._conn = conn
        self._peer = conn.get_extra_info("peername")

    def begin_auth(self, username: str) -> bool:
        log(f"Userauth-request for {username} from {self._peer[0]} port {self._peer[1]} ssh2")
        # Only root can become another user.
        with contextlib.suppress(KeyError, OSError, ValueError):
            if os.geteuid() in (0, pwd.getpwnam(username).pw_uid):
                keys = asyncssh.read_authorized_keys(self._settings.authorized_keys)
                self._conn.set_authorized_keys(keys)
        self._user = username
        return True

    def public_key_auth_supported(self) -> bool:
        return self._settings.has_publickey

    def password_auth_supported(self) -> bool:
        return self._settings.has_password

    def auth_completed(self) -> None:
        log(f"Accepted publickey for {self._user} from {self._peer[0]} port {self._peer[1]} ssh2")
        os.close(self._startup)

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> bool:
        return True

    def session_requested(self) -> object:
        if self._sessions >= self._settings.max_sessions:
            return False
        self._sessions += 1
        channel = self._conn.create_server_channel(encoding=None)
        return channel, asyncssh.SSHServerProcess(self._run, None, 3, False)

    async def _run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        try:
            await run_command(process, self._settings, pwd.getpwnam(self._user))
        except (OSError, asyncssh.Error) as error:  # its channel or connection is gone
            log(f"session of {self._user} ended: {error!r}")
            process.close()
        finally:
            self._sessions -= 1


async def run_command(
    process: asyncssh.SSHServerProcess[bytes], settings: Settings, user: pwd.struct_passwd
) -> None:
    """Run a command with the user's shell, and send how it ended when its output has."""
    peer, own = process.get_extra_info("peername"), process.get_extra_info("sockname")
    environment = {
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "HOME": user.pw_dir,
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/games",
        "SHELL": user.pw_shell,
        "SSH_CLIENT": f"{peer[0]} {peer[1]} {own[1]}",
        "SSH_CONNECTION": f"{peer[0]} {peer[1]} {own[0]} {own[1]}",
        **settings.variables,
    }
    command, shell = process.command, Path(user.pw_shell).name
    if settings.forced_command is not None:
        if command is not None:
            environment["SSH_ORIGINAL_COMMAND"] = command
        command = settings.forced_command
    words = [f"-{shell}"] if command is None else [shell, "-c", command]
    other = {}
    if user.pw_uid != os.geteuid():
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        other = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
    child = await asyncio.create_subprocess_exec(
        *words,
        executable=user.pw_shell,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=user.pw_dir if os.path.isdir(user.pw_dir) else "/",
        env=environment,
        start_new_session=True,
        **other,
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    feeding = asyncio.create_task(feed(process.stdin, child.stdin))
    await asyncio.gather(drain(child.stdout, process.stdout), drain(child.stderr, process.stderr))
    status = await child.wait()
    if status < 0:
        process.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
    else:
        process.exit(status)
    feeding.cancel()


async def feed(source: asyncssh.SSHReader[bytes], pipe: asyncio.StreamWriter) -> None:
    """Pass on what the client sends. When the client or its connection is gone, close the pipe."""
    try:
        while data := await source.read(CHUNK):
            pipe.write(data)
            await pipe.drain()
    except (OSError, asyncssh.Error):
        pass
    finally:
        pipe.close()


async def drain(pipe: asyncio.StreamReader, target: asyncssh.SSHWriter[bytes]) -> None:
    while data := await pipe.read(CHUNK):
        target.write(data)
        await target.drain()


async def serve_connection(
    caller: socket.socket, settings: Settings, keys: list[asyncssh.SSHKey], startup: int
) -> None:
    """Serve one connection until it ends, and this process with it."""
    try:
        connection = await asyncssh.run_server(
            caller,
            server_factory=lambda: Connection(settings, startup),
            server_host_keys=keys,
            public_key_auth=settings.has_publickey,
            password_auth=settings.has_password,
            kbdint_auth=False,
            gss_host=None,
            host_based_auth=False,
            agent_forwarding=False,
            login_timeout=settings.login_grace_time_s,
        )
        await connection.wait_closed()
    except (OSError, asyncssh.Error) as error:
        log(f"Connection ended: {error!r}")
    except BaseException:
        log(traceback.format_exc())
    finally:
        # At once, and without the clean-up of asyncio, which would kill the commands that still
        # run.
        os._exit(0)


def main(config: str) -> None:
    settings = Settings.read(Path(config).read_text().splitlines())
    keys = [asyncssh.read_private_key(path) for path in settings.host_keys]
    set_comm("sshd")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes of connections
    listener = socket.create_server((settings.address, settings.port), backlog=BACKLOG)
    listener.setblocking(False)
    startups: set[int] = set()
    """Ends of pipes; the other end is closed when a login has succeeded, or its process has ended.
    """
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    log(f"Server listening on {settings.address} port {settings.port}.")
    while True:
        ready = {key.fd for key, _ in selector.select()}
        for ended in ready & startups:
            selector.unregister(ended)
            os.close(ended)
            startups.discard(ended)
        if listener.fileno() not in ready:
            continue
        try:
            caller, peer = listener.accept()
        except OSError:  # the caller is gone already
            continue
        with caller:
            if len(startups) >= settings.max_startups:
                log(f"drop connection from {peer[0]} port {peer[1]}: past MaxStartups")
                continue
            log(f"Connection from {peer[0]} port {peer[1]}")
            ours, theirs = os.pipe()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                set_comm("sshd-session")
                selector.close()
                listener.close()
                for other in (ours, *startups):
                    os.close(other)
                caller.setblocking(False)
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                asyncio.run(serve_connection(caller, settings, keys, theirs))
            os.close(theirs)
            startups.add(ours)
            selector.register(ours, selectors.EVENT_READ)


if __name__ == "__main__":
    main(sys.argv[1])
