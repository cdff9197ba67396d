"""Reads YAML as values with the line of each, within bounds.

Whatever the text is, the answer is values or one sentence. PyYAML alone would raise its own
exceptions for a date that does not exist, a number of 5,000 digits or a part that contains itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from relaunch.config import ConfigError
from relaunch.text import printable

Where = tuple[str | int, ...]

MAX_BYTES = 16 << 20
"""A fleet of 10,000 nodes takes two MiB."""
MAX_DEPTH = 32
"""The deepest file that means something, a policy within a job, has 7 levels."""
MAX_PARTS = 500_000
"""Maximum number of keys, items and values; aliases count as often as they are used."""
MAX_CHARACTERS = 2 * MAX_BYTES
"""Maximum number of characters of all keys and values, counted in the same way."""
MAX_DIGITS = 18
"""What fits into 64 bits, as the messages between processes have them."""

TAG = "tag:yaml.org,2002:"
TEXTS = (f"{TAG}str", f"{TAG}timestamp", f"{TAG}value", f"{TAG}merge")
"""Tags of scalars that are text: no key of any file has a date, or the values `=` and `<<`."""
HINTS = {
    "mapping values are not allowed here": "a value that contains `: ` needs quotes",
    "found character '\\t' that cannot start any token": "indent with spaces, not with tabs",
    "could not find expected ':'": "a key has no `:`, or a quote is not closed",
    "found character '%' that cannot start any token": "a value that starts with % needs quotes",
    "found character '@' that cannot start any token": "a value that starts with @ needs quotes",
    "found character '`' that cannot start any token": "a value that starts with ` needs quotes",
}
"""What to do about errors whose text does not say it."""


def _refuse(event: yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]


class _Loader(yaml.SafeLoader):
    """Composes nodes; refuses depth without a limit, and parts that contain themselves."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open:
                raise _refuse(event, f"*{anchor} is a part of &{anchor} itself")
            return super().compose_node(parent, index)
        if len(self._open) >= MAX_DEPTH:
            raise _refuse(event, f"more than {MAX_DEPTH} levels, one in the other")
        self._open.append(anchor)
        try:
            return super().compose_node(parent, index)
        finally:
            self._open.pop()


class Document:
    """The content of a YAML text, and the line number of each part of it.

    Args:
        text: What is parsed.
        place: What to call the text in sentences: the path of its file.
        as_written: Parts whose values are text exactly as it is written: `0.10` stays 0.10 and
            `on` stays on.

    Raises:
        ConfigError: It is not YAML, or exceeds a limit.
    """

    def __init__(self, text: str, place: str, as_written: tuple[Where, ...] = ()) -> None:
        self.place = place
        self.lines: dict[Where, int] = {(): 1}
        self._as_written = as_written
        self._parts = self._characters = 0
        self._checked: set[int] = set()
        """Scalars whose characters were looked at: an alias is the scalar that it names."""
        try:
            self._loader = _Loader(text)
            root = self._loader.get_single_node()
            self.content: Any = None if root is None else self._build(root, ())
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            problem = error.problem or error.context or ""
            hint = f"; {HINTS[problem]}" if problem in HINTS else ""
            raise ConfigError(printable(f"{place}:{line}: not YAML: {problem}{hint}")) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(
                f"{place}:{line}: not YAML: the character {_name_character(error.character)} "
                "is not allowed"
            ) from None

    def line(self, where: Where) -> int:
        """Return the line of a part; of what contains it, if the text does not have it."""
        while where not in self.lines:
            where = where[:-1]
        return self.lines[where]

    def _build(self, node: yaml.Node, where: Where) -> Any:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise ConfigError(
                f"{self.place}: more than {MAX_PARTS:,} values: expected a small file"
            )
        self.lines.setdefault(where, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{TAG}seq":
            return [self._build(item, (*where, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{TAG}map":
            return self._build_mapping(node, where)
        if isinstance(node, yaml.ScalarNode):
            return self._build_scalar(node, where)
        raise self._error(node, where, f"the tag {node.tag.removeprefix(TAG)} is not supported")

    def _build_mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, Any]:
        content: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, where, f"a key is a {key.id}: expected text")
            self._check_characters(key, where)
            if key.tag == f"{TAG}merge":
                for other in self._build_merged(value, where):
                    merged = {**other, **merged}
                continue
            inner = (*where, key.value)
            if key.value in content:
                raise self._error(key, inner, f"given twice, first on line {self.lines[inner]}")
            self.lines[inner] = key.start_mark.line + 1
            content[key.value] = self._build(value, inner)
        return {**merged, **content}

    def _build_merged(self, node: yaml.Node, where: Where) -> Iterator[dict[str, Any]]:
        """Return the mappings of a merge key, `<<: *name` or `<<: [*name, *other]`."""
        for one in node.value if isinstance(node, yaml.SequenceNode) else (node,):
            if not isinstance(one, yaml.MappingNode):
                raise self._error(one, (*where, "<<"), "expected keys and values to merge")
            yield self._build(one, where)

    def _build_scalar(self, node: yaml.ScalarNode, where: Where) -> Any:
        self._check_characters(node, where)
        written: str = node.value
        if node.tag == f"{TAG}null":
            return None
        # YAML 1.1 reads 1:30 as 90: no file has numbers to the base of 60, but ranges such as 3:4.
        if node.tag in TEXTS or where[:-1] in self._as_written or ":" in written:
            return written
        if node.tag not in (f"{TAG}bool", f"{TAG}int", f"{TAG}float"):
            raise self._error(node, where, f"the tag {node.tag.removeprefix(TAG)} is not supported")
        if node.tag == f"{TAG}int" and len(written.strip("+-")) > MAX_DIGITS:
            raise self._error(
                node,
                where,
                f"a number of {len(written.strip('+-')):,} digits: expected at most {MAX_DIGITS}",
            )
        try:
            value = self._loader.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError):
            kind = node.tag.removeprefix(TAG)
            raise self._error(node, where, f"{shorten(written)} is not of type {kind}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(node, where, f"{shorten(written)} is not a finite number")
        return value

    def _check_characters(self, node: yaml.ScalarNode, where: Where) -> None:
        """Refuse what no argument, variable, path or message can contain."""
        self._characters += len(node.value)
        if self._characters > MAX_CHARACTERS:
            raise ConfigError(
                f"{self.place}: more than {MAX_CHARACTERS >> 20} MiB of values, with those that "
                "aliases repeat: expected a small file"
            )
        if id(node) in self._checked:
            return
        self._checked.add(id(node))
        for character in node.value:
            if character == "\0" or "\ud800" <= character <= "\udfff":
                name = _name_character(character)
                raise self._error(node, where, f"the character {name} is not allowed")

    def _error(self, node: yaml.Node, where: Where, problem: str) -> ConfigError:
        path = "".join(f"{part}." for part in where)[:-1]
        head = f"{self.place}:{node.start_mark.line + 1}: "
        return ConfigError(printable(f"{head}{path}: {problem}" if path else f"{head}{problem}"))


def read_document(path: Path, as_written: tuple[Where, ...] = ()) -> Document:
    """Read a file that has keys and values.

    Raises:
        ConfigError: The file cannot be read, or is not such a file.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file: expected YAML in UTF-8") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES >> 20} MiB: expected a small file")
    document = Document(text, str(path), as_written)
    if document.content is None:
        raise ConfigError(f"{path}:1: the file is empty: expected keys and values")
    if not isinstance(document.content, dict):
        kind = "list" if isinstance(document.content, list) else "single value"
        raise ConfigError(f"{path}:1: the file is a {kind}: expected keys and values")
    return document


def shorten(value: object, width: int = 60) -> str:
    """Return a value as Python writes it, cut to about `width` characters."""
    text = repr(value)
    return text if len(text) <= width else f"{text[:width]}…"


def _name_character(character: str | int) -> str:
    code = character if isinstance(character, int) else ord(character)
    return "NUL" if code == 0 else f"U+{code:04X}"
