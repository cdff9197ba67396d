"""The world of the fencing model: a network that delays, loses and repeats, and the controller.

It answers whether two tokens of the job are alive at once after each tick; what goes wrong is chosen by the test.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from tests.model.protocol import (
    FENCE_AFTER,
    LEASE,
    MARGIN,
    NEVER,
    STOP_GRACE,
    VALID_FOR,
    Answer,
    Broken,
    Node,
    State,
)


class Phase(Enum):
    LAUNCHING = auto()
    RUNNING = auto()
    STOPPING = auto()


@dataclass
class Worker:
    """One attempt of an activity: a launcher or a watcher of a generation. `current` is what the server thinks."""

    generation: int
    began: float
    current: bool = True
    frozen: bool = False


@dataclass
class Launcher(Worker):
    stamps: dict[int, float] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    asked: bool = False
    acknowledged: bool = False


@dataclass
class Watcher(Worker):
    heard: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Per node the newest heartbeat: (its stamp, when it was received)."""
    acknowledged: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Message:
    kind: str
    node: int
    generation: int
    stamp: float = NEVER
    launcher: Launcher | None = None


class World:
    def __init__(self, rates: Iterable[float], *, ring: bool = False, fences: bool = True, broken: Broken | None = None) -> None:
        self.now = 0.0
        self.broken, self.ring, self.fences = broken, ring, fences
        self.nodes = [Node(rate, fences, broken) for rate in rates]
        self.cut_in: set[int] = set()
        self.cut_out: set[int] = set()
        self.cut_peers: set[tuple[int, int]] = set()
        self.flight: deque[Message] = deque()
        self.held: list[Message] = []
        self.phase = Phase.STOPPING
        self.members: list[tuple[int, ...]] = [()]
        self.unproven: dict[int, set[int]] = {}
        self.proven_at: dict[tuple[int, int], float] = {}
        self.last_heard: dict[tuple[int, int], float] = {}
        self.rebooted: set[int] = set()
        self.workers: list[Launcher | Watcher] = []

    # The nodes and their peers.

    def peers(self, g: int, node: int) -> tuple[int, ...]:
        members = self.members[g]
        if self.ring and len(members) > 1:
            return (members[(members.index(node) + 1) % len(members)],)
        return tuple(m for m in members if m != node)

    def hops(self, g: int) -> int:
        return max(1, len(self.members[g]) - 1) if self.ring else 1

    def answers(self, g: int, node: int) -> list[tuple[int, Answer]]:
        answered = []
        for peer in self.peers(g, node):
            reached = self.nodes[peer].awake and not {(node, peer), (peer, node)} & self.cut_peers
            if reached and (answer := self.nodes[peer].answer(g, self.now)):
                answered.append((peer, answer))
        return answered

    def sleep(self, n: int, *, asking: bool) -> None:
        """Freeze every process of a node, if asked between its questions to its peers and their answers."""
        node = self.nodes[n]
        for g in node.keepers:
            if asking and node.asks(g, self.now):
                for peer, answer in self.answers(g, n):
                    node.late.append((g, self.peers(g, n), peer, node.clock(self.now), answer))
        node.awake = False

    def reboot(self, n: int) -> None:
        self.nodes[n].reboot(self.now)
        if self.phase is Phase.STOPPING or self.broken is Broken.ANY_REBOOT:
            self.rebooted.add(n)

    # Messages.

    def deliver(self, message: Message, *, dies: bool = False) -> None:
        n, g, node = message.node, message.generation, self.nodes[message.node]
        if not node.awake and len(self.held) < 8:
            self.held.append(message)
        if n in self.cut_in or not node.awake:
            return
        answered = n not in self.cut_out and not dies
        match message.kind:
            case "prepare":
                stamp = node.prepare(g, self.now, dies=dies)
                if stamp is not None and answered:
                    self.prove(n, g - 1)
                    assert message.launcher is not None
                    message.launcher.stamps[n] = stamp
            case "start":
                if node.start(g, message.stamp, self.now) and answered:
                    assert message.launcher is not None
                    message.launcher.started.add(n)
            case "stop":
                node.stop(g)
                if answered:
                    self.prove(n, g)
            case _:
                node.renew(g, message.stamp, self.now)

    def prove(self, n: int, g: int) -> None:
        for generation in range(1, g + 1):
            if n in self.unproven[generation]:
                self.unproven[generation].discard(n)
                self.proven_at[generation, n] = self.now

    # The controller.

    def launch(self, members: tuple[int, ...]) -> None:
        self.members.append(members)
        g = len(self.members) - 1
        self.unproven[g] = set(members)
        self.phase = Phase.LAUNCHING
        self.rebooted.clear()  # a node that rebooted before this launch may run it
        self.workers.append(Launcher(g, self.now))

    def may_launch(self) -> bool:
        if self.phase is not Phase.STOPPING:
            return False
        old = [g for g, nodes in self.unproven.items() if nodes]
        if not old:
            return True
        if not self.fences and self.broken is not Broken.FENCES_FALSE_ELSEWHERE:
            return False
        if self.broken is not Broken.ALL_LOST and any(self.unproven[g] == set(self.members[g]) for g in old):
            return False
        t0 = max((at for (g, _), at in self.proven_at.items() if g in old), default=NEVER)
        lease = 0.0 if self.broken is Broken.NO_LEASE else LEASE
        heard = max(self.last_heard[g, n] for g in old for n in self.unproven[g])
        hops = 1 if self.broken is Broken.NO_HOPS else max(self.hops(g) for g in old)
        fence = 0.0 if self.broken is Broken.NO_FENCE_AFTER else hops * FENCE_AFTER
        grace = 0.0 if self.broken is Broken.NO_GRACE else STOP_GRACE
        return self.now >= max(t0, heard + lease) + fence + grace + MARGIN

    def give_up(self) -> None:
        """End the launch or the watch and stop the gang."""
        self.phase = Phase.STOPPING
        worker = self.workers[-1]
        worker.current = False
        for n in self.members[-1]:
            heard = self.now if self.broken is Broken.NO_VALID_FOR else self.now + VALID_FOR
            if isinstance(worker, Watcher):
                began = NEVER if self.broken is Broken.ONLY_THIS_WATCH else worker.began
                heard = max(began, worker.heard.get(n, (NEVER, NEVER))[1])
            self.last_heard[worker.generation, n] = heard

    def supersede(self) -> None:
        """Let the server time the current attempt out and start another."""
        old = self.workers[-1]
        old.current, old.frozen = False, True
        self.workers.append(type(old)(old.generation, self.now))

    def work(self, worker: Launcher | Watcher, steps: Iterable[int] = (0, 1, 2)) -> None:
        """Take some of the three steps: ask (or hear), have a heartbeat acknowledged, act on what was acknowledged."""
        for step in steps:
            if isinstance(worker, Launcher):
                self._launch_step(worker, step)
            else:
                self._watch_step(worker, step)

    def _launch_step(self, worker: Launcher, step: int) -> None:
        g, members = worker.generation, self.members[worker.generation]
        ready = len(worker.stamps) == len(members)
        if step == 0 and not ready:
            for n in members:
                if n not in worker.stamps:
                    self.flight.append(Message("prepare", n, g, launcher=worker))
        elif step == 1 and ready:
            worker.acknowledged |= worker.current or self.broken is Broken.START_UNACKNOWLEDGED
        elif step == 2 and worker.acknowledged:
            for n in members:
                if n not in worker.started:
                    self.flight.append(Message("start", n, g, worker.stamps[n], worker))
            if worker.current and len(worker.started) == len(members):
                worker.current = False
                self.phase = Phase.RUNNING
                self.workers.append(Watcher(g, self.now))

    def _watch_step(self, worker: Watcher, step: int) -> None:
        g = worker.generation
        if step == 0:
            for n in self.members[g]:
                node = self.nodes[n]
                keeper = node.keepers.get(g)
                if node.awake and n not in self.cut_out and keeper and keeper.state is State.RUNNING:
                    worker.heard[n] = (node.clock(self.now), self.now)
        elif step == 1 and (worker.current or self.broken is Broken.RENEWS_UNACKNOWLEDGED):
            worker.acknowledged = {n: stamp for n, (stamp, _) in worker.heard.items()}
        elif step == 2:
            for n, stamp in worker.acknowledged.items():
                self.flight.append(Message("renew", n, g, stamp))

    # Time.

    def tick(self) -> None:
        self.now += 1
        for node in self.nodes:
            if node.awake:
                node.tick(self.now)
        for _ in range(len(self.flight)):
            self.deliver(self.flight.popleft())
        for n, node in enumerate(self.nodes):
            if node.awake:
                for g in node.keepers:
                    if node.asks(g, self.now):
                        for peer, answer in self.answers(g, n):
                            node.hear(g, self.peers(g, n), peer, node.clock(self.now), answer, self.now)
        if self.workers and self.workers[-1].current and not self.workers[-1].frozen:
            self.work(self.workers[-1])
        if self.phase is Phase.STOPPING:
            self._stop()
        self.check()

    def _stop(self) -> None:
        g = len(self.members) - 1
        for n in sorted(set().union(*self.unproven.values())):
            if n in self.rebooted and n not in self.cut_out:
                self.prove(n, g)
            else:
                self.flight.append(Message("stop", n, g))

    def check(self) -> None:
        alive = {g: [n for n, node in enumerate(self.nodes) if g in node.alive()] for g in range(1, len(self.members))}
        alive = {g: nodes for g, nodes in alive.items() if nodes}
        assert len(alive) <= 1, f"two tokens are alive at {self.now:g}: {alive} (generation: nodes)"
        for n, node in enumerate(self.nodes):
            twice = [g for g, count in node.forks.items() if count > 1]
            assert not twice, f"node {n} launched generation {twice[0]} twice"
