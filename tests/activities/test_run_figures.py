"""What a watch learns about the course of a generation, for the ledger."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.activities.run_figures import RunRecorder
from relaunch.job.accounts import RunFigures
from relaunch.job.events import ProgressSeen
from relaunch.job.hang import Pace, advance
from tests.activities.harness import stand
from tests.fakes.nodes import Exit, Progress, Script
from tests.recovery.builders import T0, at

START = Pace(T0, expected=True)


def seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


class Watch:
    """A recorder that is given one report after the other."""

    def __init__(self, before: RunFigures | None = None, beat_at: datetime | None = None) -> None:
        self.recorder = RunRecorder(before, beat_at, T0, T0)
        self.pace = START

    def report(self, when: float, step: int, phase: str | None = None) -> None:
        earlier = self.pace
        self.pace = advance(earlier, step, at(when), phase)
        self.recorder.note_pace(earlier, self.pace, at(when))

    @property
    def figures(self) -> RunFigures:
        return self.recorder.figures


def test_the_first_step_and_the_longest_are_kept() -> None:
    watch = Watch()
    for when, step in ((30, 5), (40, 6), (65, 7), (75, 8)):
        watch.report(when, step)
    assert watch.figures.first_step_at == at(30)
    assert seconds(watch.figures.longest_step) == 25


def test_saving_is_timed_and_is_no_long_step() -> None:
    watch = Watch()
    watch.report(10, 1)
    watch.report(20, 2, "checkpoint")
    watch.report(30, 2, "checkpoint")
    watch.report(45, 3)
    watch.report(55, 4)
    assert seconds(watch.figures.saving) == 25
    assert seconds(watch.figures.longest_step) == 10


def test_each_finished_checkpoint_counts_once() -> None:
    watch = Watch()
    watch.report(10, 1)
    for when, saved in ((20, None), (70, 5), (80, 5), (130, 10)):
        watch.recorder.note_checkpoint(saved, None, at(when))
    assert watch.figures.checkpoint == 10 and watch.figures.checkpoint_at == at(130)
    assert watch.figures.checkpoints == 2 and seconds(watch.figures.watched) == 120


def test_a_checkpoint_from_before_the_watch_has_no_time() -> None:
    watch = Watch()
    watch.recorder.note_checkpoint(5, 5, at(1))
    assert watch.figures == RunFigures(checkpoint=5)


def test_a_later_attempt_knows_how_long_no_watch_ran() -> None:
    before = RunFigures(first_step_at=at(-500), away=timedelta(seconds=40))
    assert seconds(Watch(before, at(-90)).figures.away) == 130
    assert Watch(before, at(-5)).figures == before


async def test_a_watch_reports_its_figures_with_the_fault() -> None:
    saves = Progress(rank=0, steps=((0.0, 100),), checkpoints=((0.0, 80), (0.3, 100)))
    fleet = stand(Script((saves, Exit(rank=3, exit_code=1, after=0.6))))
    await fleet.launch()
    seen = (await fleet.watch(None)).events[0]
    assert isinstance(seen, ProgressSeen) and seen.figures is not None
    assert seen.figures.checkpoint == 100 and seen.figures.checkpoints == 1
    assert seen.figures.first_step_at is not None
    assert seen.figures.checkpoint_at is not None
    other = stand(Script((saves, Exit(rank=3, exit_code=1, after=0.6))))
    await other.launch()
    seen = (await other.watch(None, judges=False)).events[0]
    assert isinstance(seen, ProgressSeen) and seen.figures is None


def test_figures_of_the_wrong_order_change_nothing() -> None:
    watch = Watch()
    watch.recorder.note_checkpoint(10, None, at(20))
    known = watch.figures
    watch.recorder.note_checkpoint(5, None, at(30))
    watch.recorder.note_checkpoint(None, None, at(30))
    assert watch.figures == replace(known)


def looked(
    recorder: RunRecorder, when: float, saved: int | None, age: float, reported: bool = False
) -> None:
    recorder.note_seen_checkpoint(saved, timedelta(seconds=age), at(when), is_reported=reported)


def test_a_checkpoint_in_the_folder_has_the_time_of_its_change() -> None:
    recorder = RunRecorder(None, None, T0, T0)
    looked(recorder, 0, 10, 3000)
    assert (recorder.figures.checkpoint, recorder.figures.checkpoint_at) == (10, None), "older"
    looked(recorder, 15, 10, 3015)
    looked(recorder, 30, 20, 4)
    assert (recorder.figures.checkpoint, recorder.figures.checkpoint_at) == (20, at(26))
    # It was not there at the look before, whatever the clock of a file server says.
    looked(recorder, 45, 30, 900)
    assert (recorder.figures.checkpoint_at, recorder.figures.checkpoints) == (at(10), 2)
    assert recorder.seen == 30


def test_the_first_one_of_a_folder_counts() -> None:
    recorder = RunRecorder(None, None, T0, T0)
    looked(recorder, 0, None, 0)
    looked(recorder, 15, 10, 5)
    assert (recorder.figures.checkpoint, recorder.figures.checkpoint_at) == (10, at(10))


def test_what_ranks_report_counts_instead() -> None:
    recorder = RunRecorder(None, None, T0, T0)
    looked(recorder, 0, None, 0)
    looked(recorder, 15, 10, 5, reported=True)
    assert recorder.figures.checkpoint is None


def test_one_saved_between_two_attempts_of_a_watch_counts() -> None:
    recorder = RunRecorder(RunFigures(checkpoint=10), T0, T0, T0)
    looked(recorder, 15, 20, 5)
    assert (recorder.figures.checkpoint, recorder.figures.checkpoint_at) == (20, at(10))


def test_a_later_watch_knows_when_the_newest_was_finished() -> None:
    recorder = RunRecorder(None, None, at(100), T0)
    looked(recorder, 100, 30, 8)
    assert (recorder.figures.checkpoint_at, recorder.figures.checkpoints) == (at(92), 0)
