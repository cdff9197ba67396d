"""The operations of ECS, as documented: what each accepts, refuses, and answers with `failures`.

What runs is of machines.py.

Sources: the operations' pages in docs.aws.amazon.com/AmazonECS/latest/APIReference (limits,
characters, filters, ECS_Idempotency), api_failures_messages.html and stopped-task-error-codes.html
in the developer guide.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.aws.expressions import parse
from tests.doubles.aws.instances import ContainerInstances, Request, page
from tests.doubles.aws.scripts import Scripts
from tests.doubles.aws.values import (
    AwsRefusal,
    Cluster,
    Container,
    ContainerInstance,
    Definition,
    Task,
    invalid,
)

HOUR = 3600.0
_MAX_OVERRIDES = 8192
_STARTED_BY = re.compile(r"[A-Za-z0-9/_-]{1,128}")
_TOKEN = re.compile(r"[!-~]{1,64}")


@dataclass
class Token:
    """A RunTask that placed tasks."""

    request: Request
    tasks: list[Task]
    created_at: float

    def expired(self, now: float) -> bool:
        """After 24 hours, or an hour after its tasks: what comes first."""
        ends = [task.stopped_at + HOUR for task in self.tasks if task.stopped_at is not None]
        lifetime = max(ends) if len(ends) == len(self.tasks) else float("inf")
        return now >= min(self.created_at + 24 * HOUR, lifetime)


@dataclass
class Ecs(ContainerInstances):
    definitions: dict[str, list[Definition]] = field(default_factory=dict)
    scripts: Scripts = field(default_factory=Scripts)
    tokens: dict[tuple[str, str], Token] = field(default_factory=dict)
    lag: float = 0.0
    """Seconds until a task that RunTask answered is found by Describe and List: the API is
    eventually consistent."""

    def answer(self, operation: str, request: Request) -> dict[str, Any]:
        handler = getattr(self, re.sub(r"(?<!^)([A-Z])", r"_\1", operation).lower(), None)
        if handler is None or operation not in OPERATIONS:
            raise AwsRefusal(
                "InvalidAction",
                f"the double of ECS has no operation {operation}; expected one of "
                f"{', '.join(sorted(OPERATIONS))}",
            )
        with self.lock:
            answer: dict[str, Any] = handler(request)
            # The answer is of this moment: it is written out before the lock is released.
            copy: dict[str, Any] = json.loads(json.dumps(answer))
            return copy

    def deregister_container_instance(self, request: Request) -> dict[str, Any]:
        """What runs on it runs on, and ECS calls it stopped.

        With `force`, "these tasks remain running until you terminate the instance or the tasks stop
        through some other means, but they're orphaned (no longer monitored or accounted for by
        Amazon ECS)" (API_DeregisterContainerInstance). "If you force the deregistration of a
        container instance with running tasks, then the tasks are given this stopped reason"
        (developer guide, stopped tasks error messages). Chosen here: the stop code, and that a task
        which was to stop before keeps the reason of that.
        """
        cluster = self.cluster_of(request)
        instance = self.instance_of(cluster, request["containerInstance"])
        if instance is None or instance.status == "INACTIVE":
            raise invalid("The specified container instance was not found.")
        if instance.tasks() and not request.get("force"):
            raise invalid("Found running tasks on the instance.")
        for task in instance.tasks():
            instance.machine.orphan(task)
        instance.status, instance.agent_connected = "INACTIVE", False
        instance.version += 1
        self.changed(instance)
        return {"containerInstance": instance.describe()}

    # Definitions.

    def register_task_definition(self, request: Request) -> dict[str, Any]:
        if not request.get("containerDefinitions"):
            raise AwsRefusal("ClientException", "Container list cannot be empty.")
        family = request["family"]
        revisions = self.definitions.setdefault(family, [])
        definition = Definition(family, len(revisions) + 1, dict(request))
        revisions.append(definition)
        return {"taskDefinition": definition.describe()}

    def describe_task_definition(self, request: Request) -> dict[str, Any]:
        return {
            "taskDefinition": self._definition(
                request["taskDefinition"], "Unable to describe task definition."
            ).describe(),
            "tags": [],
        }

    def _definition(self, name: str, otherwise: str = "TaskDefinition not found.") -> Definition:
        family, _, revision = str(name).rsplit("/", 1)[-1].partition(":")
        revisions = self.definitions.get(family, [])
        found = [
            one
            for one in revisions
            if one.status == "ACTIVE" and revision in ("", "*", str(one.revision))
        ]
        if not found:
            raise AwsRefusal("ClientException", otherwise)
        return found[-1]

    # Tasks.

    def run_task(self, request: Request) -> dict[str, Any]:
        cluster = self.cluster_of(request)
        token = request.get("clientToken")
        asked = {key: value for key, value in request.items() if key != "clientToken"}
        if token is not None:
            if not _TOKEN.fullmatch(token):
                raise invalid("clientToken must be 1 to 64 characters in the range of 33-126.")
            known = self.tokens.get((cluster.name, token))
            if known is not None and not known.expired(self.clockwork.now()):
                return self._again(known, asked)
        definition = self._definition(request["taskDefinition"])
        self._check_run(request, definition)
        tests = [
            parse(one["expression"])
            for one in [
                *definition.registered.get("placementConstraints", []),
                *request.get("placementConstraints", []),
            ]
            if one["type"] == "memberOf"
        ]
        instances = [one for one in cluster.instances.values() if one.status == "ACTIVE"]
        if not instances:
            raise invalid("No Container Instances were found in your cluster.")
        placed: list[Task] = []
        failures: list[dict[str, str]] = []
        for _ in range(request.get("count", 1)):
            task, reasons = self._place(cluster, definition, instances, tests, asked)
            failures += reasons
            placed += [task] if task else []
        if token is not None and placed:
            self.tokens[cluster.name, token] = Token(asked, placed, self.clockwork.now())
        return {"tasks": [task.describe(tags=True) for task in placed], "failures": failures}

    @staticmethod
    def _again(known: Token, asked: Request) -> dict[str, Any]:
        if asked != known.request:
            arns = [task.arn for task in known.tasks]
            raise AwsRefusal(
                "ConflictException",
                "The clientToken is already in use with a different request.",
                resourceIds=arns,
            )
        short = ("taskArn", "lastStatus", "desiredStatus")
        told = [
            {key: task.describe()[key] for key in short} if task.over else task.describe(tags=True)
            for task in known.tasks
        ]
        return {"tasks": told, "failures": []}

    @staticmethod
    def _check_run(request: Request, definition: Definition) -> None:
        if not 1 <= request.get("count", 1) <= 10:
            raise invalid("count must be between 1 and 10.")
        started_by = request.get("startedBy")
        if started_by is not None and not _STARTED_BY.fullmatch(started_by):
            raise invalid(
                "startedBy must be up to 128 letters, numbers, hyphens, forward slashes and "
                "underscores."
            )
        constraints = [
            *definition.registered.get("placementConstraints", []),
            *request.get("placementConstraints", []),
        ]
        if len(constraints) > 10:
            raise invalid("Too many placement constraints: up to 10 per task.")
        if request.get("launchType", "EC2") != "EC2":
            raise invalid("the double of ECS has the launch type EC2 only")
        awsvpc = definition.registered.get("networkMode") == "awsvpc"
        if awsvpc != ("networkConfiguration" in request):
            raise invalid(
                "Network Configuration is not valid for the given networkMode of this task "
                "definition."
            )
        overrides = request.get("overrides", {})
        # The limit counts the characters of the JSON.
        if len(json.dumps(overrides, separators=(",", ":"), ensure_ascii=False)) > _MAX_OVERRIDES:
            raise invalid(f"Container Overrides length must be at most {_MAX_OVERRIDES}")
        names = [one["name"] for one in definition.containers]
        for override in overrides.get("containerOverrides", []):
            if override.get("name") not in names:
                raise invalid(
                    f"Override for container named {override.get('name')} is not a container in "
                    "the TaskDefinition."
                )

    def _place(
        self,
        cluster: Cluster,
        definition: Definition,
        instances: list[ContainerInstance],
        tests: list[Any],
        request: Request,
    ) -> tuple[Task | None, list[dict[str, str]]]:
        overrides = {
            one["name"]: one for one in request.get("overrides", {}).get("containerOverrides", [])
        }
        containers = [
            Container(one, overrides.get(one["name"], {})) for one in definition.containers
        ]
        failures: list[dict[str, str]] = []
        for instance in instances:
            if not all(test(instance) for test in tests):
                reason = "MemberOf placement constraint unsatisfied."
            elif not instance.agent_connected:
                reason = "AGENT"
            else:
                lacks = [
                    kind
                    for kind in ("CPU", "MEMORY", "GPU")
                    if sum(one.wants(kind) for one in containers) > instance.free(kind)
                ]
                reason = f"RESOURCE:{lacks[0]}" if lacks else ""
            if not reason:
                return self._new_task(cluster, instance, definition, containers, request), []
            failures.append({"arn": instance.arn, "reason": reason})
        return None, failures

    def _new_task(
        self,
        cluster: Cluster,
        instance: ContainerInstance,
        definition: Definition,
        containers: list[Container],
        request: Request,
    ) -> Task:
        now = self.clockwork.now()
        task = Task(
            cluster,
            instance,
            definition,
            containers,
            dict(request),
            now,
            now + self.lag,
            tags=list(request.get("tags", [])),
        )
        free = instance.free_gpus()
        for container in containers:
            wanted = container.wants("GPU")
            container.gpu_ids, free = tuple(free[:wanted]), free[wanted:]
        task.script = self.scripts.take(definition.family, task.describe(tags=True))
        cluster.tasks[task.id] = task
        instance.version += 1
        self.changed(task)
        self.changed(instance)
        instance.machine.place(task)
        return task

    def stop_task(self, request: Request) -> dict[str, Any]:
        cluster = self.cluster_of(request)
        task = self._find_task(cluster, request["task"])
        if task is None:
            raise invalid("The referenced task was not found.")
        if not task.over:
            machine = task.instance.machine
            machine.end(task, "UserInitiated", request.get("reason") or "Task stopped by user")
            self.clockwork.later(0.0, lambda: machine.advance(task))
        # Documented; when exactly is not said.
        task.tags.clear()
        return {"task": task.describe(tags=True)}

    def _find_task(self, cluster: Cluster, name: str) -> Task | None:
        """A stopped task is known for at least an hour; here for exactly one."""
        task = cluster.tasks.get(str(name).rsplit("/", 1)[-1])
        now = self.clockwork.now()
        if (
            task is None
            or (task.stopped_at is not None and now >= task.stopped_at + HOUR)
            or now < task.seen_from
        ):
            return None
        return task

    def describe_tasks(self, request: Request) -> dict[str, Any]:
        cluster = self.cluster_of(request)
        names = request.get("tasks", [])
        if not names:
            raise invalid("Tasks cannot be empty.")
        if len(names) > 100:
            raise invalid("Tasks cannot have more than 100 elements.")
        tags = "TAGS" in request.get("include", [])
        found = {name: self._find_task(cluster, name) for name in names}
        missing = [
            {"arn": _task_arn(cluster, name), "reason": "MISSING"}
            for name, task in found.items()
            if task is None
        ]
        return {
            "tasks": [task.describe(tags) for task in found.values() if task],
            "failures": missing,
        }

    def list_tasks(self, request: Request) -> dict[str, Any]:
        cluster = self.cluster_of(request)
        filters = {
            "containerInstance",
            "family",
            "serviceName",
            "desiredStatus",
            "launchType",
            "startedBy",
        } & set(request)
        if "startedBy" in filters and len(filters) > 1:
            raise invalid("cannot specify startedBy with other arguments.")
        desired = request.get("desiredStatus", "RUNNING")
        tasks = [
            task
            for task in cluster.tasks.values()
            if self._find_task(cluster, task.id) and task.desired_status == desired
        ]
        if "containerInstance" in request:
            instance = self.instance_of(cluster, request["containerInstance"])
            if instance is None:
                raise invalid("Container instance not found.")
            tasks = [task for task in tasks if task.instance is instance]
        if "family" in request:
            tasks = [task for task in tasks if task.definition.family == request["family"]]
        if "startedBy" in request:
            tasks = [
                task for task in tasks if task.request.get("startedBy") == request["startedBy"]
            ]
        if "serviceName" in request:
            tasks = []
        return page("taskArns", [task.arn for task in tasks], request)


def _task_arn(cluster: Cluster, name: str) -> str:
    return cluster.arn.replace(":cluster/", ":task/") + f"/{name.rsplit('/', 1)[-1]}"


OPERATIONS = frozenset(
    {
        "CreateCluster",
        "DescribeClusters",
        "RegisterTaskDefinition",
        "DescribeTaskDefinition",
        "RunTask",
        "StopTask",
        "DescribeTasks",
        "ListTasks",
        "DeregisterContainerInstance",
        "ListContainerInstances",
        "DescribeContainerInstances",
        "UpdateContainerInstancesState",
        "PutAttributes",
        "DeleteAttributes",
        "ListAttributes",
    }
)
