"""Lists of names and counts of things, at their edges."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.text import count_noun, join_clauses, join_names, printable


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, ""),
        (1, "n1"),
        (2, "n1, n2"),
        (3, "n1, n2, n3"),
        (4, "n1, n2, n3 and 1 more"),
        (1000, "n1, n2, n3 and 997 more"),
    ],
)
def test_names_are_joined_up_to_a_limit(count: int, expected: str) -> None:
    assert join_names([f"n{number}" for number in range(1, count + 1)]) == expected


def test_a_limit_and_things_that_are_not_text_are_accepted(snapshot: SnapshotAssertion) -> None:
    assert join_names((number for number in range(5)), most=1) == snapshot


@pytest.mark.parametrize(
    ("clauses", "expected"),
    [([], ""), (["a"], "a"), (["a", "b"], "a; b"), (["a", "b", "c", "d"], "a; b; 2 more")],
)
def test_clauses_are_joined_up_to_a_limit(clauses: list[str], expected: str) -> None:
    assert join_clauses(clauses) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (1000, "1000 nodes")]
)
def test_a_count_agrees_with_its_noun(count: int, expected: str) -> None:
    assert count_noun(count, "node") == expected


def test_a_noun_may_have_a_plural_of_another_form() -> None:
    assert [count_noun(n, "try", "tries") for n in (0, 1, 2)] == ["0 tries", "1 try", "2 tries"]


def test_what_others_wrote_becomes_one_line() -> None:
    assert printable("a\nb\x1b[2J\ud800 é") == "a\\nb\\x1b[2J\\ud800 é"
    assert printable("a" * 700) == "a" * 599 + "…"
