"""Copies what `up` cannot make again: the database, archived incidents, environments of jobs.

Not copied: the states of local nodes, which are only true of the processes that run now.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from relaunch.cli.database import DATABASE, NOTE_FILE
from relaunch.cli.environment import FOLDER
from relaunch.cli.service import PARTITIONS_FILE
from relaunch.config import ConfigError

ARCHIVE = "archive"
"""As the worker names it, which this command must not import: that takes it a second."""


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
