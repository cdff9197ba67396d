"""The files that relaunch keeps outside Temporal, and how the code of today reads them.

Below `node` is a node's state folder, as its agent keeps it; below `controller` what `up`, workers
and the command line keep, and what people write for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from relaunch.activities.observations import read_observations
from relaunch.activities.records import read_archive
from relaunch.agent.node import hold, kernel_log, links, reboots, resets
from relaunch.agent.protocol import Fields
from relaunch.agent.ranks import journal, log_times
from relaunch.agent.ranks.progress import parse_file
from relaunch.agent.reports import list_jobs
from relaunch.agent.state import Generation, JobState, read_boot_id, read_json
from relaunch.backends.answers import _parse_observation, parse_list
from relaunch.cli.database import NOTE_FILE, read_writer
from relaunch.cli.event_file import read_events
from relaunch.cli.files import read_fleet, read_job, read_policy
from relaunch.config import DEFAULT_FILE, read_settings
from relaunch.spec.environment import parse_environment
from relaunch.spec.policy import resolve
from relaunch.temporal import UP_FILE, UpProcess

NODE, CONTROLLER = "node", "controller"
NAMESPACE = "default"
SOME_TIME = datetime(2026, 1, 1, tzinfo=UTC)
RESERVED = ("ballast", ".*.spare", ".*.spare2")
"""Files that only keep space."""
MAX_FILE_BYTES = 256 * 1024
Reading = tuple[str, Callable[[], Any]]


def collect(folder: Path, below: str) -> dict[str, str]:
    """Return the text of all files that are text and hold something."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if any(path.match(pattern) for pattern in RESERVED):
            continue
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES:
            try:
                found[f"{below}/{path.relative_to(folder)}"] = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
    return found


def lay_out(files: Mapping[str, str], boot_id: str, folder: Path) -> None:
    """Write the files as they were, as if this machine had not been started since."""
    now = read_boot_id(folder)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text.replace(boot_id, now))


def read_all(folder: Path) -> dict[str, Any]:
    return {name: read() for name, read in list_readings(folder)}


def list_readings(folder: Path) -> Iterator[Reading]:
    """Yield every reading of the files below a folder, as a name and what returns plain values."""
    for name, read in (*_list_node(folder / NODE), *_list_controller(folder / CONTROLLER)):

        def read_plain(read: Callable[[], Any] = read) -> Any:
            # The boot is not that of the release.
            text = json.dumps(to_jsonable_python(read(), fallback=str))
            return json.loads(text.replace(read_boot_id(folder), "BOOT"))

        yield name, read_plain


def _list_node(state: Path) -> Iterator[Reading]:
    def name_reading(what: str, read: Callable[[], Any]) -> Reading:
        return f"{NODE}/{what}", read

    for entry in sorted((state / "jobs").glob("*")):
        at = f"jobs/{entry.name}"

        def find_job(entry: Path = entry) -> JobState:
            return JobState.from_row(state, read_json(entry / "highest.json") or {})

        yield name_reading(f"{at}/highest.json", lambda find=find_job: find().names)
        yield name_reading(
            f"{at}/highest.json: tokens", lambda find=find_job: find().read_highest()
        )
        yield name_reading(f"{at}: its records", lambda find=find_job: find().is_recorded())
        for folder in sorted(each for each in entry.glob("*-*") if each.is_dir()):
            submission, _, number = folder.name.partition("-")
            order = int(submission), int(number)

            def find(find_job: Callable[[], JobState] = find_job, order: Any = order) -> Generation:
                return find_job().generation(order)

            here = f"{at}/{folder.name}"
            for what, read in _list_generation(find):
                yield name_reading(f"{here}/{what}", read)
    yield name_reading("jobs: as the controller takes them", lambda: _read_list(state))
    for file, read in (
        (reboots.JOURNAL_FILE, lambda: reboots.list_newest(state)),
        (reboots.CURRENT_FILE, lambda: reboots.read_current(state)),
        (reboots.LOG_POSITION_FILE, lambda: _read_log_position(state)),
        (resets.JOURNAL_FILE, lambda: resets.list_resets(state)),
        (links.RECORD_FILE, lambda: links._load_record(state, _read_seen(state))),
        (hold.LAST_FLEET_FILE, lambda: hold._read_last_fleet(state)),
    ):
        if (state / file).exists():
            yield name_reading(file, read)


def _list_generation(find: Callable[[], Generation]) -> Iterator[Reading]:
    yield "order.json", lambda: find().prepared_order
    yield "started.json", lambda: find().launch
    yield "started.json: pids", lambda: {str(rank): pid for rank, pid in find().pids.items()}
    yield "started.json: cgroup", lambda: find().cgroup
    yield "launched", lambda: {str(rank): pid for rank, pid in find().launched_ranks.items()}
    yield "shim.json", lambda: find().identity("shim")
    yield "supervisor.json", lambda: find().identity("supervisor")
    yield "guard.json", lambda: find().identity("guard")
    yield "journal.jsonl", lambda: journal.read(find().journal)
    yield "journal.jsonl: as the controller takes it", lambda: _read_observations(find())
    yield "kernel.json", lambda: _read_kernel(find())
    yield "progress", lambda: _read_progress(find())
    yield "log_times", lambda: _read_log_times(find())


def _read_kernel(generation: Generation) -> Any:
    stored = (generation.path / "kernel.json").exists()
    return kernel_log.read_generation(generation, None) if stored else None


def _read_list(state: Path) -> Any:
    return parse_list("n1", list_jobs(state, Fields({})))["jobs"]


def _read_observations(generation: Generation) -> Any:
    lines = [_parse_observation("n1", line, False) for line in journal.read(generation.journal)]
    return [each for line in lines for each in read_observations("n1", line, SOME_TIME)]


def _read_progress(generation: Generation) -> Any:
    """Read what ranks wrote last; as by a supervisor, without a file that was just truncated."""
    texts = {
        path.name: path.read_text()
        for path in sorted((generation.path / "progress").glob("rank_*"))
    }
    return {name: parse_file(text) for name, text in texts.items() if text}


def _read_log_times(generation: Generation) -> Any:
    marks = sorted(generation.log_times.glob("*"))
    logs = [generation.path / "logs" / path.name for path in marks]
    return {log.name: log_times.find_offset(generation, log, 1.0) for log in logs}


def _read_log_position(state: Path) -> Any:
    path = (read_json(state / reboots.LOG_POSITION_FILE) or {}).get("path", "")
    found = reboots.choose_log_position(state, path, 1e9)
    return [found.path, found.inode, found.size]


def _read_seen(state: Path) -> float:
    """Return when the ports were last seen: later they do not count any more."""
    rows = (read_json(state / links.RECORD_FILE) or {})["ports"].values()
    return float(max(row["seen"] for row in rows))


def _list_controller(folder: Path) -> Iterator[Reading]:
    def name_reading(path: Path, read: Callable[[], Any]) -> Reading:
        return f"{CONTROLLER}/{path.relative_to(folder)}", read

    for path in sorted((folder / "archive" / NAMESPACE).glob("*.jsonl")):
        yield name_reading(
            path, lambda path=path: read_archive(folder / "archive", NAMESPACE, path.stem)
        )
    for path in sorted((folder / "env").rglob("*")):
        if path.is_file():
            yield name_reading(path, lambda path=path: parse_environment(path.read_bytes()))
    for path in sorted((folder / "fleets").glob("*.yaml")):
        yield name_reading(path, lambda path=path: read_fleet(path))
    for path in sorted((folder / "jobs").glob("*.yaml")):
        yield name_reading(path, lambda path=path: read_job(path, {}))
    for path in sorted((folder / "policies").glob("*.yaml")):
        yield name_reading(path, lambda path=path: read_policy(path.name, path.parent))
    for path in sorted((folder / "events").glob("*.jsonl")):
        yield name_reading(path, lambda path=path: read_events(path, resolve({})))
    for file, read in (
        (UP_FILE, lambda: UpProcess(**json.loads((folder / UP_FILE).read_text()))),
        (NOTE_FILE, lambda: read_writer(folder)),
        (DEFAULT_FILE, lambda: _read_settings(folder / DEFAULT_FILE)),
    ):
        if (folder / file).exists():
            yield name_reading(folder / file, read)


def _read_settings(path: Path) -> Any:
    kept = {name: value for name, value in os.environ.items() if name.startswith("RELAUNCH_")}
    try:
        for name in kept:
            del os.environ[name]
        os.environ["RELAUNCH_SETTINGS"] = str(path)
        return read_settings()
    finally:
        del os.environ["RELAUNCH_SETTINGS"]
        os.environ.update(kept)
