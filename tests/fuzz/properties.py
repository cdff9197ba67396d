"""What holds for every input: which errors, how much work, and what is printed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from markdown_it import MarkdownIt

from relaunch.text import CONTROLS

Result = TypeVar("Result")
CONTROL = re.compile(f"[{CONTROLS}]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
CALLS, CALLS_PER_CHARACTER = 30_000, 400
"""Calls of functions that a parser may make, and those for each character."""
SECONDS = 10.0
"""Of processor time, for the one thing that makes no calls: a pattern that goes back and forth. A
hundred times what the slowest takes."""


class Excess(AssertionError):
    """A parser that worked more than its input justifies."""


def bounded(size: int, work: Callable[[], Result]) -> Result:
    """Run a parser; count its calls of functions.

    Raises:
        Excess: They are more than an input of this size needs.
    """
    most, calls = CALLS + CALLS_PER_CHARACTER * size, 0
    outer = sys.getprofile()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1
            if calls > most:
                sys.setprofile(outer)
                raise Excess(f"more than {most} calls for {size} characters")

    began = time.thread_time()
    sys.setprofile(count)
    try:
        return work()
    finally:
        sys.setprofile(outer)
        took = time.thread_time() - began
        if took > SECONDS:
            raise Excess(f"{took:.1f} s of processor time for {size} characters")


def expect_text(text: str, *, is_line: bool = False) -> None:
    """Check that a text does nothing on a terminal, and can be written."""
    found = CONTROL.search(text)
    assert found is None, f"{found[0]!r} in {text!r}"
    assert not (is_line and "\n" in text), f"more than a line: {text!r}"


def expect_colours(output: str) -> None:
    """Check that output of ranks only sets colours."""
    for colour in _COLOUR.findall(output):
        numbers = re.sub(r"[345]8;(?:5;\d*|2;\d*;\d*;\d*)", "", colour)
        assert not re.search(r"(?<!\d)0*8(?!\d)", numbers), f"{colour!r} hides text"
    expect_text(_COLOUR.sub("", output))


_MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
INERT = {
    *("inline", "text", "paragraph_open", "paragraph_close", "heading_open", "heading_close"),
    *("bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close", "fence"),
    *("strong_open", "strong_close", "code_inline", "softbreak"),
}
"""What pages are made of: no link, picture, HTML, table, quotation or emphasis."""


def expect_page(page: str, honest: str = "") -> None:
    """Check that a page in Markdown has only what we put there, and no other headings than an
    honest one. A page that is too long ends earlier."""
    expect_text(page)
    tokens = [each for one in _MARKDOWN.parse(page) for each in (one, *(one.children or ()))]
    odd = [one for one in tokens if one.type not in INERT]
    assert not odd, f"{odd[0].type} ({odd[0].content!r}) in {page!r}"
    if honest:
        assert count_headings(page) <= count_headings(honest)


def count_headings(page: str) -> int:
    return sum(one.type == "heading_open" for one in _MARKDOWN.parse(page))
