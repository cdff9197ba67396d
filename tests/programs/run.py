"""Run programs with faults through the whole service, and under torchrun beside it.

    python -m tests.programs --work FOLDER            all, or what is left of an interrupted run
    python -m tests.programs --only nanogpt --faults kill,keyerror
    python -m tests.programs --list

Each row goes to FOLDER/rows.jsonl as soon as it is known, and the table to FOLDER/programs.md.
The programs with torch or jax need a Python that has them: RELAUNCH_TORCH_PYTHON names it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.programs.cases import FAULTS, PROGRAMS, Fault, Program, find_deviations, has_place
from tests.programs.service import (
    Service,
    clear,
    find_missing,
    find_obstacle,
    memory_cgroup,
    read_outcome,
    run_torchrun,
    small_disk,
)
from tests.programs.table import render, render_missing

PYTHON = os.environ.get("RELAUNCH_TORCH_PYTHON", "python3")
Row = dict[str, Any]


class Rows:
    """What was measured, by two of the fields of a row; the newest of each is kept."""

    def __init__(self, file: Path, first: str = "program", second: str = "fault") -> None:
        self.file, self.known = file, dict[tuple[str, str], Row]()
        self._fields = first, second
        if file.exists():
            # The last line is half where the run was killed.
            for line in file.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                self._keep(row)

    def add(self, row: Row) -> None:
        self._keep(row)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _keep(self, row: Row) -> None:
        first, second = self._fields
        self.known[row[first], row[second]] = row


def run_cell(
    service: Service,
    program: Program,
    fault: Fault,
    work: Path,
    cgroup: Path | None,
    untouched: Mapping[str, Any] | None,
    torchrun: bool,
) -> Row:
    """Run one program with one fault, as a job and under torchrun, and return its row.

    Args:
        untouched: The outcome of the program without a fault, or None where this is that run.
        torchrun: Whether to run it under torchrun as well.
    """
    python = PYTHON if program.imports else shutil.which("python3") or sys.executable
    row: Row = {
        "program": program.name,
        "fault": fault.name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for how in ("relaunch", "torchrun") if torchrun else ("relaunch",):
        folder = work / "cells" / f"{program.name}-{fault.name}" / how
        clear(folder)
        with ExitStack() as stack:
            if fault.needs == "tmpfs":
                stack.enter_context(small_disk(folder / "out"))
            if how == "relaunch":
                row |= service.run(program, fault, python, folder, cgroup)
                row["outcome"] = read_outcome(folder)
                row["same"] = row["outcome"] is not None and row["outcome"] == (
                    untouched or row["outcome"]
                )
            else:
                home = work / "service" / "home"
                beside = run_torchrun(program, fault, python, folder, home, cgroup)
                beside["same"] = beside["outcome"] is not None and beside["outcome"] == (
                    untouched or row["outcome"]
                )
                row["torchrun"] = beside
    return row


def render_page(rows: Rows) -> str:
    known = list(rows.known.values())
    missing = render_missing(known)
    return render(known) + (f"\n\nNot run:\n\n{missing}" if missing else "")


def choose(names: str | None, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the chosen names.

    Raises:
        ValueError: One of them is unknown.
    """
    if not names:
        return tuple(known)
    chosen = tuple(names.split(","))
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"{what} {unknown[0]!r} is unknown: expected some of {', '.join(known)}")
    return chosen


def is_beside_torchrun(program: Program) -> bool:
    """Whether a program is run under torchrun as well, which some Python has and can start."""
    return bool(program.imports) and program.launcher == "none"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, help="folder of a run that can be interrupted")
    parser.add_argument("--only", help="programs, comma-separated")
    parser.add_argument("--faults", help="comma-separated; `none` is always run first")
    parser.add_argument("--again", action="store_true", help="also what has a row already")
    parser.add_argument("--no-torchrun", action="store_true", help="leave torchrun out")
    parser.add_argument(
        "--minutes", type=float, default=90.0, help="start no row after so many (default: 90)"
    )
    parser.add_argument("--list", action="store_true", help="print programs and faults, and end")
    parser.add_argument("--table", action="store_true", help="print the table of --work, and end")
    arguments = parser.parse_args()
    try:
        programs = choose(arguments.only, [one.name for one in PROGRAMS], "program")
        faults = choose(arguments.faults, [one.name for one in FAULTS], "fault")
    except ValueError as error:
        parser.error(str(error))
    cells = [
        (program, fault)
        for fault in FAULTS
        for program in PROGRAMS
        if program.name in programs
        and (fault.name in faults or fault.name == "none")
        and has_place(program, fault)
    ]
    if arguments.list:
        for one in (*PROGRAMS, *FAULTS):
            print(f"{one.name:18} {one.what}")
        print(f"{len(cells)} rows")
        return 0
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="relaunch-programs-"))).resolve()
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--work {work} cannot be made: {error.strerror}")
    rows = Rows(work / "rows.jsonl")
    if arguments.table:
        print(render_page(rows))
        return 0
    lock = (work / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.error(f"--work {work}: another run goes on there")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"rows and logs: {work}", flush=True)
    left_out = run_cells(cells, rows, work, arguments)
    (work / "programs.md").write_text(render_page(rows) + "\n")
    chosen = [
        rows.known[key]
        for program, fault in cells
        if (key := (program.name, fault.name)) in rows.known
    ]
    wrong = [(row, one) for row in chosen for one in find_deviations(row)]
    for row, one in wrong:
        print(f"{row['program']} {row['fault']}: {one}")
    for one in left_out:
        print(f"left out: {one}")
    print(f"{len(chosen)} of {len(cells)} rows, {len(wrong)} not as expected: {work}/programs.md")
    return 1 if wrong else 0


def run_cells(
    cells: Sequence[tuple[Program, Fault]], rows: Rows, work: Path, arguments: argparse.Namespace
) -> list[str]:
    """Run what has no row yet; return what cannot be run or found no time, as sentences."""
    missing = {
        program.name: f"{program.name}: {reason}, see RELAUNCH_TORCH_PYTHON"
        for program in {one.name: one for one, _ in cells}.values()
        if (reason := find_missing(PYTHON, program))
    }
    left_out = list(missing.values())
    until = time.monotonic() + 60 * arguments.minutes
    with ExitStack() as stack:
        cgroup = stack.enter_context(memory_cgroup())
        service = stack.enter_context(Service(work / "service"))
        for program, fault in cells:
            key = (program.name, fault.name)
            if program.name in missing or (key in rows.known and not arguments.again):
                continue
            if obstacle := find_obstacle(fault, cgroup):
                left_out.append(f"{program.name} {fault.name}: {obstacle}")
                continue
            if time.monotonic() > until:
                left_out.append(f"{program.name} {fault.name}: no time, `--work` goes on with it")
                continue
            base = rows.known.get((program.name, "none"))
            untouched = base["outcome"] if base and fault.name != "none" else None
            torchrun = is_beside_torchrun(program) and not arguments.no_torchrun
            row = run_cell(service, program, fault, work, cgroup, untouched, torchrun)
            rows.add(row)
            beside = row.get("torchrun")
            print(
                f"{program.name:16} {fault.name:16} {row['phase']} {row['generations']}"
                f" {row['cause']} same={row['same']} {row['seconds']:.0f} s"
                + (f"; torchrun {beside['exit_code']} same={beside['same']}" if beside else ""),
                flush=True,
            )
            for one in find_deviations(row):
                print(f"    {one}", flush=True)
    return left_out
