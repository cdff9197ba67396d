"""One generation on one simulated node: its ranks, journal, lease and fence.

As docs/reference/agent-protocol.md has them.

It knows no network: who may reach it is the node's affair.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from relaunch.backends.base import BelowLauncher, PrepareOrder, Refusal, StartedRanks, StartOrder
from relaunch.generation import Token
from tests.fakes.nodes import launcher
from tests.fakes.nodes.clock import Timer, wait_for
from tests.fakes.nodes.rank import Rank
from tests.fakes.nodes.record import Life
from tests.fakes.nodes.script import Exit, Lingers, Prints, Progress, ShimDies

if TYPE_CHECKING:
    from tests.fakes.nodes.node import Node

SIGTERM, SIGKILL = 15, 9
ASK_EVERY = 1.0
"""Seconds between questions to peers, or a fifth of `fence_after` where that is less."""


class Generation:
    def __init__(self, node: Node, token: Token, order: PrepareOrder) -> None:
        self.node = node
        self.token = token
        self.order = order
        self.state: Literal["prepared", "running", "stopping", "ended", "gone"] = "prepared"
        self.boot = node.boot
        self.answer = node.take_answer(token, node.stamp())
        self.started: StartedRanks | Refusal | None = None
        self.start_order: StartOrder | None = None
        self.ranks: dict[int, Rank] = {}
        self.journal: list[dict[str, Any]] = []
        self.is_forgotten = False
        """Whether the node does not know any more that its ranks were launched."""
        self.evidence: dict[int, Exit] = {}
        """What ranks left behind, by the number of the observation."""
        self.listeners: set[asyncio.Event] = set()
        self.watchers = 0
        self._valid_until = node.clock.time() + order.valid_for
        self._wanted_at = node.clock.time()
        self._leaving = False
        self._kill_at = math.inf
        self._leased_until = self._alive_until = math.inf
        self._renewed = False
        self._asked: dict[str, float] = {}
        """When the newest question that a peer answered with `alive` was sent."""
        self._ask_at = 0.0
        self._timer: Timer | None = None
        self._is_read = False
        self._awaits_reader: list[tuple[float, Callable[[], object]]] = []
        """What the script says of later, in seconds from the first time that steps are read."""
        self._arm()

    # --- orders ---

    def start(self, order: StartOrder) -> StartedRanks | Refusal:
        if isinstance(self.started, StartedRanks):
            return StartedRanks(self.node.name, self.started.pids, True)
        if self.started is not None:
            return self.started
        if self.state != "prepared":
            if self.node.clock.time() >= self._valid_until:
                return Refusal(
                    self.node.name, "expired", f"prepared more than {self.order.valid_for:g} s ago"
                )
            return Refusal(self.node.name, "not_prepared", "it was prepared, but its shim is gone")
        refused = self.node.scripted_refusal("start", self.token.generation)
        if refused is not None:
            self.started = refused
            self.leave()
            return refused
        now = self.node.clock.time()
        for local, rank in enumerate(self.order.ranks):
            self.ranks[rank] = Rank(rank, local, self.node.take_pid(), now)
            self._live("started", rank)
        self.started = StartedRanks(
            self.node.name, {rank: one.pid for rank, one in self.ranks.items()}, False
        )
        self.start_order = order
        self.state = "running"
        self._leased_until = self._alive_until = now + self.order.lease
        self._follow_script()
        self._arm()
        return self.started

    def stop(self, grace: float, reason: str) -> None:
        if self.state == "prepared":
            self.leave()
        elif self.state in ("running", "stopping"):
            self._leaving = True
            self._observe("Stopped", reason=reason)
            self._begin_stop(grace)
        elif self.state == "ended":
            self.leave()

    async def wait_gone(self, seconds: float) -> bool:
        """Return whether every rank is gone within this time."""
        deadline = self.node.clock.time() + seconds
        changed = asyncio.Event()
        self.listeners.add(changed)
        try:
            while self.state not in ("ended", "gone"):
                left = deadline - self.node.clock.time()
                if left <= 0:
                    return False
                changed.clear()
                await wait_for(self.node.clock, changed, left)
            return True
        finally:
            self.listeners.discard(changed)

    def renew(self, stamp: float) -> None:
        now = self.node.clock.time()
        sent = self.node.time_of(stamp)
        if (
            self.state != "running"
            or sent > now
            or sent + self.order.lease + self.order.fence_after <= now
        ):
            return
        until = sent + self.order.lease
        self._leased_until = max(self._leased_until, until) if self._renewed else until
        self._renewed = True
        self._alive_until = max(self._alive_until, self._leased_until + self.order.fence_after)
        self._arm()

    # --- questions ---

    def alive(self) -> list[int]:
        return [one.rank for one in self.ranks.values() if one.ended is None]

    def peer_view(self, now: float) -> tuple[bool, bool]:
        """Return what a peer gets as answer: alive, and leased."""
        alive = self.state == "running" and (not self._fences or now < self._alive_until)
        return alive, alive and self._renewed and now < self._leased_until

    def lease_left(self) -> float | None:
        if self.state != "running" or not self._fences:
            return None
        return max(0.0, self._leased_until - self.node.clock.time())

    def progress(self) -> dict[str, dict[str, Any]]:
        now = self.node.clock.time()
        told: dict[str, dict[str, Any]] = {}
        for one in self.ranks.values():
            if one.progress is not None and one.progress.unreadable is not None:
                told[str(one.rank)] = {"unreadable": one.progress.unreadable}
            elif one.progress is not None and (reached := one.step(now)) is not None:
                saved = one.checkpoint(now)
                told[str(one.rank)] = {
                    "step": reached[0],
                    "age": reached[1],
                    "values": {} if (busy := one.progress.busy) is None else {"busy_s": busy},
                    "phase": one.progress.phase,
                    "checkpoint": saved,
                }
        if self._launched is not None:
            return {
                str(rank): dict(report) for report in told.values() for rank in self._launched.ranks
            }
        return told

    def next_news(self) -> float:
        now = self.node.clock.time()
        return min((one.next_news(now) for one in self.ranks.values()), default=math.inf)

    def serialize(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the observation as it is sent, with what the rank left behind."""
        if observation["kind"] != "RankExited":
            return dict(observation)
        evidence = self.evidence.get(observation["seq"])
        if evidence is None:
            return {
                **observation,
                "error": None,
                "log_tail": [],
                "kernel": [],
                "kernel_unreadable": None,
            }
        printed = self.ranks[observation["rank"]].log(self.node.clock.time()).decode().splitlines()
        tail = list(evidence.log_tail) or printed
        if not tail and evidence.exit_code and evidence.signal is None and evidence.error is None:
            tail = ["ValueError: so the script says"]
        explained = not observation["stopped"] and observation["exit_code"] != 0
        below = self._launched
        left = (
            {"log_tail": tail[-200:]}
            if below is None
            else launcher.report_failure(below, int(observation["pid"]), evidence, tail[-200:])
        )
        return {
            **observation,
            "error": evidence.error if below is None else None,
            **left,
            "kernel": list(evidence.kernel[-20:]) if explained else [],
            "kernel_unreadable": evidence.kernel_unreadable if explained else None,
        }

    # --- what happens ---

    def leave(self) -> None:
        """The shim goes; its ranks have gone before."""
        self.state = "gone"
        if self._timer is not None:
            self._timer.cancel()
        self._notify()

    def vanish(self, reason: str) -> None:
        """End all ranks as a reboot does: no process sees how they end."""
        for rank in self.alive():
            self._end(self.ranks[rank], reason)
        self.leave()

    def tell_of_the_end(self) -> None:
        """Report once that ranks are gone whose exits were not seen."""
        if self.state != "gone" or not self.ranks or self.is_forgotten:
            return
        seen = {told["rank"] for told in self.journal if told["kind"] == "RankExited"}
        if len(seen) == len(self.ranks) or any(
            told["kind"] in ("ShimDied", "RanksVanished") for told in self.journal
        ):
            return
        rebooted = self.boot != self.node.boot
        reason = "the node rebooted" if rebooted else "the shim and its supervisor died"
        self._observe(
            "RanksVanished", reason=reason, rebooted=rebooted, kernel=[], kernel_unreadable=None
        )

    def note_watchers(self) -> None:
        self._wanted_at = self.node.clock.time()
        self._arm()

    def _follow_script(self) -> None:
        script, generation, name = self.node.script, self.token.generation, self.node.name
        for progress in script.of(Progress, generation, name):
            for one in self._select_ranks(progress.rank):
                one.progress = one.progress or progress
        for printed in script.of(Prints, generation, name):
            for one in self._select_ranks(printed.rank):
                one.prints = (*one.prints, printed)
        for lingering in script.of(Lingers, generation, name):
            for one in self._select_ranks(lingering.rank):
                one.lingers = one.lingers or lingering.seconds
        exits: dict[float, list[tuple[Rank, Exit]]] = {}
        for exit in script.of(Exit, generation, name):
            for one in self._select_ranks(exit.rank):
                exits.setdefault(exit.after, []).append((one, exit))
        if script.succeeds(generation):
            for one in self.ranks.values():
                last = 0.0 if one.progress is None else one.progress.steps[-1][0]
                exits.setdefault(last, []).append((one, Exit(exit_code=0)))
        for after, together in sorted(exits.items(), key=lambda entry: entry[0]):
            self._later(after, lambda together=together: self._ranks_exit(together))
        for death in script.of(ShimDies, generation, name):  # also where no watch reads
            self.node.clock.call_later(death.after, lambda death=death: self._shim_dies(death))

    def _select_ranks(self, rank: int | None) -> list[Rank]:
        if rank is None or (self._launched is not None and rank in self._launched.ranks):
            return list(self.ranks.values())
        return [self.ranks[rank]] if rank in self.ranks else []

    @property
    def _launched(self) -> BelowLauncher | None:
        return None if self.start_order is None else self.start_order.launched

    def _later(self, after: float, happen: Any) -> None:
        if after <= 0:
            happen()
        elif self._is_read:
            self.node.clock.call_later(after, happen)
        else:
            self._awaits_reader.append((after, happen))

    def read(self) -> None:
        """A watch reads the steps. With the first time the script begins: a watch that comes late
        on a busy machine sees the same as another."""
        if self._is_read or not self.ranks:
            return
        self._is_read = True
        now = self.node.clock.time()
        for one in self.ranks.values():
            one.read_at = now
        for after, happen in self._awaits_reader:
            self.node.clock.call_later(after, happen)

    def _ranks_exit(self, together: list[tuple[Rank, Exit]]) -> None:
        failed = False
        for kernel in dict.fromkeys(exit.kernel for one, exit in together if one.ended is None):
            self.node.machine.kernel_says(kernel)
        for one, exit in together:
            if one.ended is None:
                code = None if exit.signal is not None else exit.exit_code
                failed = failed or code != 0
                if self._launched is not None and code != 0:
                    self._exit(one, 1, None, exit)  # however a rank fails, its launcher ends with 1
                else:
                    self._exit(one, code, exit.signal, exit)
        if self.state == "running" and (failed or not self.alive()):
            self._begin_stop(self.order.stop_grace)

    def _shim_dies(self, death: ShimDies) -> None:
        if self.state in ("running", "stopping"):
            self.node.machine.kernel_says(death.kernel)
            for rank in self.alive():
                self._end(self.ranks[rank], "the shim died")
            self._observe(
                "ShimDied",
                reason="the shim was killed",
                kernel=list(death.kernel),
                kernel_unreadable=None,
            )
            self.leave()

    def _exit(
        self, one: Rank, code: int | None, signal: int | None, evidence: Exit | None = None
    ) -> None:
        stopped = self.state == "stopping"
        self._end(one, f"signal {signal}" if code is None else f"exit code {code}")
        seq = self._observe(
            "RankExited",
            rank=one.rank,
            local_rank=one.local,
            pid=one.pid,
            exit_code=code,
            signal=signal,
            stopped=stopped,
            **({"launcher": True} if self._launched is not None else {}),
        )
        if evidence is not None:
            self.evidence[seq] = evidence

    def _begin_stop(self, grace: float) -> None:
        now = self.node.clock.time()
        if self.state == "running":
            self.state = "stopping"
            for rank in self.alive():
                self.ranks[rank].lingers += now
        self._kill_at = min(self._kill_at, now + grace)
        self._tend()

    def _fence(self, why: str, reason: str) -> None:
        self._observe("Fenced", why=why, reason=reason)
        self._leaving = True
        self._begin_stop(self.order.stop_grace)

    # --- time ---

    @property
    def _fences(self) -> bool:
        """Without fences only `never_watched` remains, and that ends with the first renewal."""
        return not self._renewed or (self.start_order is not None and self.start_order.fences)

    def _tend(self) -> None:
        now = self.node.clock.time()
        if self.state == "prepared" and now >= self._valid_until:
            self.leave()
        if self.state == "running":
            self._tend_lease(now)
        if self.state == "stopping":
            for rank in self.alive():
                one = self.ranks[rank]
                if one.lingers <= now:
                    self._exit(one, None, SIGTERM)
                elif self._kill_at <= now and one.lingers < math.inf:
                    self._exit(one, None, SIGKILL)
            if not self.alive():
                self.state = "ended"
                self._wanted_at = now
                self._notify()
        if self.state == "ended" and (
            self._leaving or (not self.watchers and now >= self._wanted_at + self.order.lease)
        ):
            self.leave()
        self._arm()

    def _tend_lease(self, now: float) -> None:
        if self._fences and now >= self._alive_until:
            if not self._renewed:
                self._fence(
                    "never_watched",
                    f"no controller watched this generation within {self.order.lease:g} s of its "
                    "start",
                )
            else:
                self._fence(
                    "isolated",
                    f"no renewal and no word from its peers for {self.order.fence_after:g} s",
                )
        elif self._renewed and now >= self._leased_until and now >= self._ask_at:
            self._ask_at = now + min(ASK_EVERY, self.order.fence_after / 5)
            self._ask_peers(now)

    def _ask_peers(self, now: float) -> None:
        assert self.start_order is not None
        for peer in self.start_order.peers:
            answer = self.node.ask(peer.node, self.token, self.start_order.secret)
            if answer is None:
                continue
            superseded, alive, leased = answer
            if superseded is not None:
                self._fence("superseded", f"node {peer.node} {superseded}")
                return
            if leased:
                self._alive_until = max(self._alive_until, now + self.order.fence_after)
            if alive:
                self._asked[peer.node] = now
        if self.start_order.peers and len(self._asked) == len(self.start_order.peers):
            self._alive_until = max(
                self._alive_until, min(self._asked.values()) + self.order.fence_after
            )

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = math.inf
        if self.state == "prepared":
            due = self._valid_until
        elif self.state == "running":
            due = self._alive_until if self._fences else math.inf
            if self._renewed and self.start_order is not None and self.start_order.peers:
                due = min(due, max(self._leased_until, self._ask_at))
        elif self.state == "stopping":
            waits = [self.ranks[rank].lingers for rank in self.alive()]
            due = min(
                [
                    max(one, 0.0) if one < self._kill_at else self._kill_at
                    for one in waits
                    if one < math.inf
                ],
                default=math.inf,
            )
        elif self.state == "ended" and not self.watchers:
            due = self._wanted_at + self.order.lease
        if due < math.inf:
            self._timer = self.node.clock.call_later(
                max(0.0, due - self.node.clock.time()), self._tend
            )

    # --- what is written down ---

    def _observe(self, kind: str, **fields: Any) -> int:
        seq = len(self.journal) + 1
        wall = self.node.clock.wall()
        self.journal.append(
            {"seq": seq, "kind": kind, "at": wall, "stamp": self.node.stamp(), **fields}
        )
        self._notify()
        return seq

    def _live(self, kind: Literal["started", "ended"], rank: int, reason: str = "") -> None:
        record = self.node.record
        record.lives.append(
            Life(
                record.number(),
                self.node.clock.wall(),
                kind,
                self.token,
                self.node.name,
                rank,
                reason,
            )
        )

    def _end(self, one: Rank, reason: str) -> None:
        one.ended = self.node.clock.time()
        self._live("ended", one.rank, reason)

    def _notify(self) -> None:
        for listener in self.listeners:
            listener.set()
