"""Moves an instance into the Standby of its Auto Scaling group, and back into service.

A group terminates an instance in service that fails its health check, as one does that reboots or
is stopped. AWS documents Standby for that: the group then neither checks nor replaces it. When to
enter and leave it is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaunch.backends.ecs.aws import Aws, AwsError, Kind

IN_SERVICE, ENTERING, STANDBY = "InService", "EnteringStandby", "Standby"


@dataclass(frozen=True, slots=True)
class Membership:
    """An instance's place in an Auto Scaling group; both fields are empty if it is in none."""

    group: str = ""
    state: str = ""
    """Lifecycle state."""


class Standby:
    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    async def read(self, ec2_id: str) -> Membership:
        answer = await self._aws.call(
            "autoscaling", "DescribeAutoScalingInstances", InstanceIds=[ec2_id]
        )
        for one in answer.get("AutoScalingInstances") or ():
            group, state = one.get("AutoScalingGroupName"), one.get("LifecycleState")
            return Membership(str(group or ""), str(state or ""))
        return Membership()

    async def enter(self, ec2_id: str, group: str) -> None:
        """Ask the group to put an instance that is in service into Standby, without a replacement.

        The group does that after it has answered.

        Raises:
            AwsError: It did not answer, or refuses, such as where it would fall below its minimum
                size.
        """
        await self._aws.call(
            "autoscaling",
            "EnterStandby",
            InstanceIds=[ec2_id],
            AutoScalingGroupName=group,
            # Otherwise the group launches another instance, which is in no fleet file.
            ShouldDecrementDesiredCapacity=True,
        )

    async def leave(self, ec2_id: str) -> str:
        """Put an instance back into service if it is in Standby.

        Return why it stays in Standby; empty if it does not.

        Raises:
            AwsError: The group did not answer.
        """
        member = await self.read(ec2_id)
        if member.state == ENTERING:
            return f"its Auto Scaling group {member.group} is still putting it into Standby"
        if member.state != STANDBY:
            return ""
        try:
            await self._aws.call(
                "autoscaling",
                "ExitStandby",
                InstanceIds=[ec2_id],
                AutoScalingGroupName=member.group,
            )
        except AwsError as error:
            if error.kind not in (Kind.REFUSED, Kind.DENIED):
                raise
            if (await self.read(ec2_id)).state != STANDBY:
                return ""  # another worker has done it
            return (
                f"its Auto Scaling group {member.group} does not take it back from Standby: "
                f"{error.reason}"
            )
        return ""


def explain_refusal(group: str, error: AwsError) -> str:
    """Return the sentence for a group that does not put an instance into Standby."""
    return (
        f"its Auto Scaling group {group} would terminate it meanwhile, and does not put it into "
        f"Standby: {error.reason}"
    )
