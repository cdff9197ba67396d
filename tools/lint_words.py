#!/usr/bin/env python3
"""Count what docs/glossary.md asks not to write, and fail where there is more of it than before.

    python tools/lint_words.py            counts, against the limits below
    python tools/lint_words.py --list     every place

The limits only go down: a change that lowers a count lowers its limit, too.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("relaunch/", "workflows/", "activities/")
AGENT = "relaunch/agent/"
MAX_COLUMNS = 100
DIALECT = re.compile(
    r"\b(nobody|whoever|somebody|anew|of its own|(is|are|was|were) told|ha(s|ve) been met|in vain)\b",
    re.IGNORECASE,
)
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
"""Past participles, adverbs and prepositions that were names of functions here; a function is a verb."""
LIMITS = {"dialect": 0, "class names": 0, "function names": 0, "long lines": 0}


class Place(NamedTuple):
    rule: str
    file: str
    line: int
    text: str


def modules() -> list[str]:
    """Return the product's modules. Links into the folders at the top are not followed."""
    found = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def pages() -> list[str]:
    """Return the pages for people that are kept up to date; decisions and changes are history."""
    found = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "reference").glob("*.md"),
    ]
    return sorted(
        path.relative_to(ROOT).as_posix() for path in found if path.name != "CHANGELOG.md"
    )


def tables() -> list[str]:
    """Return the catalogs and presets, whose sentences people read."""
    found = [*(ROOT / "relaunch").rglob("*.json"), *(ROOT / "relaunch").rglob("*.toml")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def find_dialect() -> Iterator[Place]:
    """Find the words in code, comments and messages of the product, and in pages for people."""
    for name in (*modules(), *tables(), *pages()):
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            for match in DIALECT.finditer(line):
                yield Place("dialect", name, number, match[0])


def find_class_names() -> Iterator[Place]:
    """Find classes that share their name with another one, on the controller or within the agent."""
    seen: dict[tuple[bool, str], str] = {}
    for name in modules():
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.ClassDef):
                first = seen.setdefault((name.startswith(AGENT), node.name), name)
                if first != name:
                    yield Place("class names", name, node.lineno, f"{node.name}, also in {first}")


def find_function_names() -> Iterator[Place]:
    for name in modules():
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name.strip("_") in FORBIDDEN_NAMES
            ):
                yield Place("function names", name, node.lineno, node.name)


def find_long_lines() -> Iterator[Place]:
    for name in modules():
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if len(line) > MAX_COLUMNS and "http" not in line:
                yield Place("long lines", name, number, f"{len(line)} columns")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="print every place")
    arguments = parser.parse_args()
    found = [*find_dialect(), *find_class_names(), *find_function_names(), *find_long_lines()]
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
