"""Tasks that follow a script, instead of running anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.aws.clockwork import Clockwork

_STOP_TIMEOUT = 0.02
"""Seconds that a scripted container takes to end by a SIGTERM."""


@dataclass
class Script:
    """How the tasks of a family, or those that a predicate picks, go."""

    wanted: str | Callable[[Mapping[str, Any]], bool]
    exit_code: int | None
    reason: str | None
    stop_code: str | None
    stopped_reason: str | None
    never_starts: bool
    after: float | None
    stdout: tuple[str, ...]
    stubborn: bool
    stuck: bool
    left: int | None

    def fits(self, family: str, task: Mapping[str, Any]) -> bool:
        if self.left == 0:
            return False
        return self.wanted(task) if callable(self.wanted) else self.wanted == family


@dataclass
class Scripts:
    _told: list[Script] = field(default_factory=list)

    def add(self, script: Script) -> Script:
        self._told.append(script)
        return script

    def clear(self) -> None:
        self._told.clear()

    def take(self, family: str, task: Mapping[str, Any]) -> Script | None:
        for script in self._told:
            if script.fits(family, task):
                if script.left is not None:
                    script.left -= 1
                return script
        return None


class ScriptedProcess:
    """Stands where a container's process would."""

    def __init__(
        self,
        script: Script,
        clockwork: Clockwork,
        said: Callable[[list[str]], None],
        ended: Callable[[], None],
    ) -> None:
        self._script, self._clockwork, self._ended = script, clockwork, ended
        self._lock = threading.Lock()
        self.ended = False
        self.exit_code: int | None = None
        self.reason = script.reason
        self.pid: int | None = None
        if script.stdout:
            said(list(script.stdout))
        if script.after is not None:
            clockwork.later(script.after, lambda: self._end(script.exit_code))

    def ask(self) -> None:
        if not self._script.stubborn and not self._script.stuck:
            self._clockwork.later(_STOP_TIMEOUT, lambda: self._end(143))

    def kill(self) -> None:
        if not self._script.stuck:
            self._end(137)

    def lose_power(self) -> None:
        self._end(137)

    def _end(self, exit_code: int | None) -> None:
        with self._lock:
            if self.ended:
                return
            self.ended, self.exit_code = True, exit_code
        self._ended()
