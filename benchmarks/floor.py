"""The floor: how fast a Python program without state or policy can restart four ranks.

A bare asyncio loop: spawn all, and when one fails SIGKILL the others, reap them and spawn all
again. A supervisor that does more can only be slower; the difference is what its guarantees cost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders import WORLD_SIZE, Contender, free_port


async def respawn(command: Sequence[str], ranks: int) -> int:
    """Run generation after generation until one ends with every rank at exit code 0."""
    generation = 0
    while True:
        generation += 1
        port = str(free_port())
        processes: list[asyncio.subprocess.Process] = []
        try:
            for rank in range(ranks):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "RELAUNCH_GENERATION": str(generation),
                }
                processes.append(await asyncio.create_subprocess_exec(*command, env=environment))
            waits = [asyncio.ensure_future(process.wait()) for process in processes]
            for wait in asyncio.as_completed(waits):
                if await wait != 0:
                    break
            else:
                return 0
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
            for process in processes:
                await process.wait()


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=WORLD_SIZE)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what every rank runs"
    )
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command: expected -- COMMAND")
    loop = asyncio.ensure_future(respawn(command, options.ranks))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, loop.cancel)
    try:
        return await loop
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


class Floor(Contender):
    name = "floor: bare asyncio loop"

    def launch(self, folder: Path) -> None:
        floor = [sys.executable, "-m", "benchmarks.floor", "--ranks", str(self.ranks)]
        self.spawn([*floor, "--", *self.command], folder / "floor.log")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
