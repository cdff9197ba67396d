"""Collect what a rank left behind: its error file and the end of its log.

An error file that cannot be read is reported as `unreadable`, with the reason.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from relaunch.agent.node import kernel_log
from relaunch.agent.protocol import Json
from relaunch.agent.state import Generation, read_json

ERROR_LIMIT = 256 * 1024
"""Maximum size of an error file in bytes. Deep tracebacks are tens of KiB."""
TAIL_LINES = 40
TAIL_BYTES = 8 * 1024
LAUNCHER_LINES, LAUNCHER_BYTES = 1000, 64 * 1024
"""Limits for the tail of a launcher's log, in lines and in bytes.

A launcher logs every rank that failed, with a traceback; the rank that failed first comes last.
"""


def read_error(path: Path) -> Json | None:
    """Return the rank's error file, None if it wrote none, or {"unreadable": reason}."""
    try:
        with open(path, "rb") as file:
            data = file.read(ERROR_LIMIT + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        return {"unreadable": f"{error.strerror}"}
    if not data.strip():
        return {"unreadable": "the error file is empty"}
    if len(data) > ERROR_LIMIT:
        return {"unreadable": f"the error file is larger than {ERROR_LIMIT} bytes"}
    try:
        value = json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        return {"unreadable": f"the error file is not JSON: {str(error)[:100]}"}
    if not isinstance(value, dict) or "message" not in value:
        return {"unreadable": "the error file is not an object with a message"}
    return value


def tail(path: Path, most_lines: int = TAIL_LINES, most_bytes: int = TAIL_BYTES) -> list[str]:
    """Return the last lines of a log, within the limits; an empty list if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError:
        return []
    lines = data.decode(errors="replace").splitlines()
    if size > most_bytes and len(lines) > 1:
        lines = lines[1:]  # the first line is incomplete
    return lines[-most_lines:]


def told(generation: Generation, observation: Json, kernel: Json | None) -> Json:
    """Return a journaled observation with evidence added.

    Every observation gets the kernel's messages about it. A `RankExited` also gets the rank's error
    file and the tail of its log; if a launcher failed, those of the ranks below it as well.
    """
    explained = kernel_log.told(observation, kernel)
    if observation["kind"] != "RankExited":
        return explained
    rank = observation["rank"]
    printed = [] if observation["stopped"] else tail(generation.log(rank))
    seen = {**explained, "error": read_error(generation.error(rank)), "log_tail": printed}
    if observation["stopped"] or observation["exit_code"] == 0 or not observation.get("launcher"):
        return seen
    # A launcher failed. Its own log, without output of the ranks, says which rank failed first.
    below = [
        {
            "rank": one,
            "local_rank": (read_json(generation.launched_file(one)) or {}).get("local_rank", 0),
            "pid": pid,
            "error": read_error(generation.error(one)),
            "log_tail": tail(generation.log(one)),
        }
        for one, (pid, _) in generation.launched.items()
    ]
    return {
        **seen,
        "log_tail": tail(generation.log(rank), LAUNCHER_LINES, LAUNCHER_BYTES),
        "launched": below,
    }
