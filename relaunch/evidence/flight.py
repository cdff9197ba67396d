"""Compare torch's flight records of all ranks: who has not entered what the others wait in.

Torch's own analysis (torch.distributed.flight_recorder) matches every collective of a record after
the job has ended. This looks at the newest ones, while the ranks still wait. What is known of the
format: version 2.10 of torch 2.13; gloo tells neither the members of a group nor a state, and
records no send and no receive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from relaunch.evidence.fields import count, fields, moment, text, unreadable
from relaunch.text import count_noun, join_names

MAX_GROUPS, MAX_RECENT, MAX_SIZES, MAX_FRAMES = 32, 16, 16, 8
"""What the agent answers at most; the rest of a longer answer is not read."""
DEFAULT_GROUP = "default_pg"
"""What torch calls the group of all ranks."""
SAME_TIME = timedelta(minutes=1)
"""A record older by this than the newest one of another rank tells where its rank was, not where it
is: the rank did not answer. Clocks of nodes differ by seconds."""
EQUAL_SIZES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "_allgather_base",
    "_all_gather_base",
    "_reduce_scatter_base",
)
"""Collectives in which all ranks have tensors of one size. In others sizes may differ."""


@dataclass(frozen=True, slots=True)
class Collective:
    sequence: int
    """Its number in its process group, from 1."""
    operation: str
    """Torch's name of it: `all_reduce`."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors that go in."""

    @property
    def elements(self) -> int | None:
        """Number of elements, where all ranks must have the same."""
        if self.operation not in EQUAL_SIZES:
            return None
        return sum(math.prod(shape) for shape in self.sizes)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """What a rank did last in one process group."""

    group: str
    """Torch's name of the group: a number or a hash, the same on all its ranks."""
    backend: str
    """`gloo`, `nccl`: a group may have both, each with its own numbers."""
    last: Collective
    pending: int | None = None
    """Number of the oldest collective that is not over; None: the rank waits in none."""
    recent: tuple[Collective, ...] = ()
    """The last ones, with `last`, oldest first."""
    description: str = ""
    size: int | None = None
    """Number of ranks of the group; None: not told."""
    frames: tuple[tuple[str, str, int], ...] = ()
    """Where the program entered it: function, file and line, innermost first."""

    @property
    def key(self) -> tuple[str, str]:
        return self.group, self.backend

    def find(self, sequence: int) -> Collective | None:
        return next((each for each in self.recent if each.sequence == sequence), None)


@dataclass(frozen=True, slots=True)
class Flight:
    """The flight record of a rank, or why there is none."""

    unreadable: str = ""
    source: str = ""
    at: float = 0.0
    """Unix time in seconds at which it was written, by the node's clock."""
    groups: tuple[GroupRecord, ...] = ()


class FlightKind(StrEnum):
    """What the records show."""

    MISSING = "missing"
    """A rank has not entered a collective that others wait in, and waits in none itself."""
    DIFFERENT = "different"
    """A rank has entered another operation, or one of another size, than the others."""
    CROSSED = "crossed"
    """Each of the ranks that have not entered a collective waits in another one: the order of the
    collectives differs."""
    SILENT = "silent"
    """All that could be read wait in the same collective; of the others there is no record."""


@dataclass(frozen=True, slots=True)
class FlightFinding:
    kind: FlightKind
    suspects: tuple[int, ...]
    """Ranks at fault. Empty for SILENT: a missing record proves nothing."""
    waiting: tuple[int, ...]
    """Ranks that wait in the collective."""
    unrecorded: tuple[int, ...]
    """Ranks that gave no record, or only an old one."""
    collective: Collective
    group: str
    """The group, as torch describes it."""
    reason: str


# --- what a node says ---


def parse_flight(value: object) -> Flight:
    """Return the field `flight` of an answer to the order `stacks`."""
    row = fields(value)
    written = moment(row.get("at")) if row is not None else None
    if row is None or written is None or not isinstance(row.get("last"), list):
        return Flight(unreadable=unreadable(value if row is None else {}))
    about = {
        text(group.get("name")): group
        for group in _rows(row.get("process_groups"), MAX_GROUPS)
        if isinstance(group, Mapping)
    }
    groups = (_parse_group(each, about) for each in _rows(row["last"], MAX_GROUPS))
    return Flight(
        "",
        text(row.get("source")),
        written.timestamp(),
        tuple(group for group in groups if group is not None),
    )


def _rows(value: object, most: int) -> list[Any]:
    return value[:most] if isinstance(value, list) else []


def _parse_group(row: object, about: Mapping[str, Mapping[str, Any]]) -> GroupRecord | None:
    if not isinstance(row, Mapping):
        return None
    last = _parse_collective([row.get("sequence"), row.get("operation"), row.get("sizes")])
    if last is None:
        return None
    name = text(row.get("process_group"))
    recent = (_parse_collective(each) for each in _rows(row.get("recent"), MAX_RECENT))
    known = tuple(each for each in recent if each is not None)
    group = about.get(name, {})
    return GroupRecord(
        name,
        text(row.get("backend")),
        last,
        count(row.get("pending")),
        known if last in known else (*known, last),
        text(group.get("description")),
        count(group.get("size")),
        tuple(_parse_frame(each) for each in _rows(row.get("frames"), MAX_FRAMES)),
    )


def _parse_collective(row: object) -> Collective | None:
    if not isinstance(row, list) or len(row) != 3:
        return None
    sequence, operation = count(row[0]), text(row[1])
    if sequence is None or not operation:
        return None
    shapes = tuple(
        tuple(count(size) or 0 for size in _rows(shape, MAX_SIZES))
        for shape in _rows(row[2], MAX_SIZES)
    )
    return Collective(sequence, operation, shapes)


def _parse_frame(row: object) -> tuple[str, str, int]:
    function, file, line = row if isinstance(row, list) and len(row) == 3 else ("", "", 0)
    return text(function), text(file), count(line) or 0


# --- compared ---


@dataclass(frozen=True, slots=True)
class _Group:
    """One process group, as its ranks have recorded it."""

    records: Mapping[int, GroupRecord]
    absent: tuple[int, ...]
    """Ranks of it that have a record, but none of a collective in it: they entered none."""

    @property
    def waiting(self) -> dict[int, int]:
        """The collective that each rank waits in, by rank."""
        return {
            rank: record.pending
            for rank, record in self.records.items()
            if record.pending is not None
        }

    @property
    def entered(self) -> dict[int, int]:
        """The newest collective that each rank has entered, by rank."""
        entered = {rank: record.last.sequence for rank, record in self.records.items()}
        return {**dict.fromkeys(self.absent, 0), **entered}

    @property
    def title(self) -> str:
        record = next(iter(self.records.values()))
        return record.description or f"process group {record.group}"

    def describe(self, sequence: int, ranks: Iterable[int]) -> Collective:
        """Return a collective as the first of these ranks has recorded it."""
        found = (self.records[rank].find(sequence) for rank in ranks)
        known = next((each for each in found if each is not None), None)
        return known or Collective(sequence, "a collective")


def compare_flights(flights: Mapping[int, Flight]) -> FlightFinding | None:
    """Return what the records show of a hang; None: no rank waits, or nothing tells them apart.

    Args:
        flights: The record of each rank of the job, by global rank.
    """
    newest = max((flight.at for flight in flights.values()), default=0.0)
    recorded = {
        rank: flight
        for rank, flight in sorted(flights.items())
        if not flight.unreadable and newest - flight.at < SAME_TIME.total_seconds()
    }
    unrecorded = tuple(rank for rank in sorted(flights) if rank not in recorded)
    groups = _collect_groups(recorded, len(flights))
    return (
        _find_different(groups, unrecorded)
        or _find_missing(groups, unrecorded)
        or _find_silent(groups, unrecorded)
    )


def _collect_groups(recorded: Mapping[int, Flight], ranks: int) -> list[_Group]:
    """Return the process groups of a job that has this number of ranks."""
    found: dict[tuple[str, str], dict[int, GroupRecord]] = {}
    for rank, flight in recorded.items():
        for record in flight.groups:
            found.setdefault(record.key, {})[rank] = record
    # A rank that has a record of no group has entered no collective yet.
    absent = tuple(rank for rank, flight in recorded.items() if not flight.groups)
    groups = []
    for _, records in sorted(found.items()):
        first = next(iter(records.values()))
        # Two groups of one name with different ranks: their numbers tell nothing of each other.
        if first.size is not None and len(records) > first.size:
            continue
        # Only of the group of all ranks is it known which ranks belong to it.
        is_whole = first.description == DEFAULT_GROUP and first.size in (None, ranks)
        groups.append(_Group(records, absent if is_whole else ()))
    return groups


def _find_different(groups: Sequence[_Group], unrecorded: tuple[int, ...]) -> FlightFinding | None:
    for group in groups:
        waiting = group.waiting
        by_sequence: dict[int, dict[int, Collective]] = {}
        for rank, record in group.records.items():
            for collective in record.recent:
                by_sequence.setdefault(collective.sequence, {})[rank] = collective
        for sequence, entered in sorted(by_sequence.items()) if waiting else ():
            finding = _compare_one(group, sequence, entered, unrecorded)
            if finding is not None:
                return finding
    return None


def _compare_one(
    group: _Group, sequence: int, entered: Mapping[int, Collective], unrecorded: tuple[int, ...]
) -> FlightFinding | None:
    """Return how the ranks' collectives of one number differ; the fewer are at fault."""
    variants: dict[tuple[str, int | None], list[int]] = {}
    for rank, collective in entered.items():
        variants.setdefault((collective.operation, collective.elements), []).append(rank)
    if len(variants) < 2:
        return None
    ordered = sorted(variants.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    right, wrong = ordered[:2]
    expected, other = entered[right[0]], entered[wrong[0]]
    what = f"{_name(wrong)} entered {other.operation} #{sequence} of {group.title}"
    against = expected.operation
    if other.operation == expected.operation:
        what += f" with {count_noun(other.elements or 0, 'element')}"
        against = f"it with {count_noun(expected.elements or 0, 'element')}"
    return FlightFinding(
        FlightKind.DIFFERENT,
        # As many as the others: nobody knows whose program is right.
        tuple(rank for rank in sorted(entered) if rank not in right or len(right) == len(wrong)),
        tuple(group.waiting),
        unrecorded,
        expected,
        group.title,
        f"{what}, where {_others(len(right))} entered {against}",
    )


def _find_missing(groups: Sequence[_Group], unrecorded: tuple[int, ...]) -> FlightFinding | None:
    waits_somewhere = {rank for group in groups for rank in group.waiting}
    found: list[FlightFinding] = []
    crossed: list[FlightFinding] = []
    for group in groups:
        entered, waiting = group.entered, group.waiting
        # The oldest collective that somebody waits in and somebody else has not entered.
        behind = min(entered.values(), default=0)
        sequence = min((each for each in waiting.values() if each > behind), default=None)
        if sequence is None:
            continue
        missing = [rank for rank, last in entered.items() if last < sequence]
        inside = tuple(rank for rank, each in waiting.items() if each == sequence)
        idle = tuple(sorted(rank for rank in missing if rank not in waits_somewhere))
        collective = group.describe(sequence, inside)
        suspects = idle or tuple(sorted(missing))
        text_of = f"{collective.operation} #{sequence} of {group.title}"
        finding = FlightFinding(
            FlightKind.MISSING if idle else FlightKind.CROSSED,
            suspects,
            inside,
            unrecorded,
            collective,
            group.title,
            f"{_name(suspects)} not entered {text_of}, which {_others(len(inside))}"
            f" {'waits' if len(inside) == 1 else 'wait'} in"
            + ("" if idle else "; each waits in another itself, so their order differs"),
        )
        (found if idle else crossed).append(finding)
    both = found or crossed
    return max(both, key=lambda finding: len(finding.waiting), default=None)


def _find_silent(groups: Sequence[_Group], unrecorded: tuple[int, ...]) -> FlightFinding | None:
    waiting = [(len(group.waiting), -index) for index, group in enumerate(groups) if group.waiting]
    if not waiting or not unrecorded:
        return None
    group = groups[-max(waiting)[1]]
    sequence = min(group.waiting.values())
    inside = tuple(rank for rank, each in group.waiting.items() if each == sequence)
    collective = group.describe(sequence, inside)
    names = f"{'rank' if len(unrecorded) == 1 else 'ranks'} {join_names(unrecorded)}"
    return FlightFinding(
        FlightKind.SILENT,
        (),
        inside,
        unrecorded,
        collective,
        group.title,
        f"there is no flight record of {names}; {_others(len(inside))}"
        f" {'waits' if len(inside) == 1 else 'wait'} in {collective.operation} #{sequence}"
        f" of {group.title}",
    )


def _name(ranks: Sequence[int]) -> str:
    """Return the ranks with the verb of the sentence: `rank 3 has`, `ranks 3, 4 have`."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {join_names(ranks)} have"


def _others(number: int) -> str:
    return f"{number} other{'' if number == 1 else 's'}"
