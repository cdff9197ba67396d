"""Fixtures: container instances of a double of AWS, and workers that look after one each.

What they prove is of AWS's documents.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.backends.base import Refusal
from relaunch.backends.ecs import aws as aws_module
from relaunch.backends.ecs import batch as batch_module
from relaunch.backends.ecs import cluster as cluster_module
from relaunch.backends.ecs import examine as node_tasks_module
from relaunch.backends.ecs import follow as follow_module
from relaunch.backends.ecs.aws import Aws
from relaunch.backends.ecs.cluster import Cluster
from relaunch.backends.ecs.examine import NodeTasks
from relaunch.backends.ecs.reboots import Journal
from relaunch.backends.ecs.repairs import Repairs
from relaunch.evidence.catalog import catalog
from relaunch.evidence.health import Health, read_health
from relaunch.spec.fleet import EcsOptions
from tests.doubles.aws import AwsDouble, Delays
from tests.doubles.install import install_tool

LOGS = {
    "logDriver": "awslogs",
    "options": {
        "awslogs-group": "/relaunch/node",
        "awslogs-stream-prefix": "node",
        "awslogs-region": "us-east-1",
    },
}
OPTIONS = EcsOptions(cluster="training", node_task="node")
CHECKED = EcsOptions(cluster="training", health_check="check")
REPAIR = "repair/gpus/n1/7d4e"


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory, agent: Path) -> Iterator[AwsDouble]:
    delays = Delays(reboot=0.1, boot=0.1, power_off=0.05, stop_timeout=0.3)
    with (
        AwsDouble(tmp_path_factory.mktemp("aws"), delays=delays) as double,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in double.environment().items():
            patch.setenv(name, value)
        patch.setattr(aws_module, "RATES", {"read": (10_000.0, 100), "modify": (10_000.0, 100)})
        patch.setattr(cluster_module, "FIRST_LOOK", 0.1)
        for module in (batch_module, follow_module):
            patch.setattr(module, "GATHER", 0.005)
        patch.setattr(node_tasks_module, "LOG_LOOK", 0.1)
        patch.setattr(node_tasks_module, "FREE_LOOK", 0.1)
        entry = [sys.executable, "-S", str(agent), "task"]  # as the node image's entry point
        double.register(
            "node",
            [
                {
                    "name": "node",
                    "image": "relaunch-node",
                    "entryPoint": entry,
                    "logConfiguration": LOGS,
                }
            ],
        )
        for family in ("check", "train"):
            double.register(
                family, [{"name": family, "image": "of the user's", "command": ["true"]}]
            )
        yield double


@pytest.fixture(scope="module")
def real(aws: AwsDouble) -> Iterator[Aws]:
    """One for all tests: EC2's model alone takes half a second to read."""
    one = Aws("us-east-1")
    yield one
    asyncio.run(one.close())


@pytest.fixture(autouse=True)
def nothing_told(aws: AwsDouble) -> None:
    aws.faults.clear()
    aws.ecs.scripts.clear()
    aws.log_delay = 0.0


class Calls:
    """The one connection of the tests, of which some make something else."""

    def __init__(self, real: Aws) -> None:
        self.real = real

    async def call(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        return await self.real.call(service, operation, **request)


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class Site:
    """One instance, and a worker that looks after it."""

    def __init__(
        self, double: AwsDouble, aws: Any, ec2_id: str, options: EcsOptions = OPTIONS
    ) -> None:
        self.double, self.aws, self.ec2_id, self.options = double, aws, ec2_id, options
        self.clock = Clock()
        self.cluster = Cluster(aws, "training", 5.0)
        self.repairs = Repairs(self.cluster, aws, options, look=0.06, now=self.clock)
        self.tasks = NodeTasks(self.cluster, aws, options, self.repairs)

    @property
    def instance(self) -> Any:
        return self.double.instance(self.ec2_id)

    @property
    def status(self) -> str:
        return str(self.instance.machine.registered.status)

    async def facts(self) -> Mapping[str, Any]:
        """Stands for a probe where only its boot id matters."""
        return {"outcome": "done", "boot_id": self.instance.boot_id, "jobs": [], "held": None}

    async def reboot(
        self, boot_id: str | None = None, id: str = REPAIR
    ) -> Mapping[str, Any] | Refusal:
        return await self.repairs.reboot(
            "n1", self.ec2_id, id, boot_id or self.instance.boot_id, "Xid 79", self.facts
        )

    async def settled(self, within: float = 10.0) -> Journal:
        return await self.repairs.settle("n1", self.ec2_id, within)

    async def probe(self) -> dict[str, Any]:
        return dict(await self.tasks.probe(self.ec2_id, "n1", 10.0, None))

    async def diagnose(self, within: float = 30.0, id: str = REPAIR, gpus: int = 8) -> Any:
        return await self.tasks.diagnose(self.ec2_id, "n1", id, 2, within, gpus)

    def health(self, facts: Mapping[str, Any], diag: Any, gpus: int = 0) -> Health:
        if isinstance(diag, Refusal):
            diag = {"refused": diag.why, "reason": diag.reason}
        return read_health(facts, diag, expected_gpus=gpus, level=2, catalog=catalog())

    def count_requests(self, operation: str) -> int:
        """How often this was asked of the instance."""
        return sum(
            one.operation == operation and self.ec2_id in one.request.values()
            for one in self.double.requests
        )

    async def run(self, by: str, family: str = "train", gpus: int = 0) -> str:
        override = (
            {"name": family, "resourceRequirements": [{"type": "GPU", "value": str(gpus)}]}
            if gpus
            else {"name": family}
        )
        answer = await self.aws.call(
            "ecs",
            "RunTask",
            cluster="training",
            taskDefinition=family,
            startedBy=by,
            clientToken=uuid.uuid4().hex,
            launchType="EC2",
            placementConstraints=[
                {"type": "memberOf", "expression": f"ec2InstanceId == {self.ec2_id}"}
            ],
            overrides={"containerOverrides": [override]},
        )
        return (
            str(answer["tasks"][0]["taskArn"])
            if answer["tasks"]
            else str(answer["failures"][0]["reason"])
        )

    def examinations(self) -> list[dict[str, Any]]:
        mine = self.instance.arn
        return [
            one
            for one in self.double.tasks()
            if one["containerInstanceArn"] == mine
            and str(one.get("startedBy", "")).startswith("relaunch-node/diagnose")
        ]


Make = Callable[..., Site]


@pytest_asyncio.fixture
async def make(aws: AwsDouble, real: Aws, tmp_path: Path) -> AsyncIterator[Make]:
    sites: list[Site] = []

    def make(
        options: EcsOptions = OPTIONS,
        gpus: int = 8,
        dcgmi: str | None = None,
        exit_code: int = 0,
        aws_: Any = None,
    ) -> Site:
        programs = tmp_path / uuid.uuid4().hex[:6]
        if dcgmi is not None:
            install_tool(programs, "dcgmi", stdout=dcgmi, exit_code=exit_code)
        ec2_id = aws.add_instance(
            gpus=gpus, environment={"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        )
        sites.append(Site(aws, aws_ or Calls(real), ec2_id, options))
        return sites[-1]

    yield make
    for site in sites:
        await site.cluster.close()


def add_worker(site: Site, aws: Any = None, options: EcsOptions | None = None) -> Site:
    """Another worker, at the same time of day."""
    other = Site(site.double, aws or Calls(site.aws.real), site.ec2_id, options or site.options)
    other.clock = other.repairs._now = other.repairs._power._now = site.clock  # type: ignore[assignment]
    return other


async def eventually(what: Callable[[], Any], patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.02)
