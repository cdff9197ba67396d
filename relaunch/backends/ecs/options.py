"""Determines the ECS options of a fleet from its file and the environment.

The file takes precedence. Whether the named resources exist is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from relaunch.spec.fleet import EcsOptions, EcsTables, FleetSpec

VARIABLES = {
    "cluster": "ECS_CLUSTER_NAME",
    "health_check": "DCGM_HEALTH_CHECK_TASK",
    "topic": "SNS_TOPIC_ARN",
}
TABLES = {
    "task": "TASK_TABLE_NAME",
    "job": "JOB_TABLE_NAME",
    "node": "NODE_TABLE_NAME",
    "training_job": "TRAINING_JOB_TABLE_NAME",
    "container_instance": "CONTAINER_INSTANCE_TABLE_NAME",
}
"""The variable names that github.com/yubingjiaocn/ecs-gpu-recovery gives its functions, the last
two in its first release: its users need not change their settings.
"""

INSTANCE_ID = re.compile(r"i-[0-9a-f]{8}(?:[0-9a-f]{9})?")
"""Ids from before 2018 have 8 digits."""
CLUSTER = re.compile(r"(?:arn:aws[a-z-]*:ecs:[a-z0-9-]+:\d{12}:cluster/)?[A-Za-z0-9_-]{1,255}")
TASK_DEFINITION = re.compile(
    r"(?:arn:aws[a-z-]*:ecs:[a-z0-9-]+:\d{12}:task-definition/)?[A-Za-z0-9_-]{1,255}(?::[1-9]\d*)?"
)
TOPIC = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,256}")
TABLE = re.compile(r"(?:arn:aws[a-z-]*:dynamodb:[a-z0-9-]+:\d{12}:table/)?[A-Za-z0-9_.-]{3,255}")
LEAST_POLL = 1.0
"""Seconds. Every worker polls at this interval, and AWS allows 20 reads a second for a whole
account and region.
"""


def options(spec: FleetSpec, environ: Mapping[str, str]) -> EcsOptions:
    """Return the options of a fleet, with unset ones taken from the environment.

    A blank variable counts as unset.

    Raises:
        ValueError: An option is missing or invalid; the message is one sentence.
    """
    given = spec.ecs
    found = {
        name: environ.get(variable) or None
        for name, variable in VARIABLES.items()
        if getattr(given, name) is None
    }
    tables = {
        name: environ.get(variable) or None
        if (written := getattr(given.tables, name)) is None
        else written
        for name, variable in TABLES.items()
    }
    filled = given.model_copy(update={**found, "tables": EcsTables(**tables)})
    _check(spec, filled, {name for name, value in found.items() if value is not None})
    return filled


def _check(spec: FleetSpec, filled: EcsOptions, from_environment: set[str]) -> None:
    def refuse(name: str, value: object, expected: str) -> None:
        where = VARIABLES[name] if name in from_environment else f"ecs.{name}"
        raise ValueError(f"fleet {spec.name}: {where} is {value!r}, expected {expected}")

    if filled.cluster is None:
        raise ValueError(
            f"fleet {spec.name}: ecs.cluster is missing,"
            " expected the name or ARN of its ECS cluster there or in ECS_CLUSTER_NAME"
        )
    if not CLUSTER.fullmatch(filled.cluster):
        refuse("cluster", filled.cluster, "the name or ARN of an ECS cluster")
    for name in ("task_definition", "node_task", "health_check"):
        value = getattr(filled, name)
        if value is not None and not TASK_DEFINITION.fullmatch(value):
            refuse(name, value, "a task definition: family, family:revision, or ARN")
    if filled.queue is not None and not _is_url(filled.queue):
        refuse("queue", filled.queue, "the URL of an SQS queue, which starts with https://")
    if filled.topic is not None and not TOPIC.fullmatch(filled.topic):
        refuse(
            "topic",
            filled.topic,
            "the ARN of a standard SNS topic, such as arn:aws:sns:eu-west-1:123456789012:relaunch",
        )
    for name, variable in TABLES.items():
        value = getattr(filled.tables, name)
        if value is not None and not TABLE.fullmatch(value):
            where = f"ecs.tables.{name}" if getattr(spec.ecs.tables, name) is not None else variable
            raise ValueError(
                f"fleet {spec.name}: {where} is {value!r},"
                " expected the name or ARN of a DynamoDB table"
            )
    if filled.poll.total_seconds() < LEAST_POLL:
        refuse(
            "poll",
            f"{filled.poll.total_seconds():g}s",
            f"{LEAST_POLL:g}s or more, because AWS limits how often it is asked",
        )
    for node in spec.nodes:
        if not INSTANCE_ID.fullmatch(node.address):
            raise ValueError(
                f"fleet {spec.name}: the address of node {node.name} is {node.address!r},"
                " expected the id of its EC2 instance, such as i-0123456789abcdef0"
            )


def _is_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    # Plain HTTP is allowed for a local stand-in of SQS.
    return (
        parts.scheme in ("https", "http")
        and bool(parts.hostname)
        and len(parts.path) > 1
        and not re.search(r"\s", value)
    )
