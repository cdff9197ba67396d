"""Resolves the hosts on the way to a node, and the user, address and keys for each of them.

Each value comes from the node in the fleet file, then from the fleet file's `ssh:`, then from the
SSH configuration, then from OpenSSH's defaults. Connects to nothing.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.ssh_exception import ConfigParseError

from relaunch.backends.ssh.known_hosts import STANDARD_PORT
from relaunch.spec.fleet import FleetNode, SshOptions, parse_jumps

USER_CONFIG, SYSTEM_CONFIG = "~/.ssh/config", "/etc/ssh/ssh_config"
KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
KNOWN_TO_ALL = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
IDENTITIES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
MOST_JUMPS = 8
"""Most jump hosts: bounds a configuration whose ProxyJumps form a circle."""
DEEPEST_INCLUDE = 16
"""The limit of OpenSSH."""


class SshConfigError(ValueError):
    """The fleet file or the SSH configuration cannot be used. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Hop:
    name: str
    """As written in the fleet file or the SSH configuration."""
    host: str
    port: int
    user: str
    known_as: str
    """The name in known_hosts: its HostKeyAlias, or its host."""
    known_port: int
    """The port in known_hosts. OpenSSH looks up a HostKeyAlias without the port."""
    keys: tuple[str, ...]
    """Files of private keys, in the order in which they are offered."""
    only_these: bool
    """Whether keys of the SSH agent that are not in `keys` are withheld."""
    chosen: bool
    """Whether the fleet file names these keys. If so, an unusable key is reported."""
    known_hosts: tuple[str, ...]
    hash_known_hosts: bool

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}" if ":" not in self.host else f"[{self.host}]:{self.port}"


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    """The node's name in the fleet file."""
    hops: tuple[Hop, ...]
    """Jump hosts in order, then the node."""

    @property
    def node(self) -> Hop:
        return self.hops[-1]


def read_config(options: SshOptions) -> paramiko.SSHConfig:
    """Read the SSH configuration that `config` names, or the user's and the system's, as ssh does.

    Raises:
        SshConfigError: it cannot be read.
    """
    return parse_config(options, read_config_text(options))


def read_config_text(options: SshOptions) -> str:
    """Return the text of the SSH configuration, with what it includes.

    Raises:
        SshConfigError: it cannot be read.
    """
    lines: list[str] = []
    for file in _list_files(options):
        path = Path(file).expanduser()
        if options.config is None and not path.exists():
            continue
        lines += ["Host *", *_lines(path, 0)]
    return "\n".join(lines)


def parse_config(options: SshOptions, text: str) -> paramiko.SSHConfig:
    """Parse what `read_config_text` returned.

    Raises:
        SshConfigError: it is no SSH configuration.
    """
    try:
        return paramiko.SSHConfig.from_text(text)
    except (ConfigParseError, ValueError) as error:
        raise SshConfigError(
            f"the SSH configuration {' and '.join(_list_files(options))} cannot be read: {error}"
        ) from None


def _list_files(options: SshOptions) -> list[str]:
    return [options.config] if options.config is not None else [USER_CONFIG, SYSTEM_CONFIG]


def _lines(path: Path, depth: int) -> list[str]:
    """Return a file's lines, with each Include replaced by its files: paramiko has no Include."""
    if depth > DEEPEST_INCLUDE:
        raise SshConfigError(
            f"the SSH configuration {path} includes itself, "
            f"or more than {DEEPEST_INCLUDE} files deep"
        )
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise SshConfigError(
            f"the SSH configuration {path} cannot be read: {error.strerror}"
        ) from None
    found: list[str] = []
    header = "Host *"
    for line in text.splitlines():
        match = re.fullmatch(r"\s*(\w+)(?:\s*=\s*|\s+)(.*?)\s*", line)
        key = match[1].lower() if match else ""
        if key in ("host", "match"):
            header = line
        if match is None or key != "include":
            found.append(line)
            continue
        base = Path("~/.ssh").expanduser() if not str(path).startswith("/etc/") else path.parent
        for pattern in match[2].split():
            for name in sorted(glob.glob(str(base / Path(pattern.strip('"')).expanduser()))):
                found += _lines(Path(name), depth + 1)
        found.append(header)
    return found


def route(options: SshOptions, node: FleetNode, config: paramiko.SSHConfig) -> Route:
    """Return the route to a node.

    Raises:
        SshConfigError: the configuration of a host on the route cannot be used.
    """
    last = _hop(config, options, node.address, node.user or options.user, node.port or options.port)
    return Route(node.name, (*_jumps(config, options, node.address, options.proxy_jump, 0), last))


def _jumps(
    config: paramiko.SSHConfig, options: SshOptions, to: str, given: str | None, depth: int
) -> tuple[Hop, ...]:
    """Return the jump hosts before `to`.

    The first may itself have jump hosts from the configuration; those before the others are all
    listed here.
    """
    if depth > MOST_JUMPS:
        raise SshConfigError(
            f"the way to {to} leads over more than {MOST_JUMPS} hosts: "
            "expected a ProxyJump without a circle"
        )
    found = _lookup(config, to)
    text = given if given is not None else found.get("proxyjump")
    if text is None and found.get("proxycommand") is not None:
        raise SshConfigError(
            f"the SSH configuration has a ProxyCommand for {to}, which is not supported: "
            "expected ProxyJump"
        )
    try:
        jumps = parse_jumps(text) if text is not None else ()
    except ValueError as error:
        raise SshConfigError(f"the ProxyJump of {to}: {error}") from None
    if not jumps:
        return ()
    before = _jumps(config, options, jumps[0][1], None, depth + 1)
    return (*before, *(_hop(config, options, host, user, port) for user, host, port in jumps))


def _hop(
    config: paramiko.SSHConfig, options: SshOptions, name: str, user: str | None, port: int | None
) -> Hop:
    found = _lookup(config, name)
    host = found.get("hostname") or name
    given = found.get("port", "22")
    if port is None and not (given.isdigit() and 0 < int(given) < 2**16):
        raise SshConfigError(
            f"the SSH configuration has port {given!r} for {name}: expected a number up to 65535"
        )
    configured = [key for key in found.get("identityfile", []) if key.lower() != "none"]
    keys = [options.key] if options.key is not None else configured or list(IDENTITIES)
    own = (
        [options.known_hosts]
        if options.known_hosts is not None
        else found.get("userknownhostsfile", "").split() or list(KNOWN_HOSTS)
    )
    everybodys = found.get("globalknownhostsfile", "").split() or list(KNOWN_TO_ALL)
    port = port or int(given)
    alias = found.get("hostkeyalias")
    return Hop(
        name=name,
        host=host,
        port=port,
        user=user or found.get("user") or getpass.getuser(),
        known_as=alias or host,
        known_port=STANDARD_PORT if alias else port,
        keys=tuple(keys),
        only_these=options.key is not None or found.get("identitiesonly", "no").lower() == "yes",
        chosen=options.key is not None,
        known_hosts=tuple(file for file in (*own, *everybodys) if file != "none"),
        hash_known_hosts=found.get("hashknownhosts", "no").lower() == "yes",
    )


def _lookup(config: paramiko.SSHConfig, name: str) -> paramiko.SSHConfigDict:
    try:
        return config.lookup(name)
    except (paramiko.SSHException, ImportError, OSError, ValueError, KeyError) as error:
        raise SshConfigError(f"the SSH configuration cannot be used for {name}: {error}") from None


def check(options: SshOptions, nodes: tuple[FleetNode, ...]) -> None:
    """Check that every node has a route, and that the files in the fleet file can be read.

    Raises:
        SshConfigError: a file is missing or unreadable, or a route cannot be used.
    """
    for what, file in (
        ("config", options.config),
        ("known_hosts", options.known_hosts),
        ("key", options.key),
    ):
        if file is None:
            continue
        path = Path(file).expanduser()
        if not path.is_file():
            raise SshConfigError(f"ssh: {what}: {file} is not there: expected a file")
        if not os.access(path, os.R_OK):
            raise SshConfigError(f"ssh: {what}: {file} cannot be read by this user")
    config = read_config(options)
    for node in nodes:
        route(options, node, config)
