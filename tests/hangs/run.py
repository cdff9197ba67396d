"""Play real hangs and healthy pauses through the whole service, and count what is named right.

    python -m tests.hangs --work FOLDER --seeds 20           all, or what is left of a run
    python -m tests.hangs --work FOLDER --kinds stopped,order --beside
    python -m tests.hangs --work FOLDER --ranks 64 --seeds 3 --kinds stopped --stacks
    python -m tests.hangs --work FOLDER --table              the tables of what was played

Each row goes to FOLDER/rows.jsonl as soon as it is known, and the tables to FOLDER/hangs.md. Ranks
run in the Python that RELAUNCH_TORCH_PYTHON names, which needs torch.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.hangs.kinds import BY_NAME, Case, find_mistakes, find_obstacle, make_case
from tests.hangs.play import (
    NODES,
    TORCH_TIMEOUT_S,
    Settings,
    list_launchers,
    play_beside,
    play_job,
    prepare,
)
from tests.hangs.table import render
from tests.programs.cases import Program
from tests.programs.run import PYTHON, choose
from tests.programs.service import Service, find_missing

NEEDED = Program("hangs", "train.py", "", imports=("torch", "numpy"))

Row = dict[str, Any]


class Rows:
    """What was played, by the name of the case; the newest of each is kept."""

    def __init__(self, file: Path) -> None:
        self.file, self.known = file, dict[str, Row]()
        if file.exists():
            for line in file.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the last line is half where the run was killed
                self.known[row["case"]] = row

    def add(self, row: Row) -> None:
        self.known[row["case"]] = row
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def play(
    service: Service, fleet: str, case: Case, work: Path, settings: Settings, options: Any
) -> Row:
    """Play a case through the service and, where asked for, under other launchers after it."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = work / "plays" / f"{case.name}-{stamp}"
    row: Row = {
        "case": case.name,
        "kind": case.kind.name,
        "seed": case.seed,
        "ranks": case.ranks,
        "variant": case.variant,
        "loop": case.loop,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **play_job(service, fleet, case, folder / "relaunch", settings),
    }
    if options.beside and case.kind.hangs:
        for launcher in list_launchers(settings, options.scale, options.nvrx):
            home = service.folder / "home"
            row[launcher.name] = play_beside(launcher, case, folder / launcher.name, settings, home)
    return row


def play_cases(
    cases: Sequence[Case], rows: Rows, work: Path, settings: Settings, options: Any
) -> int:
    """Play cases side by side on one service; return how many found no time."""
    until = time.monotonic() + 60 * options.minutes
    # Another one each time: a worker that starts again reads the histories of all fleets first.
    folder = work / "services" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    prepared = prepare(folder, options.jobs)
    free = SimpleQueue[str]()
    for number in range(1, options.jobs + 1):
        free.put(f"h{number}")

    def play_next(case: Case) -> Row | None:
        if time.monotonic() > until:
            return None
        fleet = free.get()
        try:
            return play(service, fleet, case, work, settings, options)
        finally:
            free.put(fleet)

    left = 0
    with Service(folder, *prepared) as service, ThreadPoolExecutor(options.jobs) as pool:
        try:
            for done in as_completed([pool.submit(play_next, case) for case in cases]):
                row = done.result()
                if row is None:
                    left += 1
                    continue
                rows.add(row)
                print(describe(row), flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return left


def describe(row: Row) -> str:
    wrong = find_mistakes(row, BY_NAME[row["kind"]])
    after = f" after {row['seconds']:.1f} s" if row.get("seconds") is not None else ""
    rule = f" by {row['rule']}" if row.get("rule") else ""
    return (
        f"{row['case']:22} {row['phase']}, {row['generations']}: {row['cause'] or 'no incident'}"
        f"{rule}{after}, rank {row['rank']}, named {row['named']}"
        + (f": {', '.join(wrong)}" if wrong else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hangs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, help="folder of a run that can be interrupted")
    parser.add_argument("--kinds", help="comma-separated; default: all, and the healthy pauses")
    parser.add_argument("--seeds", type=int, default=1, help="of each kind (default: 1)")
    parser.add_argument("--first-seed", type=int, default=0, help="the lowest (default: 0)")
    parser.add_argument("--ranks", type=int, default=4, help="on two nodes (default: 4)")
    parser.add_argument("--jobs", type=int, default=2, help="at once (default: 2)")
    parser.add_argument(
        "--minutes", type=float, default=240.0, help="start no case after so many (default: 240)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1200.0,
        help="seconds until a hang counts as not seen (default: 1200; learned limits: 900 or more)",
    )
    parser.add_argument(
        "--pause", type=float, default=60.0, help="seconds of a healthy pause (default: 60)"
    )
    parser.add_argument("--after", default="", help="hang.after of the policy (default: learned)")
    parser.add_argument(
        "--heartbeat",
        default="",
        help="timeouts.heartbeat of the policy (default: 10s); the rules' times follow it",
    )
    parser.add_argument(
        "--recover", action="store_true", help="restart after a hang (default: the job fails)"
    )
    parser.add_argument(
        "--flight-record",
        action="store_true",
        help="ask ranks for torch's record while they hang (default: not asked)",
    )
    parser.add_argument(
        "--stacks", action="store_true", help="time `relaunch stacks` while ranks hang"
    )
    parser.add_argument(
        "--beside", action="store_true", help="the same under torchrun, and ft_launcher"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="divide the time-outs of torchrun's ranks and of ft_launcher by this (default: 1,"
        f" that is {TORCH_TIMEOUT_S:.0f} s in a collective)",
    )
    parser.add_argument(
        "--nvrx",
        default=os.environ.get("RELAUNCH_NVRX_PYTHON", ""),
        help="a Python with torch and nvidia-resiliency-ext (default: RELAUNCH_NVRX_PYTHON)",
    )
    parser.add_argument("--again", action="store_true", help="also what has a row already")
    parser.add_argument("--list", action="store_true", help="print the kinds, and end")
    parser.add_argument("--table", action="store_true", help="print the tables of --work, and end")
    options = parser.parse_args()
    if options.list:
        for kind in BY_NAME.values():
            print(f"{kind.name:14} {'hang   ' if kind.hangs else 'healthy'} {kind.what}")
        return 0
    if options.ranks < 2 * NODES or options.ranks % NODES:
        parser.error(f"--ranks {options.ranks}: expected an even number of at least {2 * NODES}")
    for name, least in (("seeds", 1), ("jobs", 1), ("first_seed", 0)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    try:
        kinds = choose(options.kinds, list(BY_NAME), "kind")
    except ValueError as error:
        parser.error(str(error))
    work = (options.work or Path(tempfile.mkdtemp(prefix="relaunch-hangs-"))).resolve()
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--work {work} cannot be made: {error.strerror}")
    rows = Rows(work / "rows.jsonl")
    if options.table:
        print(render(list(rows.known.values())))
        return 0
    if missing := find_missing(PYTHON, NEEDED):
        parser.error(f"{missing}: RELAUNCH_TORCH_PYTHON names a Python that has it")
    lock = (work / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.error(f"--work {work}: another run goes on there")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"rows and logs: {work}", flush=True)
    chosen = [
        make_case(BY_NAME[kind], seed, options.ranks)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for kind in kinds
    ]
    obstacles = {case.name: reason for case in chosen if (reason := find_obstacle(case))}
    cases = [
        case
        for case in chosen
        if case.name not in obstacles and (options.again or case.name not in rows.known)
    ]
    settings = Settings(
        PYTHON,
        options.limit,
        options.pause,
        options.after,
        options.recover,
        options.stacks,
        options.heartbeat,
        options.flight_record,
    )
    left = play_cases(cases, rows, work, settings, options) if cases else 0
    for name, reason in obstacles.items():
        print(f"left out: {name}: {reason}")
    if left:
        print(f"left out: {left} cases found no time, `--work` goes on with them")
    page = render(list(rows.known.values()))
    (work / "hangs.md").write_text(page + "\n")
    print(page)
    played = [rows.known[case.name] for case in chosen if case.name in rows.known]
    wrong = sum(bool(find_mistakes(row, BY_NAME[row["kind"]])) for row in played)
    print(f"{len(played)} of {len(chosen)} cases, {wrong} not as expected: {work}/hangs.md")
    return 1 if wrong else 0
