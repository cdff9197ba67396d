"""Selects the keys offered to a host, from the SSH agent and files, in OpenSSH's order."""

from __future__ import annotations

import base64
import binascii
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH

from relaunch.backends.ssh.known_hosts import fingerprint, kind
from relaunch.backends.ssh.route import Hop

MOST = 6
"""OpenSSH's server closes the connection after this many keys (MaxAuthTries), even if the next one
would be accepted."""
LISTING = 5.0
"""Seconds for the SSH agent to say which keys it has."""
SIGNING = 10.0
"""Seconds for the SSH agent to sign. It may ask a person first. Less than the time for the
authentication, so that no node is blamed for it."""
ABSENT = "is not there"


@dataclass(frozen=True, slots=True)
class Identity:
    key: paramiko.PKey
    source: str

    @property
    def text(self) -> str:
        return f"{self.source} ({kind(self.key.asbytes())} {fingerprint(self.key.asbytes())})"


class SshAgentError(paramiko.SSHException):
    """The SSH agent does not answer. The message is a clause for a person."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the SSH agent at {path} does not answer")


class SshAgent(AgentSSH):
    """The SSH agent at a path, which may hang: paramiko's own class waits for it for ever."""

    def __init__(self, path: str) -> None:
        """Ask the agent for its keys.

        Raises:
            SshAgentError: it does not answer.
            OSError: it cannot be reached.
            paramiko.SSHException, ValueError: what it answers cannot be read.
        """
        super().__init__()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(LISTING)
        try:
            self._socket.connect(path)
            self._connect(self._socket)  # type: ignore[attr-defined]
        except BlockingIOError as error:  # so many wait for it that it can take no more
            self.close()
            raise SshAgentError(path) from error
        except BaseException:
            self.close()
            raise
        self._socket.settimeout(SIGNING)

    def _send_message(self, msg: bytes | paramiko.Message) -> tuple[int, paramiko.Message]:
        try:
            answer: tuple[int, paramiko.Message] = super()._send_message(msg)  # type: ignore[misc]
        except TimeoutError as error:
            raise SshAgentError(self._path) from error
        return answer

    def close(self) -> None:
        self._socket.close()


@dataclass(slots=True)
class Identities:
    usable: list[Identity] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    """The keys that could not be offered, each with the reason."""
    agent_failure: str | None = None
    """Why the SSH agent's keys are not offered, if there is an agent."""
    agent: SshAgent | None = None

    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()


def identities(hop: Hop) -> Identities:
    """Collect the keys that can be offered.

    A missing file is reported only if the fleet file names it.
    """
    found = Identities()
    read = [(file, _read(Path(file).expanduser())) for file in hop.keys]
    held: dict[bytes, paramiko.PKey] = {}
    # Nothing that a worker does not need is to keep it from its nodes.
    if not hop.only_these or any(isinstance(key, str) for _, key in read):
        held = _ask_agent(found)
    from_files: list[Identity] = []
    for file, key in read:
        public = _public(Path(file).expanduser())
        if public is not None and public in held:
            found.usable.append(Identity(held.pop(public), f"{file} from the SSH agent"))
        elif isinstance(key, paramiko.PKey):
            from_files.append(Identity(key, file))
        elif key != ABSENT or hop.chosen:
            found.unusable.append(f"{file} {key}")
    if not hop.only_these:
        found.usable += [Identity(key, "a key of the SSH agent") for key in held.values()]
    found.usable += from_files
    del found.usable[MOST:]
    return found


def _ask_agent(found: Identities) -> dict[bytes, paramiko.PKey]:
    """Return the keys of the SSH agent, if there is one, by their public keys."""
    path = os.environ.get("SSH_AUTH_SOCK")
    if not path:
        return {}
    try:
        found.agent = SshAgent(path)
    except (FileNotFoundError, ConnectionRefusedError):  # it has ended
        return {}
    except SshAgentError as error:
        found.agent_failure = str(error)
        return {}
    except (paramiko.SSHException, OSError, ValueError) as error:
        found.agent_failure = f"the SSH agent at {path} gives no keys: {error}"
        return {}
    return {key.asbytes(): key for key in found.agent.get_keys()}


def _read(path: Path) -> paramiko.PKey | str:
    """Return the private key of a file, or why it has none that can be used."""
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError:
        return ABSENT
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (paramiko.PasswordRequiredException, TypeError):  # raised by its key library
        return "is locked by a passphrase and its key is not in the SSH agent"
    except UnsupportedAlgorithm as error:  # a key of a hardware token, for example
        return f"is of a kind that relaunch cannot use: {error}"
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError) as error:
        return f"is no private key that can be read: {error}"


def _public(path: Path) -> bytes | None:
    try:
        return base64.b64decode(path.with_name(path.name + ".pub").read_text().split()[1])
    except (OSError, IndexError, ValueError, binascii.Error):
        return None
