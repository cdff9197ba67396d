"""What outlives a controller: the nodes, the record, and the messages on their way to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from relaunch.backends.base import Refusal
from relaunch.generation import Token
from relaunch.spec.fleet import FleetSpec
from tests.fakes.nodes.clock import Clock, sleep
from tests.fakes.nodes.machine import NoAnswer
from tests.fakes.nodes.node import Node
from tests.fakes.nodes.record import Obeyed, Record
from tests.fakes.nodes.script import Command, Fault, Script

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Copy:
    """The second delivery of an order, and how many orders the node obeys first.

    Of its job, or of repairs.
    """

    deliver: Callable[[], Awaitable[object]]
    seconds: float
    due: int


class Simulation:
    def __init__(self, spec: FleetSpec, script: Script, clock: Clock) -> None:
        self.spec = spec
        self.script = script
        self.clock = clock
        self.record = Record()
        self.nodes: dict[str, Node] = {}
        for number, node in enumerate(spec.nodes):
            self.nodes[node.name] = Node(
                node.name, number, node.gpus, clock, self.record, script, self.nodes
            )
        self.tasks: set[asyncio.Task[Any]] = set()
        self._begun = False
        self._messages: dict[str, int] = {}
        self._matched: dict[int, int] = {}
        self._copies: dict[tuple[str, ...], list[_Copy]] = {}
        self._obeyed: dict[tuple[str, ...], int] = {}

    def begin(self) -> None:
        if not self._begun:
            self._begun = True
            for node in self.nodes.values():
                node.inject("first_call", 0)

    def faults(self, node: str, command: Command, token: Token | None) -> tuple[Fault, ...]:
        """Return what befalls the next message of this kind to the node."""
        found = []
        for fault in self.script.faults:
            generation = None if token is None else token.generation
            if (
                fault.command == command
                and fault.node in (None, node)
                and fault.generation in (None, generation)
            ):
                count = self._matched[id(fault)] = self._matched.get(id(fault), 0) + 1
                if fault.nth in (None, count):
                    found.append(fault)
        if self.script.chaos is not None:
            number = self._messages[node] = self._messages.get(node, 0) + 1
            found.extend(self.script.chaos.draw(node, number, command))
        return tuple(found)

    def later(self, seconds: float, deliver: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            await sleep(self.clock, seconds)
            with contextlib.suppress(NoAnswer):  # no caller waits for it
                await deliver()

        self.spawn(run())

    def spawn(self, work: Awaitable[T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def copy(
        self,
        node: Node,
        token: Token | None,
        fault: Fault,
        deliver: Callable[[], Awaitable[object]],
    ) -> None:
        # The order itself is the first of those that the copy waits for.
        line = _line(node, token)
        due = self._obeyed.get(line, 0) + 1 + fault.after_orders
        self._copies.setdefault(line, []).append(_Copy(deliver, fault.seconds, due))

    def obeyed(
        self, node: Node, command: Command, token: Token | None, answer: object, copy: bool
    ) -> None:
        if token is not None:
            number, at = self.record.number(), self.clock.wall()
            self.record.orders.append(
                Obeyed(number, at, node.name, command, token, outcome(answer), copy)
            )
        line = _line(node, token)
        self._obeyed[line] = self._obeyed.get(line, 0) + 1
        waiting = self._copies.get(line)
        if waiting:
            for one in [one for one in waiting if one.due <= self._obeyed[line]]:
                waiting.remove(one)
                self.later(one.seconds, one.deliver)


def _line(node: Node, token: Token | None) -> tuple[str, ...]:
    """Return which orders to the node wait for each other: of one job, and of repairs."""
    return (node.name,) if token is None else (node.name, token.namespace, token.job)


def outcome(answer: object) -> str:
    return f"refused:{answer.why}" if isinstance(answer, Refusal) else "done"
