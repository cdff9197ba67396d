"""Lists of names and counts of things, as sentences for people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise

NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def join_names(names: Iterable[object], most: int = 3) -> str:
    """Return the first `most` names and the number of the others: `n1, n2, n3 and 4 more`.

    Without names, return an empty text.
    """
    listed = [str(name) for name in names]
    shown = ", ".join(listed[:most])
    return f"{shown} and {len(listed) - most} more" if len(listed) > most else shown


def join_ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Return numbers in their order, runs as `0-62`: `0-3, 5`, and at most `most` runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return join_names(("-".join(map(str, run)) for run in runs), most)


def join_node_ranges(names: Iterable[str], most: int = 3) -> str:
    """Return names as `join_names` does, or as `n1-n8` if they differ by consecutive numbers."""
    listed = list(names)
    parts = [NUMBERED.fullmatch(name) for name in listed]
    found = [(part[1], int(part[2])) for part in parts if part]
    if len(found) == len(listed) > 2 and all(
        (before[0], before[1] + 1) == after for before, after in pairwise(found)
    ):
        return f"{listed[0]}-{listed[-1]}"
    return join_names(listed, most)


def join_clauses(clauses: Sequence[str], most: int = 2) -> str:
    """Return `most` clauses and the number of the others: `it broke; it burnt; 2 more`."""
    rest = [f"{len(clauses) - most} more"] if len(clauses) > most else []
    return "; ".join([*clauses[:most], *rest])


def count_noun(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 node`, `2 nodes`; `plural` is for a noun that adds no s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def format_time(at: datetime) -> str:
    """Return a moment for people who read it later: `2026-11-25 22:39 UTC`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def mask_numbers(error: str) -> str:
    """Return an error without its numbers, which differ between launches of one bug.

    They are sizes, addresses, ports, pids and ranks. Where a number does matter, such as that of a
    file that is missing, the program still cannot start.
    """
    return _NUMBER.sub("N", error.strip())


def printable(text: str, most: int = 600) -> str:
    """Return text as one line: line ends and other control characters as escapes, cut to `most`.

    For sentences that quote what others wrote, which may be anything.
    """
    line = "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )
    return line if len(line) <= most else f"{line[: most - 1]}…"
