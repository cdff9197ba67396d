"""EC2's orders to the power of instances, and its checks of them.

moto keeps the states, the machines do what was ordered.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.doubles.aws.front import Answer, Call, error
from tests.doubles.aws.machines import Machine

_ITEM = re.compile(
    r"<item><availabilityZone>.*?<instanceId>(i-[0-9a-f]+)</instanceId>.*?</systemStatus></item>",
    re.S,
)
_DONE = Answer(
    200, "text/xml", b"<RebootInstancesResponse><return>true</return></RebootInstancesResponse>"
)


@dataclass
class Power:
    machines: Mapping[str, Machine]
    lock: threading.RLock
    statuses: dict[str, tuple[str, str, str | None]] = field(default_factory=dict)
    """Of an instance: its system and instance status, and the code of a scheduled event."""

    def __call__(self, call: Call, by_moto: Callable[[], Answer]) -> Answer:
        """Answer a call to EC2, whose state `by_moto` keeps."""
        ids = [
            str(value)
            for key, value in call.request.items()
            if re.fullmatch(r"InstanceId\.\d+", key)
        ]
        machines = [self.machines[one] for one in ids if one in self.machines]
        if call.operation == "DescribeInstanceStatus":
            answer = by_moto()
            answer.body = _ITEM.sub(self._status, answer.body.decode()).encode()
            return answer
        with self.lock:
            if call.operation == "RebootInstances" and machines and len(machines) == len(ids):
                return self._reboot(call, machines)
            if early := [
                one
                for one in machines
                if call.operation == "StartInstances" and one.power == "stopping"
            ]:
                words = (
                    f"The instance '{early[0].ec2_id}' is not in a state from which it can be "
                    "started."
                )
                return error(call, "IncorrectInstanceState", words, 400)
            answer = by_moto()
            for machine in machines if answer.status == 200 else []:
                match call.operation, machine.power:
                    case "StopInstances", "running" | "pending":
                        machine.stop()
                    case "StartInstances", "stopped":
                        machine.start()
                    case "TerminateInstances", "running" | "pending" | "stopping" | "stopped":
                        machine.terminate()
        return answer

    @staticmethod
    def _reboot(call: Call, machines: list[Machine]) -> Answer:
        """Not for moto, which revives what was terminated.

        AWS documents that it passes that over.
        """
        if off := [one for one in machines if one.power not in ("running", "terminated")]:
            return error(
                call,
                "IncorrectState",
                f"Instance {off[0].ec2_id} is not in a state from which it can be rebooted.",
                400,
            )
        for machine in machines:
            if machine.power == "running":
                machine.reboot()
        return _DONE

    def _status(self, found: re.Match[str]) -> str:
        item = found.group(0)
        if found.group(1) not in self.statuses:
            return item
        system, instance, event = self.statuses[found.group(1)]
        for kind, word in (("systemStatus", system), ("instanceStatus", instance)):
            item = re.sub(rf"(<{kind}>.*?</details><status>)\w+", rf"\g<1>{word}", item, flags=re.S)
        if event is None:
            return item
        told = (
            f"<code>{event}</code><description>{event}</description>"
            "<instanceEventId>instance-event-0</instanceEventId>"
        )
        when = "<notBefore>2030-01-01T00:00:00.000Z</notBefore>"
        return item.replace(
            "<instanceId>", f"<eventsSet><item>{told}{when}</item></eventsSet><instanceId>", 1
        )
