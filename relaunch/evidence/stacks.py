"""Reads what the processes of ranks do, and groups ranks by where their Python code is.

A node's answer to `stacks` (docs/reference/agent-protocol.md) is read into `RankLook`s. Whether
training hangs is the question of `hung_ranks`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from relaunch.evidence.fields import count
from relaunch.evidence.waits import PLUMBING, TRANSPARENT, WAITS, WaitRow
from relaunch.text import join_node_ranges, join_ranges, printable

LIBRARY_FOLDER = re.compile(r".*/(?:site-packages|dist-packages|lib(?:64)?/python3[^/]*)/")
"""The path of a library's file up to the name of its package."""
PLURALS = {"is ": "are ", "waits ": "wait ", "has ": "have "}
MAX_PLACE = 200
"""Characters of the line that says where a rank is."""


@dataclass(frozen=True, slots=True)
class Frame:
    function: str
    file: str
    line: int

    @property
    def name(self) -> str:
        """The function without its class: py-spy says `Tensor.backward`, faulthandler `backward`"""
        return self.function.rpartition(".")[2]

    @property
    def short_file(self) -> str:
        """The path from a library's package on; of the program, only the file's name."""
        return _shorten(self.file)

    @property
    def is_library(self) -> bool:
        """Whether it is none of the program's own code."""
        return _is_library(self.file)

    def __str__(self) -> str:
        return f"{self.name} ({self.short_file}:{self.line})"


# The ranks of a job, of which there may be thousands, are in the same few files and functions.


@lru_cache(4096)
def _shorten(file: str) -> str:
    file = LIBRARY_FOLDER.sub("", file)
    return file.rpartition("/")[2] if file.startswith("/") else file


@lru_cache(4096)
def _is_library(file: str) -> bool:
    if LIBRARY_FOLDER.match(file) or file.startswith("<frozen"):
        return True
    if file.startswith("/"):
        return False
    package = file.partition("/")[0].removesuffix(".py")
    return package in sys.stdlib_module_names or package in TRANSPARENT


@lru_cache(4096)
def _is_transparent(file: str) -> bool:
    """Return whether a collective may have called a function of this file."""
    short = _shorten(file)
    return any(short == one or short.startswith(f"{one}/") for one in TRANSPARENT)


@lru_cache(4096)
def _find_row(file: str, name: str) -> WaitRow | None:
    short = _shorten(file)
    for row in WAITS:
        is_same = short == row.file or file.endswith(f"/{row.file}")
        if is_same and (not row.functions or name in row.functions):
            return row
    return None


@dataclass(frozen=True, slots=True)
class ThreadStack:
    name: str
    frames: tuple[Frame, ...]
    """The innermost first."""


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """What one process was doing."""

    pid: int
    parent: int = 0
    rank: int | None = None
    """Its RANK, which its children inherit."""
    command: str = ""
    state: str = "S"
    """Of its main thread, as in /proc/PID/stat."""
    blocked: int = 0
    """How many of its threads are in state D."""
    cpu_s: float = 0.0
    io_bytes: int = 0
    """What it has read and written by system calls so far."""
    wchan: str = ""
    """Where its main thread waits in the kernel; empty: it runs, or the kernel hides it."""
    threads: tuple[ThreadStack, ...] = ()
    """The main thread first; empty: no Python stack is known."""
    unreadable: str = ""
    """Why there are no Python stacks."""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The stack of its main thread."""
        return self.threads[0].frames if self.threads else ()


@dataclass(frozen=True, slots=True)
class StuckConnection:
    """A TCP connection whose other end acknowledges nothing any more, however often it is sent."""

    local: str
    """An address without its port."""
    remote: str


@dataclass(frozen=True, slots=True)
class RankLook:
    """What one rank was doing: its own process first, then those below it."""

    rank: int
    node: str
    processes: tuple[ProcessLook, ...] = ()
    unreadable: str = ""
    """Why nothing is known; empty: something is."""
    flight: Mapping[str, Any] | None = None
    """torch's record of its collectives, as the node read it."""
    addresses: tuple[str, ...] = ()
    """Its own ends of its TCP connections."""
    stuck: tuple[StuckConnection, ...] = ()

    @property
    def main(self) -> ProcessLook:
        return self.processes[0]

    @property
    def dumped_bytes(self) -> int:
        """What the rank wrote after its counters were read, because this look asked for it."""
        size = count((self.flight or {}).get("bytes"))
        return size or 0

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The stack of its main thread; empty: not known."""
        return self.main.frames if self.processes else ()


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank for which the others wait, as far as its stack shows: a suspect, and no proof."""

    rank: int
    node: str
    where: str
    """One line."""
    frames: tuple[str, ...] = ()
    """Its stack, the innermost frame first; only of the first suspects."""


@dataclass(frozen=True, slots=True)
class StackWait:
    """A thread waits for other ranks or for its GPU."""

    operation: str
    depth: int
    """How many of the innermost frames are part of it."""


def read_rank_looks(node: str, rows: Iterable[Mapping[str, Any]]) -> tuple[RankLook, ...]:
    """Return what a node's checked answer to `stacks` says, one look for each rank, by rank.

    Where a launcher starts the ranks, each of them is a rank by its own environment, and the
    launcher is left out.
    """
    looks: list[RankLook] = []
    for row in rows:
        processes = tuple(_read_process(one) for one in row.get("processes") or ())
        if not processes:
            looks.append(RankLook(row["rank"], node, unreadable=row.get("unreadable") or "unknown"))
            continue
        network = row.get("network") or {"addresses": (), "stuck": ()}
        look = RankLook(
            row["rank"],
            node,
            processes,
            flight=row.get("flight"),
            addresses=tuple(network["addresses"]),
            stuck=tuple(StuckConnection(one["local"], one["remote"]) for one in network["stuck"]),
        )
        looks += split_launcher(look)
    return tuple(sorted(looks, key=lambda one: one.rank))


def _read_process(row: Mapping[str, Any]) -> ProcessLook:
    return ProcessLook(
        row["pid"],
        row["parent"],
        row["rank"],
        row["command"],
        row["state"],
        row.get("blocked") or 0,
        row["cpu_s"],
        (row["read_bytes"] or 0) + (row["written_bytes"] or 0),
        # 0: it runs, or the kernel hides this from the agent's user.
        row["wchan"] if row["wchan"] not in (None, "0") else "",
        tuple(
            ThreadStack(one["name"], tuple(Frame(*frame) for frame in one["frames"]))
            for one in row["threads"]
        ),
        row["unreadable"] or "",
    )


def split_launcher(look: RankLook) -> tuple[RankLook, ...]:
    """Return the looks at the ranks that a launcher has started, or the look as it is."""
    ranks: dict[int, list[ProcessLook]] = {}
    for process in look.processes:
        if process.rank is not None and process.pid != look.main.pid:
            ranks.setdefault(process.rank, []).append(process)
    if look.main.rank is not None or not ranks:
        return (look,)
    return tuple(
        replace(look, rank=rank, processes=tuple(processes)) for rank, processes in ranks.items()
    )


def find_wait(frames: Sequence[Frame]) -> StackWait | None:
    """Return the operation in which a stack waits, or None.

    None as well if it runs code of another kind below it, such as the handler of a signal.
    """
    for index, frame in enumerate(frames):
        if (row := _find_row(frame.file, frame.name)) is not None and not (row.innermost and index):
            depth = index + 1
            while depth < len(frames) and frames[depth].is_library:
                depth += 1
            return StackWait(row.name or frame.name, depth)
        if not _is_transparent(frame.file):
            return None
    return None


def make_signature(frames: Sequence[Frame]) -> tuple[tuple[str, str, int], ...]:
    """Return what ranks that are at the same place have in common.

    The lines of a wait are left out: a library may poll.
    """
    wait = find_wait(frames)
    depth = wait.depth if wait is not None else 0
    return tuple(
        (one.name, one.file, 0 if index < depth else one.line) for index, one in enumerate(frames)
    )


def describe_stack(frames: Sequence[Frame]) -> str:
    """Return where a stack is, and where the program has called that, in one line."""
    inner = 0
    while inner < len(frames) and frames[inner].is_library:
        inner += 1
    caller = f", called from {frames[inner]}" if 0 < inner < len(frames) else ""
    if (wait := find_wait(frames)) is not None:
        at = next(one for one in frames if _find_row(one.file, one.name) is not None)
        where = f"{wait.operation} ({at.short_file}:{at.line})"
    elif inner:
        named = [one for one in frames[:inner] if not _is_plumbing(one)] or [frames[0]]
        where = str(named[-1])
    else:
        where = str(frames[0])
    return printable(where + caller, MAX_PLACE)


def _is_plumbing(frame: Frame) -> bool:
    return any(frame.short_file == file and frame.name in functions for file, functions in PLUMBING)


def describe_rank(look: RankLook) -> str:
    """Return where a rank is: `is in __next__ (…), called from train (train.py:88)`."""
    if look.unreadable:
        return printable(f"cannot be read: {look.unreadable}", MAX_PLACE)
    stopped = next((one for one in look.processes if one.state == "T"), None)
    if stopped is not None:
        whose = "" if stopped.pid == look.main.pid else f"has process {stopped.pid}, which "
        frames = stopped.frames or look.frames
        at = f" in {describe_stack(frames)}" if frames else ""
        at = f"; it is{at}" if whose and at else at
        return printable(f"{whose}is stopped (state T){at}", MAX_PLACE)
    if not look.frames:
        kernel = f" at {look.main.wchan}" if look.main.wchan else ""
        why = f"; no Python stack: {look.main.unreadable}" if look.main.unreadable else ""
        return printable(f"is in state {look.main.state}{kernel}{why}", MAX_PLACE)
    blocked = ", blocked in the kernel (state D)" if look.main.state == "D" else ""
    verb = "waits in" if find_wait(look.frames) else "is in"
    return printable(f"{verb} {describe_stack(look.frames)}{blocked}", MAX_PLACE)


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks that are at the same place."""

    looks: tuple[RankLook, ...]
    """By rank."""
    frames: tuple[Frame, ...] = ()
    """Of the first one."""
    wait: StackWait | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(one.rank for one in self.looks)

    @property
    def where(self) -> str:
        """Where they are, with a verb."""
        where = describe_rank(self.looks[0])
        if len(self.looks) > 1:
            for singular, plural in PLURALS.items():
                if where.startswith(singular):
                    return plural + where.removeprefix(singular)
        return where

    @property
    def sentence(self) -> str:
        """Who is where: `rank 63 on n8 is in __next__ (…), called from train (train.py:88)`."""
        return f"{self._who} {self.where}"

    @property
    def _who(self) -> str:
        nodes = join_node_ranges(dict.fromkeys(one.node for one in self.looks))
        return f"rank{'s' * (len(self.looks) > 1)} {join_ranges(self.ranks)} on {nodes}"

    def __str__(self) -> str:
        count = f" ({len(self.looks)})" if len(self.looks) > 1 else ""
        return f"{self._who}{count}: {self.where}"


def group_stacks(looks: Iterable[RankLook]) -> tuple[StackGroup, ...]:
    """Group ranks by the place of their main threads, the widest group first."""
    groups: dict[object, list[RankLook]] = {}
    for look in looks:
        key: object = look.unreadable or describe_rank(look)
        if look.frames:
            stopped = any(one.state == "T" for one in look.processes)
            key = (make_signature(look.frames), stopped, look.main.state == "D")
        groups.setdefault(key, []).append(look)
    found = [
        StackGroup(tuple(group), group[0].frames, find_wait(group[0].frames))
        for group in groups.values()
    ]
    return tuple(sorted(found, key=lambda one: (-len(one.looks), one.ranks[0])))
