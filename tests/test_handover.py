"""When a worker takes over for workers of another build. How it does is in tests/e2e."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import cast

import pytest
from temporalio.client import Client

from relaunch.builds import GONE_AFTER, HEARTBEAT_INTERVAL, Build, Builds
from relaunch.handover import (
    INTERVAL_S,
    QUIET_INTERVAL_S,
    RETURN_AFTER_S,
    STARTING_INTERVAL_S,
    UNHEARD_AFTER,
    WAITING_INTERVAL_S,
    Handover,
    _Silence,
)

NOW = datetime(2026, 11, 24, tzinfo=UTC)
HEARD, ENDED = NOW, None
NEW, EARLIER = None, NOW
"""Whether a build was current before."""


@pytest.mark.parametrize(
    ("ours", "heard_at", "silent_s", "replaces"),
    [
        (NEW, HEARD, 1.0, False),
        (NEW, HEARD, GONE_AFTER.total_seconds() + 1, True),
        # It has just started, or so has the server: it is first heard after an interval.
        (NEW, ENDED, HEARTBEAT_INTERVAL.total_seconds() + 1, False),
        (NEW, ENDED, UNHEARD_AFTER.total_seconds() + 1, True),
        # It may only be restarting, and we be kept for a rollback.
        (EARLIER, ENDED, UNHEARD_AFTER.total_seconds() + 1, False),
        (EARLIER, HEARD, GONE_AFTER.total_seconds() + 1, False),
        (EARLIER, ENDED, RETURN_AFTER_S + 1, True),
    ],
)
def test_a_build_replaces_the_current_one_once_that_is_gone(
    ours: datetime | None, heard_at: datetime | None, silent_s: float, replaces: bool
) -> None:
    handover = Handover(cast(Client, None), "queue", "ours")
    current = Build("current", True, NOW, heard_at)
    seen = _Silence(heard_at, time.monotonic() - silent_s)
    handover._silences["current"] = seen
    assert handover._replaces(Build("ours", False, ours, NOW), current) is replaces


def test_the_build_before_is_the_last_that_was_current() -> None:
    at = [datetime(2026, 11, day, tzinfo=UTC) for day in (1, 2, 3)]
    builds = Builds(
        (
            Build("a", False, at[0], None),
            Build("b", False, at[1], None),
            Build("c", True, at[2], None),
            Build("never", False, None, NOW),
        )
    )
    assert (builds.previous or Build("", False, None, None)).id == "b"
    assert Builds((Build("a", True, NOW, None),)).previous is None


@pytest.mark.parametrize(
    ("current", "others", "interval"),
    [
        ("", 0, STARTING_INTERVAL_S),
        ("other", 0, WAITING_INTERVAL_S),
        ("ours", 1, INTERVAL_S),
        ("ours", 0, QUIET_INTERVAL_S),
    ],
)
def test_a_worker_looks_rarely_while_no_other_build_is_used(
    current: str, others: int, interval: float
) -> None:
    handover = Handover(cast(Client, None), "queue", "ours")
    handover._others = others
    known = tuple(Build(id, id == current, NOW, NOW) for id in ("ours", "other"))
    assert handover._choose_interval(Builds(known)) == interval
