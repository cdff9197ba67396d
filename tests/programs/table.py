"""The rows as a Markdown table: what programs went through alike stands in one line."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tests.programs.cases import FAULTS, PROGRAMS, has_place

Row = dict[str, Any]


def describe_bits(row: Row) -> str:
    if row["phase"] != "SUCCEEDED":
        return "–"
    if row["same"]:
        return "same"
    beside = row.get("torchrun") or {}
    return "as torchrun's" if beside.get("outcome") == row["outcome"] else "other"


def describe_torchrun(row: Row) -> str:
    beside = row.get("torchrun")
    if beside is None:
        return "not run"
    code = beside["exit_code"]
    if code is None:
        return "hangs"
    if code != 0:
        return f"fails ({code})"
    return "same" if beside["same"] else "other"


def describe(row: Row) -> tuple[str, ...]:
    """Return the cells of a row that are the same for programs that behave alike."""
    cause = f"`{row['cause']}`" if row["cause"] else "–"
    if row["code"]:
        cause += f" ({row['code']})"
    return (
        f"{row['phase']}, {row['generations']}",
        cause,
        describe_bits(row),
        f"`{row['traceback'][:60]}`" if row["traceback"] else "–",
        describe_torchrun(row),
    )


def render(rows: Sequence[Row]) -> str:
    order = [program.name for program in PROGRAMS]
    by_key = {(row["program"], row["fault"]): row for row in rows}
    lines = [
        "| fault | programs | result, generations | last fault | bits | traceback ends"
        " | torchrun | s |",
        "| -- | -- | -- | -- | -- | -- | -- | -- |",
    ]
    for fault in FAULTS:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for name in order:
            if (row := by_key.get((name, fault.name))) is not None:
                groups.setdefault(describe(row), []).append(row)
        for cells, alike in groups.items():
            names = ", ".join(row["program"] for row in alike)
            times = f"{median(row['seconds'] for row in alike):.0f}"
            lines.append(f"| {' | '.join((fault.name, names, *cells, times))} |")
    return "\n".join(lines)


def render_missing(rows: Sequence[Row]) -> str:
    """Return which programs were not run with a fault, a line for each fault."""
    known = {(row["program"], row["fault"]) for row in rows}
    lines = []
    for fault in FAULTS:
        missing = [
            program.name
            for program in PROGRAMS
            if has_place(program, fault) and (program.name, fault.name) not in known
        ]
        if missing:
            lines.append(f"- {fault.name}: {', '.join(missing)}")
    return "\n".join(lines)
