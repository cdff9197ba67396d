"""How far each rank has come, by its progress file or by a pattern over its log.

Never says zero for what it could not read.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import Any, Optional

from relaunch.agent.protocol import Json, now
from relaunch.agent.state import Generation

TORN_FOR = 2.0
"""Seconds that a file may be half written before it counts as unreadable: writers overwrite it in place."""
FILE_LIMIT = 64 * 1024
LOG_CHUNK = 256 * 1024
"""Bytes of log read at a time; of a log that grows faster only the newest is looked at."""
MAX_STEP = 2**53
MAX_VALUES = 64
"""Numbers that a rank reports beside its step."""
MAX_NAME = 256
"""Characters of the name of such a number, and of a phase. All three are what a controller accepts."""
LINE_LIMIT = 4096
"""Longer lines are cut before matching: a pattern's time grows with the line."""
MATCH_CPU_S = 0.5
"""Seconds of processor time that a pattern may take in one look at a log, a thousand times what a usual one takes. Python's engine tries
every way in which a pattern such as `(a+)+$` may match; it looks for signals meanwhile, so one can end it (CPython, Modules/_sre)."""


class _TooSlow(Exception):
    """A pattern has taken its time."""


def _end_match(*_: object) -> None:
    raise _TooSlow


class Unreadable(Exception):
    """A progress report that says nothing, and why."""


def _step(value: Any, name: str = "step") -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value > MAX_STEP:
        raise Unreadable(f"{name} is a number of {value.bit_length()} bits; expected at most 2^53")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unreadable(f"{name} is {str(value)[:40]!r}; expected a whole number of at least 0")
    return int(value)


def _bounded(values: dict[str, Any], phase: Any) -> Json:
    """Leave out what is more than a controller accepts, and write each number as a float."""
    numbers: dict[str, float] = {}
    for name, value in list(values.items())[:MAX_VALUES]:
        try:
            numbers[name[:MAX_NAME]] = float(value)
        except OverflowError:
            numbers[name[:MAX_NAME]] = float("inf") if value > 0 else float("-inf")
    return {"values": numbers, "phase": phase[:MAX_NAME] if isinstance(phase, str) else None}


def parse_file(text: str) -> Json:
    """Read a bare step or an object with one; return step, values, phase and the step of the newest finished checkpoint, if it says one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Unreadable(f"neither a step nor JSON: {text.strip()[:40]!r}") from None
    if not isinstance(value, dict):
        return {"step": _step(value), "values": {}, "phase": None, "checkpoint": None}
    if "step" not in value:
        raise Unreadable("the object has no step")
    values = {
        name: number
        for name, number in value.items()
        if name not in ("step", "phase", "checkpoint") and isinstance(number, (int, float)) and not isinstance(number, bool)
    }
    phase = value.get("phase")
    return {
        "step": _step(value["step"]),
        **_bounded(values, phase),
        "checkpoint": None if value.get("checkpoint") is None else _step(value["checkpoint"], "checkpoint"),
    }


def parse_match(match: re.Match[str]) -> Json:
    """Read the groups of a log pattern: step (None where a line has a checkpoint alone), checkpoint, phase, any other as a number."""
    values: dict[str, float] = {}
    phase = None
    checkpoint = match.groupdict().get("checkpoint")
    for name, text in match.groupdict().items():
        if text is None or name in ("step", "checkpoint"):
            continue
        if name == "phase":
            phase = text
            continue
        try:
            values[name] = float(text)
        except ValueError:
            continue
    step = None if checkpoint is not None and match.group("step") is None else _matched("step", match.group("step"))
    saved = None if checkpoint is None else _matched("checkpoint", checkpoint)
    return {"step": step, **_bounded(values, phase), "checkpoint": saved}


def _matched(name: str, text: Optional[str]) -> int:
    try:
        value = int(str(text))
    except ValueError:
        raise Unreadable(f"the pattern's {name} is {str(text)[:40]!r}; expected a whole number") from None
    return _step(value, name)


class RankProgress:
    """Follows one rank."""

    def __init__(self, generation: Generation, rank: int, pattern: re.Pattern[str] | None) -> None:
        self.file = generation.progress(rank)
        self.log = generation.log(rank)
        self.pattern = pattern
        self.reading: Json | None = None
        self.checkpoint: int | None = None
        """Of the newest one that it called finished. Saying nothing of it takes nothing back."""
        self.unreadable: str | None = None
        self.changed_at = now()
        self._signature: tuple[int, int, int] | None = None
        self._torn_since: float | None = None
        self._doubted: int | None = None
        self._offset: int | None = None
        self._rest = b""

    def read(self) -> bool:
        """Look again; return whether the step or the checkpoint is another one."""
        before = (self.reading["step"] if self.reading else None, self.checkpoint)
        found = self._read_file()
        if not found and self.pattern is not None:
            self._read_log(self.pattern)
        return (self.reading["step"] if self.reading else None, self.checkpoint) != before

    def report(self) -> Json | None:
        if self.unreadable is not None:
            return {"unreadable": self.unreadable}
        if self.reading is None and self.checkpoint is None:
            return None
        reading = self.reading or {"step": None, "values": {}, "phase": None}
        return {**reading, "checkpoint": self.checkpoint, "age": round(max(0.0, now() - self.changed_at), 3)}

    def _accept(self, reading: Json, written: float) -> None:
        self.unreadable = None
        self._torn_since = None
        if self.reading is None or self.reading["step"] != reading["step"]:
            self.changed_at = now() - max(0.0, time.time() - written)
        self.reading = reading
        self._saved(reading)

    def _saved(self, reading: Json) -> None:
        if reading["checkpoint"] is not None:
            self.checkpoint = reading["checkpoint"]

    def _read_file(self) -> bool:
        """Return whether there is a progress file at all."""
        try:
            found = os.stat(self.file)
            signature = (found.st_mtime_ns, found.st_size, found.st_ino)
            if signature == self._signature:
                return True
            with open(self.file, "rb") as file:
                text = file.read(FILE_LIMIT).decode(errors="replace")
        except FileNotFoundError:
            return False
        except OSError as error:
            self.unreadable = str(error.strerror)
            return True
        try:
            reading = parse_file(text)
        except Unreadable as error:
            self._torn_since = self._torn_since or now()
            if now() - self._torn_since > TORN_FOR:
                self.unreadable = str(error)
            return True
        if self.reading is not None and reading["step"] < self.reading["step"] and self._doubted != reading["step"]:
            self._doubted = reading["step"]  # a torn "1234" reads as 12: believe a step back when it is seen twice
            return True
        self._doubted = None
        self._signature = signature
        self._accept(reading, found.st_mtime)
        return True

    def _read_log(self, pattern: re.Pattern[str]) -> None:
        try:
            with open(self.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                if self._offset is None or size - self._offset > LOG_CHUNK:
                    self._offset, self._rest = max(0, size - LOG_CHUNK), b""
                if size == self._offset:
                    return
                file.seek(self._offset)
                data = self._rest + file.read(LOG_CHUNK)
                self._offset = file.tell()
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable = str(error.strerror)
            return
        *lines, rest = data.replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[-LINE_LIMIT:]
        before = signal.signal(signal.SIGVTALRM, _end_match)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, MATCH_CPU_S)
            try:
                self._match(pattern, lines)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        except _TooSlow:
            # Once: the supervisor has leases to keep, and the next line would take as long.
            self.pattern = None
            self.unreadable = f"log_pattern took more than {MATCH_CPU_S:g} s of processor time, and is not used any more"
        finally:
            signal.signal(signal.SIGVTALRM, before)

    def _match(self, pattern: re.Pattern[str], lines: list[bytes]) -> None:
        """Read the newest step and checkpoint out of whole lines."""
        wanted = {"step", "checkpoint"} & set(pattern.groupindex)
        for text in reversed(lines):
            match = pattern.search(text[:LINE_LIMIT].decode(errors="replace"))
            if match is None:
                continue
            try:
                self._take(parse_match(match), wanted)
            except Unreadable as error:
                self.unreadable = str(error)
                return
            if not wanted:
                return

    def _take(self, reading: Json, wanted: set[str]) -> None:
        """Take what this line tells and no newer one has told: steps and checkpoints may stand on lines of their own."""
        if "checkpoint" in wanted and reading["checkpoint"] is not None:
            wanted.remove("checkpoint")
            self._saved(reading)
        if "step" in wanted and reading["step"] is not None:
            wanted.remove("step")
            self._accept({**reading, "checkpoint": None}, time.time())
