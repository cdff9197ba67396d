"""Prints jobs, a job and its history for people, and shapes the same for scripts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from relaunch.cli import job_views
from relaunch.cli.terminal import make_console, print_columns
from relaunch.config import ConfigError
from relaunch.text import printable

if TYPE_CHECKING:
    from relaunch.cli.jobs import JobSnapshot, JobSummary

TITLES = ("JOB", "PHASE", "GENERATION", "SUBMITTED", "ENDED")


def row(item: JobSummary) -> dict[str, Any]:
    return {
        "name": item.name,
        "phase": item.phase,
        "generation": item.generation,
        "submitted": item.submitted.isoformat(),
        "ended": item.ended.isoformat() if item.ended else None,
    }


def print_jobs(rows: Sequence[JobSummary], now: datetime) -> None:
    lines = [
        (
            printable(item.name),
            printable(item.phase),
            "" if item.generation is None else str(item.generation),
            f"{job_views.age(now - item.submitted)} ago",
            f"{job_views.age(now - item.ended)} ago" if item.ended else "",
        )
        for item in rows
    ]
    if not lines:
        print("no jobs")
        return
    if not sys.stdout.isatty():
        print_columns(TITLES, lines)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in TITLES:
        table.add_column(
            title,
            no_wrap=title in ("JOB", "PHASE"),
            justify="right" if title == "GENERATION" else "left",
        )
    for line in lines:
        table.add_row(*line)
    make_console().print(table)


def show_view(now: JobSnapshot, at: datetime) -> dict[str, Any]:
    """Return what `show --json` prints.

    If no worker answers, it has the values in the job's memo, and None or nothing for the others.
    """
    if now.state is not None:
        view = {**job_views.show(now.state, now.watch, at), "source": now.source}
        return {**view, **_describe_forced_end(now)}
    if "phase" not in now.memo:
        raise ConfigError(
            f"job {now.name} is {now.status}, has recorded no state, and no worker answers for "
            "it: start one (`relaunch up` or `relaunch-worker`), then repeat the command"
        )
    nothing = dict.fromkeys(
        (
            "progress",
            "incidents",
            "ranks",
            "generation",
            "incident",
            "ended",
            "exit_code",
            "submitted",
        )
    )
    return {
        "name": now.name,
        "phase": now.phase,
        **nothing,
        "nodes": [],
        "budgets": {},
        "reason": now.memo.get("reason"),
        "next": {"what": now.memo.get("next"), "at": None},
        "lost": [],
        "stalled": [],
        "avoided": [],
        "notices": [],
        "source": now.source,
        **_describe_forced_end(now),
    }


def _describe_forced_end(now: JobSnapshot) -> dict[str, Any]:
    """Return what `show` says of a job whose workflow was ended from outside. Its last state still
    says that it runs."""
    if now.status not in ("TERMINATED", "TIMED_OUT"):
        return {}
    ended = now.status.lower().replace("_", " ")
    reason = (
        f"its workflow {'was' if ended == 'terminated' else 'has'} {ended} in phase "
        f"{now.recorded_phase}; "
        "the fleet stops its ranks within a minute or two and takes the nodes back"
    )
    what = "nothing: `relaunch retry` or `relaunch submit` starts it again"
    return {"phase": now.status, "reason": reason, "next": {"what": what, "at": None}}


def print_show(view: Mapping[str, Any], now: JobSnapshot) -> None:
    if now.state is None:
        print(
            f"job         {view['name']}\nphase       {view['phase']}: {view['reason']}\nnext     "
            f"   {view['next']['what']}"
        )
        print(f"\n{now.silence}")
        return
    print("\n".join(job_views.show_lines(view, datetime.now(UTC))))
    if now.source == "result":
        ended = job_views.moment_text(view["ended"], datetime.now(UTC))
        print(f"\nended {ended} with exit code {view['exit_code']}")


def print_history(
    job: str, entries: Sequence[Mapping[str, Any]], checkpoint: Mapping[str, Any] | None = None
) -> None:
    if not entries:
        print(f"job {job} has had no incident")
    now = datetime.now(UTC)
    print("\n\n".join("\n".join(job_views.history_lines(entry, now)) for entry in entries))
    lines = [f"checkpoint  {line}" for line in job_views.checkpoint_lines(checkpoint)]
    if lines:
        print("\n".join(["", *lines]))
