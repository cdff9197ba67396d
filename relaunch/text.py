"""Lists of names and counts of things, as sentences for people write them; and texts that others
wrote, made safe for where people read them: a terminal, a page in Markdown, a message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import dropwhile, pairwise

CONTROLS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e"
    "\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f"
)
"""Characters that are no text, as a class of a regular expression: controls, those that turn the
direction of writing or are not seen, line separators, and halves of surrogate pairs, which no
stream can encode. Unicode calls them Cc, Cf, Cs, Zl and Zp. Tabs and line ends are not in it."""
SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)"
    r"|[ -/]*[0-OQ-WYZ\\`-~])"
)
"""Escape sequences of terminals: colours, movements, titles, links and the like."""
_CONTROL = re.compile(f"[{CONTROLS}]")
_MARKUP = re.compile(r"[\\*_\[\]<~]|&(?=[#A-Za-z])")
_MENTION = re.compile(r"@(?=(?:everyone|here|channel|all|group|room|team)\b)", re.IGNORECASE)

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


def omit_said(texts: Iterable[str], said: Iterable[str]) -> list[str]:
    """Return each text without its first clauses, as far as `said` or a text before it has them.

    After `it broke`, of `it broke; try 1` is left `…; try 1`, and of `it broke` nothing.
    """
    known = {clause for text in said for clause in text.split("; ")}
    result = []
    for text in texts:
        clauses = text.split("; ")
        further = list(dropwhile(known.__contains__, clauses))
        dropped = len(further) < len(clauses)
        result.append("; ".join(["…"] * (dropped and bool(further)) + further))
        known.update(clauses)
    return result


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
    return _NUMBER.sub("N", strip_sequences(error.strip()))


def printable(text: str, most: int = 600) -> str:
    """Return text as one line: line ends and other control characters as escapes, cut to `most`.

    For sentences that quote what others wrote, which may be anything.
    """
    head = text[:most]
    if len(head) == len(text) and text.isprintable():
        return text
    line = "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in head
    )
    return line if len(line) <= most and len(head) == len(text) else f"{line[: most - 1]}…"


def escape_controls(text: str) -> str:
    """Return text with its lines and tabs, and with `CONTROLS` as escapes: `\\x1b[2J`.

    A terminal that prints it is only written to: nothing moves, is hidden, named or answered.
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def strip_sequences(text: str) -> str:
    """Return what a program wrote for a terminal as plain lines, without colours and the like.

    What is left of `CONTROLS` is escaped.
    """
    return escape_controls(SEQUENCES.sub("", text) if "\x1b" in text else text)


def escape_markdown(text: str) -> str:
    """Return text as one line that Markdown shows as it is written: no link, picture, HTML,
    heading or emphasis comes of it.

    Backticks in pairs still mean code, in which nothing is a mark. Others become apostrophes: one
    alone would end the next code of the page at its begin. An address that is written in full
    (`https://…`) is shown as a link to itself.
    """
    line = _MARKUP.sub(_escape_mark, printable(text.strip(), len(text) * 10 + 1))
    if line.count("`") % 2 or "``" in line:
        line = line.replace("`", "'")
    if line[:1] in ("#", "+", "-", "=", ">") or _is_numbered(line):
        number = len(line) - len(line.lstrip("0123456789"))
        return f"{line[:number]}\\{line[number:]}"
    return line


def _escape_mark(found: re.Match[str]) -> str:
    mark, text, at = found[0], found.string, found.start()
    # Within a word it is no emphasis, and most names of ours have one: RESTART_IN_PLACE.
    if mark == "_" and text[at - 1 : at].isalnum() and text[at + 1 : at + 2].isalnum():
        return mark
    return f"\\{mark}"


def _is_numbered(line: str) -> bool:
    rest = line.lstrip("0123456789")
    return len(rest) < len(line) and rest[:1] in (".", ")")


def quote_code(text: str) -> str:
    """Return text as one line in the style of code in Markdown, within which nothing is a mark."""
    return f"`{printable(text).replace('`', chr(39)) or ' '}`"


def mute_markup(text: str) -> str:
    """Return text that chats and mail show as it is written: without the signs that mention
    people (`<!channel>`, `@everyone`), begin HTML, or hide an address behind a word."""
    text = escape_controls(text).replace("<", "\u2039").replace(">", "\u203a")
    return _MENTION.sub("@ ", text).replace("](", "] (")
