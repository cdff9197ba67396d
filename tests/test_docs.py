"""Pages for people: every link leads somewhere, and the README can be read in five minutes."""

from __future__ import annotations

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
