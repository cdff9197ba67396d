"""The recorder: what it records is whole, is read, and is never recorded again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.releases.check import find_breaks
from tests.releases.record import ROOT, list_missing, record
from tests.releases.recording import AlreadyRecorded, load, path_of, save

pytestmark = pytest.mark.filterwarnings("ignore:Cannot find activity to cancel")
SOME = ("archive", "queue", "retry")
MAX_BYTES = 4 * 1024 * 1024


@pytest.mark.long  # it plays scenarios; make test reads what released versions recorded
async def test_a_release_is_recorded_once_and_read_whole(tmp_path: Path) -> None:
    recording = await record("9.8.7", SOME)
    path = save(recording, tmp_path)
    assert path == path_of("9.8.7", tmp_path)
    assert await find_breaks(load(path)) == []
    told = {name.split()[0] for name in recording.histories}
    assert told == {"archived", "queued", "retried", "real"}
    for file in ("highest.json", "journal.jsonl", "order.json", "rank_0.json", "reboots.jsonl"):
        assert any(name.endswith(f"/{file}") for name in recording.files), (
            file,
            sorted(recording.files),
        )
    assert any(name.startswith("controller/archive/") for name in recording.files)
    with pytest.raises(AlreadyRecorded, match=r"9\.8\.7.* is never recorded again"):
        save(recording, tmp_path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.long  # every scenario: a minute of two cores
async def test_a_recording_has_all_kinds_of_payloads(tmp_path: Path) -> None:
    recording = await record("9.8.7")
    assert list_missing(recording) == []
    path = save(recording, tmp_path)
    assert path.stat().st_size < MAX_BYTES
    assert await find_breaks(load(path)) == []


@pytest.mark.long
def test_a_version_that_is_not_released_is_not_recorded() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.releases", "0.1.0.dev0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done
    assert "0.1.0.dev0" in lines[0] and "pyproject.toml" in lines[0]
