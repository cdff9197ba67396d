"""Tell whether faults of jobs become more frequent.

Pure. Faults are compared per time of jobs: twice as many jobs have twice as many faults, and no
node is worse for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Literal

NONE = timedelta(0)
UNITS = tuple(
    timedelta(minutes=minutes)
    for minutes in (1, 5, 15, 60, 4 * 60, 24 * 60, 7 * 24 * 60, 30 * 24 * 60)
)
"""Lengths of periods. The shortest one is taken of which `MAX_PERIODS` are enough."""
MAX_PERIODS = 14
MAX_CHANCE = 0.05
"""A difference that is likelier than this where nothing has changed is no change."""


@dataclass(frozen=True, slots=True)
class JobFault:
    at: datetime
    interruptions: int
    price: timedelta


@dataclass(frozen=True, slots=True)
class Period:
    start: datetime
    end: datetime
    interruptions: int
    price: timedelta
    jobs: timedelta
    """Time of all jobs within it."""

    @property
    def mtbf(self) -> timedelta | None:
        return self.jobs / self.interruptions if self.interruptions else None


@dataclass(frozen=True, slots=True)
class Trend:
    periods: tuple[Period, ...]
    """Of one length, oldest first; the first one may be shorter."""
    older: Period
    newer: Period
    """The two halves of the time of all jobs."""
    direction: Literal["worse", "better", "unchanged"]


def find_trend(
    spans: Sequence[tuple[datetime, datetime]], faults: Sequence[JobFault]
) -> Trend | None:
    """Return how faults are spread over the time of jobs; None: no time has passed.

    Args:
        spans: From when to when each job is reported on.
        faults: Theirs, in any order.
    """
    spans = [(start, end) for start, end in spans if end > start]
    if not spans:
        return None
    start, end = min(one for one, _ in spans), max(one for _, one in spans)
    unit = next((one for one in UNITS if one * MAX_PERIODS >= end - start), (end - start) / 12)
    edges = [end]
    while edges[0] > start:
        edges.insert(0, max(start, edges[0] - unit))
    middle = _find_middle(spans)
    older = _measure(start, middle, spans, faults, is_first=True)
    newer = _measure(middle, end, spans, faults)
    return Trend(
        tuple(
            _measure(one, other, spans, faults, is_first=one == start)
            for one, other in pairwise(edges)
        ),
        older,
        newer,
        _compare(older, newer),
    )


def _find_middle(spans: Sequence[tuple[datetime, datetime]]) -> datetime:
    """Return until when half of the time of all jobs has passed."""
    half = sum((end - start for start, end in spans), NONE) / 2
    changes = iter(sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]))
    at, change = next(changes)
    passed, running, before = NONE, 0, at
    while not running or passed + running * (at - before) < half:
        passed, running, before = passed + running * (at - before), running + change, at
        at, change = next(changes)
    return before + (half - passed) / running


def _measure(
    start: datetime,
    end: datetime,
    spans: Iterable[tuple[datetime, datetime]],
    faults: Iterable[JobFault],
    *,
    is_first: bool = False,
) -> Period:
    inside = [one for one in faults if (is_first or start < one.at) and one.at <= end]
    jobs = (max(NONE, min(end, last) - max(start, first)) for first, last in spans)
    return Period(
        start,
        end,
        sum(one.interruptions for one in inside),
        sum((one.price for one in inside), NONE),
        sum(jobs, NONE),
    )


def _compare(older: Period, newer: Period) -> Literal["worse", "better", "unchanged"]:
    """Both halves have the same time of jobs, so that a fault falls into each as likely."""
    few, many = sorted((older.interruptions, newer.interruptions))
    if estimate_chance(few, many) > MAX_CHANCE:
        return "unchanged"
    return "worse" if newer.interruptions == many else "better"


def estimate_chance(few: int, many: int) -> float:
    """Return how likely two counts differ by as much, in either direction, where nothing has
    changed: the two-sided binomial test."""
    total = few + many
    if not total or few == many:
        return 1.0
    logs = (
        math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
        for count in range(few + 1)
    )
    return min(1.0, 2 * sum(math.exp(one - total * math.log(2)) for one in logs))
