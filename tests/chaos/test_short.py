"""A short run of the crash matrix.

What is killed and cut most often, in the phase in which a job spends its life.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.chaos.run import Tally, work

SEED = 20261121
CELLS = (
    # The longest first, so that two worlds end together.
    *(
        ("RUNNING", victim)
        for victim in ("cut both", "reboot", "worker", "server", "rank", "shim", "supervisor")
    ),
    # The one that found a gang of two halves.
    ("failpoint", "start.received"),
)
WORLDS = 2


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_kill_9_and_cuts_lose_and_double_nothing_at_the_due_cost(
    tmp_path: Path,
) -> None:
    order, tally = random.Random(SEED), Tally()
    queue = [(cell, order.getrandbits(32)) for cell in CELLS]
    await asyncio.gather(
        *(work(number, tmp_path, queue, tally, time.monotonic() + 800) for number in range(WORLDS))
    )
    assert tally.reports == []
    assert sum(tally.passed.values()) == len(CELLS), f"only {dict(tally.passed)} in time"
