"""Draws hostile input for every parser: python -m tests.fuzz [--minutes 10] [--only NAME]"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.targets import TARGETS, Target

EXAMPLES = 150
"""Inputs that one seed draws for each target."""


def run(one: Target, number: int, examples: int) -> str:
    """Draw inputs by a seed; return how the smallest that fails does so, or an empty text."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    @given(one.inputs)
    def draw(value: object) -> None:
        one.check(value)

    try:
        draw()
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return "".join([*traceback.format_exception(error)[-6:], notes[:4000]])
    return ""


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--only", choices=sorted(TARGETS), action="append", metavar="NAME")
    options.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="the first; each round has one"
    )
    options.add_argument("--examples", type=int, default=EXAMPLES, help="of a target, by one seed")
    options.add_argument("--list", action="store_true", help="name all targets, and end")
    chosen = options.parse_args()
    if chosen.list:
        print("\n".join(TARGETS))
        return 0
    warnings.simplefilter("ignore")
    until = time.monotonic() + 60 * chosen.minutes
    failed: dict[str, int] = {}
    number, drawn = chosen.seed, 0
    while time.monotonic() < until:
        # In another order each time: the time may end within a round, on a busy machine each time.
        names = list(chosen.only or TARGETS)
        random.Random(number).shuffle(names)
        for name in names:
            if name in failed:
                continue
            drawn += chosen.examples
            if how := run(TARGETS[name], number, chosen.examples):
                failed[name] = number
                print(f"--- {name} with --only {name} --seed {number}\n{how}", flush=True)
            if time.monotonic() > until:
                break
        number += 1
    print(f"{drawn} inputs by seeds {chosen.seed} to {number - 1}; go on with --seed {number}")
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
