"""A rank that watches over its own kind: it trains in lockstep over TCP.

It reports when a rank of another generation is alive beside it.

Standard library only. FOLDER is shared by all ranks of a job, over all generations:

    locks/<token>.<rank>.<pid>   locked exclusively while the rank lives, also while it is stopped
    (SIGSTOP)
    starts, violations           one JSON object a line
    checkpoint                   the newest step; a new generation goes on from it
    stop                         when it appears, all ranks end with 0
    writes                       with --write-on, `TOKEN RANK HOST STAMP` a line, for as long as the
    rank lives
    quiet                        when it appears, ranks report no more progress
    env/                         when it is there, each rank leaves its environment in it
    fail.<rank>                  when it appears, that rank raises what is in it, once
    end.<rank>                   with --linger, without which a rank that has raised closes its
    connections and stays

Stamps (`raw`, and those in `writes`) are nanoseconds of CLOCK_MONOTONIC_RAW, which all hosts on one
kernel share.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
TOKEN = os.environ["RELAUNCH_TOKEN"]
CONNECT_TIMEOUT = 60.0
"""Seconds; rank 0 may be started late, on a machine that is busy with others."""
CONNECT_ATTEMPT = 5.0
"""Seconds for one attempt to connect, on a network that loses packets."""


def note(path: Path, **values: object) -> None:
    """Append one line. Appending is atomic for lines this short, with any number of writers."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, json.dumps(values).encode() + b"\n")
    finally:
        os.close(handle)


def replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def stamp() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)


def write_on(path: Path, interval: float) -> None:
    """Append a stamped line every `interval` seconds from another thread, until the process ends.

    This is what an asynchronous checkpoint writer does: it goes on while the ranks wait for each
    other.
    """
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write() -> None:
        while True:
            os.write(handle, f"{TOKEN} {RANK} {os.uname().nodename} {stamp()}\n".encode())
            time.sleep(interval)

    threading.Thread(target=write, daemon=True).start()


def refuse_second_generation(folder: Path) -> int:
    """Lock our own file, then look for living ranks of other tokens.

    Two that start at once cannot both miss each other.
    """
    mine = TOKEN.replace("/", "_")
    locks = folder / "locks"
    locks.mkdir(exist_ok=True)
    handle = os.open(locks / f"{mine}.{RANK}.{os.getpid()}", os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(handle, fcntl.LOCK_EX)
    for path in locks.iterdir():
        if path.name.startswith(f"{mine}."):
            continue
        other = os.open(path, os.O_RDONLY)
        try:
            # Shared, so that ranks that look at the same moment do not take each other for the dead
            # one.
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            note(
                folder / "violations",
                started=TOKEN,
                rank=RANK,
                pid=os.getpid(),
                node=os.environ["RELAUNCH_NODE"],
                alive=path.name,
                at=time.monotonic(),
            )
        finally:
            os.close(other)
    return handle


class Gang:
    """All ranks, one number each, every step: no rank advances without the others."""

    def __init__(self, stand_still: bool = False) -> None:
        """`stand_still`: wait without end for a peer that is gone, as a collective does."""
        self._stand_still = stand_still
        self._connections: list[socket.socket] = []
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.files = []
        if RANK == 0:
            listener = socket.create_server(where, backlog=WORLD_SIZE)
            connections = [listener.accept()[0] for _ in range(WORLD_SIZE - 1)]
            listener.close()
        else:
            connections = [self._connect(where)]
        self._connections = connections
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.files.append(connection.makefile("rw"))

    @staticmethod
    def _connect(where: tuple[str, int]) -> socket.socket:
        deadline = time.monotonic() + CONNECT_TIMEOUT
        while True:
            try:
                connection = socket.create_connection(where, CONNECT_ATTEMPT)
            except (ConnectionRefusedError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                connection.settimeout(None)
                return connection

    def _read(self, file) -> int:  # type: ignore[no-untyped-def]
        try:
            line = file.readline()
        except OSError:
            if not self._stand_still:
                raise
            line = ""
        while self._stand_still and not line.endswith("\n"):
            time.sleep(60)
        if not line.endswith("\n"):
            raise ConnectionResetError("a peer closed its connection")
        return int(line)

    def _write(self, file, number: int) -> None:  # type: ignore[no-untyped-def]
        try:
            file.write(f"{number}\n")
            file.flush()
        except OSError:
            if not self._stand_still:
                raise

    def close(self) -> None:
        """Have all peers lose this rank."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def sum(self, number: int) -> int:
        if RANK == 0:
            total = number + sum(self._read(file) for file in self.files)
            for file in self.files:
                self._write(file, total)
            return total
        self._write(self.files[0], number)
        return self._read(self.files[0])


def train(
    folder: Path, target: int, step_time: float, stand_still: bool = False, saves: bool = False
) -> None:
    gang = Gang(stand_still) if WORLD_SIZE > 1 else None

    def together(number: int) -> int:
        return gang.sum(number) if gang else number

    checkpoint = folder / "checkpoint"
    step = together(int(checkpoint.read_text()) if RANK == 0 and checkpoint.exists() else 0)
    wish = folder / f"fail.{RANK}"
    progress = os.environ.get("RELAUNCH_PROGRESS_FILE")  # a container without the agent has none
    while True:
        end = RANK == 0 and ((folder / "stop").exists() or step >= target)
        if together(int(end)):
            return
        if wish.exists():
            message = wish.read_text()
            wish.unlink()
            if gang:
                gang.close()
            raise RuntimeError(message)
        time.sleep(step_time)
        step += 1
        if RANK == 0:
            replace(checkpoint, str(step))
        if progress is not None and not (folder / "quiet").exists():
            with contextlib.suppress(OSError):  # a full disk of the node does not end the training
                saved = {"checkpoint": step} if saves else {}
                replace(Path(progress), json.dumps({"step": step, "loss": 1 / step, **saved}))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=int, default=10**9)
    parser.add_argument("--step-time", type=float, default=0.05)
    parser.add_argument("--stubborn", action="store_true", help="only SIGKILL ends it")
    parser.add_argument(
        "--stand-still", action="store_true", help="wait without end for a lost peer"
    )
    parser.add_argument("--saves", action="store_true", help="report each step as a checkpoint")
    parser.add_argument("--linger", action="store_true", help="after raising, wait for end.<rank>")
    parser.add_argument("--write-on", type=float, metavar="SECONDS", help="interval of `writes`")
    arguments = parser.parse_args()
    folder = arguments.folder
    os.umask(0)  # ranks of different users share the folder
    if arguments.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = refuse_second_generation(folder)
    note(
        folder / "starts",
        token=TOKEN,
        rank=RANK,
        node=os.environ["RELAUNCH_NODE"],
        pid=os.getpid(),
        at=time.monotonic(),
        raw=stamp(),
    )
    if arguments.write_on:
        write_on(folder / "writes", arguments.write_on)
    if (folder / "env").is_dir():
        replace(
            folder / "env" / f"{os.environ['RELAUNCH_GENERATION']}.{RANK}.json",
            json.dumps(dict(os.environ)),
        )
    print(f"rank {RANK} of generation {os.environ['RELAUNCH_GENERATION']} starts", flush=True)
    try:
        train(
            folder,
            arguments.target,
            arguments.step_time,
            arguments.stand_still,
            arguments.saves,
        )
    except Exception as error:
        text = traceback.format_exc()
        # As torch.distributed.elastic writes it.
        written = {
            "message": {
                "message": f"{type(error).__name__}: {error}",
                "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
            }
        }
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(written))
        print(text, end="", file=sys.stderr, flush=True)
        raised = isinstance(error, RuntimeError)  # and not lost a peer
        while arguments.linger and raised and not (folder / f"end.{RANK}").exists():
            time.sleep(0.02)
        return 1
    os.close(held)
    return 0


if __name__ == "__main__":
    sys.exit(main())
