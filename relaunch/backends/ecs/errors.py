"""Translates failures of AWS and unmet preconditions into refusals of an order, or `Unreachable`.

The values of `why` are those of docs/reference/agent-protocol.md; each refusal also carries a
sentence for people.
"""

from __future__ import annotations

from relaunch.backends.base import Refusal, StartOrder, Unreachable
from relaunch.backends.ecs import fence
from relaunch.backends.ecs.aws import AwsError, Kind
from relaunch.backends.ecs.fence import Fence
from relaunch.backends.ecs.tasks import QUARANTINE, Definition, Instance, RunTaskFailure
from relaunch.generation import Token

GONE_AGENT = ("AGENT", "MISSING", "INACTIVE")
"""Failure reasons of RunTask when the instance cannot take a task (ECS API failure reasons)."""
BY_AWS = "refused_by_aws"
"""Value of `why` when AWS denies the call to relaunch itself: a problem of its account or
permissions, unrelated to the job or the node.
"""


def convert_aws_error(node: str, error: AwsError, why: str = BY_AWS) -> Refusal:
    """Return the refusal that corresponds to an AWS error.

    Raises:
        Unreachable: AWS throttled the call or did not answer it.
    """
    if error.kind in (Kind.THROTTLED, Kind.UNAVAILABLE):
        raise Unreachable(node, error.reason) from error
    return Refusal(node, why if error.kind is Kind.REFUSED else BY_AWS, error.reason)


def refuse_unfit(node: str, fleet: str, instance: Instance) -> Refusal | None:
    """Return why a container instance takes no ranks of a fleet; None if it takes them.

    The mark that the fleet itself wrote does not count: it is written and removed some seconds
    after the fleet has decided, and the fleet grants no node that is quarantined.

    Raises:
        Unreachable: The ECS agent of the instance is not connected.
    """
    if not instance.agent_connected:
        raise Unreachable(node, f"the ECS agent of {instance.ec2_id} is not connected")
    if instance.status != "ACTIVE":
        return Refusal(
            node, "held", f"{instance.ec2_id} is {instance.status} in ECS and takes no tasks"
        )
    if (mark := instance.attributes.get(QUARANTINE, fleet)) != fleet:
        return Refusal(
            node,
            "held",
            f"{instance.ec2_id} has the attribute {QUARANTINE} ({mark}) and takes no ranks",
        )
    return None


def refuse_forbidden(node: str, set_: Fence | None, token: Token) -> Refusal | None:
    if set_ is None or set_.highest < fence.key(token):
        return None
    if set_.state != "prepared":
        return Refusal(
            node,
            "stopped",
            f"generation {token.generation} was stopped on {node} for ever",
            set_.highest,
        )
    return (
        refuse_lower_token(node, token, set_.highest) if set_.highest > fence.key(token) else None
    )


def refuse_lower_token(node: str, token: Token, highest: tuple[int, int]) -> Refusal:
    reason = (
        f"{node} was prepared for generation {highest[1]} of submission {highest[0]},"
        f" and this is {token.generation} of {token.submission}"
    )
    return Refusal(node, "not_above", reason, highest)


def find_order_problem(order: StartOrder) -> str | None:
    """Return why an order cannot be run as an ECS task; None if it can."""
    if order.launched is not None:
        return (
            "relaunch starts no launcher on ECS: "
            "write `launcher: none`, and torchrun into the command"
        )
    if order.secrets:
        return (
            "everyone who may describe tasks could read the job's secrets: "
            "name them under `secrets` of the task definition"
        )
    if not order.inherit_env or order.umask is not None:
        return (
            "RunTask can only add to the image's environment: leave out inherit_env and umask, or "
            "set them in the command"
        )
    if order.limits:
        return "RunTask cannot set limits: write them as `ulimits` into the task definition"
    if order.separate_stderr:
        return (
            "the log driver of the container gets both streams of a rank: leave out "
            "`output: separate`"
        )
    if order.workdir is not None:
        return (
            f"RunTask cannot set workdir {order.workdir!r}: "
            "write it as workingDirectory into the task definition"
        )
    return None


def find_network_problem(definition: Definition, order: StartOrder) -> str | None:
    if definition.network_mode == "awsvpc":
        return (
            f"task definition {definition.arn} has networkMode awsvpc, "
            "expected host (or bridge, of a job on one node)"
        )
    if _nodes(order) > 1 and definition.network_mode != "host":
        has = f"task definition {definition.arn} has networkMode {definition.network_mode}"
        return f"{has}, expected host: ranks on several nodes have to meet"
    return None


def _nodes(order: StartOrder) -> int:
    said = order.env.get("GROUP_WORLD_SIZE", "")
    return int(said) if said.isdecimal() else len(order.peers) + 1


def refuse_unplaced(node: str, ec2_id: str, failure: RunTaskFailure) -> Refusal:
    """Return the refusal for a task that ECS did not place.

    Raises:
        Unreachable: The instance is missing, inactive or its agent is disconnected.
    """
    said = failure.reason + (f" ({failure.detail})" if failure.detail else "")
    if failure.reason in GONE_AGENT:
        raise Unreachable(node, f"ECS cannot reach {ec2_id}: {said}")
    if failure.reason.startswith("RESOURCE"):
        return Refusal(
            node, "held", f"{ec2_id} has not what the task needs, or others have it: {said}"
        )
    return Refusal(node, "held", f"ECS places no task on {ec2_id}: {said}")
