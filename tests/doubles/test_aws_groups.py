"""The double of AWS plays Auto Scaling groups, as AWS documents them and says where it does not."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from tests.doubles.aws import AwsDouble
from tests.doubles.aws_caller import Caller, refused, until


def state(caller: Caller, node: str) -> str:
    """As DescribeAutoScalingInstances says it; empty for an instance in no group."""
    rows = caller.autoscaling.describe_auto_scaling_instances(InstanceIds=[node])
    return next((str(row["LifecycleState"]) for row in rows["AutoScalingInstances"]), "")


def enter(caller: Caller, node: str, group: str, decrement: bool = True) -> None:
    caller.autoscaling.enter_standby(
        InstanceIds=[node], AutoScalingGroupName=group, ShouldDecrementDesiredCapacity=decrement
    )


def test_standby_is_entered_and_left_in_two_steps(aws: AwsDouble, caller: Caller) -> None:
    node, alone = aws.add_instance(gpus=0), aws.add_instance(gpus=0)
    group = aws.add_group("two steps", [node])
    assert (state(caller, node), state(caller, alone)) == ("InService", "")
    enter(caller, node, group.name)
    assert state(caller, node) in ("EnteringStandby", "Standby") and group.desired == 0
    until(lambda: state(caller, node) == "Standby")
    for misplaced in (node, alone):
        with pytest.raises(ClientError) as caught:
            enter(caller, misplaced, group.name)
        assert refused(caught) == "ValidationError"
    there = {"InstanceIds": [node], "AutoScalingGroupName": group.name}
    caller.autoscaling.exit_standby(**there)
    assert state(caller, node) in ("Pending", "InService") and group.desired == 1
    until(lambda: state(caller, node) == "InService")
    with pytest.raises(ClientError, match="is not in Standby"):
        caller.autoscaling.exit_standby(**there)


def test_the_desired_capacity_stays_within_its_bounds(aws: AwsDouble, caller: Caller) -> None:
    node = aws.add_instance(gpus=0)
    group = aws.add_group("bounds", [node], min_size=1, max_size=1)
    with pytest.raises(ClientError, match="min-size=1, max-size=1, and desired-size=1"):
        enter(caller, node, group.name)
    enter(caller, node, group.name, decrement=False)
    until(lambda: state(caller, node) == "Standby")
    with pytest.raises(ClientError, match="max-size=1"):
        caller.autoscaling.exit_standby(InstanceIds=[node], AutoScalingGroupName=group.name)


@pytest.mark.parametrize("operation", ["reboot_instances", "stop_instances"])
def test_a_group_terminates_what_goes_down_in_service(
    aws: AwsDouble, caller: Caller, operation: str
) -> None:
    in_service, standing_by = aws.add_instance(gpus=0), aws.add_instance(gpus=0)
    group = aws.add_group(operation, [in_service, standing_by])
    group.states[standing_by] = "Standby"
    getattr(caller.ec2, operation)(InstanceIds=[in_service, standing_by])
    until(lambda: aws.instance(in_service).machine.power == "terminated")
    assert state(caller, in_service) == "Terminating"
    rest = {"reboot_instances": "running", "stop_instances": "stopped"}[operation]
    until(lambda: aws.instance(standing_by).machine.power == rest)
    assert state(caller, standing_by) == "Standby"
    (row,) = caller.ec2.describe_instances(InstanceIds=[in_service])["Reservations"]
    assert row["Instances"][0]["State"]["Name"] == "terminated"
