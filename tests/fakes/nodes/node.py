"""One simulated node.

Which tokens it has seen, what it obeys and what it refuses, and who can reach it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from relaunch.backends.base import (
    LogChunk,
    Logs,
    Preparation,
    PrepareOrder,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
)
from relaunch.generation import Token
from relaunch.job.places import parse_place
from tests.fakes.nodes import stacks
from tests.fakes.nodes.clock import Clock, wait_for
from tests.fakes.nodes.generation import Generation
from tests.fakes.nodes.machine import Machine, NoAnswer
from tests.fakes.nodes.rank import Rank
from tests.fakes.nodes.record import Record
from tests.fakes.nodes.script import (
    Befalls,
    Cut,
    Reboot,
    Refuse,
    RepairCommand,
    Script,
    Sick,
    Stack,
    Stranger,
    When,
    Writes,
)

KEEP = 10
"""Generations of a job that stay on a node."""


@dataclass(slots=True)
class Job:
    prepared: Token | None = None
    stopped: Token | None = None
    generations: dict[Token, Generation] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def _order(token: Token | None) -> tuple[int, int] | None:
    return None if token is None else (token.submission, token.generation)


class Node:
    def __init__(
        self,
        name: str,
        number: int,
        gpus: int,
        clock: Clock,
        record: Record,
        script: Script,
        nodes: Mapping[str, Node],
    ) -> None:
        self.name = name
        self.clock = clock
        self.record = record
        self.script = script
        self.jobs: dict[tuple[str, str], Job] = {}
        self.cuts: tuple[str, ...] = ()
        self.down = False
        self.boot = 1
        self.machine = Machine(self, gpus)
        # Each node has been up for another while, so that a stamp given to the wrong node is seen.
        self._booted_at = clock.time() - 1000.0 * (number + 1)
        self._nodes = nodes
        self._pids = itertools.count(1000)
        self._ports = itertools.count(20000)
        self._refused: dict[int, int] = {}
        self._fired: set[tuple[int, int]] = set()
        self._stacks: list[tuple[float, Stack]] = []
        self.host = 0
        """Which machine answers under this name."""
        self._elsewhere: dict[int, dict[tuple[str, str], Job]] = {}
        """What other machines have that have answered under it, and go on by themselves."""

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot-{self.boot}"

    @property
    def hears(self) -> bool:
        return not self.down and "controller-in" not in self.cuts

    @property
    def speaks(self) -> bool:
        return not self.down and "controller-out" not in self.cuts

    def stamp(self) -> float:
        return self.clock.time() - self._booted_at

    def time_of(self, stamp: float) -> float:
        return stamp + self._booted_at

    def take_pid(self) -> int:
        return next(self._pids)

    def take_answer(self, token: Token, stamp: float) -> Preparation:
        nonce = hashlib.sha256(f"{self.name}/{token}/{stamp}".encode()).hexdigest()[:32]
        ports = next(self._ports), next(self._ports)
        return Preparation(
            self.name, self.boot_id, *ports, stamp, nonce, parse_place(self.place(token))
        )

    def place(self, token: Token) -> dict[str, Any]:
        """Return where the orders of a job are carried out, as an agent tells it."""
        machine = f"{self.name}-{self.host}"
        known = (token.namespace, token.job) in self.jobs
        state = (
            hashlib.sha256(f"{machine}/{token.namespace}/{token.job}".encode()).hexdigest()[:16]
            if known
            else ""
        )
        return {"machine": machine, "boot_id": self.boot_id, "uid": 0, "state": state}

    # --- what befalls it ---

    def inject(self, when: When, generation: int) -> None:
        """Let happen what the script has for this moment, once a generation."""
        happenings: tuple[Befalls, ...] = (
            *self.script.of(Sick, generation, self.name),
            *self.script.of(Stranger, generation, self.name),
            *self.script.of(Cut, generation, self.name),
            *self.script.of(Reboot, generation, self.name),
        )
        for happening in happenings:
            key = (id(happening), generation)
            if happening.when == when and key not in self._fired:
                self._fired.add(key)
                if happening.after > 0:
                    self.clock.call_later(happening.after, partial(self._inject, happening))
                else:
                    self._inject(happening)

    def _inject(self, happening: Befalls) -> None:
        if isinstance(happening, Sick):
            self.machine.fall_ill(happening)
            return
        if isinstance(happening, Stranger):
            self.machine.visit(happening)
            if happening.lasts is not None:
                self.clock.call_later(happening.lasts, partial(self.machine.leave, happening))
            return
        if isinstance(happening, Reboot):
            self.reboot(happening.down_for, happening.forgets)
            return
        self.cut(*happening.words)
        if happening.lasts is not None:
            self.clock.call_later(happening.lasts, self.heal)

    def cut(self, *words: str) -> None:
        self.cuts = tuple(dict.fromkeys((*self.cuts, *words)))
        self._notify()

    def heal(self) -> None:
        self.cuts = ()

    def reboot(self, down_for: float = 0.0, forgets: bool = False) -> None:
        self.boot += 1
        self.down = True
        self.machine.rebooted()
        for job in self.jobs.values():
            for generation in job.generations.values():
                generation.vanish("the node rebooted")
                generation.is_forgotten = generation.is_forgotten or forgets
        self._booted_at = self.clock.time() + down_for
        if down_for > 0:
            self.clock.call_later(down_for, self._up)
        else:
            self._up()

    def _up(self) -> None:
        self.down = False

    def move(self, host: int) -> None:
        """Let another machine answer under this name; what runs on the one before goes on there."""
        self._elsewhere[self.host] = self.jobs
        self.host, self.jobs = host, self._elsewhere.pop(host, {})
        self._notify()

    def power_off(self) -> None:
        """Go down and stay so, until it is rebooted."""
        self.down = True
        for job in self.jobs.values():
            for generation in job.generations.values():
                generation.vanish("the node went down")
        self.machine.went_down()

    def _notify(self) -> None:
        for job in self.jobs.values():
            for generation in job.generations.values():
                for listener in generation.listeners:
                    listener.set()

    # --- orders ---

    def job(self, token: Token) -> Job:
        return self.jobs.setdefault((token.namespace, token.job), Job())

    def generation(self, token: Token) -> Generation | None:
        job = self.jobs.get((token.namespace, token.job))
        return None if job is None else job.generations.get(token)

    async def prepare(self, order: PrepareOrder) -> Preparation | Refusal:
        token, job = order.token, self.job(order.token)
        async with job.lock:
            if job.stopped is not None and token <= job.stopped:
                return self._refuse(
                    "stopped",
                    f"generation {job.stopped.generation} was stopped for ever",
                    job.stopped,
                )
            if job.prepared is not None and token < job.prepared:
                return self._not_above(job.prepared)
            same = job.generations.get(token)
            if same is not None and same.state != "gone":
                return same.answer
            if same is not None and same.started is not None:
                return self._not_above(token)
            async with self.machine.preparing() as refused:
                return refused or await self._take_up(job, order)

    async def _take_up(self, job: Job, order: PrepareOrder) -> Preparation | Refusal:
        token = job.prepared = order.token
        refused = self.scripted_refusal("prepare", token.generation)
        if refused is None:
            older = [one for seen, one in job.generations.items() if seen < token]
            refused = await self._stop(
                older, order.stop_grace, order.stuck_after, f"{token} was prepared"
            )
        if refused is not None:
            return refused
        for seen in sorted(job.generations)[: max(0, len(job.generations) + 1 - KEEP)]:
            del job.generations[seen]
        job.generations[token] = Generation(self, token, order)
        return job.generations[token].answer

    async def start(self, order: StartOrder) -> StartedRanks | Refusal:
        token, job = order.token, self.job(order.token)
        async with job.lock:
            if job.stopped is not None and token <= job.stopped:
                return self._refuse(
                    "stopped",
                    f"generation {job.stopped.generation} was stopped for ever",
                    job.stopped,
                )
            if job.prepared is None or token > job.prepared:
                return self._refuse("not_prepared", f"{token} was never prepared here")
            if token < job.prepared:
                return self._not_above(job.prepared)
            generation = job.generations.get(token)
            if generation is None:
                return self._refuse("not_prepared", f"{token} was never prepared here to the end")
            if generation.started is None and order.prepared != generation.answer.stamp:
                return self._refuse("expired", "this order belongs to an earlier preparation")
            answer = generation.start(order)
            if isinstance(answer, StartedRanks) and not answer.already:
                self.inject("running", token.generation)
            return answer

    async def stop(self, order: StopOrder) -> StopProof | Refusal:
        token, job = order.token, self.job(order.token)
        async with job.lock:
            job.stopped = token if job.stopped is None else max(job.stopped, token)
            refused = self.scripted_refusal("stop", token.generation)
            if refused is None:
                which = [one for seen, one in job.generations.items() if seen <= token]
                refused = await self._stop(
                    which, order.stop_grace, order.stuck_after, "an order came"
                )
            return refused or StopProof(self.name, parse_place(self.place(token)))

    async def _stop(
        self, which: list[Generation], grace: float, stuck_after: float, reason: str
    ) -> Refusal | None:
        boot = self.boot
        living = [one for one in which if one.state != "gone"]
        for one in living:
            one.stop(grace, reason)
        stuck = [one for one in living if not await one.wait_gone(grace + stuck_after)]
        if boot != self.boot:
            raise NoAnswer
        if not stuck:
            return None
        ranks = ", ".join(str(rank) for one in stuck for rank in one.alive())
        return self._refuse("stuck", f"SIGKILL does not end the ranks {ranks}")

    def list(self) -> dict[str, Any]:
        jobs = []
        for (namespace, name), job in self.jobs.items():
            generations = []
            newest = {one.order.fleet: token for token, one in job.generations.items()}
            for token, one in job.generations.items():
                is_over = one.state == "gone"
                if is_over and newest[one.order.fleet] != token:
                    continue
                ranks = [
                    {"rank": rank.rank, "pid": rank.pid, "alive": rank.ended is None}
                    for rank in (() if is_over else one.ranks.values())
                ]
                whose = {"fleet": one.order.fleet} if one.order.fleet else {}
                generations.append(
                    {**_serialize_token(token), "state": one.state, "ranks": ranks, **whose}
                )
            prepared, stopped = _order(job.prepared), _order(job.stopped)
            told = {
                "prepared": prepared and list(prepared),
                "stopped": stopped and list(stopped),
                "generations": generations,
            }
            jobs.append({"namespace": namespace, "job": name, **told})
        held = None if self.machine.held is None else self.machine.held.serialize()
        return {
            "outcome": "done",
            "boot_id": self.boot_id,
            "protocol": 1,
            "jobs": jobs,
            "held": held,
        }

    def living(self) -> tuple[Token, ...]:
        """Return the generations that have ranks here, or may yet start some."""
        return tuple(
            token
            for job in self.jobs.values()
            for token, one in job.generations.items()
            if one.state not in ("ended", "gone")
        )

    def ranks_alive(self) -> tuple[Rank, ...]:
        generations = [one for job in self.jobs.values() for one in job.generations.values()]
        return tuple(one.ranks[rank] for one in generations for rank in one.alive())

    async def logs(
        self,
        token: Token,
        offsets: Mapping[int, int] | None,
        max_bytes: int,
        wait: float,
        tail: int | None,
        since: float | None = None,
    ) -> Logs | Refusal:
        generation = self.generation(token)
        if generation is None:
            return self._refuse("no_such_generation", f"{token} was never prepared here")
        deadline = self.clock.time() + wait
        while True:
            now = self.clock.time()
            chunks: list[LogChunk] = []
            unread = False
            for rank in generation.ranks:
                data = generation.ranks[rank].log(now)
                offset = (
                    _tail(data, tail)
                    if offsets is None or rank not in offsets
                    else min(offsets[rank], len(data))
                )
                piece = data[offset : offset + max_bytes]
                unread = unread or offset + len(piece) < len(data)
                if piece:
                    text = piece.decode(
                        errors="ignore"
                    )  # a letter that is cut in two is left for the next time
                    chunks.append(LogChunk(rank, offset, offset + len(text.encode()), text))
            over = generation.state in ("ended", "gone")
            if chunks or now >= deadline or (over and not unread):
                return Logs(tuple(chunks), over and not unread)
            await self._log_grows(generation, now, deadline)

    def set_stack(self, stack: Stack) -> None:
        self._stacks.insert(0, (self.clock.time(), stack))

    def stacks(self, token: Token, rank: int | None, frames: bool) -> Mapping[str, Any] | Refusal:
        generation = self.generation(token)
        if generation is None:
            return self._refuse("no_such_generation", f"{token} was never prepared here")
        ranks = generation.ranks
        if rank is not None and rank not in ranks:
            return self._refuse("bad_order", f"rank is {rank}; expected one of {list(ranks)}")
        now = self.clock.time()
        rows = [
            stacks.read_rank(one, now, self._select_stacks(token, one), frames)
            for one in ranks.values()
            if rank in (None, one.rank)
        ]
        return {"outcome": "done", "stacks": rows}

    def last_words(self, token: Token) -> Mapping[str, Any] | Refusal:
        generation = self.generation(token)
        if generation is None:
            return self._refuse("no_such_generation", f"{token} was never prepared here")
        living = [one for one in generation.ranks.values() if one.ended is None]
        return {"outcome": "done", "ranks": [self._read_words(token, one) for one in living]}

    def _read_words(self, token: Token, rank: Rank) -> dict[str, Any]:
        now = self.clock.time()
        row: dict[str, Any] = {"rank": rank.rank, "local_rank": rank.local, "pid": rank.pid}
        for one in self.script.of(Writes, token.generation, self.name):
            age = rank.elapsed(now) - one.after
            if one.rank in (None, rank.rank) and age >= 0:
                return {
                    **row,
                    "state": one.state,
                    "error": one.error,
                    "error_age": None if one.error is None else age,
                    "log_tail": list(one.log_tail),
                    "log_age": age if one.log_tail else None,
                }
        printed = rank.log(now).decode().splitlines()
        return {**row, "log_tail": printed, "log_age": rank.elapsed(now) if printed else None}

    def _select_stacks(self, token: Token, rank: Rank) -> list[tuple[float, Stack]]:
        """Return the stacks of a rank, each with the time from which it counts, newest first."""
        scripted = [
            ((rank.started if rank.read_at is None else rank.read_at) + one.after, one)
            for one in self.script.of(Stack, token.generation, self.name)
        ]
        scripted.sort(key=lambda entry: -entry[0])
        by_hand = [
            (max(at, rank.started), one)
            for at, one in self._stacks
            if one.generation in (None, token.generation)
        ]
        return [entry for entry in (*by_hand, *scripted) if entry[1].rank in (None, rank.rank)]

    async def _log_grows(self, generation: Generation, now: float, deadline: float) -> None:
        due = deadline
        for rank in generation.ranks.values():
            due = min(
                [
                    due,
                    *(
                        rank.begin(now) + one.after
                        for one in rank.prints
                        if rank.begin(now) + one.after > now
                    ),
                ]
            )
        changed = asyncio.Event()
        generation.listeners.add(changed)
        try:
            await wait_for(self.clock, changed, due - now)
        finally:
            generation.listeners.discard(changed)

    # --- peers ---

    def ask(self, peer: str, token: Token, secret: str) -> tuple[str | None, bool, bool] | None:
        """Ask another node about a generation.

        Return why it is superseded (or None), whether it is alive there, whether leased.
        """
        other = self._nodes.get(peer)
        if other is None or self.down or other.down or self._is_cut_from(other):
            return None
        hosts = [other.jobs, *other._elsewhere.values()]
        jobs = [found for host in hosts if (found := host.get((token.namespace, token.job)))]
        # Peers know addresses of machines, not names.
        job = next((one for one in jobs if token in one.generations), None)
        generation = None if job is None else job.generations[token]
        # Who answers is the supervisor of this very generation, and it goes when its ranks have
        # been stopped.
        if job is None or generation is None or generation.state == "gone":
            return None
        if generation.start_order is None or generation.start_order.secret != secret:
            return None
        if job.stopped is not None and job.stopped >= token:
            return f"was ordered to stop {job.stopped}", False, False
        if job.prepared is not None and job.prepared > token:
            return f"knows {job.prepared}", False, False
        return None, *generation.peer_view(self.clock.time())

    def _is_cut_from(self, other: Node) -> bool:
        if "peers" in (*other.cuts, *self.cuts):
            return True
        return f"peers:{other.name}" in self.cuts or f"peers:{self.name}" in other.cuts

    # --- refusals ---

    def scripted_refusal(
        self, command: Literal["prepare", "start", "stop"] | RepairCommand, generation: int
    ) -> Refusal | None:
        for refusal in self.script.of(Refuse, generation, self.name):
            count = self._refused.get(id(refusal), 0)
            if refusal.command == command and count < (
                math.inf if refusal.times is None else refusal.times
            ):
                self._refused[id(refusal)] = count + 1
                return self._refuse(refusal.why, refusal.reason)
        return None

    def _refuse(self, why: str, reason: str, highest: Token | None = None) -> Refusal:
        return Refusal(self.name, why, reason, _order(highest))

    def _not_above(self, highest: Token) -> Refusal:
        return self._refuse("not_above", f"{highest} has been seen here", highest)


def _serialize_token(token: Token) -> dict[str, int]:
    return {"submission": token.submission, "generation": token.generation}


def _tail(data: bytes, lines: int | None) -> int:
    if lines is None:
        return 0
    kept = data.splitlines(keepends=True)[-lines:] if lines > 0 else []
    return len(data) - sum(len(line) for line in kept)
