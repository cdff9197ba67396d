"""Pages for people: every link leads somewhere, and the README can be read in five minutes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MAX_README_LINES = 150
MAX_COLUMNS = 100
"""Of the pages that are new enough to keep to it; tables and links cannot be broken."""
NARROW = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/index.md", "docs/glossary.md")


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))
        if not re.match(r"https?:|mailto:", link)
    ]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for name, test in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)", page.read_text()):
        assert f"def {test}(" in (ROOT / "tests" / name).read_text(), f"{name}::{test}"


ROWS = {"S1": 11, "S2": 11, "S3": 11, "S4": 10, "S5": 6}
"""How many rows docs/testing.md has of what each system does."""


def rows_in_make_test(path: Path) -> set[str]:
    """Return the rows that names of this file's tests give, without the tests of `make long`."""
    text = path.read_text()
    if not re.search(r"def test_s\d+_\d+_", text):
        return set()
    tree = ast.parse(text)
    if any("pytestmark = " in line and ".long" in line for line in map(ast.unparse, tree.body)):
        return set()
    return {
        f"S{group}.{number}"
        for test in tree.body
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef)
        and "pytest.mark.long" not in map(ast.unparse, test.decorator_list)
        for group, number in re.findall(r"(?<=_)s(\d+)_(\d+)(?=_)", test.name)
    }


def test_each_row_of_other_systems_has_a_test_in_make_test() -> None:
    rows = [f"{group}.{n}" for group, count in ROWS.items() for n in range(1, count + 1)]
    page = (ROOT / "docs" / "testing.md").read_text()
    assert re.findall(r"^\| (S\d+\.\d+) \|", page, re.MULTILINE) == rows
    shown = {row for path in (ROOT / "tests").rglob("test_*.py") for row in rows_in_make_test(path)}
    assert sorted(shown) == sorted(rows)


def test_each_promise_has_a_row_of_tests() -> None:
    promises, tests = (ROOT / "docs" / "guarantees.md").read_text().split("\n## Tests\n")
    promised = re.findall(r"^\| (.*?) \|", promises, re.MULTILINE)
    assert "what happens" in promised and "`kill -9` of a rank" in promised
    assert re.findall(r"^\| (.*?) \| (?=`|tests|--)", tests, re.MULTILINE) == promised


def test_the_index_has_every_page() -> None:
    listed = set(re.findall(r"\]\(([^)#\s]+)\)", (ROOT / "docs" / "index.md").read_text()))
    here = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if path.parent.name != "decisions"
    }
    assert here - {"index.md"} <= listed


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("name", NARROW)
def test_lines_fit_a_terminal(name: str) -> None:
    wide = [
        line
        for line in (ROOT / name).read_text().splitlines()
        if len(line) > MAX_COLUMNS and not line.startswith("|")
    ]
    assert wide == []
