"""Commands that have a daemon, or other hosts, do the work of a rank.

Relaunch stops the client. What that has started goes on, unseen: a next generation would train
beside it (docs/decisions/0103-clients-of-daemons.md).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

WRAPPERS = frozenset(("sudo", "env", "exec", "command", "timeout", "nohup", "time", "setsid"))
WRAPPERS |= {"nice", "ionice", "stdbuf", "taskset", "numactl"}
"""They run the rest of their words as a command, with or without a process of their own."""
ARGUMENT = re.compile(r"-.*|[A-Za-z_][A-Za-z0-9_]*=.*|[0-9][0-9.,]*[smhd]?|", re.DOTALL)
"""An argument of a wrapper that is no command: an option, a variable, a number, a duration."""
SHELLS = frozenset(("sh", "bash", "dash", "zsh"))
ENGINES = frozenset(("docker", "docker-compose", "nerdctl", "podman", "podman-remote"))
ELSEWHERE = {
    "kubectl": "a pod",
    "oc": "a pod",
    "srun": "Slurm's daemons",
    "mpirun": "other hosts",
    "mpiexec": "other hosts",
    "prterun": "other hosts",
    "pdsh": "other hosts",
    "ssh": "another host",
}
"""What runs the work of these clients."""
HOSTS = frozenset(("-H", "-host", "--host", "-hostfile", "--hostfile", "-machinefile", "-f"))
HOSTS |= {"--machinefile", "-hosts", "--hosts"}
"""Options with which the clients of MPI go to other hosts."""
MARKS = ("RELAUNCH_TOKEN", "RELAUNCH_NODE_STATE")
"""The variables by which a process of a rank is found."""
BLIND = (
    "an agent that is not root finds a container only if it runs as the agent's user: add "
    "`--user UID:GID`, unless the engine is rootless"
)
SECTION = "docs/jobs.md, Training in a container"


def _find_client(words: Sequence[str]) -> tuple[str, Sequence[str], bool]:
    """Return the name of the program behind wrappers and a shell, its arguments, and whether a
    `sudo` takes its variables."""
    drops = False
    while words:
        name, words = PurePosixPath(words[0]).name, words[1:]
        if name in SHELLS:
            texts = [index for index, word in enumerate(words) if re.fullmatch("-[a-z]*c", word)]
            if not texts or texts[0] + 1 >= len(words):
                return name, words, drops
            try:
                words = shlex.split(words[texts[0] + 1])
            except ValueError:  # a quote is open: the shell will say so
                return name, (), drops
            continue
        if name not in WRAPPERS:
            return name, words, drops
        drops = drops or name == "sudo"
        is_option = False
        while words and (ARGUMENT.fullmatch(words[0]) or (is_option and _is_value(words[0]))):
            is_option = re.fullmatch("-[A-Za-z]", words[0]) is not None
            drops = drops and not words[0].startswith(("-E", "--preserve-env"))
            words = words[1:]
    return "", (), False


def _is_value(word: str) -> bool:
    """Return whether a word behind an option of one letter is its value, as in `sudo -u alice`."""
    name = PurePosixPath(word).name
    return "/" not in word and not (name in WRAPPERS | SHELLS | ENGINES or name in ELSEWHERE)


def find_refusal(command: Sequence[str]) -> str | None:
    """Return why a command cannot be run as it is written, and how to write it; None: it can."""
    name, words, drops = _find_client(command)
    if not drops and all(any(mark in word for word in words) for mark in MARKS):
        return None
    if name == "systemd-run" and "--scope" not in words:
        return (
            "systemd starts what follows systemd-run. Relaunch would stop systemd-run, take that "
            "for the end of the rank, and could start it again beside the old one. Leave it out, "
            "or write `systemd-run --scope …`"
        )
    is_remote = name != "podman" or not {"--remote", "-r"}.isdisjoint(words)
    if name in ENGINES and is_remote and not {"run", "exec", "start", "compose"}.isdisjoint(words):
        verb = "exec" if "exec" in words else "run --init --rm"
        return (
            f"an engine starts the container, not {name}. Relaunch would stop {name}, take that "
            "for the end of the rank, and could start it again beside a container that goes on. "
            "Hand over the variables by which relaunch finds and ends it: "
            f"`{'sudo -E ' * drops}{name} {verb} -e {' -e '.join(MARKS)} …` ({SECTION})"
        )
    return None


def find_notice(command: Sequence[str]) -> str | None:
    """Return what relaunch cannot promise for a command; None: nothing is to be said."""
    name, words, _ = _find_client(command)
    if name in ENGINES:
        is_found = any(re.match("--user|-u", word) for word in words) or MARKS[0] not in words
        return None if is_found or os.geteuid() == 0 or name == "podman" else BLIND
    if name not in ELSEWHERE:
        return None
    if name in ("mpirun", "mpiexec", "prterun"):
        options = {word.partition("=")[0] for word in words}
        if options.isdisjoint(HOSTS):
            return None
    return (
        f"{name} has {ELSEWHERE[name]} do the work, where relaunch neither ends it nor sees its "
        f"end: after a fault or a stop a next generation may run beside it. Make each host a node "
        "of the fleet, and relaunch starts the ranks there (docs/nodes.md)"
    )
