"""Whether faults become more frequent, per time of jobs."""

from __future__ import annotations

from datetime import timedelta

import pytest

from relaunch.job.trend import MAX_PERIODS, JobFault, estimate_chance, find_trend
from tests.recovery.builders import T0, at

HOUR = 3600


def faults(*hours: float) -> list[JobFault]:
    return [JobFault(at(hour * HOUR), 1, timedelta(minutes=10)) for hour in hours]


ONE_JOB = ((T0, at(20 * HOUR)),)


@pytest.mark.parametrize(
    ("hours", "direction"),
    [
        ((1, 11, 12, 13, 14, 15, 16, 17, 18), "worse"),
        ((1, 2, 3, 4, 5, 6, 7, 8, 18), "better"),
        ((1, 2, 11, 12, 13, 14), "unchanged"),
        ((), "unchanged"),
        ((15, 16, 17, 18, 19), "unchanged"),
        ((14, 15, 16, 17, 18, 19), "worse"),
    ],
)
def test_a_change_that_may_be_chance_is_none(hours: tuple[float, ...], direction: str) -> None:
    trend = find_trend(ONE_JOB, faults(*hours))
    assert trend is not None
    assert trend.direction == direction
    assert trend.older.end == trend.newer.start == at(10 * HOUR)


def test_more_jobs_may_have_more_faults() -> None:
    few = ((T0, at(20 * HOUR)), *(((at(15 * HOUR), at(20 * HOUR)),) * 8))
    late = faults(1, 16, 16.5, 17, 17.5, 18, 18.5, 19, 19.5)
    many = find_trend(few, late)
    assert many is not None and many.direction == "unchanged"
    # 15 h of one job, then 5 h of nine: half of these 60 h has passed after 16 h and 40 min
    assert many.newer.start == at(15 * HOUR) + timedelta(hours=15) / 9
    assert many.older.jobs == many.newer.jobs == timedelta(hours=30)
    alone = find_trend(ONE_JOB, late)
    assert alone is not None and alone.direction == "worse"


def test_each_fault_is_in_one_period() -> None:
    for length in (30.0, 3600.0, 86_400.0 * 400, 86_400.0 * 4000):
        begin, last = faults(0)[0], JobFault(at(length), 2, timedelta(0))
        trend = find_trend(((T0, at(length)),), [begin, last])
        assert trend is not None
        assert len(trend.periods) <= MAX_PERIODS
        assert sum(one.interruptions for one in trend.periods) == 3
        assert (trend.periods[0].start, trend.periods[-1].end) == (T0, at(length))
        assert trend.newer.mtbf == timedelta(seconds=length / 4)
        assert sum((one.jobs for one in trend.periods), timedelta(0)) == timedelta(seconds=length)


def test_jobs_with_a_pause_between_them_have_a_middle() -> None:
    spans = ((T0, at(HOUR)), (at(9 * HOUR), at(10 * HOUR)))
    trend = find_trend(spans, faults(0.5))
    assert trend is not None and trend.newer.start == at(HOUR)
    assert find_trend(((T0, T0),), []) is None
    instant = find_trend(((T0, T0 + timedelta(microseconds=1)),), [])
    assert instant is not None and instant.newer.start == T0


def test_the_chance_of_two_counts_is_that_of_a_fair_coin() -> None:
    assert estimate_chance(0, 5) == pytest.approx(2 / 32)
    assert estimate_chance(1, 5) == pytest.approx(2 * 7 / 64)
    assert estimate_chance(3, 3) == estimate_chance(0, 0) == 1.0
    assert estimate_chance(2000, 3000) < 1e-9
