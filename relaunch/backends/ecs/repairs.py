"""Reboots and power-cycles container instances, and finishes such orders that were interrupted.

RebootInstances is not idempotent: every order is written to the instance's tags before it is sent,
so that no worker sends it twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from relaunch.backends.base import Refusal, Unreachable
from relaunch.backends.ecs.aws import Aws, AwsError, Kind
from relaunch.backends.ecs.cluster import Cluster, UnknownInstance
from relaunch.backends.ecs.occupants import names, occupants
from relaunch.backends.ecs.power import NO_CAPACITY, PowerCycle
from relaunch.backends.ecs.reboots import Journal, JournalEntry, JournalPhase, Way, launch
from relaunch.backends.ecs.standby import IN_SERVICE, STANDBY, Standby, explain_refusal
from relaunch.backends.ecs.tasks import Instance
from relaunch.spec.fleet import EcsOptions

HARD_RESET = 300.0
"""Seconds after which an ordered reboot has happened: EC2 queues a reboot, and resets by force an
instance that does not shut down within a few minutes.
"""
BEGIN_TIMEOUT = 60.0
"""Seconds from the intent until its worker has drained the instance or is gone: each of the calls
in between ends within thirteen.
"""
STANDBY_TIMEOUT = 45.0
"""Seconds for an Auto Scaling group to put an instance into Standby, which takes a few unless a
load balancer drains it. With the probe before, that is less than an order to reboot may take.
"""
RETIRED = ("instance-retirement", "instance-stop")
"""Events that EC2 schedules for failing hardware: a reboot keeps the instance on it, a stop and
start moves it to other hardware.
"""
NO_RESET = (
    "relaunch does not reset GPUs of an ECS instance: "
    "ECS and its GPU runtime hold them open; reboot it instead"
)
LOST_BY_A_STOP = (
    "stopped and started by EC2, on other hardware; what was on instance store volumes is lost"
)


class Repairs:
    def __init__(
        self,
        cluster: Cluster,
        aws: Aws,
        options: EcsOptions,
        *,
        look: float = 2.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._aws = aws
        self._options = options
        self._look = look
        self._now = now
        self._power = PowerCycle(cluster, aws, now)
        self._standby = Standby(aws)

    # --- reboot

    async def reboot(
        self,
        node: str,
        ec2_id: str,
        id: str,
        boot_id: str,
        reason: str,
        probe: Callable[[], Awaitable[Mapping[str, Any]]],
    ) -> Mapping[str, Any] | Refusal:
        """Tell EC2 to reboot an instance if it still runs this boot and nothing runs there.

        Only a different boot id afterwards proves that the reboot happened.
        """
        if self._options.node_task is None:
            why = (
                "nothing on it could report a boot id, which alone proves a reboot: "
                "set ecs.node_task in the fleet file"
            )
            return Refusal(node, "cannot_reboot", why)
        with _asking(node):
            journal = await Journal.read(self._aws, ec2_id)
            going = journal.find_unfinished(Way.REBOOT)
            if going is not None and going.id != id and self._age(going) < HARD_RESET:
                return Refusal(node, "held", f"it is being rebooted (reboot, {going.id})")
            mine = journal.find_entry(Way.REBOOT, id)
            if mine is not None and (mine.sent or not mine.over) and self._age(mine) < HARD_RESET:
                return {"outcome": "done", "boot_id": mine.before, "already": True}
            instance = await self._cluster.instance(ec2_id)
            if instance.status != "ACTIVE" and going is None:
                return Refusal(
                    node,
                    "held",
                    f"its container instance is {instance.status}, which relaunch did not make it",
                )
            facts = await probe()
            if refused := _unlike(node, boot_id, facts) or await self._cannot(node, ec2_id):
                return refused
            # the probe may have finished an interrupted order
            journal = await Journal.read(self._aws, ec2_id)
            return await self._order(
                node, journal, JournalEntry(Way.REBOOT, id, self._now(), boot_id)
            )

    async def _order(
        self, node: str, journal: Journal, entry: JournalEntry
    ) -> Mapping[str, Any] | Refusal:
        instance = await self._cluster.instance(journal.ec2_id)
        try:
            member = await self._standby.read(journal.ec2_id)
        except AwsError as error:
            if error.kind in (Kind.THROTTLED, Kind.UNAVAILABLE):
                raise
            return Refusal(node, "held", f"its Auto Scaling group is not known: {error.reason}")
        if member.state not in ("", IN_SERVICE, STANDBY):
            return Refusal(
                node,
                "held",
                f"its Auto Scaling group {member.group} has it {member.state}, expected "
                f"{IN_SERVICE} or {STANDBY}",
            )
        await journal.write(entry)
        await self._set_state(instance, "DRAINING")
        # From here on ECS places nothing there: only tasks that are there now could be lost.
        if on_it := _busy(await self._cluster.tasks_on(journal.ec2_id)):
            await self._undo(journal, entry, instance)
            return Refusal(node, "busy", on_it)
        if member.state == IN_SERVICE:
            entry = await journal.write(replace(entry, standby=True))
            try:
                await self._standby.enter(journal.ec2_id, member.group)
            except AwsError as error:
                if error.kind is Kind.UNAVAILABLE:
                    raise
                await self._undo(journal, replace(entry, standby=False), instance)
                if error.kind is Kind.THROTTLED:
                    raise
                return Refusal(node, "held", explain_refusal(member.group, error))
            entry = await self._await_standby(node, journal, entry)
        try:
            await self._aws.call("ec2", "RebootInstances", InstanceIds=[journal.ec2_id])
        except AwsError as error:
            # it may reboot: keep the entry, so that no worker orders it again
            if error.kind is Kind.UNAVAILABLE:
                raise
            await self._undo(journal, entry, instance)
            if error.kind is Kind.THROTTLED:
                raise
            return Refusal(node, "cannot_reboot", error.reason)
        await journal.write(entry.advance(JournalPhase.SENT))
        return {"outcome": "done", "boot_id": entry.before}

    async def _await_standby(
        self, node: str, journal: Journal, entry: JournalEntry
    ) -> JournalEntry:
        """Wait until the instance is in Standby, and return the entry of the reboot that is due.

        Raises:
            Unreachable: It is not in Standby in time. A later probe takes it out again.
        """
        until = time.monotonic() + STANDBY_TIMEOUT
        while (member := await self._standby.read(journal.ec2_id)).state != STANDBY:
            if time.monotonic() >= until:
                raise Unreachable(
                    node,
                    f"it was not rebooted: its Auto Scaling group {member.group} has it "
                    f"{member.state or 'no more'}, {STANDBY_TIMEOUT:.0f} s after it was asked to "
                    "put it into Standby",
                )
            await asyncio.sleep(self._look)
        # The time that a reboot may take is counted from its order.
        return await journal.write(replace(entry, at=self._now()))

    async def _undo(self, journal: Journal, entry: JournalEntry, instance: Instance) -> None:
        if entry.standby and await self._standby.leave(journal.ec2_id):
            return  # the entry stays: later probes of the node go on with this
        await self._set_state(instance, "ACTIVE")
        await journal.withdraw(entry)

    async def _set_state(self, instance: Instance, status: str) -> None:
        request = {"cluster": self._cluster.name, "containerInstances": [instance.arn]}
        await self._aws.call("ecs", "UpdateContainerInstancesState", status=status, **request)

    async def _cannot(self, node: str, ec2_id: str) -> Refusal | None:
        """Return a refusal if EC2 reports the instance's hardware as broken.

        A reboot would leave the instance on the same hardware.
        """
        answer = await self._aws.call(
            "ec2", "DescribeInstanceStatus", InstanceIds=[ec2_id], IncludeAllInstances=True
        )
        for one in answer.get("InstanceStatuses") or ():
            if (one.get("SystemStatus") or {}).get("Status") == "impaired":
                return Refusal(
                    node,
                    "cannot_reboot",
                    "EC2 says that the system below it is impaired: it needs other hardware",
                )
            for event in one.get("Events") or ():
                if event.get("Code") in RETIRED and not str(
                    event.get("Description") or ""
                ).startswith("[Completed]"):
                    return Refusal(
                        node,
                        "cannot_reboot",
                        f"EC2 has scheduled its {event['Code']}: it needs other hardware",
                    )
        return None

    # --- interrupted orders

    async def settle(self, node: str, ec2_id: str, within: float) -> Journal:
        """Finish an interrupted order and wait for the instance to come back.

        Raises:
            Unreachable: It is not back yet.
        """
        until = time.monotonic() + within
        with _asking(node):
            journal = await Journal.read(self._aws, ec2_id)
            while reason := await self._advance_unfinished(journal):
                if time.monotonic() + self._look >= until:
                    raise Unreachable(node, reason)
                await asyncio.sleep(self._look)
        return journal

    async def _advance_unfinished(self, journal: Journal) -> str:
        """Return why the instance cannot be probed yet; empty if it can."""
        cycle = journal.find_unfinished(Way.POWER)
        if cycle is not None:
            waiting = await self._power.step(journal, cycle)
            if waiting is not None:
                return f"its power is being cycled: {waiting.reason}"
            if (reboot := journal.find_unfinished(Way.REBOOT)) is not None:
                # the power cycle also ended that boot
                await journal.write(reboot.advance(JournalPhase.DOWN))
        reboot = journal.find_unfinished(Way.REBOOT)
        return "" if reboot is None else await self._not_back(journal, reboot)

    async def _not_back(self, journal: Journal, entry: JournalEntry) -> str:
        instance = await self._cluster.instance(journal.ec2_id)
        age = self._age(entry)
        if not instance.agent_connected:
            if entry.phase is not JournalPhase.DOWN and instance.status == "DRAINING":
                await journal.write(entry.advance(JournalPhase.DOWN))
            return f"its reboot was ordered {age:.0f} s ago, and its ECS agent has not come back"
        if entry.phase is JournalPhase.INTENT and instance.status == "ACTIVE":
            if age < BEGIN_TIMEOUT:
                return f"its reboot is about to be ordered, since {age:.0f} s"
            # an instance is drained before it is rebooted: the worker that wrote the entry did
            # neither
            if entry.standby and (stays := await self._standby.leave(journal.ec2_id)):
                return stays
            await journal.withdraw(entry)
            return ""
        # An agent stays connected for a while after the order, and a short disconnection may have
        # been missed.
        if entry.phase is not JournalPhase.DOWN and age < HARD_RESET:
            return f"its reboot was ordered {age:.0f} s ago, and it has not gone down"
        if entry.standby and (stays := await self._standby.leave(journal.ec2_id)):
            return stays
        if instance.status == "DRAINING":
            await self._set_state(instance, "ACTIVE")
        await journal.write(entry.advance(JournalPhase.DONE))
        return ""

    def _age(self, entry: JournalEntry) -> float:
        return max(0.0, self._now() - entry.at)

    # --- power

    async def cycle_power(
        self, node: str, ec2_id: str, id: str, within: float
    ) -> Mapping[str, Any]:
        """Have EC2 stop and start an instance, as far as that goes within this time.

        Every later probe of the node continues it.

        Raises:
            Unreachable: It is still in progress.
        """
        began = time.monotonic()

        def build_result(exit_code: int, output: str) -> Mapping[str, Any]:
            told = {"program": "EC2 stop and start", "exit_code": exit_code, "output": output}
            return {"outcome": "done", **told, "took": time.monotonic() - began}

        with _asking(node):
            try:
                journal, entry = await self._cycle(ec2_id, id)
            except AwsError as error:
                if error.kind in (Kind.THROTTLED, Kind.UNAVAILABLE):
                    raise
                return build_result(1, f"it was not stopped: {error.reason}")
            while entry is not None:
                waiting = await self._power.step(journal, entry)
                if waiting is None:
                    break
                over = time.monotonic() - began + self._look >= within
                if waiting.exit_code and (over or waiting.exit_code != NO_CAPACITY):
                    return build_result(waiting.exit_code, waiting.reason)
                if over:
                    raise Unreachable(node, f"its power is being cycled: {waiting.reason}")
                await asyncio.sleep(self._look)
                entry = journal.find_unfinished(Way.POWER)
        return build_result(0, LOST_BY_A_STOP)

    async def _cycle(self, ec2_id: str, id: str) -> tuple[Journal, JournalEntry | None]:
        """Return the power cycle to continue; None if that of this repair has already happened."""
        journal = await Journal.read(self._aws, ec2_id)
        if (going := journal.find_unfinished(Way.POWER)) is not None:
            return journal, going
        now = launch((await self._cluster.machine(ec2_id)).launched_at)
        mine = journal.find_entry(Way.POWER, id)
        if mine is not None and mine.before != now:
            return journal, None
        return journal, await journal.write(JournalEntry(Way.POWER, id, self._now(), now))

    # --- the rest

    def reset_gpus(self, node: str) -> Refusal:
        return Refusal(node, "cannot_reset", NO_RESET)


def _unlike(node: str, boot_id: str, facts: Mapping[str, Any]) -> Refusal | None:
    """Return a refusal if the answer of a probe rules out a reboot."""
    present = str(facts.get("boot_id") or "")
    if present != boot_id:
        reason = (
            f"this node runs boot {present or 'unknown'}; the order was decided on boot {boot_id}"
        )
        return Refusal(node, "boot_changed", reason, boot_id=present)
    using = [*(facts.get("jobs") or ()), *filter(None, [facts.get("held")])]
    if using:
        return Refusal(
            node, "busy", f"{', '.join(names(one) for one in using[:8])} runs on this node"
        )
    gpus = facts.get("gpus")
    rows = gpus.get("gpus") or () if isinstance(gpus, Mapping) else ()
    pids = [
        f"pid {one.get('pid')} uses GPU {row.get('bus_id')}"
        for row in rows
        for one in _processes(row)
    ]
    return Refusal(node, "busy", ", ".join(pids[:8])) if pids else None


def _processes(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    listed = row.get("processes")
    return listed if isinstance(listed, list) else []


def _busy(tasks: Any) -> str:
    found = occupants(tasks)
    using = [*found.jobs, *filter(None, [found.held])]
    return f"{', '.join(names(one) for one in using[:8])} runs on this node" if using else ""


@contextmanager
def _asking(node: str) -> Iterator[None]:
    """Convert errors of AWS to `Unreachable`: they say nothing about the state of the node."""
    try:
        yield
    except (AwsError, UnknownInstance) as error:
        raise Unreachable(node, error.reason) from error
    except TimeoutError as error:
        raise Unreachable(
            node, "EC2 does not show what was written to its tags: nothing was ordered"
        ) from error
