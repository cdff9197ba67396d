"""The account that benchmarks/ecs.py counts calls to: the double of AWS in a separate process.

The process reads its orders line by line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.contenders import ROOT
from benchmarks.many import cpu_seconds
from tests.doubles.aws import AwsDouble, Delays

FAMILY = "train"


class Account:
    """So many instances of eight GPUs, and a queue that has the cluster's events."""

    def __init__(self, instances: int, folder: Path) -> None:
        words = [
            sys.executable,
            "-m",
            "benchmarks.ecs_account",
            "--instances",
            str(instances),
            "--folder",
            str(folder / "aws"),
        ]
        self._process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._calls: list[tuple[float, str]] = []

    def __enter__(self) -> Self:
        ready = self._answer()
        self.ids: list[str] = ready["ids"]
        self.queue: str = ready["queue"]
        self.cluster: str = ready["cluster"]
        self.environment: dict[str, str] = ready["environment"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def calls(self) -> list[tuple[float, str]]:
        """Every call so far: when it came (time.monotonic), and `ecs.RunTask`."""
        self._calls += [
            (at, operation) for at, operation in self._ask({"calls_from": len(self._calls)})
        ]
        return self._calls

    def end(self, job: str) -> None:
        """End one rank of a job, with exit code 1."""
        self._ask({"end": job})

    def drain(self) -> None:
        """Discard unread events: moto's queue, unlike SQS, is slow when it holds thousands."""
        self._ask({"drain": self.queue})

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def end(aws: AwsDouble, job: str) -> str:
    """End the rank of a job that was placed first."""
    found = next(one for one in aws.tasks(FAMILY, "RUNNING") if f"/{job}/" in one["startedBy"])
    with aws.lock:
        # A script cannot set the end of a task that already runs.
        aws._task(found["taskArn"]).containers[0].process._end(1)
    return str(found["taskArn"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instances", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    with AwsDouble(given.folder, delays=Delays(stop_timeout=30.0)) as aws:
        ids = [
            aws.add_instance(8, address=f"10.0.{number >> 8}.{number & 255}")
            for number in range(1, given.instances + 1)
        ]
        aws.register(FAMILY, [{"name": "trainer", "image": "any"}], networkMode="host")
        aws.script(FAMILY, after=None)
        queue = aws.create_queue("events")
        aws.events_to(queue)
        print(
            json.dumps(
                {
                    "ids": ids,
                    "queue": queue,
                    "cluster": aws.cluster,
                    "environment": aws.environment(),
                }
            ),
            flush=True,
        )
        for line in sys.stdin:
            order = json.loads(line)
            answer: Any = end(aws, order["end"]) if "end" in order else None
            if "drain" in order:
                aws._moto.json("sqs", "PurgeQueue", {"QueueUrl": order["drain"]})
            if "calls_from" in order:
                answer = [
                    (call.at, f"{call.service}.{call.operation}")
                    for call in aws.requests[order["calls_from"] :]
                ]
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
