"""`relaunch backup`: of a database that is being written, and of a service that is then lost."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from relaunch.cli.backup import BACKUP_NOTE, back_up, describe_restored
from relaunch.cli.database import DATABASE
from relaunch.config import ConfigError
from tests.console.commands import STARTER, bare_environment

DEADLINE = 240.0
"""Seconds that only a hang reaches."""
WRITER = """
import sqlite3, sys
file = sqlite3.connect(sys.argv[1], isolation_level=None)
file.execute("pragma journal_mode=WAL")
file.execute("create table numbers (number integer, text text)")
for number in range(10**9):
    file.execute("insert into numbers values (?, ?)", (number, "x" * 1000))
    print(number, flush=True)
"""


def test_a_database_is_copied_while_a_process_writes_to_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "archive").mkdir(parents=True)
    (state / "archive" / "incident.json").write_text("{}")
    (state / "one-partition").touch()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(state / DATABASE)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        acknowledged = max(int(writer.stdout.readline()) for _ in range(200))
        size = back_up(state, tmp_path / "copy")
        after = int(writer.stdout.readline())
        writer.kill()
        writer.stdout.read()
    with closing(sqlite3.connect(tmp_path / "copy" / DATABASE)) as copy:
        found = [number for (number,) in copy.execute("select number from numbers")]
        assert copy.execute("pragma integrity_check").fetchone() == ("ok",)
    assert found == list(range(len(found))), "a prefix of what was written"
    assert acknowledged < len(found) and acknowledged < after
    assert size > len(found) * 1000
    assert describe_restored(state) is None
    assert "no worker is started" in (describe_restored(tmp_path / "copy") or "")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "archive",
        BACKUP_NOTE,
        "one-partition",
        DATABASE,
    ]
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700, "environments may be secret"


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with pytest.raises(ConfigError, match=r"there is no database .*state/temporal\.db"):
        back_up(state, tmp_path / "copy")
    (state / DATABASE).write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="file is not a database"):
        back_up(state, tmp_path / "copy")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=r"there exists: expected the name of a new folder"):
        back_up(state, tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "there"]


@contextmanager
def up(folder: Path, ready: str = "worker started") -> Iterator[None]:
    words = [sys.executable, STARTER, "up", "--port", "0", "--ui-port", "0"]
    with subprocess.Popen(
        words,
        cwd=folder,
        env=bare_environment({}),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (ready in said and "web UI" in said):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield
        finally:
            process.kill()  # its children die with it: nothing is stopped in order
            process.communicate()


def relaunch(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, STARTER, *words],
        cwd=folder,
        env=bare_environment({}),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return done.stdout + done.stderr


def until(is_true: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


RANK = """
import os, time
with open("starts", "a") as starts:
    print(os.environ["RELAUNCH_GENERATION"], os.getpid(), file=starts)
for step in range(10**9):
    print("step", step, flush=True)
    time.sleep(0.1)
"""
JOB = r"""
name: first
command: [%s, rank.py]
progress: {log_pattern: 'step (?P<step>\d+)'}
policy: {timeouts: {heartbeat: 1s, lease: 5s, fence_after: 5s, lost_after: 5s}}
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "job.yaml").write_text(JOB % sys.executable)
    yield tmp_path
    for _, pid in starts(tmp_path):
        with open(os.devnull, "w") as devnull:
            subprocess.run(["kill", "-9", str(pid)], stderr=devnull)


def starts(folder: Path) -> list[tuple[int, int]]:
    """Generation and process of each rank that has ever started, in order."""
    path = folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def is_watched(shown: str, generation: int) -> bool:
    return f"generation  {generation}" in shown and "progress    step" in shown


def restore(folder: Path) -> None:
    for old in (folder / ".relaunch").glob(f"{DATABASE}*"):
        old.unlink()
    shutil.copytree(folder / "copy", folder / ".relaunch", dirs_exist_ok=True)


@pytest.mark.long
@pytest.mark.timeout(3 * DEADLINE)
def test_a_job_goes_on_under_the_restored_service(place: Path) -> None:
    def show() -> str:
        return relaunch(place, "show", "first")

    with up(place):
        relaunch(place, "submit", "job.yaml")
        until(lambda: "progress    step" in show(), show)
        assert "has the backup" in relaunch(place, "backup", "copy")
    restore(place)
    (place / ".relaunch" / BACKUP_NOTE).unlink()
    with up(place):
        until(lambda: "progress    step" in show(), show)
        assert "RUNNING: generation 1" in show()
        ((generation, rank),) = starts(place)
        assert generation == 1 and is_alive(rank), "the rank was left alone"
        os.kill(rank, signal.SIGKILL)
        until(lambda: len(starts(place)) == 2, show)
        until(lambda: "RUNNING: training passed" in show(), show)


@pytest.mark.long
@pytest.mark.timeout(3 * DEADLINE)
def test_a_job_that_moved_since_never_runs_twice(place: Path) -> None:
    """The steps of docs/operations.md.

    Without them the job would be launched as generation 2 where generation 1 ran, and another
    generation 2 runs elsewhere.
    """

    def jobs() -> str:
        return relaunch(place, "jobs") + relaunch(place, "history", "first")

    with up(place):
        relaunch(place, "submit", "job.yaml")
        until(lambda: "progress    step" in relaunch(place, "show", "first"), jobs)
        relaunch(place, "backup", "copy")
        relaunch(place, "retry", "first", "--avoid", "local-1", "--reason", "moved")
        # Ranks that no watch has ever met end with their first lease.
        until(lambda: is_watched(relaunch(place, "show", "first"), 2), jobs)
    (_, first), (_, moved) = starts(place)
    assert is_alive(moved) and not is_alive(first)
    restore(place)
    with up(place, ready="no worker is started"):
        until(lambda: "first" in relaunch(place, "jobs"), jobs)
        assert "cancellation requested" in relaunch(place, "cancel", "first")
        assert len(starts(place)) == 2 and is_alive(moved)
    (place / ".relaunch" / BACKUP_NOTE).unlink()
    with up(place):
        until(lambda: "CANCELLED" in jobs(), jobs)
        until(lambda: not is_alive(moved), lambda: relaunch(place, "nodes", "list"))
        assert len(starts(place)) == 2
        relaunch(place, "retry", "first", "--reason", "restored")
        until(lambda: len(starts(place)) == 3, jobs)
        assert is_alive(starts(place)[-1][1])


@pytest.mark.long
@pytest.mark.timeout(3 * DEADLINE)
def test_who_forgets_the_steps_has_two_gangs_for_a_minute(place: Path) -> None:
    """The restored server launches generation 2 where generation 1 ran, and finds the other one."""

    def shown() -> str:
        return relaunch(place, "show", "first") + relaunch(place, "nodes", "list")

    with up(place):
        relaunch(place, "submit", "job.yaml")
        until(lambda: "progress    step" in relaunch(place, "show", "first"), shown)
        relaunch(place, "backup", "copy")
        relaunch(place, "retry", "first", "--avoid", "local-1", "--reason", "moved")
        until(lambda: is_watched(relaunch(place, "show", "first"), 2), shown)
    (_, moved) = starts(place)[-1]
    restore(place)
    (place / ".relaunch" / BACKUP_NOTE).unlink()
    with up(place):
        until(lambda: len(starts(place)) == 3, shown)
        until(lambda: not is_alive(moved), shown)
        until(lambda: is_watched(relaunch(place, "show", "first"), 2), shown)
        ((_, _), (_, _), (generation, rank)) = starts(place)
        assert generation == 2 and is_alive(rank), "only the misplaced ranks were stopped"
