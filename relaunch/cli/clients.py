"""Commands that have a daemon, or other hosts, do the work of a rank.

Relaunch stops the client. What that has started goes on, unseen: a next generation would train
beside it (docs/decisions/0103-clients-of-daemons.md).
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

WRAPPERS = frozenset(("sudo", "env", "exec", "command", "timeout", "nohup", "time", "setsid"))
WRAPPERS |= {"nice", "ionice", "stdbuf", "taskset", "numactl", "flock", "tini", "dumb-init"}
"""They run the rest of their words as a command, with or without a process of their own."""
ARGUMENT = re.compile(r"-.*|[A-Za-z_][A-Za-z0-9_]*=.*|[0-9][0-9.,]*[smhd]?|", re.DOTALL)
"""An argument of a wrapper that is no command: an option, a variable, a number, a duration."""
KEEPS = re.compile(r"-[A-Za-z]*E|--preserve-env.*")
"""With these options `sudo` hands variables on."""
SHELLS = frozenset(("sh", "bash", "dash", "zsh"))
KEYWORD = re.compile(r"if|then|elif|else|while|until|do|!|\{|[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
"""A word of a shell behind which a command begins, or a variable for it."""
ENDINGS = frozenset(("echo", "printf", "exit", "true", ":", "wait", "date", "fi", "done", "}"))
"""What does no work of a rank at the end of a shell's text."""
ENGINES = frozenset(("docker", "docker-compose", "nerdctl", "podman", "podman-remote"))
SWITCHES = re.compile(
    r"-[ditPqTD]+|--(detach|interactive|tty|rm|init|privileged|read-only|publish-all|quiet|attach"
    r"|sig-proxy|no-healthcheck|no-deps|service-ports|build|remove-orphans|debug|remote|tls"
    r"|tlsverify|.*=.*)|--",
    re.DOTALL,
)
"""Options of an engine's client behind which no value follows."""
TAKES_VALUE = re.compile(r"-[ditPqT]*[A-Za-z]|--.+", re.DOTALL)
DETACHED = re.compile(r"-[itPqT]*d[ditPqT]*|--detach(=true)?")
ATTACHED = re.compile(r"-[ai]+|--(attach|interactive)(=true)?")
USER = re.compile(r"-[ditPqT]*u.*|--user(=.*)?", re.DOTALL)
ENV_FILE = re.compile(r"--env-file(=.*)?", re.DOTALL)
REMOTE = re.compile(r"-r|-c.*|--(remote|url|connection)(=.*)?", re.DOTALL)
"""With these, in front of its subcommand, podman asks an engine."""
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


class RankProgram(NamedTuple):
    """A program that a command runs, behind wrappers and shells."""

    name: str
    words: Sequence[str]
    """Its arguments."""
    drops: bool
    """Whether a `sudo` takes its variables."""
    is_last: bool
    """Whether nothing but endings follows it in a shell's text, so that it is the rank's work."""

    @property
    def is_marked(self) -> bool:
        """Whether it hands over the variables by which relaunch finds what it starts."""
        marks = [f"{mark}=" if self.drops else mark for mark in MARKS]
        return all(any(mark in word for word in self.words) for mark in marks)


class Start(NamedTuple):
    """What the client of an engine is asked to start."""

    verb: str
    options: Sequence[str]
    """Those of the subcommand: what follows belongs to the program in the container."""
    is_remote: bool
    """Whether an engine starts it, and not the client itself."""


def _find_programs(
    words: Sequence[str], drops: bool = False, is_last: bool = True
) -> list[RankProgram]:
    """Return what a command runs, as far as its words tell; a shell's text may run several."""
    while words:
        name, words = PurePosixPath(words[0]).name, words[1:]
        if name in SHELLS:
            texts = [index for index, word in enumerate(words) if re.fullmatch("-[a-z]*c", word)]
            if not texts or texts[0] + 1 >= len(words):
                return [RankProgram(name, words, drops, is_last)]
            return _read_text(words[texts[0] + 1], drops, is_last)
        if name not in WRAPPERS:
            return [RankProgram(name, words, drops, is_last)]
        if name == "flock":
            words = _skip_lock(words)
        arguments = _list_arguments(words)
        words = words[len(arguments) :]
        is_set = all(any(word.startswith(f"{mark}=") for word in arguments) for mark in MARKS)
        drops = (drops or name == "sudo") and not is_set
        drops = drops and not any(KEEPS.fullmatch(word) for word in arguments)
    return []


def _skip_lock(words: Sequence[str]) -> Sequence[str]:
    """Return the command behind the options and the file of `flock`."""
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in ("-w", "--timeout", "-E", "--conflict-exit-code") else 1 :]
    words = words[1:]
    return ["sh", "-c", *words[1:]] if words and words[0] in ("-c", "--command") else words


def _list_arguments(words: Sequence[str]) -> Sequence[str]:
    """Return the arguments of a wrapper in front of the command that it runs."""
    is_option = False
    for index, word in enumerate(words):
        if not (ARGUMENT.fullmatch(word) or (is_option and _is_value(word))):
            return words[:index]
        is_option = re.fullmatch("-[A-Za-z]", word) is not None
    return words


def _is_value(word: str) -> bool:
    """Return whether a word behind an option of one letter is its value, as in `sudo -u alice`."""
    name = PurePosixPath(word).name
    return "/" not in word and not (name in WRAPPERS | SHELLS | ENGINES or name in ELSEWHERE)


def _read_text(text: str, drops: bool, is_last: bool) -> list[RankProgram]:
    """Return the programs of a shell's text, but not those in its substitutions."""
    text = re.sub(r"^\s*#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "$_", text)
    while (shorter := re.sub(r"\$\([^()]*\)", "$_", text)) != text:
        text = shorter
    text = text.partition("<<")[0]  # what a file in the text says is no command
    text = text.replace("&>", ">").replace(">&", ">")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    pipes: list[list[list[str]]] = [[[]]]
    try:
        for word in lexer:
            if word.strip(";&|()\n"):
                pipes[-1][-1].append(word)
            elif word in ("|", "|&"):
                pipes[-1].append([])
            else:
                pipes.append([[]])
    except ValueError:  # a quote is open: the shell will say so
        return []
    found: list[RankProgram] = []
    for pipe in reversed(pipes):
        programs = []
        for part in pipe:
            words = list(itertools.dropwhile(KEYWORD.fullmatch, part))
            programs += _find_programs(words, drops, is_last)
        found = programs + found
        is_last = is_last and all(program.name in ENDINGS for program in programs)
    return found


def _list_options(words: Sequence[str]) -> Sequence[str]:
    """Return the options, and their values, in front of the first word that is none."""
    is_value = False
    for index, word in enumerate(words):
        if not word.startswith("-") and not word.startswith("$") and not is_value:
            return words[:index]
        is_value = not is_value and _takes_value(word)
    return words


def _takes_value(option: str) -> bool:
    """Return whether the word behind an option of an engine's client is its value."""
    return SWITCHES.fullmatch(option) is None and TAKES_VALUE.fullmatch(option) is not None


def _has_unknown(options: Sequence[str]) -> bool:
    """Return whether variables may be handed over by what is written elsewhere."""
    is_expanded = any(
        word.startswith("$") and not _takes_value(before)
        for before, word in itertools.pairwise(("", *options))
    )
    return is_expanded or any(map(ENV_FILE.fullmatch, options))


def _find_start(program: RankProgram) -> Start | None:
    """Return what the client of an engine is asked to start and to wait for; None: nothing."""
    if program.name not in ENGINES:
        return None
    words = program.words
    options = _list_options(words)
    is_remote = program.name != "podman" or any(map(REMOTE.fullmatch, options))
    words = words[len(options) :]
    verbs = ["compose"] if program.name == "docker-compose" else []
    while words:
        verbs.append(words[0])
        options = _list_options(words[1:])
        words = words[1 + len(options) :]
        if verbs[-1] not in ("compose", "container"):
            break
    verb = " ".join(verb for verb in verbs if verb != "container")
    if verb == "start" and not any(map(ATTACHED.fullmatch, options)):
        return None
    if verb == "compose up" and any(map(DETACHED.fullmatch, options)):
        return None
    if verb not in ("run", "exec", "start", "compose run", "compose exec", "compose up"):
        return None
    return Start(verb, options, is_remote)


def _is_refused(program: RankProgram, start: Start) -> bool:
    """Return whether it is sure that an engine starts the rank, and that relaunch cannot see it."""
    if program.is_marked or not start.is_remote or start.verb == "compose up":
        return False
    return program.is_last and not _has_unknown(start.options)


def _join(name: str, start: Start) -> str:
    verb = start.verb.removeprefix("compose ") if name == "docker-compose" else start.verb
    return f"{name} {verb}"


def find_refusal(command: Sequence[str]) -> str | None:
    """Return why a command cannot be run as it is written, and how to write it; None: it can."""
    for program in _find_programs(command):
        name, words, drops, is_last = program
        is_systemd = name == "systemd-run" and is_last and not program.is_marked
        if is_systemd and "--scope" not in words:
            return (
                "systemd starts what follows systemd-run. Relaunch would stop systemd-run, take "
                "that for the end of the rank, and could start it again beside the old one. Leave "
                "it out, or write `systemd-run --scope …`"
            )
        start = _find_start(program)
        if start is not None and _is_refused(program, start):
            shown = _join(name, start)
            if start.verb in ("run", "start"):
                shown = f"{name} run --init --rm"
            return (
                f"an engine starts the container, not {name}. Relaunch would stop {name}, take "
                "that for the end of the rank, and could start it again beside a container that "
                "goes on. Hand over the variables by which relaunch finds and ends it: "
                f"`{'sudo -E ' * drops}{shown} -e {' -e '.join(MARKS)} …` ({SECTION})"
            )
    return None


def find_notice(command: Sequence[str]) -> str | None:
    """Return what relaunch cannot promise for a command; None: nothing is to be said."""
    notices = (_find_notice(program) for program in _find_programs(command))
    return next(filter(None, notices), None)


def _find_notice(program: RankProgram) -> str | None:
    name, words, _, is_last = program
    start = _find_start(program)
    if start is not None:
        if not start.is_remote:
            return None
        if not program.is_marked:
            return (
                f"an engine starts the containers of `{_join(name, start)}`: relaunch finds and "
                f"ends one only with {' and '.join(MARKS)} of its rank among its variables; "
                f"another goes on after a fault or a stop ({SECTION})"
            )
        is_found = any(map(USER.fullmatch, start.options))
        return None if is_found or os.geteuid() == 0 or name == "podman" else BLIND
    if name not in ELSEWHERE or not is_last:
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
