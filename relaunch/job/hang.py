"""Detect training that no longer advances.

A job that never reported progress is not called hung for missing progress. What the ranks do while
the step stays the same is judged by `relaunch.evidence.hung_ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from relaunch.job.copies import replace
from relaunch.spec.policy import HangLimits, Timeouts

SAFETY_FACTOR = 5
"""A step may take this many times the longest one seen.

This is nvidia-resiliency-ext's default safety factor.
"""
LEARNED_FROM = 5
"""Intervals before the learned limit is trusted.

nvidia-resiliency-ext leaves out as many warm-up iterations.
"""
KEPT_INTERVALS = 50
LEARNED_FLOOR = timedelta(minutes=15)
"""A learned limit is never shorter.

An evaluation or a checkpoint that the program does not announce takes minutes, and the times of
steps do not show how many.
"""
LATE_FACTOR, LATE_BEATS = 3, 3
"""Progress is late after this many times the longest step seen, and this many heartbeats.

Steps are seen once a heartbeat, so one that takes less seems to take as long. Nothing is decided by
this: from then on the ranks are looked at. Their looks cost less than a step in a hundred.
"""
DEFAULT_LIMITS = HangLimits()
DEFAULT_EXIT_BARRIER = Timeouts().exit_barrier


@dataclass(frozen=True, slots=True)
class Counter:
    """The step counter of one rank in one generation.

    It may start again while the rank lives, as a progress bar does in each epoch.
    """

    step: int
    base: int = 0
    """What to add since it last started again, so that this was an advance by one step."""

    @property
    def position(self) -> int:
        """How far the rank has come; it never decreases."""
        return self.base + self.step


def update_counter(counter: Counter | None, step: int) -> Counter:
    """Return the counter of a rank that now reports this step."""
    if counter is None:
        return Counter(step)
    if step >= counter.step:
        return replace(counter, step=step)
    return Counter(step, counter.position + 1 - step)


def has_restarted(counter: Counter | None, step: int) -> bool:
    """Return whether a counter has started again, as a progress bar does in each epoch.

    A program that returns to its checkpoint counts back as well, but to a step that is seldom below
    half of what it had reached, and it passes that step later.
    """
    return counter is not None and 2 * step < counter.step


@dataclass(frozen=True, slots=True)
class Pace:
    """How one generation advances, by the watcher's clock.

    It is stored in the heartbeat details, so that a new watcher need not learn it again.
    """

    started_at: datetime
    expected: bool
    """Whether this job has reported progress, in this generation or an earlier one."""
    step: int | None = None
    """The step that all reporting ranks have reached, by their present counters."""
    highest: int | None = None
    """The highest of these steps: counters may start again."""
    position: int | None = None
    """How far all reporting ranks have come. Only this says whether training advances."""
    advanced_at: datetime | None = None
    intervals: tuple[float, ...] = ()
    """Seconds between advances, the newest last."""
    steps: tuple[int, ...] = ()
    """By how many steps training advanced in each interval: one report may cover many steps."""
    doing: str | None = None
    """What a rank reports to be doing other than stepping: checkpoint, evaluation."""
    restarts: bool = False
    """Whether a rank's counter has started again (`has_restarted`)."""


def advance(
    pace: Pace, step: int, at: datetime, doing: str | None = None, position: int | None = None
) -> Pace:
    """Return the pace with what all reporting ranks have reached.

    Args:
        pace: The pace so far.
        step: The lowest step of the ranks, by their present counters.
        at: When the last of them reached it.
        doing: What a rank reports to be doing other than stepping.
        position: The lowest `Counter.position` of the ranks; None: no counter started again.
    """
    position = step if position is None else position
    if pace.position is not None and position <= pace.position:
        return replace(pace, doing=doing)
    intervals, steps = pace.intervals, pace.steps
    if pace.position is not None and pace.advanced_at is not None:
        intervals = (*intervals, max(0.0, (at - pace.advanced_at).total_seconds()))[
            -KEPT_INTERVALS:
        ]
        steps = (*steps, position - pace.position)[-KEPT_INTERVALS:]
    return replace(
        pace,
        step=step,
        highest=step if pace.highest is None else max(step, pace.highest),
        position=position,
        advanced_at=at,
        intervals=intervals,
        steps=steps,
        expected=True,
        doing=doing,
    )


def rate(pace: Pace, advances: int = 10) -> float | None:
    """Return the steps per second over the newest advances; None: not known yet."""
    seconds = sum(pace.intervals[-advances:])
    return sum(pace.steps[-advances:]) / seconds if seconds > 0 else None


def limit(pace: Pace, limits: HangLimits) -> timedelta | None:
    """Return how long the step may now stay the same; None: no limit."""
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


def is_late(pace: Pace, limits: HangLimits, heartbeat: timedelta, now: datetime) -> bool:
    """Return whether the step has stayed the same for so long that the ranks are worth a look.

    Where a rank says that it saves or evaluates, only its limit makes it late. Where the time of a
    step is not known yet, half of the limit does.
    """
    allowed = limit(pace, limits)
    if allowed is None:
        return False
    if pace.doing is None and not pace.intervals:
        allowed /= 2
    elif pace.doing is None:
        longest = timedelta(seconds=max(pace.intervals))
        allowed = min(allowed, max(LATE_BEATS * heartbeat, LATE_FACTOR * longest))
    return now - (pace.advanced_at or pace.started_at) > allowed


@dataclass(frozen=True, slots=True)
class Overdue:
    """The step has stayed the same for longer than it may."""

    reason: str
    is_stated: bool
    """Whether a person chose the limit, so that it counts without a proof that no rank works."""
    past: timedelta
    """How long ago the limit passed."""


def find_overdue(pace: Pace, limits: HangLimits, now: datetime) -> Overdue | None:
    """Return why and since when the step should have changed, or None."""
    allowed = limit(pace, limits)
    waited = now - (pace.advanced_at or pace.started_at)
    if allowed is None or waited <= allowed:
        return None
    reason = f"{describe_standstill(pace, now)}, allowed are {allowed.total_seconds():.0f} s"
    return Overdue(reason, _is_stated(pace, limits), waited - allowed)


def find_late_exit(
    finished: timedelta | None, pace: Pace, barrier: timedelta, now: datetime
) -> Overdue | None:
    """Return why ranks are late at the exit barrier, or None.

    Once one rank has finished, the others must finish or advance within `timeouts.exit_barrier`.

    Args:
        finished: How long ago the first rank finished; None: none has.
        pace: How training advances.
        barrier: `timeouts.exit_barrier`.
        now: The watcher's time.
    """
    if finished is None or finished <= barrier:
        return None
    if pace.advanced_at is not None and now - pace.advanced_at <= barrier:
        return None
    past = finished - barrier
    if pace.advanced_at is not None:
        past = min(past, now - pace.advanced_at - barrier)
    reason = (
        f"a rank finished {barrier.total_seconds():g} s ago and others neither finish nor advance"
    )
    return Overdue(reason, barrier != DEFAULT_EXIT_BARRIER, past)


def describe_standstill(pace: Pace, now: datetime) -> str:
    """Return a clause about how long the step has stayed the same."""
    where = "no step was reported" if pace.step is None else f"step {pace.step} has not changed"
    return f"{where} for {(now - (pace.advanced_at or pace.started_at)).total_seconds():.0f} s"


def _is_stated(pace: Pace, limits: HangLimits) -> bool:
    """Return whether a person chose the limit that applies now."""
    if pace.doing == "checkpoint":
        return limits.checkpoint != DEFAULT_LIMITS.checkpoint
    if pace.doing == "evaluation":
        return limits.evaluation != DEFAULT_LIMITS.evaluation
    is_early = limits.after == "learned" and len(pace.intervals) < LEARNED_FROM
    if pace.step is None or is_early:
        return limits.first_step != DEFAULT_LIMITS.first_step
    return limits.after != "learned"
