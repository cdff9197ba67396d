"""Commands through the process that `up` keeps ready, against the same commands started cold.

One real `up`, and real signals.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from relaunch.temporal import read_start_time

ROOT = Path(__file__).parents[2]
COLD = {"RELAUNCH_NO_WARM": "1"}
WITHIN = 100.0
CANCELLED = 130


def environment(**more: str) -> dict[str, str]:
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RELAUNCH_", "TEMPORAL_"))
    }
    return {**ours, **more}


def warm_of(up: int) -> int | None:
    """The process id of the warm process of this `up`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        if parent == up and b"warm" in command:
            return int(folder.name)
    return None


@dataclass(frozen=True)
class Place:
    root: Path
    """A separate checkout, so that its files can be touched."""
    folder: Path
    up: int

    def command(self, *words: str) -> list[str]:
        return [sys.executable, str(self.root / "starter.py"), *words]

    def call(
        self, *words: str, folder: Path | None = None, umask: int = -1, **more: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            cwd=folder or self.folder,
            env=environment(**more),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=WITHIN,
            umask=umask,
        )

    def start(self, *words: str, through: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*through, *self.command(*words)],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def is_warm(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(os.path.relpath(self.folder / ".relaunch" / "cli.sock"))
            except OSError:
                return False
            return True

    def wait_until_warm(self) -> None:
        deadline = time.monotonic() + WITHIN
        while not self.is_warm():
            assert time.monotonic() < deadline, (self.folder / "up.log").read_text()
            time.sleep(0.02)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("warm")
    root, folder = base / "checkout", base / "here"
    folder.mkdir()
    shutil.copytree(
        ROOT,
        root,
        ignore=lambda at, names: [
            n for n in names if n.startswith(".") or n in ("tests", "docs", "build") or ".pyc." in n
        ],
    )
    command = [sys.executable, str(root / "starter.py"), "up", "--port", "0", "--ui-port", "0"]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            command, cwd=folder, env=environment(OF_UP="1"), stdout=log, stderr=log
        )
    try:
        found = Place(root, folder, up.pid)
        found.wait_until_warm()
        yield found
    finally:
        up.terminate()
        up.wait(WITHIN)


def submitted(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while "submitted" not in (line := process.stderr.readline()):
        assert line, "it ended before the job was submitted"


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("jobs", "--json"), 0),
        (("show", "missing"), 2),
        (("run", "--nodes", "0", "--", "true"), 2),
        (("run", "--nodes", "x", "--", "true"), 2),
        (("run", "--", "no-such-program"), 2),
        (("submit", "missing.yaml"), 2),
        (("next",), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_output_and_exit_code_are_those_of_a_cold_start(
    place: Place, words: tuple[str, ...], code: int
) -> None:
    assert place.is_warm()
    warm, cold = place.call(*words), place.call(*words, **COLD)
    assert (warm.returncode, warm.stdout, warm.stderr) == (code, cold.stdout, cold.stderr)
    assert cold.returncode == code


@pytest.mark.long
def test_run_exits_as_its_job_with_the_callers_environment(
    place: Place,
) -> None:
    line = 'echo "$MARK,$OWN,$OF_UP,$SSH_TTY,$(umask),$(ulimit -n)" && pwd && exit 3'
    more = {"MARK": "a b", "OWN": "no", "SSH_TTY": "/dev/pts/9"}
    words = ("run", "--name", "own", "--env", "OWN=yes", "--", "sh", "-c", line)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    try:
        done = place.call(*words, umask=0o026, **more)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert done.returncode == 3, done
    assert set(done.stdout.splitlines()) == {
        "[rank 0] a b,yes,,,0026,300",
        f"[rank 0] {place.folder}",
    }
    # The job may be retried, as long as its file is there.
    (file,) = (place.folder / ".relaunch" / "env" / "own").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert place.call("run", "--name", "own", "--", "true").returncode == 0
    assert not file.exists()
    assert place.call("retry", "own").returncode == 0
    followed = place.call("follow", "own")
    assert (followed.returncode, f"{file.parent}" in followed.stdout) == (1, True), followed
    warm = warm_of(place.up)
    assert warm is not None
    deadline = time.monotonic() + WITHIN
    while children_of(warm):  # the fork has sent its exit code, and ends
        assert time.monotonic() < deadline, children_of(warm)
        time.sleep(0.02)


@pytest.mark.long
def test_ranks_of_submit_start_in_the_folder_of_submit(place: Place, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text(
        'name: here\ncommand: [sh, -c, \'test "$PWD" = "$0"\', ' + f"{tmp_path}]\n"
    )
    state = str(place.folder / ".relaunch")
    words = ("submit", "jobs/job.yaml", "--follow")
    done = place.call(*words, folder=tmp_path, RELAUNCH_STATE=state)
    assert done.returncode == 0, done


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(other, marks=pytest.mark.long) for other in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal_cancels_the_job_and_run_ends_with_it(
    place: Place, number: signal.Signals
) -> None:
    process = place.start("run", "--", "sleep", "1000")
    submitted(process)
    warm = warm_of(place.up)
    assert warm is not None and len(children_of(warm)) == 1
    process.send_signal(number)
    _, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, "CANCELLED: cancelled by" in err) == (CANCELLED, True), err


@pytest.mark.long
def test_a_closed_output_cancels_the_job(place: Place) -> None:
    line = "while :; do echo here; sleep 1; done"
    process = place.start("run", "--", "sh", "-c", line)
    assert process.stdout is not None and process.stderr is not None
    assert "here" in process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert (process.wait(WITHIN), "output of `relaunch run` was closed" in err) == (130, True), err


@pytest.mark.long
def test_under_nohup_only_ctrl_c_cancels(place: Place) -> None:
    process = place.start("run", "--", "sleep", "1000", through=("nohup",))
    submitted(process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, "ctrl-C" in err, "SIGHUP" in err) == (CANCELLED, True, False), err


def test_a_second_ctrl_c_leaves_at_once(place: Place) -> None:
    # It ends late enough for a second one.
    process = place.start(
        "run", "--", "sh", "-c", "trap '' TERM; echo here; while :; do sleep 1; done"
    )
    assert process.stdout is not None and process.stderr is not None
    assert "here" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    while "cancelling job" not in (line := process.stderr.readline()):
        assert line, "it ended before it said so"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, "exiting; " in err) == (130, True), err


@pytest.mark.long
def test_a_command_ends_with_its_client_while_the_job_goes_on(place: Place) -> None:
    process = place.start("run", "--name", "stays", "--", "sleep", "1000")
    submitted(process)
    warm = warm_of(place.up)
    assert warm is not None
    (child,) = children_of(warm)
    process.kill()
    process.communicate(timeout=WITHIN)
    deadline = time.monotonic() + WITHIN
    while read_start_time(child) is not None:
        assert time.monotonic() < deadline, "it outlived the client that typed it"
        time.sleep(0.02)

    follower = place.start("follow", "stays")
    while not (children := children_of(warm)):
        assert follower.poll() is None
        time.sleep(0.01)
    assert len(children) == 1
    follower.terminate()
    follower.communicate(timeout=WITHIN)
    assert follower.returncode == -signal.SIGTERM
    assert place.call("cancel", "stays").returncode == 0


@pytest.mark.long
def test_a_killed_warm_process_ends_no_command_and_is_restarted(place: Place) -> None:
    process = place.start("run", "--name", "goes-on", "--", "sleep", "1000")
    submitted(process)
    warm = warm_of(place.up)
    assert warm is not None
    os.kill(warm, signal.SIGKILL)
    # No process listens on the socket that is still there.
    assert "goes-on" in place.call("jobs").stdout
    place.wait_until_warm()
    assert warm_of(place.up) not in (warm, None)
    assert place.call("cancel", "goes-on").returncode == 0
    _, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, "CANCELLED" in err) == (CANCELLED, True), err


@pytest.mark.long
def test_changed_code_is_what_runs_next(place: Place) -> None:
    file = place.root / "relaunch" / "cli" / "tables.py"
    text = file.read_text()
    begin = "def print_jobs(rows: Sequence[JobSummary], now: datetime) -> None:\n"
    assert begin in text
    file.write_text(text.replace(begin, f"{begin}    print('changed')\n"))
    assert "changed" in place.call("jobs").stdout
    place.wait_until_warm()
    assert "changed" in place.call("jobs").stdout


@pytest.mark.long
def test_a_terminal_stays_one_and_settings_files_start_cold(place: Place, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        subprocess.run(
            place.command("follow", "stays"),
            cwd=place.folder,
            env=environment(TERM="xterm"),
            stdout=theirs,
            timeout=WITHIN,
        )
        assert b"\x1b[" in os.read(ours, 65536)
    finally:
        os.close(theirs)
        os.close(ours)
    (tmp_path / "relaunch.toml").write_text("jobs = 'many'\n")
    (tmp_path / ".relaunch").symlink_to(place.folder / ".relaunch")
    done = subprocess.run(
        place.command("jobs"),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN,
    )
    assert done.returncode == 2 and "relaunch.toml: jobs " in done.stderr


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is not installed")
def test_a_passphrase_is_asked_for_in_the_terminal(place: Place, tmp_path: Path) -> None:
    """A fork of `up` has none, and ssh-keygen asks nowhere else."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", key], check=True)
    (tmp_path / "job.yaml").write_text("name: signed\ncommand: ['true']\n")
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *place.command("submit", "job.yaml")],
        cwd=tmp_path,
        env=environment(RELAUNCH_STATE=str(place.folder / ".relaunch"), RELAUNCH_SSH_KEY=str(key)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # its end closes the terminal
        while True:
            shown += os.read(ours, 4096)
            if b"passphrase" in shown and b"secret" not in shown:
                os.write(ours, b"secret\n")
                shown += b"secret"
    os.close(ours)
    assert (process.wait(WITHIN), b"job signed submitted" in shown) == (0, True), shown
