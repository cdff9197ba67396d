"""Selects the keys offered to a host, from the SSH agent and files, in OpenSSH's order."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from relaunch.backends.ssh.known_hosts import fingerprint, kind
from relaunch.backends.ssh.route import Hop

MOST = 6
"""OpenSSH's server closes the connection after this many keys (MaxAuthTries), even if the next one
would be accepted."""


@dataclass(frozen=True, slots=True)
class Identity:
    key: paramiko.PKey
    source: str

    @property
    def text(self) -> str:
        return f"{self.source} ({kind(self.key.asbytes())} {fingerprint(self.key.asbytes())})"


@dataclass(slots=True)
class Identities:
    usable: list[Identity] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    """The keys that could not be offered, each with the reason."""
    agent: paramiko.Agent | None = None

    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()


def identities(hop: Hop) -> Identities:
    """Collect the keys that can be offered.

    A missing file is reported only if the fleet file names it.
    """
    found = Identities()
    held: dict[bytes, paramiko.PKey] = {}
    try:
        found.agent = paramiko.Agent()
        held = {key.asbytes(): key for key in found.agent.get_keys()}
    except (paramiko.SSHException, OSError, EOFError) as error:
        found.unusable.append(f"the SSH agent does not answer: {error}")
    from_files: list[Identity] = []
    for file in hop.keys:
        path = Path(file).expanduser()
        public = _public(path)
        if public is not None and public in held:
            found.usable.append(Identity(held.pop(public), f"{file} from the SSH agent"))
            continue
        try:
            from_files.append(Identity(paramiko.PKey.from_path(path), file))
        except FileNotFoundError:
            if hop.chosen:
                found.unusable.append(f"{file} is not there")
        except OSError as error:
            found.unusable.append(f"{file} cannot be read: {error.strerror}")
        except (paramiko.PasswordRequiredException, TypeError):  # raised by its key library
            found.unusable.append(
                f"{file} is locked by a passphrase and its key is not in the SSH agent"
            )
        except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError) as error:
            found.unusable.append(f"{file} is no private key that can be read: {error}")
    if not hop.only_these:
        found.usable += [Identity(key, "a key of the SSH agent") for key in held.values()]
    found.usable += from_files
    del found.usable[MOST:]
    return found


def _public(path: Path) -> bytes | None:
    try:
        return base64.b64decode(path.with_name(path.name + ".pub").read_text().split()[1])
    except (OSError, IndexError, ValueError, binascii.Error):
        return None
