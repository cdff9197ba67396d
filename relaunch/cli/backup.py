"""Copies what `up` cannot make again: the database, archived incidents, environments of jobs.

Not copied: the states of local nodes, which are only true of the processes that run now.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from relaunch.cli.database import DATABASE, NOTE_FILE
from relaunch.cli.environment import FOLDER
from relaunch.cli.service import PARTITIONS_FILE
from relaunch.config import ConfigError

BACKUP_NOTE = "backup-of"
"""The file with the time of the backup. Where it is found in a state folder, that was restored."""
ARCHIVE = "archive"
"""As the worker names it, which this command must not import: that takes it a second."""


def describe_restored(state: Path) -> str | None:
    """Return why no worker may start on a state folder that was restored; None: it was not.

    A job that was launched on other nodes after the backup would be launched a second time, beside
    ranks of which the restored service knows nothing.
    """
    note = state / BACKUP_NOTE
    try:
        at = note.read_text().strip()
    except OSError:
        return None
    return (
        f"state folder {state} was restored from the backup of {at}, so no worker is started: jobs"
        " that were launched elsewhere since could run twice. Cancel each job that the backup has"
        f" (`relaunch jobs`), remove {note}, and start `up` again; docs/operations.md has the steps"
    )


def back_up(state: Path, folder: Path) -> int:
    """Copy a state folder to a new folder, which is complete or not there; return its bytes.

    The database is copied by SQLite's own online backup, in one transaction: what was acknowledged
    before is in it, and the server waits for nothing.

    Raises:
        ConfigError: There is no database, the folder exists, or it cannot be written.
    """
    import sqlite3

    source = state / DATABASE
    if not source.exists():
        raise ConfigError(
            f"there is no database {source}: give the state folder of `relaunch up` with --state"
        )
    if folder.exists():
        raise ConfigError(f"{folder} exists: expected the name of a new folder")
    partial = folder.with_name(f"{folder.name}.partial.{os.getpid()}")
    try:
        partial.mkdir(mode=0o700, parents=True)
        # Before the copy: what came later may be missing in it.
        (partial / BACKUP_NOTE).write_text(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n")
        with (
            contextlib.closing(
                sqlite3.connect(f"{source.resolve().as_uri()}?mode=rw", uri=True)
            ) as original,
            contextlib.closing(sqlite3.connect(partial / DATABASE)) as copy,
        ):
            original.backup(copy)
            (verdict,) = copy.execute("pragma quick_check").fetchone()
            if verdict != "ok":
                raise ConfigError(f"database {source} is damaged: {verdict}")
        for name in (NOTE_FILE, PARTITIONS_FILE):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(state / name, partial)
        for name in (ARCHIVE, FOLDER):
            with contextlib.suppress(FileNotFoundError):
                shutil.copytree(state / name, partial / name)
        os.sync()
        partial.rename(folder)
    except (OSError, shutil.Error, sqlite3.Error) as error:
        raise ConfigError(f"{state} cannot be copied to {folder}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
