"""Stops an EC2 instance and starts it again, one step per call, so that any worker can continue.

When to power-cycle an instance is decided elsewhere. The EC2 state and launch time show the
progress: if a worker dies between two steps, the next one sees what remains to be done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from relaunch.backends.ecs.aws import Aws, AwsError, Kind
from relaunch.backends.ecs.cluster import Cluster, UnknownInstance
from relaunch.backends.ecs.reboots import Journal, JournalEntry, JournalPhase, launch
from relaunch.backends.ecs.standby import IN_SERVICE, STANDBY, Standby, explain_refusal

FORCE_AFTER = 120.0
"""Seconds until the stop is forced. A hanging driver can keep the system from shutting down, and
EC2 by itself waits longer before it forces a stop.
"""
NO_CAPACITY = 75
"""EX_TEMPFAIL of sysexits.h: a later attempt may succeed."""
FAILED = 1


@dataclass(frozen=True, slots=True)
class UnfinishedCycle:
    """A power cycle that is not finished."""

    reason: str
    exit_code: int = 0
    """Nonzero if it cannot continue by itself."""


class PowerCycle:
    def __init__(self, cluster: Cluster, aws: Aws, now: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._aws = aws
        self._standby = Standby(aws)
        self._now = now

    async def step(self, journal: Journal, entry: JournalEntry) -> UnfinishedCycle | None:
        """Take the next step. Return None once the instance runs again and its agent is connected.

        Raises:
            AwsError: A call failed whose failure is not returned as `UnfinishedCycle`, such as a
                read.
        """
        machine = await self._cluster.machine(journal.ec2_id)
        match machine.state:
            case "running" if launch(machine.launched_at) == entry.before:
                return await self._stop(journal, entry)
            case "running":
                return await self._back(journal, entry)
            case "stopping":
                return await self._stopping(journal, entry)
            case "stopped":
                return await self._start(journal, entry)
            case "pending":
                return UnfinishedCycle("EC2 starts it")
            case state:
                await journal.write(entry.advance(JournalPhase.DONE))
                return UnfinishedCycle(f"EC2 says that it is {state or 'unknown'}", FAILED)

    async def _stop(self, journal: Journal, entry: JournalEntry) -> UnfinishedCycle:
        member = await self._standby.read(journal.ec2_id)
        if member.state == IN_SERVICE:
            entry = await journal.write(replace(entry, standby=True))
            try:
                await self._standby.enter(journal.ec2_id, member.group)
            except AwsError as error:
                reason = explain_refusal(member.group, error)
                entry = replace(entry, standby=False)
                return await self._give_up(journal, entry, error, reason)
        if member.state not in ("", STANDBY):
            return UnfinishedCycle(
                f"its Auto Scaling group {member.group} has it {member.state}; "
                "it is stopped when that says Standby"
            )
        try:
            await self._aws.call("ec2", "StopInstances", InstanceIds=[journal.ec2_id])
        except AwsError as error:
            return await self._give_up(journal, entry, error, error.reason)
        if not entry.sent:
            await journal.write(replace(entry, phase=JournalPhase.SENT, sent=True))
        return UnfinishedCycle("EC2 was asked to stop it")

    async def _give_up(
        self, journal: Journal, entry: JournalEntry, error: AwsError, reason: str
    ) -> UnfinishedCycle:
        if error.kind not in (Kind.REFUSED, Kind.DENIED):
            return UnfinishedCycle(error.reason)
        if entry.standby and (stays := await self._standby.leave(journal.ec2_id)):
            return UnfinishedCycle(stays)
        await journal.write(entry.advance(JournalPhase.DONE))
        return UnfinishedCycle(f"it was not stopped: {reason}", FAILED)

    async def _stopping(self, journal: Journal, entry: JournalEntry) -> UnfinishedCycle:
        since = self._now() - entry.at
        if since < FORCE_AFTER or entry.forced:
            return UnfinishedCycle(
                f"EC2 has been stopping it for {since:.0f} s{' by force' if entry.forced else ''}"
            )
        await journal.write(replace(entry, forced=True))
        await self._aws.call("ec2", "StopInstances", InstanceIds=[journal.ec2_id], Force=True)
        return UnfinishedCycle(
            f"it did not stop within {FORCE_AFTER:.0f} s, and EC2 was asked to stop it by force"
        )

    async def _start(self, journal: Journal, entry: JournalEntry) -> UnfinishedCycle:
        try:
            await self._aws.call("ec2", "StartInstances", InstanceIds=[journal.ec2_id])
        except AwsError as error:
            if error.code.startswith("Insufficient"):
                return UnfinishedCycle(
                    f"it is stopped, and EC2 cannot start it: {error.reason}", NO_CAPACITY
                )
            if error.kind in (Kind.REFUSED, Kind.DENIED) and error.code != "IncorrectInstanceState":
                return UnfinishedCycle(
                    f"it is stopped, and was not started: {error.reason}", FAILED
                )
            return UnfinishedCycle(error.reason)
        return UnfinishedCycle("EC2 was asked to start it")

    async def _back(self, journal: Journal, entry: JournalEntry) -> UnfinishedCycle | None:
        try:
            instance = await self._cluster.instance(journal.ec2_id)
        except UnknownInstance as error:
            return UnfinishedCycle(f"it runs, and {error.reason} yet")
        if not instance.agent_connected:
            return UnfinishedCycle("it runs, and its ECS agent is not connected yet")
        if entry.standby and (stays := await self._standby.leave(journal.ec2_id)):
            return UnfinishedCycle(stays)
        await journal.write(entry.advance(JournalPhase.DONE))
        return None
