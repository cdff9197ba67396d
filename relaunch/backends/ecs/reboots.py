"""What an EC2 instance's tags remember of how relaunch ended its boots: read by whichever worker comes next. Orders nothing.

Tags, because attributes of a container instance are lost when its agent registers anew, which is what reboots lead to.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from relaunch.backends.ecs.aws import Aws

PREFIX = "relaunch:"
KEPT = 8
"""Entries on one instance, of the 50 tags that EC2 allows: more than any policy reboots a node before a person looks at it."""
LONGEST = 256
"""Characters of a tag's value."""
VISIBLE_WITHIN, VISIBLE_LOOK = 5.0, 0.25
"""Seconds. EC2 is eventually consistent, mostly within one."""


class Way(StrEnum):
    REBOOT = "reboot"
    POWER = "power"


class Phase(StrEnum):
    INTENT = "intent"
    """Written before the first call that acts: from here on it may have been ordered."""
    SENT = "sent"
    """EC2 has taken the order."""
    DOWN = "down"
    """And the instance was seen without its agent since."""
    DONE = "done"
    """It is back, or was given up."""


@dataclass(frozen=True, slots=True)
class Entry:
    way: Way
    id: str
    """Of the repair that ordered it."""
    at: float
    """Unix seconds of the worker that ordered it."""
    before: str
    """The boot id that it ends; of a power cycle, the launch time."""
    phase: Phase = Phase.INTENT
    sent: bool = False
    """EC2 is known to have taken it; else it is known only by what came of it."""
    standby: bool = False
    """Its Auto Scaling group was told to leave it alone meanwhile."""
    forced: bool = False

    @property
    def key(self) -> str:
        return f"{PREFIX}{self.way}:{hashlib.sha256(self.id.encode()).hexdigest()[:8]}"

    @property
    def over(self) -> bool:
        return self.phase is Phase.DONE

    def moved(self, phase: Phase) -> Entry:
        return replace(self, phase=phase, sent=self.sent or phase is Phase.SENT)


_MARKS = ("sent", "standby", "forced")


def written(entry: Entry) -> str:
    """The value of its tag."""
    state = "+".join((entry.phase, *(mark for mark in _MARKS if getattr(entry, mark))))
    return f"{state} {entry.at:.0f} {entry.before or '-'} {entry.id}"[:LONGEST]


def read(key: str, value: str) -> Entry | None:
    """None: it is no entry of this journal, or one that somebody has written over."""
    way = key.removeprefix(PREFIX).partition(":")[0]
    state, _, rest = value.partition(" ")
    at, _, rest = rest.partition(" ")
    before, _, id = rest.partition(" ")
    phase, *marks = state.split("+")
    if not key.startswith(PREFIX) or way not in tuple(Way) or phase not in tuple(Phase) or not at.isdecimal() or not id:
        return None
    return Entry(Way(way), id, float(at), "" if before == "-" else before, Phase(phase), **{mark: mark in marks for mark in _MARKS})


class Journal:
    """Of one instance, as it was read."""

    def __init__(self, aws: Aws, ec2_id: str, entries: tuple[Entry, ...]) -> None:
        self._aws = aws
        self.ec2_id = ec2_id
        self.entries = entries
        """The oldest first."""

    @classmethod
    async def of(cls, aws: Aws, ec2_id: str) -> Journal:
        return cls(aws, ec2_id, await _entries(aws, ec2_id))

    def unfinished(self, way: Way) -> Entry | None:
        return next((one for one in reversed(self.entries) if one.way is way and not one.over), None)

    def of_repair(self, way: Way, id: str) -> Entry | None:
        key = Entry(way, id, 0.0, "").key
        return next((one for one in self.entries if one.key == key), None)

    async def write(self, entry: Entry) -> Entry:
        """Write an entry over the one of its repair, and return when whoever asks sees it."""
        await self._aws.call("ec2", "CreateTags", Resources=[self.ec2_id], Tags=[{"Key": entry.key, "Value": written(entry)}])
        others = [one for one in self.entries if one.key != entry.key]
        old = [one for one in others if one.over][: max(0, len(others) + 1 - KEPT)]
        self.entries = tuple(sorted((*(one for one in others if one not in old), entry), key=lambda one: one.at))
        if old:
            await self._forget(old)
        if entry.phase is Phase.INTENT:
            await self._visible(entry)
        return entry

    async def withdraw(self, entry: Entry) -> None:
        """Forget an entry: nothing was ordered."""
        await self._forget([entry])
        self.entries = tuple(one for one in self.entries if one.key != entry.key)

    def told(self, boot_id: str, launched_at: float | None) -> list[dict[str, Any]]:
        """The reboots that happened, or are about to, as a probe's answer has them."""
        return [
            {"at": one.at, "id": one.id, "reason": _reason(one), "boot_id": one.before if one.way is Way.REBOOT else ""}
            for one in self.entries
            if one.sent or one.before != (boot_id if one.way is Way.REBOOT else launch(launched_at))
        ]

    async def _forget(self, entries: Sequence[Entry]) -> None:
        await self._aws.call("ec2", "DeleteTags", Resources=[self.ec2_id], Tags=[{"Key": one.key} for one in entries])

    async def _visible(self, entry: Entry) -> None:
        async with asyncio.timeout(VISIBLE_WITHIN):
            while True:
                if any(one.key == entry.key and written(one) == written(entry) for one in await _entries(self._aws, self.ec2_id)):
                    return
                await asyncio.sleep(VISIBLE_LOOK)


def launch(launched_at: float | None) -> str:
    """A launch time as entries have it."""
    return "" if launched_at is None else f"{launched_at:.0f}"


def _reason(entry: Entry) -> str:
    return "relaunch rebooted it" if entry.way is Way.REBOOT else "relaunch stopped and started it"


async def _entries(aws: Aws, ec2_id: str) -> tuple[Entry, ...]:
    answer: Mapping[str, Any] = await aws.call("ec2", "DescribeTags", Filters=[{"Name": "resource-id", "Values": [ec2_id]}])
    found = [read(str(tag.get("Key") or ""), str(tag.get("Value") or "")) for tag in answer.get("Tags") or ()]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.at))
