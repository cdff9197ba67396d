"""Core files, which a worker leaves none of: its memory has the secrets of jobs."""

from __future__ import annotations

import resource

NO_CORE = 1
"""As in relaunch.agent.processes, which has the standard library only."""
_given: list[int] = []


def forgo() -> None:
    """Have this process leave no core, also where `core_pattern` is a pipe."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if not _given and hard != 0:
        _given.append(soft)
        resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE, hard))


def read_given_limit() -> int | None:
    """Return the soft limit that this process was started with; None: it has it still."""
    return _given[0] if _given else None
