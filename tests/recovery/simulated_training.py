"""A job that trains, saves and fails on simulated time, through the pure core."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import timedelta

from relaunch.job.accounts import RunFigures
from relaunch.job.apply import finish
from relaunch.job.events import (
    Event,
    FaultObserved,
    IncidentsArchived,
    Launched,
    NodesAcquired,
    ProgressSeen,
    RanksSucceeded,
    StepReached,
    Submitted,
)
from relaunch.job.report import JobRecord
from relaunch.job.state import Incident, JobState, Slot
from relaunch.job.step import step
from tests.recovery.builders import at, exited, new_job, policy, xid

RULES = policy(
    causes={"GPU_FATAL": [{"strategy": "REPLACE_NODE", "spends": False}]},
    no_progress_stop="off",
    no_progress_ask="off",
    startup_stop="off",
)
MAX_INCIDENTS = 10
"""As the workflow, which archives the others."""
STEP_S = 10.0
"""Seconds that one step takes."""


@dataclass(slots=True)
class Training:
    """Saves after each `interval` of training, which stops it for `cost`; all in seconds."""

    interval: float
    cost: float
    detect: float = 5.0
    stop: float = 15.0
    start: float = 280.0
    """Until the ranks run: among others a spare node is found."""
    load: float = 300.0
    """Until the first step."""
    now: float = 0.0
    saved: float = 0.0
    """Seconds of training in the newest checkpoint."""
    archived: list[Incident] = field(default_factory=list)
    job: JobState = field(default_factory=lambda: new_job(policy=RULES, nodes=2))

    @property
    def restart(self) -> timedelta:
        return timedelta(seconds=self.detect + self.stop + self.start + self.load)

    def take(self, seconds: float, event: Event) -> None:
        self.now = max(self.now, seconds)
        self.job, _ = step(self.job, event, at(self.now))
        if len(self.job.incidents) > MAX_INCIDENTS:
            self.archived += self.job.incidents
            self.job, _ = step(self.job, IncidentsArchived(len(self.job.incidents)), at(self.now))

    @property
    def record(self) -> JobRecord:
        still_open = (self.job.incident,) if self.job.incident is not None else ()
        return JobRecord(self.job, (*self.archived, *self.job.incidents, *still_open))

    def begin(self) -> None:
        self.take(0.0, Submitted("", "ada"))
        self._launch()

    def _launch(self) -> None:
        number = self.job.generation
        slots = tuple(Slot(f"n{number}-{place}", "10.0.0.1", 1, 1) for place in (1, 2))
        stopped = self.now + self.stop
        self.take(self.now, NodesAcquired(slots))
        self.take(stopped + self.start, Launched(number, at(stopped), at(stopped + self.start)))

    def run(self, seconds: float, *, fails: bool = True) -> None:
        """Let ranks live for a time after their first step, then fail, or end well."""
        number, first = self.job.generation, self.now + self.load
        end = first + seconds
        period = self.interval + self.cost
        count = int(seconds // period)
        checkpoint_at = first + count * period
        reached = self.saved + seconds - count * self.cost
        figures = RunFigures(
            first_step_at=at(first),
            checkpoint=int((self.saved + count * self.interval) / STEP_S),
            checkpoint_at=at(checkpoint_at) if count else None,
            checkpoints=count,
            watched=timedelta(seconds=count * period),
            saving=timedelta(seconds=count * self.cost),
        )
        due = self.job.report_at_step
        if due is not None and due * STEP_S <= reached:
            passed = min(end, first + max(0.0, due * STEP_S - self.saved))
            early = RunFigures(first_step_at=at(first))
            self.take(passed, ProgressSeen(number, due, at(passed), figures=early))
            self.take(passed, StepReached(number, due, at(passed)))
        self.take(
            end + self.detect, ProgressSeen(number, int(reached / STEP_S), at(end), figures=figures)
        )
        self.saved += count * self.interval
        if not fails:
            self.take(self.now, RanksSucceeded(number))
            self.job = finish(self.job, at(self.now))
            return
        rank = exited(3, self.job.slots[1].node, code=1, kernel=(xid(79),))
        fault = FaultObserved(number, (replace(rank, at=at(end)),), 0, at(end))
        self.take(self.now, fault)
        self._launch()


def draw_faults(count: int, wall: timedelta, restart: timedelta, seed: int) -> list[float]:
    """Return the seconds that ranks live between faults, which come at random times."""
    chance = random.Random(seed)
    drawn = [chance.expovariate(1.0) for _ in range(count)]
    whole = (wall - count * restart).total_seconds()
    return [whole * one / sum(drawn) for one in drawn]


def train(training: Training, lives: list[float]) -> JobRecord:
    training.begin()
    for seconds in lives[:-1]:
        training.run(seconds)
    training.run(lives[-1])
    training.run(STEP_S, fails=False)
    return training.record
