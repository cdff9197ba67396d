"""Collect what a rank left behind: its error file and the end of its log.

An error file that cannot be read is reported as `unreadable`, with the reason.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Iterable, Optional

from relaunch.agent.node import kernel_log
from relaunch.agent.protocol import Json
from relaunch.agent.ranks.rank_files import open_plain
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.state import Generation, read_json

MAX_ERROR_BYTES = 256 * 1024
"""Maximum size of an error file in bytes. Deep tracebacks are tens of KiB."""
MAX_TAIL_LINES = 200
MAX_TAIL_BYTES = 16 * 1024
"""Limits for the tail of a rank's log, in lines and in bytes.

A traceback through a framework has a hundred lines, and what libraries print while the process
ends, such as the tracebacks of data loaders, follows it.
"""
MAX_LAUNCHER_LINES, MAX_LAUNCHER_BYTES = 1000, 64 * 1024
"""Limits for the tail of a launcher's log, in lines and in bytes.

A launcher logs every rank that failed, with a traceback; the rank that failed first comes last.
"""
CLOCK_TICK = 0.01
"""Seconds by which the time of a file may be behind the clock: the kernel takes it from its tick,
of which there are 100 a second or more."""


def read_error(path: Path, redactor: Redactor) -> Json | None:
    """Return the rank's error file, None if it wrote none, or {"unreadable": reason}."""
    try:
        with open_plain(path) as file:
            data = file.read(MAX_ERROR_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        return {"unreadable": f"{error.strerror}"}
    if not data.strip():
        return {"unreadable": "the error file is empty"}
    if len(data) > MAX_ERROR_BYTES:
        return {"unreadable": f"the error file is larger than {MAX_ERROR_BYTES} bytes"}
    try:
        value = redactor.redact(json.loads(data.decode(errors="replace")))
    except (ValueError, RecursionError) as error:
        return {"unreadable": f"the error file is not JSON: {str(error)[:100]}"}
    if not isinstance(value, dict) or "message" not in value:
        return {"unreadable": "the error file is not an object with a message"}
    return value


def read_tail(
    path: Path,
    redactor: Redactor,
    max_lines: int = MAX_TAIL_LINES,
    max_bytes: int = MAX_TAIL_BYTES,
) -> list[str]:
    """Return the last lines of a log, within the limits; an empty list if it cannot be read."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            # From further up, to know a value of which only the end is within the limit.
            before = min(redactor.longest, max(0, size - max_bytes))
            file.seek(max(0, size - max_bytes) - before)
            data = file.read(before + max_bytes)
    except OSError:
        return []
    data = redactor.replace(data, redactor.find(data), before, len(data))
    lines = data.decode(errors="replace").splitlines()
    if size > max_bytes and len(lines) > 1:
        lines = lines[1:]  # the first line is incomplete
    return lines[-max_lines:]


def read_output_tail(generation: Generation, rank: int, redactor: Redactor) -> list[str]:
    """Return the last lines of a rank's output, where its streams are apart those of stderr last.

    Tracebacks are on stderr, and the last of the lines count most.
    """
    errors = generation.log_path(rank, "stderr")
    if not errors.exists():
        return read_tail(generation.log_path(rank), redactor)
    half = MAX_TAIL_BYTES // 2
    paths = generation.log_path(rank), errors
    lines = [read_tail(path, redactor, max_bytes=half) for path in paths]
    return [*lines[0], *lines[1]][-MAX_TAIL_LINES:]


def read_written(generation: Generation, rank: int, redactor: Redactor, until: float) -> Json:
    """Return what a rank had written by a moment, and how many seconds before it.

    A file that was written to later is left out: what of it is older is not known.

    Args:
        generation: The rank's generation.
        rank: The rank.
        redactor: Replaces secrets in what it wrote.
        until: Unix time by this node's clock.
    """
    error_path = generation.error_path(rank)
    error_age = _find_age([error_path], until)
    log_age = _find_age([generation.log_path(rank), generation.log_path(rank, "stderr")], until)
    return {
        "error": None if error_age is None else read_error(error_path, redactor),
        "error_age": error_age,
        "log_tail": [] if log_age is None else read_output_tail(generation, rank, redactor),
        "log_age": log_age,
    }


def _find_age(paths: Iterable[Path], until: float) -> Optional[float]:
    """Return how long before a moment files were written last; None: never, or later."""
    times = []
    for path in paths:
        try:
            times.append(os.stat(path).st_mtime)
        except OSError:  # the rank has written none
            continue
    return round(until - max(times), 3) if times and max(times) <= until else None


def add_evidence(generation: Generation, observation: Json, kernel: Json | None) -> Json:
    """Return a journaled observation with evidence added.

    Every observation gets the kernel's messages about it. A `RankExited` also gets the rank's error
    file and the tail of its log; if a launcher failed, those of the ranks below it as well. One
    that was stopped gets what it had written before: it may have failed, and been slow to end.
    """
    explained = kernel_log.add_reading(observation, kernel)
    if observation["kind"] != "RankExited":
        return explained
    rank = observation["rank"]
    redactor = Redactor.read(generation)
    log_tail = [] if observation["stopped"] else read_output_tail(generation, rank, redactor)
    error = read_error(generation.error_path(rank), redactor)
    report = {**explained, "error": error, "log_tail": log_tail}
    if observation["stopped"] and observation.get("stopped_at") is not None:
        until = observation["stopped_at"] - CLOCK_TICK
        report["before_stop"] = read_written(generation, rank, redactor, until)
    if observation["stopped"] or observation["exit_code"] == 0 or not observation.get("launcher"):
        return report
    # A launcher failed. Its own log, without output of the ranks, says which rank failed first.
    below = [
        {
            "rank": launched_rank,
            "local_rank": (read_json(generation.rank_record_path(launched_rank)) or {}).get(
                "local_rank", 0
            ),
            "pid": pid,
            "error": read_error(generation.error_path(launched_rank), redactor),
            "log_tail": read_output_tail(generation, launched_rank, redactor),
        }
        for launched_rank, (pid, _) in generation.launched_ranks.items()
    ]
    return {
        **report,
        "log_tail": read_tail(
            generation.log_path(rank), redactor, MAX_LAUNCHER_LINES, MAX_LAUNCHER_BYTES
        ),
        "launched": below,
    }
