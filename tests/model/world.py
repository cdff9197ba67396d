"""The world of the fencing model: a network that delays, loses and repeats, and the controller.

It answers whether two tokens of the job are alive at once after each tick; what goes wrong is
chosen by the test. Each direction between the controller and a host, and each pair of hosts, is
cut by itself. The rule that says when a launch is safe is the code's (relaunch/job/fencing.py).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from relaunch.generation import LaunchedGeneration
from relaunch.job.places import AgentPlace
from tests.model.controller import Controller, peers_in_gang
from tests.model.protocol import LATE, NEVER, USUAL, Answer, Broken, Node, Shim, State, Times

NODES = 4
ELSEWHERE = NODES
"""A machine that none of the names lead to at first."""
STALE = 2.0
"""Ticks without a heartbeat after which a report of a fault calls a node silent."""


class Phase(Enum):
    LAUNCHING = auto()
    RUNNING = auto()
    STOPPING = auto()


class Limit(StrEnum):
    """When two tokens are alive in spite of the protocol. Each has a story that shows it."""

    OVERSLEPT = "a node that slept as a whole writes until its shim is scheduled for the first time"
    CLOCK_STOOD = "a machine paused with its clock that finds no peer does not know how late it is"
    ALL_STOPPED = "shim, guard and supervisor are all stopped, and the ranks are not"
    PLACE_UNKNOWN = (
        "a name leads elsewhere, and where ranks were started has been lost with a worker or a job"
    )
    DECLARED_DEAD = (
        "a person has declared a node dead that lives, and vouches for others of its gang"
    )


class End(Enum):
    """How a launch or a watch ends, as the job sees it."""

    REPORT = auto()
    """It returns: with what it knows of silent nodes, or with what failed."""
    CANCEL = auto()
    """A person's order, or another shard's report: what it knows is lost."""
    REFUSED = auto()
    """A node refused to start."""


@dataclass
class Worker:
    """One attempt of an activity: a launcher or a watcher of a generation.

    `current` is what the server thinks.
    """

    generation: int
    began: float
    current: bool = True
    frozen: bool = False


@dataclass
class Launcher(Worker):
    stamps: dict[int, float] = field(default_factory=dict)
    places: dict[int, AgentPlace] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    refused: bool = False
    acknowledged: bool = False


@dataclass
class Watcher(Worker):
    lost: frozenset[int] = frozenset()
    """Nodes that the job counted as lost when this was ordered."""
    gathers: bool = False
    """A rank has failed, and the report waits for others that may be the cause."""
    heard: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Per node the newest heartbeat: (its stamp, when it was received)."""
    acknowledged: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Message:
    kind: str
    node: int
    host: int
    generation: int
    stamp: float = NEVER
    launcher: Launcher | None = None


@dataclass
class Launch:
    """One launched generation, as it was ordered."""

    hosts: tuple[int, ...]
    """By group rank, the machines that the names led to."""
    record: LaunchedGeneration
    times: Times
    members: tuple[int, ...]
    stamps: dict[int, float] = field(default_factory=dict)
    """Of the preparation whose ranks may have been started: the server learned of it before."""
    places: dict[int, AgentPlace] = field(default_factory=dict)
    """Where that was prepared."""
    declared_dead: bool = False
    """A person has said so of one of its nodes."""
    is_unplaced: bool = False
    """Where it was prepared is not known: its worker died, or its job was terminated."""
    misjudged: set[int] = field(default_factory=set)
    """Machines for which another one has answered while the place was not known."""


class World:
    def __init__(
        self,
        rates: Iterable[float] = (1.0,) * NODES,
        *,
        sparse: bool = False,
        fences: bool = True,
        times: Times = USUAL,
        broken: Broken | None = None,
    ) -> None:
        self.now = 0.0
        self.broken = broken
        self.controller = Controller(times, sparse=sparse, is_fencing=fences, broken=broken)
        rates = [*rates, 1.0]
        self.nodes = [Node(rate, broken, machine) for machine, rate in enumerate(rates)]
        self.at = list(range(len(rates)))
        """The machine that each name leads to; the last has no name."""
        self.cut_in: set[int] = set()
        self.cut_out: set[int] = set()
        self.cut_peers: set[tuple[int, int]] = set()
        self.flight: deque[Message] = deque()
        self.held: list[Message] = []
        self.phase = Phase.STOPPING
        self.launches: dict[int, Launch] = {}
        self.rebooted: set[int] = set()
        self.waits_for_ever = False
        """No wait was long enough when that was asked last."""
        self.workers: list[Launcher | Watcher] = []
        self.others = 1000
        """The generation that a job of another server with the same names has reached."""
        self.limits = set(Limit)
        """What does not count as a violation."""

    # The nodes and their peers.

    def peers(self, g: int, host: int) -> tuple[int, ...]:
        hosts = self.launches[g].hosts
        ranks = peers_in_gang(len(hosts), self.controller.most_peers)[hosts.index(host)]
        return tuple(hosts[peer] for peer in ranks)

    def answers(self, shim: Shim, host: int) -> list[tuple[int, Answer]]:
        answered = []
        for peer in map(int, shim.peers):
            node = self.nodes[peer]
            reached = (
                node.awake
                and not node.supervisor_stopped
                and not {(host, peer), (peer, host)} & self.cut_peers
            )
            if reached and (answer := node.answer(shim.generation, self.now)):
                answered.append((peer, answer))
        return answered

    def sleep(self, h: int, *, asking: bool, clock_stands: bool = False) -> None:
        """Freeze all processes of a machine, if asked between its questions and their answers."""
        node = self.nodes[h]
        for shim in node.shims:
            if asking and node.asks(shim, self.now) and not node.supervisor_stopped:
                for peer, answer in self.answers(shim, h):
                    node.late.append((shim.generation, peer, node.clock(self.now), answer))
        node.sleep(self.now, clock_stands=clock_stands)

    def reboot(self, h: int) -> None:
        self.nodes[h].reboot(self.now)
        if self.broken is Broken.ANY_REBOOT:
            self.rebooted |= {n for n, host in enumerate(self.at) if host == h}

    # Messages.

    def send(
        self, kind: str, n: int, g: int, stamp: float = NEVER, launcher: Launcher | None = None
    ) -> None:
        self.flight.append(Message(kind, n, self.at[n], g, stamp, launcher))

    def deliver(self, message: Message, *, dies: bool = False) -> None:
        n, g, h = message.node, message.generation, message.host
        node, launch, launcher = self.nodes[h], self.launches[g], message.launcher
        if not node.awake and len(self.held) < 8:
            self.held.append(message)
        if h in self.cut_in or not node.awake:
            return
        answered = h not in self.cut_out and not dies
        match message.kind:
            case "prepare":
                stamp = node.prepare(g, launch.times, self.now, dies=dies)
                if stamp is not None and answered and self.controller.is_proof(n, node.place):
                    assert launcher is not None
                    self.misjudge(n, h, g - 1)
                    launcher.stamps[n], launcher.places[n] = stamp, node.place
            case "start":
                peers = self.peers(g, h) if h in launch.hosts else ()
                started = node.start(g, message.stamp, launch.record.fences, peers, self.now)
                if answered and launcher is not None:
                    if started:
                        launcher.started.add(n)
                    else:
                        launcher.refused = True
            case "stop":
                node.stop(g)
                if answered and g == self.newest and self.controller.is_proof(n, node.place):
                    self.prove(n, h)
            case _ if not node.supervisor_stopped:
                node.renew(g, message.stamp, self.now)

    def prove(self, n: int, h: int) -> None:
        self.misjudge(n, h, self.newest)
        self.controller.prove(n, self.now)

    def misjudge(self, n: int, h: int, g: int) -> None:
        """Note the machines for which an answer of `h` is taken as their place is not known."""
        for generation, launch in self.launches.items():
            if (
                generation <= g
                and n in launch.members
                and not self.controller.knows_place(n, generation)
            ):
                started = launch.hosts[launch.members.index(n)]
                if started != h and launch.is_unplaced:
                    launch.misjudged.add(started)

    # The controller.

    @property
    def newest(self) -> int:
        return self.controller.job.generation

    def launch(self, members: tuple[int, ...]) -> None:
        """Begin to launch a generation: what was left of older ones has been waited for."""
        self.controller.end_stop(self.now)
        self._launch(members)

    def launch_in_place(self, more: Iterable[int]) -> bool:
        """Launch over all that may be alive without a stop: each `prepare` proves one."""
        self._end_worker(End.CANCEL)
        members = tuple(sorted({*map(int, self.controller.job.maybe_alive), *more}))
        if self.controller.lost_nodes or not self.controller.may_launch_in_place(len(members)):
            self._begin_stop()
            return False
        self._launch(members)
        return True

    def _launch(self, members: tuple[int, ...]) -> None:
        record = self.controller.order_launch(members, self.now)
        hosts = tuple(self.at[n] for n in members)
        self.launches[self.newest] = Launch(hosts, record, self.controller.times, members)
        self.phase = Phase.LAUNCHING
        self.rebooted.clear()  # a node that rebooted before this launch may run it
        self.workers.append(Launcher(self.newest, self.now))

    def give_up(self, end: End = End.REPORT) -> None:
        """End the launch or the watch and stop the gang."""
        self._end_worker(end)
        self._begin_stop()

    def _end_worker(self, end: End) -> None:
        worker = self.workers[-1]
        if not worker.current:
            return
        worker.current = False
        if isinstance(worker, Watcher):
            if end is End.REPORT:
                self._report_hang(worker)
            return
        launch = self.launches[worker.generation]
        places = launch.places
        if self.broken is Broken.LAST_ATTEMPT and not worker.acknowledged:
            places = {}
        if end is End.CANCEL:
            launch.is_unplaced = worker.frozen
            self.controller.launch_cancelled(
                launch.record, {} if worker.frozen else places, self.now
            )
        elif end is End.REFUSED and worker.refused:
            self.controller.launch_refused(launch.record, places, self.now)
        else:
            unreachable = [
                n
                for n in launch.members
                if n not in (worker.started if worker.acknowledged else worker.stamps)
            ]
            self.controller.launch_failed(launch.record, unreachable, places, self.now)

    def _unheard(self, watcher: Watcher, n: int) -> float:
        began = 0.0 if self.broken is Broken.ONLY_THIS_WATCH else watcher.began
        return self.now - max(began, watcher.heard.get(n, (NEVER, NEVER))[1])

    def _report_hang(self, watcher: Watcher) -> None:
        ages = {n: self._unheard(watcher, n) for n in self.launches[watcher.generation].members}
        back = self._report_returned(watcher) if self.broken is not Broken.RENEWS_LOST else set()
        silent = {n: age for n, age in ages.items() if age > STALE and n not in watcher.lost}
        unheard = {n: ages[n] for n in watcher.lost - back}
        self.controller.hung(silent, unheard, self.now)

    def _report_returned(self, watcher: Watcher) -> set[int]:
        back = {n for n in watcher.lost if n in watcher.heard}
        for n in back:
            self.controller.returned(n, self.now)
        return back

    def _begin_stop(self) -> None:
        self.phase = Phase.STOPPING
        self.controller.begin_stop(self.now)

    def repeat_stop(self) -> None:
        """Let another worker stop: what the one before it has proven is not known to it."""
        self._begin_stop()

    def resubmit(self, *, new_fleet: bool) -> None:
        """Terminate the job, and the fleet if asked, and submit a job of the same name."""
        if self.workers:
            self.workers[-1].current = False
        cut = self.cut_in | self.cut_out
        reachable = [
            n for n in range(NODES) if self.nodes[self.at[n]].awake and self.at[n] not in cut
        ]
        self.controller.resubmit(reachable, new_fleet=new_fleet, now=self.now)
        for launch in self.launches.values():
            launch.is_unplaced = True
        self._begin_stop()

    def declare_dead(self, n: int) -> None:
        self.controller.declare_dead(n, self.now)
        for launch in self.launches.values():
            launch.declared_dead |= n in launch.members

    def may_launch(self) -> bool:
        if self.phase is not Phase.STOPPING:
            return False
        safe = self.controller.is_safe(self.now)
        self.waits_for_ever = safe is None
        return bool(safe)

    def supersede(self) -> None:
        """Let the server time the current attempt out and start another."""
        old = self.workers[-1]
        old.current, old.frozen = False, True
        if isinstance(old, Watcher):
            self.workers.append(Watcher(old.generation, self.now, lost=old.lost))
        else:
            self.workers.append(Launcher(old.generation, self.now))

    def work(self, worker: Launcher | Watcher, steps: Iterable[int] = (0, 1, 2)) -> None:
        """Take some of the steps: ask (or hear), have a heartbeat acknowledged, act on that."""
        for step in steps:
            if isinstance(worker, Launcher):
                self._launch_step(worker, step)
            else:
                self._watch_step(worker, step)

    def _launch_step(self, worker: Launcher, step: int) -> None:
        g = worker.generation
        members = self.launches[g].members
        ready = len(worker.stamps) == len(members)
        if step == 0 and not ready:
            for n in members:
                if n not in worker.stamps:
                    self.send("prepare", n, g, launcher=worker)
        elif step == 1 and ready:
            launch = self.launches[g]
            again = launch.stamps and launch.stamps != worker.stamps
            if again and self.broken is not Broken.PREPARED_AGAIN:
                worker.refused = True
                return
            if worker.current:
                launch.stamps, launch.places = dict(worker.stamps), dict(worker.places)
            worker.acknowledged |= worker.current or self.broken is Broken.START_UNACKNOWLEDGED
        elif step == 2 and worker.acknowledged:
            for n in members:
                if n not in worker.started:
                    self.send("start", n, g, worker.stamps[n], worker)
            if worker.current and len(worker.started) == len(members):
                self._launched(worker)

    def _launched(self, worker: Launcher) -> None:
        worker.current = False
        self.phase = Phase.RUNNING
        self.controller.launched(self.launches[worker.generation].places, self.now)
        self._watch(worker.generation)

    def _watch(self, g: int) -> None:
        self.workers.append(Watcher(g, self.now, lost=self.controller.lost_nodes))

    def _watch_step(self, worker: Watcher, step: int) -> None:
        g = worker.generation
        if step == 0:
            for n in self.launches[g].members:
                h = self.at[n]
                node = self.nodes[h]
                shim = node.shim(g)
                if (
                    node.awake
                    and not node.supervisor_stopped
                    and h not in self.cut_out
                    and shim
                    and shim.state is State.RUNNING
                ):
                    worker.heard[n] = (node.clock(self.now), self.now)
        elif step == 1 and (worker.current or self.broken is Broken.RENEWS_UNACKNOWLEDGED):
            renews_lost = self.broken is Broken.RENEWS_LOST
            worker.acknowledged = {
                n: stamp
                for n, (stamp, _) in worker.heard.items()
                if renews_lost or n not in worker.lost
            }
        elif step == 2:
            for n, stamp in worker.acknowledged.items():
                self.send("renew", n, g, stamp)

    def _look_at_watch(self, watcher: Watcher) -> None:
        """Let a watch report nodes that are back or silent for long; another takes over."""
        if watcher.gathers:
            return
        lost_after = self.controller.times.lost_after
        members = self.launches[watcher.generation].members
        heard = {n: max(watcher.began, watcher.heard.get(n, (0.0, NEVER))[1]) for n in members}
        silent = [n for n in members if n not in watcher.lost and self.now - heard[n] > lost_after]
        if not silent and not any(n in watcher.heard for n in watcher.lost):
            return
        watcher.current = False
        self._report_returned(watcher)
        for n in silent:
            self.controller.lose_node(n, self._unheard(watcher, n), self.now)
        self._watch(watcher.generation)

    # Time.

    def tick(self) -> None:
        self.now += 1
        for node in self.nodes:
            if node.awake and node.shims:
                node.tick(self.now)
        for _ in range(len(self.flight)):
            self.deliver(self.flight.popleft())
        for h, node in enumerate(self.nodes):
            if node.awake and not node.supervisor_stopped:
                for shim in node.shims:
                    if shim.state is State.RUNNING:
                        self._ask_peers(h, node, shim)
        worker = self.workers[-1] if self.workers else None
        if worker and worker.current and not worker.frozen:
            self.work(worker)
            if isinstance(worker, Watcher) and worker.current:
                self._look_at_watch(worker)
        if self.phase is Phase.STOPPING:
            self._stop()
        self.check()

    def _ask_peers(self, h: int, node: Node, shim: Shim) -> None:
        clock, asks = node.clock(self.now), node.asks(shim, self.now)
        answers = self.answers(shim, h)
        shim.known |= {peer for peer, _ in answers}
        for peer, answer in answers:
            if asks:
                node.hear(shim, peer, clock, answer, self.now)
            node.compare_clock(shim, peer, clock, answer, self.now)
        if not answers and self._is_refused(h, shim) and not self._is_watched(h, shim.generation):
            node.see_alone(shim, self.now)

    def _is_refused(self, h: int, shim: Shim) -> bool:
        """Return whether some peer's machine is reached, and lacks this generation, that it had."""
        for peer in sorted(shim.known):
            node = self.nodes[peer]
            if (
                node.awake
                and not {(h, peer), (peer, h)} & self.cut_peers
                and node.lacks(shim.generation)
            ):
                return True
        return False

    def _is_watched(self, h: int, g: int) -> bool:
        if h in self.cut_in | self.cut_out:
            return False
        return any(
            isinstance(one, Watcher) and one.generation == g and (one.current or one.frozen)
            for one in self.workers
        )

    def _stop(self) -> None:
        if self.broken is Broken.OWN_LEASE_ONLY:
            self.controller.safe_at(self.now)  # which leaves out those whose time is over
        for n in self.controller.waits_for:
            if n in self.rebooted and self.at[n] not in self.cut_out:
                self.rebooted.discard(n)
                self.prove(n, self.at[n])
            else:
                self.send("stop", n, self.newest)

    def alive(self) -> dict[int, list[int]]:
        """Return the machines by the generation that runs there, less what is past a limit."""
        found: dict[int, list[int]] = {}
        for h, node in enumerate(self.nodes):
            for shim in node.alive():
                limit = self._limit(h, node, shim)
                if limit is None or limit not in self.limits:
                    found.setdefault(shim.generation, []).append(h)
        return found

    def limits_met(self) -> set[Limit]:
        found = {
            self._limit(h, node, shim) for h, node in enumerate(self.nodes) for shim in node.alive()
        }
        return {limit for limit in found if limit is not None}

    def _limit(self, h: int, node: Node, shim: Shim) -> Limit | None:
        launch = self.launches.get(shim.generation)
        if launch is not None and launch.declared_dead:
            return Limit.DECLARED_DEAD
        if shim.overslept:
            return Limit.OVERSLEPT
        if launch is not None and launch.misjudged:  # they may vouch for others of the gang
            return Limit.PLACE_UNKNOWN
        if shim.late_by > LATE and self.now <= shim.alone_since + shim.times.stop_grace + 1:
            return Limit.CLOCK_STOOD
        return Limit.ALL_STOPPED if node.is_stopped else None

    def check(self) -> None:
        alive = self.alive()
        assert len(alive) <= 1, (
            f"two tokens are alive at {self.now:g}: {alive} (generation: machines)"
        )
        for h, node in enumerate(self.nodes):
            for key, count in node.forks.items():
                assert count <= 1, f"machine {h} launched generation {key[1]} twice"
