"""Read values from a node's answer.

The node may run another version or send wrong data: a missing or mistyped value counts as
unreadable, never as an error and never as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from relaunch.text import printable, strip_sequences

LONGEST = 300
"""Characters kept of any text: it goes into reasons, which are stored in workflow histories."""
MOST = 2**63
"""Limit of a counter: counters have at most 64 bits on every node; a larger value is invalid."""
MOST_GPUS = 64
"""Four times the number in the largest nodes; a longer answer is invalid."""
LATEST = 253402300799
"""Unix seconds of the end of the year 9999, the latest that a datetime can hold."""


def text(value: object, longest: int = LONGEST) -> str:
    """Return a text as one line that any encoder accepts, control characters as escapes; empty
    where the value is not a text."""
    if not isinstance(value, str):
        return ""
    line = " ".join(value[: 8 * longest].encode("utf-8", "replace").decode().split())
    return printable(strip_sequences(line), longest)


def last_line(value: object) -> str:
    """Return the last line that is not blank, where tools say what went wrong."""
    lines = (
        [line for line in value[-8192:].splitlines() if line.strip()]
        if isinstance(value, str)
        else []
    )
    return text(lines[-1]) if lines else ""


def count(value: object) -> int | None:
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST
        else None
    )


def moment(value: object) -> datetime | None:
    """Return the date of a Unix time in seconds; None where the value is invalid."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LATEST:
        return None
    return datetime.fromtimestamp(value, UTC)


def fields(value: object) -> Mapping[str, Any] | None:
    """Return an object that the node could read; None where it is missing or says unreadable."""
    return value if isinstance(value, Mapping) and "unreadable" not in value else None


def unreadable(value: object) -> str:
    """Return why a value was not read, in the node's own words if it gave any."""
    if isinstance(value, Mapping) and "unreadable" in value:
        return text(value["unreadable"]) or "it does not say why"
    return (
        "the node's answer lacks it" if value is None else "the node's answer makes no sense there"
    )
