"""Writes and reads the archive of closed incidents, for `history`.

It has JSON lines, one file for each job. A job's state holds only the newest incidents.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from temporalio import activity

from relaunch.job.state import Incident

_INCIDENT = TypeAdapter(Incident)


@dataclass(frozen=True, slots=True)
class ArchiveIncidentsInput:
    namespace: str
    job: str
    incidents: tuple[Incident, ...]


class RecordActivities:
    def __init__(self, archive: Path) -> None:
        self._archive = archive

    @activity.defn
    async def archive_incidents(self, input: ArchiveIncidentsInput) -> int:
        """Append incidents that are not in the archive yet; return how many it holds for this job.

        Idempotent.
        """
        return await asyncio.to_thread(self._append, input)

    def _append(self, input: ArchiveIncidentsInput) -> int:
        path = archive_file(self._archive, input.namespace, input.job)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            content = file.read()
            if content and not content.endswith(b"\n"):
                # A writer died in the middle of a line; this same call writes the line again.
                content = content[: content.rfind(b"\n") + 1]
                file.truncate(len(content))
            known = set(content.splitlines())
            new = [
                line
                for line in (_INCIDENT.dump_json(incident) for incident in input.incidents)
                if line not in known
            ]
            file.write(b"".join(line + b"\n" for line in new))
            file.flush()
            os.fsync(file.fileno())
            return len(known) + len(new)


def archive_file(archive: Path, namespace: str, job: str) -> Path:
    return archive / namespace / f"{job}.jsonl"


def read_archive(archive: Path, namespace: str, job: str) -> list[Incident]:
    """Return the archived incidents, oldest first.

    A last line that is still being written is left out.
    """
    path = archive_file(archive, namespace, job)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_INCIDENT.validate_json(line) for line in lines if line]
