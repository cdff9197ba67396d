"""Ranks that are run by a daemon of the node, because their command is, or has, its client.

`docker run` asks an engine to start a container: what trains there is no descendant of the rank,
and goes on when the client is killed. It is found by the token in its environment, where the job
hands that over. This is part of the shim, and signals nothing.
"""

from __future__ import annotations

import itertools
import re
from typing import Callable, Iterable, Iterator, List, Optional, Set, Tuple

from relaunch.agent import processes
from relaunch.agent.protocol import Json, now

CLIENTS = frozenset(
    ("docker", "docker-compose", "nerdctl", "podman", "podman-remote", "systemd-run", "srun")
)
"""Those that have processes started on this node, with variables of theirs.

relaunch.cli.clients knows more: what runs on other hosts is not found here.
"""
OTHERS = frozenset(("systemd-run", "srun"))
"""Those that count only where a command begins: no word behind them tells."""
STARTS = re.compile(r"run|exec|(re)?start|compose|up|\$.*")
"""The word of an engine's client that starts something, or may stand for it."""
WRAPPERS = frozenset(("sudo", "env", "exec", "command", "timeout", "nohup", "time", "setsid"))
WRAPPERS |= {"nice", "ionice", "stdbuf", "taskset", "numactl", "flock", "tini", "dumb-init"}
WRAPPERS |= {"sh", "bash", "dash", "zsh", "if", "then", "elif", "else", "while", "until", "do", "!"}
"""Words behind which a command begins."""
ARGUMENT = re.compile(r"-.*|[A-Za-z_]\w*=.*|[0-9].*", re.DOTALL)
"""What may stand between: an option, a variable, a number, a duration."""
TAKES_VALUE = re.compile(r"-[A-Za-z]|flock")
"""A word whose value may follow: an option of one letter, and what locks a file."""
LOOK_DELAYS = (2.0, 60.0)
"""Seconds between two looks for clients below the ranks: the first and the longest.

For a client that is killed: later it cannot be seen. Once one is found there are no more looks.
"""
SETTLE_TIME = 1.0
"""Seconds after the end of all that is below the shim until a search that finds nothing is a proof.

An engine goes on with a start whose client was killed: up to 0.4 s later a container began (Docker
26.1). Longer, and a caller would take the shim for silent (stop.SHIM_EXIT_TIMEOUT).
"""


def find_in_command(command: Iterable[str]) -> Set[str]:
    """Return the clients that a command runs, as far as its words tell, also in a shell's text.

    In doubt it is one: a search costs a second, and a client that is not found here may have been
    killed before it is seen. So an engine's counts behind any words, if what starts a container
    follows in the same command of the text. podman counts always: by a variable or a file of its
    settings it, too, asks an engine.
    """
    words = list(command)
    parts = [words]
    for word in words:
        if re.search(r"[\s;|&`]", word) is None:
            continue
        text = re.sub(r"^\s*#.*$", "", word.replace("\\\n", " "), flags=re.MULTILINE)
        for part in re.split(r"[\n;|&()`]+", text):
            parts.append(re.findall(r"[^\s'\",\[\]{}]+", part))
    return {name for part in parts for name in _find_in_part(part)}


def _find_in_part(words: List[str]) -> Iterator[str]:
    """Yield the clients in the words of one command."""
    may_begin = True
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in CLIENTS - OTHERS:
            if name == "docker-compose" or any(map(STARTS.fullmatch, words[index + 1 :])):
                yield name
        elif name in OTHERS and may_begin and not _is_scope(name, words[index + 1 :]):
            yield name
        is_value = index > 0 and TAKES_VALUE.fullmatch(words[index - 1]) is not None
        may_begin = may_begin and (
            name in WRAPPERS or ARGUMENT.fullmatch(word) is not None or is_value
        )


def _is_scope(name: str, behind: List[str]) -> bool:
    """Return whether `systemd-run` starts what follows itself, as one of its options says."""
    own = itertools.takewhile(lambda word: word.startswith("-"), behind)
    return name == "systemd-run" and "--scope" in own


class ClientWork:
    """What clients among the ranks have had a daemon start, and the search for it.

    The guard searches, because reading of each process of the node may block on one that hangs.
    """

    def __init__(self, inform: Callable[[], None]) -> None:
        """Begin without a client; `inform` tells the guard that there is one, or a search."""
        self.inform = inform
        self.has_clients = False
        self.search = 0
        """The number of the last search that was asked for."""
        self.left: List[processes.Process] = []
        """What the last search has found: it is not below the shim."""
        self.unread: List[processes.Process] = []
        """What the last search could not look into: it may be such a process, or of anybody."""
        self._is_empty = False
        """Whether the last search has found nothing, not even what has ended since."""
        self._searched = 0
        """The number of the last search that was answered."""
        self._proving: Optional[int] = None
        """The number of the first search that was late enough to prove that nothing is left."""
        self._empty_at: Optional[float] = None
        self._delay = LOOK_DELAYS[0]
        self._look_at = 0.0

    def begin(self, *commands: Iterable[str]) -> None:
        """Note the commands that ranks are about to be started with."""
        self.has_clients = any(find_in_command(command) for command in commands)
        self._look_at = now() + self._delay

    def note(self, below: Iterable[processes.Process]) -> None:
        """Look for a client among the processes below the shim."""
        if self.has_clients:
            return
        self._look_at = now() + self._delay
        self._delay = min(LOOK_DELAYS[1], self._delay * 2)
        if any(processes.read_name(process.pid) in CLIENTS for process in below):
            self.has_clients = True
            self.inform()

    @property
    def look_at(self) -> Optional[float]:
        """When to look again while ranks run; None: not any more."""
        return None if self.has_clients else self._look_at

    def note_living(self) -> None:
        """Note that something still lives below the shim, and may yet ask its daemon for more."""
        self._empty_at = self._proving = None

    def is_gone(self) -> bool:
        """Return whether nothing is left, now that nothing is below the shim; ask for a search.

        To be called again until it is.
        """
        if not self.has_clients:
            return True
        if self._empty_at is None:
            self._empty_at = now()
        if self._searched < self.search:
            return False
        if self._has_proof():
            return True
        self.search += 1
        if self._proving is None and now() >= self._empty_at + SETTLE_TIME:
            self._proving = self.search
        self.inform()
        return False

    def handle_answer(self, message: Json) -> bool:
        """Take what the guard has found; return whether that proves that nothing is left."""
        if message["searched"] != self.search:
            return False
        self._searched = self.search
        self._is_empty = not message["left"] and not message["unread"]
        self.left = _read_processes(message["left"])
        self.unread = _read_processes(message["unread"])
        return self._has_proof()

    def _has_proof(self) -> bool:
        """Return whether the last search proves that nothing is left."""
        return self._proving is not None and self._is_empty

    def list_unfinished(self) -> List[processes.Process]:
        """Return what keeps a stop from its end, of what the last search has told."""
        return [
            process
            for process in (*self.left, *self.unread)
            if processes.is_alive(process.pid, process.started)
        ]

    def list_first(self) -> List[processes.Process]:
        """Return those of what is left that none of it has forked: they pass a signal on."""
        pids = {process.pid for process in self.left}
        return [process for process in self.left if process.parent not in pids]


def _read_processes(identities: List[Tuple[int, int]]) -> List[processes.Process]:
    """Return those of these processes, by pid and start time, that still are in /proc."""
    return [
        process
        for pid, started in identities
        if (process := processes.read_process(pid)) is not None and process.started == started
    ]
