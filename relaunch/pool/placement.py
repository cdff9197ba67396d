"""Track which jobs have which nodes, what is free, and choose the nodes that a claim can have.

`grants` decides the order of claims. A placement is built from the fleet's state. It can follow the
state to a later one at the cost of what has changed, and is then equal to one built from it: the
tests of the scheduler compare the two at every step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import heappop, heappush
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple, TypeVar

from relaunch.pool.inventory import GpuUse
from relaunch.pool.messages import Claim, Place
from relaunch.pool.nodes import PROBE_LIFETIME, can_read_inventory, is_probe_due
from relaunch.pool.state import (
    ClaimRecord,
    FleetState,
    LiveGeneration,
    NodeRecord,
    NodeStatus,
    OfferRecord,
)

SILENCE_TIMEOUT = timedelta(minutes=10)
"""After so long a silence a node is no longer waited for, and other jobs get what a large claim
would leave free meanwhile."""
MIN_PROBES = 16
"""Nodes probed for a claim beyond those that it lacks, if there are so many: some may not
answer."""
Key = TypeVar("Key")
Gpus = tuple[int, ...]
"""GPU indexes of a job's share of a node. Empty: no particular share (all GPUs, or there are
none)."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """What a node offers once jobs and repairs have ended."""

    is_spare: bool
    gpus: int
    """Without those that foreign processes use: the fleet does not control these."""
    is_whole: bool
    """There are no foreign processes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a claim can use of the nodes."""

    gpus: int
    """Wanted on each node; 0: all of the node."""
    with_spares: bool
    avoid: frozenset[str] = frozenset()

    def fits(self, node: NodeRecord, *, with_avoided: bool = False) -> bool:
        if node.spec.gpus < self.gpus or (node.spec.spare and not self.with_spares):
            return False
        return with_avoided or node.name not in self.avoid

    def accepts(self, kind: NodeKind) -> bool:
        if kind.gpus < self.gpus or (kind.is_spare and not self.with_spares):
            return False
        return kind.is_whole or self.gpus > 0


class BucketKey(NamedTuple):
    """Nodes with the same key are interchangeable. Claims get nodes in the order of the keys."""

    is_spare: bool
    preference: int
    """Lower is better: nodes that are already shared are shared further; nodes without GPUs have
    nothing to share, so the emptiest is best."""
    free: int
    gpus: int


Buckets = dict[BucketKey, list["NodeUse"]]


@dataclass(eq=False, slots=True)
class NodeUse:
    """A node, the jobs that have it or may have it, and the foreign processes on it."""

    record: NodeRecord
    position: int
    """In the fleet file."""
    claimants: dict[str, Gpus] = field(default_factory=dict)
    """The jobs that have it as far as the state says, and their GPUs."""
    holders: dict[str, Gpus] = field(default_factory=dict)
    """The jobs that have it, and their GPUs, with those that this run of the scheduler granted
    it."""
    contested: set[str] = field(default_factory=set)
    """Jobs that claim what another job has: their claims came so late that a restarted fleet had
    granted the node elsewhere."""
    offers: dict[str, Gpus] = field(default_factory=dict)
    """The running jobs that may have it or a part of it, if they want to grow."""
    foreign_gpus: frozenset[int] = frozenset()
    """The GPUs that foreign processes use."""
    bucket: tuple[Buckets, BucketKey] | None = None
    """Where it is listed as free."""
    in_file: tuple[bool, int] | None = None
    """As what it is counted among the nodes of the file: is a spare, GPUs."""
    eventual: NodeKind | None = None
    """As what it is counted among the nodes that jobs may get eventually."""

    def __lt__(self, other: NodeUse) -> bool:
        return self.position < other.position

    @property
    def name(self) -> str:
        return self.record.spec.name

    @property
    def kind(self) -> NodeKind:
        gpus, foreign = self.record.spec.gpus, self.foreign_gpus
        return NodeKind(self.record.spec.spare, gpus - len(foreign), not foreign)

    def unclaimed_gpus(self, job: str = "") -> Gpus:
        """Return the GPUs that no other job has or was offered."""
        every = range(self.record.spec.gpus)
        if not self.holders and not self.offers:
            return tuple(every)
        free = set(every)
        for shares in (self.holders, self.offers):
            for holder, gpus in shares.items():
                if holder != job:
                    free.difference_update(gpus or every)
        return tuple(sorted(free))

    def free_gpus(self, job: str = "") -> Gpus:
        """Return the GPUs that this job may have: no other job has them, and no foreign process was
        seen on them."""
        return tuple(gpu for gpu in self.unclaimed_gpus(job) if gpu not in self.foreign_gpus)

    def has_room(self, claim: Claim) -> bool:
        return len(self.free_gpus(claim.job)) >= (claim.gpus or self.record.spec.gpus)

    def is_full(self) -> bool:
        """Return whether jobs have all of the node."""
        return bool(self.holders) and not self.unclaimed_gpus()

    def blocking_processes(self, gpus: int) -> tuple[GpuUse, ...]:
        """Return the foreign processes without which a claim for so many GPUs (0: all) would fit
        here."""
        if not self.foreign_gpus:
            return ()
        wanted = gpus or self.record.spec.gpus
        if not len(self.free_gpus()) < wanted <= len(self.unclaimed_gpus()):
            return ()
        return self.record.foreign_processes

    def has_ranks(self) -> bool:
        probe = self.record.probe
        return probe is not None and bool(probe.generations)

    def has_unheld_ranks(self) -> bool:
        """Return whether ranks of jobs without a share of this node live there, GPUs or not."""
        probe = self.record.probe
        return probe is not None and any(one.job not in self.holders for one in probe.generations)

    def has_foreign_ranks(self, job: str = "") -> bool:
        """Return whether ranks of other jobs without a share of this node live there."""
        probe = self.record.probe
        if probe is None or not self.record.spec.gpus:
            return False
        return any(one.job != job and not self.holders.get(one.job) for one in probe.generations)

    def is_ready(self, now: datetime, job: str = "") -> bool:
        """Return whether a fresh probe says that the job can be launched there."""
        record = self.record
        probe = record.probe
        if probe is None or record.probed_at is None or probe.silent or probe.busy:
            return False
        if record.spec.gpus and (
            record.inventory_at is None or now - record.inventory_at >= PROBE_LIFETIME
        ):
            return False
        return now - record.probed_at < PROBE_LIFETIME and not self.has_foreign_ranks(job)

    def is_only_stale(self) -> bool:
        """Return whether the age of the last probe is the only reason against the node."""
        probe = self.record.probe
        return probe is None or not (probe.silent or probe.busy or self.has_foreign_ranks())

    def is_usable(self) -> bool:
        """Return whether jobs may be granted the node, as far as its status goes."""
        record = self.record
        return (
            record.status is NodeStatus.IN_SERVICE
            and record.drain is None
            and not record.is_removed
            and not record.repair
            and not record.fault
        )

    def is_eventual(self, now: datetime) -> bool:
        """Return whether a job may get the node eventually, without a person's help."""
        record = self.record
        if record.status is NodeStatus.QUARANTINED or record.drain is not None or record.is_removed:
            return False
        return record.silent_since is None or now - record.silent_since < SILENCE_TIMEOUT


@dataclass(slots=True)
class Choice:
    """The nodes that a claim can have now."""

    kept: list[NodeUse]
    new: list[NodeUse]
    missing: int
    """Nodes that are missing beyond `kept` and `new`."""
    probes: list[NodeUse] = field(default_factory=list)
    """Nodes that have to be probed before the claim can have more."""
    is_hopeful: bool = False
    """The nodes to probe may be enough."""
    stale: int = 0
    """Nodes that the claim could have but for a stale probe. They are not probed for a claim that
    would still lack others."""

    def __len__(self) -> int:
        return len(self.kept) + len(self.new)


def is_reserved(offer: OfferRecord, record: ClaimRecord | None, now: datetime) -> bool:
    """Return whether the nodes of an offer are still reserved: the job has sent no newer claim, or
    its newer claim still waits for the answer."""
    if (
        record is None
        or record.is_closed
        or record.claim.submission != offer.submission
        or now >= offer.until
    ):
        return False
    return record.claim.seq == offer.seq or record.is_waiting


class Placement:
    """Which jobs have which nodes, and what is free. Grants, offers and reservations change it."""

    def __init__(self, state: FleetState, now: datetime) -> None:
        self._build(state, now)

    def _build(self, state: FleetState, now: datetime) -> None:
        self.state = state
        self.now = now
        self.nodes = [NodeUse(record, position) for position, record in enumerate(state.nodes)]
        self.by_name = {node.name: node for node in self.nodes}
        self.spares = [node for node in self.nodes if node.record.spec.spare]
        self.reserved: dict[Shape, str] = {}
        """The shapes that nodes are reserved for, and the job of each."""
        self.nodes_of: dict[str, dict[NodeUse, None]] = {}
        """By job: the nodes that it has."""
        self.notable: set[NodeUse] = set()
        """Nodes of which there is more to say than that they are in service, answer, and are used
        only by the jobs that have them."""
        self.watched: set[NodeUse] = set()
        """Nodes a probe of which may bring news that a claim waits for."""
        self.foreign: set[NodeUse] = set()
        """Nodes that foreign processes use."""
        self.orphaned: set[NodeUse] = set()
        """Nodes with ranks of a job that has no claim, that are not of its newest submission, or
        where it has no share."""
        self._claims: dict[str, ClaimRecord] = {}
        self._order: dict[str, int] = {}
        """Positions of the claims, as soon as they are needed."""
        self._offered: dict[str, list[NodeUse]] = {}
        """By job: the nodes offered to it."""
        self._ranks: dict[str, set[NodeUse]] = {}
        """By job: where its ranks live."""
        self._last_ranks: dict[str, set[NodeUse]] = {}
        """By job: where its ranks lived when nodes answered last that are silent now."""
        self._free: Buckets = {}
        self._doubtful: Buckets = {}
        """Nodes that would be free if they answered, or if the ranks that live there had ended."""
        self._eventual = Counter[NodeKind]()
        self._in_file = Counter[tuple[bool, int]]()
        """By (is a spare, GPUs): how many nodes the fleet file names."""
        self._touched: set[NodeUse] = set()
        """Nodes that this run of the scheduler granted or offered."""
        self._changes: list[tuple[datetime, int]] = []
        """When the age of what is known of a node makes a difference, and its position; a heap."""
        self._record_claims()
        self._record_offers()
        for node in self.nodes:
            self._record_ranks(node, node.record)
            self._record_node(node)

    def update(self, state: FleetState, now: datetime) -> None:
        """Follow the fleet to a later state."""
        before = self.state
        if now < self.now or not self._has_same_nodes(state):
            self._build(state, now)
            return
        self.state, self.now, self.reserved = state, now, {}
        changed, self._touched = self._touched, set()
        for node in changed:  # a grant holds if the new state has it
            for job in node.holders.keys() - node.claimants.keys():
                self.nodes_of[job].pop(node, None)
        if state.nodes is not before.nodes:
            changed |= self._take_records(state.nodes)
        if state.claims is not before.claims:
            changed |= self._take_claims(state.claims)
        while self._changes and self._changes[0][0] <= now:
            changed.add(self.nodes[heappop(self._changes)[1]])
        for offered in self._offered.values():
            changed.update(offered)
        self._offered = {}
        for node in changed:
            self._unlist(node)
            node.offers = {}
            self._record_holders(node)
        offered_to = set(changed)
        self._record_offers()
        for offered in self._offered.values():
            offered_to.update(offered)
        for node in offered_to:
            self._unlist(node)
            self._record_node(node)

    def _has_same_nodes(self, state: FleetState) -> bool:
        """Return whether the fleet has the same nodes, by name, in the same order."""
        if state.nodes is self.state.nodes:
            return True
        return len(state.nodes) == len(self.nodes) and all(
            node.name == record.name
            for node, record in zip(self.nodes, state.nodes, strict=True)
            if node.record is not record
        )

    def _take_records(self, records: tuple[NodeRecord, ...]) -> set[NodeUse]:
        changed = set()
        for node, record in zip(self.nodes, records, strict=True):
            if node.record is not record:
                self._record_ranks(node, record)
                node.record = record
                changed.add(node)
        return changed

    def _take_claims(self, claims: tuple[ClaimRecord, ...]) -> set[NodeUse]:
        before, self._claims = self._claims, {record.claim.job: record for record in claims}
        self._order = {}
        jobs = [job for job, record in self._claims.items() if before.get(job) is not record]
        jobs += [job for job in before if job not in self._claims]
        changed: set[NodeUse] = set()
        for job in jobs:
            changed.update(self.nodes_of.pop(job, ()), self._ranks.get(job, ()))
            for place in before[job].places if job in before else ():
                if (node := self.by_name.get(place.node)) is not None:
                    node.claimants.pop(job, None)
                    changed.add(node)
            if (record := self._claims.get(job)) is not None:
                changed.update(self._record_claim(record))
        return changed

    def _record_claims(self) -> None:
        self._claims = {record.claim.job: record for record in self.state.claims}
        held: dict[NodeUse, None] = {}
        for record in self.state.claims:
            held.update(dict.fromkeys(self._record_claim(record)))
        for node in held:
            self._record_holders(node)

    def _record_claim(self, record: ClaimRecord) -> list[NodeUse]:
        nodes = []
        for place in record.places:
            if (node := self.by_name.get(place.node)) is not None:
                node.claimants[record.claim.job] = place.gpus
                nodes.append(node)
        self.nodes_of[record.claim.job] = dict.fromkeys(nodes)
        return nodes

    def _record_holders(self, node: NodeUse) -> None:
        """Record the claimants of a node as its holders, in the order of the claims."""
        node.holders, node.contested = {}, set()
        jobs: Iterable[str] = node.claimants
        if len(node.claimants) > 1:
            if not self._order:
                self._order = {job: position for position, job in enumerate(self._claims)}
            jobs = sorted(node.claimants, key=self._order.__getitem__)
        for job in jobs:
            gpus = node.claimants[job]
            wanted = gpus or range(node.record.spec.gpus)
            if node.holders and not set(wanted) <= set(node.unclaimed_gpus()):
                node.contested.add(job)
            node.holders[job] = gpus

    def _record_offers(self) -> None:
        for offer in self.state.offers:
            if is_reserved(offer, self._claims.get(offer.job), self.now):
                for place in offer.places:
                    if (node := self.by_name.get(place.node)) is not None:
                        self._record_offer(node, offer.job, place.gpus)

    def _record_offer(self, node: NodeUse, job: str, gpus: Gpus) -> None:
        node.offers[job] = gpus
        self._offered.setdefault(job, []).append(node)

    def _record_ranks(self, node: NodeUse, record: NodeRecord) -> None:
        """Record where ranks live, by the newest record of a node."""
        for one in node.record.probe.generations if node.record.probe else ():
            self._ranks.get(one.job, set()).discard(node)
        for one in node.record.last_generations:
            self._last_ranks.get(one.job, set()).discard(node)
        for one in record.probe.generations if record.probe else ():
            self._ranks.setdefault(one.job, set()).add(node)
        for one in record.last_generations:
            self._last_ranks.setdefault(one.job, set()).add(node)

    def _record_node(self, node: NodeUse) -> None:
        record = node.record
        foreign = record.foreign_processes if record.inventory and record.inventory.used else ()
        node.foreign_gpus = frozenset(gpu for use in foreign for gpu in use.gpus)
        in_file = None if record.is_removed else (record.spec.spare, record.spec.gpus)
        _recount(self._in_file, node.in_file, in_file)
        eventual = node.kind if node.is_eventual(self.now) else None
        _recount(self._eventual, node.eventual, eventual)
        node.in_file, node.eventual = in_file, eventual
        _include(self.foreign, node, bool(node.foreign_gpus))
        _include(self.watched, node, _is_watched(node))
        _include(self.notable, node, is_notable(record) or _has_unheld_ranks(node))
        _include(self.orphaned, node, self._has_orphans(record))
        self._list(node)
        if (at := self._changes_at(node)) is not None:
            heappush(self._changes, (at, node.position))

    def _changes_at(self, node: NodeUse) -> datetime | None:
        """Return when the age of what is known of a node makes a difference; None: only news
        does."""
        record = node.record
        if node.bucket is not None and node.bucket[0] is self._free:
            known = (record.probed_at, record.inventory_at if record.spec.gpus else None)
            return min(at for at in known if at is not None) + PROBE_LIFETIME
        if record.silent_since is None or self.now - record.silent_since >= SILENCE_TIMEOUT:
            return None
        return record.silent_since + SILENCE_TIMEOUT

    def _has_orphans(self, record: NodeRecord) -> bool:
        for one in record.probe.generations if record.probe else ():
            known = self._claims.get(one.job)
            if known is None or known.is_closed or one.submission < known.claim.submission:
                return True
            if all(place.node != record.name for place in known.places):
                return True
        return False

    def list_notable(self) -> list[NodeUse]:
        """Return the notable nodes and those that are offered, in the order of the fleet file."""
        found = self.notable.union(*self._offered.values())
        return sorted(found, key=attrgetter("position"))

    # --- the lists of free nodes

    def _list(self, node: NodeUse) -> None:
        """List the node as free, as far as it is."""
        if not node.is_usable():
            return
        spec = node.record.spec
        is_shared = node.holders or node.offers or node.foreign_gpus
        free = len(node.free_gpus()) if is_shared else spec.gpus
        if spec.gpus and not free:
            return
        preference = free - spec.gpus if spec.gpus else len(node.holders)
        buckets = self._free if node.is_ready(self.now) else self._doubtful
        key = BucketKey(spec.spare, preference, free, spec.gpus)
        insort(buckets.setdefault(key, []), node)
        node.bucket = buckets, key

    def _unlist(self, node: NodeUse) -> None:
        if node.bucket is None:
            return
        buckets, key = node.bucket
        node.bucket = None
        bucket = buckets[key]
        del bucket[bisect_left(bucket, node)]
        if not bucket:
            del buckets[key]

    def _fitting(
        self, buckets: Buckets, shape: Shape, without: Collection[NodeUse]
    ) -> Iterator[NodeUse]:
        """Yield the listed nodes that fit the shape and are not reserved, the best first."""
        for key in sorted(buckets):
            if (key.is_spare and not shape.with_spares) or key.gpus < shape.gpus:
                continue
            if key.free < (shape.gpus or key.gpus):
                continue
            for node in self._list_unreserved(buckets[key], key):
                if node not in without and node.name not in shape.avoid:
                    yield node

    def _list_unreserved(self, bucket: list[NodeUse], key: BucketKey) -> Iterable[NodeUse]:
        """Return the nodes of a bucket without those reserved for a claim that comes first: all
        that its shape could use."""
        avoided: frozenset[str] | None = None
        for shape in self.reserved:
            if key.gpus >= shape.gpus and (shape.with_spares or not key.is_spare):
                avoided = shape.avoid if avoided is None else avoided & shape.avoid
        if avoided is None:
            return bucket
        return [node for node in bucket if node.name in avoided] if avoided else ()

    def _own(
        self, record: ClaimRecord, shape: Shape, without: Collection[NodeUse]
    ) -> list[NodeUse]:
        """Return the usable nodes that the job already has but does not keep.

        No other job can have them, so the job gets them first.
        """
        job = record.claim.job
        mine = {self.by_name[place.node] for place in record.places if place.node in self.by_name}
        mine.update(self._ranks.get(job, ()))
        mine.update(self._offered.get(job, ()))
        return [
            node
            for node in sorted(mine, key=lambda node: (node.record.spec.spare, node.position))
            if node not in without
            and node.is_usable()
            and shape.fits(node.record)
            and node.has_room(record.claim)
            and not any(other.fits(node.record) for other in self.reserved)
        ]

    # --- what a claim can have

    def shape_of(self, claim: Claim) -> Shape:
        own = sum(
            count
            for (spare, gpus), count in self._in_file.items()
            if not spare and gpus >= claim.gpus
        )
        # Spares are for jobs that have run, and for those that need more nodes than there are
        # without spares: they could never start.
        return Shape(claim.gpus, claim.running or own < claim.nodes, frozenset(claim.avoid))

    def fits_all(self, shape: Shape) -> bool:
        """Return whether every node of the file fits the shape, but for those that it avoids."""
        return all(
            gpus >= shape.gpus and (shape.with_spares or not spare) for spare, gpus in self._in_file
        )

    def count_in_file(self, shape: Shape) -> int:
        """Return how many nodes of the file fit the shape."""
        return sum(
            count
            for (spare, gpus), count in self._in_file.items()
            if gpus >= shape.gpus and (shape.with_spares or not spare)
        )

    def keep_nodes(self, record: ClaimRecord) -> list[NodeUse]:
        """Return the nodes that the job may continue with."""
        places = {place.node for place in record.places}
        # A node that is wanted back is left when its job says so: until then, another one that is
        # granted for it would stand idle.
        is_complete = record.claim.is_current and len(record.claim.keep) >= record.claim.max_nodes
        found = []
        for name in dict.fromkeys(record.claim.keep):
            node = self.by_name.get(name)
            if (
                node is None
                or name not in places
                or name in record.claim.avoid
                or record.claim.job in node.contested
            ):
                continue
            drain = node.record.drain or node.record.repair_drain
            stays = drain is not None and name in record.claim.stays and self.now < drain.until
            is_fit = node.record.drain is None and node.record.status in (
                NodeStatus.IN_SERVICE,
                NodeStatus.QUARANTINED,
            )
            if is_complete or stays or is_fit:
                found.append(node)
        return found[: record.claim.max_nodes]

    def choose(self, record: ClaimRecord, shape: Shape, *, is_alone: bool = False) -> Choice:
        """Return what the claim can have now; `is_alone`: no other claim waits."""
        choice = self._choose_needed(record, shape)
        if not choice.missing and len(choice) < record.claim.max_nodes:
            self._choose_more(record, shape, choice, is_alone)
        return choice

    def _choose_needed(self, record: ClaimRecord, shape: Shape) -> Choice:
        """Choose the nodes without which the job does not run."""
        kept = self.keep_nodes(record)
        missing = record.claim.nodes - len(kept)
        if missing <= 0:
            return Choice(kept, [], 0)
        ready: list[NodeUse] = []
        doubtful: list[NodeUse] = []
        for node in self._own(record, shape, set(kept)):
            (ready if node.is_ready(self.now, record.claim.job) else doubtful).append(node)
        own = {*ready, *doubtful, *kept}
        new = ready[:missing]
        doubts: list[NodeUse] | None = None
        for node in self._fitting(self._free, shape, own) if len(new) < missing else ():
            if node.record.spec.spare and doubts is None:
                doubts = [*doubtful, *self._fitting(self._doubtful, shape, own)]
                if any(not one.record.spec.spare and one.is_only_stale() for one in doubts):
                    break  # use a spare only once it is known that the others do not answer
            new.append(node)
            if len(new) == missing:
                break
        choice = Choice(kept, new, missing - len(new))
        if choice.missing:
            fitting = chain(doubtful, self._fitting(self._doubtful, shape, own))
            self._choose_probes(shape, choice, fitting, {*own, *new})
        return choice

    def _choose_probes(
        self, shape: Shape, choice: Choice, fitting: Iterable[NodeUse], without: set[NodeUse]
    ) -> None:
        """Choose which nodes to probe for a claim that lacks some: if stale ones may be enough, a
        few more of these than it lacks."""
        doubts = []
        for node in fitting:
            doubts.append(node)
            if not node.is_only_stale():
                continue
            choice.stale += 1
            if is_probe_due(node.record, self.now):
                choice.probes.append(node)
            if len(choice.probes) >= choice.missing + MIN_PROBES:
                break
        choice.is_hopeful = choice.stale >= choice.missing
        if not choice.is_hopeful:
            choice.probes = self._due(doubts)
            choice.probes += self._find_used_by_others(shape, {*without, *doubts})

    def _due(self, nodes: list[NodeUse]) -> list[NodeUse]:
        return [node for node in nodes if is_probe_due(node.record, self.now)]

    def _find_used_by_others(self, shape: Shape, without: Collection[NodeUse]) -> list[NodeUse]:
        """Return nodes that the claim could have if foreign processes had left, and that are due
        for a probe."""
        return [
            node
            for node in sorted(self.foreign)
            if node not in without
            and node.is_usable()
            and shape.fits(node.record)
            and node.blocking_processes(shape.gpus)
            and can_read_inventory(node.record, self.now, PROBE_LIFETIME)
            and is_probe_due(node.record, self.now)
        ]

    def _choose_more(
        self, record: ClaimRecord, shape: Shape, choice: Choice, is_alone: bool
    ) -> None:
        """Add nodes beyond the required ones that no other claim waits for.

        Spares, and nodes that others wait for, replace nodes that the job had before; they never
        make it larger.
        """
        claim = record.claim
        own = self._own(record, shape, {*choice.kept, *choice.new})
        without = {*choice.kept, *choice.new, *own}

        def may_have(node: NodeUse) -> bool:
            if len(choice) < claim.had:
                return True
            return not node.record.spec.spare and (
                is_alone or not claim.running or claim.job in node.offers
            )

        for node in chain(own, self._fitting(self._free, shape, without)):
            if len(choice) == claim.max_nodes:
                break
            if node.is_ready(self.now, claim.job) and may_have(node):
                choice.new.append(node)
        if len(choice) < claim.max_nodes:
            doubts = [
                node
                for node in (*own, *self._fitting(self._doubtful, shape, without))
                if node not in choice.new
            ]
            stale = [node for node in doubts if node.is_only_stale() and may_have(node)]
            choice.is_hopeful = bool(stale)
            choice.probes = self._due(stale)

    def choose_offer(self, record: ClaimRecord, count: int) -> Choice:
        """Return so many nodes by which a running job could grow now; `stale` counts those by which
        it could if a new probe finds that they answer."""
        claim = record.claim
        shape = Shape(claim.gpus, False, frozenset(claim.avoid))
        taken = {self.by_name[place.node] for place in record.places if place.node in self.by_name}
        own = self._own(record, shape, taken)
        without = {*taken, *own}
        fitting = chain(own, self._fitting(self._free, shape, without))
        ready = list(islice((one for one in fitting if one.is_ready(self.now, claim.job)), count))
        choice = Choice([], ready, count - len(ready))
        if choice.missing:
            doubts = (*own, *self._fitting(self._doubtful, shape, without))
            stale = [node for node in doubts if node not in ready and node.is_only_stale()]
            choice.probes, choice.stale = self._due(stale), len(stale)
        return choice

    def count_free(self, claim: Claim) -> int:
        """Return how many nodes the claim could get beside those that it avoids, as far as a new
        probe finds that they answer."""
        shape = self.shape_of(claim)
        doubts = self._fitting(self._doubtful, shape, ())
        return sum(1 for _ in self._fitting(self._free, shape, ())) + sum(
            node.is_only_stale() for node in doubts
        )

    def could_have(self, record: ClaimRecord, shape: Shape, choice: Choice) -> bool:
        """Return whether there will be enough nodes once jobs and repairs end, without a person's
        help."""
        count = sum(number for kind, number in self._eventual.items() if shape.accepts(kind))
        avoided = {self.by_name[name] for name in shape.avoid if name in self.by_name}
        count -= sum(
            node.is_eventual(self.now) and shape.accepts(node.kind)
            for node in avoided | set(choice.kept)
        )
        return count + len(choice.kept) >= record.claim.nodes

    # --- grants, offers, reservations

    def grant(self, record: ClaimRecord, choice: Choice) -> tuple[Place, ...]:
        """Give the chosen nodes to the job, and return its places."""
        job = record.claim.job
        shares = {place.node: place.gpus for place in record.places}
        places = [
            Place(node.name, node.record.spec.address, shares[node.name]) for node in choice.kept
        ]
        for node in choice.new:
            gpus = self._share(node, record.claim)
            places.append(Place(node.name, node.record.spec.address, gpus))
            before = node.holders.get(job)
            if before is not None:
                gpus = tuple(sorted({*before, *gpus})) if before and gpus else ()
            self._unlist(node)
            node.holders[job] = gpus
            self.nodes_of.setdefault(job, {})[node] = None
            self._touched.add(node)
            self._list(node)
        return tuple(places)

    def offer(self, record: ClaimRecord, nodes: list[NodeUse]) -> tuple[Place, ...]:
        """Reserve nodes for a job that may grow by them, and return their places."""
        places = []
        for node in nodes:
            gpus = self._share(node, record.claim)
            places.append(Place(node.name, node.record.spec.address, gpus))
            self._unlist(node)
            self._record_offer(node, record.claim.job, gpus)
            self._touched.add(node)
            self._list(node)
        return tuple(places)

    def _share(self, node: NodeUse, claim: Claim) -> Gpus:
        is_part = 0 < claim.gpus < node.record.spec.gpus
        return node.free_gpus(claim.job)[: claim.gpus] if is_part else ()

    def reserve(self, job: str, shape: Shape) -> None:
        """Reserve every node that this shape could use, so that later claims do not get it."""
        self.reserved.setdefault(shape, job)

    def find_job_ahead(self, shape: Shape) -> str:
        """Return the job for which nodes of this shape are reserved; empty if there is none."""
        for other, job in self.reserved.items():
            for is_spare, gpus in self._in_file:
                is_for_both = not is_spare or (shape.with_spares and other.with_spares)
                if is_for_both and gpus >= max(shape.gpus, other.gpus):
                    return job
        return ""

    # --- ranks of earlier submissions

    def find_earlier_ranks(self, record: ClaimRecord) -> tuple[str, ...]:
        """Return the nodes on which ranks of an earlier submission of this job may live, without
        those that the job names itself."""
        claim = record.claim
        named = {place.node for place in claim.holds}
        nodes = {
            self.by_name[place.node] for place in record.inherited if place.node in self.by_name
        }
        for node in self._ranks.get(claim.job, ()):
            if _has_earlier(node.record.probe.generations if node.record.probe else (), claim):
                nodes.add(node)
        for node in self._last_ranks.get(claim.job, ()):
            if _has_earlier(node.record.last_generations, claim):
                nodes.add(node)
        return tuple(node.name for node in sorted(nodes) if node.name not in named)

    def find_unknown_nodes(self, record: ClaimRecord) -> list[NodeUse]:
        """Return the silent nodes on which unrecorded ranks of an earlier submission may live.

        Only for a job that was never granted anything: otherwise the run that granted it knew. And
        only nodes that have not answered since this fleet began: the others reported the ranks that
        lived there.
        """
        claim = record.claim
        if claim.running or claim.holds or record.inherited:
            return []
        has_earlier = any(
            node.record.probe is not None and _has_earlier(node.record.probe.generations, claim)
            for node in self._ranks.get(claim.job, ())
        )
        if not (self.state.restore_error or has_earlier):
            return []
        return [
            node
            for node in self.nodes
            if not node.record.has_answered and not node.record.is_removed
        ]


def is_notable(record: NodeRecord) -> bool:
    """Return whether there is more to say of a node than that it is in service and answers."""
    probe, inventory = record.probe, record.inventory
    return (
        record.status is not NodeStatus.IN_SERVICE
        or probe is None
        or bool(probe.silent or probe.busy or probe.inventory_pending)
        or bool(record.repair or record.asked_jobs or record.is_removed)
        or record.repair_since is not None
        or record.drain is not None
        or record.repair_drain is not None
        or (inventory is not None and bool(inventory.used or inventory.unreadable))
        or bool(record.remarks)
    )


def _recount(counts: Counter[Key], before: Key | None, now: Key | None) -> None:
    """Count a node as something else. What is counted no more is left out."""
    if before == now:
        return
    if now is not None:
        counts[now] += 1
    if before is not None:
        counts[before] -= 1
        if not counts[before]:
            del counts[before]


def _include(nodes: set[NodeUse], node: NodeUse, is_in: bool) -> None:
    if is_in:
        nodes.add(node)
    else:
        nodes.discard(node)


def _has_unheld_ranks(node: NodeUse) -> bool:
    probe = node.record.probe
    return probe is not None and bool(probe.generations) and not node.claimants


def _is_watched(node: NodeUse) -> bool:
    """Return whether a probe of the node may bring news that a claim waits for."""
    record = node.record
    if (
        record.status not in (NodeStatus.IN_SERVICE, NodeStatus.SUSPECT)
        or record.probe_ordered_at is None
    ):
        return False
    probe, at = record.probe, record.probed_at
    if probe is None or at is None or at < record.probe_ordered_at:
        return True
    return bool(probe.silent or probe.busy) or _has_unheld_ranks(node)


def _has_earlier(generations: tuple[LiveGeneration, ...], claim: Claim) -> bool:
    return any(one.job == claim.job and one.submission < claim.submission for one in generations)
