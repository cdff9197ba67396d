"""The machine under one simulated node.

How it is, who holds it for a repair, and the four orders that ask, examine and mend.

It never holds a node on which a generation lives, and never lets one begin on a node that it holds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from relaunch.backends.base import Refusal
from tests.fakes.nodes import health
from tests.fakes.nodes.clock import wait_for
from tests.fakes.nodes.script import (
    DiagHangs,
    Fails,
    RebootFails,
    RebootHangs,
    RepairCommand,
    ResetFails,
    Sick,
    Stranger,
    Takes,
)

if TYPE_CHECKING:
    from tests.fakes.nodes.node import Node

HOLD_WAIT = 2.0
"""Seconds for the holder of the node to release it, before its next holder is refused."""
ORDERED_LATELY = 60.0
"""Seconds after a reboot was ordered in which the same boot is not ordered to end again."""
GOES_DOWN_AFTER = 0.2
"""Seconds from the answer to a reboot until the node is gone: long enough for the answer to leave.
"""
_DOING: dict[RepairCommand, str] = {
    "diagnose": "this node is being examined",
    "reset-gpus": "this node's GPUs are being reset",
    "reboot": "this node is being rebooted",
}
NVML_TIMEOUT = 10.0
"""Seconds that a node gives NVML."""
KERNEL_LINES, REBOOTS = 200, 20
"""What a probe tells at most, the newest."""

F = TypeVar("F", bound=Fails)


class NoAnswer(Exception):
    """The process that was carrying out the order is gone."""


@dataclass(frozen=True, slots=True)
class Held:
    by: RepairCommand
    id: str
    since: float
    """CLOCK_BOOTTIME."""

    def serialize(self) -> dict[str, Any]:
        return {"by": self.by, "id": self.id, "since": self.since}


class Machine:
    def __init__(self, node: Node, gpus: int) -> None:
        self.held: Held | None = None
        self._rebooting: tuple[str, float] | None = None
        """The repair that has told this boot to end, and when."""
        self.sick: tuple[Sick, ...] = ()
        self._node = node
        self._gpus = gpus
        self._preparing = 0
        self._strangers: tuple[Stranger, ...] = ()
        self._waiting: set[asyncio.Event] = set()
        self._left: str | None = None
        """The examination that no caller waits for any more."""
        self._kernel: list[tuple[float, str]] = []
        self._resets: list[dict[str, Any]] = []
        self._reboots: list[dict[str, Any]] = []
        """The node's own journal; it outlives every boot."""
        self._failed: dict[int, int] = {}

    # --- what befalls it ---

    def fall_ill(self, sick: Sick) -> None:
        self.sick = (*self.sick, sick)
        self.kernel_says(sick.kernel)

    def visit(self, stranger: Stranger) -> None:
        self._strangers = (*self._strangers, stranger)

    def leave(self, stranger: Stranger | None = None) -> None:
        """None: all of them."""
        self._strangers = (
            () if stranger is None else tuple(one for one in self._strangers if one is not stranger)
        )

    def kernel_says(self, lines: tuple[str, ...]) -> None:
        now = self._node.clock.time()
        self._kernel += [(now, line) for line in lines]

    def went_down(self) -> None:
        """Whatever ran on the node is gone, and with it who held it; no other boot has begun."""
        self.leave()
        if self.held is not None:
            self._note("ended", self.held.by, self.held.id, "lost")
        self.held = None
        self._wake()

    def rebooted(self) -> None:
        """Another boot has begun."""
        self.went_down()
        self._note("rebooted", "reboot", "" if self._rebooting is None else self._rebooting[0])
        self._rebooting = None
        self._preparing = 0
        self._kernel, self._resets = [], []
        self.sick = tuple(one for one in self.sick if one.until is None)

    # --- the hold ---

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[Refusal | None]:
        """Keep the node from being held, from before a generation is reserved until it lives.

        Yields why it cannot be had.
        """
        node, boot = self._node, self._node.boot
        if not await self._comes_true(lambda: self.held is None):
            yield self._refused_because_held()
        elif self._rebooting is not None:
            yield Refusal(
                node.name,
                "rebooting",
                f"this node was ordered to reboot ({self._rebooting[0]}) and has not yet",
            )
        else:
            self._preparing += 1
            try:
                yield None
            finally:
                if boot == node.boot:
                    self._preparing -= 1
                    self._wake()

    async def _take(
        self, command: RepairCommand, id: str, boot_id: str | None = None
    ) -> Refusal | None:
        node = self._node
        refused = node.scripted_refusal(command, 0)
        if refused is None and not await self._comes_true(
            lambda: self.held is None and self._preparing == 0
        ):
            refused = self._refused_because_held()
        if refused is None and boot_id not in (None, node.boot_id):
            reason = f"this node runs boot {node.boot_id}; the order was decided on boot {boot_id}"
            refused = Refusal(node.name, "boot_changed", reason, boot_id=node.boot_id)
        if (
            refused is None
            and command == "reboot"
            and (lately := self._ordered_lately()) not in (None, id)
        ):
            refused = Refusal(node.name, "held", f"this node is being rebooted (reboot, {lately})")
        if refused is None and (living := node.living()):
            names = ", ".join(f"job {token.job} generation {token.generation}" for token in living)
            refused = Refusal(node.name, "busy", f"{names} runs on this node")
        if refused is None and self._strangers:
            uses = ", ".join(
                f"pid {each.pid} uses GPU {health.bus_id(each.gpu)}" for each in self._strangers
            )
            refused = Refusal(node.name, "busy", uses)
        if refused is None:
            self.held = Held(command, id, node.stamp())
            self._note("began", command, id)
        else:
            self._note("refused", command, id, refused.why)
        return refused

    def _ordered_lately(self) -> str | None:
        """Return the repair that has told this boot to end a moment ago."""
        if (
            self._rebooting is None
            or self._node.clock.time() - self._rebooting[1] >= ORDERED_LATELY
        ):
            return None
        return self._rebooting[0]

    @contextmanager
    def _holding(self, command: RepairCommand, id: str) -> Iterator[Callable[[str], None]]:
        """Let the node go at the end; yields what says how it ended."""
        mine, ends = self.held, ["lost"]
        try:
            yield lambda reason: ends.__setitem__(0, reason)
        finally:
            if self.held is mine:
                self._note("ended", command, id, ends[0])
                self.held = None
                self._wake()

    def _refused_because_held(self) -> Refusal:
        if self.held is None:
            return Refusal(self._node.name, "held", "a launch is being prepared on this node")
        doing = _DOING[self.held.by]
        return Refusal(
            self._node.name,
            "held",
            f"{doing} ({self.held.by}, {self.held.id})",
            held_by=self.held.id,
        )

    # --- orders ---

    async def probe(self, within: float, kernel_since: float | None) -> Mapping[str, Any]:
        node = self._node
        await self._pass(min(within, self._takes("probe")))
        now, wall = node.clock.time(), node.clock.wall()
        lines = [
            line if line.startswith("[") else f"[{at:12.6f}] {line}"
            for at, line in self._kernel
            if kernel_since is None or at >= now - kernel_since
        ]
        return {
            "outcome": "done",
            "boot_id": node.boot_id,
            "stamp": node.stamp(),
            "wall": wall,
            **health.condition(self.sick),
            "gpus": health.gpus(node.name, self._gpus, self.sick, self._processes()),
            "kernel": {"lines": lines[-KERNEL_LINES:]},
            "resets": list(self._resets),
            "jobs": [asdict(token) for token in node.living()],
            "held": None if self.held is None else self.held.serialize(),
            "reboots": self._reboots[-REBOOTS:],
        }

    async def look(self) -> dict[str, Any]:
        """What a look at the node reads: its GPUs, its disk and its network ports."""
        takes = self._takes("gpus")
        await self._pass(min(takes, NVML_TIMEOUT))
        gpus = health.inventory(self._node.name, self._gpus, self.sick, self._processes())
        if takes > NVML_TIMEOUT:
            gpus = {"unreadable": f"NVML did not answer within {NVML_TIMEOUT:g} s"}
        return {
            "gpus": gpus,
            "disks": health.condition(self.sick)["disks"][:1],
            "links": {"ports": []},
        }

    def _processes(self) -> dict[int, list[dict[str, Any]]]:
        """Who computes, by GPU."""
        found: dict[int, list[dict[str, Any]]] = {}
        for one in self._node.ranks_alive():
            if self._gpus:
                found.setdefault(one.local % self._gpus, []).append({"pid": one.pid, "ours": True})
        for each in self._strangers:
            found.setdefault(each.gpu, []).append(
                {"pid": each.pid, "ours": False, "user": each.user, "program": each.program}
            )
        return found

    def hang_up(self, id: str) -> None:
        """The caller of this examination left, which ends it, as a session's end really does."""
        if self.held is not None and (self.held.by, self.held.id) == ("diagnose", id):
            self._left = id
            self._wake()

    async def diagnose(self, id: str, level: int, within: float) -> Mapping[str, Any] | Refusal:
        if refused := await self._take("diagnose", id):
            return refused
        with self._holding("diagnose", id) as ended:
            self._left = None
            answer: dict[str, Any] = {"outcome": "done", "boot_id": self._node.boot_id}
            if self._gpus == 0:
                answer["missing"] = health.NO_DCGMI
            else:
                takes = math.inf if self._fails(DiagHangs) is not None else self._takes("diagnose")
                await self._pass(min(takes, within), lambda: self._left == id)
                if self._left == id:
                    ended("closed")
                    raise NoAnswer
                # What a killed one had printed until then is nothing: it prints its document at the
                # end.
                code, stdout = (
                    health.diagnosed(self._gpus, level, self.sick)
                    if takes <= within
                    else (None, "")
                )
                answer |= {
                    "exit_code": code,
                    "stdout": stdout,
                    "stderr": "",
                    "took": min(takes, within),
                }
            ended("done")
            return answer

    async def reset_gpus(
        self, id: str, boot_id: str, gpus: tuple[str, ...], within: float
    ) -> Mapping[str, Any] | Refusal:
        if refused := await self._take("reset-gpus", id, boot_id):
            return refused
        with self._holding("reset-gpus", id) as ended:
            answer: dict[str, Any] = {"outcome": "done", "boot_id": self._node.boot_id}
            if self._gpus == 0:
                answer["missing"] = health.NO_NVIDIA_SMI
            else:
                takes = self._takes("reset-gpus")
                await self._pass(min(takes, within))
                answer |= {**self._reset(gpus, in_time=takes <= within), "took": min(takes, within)}
            ended("done")
            return answer

    def _reset(self, named: tuple[str, ...], in_time: bool) -> dict[str, Any]:
        if not in_time:
            return {"exit_code": None, "output": ""}
        if (fails := self._fails(ResetFails)) is not None:
            return {"exit_code": fails.exit_code, "output": fails.output}
        code, output, done = health.reset(self._gpus, named, self.sick)
        self.sick = tuple(
            one
            for one in self.sick
            if one.until != "reset" or health.of_gpu(one) not in (None, *done)
        )
        if code == 0:
            self._resets.append({"uptime": self._node.clock.time(), "id": "", "gpus": list(named)})
        return {"exit_code": code, "output": output}

    async def reboot(self, id: str, boot_id: str, reason: str) -> Mapping[str, Any] | Refusal:
        node = self._node
        if refused := await self._take("reboot", id, boot_id):
            return refused
        with self._holding("reboot", id) as ended:
            if self._ordered_lately() is not None:
                ended("already")
                return {"outcome": "done", "boot_id": boot_id, "already": True}
            entries = [one for one in self._reboots if (one["id"], one["boot_id"]) != (id, boot_id)]
            if (fails := self._fails(RebootFails)) is not None:
                self._reboots, self._rebooting = entries, None
                ended("refused:cannot_reboot")
                return Refusal(node.name, "cannot_reboot", fails.reason)
            if len(entries) == len(self._reboots):
                self._reboots.append(
                    {"at": node.clock.wall(), "id": id, "reason": reason, "boot_id": boot_id}
                )
            self._rebooting = (id, node.clock.time())
            ended("done")
        self._go_down()
        return {"outcome": "done", "boot_id": boot_id}

    def _go_down(self) -> None:
        node, boot, takes = self._node, self._node.boot, self._takes("reboot")
        hangs = self._fails(RebootHangs)
        if hangs is not None and hangs.answers:
            return

        def go() -> None:
            if boot != node.boot:
                return  # it has, by itself
            if hangs is None:
                node.reboot(takes)
            else:
                node.power_off()

        if takes > 0 or hangs is not None:
            node.clock.call_later(GOES_DOWN_AFTER, go)
        else:
            go()

    # --- the script and the time ---

    def _takes(self, command: str) -> float:
        return next(
            (
                one.seconds
                for one in self._node.script.of(Takes, 0, self._node.name)
                if one.command == command
            ),
            0.0,
        )

    def _fails(self, kind: type[F]) -> F | None:
        for one in self._node.script.of(kind, 0, self._node.name):
            count = self._failed.get(id(one), 0)
            if count < (math.inf if one.times is None else one.times):
                self._failed[id(one)] = count + 1
                return one
        return None

    async def _pass(self, seconds: float, over_early: Callable[[], bool] = lambda: False) -> None:
        """Let time pass. Raises NoAnswer where the node went down meanwhile."""
        node, boot = self._node, self._node.boot
        over = asyncio.Event()
        end = node.clock.time() + seconds
        self._waiting.add(over)
        try:
            while (
                (left := end - node.clock.time()) > 0
                and boot == node.boot
                and not node.down
                and not over_early()
            ):
                over.clear()
                await wait_for(node.clock, over, left)
        finally:
            self._waiting.discard(over)
        if boot != node.boot or node.down:
            raise NoAnswer

    async def _comes_true(self, condition: Callable[[], bool]) -> bool:
        """Wait for it, for as long as the next holder of the node waits."""
        node, boot = self._node, self._node.boot
        changed = asyncio.Event()
        end = node.clock.time() + HOLD_WAIT
        self._waiting.add(changed)
        try:
            while not condition() and (left := end - node.clock.time()) > 0:
                changed.clear()
                await wait_for(node.clock, changed, left)
                if boot != node.boot or node.down:
                    raise NoAnswer
        finally:
            self._waiting.discard(changed)
        return condition()

    def _wake(self) -> None:
        for one in self._waiting:
            one.set()

    def _note(self, kind: Any, command: RepairCommand, id: str, reason: str = "") -> None:
        node = self._node
        node.record.keep_up(node.clock.wall(), kind, node.name, command, id, node.boot_id, reason)
