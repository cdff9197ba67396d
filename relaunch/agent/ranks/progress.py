"""Read the progress of each rank, from its progress file or by a pattern from its log.

What cannot be read is reported as unreadable or as None, never as zero.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from relaunch.agent import tools
from relaunch.agent.protocol import Json, Order, now
from relaunch.agent.ranks.rank_files import open_plain
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.state import Generation

TORN_TIMEOUT = 2.0
"""Seconds before a half-written file counts as unreadable: ranks overwrite it in place."""
MAX_FILE_BYTES = 64 * 1024
LOG_CHUNK_BYTES = 256 * 1024
"""Bytes of log to read at a time. Of a log that grows faster, only the newest part is read."""
MAX_STEP = 2**53
MAX_VALUES = 64
"""Maximum number of values that a rank may report beside its step."""
MAX_NAME = 256
"""Maximum characters of the name of such a value, and of a phase.

MAX_STEP, MAX_VALUES and MAX_NAME are the limits of the controller.
"""
MAX_LINE_BYTES = 4096
"""Bytes of a line to match; the rest is cut off, as matching time grows with the line."""
MAX_TAIL_LINES = 5
MAX_TAIL_CHARS = 300
"""Most lines, and characters of each, of what a rank without progress printed last."""
TAIL_BYTES = 8 * 1024
COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
"""Colours may stand between a word and its number; other sequences may say where a line belongs."""
LAST_READ_TIMEOUT = 2.0
"""Timeout in seconds for the last read of all ranks of a node, whose disk may hang."""
LAST_READ_CPU_S = 0.2
"""Seconds of CPU time for it: the next launch waits for it.

This is enough for some megabytes, with a usual pattern.
"""
MAX_LAST_PARTS = 16
"""Most parts of LOG_CHUNK_BYTES of each log in which the last step is looked for.

The ranks of a failed generation may print megabytes after it, such as traces of NCCL.
"""
SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
"""Control sequences of terminals (ECMA-48)."""
MATCH_CPU_S = 0.5
"""Seconds of CPU time that a pattern may take in one pass over a log.

This is a thousand times what a usual pattern takes. Python's engine backtracks without limit on a
pattern such as `(a+)+$`, but it checks for signals meanwhile, so a signal can end it (CPython,
Modules/_sre).
"""


class _MatchTimeout(Exception):
    """A pattern has used up its CPU time."""


def _end_match(*_: object) -> None:
    raise _MatchTimeout


class ProgressError(Exception):
    """A progress report cannot be read. The text says why."""


def _parse_step(value: Any, name: str = "step") -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value > MAX_STEP:
        raise ProgressError(
            f"{name} is a number of {value.bit_length()} bits; expected at most 2^53"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProgressError(f"{name} is {str(value)[:40]!r}; expected a whole number of at least 0")
    return int(value)


def _limit_values(values: dict[str, Any], phase: Any) -> Json:
    """Cut values and phase to the controller's limits, and convert each value to a float."""
    numbers: dict[str, float] = {}
    for name, value in list(values.items())[:MAX_VALUES]:
        try:
            numbers[name[:MAX_NAME]] = float(value)
        except OverflowError:
            numbers[name[:MAX_NAME]] = float("inf") if value > 0 else float("-inf")
    return {"values": numbers, "phase": phase[:MAX_NAME] if isinstance(phase, str) else None}


def parse_file(text: str) -> Json:
    """Parse a progress file: a bare step, or a JSON object with a step.

    Return step, values, phase, and the step of the newest finished checkpoint (None if not given).

    Raises:
        ProgressError: The text is neither, or a number is out of range.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ProgressError(f"neither a step nor JSON: {text.strip()[:40]!r}") from None
    if not isinstance(value, dict):
        return {"step": _parse_step(value), "values": {}, "phase": None, "checkpoint": None}
    if "step" not in value:
        raise ProgressError("the object has no step")
    values = {
        name: number
        for name, number in value.items()
        if name not in ("step", "phase", "checkpoint")
        and isinstance(number, (int, float))
        and not isinstance(number, bool)
    }
    phase = value.get("phase")
    return {
        "step": _parse_step(value["step"]),
        **_limit_values(values, phase),
        "checkpoint": None
        if value.get("checkpoint") is None
        else _parse_step(value["checkpoint"], "checkpoint"),
    }


def parse_match(match: re.Match[str]) -> Json:
    """Read the groups of a log pattern: step, checkpoint, phase, and any other as a number.

    With the groups epoch and total, step counts within an epoch of that many steps, and the step is
    epoch * total + step. The step is None if the line has only a checkpoint.

    Raises:
        ProgressError: The step or the checkpoint is not a whole number in range.
    """
    groups = match.groupdict()
    step = saved = None
    if groups.get("checkpoint") is not None:
        saved = _parse_matched("checkpoint", groups["checkpoint"])
    if saved is None or groups["step"] is not None:
        step = _parse_matched("step", groups["step"])
        epoch, total = groups.get("epoch") or "", groups.get("total") or ""
        if epoch.isdecimal() and total.isdecimal():
            step = _parse_step(int(epoch[:20]) * int(total[:20]) + step)
            groups["epoch"] = groups["total"] = None
    values: dict[str, float] = {}
    for name, text in groups.items():
        if text is None or name in ("step", "checkpoint", "phase"):
            continue
        try:
            values[name] = float(text)
        except ValueError:
            continue
    return {"step": step, **_limit_values(values, groups.get("phase")), "checkpoint": saved}


def _parse_matched(name: str, text: Optional[str]) -> int:
    try:
        value = int(str(text))
    except ValueError:
        raise ProgressError(
            f"the pattern's {name} is {str(text)[:40]!r}; expected a whole number"
        ) from None
    return _parse_step(value, name)


class LogReader:
    """Reads the new lines of one log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset: int | None = None
        self._rest = b""

    def read_lines(self) -> list[bytes]:
        """Return the lines that are new, of a log that has grown much only the newest.

        Raises:
            OSError: The log cannot be read.
        """
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                if self._offset is not None and size < self._offset:
                    self._offset, self._rest = 0, b""  # the rank has cut its own log
                if self._offset is None or size - self._offset > LOG_CHUNK_BYTES:
                    self._offset, self._rest = max(0, size - LOG_CHUNK_BYTES), b""
                if size == self._offset:
                    return []
                file.seek(self._offset)
                data = self._rest + file.read(LOG_CHUNK_BYTES)
                self._offset = file.tell()
        except FileNotFoundError:
            return []
        data = COLOURS.sub(b"", data)
        *lines, rest = data.replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        if data.rfind(b"\r") > data.rfind(b"\n"):
            # A bar draws a whole line at once, after the return, and may leave it for a long time.
            lines.append(rest)
        return lines

    def printed_at(self) -> float:
        """Return when the rank printed here last, by the wall clock; 0.0: it printed nothing."""
        try:
            status = os.stat(self.path)
        except OSError:
            return 0.0
        return status.st_mtime if status.st_size else 0.0


class RankProgress:
    """The progress of one rank."""

    def __init__(self, generation: Generation, rank: int, pattern: re.Pattern[str] | None) -> None:
        self.file = generation.progress_path(rank)
        # Bars and logging are on stderr, which may have a separate log.
        self.logs = [LogReader(generation.log_path(rank, name)) for name in ("stdout", "stderr")]
        self.pattern = pattern
        self.reading: Json | None = None
        self.checkpoint: int | None = None
        """Step of the newest finished checkpoint. A report without one does not clear it."""
        self.unreadable: str | None = None
        self.changed_at = now()
        self._signature: tuple[int, int, int] | None = None
        self._torn_since: float | None = None
        self._doubted_step: int | None = None

    def read(self) -> bool:
        """Read the progress; return whether the step or the checkpoint changed."""
        before = (self.reading["step"] if self.reading else None, self.checkpoint)
        has_file = self.read_file()
        if not has_file and self.pattern is not None:
            self._read_log(self.pattern)
        return (self.reading["step"] if self.reading else None, self.checkpoint) != before

    def report(self) -> Json | None:
        if self.unreadable is not None:
            return {"unreadable": self.unreadable}
        if self.reading is None and self.checkpoint is None:
            return None
        reading = self.reading or {"step": None, "values": {}, "phase": None}
        return {
            **reading,
            "checkpoint": self.checkpoint,
            "age": round(max(0.0, now() - self.changed_at), 3),
        }

    def printed_at(self) -> float:
        """Return when the rank printed last, by the wall clock; 0.0: it printed nothing."""
        return max(log.printed_at() for log in self.logs)

    def read_tail(self, redactor: Redactor) -> List[str]:
        """Return the last lines that the rank printed, for people: without control characters."""
        newest = max(self.logs, key=lambda log: log.printed_at())
        try:
            with open_plain(newest.path) as file:
                start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
                before = min(redactor.longest, start)
                file.seek(start - before)
                data = file.read(before + TAIL_BYTES)
        except OSError:
            return []
        data = redactor.replace(data, redactor.find(data), before, len(data))
        text = SEQUENCES.sub("", data.decode(errors="replace").replace("\r", "\n"))
        lines = text.split("\n")[1 if start and "\n" in text else 0 :]
        shown: List[str] = []
        for one in reversed(lines):
            line = "".join(c if c.isprintable() else " " for c in one.strip()[:MAX_TAIL_CHARS])
            if line.strip():
                shown.insert(0, line.strip())
            if len(shown) == MAX_TAIL_LINES:
                break
        return shown

    def _accept(self, reading: Json, written: float) -> None:
        self.unreadable = None
        self._torn_since = None
        if self.reading is None or self.reading["step"] != reading["step"]:
            self.changed_at = now() - max(0.0, time.time() - written)
        self.reading = reading
        self._store_checkpoint(reading)

    def _store_checkpoint(self, reading: Json) -> None:
        if reading["checkpoint"] is not None:
            self.checkpoint = reading["checkpoint"]

    def read_file(self) -> bool:
        """Read the progress file; return whether it exists, even if it cannot be read."""
        try:
            status = os.stat(self.file)
            signature = (status.st_mtime_ns, status.st_size, status.st_ino)
            if signature == self._signature:
                return True
            with open_plain(self.file) as file:
                text = file.read(MAX_FILE_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return False
        except OSError as error:
            self.unreadable = str(error.strerror)
            return True
        try:
            reading = parse_file(text)
        except ProgressError as error:
            self._torn_since = self._torn_since or now()
            if now() - self._torn_since > TORN_TIMEOUT:
                self.unreadable = str(error)
            return True
        if (
            self.reading is not None
            and reading["step"] < self.reading["step"]
            and self._doubted_step != reading["step"]
        ):
            # A half-written "1234" reads as 12: accept a lower step only when it is read twice.
            self._doubted_step = reading["step"]
            return True
        self._doubted_step = None
        self._signature = signature
        self._accept(reading, status.st_mtime)
        return True

    def _read_log(self, pattern: re.Pattern[str]) -> None:
        try:
            lines = [line for log in self.logs for line in log.read_lines()]
        except OSError as error:
            self.unreadable = str(error.strerror)
            return
        if not lines:
            return
        before = signal.signal(signal.SIGVTALRM, _end_match)
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, MATCH_CPU_S)
            try:
                self._match(pattern, lines)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        except _MatchTimeout:
            # Disable the pattern: the supervisor has leases to serve, and the next line may take as
            # long.
            self.pattern = None
            self.unreadable = (
                f"log_pattern took more than {MATCH_CPU_S:g} s of processor time, "
                "and is not used any more"
            )
        finally:
            signal.signal(signal.SIGVTALRM, before)

    def _match(self, pattern: re.Pattern[str], lines: list[bytes]) -> None:
        """Read the newest step and checkpoint from complete lines, newest line first."""
        missing = {"step", "checkpoint"} & set(pattern.groupindex)
        for text in reversed(lines):
            match = pattern.search(text[:MAX_LINE_BYTES].decode(errors="replace"))
            if match is None:
                continue
            try:
                self._take(parse_match(match), missing)
            except ProgressError as error:
                self.unreadable = str(error)
                return
            if not missing:
                return

    def _take(self, reading: Json, missing: set[str]) -> None:
        """Store the step and the checkpoint of this line, unless a newer line has set them.

        Steps and checkpoints may be on separate lines, so `missing` holds what is not found yet.
        """
        if "checkpoint" in missing and reading["checkpoint"] is not None:
            missing.remove("checkpoint")
            self._store_checkpoint(reading)
        if "step" in missing and reading["step"] is not None:
            missing.remove("step")
            self._accept({**reading, "checkpoint": None}, time.time())


class _LogTail:
    """Reads a log from its end back to its begin, a part at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end: Optional[int] = None
        """Where the part that was read last begins; None before the first."""
        self._continuation = b""
        """The begin of what follows `_end` up to the end of its line."""

    def read_step(self, pattern: re.Pattern[str]) -> Optional[int]:
        """Return the newest step in the next part, or None.

        Raises:
            OSError: The log cannot be read.
        """
        is_newest = self._end is None
        steps: List[int] = []
        for number, text in enumerate(reversed(self._read_lines())):
            match = pattern.search(text[:MAX_LINE_BYTES].decode(errors="replace"))
            try:
                step = None if match is None else parse_match(match)["step"]
            except ProgressError:
                continue
            if step is not None:
                steps.append(step)
                # The last line may have been cut within a number, when its rank was killed.
                if number > 0 or not is_newest:
                    break
        return max(steps, default=None)

    def _read_lines(self) -> List[bytes]:
        with open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END) if self._end is None else self._end
            self._end = max(0, end - LOG_CHUNK_BYTES)
            file.seek(self._end)
            data = file.read(end - self._end) + self._continuation
        data = data.replace(b"\r", b"\n")
        if self._end > 0:
            head, _, data = data.partition(b"\n")
            self._continuation = head[:MAX_LINE_BYTES]
        return COLOURS.sub(b"", data).split(b"\n") if data else []

    @property
    def is_read(self) -> bool:
        return self._end == 0

    def skip(self) -> None:
        self._end = 0


def read_last_step(
    generations: Sequence[Generation], pattern: Optional[str]
) -> Tuple[Optional[int], Optional[Order]]:
    """Return the step that all ranks that report steps have reached, and in which generation.

    To be called once they have ended: it is the last word on what they reached. Of several
    generations it is the first that has a step. None: no rank reported a step, or none in what was
    read within MAX_LAST_PARTS of each log, LAST_READ_CPU_S and LAST_READ_TIMEOUT.
    """

    def read() -> Json:
        compiled = re.compile(pattern) if pattern is not None else None
        steps: Dict[int, int] = {}
        order: Optional[Order] = None
        before = signal.signal(signal.SIGPROF, _end_match)
        try:
            signal.setitimer(signal.ITIMER_PROF, LAST_READ_CPU_S)
            for generation in generations:
                order = generation.order
                _collect_last_steps(generation, compiled, steps)
                if steps:
                    break
        except _MatchTimeout:  # what was read before counts
            pass
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, before)
        return {"last": [min(steps.values()), order] if steps else [None, None]}

    answer = tools.run_bounded(read, LAST_READ_TIMEOUT) if generations else None
    step, reached_in = answer["last"] if answer is not None else (None, None)
    return step, None if reached_in is None else (reached_in[0], reached_in[1])


def _collect_last_steps(
    generation: Generation, pattern: Optional[re.Pattern[str]], steps: Dict[int, int]
) -> None:
    """Fill in the last steps: of each log the newest part, and older ones while no step is known.

    Most jobs report steps at one rank, and the logs of the others would be searched for nothing.
    """
    prepared = generation.prepared_order
    if prepared is None:
        return
    logs: Dict[int, List[_LogTail]] = {}
    for rank in sorted({*prepared["ranks"], *generation.launched_ranks}):
        progress = RankProgress(generation, rank, None)
        if not progress.read_file():
            logs[rank] = [_LogTail(log.path) for log in progress.logs]
        elif progress.reading is not None:
            steps[rank] = progress.reading["step"]
    if pattern is None:
        return
    for _ in range(MAX_LAST_PARTS):
        for rank, tails in logs.items():
            found = [_read_part(log, pattern) for log in tails if not log.is_read]
            known = [step for step in found if step is not None]
            if known:
                steps[rank] = max(known)
        if steps:
            return


def _read_part(log: _LogTail, pattern: re.Pattern[str]) -> Optional[int]:
    try:
        return log.read_step(pattern)
    except OSError:  # the rank has printed nothing into it, or it cannot be read
        log.skip()
        return None
