"""What the job of the model knows, in the code's own records.

Events go through relaunch/job/apply.py and answers through relaunch/job/places.py. When a launch is
safe is said by relaunch/job/fencing.py, called as activities/stop.py does. `Broken` changes what
they are given, or what becomes of their answer.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache

import relaunch.job.fencing
from relaunch.activities.stop import StopRanksInput, list_launches
from relaunch.generation import LaunchedGeneration
from relaunch.job.apply import apply_event
from relaunch.job.claim import build_current_claim, build_empty_claim, is_known_by
from relaunch.job.events import (
    Event,
    Launched,
    LaunchFailed,
    LaunchOrdered,
    LaunchRefused,
    NodeDeclaredDead,
    NodeRefusal,
    NodeReturned,
    NodeUnreachable,
    RanksFound,
    RanksHung,
    RanksStopped,
)
from relaunch.job.fencing import (
    fences,
    living_generations,
    peers_of,
    plan_generation,
    safe_launch_at,
    will_fence,
)
from relaunch.job.places import AgentPlace, StartedPlaces, find_doubt, limit_places, record_places
from relaunch.job.state import JobState, Phase, Slot
from relaunch.job.step import diagnose_event
from relaunch.pool.messages import Place as FleetPlace
from relaunch.pool.state import ClaimRecord
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, preset
from tests.model.protocol import TICK, Broken, Times, duration, seconds

EPOCH = datetime(2026, 11, 21, tzinfo=UTC)
SPEC = JobSpec.model_validate(
    {"name": "job", "command": ["train"], "nodes": 4, "gang": "independent"}
)
SPARSE = 2
"""Peers that a node asks where a gang of four is to be too large for all to ask all."""


@cache
def policy_of(times: Times, is_fencing: bool) -> Policy:
    usual = preset("default")
    given = {
        name: duration(getattr(times, name))
        for name in ("lease", "fence_after", "stop_grace", "lost_after")
    }
    return usual.model_copy(
        update={"timeouts": usual.timeouts.model_copy(update=given), "strict_lease": is_fencing}
    )


@contextmanager
def asking(most_peers: int | None) -> Iterator[None]:
    """Have each node ask so many peers, where a number is given."""
    usual = relaunch.job.fencing.MOST_PEERS
    relaunch.job.fencing.MOST_PEERS = most_peers or usual
    try:
        yield
    finally:
        relaunch.job.fencing.MOST_PEERS = usual


@cache
def peers_in_gang(nodes: int, most_peers: int | None) -> tuple[tuple[int, ...], ...]:
    with asking(most_peers):
        return tuple(peers_of(rank, nodes) for rank in range(nodes))


def names(nodes: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(str, nodes))


class Controller:
    def __init__(
        self, times: Times, *, sparse: bool, is_fencing: bool, broken: Broken | None
    ) -> None:
        self.broken = broken
        self.most_peers = SPARSE if sparse else None
        self.times, self.is_fencing = times, is_fencing
        self.job = self._submitted(1)
        self.wall = 0.0
        """By how much people have set the wall clock ahead, in ticks."""
        self.heard_at: dict[str, float] = {}
        """When lost nodes were heard last, by the wall clock."""
        self.claimed = ClaimRecord(build_empty_claim(self.job, 0))
        """What the fleet knows of the job."""
        self.places: tuple[StartedPlaces, ...] = ()
        self.since, self.wall_then = 0.0, 0.0
        """When the present attempt to stop began, and how far ahead the wall clock was."""
        self.stopped_at: dict[str, float] = {}
        """Nodes that it has proven stopped."""

    def _submitted(self, submission: int) -> JobState:
        policy = policy_of(self.times, self.is_fencing)
        return JobState(
            "model", SPEC.name, submission, SPEC, policy, "h", EPOCH, phase=Phase.RUNNING
        )

    def _take(self, event: Event, now: float) -> None:
        at = EPOCH + TICK * (now + self.wall)
        job = apply_event(self.job, event, diagnose_event(self.job, event), at)
        self.job = replace(job, incident=None, incidents=(), notices=(), deferred_fault=None)
        if self.places:
            self.places = limit_places(self.places, self.job.maybe_alive)

    # What is ordered.

    def set_policy(self, times: Times, is_fencing: bool) -> None:
        self.times, self.is_fencing = times, is_fencing
        self.job = replace(self.job, policy=policy_of(times, is_fencing))

    def order_launch(self, members: tuple[int, ...], now: float) -> LaunchedGeneration:
        nodes = names(members)
        slots = tuple(Slot(node, node) for node in nodes)
        g = self.job.generation + 1
        self.job = replace(self.job, generation=g, slots=slots)
        launch = plan_generation(self.job, g, nodes)
        self._claim(launch)
        self._take(LaunchOrdered(g, launch), now)
        return launch

    def _claim(self, launch: LaunchedGeneration) -> None:
        """Tell the fleet the nodes and the times of a launch, where it does not know them yet."""
        granted = {place.node for place in self.claimed.granted or ()}
        if granted != set(launch.nodes) or not is_known_by(self.claimed.claim.launched, launch):
            places = tuple(FleetPlace(node, node) for node in launch.nodes)
            self.claimed = ClaimRecord(
                build_current_claim(self.job, 0, launch.nodes), granted=places
            )

    def may_launch_in_place(self, nodes: int) -> bool:
        """Whether ranks that do not fence would be taken for part of a gang that does."""
        return fences(self.job) or not will_fence(self.job, nodes)

    # What is reported.

    def launched(self, places: Mapping[int, AgentPlace], now: float) -> None:
        at = EPOCH + TICK * now
        self._take(Launched(self.job.generation, at, at), now)
        self._record_places((), places)

    def launch_failed(
        self,
        launch: LaunchedGeneration,
        unreachable: Iterable[int],
        places: Mapping[int, AgentPlace],
        now: float,
    ) -> None:
        started = bool(places)
        within = (
            launch.valid_for if started and self.broken is not Broken.NO_VALID_FOR else timedelta(0)
        )
        self._take(
            LaunchFailed(launch.generation, names(unreachable), started, within, "no answer"), now
        )
        self._record_places(self.places, places)

    def launch_refused(
        self, launch: LaunchedGeneration, places: Mapping[int, AgentPlace], now: float
    ) -> None:
        started = bool(places) and self.broken is not Broken.REFUSED_UNKNOWN
        refusal = NodeRefusal(launch.nodes[0], "cannot_start", "no")
        self._take(LaunchRefused(launch.generation, (refusal,), started=started), now)
        self._record_places(self.places, places)

    def launch_cancelled(
        self, launch: LaunchedGeneration, places: Mapping[int, AgentPlace], now: float
    ) -> None:
        self._take(RanksFound(launch.nodes), now)
        self._record_places(self.places, places)

    def _record_places(
        self, older: tuple[StartedPlaces, ...], places: Mapping[int, AgentPlace]
    ) -> None:
        if places:
            by_node = {str(n): place.text for n, place in places.items()}
            started = StartedPlaces(self.job.submission, self.job.generation, by_node)
            self.places = record_places(older, started, self.job.maybe_alive)

    def lose_node(self, n: int, unheard: float, now: float) -> None:
        self.heard_at[str(n)] = now + self.wall - unheard
        self._take(
            NodeUnreachable(self.job.generation, str(n), duration(unheard), "no answer"), now
        )

    def returned(self, n: int, now: float) -> None:
        self._take(NodeReturned(self.job.generation, str(n)), now)

    def hung(self, silent: Mapping[int, float], unheard: Mapping[int, float], now: float) -> None:
        """Take a report of a hang, with silent nodes and those that were lost before."""
        for n, age in silent.items():
            self.heard_at[str(n)] = now + self.wall - age
        ages, lost = (
            tuple((str(n), duration(age)) for n, age in one.items()) for one in (silent, unheard)
        )
        self._take(
            RanksHung(self.job.generation, (), "it hangs", EPOCH, silent=ages, unheard=lost), now
        )

    def declare_dead(self, n: int, now: float) -> None:
        self._take(NodeDeclaredDead(str(n), "a person", "it burns"), now)

    def resubmit(self, reachable: Iterable[int], *, new_fleet: bool, now: float) -> None:
        """Begin with what the fleet says of the ranks of a terminated submission."""
        known = self.claimed
        holding, launched = tuple(place.node for place in known.places), known.launched
        self.job = replace(self._submitted(self.job.submission + 1), generation=self.job.generation)
        self.claimed = ClaimRecord(
            build_empty_claim(self.job, 0), inherited=known.places, inherited_launched=launched
        )
        self.heard_at.clear()
        self.places = ()
        if self.broken is Broken.TIMES_OF_OTHERS:
            launched = tuple(
                plan_generation(
                    replace(self.job, submission=one.submission), one.generation, one.nodes
                )
                for one in launched
            )
        if new_fleet and self.broken is Broken.NEW_FLEET:
            holding, launched = tuple(node for node in holding if int(node) in set(reachable)), ()
        if holding:
            self._take(RanksFound(holding, launched=launched), now)

    @property
    def lost_nodes(self) -> frozenset[int]:
        return frozenset(map(int, self.job.lost_names))

    # Stopping.

    def begin_stop(self, now: float) -> None:
        self.since, self.wall_then = now, self.wall
        self.stopped_at = {}

    @property
    def waits_for(self) -> tuple[int, ...]:
        return tuple(int(node) for node in self.job.maybe_alive if node not in self.stopped_at)

    def is_proof(self, n: int, place: AgentPlace) -> bool:
        return self.broken is Broken.ANY_PLACE or find_doubt(self.places, str(n), place) is None

    def knows_place(self, n: int, g: int) -> bool:
        return any(one.generation == g and str(n) in one.by_node for one in self.places)

    def prove(self, n: int, now: float) -> None:
        self.stopped_at[str(n)] = seconds(now)

    def end_stop(self, now: float) -> None:
        """Take all for stopped: they are proven so, or must have fenced."""
        fenced = names(self.waits_for)
        self._take(RanksStopped(self.job.generation, self.job.maybe_alive, EPOCH, fenced), now)

    def safe_at(self, now: float) -> float | None:
        """Return when a launch is safe, in seconds of a clock that is never stepped."""
        job = self.job
        if not job.maybe_alive:
            return seconds(self.since)  # nothing is ordered to stop
        unheard = tuple((lost.node, lost.unheard_for) for lost in job.lost)
        order = StopRanksInput(
            job.token,
            "",
            job.maybe_alive,
            job.policy.timeouts,
            len(job.slots),
            unheard_for=unheard,
            generations=living_generations(job),
        )
        generations = list_launches(order)
        last_heard = {node: seconds(self.since) - age.total_seconds() for node, age in unheard}
        if self.broken is None:
            with asking(self.most_peers):
                return safe_launch_at(generations, seconds(self.since), self.stopped_at, last_heard)
        generations = tuple(map(self._judged, generations))
        stopped_at = dict(self.stopped_at)
        match self.broken:
            case Broken.WALL_CLOCK:
                last_heard = {
                    node: seconds(self.heard_at.get(node, self.since) - self.wall_then)
                    for node in last_heard
                }
            case Broken.FIRST_STOP if stopped_at:
                stopped_at = dict.fromkeys(stopped_at, min(stopped_at.values()))
            case Broken.ALL_LOST:
                generations = tuple(replace(one, nodes=(*one.nodes, "none")) for one in generations)
                stopped_at["none"] = seconds(self.since)
            case Broken.NO_LEASE:
                last_heard = {}
            case Broken.OWN_LEASE_ONLY:
                self._leave_alone(generations, last_heard, now)
                stopped_at = dict(self.stopped_at)
        with asking(self.most_peers):
            return safe_launch_at(generations, seconds(self.since), stopped_at, last_heard)

    def is_safe(self, now: float) -> bool | None:
        """Whether a launch is safe now; None: no wait is long enough."""
        at = self.safe_at(now)
        if at is None:
            return None
        ahead = self.wall - self.wall_then if self.broken is Broken.WALL_CLOCK else 0.0
        return seconds(now + ahead) >= at

    def _leave_alone(
        self, generations: tuple[LaunchedGeneration, ...], last_heard: dict[str, float], now: float
    ) -> None:
        """Count each silent node as fenced by its own lease."""
        for node in set(names(self.waits_for)):
            others = {other: 0.0 for one in generations for other in one.nodes if other != node}
            with asking(self.most_peers):
                at = safe_launch_at(
                    generations, seconds(self.since), others | self.stopped_at, last_heard
                )
            if at is not None and self.stopped_at and seconds(now) >= at:
                self.stopped_at[node] = seconds(self.since)

    def _judged(self, launch: LaunchedGeneration) -> LaunchedGeneration:
        """Return the record of a launch as the rule gets it, less what is broken."""
        zero, times = timedelta(0), self.job.policy.timeouts
        match self.broken:
            case Broken.POLICY_OF_NOW:
                return replace(
                    launch,
                    lease=times.lease,
                    fence_after=times.fence_after,
                    stop_grace=times.stop_grace,
                )
            case Broken.FENCES_OF_NOW:
                return replace(launch, fences=self.is_fencing)
            case Broken.FENCES_FALSE_ELSEWHERE:
                return replace(launch, fences=True)
            case Broken.NO_LEASE:
                return replace(launch, lease=zero)
            case Broken.NO_FENCE_AFTER:
                return replace(launch, fence_after=zero)
            case Broken.NO_GRACE:
                return replace(launch, stop_grace=zero)
            case Broken.NO_VALID_FOR:
                return replace(launch, valid_for=zero, complete=True)
            case Broken.NO_HOPS:
                return replace(launch, size=1)
        return launch
