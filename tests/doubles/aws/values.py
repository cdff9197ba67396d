"""What ECS knows: task definitions, tasks, container instances.

How its API and its events tell of them. Nothing happens here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.doubles.aws.containers import Process
    from tests.doubles.aws.machines import Machine
    from tests.doubles.aws.scripts import Script

ACCOUNT = "123456789012"
"""The account that moto answers for."""
REGION = "us-east-1"
_TIMES = ("createdAt", "startedAt", "stoppingAt", "stoppedAt", "executionStoppedAt", "registeredAt")


class AwsRefusal(Exception):
    """An error of the API's model: its code, its words, its HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400, **members: Any) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status, self.members = code, message, status, members


def invalid(message: str) -> AwsRefusal:
    return AwsRefusal("InvalidParameterException", message)


def arn(kind: str, *path: str) -> str:
    return f"arn:aws:ecs:{REGION}:{ACCOUNT}:{kind}/{'/'.join(path)}"


def new_id() -> str:
    return uuid.uuid4().hex


def without_nothing(members: Mapping[str, Any]) -> dict[str, Any]:
    """What AWS does not know it leaves out; it does not say null."""
    return {key: value for key, value in members.items() if value is not None}


def in_words_of_events(detail: Mapping[str, Any]) -> dict[str, Any]:
    """Times are ISO texts in events and numbers in the API."""
    said = dict(detail)
    for key in _TIMES:
        if key in said:
            said[key] = (
                datetime.fromtimestamp(said[key], UTC)
                .isoformat(timespec="milliseconds")
                .replace("+00:00", "Z")
            )
    return said


@dataclass
class Definition:
    family: str
    revision: int
    registered: dict[str, Any]
    status: str = "ACTIVE"

    @property
    def arn(self) -> str:
        return arn("task-definition", f"{self.family}:{self.revision}")

    @property
    def containers(self) -> list[dict[str, Any]]:
        return list(self.registered["containerDefinitions"])

    def describe(self) -> dict[str, Any]:
        return (
            {"networkMode": "bridge"}
            | self.registered
            | {"taskDefinitionArn": self.arn, "revision": self.revision, "status": self.status}
        )


@dataclass
class Container:
    definition: dict[str, Any]
    override: dict[str, Any]
    id: str = field(default_factory=new_id)
    last_status: str = "PENDING"
    exit_code: int | None = None
    reason: str | None = None
    gpu_ids: tuple[str, ...] = ()
    process: Process | None = None

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    @property
    def essential(self) -> bool:
        return bool(self.definition.get("essential", True))

    def wants(self, kind: str) -> int:
        if kind == "GPU":
            given = (
                self.override.get("resourceRequirements")
                or self.definition.get("resourceRequirements")
                or []
            )
            return sum(int(one["value"]) for one in given if one["type"] == "GPU")
        if kind == "CPU":
            return int(self.override.get("cpu") or self.definition.get("cpu") or 0)
        reserved = self.override.get("memoryReservation") or self.definition.get(
            "memoryReservation"
        )
        return int(reserved or self.override.get("memory") or self.definition.get("memory") or 0)


@dataclass
class Task:
    cluster: Cluster
    instance: ContainerInstance
    definition: Definition
    containers: list[Container]
    request: dict[str, Any]
    created_at: float
    seen_from: float
    """When Describe and List see it: the API is eventually consistent."""
    script: Script | None = None
    id: str = field(default_factory=new_id)
    version: int = 1
    last_status: str = "PENDING"
    desired_status: str = "RUNNING"
    tags: list[dict[str, str]] = field(default_factory=list)
    stop_code: str | None = None
    stopped_reason: str | None = None
    started_at: float | None = None
    stopping_at: float | None = None
    stopped_at: float | None = None

    @property
    def arn(self) -> str:
        return arn("task", self.cluster.name, self.id)

    @property
    def over(self) -> bool:
        return self.last_status == "STOPPED"

    def wants(self, kind: str) -> int:
        return sum(container.wants(kind) for container in self.containers)

    def describe(self, tags: bool = False) -> dict[str, Any]:
        return without_nothing(
            {
                "taskArn": self.arn,
                "clusterArn": self.cluster.arn,
                "taskDefinitionArn": self.definition.arn,
                "containerInstanceArn": self.instance.arn,
                "availabilityZone": f"{REGION}a",
                "group": self.request.get("group") or f"family:{self.definition.family}",
                "launchType": "EC2",
                "lastStatus": self.last_status,
                "desiredStatus": self.desired_status,
                "connectivity": "CONNECTED" if self.last_status != "PENDING" else None,
                "overrides": {"containerOverrides": [], "inferenceAcceleratorOverrides": []}
                | self.request.get("overrides", {}),
                "startedBy": self.request.get("startedBy"),
                "version": self.version,
                "createdAt": self.created_at,
                "startedAt": self.started_at,
                "stoppingAt": self.stopping_at,
                "executionStoppedAt": self.stopped_at,
                "stoppedAt": self.stopped_at,
                "stopCode": self.stop_code,
                "stoppedReason": self.stopped_reason,
                "attachments": [],
                "attributes": [],
                "containers": [self._container(container) for container in self.containers],
                "tags": list(self.tags) if tags else [],
            }
        )

    def _container(self, container: Container) -> dict[str, Any]:
        return without_nothing(
            {
                "containerArn": arn("container", self.cluster.name, self.id, container.id),
                "taskArn": self.arn,
                "name": container.name,
                "image": container.definition.get("image", ""),
                "lastStatus": container.last_status,
                "exitCode": container.exit_code,
                "reason": container.reason,
                "runtimeId": container.id * 2 if container.last_status != "PENDING" else None,
                "networkBindings": [],
                "networkInterfaces": [],
                "gpuIds": list(container.gpu_ids) or None,
            }
        )

    def event(self, now: float) -> dict[str, Any]:
        """Events carry no tags and no environment."""
        detail = in_words_of_events(self.describe())
        del detail["tags"]
        names = [{"name": one["name"]} for one in detail["overrides"]["containerOverrides"]]
        detail["overrides"] = {"containerOverrides": names}
        detail["updatedAt"] = in_words_of_events({"createdAt": now})["createdAt"]
        return detail


@dataclass
class ContainerInstance:
    """One registration of one EC2 instance: an agent that lost its memory registers another."""

    cluster: Cluster
    machine: Machine
    registered_at: float
    id: str = field(default_factory=new_id)
    status: str = "ACTIVE"
    agent_connected: bool = True
    version: int = 1
    attributes: dict[str, str | None] = field(default_factory=dict)
    health: str | None = None

    @property
    def arn(self) -> str:
        return arn("container-instance", self.cluster.name, self.id)

    def tasks(self) -> list[Task]:
        return [
            task for task in self.cluster.tasks.values() if task.instance is self and not task.over
        ]

    def free_gpus(self) -> list[str]:
        used = {
            gpu
            for task in self.tasks()
            for container in task.containers
            for gpu in container.gpu_ids
        }
        return [gpu for gpu in self.machine.gpus if gpu not in used]

    def free(self, kind: str) -> int:
        if kind == "GPU":
            return len(self.free_gpus())
        return int(self.machine.capacity[kind]) - sum(task.wants(kind) for task in self.tasks())

    def describe(self, health: bool = False) -> dict[str, Any]:
        tasks = self.tasks()
        built_in: dict[str, str | None] = {
            "ecs.availability-zone": f"{REGION}a",
            "ecs.os-type": "linux",
            "ecs.instance-type": self.machine.type,
        }
        attributes = built_in | self.attributes
        return without_nothing(
            {
                "containerInstanceArn": self.arn,
                "ec2InstanceId": self.machine.ec2_id,
                "version": self.version,
                "versionInfo": {"agentVersion": "1.99.0"},
                "status": self.status,
                "agentConnected": self.agent_connected,
                "registeredAt": self.registered_at,
                "runningTasksCount": sum(task.last_status == "RUNNING" for task in tasks),
                "pendingTasksCount": sum(task.last_status == "PENDING" for task in tasks),
                "registeredResources": self._resources(
                    self.machine.capacity, list(self.machine.gpus)
                ),
                "remainingResources": self._resources(
                    {kind: self.free(kind) for kind in ("CPU", "MEMORY")}, self.free_gpus()
                ),
                "attributes": [
                    without_nothing({"name": name, "value": value})
                    for name, value in sorted(attributes.items())
                ],
                "attachments": [],
                "tags": [],
                "healthStatus": self._health() if health and self.health else None,
            }
        )

    def _health(self) -> dict[str, Any]:
        return {
            "overallStatus": self.health,
            "details": [{"type": "CONTAINER_RUNTIME", "status": self.health}],
        }

    @staticmethod
    def _resources(numbers: Mapping[str, int], gpus: list[str]) -> list[dict[str, Any]]:
        given: list[dict[str, Any]] = [
            {"name": kind, "type": "INTEGER", "integerValue": numbers[kind]}
            for kind in ("CPU", "MEMORY")
        ]
        return [*given, {"name": "GPU", "type": "STRINGSET", "stringSetValue": gpus}]

    def event(self) -> dict[str, Any]:
        detail = in_words_of_events(self.describe())
        del detail["tags"]
        return detail | {"clusterArn": self.cluster.arn}


@dataclass
class Cluster:
    name: str
    tasks: dict[str, Task] = field(default_factory=dict)
    instances: dict[str, ContainerInstance] = field(default_factory=dict)

    @property
    def arn(self) -> str:
        return arn("cluster", self.name)


Changed = Callable[[Task | ContainerInstance], None]
"""Called, under the lock, when ECS's own knowledge of one has changed."""
