"""The signals of Linux by number.

The ranks run on Linux, but relaunch may run on a system that numbers some signals differently.
"""

from __future__ import annotations

SIGNALS: dict[int, str] = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    16: "SIGSTKFLT",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    26: "SIGVTALRM",
    27: "SIGPROF",
    29: "SIGIO",
    30: "SIGPWR",
    31: "SIGSYS",
}
"""Signals that end a process, from signal(7) for x86 and Arm; real-time signals have no names."""
