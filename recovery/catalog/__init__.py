"""Facts about exits and log lines, as data files with their sources; loaded once."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class LogLine:
    id: str
    pattern: re.Pattern[str]
    role: Literal["cascade"]
    """cascade: seen by a rank because another one failed."""


@dataclass(frozen=True, slots=True)
class ExitMeaning:
    cause: str
    meaning: str


@cache
def log_lines() -> tuple[LogLine, ...]:
    rows = json.loads((FOLDER / "log_lines.json").read_text())["rows"]
    return tuple(LogLine(id=row["id"], pattern=re.compile(row["pattern"]), role=row["role"]) for row in rows)


@cache
def _exits() -> dict[str, dict[str, dict[str, str]]]:
    tables: dict[str, dict[str, dict[str, str]]] = json.loads((FOLDER / "exits.json").read_text())
    return tables


def exit_meaning(exit_code: int | None, signal: int | None) -> ExitMeaning | None:
    """What the catalog knows about an exit by itself; None when it says nothing more than "it failed"."""
    row = _exits()["signals"].get(str(signal)) if signal is not None else _exits()["codes"].get(str(exit_code))
    return ExitMeaning(row["cause"], row["meaning"]) if row else None


def is_cascade(lines: tuple[str, ...]) -> bool:
    """Whether the last words of a rank say that it failed because a peer did."""
    return any(row.role == "cascade" and row.pattern.search(line) for line in lines for row in log_lines())
