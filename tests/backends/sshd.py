"""Real SSH servers for tests, on loopback and a free port.

Each has separate host keys, configuration and state of a node.

They are OpenSSH's where its sshd is installed, and asyncssh_server.py elsewhere.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, cast

from relaunch.backends import local_power

Kind = Literal["openssh", "asyncssh"]
SWITCH = "RELAUNCH_TEST_SSHD"
"""Environment variable that says which server tests use; by default OpenSSH's where it is
installed."""


def find_openssh() -> str | None:
    """Return OpenSSH's sshd, or None where it is not installed, or hidden by the switch.

    Raises:
        ValueError: the switch names no server, or one that is not installed.
    """
    wanted = os.environ.get(SWITCH) or None
    if wanted not in (None, "openssh", "asyncssh"):
        raise ValueError(f"{SWITCH}={wanted}: expected openssh or asyncssh")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    found = None if wanted == "asyncssh" else shutil.which("sshd", path=path)
    if wanted == "openssh" and found is None:
        raise ValueError(f"{SWITCH}={wanted}: no sshd is installed here (package openssh-server)")
    return found


OPENSSH = find_openssh()
DEFAULT: Kind = "asyncssh" if OPENSSH is None else "openssh"
"""The server of tests that name none."""
KINDS: tuple[Kind, ...] = ("asyncssh",) if OPENSSH is None else ("openssh", "asyncssh")
"""The servers of tests that are held against each."""
ASYNCSSH = (sys.executable, "-P", str(Path(__file__).with_name("asyncssh_server.py")))
PRIVILEGES = Path("/run/sshd")
"""sshd of root insists on it; distributions make it when the service is started."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATIENCE = 60.0


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """Make a key and its .pub, with OpenSSH's tool where it is installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    comment = "a test's"
    if shutil.which("ssh-keygen") is not None:
        words = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", comment, "-f", str(path)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        return path
    import asyncssh

    algorithm = {"ecdsa": "ecdsa-sha2-nistp256"}.get(kind, f"ssh-{kind}")
    key = asyncssh.generate_private_key(algorithm, comment)
    path.touch(mode=0o600)
    key.write_private_key(path, passphrase=passphrase or None)
    key.write_public_key(path.with_suffix(".pub"))
    return path


def eventually(what: object, why: str = "it never happened", patience: float = PATIENCE) -> None:
    assert callable(what)
    deadline = time.monotonic() + patience
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def children_of(pids: Iterable[int]) -> dict[int, list[int]]:
    """Children by parent, of all processes."""
    found: dict[int, list[int]] = {pid: [] for pid in pids}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parent = int(
                    Path("/proc", entry, "stat").read_bytes().rsplit(b")", 1)[1].split()[1]
                )
                found.setdefault(parent, []).append(int(entry))
    return found


class Sshd:
    """One server. It accepts `key`, for the user who runs the test."""

    def __init__(
        self,
        folder: Path,
        address: str,
        key: Path,
        kinds: tuple[str, ...] = ("ed25519",),
        server: Kind = DEFAULT,
        **options: str,
    ) -> None:
        """`kinds`: of its host keys.

        `options`: lines of its configuration, such as MaxSessions="2".
        """
        self.server = server
        self.within: tuple[str, ...] = ()
        """What it is started by: a network namespace, for example."""
        self.folder = folder
        self.address = address
        self.state = folder / "state"
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self.port = free_port(address)
        self.host_keys = [make_key(folder / f"host_{kind}", kind) for kind in kinds]
        self.authorized = folder / "authorized_keys"
        self.authorized.write_text(key.with_suffix(".pub").read_text())
        self.log = folder / "sshd.log"
        self.environment = {
            "RELAUNCH_AGENT_STATE": str(self.state),
            "RELAUNCH_KERNEL_LOG": str(folder / "kernel.log"),
            "PATH": f"{self.bin}:{sys.base_prefix}/bin:{SYSTEM_PATH}",
            "LD_LIBRARY_PATH": str(folder / "lib"),
            # Not that of the user who runs the tests, whose shell may change PATH.
            "HOME": str(folder / "home"),
            # Whatever is on PATH, and whatever a test orders: the machine that it runs on is never
            # rebooted.
            "RELAUNCH_REBOOT_COMMAND": json.dumps(
                [str(self.bin / "systemctl"), "reboot"], separators=(",", ":")
            ),
        }
        (folder / "home").mkdir()
        (folder / "kernel.log").touch()
        self.options = {
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "LogLevel": "VERBOSE",
            "MaxStartups": "100",
            **options,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._said = 0

    @property
    def user(self) -> str:
        return getpass.getuser()

    @property
    def known_hosts(self) -> str:
        """Lines for the keys that it has now."""
        name = self.address if self.port == 22 else f"[{self.address}]:{self.port}"
        return "".join(f"{name} {' '.join(public.split()[:2])}\n" for public in self.public_keys)

    @property
    def public_keys(self) -> list[str]:
        return [path.with_suffix(".pub").read_text() for path in self.host_keys]

    def start(self) -> Sshd:
        variables = " ".join(f"'{name}={value}'" for name, value in self.environment.items())
        lines = [
            f"Port {self.port}",
            f"ListenAddress {self.address}",
            *(f"HostKey {path}" for path in self.host_keys),
            f"AuthorizedKeysFile {self.authorized}",
            f"SetEnv {variables}",
            *(f"{name} {value}" for name, value in self.options.items()),
        ]
        config = self.folder / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        words = self._openssh(config) if self.server == "openssh" else [*ASYNCSSH, str(config)]
        self.log.touch()
        self._said = self.log.stat().st_size
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.within, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        eventually(self._listens, "sshd did not start")
        return self

    def _openssh(self, config: Path) -> list[str]:
        """Return the command of an sshd, when it has understood its configuration."""
        program = cast(str, OPENSSH)
        if os.geteuid() == 0:
            PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
        understood = subprocess.run(
            [program, "-T", "-f", str(config)], capture_output=True, text=True, check=True
        ).stdout
        reboot = self.environment["RELAUNCH_REBOOT_COMMAND"]
        assert f"setenv RELAUNCH_REBOOT_COMMAND={reboot}" in understood, understood
        return [program, "-D", "-e", "-f", str(config)]

    def _listens(self) -> bool:
        """By its log: a connection would be one of those that tests count."""
        assert self.process is not None
        said = self.log.read_bytes()[self._said :]
        assert self.process.poll() is None, said
        return b"Server listening on" in said

    def servers(self) -> list[int]:
        """The processes of this sshd: who listens, and those of each connection.

        None of what they have started.
        """
        if self.process is None or self.process.poll() is not None:
            return []
        children = children_of([self.process.pid])
        found, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                if Path("/proc", str(pid), "comm").read_text().startswith("sshd"):
                    found.append(pid)
                    waiting += children.get(pid, [])
        return found

    def signal(self, number: signal.Signals) -> None:
        local_power.signal_all(self.servers(), number)

    def kill(self) -> None:
        """End it and its connections at once; what was started over them lives on if it can."""
        if self.process is None:
            return
        pids = self.servers()
        local_power.signal_all(pids, signal.SIGSTOP)
        local_power.signal_all({*pids, *self.servers()}, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def program_named(self, name: str, text: str) -> Path:
        """Put a program before all others on the path of each login."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def logins(self) -> int:
        return self.log.read_text().count("Accepted publickey")

    def close(self) -> None:
        self.kill()
        if self.state.is_dir():
            local_power.reboot(self.state)


def free_port(address: str) -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])
