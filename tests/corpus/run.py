"""Play the real endings of `endings/` through the whole service, and count what is right.

    python -m tests.corpus --work FOLDER          all, or what is left of an interrupted run
    python -m tests.corpus --only node_xid94_contained_documented --ways alone,error-file
    python -m tests.corpus --work FOLDER --table  the score of what was played

Each row goes to FOLDER/rows.jsonl as soon as it is known. Wrong ones are listed only of endings
that tables may be written with; --held-out lists the others, too, and then they are spent.
"""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from queue import SimpleQueue

from tests.corpus.ending import ENDINGS, Ending, is_held_out, read_ending
from tests.corpus.play import Row, find_mistakes, find_reboots, make_play, prepare, run_play
from tests.programs.run import Rows, choose
from tests.programs.service import Service

WAYS = {
    "alone": "only the ranks of the ending; one more runs until it is stopped",
    "after-echo": "1 s after that one has lost a connection on another node",
    "before-echo": "1 s before it",
    "error-file": "alone; where it is an exception, torch's error file has it, too",
    "torchrun": "alone; a double of torchrun starts the ranks",
}
COLUMNS = ("cause", "action", "guilty", "healthy node touched")
Cell = tuple[str, str]


def list_cells(endings: dict[str, Ending], ways: Sequence[str]) -> list[Cell]:
    """Return what can be played, one way after the other."""
    return [
        (name, way) for way in ways for name in endings if make_play(endings[name], way) is not None
    ]


def play_cells(
    cells: Sequence[Cell],
    endings: dict[str, Ending],
    rows: Rows,
    work: Path,
    at_once: int,
    until: float,
) -> int:
    """Play cells side by side on one service; return how many found no time."""
    # Another one each time: a worker that starts again reads the histories of all its fleets first.
    folder = work / "services" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    options = prepare(folder, at_once)
    free = SimpleQueue[str]()
    for number in range(1, at_once + 1):
        free.put(f"f{number}")

    def play(cell: Cell) -> Row | None:
        name, way = cell
        if time.monotonic() > until:
            return None
        fleet = free.get()
        try:
            return run_play(service, fleet, name, way, endings[name], work / "plays")
        finally:
            free.put(fleet)

    left = 0
    with Service(folder, *options) as service, ThreadPoolExecutor(at_once) as pool:
        try:
            for done in as_completed([pool.submit(play, cell) for cell in cells]):
                row = done.result()
                if row is None:
                    left += 1
                    continue
                rows.add(row)
                name = row["ending"]
                wrong = [] if is_held_out(name) else find_mistakes(row, endings[name])
                print(f"{Path(name).stem:48} {row['way']:12} {', '.join(wrong)}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return left


def judge(rows: Sequence[Row], endings: dict[str, Ending]) -> list[tuple[Row, list[str]]]:
    """Return each row with what it has wrong."""
    rebooted = defaultdict[str, set[str]](set)
    for row, node in find_reboots(rows):
        rebooted[row["job"]].add(node)
    return [
        (row, find_mistakes(row, endings[row["ending"]], frozenset(rebooted[row["job"]])))
        for row in rows
    ]


def render_score(judged: Sequence[tuple[Row, list[str]]]) -> str:
    """Return the table of what is right, by way, known endings and held-out ones apart."""
    lines = [
        "| way | endings | played | cause | first action | rank named | healthy nodes touched |",
        "| -- | -- | -- | -- | -- | -- | -- |",
    ]
    for way in WAYS:
        for title, held in (("known", False), ("held out", True)):
            group = [
                (row, wrong)
                for row, wrong in judged
                if row["way"] == way and is_held_out(row["ending"]) is held
            ]
            if not group:
                continue
            count = {what: sum(what in wrong for _, wrong in group) for what in COLUMNS}
            named = sum(bool(row["guilty"]) for row, _ in group)
            share = [
                f"{total - count[what]} of {total} ({(total - count[what]) / max(1, total):.1%})"
                for what, total in (
                    ("cause", len(group)),
                    ("action", len(group)),
                    ("guilty", named),
                )
            ]
            lines.append(
                f"| {way} | {title} | {len(group)} | {' | '.join(share)} "
                f"| {count['healthy node touched']} |"
            )
    return "\n".join(lines)


def list_wrong(
    judged: Sequence[tuple[Row, list[str]]], endings: dict[str, Ending], held_out: bool
) -> list[str]:
    """Return a line for each row that has something wrong, or differs from `diagnose` alone."""
    lines = []
    for row, wrong in sorted(
        judged, key=lambda one: (one[0]["ending"], [*WAYS].index(one[0]["way"]))
    ):
        if is_held_out(row["ending"]) and not held_out:
            continue
        ending, notes = endings[row["ending"]], list(wrong)
        if row["way"] == "alone" and row["pure"] is not None and row["pure"] != row["cause"]:
            notes.append(f"diagnose alone says {row['pure']}")
        if notes:
            lines.append(
                f"{row['ending'].removesuffix('.yaml')} {row['way']}: {', '.join(notes)}: "
                f"{row['cause']} {row['action']} {row['code']}, right is {ending.cause} "
                f"{ending.action}: {row['reason'][:160]}"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, help="folder of a run that can be interrupted")
    parser.add_argument("--only", help="endings, comma-separated, without .yaml")
    parser.add_argument("--ways", help=f"comma-separated: {', '.join(WAYS)}")
    parser.add_argument("--again", action="store_true", help="also what has a row already")
    parser.add_argument("--at-once", type=int, default=8, help="jobs side by side (default: 8)")
    parser.add_argument(
        "--minutes", type=float, default=90.0, help="start no job after so many (default: 90)"
    )
    parser.add_argument("--table", action="store_true", help="print the score of --work, and end")
    parser.add_argument("--held-out", action="store_true", help="list wrong held-out ones, too")
    arguments = parser.parse_args()
    paths = {path.stem: path for path in sorted(ENDINGS.glob("*.yaml"))}
    names = arguments.only.split(",") if arguments.only else list(paths)
    for name in names:
        if name not in paths:
            near = ", ".join(get_close_matches(name, paths, cutoff=0.2)) or "a file's name"
            parser.error(f"ending {name!r} is unknown: expected one of {ENDINGS}, such as {near}")
    try:
        ways = choose(arguments.ways, list(WAYS), "way")
    except ValueError as error:
        parser.error(str(error))
    if arguments.at_once < 1:
        parser.error(f"--at-once {arguments.at_once}: expected 1 or more")
    endings = {paths[name].name: read_ending(paths[name]) for name in names}
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="relaunch-corpus-"))).resolve()
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--work {work} cannot be made: {error.strerror}")
    rows = Rows(work / "rows.jsonl", "ending", "way")
    cells = list_cells(endings, ways)
    left = 0
    if not arguments.table:
        lock = (work / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"--work {work}: another run goes on there")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        print(f"rows and logs: {work}", flush=True)
        missing = [cell for cell in cells if arguments.again or cell not in rows.known]
        if missing:
            until = time.monotonic() + 60 * arguments.minutes
            left = play_cells(missing, endings, rows, work, arguments.at_once, until)
    played = [rows.known[cell] for cell in cells if cell in rows.known]
    judged = judge(played, endings)
    for line in list_wrong(judged, endings, arguments.held_out):
        print(line)
    print(render_score(judged))
    if left:
        print(f"{left} found no time: --work {work} goes on with them")
    return 0
