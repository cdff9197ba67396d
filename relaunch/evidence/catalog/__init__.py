"""Load the catalog of Xids, exits, log lines and stop codes, and apply a user's overrides to it.

The facts are in data files with their sources, which are loaded once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from relaunch.evidence.catalog.overrides import (
    NO_OVERRIDES,
    CatalogOverrides,
    LogOverride,
    XidOverride,
)
from relaunch.evidence.catalog.rows import (
    Catalog,
    EcsStopRow,
    ExitRow,
    KernelRow,
    LogRow,
    NpuRow,
    NvlinkRule,
    RecoveryAction,
    XidRow,
)
from relaunch.evidence.catalog.signals import SIGNALS
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Role
from relaunch.fields import Pattern, compile_pattern

__all__ = [
    "NO_OVERRIDES",
    "Catalog",
    "CatalogOverrides",
    "EcsStopRow",
    "ExitRow",
    "KernelRow",
    "LogRow",
    "NpuRow",
    "NvlinkRule",
    "RecoveryAction",
    "XidRow",
    "catalog",
    "exit_meaning",
    "is_cascade",
]

FOLDER = Path(__file__).parent
USER = "User"
"""In `npu_codes.json`: the program's input or operators cause it, and the chip is well."""
USER_MEANING = "an error that the program's input or its operators caused"
MAX_STATES_MEMORY = 64 * 2**20
"""Bytes that RE2 may use for the states of the joined pattern, which took 12 MiB for 3,235 lines of
real jobs. With RE2's own limit (8 MiB) the states were dropped and built again all the time: 0.3 ms
a line instead of 0.01 ms, and one more row later it gave up states with an error for each line.
"""
YOURS = "your policy"
"""The source given for a row that a user wrote."""


def catalog(overrides: CatalogOverrides = NO_OVERRIDES) -> Catalog:
    """Return the tables with the overrides of one job's policy."""
    return (
        _load_tables()
        if overrides == NO_OVERRIDES
        else _apply_overrides(overrides.model_dump_json())
    )


@cache
def _load_tables() -> Catalog:
    xids = _load_table("xids")
    log = _load_table("log_lines")
    log_lines = tuple(LogRow(**_parse_row(row)) for row in log["rows"])
    return Catalog(
        xids={row["code"]: XidRow(**_parse_row(row)) for row in xids["rows"]},
        npu_codes=_parse_npu_codes(_load_table("npu_codes")),
        recovery_actions={
            row["number"]: RecoveryAction(**_parse_row(row)) for row in xids["recovery_actions"]
        },
        nvlink=tuple(NvlinkRule(**row) for row in _load_table("nvlink")["rows"]),
        exits={row["key"]: ExitRow(**_parse_row(row)) for row in _load_table("exits")["rows"]},
        log_lines=log_lines,
        any_log_line=(_join_patterns(log_lines),),
        advice_lines=tuple(re.compile(row["pattern"]) for row in log["advice"]),
        kernel_lines=tuple(
            KernelRow(**_parse_row(row)) for row in _load_table("kernel_lines")["rows"]
        ),
        ecs_stops=tuple(EcsStopRow(**_parse_row(row)) for row in _load_table("ecs_stops")["rows"]),
        dcgm={},
    )


def _load_table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return table


def _parse_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with roles, causes and patterns as objects.

    Raises:
        ValueError: A role or cause does not exist.
    """
    values = dict(row)
    values["role"] = Role(row["role"])
    values["cause"] = Cause(row["cause"]) if row["cause"] is not None else None
    for field in ("pattern", "reason"):
        if isinstance(row.get(field), str):
            values[field] = re.compile(row[field])
    return values


def _parse_npu_codes(table: dict[str, Any]) -> dict[str, NpuRow]:
    """Return the rows with the meaning of their level, or of their being the user's doing."""
    levels = {row["level"]: _parse_row(row) for row in table["levels"]}
    rows = {}
    for row in table["rows"]:
        one = NpuRow(**levels[row["level"]] | row)
        if one.by == USER:
            one = replace(one, role=Role.ROOT, cause=Cause.GPU_USER_INDUCED, meaning=USER_MEANING)
        rows[one.code] = one
    return rows


def _join_patterns(rows: Iterable[LogRow]) -> Pattern:
    """Return one pattern for all rows. RE2 matches it in one pass, whatever the number of rows."""
    import re2

    options = re2.Options()
    options.never_capture = True
    options.max_mem = MAX_STATES_MEMORY
    # Groups of two rows may have one name, which RE2 refuses, as it does look-behind: without that
    # it matches more lines, of which each row then decides.
    texts = (
        re.sub(r"\(\?<![^()]*\)", "", re.sub(r"\(\?P<\w+>", "(?:", row.pattern.pattern))
        for row in rows
    )
    joined: Pattern = re2.compile("|".join(f"(?:{text})" for text in texts), options)
    return joined


@lru_cache(maxsize=64)  # one worker serves a few dozen policies; a miss costs a few milliseconds
def _apply_overrides(canonical: str) -> Catalog:
    overrides = CatalogOverrides.model_validate_json(canonical)
    tables = _load_tables()
    log_lines = _override_log_lines(tables.log_lines, overrides.log)
    return replace(
        tables,
        xids=tables.xids
        | {
            code: _override_xid(code, wish, tables.xids.get(code))
            for code, wish in overrides.xid.items()
        },
        exits=tables.exits
        | {
            key: ExitRow(key, wish.cause, wish.role or Role.ROOT, wish.meaning, YOURS)
            for key, wish in overrides.exit.items()
        },
        log_lines=log_lines,
        # Joined, 200 rows of a user's could take seconds to compile.
        any_log_line=(
            *tables.any_log_line,
            *(row.pattern for row in log_lines if row.source == YOURS),
        ),
        dcgm={error: wish.advice for error, wish in overrides.dcgm.items()},
    )


def _override_xid(code: int, wish: XidOverride, known: XidRow | None) -> XidRow:
    row = known or XidRow(
        code, "", "", "", "", wish.effective_role, None, "a code that our catalog does not know", ""
    )
    reason = f" ({YOURS}: {wish.reason})" if wish.reason else f" ({YOURS})"
    return replace(
        row, role=wish.effective_role, cause=wish.cause, meaning=row.meaning + reason, by_user=True
    )


def _override_log_lines(
    rows: tuple[LogRow, ...], wishes: Iterable[LogOverride]
) -> tuple[LogRow, ...]:
    """Return the log rows with the user's overrides.

    A known id keeps its position; new ones come first, in the user's order.
    """
    yours = {
        w.id: LogRow(w.id, compile_pattern(w.pattern), w.role, w.cause, w.meaning, YOURS)
        for w in wishes
    }
    known = {row.id for row in rows}
    return (
        *(row for id_, row in yours.items() if id_ not in known),
        *(yours.get(row.id, row) for row in rows),
    )


def find_exit_row(exit_code: int | None, signal: int | None) -> ExitRow | None:
    """Return the catalog's row for an exit; None when the exit says no more than "it failed"."""
    key = SIGNALS.get(signal, "") if signal is not None else f"exit {exit_code}"
    return catalog().exits.get(key)


def is_cascade(lines: tuple[str, ...]) -> bool:
    """Return whether the last lines of a rank say that it failed because a peer did."""
    rows = [row for row in catalog().log_lines if row.role is Role.CASCADE]
    return any(row.pattern.search(line) for line in lines for row in rows)
