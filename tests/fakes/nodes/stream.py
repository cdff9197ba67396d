"""One watch of a simulated generation: `base.WatchStream`.

It has no separate task; an idle one is an event and a timer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

from relaunch.backends.base import Unreachable
from relaunch.generation import Token
from tests.fakes.nodes.clock import wait_for
from tests.fakes.nodes.generation import Generation
from tests.fakes.nodes.network import Simulation
from tests.fakes.nodes.node import Node

STEP_PAUSE = 1.0
"""Seconds at least between heartbeats that are sent because a step advanced."""


class Stream:
    def __init__(
        self,
        world: Simulation,
        node: Node,
        token: Token,
        after_seq: int,
        heartbeat: float,
        breaks_after: int | None,
    ) -> None:
        self._world = world
        self._node = node
        self._boot, self._host = node.boot, node.host
        self._token = token
        self._sent = after_seq
        self._heartbeat = heartbeat
        self._left = breaks_after
        self._broken: str | None = None
        self._woken = asyncio.Event()
        self._generation = node.generation(token)
        if self._generation is not None:
            self._generation.tell_of_the_end()
            self._generation.listeners.add(self._woken)
            self._generation.watchers += 1
            self._generation.note_watchers()

    def drop(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self._woken.set()
            if self._generation is not None:
                self._generation.listeners.discard(self._woken)
                self._generation.watchers -= 1
                self._generation.note_watchers()

    async def lines(self) -> AsyncIterator[Mapping[str, Any]]:
        generation, clock = self._generation, self._world.clock
        if generation is None:
            reason = f"{self._token} was never prepared here"
            place = self._node.place(self._token)
            yield self._line(
                {
                    "outcome": "refused",
                    "why": "no_such_generation",
                    "reason": reason,
                    "place": place,
                }
            )
            return
        yield self._line({"hello": self._hello(generation)})
        beat = step_at = -math.inf
        while True:
            self._woken.clear()
            while self._sent < len(generation.journal):
                observation = generation.serialize(generation.journal[self._sent])
                self._sent += 1
                yield self._line({"observation": observation})
            self._line({}, count=False)
            if generation.state == "gone":
                yield self._line({"end": {"seq": len(generation.journal)}})
                return
            due = min(beat + self._heartbeat, max(beat + STEP_PAUSE, step_at))
            if clock.time() >= due:
                generation.read()
                beat, step_at = clock.time(), generation.next_news()
                yield self._line({"heartbeat": self._beat(generation)})
            elif not self._woken.is_set():
                await wait_for(clock, self._woken, due - clock.time())

    async def renew(self, stamp: float, age: float = 0.0) -> None:
        node, world = self._node, self._world
        place = world.record.call(world.clock.wall(), node.name, "renew", self._token, stamp)
        faults = world.faults(node.name, "renew", self._token)
        world.record.answered(place, "done")
        if self._broken is not None or any(fault.kind == "lose_order" for fault in faults):
            return

        async def arrive() -> None:
            if (
                node.hears
                and (self._boot, self._host) == (node.boot, node.host)
                and self._generation is not None
            ):
                self._generation.renew(stamp)

        delay = sum(fault.seconds for fault in faults if fault.kind == "delay")
        if delay > 0:
            world.later(delay, arrive)
        else:
            await arrive()

    def _line(self, line: dict[str, Any], count: bool = True) -> dict[str, Any]:
        """Return the line, if the connection still carries it."""
        if self._broken is not None:
            raise Unreachable(self._node.name, self._broken)
        if not self._node.speaks or (self._boot, self._host) != (self._node.boot, self._node.host):
            raise Unreachable(self._node.name, "the connection broke")
        if count and self._left is not None:
            if self._left == 0:
                raise Unreachable(self._node.name, "the connection broke")
            self._left -= 1
        return {**line, "sender": self._sender()}

    def _sender(self) -> dict[str, Any]:
        """Return who speaks, as the agent names it: see docs/reference/agent-protocol.md."""
        shim = {"pid": 1000, "started": self._token.generation, "boot_id": self._node.boot_id}
        is_known = self._generation is not None
        return {
            "token": asdict(self._token),
            "node": self._node.name if is_known else None,
            "shim": shim if is_known else None,
        }

    def _hello(self, generation: Generation) -> dict[str, Any]:
        ranks = list(generation.order.ranks)
        return {
            "token": asdict(self._token),
            "boot_id": self._node.boot_id,
            "state": generation.state,
            "ranks": ranks,
            "stamp": self._node.stamp(),
            "place": self._node.place(self._token),
        }

    def _beat(self, generation: Generation) -> dict[str, Any]:
        return {
            "stamp": self._node.stamp(),
            "alive": generation.alive(),
            "lease_left": generation.lease_left(),
            "progress": generation.progress(),
        }
