"""Whether training stands still."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from relaunch.job.hang import (
    Counter,
    Pace,
    advance,
    find_late_exit,
    find_overdue,
    has_restarted,
    is_late,
    limit,
    rate,
    update_counter,
)
from relaunch.spec.policy import HangLimits
from tests.recovery.builders import T0, at
from tests.recovery.generated import searched

LEARNED = HangLimits()
FIXED = HangLimits(after=timedelta(seconds=30))


def stepping(steps: int, seconds: float, by: int = 1) -> Pace:
    pace = Pace(started_at=T0, expected=True)
    for index in range(steps + 1):
        pace = advance(pace, index * by, at(index * seconds))
    return pace


def hung(pace: Pace, limits: HangLimits, now: datetime) -> str | None:
    """Return why the step has stayed the same for longer than it may, or None."""
    overdue = find_overdue(pace, limits, now)
    return None if overdue is None else overdue.reason


def test_what_never_reported_is_never_called_hung() -> None:
    assert hung(Pace(T0, expected=False), FIXED, at(10**9)) is None


def test_a_job_that_reported_before_has_until_first_step(snapshot: SnapshotAssertion) -> None:
    pace = Pace(T0, expected=True)
    assert hung(pace, LEARNED, at(30 * 60)) is None
    assert hung(pace, LEARNED, at(30 * 60 + 1)) == snapshot


def test_a_flat_step_is_a_hang_after_the_limit(snapshot: SnapshotAssertion) -> None:
    pace = stepping(3, 1.0)
    assert hung(pace, FIXED, at(33)) is None
    assert hung(pace, FIXED, at(34)) == snapshot


def test_the_learned_limit_is_5_longest_intervals_or_15_minutes() -> None:
    assert timedelta(minutes=15) == limit(stepping(10, 1.0), LEARNED)
    assert timedelta(seconds=1500) == limit(stepping(10, 300.0), LEARNED)


def test_an_unannounced_evaluation_of_two_minutes_is_no_hang(snapshot: SnapshotAssertion) -> None:
    pace = stepping(100, 1.0)
    assert hung(pace, LEARNED, at(100 + 120)) is None
    assert hung(pace, LEARNED, at(100 + 15 * 60)) is None
    assert hung(pace, LEARNED, at(100 + 15 * 60 + 1)) == snapshot


def test_nothing_is_learned_from_the_first_few_steps() -> None:
    assert LEARNED.first_step == limit(stepping(4, 1.0), LEARNED)


@pytest.mark.parametrize(
    ("doing", "allowed"),
    [("checkpoint", timedelta(minutes=20)), ("evaluation", timedelta(minutes=60))],
)
def test_a_rank_that_says_it_is_busy_has_longer(doing: str, allowed: timedelta) -> None:
    assert allowed == limit(advance(stepping(10, 1.0), 11, at(11), doing), LEARNED)


def test_off_is_off() -> None:
    assert hung(stepping(3, 1.0), HangLimits(after="off"), at(10**9)) is None


def test_a_step_that_goes_back_is_no_advance() -> None:
    pace = stepping(3, 1.0)
    assert pace.advanced_at == advance(pace, 1, at(100)).advanced_at


def test_the_rate_counts_steps_not_reports() -> None:
    assert rate(stepping(10, 2.0, by=10)) == 5.0
    assert rate(Pace(T0, expected=True)) is None


def count(steps: Iterable[int]) -> Counter:
    counter: Counter | None = None
    for step in steps:
        counter = update_counter(counter, step)
    assert counter is not None
    return counter


def test_a_counter_that_starts_again_goes_on() -> None:
    assert count([7]).position == 7
    positions = [count([0, 98, 99, 0, 1, 99, 0][:end]).position for end in range(1, 8)]
    assert positions == [0, 98, 99, 100, 101, 199, 200]
    assert count([98, 98]).position == 98, "the same step is no advance"


@searched(400)
@given(st.lists(st.integers(0, 50), min_size=1))
def test_a_position_grows_if_and_only_if_a_report_changes(steps: list[int]) -> None:
    positions = [count(steps[: end + 1]).position for end in range(len(steps))]
    for before, after in itertools.pairwise(range(len(steps))):
        assert (positions[after] > positions[before]) == (steps[after] != steps[before])
        assert positions[after] >= positions[before]


def test_an_epoch_that_starts_again_is_no_hang() -> None:
    pace, counter = Pace(T0, expected=True), None
    for second in range(100):
        counter = update_counter(counter, second % 10)
        pace = advance(pace, counter.step, at(second), position=counter.position)
    assert hung(pace, FIXED, at(129)) is None
    assert (pace.step, pace.highest, rate(pace)) == (9, 9, 1.0)
    for second in range(100, 103):
        counter = update_counter(counter, second % 10)
        pace = advance(pace, counter.step, at(second), position=counter.position)
    assert (pace.step, pace.highest) == (2, 9), "the highest step is not lowered"
    assert "step 2 has not changed" in (hung(pace, FIXED, at(133)) or "")


@pytest.mark.parametrize(
    ("before", "step", "expected"),
    [
        pytest.param(None, 0, False, id="the first report"),
        pytest.param(Counter(99), 37, True, id="the next epoch, seen late"),
        pytest.param(Counter(1), 0, True, id="the next of a short one"),
        pytest.param(Counter(100), 50, False, id="back to a checkpoint"),
        pytest.param(Counter(0), 0, False, id="no step yet"),
        pytest.param(Counter(3, base=100), 4, False, id="forward, in a later epoch"),
    ],
)
def test_which_counters_start_again(before: Counter | None, step: int, expected: bool) -> None:
    assert has_restarted(before, step) == expected


# --- late, and past the limit

BEAT = timedelta(seconds=10)


@pytest.mark.parametrize(
    ("pace", "late_after"),
    [
        (stepping(10, 1.0), 30.0),
        (stepping(10, 20.0), 60.0),
        (stepping(10, 400.0), 1200.0),
        (advance(stepping(10, 1.0), 11, at(10), "checkpoint"), 20 * 60.0),
        (advance(stepping(10, 1.0), 11, at(10), "warm-up"), 15 * 60.0),
        (stepping(0, 1.0), 15 * 60.0),
        (Pace(T0, expected=True), 15 * 60.0),
    ],
)
def test_progress_is_late_after_3_of_the_longest_steps(pace: Pace, late_after: float) -> None:
    since = pace.advanced_at or T0
    assert not is_late(pace, LEARNED, BEAT, since + timedelta(seconds=late_after))
    assert is_late(pace, LEARNED, BEAT, since + timedelta(seconds=late_after + 1))


def test_late_is_no_later_than_the_limit() -> None:
    assert is_late(stepping(10, 20.0), FIXED, BEAT, at(231))
    assert not is_late(stepping(10, 1.0), HangLimits(after="off"), BEAT, at(10**6))


STATED = HangLimits(
    first_step=timedelta(minutes=1),
    checkpoint=timedelta(minutes=1),
    evaluation=timedelta(minutes=1),
)


@pytest.mark.parametrize("doing", ["checkpoint", "evaluation"])
def test_a_limit_of_a_phase_is_stated_unless_it_is_the_default(doing: str) -> None:
    pace = advance(stepping(10, 1.0), 11, at(11), doing)
    for limits, stated in ((LEARNED, False), (STATED, True)):
        overdue = find_overdue(pace, limits, at(10**5))
        assert overdue is not None and overdue.is_stated is stated


def test_a_first_step_is_stated_unless_it_is_the_default() -> None:
    for pace in (Pace(T0, expected=True), stepping(2, 1.0)):
        for limits, stated in ((LEARNED, False), (STATED, True)):
            overdue = find_overdue(pace, limits, at(10**5))
            assert overdue is not None and overdue.is_stated is stated


def test_a_learned_limit_is_not_stated_and_a_fixed_one_is() -> None:
    learned = find_overdue(stepping(10, 1.0), LEARNED, at(10 + 15 * 60 + 7))
    assert learned is not None and not learned.is_stated
    assert learned.past == timedelta(seconds=7)
    fixed = find_overdue(stepping(10, 1.0), FIXED, at(50))
    assert fixed is not None and fixed.is_stated


BARRIER = timedelta(seconds=300)


@pytest.mark.parametrize(
    ("finished", "advanced", "past"),
    [(None, None, None), (300, None, None), (310, None, 10), (400, 200, None), (400, 90, 10)],
)
def test_ranks_are_late_at_the_exit_barrier(
    finished: float | None, advanced: float | None, past: float | None
) -> None:
    pace = Pace(T0, expected=True)
    if advanced is not None:
        pace = advance(pace, 3, at(advanced))
    age = None if finished is None else timedelta(seconds=finished)
    overdue = find_late_exit(age, pace, BARRIER, at(400))
    assert (overdue and overdue.past) == (None if past is None else timedelta(seconds=past))
    assert overdue is None or not overdue.is_stated
    stated = find_late_exit(
        timedelta(hours=1), Pace(T0, expected=True), timedelta(minutes=1), at(0)
    )
    assert stated is not None and stated.is_stated
