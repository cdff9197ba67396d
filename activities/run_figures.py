"""Learns what a watch can say about the course of a generation beside its step, for the ledger."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.job.accounts import RunFigures
from relaunch.job.hang import Pace

MIN_AWAY = timedelta(seconds=30)
"""A shorter time between two attempts of a watch is a hand-over, or a worker that starts again."""
SETTLED = timedelta(seconds=20)
"""How long a node waits for a change until it calls a checkpoint of no known kind complete."""
SAVING = "checkpoint"
"""The phase that a rank reports while it saves one."""


class RunRecorder:
    """Follows one watch over all its attempts."""

    def __init__(
        self,
        before: RunFigures | None,
        last_beat_at: datetime | None,
        now: datetime,
        launched_at: datetime,
    ) -> None:
        self.figures = before or RunFigures()
        if last_beat_at is not None and now - last_beat_at >= MIN_AWAY:
            self.figures = replace(self.figures, away=self.figures.away + (now - last_beat_at))
        self._saving_since: datetime | None = None
        self._launched_at = launched_at
        self._looked_at: datetime | None = None
        self.seen: int | None = None
        """The step of the newest checkpoint in the folder that the job names."""

    def note_pace(self, earlier: Pace, pace: Pace, now: datetime) -> None:
        """Record an advance, and for how long ranks have been saving."""
        if self._saving_since is not None:
            saving = self.figures.saving + (now - self._saving_since)
            self.figures = replace(self.figures, saving=saving)
        self._saving_since = now if pace.doing == SAVING else None
        if pace.position is None or pace.position == earlier.position:
            return
        first = self.figures.first_step_at or pace.advanced_at
        longest = self.figures.longest_step
        if earlier.position is not None and earlier.doing is None and pace.intervals:
            took = timedelta(seconds=pace.intervals[-1])
            longest = took if longest is None else max(longest, took)
        self.figures = replace(self.figures, first_step_at=first, longest_step=longest)

    def note_seen_checkpoint(
        self, saved: int | None, age: timedelta, now: datetime, *, is_reported: bool
    ) -> None:
        """Record what a look at the folder of checkpoints found.

        Args:
            saved: The step of the newest complete one; None: there is none.
            age: How long ago it was changed, by the clocks of its node and file system.
            now: The time of the look.
            is_reported: Whether ranks report theirs: these count then.
        """
        before, self._looked_at, self.seen = self._looked_at, now, saved
        if is_reported or saved is None:
            return
        if before is None and self.figures.checkpoint is None:
            # It is older than this watch. The one before may have counted it, or not seen it yet.
            is_of_generation = age < now - self._launched_at
            at = now - age if is_of_generation else None
            self.figures = replace(self.figures, checkpoint=saved, checkpoint_at=at)
            return
        # It was not there, or not complete, at the look before, whatever those clocks say.
        longest = SETTLED + (now - before if before is not None else timedelta(0))
        self.note_checkpoint(saved, None, now - min(age, longest))

    def note_checkpoint(self, saved: int | None, baseline: int | None, now: datetime) -> None:
        """Record the newest finished checkpoint.

        Args:
            saved: Its step; None: there is none yet.
            baseline: The step of the newest that is older than this watch.
            now: The watcher's time.
        """
        known = self.figures.checkpoint
        if saved is None or (known is not None and saved <= known):
            return
        self.figures = replace(self.figures, checkpoint=saved)
        if baseline is not None and saved <= baseline:
            return
        first = self.figures.first_step_at
        self.figures = replace(
            self.figures,
            checkpoint_at=now,
            checkpoints=self.figures.checkpoints + 1,
            watched=max(timedelta(0), now - first) if first is not None else timedelta(0),
        )
