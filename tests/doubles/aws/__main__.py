"""The double by hand: prints what to export, its instances and a fleet file.

It serves until it is interrupted.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import threading
from pathlib import Path

from tests.doubles.aws import AwsDouble

_LOGS = {
    "logDriver": "awslogs",
    "options": {
        "awslogs-group": "/relaunch/node",
        "awslogs-region": "us-east-1",
        "awslogs-stream-prefix": "node",
    },
}


def _fleet(aws: AwsDouble, nodes: list[str]) -> str:
    queue = aws.create_queue("relaunch-events")
    aws.events_to(queue)
    rows = [f"  - {{name: n{number}, address: {ec2_id}}}" for number, ec2_id in enumerate(nodes)]
    return "\n".join(
        [
            "name: training",
            "backend: ecs",
            "nodes:",
            *rows,
            f"ecs: {{cluster: {aws.cluster}, region: us-east-1, task_definition: train, node_task: "
            f"relaunch-node, queue: '{queue}'}}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.doubles.aws", description=__doc__)
    parser.add_argument("--port", type=int, default=5005)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where instances keep their state and output (a new one in the temporary folder)",
    )
    given = parser.parse_args()
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    folder = given.folder or Path(tempfile.mkdtemp(prefix="aws-double-"))
    with AwsDouble(folder, port=given.port) as aws:
        nodes = [
            aws.add_instance(given.gpus, name=f"n{number}") for number in range(given.instances)
        ]
        aws.register(
            "train", [{"name": "trainer", "image": "any", "command": ["true"]}], networkMode="host"
        )
        aws.register(
            "relaunch-node",
            [{"name": "node", "image": "relaunch-node", "logConfiguration": _LOGS}],
            networkMode="host",
        )
        for name, value in aws.environment().items():
            print(f"export {name}={value}")
        print(f"# instances in {folder}; a fleet file:\n{_fleet(aws, nodes)}", flush=True)
        over.wait()


if __name__ == "__main__":
    main()
