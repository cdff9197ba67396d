"""Converts the agent's JSON to observations.

A part that cannot be read is reported as unreadable, never left out. Of what ranks and nodes wrote,
only text is kept: no escape sequence or control character reaches a job's state.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal

from relaunch.evidence.observations import (
    EcsStop,
    Observation,
    RankError,
    RankExited,
    RanksFenced,
    RanksVanished,
)
from relaunch.evidence.rank_log import TAIL_LINES
from relaunch.job.launchers import RankFailure, parse_failures
from relaunch.text import printable, strip_sequences

MESSAGE_LIMIT = 2000
TAIL_LINE = 500
TRACEBACK_LIMIT = 8000
"""Characters. A traceback is cut at its start; sixteen of them must stay far below 256 KiB."""
KERNEL_LINES, KERNEL_LINE = 20, 400
"""The most that the agent sends; a line is ASCII."""


def read_observations(
    node: str, raw: Mapping[str, Any], received_at: datetime
) -> tuple[Observation, ...]:
    """Return the observations of one line. The end of a launcher becomes the ends of its ranks."""
    one = read_observation(node, raw, received_at)
    if one is None:
        return ()
    if isinstance(one, RankExited) and one.launcher and one.failed and not one.stopped:
        return _read_launched_exits(one, raw)
    return (one,)


def read_observation(
    node: str, raw: Mapping[str, Any], received_at: datetime
) -> Observation | None:
    """Return one observation, or None for kinds that a job does not act on."""
    kind = raw.get("kind")
    if kind == "RankExited":
        error, unreadable = read_error(raw.get("error"))
        kernel, kernel_unreadable = read_kernel_lines(raw)
        pid = raw.get("pid")
        return RankExited(
            node=node,
            rank=int(raw["rank"]),
            local_rank=int(raw["local_rank"]),
            exit_code=raw.get("exit_code"),
            signal=raw.get("signal"),
            at=received_at,
            stopped=bool(raw.get("stopped")),
            error=error,
            error_unreadable=unreadable,
            log_tail=_read_log_tail(raw),
            kernel=kernel,
            kernel_unreadable=kernel_unreadable,
            pid=pid if isinstance(pid, int) else None,
            launcher=bool(raw.get("launcher")),
            ecs=_read_ecs_stop(raw.get("ecs")),
        )
    reason = printable(str(raw.get("reason") or kind), MESSAGE_LIMIT)
    if kind == "Fenced":
        return RanksFenced(node, received_at, str(raw.get("why")), reason)
    if kind in ("ShimDied", "RanksVanished"):
        return RanksVanished(node, received_at, reason, "reboot" in reason, *read_kernel_lines(raw))
    if kind == "Stopped":
        # The order came from a higher generation or from a person; for this generation it means
        # that its ranks are gone.
        return RanksFenced(node, received_at, "superseded", reason)
    return None


def read_unfinished(
    node: str,
    raw: Mapping[str, Any],
    unfinished: Literal["alive", "dumping", "stopped"],
    received_at: datetime,
) -> RankExited:
    """Return the observation of a rank whose exit does not say how it failed.

    Args:
        node: Its node.
        raw: What it wrote and how long before: an answer to `last-words`, or an observation.
        unfinished: What it was doing.
        received_at: The receiver's time.
    """
    error, unreadable = read_error(raw.get("error"))
    age = raw.get("log_age") if error is None else raw.get("error_age")
    pid = raw.get("pid")
    return RankExited(
        node=node,
        rank=int(raw["rank"]),
        local_rank=int(raw["local_rank"]),
        exit_code=None,
        signal=None,
        at=received_at - timedelta(seconds=float(age or 0.0)),
        error=error,
        error_unreadable=unreadable,
        log_tail=_read_log_tail(raw),
        pid=pid if isinstance(pid, int) else None,
        unfinished=unfinished,
    )


def _read_ecs_stop(raw: Any) -> EcsStop | None:
    if not isinstance(raw, Mapping):
        return None
    code = raw.get("stop_code")
    return EcsStop(
        None if code is None else printable(str(code), MESSAGE_LIMIT),
        printable(str(raw.get("reason") or ""), MESSAGE_LIMIT),
    )


def _read_log_tail(raw: Mapping[str, Any]) -> tuple[str, ...]:
    lines = list(raw.get("log_tail") or ())[-TAIL_LINES:]
    return tuple(strip_sequences(str(line)[:TAIL_LINE]) for line in lines)


def _read_launched_exits(launcher: RankExited, raw: Mapping[str, Any]) -> tuple[RankExited, ...]:
    """Return the exits of the ranks that a launcher reports as failed.

    Each has the rank's error file and output. If the launcher reports none, return its own exit.
    """
    left = [one for one in raw.get("launched") or () if isinstance(one, Mapping)]
    reported = parse_failures(
        [str(line) for line in raw.get("log_tail") or ()]
    ) or _find_first_writer(left, launcher.exit_code)
    found: list[RankExited] = []
    for failure in reported:
        one = next((one for one in left if one.get("pid") == failure.pid), None)
        if one is None:
            continue
        error, unreadable = read_error(one.get("error"))
        # The launcher ends the other ranks with SIGTERM once one has failed. A rank that had
        # written an error by then was ending already.
        ended, raised = failure.signal == signal.SIGTERM, error is not None
        rank = replace(
            launcher,
            rank=int(one["rank"]),
            local_rank=int(one.get("local_rank", 0)),
            exit_code=1 if ended and raised else failure.exit_code,
            signal=None if ended and raised else failure.signal,
            # Keep the launcher's order.
            at=launcher.at + timedelta(milliseconds=len(found)),
            stopped=bool(found) and ended and not raised,
            error=error,
            error_unreadable=unreadable,
            log_tail=_read_log_tail(one),
            pid=failure.pid,
            launcher=False,
        )
        found.append(rank)
    return tuple(found) or (launcher,)


def _find_first_writer(
    left: list[Mapping[str, Any]], exit_code: int | None
) -> tuple[RankFailure, ...]:
    """Return the failure of the rank that wrote an error first.

    For a failed launcher that did not say which rank failed.
    """
    errors = ((read_error(one.get("error"))[0], int(one["pid"])) for one in left)
    wrote = [
        (error.timestamp, pid)
        for error, pid in errors
        if error is not None and error.timestamp is not None
    ]
    return (RankFailure(min(wrote)[1], exit_code, None),) if wrote and exit_code is not None else ()


def read_kernel_lines(raw: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Return the kernel's lines, and why they may be incomplete."""
    lines, unreadable = raw.get("kernel"), raw.get("kernel_unreadable")
    if (
        lines is None
        and unreadable is None
        and not raw.get("stopped")
        and raw.get("exit_code") != 0
    ):
        # The agent is older than the reading of the kernel log: a generation can outlive an upgrade
        # of its controller.
        return (), "the agent of this generation does not read it"
    if not isinstance(lines, list | None):
        return (), f"expected a list of lines, found {type(lines).__name__}"
    found = tuple(printable(str(line), KERNEL_LINE) for line in (lines or ())[-KERNEL_LINES:])
    return found, None if unreadable is None else printable(str(unreadable), KERNEL_LINE)


def read_error(raw: Any) -> tuple[RankError | None, str | None]:
    """Read the content of TORCHELASTIC_ERROR_FILE.

    Return (error, None), (None, why it is unreadable), or (None, None) if there was none. Both
    forms that torch 2.11 writes are accepted
    (torch/distributed/elastic/multiprocessing/errors/error_handler.py).
    """
    if raw is None:
        return None, None
    if not isinstance(raw, dict):
        return None, f"expected an object, found {type(raw).__name__}"
    if "unreadable" in raw:
        return None, printable(str(raw["unreadable"]), MESSAGE_LIMIT)
    message, timestamp, traceback = raw.get("message"), raw.get("timestamp"), ""
    if isinstance(message, dict):
        extra = message.get("extraInfo") or {}
        timestamp, traceback = extra.get("timestamp"), str(extra.get("py_callstack") or "")
        message = message.get("message")
    if not isinstance(message, str):
        return None, "it has no message"
    try:
        seconds = float(timestamp) if timestamp is not None else None
    except (TypeError, ValueError):
        seconds = None
    text = strip_sequences(message[:MESSAGE_LIMIT])
    return RankError(text, strip_sequences(traceback[-TRACEBACK_LIMIT:]), seconds), None
