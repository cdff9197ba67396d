"""Reads a file of events, one JSON object per line, for `policy replay --events`.

The format is docs/reference/events.md. Missing values get defaults; an invalid value raises
`ConfigError` with a sentence that names file and line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from relaunch.config import ConfigError
from relaunch.evidence.observations import Observation, RankExited, RanksVanished
from relaunch.fields import parse_duration
from relaunch.job import events
from relaunch.job.replay import CURRENT, Step
from relaunch.job.state import JobState, Slot
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
"""Start of a file whose times are all relative to its start."""
MAX_BYTES = 16 << 20
MAX_TIME = timedelta(days=3650)
"""Upper limit of a time: no job runs for ten years, and the calendar ends after year 9999."""
UNNAMED = {"name": "job", "command": ["train"]}
WITHOUT_JOB = {**UNNAMED, "nodes": 2, "nproc_per_node": 8}

DEFAULT_REASONS = {
    "RanksHung": "no training progress",
    "NodeUnreachable": "no answer",
    "RepairEnded": "as written",
}

Line = dict[str, Any]


def _union_members(union: Any) -> dict[str, type]:
    return {one.__name__: one for one in typing.get_args(typing.get_args(union)[0])}


OBSERVATIONS = _union_members(Observation)
# Policy changes are left out: the policy to try is given on the command line.
EVENTS = {
    kind: one
    for kind, one in _union_members(events.Event).items()
    if one
    not in (
        events.PolicyChanged,
        events.IncidentsArchived,
        events.StopUnproven,
        events.SubmitterChecked,
    )
}
_ANY_EVENT: TypeAdapter[events.Event] = TypeAdapter(events.Event)


@dataclass(frozen=True)
class EventFile:
    spec: JobSpec
    start: datetime
    steps: tuple[Step, ...]
    absolute: bool
    """True if some line has a time of day: then times are shown as such, not as durations from the
    start."""

    def job(self, policy: Policy) -> JobState:
        return JobState("default", self.spec.name, 1, self.spec, policy, "", self.start)


def read_events(path: Path, policy: Policy) -> EventFile:
    """Read a file of events.

    `policy` gives the time that a node was silent where a line does not.

    Raises:
        ConfigError: A line cannot be used.
    """
    lines = list(_lines(path))
    if not lines:
        raise ConfigError(
            f'{path}:1: the file is empty: expected one event per line, such as {{"at": "5m", '
            f'"kind": "RankExited", …}}'
        )
    spec = JobSpec.model_validate(WITHOUT_JOB)
    if "job" in lines[0][1]:
        spec = _job(*lines[0])
        lines = lines[1:]
    times = [_time(where, line) for where, line in lines]
    first = next((time for time in times if isinstance(time, datetime)), None)
    start = first or BEGINNING
    steps: list[Step] = []
    before = ""
    for (where, line), time in zip(lines, times, strict=True):
        at = start + time if isinstance(time, timedelta) else time
        if steps and at < steps[-1].at:
            raise ConfigError(
                f"{where}: at: {line['at']} is before {before} on the line above: sort the lines "
                "by time"
            )
        before = line["at"]
        steps.append(Step(at, _event(where, line, at, spec, policy)))
    return EventFile(spec, start, tuple(steps), first is not None)


def _lines(path: Path) -> Iterator[tuple[str, Line]]:
    try:
        with path.open("rb") as file:
            raw_text = file.read(MAX_BYTES + 1)
        text = raw_text.decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file: expected one JSON object per line") from None
    if len(raw_text) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES >> 20} MiB: expected a small file")
    for number, raw in enumerate(text.splitlines(), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{number}"
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        except RecursionError:
            raise ConfigError(f"{where}: not an event: its JSON is nested too deeply") from None
        if not isinstance(line, dict):
            raise ConfigError(
                f"{where}: {raw.strip()[:60]!r} is not a JSON object: expected one such as "
                f'{{"at": "5m", "kind": …}}'
            )
        yield where, line


def _job(where: str, line: Line) -> JobSpec:
    if len(line) > 1 or not isinstance(line["job"], dict):
        raise ConfigError(
            f"{where}: job: expected an object with keys of a job file, and no other key on the "
            "line"
        )
    try:
        return JobSpec.model_validate({**UNNAMED, **line["job"]})
    except ValidationError as error:
        raise ConfigError(f"{where}: job.{_explain(error)}") from None


def _time(where: str, line: Line) -> datetime | timedelta:
    written = line.get("at")
    expected = (
        "expected a duration from the start such as 5m, or a time such as 2026-01-01T12:00:00Z"
    )
    if "job" in line:
        raise ConfigError(f"{where}: job: only the first line describes the job")
    if written is None:
        raise ConfigError(f"{where}: at: missing, {expected}")
    if isinstance(written, str) and re.match(r"\d{4}-", written):
        try:
            at = datetime.fromisoformat(written)
        except ValueError:
            raise ConfigError(f"{where}: at: {written!r} is not a time: {expected}") from None
        if not 1970 <= at.year <= 2200:
            raise ConfigError(
                f"{where}: at: {written!r} is not between the years 1970 and 2200: {expected}"
            )
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    try:
        after = parse_duration(written)
    except ValueError as error:
        raise ConfigError(f"{where}: at: {error}") from None
    except OverflowError:
        after = None
    if not isinstance(after, timedelta) or after > MAX_TIME:
        raise ConfigError(f"{where}: at: {written!r} is not a time: {expected}")
    return after


def _event(where: str, line: Line, at: datetime, spec: JobSpec, policy: Policy) -> events.Event:
    kind = line.get("kind")
    if not isinstance(kind, str | None):
        raise ConfigError(f"{where}: kind: {kind!r} is not a string")
    written = {key: value for key, value in line.items() if key not in ("at", "kind")}
    if kind in OBSERVATIONS:
        observation = _observation(where, {"kind": kind, **written}, at, spec)
        return _make_event(
            where, {"kind": "FaultObserved", "observations": [observation]}, at, policy
        )
    if kind not in EVENTS:
        known = (*EVENTS, *OBSERVATIONS)
        near = difflib.get_close_matches(str(kind), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
        raise ConfigError(
            f"{where}: kind: missing, {hint}"
            if kind is None
            else f"{where}: kind: {kind!r} is unknown, {hint}"
        )
    if kind in ("ProgressSeen", "StepReached"):
        kind = "ProgressSeen"  # whether the job waited for that step follows from it
    if kind == "FaultObserved" and isinstance(written.get("observations"), list):
        written["observations"] = [
            _observation(where, each, at, spec) for each in written["observations"]
        ]
    if kind == "NodesAcquired" and isinstance(names := written.pop("nodes", None), list):
        written["slots"] = [
            dataclasses.asdict(Slot(str(name), str(name), started=1)) for name in names
        ]
    if kind == "NodesExamined" and isinstance(found := written.get("examined"), dict):
        written["examined"] = [
            {"node": node, "verdict": verdict, "reason": "as written"}
            for node, verdict in found.items()
        ]
    return _make_event(where, {"kind": kind, **written}, at, policy)


def _observation(where: str, written: Any, at: datetime, spec: JobSpec) -> Line:
    if not isinstance(written, dict) or str(written.get("kind")) not in OBSERVATIONS:
        raise ConfigError(
            f"{where}: observations: expected objects whose kind is one of "
            f"{', '.join(OBSERVATIONS)}"
        )
    kind = OBSERVATIONS[written["kind"]]
    if isinstance(written.get("error"), str):
        written = {**written, "error": {"message": written["error"]}}
    if kind is RankExited and "exit_code" not in written and "signal" not in written:
        raise ConfigError(f"{where}: exit_code: missing, expected exit_code or signal")
    rank = written.get("rank")
    defaults = {
        "at": at,
        "local_rank": rank % spec.ranks_per_node if isinstance(rank, int) else 0,
        "exit_code": None,
        "signal": None,
        "why": "isolated",
        "reason": "the ranks are gone; how they ended is unknown"
        if kind is RanksVanished
        else "no node could be probed",
    }
    fields = {field.name: field for field in dataclasses.fields(kind)}
    _refuse_unknown(where, written, list(fields))
    values = {**{key: value for key, value in defaults.items() if key in fields}, **written}
    _refuse_missing(where, values, fields)
    return values


def _make_event(where: str, written: Line, at: datetime, policy: Policy) -> events.Event:
    kind = EVENTS[written["kind"]]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    defaults: Mapping[str, Any] = {
        "generation": CURRENT,
        "at": at,
        "opened_at": at,
        "stopped_at": at,
        "started_at": at,
        "more": 0,
        "by": "",
        "reason": "" if "by" in fields else DEFAULT_REASONS.get(written["kind"], "no reason given"),
        "ranks": [],
        "unreachable": [],
        "started": False,
        "may_start_within": timedelta(0),
        "unheard_for": policy.timeouts.lost_after,
        "outcome": "done",
        "strategy": "REBOOT_NODE",  # of RepairEnded: replay fills in the actual one
    }
    if kind is events.RepairEnded:
        defaults = {**defaults, "nodes": []}
    known = [key for key in fields if key != "kind"]
    _refuse_unknown(where, written, [*known, "kind"])
    values = {**{key: value for key, value in defaults.items() if key in fields}, **written}
    for key in ("unheard_for", "may_start_within"):
        values = _duration(where, values, key)
    if isinstance(values.get("silent"), dict):
        values["silent"] = [
            (node, _duration(where, {"silent": span}, "silent")["silent"])
            for node, span in values["silent"].items()
        ]
    _refuse_missing(where, values, fields)
    try:
        return _ANY_EVENT.validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error, written['kind'])}") from None


def _duration(where: str, values: Line, key: str) -> Line:
    if not isinstance(values.get(key), str):
        return values
    try:
        return {**values, key: parse_duration(values[key])}
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {key}: {error}") from None


def _refuse_missing(where: str, values: Line, fields: Mapping[str, dataclasses.Field[Any]]) -> None:
    for key, field in fields.items():
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if key not in values and not has_default:
            raise ConfigError(f"{where}: {key}: missing in {values['kind']}")


def _refuse_unknown(where: str, written: Line, known: list[str]) -> None:
    for key in written:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"{written['kind']} has {', '.join(one for one in known if one != 'kind')}"
            )
            raise ConfigError(f"{where}: {key}: unknown key, {hint}")


def _explain(error: ValidationError, kind: str = "") -> str:
    first = error.errors()[0]
    # pydantic adds the union member it tried to the location; that name is not in the file.
    parts = [str(part) for part in first["loc"] if part not in (kind, *OBSERVATIONS)]
    path = ".".join(parts[2:] if parts[:1] == ["observations"] and len(parts) > 2 else parts)
    what = first["msg"].removeprefix("Value error, ")
    got = (
        ""
        if first["type"] in ("value_error", "missing", "extra_forbidden")
        else f" (got {first['input']!r})"
    )
    return f"{path}: {what}{got}"
