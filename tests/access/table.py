"""Which role may give which order, as the table of docs/access.md has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relaunch.spec.access import RESEARCHER, ROLES, Permission

Cell = Literal["claimed", "signed", "refused", "–"]
OTHERS = "not named"
"""The column of those who are not in `people`, where `others` says nothing."""
COLUMNS = (*ROLES, OTHERS)
PAGE = Path(__file__).parents[2] / "docs" / "access.md"
HEAD = "| order | " + " | ".join(COLUMNS) + " |"


@dataclass(frozen=True)
class Row:
    words: str
    """What is typed, without options that matter to nothing here."""
    permission: Permission
    owner: Literal["own", "another's", ""] = ""
    """Whose job; empty: it is not about a job that exists."""
    in_service: bool = True
    """Whether it is tried through the command line, a service and nodes, too."""

    @property
    def title(self) -> str:
        return f"`{self.words}`" + (f", {self.owner} job" if self.owner else "")


JOB_ORDERS: tuple[tuple[str, Permission], ...] = (
    ("cancel JOB", "cancel"),
    ("retry JOB", "retry"),
    ("answer JOB", "answer"),
    ("policy change JOB", "policy"),
)
ROWS = (
    Row("submit", "submit"),
    *(Row(words, right, "own") for words, right in JOB_ORDERS),
    *(Row(words, right, "another's") for words, right in JOB_ORDERS),
    Row("nodes quarantine NODE", "drain"),
    Row("nodes release NODE", "drain"),
    Row("nodes pause", "pause"),
    Row("nodes resume", "pause"),
    Row("nodes answer NODE deny", "answer", in_service=False),
    Row("nodes answer NODE approve", "repair", in_service=False),
    Row("nodes repair NODE --reset-gpus", "repair"),
    Row("nodes repair NODE --reboot", "repair"),
    Row("nodes repair NODE --power-cycle", "repair"),
    Row("nodes declare-dead NODE", "declare-dead"),
)
UNCHECKED = {
    *("backup", "codec-server", "doctor", "explain", "follow", "history", "init", "jobs", "logs"),
    *("next", "nodes apply", "nodes check", "nodes discover", "nodes list", "nodes show"),
    *("nodes trust", "notify test", "policy check", "policy explain", "policy presets"),
    *("policy replay", "report", "rollback", "show", "stacks", "up", "upgrade"),
}
"""Commands that take no right: most of them read."""
BY_OTHER_NAMES = {"run": "submit"}
"""Commands that give an order of the table by another name."""


def find_cell(role: str, row: Row) -> Cell:
    """Return what a role of relaunch may do by the rules of docs/access.md, written once more."""
    if role not in ROLES:
        return "–" if row.owner == "own" else "refused"
    wanted = {row.permission, *([f"{row.permission}-own"] if row.owner == "own" else [])}
    if wanted.isdisjoint(ROLES[role]):
        return "refused"
    return "signed" if wanted.isdisjoint(RESEARCHER) else "claimed"


def format_table(cells: Mapping[tuple[str, str], str]) -> list[str]:
    """Return the table; `cells` by the title of the row and the column."""
    lines = [HEAD, f"|{' -- |' * (len(COLUMNS) + 1)}"]
    for row in ROWS:
        found = [cells[row.title, column] for column in COLUMNS]
        lines.append(f"| {' | '.join((row.title, *found))} |")
    return lines


def read_page() -> list[str]:
    """Return the table as docs/access.md has it."""
    lines = iter(PAGE.read_text().splitlines())
    return list(_take_table(lines))


def _take_table(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line == HEAD:
            yield line
            break
    for line in lines:
        if not line.startswith("|"):
            return
        yield line
