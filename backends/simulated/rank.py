"""One simulated rank: how far it has come and what it has printed, as functions of the time. Decides nothing."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from backends.simulated.script import Prints, Progress


@dataclass(slots=True)
class Rank:
    rank: int
    local: int
    pid: int
    started: float
    ended: float | None = None
    progress: Progress | None = None
    prints: tuple[Prints, ...] = ()
    lingers: float = 0.0

    def elapsed(self, now: float) -> float:
        return (now if self.ended is None else self.ended) - self.started

    def step(self, now: float) -> tuple[int, float] | None:
        """Return the step and for how long it has been that; None: nothing reported yet."""
        if self.progress is None:
            return None
        elapsed = self.elapsed(now)
        steps = self.progress.steps
        found = bisect.bisect_right(steps, elapsed, key=lambda entry: entry[0])
        if found == 0:
            return None
        at, step = steps[found - 1]
        if found == len(steps) and self.progress.rate > 0:
            more = math.floor((elapsed - at) * self.progress.rate + 1e-9)
            at, step = at + more / self.progress.rate, step + more
        return step, max(0.0, now - self.started - at)

    def next_step(self, now: float) -> float:
        """Return when the step changes next, infinity for never."""
        if self.progress is None or self.ended is not None or self.progress.unreadable is not None:
            return math.inf
        elapsed = self.elapsed(now)
        steps = self.progress.steps
        found = bisect.bisect_right(steps, elapsed, key=lambda entry: entry[0])
        if found < len(steps):
            return self.started + steps[found][0]
        return now + 1 / self.progress.rate if self.progress.rate > 0 else math.inf

    def log(self, now: float) -> bytes:
        elapsed = self.elapsed(now)
        return b"".join(printed.text.encode() for printed in self.prints if printed.after <= elapsed)
