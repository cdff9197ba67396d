"""Lists of names and counts of things, at their edges."""

from __future__ import annotations

import re
import unicodedata

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.text import (
    CONTROLS,
    count_noun,
    escape_controls,
    escape_markdown,
    join_clauses,
    join_names,
    mute_markup,
    omit_said,
    printable,
    strip_sequences,
)


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


def test_every_character_that_is_no_text_is_a_control() -> None:
    known = re.compile(f"[{CONTROLS}]")
    blocks = ((0, 0x3000), (0xD700, 0x10000), (0x11000, 0x1E000), (0xE0000, 0xE0100))
    points = (code for begin, end in blocks for code in range(begin, end))
    odd = [
        hex(code)
        for code in points
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        and chr(code) not in "\n\t"
        and not known.match(chr(code))
    ]
    assert odd == []
    assert not known.search("\n\tä\u4e2d\U0001f600 \xa0")


def test_lines_stay_and_controls_are_seen() -> None:
    assert escape_controls("a\tb\n\x1b[2J\u202e") == "a\tb\n\\x1b[2J\\u202e"
    assert strip_sequences("\x1b[31mred\x1b[0m\x1b]0;t\x07 \x1b") == "red \\x1b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("RESTART_IN_PLACE 1 of 2 (n1)", "RESTART_IN_PLACE 1 of 2 (n1)"),
        ("# a", r"\# a"),
        ("12. a", r"12\. a"),
        ("- a\n## b", r"\- a\\n## b"),
        ("![a](http://e) <b> &lt; **c** _d_", r"!\[a\](http://e) \<b> \&lt; \*\*c\*\* \_d\_"),
        ("`answer x`: at once", "`answer x`: at once"),
        ("one ` alone", "one ' alone"),
    ],
)
def test_markdown_shows_what_was_written(text: str, shown: str) -> None:
    assert escape_markdown(text) == shown


def test_chats_and_mails_take_nothing_as_markup() -> None:
    text = "<!channel> <b>x</b> [a](http://e) @everyone ann@here.de"
    assert mute_markup(text) == "‹!channel› ‹b›x‹/b› [a] (http://e) @ everyone ann@ here.de"


def test_what_was_said_before_is_not_said_again() -> None:
    told = ["rank 3 exited; n2 answers", "n2 is hot"]
    texts = [
        "rank 3 exited; n2 answers",
        "n2 is hot; rank 3 exited; try 1 of 2",
        "try 1 of 2; n2 is hot; try 2 of 2",
        "it is over; rank 3 exited",
    ]
    assert omit_said(texts, told) == ["", "…; try 1 of 2", "…; try 2 of 2", texts[3]]
