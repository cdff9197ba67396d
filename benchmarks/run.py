"""`make bench`: compare relaunch with torchrun and a bare respawn loop, in one run on one machine.

    python -m benchmarks.run [--rounds 20] [--starts 5] [--jobs 200] [--torch PYTHON]
                             [--output FILE]

It writes results to JSON and prints a table. torchrun takes part where PYTHON (default: this one)
can import torch. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import Contender, measure_recovery, measure_start
from benchmarks.decisions import measure_decisions
from benchmarks.events import measure_events
from benchmarks.fleet import measure_fleet
from benchmarks.floor import Floor
from benchmarks.idle import MARK, measure_idle
from benchmarks.machine import describe_machine
from benchmarks.many import measure_many
from benchmarks.relaunch import Relaunch
from benchmarks.torchrun import Torchrun, version

IDLE_FOR = 30.0
"""Seconds; a 10 s heartbeat happens three times."""


def measure(contender: Contender, rounds: int, starts: int) -> dict[str, Any]:
    """Start it several times; measure `rounds` recoveries and the idle cost of the last one."""
    started, recovered = [], []
    for number in range(starts):
        with tempfile.TemporaryDirectory(prefix="relaunch-bench-") as folder:
            try:
                started.append(measure_start(contender, Path(folder)))
                if number == starts - 1:
                    recovered = measure_recovery(contender, rounds)
                    idle = measure_idle(contender.name, IDLE_FOR)
            finally:
                contender.stop()
    return {
        "name": contender.name,
        "start_s": started,
        "recovery_ms": recovered,
        "idle": dataclasses.asdict(idle),
    }


def row(result: dict[str, Any]) -> str:
    recovery, start, idle = sorted(result["recovery_ms"]), sorted(result["start_s"]), result["idle"]
    return (
        f"| {result['name']} "
        f"| {statistics.median(recovery):.0f} ({recovery[0]:.0f}–{recovery[-1]:.0f}) "
        f"| {statistics.median(start):.2f} | {idle['cpu_percent']:.1f} % "
        f"| {idle['memory_mib']:.0f} MiB in {idle['processes']} processes |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument(
        "--jobs", type=int, default=200, help="how many at once on one worker; 0 leaves that out"
    )
    parser.add_argument("--torch", default=sys.executable, help="a Python that can import torch")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="relaunch-bench-up-") as folder:
        service = Relaunch(Path(folder) / "state")
        contenders: list[Contender] = [Floor(), service]
        torch = version(arguments.torch)
        if torch:
            contenders += [Torchrun(arguments.torch, nodes=1), Torchrun(arguments.torch, nodes=2)]
        for contender in contenders:
            os.environ[MARK] = contender.name
            if contender is service:
                service.bring_up()
            try:
                print(f"measuring {contender.name} …", file=sys.stderr, flush=True)
                results.append(measure(contender, arguments.rounds, arguments.starts))
            finally:
                if contender is service:
                    service.take_down()
    events = [dataclasses.asdict(asyncio.run(measure_events(nodes))) for nodes in (2, 200)]
    decisions = measure_decisions(2048)
    many = measure_many(arguments.jobs, on_disk=False) if arguments.jobs else None
    fleet = measure_fleet(50, 200, 60)
    report = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "torch": torch,
        "rounds": arguments.rounds,
        "contenders": results,
        "events_per_recovery": events,
        "decisions": decisions,
        "many_jobs": many,
        "fleet": fleet,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(
        "| 4 ranks on one machine | SIGKILL of a rank → all 4 run again, ms "
        "| command → all 4 run, s | idle CPU | idle memory |"
    )
    print("|---|---|---|---|---|")
    for result in results:
        print(row(result))
    print()
    for recovery in events:
        print(
            f"{recovery['events']} history events ({recovery['bytes']} bytes) a recovery "
            f"with {recovery['nodes']} simulated nodes"
        )
    for one in decisions:
        took = f"diagnose {one['diagnose_ms']} ms, step {one['step_ms']} ms"
        print(f"{one['ranks']} ranks of {one['nodes']} nodes fail at once ({one['kind']}): {took}")
    if many:
        print(
            f"{many['jobs']} jobs, a fault each, "
            f"all recovered after {many['all_recovered_after_s']} s: "
            f"{many['workflow_tasks_failed']} failed and "
            f"{many['workflow_tasks_timed_out']} timed-out workflow tasks"
        )
        print(
            f"the worker held {many['worker_peak_mib']} MiB, "
            f"the server {many['server_peak_mib']} MiB"
        )
    print(
        f"{fleet['jobs']} jobs on {fleet['nodes']} nodes, a fault a second "
        f"for {fleet['faults']} s: a replacement granted after "
        f"{fleet['replacement_ms_median']} ms (worst {fleet['replacement_ms_worst']}), "
        f"{fleet['fleet_signals']} signals to the fleet, "
        f"{fleet['two_jobs_on_one_node']} times two jobs on one node"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
