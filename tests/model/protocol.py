"""A model of a node: prepare, start, stop, the lease, the peers and what proves ranks gone.

It answers what the nodes would do under any order of messages, cuts, crashes, sleeps and stopped
clocks. What decides is the code's own: the lease and the peers' words
(relaunch/agent/ranks/lease.py) and what an answer proves. One tick is the longest that a scheduled
process takes to act. The rules are those of docs/reference/agent-protocol.md; `Broken` leaves one
of them out.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, StrEnum, auto

from relaunch.agent.ranks.lease import Lease, PeerClocks, Standstills, Vouchers
from relaunch.job.fencing import FENCE_MARGIN
from relaunch.job.places import AgentPlace

MARGIN = 2.0  # a tick until the shim acts, and 1/128 of drift over at most 65
TICK = FENCE_MARGIN / MARGIN
PEER_TIMEOUT = 1.0
LATE = 0.5
"""For how long a clock has to have stood still, unnoticed, for that to count as a limit."""
NEVER = float("-inf")


@dataclass(frozen=True)
class Times:
    """Of one policy, in ticks."""

    lease: float = 14.0
    fence_after: float = 8.0
    stop_grace: float = 7.0
    lost_after: float = 6.0

    @property
    def valid_for(self) -> float:
        """As `Timeouts` has it."""
        return self.lease + 2 * self.stop_grace


USUAL = Times()
"""Each above MARGIN and the three ticks of a launch, so that leaving one out shows.

`valid_for` is above `fence_after`, which would hide it, and a node is lost before its lease has run
out."""
PATIENT = Times(lost_after=20.0)
"""A node is lost when its lease has run out already."""
SHORT = Times(lease=4.0, fence_after=3.0, stop_grace=2.0, lost_after=3.0)
POLICIES = (USUAL, PATIENT, SHORT)


def seconds(ticks: float) -> float:
    return ticks * TICK.total_seconds()


def duration(ticks: float) -> timedelta:
    return ticks * TICK


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
    GRACE_FROM_WAKING = "a shim that overslept gives its ranks a grace"
    START_AFTER_EXPIRY = "a prepared shim never expires"
    START_OF_ANY_PREPARE = "start is not bound to the prepare that it follows"
    START_UNACKNOWLEDGED = "a launcher sends start without an acknowledged heartbeat"
    PREPARE_KEEPS_OLD = "prepare does not stop older generations"
    PREPARE_OF_ANY_AGE = "prepare takes a token below the highest"
    PREPARED_TWICE = "a generation that was started is prepared again"
    FIRST_STOP = "the fence wait starts at the first proven stop, not at the last"
    OWN_LEASE_ONLY = "a lost node's wait leaves out the leases of the others that are not stopped"
    ANY_PLACE = "any machine that answers to a node's name proves its ranks gone"
    RENEWS_LOST = "a watch renews the lease of a node that its job counts as lost"
    PREPARED_AGAIN = "a later attempt starts ranks on nodes that had to be prepared again"
    LAST_ATTEMPT = "whether ranks were started is what the last attempt of a launch says"
    REFUSED_UNKNOWN = "a launch that one node refused has started nothing"
    POLICY_OF_NOW = "ranks are judged by the policy of now, not by that of their launch"
    FENCES_OF_NOW = "whether ranks fence is judged by the policy of now"
    TIMES_OF_OTHERS = "a resubmission judges older ranks by its own times"
    NEW_FLEET = "a fleet without memory knows no ranks on a node that does not answer"
    ONE_SHIM = "only the shim knows when the ranks have to be dead"
    WRITES_FIRST = "a fence is written to the disk before ranks are killed"
    SWEPT_STATE = "ranks whose files were removed are neither found nor counted"
    WALL_CLOCK = "the wait is measured by a clock that people may set"
    STOPPED_CLOCK = "a clock that stood still is never compared with a peer's"
    GOES_ON_ALONE = "ranks go on without a watcher when no peer knows their generation any more"
    OLD_STAMPS = "a stamp from before a clock stood still counts as it is"
    NO_SERVER = "a token does not name the server that it comes from"


class State(Enum):
    PREPARED = auto()
    RUNNING = auto()
    STOPPING = auto()
    GONE = auto()


ALIVE = (State.RUNNING, State.STOPPING)


@dataclass
class Shim:
    """One generation on one node; all times are the node's own clock."""

    server: int
    generation: int
    stamp: float
    times: Times
    state: State = State.PREPARED
    lease: Lease | None = None
    peers: tuple[str, ...] = ()
    vouchers: Vouchers | None = None
    dead_by: float = NEVER
    overslept: bool = False
    fenced: bool = False
    hidden: bool = False
    """Its files were removed, and it cannot be found by them."""
    clocks: PeerClocks = field(default_factory=PeerClocks)
    late_by: float = 0.0
    """For how long the clock has stood still since it was prepared, and that is not found out."""
    standstills: Standstills = field(default_factory=Standstills)
    known: set[int] = field(default_factory=set)
    """Peers that have answered: only their refusal counts."""
    alone_since: float = -NEVER
    """Since when no peer knows this generation any more and no watcher is connected."""

    @property
    def leased_until(self) -> float:
        return self.lease.leased_until if self.lease is not None else NEVER

    @property
    def ends(self) -> float:
        """When the handle falls; infinite where it cannot."""
        assert self.lease is not None
        return self.lease.ends if self.lease.ends is not None else -NEVER


@dataclass(frozen=True)
class Answer:
    superseded: bool
    alive: bool
    leased: bool
    clock: float


@dataclass
class Book:
    """What a node knows of the job of one server."""

    prepared: int = 0
    stopped: int = 0
    started: set[int] = field(default_factory=set)


@dataclass
class Node:
    rate: float
    broken: Broken | None
    machine: int = 0
    booted: float = 0.0
    stood: float = 0.0
    """For how long its clock has stood still since the boot."""
    slept_at: float = 0.0
    clock_stands: bool = False
    boot: int = 1
    state: int = 1
    awake: bool = True
    shim_stopped: bool = False
    supervisor_stopped: bool = False
    guard_stopped: bool = False
    disk_frozen: bool = False
    books: dict[int, Book] = field(default_factory=dict)
    shims: list[Shim] = field(default_factory=list)
    forks: Counter[tuple[int, int]] = field(default_factory=Counter)
    late: list[tuple[int, int, float, Answer]] = field(default_factory=list)
    """Answers that arrived while it slept: (generation, peer, question sent, answer)."""

    def clock(self, now: float) -> float:
        stood = self.stood + (now - self.slept_at if self.clock_stands else 0.0)
        return self.rate * (now - self.booted - stood)

    @property
    def place(self) -> AgentPlace:
        return AgentPlace(f"machine{self.machine}", f"boot{self.boot}", 0, f"state{self.state}")

    @property
    def is_stopped(self) -> bool:
        """Whether all that could kill ranks is stopped, and the ranks are not."""
        return self.shim_stopped and self.guard_stopped and self.supervisor_stopped

    def book(self, server: int) -> Book:
        return self.books.setdefault(self._server(server), Book())

    def shim(self, g: int, server: int = 0) -> Shim | None:
        """Return the newest shim of a generation that orders can reach."""
        found = [k for k in self._of(server) if k.generation == g and not k.hidden]
        return found[-1] if found else None

    # Orders of a controller.

    def prepare(
        self, g: int, times: Times, now: float, *, server: int = 0, dies: bool = False
    ) -> float | None:
        book = self.book(server)
        if self.broken is not Broken.NO_SERVER and any(
            k.server != server and k.state is not State.GONE for k in self.shims
        ):
            return None  # other_fleet
        ordered = self.broken is not Broken.PREPARE_OF_ANY_AGE
        if ordered and (g <= book.stopped or g < self._highest(server)):
            return None
        shim = self.shim(g, server)
        if shim and shim.state is not State.GONE:
            return shim.stamp
        if g in book.started and self.broken is not Broken.PREPARED_TWICE:
            return None
        book.prepared = max(book.prepared, g)
        if dies:
            return None
        if self.broken is not Broken.PREPARE_KEEPS_OLD:
            self._kill(g - 1, server)
        if not any(k.state is not State.GONE for k in self.shims):
            self.shims = [k for k in self.shims if k.fenced]
        shim = Shim(server, g, self.clock(now), times)
        self.shims.append(shim)
        return shim.stamp

    def start(
        self,
        g: int,
        stamp: float,
        fences: bool,
        peers: Iterable[int],
        now: float,
        *,
        server: int = 0,
    ) -> bool:
        shim = self.shim(g, server)
        if not shim or shim.state in ALIVE:
            return shim is not None
        if shim.stamp != stamp and self.broken is not Broken.START_OF_ANY_PREPARE:
            return False
        if shim.state is State.GONE or (
            self.clock(now) >= shim.stamp + shim.times.valid_for and not self._never_expires()
        ):
            return False
        self.book(server).started.add(g)
        self.forks[self._server(server), g] += 1
        shim.state = State.RUNNING
        shim.lease = Lease(self.clock(now), shim.times.lease, shim.times.fence_after, fences)
        shim.peers = tuple(str(peer) for peer in peers)
        shim.vouchers = Vouchers(shim.peers)
        return True

    def stop(self, g: int, *, server: int = 0) -> None:
        book = self.book(server)
        book.stopped = max(book.stopped, g)
        self._kill(g, server)

    def renew(self, g: int, stamp: float, now: float) -> None:
        shim = self.shim(g)
        if not shim or shim.state is not State.RUNNING:
            return
        assert shim.lease is not None
        if self.broken is Broken.RENEWS_FROM_RECEIPT:
            stamp = self.clock(now)
        shim.lease.renew(self._since(shim, stamp), self.clock(now))

    # Peers.

    def answer(self, g: int, now: float) -> Answer | None:
        found = [k for k in self.shims if k.generation == g and k.server == 0]
        shim = found[-1] if found else None
        lies = self.broken is Broken.VOUCHES_WHEN_FENCED and shim is not None and shim.fenced
        if not shim or shim.lease is None or (shim.state is State.GONE and not lies):
            return None
        clock, lease, book = self.clock(now), shim.lease, self.book(0)
        alive = shim.state is State.RUNNING and clock < shim.ends
        alive = alive or lies
        superseded = book.prepared > g or book.stopped >= g
        return Answer(
            superseded, alive, alive and lease.renewed and clock < lease.leased_until, clock
        )

    def lacks(self, g: int) -> bool:
        """Return whether nothing of a generation lives here: a peer that asks is refused."""
        return not any(
            k.generation == g and k.server == 0 and k.state is not State.GONE for k in self.shims
        )

    def asks(self, shim: Shim, now: float) -> bool:
        """Whether it asks its peers if it may go on."""
        lease = shim.lease
        return (
            shim.state is State.RUNNING
            and lease is not None
            and lease.renewed
            and lease.leased_until <= self.clock(now)
        )

    def hear(self, shim: Shim, peer: int, sent: float, answer: Answer, now: float) -> None:
        clock = self.clock(now)
        if shim.state is not State.RUNNING:
            return
        if self.broken is Broken.ANSWERS_FROM_RECEIPT:
            sent = clock
        elif clock > sent + PEER_TIMEOUT:
            return
        assert shim.lease is not None
        assert shim.vouchers is not None
        if answer.superseded:
            self._fence(shim, clock)
            return
        any_peer = self.broken is Broken.ANY_PEER and not answer.superseded
        vouched = shim.vouchers.record_answer(
            str(peer), self._since(shim, sent), answer.alive, answer.leased or any_peer
        )
        if any_peer:
            vouched = sent
        if vouched is not None:
            shim.lease.extend(vouched)

    def compare_clock(
        self, shim: Shim, peer: int, asked: float, answer: Answer, now: float
    ) -> None:
        """Compare clocks with a peer, whose clock was read while the question was open."""
        at = (seconds(asked), seconds(self.clock(now)), seconds(answer.clock))
        stood = shim.clocks.compare(str(peer), *at) / seconds(1)
        if stood > 0.0:
            shim.late_by = max(0.0, shim.late_by - stood)
            if self.broken is not Broken.STOPPED_CLOCK:
                self._stood_still(shim, stood, now)

    def _stood_still(self, shim: Shim, stood: float, now: float) -> None:
        """Count for passed what the clock has left out."""
        assert shim.lease is not None
        assert shim.vouchers is not None
        shim.standstills.add(self.clock(now), stood)
        shim.vouchers.forget()
        shim.lease.shorten(stood)

    def _since(self, shim: Shim, stamp: float) -> float:
        """Return a time of this clock as what it is worth after the clock stood still."""
        if self.broken is Broken.OLD_STAMPS:
            return stamp
        return shim.standstills.correct(stamp)

    def see_alone(self, shim: Shim, now: float) -> None:
        """Fence a generation that no peer knows any more and that has no watcher."""
        if shim.state is not State.RUNNING or shim.lease is None or not shim.lease.fences:
            return
        shim.alone_since = min(shim.alone_since, now)
        if self.broken is not Broken.GOES_ON_ALONE:
            self._fence(shim, self.clock(now))

    # Time.

    def tick(self, now: float) -> None:
        """Let every shim act on its clock, and the process beside it."""
        clock = self.clock(now)
        is_stuck = self.disk_frozen and self.broken is Broken.WRITES_FIRST
        for shim in self.shims:
            if shim.state is State.GONE:
                continue
            shim.overslept = False
            if not self.shim_stopped and not is_stuck:
                self._act(shim, clock)
            elif not self.is_stopped and not is_stuck and self.broken is not Broken.ONE_SHIM:
                self._guard(shim, clock)

    def _guard(self, shim: Shim, clock: float) -> None:
        """Kill for a shim that does not: guard and supervisor know the deadline, too."""
        if shim.state in ALIVE:
            begun = shim.dead_by if shim.state is State.STOPPING else -NEVER
            if clock >= min(begun, shim.ends + shim.times.stop_grace):
                shim.state = State.GONE

    def _act(self, shim: Shim, clock: float) -> None:
        if (
            shim.state is State.PREPARED
            and clock >= shim.stamp + shim.times.valid_for
            and not self._never_expires()
        ):
            shim.state = State.GONE
        if shim.state is State.RUNNING:
            assert shim.lease is not None
            if shim.lease.find_fence_reason(clock) is not None:
                self._fence(shim, clock)
        if shim.state is State.STOPPING and clock >= shim.dead_by:
            shim.state = State.GONE

    def _fence(self, shim: Shim, clock: float) -> None:
        grace = shim.times.stop_grace
        shim.state, shim.fenced = State.STOPPING, True
        shim.dead_by = (
            clock + grace
            if self.broken is Broken.GRACE_FROM_WAKING
            else min(clock, shim.ends) + grace
        )

    # What goes wrong.

    def sleep(self, now: float, *, clock_stands: bool = False) -> None:
        self.awake, self.slept_at, self.clock_stands = False, now, clock_stands

    def wake(self, now: float) -> None:
        """Go on after a sleep of every process; the supervisor may be scheduled before the shim."""
        self.awake = True
        if self.clock_stands:
            self.stood += now - self.slept_at
            for shim in self.shims:
                shim.late_by += now - self.slept_at
                shim.alone_since = -NEVER
            self.clock_stands = False
        for g, peer, sent, answer in self.late:
            if (shim := self.shim(g)) is not None:
                self.hear(shim, peer, sent, answer, now)
        self.late.clear()
        self._oversleep(now)

    def go_on(self, now: float) -> None:
        """Have the processes that were stopped go on."""
        if self.is_stopped:
            self._oversleep(now)
        self.shim_stopped = self.supervisor_stopped = self.guard_stopped = False

    def _oversleep(self, now: float) -> None:
        for shim in self.shims:
            if shim.state in ALIVE:
                grace = shim.times.stop_grace
                dead_by = shim.dead_by if shim.state is State.STOPPING else shim.ends + grace
                shim.overslept = self.clock(now) >= dead_by

    def die(self) -> None:
        """Lose every shim, and by PDEATHSIG every rank."""
        for shim in self.shims:
            shim.state, shim.fenced = State.GONE, False

    def reboot(self, now: float) -> None:
        self.shims.clear()
        self.late.clear()
        self.booted, self.awake, self.boot, self.stood = now, True, self.boot + 1, 0.0
        self.shim_stopped = self.supervisor_stopped = self.guard_stopped = self.disk_frozen = (
            self.clock_stands
        ) = False

    def sweep(self, *, whole: bool) -> None:
        """Remove the files of every job, or the whole state folder, under the ranks."""
        self.books.clear()
        self.state += whole
        for shim in self.shims:
            shim.hidden = self.broken is Broken.SWEPT_STATE

    def alive(self, server: int = 0) -> list[Shim]:
        """Return the generations with ranks that run."""
        return [k for k in self._of(server) if k.state in ALIVE and self.awake]

    def _of(self, server: int) -> list[Shim]:
        if not self.shims:
            return self.shims
        return [k for k in self.shims if self._server(k.server) == self._server(server)]

    def _server(self, server: int) -> int:
        return 0 if self.broken is Broken.NO_SERVER else server

    def _highest(self, server: int) -> int:
        """Return the highest generation prepared, by the files or by a shim that lives."""
        living = [
            k.generation for k in self._of(server) if not k.hidden and k.state is not State.GONE
        ]
        return max(self.book(server).prepared, *living, 0)

    def _kill(self, g: int, server: int) -> None:
        for shim in self._of(server):
            if shim.generation <= g and not shim.hidden:
                shim.state, shim.fenced = State.GONE, False

    def _never_expires(self) -> bool:
        return self.broken is Broken.START_AFTER_EXPIRY
