"""Formats a report for people and scripts.

Pure: values in, plain mappings and lines out. The keys of `report_view` are a stable interface for
scripts: keys may be added, never renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from relaunch.job.accounts import Account
from relaunch.job.report import (
    STAGES,
    PricedIncident,
    Report,
    describe_trend,
    format_span,
    summarize,
)
from relaunch.job.trend import Period
from relaunch.text import format_time, join_names

ACCOUNTS = {
    Account.PRODUCTIVE: "training that was kept",
    Account.CONTROLLER_AWAY: "training without a controller",
    Account.SAVING: "saving checkpoints",
    Account.LOST_WORK: "work that was lost",
    Account.DETECTING: "detecting faults",
    Account.DECIDING: "deciding",
    Account.STOPPING: "stopping ranks",
    Account.EXAMINING: "examining nodes",
    Account.REPAIRING: "repairing nodes",
    Account.LAUNCHING: "launching, up to the first step",
    Account.WAITING_FOR_NODES: "waiting for nodes",
    Account.WAITING_FOR_PERSON: "waiting for a person",
    Account.QUEUED: "queued",
    Account.UNKNOWN: "unknown",
}
"""In the order in which they are shown."""
DEFINITIONS = {
    "ettr": "ETTR, the effective training time ratio: productive time / time from submission to "
    "end, queueing included",
    "mtbf": "MTBF: time from submission to end without queueing / interruptions",
    "mttr": "MTTR: from a fault to the first step after it, mean over interruptions",
}
BAR_WIDTH = 40
MAX_ROWS = 10
"""Of a table of jobs in the terminal."""
Link = Callable[[str, datetime], str | None]
"""Returns the page of the web UI that shows a job's event at a time; None: not known."""


def report_view(report: Report, link: Link) -> dict[str, Any]:
    """Return what `report --json` prints: seconds as floats, times as ISO 8601."""

    numbers = {id(one): number for number, one in enumerate(report.incidents)}

    def number(priced: Sequence[PricedIncident], account: Account | None = None) -> list[int]:
        """Return the positions of incidents in the report, the most expensive first."""
        costs = [(one, one.price if account is None else one.cost(account)) for one in priced]
        costs.sort(key=lambda one: one[1], reverse=True)
        return [numbers[id(one)] for one, _ in costs]

    def find_page(priced: Sequence[PricedIncident]) -> str | None:
        """Return the page of the most expensive incident."""
        if not priced:
            return None
        worst = max(priced, key=lambda one: one.price)
        return link(worst.job, worst.incident.detected or worst.incident.opened)

    wall = report.wall.total_seconds()
    return {
        "summary": summarize(report),
        "jobs": list(report.jobs),
        "start": _iso(report.start),
        "end": _iso(report.end),
        "over": report.is_over,
        "wall": wall,
        "effective": report.effective.total_seconds(),
        "lost": report.loss.total_seconds(),
        "unknown": report.unknown.total_seconds(),
        "ettr": report.ettr,
        "interruptions": report.interruptions,
        "mtbf": _seconds(report.mtbf),
        "mttr": _seconds(report.mttr),
        "definitions": DEFINITIONS,
        "accounts": [
            {
                "account": account.value,
                "what": what,
                "seconds": span.total_seconds(),
                "share": span.total_seconds() / wall if wall else 0.0,
                "link": find_page(found) or link(report.jobs[0], report.end),
                "which": number(found, account),
            }
            for account, what in ACCOUNTS.items()
            if (span := report.total(account))
            for found in [[one for one in report.incidents if one.cost(account)]]
        ],
        "runs": [
            {
                "job": run.job,
                "generation": run.generation,
                "start": _iso(run.start),
                "end": _iso(run.end),
                "link": link(run.job, run.start),
            }
            for run in report.runs
        ],
        "incidents": [
            {
                "job": one.job,
                "opened": _iso(one.incident.opened),
                "closed": _iso(one.incident.closed),
                "generation": one.incident.generation,
                "cause": one.incident.cause.value,
                "nodes": list(one.incident.nodes),
                "reason": one.incident.reason,
                "outcome": one.incident.outcome,
                "price": one.price.total_seconds(),
                "costs": {
                    account.value: span.total_seconds()
                    for account in ACCOUNTS
                    if (span := one.cost(account))
                },
                "stages": _view_stages(one.find_stages()),
                "link": link(one.job, one.incident.detected or one.incident.opened),
            }
            for one in report.incidents
        ],
        "causes": [
            {
                "cause": row.cause.value,
                "count": row.count,
                "price": row.price.total_seconds(),
                "median": _view_stages(row.medians),
                "link": find_page(row.incidents),
                "which": number(row.incidents),
            }
            for row in report.causes
        ],
        "nodes": [
            {
                "node": row.node,
                "count": row.count,
                "price": row.price.total_seconds(),
                "causes": [cause.value for cause in row.causes],
                "jobs": list(row.jobs),
                "recent": row.recent,
                "link": find_page(row.incidents),
                "which": number(row.incidents),
            }
            for row in report.nodes
        ],
        "waits": [
            {
                "job": row.job,
                "for": row.whom,
                "account": row.account.value,
                "seconds": row.span.total_seconds(),
                "incidents": row.count,
                "link": find_page(row.incidents) or link(row.job, report.start),
                "which": number(row.incidents, row.account),
            }
            for row in report.waits
        ],
        "checkpoints": {
            "interval": _seconds(report.checkpoints.interval),
            "cost": _seconds(report.checkpoints.cost),
            "best": _seconds(report.checkpoints.best),
        },
        "advice": [
            {
                "what": one.what,
                "reason": one.reason,
                "setting": one.setting or None,
                "saves": _seconds(one.saves),
                "account": one.account and one.account.value,
                "which": number(one.incidents, one.account),
            }
            for one in report.advice
        ],
        "missing": list(report.missing),
        "by_job": [
            {
                "job": row.job,
                "over": row.is_over,
                "wall": row.wall.total_seconds(),
                "ettr": row.ettr,
                "lost": row.lost.total_seconds(),
                "interruptions": row.interruptions,
                "link": link(row.job, report.end),
            }
            for row in report.by_job
        ],
        "trend": report.trend
        and {
            "direction": report.trend.direction,
            "sentence": describe_trend(report),
            "older": _view_period(report.trend.older),
            "newer": _view_period(report.trend.newer),
            "periods": [_view_period(one) for one in report.trend.periods],
        },
    }


def _view_stages(spans: Mapping[str, timedelta | None]) -> dict[str, float | None]:
    return {
        "detect": _seconds(spans.get("detect")),
        "decide": _seconds(spans.get("decide")),
        "repair": _seconds(spans.get("repair")),
        "relaunch": _seconds(spans.get("relaunch")),
        "regain": _seconds(spans.get("regain")),
    }


def _view_period(period: Period) -> dict[str, Any]:
    return {
        "start": _iso(period.start),
        "end": _iso(period.end),
        "interruptions": period.interruptions,
        "price": period.price.total_seconds(),
        "jobs": period.jobs.total_seconds(),
        "mtbf": _seconds(period.mtbf),
    }


def report_lines(view: Mapping[str, Any]) -> list[str]:
    """Return the lines for a `report` view."""
    span = format_seconds
    when = f"{_day(view['start'])} to {_day(view['end'])}{'' if view['over'] else ', not ended'}"
    lines = [f"{join_names(view['jobs'], 4)}: {view['summary']}", when, ""]
    width = max((len(one["what"]) for one in view["accounts"]), default=0)
    for one in view["accounts"]:
        bar = "█" * round(BAR_WIDTH * one["share"])
        lines.append(
            f"  {one['what']:<{width}}  {one['share']:>6.1%}  {span(one['seconds']):>9}  {bar}"
        )
    lines += [
        "",
        f"interruptions  {view['interruptions']}",
        f"MTBF           {span(view['mtbf'])}   time without queueing / interruptions",
        f"MTTR           {span(view['mttr'])}   from a fault to the first step after it, mean",
    ]
    if view["trend"] and view["trend"]["sentence"]:
        counts = [one["interruptions"] for one in view["trend"]["periods"]]
        each = span(_length(view["trend"]["periods"][-1]))
        lines.append(f"trend          {view['trend']['sentence']}")
        lines.append(f"               {' '.join(map(str, counts))}   interruptions in each {each}")
    if len(view["by_job"]) > 1:
        lines += _table(
            "the jobs that lost most",
            ("job", "effective", "lost", "of", "interruptions"),
            [
                (
                    one["job"],
                    "–" if one["ettr"] is None else f"{one['ettr']:.1%}",
                    span(one["lost"]),
                    span(one["wall"]),
                    str(one["interruptions"]),
                )
                for one in view["by_job"][:MAX_ROWS]
            ],
            len(view["by_job"]) - MAX_ROWS,
        )
    lines += _table(
        "what the faults cost; the times are medians",
        ("cause", "incidents", "price", *STAGES),
        [
            (
                one["cause"],
                str(one["count"]),
                span(one["price"]),
                *(span(one["median"][name]) for name in STAGES),
            )
            for one in view["causes"]
        ],
    )
    lines += _table(
        "the most expensive nodes",
        ("node", "incidents", "newer half", "price", "causes", "jobs"),
        [
            (
                one["node"],
                str(one["count"]),
                str(one["recent"]),
                span(one["price"]),
                ", ".join(one["causes"]),
                join_names(one["jobs"], 3),
            )
            for one in view["nodes"]
        ],
    )
    lines += _table(
        "who waited for whom",
        ("job", "for", "time", "incidents"),
        [
            (one["job"], one["for"], span(one["seconds"]), str(one["incidents"] or "–"))
            for one in view["waits"][:MAX_ROWS]
        ],
        len(view["waits"]) - MAX_ROWS,
    )
    if view["advice"]:
        lines += ["", "what would have helped"]
    for one in view["advice"]:
        saved = f", saves {span(one['saves'])}" if one["saves"] is not None else ""
        lines.append(f"  {one['what']}{saved}")
        lines.append(f"      {one['reason']}")
        lines += [f"      {one['setting']}"] if one["setting"] else []
    return lines


def _length(period: Mapping[str, Any]) -> float:
    start, end = (datetime.fromisoformat(period[one]) for one in ("start", "end"))
    return (end - start).total_seconds()


def _table(
    title: str, head: tuple[str, ...], rows: list[tuple[str, ...]], hidden: int = 0
) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    more = [f"  and {hidden} more: --json has them all"] if hidden > 0 else []
    return ["", title, *(f"  {line}" for line in lines), *more]


def describe_incident(entry: Mapping[str, Any]) -> str:
    """Return an incident of a view in one line."""
    where = f" on {join_names(entry['nodes'], 2)}" if entry["nodes"] else ""
    return f"{entry['cause']}{where}: {entry['reason']}"


def format_seconds(seconds: float | None) -> str:
    return "–" if seconds is None else format_span(timedelta(seconds=seconds))


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


def _day(written: str) -> str:
    return format_time(datetime.fromisoformat(written))
