"""What the time from the kill of a rank to the next four ranks goes into, without torch.

    python -m benchmarks.split [--rounds 20] [--output FILE]

As `benchmarks.run` measures relaunch: `up` runs, one job has two local nodes of two ranks. Nothing
is added to what is measured. The moments are those that the parts write down anyway: the shim in
its journal, `prepare` and `start` in their records, Temporal's server in the history, and the ranks
themselves; all by the clocks of one machine. The floor is measured before and after, in as many
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    SETTLE,
    WORLD_SIZE,
    Contender,
    await_gang,
    measure_recovery,
    measure_start,
)
from benchmarks.floor import Floor
from benchmarks.machine import describe_machine
from benchmarks.relaunch import Relaunch
from relaunch.temporal import connect, find_running_up

PARTS = (
    ("kill → its shim has journaled the exit", "journaled"),
    ("→ the server has the report of the watch", "reported"),
    ("→ the server has the order to launch", "ordered"),
    ("→ a worker begins the launch", "begun"),
    ("→ both nodes are prepared: older ranks gone, shims ready", "prepared"),
    ("→ both nodes have forked their ranks", "forked"),
    ("→ the last rank runs", "runs"),
)
"""The moments in their order, each with its part of the table."""


def measure_floor(folder: Path, rounds: int) -> list[float]:
    contender: Contender = Floor()
    try:
        measure_start(contender, folder)
        return measure_recovery(contender, rounds)
    finally:
        contender.stop()


async def read_history(state: Path, job: str) -> list[dict[str, float]]:
    """Return for each launch but the first when it was reported, ordered and begun (Unix time)."""
    up = find_running_up(state)
    assert up is not None
    client = await connect(state, up.address)
    names: dict[int, str] = {}
    launches: list[dict[str, float]] = []
    reported = 0.0
    async for event in client.get_workflow_handle(f"job/{job}").fetch_history_events():
        at = event.event_time.ToNanoseconds() / 1e9
        if event.HasField("activity_task_scheduled_event_attributes"):
            name = event.activity_task_scheduled_event_attributes.activity_type.name
            names[event.event_id] = name
            if name == "launch_ranks":
                launches.append({"reported": reported, "ordered": at})
        elif event.HasField("activity_task_started_event_attributes"):
            of = event.activity_task_started_event_attributes.scheduled_event_id
            if names.get(of) == "launch_ranks":
                launches[-1]["begun"] = at
        elif event.HasField("activity_task_completed_event_attributes"):
            of = event.activity_task_completed_event_attributes.scheduled_event_id
            if names.get(of) == "watch_ranks":
                reported = at
    return launches[1:]


def read_nodes(state: Path, job: str, generation: int) -> dict[str, float]:
    """Return what the nodes wrote down of a generation and of the fault before it (Unix time)."""
    since_boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    found: dict[str, list[float]] = {"prepared": [], "forked": []}
    exits = []
    for folder in (state / "nodes").glob(f"*/jobs/*/*-{generation}"):
        if json.loads((folder.parent / "highest.json").read_text())["job"] != job:
            continue
        order = json.loads((folder / "order.json").read_text())
        started = json.loads((folder / "started.json").read_text())
        found["prepared"].append(order["answer"]["stamp"] + since_boot)
        found["forked"].append(started["stamp"] + since_boot)
        before = folder.with_name(f"{folder.name.rpartition('-')[0]}-{generation - 1}")
        lines = (before / "journal.jsonl").read_text(errors="replace").splitlines()
        told = [json.loads(line) for line in lines if line.startswith("{")]
        exits += [one["at"] for one in told if one["kind"] == "RankExited" and not one["stopped"]]
    return {"journaled": min(exits)} | {name: max(times) for name, times in found.items()}


def measure_split(state: Path, rounds: int) -> tuple[list[float], list[dict[str, float]]]:
    """Return the milliseconds of each recovery, and its parts."""
    service = Relaunch(state)
    service.bring_up()
    parts: list[dict[str, float]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="relaunch-bench-") as folder:
            measure_start(service, Path(folder))
            seen: list[dict[str, float]] = []
            for number in range(rounds):
                time.sleep(SETTLE[1])
                killed = service.kill_a_rank(number % WORLD_SIZE)
                offset = time.time() - time.monotonic()
                last = await_gang(service, killed)
                moments = {"killed": killed / 1e9 + offset, "runs": last / 1e9 + offset}
                seen.append(moments | read_nodes(state, service.job, number + 2))
            history = asyncio.run(read_history(state, service.job))
            parts = [one | of for one, of in zip(seen, history, strict=False)]
            service.stop()
    finally:
        service.take_down()
    return [1000 * (one["runs"] - one["killed"]) for one in parts], parts


def split(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return the median milliseconds of each part."""
    names = ["killed", *(name for _, name in PARTS)]
    return {
        name: statistics.median(1000 * (one[name] - one[before]) for one in parts)
        for before, name in itertools.pairwise(names)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    floor: list[float] = []
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-split-") as text:
        folder = Path(text)
        floor += measure_floor(folder / "before", arguments.rounds)
        whole, parts = measure_split(folder / "state", arguments.rounds)
        floor += measure_floor(folder / "after", arguments.rounds)
    found: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "floor_ms": [round(one, 1) for one in floor],
        "recovery_ms": [round(one, 1) for one in whole],
        "split_ms": {name: round(one, 1) for name, one in split(parts).items()},
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    for text, times in (("floor", floor), ("relaunch, 2 nodes × 2 ranks", whole)):
        print(f"| {text} | {statistics.median(times):.0f} ms ({min(times):.0f}–{max(times):.0f}) |")
    for text, name in PARTS:
        print(f"| {text} | {found['split_ms'][name]:.0f} ms |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
