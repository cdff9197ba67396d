"""Reading what nodes and archives hold: standalone activities that the command line, which never reaches a node, runs through a worker.

`read_logs(ReadLogsInput) -> ReadLogsOutput`, `read_stacks(ReadStacksInput) -> ReadStacksOutput` and
`read_incidents(ReadIncidentsInput) -> ReadIncidentsOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaunch.job.state import Incident


@dataclass(frozen=True, slots=True)
class ReadLogsInput:
    fleet: str
    nodes: tuple[str, ...]
    """By group rank."""
    namespace: str
    job: str
    submission: int
    generation: int
    offsets: dict[int, int] | None = None
    """Where to read on, by rank; a rank that is not in it is read from its beginning (or its `tail`). None: all from there."""
    max_bytes: int = 262_144
    """Of the whole answer: with its escapes well below the 2 MiB that a payload may have."""
    wait: float = 0.0
    """Seconds to wait until something new is there."""
    tail: int | None = None
    """Begin with the last so many lines of each rank; only for ranks that have no offset."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    rank: int
    next: int
    """Where to read on, in bytes."""
    data: str


@dataclass(frozen=True, slots=True)
class ReadLogsOutput:
    chunks: tuple[LogPiece, ...] = ()
    ended: bool = False
    """Nothing more will come: every rank of the generation has ended on every node, and all was read."""
    unreachable: tuple[str, ...] = ()
    """Nodes that did not answer."""
    refused: tuple[str, ...] = ()
    """What nodes that answered said instead of logs, such as that they know of no such generation."""


@dataclass(frozen=True, slots=True)
class ReadStacksInput:
    fleet: str
    places: tuple[tuple[str, int], ...]
    """Node and global rank of each that is asked for."""
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
    """Where it is, for a person: as py-spy has it, else as the kernel does; or why nobody can tell."""


@dataclass(frozen=True, slots=True)
class ReadStacksOutput:
    stacks: tuple[Stack, ...] = ()
    """By rank; one for each that was asked for."""


@dataclass(frozen=True, slots=True)
class ReadIncidentsInput:
    namespace: str
    job: str


@dataclass(frozen=True, slots=True)
class ReadIncidentsOutput:
    incidents: tuple[Incident, ...] = ()
    """Oldest first."""
