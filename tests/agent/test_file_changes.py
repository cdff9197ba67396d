"""Whether the kernel tells of new output. Without that, readers of logs look all the time."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from relaunch.agent import file_changes
from relaunch.agent.file_changes import FileChanges


def is_ready(changes: FileChanges) -> bool:
    assert changes.handle is not None
    return bool(select.select([changes.handle], [], [], 0)[0])


def test_new_output_in_any_of_the_folders_is_reported_once(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank_0.log").write_text("step 1\n")
    changes = FileChanges([tmp_path, logs])
    assert not is_ready(changes)
    for path in (logs / "rank_0.log", tmp_path / "journal.jsonl", logs / "rank_1.log"):
        with path.open("a") as file:
            file.write("more\n")
        assert is_ready(changes), path
        changes.clear()
        assert not is_ready(changes)
    changes.close()
    assert changes.handle is None
    changes.clear()


def test_where_the_kernel_tells_nothing_there_is_no_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FileChanges([tmp_path, tmp_path / "missing"]).handle is None

    class NoInotify:
        @staticmethod
        def inotify_init1(flags: int) -> int:
            return -1

    monkeypatch.setattr(file_changes, "_libc", NoInotify)
    assert FileChanges([tmp_path]).handle is None
