"""Whether training stands still. Not reported is unknown: what never reported progress is never called hung for that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from relaunch.spec.policy import HangLimits

SAFETY_FACTOR = 5
"""A step may take this many times the longest one seen (nvidia-resiliency-ext's default safety factor)."""
LEARNED_FROM = 5
"""Intervals before the learned limit is trusted (nvidia-resiliency-ext leaves out as many warm-up iterations)."""
KEPT_INTERVALS = 50
LEARNED_FLOOR = timedelta(minutes=15)
"""A learned limit is never shorter: an evaluation or a checkpoint that the program does not announce takes minutes,
and steps say nothing about how long."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How one generation advances, by the watcher's clock. It rides in heartbeat details, so a new watcher need not learn anew."""

    started_at: datetime
    expected: bool
    """Progress was reported by this job before, or now."""
    step: int | None = None
    advanced_at: datetime | None = None
    intervals: tuple[float, ...] = ()
    """Seconds between advances, the newest last."""
    steps: tuple[int, ...] = ()
    """By how many steps each of them advanced: a watcher sees one report for many steps."""
    doing: str | None = None
    """What a rank says it is busy with beside stepping: checkpoint, evaluation."""


def advance(pace: Pace, step: int, at: datetime, doing: str | None = None) -> Pace:
    """Take in the step that all reporting ranks have reached."""
    if pace.step is not None and step <= pace.step:
        return replace(pace, doing=doing)
    intervals, steps = pace.intervals, pace.steps
    if pace.step is not None and pace.advanced_at is not None:
        intervals = (*intervals, max(0.0, (at - pace.advanced_at).total_seconds()))[-KEPT_INTERVALS:]
        steps = (*steps, step - pace.step)[-KEPT_INTERVALS:]
    return replace(pace, step=step, advanced_at=at, intervals=intervals, steps=steps, expected=True, doing=doing)


def rate(pace: Pace, advances: int = 10) -> float | None:
    """Steps a second over the newest advances; None: not known yet."""
    seconds = sum(pace.intervals[-advances:])
    return sum(pace.steps[-advances:]) / seconds if seconds > 0 else None


def limit(pace: Pace, limits: HangLimits) -> timedelta | None:
    """How long the step may stay flat now; None: no limit."""
    if limits.after == "off" or not pace.expected:
        return None
    if pace.doing == "checkpoint":
        return limits.checkpoint
    if pace.doing == "evaluation":
        return limits.evaluation
    if pace.step is None:
        return limits.first_step
    if limits.after == "learned":
        if len(pace.intervals) < LEARNED_FROM:
            return limits.first_step
        return max(LEARNED_FLOOR, SAFETY_FACTOR * timedelta(seconds=max(pace.intervals)))
    return limits.after


def hung(pace: Pace, limits: HangLimits, now: datetime) -> str | None:
    """Return why training counts as hung, or None."""
    allowed = limit(pace, limits)
    since = pace.advanced_at or pace.started_at
    if allowed is None or now - since <= allowed:
        return None
    where = "no step was reported" if pace.step is None else f"step {pace.step} has not changed"
    return f"{where} for {(now - since).total_seconds():.0f} s, allowed are {allowed.total_seconds():.0f} s"
