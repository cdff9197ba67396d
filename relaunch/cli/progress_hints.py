"""Explains why no step of a job is known, and what to write into the job file to change that."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from relaunch.fields import duration

if TYPE_CHECKING:
    from relaunch.spec.job import ProgressSpec

NO_MATCH_AFTER = timedelta(minutes=3)
"""How long after the launch it is no news that no step is known: programs print much before it."""
MAX_SHOWN = 120
"""Most characters shown of a line."""


def explain_missing_progress(
    spec: ProgressSpec, missing: Mapping[str, Any], waited: timedelta
) -> str | None:
    """Return a sentence, or None if it is too early for one.

    Args:
        spec: How the job file says that the step is found.
        missing: The fields of a `MissingProgress`, as the watch reports them.
        waited: The time since the launch.
    """
    try:
        where = f"rank {missing['rank']:d} on {missing['node']}"
        unreadable, lines = str(missing["unreadable"]), [str(line) for line in missing["lines"]]
    except (KeyError, TypeError, ValueError):
        return None  # from an older or newer worker
    if unreadable:
        return f"{where}: {unreadable}"
    if waited < NO_MATCH_AFTER:
        return None
    since = duration(timedelta(minutes=waited // timedelta(minutes=1)))
    if not lines:
        return (
            f"no rank has printed a line in {since}. A bar drawn by Rich prints nothing into a"
            " file: use one of tqdm, or relaunch.callbacks"
        )
    return f"{_describe_pattern(spec, since)}; {where} printed last: {lines[-1][:MAX_SHOWN]!r}" + (
        _propose(lines)
    )


def _describe_pattern(spec: ProgressSpec, since: str) -> str:
    if spec.pattern is None:
        return "the job file has no `progress`"
    name = "log_pattern" if spec.preset is None else f"progress: {spec.preset}"
    return f"no line has matched `{name}` in {since}"


def _propose(lines: list[str]) -> str:
    from relaunch.spec.progress import propose_progress

    proposal = propose_progress(lines)
    if proposal is not None:
        return f". With `progress: {proposal}` in the job file the step would be found"
    return (
        ". A log_pattern or relaunch.callbacks can report the step; a bar drawn by Rich prints"
        " nothing into a file"
    )
