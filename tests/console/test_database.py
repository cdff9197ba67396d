"""A database that another version of Temporal's server wrote is refused, and stays as it is.

The programs of other versions are scripts that name another version and start the real server.
"""

from __future__ import annotations

import functools
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from relaunch.cli.database import (
    DATABASE,
    NOTE_FILE,
    Writer,
    check_database,
    read_program,
    read_schema,
)
from relaunch.cli.service import choose_port, find_server
from relaunch.config import ConfigError
from relaunch.temporal import find_running_up
from tests.console.commands import STARTER, bare_environment

DEADLINE = 120.0
UP = [sys.executable, STARTER, "up", "--workers", "0", "--port", "0", "--ui-port", "0"]


@functools.cache
def ours() -> Writer:
    """The versions of the server that tests start."""
    return read_program(find_server())


def make_program(folder: Path, server: str) -> Path:
    """Return a program that says it is another version of the server."""
    path = folder / f"temporal-{server}"
    path.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && exec echo "temporal version 9.9 (Server {server}, UI 1)"
exec {find_server()} "$@"
"""
    )
    path.chmod(0o755)
    return path


def run_up(folder: Path, program: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run an `up` that is expected to refuse."""
    chosen = {"RELAUNCH_TEMPORAL_BIN": str(program)} if program else {}
    return subprocess.run(
        UP, cwd=folder, env=bare_environment(chosen), capture_output=True, text=True
    )


@contextmanager
def keep_up(folder: Path) -> Iterator[None]:
    """Run an `up` that works, until it has noted which server wrote its database."""
    process = subprocess.Popen(UP, cwd=folder, env=bare_environment({}), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + DEADLINE
        state = folder / ".relaunch"
        while find_running_up(state) is None or not (state / NOTE_FILE).exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(DEADLINE)


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done
    assert all(word in lines[0] for word in (*words, "RELAUNCH_TEMPORAL_BIN", "--state")), lines


def change_tables(database: Path) -> None:
    """Make the file that of a server with other tables."""
    with closing(sqlite3.connect(database)) as file:
        file.execute("alter table executions add column other integer")
        file.commit()


@pytest.mark.long
def test_a_database_is_opened_by_its_own_server_or_refused(tmp_path: Path) -> None:
    with keep_up(tmp_path):
        pass
    state = tmp_path / ".relaunch"
    database, note = state / DATABASE, state / NOTE_FILE
    noted = json.loads(note.read_text())
    assert (noted["server"], noted["program"]) == (ours().server, ours().program)
    with keep_up(tmp_path):
        pass

    older = make_program(tmp_path, "1.2.3")
    written = database.read_bytes()
    done = run_up(tmp_path, older)
    assert_refused(
        done, str(database.name), ours().server, "1.2.3", f"temporal-bin {ours().program}"
    )

    change_tables(database)
    written = database.read_bytes()
    note.write_text(json.dumps({**noted, "server": "1.2.3", "program": "0.1", "file": [1, 1]}))
    assert_refused(run_up(tmp_path), "1.2.3", ours().server, "temporal-bin 0.1", "tables")
    note.unlink()
    assert_refused(run_up(tmp_path), "unknown version", ours().server, "tables")
    assert database.read_bytes() == written
    assert not note.exists()


def kill_while_creating(database: Path) -> None:
    """Kill a server after it has created some of its tables."""
    port = str(choose_port("--port", 0))
    command = [str(find_server()), "server", "start-dev", "--headless", "--port", port]
    deadline = time.monotonic() + DEADLINE
    while True:
        server = subprocess.Popen(
            [*command, "--db-filename", str(database)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (database.exists() and database.stat().st_size):
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.001)
        finally:
            server.kill()
            server.wait()
        if "cluster_metadata_info" not in {name for _, name, _ in read_schema(database)}:
            return
        database.unlink()  # it was faster


@pytest.mark.long
def test_a_server_killed_while_it_creates_tables_starts_again(tmp_path: Path) -> None:
    state = tmp_path / ".relaunch"
    state.mkdir(mode=0o700)
    kill_while_creating(state / DATABASE)
    with keep_up(tmp_path):
        pass
    (state / NOTE_FILE).unlink()
    # One that was in use is kept, also if it has fewer tables: an older server wrote it.
    with closing(sqlite3.connect(state / DATABASE)) as file:
        file.execute("drop table nexus_endpoints")
        file.commit()
    with pytest.raises(ConfigError, match="unknown version"):
        check_database(state, find_server())
    # The note of a database that a person has moved away says nothing about the next one.
    (state / NOTE_FILE).write_text("{}")
    (state / DATABASE).rename(tmp_path / "moved.db")
    check_database(state, find_server())
    assert not (state / NOTE_FILE).exists()


@pytest.mark.long
def test_a_server_with_the_same_tables_opens_an_older_file(tmp_path: Path) -> None:
    newer = make_program(tmp_path, "1000.0.0")
    with keep_up(tmp_path):
        pass
    state = tmp_path / ".relaunch"
    note = state / NOTE_FILE
    older = json.dumps({"server": "1.2.3", "program": "0.1", "file": [1, 1]})
    for written in (older, "torn"):
        note.write_text(written)
        check_database(state, newer)
        assert json.loads(note.read_text())["server"] == "1000.0.0"
    with pytest.raises(ConfigError, match=r"1000\.0\.0"):
        check_database(state, find_server())


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_text("a picture, by mistake " * 100)
    with pytest.raises(ConfigError, match=r"temporal\.db cannot be read"):
        check_database(tmp_path, find_server())


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("program", ["/none", "/bin/echo"])
def test_a_program_that_is_not_temporals_is_one_sentence(tmp_path: Path, program: str) -> None:
    (tmp_path / ".relaunch").mkdir(mode=0o700)
    (tmp_path / ".relaunch" / DATABASE).touch()
    done = run_up(tmp_path, Path(program))
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, len(lines)) == (2, 1), done
    assert program in lines[0] and "expected" in lines[0], lines


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_tables_are_read_after_a_kill_during_a_write(tmp_path: Path, journal: str) -> None:
    live, killed = tmp_path / "live.db", tmp_path / "killed.db"
    with closing(sqlite3.connect(live, isolation_level=None)) as writer:
        writer.execute(f"pragma journal_mode={journal}")
        writer.execute("pragma cache_size=1")  # pages go to the file before the commit
        writer.execute("create table kept (a)")
        writer.execute("begin")
        writer.execute("create table undone (a)")
        writer.executemany("insert into kept values (?)", [("x" * 5000,) for _ in range(50)])
        for suffix in ("", "-journal", "-wal"):  # what a kill at this moment leaves
            with suppress(FileNotFoundError):
                shutil.copy(f"{live}{suffix}", f"{killed}{suffix}")
    assert {name for _, name, _ in read_schema(killed)} == {"kept"}
