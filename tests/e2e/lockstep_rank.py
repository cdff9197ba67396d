"""A rank whose steps wait for all others; on one node its work takes longer.

lockstep_rank.py FOLDER SLOW_GROUP_RANK
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from relaunch.callbacks import report, time_work

FOLDER, SLOW = Path(sys.argv[1]), sys.argv[2]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def reach(step: int) -> None:
    """Wait until all ranks have come to a step."""
    own = FOLDER / f"{os.environ['RELAUNCH_GENERATION']}.{RANK}"
    part = own.with_name(f"{own.name}.part")
    part.write_text(str(step))
    part.rename(own)
    for rank in range(WORLD):
        other = own.with_name(f"{os.environ['RELAUNCH_GENERATION']}.{rank}")
        while not other.exists() or int(other.read_text()) < step:
            time.sleep(0.002)


step, last = 0, FOLDER / "last"
while not last.exists() or step < int(last.read_text()):
    step += 1
    with time_work():
        time.sleep(0.12 if os.environ["GROUP_RANK"] == SLOW else 0.04)
    if RANK == 0 and (FOLDER / "end").exists() and not last.exists():
        # All see it before the step after this one.
        (FOLDER / "last.part").write_text(str(step + 1))
        (FOLDER / "last.part").rename(last)
    reach(step)
    report(step)
