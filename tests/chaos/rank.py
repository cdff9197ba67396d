"""A rank that watches over its own kind: it trains in lockstep over TCP, and tells when a rank of another generation is alive beside it.

Standard library only. FOLDER is shared by all ranks of a job, over all generations:

    locks/<token>.<rank>.<pid>   locked exclusively while the rank lives, also while it is stopped (SIGSTOP)
    starts, violations           one JSON object a line
    checkpoint                   the newest step; a new generation goes on from it
    stop                         when it appears, all ranks end with 0
    env/                         when it is there, each rank leaves its environment in it
    fail.<rank>                  when it appears, that rank raises what is in it, once
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
TOKEN = os.environ["RELAUNCH_TOKEN"]
CONNECT_WITHIN = 60.0
"""Seconds; rank 0 may be started late, on a machine that is busy with others."""


def note(path: Path, **values: object) -> None:
    """Append one line. Appending is atomic for lines this short, whoever else does."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, json.dumps(values).encode() + b"\n")
    finally:
        os.close(handle)


def replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def refuse_second_generation(folder: Path) -> int:
    """Lock our own file, then look for living ranks of other tokens. Two that start at once cannot both miss each other."""
    mine = TOKEN.replace("/", "_")
    locks = folder / "locks"
    locks.mkdir(exist_ok=True)
    handle = os.open(locks / f"{mine}.{RANK}.{os.getpid()}", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    for path in locks.iterdir():
        if path.name.startswith(f"{mine}."):
            continue
        other = os.open(path, os.O_RDONLY)
        try:
            # Shared, so that ranks that look at the same moment do not take each other for the dead one.
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
    """All ranks, one number each, every step: nobody advances without the others."""

    def __init__(self) -> None:
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.files = []
        if RANK == 0:
            listener = socket.create_server(where, backlog=WORLD_SIZE)
            connections = [listener.accept()[0] for _ in range(WORLD_SIZE - 1)]
            listener.close()
        else:
            connections = [self._connect(where)]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.files.append(connection.makefile("rw"))

    @staticmethod
    def _connect(where: tuple[str, int]) -> socket.socket:
        deadline = time.monotonic() + CONNECT_WITHIN
        while True:
            try:
                return socket.create_connection(where)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @staticmethod
    def _read(file) -> int:  # type: ignore[no-untyped-def]
        line = file.readline()
        if not line.endswith("\n"):
            raise ConnectionResetError("a peer closed its connection")
        return int(line)

    def sum(self, number: int) -> int:
        if RANK == 0:
            total = number + sum(self._read(file) for file in self.files)
            for file in self.files:
                file.write(f"{total}\n")
                file.flush()
            return total
        self.files[0].write(f"{number}\n")
        self.files[0].flush()
        return self._read(self.files[0])


def train(folder: Path, target: int, step_time: float) -> None:
    gang = Gang() if WORLD_SIZE > 1 else None

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
            raise RuntimeError(message)
        time.sleep(step_time)
        step += 1
        if RANK == 0:
            replace(checkpoint, str(step))
        if progress is not None:
            replace(Path(progress), json.dumps({"step": step, "loss": 1 / step}))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=int, default=10**9)
    parser.add_argument("--step-time", type=float, default=0.05)
    parser.add_argument("--stubborn", action="store_true", help="only SIGKILL ends it")
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = refuse_second_generation(folder)
    note(folder / "starts", token=TOKEN, rank=RANK, node=os.environ["RELAUNCH_NODE"], pid=os.getpid(), at=time.monotonic())
    if (folder / "env").is_dir():
        replace(folder / "env" / f"{os.environ['RELAUNCH_GENERATION']}.{RANK}.json", json.dumps(dict(os.environ)))
    print(f"rank {RANK} of generation {os.environ['RELAUNCH_GENERATION']} starts", flush=True)
    try:
        train(folder, arguments.target, arguments.step_time)
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
        sys.stderr.write(text)
        return 1
    os.close(held)
    return 0


if __name__ == "__main__":
    sys.exit(main())
