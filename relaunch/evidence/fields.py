"""Values out of what a node answered.

It may be of another version, or lie: whatever is missing or mistyped is unreadable, never an error and never a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LONGEST = 300
"""Characters of any text that is kept: it goes into reasons, and those into histories."""
MOST = 2**63
"""Counters are 64 bits wide on every node; more is no counter."""
MOST_GPUS = 64
"""Four times what the largest nodes have; a longer answer is none."""
LATEST = 253402300799
"""The end of the year 9999: no date can hold more."""


def text(value: object, longest: int = LONGEST) -> str:
    """One line that any encoder takes; empty where it is no text."""
    if not isinstance(value, str):
        return ""
    line = " ".join(value[: 8 * longest].encode("utf-8", "replace").decode().split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def last_line(value: object) -> str:
    """The last line with anything on it, which is where tools say what went wrong."""
    lines = [line for line in value[-8192:].splitlines() if line.strip()] if isinstance(value, str) else []
    return text(lines[-1]) if lines else ""


def count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


def moment(value: object) -> datetime | None:
    """Unix time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LATEST:
        return None
    return datetime.fromtimestamp(value, UTC)


def fields(value: object) -> Mapping[str, Any] | None:
    """An object that was read, None where it says that it was not."""
    return value if isinstance(value, Mapping) and "unreadable" not in value else None


def unreadable(value: object) -> str:
    """Why it was not read: in the node's own words, if it has any."""
    if isinstance(value, Mapping) and "unreadable" in value:
        return text(value["unreadable"]) or "it does not say why"
    return "the node's answer lacks it" if value is None else "the node's answer makes no sense there"
