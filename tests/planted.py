"""A secret that the jobs of end-to-end tests carry, and where it must not be found.

It is random for each process of tests, and every job of a `tests.chaos.world.World` has it twice:
as a secret and in an environment file. Both may be in the environment of ranks, and nowhere else.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import sqlite3
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TOKEN = f"planted-{secrets.token_hex(12)}"
"""What both values contain."""
NAME, FILED_NAME = "PLANTED_SECRET", "PLANTED_IN_FILE"
FOLDER = "planted"
"""Where the files are that may have it."""
ENVIRONMENTS = "env"
"""The folder of a service for what `run` was typed with (docs/security.md)."""
ALLOWED_IN = (b"RELAUNCH_TOKEN=", b"RELAUNCH_WARM_FD=", b"AWS_DOUBLE_CONTAINER=")
"""Variables of processes whose environment has secrets: ranks, a Python that imports ahead, and all
of a container, where ECS puts them."""
COMPRESSED = b"json/zlib"
"""Marks payloads of over 256 KiB in the server's database (relaunch.converter)."""

folders: set[Path] = set()
"""Of the worlds that are open."""
_seen: dict[Path, tuple[int, int, int]] = {}
"""Which version of a file was searched: what has not changed since is not read again."""


class Leak(AssertionError):
    """A secret is where it must not be."""


def _list_forms(text: str) -> list[bytes]:
    """Return how a text may stand in a file: as it is, in UTF-16, in base64 at any offset."""
    raw = text.encode()
    coded = [base64.b64encode(b"\0" * n + raw)[(n * 4 + 2) // 3 + 1 :][:-4] for n in range(3)]
    return [raw, text.encode("utf-16-le"), *coded]


_FORMS = _list_forms(TOKEN)


def plant(folder: Path) -> dict[str, Any]:
    """Write the files of the secret below a folder; return the fields of a job that name them."""
    (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
    secret, variables = folder / FOLDER / "secret", folder / FOLDER / "variables"
    for path, text in ((secret, f"{TOKEN}-a\n"), (variables, f"{FILED_NAME}={TOKEN}-b\n")):
        path.touch(mode=0o600)
        path.write_text(text)
    return {"secrets": {NAME: {"file": str(secret)}}, "env_file": str(variables)}


def add_to(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a job with the secret, beside those that it has."""
    planted = plant(folder)
    return {**planted, **spec, "secrets": {**planted["secrets"], **spec.get("secrets", {})}}


def is_in(data: bytes) -> bool:
    return any(form in data for form in _FORMS)


def check(where: str, data: bytes | str) -> None:
    """Check what people or programs were given.

    Raises:
        Leak: The secret is in it.
    """
    if is_in(data.encode(errors="replace") if isinstance(data, str) else data):
        raise Leak(f"{where} has the secret of a job")


def _walk(folder: Path) -> Iterator[Path]:
    for path, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in (FOLDER, ENVIRONMENTS)]
        yield from (Path(path, name) for name in files)


def list_files(places: Iterable[Path]) -> list[str]:
    """Return the files below these folders that have the secret."""
    found = []
    for path in (path for place in places for path in _walk(place)):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            known = path.lstat()
            version = known.st_ino, known.st_size, known.st_mtime_ns
            if not stat.S_ISREG(known.st_mode) or _seen.get(path) == version:
                continue
            if is_in(path.read_bytes()):
                found.append(str(path))
            else:
                _seen[path] = version
            if path.name == "temporal.db" and _is_in_compressed(path):
                found.append(f"a compressed payload in {path}")
    return found


def _is_in_compressed(database: Path) -> bool:
    """Search the payloads of a database that are not there as they are."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "SELECT data FROM history_node WHERE instr(data, ?)", [COMPRESSED]
        ).fetchall()
    for (blob,) in rows:
        for part in blob.split(COMPRESSED)[1:]:
            with contextlib.suppress(zlib.error):  # it was encrypted afterwards
                if is_in(zlib.decompressobj().decompress(part[part.find(b"\x78") :])):
                    return True
    return False


def list_processes() -> list[str]:
    """Return the processes that have the secret in their command line, or in their environment
    although they are no ranks."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                words = file.read()
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                variables = file.read()
            named = words.replace(b"\0", b" ").decode(errors="replace")
            if is_in(words):
                found.append(f"the command line of {entry.name}: {named}")
            if is_in(variables) and not any(name in variables for name in ALLOWED_IN):
                found.append(f"the environment of {entry.name}: {named}")
    return found


def search(*more: Path) -> None:
    """Search all worlds that are open, other folders, and all processes.

    Raises:
        Leak: The secret was found.
    """
    if found := [*list_files({*folders, *more}), *list_processes()]:
        raise Leak(f"the secret of a job is in: {'; '.join(found)}")
