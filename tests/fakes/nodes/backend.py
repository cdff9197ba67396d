"""Calls to simulated nodes over a network that follows the script.

It loses, delays and doubles messages.

A message that is lost is known to be lost at once: no caller waits for an answer that the script
has thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from relaunch.backends.answers import parse_last_words, parse_stacks
from relaunch.backends.base import (
    STACKS_WITHIN,
    BackendError,
    LinkListener,
    Logs,
    Preparation,
    PrepareOrder,
    ProtocolError,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
    Unreachable,
)
from relaunch.generation import Token
from relaunch.spec.fleet import FleetNode, FleetSpec
from relaunch.spec.job import OutputStream
from tests.fakes.nodes.clock import Clock, RealClock, sleep
from tests.fakes.nodes.machine import NoAnswer
from tests.fakes.nodes.network import Simulation, outcome
from tests.fakes.nodes.node import Node
from tests.fakes.nodes.record import Call, Life, Obeyed, Upkeep
from tests.fakes.nodes.script import Command, Fault, Script, Sick, Stack, Stranger
from tests.fakes.nodes.stream import Stream

T = TypeVar("T")
Obey = Callable[[Node], Awaitable[T]]


class SimulatedBackend:
    """A controller's view of simulated nodes.

    Args:
        spec: The fleet.
        script: What happens; frozen, and its seconds count by `clock`.
        clock: `ManualClock` where a test wants hours to pass.
        other: Take the nodes of this backend, as a controller does that starts beside it or after
        it.
    """

    fences = True
    server = ""

    def __init__(
        self,
        spec: FleetSpec,
        script: Script | None = None,
        clock: Clock | None = None,
        other: SimulatedBackend | None = None,
    ) -> None:
        if other is None:
            self._world: Simulation = Simulation(spec, script or Script(), clock or RealClock())
        else:
            self._world = other._world
        self._specs = {node.name: node for node in spec.nodes}
        self._streams: set[Stream] = set()
        self._closed = False
        self.told: list[tuple[str, str]] = []
        """Subject and text of the messages to people."""

    @property
    def calls(self) -> list[Call]:
        return self._world.record.calls

    @property
    def orders(self) -> list[Obeyed]:
        return self._world.record.orders

    @property
    def lives(self) -> list[Life]:
        return self._world.record.lives

    @property
    def upkeep(self) -> list[Upkeep]:
        return self._world.record.upkeep

    # --- what tests do to nodes by hand ---

    def cut(self, node: str, *words: str) -> None:
        """Cut a node off; without words from everybody."""
        self._node(node).cut(*(words or ("controller-in", "controller-out", "peers")))

    def heal(self, node: str) -> None:
        self._node(node).heal()

    def lose_power(self, node: str, down_for: float = 0.0, *, forgets: bool = False) -> None:
        """Reboot a node without an order; `forgets`: as in `Reboot`."""
        self._node(node).reboot(down_for, forgets)

    def recover(self, node: str) -> None:
        """Cure a node without an order and without a reboot."""
        self._node(node).machine.sick = ()

    def move(self, node: str, host: int) -> None:
        """Let another machine answer for a node, as after a change of its address.

        0: the first one.
        """
        self._node(node).move(host)

    def visit(self, node: str, stranger: Stranger) -> None:
        """Let a program that is none of ours compute there."""
        self._node(node).machine.visit(stranger)

    def fall_ill(self, node: str, sick: Sick) -> None:
        """Something is wrong with the machine from now on."""
        self._node(node).machine.fall_ill(sick)

    def leave(self, node: str) -> None:
        """Let all such programs end."""
        self._node(node).machine.leave()

    def set_stack(self, node: str, stack: Stack) -> None:
        """Let a look at ranks of a node find this from now on, instead of what the script says."""
        self._node(node).set_stack(stack)

    async def settled(self) -> None:
        """Wait until no order is on its way.

        Copies that wait for further orders are not on their way.
        """
        while self._world.tasks:
            await asyncio.wait(set(self._world.tasks))

    # --- base.TellsPeople ---

    @property
    def has_topic(self) -> bool:
        return True

    async def tell_people(self, subject: str, text: str) -> str:
        self.told.append((subject, text))
        return "sent"

    # --- base.Backend ---

    def node(self, name: str) -> FleetNode:
        if name not in self._specs:
            raise KeyError(
                f"fleet {self._world.spec.name} has no node {name!r}; it has "
                f"{', '.join(list(self._specs)[:8])}"
            )
        return self._specs[name]

    async def prepare(self, node: str, order: PrepareOrder) -> Preparation | Refusal:
        return await self._order(
            node, "prepare", order.token, order, lambda one: one.prepare(order)
        )

    async def start(self, node: str, order: StartOrder) -> StartedRanks | Refusal:
        return await self._order(node, "start", order.token, order, lambda one: one.start(order))

    async def stop(self, node: str, order: StopOrder) -> StopProof | Refusal:
        return await self._order(node, "stop", order.token, order, lambda one: one.stop(order))

    async def list(self, node: str, gpus: bool = False) -> Mapping[str, Any]:
        async def ask(one: Node, faults: tuple[Fault, ...]) -> Mapping[str, Any]:
            read = await one.machine.look() if gpus and one.machine.held is None else {}
            return {**one.list(), **read}

        return await self._call(node, "list", None, None, ask)

    async def logs(
        self,
        node: str,
        token: Token,
        offsets: Mapping[int, int] | None,
        max_bytes: int,
        wait: float,
        tail: int | None,
        since: float | None = None,
        stream: OutputStream = "stdout",
    ) -> Logs | Refusal:
        async def ask(one: Node, faults: tuple[Fault, ...]) -> Logs | Refusal:
            return await one.logs(token, offsets, max_bytes, wait, tail)

        return await self._call(node, "logs", token, offsets, ask)

    async def stacks(
        self,
        node: str,
        token: Token,
        rank: int | None = None,
        frames: bool = True,
        within: float = STACKS_WITHIN,
    ) -> Mapping[str, Any] | Refusal:
        async def ask(one: Node, faults: tuple[Fault, ...]) -> Mapping[str, Any] | Refusal:
            return one.stacks(token, rank, frames)

        found = await self._call(node, "stacks", token, {"rank": rank, "frames": frames}, ask)
        return found if isinstance(found, Refusal) else parse_stacks(node, rank, found)

    async def last_words(self, node: str, token: Token) -> Mapping[str, Any] | Refusal:
        async def ask(one: Node, faults: tuple[Fault, ...]) -> Mapping[str, Any] | Refusal:
            return one.last_words(token)

        found = await self._call(node, "last-words", token, None, ask)
        return found if isinstance(found, Refusal) else parse_last_words(node, found)

    async def checkpoints(
        self, node: str, directory: str, workdir: str | None, pattern: str | None = None
    ) -> Mapping[str, Any] | Refusal:
        return Refusal(node, "bad_order", "simulated nodes have no folders")

    @asynccontextmanager
    async def watch(
        self, node: str, token: Token, after_seq: int, heartbeat: float
    ) -> AsyncIterator[Stream]:
        async def connect(one: Node, faults: tuple[Fault, ...]) -> int | None:
            return min((fault.lines for fault in faults if fault.kind == "break"), default=None)

        breaks_after = await self._call(node, "watch", token, after_seq, connect)
        stream = Stream(self._world, self._node(node), token, after_seq, heartbeat, breaks_after)
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)
            stream.drop("the watch was left")

    async def probe(
        self, node: str, within: float, kernel_since: float | None
    ) -> Mapping[str, Any]:
        async def ask(one: Node, faults: tuple[Fault, ...]) -> Mapping[str, Any]:
            return await one.machine.probe(within, kernel_since)

        return await self._call(node, "probe", None, kernel_since, ask)

    async def listen_for_peers(self, node: str, address: str, stay: float) -> LinkListener | str:
        async def ask(one: Node, faults: tuple[Fault, ...]) -> LinkListener:
            return LinkListener(node, address, (40000,), node)

        return await self._call(node, "reach", None, address, ask)

    async def call_peers(
        self, node: str, peers: Sequence[LinkListener], within: float
    ) -> Mapping[str, str]:
        broken = self._world.script.broken_links

        async def ask(one: Node, faults: tuple[Fault, ...]) -> Mapping[str, str]:
            return {
                peer.node: f"no answer from {peer.address} port 40000"
                if (node, peer.node) in broken
                else ""
                for peer in peers
            }

        return await self._call(node, "reach", None, tuple(one.node for one in peers), ask)

    # A simulated node is of one fleet: whose order it is makes no difference to it.

    async def diagnose(
        self, node: str, id: str, level: int, within: float, fleet: str = ""
    ) -> Mapping[str, Any] | Refusal:
        order = {"id": id, "level": level, "within": within}
        try:
            return await self._order(
                node, "diagnose", None, order, lambda one: one.machine.diagnose(id, level, within)
            )
        except asyncio.CancelledError:
            self._node(node).machine.hang_up(id)
            raise

    async def reset_gpus(
        self,
        node: str,
        id: str,
        boot_id: str,
        gpus: tuple[str, ...],
        within: float,
        fleet: str = "",
        reason: str = "",
        by: str = "",
    ) -> Mapping[str, Any] | Refusal:
        order = {"id": id, "boot_id": boot_id, "gpus": gpus, "within": within}
        return await self._order(
            node,
            "reset-gpus",
            None,
            order,
            lambda one: one.machine.reset_gpus(id, boot_id, gpus, within),
        )

    async def reboot(
        self, node: str, id: str, boot_id: str, reason: str, fleet: str = "", by: str = ""
    ) -> Mapping[str, Any] | Refusal:
        order = {"id": id, "boot_id": boot_id, "reason": reason}
        return await self._order(
            node, "reboot", None, order, lambda one: one.machine.reboot(id, boot_id, reason)
        )

    async def close(self) -> None:
        self._closed = True
        for stream in tuple(self._streams):
            stream.drop("the backend was closed")

    # --- the network ---

    def _node(self, name: str) -> Node:
        self.node(name)
        return self._world.nodes[name]

    async def _order(
        self, name: str, command: Command, token: Token | None, order: object, obey: Obey[T]
    ) -> T:
        world = self._world

        async def carry_out(node: Node, copy: bool) -> T:
            answer = await obey(node)
            world.obeyed(node, command, token, answer, copy)
            return answer

        async def deliver(node: Node, faults: tuple[Fault, ...]) -> T:
            async def again() -> None:
                if node.hears:
                    await carry_out(node, True)

            for fault in faults:
                if fault.kind == "double":
                    world.copy(node, token, fault, again)
            return await carry_out(node, False)

        return await self._call(name, command, token, order, deliver)

    async def _call(
        self,
        name: str,
        command: Command,
        token: Token | None,
        order: object,
        deliver: Callable[[Node, tuple[Fault, ...]], Awaitable[T]],
    ) -> T:
        node, world = self._node(name), self._world
        if self._closed:
            raise BackendError(name, "this backend has been closed")
        world.begin()
        place = world.record.call(world.clock.wall(), name, command, token, order)
        try:
            answer = await self._exchange(node, command, token, deliver)
        except ProtocolError:
            world.record.answered(place, "protocol")
            raise
        except Unreachable:
            world.record.answered(place, "unreachable")
            raise
        except asyncio.CancelledError:
            world.record.answered(place, "cancelled")
            raise
        world.record.answered(place, outcome(answer))
        return answer

    async def _exchange(
        self,
        node: Node,
        command: Command,
        token: Token | None,
        deliver: Callable[[Node, tuple[Fault, ...]], Awaitable[T]],
    ) -> T:
        world, timeout = self._world, self._world.script.timeout
        faults = world.faults(node.name, command, token)
        kinds = [fault.kind for fault in faults]
        if token is not None and command in ("prepare", "start"):
            node.inject(command, token.generation)
        if "lose_order" in kinds:
            raise Unreachable(node.name, f"no answer to {command}: the order was lost")

        async def arrive() -> T:
            if not node.hears:
                raise NoAnswer
            return await deliver(node, faults)

        delay = sum(fault.seconds for fault in faults if fault.kind == "delay")
        if delay > timeout:
            world.later(delay, arrive)
            raise Unreachable(node.name, f"no answer to {command} within {timeout:g} s")
        await sleep(world.clock, delay)
        try:
            # An order that has arrived is carried out, whatever becomes of its sender.
            answer: T = await asyncio.shield(world.spawn(arrive()))
        except NoAnswer:
            raise Unreachable(
                node.name, f"no answer to {command}: the node is cut off, down or rebooting"
            ) from None
        if "lose_answer" in kinds or not node.speaks:
            raise Unreachable(node.name, f"no answer to {command}: the answer was lost")
        return answer
