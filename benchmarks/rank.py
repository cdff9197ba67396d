"""The rank of all contenders of the benchmark: it reports when it started, then counts steps.

It imports no more than it needs, so that the launcher is measured and not the rank.
"""

import os
import sys
import time

STEP_VARIABLE = "BENCH_STEP_S"
"""Names the variable with the seconds between two steps."""
STARTED = time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def report_start() -> None:
    """Append `<CLOCK_MONOTONIC ns> <rank> <generation> <pid>`, in one O_APPEND write: not torn."""
    path = os.environ.get("BENCH_STARTS") or (sys.argv[1] if len(sys.argv) > 1 else "")
    if not path:
        sys.exit(
            "no file to report the start to: set BENCH_STARTS or give it as the first argument"
        )
    generation = (
        os.environ.get("RELAUNCH_GENERATION") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    )
    line = f"{STARTED} {os.environ.get('RANK', '0')} {generation} {os.getpid()}\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line.encode())
    os.close(file)


def count_steps(path: str) -> None:
    step, interval = 0, float(os.environ.get(STEP_VARIABLE, "0.1"))
    while True:
        time.sleep(interval)
        step += 1
        if path:
            with open(path, "w") as file:
                file.write(f'{{"step": {step}}}')


if __name__ == "__main__":
    report_start()
    count_steps(os.environ.get("RELAUNCH_PROGRESS_FILE", ""))
