"""What ECS says of tasks, container instances and task definitions, as values; and what is said to it to run one. Calls nobody."""

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
"""Of RunTask; StartTask takes 36."""
LONGEST_OVERRIDES = 8192
"""Characters of a RunTask's overrides (ECS API Reference, TaskOverride)."""
QUARANTINE = "relaunch.quarantine"
"""A container instance that has this attribute takes no ranks."""


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    exit_code: int | None
    """None where ECS has none: it never started, or its machine went away. That is no success."""
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
    """Unix seconds, here and below."""
    started_at: float | None
    stopped_at: float | None
    definition: str = ""
    rank: int | None = None
    """Global; from the environment that it was run with."""
    trainer: str = ""
    """The container that was given that rank; empty: none was."""
    ranks: tuple[int, ...] = ()
    """All that run there, that one first: more than one only where an agent in the container runs them."""
    port: int | None = None
    """Of that agent; None: there is none."""

    @property
    def stopped(self) -> bool:
        return self.last_status == STOPPED

    @property
    def short(self) -> str:
        """Its id, without account and cluster."""
        return self.arn.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Instance:
    arn: str
    ec2_id: str
    status: str
    agent_connected: bool
    attributes: Mapping[str, str]
    gpus: tuple[str, ...]
    """Their uuids, as its agent registered them."""
    version: int
    health: str
    """OK, IMPAIRED, …; empty: not known."""
    registered_at: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """ECS answered that it did not run a task."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Log:
    """Where a container's output is in CloudWatch Logs."""

    group: str
    prefix: str
    region: str | None

    def stream(self, container: str, task: str) -> str:
        """Of a container of the task with that id (not ARN)."""
        return f"{self.prefix}/{container}/{task}"


@dataclass(frozen=True, slots=True)
class Definition:
    arn: str
    network_mode: str
    containers: tuple[str, ...]
    essential: tuple[str, ...]
    logs: Mapping[str, Log]
    """By container."""
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of the environment, by container."""


def read_task(raw: Mapping[str, Any]) -> Task:
    """Read a task of DescribeTasks or RunTask; a repeated RunTask may leave out most of it."""
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
    return Container(str(raw.get("name") or ""), None if code is None else int(code), str(raw.get("reason") or ""))


def _trainer(overrides: Mapping[str, Any]) -> tuple[str, int | None, tuple[int, ...], int | None]:
    """Return which container trains, the first rank there, all of them, and the port of the agent that runs them."""
    for container in overrides.get("containerOverrides") or ():
        variables = {str(one.get("name")): str(one.get("value")) for one in container.get("environment") or ()}
        if (written := variables.get("RANK", "")).isdecimal():
            name, rank = str(container.get("name") or ""), int(written)
            if "RELAUNCH_ORDER" not in variables:
                return name, rank, (rank,), None
            order = json.loads(variables["RELAUNCH_ORDER"])  # it is of our own making
            return name, rank, tuple(order["ranks"]), order["port"]
    return "", None, (), None


def read_instance(raw: Mapping[str, Any]) -> Instance:
    gpus = [one for one in raw.get("registeredResources") or () if one.get("name") == "GPU"]
    return Instance(
        arn=str(raw.get("containerInstanceArn") or ""),
        ec2_id=str(raw.get("ec2InstanceId") or ""),
        status=str(raw.get("status") or ""),
        agent_connected=bool(raw.get("agentConnected")),
        attributes={str(one["name"]): str(one.get("value") or "") for one in raw.get("attributes") or ()},
        gpus=tuple(str(uuid) for one in gpus for uuid in one.get("stringSetValue") or ()),
        version=int(raw.get("version") or 0),
        health=str((raw.get("healthStatus") or {}).get("overallStatus") or ""),
        registered_at=seconds(raw.get("registeredAt")),
    )


def read_definition(raw: Mapping[str, Any]) -> Definition:
    containers = [one for one in raw.get("containerDefinitions") or () if one.get("name")]
    return Definition(
        arn=str(raw.get("taskDefinitionArn") or ""),
        # ECS's own default for Linux.
        network_mode=str(raw.get("networkMode") or "bridge"),
        containers=tuple(str(one["name"]) for one in containers),
        essential=tuple(str(one["name"]) for one in containers if one.get("essential") is not False),
        variables={str(one["name"]): _variables(one) for one in containers},
        logs={str(one["name"]): log for one in containers if (log := _log(one.get("logConfiguration") or {})) is not None},
    )


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    return {str(one.get("name")): str(one.get("value") or "") for one in container.get("environment") or ()}


def _log(raw: Mapping[str, Any]) -> Log | None:
    options = raw.get("options") or {}
    if raw.get("logDriver") != "awslogs" or not options.get("awslogs-group") or not options.get("awslogs-stream-prefix"):
        return None
    return Log(str(options["awslogs-group"]), str(options["awslogs-stream-prefix"]), options.get("awslogs-region"))


def seconds(value: object) -> float | None:
    """Read a time as boto3 gives it, or as events write it."""
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
    """Which container trains.

    Raises:
        ValueError: there is no such container, or nobody said which.
    """
    if named is not None:
        if named not in definition.containers:
            known = ", ".join(definition.containers) or "none"
            raise ValueError(f"task definition {definition.arn} has no container {named!r}: it has {known}")
        return named
    if len(definition.essential) == 1:
        return definition.essential[0]
    known = ", ".join(definition.essential) or "none"
    raise ValueError(
        f"task definition {definition.arn} has not one essential container ({known}): name the one that trains, `ecs: {{container: …}}`"
    )


# --- names


def started_by(token: Token) -> str:
    """Name a generation in a task's startedBy, where events and descriptions have it.

    Raises:
        ValueError: it cannot be named there.
    """
    name = "/".join(("relaunch", _escaped(token.namespace), _escaped(token.job), str(token.submission), str(token.generation)))
    if len(name) > LONGEST_STARTED_BY:
        raise ValueError(
            f"{token} makes {len(name)} letters of startedBy, of which ECS takes {LONGEST_STARTED_BY}: give the job a shorter name"
        )
    return name


def _escaped(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(f"{name!r} cannot be part of a task's startedBy: letters, digits, '.', '_' and '-'")
    return name.replace("_", "__").replace(".", "_d")


def token_of(started_by: str) -> Token | None:
    """Whose task it is; None: no rank of relaunch."""
    match = re.fullmatch(r"relaunch/([A-Za-z0-9_-]+)/([A-Za-z0-9_-]+)/(\d+)/(\d+)", started_by)
    if match is None:
        return None
    namespace, job = (re.sub(r"__|_d", lambda found: "_" if found[0] == "__" else ".", part) for part in match.groups()[:2])
    return Token(namespace, job, int(match[3]), int(match[4]))


def stop_reason(token: Token) -> str:
    """What a task that we stopped says of it: whoever else stops one says something else."""
    return f"relaunch: {token}"


def is_ours(stopped_reason: str) -> bool:
    return stopped_reason.startswith("relaunch: ")


def client_token(*parts: str) -> str:
    """Name one effect, so that asking for it again has it once."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def job_attribute(namespace: str, job: str) -> str:
    """The attribute of a container instance that says which generation of a job may be placed there."""
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
    """Make a request of RunTask for one task on that instance; what is left out is as the task definition has it.

    Args:
        cluster: Its name or ARN.
        ec2_id: Of the machine.
        task_definition: As RunTask takes it.
        container: Which is overridden.
        started_by: Whose it is.
        client_token: Names this effect.
        command: Of the container.
        environment: Added to the container's.
        gpus: Reserved for it.
        only_where: Further expressions of the cluster query language that the instance has to satisfy when ECS places the task.
    """
    override: dict[str, Any] = {"name": container}
    if command:
        override["command"] = list(command)
    if environment:
        override["environment"] = [{"name": name, "value": value} for name, value in sorted(environment.items())]
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
