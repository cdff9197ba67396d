"""Asks the user whether a node's host key is the right one, and records it.

A key that has changed is never replaced here.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from relaunch.cli.direct import MissingKey, remember
from relaunch.config import ConfigError
from relaunch.spec.fleet import FleetSpec

if TYPE_CHECKING:
    from relaunch.backends.ssh.trust import HostKey


def trust(
    spec: FleetSpec,
    keys: Iterable[HostKey | MissingKey],
    yes: bool,
    ask: Callable[[str], str] | None,
) -> bool:
    """Show the keys, ask about each unknown one, and record those that were vouched for.

    Return whether all keys are known afterwards.

    Args:
        yes: Vouch for all unknown keys without asking.
        ask: Asks the user a question; None if there is no terminal.

    Raises:
        ConfigError: There is an unknown key and no terminal to ask at.
    """
    known = True
    for key in keys:
        if isinstance(key, MissingKey):
            print(f"{key.node}: {key.reason}")
            known = False
        elif key.standing == "known":
            print(f"{key.node}: {key.algorithm} {key.fingerprint}, known already")
        elif key.standing == "unknown":
            known = _unknown(spec, key, yes, ask) and known
        else:
            print(_danger(key))
            known = False
    return known


def _unknown(spec: FleetSpec, key: HostKey, yes: bool, ask: Callable[[str], str] | None) -> bool:
    address = next(node.address for node in spec.nodes if node.name == key.node)
    print(f"{key.node} ({address}): {key.algorithm} {key.fingerprint}, not yet in {key.file}")
    if not yes:
        if ask is None:
            raise ConfigError(
                f"no terminal to ask whether this is the key of {key.node}: compare it with the "
                "key on that machine, then repeat the command with --yes"
            )
        print(
            "  to compare, run on the machine itself: ssh-keygen -lf "
            f"/etc/ssh/ssh_host_{key.algorithm.lower()}_key.pub"
        )
        answer = ask(f"  is that the key of {key.node}? [y/N] ").strip().lower()
        if answer not in ("y", "yes"):
            print(f"{key.node}: not trusted, nothing was written")
            return False
    remember(key)
    print(f"{key.node}: trusted")
    return True


def _danger(key: HostKey) -> str:
    if key.standing == "revoked":
        return (
            f"{key.node}: {key.reason}: do not trust a machine that presents it. Nothing was "
            "written"
        )
    name, file = shlex.quote(key.known_as), key.told_by or key.file
    return (
        f"{key.node}: {key.reason}\n"
        "  An attacker who answers in the node's place looks exactly like this, and would receive "
        "your commands and your secrets.\n"
        "  If you know from another source than this connection that the machine was reinstalled, "
        "remove the old key:\n"
        f"      ssh-keygen -R {name} -f {file if file.startswith('~/') else shlex.quote(file)}\n"
        "  and run this command again. Nothing was written"
    )


def at_terminal() -> Callable[[str], str] | None:
    """Return a function that asks the user; None if there is no terminal."""
    return _ask if sys.stdin.isatty() and sys.stdout.isatty() else None


def _ask(question: str) -> str:
    try:
        return input(question)
    except EOFError:  # ctrl-D counts as no
        print()
        return ""
