"""A round of chaos: bring a job into a phase, hit a victim at a random moment, let it end.

And what may have been spent on the way.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from relaunch.spec.policy import Policy
from tests.chaos.disturbances import DISTURBANCES, MAX_FROZEN_S, ONLY_SSH, disturb
from tests.chaos.places import SshPlaces
from tests.chaos.world import PATIENCE, Job, Unmet, World, chaos_policy, eventually

IN_PLACE, REPLACE = "RESTART_IN_PLACE", "REPLACE_NODE"
Tries = tuple[tuple[str, str, bool], ...]
"""(cause, strategy, spent), in order: what a job may have tried."""
NOTHING: Tries = ()
KILLED: Tries = (("UNKNOWN", IN_PLACE, True),)
FAULTY: Tries = (("NODE_FAULT", IN_PLACE, False),)
LOST: Tries = (("NODE_LOST", REPLACE, False),)
LATE: Tries = (("PLATFORM", IN_PLACE, False),)
"""A node that refused, because it had been prepared before it was hit."""

CUTS = {
    "cut controller": ("controller-in", "controller-out"),
    "cut controller-in": ("controller-in",),
    "cut controller-out": ("controller-out",),
    "cut peers": ("peers",),
    "cut both": ("controller-in", "controller-out", "peers"),
}
WARM = ("standby", "warm python", "stop standby", "stop warm python")
"""With --warm: the process that imports ahead, and its Python."""
VICTIMS = (
    "rank",
    "shim",
    "supervisor",
    "session",
    "sshd",
    "worker",
    "server",
    *CUTS,
    "reboot",
    *DISTURBANCES,
    *WARM,
)
ONLY = {"sshd": "ssh", **dict.fromkeys(ONLY_SSH, "ssh")}
"""Victims that nodes of one backend only have."""
PHASES = (
    "QUEUED",
    "LAUNCHING",
    "RUNNING",
    "NODE_LOST",
    "STOPPING",
    "WAITING_FOR_NODES",
    "WAITING_FOR_PERSON",
    "ended",
)
NOT_YET = ("EXAMINING", "REPAIRING")
"""Phases whose blows are another program's, tests.chaos.repairs."""
_WARM_PHASES = ("LAUNCHING", "RUNNING")
ON_NODES = ("rank", "shim", "supervisor", "stop shim", "stop supervisor")
ABSENT = {
    **{
        (phase, victim): "no rank lives then"
        for phase in ("QUEUED", "WAITING_FOR_NODES", "WAITING_FOR_PERSON", "ended")
        for victim in ON_NODES
    },
    **{
        (phase, victim): "nothing is to be launched after it, or ranks do not run"
        for phase in PHASES
        if phase not in _WARM_PHASES
        for victim in WARM
    },
    **{
        ("QUEUED", victim): "sessions begin with the first look at a node"
        for victim in ("session", "sshd", "stop session", "stop node")
    },
}
FAILPOINTS = (
    "prepare.reserved",
    "prepare.stopped",
    "prepare.forked",
    "start.received",
    "start.forking",
    "start.forked",
    "shim.reaped",
    "shim.journaled",
    "supervisor.sending",
    "stop.reserved",
    "stop.killed",
)

POINTS = tuple(
    f"{who} at {point}"
    for who in ("worker", "server")
    for point in ("reserved", "prepared", "started", "stopped")
)
"""The controller dies as soon as generation 2 is reserved in its state, prepared on a node, started
on a node; or generation 1 stopped."""

PATIENT = {"lease": "15s"}
"""For controllers that die while they launch: their successor comes after 6 s, and ranks that are
not watched within one lease stop. And for a launch that waits for a process that was stopped."""


@dataclass
class Expected:
    """How a round must end."""

    tries: tuple[Tries, ...] | None
    """Any one of these; None: whatever it took."""
    phase: str = "SUCCEEDED"
    exit_code: int = 0
    generation: int | None = None
    """None: one more than there were tries. Otherwise a launch was no try: a person asked for it,
    or a node had seen ours before."""
    paused: frozenset[int] = frozenset()
    """Processes that stood still for a while: a rank among them holds its lock, and nothing can
    prevent that."""


@dataclass
class Round:
    world: World
    phase: str
    victim: str
    random: random.Random
    log: list[str] = field(default_factory=list)
    job: Job = field(init=False)
    staged: Tries = NOTHING
    cut_off: list[str] = field(default_factory=list)
    """Nodes cut by the staging."""
    cuts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What each node is cut off from."""
    absent: list[asyncio.Task[None]] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    """Processes of nodes that stood still as a whole."""

    def note(self, text: str) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():.2f} {text}")

    def moment(self, most: float) -> float:
        return self.random.uniform(0.0, most)

    async def play(self) -> Expected:
        """Go through the round; afterwards the job has ended."""
        if self.phase == "failpoint":
            return await self._failpoint()
        if self.phase == "point":
            return await self._point()
        stage: Callable[[], Awaitable[float]] = getattr(self, f"_stage_{self.phase.lower()}")
        window = await stage()
        delay = self.moment(window)
        self.note(f"in {self.phase}, {self.victim} in {delay:.2f} s")
        await asyncio.sleep(delay)
        if self.victim in DISTURBANCES:
            return await self._finish_disturbed()
        if self.victim in WARM:
            return await self._finish_warm()
        return await getattr(self, f"_finish_{self.phase.lower()}")()  # type: ignore[no-any-return]

    # --- bringing a job into a phase; each returns how long the window is in which the blow falls

    async def _submit(self, policy: Policy | None = None, rank: Iterable[str] = ()) -> None:
        self.job = await self.world.submit(policy=policy, rank=rank)
        self.note(f"submitted {self.job.name}")

    async def _stage_queued(self) -> float:
        await self.world.worker.end()
        await self._submit()
        await self.job.until_phase("QUEUED")
        return 1.0

    async def _stage_launching(self) -> float:
        patient = self.victim in ("worker", "server", "session", "sshd", *WARM)
        await self._submit(chaos_policy(PATIENT if patient else None))
        await self.job.until_phase("LAUNCHING", "RUNNING")
        return 0.25  # a launch takes as long when the machine is idle

    async def _stage_running(self) -> float:
        await self._submit(chaos_policy(PATIENT) if self.victim in WARM else None)
        await self.job.until_phase("RUNNING")
        await self.job.until_watched()
        return 2.0

    async def _stage_node_lost(self) -> float:
        await self._stage_running()
        self._cut("n2", "cut controller")
        self.cut_off = ["n2"]
        await self.job.until_phase("NODE_LOST")
        return 4.0  # so that the lease has run out in some rounds and in others not

    async def _stage_stopping(self) -> float:
        await self._submit(rank=["--stubborn"])
        await self.job.until_phase("RUNNING")
        await self.job.until_steps()
        await self.job.signal("cancel", {"reason": "chaos"})
        return 1.2  # until SIGKILL after `stop_grace`, and a little beyond

    async def _stage_waiting_for_nodes(self) -> float:
        # A job that has never run is QUEUED for as long as its nodes are missing, and gets no
        # spares.
        await self._stage_running()
        self.cut_off = self.world.names[1:]
        for name in self.cut_off:
            self._cut(name, "cut both")
        await self.job.until_phase("WAITING_FOR_NODES")
        return 2.0

    async def _stage_waiting_for_person(self) -> float:
        await self._submit(chaos_policy(causes={"UNKNOWN": [{"strategy": "ASK"}]}))
        await self.job.until_phase("RUNNING")
        await self.job.until_steps()
        self._kill_a_rank()
        await self.job.until_phase("WAITING_FOR_PERSON")
        return 1.0

    def _kill_a_rank(self) -> None:
        pids = self.job.rank_pids()
        if not pids:
            raise Unmet(f"no rank of {self.job.name} is left to kill")
        os.kill(self.random.choice(pids), signal.SIGKILL)

    async def _stage_ended(self) -> float:
        await self._stage_running()
        self.job.let_end()
        await self.job.until_phase("SUCCEEDED")
        return 0.5

    # --- the blow

    async def _hit(self, node: str | None = None) -> str:
        """Hit the victim; return the node that was hit, or an empty text."""
        node = node or self.random.choice(self._nodes())
        match self.victim:
            case "rank":
                await self._kill("rank", node, lambda: next(iter(self.job.rank_pids(node)), None))
            case "shim" | "supervisor":
                await self._kill(self.victim, node, lambda: self.job.agent_pid(node, self.victim))
            case "session":
                await self._kill(
                    "session", node, lambda: next(iter(self.world.sessions(node)), None)
                )
            case "worker" | "server":
                await self._restart(self.victim)
                return ""
            case "sshd":
                await self._without_sshd(node)
            case "reboot":
                self.world.places.reboot(node)
                self.note(f"rebooted {node}")
            case _:
                self._cut(node, self.victim)
        return node

    def _nodes(self) -> list[str]:
        return self.world.names[: self.world.nodes]

    async def _kill(self, what: str, node: str, find: Callable[[], int | None]) -> None:
        async def killed() -> bool:
            pid = find()
            if pid is None:
                return False
            os.kill(pid, signal.SIGKILL)
            self.note(f"killed {what} {pid} on {node}")
            return True

        await eventually(killed, f"there is no {what} on {node}", 10.0, 0.005)

    async def _restart(self, victim: str) -> None:
        process = self.world.worker if victim == "worker" else self.world.server
        await process.end()
        away = self.moment(3.0)
        self.note(f"killed {victim}, back in {away:.2f} s")
        await asyncio.sleep(away)
        await process.start()

    async def _without_sshd(self, node: str) -> None:
        assert isinstance(self.world.places, SshPlaces)
        host = self.world.places.hosts[node]
        host.kill()
        away = self.moment(3.0)
        self.note(f"killed sshd of {node} and its connections, back in {away:.2f} s")
        await asyncio.sleep(away)
        host.start()

    def _cut(self, node: str, how: str) -> None:
        freeze = how == "cut both" and self.random.random() < 0.5
        # A second cut comes on top of the first; `cut` by itself says what is cut from now on.
        self.cuts[node] = tuple(dict.fromkeys((*self.cuts.get(node, ()), *CUTS[how])))
        self.world.places.cut(node, self.cuts[node], freeze_ranks=freeze)
        self.note(f"{how} on {node}" + (", its ranks frozen" if freeze else ""))

    def _heal(self, *nodes: str) -> None:
        for node in nodes:
            self.world.places.heal(node)
            self.cuts.pop(node, None)
        self.note(f"healed {', '.join(nodes)}")

    def cut_off_node(self, node: str) -> None:
        self._cut(node, "cut both")

    # --- leading it to its end

    async def _end(self) -> None:
        """All is well again: the newest generation trains, and then ends by itself."""
        self.note(f"before the end: {await self.job.phase()}")
        await self.job.until_phase("RUNNING")
        await self.job.until_steps()
        self.job.let_end()
        await self.job.until_phase("SUCCEEDED")

    async def _finish_disturbed(self) -> Expected:
        """Disturb the victim for a while, restore it, and lead the job to the end of its phase."""
        undo = await disturb(self, self.random.choice(self._nodes()))
        try:
            if self.phase == "QUEUED":
                await self.world.worker.start()
            await asyncio.sleep(self.moment(MAX_FROZEN_S if self.victim == "disk frozen" else 12.0))
        finally:
            await undo()
            self._heal(*self._nodes(), *self.cut_off)
        paused = frozenset(self.paused)
        if self.phase == "STOPPING":
            await self.job.until_phase("CANCELLED")
            return Expected(None, "CANCELLED", 130, paused=paused)
        if self.phase == "ended":
            return Expected((NOTHING,))
        if self.phase == "WAITING_FOR_PERSON":
            await self.job.signal("force_retry", {"reason": "chaos"})
            await self.job.until_phase("RUNNING", generation=2)
        await self._end_whatever_it_takes()
        if (self.phase, self.victim) == ("RUNNING", "two servers"):
            return Expected((NOTHING,))  # what runs is nothing to another server
        return Expected(None, paused=paused)

    async def _end_whatever_it_takes(self) -> None:
        """Have the job end once it trains; a later generation may be needed until it does."""
        self.note(f"before the end: {await self.job.phase()}")
        await self.job.until_steps(patience=2 * PATIENCE)
        self.job.let_end()
        await self.job.until_phase("SUCCEEDED", "FAILED")

    async def _finish_warm(self) -> Expected:
        """Hit what imports ahead, on one node, and then kill a rank.

        It costs what the rank costs, and nothing for itself.
        """
        node = self.random.choice(self._nodes())
        kind = self.victim.removeprefix("stop ")
        number = signal.SIGSTOP if kind != self.victim else signal.SIGKILL

        async def is_hit() -> bool:
            pids = self.job.warm_pids(node)
            if pids is None:
                return False
            pid = pids[0 if kind == "standby" else 1]
            os.kill(pid, number)
            self.note(f"{signal.Signals(number).name} to the {kind} {pid} on {node}")
            return True

        await eventually(is_hit, f"nothing imports ahead on {node}", 20.0, 0.005)
        await asyncio.sleep(self.moment(2.0))
        self._kill_a_rank()
        await self.job.until_phase("RUNNING", generation=2)
        return await self._ended_with(KILLED)

    async def _finish_queued(self) -> Expected:
        if self.victim == "worker":
            await self.world.worker.start()
            await asyncio.sleep(
                self.moment(6.0)
            )  # while it starts, or just after it has begun to work
            await self._restart("worker")
        else:
            node = await self._hit()
            await self.world.worker.start()
            if self.victim in CUTS:
                await asyncio.sleep(4.0 + self.moment(4.0))
                self._heal(node)
        await self._end()
        return Expected((NOTHING,))

    async def _finish_launching(self) -> Expected:
        node = await self._hit()
        match self.victim:
            case "rank":
                await self.job.until_phase("RUNNING", generation=2)
                allowed: tuple[Tries, ...] = (KILLED,)
            case "shim":
                await self.job.until_phase("RUNNING", generation=2)
                allowed = (FAULTY, LATE)
            case "reboot":
                allowed = (NOTHING, FAULTY, LATE)
            case "cut both":
                await self._wait_without(node)
                self._heal(node)
                allowed = (NOTHING, LOST)
            case "sshd":
                allowed = (NOTHING, LOST)
            case "cut controller" | "cut controller-in" | "cut controller-out":
                await asyncio.sleep(1.0 + self.moment(8.0))
                self._heal(node)
                # What the others had prepared is too old by then, and a launch with that is
                # refused.
                allowed = (NOTHING, LOST, LATE)
            case "cut peers":
                await asyncio.sleep(1.0 + self.moment(8.0))
                self._heal(node)
                allowed = (NOTHING,)
            case _:
                allowed = (NOTHING,)
        await self._end()
        return Expected(allowed)

    async def _wait_without(self, node: str) -> None:
        """Wait until the job trains without a node.

        Where the cut came before nodes were chosen, it was never used, or is waited for: the spares
        are for jobs that have run.
        """

        async def elsewhere() -> bool:
            state = await self.job.state()
            if state.phase == "QUEUED":
                return f"{node} does not answer" in state.reason
            return state.phase == "RUNNING" and node not in {slot.node for slot in state.slots}

        await self.job.until(elsewhere, f"{self.job.name} does not train without {node}")

    async def _finish_running(self) -> Expected:
        node = await self._hit()
        allowed: Tries = NOTHING
        if self.victim in ("rank", "shim", "reboot", "cut both"):
            await self.job.until_phase("RUNNING", generation=2)
            allowed = {"rank": KILLED, "cut both": LOST}.get(self.victim, FAULTY)
            if self.victim == "reboot" and self.world.backend == "ssh":
                # It may be away for longer than `lost_after`: until sshd is up again, and a worker
                # has logged in to it.
                return await self._ended_with(FAULTY, LOST)
        elif self.victim in CUTS:
            await asyncio.sleep(self.moment(9.0))
        else:
            await asyncio.sleep(self.moment(2.0))
        if self.victim in CUTS:
            self._heal(node)
        if self.victim in ("sshd", *CUTS):
            await self._heard_again()
        return await self._ended_with(allowed)

    async def _ended_with(self, *allowed: Tries) -> Expected:
        await self._end()
        return Expected(allowed)

    async def _heard_again(self) -> None:
        async def is_heard() -> bool:
            return not (await self.job.state()).lost

        await eventually(is_heard, f"a healed node of {self.job.name} is not heard again")

    async def _finish_node_lost(self) -> Expected:
        allowed: Tries = LOST
        match self.victim:
            case "rank":
                await self._hit()
            case "shim":
                await self._hit()
            case "reboot" | "cut both":
                await self._hit("n2")
            case "cut peers":
                await self._hit()
            case _:
                await self._hit("n1")
                allowed = NOTHING
        if allowed:
            await self.job.until_phase("RUNNING", generation=2)
        else:
            await asyncio.sleep(self.moment(6.0))
        self._heal(*self._nodes())
        await self._heard_again()
        await self._end()
        return Expected((allowed,))

    async def _finish_stopping(self) -> Expected:
        node = await self._hit_if_there()
        await self.job.until_phase("CANCELLED")
        if node:
            self._heal(node)
        return Expected((NOTHING,), phase="CANCELLED", exit_code=130)

    async def _hit_if_there(self) -> str:
        """While ranks are being stopped a victim may be gone already.

        Then there is nothing to hit.
        """
        if self.victim in ON_NODES:
            node = self.random.choice(self._nodes())
            pid = (
                next(iter(self.job.rank_pids(node)), None)
                if self.victim == "rank"
                else self.job.agent_pid(node, self.victim)
            )
            if pid is None:
                self.note(f"the {self.victim} on {node} was gone already")
                return node
            os.kill(pid, signal.SIGKILL)
            self.note(f"killed {self.victim} {pid} on {node}")
            return node
        return await self._hit()

    async def _finish_waiting_for_nodes(self) -> Expected:
        node = await self._hit("n1" if self.victim in ("session", *CUTS) else None)
        await asyncio.sleep(self.moment(4.0))
        self._heal(*{*self.cut_off, node} - {""})
        await self._end()
        # A spare that answered just before the cut may still be granted, and is lost as well.
        return Expected((LOST, LOST + LOST))

    async def _finish_waiting_for_person(self) -> Expected:
        node = await self._hit()
        await asyncio.sleep(self.moment(4.0))
        if self.victim in CUTS:
            self._heal(node)
        await self.job.signal("force_retry", {"reason": "chaos"})
        await self.job.until_phase("RUNNING", generation=2)
        await self._end()
        return Expected((NOTHING,), generation=2)

    async def _finish_ended(self) -> Expected:
        node = await self._hit()
        await asyncio.sleep(self.moment(2.0))
        if node:
            self._heal(node)
        return Expected((NOTHING,))

    # --- named points in the agent

    async def _failpoint(self) -> Expected:
        """The agent dies between reserve, act and record, on either node."""
        name, node = self.victim, self.random.choice(self._nodes())
        file = self.world.node(node) / "failpoints" / name
        file.parent.mkdir(exist_ok=True)
        first, _, _ = name.partition(".")
        relaunch = first == "prepare" and self.random.random() < 0.5
        if first in ("prepare", "start") and not relaunch:
            file.touch()
        await self._submit(chaos_policy(PATIENT))
        allowed: tuple[Tries, ...] = (NOTHING,)
        generation = None
        if first == "start":
            # The shim dies: its ranks are gone with it, or it refuses a second start or
            # preparation, or its gang has started without it.
            allowed, generation = (FAULTY, LATE, NOTHING), 2
            if self.world.backend == "ssh":
                # To log in again takes a part of `lost_after`, here of 2 s. It is launched
                # elsewhere when the node has stopped it for good.
                allowed += (LOST,)
            await self.job.until_phase("RUNNING", generation=2)
        await self.job.until_phase("RUNNING")
        await self.job.until_steps()
        if first in ("shim", "supervisor") or relaunch:
            file.touch()
            pid = next(iter(self.job.rank_pids(node if first in ("shim", "supervisor") else None)))
            os.kill(pid, signal.SIGKILL)
            self.note(f"killed rank {pid}")
            await self.job.until_phase("RUNNING", generation=2)
            # What its shim had not written down is unknown.
            allowed = (
                (FAULTY,)
                if name == "shim.reaped"
                else (KILLED, FAULTY)
                if name == "shim.journaled"
                else (KILLED,)
            )
        if first == "stop":
            file.touch()
            await self.job.signal("cancel")
            await self.job.until_phase("CANCELLED")
            self._must_be_spent(file)
            return Expected((NOTHING,), phase="CANCELLED", exit_code=130)
        self._must_be_spent(file)
        await self._end()
        return Expected(allowed, generation=generation)

    async def _point(self) -> Expected:
        """The controller dies between reserve, act and record.

        Its successor must find out what was done.
        """
        who, _, point = self.victim.partition(" at ")
        await self._submit(chaos_policy(PATIENT))
        await self.job.until_phase("RUNNING")
        await self.job.until_watched()
        if point == "stopped":
            await self.job.signal("cancel")
        else:
            self._kill_a_rank()

        async def reached() -> bool:
            match point:
                case "reserved":
                    return (await self.job.phase())[1] == 2
                case "prepared" | "stopped":
                    highest = [self.job.highest(node, point) for node in self._nodes()]
                    return any(
                        generation == (2 if point == "prepared" else 1) for generation in highest
                    )
                case _:
                    return any(line["token"].endswith("/2") for line in self.job.starts())

        await eventually(reached, f"nothing is ever {point}", pause=0.001)
        await self._restart(who)
        if point == "stopped":
            await self.job.until_phase("CANCELLED")
            return Expected((NOTHING,), phase="CANCELLED", exit_code=130)
        await self.job.until_phase("RUNNING", generation=2)
        await self._end()
        return Expected((KILLED,))

    def _must_be_spent(self, file: os.PathLike[str]) -> None:
        if os.path.exists(file):
            raise Unmet(f"no agent passed the failpoint {self.victim}")
