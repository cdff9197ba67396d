"""Reads the clock that measures waits and ages. Unlike the wall clock, it is never stepped."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path


def read_boot_clock() -> float:
    """Return seconds since an arbitrary moment, including the time that the machine was suspended.

    Without CLOCK_BOOTTIME (not on Linux) that time may be left out: a wait is then longer than
    necessary, never shorter. Readings of two machines cannot be compared.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read_wall_clock() -> datetime:
    return datetime.now(UTC)


MAX_READ_S = 0.5


def read_wall_offset() -> float:
    """Return by how many seconds the wall clock is ahead of CLOCK_MONOTONIC.

    It changes where the wall clock is stepped, and where the machine was suspended: training on
    this machine stood still as well, and was not late. In one boot, two processes may compare it.
    """
    while True:
        before = time.monotonic()
        wall = read_wall_clock().timestamp()
        if time.monotonic() - before < MAX_READ_S:  # else it was stopped in between
            return wall - before


@cache
def read_boot() -> str:
    """Return what identifies this boot of the machine; empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
