"""Why an order is refused, in the words of docs/reference/agent-protocol.md and in a sentence; and what is no refusal but silence."""

from __future__ import annotations

from relaunch.backends.base import Refused, StartOrder, Unreachable
from relaunch.backends.ecs import fence
from relaunch.backends.ecs.aws import AwsError, Kind
from relaunch.backends.ecs.fence import Fence
from relaunch.backends.ecs.tasks import QUARANTINE, Definition, Failure, Instance
from relaunch.generation import Token

GONE_AGENT = ("AGENT", "MISSING", "INACTIVE")
"""Reasons of RunTask that say the instance is not there to take a task (API failure reasons)."""
BY_AWS = "refused_by_aws"
"""Why an order was refused that AWS refuses to relaunch itself: its account or its permissions, and nothing of the job or the node."""


def by_aws(node: str, error: AwsError, why: str = BY_AWS) -> Refused:
    """Refuse where AWS has refused.

    Raises:
        Unreachable: nobody knows what it did.
    """
    if error.kind in (Kind.THROTTLED, Kind.UNAVAILABLE):
        raise Unreachable(node, error.reason) from error
    return Refused(node, why if error.kind is Kind.REFUSED else BY_AWS, error.reason)


def unfit(node: str, instance: Instance) -> Refused | None:
    """Why a container instance takes no ranks.

    Raises:
        Unreachable: its agent is away.
    """
    if not instance.agent_connected:
        raise Unreachable(node, f"the ECS agent of {instance.ec2_id} is not connected")
    if instance.status != "ACTIVE":
        return Refused(node, "held", f"{instance.ec2_id} is {instance.status} in ECS and takes no tasks")
    if QUARANTINE in instance.attributes:
        return Refused(node, "held", f"{instance.ec2_id} has the attribute {QUARANTINE} and takes no ranks")
    return None


def forbidden(node: str, set_: Fence | None, token: Token) -> Refused | None:
    if set_ is None or set_.highest < fence.key(token):
        return None
    if set_.state == "stopped":
        return Refused(node, "stopped", f"generation {token.generation} was stopped on {node} for ever", set_.highest)
    return not_above(node, token, set_.highest) if set_.highest > fence.key(token) else None


def not_above(node: str, token: Token, highest: tuple[int, int]) -> Refused:
    reason = (
        f"{node} was prepared for generation {highest[1]} of submission {highest[0]}, and this is {token.generation} of {token.submission}"
    )
    return Refused(node, "not_above", reason, highest)


def cannot(order: StartOrder) -> str | None:
    """What a task cannot be."""
    if order.launched is not None:
        return "relaunch starts no launcher on ECS: write `launcher: none`, and torchrun into the command"
    if order.secrets:
        return "whoever may describe tasks could read the job's secrets: name them under `secrets` of the task definition"
    if order.workdir is not None:
        return f"RunTask cannot set workdir {order.workdir!r}: write it as workingDirectory into the task definition"
    return None


def no_network(definition: Definition, order: StartOrder) -> str | None:
    if definition.network_mode == "awsvpc":
        return f"task definition {definition.arn} has networkMode awsvpc, expected host (or bridge, of a job on one node)"
    if _nodes(order) > 1 and definition.network_mode != "host":
        has = f"task definition {definition.arn} has networkMode {definition.network_mode}"
        return f"{has}, expected host: ranks on several nodes have to meet"
    return None


def _nodes(order: StartOrder) -> int:
    said = order.env.get("GROUP_WORLD_SIZE", "")
    return int(said) if said.isdecimal() else len(order.peers) + 1


def not_placed(node: str, ec2_id: str, failure: Failure) -> Refused:
    """Say why ECS placed no task.

    Raises:
        Unreachable: the instance is not there.
    """
    said = failure.reason + (f" ({failure.detail})" if failure.detail else "")
    if failure.reason in GONE_AGENT:
        raise Unreachable(node, f"ECS cannot reach {ec2_id}: {said}")
    if failure.reason.startswith("RESOURCE"):
        return Refused(node, "held", f"{ec2_id} has not what the task needs, or others have it: {said}")
    return Refused(node, "held", f"ECS places no task on {ec2_id}: {said}")
