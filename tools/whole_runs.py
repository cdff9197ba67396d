#!/usr/bin/env python3
"""Run `make test` from nothing, again and again, and print the table of docs/testing.md.

    python tools/whole_runs.py --work FOLDER --runs 20     resumes after an interruption
    python tools/whole_runs.py --work FOLDER --table

Each run is a new clone of this commit with a new environment and an empty HOME, from the shell of
a new user (`env -i` with PATH, HOME and TERM). Every second one has two busy loops beside it. A run
that was interrupted is begun again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BUSY = "while :; do :; done"
BUSY_LOOPS = 2
SUMMARY = re.compile(r"^=+ (.*(?:passed|failed|error).*) in .*=+$", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
Row = dict[str, Any]


def run_once(number: int, work: Path, commit: str, python: str) -> Row:
    clone = work / "clone"
    home = work / "home"
    for folder in (clone, home):
        shutil.rmtree(folder, ignore_errors=True)
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "checkout", "--quiet", commit], cwd=clone, check=True)
    environment = {"PATH": f"{python}:{PATH}" if python else PATH, "TERM": "xterm"}
    environment["HOME"] = str(home)
    loops = BUSY_LOOPS if number % 2 == 0 else 0
    busy = [subprocess.Popen(["sh", "-c", BUSY]) for _ in range(loops)]
    before = processor_seconds()
    began = time.monotonic()
    try:
        with (
            (work / f"run-{number}.log").open("w") as log,
            subprocess.Popen(
                ["make", "test"],
                cwd=clone,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as test,
        ):
            try:
                code = test.wait()
            except BaseException:
                os.killpg(test.pid, signal.SIGTERM)  # else the tests run on without this program
                raise
        ended, used = time.monotonic(), processor_seconds() - before
    finally:
        for loop in busy:
            loop.kill()
            loop.wait()
    text = (work / f"run-{number}.log").read_text(errors="replace")
    version = re.search(r"-- Python (\S+),", text)
    return {
        "number": number,
        "at": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": commit[:7],
        "python": version[1] if version else "",
        "busy": loops,
        "code": code,
        "tests": count(SUMMARY.findall(text)),
        "failed": FAILED.findall(text),
        "seconds": round(ended - began),
        "processor_s": round(used),
    }


def processor_seconds() -> float:
    """What the children that have ended, and theirs, have used; the busy loops still run."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def count(summaries: list[str]) -> dict[str, int]:
    """The tests of all sessions of `make test` by their results."""
    counts: dict[str, int] = {}
    for summary in summaries:
        for number, result in COUNT.findall(summary):
            counts[result] = counts.get(result, 0) + int(number)
    return counts


def render(rows: list[Row]) -> str:
    lines = [
        "| date | commit | Python | beside it | tests | failed | took | user + system |",
        "| -- | -- | -- | -- | -- | -- | -- | -- |",
    ]
    for row in rows:
        minutes, seconds = divmod(row["seconds"], 60)
        beside = f"{row['busy']} busy loops" if row["busy"] else "nothing"
        failed = ", ".join(f"`{test}`" for test in row["failed"]) or (
            "–" if row["code"] == 0 else f"exit code {row['code']}"
        )
        tests = ", ".join(f"{number:,} {result}" for result, number in row["tests"].items())
        lines.append(
            f"| {row['at'][:10]} | {row['commit']} | {row['python']} | {beside} "
            f"| {tests} | {failed} | {minutes} min {seconds} s | {row['processor_s']} s |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, required=True, help="folder of an interruptible run")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--python", default="", help="a folder to look for Python in first")
    parser.add_argument("--table", action="store_true", help="print the table of --work, and end")
    arguments = parser.parse_args()
    work: Path = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    file = work / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not arguments.table:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        while len(rows) < arguments.runs:
            row = run_once(len(rows) + 1, work, commit, arguments.python)
            rows.append(row)
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(render([row]).splitlines()[-1], flush=True)
    print(render(rows))
    return 1 if any(row["code"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
