"""Nodes of a world that are container instances of an ECS cluster, in the double of AWS.

Their network is this machine's loopback.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from boto3.dynamodb.types import TypeDeserializer

from relaunch.backends import local
from relaunch.backends.ecs import reboots
from tests import planted
from tests.chaos.places import Lines, copy_state
from tests.doubles.aws import AwsDouble, Instance
from tests.doubles.aws.values import REGION
from tests.doubles.aws_caller import Caller

TRAINER, LOGGED, NODE = "train", "train-logged", "relaunch-node"
"""Families of task definitions: of ranks, of ranks whose output can be read, and of what examines
nodes.
"""
TABLES = {"ecs_task": "ecs_task_id", "ecs_job": "job_id", "ecs_node": "node_name"}
"""And their keys."""
OLDER_TABLES = {
    "ecs-job-sub": ("job_id_rank", "TRAINING_JOB_TABLE_NAME"),
    "ecs_container_instance": ("container_inst_id", "CONTAINER_INSTANCE_TABLE_NAME"),
}
"""Their keys, and the variables of the worker that name them."""
KEYS = TABLES | {name: key for name, (key, _) in OLDER_TABLES.items()}
LOG_GROUP, TRAINING_LOG_GROUP = "/relaunch/node", "/training"


class EcsPlaces:
    backend = "ecs"
    within = elsewhere = ()

    def __init__(self, folder: Path, names: Iterable[str], gpus: int = 0, **options: Any) -> None:
        """`options`: of the fleet file's `ecs`, beside those that name what is made here."""
        self.aws = AwsDouble(folder / "aws")
        self.aws.__enter__()
        self._options = options
        logs, training_logs = (
            {
                "logDriver": "awslogs",
                "options": {
                    "awslogs-group": group,
                    "awslogs-stream-prefix": prefix,
                    "awslogs-region": REGION,
                },
            }
            for group, prefix in ((LOG_GROUP, "node"), (TRAINING_LOG_GROUP, "train"))
        )
        trainer = {"name": "trainer", "image": "any", "essential": True}
        self.aws.register(TRAINER, [trainer], networkMode="host")
        logged = trainer | {"logConfiguration": training_logs}
        self.aws.register(LOGGED, [logged], networkMode="host")
        self.aws.register(
            NODE,
            [
                {
                    "name": "node",
                    "image": "relaunch-node",
                    "essential": True,
                    "logConfiguration": logs,
                }
            ],
        )
        # As ECS puts what `secrets` of a task definition name into its containers.
        secret = {planted.NAME: planted.TOKEN}
        self.instances: dict[str, Instance] = {
            name: self.aws.instance(self.aws.add_instance(gpus=gpus, name=name, environment=secret))
            for name in names
        }
        named = {variable: name for name, (_, variable) in OLDER_TABLES.items()}
        self.environment = self.aws.environment() | named
        calls = Caller(self.aws)
        self.topic = calls.sns.create_topic(Name="relaunch")["TopicArn"]
        self._inbox = self.aws.create_queue("inbox")
        calls.sns.subscribe(TopicArn=self.topic, Protocol="sqs", Endpoint=self._arn(self._inbox))
        self.queue = self.aws.create_queue("events")
        self.aws.events_to(self.queue)
        for kind, key in KEYS.items():
            keyed = {
                "AttributeDefinitions": [{"AttributeName": key, "AttributeType": "S"}],
                "KeySchema": [{"AttributeName": key, "KeyType": "HASH"}],
            }
            calls.dynamodb.create_table(TableName=kind, BillingMode="PAY_PER_REQUEST", **keyed)
        self._calls = calls
        self._notices: list[dict[str, str]] = []

    def state(self, name: str) -> Path:
        return self.instances[name].state

    def described(self) -> tuple[Lines, dict[str, object]]:
        nodes: Lines = [
            {"name": name, "address": instance.ec2_id} for name, instance in self.instances.items()
        ]
        made = {
            "cluster": self.aws.cluster,
            "task_definition": TRAINER,
            "node_task": NODE,
            "queue": self.queue,
            "topic": self.topic,
        }
        ecs = {
            **made,
            "tables": {kind.removeprefix("ecs_"): kind for kind in TABLES},
            "poll": "5s",
            **self._options,
        }
        return nodes, {"ecs": ecs}

    def _arn(self, queue: str) -> str:
        return f"arn:aws:sqs:{REGION}:123456789012:{queue.rpartition('/')[2]}"

    def notices(self) -> list[dict[str, str]]:
        """Return the messages to people, in the order of their arrival."""
        while messages := self._calls.sqs.receive_message(
            QueueUrl=self._inbox, MaxNumberOfMessages=10
        ).get("Messages"):
            for message in messages:
                self._notices.append(json.loads(message["Body"]))
                self._calls.sqs.delete_message(
                    QueueUrl=self._inbox, ReceiptHandle=message["ReceiptHandle"]
                )
        return self._notices

    def repair_tags(self, name: str) -> list[str]:
        """Return what relaunch wrote on an instance about its reboots and power cycles."""
        ec2_id = self.instances[name].ec2_id
        tags = self._calls.ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [ec2_id]}])[
            "Tags"
        ]
        return [tag["Value"] for tag in tags if tag["Key"].startswith(reboots.PREFIX)]

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """What is in a table, by its key."""
        plain = TypeDeserializer().deserialize
        found = [
            {name: plain(value) for name, value in item.items()}
            for item in self._calls.dynamodb.scan(TableName=table)["Items"]
        ]
        return {str(row[KEYS[table]]): row for row in found}

    async def serve(self, port: int) -> None:
        pass

    def sessions(self, name: str, worker: int) -> list[int]:
        return []

    def cut(
        self, name: str, what: Iterable[str] = local.CUTS, *, freeze_ranks: bool = False
    ) -> None:
        self.instances[name].disconnect()

    def heal(self, name: str) -> None:
        self.instances[name].connect()

    def reboot(self, name: str) -> None:
        """Have what runs there stopped, as a person would.

        A machine that is away comes back first.
        """
        instance = self.instances[name]
        instance.connect()
        with self.aws.lock:
            for task in instance.machine.registered.tasks():
                instance.machine.end(task, "UserInitiated", "the round is over")
                instance.machine.advance(task)

    def keep(self, name: str, folder: Path) -> None:
        copy_state(self.state(name), folder)

    async def close(self) -> None:
        self.aws.__exit__(None, None, None)
