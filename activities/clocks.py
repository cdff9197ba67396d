"""The clock by which waits and ages are measured: it is never stepped, unlike the wall clock."""

from __future__ import annotations

import time


def read_boot_clock() -> float:
    """Return seconds since some moment, the time that the machine was suspended included.

    Where there is no CLOCK_BOOTTIME (not on Linux) that time may be left out: a wait is then
    longer than it has to be, never shorter. Readings of two machines have nothing in common.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
