"""How many of the real endings the diagnosis names right.

    python -m tests.corpus.score [--wrong]

Each ending is given to `diagnose` as the observations that agents would send of it: a second for
all of them, for people who change tables. No rank runs, nothing is watched, and no action is taken:
`python -m tests.corpus` plays them.
"""

from __future__ import annotations

import argparse
import signal
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from relaunch.evidence.causes import Cause
from relaunch.evidence.observations import RankExited
from relaunch.job.diagnose import diagnose
from relaunch.job.events import FaultObserved
from tests.corpus.ending import ENDINGS, Ending, RankEnding, is_held_out, read_ending
from tests.recovery.builders import running

BEGAN = datetime(2026, 11, 23, tzinfo=UTC)
KILLED = (RankEnding(rank=0, exit="SIGKILL"),)
"""Whose ending a kernel log is that was published without its job."""


class Judged(NamedTuple):
    name: str
    ending: Ending
    cause: Cause

    @property
    def is_right(self) -> bool:
        return self.cause in self.ending.causes


def judge_all() -> list[Judged]:
    """Judge every ending."""
    endings = ((path.name, read_ending(path)) for path in sorted(ENDINGS.glob("*.yaml")))
    judged = ((name, ending, diagnose_ending(ending)) for name, ending in endings)
    return [Judged(name, ending, cause) for name, ending, cause in judged if cause is not None]


def diagnose_ending(ending: Ending) -> Cause | None:
    """Return the cause that `diagnose` names for an ending; None: no rank fails in it."""
    ranks = ending.ranks or KILLED
    ends = [_observe(one, ending, at) for at, one in enumerate(ranks)]
    exits = tuple(one for one in ends if one.failed)
    if not exits:
        return None
    finished = tuple(one for one in ends if not one.failed and one.at <= exits[0].at)
    fault = FaultObserved(1, exits, 0, BEGAN, (), finished=finished)
    return diagnose(running(generation=1), fault).cause


def _observe(one: RankEnding, ending: Ending, at: int) -> RankExited:
    number = int(signal.Signals[one.exit]) if isinstance(one.exit, str) else None
    return RankExited(
        node=f"n{at + 1}",
        rank=one.rank,
        local_rank=0,
        exit_code=None if isinstance(one.exit, str) else one.exit,
        signal=number,
        at=BEGAN + timedelta(seconds=one.after),
        log_tail=tuple(one.log.splitlines()),
        kernel=tuple(ending.kernel.splitlines()) if at == 0 else (),
        pid=one.pid,
    )


def split(judged: list[Judged]) -> tuple[list[Judged], list[Judged]]:
    """Return those that tables may be written with, and those that are held out."""
    return (
        [one for one in judged if not is_held_out(one.name)],
        [one for one in judged if is_held_out(one.name)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrong", action="store_true", help="list the wrong ones, not held out")
    wants_wrong = parser.parse_args().wrong
    known, held_out = split(judge_all())
    for title, group in (("known", known), ("held out", held_out)):
        print(f"{title}: {sum(one.is_right for one in group)} of {len(group)} causes right")
    for one in known if wants_wrong else ():
        if not one.is_right:
            print(f"{one.name}: {one.cause}, right is {one.ending.cause}")


if __name__ == "__main__":
    main()
