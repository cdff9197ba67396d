"""Bounds of messages to workflows, which anyone who reaches the server can send.

What a message says is kept in the workflow's state and in its history, and is shown to people. A
state that has become larger than the server stores stops its workflow for good.
"""

from __future__ import annotations

import math
from typing import Any

from relaunch.text import printable

MAX_DEPTH = 16
MAX_VALUES = 200_000
"""Keys, items and values; the claim of a job on 10,000 nodes has some 50,000."""
MAX_REASON = 500
"""Characters that are kept of a text that a person sends."""
MAX_TEXT = 4000
"""Characters that are kept of a text that a program sends."""
MAX_NUMBER = 2**64


class MessageError(ValueError):
    """A message that is not taken. The text is a clause that says why."""


def bound_message(raw: Any, longest: int = MAX_REASON) -> Any:
    """Return a message as it is taken: each text is one line of at most `longest` characters, with
    control characters as escapes, each whole number has 64 bits, and none is infinite.

    Raises:
        MessageError: It has more values or levels than any that relaunch sends.
    """
    return _Copy(longest).copy(raw, 0)


class _Copy:
    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._left = MAX_VALUES

    def copy(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MessageError(f"more than {MAX_VALUES:,} values")
        if depth > MAX_DEPTH:
            raise MessageError(f"more than {MAX_DEPTH} levels, one in the other")
        match value:
            case str():
                return printable(value, self._longest)
            case dict():
                return {
                    printable(key, self._longest) if isinstance(key, str) else key: self.copy(
                        inner, depth + 1
                    )
                    for key, inner in value.items()
                }
            case list() | tuple():
                return [self.copy(inner, depth + 1) for inner in value]
            case float() if not math.isfinite(value):
                return None
            case int() if abs(value) > MAX_NUMBER:
                return MAX_NUMBER if value > 0 else -MAX_NUMBER
            case _:
                return value
