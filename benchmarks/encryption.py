"""What encryption of payloads costs: recovery of one job, and one service with many jobs.

    python -m benchmarks.encryption [--turns 4] [--rounds 10] [--jobs 300] [--output FILE]

Both kinds, without and with keys, in turns and in one run on one machine. Recovery is that of
`benchmarks.run`, from the kill of one of four ranks until all four run again, under `relaunch up`;
which kind begins changes with each turn. Many jobs are those of `benchmarks.scale`. With `--output`
what is in the file already is not measured again, so a run can be done in parts: `--turns 0` leaves
recovery out, `--jobs 0` the jobs, and `--kinds` one kind.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import scale
from benchmarks.contenders import measure_recovery, measure_start
from benchmarks.relaunch import Relaunch

KINDS = ("without", "with")
VARIABLES = ("RELAUNCH_ENCRYPTION_KEYS", "RELAUNCH_ENCRYPTION_KEY")


@contextmanager
def environment(kind: str, folder: Path) -> Iterator[None]:
    """Have what is started use a new key, or none."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    if kind == "with":
        keys = folder / "keys"
        keys.mkdir(mode=0o700)
        (keys / "bench").touch(mode=0o600)
        (keys / "bench").write_text(base64.b64encode(os.urandom(32)).decode())
        os.environ.update(zip(VARIABLES, (str(keys), "bench"), strict=True))
    try:
        yield
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)


def measure_turn(kind: str, rounds: int) -> list[float]:
    """Return the milliseconds of each recovery."""
    with (
        tempfile.TemporaryDirectory(prefix="relaunch-bench-") as name,
        environment(kind, Path(name)),
    ):
        contender = Relaunch(Path(name) / "state")
        contender.bring_up()
        try:
            measure_start(contender, Path(name) / "job")
            return measure_recovery(contender, rounds)
        finally:
            contender.stop()
            contender.take_down()


def measure_jobs(kind: str, jobs: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="relaunch-bench-") as name,
        environment(kind, Path(name)),
    ):
        return scale.measure(2 * jobs, jobs)


def describe_recovery(times: list[float]) -> str:
    low, median, high = statistics.quantiles(times, n=4)
    return f"{median:.0f} ms ({low:.0f} to {high:.0f}), {len(times)} recoveries"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="recoveries in each turn of a kind")
    parser.add_argument("--jobs", type=int, default=300, help="0 leaves them out")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    output: Path | None = options.output
    found: dict[str, Any] = json.loads(output.read_text()) if output and output.exists() else {}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        if output:
            output.write_text(json.dumps(found, indent=1) + "\n")

    for turn in range(options.turns):
        for kind in options.kinds if turn % 2 == 0 else reversed(options.kinds):
            if (name := f"recovery {kind} {turn}") not in found:
                keep(name, [round(one, 1) for one in measure_turn(kind, options.rounds)])
    for kind in options.kinds:
        name = f"{options.jobs} jobs {kind}"
        if options.jobs and name not in found:
            keep(name, measure_jobs(kind, options.jobs))
    for kind in KINDS:
        named = [value for name, value in found.items() if name.startswith(f"recovery {kind} ")]
        if times := [one for each in named for one in each]:
            print(f"{kind:<8} {describe_recovery(times)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
