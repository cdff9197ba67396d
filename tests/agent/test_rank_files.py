"""Files that a rank has replaced: none keeps the supervisor waiting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relaunch.agent.ranks.evidence import read_error, read_tail
from relaunch.agent.ranks.progress import RankProgress
from relaunch.agent.ranks.rank_files import open_plain
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.state import Generation


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe into which no process writes."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_pipe_in_the_place_of_a_file_is_unreadable(pipe: Path) -> None:
    assert read_error(pipe, Redactor()) == {"unreadable": "it is no regular file"}
    assert read_tail(pipe, Redactor()) == []


def test_a_pipe_in_the_place_of_a_progress_file_is_unreadable(tmp_path: Path) -> None:
    generation = Generation(tmp_path, tmp_path, (1, 1))
    path = generation.progress_path(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    progress = RankProgress(generation, 0, None)
    assert progress.read_file() and progress.unreadable == "it is no regular file"


@pytest.mark.parametrize("name", ["/dev/zero", "/", "/proc/self/fd/0"])
def test_devices_and_folders_are_not_read(name: str) -> None:
    with pytest.raises(OSError, match=r"it is no regular file|No such"):
        open_plain(Path(name))


def test_a_folder_that_is_not_read_stays_open_nowhere(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="it is no regular file"):
        open_plain(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"5")
    with open_plain(tmp_path / "file") as file:
        assert file.read() == b"5"
