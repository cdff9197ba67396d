"""Auto Scaling groups of instances that are there: their Standby and their health checks.

Played as documented: an instance goes into Standby only from InService, and back only from Standby,
over states that last a while; the desired capacity follows, between minimum and maximum; a group
terminates an instance in service that fails its health check, and leaves one in Standby alone.
Chosen here, as no document says it: that an instance which reboots, or is stopped, always fails it,
at once. Of the refusals only "is not in InService" was seen in a report of AWS's own; the words of
the others are ours. Not played: a group that launches instances.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from tests.doubles.aws.clockwork import Clockwork
from tests.doubles.aws.front import Answer, Call, error
from tests.doubles.aws.machines import Delays, Machine

NAMESPACE = "http://autoscaling.amazonaws.com/doc/2011-01-01/"
ENTERED = {"EnteringStandby": "Standby", "Pending": "InService"}
"""What follows a state by itself."""


@dataclass
class Group:
    name: str
    min_size: int
    max_size: int
    desired: int
    states: dict[str, str] = field(default_factory=dict)
    """Lifecycle state by EC2 id."""


@dataclass
class Groups:
    machines: Mapping[str, Machine]
    lock: threading.RLock
    clockwork: Clockwork
    delays: Delays
    ec2: Callable[[str, str], None]
    """Tells EC2 of an instance's state."""
    groups: dict[str, Group] = field(default_factory=dict)

    def __call__(self, call: Call, by_moto: Callable[[], Answer]) -> Answer:
        ids = [
            value
            for key, value in sorted(call.request.items())
            if re.fullmatch(r"InstanceIds\.member\.\d+", key)
        ]
        with self.lock:
            match call.operation:
                case "DescribeAutoScalingInstances":
                    return self._describe(call, ids)
                case "EnterStandby" | "ExitStandby":
                    return self._move(call, ids)
        return by_moto()

    def fail_health_check(self, ec2_id: str) -> None:
        """An instance reboots or stops: its group terminates it, unless that leaves it alone."""
        for group in self.groups.values():
            if group.states.get(ec2_id) == "InService":
                group.states[ec2_id] = "Terminating"
                self.ec2(ec2_id, "terminated")
                self.machines[ec2_id].terminate()

    def _describe(self, call: Call, ids: list[str]) -> Answer:
        rows = [
            f"<member><InstanceId>{ec2_id}</InstanceId>"
            f"<AutoScalingGroupName>{escape(group.name)}</AutoScalingGroupName>"
            "<AvailabilityZone>us-east-1a</AvailabilityZone>"
            f"<LifecycleState>{state}</LifecycleState><HealthStatus>HEALTHY</HealthStatus>"
            "<ProtectedFromScaleIn>false</ProtectedFromScaleIn></member>"
            for group in self.groups.values()
            for ec2_id, state in group.states.items()
            if ec2_id in ids
        ]
        return _answer(call, f"<AutoScalingInstances>{''.join(rows)}</AutoScalingInstances>")

    def _move(self, call: Call, ids: list[str]) -> Answer:
        enters = call.operation == "EnterStandby"
        expected = "InService" if enters else "Standby"
        group = self.groups.get(str(call.request.get("AutoScalingGroupName")))
        if group is None:
            return _refuse(call, f"AutoScalingGroup name not found - {call.request}")
        for ec2_id in ids:
            if ec2_id not in group.states:
                return _refuse(call, f"The instance {ec2_id} is not part of {group.name}.")
            if group.states[ec2_id] != expected:
                return _refuse(call, f"The instance {ec2_id} is not in {expected}.")
        counts = not enters or call.request.get("ShouldDecrementDesiredCapacity") == "true"
        desired = group.desired + (-len(ids) if enters else len(ids)) * counts
        if not group.min_size <= desired <= group.max_size:
            return _refuse(
                call,
                f"AutoScalingGroup {group.name} has min-size={group.min_size}, "
                f"max-size={group.max_size}, and desired-size={group.desired}. To place "
                f"{'into' if enters else 'out of'} standby {len(ids)} instance, please update the "
                "AutoScalingGroup sizes appropriately.",
            )
        group.desired = desired
        for ec2_id in ids:
            group.states[ec2_id] = "EnteringStandby" if enters else "Pending"
            self.clockwork.later(
                self.delays.standby, lambda ec2_id=ec2_id: self._arrive(group, ec2_id)
            )  # type: ignore[misc]
        return _answer(call, "<Activities></Activities>")

    @staticmethod
    def _arrive(group: Group, ec2_id: str) -> None:
        state = group.states[ec2_id]
        group.states[ec2_id] = ENTERED.get(state, state)


def _refuse(call: Call, message: str) -> Answer:
    return error(call, "ValidationError", message, 400)


def _answer(call: Call, result: str) -> Answer:
    name = call.operation
    text = f"<{name}Result>{result}</{name}Result>"
    body = f'<{name}Response xmlns="{NAMESPACE}">{text}</{name}Response>'
    return Answer(200, "text/xml", body.encode())
