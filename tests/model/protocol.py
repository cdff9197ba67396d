"""A model of prepare, start, stop, the lease, the peers and the launch rule of docs/reference/agent-protocol.md.

It answers what the nodes would do under any order of messages, cuts, crashes and sleeps; it refuses to know anything
of sockets and processes. One tick is the longest that a scheduled process takes to act. `Broken` leaves one rule out.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

LEASE, FENCE_AFTER, STOP_GRACE = (
    14.0,
    8.0,
    7.0,
)  # each above MARGIN and the three ticks of a launch, so that leaving one out shows
VALID_FOR = 20.0  # above fence_after, which would hide it
PEER_TIMEOUT = 1.0
MARGIN = 2.0  # a tick until the keeper acts, and 1/128 of drift over at most 65
NEVER = float("-inf")


class Broken(StrEnum):
    """A protocol with one rule missing; each must be caught."""

    ANY_PEER = "one peer that answers is enough to go on"
    ALL_LOST = "launched elsewhere though no node of the old gang is proven gone"
    ANY_REBOOT = "a reboot that may have come before the start counts as proof"
    NO_FENCE_AFTER = "the launch does not wait for fence_after"
    NO_LEASE = "the launch does not wait for the lease of the lost node"
    NO_GRACE = "the launch does not wait for stop_grace"
    NO_HOPS = "the launch waits for one fence_after however long the chain of peers"
    NO_VALID_FOR = "an ambiguous start is taken to have happened before the launch ended"
    ONLY_THIS_WATCH = "the wait forgets what older watch attempts may have renewed"
    FENCES_FALSE_ELSEWHERE = "a job that does not fence is launched elsewhere by waiting"
    RENEWS_FROM_RECEIPT = "a renewal counts from its receipt, not from its stamp"
    RENEWS_UNACKNOWLEDGED = "a watcher renews without an acknowledged heartbeat"
    ANSWERS_FROM_RECEIPT = "a peer's answer counts from its receipt"
    VOUCHES_WHEN_FENCED = "a node that has fenced still says alive"
    GRACE_FROM_WAKING = "a keeper that overslept gives its ranks a grace"
    START_AFTER_EXPIRY = "a prepared keeper never expires"
    START_OF_ANY_PREPARE = "start is not bound to the prepare that it follows"
    START_UNACKNOWLEDGED = "a launcher sends start without an acknowledged heartbeat"
    PREPARE_KEEPS_OLD = "prepare does not stop older generations"
    PREPARE_OF_ANY_AGE = "prepare takes a token below the highest"
    PREPARED_TWICE = "a generation that was started is prepared again"


class State(Enum):
    PREPARED = auto()
    RUNNING = auto()
    STOPPING = auto()
    GONE = auto()


ALIVE = (State.RUNNING, State.STOPPING)


@dataclass
class Keeper:
    """One generation on one node; all times are the node's own clock."""

    generation: int
    stamp: float
    state: State = State.PREPARED
    alive_until: float = NEVER
    leased_until: float = NEVER
    dead_by: float = NEVER
    answered: dict[int, float] = field(default_factory=dict)
    """Per peer, when the newest question that it answered `alive` was sent."""
    overslept: bool = False
    fenced: bool = False


@dataclass(frozen=True)
class Answer:
    superseded: bool
    alive: bool
    leased: bool


@dataclass
class Node:
    rate: float
    fences: bool
    broken: Broken | None
    booted: float = 0.0
    awake: bool = True
    prepared: int = 0
    stopped: int = 0
    started: set[int] = field(default_factory=set)
    keepers: dict[int, Keeper] = field(default_factory=dict)
    forks: Counter[int] = field(default_factory=Counter)
    late: list[tuple[int, tuple[int, ...], int, float, Answer]] = field(default_factory=list)
    """Answers that arrived while it slept: (generation, peers, peer, question sent, answer)."""

    def clock(self, now: float) -> float:
        return self.rate * (now - self.booted)

    def prepare(self, g: int, now: float, *, dies: bool = False) -> float | None:
        ordered = self.broken is not Broken.PREPARE_OF_ANY_AGE
        if ordered and (g <= self.stopped or g < self.prepared):
            return None
        keeper = self.keepers.get(g)
        if keeper and keeper.state is not State.GONE:
            return keeper.stamp
        if g in self.started and self.broken is not Broken.PREPARED_TWICE:
            return None
        self.prepared = max(self.prepared, g)
        if dies:
            return None
        if self.broken is not Broken.PREPARE_KEEPS_OLD:
            self._kill(g - 1)
        self.keepers[g] = Keeper(g, self.clock(now))
        return self.keepers[g].stamp

    def start(self, g: int, stamp: float, now: float) -> bool:
        keeper = self.keepers.get(g)
        if not keeper or keeper.state in ALIVE:
            return keeper is not None
        if keeper.stamp != stamp and self.broken is not Broken.START_OF_ANY_PREPARE:
            return False
        if keeper.state is State.GONE or (self.clock(now) >= keeper.stamp + VALID_FOR and not self._never_expires()):
            return False
        self.started.add(g)
        self.forks[g] += 1
        keeper.state = State.RUNNING
        keeper.alive_until = self.clock(now) + LEASE
        return True

    def stop(self, g: int) -> None:
        self.stopped = max(self.stopped, g)
        self._kill(g)

    def renew(self, g: int, stamp: float, now: float) -> None:
        keeper = self.keepers.get(g)
        if self.broken is Broken.RENEWS_FROM_RECEIPT:
            stamp = self.clock(now)
        if keeper and keeper.state is State.RUNNING and stamp <= self.clock(now):
            keeper.leased_until = max(keeper.leased_until, stamp + LEASE)
            keeper.alive_until = max(keeper.alive_until, keeper.leased_until + FENCE_AFTER)

    def answer(self, g: int, now: float) -> Answer | None:
        keeper = self.keepers.get(g)
        if not keeper or (keeper.state is State.GONE and not keeper.fenced):
            return None
        clock = self.clock(now)
        alive = keeper.state is State.RUNNING and clock < keeper.alive_until
        if self.broken is Broken.VOUCHES_WHEN_FENCED:
            alive = True
        superseded = self.prepared > g or self.stopped >= g
        return Answer(superseded, alive, alive and clock < keeper.leased_until)

    def asks(self, g: int, now: float) -> bool:
        keeper = self.keepers[g]
        return keeper.state is State.RUNNING and NEVER < keeper.leased_until <= self.clock(now)

    def hear(self, g: int, peers: tuple[int, ...], peer: int, sent: float, answer: Answer, now: float) -> None:
        keeper, clock = self.keepers.get(g), self.clock(now)
        if not keeper or keeper.state is not State.RUNNING:
            return
        if self.broken is Broken.ANSWERS_FROM_RECEIPT:
            sent = clock
        elif clock > sent + PEER_TIMEOUT:
            return
        if answer.superseded:
            keeper.state, keeper.dead_by, keeper.fenced = State.STOPPING, clock + STOP_GRACE, True
            return
        if answer.alive:
            keeper.answered[peer] = sent
        if answer.leased or self.broken is Broken.ANY_PEER:
            keeper.alive_until = max(keeper.alive_until, sent + FENCE_AFTER)
        if all(p in keeper.answered for p in peers):
            keeper.alive_until = max(keeper.alive_until, min(keeper.answered.values()) + FENCE_AFTER)

    def tick(self, now: float) -> None:
        """Let every keeper act on its clock."""
        clock = self.clock(now)
        for keeper in self.keepers.values():
            keeper.overslept = False
            if keeper.state is State.PREPARED and clock >= keeper.stamp + VALID_FOR and not self._never_expires():
                keeper.state = State.GONE
            held = not self.fences and keeper.leased_until > NEVER
            if keeper.state is State.RUNNING and clock >= keeper.alive_until and not held:
                from_ = clock if self.broken is Broken.GRACE_FROM_WAKING else keeper.alive_until
                keeper.state, keeper.dead_by, keeper.fenced = State.STOPPING, from_ + STOP_GRACE, True
            if keeper.state is State.STOPPING and clock >= keeper.dead_by:
                keeper.state = State.GONE

    def wake(self, now: float) -> None:
        """Go on after a sleep of every process; the supervisor may be scheduled before the keeper."""
        self.awake = True
        for g, peers, peer, sent, answer in self.late:
            self.hear(g, peers, peer, sent, answer, now)
        self.late.clear()
        for keeper in self.keepers.values():
            dead_by = keeper.dead_by if keeper.state is State.STOPPING else keeper.alive_until + STOP_GRACE
            keeper.overslept = keeper.state in ALIVE and self.clock(now) >= dead_by

    def die(self) -> None:
        """Lose every keeper, and by PDEATHSIG every rank."""
        for keeper in self.keepers.values():
            keeper.state, keeper.fenced = State.GONE, False

    def reboot(self, now: float) -> None:
        self.keepers.clear()
        self.late.clear()
        self.booted, self.awake = now, True

    def alive(self) -> list[int]:
        """Return generations with ranks that run; a node that sleeps or just overslept is the residual."""
        return [k.generation for k in self.keepers.values() if k.state in ALIVE and self.awake and not k.overslept]

    def _kill(self, g: int) -> None:
        for keeper in self.keepers.values():
            if keeper.generation <= g:
                keeper.state, keeper.fenced = State.GONE, False

    def _never_expires(self) -> bool:
        return self.broken is Broken.START_AFTER_EXPIRY
