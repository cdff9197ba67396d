"""Value types for tasks, container instances and task definitions of ECS, and run requests.

This module makes no calls.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from relaunch.generation import Token

STOPPED = "STOPPED"
LONGEST_STARTED_BY = 128
"""Characters of `startedBy` in RunTask; StartTask allows 36."""
LONGEST_OVERRIDES = 8192
"""Characters of a RunTask's overrides (ECS API Reference, TaskOverride)."""
_DEREGISTERED = re.compile(r"(?i)deregist")
"""The reason that ECS gives: `Container instance deregistration forced by user`."""
QUARANTINE = "relaunch.quarantine"
"""A container instance that has this attribute takes no ranks."""


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    exit_code: int | None
    """None if ECS reports none: the container never started, or its machine went away. That does
    not count as success.
    """
    reason: str


@dataclass(frozen=True, slots=True)
class Task:
    arn: str
    instance_arn: str
    started_by: str
    last_status: str
    desired_status: str
    version: int
    stop_code: str | None
    stopped_reason: str
    containers: tuple[Container, ...]
    created_at: float | None
    """Unix seconds, as are the two below."""
    started_at: float | None
    stopped_at: float | None
    definition: str = ""
    rank: int | None = None
    """Global rank, from the environment that the task was run with."""
    trainer: str = ""
    """Container that was given that rank; empty if none was."""
    ranks: tuple[int, ...] = ()
    """All ranks of the task, starting with `rank`. More than one only if an agent in the container
    runs them.
    """
    port: int | None = None
    """Port of that agent; None if there is none."""

    @property
    def stopped(self) -> bool:
        return self.last_status == STOPPED

    @property
    def is_deregistered(self) -> bool:
        """Return whether ECS calls it stopped because its instance was deregistered by force."""
        return self.stopped and _DEREGISTERED.search(self.stopped_reason) is not None

    @property
    def is_unseen(self) -> bool:
        """Return whether ECS calls it stopped, and no agent has seen its ranks end.

        If its container instance was deregistered by force, they may run on: "these tasks remain
        running until you terminate the instance or the tasks stop through some other means, but
        they're orphaned (no longer monitored or accounted for by Amazon ECS)" (API reference,
        DeregisterContainerInstance).
        """
        own = [one for one in self.containers if one.name == self.trainer] or self.containers
        return (
            self.stopped
            and self.stop_code != "TaskFailedToStart"
            and all(one.exit_code is None for one in own)
        )

    @property
    def short(self) -> str:
        """Return the id of the task, without account and cluster."""
        return self.arn.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Instance:
    arn: str
    ec2_id: str
    status: str
    agent_connected: bool
    attributes: Mapping[str, str]
    gpus: tuple[str, ...]
    """UUIDs, as the instance's agent registered them."""
    version: int
    health: str
    """OK, IMPAIRED, …; empty if not known."""
    registered_at: float | None = None


@dataclass(frozen=True, slots=True)
class RunTaskFailure:
    """Answer of ECS that it did not run a task."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Log:
    """Location of a container's output in CloudWatch Logs."""

    group: str
    prefix: str
    region: str | None

    def stream(self, container: str, task: str) -> str:
        """Return the log stream of a container; `task` is the id of its task, not the ARN."""
        return f"{self.prefix}/{container}/{task}"


@dataclass(frozen=True, slots=True)
class Definition:
    arn: str
    network_mode: str
    containers: tuple[str, ...]
    essential: tuple[str, ...]
    logs: Mapping[str, Log]
    """Log locations by container."""
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables by container."""


def read_task(raw: Mapping[str, Any]) -> Task:
    """Parse a task of DescribeTasks or RunTask.

    The answer to a repeated RunTask may omit most fields.
    """
    trainer, rank, ranks, port = _trainer(raw.get("overrides") or {})
    return Task(
        arn=str(raw.get("taskArn") or ""),
        instance_arn=str(raw.get("containerInstanceArn") or ""),
        started_by=str(raw.get("startedBy") or ""),
        last_status=str(raw.get("lastStatus") or ""),
        desired_status=str(raw.get("desiredStatus") or ""),
        version=int(raw.get("version") or 0),
        stop_code=str(raw["stopCode"]) if raw.get("stopCode") else None,
        stopped_reason=str(raw.get("stoppedReason") or ""),
        containers=tuple(_container(one) for one in raw.get("containers") or ()),
        created_at=seconds(raw.get("createdAt")),
        started_at=seconds(raw.get("startedAt")),
        stopped_at=seconds(raw.get("stoppedAt")),
        definition=str(raw.get("taskDefinitionArn") or ""),
        rank=rank,
        trainer=trainer,
        ranks=ranks,
        port=port,
    )


def _container(raw: Mapping[str, Any]) -> Container:
    code = raw.get("exitCode")
    return Container(
        str(raw.get("name") or ""),
        None if code is None else int(code),
        str(raw.get("reason") or ""),
    )


def _trainer(overrides: Mapping[str, Any]) -> tuple[str, int | None, tuple[int, ...], int | None]:
    """Return the training container, its first rank, all its ranks, and the port of its agent."""
    for container in overrides.get("containerOverrides") or ():
        variables = {
            str(one.get("name")): str(one.get("value"))
            for one in container.get("environment") or ()
        }
        if (written := variables.get("RANK", "")).isdecimal():
            name, rank = str(container.get("name") or ""), int(written)
            if "RELAUNCH_ORDER" not in variables:
                return name, rank, (rank,), None
            # written by relaunch itself, so it is valid
            order = json.loads(variables["RELAUNCH_ORDER"])
            return name, rank, tuple(order["ranks"]), order["port"]
    return "", None, (), None


def read_instance(raw: Mapping[str, Any]) -> Instance:
    gpus = [one for one in raw.get("registeredResources") or () if one.get("name") == "GPU"]
    return Instance(
        arn=str(raw.get("containerInstanceArn") or ""),
        ec2_id=str(raw.get("ec2InstanceId") or ""),
        status=str(raw.get("status") or ""),
        agent_connected=bool(raw.get("agentConnected")),
        attributes={
            str(one["name"]): str(one.get("value") or "") for one in raw.get("attributes") or ()
        },
        gpus=tuple(str(uuid) for one in gpus for uuid in one.get("stringSetValue") or ()),
        version=int(raw.get("version") or 0),
        health=str((raw.get("healthStatus") or {}).get("overallStatus") or ""),
        registered_at=seconds(raw.get("registeredAt")),
    )


def read_definition(raw: Mapping[str, Any]) -> Definition:
    containers = [one for one in raw.get("containerDefinitions") or () if one.get("name")]
    return Definition(
        arn=str(raw.get("taskDefinitionArn") or ""),
        # The default of ECS for Linux.
        network_mode=str(raw.get("networkMode") or "bridge"),
        containers=tuple(str(one["name"]) for one in containers),
        essential=tuple(
            str(one["name"]) for one in containers if one.get("essential") is not False
        ),
        variables={str(one["name"]): _variables(one) for one in containers},
        logs={
            str(one["name"]): log
            for one in containers
            if (log := _log(one.get("logConfiguration") or {})) is not None
        },
    )


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    return {
        str(one.get("name")): str(one.get("value") or "")
        for one in container.get("environment") or ()
    }


def _log(raw: Mapping[str, Any]) -> Log | None:
    options = raw.get("options") or {}
    if (
        raw.get("logDriver") != "awslogs"
        or not options.get("awslogs-group")
        or not options.get("awslogs-stream-prefix")
    ):
        return None
    return Log(
        str(options["awslogs-group"]),
        str(options["awslogs-stream-prefix"]),
        options.get("awslogs-region"),
    )


def seconds(value: object) -> float | None:
    """Return a time in Unix seconds, parsed from the format of boto3 or of events."""
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return None


def the_container(definition: Definition, named: str | None) -> str:
    """Return the name of the training container.

    Raises:
        ValueError: There is no such container, or none is named and there is no single essential
            one.
    """
    if named is not None:
        if named not in definition.containers:
            known = ", ".join(definition.containers) or "none"
            raise ValueError(
                f"task definition {definition.arn} has no container {named!r}: it has {known}"
            )
        return named
    if len(definition.essential) == 1:
        return definition.essential[0]
    known = ", ".join(definition.essential) or "none"
    raise ValueError(
        f"task definition {definition.arn} has not one essential container ({known}):"
        " name the one that trains, `ecs: {container: …}`"
    )


# --- names


def build_started_by(token: Token) -> str:
    """Return the `startedBy` that names a generation in events and descriptions.

    Raises:
        ValueError: The token cannot be written there.
    """
    name = "/".join(
        (
            "relaunch",
            _escape(token.namespace),
            _escape(token.job),
            str(token.submission),
            str(token.generation),
        )
    )
    if len(name) > LONGEST_STARTED_BY:
        raise ValueError(
            f"{token} makes {len(name)} letters of startedBy,"
            f" of which ECS takes {LONGEST_STARTED_BY}: give the job a shorter name"
        )
    return name


def _escape(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(
            f"{name!r} cannot be part of a task's startedBy: letters, digits, '.', '_' and '-'"
        )
    return name.replace("_", "__").replace(".", "_d")


def token_of(started_by: str) -> Token | None:
    """Return the token of the task with this `startedBy`; None if it is not a rank of relaunch."""
    match = re.fullmatch(r"relaunch/([A-Za-z0-9_-]+)/([A-Za-z0-9_-]+)/(\d+)/(\d+)", started_by)
    if match is None:
        return None
    namespace, job = (
        re.sub(r"__|_d", lambda found: "_" if found[0] == "__" else ".", part)
        for part in match.groups()[:2]
    )
    return Token(namespace, job, int(match[3]), int(match[4]))


def stop_reason(token: Token) -> str:
    """Return the reason that relaunch gives when it stops a task.

    Other users give other reasons, so it identifies the tasks that relaunch stopped.
    """
    return f"relaunch: {token}"


def is_ours(stopped_reason: str) -> bool:
    return stopped_reason.startswith("relaunch: ")


def client_token(*parts: str) -> str:
    """Return an idempotency token: repeated requests with it take effect once."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def job_attribute(namespace: str, job: str) -> str:
    """Return the name of the fence attribute of a job.

    The attribute of that name on a container instance says which generation of the job may be
    placed there.
    """
    return f"relaunch.{hashlib.sha256(f'{namespace}/{job}'.encode()).hexdigest()[:16]}"


# --- running one


def run_task(
    cluster: str,
    ec2_id: str,
    *,
    task_definition: str,
    container: str,
    started_by: str,
    client_token: str,
    command: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    gpus: int = 0,
    only_where: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return a RunTask request for one task on an instance.

    What is not given here is taken from the task definition.

    Args:
        cluster: Name or ARN of the cluster.
        ec2_id: Id of the EC2 instance.
        task_definition: Task definition, as RunTask takes it.
        container: Name of the container to override.
        started_by: Names the owner of the task.
        client_token: Idempotency token.
        command: Command of the container.
        environment: Variables added to those of the container.
        gpus: Number of GPUs to reserve for the container.
        only_where: Further expressions of the cluster query language that the instance must satisfy
            when ECS places the task.
    """
    override: dict[str, Any] = {"name": container}
    if command:
        override["command"] = list(command)
    if environment:
        override["environment"] = [
            {"name": name, "value": value} for name, value in sorted(environment.items())
        ]
    if gpus:
        override["resourceRequirements"] = [{"type": "GPU", "value": str(gpus)}]
    where = " and ".join((f"ec2InstanceId == {ec2_id}", *only_where))
    return {
        "cluster": cluster,
        "taskDefinition": task_definition,
        "launchType": "EC2",
        "count": 1,
        "startedBy": started_by,
        "clientToken": client_token,
        "placementConstraints": [{"type": "memberOf", "expression": where}],
        "overrides": {"containerOverrides": [override]},
    }


def overrides_length(request: Mapping[str, Any]) -> int:
    return len(json.dumps(request["overrides"]))
