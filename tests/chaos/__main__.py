"""`python -m tests.chaos`: kill and cut everything in every phase.

Nothing may be lost, doubled or spent without need.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.disturbances import find_obstacle
from tests.chaos.rounds import ABSENT, FAILPOINTS, NOT_YET, ONLY, PHASES, POINTS, VICTIMS, WARM
from tests.chaos.run import Tally, end_by_signal, work

NAMED = {"failpoint": FAILPOINTS, "point": POINTS}
"""Not at random moments: where the agent, or the controller, dies between reserve, act and record.
"""


def table(rows: tuple[str, ...], columns: tuple[str, ...], cell: str, tally: Tally) -> list[str]:
    """Rounds that passed of those played; – where the victim does not exist."""

    def text(row: str, column: str) -> str:
        key = (column, row)
        if key in ABSENT:
            return "–"
        played = tally.passed[key] + tally.failed[key]
        return f"{tally.passed[key]}/{played}" if played else "·"

    wide = max(len(cell), *(len(row) for row in rows))
    head = f"{cell:<{wide}}  " + "  ".join(f"{column:>{max(6, len(column))}}" for column in columns)
    return [
        head,
        *(
            f"{row:<{wide}}  " + "  ".join(f"{text(row, c):>{max(6, len(c))}}" for c in columns)
            for row in rows
        ),
    ]


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--rounds", type=int, default=10, help="of each cell")
    parser.add_argument(
        "--backend",
        choices=("local", "ssh"),
        default="local",
        help="of the nodes",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="nodes of ssh in network namespaces: cuts are packets that get lost (root)",
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="jobs import ahead, so that their ranks are forked from their second generation on",
    )
    parser.add_argument("--victims", help="comma-separated; default: all that such nodes have")
    parser.add_argument("--phases", default=",".join((*PHASES, *NAMED)), help="comma-separated")
    parser.add_argument(
        "--minutes", type=float, default=24 * 60, help="start no round after so many"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help=(
            "folder of a run that can be interrupted: with the same seed and cells it goes on there"
        ),
    )
    parser.add_argument(
        "--answer-within",
        type=float,
        help="seconds that a node has for an answer; more than the default on a busy machine",
    )
    parser.add_argument(
        "--worlds", type=int, default=2, help="servers, workers and fleets side by side"
    )
    arguments = parser.parse_args()
    there = tuple(
        victim for victim in VICTIMS if ONLY.get(victim, arguments.backend) == arguments.backend
    )
    if not arguments.warm:
        there = tuple(victim for victim in there if victim not in WARM)
    if arguments.apart:
        # Agents ask their peers over the network that ranks train over: to cut it off is to stop
        # training, which no round expects.
        there = tuple(victim for victim in there if victim != "cut peers")
    for victim in there:
        if (reason := find_obstacle(victim)) is not None:
            print(f"left out: {victim}: {reason}", flush=True)
    there = tuple(victim for victim in there if find_obstacle(victim) is None)
    victims, phases = (
        tuple(arguments.victims.split(",")) if arguments.victims else there,
        tuple(arguments.phases.split(",")),
    )
    for given, known in ((victims, there), (phases, (*PHASES, *NAMED))):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    if arguments.warm and arguments.backend != "local":
        parser.error("--warm: expected --backend local, whose agents have the worker's environment")
    if arguments.apart and arguments.backend != "ssh":
        parser.error("--apart: local nodes have no networks of their own, expected --backend ssh")
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4))
    print(f"seed {seed}", flush=True)
    order = random.Random(seed)
    cells = [
        (phase, victim)
        for phase in phases
        if phase in PHASES
        for victim in victims
        if (phase, victim) not in ABSENT
    ]
    cells += [(phase, name) for phase, names in NAMED.items() if phase in phases for name in names]
    queue = []
    for _ in range(arguments.rounds):
        # Every cell once before any a second time, so that a run that is cut short has seen all of
        # them.
        order.shuffle(cells)
        queue += [(cell, order.getrandbits(32)) for cell in cells]
    folder = (arguments.work or Path(tempfile.mkdtemp(prefix="relaunch-chaos-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally(file=folder / f"rounds-{seed}.jsonl")
    if played := tally.restore():
        print(f"{len(played)} rounds were played before", flush=True)
        queue = [one for one in queue if one not in played]
    until = time.monotonic() + 60 * arguments.minutes
    how = {
        "backend": arguments.backend,
        "apart": arguments.apart,
        "answer_within": arguments.answer_within,
        "warm": arguments.warm,
    }
    await asyncio.gather(
        *(work(number, folder, queue, tally, until, **how) for number in range(arguments.worlds))
    )
    print(f"\nseed {seed}: rounds passed / played\n")
    if shown := tuple(phase for phase in PHASES if phase in phases):
        print(
            "\n".join(
                table(
                    tuple(victim for victim in VICTIMS if victim in victims), shown, "victim", tally
                )
            )
        )
        print(
            f"\n–: no such victim in that phase. {' and '.join(NOT_YET)}: see tests.chaos.repairs."
        )
    for phase, names in NAMED.items():
        if phase in phases:
            print("\n" + "\n".join(table(names, (phase,), "killed at", tally)))
    for report in tally.reports:
        print(f"\n{report}")
    if not tally.reports and arguments.work is None:
        shutil.rmtree(folder)
    return 1 if tally.reports else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(end_by_signal(main())))
