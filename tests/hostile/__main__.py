"""Has one node of three lie: python -m tests.hostile [--messages 10000] [--seed N]"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from datetime import timedelta
from pathlib import Path

import relaunch.job.fencing
from tests.hostile.service import attack
from tests.workflows.conftest import dev_server


async def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    options.add_argument(
        "--messages", type=int, default=10_000, help="how many false messages to send"
    )
    options.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="draws the same lies again"
    )
    given = options.parse_args()
    relaunch.job.fencing.FENCE_MARGIN = timedelta(seconds=0.5)
    with tempfile.TemporaryDirectory(prefix="relaunch-hostile-") as folder:
        async with dev_server() as client:
            print(
                await attack(
                    client,
                    Path(folder),
                    messages=given.messages,
                    seed=given.seed,
                    say=lambda text: print(text, flush=True),
                )
            )


asyncio.run(main())
