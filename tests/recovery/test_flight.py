"""Flight records of all ranks, compared.

The samples were recorded from real gloo ranks by the script beside them. Records of NCCL are made
here, by the format that torch documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.agent.flight_records import parse_dump, summarize
from relaunch.evidence.flight import (
    Collective,
    Flight,
    FlightKind,
    GroupRecord,
    compare_flights,
    parse_flight,
)
from tests.pages import sections

SAMPLES = Path(__file__).with_name("samples") / "flight"
NOW = 1_800_000_000.0


def sample(kind: str) -> dict[int, Flight]:
    """Read the dumps of a kind of hang as the agent does."""
    paths = sorted(SAMPLES.glob(f"{kind}.rank_*"))
    dumps = [summarize(parse_dump(path.read_bytes()), str(path), NOW) for path in paths]
    return {rank: parse_flight(dump) for rank, dump in enumerate(dumps)}


def record(
    sequence: int,
    operation: str = "all_reduce",
    elements: int = 32,
    is_over: bool = False,
    **more: Any,
) -> GroupRecord:
    """Record of a rank of four that has entered this collective as its last."""
    last = Collective(sequence, operation, ((elements,),))
    fields = {"group": "0", "backend": "nccl", "description": "default_pg", "size": 4}
    fields |= {"pending": None if is_over else sequence, "recent": (last,), **more}
    return GroupRecord(last=last, **fields)


def flight(*groups: GroupRecord, at: float = NOW) -> Flight:
    return Flight(at=at, groups=groups)


UNREADABLE = Flight(unreadable="no dump of it")
PAIR = {"group": "7", "description": "", "size": 2}

KINDS: dict[str, dict[int, Flight]] = {
    "gloo: rank 2 never enters": sample("missing"),
    "gloo: rank 2 enters a barrier": sample("other_operation"),
    "gloo: rank 2 takes another group first": sample("crossed"),
    "one is missing": {
        **{rank: flight(record(288686)) for rank in (0, 1, 2)},
        3: flight(record(288685, is_over=True)),
    },
    "one has entered nothing": {
        **{rank: flight(record(1)) for rank in (0, 1, 2)},
        3: flight(),
    },
    "half are missing": {
        **{rank: flight(record(7, size=10)) for rank in range(5)},
        **{rank: flight(record(5, is_over=True, size=10)) for rank in range(5, 10)},
    },
    "its peer waits elsewhere": {
        0: flight(record(9), record(4, **PAIR)),
        1: flight(record(9, is_over=True), record(3, is_over=True, **PAIR)),
        2: flight(record(10, recent=())),
        3: flight(record(10)),
    },
    "all operations enqueued ahead": {
        0: flight(record(12, pending=10, recent=(Collective(10, "broadcast"),))),
        1: flight(record(9, is_over=True)),
    },
    "another size": {
        **{rank: flight(record(7)) for rank in (0, 1, 2)},
        3: flight(record(7, elements=64)),
    },
    "two programs, one of them wrong": {
        0: flight(record(7)),
        1: flight(record(7, "barrier")),
    },
    "one gives no record": {
        **{rank: flight(record(7)) for rank in (0, 1)},
        2: UNREADABLE,
    },
    "two give no record, one an old one": {
        **{rank: flight(record(7)) for rank in (0,)},
        1: UNREADABLE,
        2: flight(record(3), at=NOW - 61),
    },
}


@pytest.mark.parametrize(
    ("name", "kind", "suspects"),
    [
        ("gloo: rank 2 never enters", FlightKind.MISSING, (2,)),
        ("gloo: rank 2 enters a barrier", FlightKind.DIFFERENT, (2,)),
        ("gloo: rank 2 takes another group first", FlightKind.CROSSED, (2,)),
        ("one is missing", FlightKind.MISSING, (3,)),
        ("one has entered nothing", FlightKind.MISSING, (3,)),
        ("half are missing", FlightKind.MISSING, (5, 6, 7, 8, 9)),
        ("its peer waits elsewhere", FlightKind.MISSING, (1,)),
        ("all operations enqueued ahead", FlightKind.MISSING, (1,)),
        ("another size", FlightKind.DIFFERENT, (3,)),
        ("two programs, one of them wrong", FlightKind.DIFFERENT, (0, 1)),
        ("one gives no record", FlightKind.SILENT, ()),
        ("two give no record, one an old one", FlightKind.SILENT, ()),
    ],
)
def test_records_name_the_rank(name: str, kind: FlightKind, suspects: tuple[int, ...]) -> None:
    finding = compare_flights(KINDS[name])
    assert finding is not None
    assert (finding.kind, finding.suspects) == (kind, suspects)


def test_sentences_about_records(page: SnapshotAssertion) -> None:
    found = {name: compare_flights(flights) for name, flights in KINDS.items()}
    assert sections({name: one.reason for name, one in found.items() if one}) == page


def test_a_finding_tells_who_waits_in_what() -> None:
    finding = compare_flights(KINDS["one is missing"])
    assert finding is not None
    assert (finding.waiting, finding.unrecorded) == ((0, 1, 2), ())
    assert finding.collective == Collective(288686, "all_reduce", ((32,),))
    assert finding.group == "default_pg"


@pytest.mark.parametrize(
    "flights",
    [
        {},
        sample("healthy"),
        {0: UNREADABLE, 1: UNREADABLE},
        {0: flight(record(7)), 1: flight(record(7))},  # all wait in the same: none is at fault
        {0: flight(record(7)), 1: flight(record(8, is_over=True))},
        # All_to_all takes other sizes from each rank.
        {0: flight(record(7, "all_to_all")), 1: flight(record(7, "all_to_all", 64))},
        # Three ranks of a group of two: these are two groups of one name.
        {rank: flight(record(7 + rank, **PAIR)) for rank in range(3)},
        # Who belongs to a small group is not known: this rank may not.
        {0: flight(record(7, **PAIR)), 1: flight()},
    ],
)
def test_records_that_tell_nothing(flights: dict[int, Flight]) -> None:
    assert compare_flights(flights) is None


# --- what a node says ---


def test_a_record_is_read() -> None:
    value = {
        "source": "/flight/rank_3",
        "at": NOW,
        "process_groups": [{"name": "0", "description": "default_pg", "size": 4}],
        "last": [
            {
                "process_group": "0",
                "backend": "nccl",
                "sequence": 8,
                "operation": "all_reduce",
                "state": "started",
                "sizes": [[2, 3]],
                "frames": [["train", "train.py", 7]],
                "pending": 7,
                "recent": [[7, "barrier", []], [8, "all_reduce", [[2, 3]]]],
            }
        ],
    }
    last = Collective(8, "all_reduce", ((2, 3),))
    expected = GroupRecord(
        "0", "nccl", last, 7, (Collective(7, "barrier"), last), "default_pg", 4,
        (("train", "train.py", 7),),
    )  # fmt: skip
    assert parse_flight(value) == Flight("", "/flight/rank_3", NOW, (expected,))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "the node's answer lacks it"),
        ({"unreadable": "no dump of it"}, "no dump of it"),
        (7, "the node's answer makes no sense there"),
        ({"at": NOW}, "the node's answer makes no sense there"),
        ({"at": -1, "last": []}, "the node's answer makes no sense there"),
    ],
)
def test_no_record_says_why(value: object, why: str) -> None:
    assert parse_flight(value) == Flight(unreadable=why)


def test_nonsense_in_a_record_is_passed_over() -> None:
    row = {"process_group": "0", "sequence": 8, "operation": "all_reduce", "sizes": 7}
    wrong = [7, {}, {**row, "sequence": -1}, {**row, "operation": 7}]
    odd = {**row, "recent": [7, [1, 2]], "frames": [7], "pending": "x"}
    found = parse_flight({"at": NOW, "process_groups": [7], "last": [*wrong, odd]})
    last = Collective(8, "all_reduce")
    assert found.groups == (GroupRecord("0", "", last, None, (last,), frames=(("", "", 0),)),)
