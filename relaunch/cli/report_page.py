"""Writes a report as one page that needs no server and no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from relaunch.cli.report_views import describe_incident, format_seconds
from relaunch.config import ConfigError
from relaunch.job.report import STAGES
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
LISTED = 8
"""Incidents that are listed of one number; all are in the table of incidents."""
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
    parts = list_parts(view)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        view=view,
        bar=_place_accounts(view["accounts"]),
        lanes=[_draw_lane(view, job) for job in view["jobs"][:LANES]],
        hidden_lanes=len(view["jobs"][LANES:]),
        parts=parts,
        anchors={one["id"] for one in parts},
        stages=STAGES,
        rows=ROWS,
        summary=_link_summary(view),
        trend=_draw_trend(view),
        halves=view["trend"]["sentence"].rpartition(", ") if periods else ("", "", ""),
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


def list_parts(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what each number of the page is made of: its incidents, the most expensive first.

    `id` is the anchor that the number links to.
    """
    incidents = view["incidents"]

    def measure(which: Iterable[int], account: str | None = None) -> list[tuple[int, float]]:
        """Return incidents, each with its time in an account, or else its price."""
        return [
            (number, incidents[number]["costs"].get(account, incidents[number]["price"]))
            for number in which
        ]

    def find(holds: Callable[[Any], bool], stage: str | None = None) -> list[tuple[int, float]]:
        """Return the incidents that had a stage, with its time; without one, with their price."""
        found = [
            (number, span)
            for number, one in enumerate(incidents)
            if holds(one)
            and (span := one["price"] if stage is None else one["stages"][stage]) is not None
        ]
        return sorted(found, key=lambda one: one[1], reverse=True)

    named = []
    for one in view["accounts"]:
        named.append((f"of-{one['account']}", one["what"], measure(one["which"], one["account"])))
    for name, what, is_within in _list_periods(view):
        named.append((f"of-{name}", what, find(is_within)))
    for at, one in enumerate(view["by_job"][:ROWS] if len(view["by_job"]) > 1 else ()):
        named.append((f"of-job-{at}", one["job"], find(partial(_has, "job", one["job"]))))
    for at, one in enumerate(view["advice"]):
        named.append((f"of-advice-{at}", one["what"], measure(one["which"], one["account"])))
    for one in view["causes"]:
        cause = one["cause"]
        named.append((f"of-cause-{cause}", cause, measure(one["which"])))
        named += [
            (f"of-{stage}-{cause}", f"{cause}: {stage}", find(partial(_has, "cause", cause), stage))
            for stage in STAGES
        ]
    for at, one in enumerate(view["nodes"]):
        named.append((f"of-node-{at}", one["node"], measure(one["which"])))
    for at, one in enumerate(view["waits"][:ROWS]):
        what = f"{one['job']}: waited for {one['for']}"
        named.append((f"of-wait-{at}", what, measure(one["which"], one["account"])))
    return [
        {
            "id": id,
            "what": what,
            "incidents": [
                {**incidents[number], "number": number, "part": span}
                for number, span in times[:LISTED]
            ],
            "hidden": len(times[LISTED:]),
        }
        for id, what, times in named
        if times
    ]


def _list_periods(view: Mapping[str, Any]) -> list[tuple[str, str, Callable[[Any], bool]]]:
    """Return the halves of the time and its periods: id, words, and which incidents are within."""
    trend = view["trend"]
    if trend is None:
        return []
    middle = _format_moment(trend["newer"]["start"])
    named = [
        ("newer", f"since {middle}", trend["newer"]),
        ("older", f"before {middle}", trend["older"]),
        *(
            (f"period-{at}", f"until {_format_moment(one['end'])}", one)
            for at, one in enumerate(trend["periods"])
        ),
    ]
    return [
        (id, f"interruptions {what}", partial(_is_within, period, id in ("older", "period-0")))
        for id, what, period in named
        if period["interruptions"]
    ]


def _is_within(period: Mapping[str, Any], is_first: bool, incident: Mapping[str, Any]) -> bool:
    """Return whether an incident interrupted training within a period, as `job.trend` counts."""
    start, end, opened = map(_parse, (period["start"], period["end"], incident["opened"]))
    return bool(incident["costs"]) and start <= opened <= end and (is_first or opened > start)


def _has(key: str, value: str, incident: Mapping[str, Any]) -> bool:
    return bool(incident[key] == value)


def _link_summary(view: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the clauses of the summary, each with the anchor of what it was computed of."""
    anchors = {"worst:": "of-node-0", "getting": "trend"}
    return [
        (clause, anchors.get(clause.partition(" ")[0], "accounts"))
        for clause in view["summary"].split("; ")
    ]


def _draw_trend(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the columns of interruptions by time; none where there were none."""
    trend = view["trend"]
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
