"""Lists of names and counts of things, as sentences for people write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def join_names(names: Iterable[object], most: int = 3) -> str:
    """Return the first `most` names and the number of the others: `n1, n2, n3 and 4 more`.

    Without names, return an empty text.
    """
    listed = [str(name) for name in names]
    shown = ", ".join(listed[:most])
    return f"{shown} and {len(listed) - most} more" if len(listed) > most else shown


def join_clauses(clauses: Sequence[str], most: int = 2) -> str:
    """Return `most` clauses and the number of the others: `it broke; it burnt; 2 more`."""
    rest = [f"{len(clauses) - most} more"] if len(clauses) > most else []
    return "; ".join([*clauses[:most], *rest])


def count_noun(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 node`, `2 nodes`; `plural` is for a noun that adds no s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def printable(text: str, most: int = 600) -> str:
    """Return text as one line: line ends and other control characters as escapes, cut to `most`.

    For sentences that quote what others wrote, which may be anything.
    """
    line = "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )
    return line if len(line) <= most else f"{line[: most - 1]}…"
