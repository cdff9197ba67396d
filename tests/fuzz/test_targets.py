"""What was found stays mended, and each target takes some inputs that are drawn.

`python -m tests.fuzz` draws for as long as one likes.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.properties import Excess, bounded, expect_colours, expect_page, expect_text
from tests.fuzz.targets import TARGETS, Target

EXAMPLES = 2


@pytest.mark.parametrize("one", TARGETS.values(), ids=TARGETS)
def test_inputs_that_are_drawn_are_read_or_refused(one: Target) -> None:
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(one.inputs)
    def draw(value: object) -> None:
        one.check(value)

    draw()


@pytest.mark.long
@pytest.mark.parametrize("one", TARGETS.values(), ids=TARGETS)
def test_what_was_found_stays_mended(one: Target) -> None:
    for value in one.found:
        one.check(value)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("event-file", 0),
        ("settings-file", 0),
        ("task-event", 1),
        ("agent-files", 0),
        ("error-file", 1),
        ("flight-record", 0),
        ("fleet-message", 2),
        ("fleet-page", 5),
        ("job-page", 40),
    ],
)
def test_the_cheapest_of_what_was_found_stays_mended(name: str, number: int) -> None:
    one = TARGETS[name]
    one.check(one.found[number])


# --- the properties themselves


def test_a_parser_that_works_too_much_is_found() -> None:
    def work() -> None:
        for _ in range(100_000):
            len("")

    with pytest.raises(Excess, match="more than 30400 calls for 1 characters"):
        bounded(1, work)
    assert bounded(1000, lambda: 7) == 7


@pytest.mark.parametrize("text", ["\x1b[2J", "\u202e", "\x9b", "\u2028", "\ud800", "\x00"])
def test_a_text_that_acts_on_a_terminal_is_found(text: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(repr(text)[1:5])):
        expect_text(f"a{text}b")


@pytest.mark.parametrize("output", ["\x1b[8mx", "\x1b[1;8mx", "\x1b[?4m", "\x1b[2J", "\x1b[0 m"])
def test_output_that_does_more_than_colour_is_found(output: str) -> None:
    expect_colours("\x1b[1;38;5;8;48;2;8;8;8mx\x1b[0m")
    with pytest.raises(AssertionError):
        expect_colours(output)


@pytest.mark.parametrize(
    "text", ["[a](b)", "![a](b)", "<b>", "*a*", "> q", "<http://e>", "\x1b", "1. a", "a\n\n## b"]
)
def test_a_page_with_anything_but_our_own_marks_is_found(text: Any) -> None:
    expect_page("## a\n\n**b** c `d`\n\n- e\n\n```\nf\n```\n", "# a")
    with pytest.raises(AssertionError):
        expect_page(text, "a")
