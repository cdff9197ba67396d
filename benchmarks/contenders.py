"""What a contender is, and how its recovery is measured.

A recovery lasts from the SIGKILL of one rank to the start of the last of four new ones. The
contender is not asked: the only evidence is the line that each rank writes as its first act,
stamped with CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

import abc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WORLD_SIZE = 4
DEADLINE = 120.0
"""Seconds; above torchrun's own 30 s for workers that do not stop."""
SETTLE = (0.5, 1.0)
"""Seconds between recovery and next kill, drawn each round: any phase of a poll may be hit."""
ROOT = Path(__file__).resolve().parent.parent
RANKS = str(ROOT / "benchmarks").encode()


@dataclass(frozen=True, slots=True)
class Start:
    at: int
    """CLOCK_MONOTONIC, nanoseconds."""
    rank: int
    generation: int
    """As the contender counts. No result depends on it: two torchrun agents count differently."""
    pid: int


def rank_command() -> tuple[str, ...]:
    """What every contender runs as a rank; the file to report to comes from BENCH_STARTS."""
    return (sys.executable, str(ROOT / "benchmarks" / "rank.py"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Contender(abc.ABC):
    """A launcher of ranks on this machine, four unless `ranks` has another number.

    A subclass defines how it is started, and may extend `stop`.
    """

    name: str
    command: tuple[str, ...] = ()
    """The command of a rank."""
    ranks: int = WORLD_SIZE

    def __init__(self) -> None:
        self.command = self.command or rank_command()
        self._file: Path | None = None
        self._launchers: list[subprocess.Popen[bytes]] = []

    @abc.abstractmethod
    def launch(self, folder: Path) -> None:
        """Start the ranks, and return without waiting.

        Their environment has BENCH_STARTS.
        """

    @property
    def starts_file(self) -> Path:
        if self._file is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._file

    def start(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "starts"
        self._file.write_bytes(b"")
        self.launch(folder)

    def spawn(self, command: Sequence[str], log: Path) -> None:
        """Start a process of the contender, which `stop` ends."""
        environment = {**os.environ, "BENCH_STARTS": str(self.starts_file)}
        with open(log, "wb") as file:
            self._launchers.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)
            )

    def starts(self) -> list[Start]:
        lines = self.starts_file.read_text().splitlines()
        return [Start(*(int(field) for field in line.split())) for line in lines]

    def kill_a_rank(self, rank: int = 0) -> int:
        """SIGKILL the newest process of a rank; return CLOCK_MONOTONIC just before, nanoseconds."""
        newest = max(
            (start for start in self.starts() if start.rank == rank), key=lambda start: start.at
        )
        if not alive(newest.pid):
            raise RuntimeError(
                f"{self.name}: rank {rank} (pid {newest.pid}) is gone before it was killed"
            )
        at = time.monotonic_ns()
        os.kill(newest.pid, signal.SIGKILL)
        return at

    def stop(self) -> None:
        for process in self._launchers:
            process.terminate()
        for process in self._launchers:
            try:
                process.wait(40.0)  # torchrun gives its workers 30 s
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._launchers.clear()
        for (
            start
        ) in self.starts():  # what the contender has left behind must not burden the next one
            if alive(start.pid):
                os.kill(start.pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether this is still one of our ranks: the kernel may have reused the pid."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(word.startswith(RANKS) and word.endswith(b"rank.py") for word in words)


def gang_since(starts: Sequence[Start], since: int, ranks: int = WORLD_SIZE) -> int | None:
    """Return when the last rank of a gang wrote its line after `since`.

    None while the gang is not complete and alive.
    """
    newest = {start.rank: start for start in starts if start.at > since}
    if len(newest) < ranks or not all(alive(start.pid) for start in newest.values()):
        return None
    return max(start.at for start in newest.values())


def await_gang(contender: Contender, since: int) -> int:
    deadline = time.monotonic() + DEADLINE
    while (at := gang_since(contender.starts(), since, contender.ranks)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{contender.name}: no {contender.ranks} ranks within {DEADLINE:.0f} s"
            )
        # Coarse: the stamps are the ranks', and each check takes CPU time from the contender.
        time.sleep(0.02)
    return at


def measure_start(contender: Contender, folder: Path) -> float:
    """Start it and leave it running; return the seconds from the command to its last rank."""
    began = time.monotonic_ns()
    contender.start(folder)
    return (await_gang(contender, began) - began) / 1e9


def measure_recovery(contender: Contender, rounds: int, seed: int = 1) -> list[float]:
    """Kill one rank after the other of a running contender.

    Return the milliseconds from each SIGKILL to four ranks.
    """
    moment = random.Random(seed)
    times = []
    for number in range(rounds):
        time.sleep(moment.uniform(*SETTLE))
        killed = contender.kill_a_rank(number % WORLD_SIZE)
        await_gang(contender, killed)
        time.sleep(
            SETTLE[0]
        )  # a second restart for the same kill would count: the gang has to stay
        times.append((await_gang(contender, killed) - killed) / 1e6)
    return times


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    start_s: float
    """From the command to the fourth rank's line."""
    recovery_ms: tuple[float, ...]
    """From the SIGKILL of a rank to the fourth line of the next generation, one value a round."""


def measure(contender: Contender, rounds: int) -> Measured:
    """Start a contender in a new folder, let it recover `rounds` times, and stop it."""
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-") as folder:
        try:
            started = measure_start(contender, Path(folder))
            times = measure_recovery(contender, rounds)
        finally:
            contender.stop()
    return Measured(contender.name, started, tuple(times))
