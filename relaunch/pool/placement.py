"""What a claim can use of a node, and what a node offers once jobs and repairs have ended."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

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

Shape = tuple[int, bool, frozenset[str]]
"""What a claim can use: GPUs on each node, whether spares too, and the nodes to avoid."""
Kind = tuple[bool, int, bool]
"""Whether the node is a spare, its GPUs without those that foreign processes use (the fleet does
not control these), and whether there are no such GPUs."""


def serves(kind: Kind, shape: Shape) -> bool:
    spare, gpus, whole = kind
    need, spares, _ = shape
    return gpus >= need and (whole or need > 0) and (spares or not spare)


def fits(record: NodeRecord, shape: Shape, *, with_avoided: bool = False) -> bool:
    need, spares, avoid = shape
    if record.spec.gpus < need or (record.spec.spare and not spares):
        return False
    return with_avoided or record.name not in avoid


SILENCE_TIMEOUT = timedelta(minutes=10)
"""After so long a silence a node is no longer waited for, and other jobs get what a large claim
would leave free meanwhile."""
Key = tuple[bool, int, int, int]
"""Spare, preference (lower is better), free GPUs, GPUs: nodes with the same key are
interchangeable."""
NOWHERE: Key = (False, 0, -1, -1)


def holds(offered: OfferRecord, record: ClaimRecord | None, now: datetime) -> bool:
    """Return whether the nodes of an offer are still reserved: the job has sent no newer claim, or
    its newer claim still waits for the answer."""
    if (
        record is None
        or record.is_closed
        or record.claim.submission != offered.submission
        or now >= offered.until
    ):
        return False
    return record.claim.seq == offered.seq or record.is_waiting


@dataclass(slots=True)
class Choice:
    """The nodes that a claim can have now."""

    kept: list[int]
    new: list[int]
    missing: int
    """Nodes that are missing beyond `kept` and `new` for the job to run."""
    looks: list[int] = field(default_factory=list)
    """Nodes that have to be probed before the claim can have more."""
    hopeful: bool = False
    """The nodes to probe may be enough."""
    stale: int = 0
    """Nodes that the claim could have but for a stale probe. They are not probed for a claim that
    would still lack others."""


class Placement:
    """Which jobs have which nodes, and what is free. Grants change it."""

    def __init__(self, state: FleetState, now: datetime) -> None:
        self.state = state
        self.now = now
        self.nodes = state.nodes
        self.index = {node.name: index for index, node in enumerate(state.nodes)}
        self.holders: dict[int, dict[str, tuple[int, ...]]] = {}
        """By node: the jobs that have it, and their GPUs."""
        self.contested: set[tuple[int, str]] = set()
        """Jobs that claim what another job has: their claim came so late that a restarted fleet had
        granted the node elsewhere."""
        self.visited: dict[int, frozenset[int]] = {}
        """By node: the GPUs that foreign processes use."""
        self.living: dict[str, list[tuple[int, LiveGeneration]]] = {}
        """By job: where ranks of it live."""
        self.offered: dict[int, dict[str, tuple[int, ...]]] = {}
        """By node: the running jobs that may have it or a part of it, if they want to grow."""
        self.reserved: dict[Shape, str] = {}
        """The shapes that nodes are reserved for, and the job of each."""
        self._free: dict[Key, list[int]] = {}
        self._doubtful: dict[Key, list[int]] = {}
        """Nodes that would be free if they answered, or if the ranks that live there were gone."""
        self._where: dict[int, tuple[dict[Key, list[int]], Key]] = {}
        self._eventual = Counter[Kind]()
        self._in_file = Counter[tuple[bool, int]]()
        for record in state.claims:
            for place in record.places:
                if (node := self.index.get(place.node)) is not None:
                    if node in self.holders and not set(place.gpus or self._all(node)) <= set(
                        self.unclaimed(node)
                    ):
                        self.contested.add((node, record.claim.job))
                    self.holders.setdefault(node, {})[record.claim.job] = place.gpus
        records = {record.claim.job: record for record in state.claims} if state.offers else {}
        for offered in state.offers:
            if holds(offered, records.get(offered.job), now):
                for place in offered.places:
                    if (node := self.index.get(place.node)) is not None:
                        self.offered.setdefault(node, {})[offered.job] = place.gpus
        for node, one in enumerate(self.nodes):
            for living in one.probe.generations if one.probe else ():
                self.living.setdefault(living.job, []).append((node, living))
            if (
                one.inventory is not None
                and one.inventory.used
                and (foreign_processes := one.foreign_processes)
            ):
                self.visited[node] = frozenset(gpu for use in foreign_processes for gpu in use.gpus)
            if not one.is_removed:
                self._in_file[one.spec.spare, one.spec.gpus] += 1
            if self._is_eventual(one):
                self._eventual[self._kind(node)] += 1
            self._put(node)

    # --- nodes

    def free_gpus(self, node: int, job: str = "") -> tuple[int, ...]:
        """Return the GPUs that this job may have: no other job has them, and no foreign process was
        seen on them."""
        return tuple(
            gpu for gpu in self.unclaimed(node, job) if gpu not in self.visited.get(node, ())
        )

    def unclaimed(self, node: int, job: str = "") -> tuple[int, ...]:
        """Return the GPUs that no other job has or was offered."""
        free = set(self._all(node))
        for has in (self.holders.get(node, {}), self.offered.get(node, {})):
            for holder, gpus in has.items():
                if holder != job:
                    free.difference_update(gpus or self._all(node))
        return tuple(sorted(free))

    def _all(self, node: int) -> range:
        return range(self.nodes[node].spec.gpus)

    def has_foreign_ranks(self, node: int, job: str = "") -> bool:
        """Return whether ranks of other jobs without a share of this node live there."""
        look = self.nodes[node].probe
        if look is None or not self.nodes[node].spec.gpus:
            return False
        shares = self.holders.get(node, {})
        return any(one.job != job and not shares.get(one.job) for one in look.generations)

    def is_ready(self, node: int, job: str = "") -> bool:
        one = self.nodes[node]
        if one.probe is None or one.probed_at is None or one.probe.silent or one.probe.busy:
            return False
        if one.spec.gpus and (
            one.inventory_at is None or self.now - one.inventory_at >= PROBE_LIFETIME
        ):
            return False
        return self.now - one.probed_at < PROBE_LIFETIME and not self.has_foreign_ranks(node, job)

    def in_the_way(self, node: int, need: int) -> tuple[GpuUse, ...]:
        """Return the foreign processes without which a claim for so many GPUs (0: all) would fit
        here."""
        wanted = need or self.nodes[node].spec.gpus
        if node not in self.visited or not len(self.free_gpus(node)) < wanted <= len(
            self.unclaimed(node)
        ):
            return ()
        return self.nodes[node].foreign_processes

    def is_full(self, node: int) -> bool:
        """Return whether jobs have all of the node."""
        return node in self.holders and not self.unclaimed(node)

    def is_free(self, node: int) -> bool:
        return node not in self.holders

    def has_living(self, node: int) -> bool:
        look = self.nodes[node].probe
        return look is not None and bool(look.generations)

    def _is_usable(self, node: int) -> bool:
        one = self.nodes[node]
        return (
            one.status is NodeStatus.IN_SERVICE
            and one.drain is None
            and not one.is_removed
            and not one.repair
            and not one.missing_gpus
        )

    def _is_eventual(self, one: NodeRecord) -> bool:
        """Return whether a job may get the node eventually, without a person's help."""
        if one.status is NodeStatus.QUARANTINED or one.drain is not None or one.is_removed:
            return False
        return one.silent_since is None or self.now - one.silent_since < SILENCE_TIMEOUT

    def _put(self, node: int) -> None:
        if not self._is_usable(node):
            return
        spec = self.nodes[node].spec
        shared = node in self.holders or node in self.offered or node in self.visited
        free = len(self.free_gpus(node)) if shared else spec.gpus
        if spec.gpus and not free:
            return
        # Nodes that are already shared are shared further; nodes without GPUs have nothing to
        # share, so the emptiest is best.
        liked = free - spec.gpus if spec.gpus else len(self.holders.get(node, {}))
        buckets = self._free if self.is_ready(node) else self._doubtful
        key = (spec.spare, liked, free, spec.gpus)
        insort(buckets.setdefault(key, []), node)
        self._where[node] = (buckets, key)

    def _take(self, node: int) -> None:
        buckets, key = self._where.pop(node, (self._free, NOWHERE))
        bucket = buckets.get(key, [])
        at = bisect_left(bucket, node)
        if bucket[at : at + 1] == [node]:
            del bucket[at]

    # --- claims

    def shape(self, claim: Claim) -> Shape:
        own = sum(
            count
            for (spare, gpus), count in self._in_file.items()
            if not spare and gpus >= claim.gpus
        )
        # Spares are for jobs that have run, and for those that need more nodes than there are
        # without spares: they could never start.
        return claim.gpus, claim.running or own < claim.nodes, frozenset(claim.avoid)

    def most(self, shape: Shape) -> int:
        """Return how many nodes of the file fit the shape."""
        need, spares, _ = shape
        return sum(
            count
            for (spare, gpus), count in self._in_file.items()
            if gpus >= need and (spares or not spare)
        )

    def kept(self, record: ClaimRecord) -> list[int]:
        held = {place.node for place in record.places}
        avoid = frozenset(record.claim.avoid)
        found = []
        for name in dict.fromkeys(record.claim.keep):
            node = self.index.get(name)
            if (
                node is None
                or name not in held
                or name in avoid
                or (node, record.claim.job) in self.contested
            ):
                continue
            one = self.nodes[node]
            wish = one.drain or one.repair_drain
            stays = wish is not None and name in record.claim.stays and self.now < wish.until
            if stays or (
                one.drain is None and one.status in (NodeStatus.IN_SERVICE, NodeStatus.QUARANTINED)
            ):
                found.append(node)
        return found[: record.claim.max_nodes]

    def choose(self, record: ClaimRecord, shape: Shape, *, alone: bool = False) -> Choice:
        """Return what the claim can have now; `alone`: no other claim waits."""
        chosen = self._needed(record, shape)
        if not chosen.missing and len(chosen.kept) + len(chosen.new) < record.claim.max_nodes:
            self._choose_more(record, shape, chosen, alone)
        return chosen

    def _needed(self, record: ClaimRecord, shape: Shape) -> Choice:
        kept = self.kept(record)
        missing = record.claim.nodes - len(kept)
        if missing <= 0:
            return Choice(kept, [], 0)
        taken = frozenset(kept)
        ready: list[int] = []
        doubtful: list[int] = []
        for node in self._own(record, shape, taken):
            (ready if self.is_ready(node, record.claim.job) else doubtful).append(node)
        own = frozenset((*ready, *doubtful, *taken))
        new = ready[:missing]
        doubts: list[int] | None = None
        for node in self._fitting(self._free, shape, own) if len(new) < missing else ():
            if self.nodes[node].spec.spare and doubts is None:
                doubts = [*doubtful, *self._fitting(self._doubtful, shape, own)]
                if any(not self.nodes[one].spec.spare and self._only_stale(one) for one in doubts):
                    break  # use a spare only once it is known that the others do not answer
            new.append(node)
            if len(new) == missing:
                break
        chosen = Choice(kept, new, missing - len(new))
        if chosen.missing:
            doubts = doubts or [*doubtful, *self._fitting(self._doubtful, shape, own)]
            stale = [node for node in doubts if self._only_stale(node)]
            chosen.hopeful, chosen.stale = len(stale) >= chosen.missing, len(stale)
            chosen.looks = [
                node
                for node in (stale if chosen.hopeful else doubts)
                if is_probe_due(self.nodes[node], self.now)
            ]
            chosen.looks += (
                () if chosen.hopeful else self._visited_for(shape, frozenset((*own, *new, *doubts)))
            )
        return chosen

    def _visited_for(self, shape: Shape, without: frozenset[int]) -> list[int]:
        """Return nodes that the claim could have if foreign processes had left, and that are due
        for a probe."""
        return [
            node
            for node in sorted(self.visited)
            if node not in without
            and self._is_usable(node)
            and fits(self.nodes[node], shape)
            and self.in_the_way(node, shape[0])
            and can_read_inventory(self.nodes[node], self.now, PROBE_LIFETIME)
            and is_probe_due(self.nodes[node], self.now)
        ]

    def _choose_more(self, record: ClaimRecord, shape: Shape, chosen: Choice, alone: bool) -> None:
        """Add nodes beyond the required ones that no other claim waits for.

        Spares, and nodes that others wait for, replace nodes that the job had before; they never
        make it larger.
        """
        claim = record.claim
        count = len(chosen.kept) + len(chosen.new)
        own = self._own(record, shape, frozenset((*chosen.kept, *chosen.new)))
        without = frozenset((*chosen.kept, *chosen.new, *own))

        def may_have(node: int) -> bool:
            if count < claim.had:
                return True
            return not self.nodes[node].spec.spare and (
                alone or not claim.running or claim.job in self.offered.get(node, ())
            )

        for node in (*own, *self._fitting(self._free, shape, without)):
            if count < claim.max_nodes and self.is_ready(node, claim.job) and may_have(node):
                chosen.new.append(node)
                count += 1
        if count < claim.max_nodes:
            doubts = [
                node
                for node in (*own, *self._fitting(self._doubtful, shape, without))
                if node not in chosen.new
            ]
            stale = [node for node in doubts if self._only_stale(node) and may_have(node)]
            chosen.hopeful = bool(stale)
            chosen.looks = [node for node in stale if is_probe_due(self.nodes[node], self.now)]

    def offerable(self, record: ClaimRecord, count: int) -> tuple[list[int], list[int]]:
        """Return nodes by which a running job could grow now, and those by which it could if a new
        probe finds that they answer."""
        claim = record.claim
        shape = claim.gpus, False, frozenset(claim.avoid)
        taken = frozenset(
            self.index[place.node] for place in record.places if place.node in self.index
        )
        own = self._own(record, shape, taken)
        without = frozenset((*taken, *own))
        ready = [
            node
            for node in (*own, *self._fitting(self._free, shape, without))
            if self.is_ready(node, claim.job)
        ][:count]
        if len(ready) == count:
            return ready, []
        doubts = [
            node
            for node in (*own, *self._fitting(self._doubtful, shape, without))
            if node not in ready
        ]
        return ready, [node for node in doubts if self._only_stale(node)]

    def offer(self, record: ClaimRecord, nodes: list[int]) -> tuple[Place, ...]:
        job, need = record.claim.job, record.claim.gpus
        places = []
        for node in nodes:
            spec = self.nodes[node].spec
            gpus = self.free_gpus(node, job)[:need] if 0 < need < spec.gpus else ()
            places.append(Place(spec.name, spec.address, gpus))
            self._take(node)
            self.offered.setdefault(node, {})[job] = gpus
            self._put(node)
        return tuple(places)

    def grant(self, record: ClaimRecord, chosen: Choice) -> tuple[Place, ...]:
        job, need = record.claim.job, record.claim.gpus
        held = {place.node: place for place in record.places}
        places = []
        for node in chosen.kept:
            spec = self.nodes[node].spec
            places.append(Place(spec.name, spec.address, held[spec.name].gpus))
        for node in chosen.new:
            spec = self.nodes[node].spec
            gpus = self.free_gpus(node, job)[:need] if 0 < need < spec.gpus else ()
            places.append(Place(spec.name, spec.address, gpus))
            before = self.holders.get(node, {}).get(job)
            both = (
                gpus
                if before is None
                else tuple(sorted({*before, *gpus}))
                if before and gpus
                else ()
            )
            self._take(node)
            self.holders.setdefault(node, {})[job] = both
            self._put(node)
        return tuple(places)

    def could_have(self, record: ClaimRecord, shape: Shape, chosen: Choice) -> bool:
        """Return whether there will be enough nodes once jobs and repairs end, without a person's
        help."""
        count = sum(n for kind, n in self._eventual.items() if serves(kind, shape))
        out = {node for name in shape[2] if (node := self.index.get(name)) is not None} | set(
            chosen.kept
        )
        count -= sum(
            self._is_eventual(self.nodes[node]) and serves(self._kind(node), shape) for node in out
        )
        return count + len(chosen.kept) >= record.claim.nodes

    def _kind(self, node: int) -> Kind:
        spec, visited = self.nodes[node].spec, self.visited.get(node, ())
        return spec.spare, spec.gpus - len(visited), not visited

    def reserve(self, job: str, shape: Shape) -> None:
        """Reserve every node that this shape could use, so that later claims do not get it."""
        if shape in self.reserved:
            return
        self.reserved[shape] = job
        avoid = shape[2]
        for buckets in (self._free, self._doubtful):
            for key in [key for key in buckets if key[3] >= shape[0] and (shape[1] or not key[0])]:
                left = (
                    [node for node in buckets[key] if self.nodes[node].name in avoid]
                    if avoid
                    else []
                )
                if left:
                    buckets[key] = left
                else:
                    del buckets[key]

    def ahead(self, shape: Shape) -> str:
        """Return the job for which nodes of this shape are reserved; empty if there is none."""

        def both(other: Shape, spare: bool, gpus: int) -> bool:
            return gpus >= max(shape[0], other[0]) and ((shape[1] and other[1]) or not spare)

        return next(
            (
                job
                for other, job in self.reserved.items()
                if any(both(other, *kind) for kind in self._in_file)
            ),
            "",
        )

    def holding(self, record: ClaimRecord) -> tuple[str, ...]:
        """Return where ranks of an earlier submission of this job may live."""
        claim = record.claim
        told = {place.node for place in claim.holds}
        nodes = {self.index[place.node] for place in record.inherited if place.node in self.index}
        nodes |= {
            node
            for node, living in self.living.get(claim.job, ())
            if living.submission < claim.submission
        }
        nodes |= {
            node
            for node, one in enumerate(self.nodes)
            if any(
                living.job == claim.job and living.submission < claim.submission
                for living in one.last_generations
            )
        }
        return tuple(name for node in sorted(nodes) if (name := self.nodes[node].name) not in told)

    def where_unknown(self, record: ClaimRecord) -> list[int]:
        """Return the silent nodes on which unrecorded ranks of an earlier submission may live.

        Only for a job that was never granted anything: otherwise the run that granted it knew. And
        only nodes that have not answered since this fleet began: the others reported the ranks that
        lived there.
        """
        claim = record.claim
        if claim.running or claim.holds or record.inherited:
            return []
        earlier = any(
            living.submission < claim.submission for _, living in self.living.get(claim.job, ())
        )
        if not (self.state.restore_error or earlier):
            return []
        return [
            node
            for node, one in enumerate(self.nodes)
            if not one.has_answered and not one.is_removed
        ]

    def _own(self, record: ClaimRecord, shape: Shape, taken: frozenset[int]) -> list[int]:
        """Return the usable nodes that the job already has but does not keep.

        No other job can have them, so the job gets them first.
        """
        job = record.claim.job
        mine = {self.index[place.node] for place in record.places if place.node in self.index}
        mine |= {node for node, _ in self.living.get(job, ())}
        mine |= {node for node, jobs in self.offered.items() if job in jobs}
        return [
            node
            for node in sorted(mine - taken, key=lambda node: (self.nodes[node].spec.spare, node))
            if self._is_usable(node)
            and fits(self.nodes[node], shape)
            and self._has_room(node, record.claim)
            and not any(fits(self.nodes[node], other) for other in self.reserved)
        ]

    def _has_room(self, node: int, claim: Claim) -> bool:
        free, gpus = len(self.free_gpus(node, claim.job)), self.nodes[node].spec.gpus
        return free >= (claim.gpus or gpus)

    def _fitting(
        self, buckets: dict[Key, list[int]], shape: Shape, without: frozenset[int]
    ) -> Iterator[int]:
        need, spares, avoid = shape
        for key in sorted(buckets):
            spare, _, free, gpus = key
            if (spare and not spares) or gpus < need or free < (need or gpus):
                continue
            for node in buckets[key]:
                if node not in without and self.nodes[node].name not in avoid:
                    yield node

    def _only_stale(self, node: int) -> bool:
        """Return whether the age of the last probe is the only reason against the node."""
        look = self.nodes[node].probe
        return look is None or not (look.silent or look.busy or self.has_foreign_ranks(node))
