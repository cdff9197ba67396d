"""The file of a release: what it has, where it is, and that it is written once."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowHistory

RELEASES = Path(__file__).parent
SUFFIX = ".json.xz"
FINAL = re.compile(r"\d+\.\d+\.\d+")
"""A version that is released; those with `.dev` and the like are not."""


class AlreadyRecorded(Exception):
    """The release has its file."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A payload that stands in no history: a query's answer, or of an activity without workflow."""

    kind: str
    """As `payloads` names it: "answer of query state of TrainingJob"."""
    scenario: str
    value: Any


@dataclass(frozen=True, slots=True)
class Recording:
    release: str
    made_with: Mapping[str, str]
    """The commit, the SDK, the server, and Python."""
    histories: Mapping[str, Mapping[str, Any]]
    """As Temporal writes them as JSON, by scenario, workflow id and number of the run."""
    answers: tuple[Answer, ...]
    files: Mapping[str, str]
    """Text of each file, by its path below the folder of a node or of the controller."""
    boot_id: str
    """Of the machine that wrote the files: a node believes pids of the same boot only."""
    readings: Mapping[str, Any]
    """What the release itself read in these files, by the name of the reading."""

    def list_histories(self) -> list[tuple[str, WorkflowHistory]]:
        found = []
        for name, history in self.histories.items():
            id_ = name.partition(" ")[2].rpartition(" ")[0]
            found.append((name, WorkflowHistory.from_json(id_, dict(history))))
        return found


def path_of(release: str, folder: Path = RELEASES) -> Path:
    return folder / f"{release}{SUFFIX}"


def list_releases(folder: Path = RELEASES) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def refuse_second(release: str, folder: Path = RELEASES) -> None:
    """Refuse to record a release that has a file.

    Raises:
        AlreadyRecorded: It has.
    """
    if (path := path_of(release, folder)).exists():
        raise AlreadyRecorded(
            f"{path} has what release {release} wrote and is never recorded again: change the"
            " version in pyproject.toml, or delete a file that was never released"
        )


def save(recording: Recording, folder: Path = RELEASES) -> Path:
    """Write the file of a release.

    Raises:
        AlreadyRecorded: It has one.
    """
    refuse_second(recording.release, folder)
    path = path_of(recording.release, folder)
    text = json.dumps(asdict(recording), separators=(",", ":"), sort_keys=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(lzma.compress(text.encode()))
    partial.replace(path)
    return path


def load(path: Path) -> Recording:
    found = json.loads(lzma.decompress(path.read_bytes()))
    answers = tuple(Answer(**each) for each in found.pop("answers"))
    return Recording(**found, answers=answers)
