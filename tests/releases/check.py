"""What of a release's recording the code of today cannot continue, decode or read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from temporalio.client import WorkflowHistory

from relaunch.temporal import data_converter
from relaunch.workflows.replay import find_difference
from tests.releases.files import lay_out, list_readings
from tests.releases.payloads import RecordedPayload, find_nested, find_types, list_payloads
from tests.releases.recording import Recording

REMOVED: frozenset[tuple[str, str]] = frozenset()
"""Fields that releases wrote and that mean nothing any more: the kind of payload, and the name. A
field whose content is needed is not removed, but read."""
ADDED_CODES = frozenset({"lockup", "nic-fault", "oops", "panic"})
"""Codes that ladders of presets name since a later release: a file that extends a preset is read
with them (docs/decisions/0090-presets-improve.md)."""
MAX_SENTENCE = 500


async def find_breaks(recording: Recording) -> list[str]:
    """Return one sentence for each thing that no longer works, and what to do about it."""
    found = []
    histories = recording.list_histories()
    for name, history in histories:
        if difference := await find_difference(history, "default", data_converter()):
            found.append(
                f"history {name} is not replayed: guard the changed order of commands by"
                f" workflow.patched ({difference})"
            )
    seen: set[tuple[str, bytes]] = set()
    for payload in list_all(recording, histories):
        if (payload.kind, payload.data) not in seen:
            seen.add((payload.kind, payload.data))
            found += [f"{payload.kind} ({payload.where}) {each}" for each in _decode(payload)]
    found += _read_files(recording)
    return [f"release {recording.release}: {each}"[:MAX_SENTENCE] for each in found]


def list_all(
    recording: Recording, histories: Iterable[tuple[str, WorkflowHistory]]
) -> Iterator[RecordedPayload]:
    """Yield every payload of a recording, of its histories and others."""
    for name, history in histories:
        for payload in list_payloads(name, history):
            yield payload
            if payload.kind == "input of activity tell_fleet":
                yield find_nested(payload)
    for answer in recording.answers:
        yield RecordedPayload(answer.kind, answer.scenario, json.dumps(answer.value).encode())


@cache
def _adapt(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _decode(payload: RecordedPayload) -> Iterator[str]:
    if payload.kind not in find_types():
        yield "is not taken by any workflow or activity: keep it until no job of that release runs"
        return
    adapter = _adapt(find_types()[payload.kind])
    try:
        # Not as the service decodes it, which leaves unknown fields out: what a renamed field
        # held would be lost without a word.
        read = adapter.validate_json(payload.data, extra="forbid")
    except ValidationError as error:
        for each in error.errors():
            where = ".".join(str(part) for part in each["loc"]) or "it"
            if (payload.kind, where.rpartition(".")[2]) not in REMOVED:
                yield (
                    f"is not decoded: {where}: {each['msg']}; a field keeps its name and its type,"
                    " and a new one has a default"
                )
                return
    else:
        if isinstance(read, BaseModel):  # what people write, such as "2h", has more than one form
            return
        written = json.loads(payload.data)
        if difference := compare(written, adapter.dump_python(read, mode="json"), only_both=True):
            yield f"is decoded as something else: {difference}; keep what the values mean"


def compare(recorded: Any, now: Any, where: str = "", *, only_both: bool = False) -> str:
    """Return what of a recorded value is not in the one of today; empty: nothing.

    More fields are fine. With `only_both`, so are fewer: a type may leave out what has its default.
    """
    match recorded, now:
        case dict(), dict():
            for key, value in recorded.items():
                if key in now:
                    place = f"{where}.{key}".lstrip(".")
                    if difference := compare(value, now[key], place, only_both=only_both):
                        return difference
                elif not only_both:
                    return f"{where}.{key} is missing".lstrip(".")
            return ""
        case list(), list() if where.rpartition(".")[2] == "codes":
            now = [code for code in now if code in recorded or code not in ADDED_CODES]
        case list(), list() if len(recorded) == len(now):
            pairs = enumerate(zip(recorded, now, strict=True))
            return next(
                filter(
                    None,
                    (compare(*pair, f"{where}.{n}", only_both=only_both) for n, pair in pairs),
                ),
                "",
            )
    if recorded == now:
        return ""
    return f"{where or 'it'} was {str(recorded)[:80]!r} and is {str(now)[:80]!r}"


def _read_files(recording: Recording) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        lay_out(recording.files, recording.boot_id, Path(folder))
        readers = dict(list_readings(Path(folder)))
        for name, recorded in recording.readings.items():
            if name not in readers:
                yield f"file {name} is read by nothing: keep its reader"
                continue
            try:
                difference = compare(recorded, readers[name]())
            except Exception as error:  # whatever a reader raises
                difference = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if difference:
                yield (
                    f"file {name} is not read as it was: {difference}; read the old form as well,"
                    " for as long as files of that release may exist"
                )
