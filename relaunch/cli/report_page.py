"""Writes a report as one page that needs no server and no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relaunch.cli.report_views import (
    MEDIANS,
    describe_incident,
    format_seconds,
)
from relaunch.config import ConfigError
from relaunch.text import count_noun

TEMPLATE = Path(__file__).with_name("report.html.j2")
WIDTH = 1000
"""Units across the bar and the lanes; they are drawn as wide as the page."""
MIN_MARK = 2.0
"""Units that a mark has at least, so that it is seen."""
GAP = 4.0
"""Units at each side of a column."""
ROWS = 40
"""Jobs, and waits of jobs, that a table lists."""
LANES = 40
"""Jobs whose lanes are drawn; a picture of more says nothing."""


def write_page(view: Mapping[str, Any], path: Path) -> None:
    """Write a view of `report_views.report_view` as a page.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_text(make_page(view), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror}") from None


def make_page(view: Mapping[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.filters.update(
        span=_format_span, moment=_format_moment, describe=describe_incident, percent=_percent
    )
    periods = view["trend"]["periods"] if view["trend"] else []
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        view=view,
        bar=_place_accounts(view["accounts"]),
        lanes=[_draw_lane(view, job) for job in view["jobs"][:LANES]],
        hidden_lanes=len(view["jobs"][LANES:]),
        medians=MEDIANS,
        rows=ROWS,
        trend=_draw_trend(view["trend"]),
        most=max((one["interruptions"] for one in periods), default=0),
        period=_measure(periods[-1]) if periods else None,
        interruptions=count_noun(view["interruptions"], "interruption"),
        width=WIDTH,
    )


def _place_accounts(accounts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of the bar of all accounts, with their place in it."""
    parts, x = [], 0.0
    for one in accounts:
        width = WIDTH * one["share"]
        parts.append({**one, "x": round(x, 2), "width": round(width, 2)})
        x += width
    return parts


def _draw_trend(trend: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the columns of interruptions by time; none where there were none."""
    if trend is None or not trend["sentence"]:
        return []
    periods = trend["periods"]
    most = max(one["interruptions"] for one in periods)
    width = WIDTH / len(periods)
    return [
        {
            **one,
            "x": round(width * index + GAP, 2),
            "width": round(width - 2 * GAP, 2),
            "height": round(100 * one["interruptions"] / most, 2),
        }
        for index, one in enumerate(periods)
    ]


def _measure(period: Mapping[str, Any]) -> float:
    return (_parse(period["end"]) - _parse(period["start"])).total_seconds()


def _draw_lane(view: Mapping[str, Any], job: str) -> dict[str, Any]:
    """Return where a job's generations and incidents are on the time axis."""
    start, end = _parse(view["start"]), _parse(view["end"])
    length = max((end - start).total_seconds(), 1.0)

    def place(written: str) -> float:
        share = (_parse(written) - start).total_seconds() / length
        return round(WIDTH * min(1.0, max(0.0, share)), 2)

    runs = [
        {**run, "x": (x := place(run["start"])), "width": round(place(run["end"]) - x, 2)}
        for run in view["runs"]
        if run["job"] == job
    ]
    marks = []
    for number, one in enumerate(view["incidents"]):
        if one["job"] == job:
            x = place(one["opened"])
            width = max(MIN_MARK, place(one["closed"] or view["end"]) - x)
            marks.append({**one, "number": number, "x": x, "width": round(width, 2)})
    return {"job": job, "runs": runs, "marks": marks}


def _format_span(seconds: float | None) -> str:
    """Return a time that is not broken between two lines."""
    return format_seconds(seconds).replace(" ", "\N{NO-BREAK SPACE}")


def _parse(written: str) -> datetime:
    return datetime.fromisoformat(written)


def _format_moment(written: str) -> str:
    return f"{_parse(written).astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
