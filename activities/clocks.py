"""Reads the clock that measures waits and ages. Unlike the wall clock, it is never stepped."""

from __future__ import annotations

import time


def read_boot_clock() -> float:
    """Return seconds since an arbitrary moment, including the time that the machine was suspended.

    Without CLOCK_BOOTTIME (not on Linux) that time may be left out: a wait is then longer than
    necessary, never shorter. Readings of two machines cannot be compared.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
