#!/usr/bin/env python3
"""Count what docs/glossary.md asks not to write, and fail where there is more of it than before.

    python tools/lint_words.py            counts, against the limits below
    python tools/lint_words.py --list     every place

The limits only go down: a change that lowers a count lowers its limit, too.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OWN_FILE = "tools/lint_words.py"
PRODUCT = ("relaunch/", "workflows/", "activities/")
REST = ("tests/", "benchmarks/", "examples/", "tools/", "deploy/")
SCRIPTS = (".sh", ".c", ".yaml", ".yml")
"""Other files of `REST` whose comments count. Texts and JSON there are recorded, or of others."""
RECORDED = "tests/corpus/endings/"
"""What others wrote."""
BUILD_FILES = ("Dockerfile", "Dockerfile.node", "Makefile", "docker-compose.yml", "pyproject.toml")
AGENT = "relaunch/agent/"
MAX_COLUMNS = 100
DIALECT = re.compile(
    r"\b(nobody|whoever|somebody|anew|of its own|(is|are|was|were) told"
    r"|ha(s|ve) been met|in vain)\b",
    re.IGNORECASE,
)
EXPRESSION = re.compile(r'^    r".*",?$', re.MULTILINE)
"""The lines of `DIALECT` in this file, which are not counted."""
FORBIDDEN_NAMES = frozenset(
    {
        "told",
        "said",
        "met",
        "seen",
        "gone",
        "heard",
        "asked",
        "given",
        "held",
        "kept",
        "left",
        "lost",
        "known",
        "found",
        "meant",
        "wanted",
        "named",
        "meanwhile",
        "beside",
        "up_to",
    }
)
"""Past participles, adverbs and prepositions that were function names here; functions are verbs."""
PARTICIPLE = re.compile(
    r"_?[A-Z][a-z]+(?:ed|ing)$|_?(?:Gone|Held|Found|Lost|Seen|Told|Known|Through)$"
)
"""A class is a noun that says which kind; one word of this form is none."""
NOUNS = frozenset(
    {"Feed", "Finding", "Healing", "Reading", "Recording", "Answered", "Launched", "Submitted"}
)
"""Nouns of that form, and events, which are named by what has happened."""
CLASS = re.compile(r"^\s*class (\w+)[(:]", re.MULTILINE)
DEFINITION = re.compile(r"^\s*(?:async )?def (\w+)\(", re.MULTILINE)
TYPE_IGNORE = re.compile(r"  # type: ignore\[[\w, -]+\]$")
"""Is not counted as a part of its line: it can neither be shortened nor wrapped."""
MAX_TEST_NAME = 60
LIMITS = {"dialect": 0, "class names": 0, "function names": 0, "test names": 0, "long lines": 0}


class Place(NamedTuple):
    rule: str
    file: str
    line: int
    text: str


def modules() -> list[str]:
    """Return the product's modules. Links into the folders at the top are not followed."""
    return find_files(PRODUCT, (".py",))


def code() -> list[str]:
    """Return all Python files: the product, what starts it, and what tests and measures it."""
    return [*modules(), *find_files(REST, (".py",)), *(path.name for path in ROOT.glob("*.py"))]


def pages() -> list[str]:
    """Return the pages for people that are kept up to date."""
    found = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "reference").glob("*.md"),
    ]
    return sorted(
        path.relative_to(ROOT).as_posix() for path in found if path.name != "CHANGELOG.md"
    )


def records() -> list[str]:
    """Return decisions and changes. Their facts are history, their words are not."""
    return [*find_files(("docs/decisions/",), (".md",)), "CHANGELOG.md"]


def tables() -> list[str]:
    """Return the catalogs and presets, whose sentences people read."""
    return find_files(("relaunch/",), (".json", ".toml"))


def find_files(folders: tuple[str, ...], suffixes: tuple[str, ...]) -> list[str]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found if path.suffix in suffixes)


@functools.cache
def read(name: str) -> str:
    return (ROOT / name).read_text()


def find_dialect() -> Iterator[Place]:
    """Find the words in code and its names, comments and messages, and in pages for people."""
    scripts = (*find_files(REST, SCRIPTS), *BUILD_FILES)
    scripts = tuple(name for name in scripts if not name.startswith(RECORDED))
    for name in (*code(), *scripts, *tables(), *pages(), *records()):
        text = read(name)
        if name == OWN_FILE:
            text = EXPRESSION.sub("", text)
        words = text.replace("_", " ") if name.endswith(".py") else text
        for match in DIALECT.finditer(words):
            yield Place("dialect", name, count_lines(text, match.start()), match[0])


def count_lines(text: str, end: int) -> int:
    """Return the number of the line that has this character."""
    return text.count("\n", 0, end) + 1


def find_class_names() -> Iterator[Place]:
    """Find bare participles, and classes of one name on the controller or in the agent."""
    seen: dict[tuple[bool, str], str] = {}
    for name in modules():
        for match in CLASS.finditer(read(name)):
            if PARTICIPLE.match(match[1]) and match[1].strip("_") not in NOUNS:
                line = count_lines(read(name), match.start(1))
                yield Place("class names", name, line, f"{match[1]} is a participle")
            first = seen.setdefault((name.startswith(AGENT), match[1]), name)
            if first != name:
                line = count_lines(read(name), match.start(1))
                yield Place("class names", name, line, f"{match[1]}, also in {first}")


def find_function_names() -> Iterator[Place]:
    for name in code():
        for match in DEFINITION.finditer(read(name)):
            if match[1].strip("_") in FORBIDDEN_NAMES:
                line = count_lines(read(name), match.start(1))
                yield Place("function names", name, line, match[1])


def find_test_names() -> Iterator[Place]:
    for name in find_files(("tests/",), (".py",)):
        for match in DEFINITION.finditer(read(name)):
            if match[1].startswith("test_") and len(match[1]) > MAX_TEST_NAME:
                line = count_lines(read(name), match.start(1))
                yield Place("test names", name, line, f"{match[1]}: {len(match[1])} characters")


def find_long_lines() -> Iterator[Place]:
    """Find them in code and in the text of pages.

    A row of a table is one line. A block of a page is what a program prints or reads, as is what
    a test generates.
    """
    for name in (*code(), *pages(), *records()):
        is_block = is_generated = False
        for number, line in enumerate(read(name).splitlines(), 1):
            is_fence = name.endswith(".md") and line.lstrip().startswith("```")
            is_block ^= is_fence
            is_table = name.endswith(".md") and line.startswith("|")
            is_generated = line.startswith("<!-- generated") or (
                is_generated and line != "<!-- end -->"
            )
            is_exempt = is_table or is_block or is_fence or is_generated
            if len(line) <= MAX_COLUMNS or "http" in line or is_exempt:
                continue
            columns = len(TYPE_IGNORE.sub("", line))
            if columns > MAX_COLUMNS:
                yield Place("long lines", name, number, f"{columns} columns")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="print every place")
    arguments = parser.parse_args()
    found = [
        *find_dialect(),
        *find_class_names(),
        *find_function_names(),
        *find_test_names(),
        *find_long_lines(),
    ]
    if arguments.list:
        for place in found:
            print(f"{place.file}:{place.line}: {place.rule}: {place.text}")
    failed = False
    for rule, limit in LIMITS.items():
        count = sum(place.rule == rule for place in found)
        failed |= count > limit
        verdict = (
            "ok" if count == limit else "above its limit" if count > limit else "lower its limit"
        )
        print(f"{rule}: {count}, limit {limit}: {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
