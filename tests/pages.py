"""Sentences for people, held in one text file a page.

A test whose last argument is `page` compares a whole page to the file that bears its name, in
`__snapshots__` beside it. After a change of wording, `pytest --snapshot-update FILE` writes the
pages again; read the difference before you commit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode


class PageExtension(SingleFileSnapshotExtension):
    """A page is a text file that ends with a newline, and no line of it with a space."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    def serialize(self, data: Any, **_: Any) -> str:
        return "\n".join(map(str.rstrip, f"{data}".rstrip("\n").split("\n"))) + "\n"


def sections(parts: Mapping[str, str | Iterable[str]]) -> str:
    """Return one page of several texts, each under its title."""
    found = []
    for title, text in parts.items():
        lines = text.splitlines() if isinstance(text, str) else list(text)
        titles = title.strip("\n").splitlines() or [""]
        found.append("\n".join([*(f"--- {line}".rstrip() for line in titles), *lines]))
    return "\n\n".join(found)
