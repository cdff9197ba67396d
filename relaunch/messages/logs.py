"""Inputs and outputs of the activities that read what nodes and archives hold.

They are standalone activities: the command line never reaches a node and runs them through a
worker.
`read_logs(ReadLogsInput) -> ReadLogsOutput`, `read_stacks(ReadStacksInput) -> ReadStacksOutput`,
`read_checkpoints(ReadCheckpointsInput) -> ReadCheckpointsOutput` and
`read_incidents(ReadIncidentsInput) -> ReadIncidentsOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from relaunch.job.state import Incident
from relaunch.spec.job import OutputStream

MAX_READ_BYTES = 262_144
"""Limit for one answer; with JSON escapes it stays well below the 2 MiB limit of a payload."""


@dataclass(frozen=True, slots=True)
class ReadLogsInput:
    fleet: str
    nodes: tuple[str, ...]
    """Nodes by group rank."""
    namespace: str
    job: str
    submission: int
    generation: int
    offsets: dict[int, int] | None = None
    """Offset to continue from, by rank; a rank without one is read from its beginning (or its
    `tail`). None: all ranks are."""
    max_bytes: int = MAX_READ_BYTES
    """Limit for the whole answer, in equal shares for the nodes."""
    wait: float = 0.0
    """Seconds to wait for new data. 0: for the answers of all nodes instead."""
    tail: int | None = None
    """Begin with this many last lines of each rank; only for ranks that have no offset."""
    since: float | None = None
    """Begin with what was printed in this many last seconds, by the node's clock, and at most some
    seconds before; only for ranks that have no offset."""
    stream: OutputStream = "stdout"
    """Which log of each rank; "stdout" has both streams, unless the job keeps them apart."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    rank: int
    next: int
    """Offset to continue from, in bytes."""
    data: str


@dataclass(frozen=True, slots=True)
class MissingLog:
    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class ReadLogsOutput:
    chunks: tuple[LogPiece, ...] = ()
    ended: bool = False
    """Nothing more will come: every rank of the generation has ended on every node, and all was
    read."""
    unreachable: tuple[str, ...] = ()
    """Nodes that did not answer, each with the reason."""
    refused: tuple[str, ...] = ()
    """Answers of nodes that returned an error and no logs, for example that the generation is
    unknown."""
    begins: dict[int, int] = field(default_factory=dict)
    """Where reading began, of ranks for which no offset was given."""
    sizes: dict[int, int] = field(default_factory=dict)
    """How long the logs of those ranks were then, in bytes."""
    missing: tuple[MissingLog, ...] = ()
    """Ranks that have ended and have no log."""


@dataclass(frozen=True, slots=True)
class ReadStacksInput:
    fleet: str
    places: tuple[tuple[str, int], ...]
    """Node and global rank of each rank that is requested."""
    namespace: str
    job: str
    submission: int
    generation: int


@dataclass(frozen=True, slots=True)
class Stack:
    rank: int
    node: str
    pid: int | None
    text: str
    """The rank's stack for people: from py-spy, otherwise from the kernel, otherwise why it is
    unknown."""
    where: str = ""
    """Where its main thread is, in one line; empty: the worker is too old to say."""
    group: int | None = None
    """Which of the groups it belongs to: 0 is the widest."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that are at the same place."""

    title: str
    """Who is where: `ranks 0-62 on n1-n8 (63): wait in all_reduce (…)`."""
    frames: tuple[str, ...] = ()
    """The stack of the first one's main thread, the innermost frame first."""


@dataclass(frozen=True, slots=True)
class ReadStacksOutput:
    stacks: tuple[Stack, ...] = ()
    """One stack for each rank that was requested, by rank."""
    groups: tuple[RankGroup, ...] = ()
    """The widest first."""


@dataclass(frozen=True, slots=True)
class ReadCheckpointsInput:
    fleet: str
    nodes: tuple[str, ...]
    """Nodes to ask; the first that answers is enough."""
    directory: str
    workdir: str | None
    pattern: str | None = None
    """The regular expression of a checkpoint's name; None: those of known kinds are found."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint, complete or not."""

    name: str
    format: str
    """dcp, hf, accelerate, megatron, torch, or other: known by its name alone."""
    step: int | None
    age: float
    """Seconds since it was changed, by the node's clock."""
    incomplete: str = ""
    """What is missing; empty: nothing."""


@dataclass(frozen=True, slots=True)
class ReadCheckpointsOutput:
    node: str = ""
    """The node that answered; empty: none did."""
    newest: CheckpointFolder | None = None
    """The newest complete one."""
    incomplete: tuple[CheckpointFolder, ...] = ()
    """Those that are newer and not complete, newest first."""
    unreadable: str = ""
    """Why the folder could not be read."""


@dataclass(frozen=True, slots=True)
class ReadIncidentsInput:
    namespace: str
    job: str


@dataclass(frozen=True, slots=True)
class ReadIncidentsOutput:
    incidents: tuple[Incident, ...] = ()
    """Oldest first."""
