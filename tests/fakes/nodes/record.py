"""What was asked of simulated nodes and what became of it, in order, as plain values.

Judges nothing: tests do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from relaunch.generation import Token
from tests.fakes.nodes.script import Command, RepairCommand


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the controller; `number` orders it among all entries of a record."""

    number: int
    at: float
    """Unix seconds."""
    node: str
    command: Command
    token: Token | None
    order: object = field(repr=False)
    outcome: str = "pending"
    """done, refused:<why>, unreachable, protocol (it makes no sense), or cancelled by the caller. A
    watch that was connected is done."""


@dataclass(frozen=True, slots=True)
class Obeyed:
    """A node has answered an order, whether or not anybody heard it."""

    number: int
    at: float
    node: str
    command: Command
    token: Token
    outcome: str
    copy: bool
    """The network delivered this order a second time."""


@dataclass(frozen=True, slots=True)
class Life:
    number: int
    at: float
    kind: Literal["started", "ended"]
    token: Token
    node: str
    rank: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """One moment in the examination and repair of a node, whether or not anybody heard of it.

    An order is refused, or it begins (it holds the node from then on) and ends; a reboot that was
    ordered comes after its order's end.
    """

    number: int
    at: float
    kind: Literal["refused", "began", "ended", "rebooted"]
    node: str
    command: RepairCommand
    id: str
    """Of the repair; empty for a reboot without an order."""
    boot_id: str
    """The one that the node has at this moment; for `rebooted` the new one."""
    reason: str = ""
    """Why it was refused, in the agent's word; how it ended: done, already (this boot was ordered
    to end a moment ago, and is not ordered again), refused:<why>, or lost where the node went down
    under it."""


class Record:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.orders: list[Obeyed] = []
        self.lives: list[Life] = []
        self.upkeep: list[Upkeep] = []
        self._number = 0

    def number(self) -> int:
        self._number += 1
        return self._number

    def keep_up(
        self,
        at: float,
        kind: Literal["refused", "began", "ended", "rebooted"],
        node: str,
        command: RepairCommand,
        id: str,
        boot_id: str,
        reason: str,
    ) -> None:
        self.upkeep.append(Upkeep(self.number(), at, kind, node, command, id, boot_id, reason))

    def call(
        self, at: float, node: str, command: Command, token: Token | None, order: object
    ) -> int:
        """Return the place of the call, for `answered`."""
        self.calls.append(Call(self.number(), at, node, command, token, order))
        return len(self.calls) - 1

    def answered(self, place: int, outcome: str) -> None:
        self.calls[place] = replace(self.calls[place], outcome=outcome)
