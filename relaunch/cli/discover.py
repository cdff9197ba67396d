"""Writes a fleet file for an existing ECS cluster, with a node for each of its EC2 instances.

It calls AWS from this machine and changes nothing there. A person has to review the result: AWS
does not say which nodes are spares, or what a rank is run as.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relaunch.cli.terminal import check_name
from relaunch.config import ConfigError
from relaunch.fields import parse_name
from relaunch.spec.fleet import EcsOptions, FleetNode, FleetSpec

if TYPE_CHECKING:
    from relaunch.backends.ecs.aws import Aws, AwsError

MAX_INSTANCES_PER_CALL = 100
"""Instances per call: the most that ECS describes at once."""
ENDED_STATES = ("", "shutting-down", "terminated")
"""EC2 states that an instance does not come back from. ECS keeps a container instance that was
terminated while it was stopped."""
EC2_ID_PREFIX = "i-"
"""Prefix of EC2 instance IDs; those of ECS Anywhere begin with mi-."""


@dataclass(frozen=True, slots=True)
class ContainerInstance:
    """A container instance that its cluster lists as ACTIVE."""

    arn: str
    ec2_id: str
    gpus: int
    """Number of GPUs registered with ECS."""
    connected: bool
    """Whether its ECS agent is connected."""
    registered_at: float
    tag: str
    """EC2's tag `Name`; empty if it has none."""
    state: str
    """State of the EC2 instance; empty if EC2 does not know it."""


def fleet_file(cluster: str, region: str | None, name: str, task_definition: str | None) -> str:
    """Return the text of the fleet file.

    Args:
        cluster: Name or ARN of the cluster.
        region: None: the region of the ARN, else the one that boto3 finds.
        name: Name of the fleet.
        task_definition: What a rank is run as; None: left for the user of the file to fill in.

    Raises:
        ConfigError: The cluster cannot be listed or has no EC2 instance, or an argument is not
            valid in a fleet file.
    """
    check_name("fleet", name)
    task_definition = task_definition or None
    _check(cluster, name, task_definition)
    if region is None and cluster.startswith("arn:"):
        region = cluster.split(":")[3] or None
    nodes, left_out = select_instances(asyncio.run(_list(cluster, region)))
    if not nodes:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise ConfigError(
            f"ECS cluster {cluster!r} has no ACTIVE container instance that is an EC2 "
            f"instance{why}: expected at least one"
        )
    return _render_file(
        cluster, region or nodes[0].arn.split(":")[3], name, task_definition, nodes, left_out
    )


def _check(cluster: str, name: str, task_definition: str | None) -> None:
    """Refuse what a worker would refuse in the file, before calling AWS."""
    from relaunch.backends.ecs.options import options

    ecs = EcsOptions(cluster=cluster, task_definition=task_definition)
    try:
        options(
            FleetSpec(
                name=name,
                backend="ecs",
                nodes=(FleetNode(name="any", address="i-00000000"),),
                ecs=ecs,
            ),
            {},
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


# --- what AWS says


async def _list(cluster: str, region: str | None) -> list[ContainerInstance]:
    """Return the instances of a cluster in the order of their registration."""
    from relaunch.backends.ecs.aws import Aws, AwsError
    from relaunch.backends.ecs.tasks import read_instance

    aws = Aws(region)
    try:
        arns = await _read_pages(
            aws,
            "ecs",
            "ListContainerInstances",
            "containerInstanceArns",
            cluster=cluster,
            status="ACTIVE",
        )
        answers = [
            await aws.call(
                "ecs",
                "DescribeContainerInstances",
                cluster=cluster,
                containerInstances=arns[first : first + MAX_INSTANCES_PER_CALL],
            )
            for first in range(0, len(arns), MAX_INSTANCES_PER_CALL)
        ]
        instances = [
            read_instance(one)
            for answer in answers
            for one in answer.get("containerInstances") or ()
        ]
        machines: dict[str, tuple[str, str]] = {}
        for first in range(0, len(instances), MAX_INSTANCES_PER_CALL):
            # Not by InstanceIds: one that EC2 has forgotten would fail the whole call.
            filters = [
                {
                    "Name": "instance-id",
                    "Values": [
                        one.ec2_id for one in instances[first : first + MAX_INSTANCES_PER_CALL]
                    ],
                }
            ]
            for reservation in await _read_pages(
                aws, "ec2", "DescribeInstances", "Reservations", "NextToken", Filters=filters
            ):
                machines.update(_read_machine(one) for one in reservation.get("Instances") or ())
    except AwsError as error:
        raise ConfigError(_explain_error(cluster, region, error)) from None
    finally:
        await aws.close()
    found = [
        ContainerInstance(
            one.arn,
            one.ec2_id,
            len(one.gpus),
            one.agent_connected,
            one.registered_at or 0.0,
            *machines.get(one.ec2_id, ("", "")),
        )
        for one in instances
    ]
    return sorted(found, key=lambda one: (one.registered_at, one.ec2_id, one.arn))


async def _read_pages(
    aws: Aws, service: str, operation: str, key: str, token: str = "nextToken", **request: Any
) -> list[Any]:
    found: list[Any] = []
    page: dict[str, str] = {}
    while True:
        answer = await aws.call(service, operation, **request, **page)
        found += answer.get(key) or ()
        if not answer.get(token):
            return found
        page = {token: answer[token]}


def _read_machine(raw: Mapping[str, Any]) -> tuple[str, tuple[str, str]]:
    """Return the EC2 ID of an instance, and its tag `Name` and state."""
    tags = {str(tag.get("Key")): str(tag.get("Value") or "") for tag in raw.get("Tags") or ()}
    return str(raw["InstanceId"]), (
        tags.get("Name", ""),
        str((raw.get("State") or {}).get("Name") or ""),
    )


def _explain_error(cluster: str, region: str | None, error: AwsError) -> str:
    from relaunch.backends.ecs.aws import Kind

    what = f"ECS cluster {cluster!r} cannot be read: {error.reason.rstrip('.')}"
    if error.code == "ClusterNotFoundException":
        return (
            f"{what}: expected the name or ARN of a cluster of this account in "
            f"{region or 'the region that boto3 finds (or --region)'}"
        )
    if error.kind is Kind.DENIED and not error.code:
        return (
            f"{what}: expected credentials where boto3 looks for them (AWS_PROFILE, "
            "AWS_ACCESS_KEY_ID, ~/.aws, a role of this machine)"
        )
    if error.kind is Kind.DENIED:
        allowed = (
            "ecs:ListContainerInstances, ecs:DescribeContainerInstances and ec2:DescribeInstances"
        )
        return f"{what}: expected credentials that may {allowed}"
    if error.kind is Kind.REFUSED and not error.code and region is None:
        return f"{what}: expected --region REGION, or AWS_DEFAULT_REGION"
    return f"{what}: check the network to AWS, then repeat the command"


# --- what is written


def select_instances(
    found: Sequence[ContainerInstance],
) -> tuple[list[ContainerInstance], list[str]]:
    """Return each EC2 instance once, and the reason for each container instance left out."""
    nodes: dict[str, ContainerInstance] = {}
    left_out = []
    for one in found:
        if not one.ec2_id.startswith(EC2_ID_PREFIX):
            left_out.append(f"{one.ec2_id or one.arn} is not an EC2 instance")
        elif one.state in ENDED_STATES:
            left_out.append(f"{one.ec2_id} is {one.state or 'not known to EC2'}")
        elif one.ec2_id not in nodes or one.connected:
            # An agent that lost its state registers again; its old registration remains, never
            # connected.
            nodes[one.ec2_id] = one
    return list(nodes.values()), left_out


def names(tags: Sequence[str]) -> tuple[str, ...]:
    """Return node names: the tag where it is a valid and unique name, else a number."""
    how_often = Counter(tags)
    taken = {tag for tag in tags if how_often[tag] == 1 and _is_name(tag)}
    width = max(2, len(str(len(tags))))
    numbered = (
        name
        for number in range(1, 2 * len(tags) + 1)
        if (name := f"gpu-{number:0{width}}") not in taken
    )
    return tuple(tag if tag in taken else next(numbered) for tag in tags)


def _is_name(tag: str) -> bool:
    try:
        parse_name(tag)
    except ValueError:
        return False
    return True


def _render_file(
    cluster: str,
    region: str,
    name: str,
    task_definition: str | None,
    nodes: Sequence[ContainerInstance],
    left_out: Sequence[str],
) -> str:
    short = cluster.rpartition("/")[2]
    lines = [
        f"# Nodes of ECS cluster {short}, by `relaunch nodes discover`.",
        *_dump_block({"name": name, "backend": "ecs"}),
        "nodes:",
    ]
    for one, called in zip(nodes, names([one.tag for one in nodes]), strict=True):
        entry = _dump_inline({"name": called, "address": one.ec2_id, "gpus": one.gpus})
        lines.append(f"  - {entry}{_describe_problems(one)}")
    lines += [f"# left out: {reason}" for reason in left_out]
    rank = {} if task_definition is None else {"task_definition": task_definition}
    # The task family that deploy/ecs/relaunch.yaml creates; users of another family edit this line.
    ecs = {"cluster": cluster, "region": region, **rank, "node_task": f"relaunch-node-{short}"}
    lines += ["ecs:", *(f"  {line}" for line in _dump_block(ecs))]
    if task_definition is None:
        lines.append(
            "  # task_definition: FAMILY  the task that runs a rank; a job file may name it instead"
        )
    lines.append(
        "  # queue: URL, topic: ARN   outputs Queue and Topic of the stack created by "
        "deploy/ecs/relaunch.yaml"
    )
    return "\n".join(lines) + "\n"


def _describe_problems(one: ContainerInstance) -> str:
    said = (
        [f"EC2 says {one.state}"]
        if one.state != "running"
        else ["ECS agent not connected"]
        if not one.connected
        else []
    )
    said += ["no GPU registered with ECS"] if not one.gpus else []
    return f"  # {'; '.join(said)}" if said else ""


def _dump_block(values: Mapping[str, Any]) -> list[str]:
    import yaml

    return str(yaml.safe_dump(dict(values), sort_keys=False, width=1000)).splitlines()


def _dump_inline(values: Mapping[str, Any]) -> str:
    import yaml

    return str(
        yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=True, width=1000)
    ).strip()
