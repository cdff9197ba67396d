"""Take out of the code what a row is about, one change after the other, and run the tests named
after it: each has to fail.

    python -m tests.mutants [ROW ...] [--work FOLDER] [--jobs N]

Each change is made in a copy of this checkout. Before, the same tests run in a copy without any:
they have to pass. With `--work` it goes on there after an interruption. Exit code 1 if a test
passes in spite of a change.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.rows import MUTANTS

BASELINE = "none"
TIMEOUT_S = 120
"""For one test: one that waits for what the change took out has failed then."""
OUTCOME = re.compile(r"^(tests/\S+?::\w+)(?:\[.*\])? (PASSED|FAILED|ERROR|SKIPPED|)", re.MULTILINE)
"""A line of `pytest -v`: the test when it begins, and how it ended behind it."""
Outcomes = dict[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """The tests of a mutant, or all of them without any change."""

    key: str
    mutant: Mutant | None
    tests: tuple[str, ...]


def list_runs(mutants: Sequence[Mutant]) -> list[Run]:
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    before = [Run(f"{BASELINE}: {file}", None, tuple(ids)) for file, ids in by_file.items()]
    changed = [Run(f"{one.row}: {one.what}", one, one.tests) for one in mutants]
    return sorted(before + changed, key=lambda run: max(map(_place, run.tests)))


def _place(test: str) -> int:
    """Return where a test stands in the order: first those that start no server and no process."""
    folders = ("recovery", "access", "deploy", "console", "activities", "agent", "backends")
    folder = test.split("/")[1]
    slow = {"workflows": len(folders), "e2e": len(folders) + 1}
    return folders.index(folder) if folder in folders else slow.get(folder, 0)


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks or would add, with its links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def run(one: Run, copy: Path) -> Outcomes:
    """Run its tests in a copy; return `passed`, `failed` or `skipped` for each."""
    if one.mutant is None:
        return _run_files(one.tests, copy)
    file = copy / one.mutant.file
    before = file.read_text()
    file.write_text(one.mutant.change(copy))
    try:
        return _run_files(one.tests, copy)
    finally:
        file.write_text(before)


def _run_files(tests: Sequence[str], copy: Path) -> Outcomes:
    """Run the tests of each file by themselves: one file may keep pytest from going on."""
    outcomes: Outcomes = {}
    for _, of_file in groupby(sorted(tests), key=lambda test: test.partition("::")[0]):
        left = tuple(of_file)
        while left:
            found = _run_tests(left, copy)
            outcomes |= found
            # Those that an earlier one left no time for, which did not end.
            unseen = tuple(test for test in left if found[test] == "not found")
            left = unseen if len(unseen) < len(left) else ()
    return {test: outcomes[test] for test in tests}


def _run_tests(tests: Sequence[str], copy: Path) -> Outcomes:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--timeout"]
    command += [str(TIMEOUT_S), "-m", "long or not long", *tests]
    # Compiled code is known by time and size only, and a mutant may have both of what it replaces.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with (
        (copy / "output").open("w+", errors="replace") as output,
        # Short: the sockets of its nodes are below it, and their addresses hold 108 bytes.
        tempfile.TemporaryDirectory(prefix="m", ignore_cleanup_errors=True) as folder,
    ):
        environment["TMPDIR"] = folder
        pytest = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = pytest.wait(TIMEOUT_S * (1 + len(tests)))
        except subprocess.TimeoutExpired:
            # What a failed test leaves behind, a workflow that never ends, may keep pytest waiting.
            code = 1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
            _kill_what_names(folder)
        output.seek(0)
        text = output.read()
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with {code}: {text[-2000:]}")
    return read_outcomes(text, tests)


def _kill_what_names(folder: str) -> None:
    """Kill what tests have left behind: servers, workers and agents, which have other groups."""
    mark = folder.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def read_outcomes(text: str, tests: Iterable[str]) -> Outcomes:
    """Return the outcome of each test from the output of `pytest -v`.

    Of the variants of a test it is the worst: one that fails is enough. A test that began and has
    none did not end.
    """
    worst = ("skipped", "passed", "failed", "never ended")
    found: Outcomes = {}
    for test, said in OUTCOME.findall(text):
        outcome = {"": "never ended", "ERROR": "failed"}.get(said, said.lower())
        found[test] = max(found.get(test, worst[0]), outcome, key=worst.index)
    return {test: found.get(test.partition("[")[0], "not found") for test in tests}


def judge(one: Run, outcomes: Outcomes) -> list[str]:
    """Return what is wrong: tests that pass with the change, or that do not pass without."""
    expected = ("passed",) if one.mutant is None else ("failed", "never ended")
    return [f"{test}: {outcome}" for test, outcome in outcomes.items() if outcome not in expected]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as S2.8; default: all")
    parser.add_argument("--work", type=Path, help="keep the results here, and go on from them")
    parser.add_argument("--jobs", type=int, default=2, help="how many run beside each other")
    given = parser.parse_args()
    unknown = sorted({*given.rows} - {one.row for one in MUTANTS})
    if unknown:
        parser.error(f"{', '.join(unknown)}: no mutant has this row")
    mutants = [one for one in MUTANTS if not given.rows or one.row in given.rows]
    with tempfile.TemporaryDirectory(prefix="relaunch-mutants-") as scratch:
        work = given.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        kept = work / "results.jsonl"
        lines = kept.read_text().splitlines() if kept.exists() else []
        results = {row["key"]: row for row in map(json.loads, lines)}
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            copy = Path(scratch) / f"copy-{number}"
            copy_checkout(copy)
            copies.put(copy)

        def play(one: Run) -> None:
            copy, began = copies.get(), time.monotonic()
            try:
                outcomes = run(one, copy)
            finally:
                copies.put(copy)
            wrong = judge(one, outcomes)
            seconds = round(time.monotonic() - began, 1)
            row = {"key": one.key, "outcomes": outcomes, "wrong": wrong, "seconds": seconds}
            with kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
            results[one.key] = row
            print(f"{'ok' if not wrong else 'WRONG':6}{seconds:6} s  {one.key}", flush=True)
            for line in wrong:
                print(f"{'':14}{line}", flush=True)

        runs = list_runs(mutants)
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(play, [one for one in runs if one.key not in results]))
        wrong = [one.key for one in runs if results[one.key]["wrong"]]
        tests = {test for mutant in mutants for test in mutant.tests}
        rows = {one.row for one in mutants}
        print(f"{len(mutants)} mutants, {len(rows)} rows, {len(tests)} tests; {len(wrong)} wrong")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
