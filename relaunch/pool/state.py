"""State of a fleet. Data only: `allocate` decides which job gets which node."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal

from relaunch.access.orders import UsedProof
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.generation import LaunchedGeneration
from relaunch.pool.inventory import GpuUse, Inventory, shortage
from relaunch.pool.messages import (
    Claim,
    DrainRequest,
    Grant,
    Healing,
    Offer,
    Permit,
    PermitRequest,
    Place,
)
from relaunch.spec.access import Access
from relaunch.spec.fleet import FleetLimits, FleetNode

# --- nodes


@dataclass(frozen=True, slots=True)
class LiveGeneration:
    """Ranks that live on a node, as its agent reports. Ordered by (submission, generation)."""

    job: str
    submission: int
    generation: int


@dataclass(frozen=True, slots=True)
class WarmPython:
    """A process on a node that imports modules ahead for a job."""

    job: str
    modules: tuple[str, ...]
    state: str
    """`waiting`, `importing`, `ready` or `cold`."""
    bytes: int | None = None
    """Of its memory, pages that it shares included; None: none yet."""


@dataclass(frozen=True, slots=True)
class NodeProbe:
    """The result of one probe of one node: its answer, or why there is none."""

    node: str
    silent: str = ""
    """Why it gave no answer; empty if it answered."""
    boot_id: str = ""
    """Shortened: for people to compare, not for a proof of a reboot."""
    busy: str = ""
    """What works on the node (an examination, a repair), as a clause; empty if nothing does. No job
    is granted the node meanwhile."""
    generations: tuple[LiveGeneration, ...] = ()
    inventory: Inventory | None = None
    """Inventory of its GPUs if they were read for this probe; the record of the node keeps it."""
    inventory_age: timedelta = timedelta(0)
    """How old the inventory was then: a reading that took long is reported with the next probe."""
    inventory_pending: bool = False
    """Its GPUs were to be read for this probe, but the reading has not ended."""
    warm: tuple[WarmPython, ...] = field(default=(), repr=False)
    """Only in the answer to a person: a fleet does not keep it, and its changes are no news."""


FAULT_LASTS = timedelta(minutes=4)
"""How far apart two readings are that confirm a fault: they are made every five minutes, and a
switch that restarts, or a disk that is cleaned up, needs less."""


class NodeStatus(StrEnum):
    """Whether a node may be granted to jobs. Whether it answers and which jobs use it is recorded
    elsewhere."""

    IN_SERVICE = "in service"
    SUSPECT = "suspect"
    """To be examined, and repaired if needed, as soon as it is unused and the limits allow."""
    REPAIRING = "repairing"
    QUARANTINED = "quarantined"
    """Until a person releases it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Evidence of one job against one node. It counts unless it was retracted."""

    at: datetime
    job: str
    submission: int
    generation: int
    cause: Cause
    reason: str
    code: str = ""
    gpus: tuple[str, ...] = ()
    retracted: str = ""
    """Why it no longer counts: the fault followed the job to another node, an examination, or a
    person."""
    isolated: bool = False
    """The evidence is against the hardware, and is by itself enough reason to examine the node."""


@dataclass(frozen=True, slots=True)
class PastReason:
    """A reason that kept a node from jobs and no longer holds."""

    reason: str
    by: str
    since: datetime | None
    until: datetime
    end: str
    """A clause that says why it no longer holds."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    spec: FleetNode
    status: NodeStatus = NodeStatus.IN_SERVICE
    reason: str = ""
    by: str = ""
    since: datetime | None = None
    probe: NodeProbe | None = None
    """The newest probe."""
    probed_at: datetime | None = None
    has_answered: bool = False
    """The node has answered since this fleet began, so ranks there that only it can report have
    been seen."""
    last_generations: tuple[LiveGeneration, ...] = ()
    """Ranks that lived there when the node last answered; only set while it is silent."""
    inventory: Inventory | None = None
    """Inventory of its GPUs, as last read."""
    inventory_at: datetime | None = None
    """When the inventory was read; None: never, or before something was done to the node."""
    fault_since: datetime | None = None
    """When the fault that the inventory shows was first read; None: it shows none. Not of missing
    GPUs."""
    vouched_fault: str = ""
    """The fault that the node showed when a person released it, as long as it shows that one."""
    silent_since: datetime | None = None
    repair: str = ""
    """The repair under way, by any order: its workflow's id and run, `repair/gpus/n2/RUN`; without
    the run while it is ordered and has not begun. It may run while the job that ordered it holds
    the node."""
    repair_since: datetime | None = None
    repair_acts: bool = False
    """The repair was permitted to reset or reboot: it counts against the repairs that may act at
    one time."""
    verdict: Verdict | None = None
    """HEALTHY or UNHEALTHY, from the last repair whose examination was conclusive. None: there was
    none yet."""
    verdict_at: datetime | None = None
    verdict_reason: str = ""
    """Kept whatever happens to the node later: `verdict_at` gives its age."""
    healed: tuple[Healing, ...] = ()
    """What repairs did that an examination then confirmed, the newest last; a later one replaces
    the same of the same GPUs."""
    cleared_at: datetime | None = None
    """When a repair last proved the node healthy, or a person released it: evidence from before is
    no reason to take it out of service."""
    released_at: datetime | None = None
    """When a person last released it: `limits.cool_down` counts no repair from before."""
    past: tuple[PastReason, ...] = ()
    """Reasons that kept the node from jobs and no longer hold, the newest last."""
    repair_ended: str = ""
    """The last repair that has ended; a late message of it changes nothing."""
    power_cycles: tuple[datetime, ...] = ()
    """Power cycles permitted in the last three days: the node's own journal does not record
    them."""
    rebooted_at: datetime | None = None
    """When a reboot or a power cycle was permitted last."""
    drain: DrainRequest | None = None
    """A person wants the node empty: the jobs on it were asked to leave, and no new ones get it."""
    repair_drain: DrainRequest | None = None
    """The fleet wants the node empty: it is a suspect that jobs share, and they were asked to
    leave."""
    asked_jobs: tuple[str, ...] = ()
    """Jobs that were asked to leave."""
    marks: tuple[Mark, ...] = ()
    """Newest last."""
    probe_ordered_at: datetime | None = None
    """When a probe of it was last ordered."""
    is_removed: bool = False
    """The fleet file no longer names it; it is kept until no job has it."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def foreign_processes(self) -> tuple[GpuUse, ...]:
        """Processes outside relaunch's jobs on those of its GPUs that relaunch grants."""
        given = (
            [
                (tuple(gpu for gpu in use.gpus if gpu < self.spec.gpus), use.who)
                for use in self.inventory.used
            ]
            if self.inventory
            else []
        )
        return tuple(GpuUse(gpus, who) for gpus, who in given if gpus)

    @property
    def missing_gpus(self) -> str:
        """Which of the GPUs promised by the fleet file are missing, in words; empty if none, or if
        unknown."""
        return (
            shortage(self.inventory, self.spec.gpus)
            if self.inventory and self.inventory_at and self.spec.gpus
            else ""
        )

    @property
    def fault(self) -> str:
        """What makes the node unfit for jobs by its own account, in words; empty if nothing is
        known, or a person has vouched for it."""
        return self.missing_gpus or ("" if self._is_vouched_for else self._shown_fault)

    @property
    def reset_wanted(self) -> str:
        """Why its GPUs should be reset when they are free, in words; empty if not known."""
        return self._inventory.reset_wanted

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the node shows of itself while it is in service, for people."""
        note = ""
        if self._is_vouched_for:
            note = "a person has vouched for it"
        elif self.is_fault_unconfirmed:
            note = "not granted; examined if the next reading confirms it"
        shown = f"{self._shown_fault} ({note})" if note and self._shown_fault else self._shown_fault
        return tuple(one for one in (self.missing_gpus, shown, self.reset_wanted) if one)

    @property
    def _inventory(self) -> Inventory:
        """What the inventory says, as far as it is valid."""
        is_valid = self.inventory_at is not None and self.spec.gpus
        return self.inventory if self.inventory and is_valid else Inventory()

    @property
    def _shown_fault(self) -> str:
        return self._inventory.fault

    @property
    def _is_vouched_for(self) -> bool:
        return bool(self._shown_fault) and self._shown_fault == self.vouched_fault

    @property
    def is_fault_unconfirmed(self) -> bool:
        """Whether a fault was read once, and another reading has to confirm it."""
        return (
            self.fault_since is not None
            and self.inventory_at is not None
            and self.inventory_at - self.fault_since < FAULT_LASTS
        )


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    claim: Claim
    granted: tuple[Place, ...] | None = None
    """None: the claim waits."""
    claimed_at: datetime | None = None
    """When the claim came. None: before the last restart of the fleet."""
    wait_reason: str = ""
    """The last reason sent to the job while it waits, so that only news is sent."""
    waiting_since: datetime | None = None
    is_closed: bool = False
    """Its workflow has ended without giving back its nodes: the remaining ranks are being
    stopped."""
    inherited: tuple[Place, ...] = ()
    """What an earlier submission of this job held, until this submission has confirmed that it
    knows."""
    inherited_launched: tuple[LaunchedGeneration, ...] = ()
    """The launches whose ranks may live on the inherited places."""
    answer: Grant | None = None
    """The last answer to this claim, other than that it waits; without places, which are those of
    `granted`."""
    is_answer_sent: bool = True
    """The answer is on its way to the job; False: it has to be sent (again)."""
    reason_sent_at: datetime | None = None
    reason_due_at: datetime | None = None
    """When to send news that was held back so that a busy fleet does not flood its jobs."""
    is_restored: bool = False
    """Restored from the previous run; the job has not yet claimed what it holds."""
    old_logins: dict[str, str] = field(default_factory=dict)
    """Nodes of `places` that now have another address or user in the fleet file than when ranks may
    have been started there, with the earlier login of each. What answers now proves nothing about
    those ranks."""
    submitter: str = ""
    """Who submitted the job, as far as that is proven; empty where the fleet has no `access`."""
    refusal: str = ""
    """Why its submitter may not submit to this fleet; empty if they may."""

    @property
    def key(self) -> tuple[str, int]:
        return self.claim.job, self.claim.submission

    @property
    def places(self) -> tuple[Place, ...]:
        """Everything that no other job may have: what it holds, what it was granted, and what an
        earlier submission held."""
        if not self.inherited and self.granted in (None, (), self.claim.holds):
            return self.claim.holds
        places: dict[str, Place] = {}
        for place in (*self.inherited, *self.claim.holds, *(self.granted or ())):
            other = places.get(place.node)
            if other is None or other.gpus == place.gpus:
                places[place.node] = place
            else:
                # An empty share means all GPUs.
                gpus = (
                    tuple(sorted({*other.gpus, *place.gpus})) if other.gpus and place.gpus else ()
                )
                places[place.node] = replace(place, gpus=gpus)
        return tuple(places.values())

    @property
    def launched(self) -> tuple[LaunchedGeneration, ...]:
        """The launches whose ranks may live on `places`, each with its nodes."""
        granted = tuple(place.node for place in self.granted or ())
        own = (
            one if one.nodes else replace(one, nodes=granted, size=len(granted))
            for one in self.claim.launched
        )
        return (*self.inherited_launched, *(one for one in own if one.nodes))

    @property
    def is_waiting(self) -> bool:
        return self.granted is None and not self.is_closed


# --- the breaker


@dataclass(frozen=True, slots=True)
class Breaker:
    """The breaker of a fleet. While it is open, nothing is repaired or granted until a person
    closes it."""

    reason: str = ""
    """Why it is open; empty if it is closed."""
    since: datetime | None = None
    paused: str = ""
    """The person who has paused repairs (only those), and why; empty if repairs are not paused."""
    paused_since: datetime | None = None
    resumed_at: datetime | None = None
    """When a person last ended a pause or closed the breaker."""

    @property
    def is_open(self) -> bool:
        return bool(self.reason)


@dataclass(frozen=True, slots=True)
class PermitRecord:
    """A permit and the workflow that it is for. The newest are kept, so that a repeated request
    gets the same answer."""

    workflow: str
    permit: Permit
    is_sent: bool = False


# --- the state


@dataclass(frozen=True, slots=True)
class LastClaim:
    """The last claim of a job that has nothing left. Earlier or late messages of it change
    nothing."""

    job: str
    submission: int
    seq: int
    at: datetime


@dataclass(frozen=True, slots=True)
class BehindClaim:
    """A claim that is older than one that the fleet knows, to be answered with `behind`."""

    job: str
    submission: int
    seq: int
    above: int


@dataclass(frozen=True, slots=True)
class RecentReclaim:
    job: str
    submission: int
    at: datetime
    """When the order was last given."""
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class OfferRecord:
    """An offer, from when it was made until the next one to this job may be made."""

    job: str
    submission: int
    seq: int
    places: tuple[Place, ...]
    until: datetime
    """Until then no other job gets the nodes, unless this job declines before."""

    @property
    def offer(self) -> Offer:
        return Offer(
            self.submission, self.seq, tuple(place.node for place in self.places), self.until
        )


@dataclass(frozen=True, slots=True)
class RemovedNode:
    """What a fleet knows of a node that the fleet file names no more, in case it returns."""

    record: NodeRecord
    at: datetime
    """When the fleet forgot the rest."""


@dataclass(frozen=True, slots=True)
class FleetState:
    name: str
    repairs: Literal["act", "ask", "observe"] = "ask"
    limits: FleetLimits = field(default_factory=FleetLimits)
    nodes: tuple[NodeRecord, ...] = ()
    """In the order of the fleet file. A node that has left the file while in use stays,
    quarantined, until it is unused."""
    claims: tuple[ClaimRecord, ...] = ()
    breaker: Breaker = Breaker()
    requests: tuple[PermitRequest, ...] = ()
    """Not yet answered."""
    reboots: tuple[datetime, ...] = ()
    """Reboots permitted in the last hour."""
    awaited_jobs: tuple[str, ...] | None = None
    """Jobs that have not yet claimed what they hold since this run began; None: the running jobs
    are not yet known."""
    awaited_until: datetime | None = None
    """When they are no longer waited for."""
    notices: tuple[str, ...] = ()
    """What people did and what could not be parsed, newest last, with time and name."""
    probe_count: int = 0
    """Number of probes ordered, which shows people that the fleet is active."""
    is_file_read: bool = False
    """The fleet file has been read."""
    is_restored: bool = False
    """The state of the previous run was restored, or that was given up."""
    restore_until: datetime | None = None
    """When to give up restoring."""
    restore_error: str = ""
    """Why it is unknown which jobs held which nodes before this run began; empty if it is known."""
    is_probed: bool = False
    """Each node has been probed: before that it is unknown which ranks live where, and nothing is
    granted."""
    swept_at: datetime | None = None
    """When a probe of all nodes was last ordered."""
    watched_at: datetime | None = None
    """When the last watch over all nodes ended."""
    progress_at: datetime | None = None
    """When a running job was last granted nodes or asked to yield: two running jobs that wait
    longer block each other."""
    asked_jobs: tuple[str, ...] = ()
    """Jobs that were asked what they hold."""
    last_claims: tuple[LastClaim, ...] = ()
    """Newest last."""
    behind: tuple[BehindClaim, ...] = ()
    recent_reclaims: tuple[RecentReclaim, ...] = ()
    permits: tuple[PermitRecord, ...] = ()
    """Permits, newest last."""
    out_when_resumed: int = 0
    """How many nodes were out when a person closed the breaker: one more opens it again."""
    offers: tuple[OfferRecord, ...] = ()
    """The last offer to each job."""
    access: Access | None = None
    """Who may do what, by the fleet file; None: everyone may do everything."""
    removed: tuple[RemovedNode, ...] = ()
    """Nodes that the file names no more and of which something is to be known if they return; the
    last removed is the last."""
    used_proofs: tuple[UsedProof, ...] = ()
    """Signatures of orders that were accepted a short time ago."""
