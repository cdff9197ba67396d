"""The rows as Markdown tables: what was named of each kind, and after how long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from tests.hangs.kinds import BY_NAME, CONTROLS, KINDS, Kind, find_mistakes

Row = dict[str, Any]


def seconds(values: Iterable[float | None]) -> tuple[str, str]:
    """Return the median and the largest of some times, as text."""
    known = [value for value in values if value is not None]
    return (f"{median(known):.1f}", f"{max(known):.1f}") if known else ("–", "–")


def count(values: Iterable[Any]) -> str:
    """Return how often each value is there, the most frequent first."""
    found = [str(value) for value in values if value]
    order = sorted(set(found), key=lambda one: (-found.count(one), one))
    return ", ".join(f"`{one}` {found.count(one)}" for one in order) or "–"


def describe_hang(kind: Kind, rows: Sequence[Row]) -> str:
    mistakes = [find_mistakes(row, kind) for row in rows]
    seen = [row for row in rows if row["cause"]]
    named = sum(not one for one in mistakes)
    wrong = sum("wrong rank" in one for one in mistakes)
    middle, worst = seconds(row.get("seconds") for row in seen)
    cells = [
        f"{kind.name}",
        f"{len(seen)}/{len(rows)}",
        f"{named}/{len(rows)}",
        str(wrong),
        count(row.get("rule") for row in seen),
        count(row["cause"] for row in seen),
        middle,
        worst,
    ]
    cells += [describe_beside(launcher, rows) for launcher in ("torchrun", "nvrx")]
    return f"| {' | '.join(cells)} |"


def describe_beside(launcher: str, rows: Sequence[Row]) -> str:
    """Return what another launcher made of the same hangs.

    With divided time-outs: also after how long it would have been by default, where nothing but the
    waiting takes longer.
    """
    played = [(row["rank"], row[launcher]) for row in rows if launcher in row]
    if not played:
        return "not run"
    right = sum(one["named"] == [rank] for rank, one in played)
    known = [one for _, one in played if one["seconds"] is not None]
    text = seconds(one["seconds"] for one in known)[0]
    if any(one["scale"] != 1 for one in known):
        text += " → " + seconds(
            one["seconds"] + one["default_s"] * (1 - 1 / one["scale"]) for one in known
        )[0].removesuffix(".0")
    return f"{text} ({right}/{len(played)})"


def describe_healthy(kind: Kind, rows: Sequence[Row]) -> str:
    restarted = sum("restarted" in find_mistakes(row, kind) for row in rows)
    causes = count(row["cause"] for row in rows)
    return f"| {kind.name} | {kind.what} | {len(rows)} | {restarted} | {causes} |"


def render(rows: Sequence[Row]) -> str:
    """Return the tables of hangs and of healthy runs, of each number of ranks."""
    lines: list[str] = []
    for ranks in sorted({row["ranks"] for row in rows}):
        of_kind = {
            name: [row for row in rows if row["kind"] == name and row["ranks"] == ranks]
            for name in BY_NAME
        }
        hangs = [kind for kind in KINDS if kind.hangs and of_kind[kind.name]]
        if hangs:
            lines += [
                f"{ranks} ranks, hangs. Seconds are from the beginning to the decision; of torchrun"
                " and nvrx (ranks named right) as measured → with their default time-outs.",
                "",
                "| kind | seen | named right | wrong rank | by rule | cause | median | worst"
                " | torchrun | nvrx |",
                "| -- | -- | -- | -- | -- | -- | -- | -- | -- | -- |",
                *(describe_hang(kind, of_kind[kind.name]) for kind in hangs),
                "",
            ]
        healthy = [kind for kind in (*KINDS, *CONTROLS) if not kind.hangs and of_kind[kind.name]]
        if healthy:
            lines += [
                f"{ranks} ranks, no hang:",
                "",
                "| kind | what | runs | restarted | cause |",
                "| -- | -- | -- | -- | -- |",
                *(describe_healthy(kind, of_kind[kind.name]) for kind in healthy),
                "",
            ]
        timed = [row["stacks_s"] for row in rows if "stacks_s" in row and row["ranks"] == ranks]
        if timed:
            middle, worst = seconds(timed)
            lines += [f"`relaunch stacks` of {ranks} ranks: {middle} s, at worst {worst} s.", ""]
    return "\n".join(lines).rstrip()
