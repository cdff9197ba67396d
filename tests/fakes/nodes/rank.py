"""One simulated rank: how far it has come and what it has printed, as functions of the time.

Decides nothing.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from tests.fakes.nodes.script import Prints, Progress


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
    read_at: float | None = None
    """When a watch first read its steps: the times of its script begin then."""
    told: int = 0
    """How many of the steps listed in its script were read, where each is to be read."""
    late: float = 0.0
    """By how many seconds its steps are later than in its script, because they were read late."""

    def begin(self, now: float) -> float:
        """Return the time from which its script counts: `now` while no watch has read it."""
        return now if self.read_at is None else self.read_at

    def elapsed(self, now: float) -> float:
        """Return the seconds of its script that are over."""
        if self.read_at is None:
            return 0.0
        return max(0.0, (now if self.ended is None else self.ended) - self.read_at)

    def step(self, now: float) -> tuple[int, float] | None:
        """Return the step and for how long it has been that; None: nothing reported yet."""
        if self.progress is None:
            return None
        elapsed, steps = self.elapsed(now) - self.late, self.progress.steps
        if self.progress.each_read and self.told < len(steps):
            skipped = elapsed - steps[self.told][0]
            if skipped >= 0:
                self.told += 1
                if self.told < len(steps) and elapsed >= steps[self.told][0]:
                    self.late, elapsed = self.late + skipped, elapsed - skipped
        found = bisect.bisect_right(steps, elapsed, key=lambda entry: entry[0])
        if found == 0:
            return None
        at, step = steps[found - 1]
        if found == len(steps) and self.progress.rate > 0:
            more = math.floor((elapsed - at) * self.progress.rate + 1e-9)
            at, step = at + more / self.progress.rate, step + more
        return step, max(0.0, now - self.begin(now) - self.late - at)

    def checkpoint(self, now: float) -> int | None:
        """Return the step of the newest finished one; None: it never said."""
        finished = [
            step
            for at, step in (self.progress.checkpoints if self.progress else ())
            if at <= self.elapsed(now)
        ]
        return finished[-1] if finished else None

    def next_news(self, now: float) -> float:
        """Return when the step or the checkpoint changes next, infinity for never."""
        if self.progress is None or self.ended is not None or self.progress.unreadable is not None:
            return math.inf
        elapsed = self.elapsed(now)
        saved = next(
            (self.begin(now) + at for at, _ in self.progress.checkpoints if at > elapsed),
            math.inf,
        )
        return min(saved, self._next_step(self.progress, elapsed, now))

    def _next_step(self, progress: Progress, elapsed: float, now: float) -> float:
        steps = progress.steps
        found = bisect.bisect_right(steps, elapsed - self.late, key=lambda entry: entry[0])
        if found < len(steps):
            return self.begin(now) + self.late + steps[found][0]
        return now + 1 / progress.rate if progress.rate > 0 else math.inf

    def log(self, now: float) -> bytes:
        elapsed = self.elapsed(now)
        return b"".join(
            printed.text.encode() for printed in self.prints if printed.after <= elapsed
        )
