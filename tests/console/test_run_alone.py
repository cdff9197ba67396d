"""`run` without `up`, in the shell of a new user: the environment of ranks, and how it ends.

Real processes, signals and terminals. However it ends, no rank outlives its supervision.
"""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from relaunch.temporal import find_running_up, read_start_time

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0
SECRET = "hush-4711"
PROGRAM = """
import os, resource, sys, time
print("warned", file=sys.stderr)
print("folder", os.getcwd(), flush=True)
print("nofile", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
print("columns", os.environ.get("COLUMNS"), flush=True)
print("variables", sorted(os.environ), flush=True)
open("pid.new", "w").write(str(os.getpid()))
os.rename("pid.new", "pid")
while True:
    time.sleep(1)
"""


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@dataclass
class Shell:
    """A folder with a program, and the environment of `env -i` with a plain PATH, HOME and TERM."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / ".relaunch" / "runs" / "alone"

    @property
    def command(self) -> list[str]:
        options = ["--name", "alone", "--standalone", "--nproc_per_node=1"]
        return [sys.executable, str(ROOT / "starter.py"), "run", *options, "train.py"]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": os.environ.get("HOME", "/"),
            "TERM": "xterm",
            "PYTHONPATH": str(ROOT),
            "SSH_TTY": "/dev/pts/9",
            "API_KEY": SECRET,
        }

    def wait_for_rank(self) -> int:
        """Return the pid of the rank."""
        wait_for((self.folder / "pid").exists, "the rank did not start")
        return int((self.folder / "pid").read_text())

    def wait_until_stopped(self, rank: int, up: int) -> None:
        for name, pid in (("rank", rank), ("server", up)):
            wait_for(lambda pid=pid: read_start_time(pid) is None, f"the {name} still runs")  # type: ignore[misc]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "train.py").write_text(PROGRAM)
    return Shell(tmp_path)


def up_of(shell: Shell) -> int:
    up = find_running_up(shell.state)
    assert up is not None
    return up.pid


@pytest.mark.long
def test_a_killed_run_stops_its_ranks_and_leaks_no_variable(shell: Shell) -> None:
    process = subprocess.Popen(
        ["sh", "-c", 'ulimit -Sn 777 && exec "$@"', "sh", *shell.command],
        cwd=shell.folder,
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    found: dict[str, str] = {}
    while not {"folder", "nofile", "columns", "variables"} <= found.keys():
        name, _, value = process.stdout.readline().removeprefix("[rank 0] ").partition(" ")
        assert name, "it ended"
        found[name] = value.strip()
    rank, up = shell.wait_for_rank(), up_of(shell)
    assert (found["folder"], found["columns"]) == (str(shell.folder), "None")
    assert found["nofile"] == "777", "the limit of the shell"
    assert "'API_KEY'" in found["variables"] and "'SSH_TTY'" not in found["variables"]

    holders = [
        path
        for path in shell.state.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert [path.relative_to(shell.state).parts[:2] for path in holders] == [("env", "alone")]
    assert holders[0].stat().st_mode & 0o777 == 0o600

    process.kill()
    process.communicate()
    shell.wait_until_stopped(rank, up)
    assert "cancelling the job" in (shell.state / "up.log").read_text()


@pytest.mark.long
def test_ranks_outlive_a_killed_run_and_server_only_briefly(shell: Shell) -> None:
    short = shell.folder / "policy.yaml"
    short.write_text("timeouts: {heartbeat: 1s, lease: 3s}\n")
    options = ["--policy", str(short), "--redirects", "2", "--log-dir", "logs"]
    command = [*shell.command[:-1], *options, shell.command[-1]]
    process = subprocess.Popen(
        command, cwd=shell.folder, env=shell.environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # what ranks print comes by a worker, which is watching them
    copy = shell.folder / "logs" / "alone" / "attempt_0" / "0" / "stderr.log"
    wait_for(copy.exists, "stderr was not copied")
    assert copy.read_text() == "warned\n"
    rank, up = shell.wait_for_rank(), up_of(shell)
    process.send_signal(signal.SIGSTOP)  # it must not start its server again
    os.kill(up, signal.SIGKILL)
    process.kill()
    process.communicate()
    shell.wait_until_stopped(rank, up)


@pytest.mark.long
def test_a_closed_terminal_stops_the_ranks_after_a_killed_server(shell: Shell) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))

    process = subprocess.Popen(
        ["setsid", "--ctty", *shell.command],
        cwd=shell.folder,
        env=shell.environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""

    def wait_for_text(text: bytes) -> None:
        nonlocal shown
        while text not in shown:  # the read ends when no process has the terminal
            shown += os.read(master, 4096)

    wait_for_text(b"columns 151")  # less the prefix [rank 0]
    rank = shell.wait_for_rank()
    wait_for_text(b"generation 1 RUNNING")
    os.kill(up_of(shell), signal.SIGKILL)
    wait_for_text(b"starting it again")
    wait_for(lambda: find_running_up(shell.state), "the server was not started again")
    up = up_of(shell)
    assert read_start_time(rank) is not None
    os.close(master)
    assert process.wait(DEADLINE) == 130
    shell.wait_until_stopped(rank, up)


@pytest.mark.long
def test_all_that_a_rank_of_many_prints_is_printed(shell: Shell) -> None:
    """40 MB, for which the end of the job is no reason to stop reading."""
    lines = [f"{number:09d} {'x' * 89}\n" for number in range(1000)]
    program = "import os, sys\nif os.environ['RANK'] == '0':\n    for number in range(400):\n"
    program += "        sys.stdout.write(''.join(f'{one:09d} ' + 'x' * 89 + '\\n' "
    (shell.folder / "train.py").write_text(program + "for one in range(1000)))\n")
    command = [word.replace("node=1", "node=8") for word in shell.command]
    done = subprocess.run(
        command, cwd=shell.folder, env=shell.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"[rank 0] {line}" for line in lines) * 400
    assert "not printed" not in done.stderr
    wait_for(lambda: not shell.state.exists(), "the state folder of a success is left")
