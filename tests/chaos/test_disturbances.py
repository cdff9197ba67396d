"""Disturbances do what they say, and an interrupted run of the matrix goes on from there."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import clocks, disks
from tests.chaos.clocks import Clocks
from tests.chaos.disks import Disk
from tests.chaos.run import Tally

READ = (
    "import time; input(); print(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), "
    "time.monotonic())"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if obstacle := disks.find_obstacle():
        pytest.skip(obstacle)
    place = tmp_path / "place"
    place.mkdir()
    try:
        made = Disk(tmp_path / "image", place)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield made
    made.close()


def test_a_full_disk_takes_no_byte_until_it_is_freed(disk: Disk, tmp_path: Path) -> None:
    disk.fill()
    with pytest.raises(OSError, match="No space left") as full:
        (tmp_path / "place" / "more").write_bytes(bytes(4096))
    assert full.value.errno == errno.ENOSPC
    disk.free()
    (tmp_path / "place" / "more").write_bytes(bytes(4096))


def test_a_frozen_disk_keeps_a_write_waiting_until_it_is_thawed(disk: Disk, tmp_path: Path) -> None:
    disk.freeze()
    write = threading.Thread(
        target=(tmp_path / "place" / "more").write_text, args=("x",), daemon=True
    )
    write.start()
    write.join(0.3)
    waited = write.is_alive()
    disk.thaw()
    write.join(30)
    assert waited and (tmp_path / "place" / "more").read_text() == "x"


def test_an_emptied_disk_keeps_only_what_makes_the_machine(disk: Disk, tmp_path: Path) -> None:
    place = tmp_path / "place"
    (place / "jobs" / "1").mkdir(parents=True)
    for name in ("boot_id", "jobs/1/highest.json", "node.lock"):
        (place / name).touch()
    disk.empty()
    assert os.listdir(place) == ["boot_id"]


def test_clocks_are_stepped_for_one_running_process_alone(tmp_path: Path) -> None:
    if obstacle := clocks.find_obstacle():
        pytest.skip(obstacle)
    stepped = Clocks(tmp_path)

    def read(wall: float = 0.0, boot: float = 0.0) -> list[float]:
        """Return how far the clocks of a process are ahead of ours, stepped after its start."""
        words = [sys.executable, "-S", "-c", READ]
        environment = {**os.environ, **stepped.variables}
        with subprocess.Popen(words, env=environment, stdin=-1, stdout=-1, text=True) as process:
            stepped.step_wall(wall)
            stepped.step_boot(boot)
            said, _ = process.communicate("go\n")
        now = (time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic())
        return [float(theirs) - ours for theirs, ours in zip(said.split(), now, strict=True)]

    # A process may be late, by a minute at most: what it read is then behind.
    for steps, ahead in (((0.0, 0.0), (0, 0, 0)), ((7200.0, -3600.0), (7200, -3600, 0))):
        assert [
            -60 < found - wanted <= 0.001 for found, wanted in zip(read(*steps), ahead, strict=True)
        ] == [True] * 3
    stepped.reset_wall()
    wall, boot, _ = read()
    assert -60 < wall <= 0.001 and boot < -3500


def test_rounds_that_were_played_are_not_played_again(tmp_path: Path) -> None:
    first = Tally(file=tmp_path / "rounds.jsonl")
    first.add(("RUNNING", "stop shim"), 7, None)
    first.add(("QUEUED", "disk full"), 8, "why it failed")
    again = Tally(file=tmp_path / "rounds.jsonl")
    assert again.restore() == {(("RUNNING", "stop shim"), 7), (("QUEUED", "disk full"), 8)}
    assert (again.passed, again.failed) == (first.passed, first.failed)
    assert again.reports == ["why it failed"]
