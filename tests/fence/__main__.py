"""`python -m tests.fence`: attack the promise that no two generations of a job are alive at once.

Hosts with an sshd each stand in namespaces on a switch that loses and delays packets (needs root;
`hosts.py`). A violation is read from the ranks' own stamps, which all hosts take from one clock: a
busy machine makes things late and never wrong. Without --attack, each named attack is played once
and the random one 200 times; a run that was interrupted goes on with the same --work and --seed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import end_by_signal
from tests.fence.hosts import find_obstacle
from tests.fence.rounds import ALL, RANDOM, Record, work

RANDOM_ROUNDS = 200


async def main() -> int:
    listed = "\n".join(f"  {name:<28} {attack.shows}" for name, attack in ALL.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.fence",
        description=__doc__,
        epilog=f"attacks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--attack", help="comma-separated; default: all")
    parser.add_argument(
        "--rounds", type=int, help=f"of each attack; default: 1, of {RANDOM.name} {RANDOM_ROUNDS}"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--work", type=Path, help="folder of worlds and results; default: a new one"
    )
    parser.add_argument("--worlds", type=int, default=1, help="side by side")
    arguments = parser.parse_args()
    if obstacle := find_obstacle():
        parser.error(obstacle)
    names = arguments.attack.split(",") if arguments.attack else list(ALL)
    if unknown := set(names) - set(ALL):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(ALL)}")
    folder = arguments.work or Path(tempfile.mkdtemp(prefix="relaunch-fence-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    folder.chmod(0o755)  # ranks may be another user's
    print(f"seed {arguments.seed}, in {folder}", flush=True)
    record, queue = Record(folder, arguments.seed), []
    for name in names:
        attack = ALL[name]
        if reason := attack.obstacle():
            print(f"left out   {name}: {reason}", flush=True)
            continue
        rounds = arguments.rounds or (RANDOM_ROUNDS if attack is RANDOM else 1)
        queue += [(attack, number) for number in range(rounds) if not record.has(name, number)]
    await asyncio.gather(
        *(
            work(folder / f"stage-{number}", queue, arguments.seed, record)
            for number in range(arguments.worlds)
        )
    )
    print("\n" + "\n".join(record.table()))
    return int(any(one.overlaps for one in record.results))


if __name__ == "__main__":
    sys.exit(asyncio.run(end_by_signal(main())))
