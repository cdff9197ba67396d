"""How tests of the double call it: by boto3, as production has it, without boto3's retries."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.doubles.aws import AwsDouble

WITHIN = 10.0
_numbers = itertools.count()


class Caller:
    """Has a client of each service, by its name, and what tests ask of ECS again and again."""

    def __init__(self, aws: AwsDouble) -> None:
        environment = aws.environment()
        session = boto3.Session(
            environment["AWS_ACCESS_KEY_ID"],
            environment["AWS_SECRET_ACCESS_KEY"],
            region_name=environment["AWS_REGION"],
        )
        self._made: dict[str, Any] = {}
        self._make = lambda name: session.client(
            name, endpoint_url=aws.url, config=Config(retries={"total_max_attempts": 1})
        )

    def __getattr__(self, name: str) -> Any:
        return self._made.get(name) or self._made.setdefault(name, self._make(name))

    def run(self, node: str, family: str = "train", **more: Any) -> dict[str, Any]:
        pinned = [
            {"type": "memberOf", "expression": f"ec2InstanceId == {node}{more.pop('also', '')}"}
        ]
        return dict(
            self.ecs.run_task(
                cluster="training", taskDefinition=family, placementConstraints=pinned, **more
            )
        )

    def task(self, arn: str) -> dict[str, Any]:
        return dict(self.ecs.describe_tasks(cluster="training", tasks=[arn])["tasks"][0])

    def until(self, arn: str, status: str) -> dict[str, Any]:
        return until(lambda: (task := self.task(arn))["lastStatus"] == status and task)

    def node(self, arn: str) -> dict[str, Any]:
        return dict(
            self.ecs.describe_container_instances(cluster="training", containerInstances=[arn])[
                "containerInstances"
            ][0]
        )

    def mark(self, arn: str, name: str, value: str) -> None:
        self.ecs.put_attributes(
            cluster="training", attributes=[{"name": name, "value": value, "targetId": arn}]
        )


def until(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WITHIN
    while not (seen := look()):
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.01)
    return seen


def new_family() -> str:
    return f"family-{next(_numbers)}"


def register(aws: AwsDouble, *command: str, **container: Any) -> str:
    family = new_family()
    aws.register(
        family, [{"name": "trainer", "image": "any", "command": list(command), **container}]
    )
    return family


def lives(aws: AwsDouble, arn: str) -> bool:
    return bool(aws.pids(arn))


def refused(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def logs_in(group: str) -> dict[str, Any]:
    options = {"awslogs-group": group, "awslogs-region": "us-east-1", "awslogs-stream-prefix": "p"}
    return {"logDriver": "awslogs", "options": options}
