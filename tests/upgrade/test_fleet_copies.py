"""The copies of a fleet file that a worker serves while it cannot use the file itself.

A release and this checkout use the same state folder in turn, as after an upgrade and a rollback.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from relaunch.config import ConfigError, Settings
from relaunch.worker import KEPT_FLEETS, find_copy, make_fleets

FLEET = """\
name: lab
backend: local
repairs: act
nodes:
  - {name: n1, address: 127.0.0.2}
"""
NEW_KEY = "warm: [json]\n"
BAD = "name: lab\nnodes: [\n"
SERVE = """\
from pathlib import Path
import relaunch.worker
from relaunch.config import Settings

assert relaunch.worker.__file__.startswith({package!r}), relaunch.worker.__file__
settings = Settings(state=Path({state!r}), fleets=(Path({file!r}),))
print(*(node.name for node in relaunch.worker.make_fleets(settings).spec("lab").nodes))
"""


@dataclass(frozen=True)
class Workers:
    """The starts of workers of both versions, one after the other."""

    package: Path
    state: Path
    file: Path

    def start_release(self) -> str:
        """Have the release's own code read the file; return the nodes that it serves, or why it
        serves none."""
        names = {"package": str(self.package), "state": str(self.state), "file": str(self.file)}
        done = subprocess.run(
            [sys.executable, "-c", SERVE.format(**names)],
            env={**os.environ, "PYTHONPATH": str(self.package)},
            cwd=self.package,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done.stdout.strip() if done.returncode == 0 else done.stderr

    def start(self) -> str:
        settings = Settings(state=self.state, fleets=(self.file,))
        return " ".join(node.name for node in make_fleets(settings).spec("lab").nodes)

    @property
    def copies(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.state / KEPT_FLEETS).iterdir()}


@pytest.fixture
def workers(package: Path, tmp_path: Path) -> Workers:
    file = tmp_path / "lab.yaml"
    file.write_text(FLEET)
    return Workers(package, tmp_path / "state", file)


def test_a_release_serves_its_own_copy_after_a_rollback(workers: Workers) -> None:
    assert workers.start_release() == "n1"
    (of_release,) = workers.copies
    workers.file.write_text(FLEET.replace("n1", "n2") + NEW_KEY)
    assert workers.start() == "n2"
    assert workers.copies[of_release] == FLEET
    assert workers.start_release() == "n1"
    workers.file.write_text(BAD)
    assert workers.start() == "n2", "each has its own"
    assert workers.start_release() == "n1"


def test_the_copy_of_a_release_is_served_by_a_new_worker(workers: Workers) -> None:
    """The file was damaged between the two."""
    assert workers.start_release() == "n1"
    before = workers.copies
    workers.file.write_text(BAD)
    assert workers.start() == "n1"
    assert workers.copies == before
    find_copy(workers.state / KEPT_FLEETS, workers.file).write_text(BAD)
    with pytest.raises(ConfigError, match=r"lab\.yaml"):
        workers.start()  # what it served itself may have had rules that the release's has not


def test_of_the_copies_of_other_releases_the_newest_is_served(workers: Workers) -> None:
    workers.start()
    (own,) = (workers.state / KEPT_FLEETS).iterdir()
    folder, name = own.parent, find_copy(own.parent, workers.file).name.split(".")[0]
    own.unlink()
    for at, (release, text) in enumerate(
        [(".0.3.0", FLEET.replace("n1", "n3")), ("", FLEET.replace("n1", "n4")), (".0.9.0", BAD)]
    ):
        copy = folder / f"{name}{release}.yaml"
        copy.write_text(text)
        os.utime(copy, (at, at))
    workers.file.write_text(BAD)
    assert workers.start() == "n4"
