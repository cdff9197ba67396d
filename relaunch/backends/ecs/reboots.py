"""Keeps, in the tags of an EC2 instance, a journal of reboots and power cycles ordered by relaunch.

Whichever worker takes over reads it. This module issues no orders itself.

Tags are used because attributes of a container instance are lost when its agent registers again,
which can happen after a reboot.
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
"""Entries kept on one instance, of the 50 tags that EC2 allows: more than the number of reboots
that any policy makes before a person looks at the node.
"""
LONGEST = 256
"""Maximum length of a tag's value in characters."""
VISIBILITY_TIMEOUT, VISIBLE_LOOK = 5.0, 0.25
"""Seconds to wait for a written tag to become visible, and between two looks. EC2 is eventually
consistent, mostly within one second.
"""


class Way(StrEnum):
    REBOOT = "reboot"
    POWER = "power"


class JournalPhase(StrEnum):
    INTENT = "intent"
    """Written before the first call that acts: from here on the order may have been sent."""
    SENT = "sent"
    """EC2 has accepted the order."""
    DOWN = "down"
    """EC2 has accepted the order, and the instance has since been seen without its agent."""
    DONE = "done"
    """The instance is back, or the order was given up."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    way: Way
    id: str
    """Id of the repair that ordered it."""
    at: float
    """Unix seconds by the clock of the worker that ordered it."""
    before: str
    """Boot id that the reboot ends; for a power cycle, the launch time."""
    phase: JournalPhase = JournalPhase.INTENT
    sent: bool = False
    """Whether EC2 is known to have accepted the order; if not, only a changed boot id or launch
    time shows that it took effect.
    """
    standby: bool = False
    """Whether its Auto Scaling group has been asked to put the instance into Standby meanwhile."""
    forced: bool = False

    @property
    def key(self) -> str:
        return f"{PREFIX}{self.way}:{hashlib.sha256(self.id.encode()).hexdigest()[:8]}"

    @property
    def over(self) -> bool:
        return self.phase is JournalPhase.DONE

    def advance(self, phase: JournalPhase) -> JournalEntry:
        return replace(self, phase=phase, sent=self.sent or phase is JournalPhase.SENT)


_MARKS = ("sent", "standby", "forced")


def format_entry(entry: JournalEntry) -> str:
    """Return the value of the tag for an entry."""
    state = "+".join((entry.phase, *(mark for mark in _MARKS if getattr(entry, mark))))
    return f"{state} {entry.at:.0f} {entry.before or '-'} {entry.id}"[:LONGEST]


def read(key: str, value: str) -> JournalEntry | None:
    """Parse a tag; None if it is no entry of this journal, or was overwritten by a user."""
    way = key.removeprefix(PREFIX).partition(":")[0]
    state, _, rest = value.partition(" ")
    at, _, rest = rest.partition(" ")
    before, _, id = rest.partition(" ")
    phase, *marks = state.split("+")
    if (
        not key.startswith(PREFIX)
        or way not in tuple(Way)
        or phase not in tuple(JournalPhase)
        or not at.isdecimal()
        or not id
    ):
        return None
    return JournalEntry(
        Way(way),
        id,
        float(at),
        "" if before == "-" else before,
        JournalPhase(phase),
        **{mark: mark in marks for mark in _MARKS},
    )


class Journal:
    """Journal of one instance, as of when it was read."""

    def __init__(self, aws: Aws, ec2_id: str, entries: tuple[JournalEntry, ...]) -> None:
        self._aws = aws
        self.ec2_id = ec2_id
        self.entries = entries
        """Oldest first."""

    @classmethod
    async def read(cls, aws: Aws, ec2_id: str) -> Journal:
        return cls(aws, ec2_id, await _entries(aws, ec2_id))

    def find_unfinished(self, way: Way) -> JournalEntry | None:
        return next(
            (one for one in reversed(self.entries) if one.way is way and not one.over), None
        )

    def find_entry(self, way: Way, id: str) -> JournalEntry | None:
        key = JournalEntry(way, id, 0.0, "").key
        return next((one for one in self.entries if one.key == key), None)

    async def write(self, entry: JournalEntry) -> JournalEntry:
        """Write an entry, replacing the earlier entry of the same repair.

        For an INTENT entry, wait until EC2 shows it to readers.

        Raises:
            TimeoutError: EC2 does not show the entry within `VISIBILITY_TIMEOUT` seconds.
        """
        await self._aws.call(
            "ec2",
            "CreateTags",
            Resources=[self.ec2_id],
            Tags=[{"Key": entry.key, "Value": format_entry(entry)}],
        )
        others = [one for one in self.entries if one.key != entry.key]
        old = [one for one in others if one.over][: max(0, len(others) + 1 - KEPT)]
        self.entries = tuple(
            sorted((*(one for one in others if one not in old), entry), key=lambda one: one.at)
        )
        if old:
            await self._forget(old)
        if entry.phase is JournalPhase.INTENT:
            await self._visible(entry)
        return entry

    async def withdraw(self, entry: JournalEntry) -> None:
        """Delete an entry whose order was not carried out."""
        await self._forget([entry])
        self.entries = tuple(one for one in self.entries if one.key != entry.key)

    def list_reboots(self, boot_id: str, launched_at: float | None) -> list[dict[str, Any]]:
        """Return the reboots that happened or are about to, in the format of a probe's answer."""
        return [
            {
                "at": one.at,
                "id": one.id,
                "reason": _reason(one),
                "boot_id": one.before if one.way is Way.REBOOT else "",
            }
            for one in self.entries
            if one.sent or one.before != (boot_id if one.way is Way.REBOOT else launch(launched_at))
        ]

    async def _forget(self, entries: Sequence[JournalEntry]) -> None:
        await self._aws.call(
            "ec2", "DeleteTags", Resources=[self.ec2_id], Tags=[{"Key": one.key} for one in entries]
        )

    async def _visible(self, entry: JournalEntry) -> None:
        async with asyncio.timeout(VISIBILITY_TIMEOUT):
            while True:
                if any(
                    one.key == entry.key and format_entry(one) == format_entry(entry)
                    for one in await _entries(self._aws, self.ec2_id)
                ):
                    return
                await asyncio.sleep(VISIBLE_LOOK)


def launch(launched_at: float | None) -> str:
    """Return a launch time in the format of entries."""
    return "" if launched_at is None else f"{launched_at:.0f}"


def _reason(entry: JournalEntry) -> str:
    return "relaunch rebooted it" if entry.way is Way.REBOOT else "relaunch stopped and started it"


async def _entries(aws: Aws, ec2_id: str) -> tuple[JournalEntry, ...]:
    answer: Mapping[str, Any] = await aws.call(
        "ec2", "DescribeTags", Filters=[{"Name": "resource-id", "Values": [ec2_id]}]
    )
    found = [
        read(str(tag.get("Key") or ""), str(tag.get("Value") or ""))
        for tag in answer.get("Tags") or ()
    ]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.at))
