"""What a case needs of this machine: a file that is not answered, and a network that can be cut."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hangs.kinds import Case

SERVER = Path(__file__).with_name("blocked_files.py")
MOUNT_TIMEOUT = 20.0
NUMBERS = itertools.count()

Cut = Callable[[], None]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def disturb(case: Case, folder: Path) -> Iterator[tuple[dict[str, str], Cut | None]]:
    """Yield the environment that a case needs, and what to call once it has begun, if anything."""
    match case.kind.name, case.variant:
        case "blocked_read", 0:
            with blocked_file_system(folder / "data") as file:
                yield {"BLOCKED_FILE": str(file)}, None
        case "blocked_read", _:
            file = folder / "shard.fifo"
            os.mkfifo(file)
            # With a writer that writes nothing: opening it does not wait, reading does.
            writer = os.open(file, os.O_RDWR)
            try:
                yield {"BLOCKED_FILE": str(file)}, None
            finally:
                os.close(writer)
        case "partition", _:
            with networks(case.ranks) as tag:
                yield {"RANK_NETWORK": tag}, lambda: cut(tag, case.rank)
        case _:
            yield {}, None


@contextlib.contextmanager
def blocked_file_system(folder: Path) -> Iterator[Path]:
    """Mount a file system whose file blocks its readers, in state D. It needs root."""
    folder.mkdir()
    server = subprocess.Popen([sys.executable, "-S", "-E", str(SERVER), str(folder)])
    try:
        deadline = time.monotonic() + MOUNT_TIMEOUT
        while not folder.is_mount():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{folder}: no file system is mounted there")
            time.sleep(0.05)
        yield folder / "shard.bin"
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def networks(ranks: int) -> Iterator[str]:
    """Make a network for each rank, on a switch; yield what their names begin with. It needs root.

    The network of rank 2 is `TAGr2`, its device is `training`.
    """
    tag = f"rh{os.getpid()}x{next(NUMBERS)}"
    switch, made = f"{tag}s", []
    try:
        for name in (switch, *(f"{tag}r{rank}" for rank in range(ranks))):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "name", "training", "type", "bridge")
        ip("-n", switch, "link", "set", "training", "up")
        for rank in range(ranks):
            name, port = f"{tag}r{rank}", f"p{rank}"
            peer = ("peer", "name", "training", "netns", name)
            ip("-n", switch, "link", "add", "name", port, "type", "veth", *peer)
            ip("-n", switch, "link", "set", port, "master", "training", "up")
            ip(
                "-n",
                name,
                "addr",
                "add",
                f"10.97.{rank // 250}.{rank % 250 + 1}/16",
                "dev",
                "training",
            )
            ip("-n", name, "link", "set", "training", "up")
        yield tag
    finally:
        for name in made:
            ip("netns", "del", name)


def cut(tag: str, rank: int) -> None:
    """Lose all packets to and from a rank. Its device stays up, and no connection ends."""
    ip("-n", f"{tag}s", "link", "set", f"p{rank}", "nomaster")
