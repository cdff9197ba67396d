"""What a fleet remembers. Only data: who gets which node `allocate` says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.generation import LaunchedGeneration
from relaunch.pool.inventory import GpuUse, Inventory, shortage
from relaunch.pool.messages import Claim, Grant, Offer, Permit, PermitRequest, Place, Withdraw
from relaunch.spec.fleet import FleetLimits, FleetNode

# --- what is known of nodes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveGeneration:
    """Ranks that live on a node, as its agent says. Ordered by (submission, generation)."""

    job: str
    submission: int
    generation: int


@dataclass(frozen=True, slots=True)
class NodeProbe:
    """One look at one node: it answered, or why not."""

    node: str
    silent: str = ""
    """Why it gave no answer; empty: it did."""
    boot_id: str = ""
    held: str = ""
    """Who works on it (an examination, a repair), a clause; empty: nobody. It is in no job's way otherwise."""
    living: tuple[LiveGeneration, ...] = ()
    inventory: Inventory | None = None
    """Of its GPUs, where they were read for this look; the record of the node keeps it."""
    read_ago: timedelta = timedelta(0)
    """How old that was by then: a reading that took long is told with the next look."""
    unread: bool = False
    """Its GPUs were to be read for this look, and the reading had not come to an end."""


class NodeStatus(StrEnum):
    """Whether a node may be given to jobs. Whether it answers and who uses it are other questions."""

    IN_SERVICE = "in service"
    SUSPECT = "suspect"
    """To be examined, and repaired where needed, as soon as nobody uses it and the limits allow."""
    REPAIRING = "repairing"
    QUARANTINED = "quarantined"
    """Until a person releases it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One job's evidence against one node. It counts unless it was retracted."""

    at: datetime
    job: str
    submission: int
    generation: int
    cause: Cause
    reason: str
    code: str = ""
    gpus: tuple[str, ...] = ()
    retracted: str = ""
    """Why it counts no more: the fault followed the job elsewhere, an examination, a person."""
    isolated: bool = False
    """It is against the hardware, and by itself reason enough to examine the node."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    spec: FleetNode
    standing: NodeStatus = NodeStatus.IN_SERVICE
    reason: str = ""
    by: str = ""
    since: datetime | None = None
    look: NodeProbe | None = None
    """The newest one."""
    looked_at: datetime | None = None
    answered: bool = False
    """It has answered since this fleet began: what lives there that no other one can tell of has been seen."""
    last_living: tuple[LiveGeneration, ...] = ()
    """Ranks that lived there when it answered last; only while it is silent."""
    inventory: Inventory | None = None
    """Of its GPUs, as they were read last."""
    read_at: datetime | None = None
    """When that was; None: never, or before something was done to it."""
    silent_since: datetime | None = None
    repair: str = ""
    """The repair under way, whoever ordered it: its workflow's id and run, `repair/gpus/n2/RUN`; without the run while it was ordered and
    has not begun. It may run while a job holds the node, which ordered it."""
    repair_since: datetime | None = None
    repair_acts: bool = False
    """It was permitted to reset or reboot: one of the few that may at a time."""
    verdict: Verdict | None = None
    """Of the last repair whose examination came to one: HEALTHY or UNHEALTHY. None: there was none yet."""
    verdict_at: datetime | None = None
    verdict_reason: str = ""
    """Kept through whatever happens on the node later: it says how old it is."""
    repair_ended: str = ""
    """The last one that has ended; a message of it that comes late changes nothing."""
    power_cycles: tuple[datetime, ...] = ()
    """Permitted ones of the last three days: no journal of the node's tells of them."""
    rebooted_at: datetime | None = None
    """When a reboot or a power cycle was permitted last."""
    drain: Withdraw | None = None
    """A person wants it empty: whoever is on it was asked to leave; nobody new comes."""
    leave: Withdraw | None = None
    """The fleet wants it empty: it is a suspect, others were on it too, and they were asked to leave."""
    told: tuple[str, ...] = ()
    """Jobs that were asked to leave."""
    marks: tuple[Mark, ...] = ()
    """Newest last."""
    asked_at: datetime | None = None
    """When a look at it was ordered last."""
    gone: bool = False
    """The fleet file does not name it any more; it is kept until nobody is on it."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def foreign_processes(self) -> tuple[GpuUse, ...]:
        """Who uses GPUs of it that are relaunch's to give, and is none of its jobs."""
        given = [(tuple(gpu for gpu in use.gpus if gpu < self.spec.gpus), use.who) for use in self.inventory.used] if self.inventory else []
        return tuple(GpuUse(gpus, who) for gpus, who in given if gpus)

    @property
    def short(self) -> str:
        """What it lacks of the GPUs that the fleet file promises, in words; empty: nothing, or nobody knows."""
        return shortage(self.inventory, self.spec.gpus) if self.inventory and self.read_at and self.spec.gpus else ""


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    claim: Claim
    granted: tuple[Place, ...] | None = None
    """None: it waits."""
    said: str = ""
    """What it was told last while it waits, so that it is told only news."""
    waiting_since: datetime | None = None
    closed: bool = False
    """Its workflow has ended without giving its nodes back: whatever ranks are left are being stopped."""
    inherited: tuple[Place, ...] = ()
    """What an earlier submission of this job held, until this one has said that it knows."""
    inherited_launched: tuple[LaunchedGeneration, ...] = ()
    """The launches whose ranks may live there."""
    answer: Grant | None = None
    """The last one to this claim, other than that it waits."""
    told: bool = True
    """The answer is on its way to the job; False: it is to be told (again)."""
    said_at: datetime | None = None
    say_at: datetime | None = None
    """When there is news for it that had to wait, so that a busy fleet does not flood its jobs."""
    restored: bool = False
    """As the run before this one knew it; the job has not said yet what it holds."""
    moved: dict[str, str] = field(default_factory=dict)
    """Of `places`, nodes that have another address or user in the fleet file now than when ranks may
    have been started there: the earlier login of each. What answers now proves nothing of them."""

    @property
    def key(self) -> tuple[str, int]:
        return self.claim.job, self.claim.submission

    @property
    def places(self) -> tuple[Place, ...]:
        """All that nobody else may have: what it holds, what it was granted, and what an earlier submission held."""
        places: dict[str, Place] = {}
        for place in (*self.inherited, *self.claim.holds, *(self.granted or ())):
            other = places.get(place.node)
            if other is None or other.gpus == place.gpus:
                places[place.node] = place
            else:
                # No share is all of them.
                gpus = tuple(sorted({*other.gpus, *place.gpus})) if other.gpus and place.gpus else ()
                places[place.node] = replace(place, gpus=gpus)
        return tuple(places.values())

    @property
    def launched(self) -> tuple[LaunchedGeneration, ...]:
        """The launches whose ranks may live on `places`, each with its nodes."""
        granted = tuple(place.node for place in self.granted or ())
        own = (one if one.nodes else replace(one, nodes=granted, size=len(granted)) for one in self.claim.launched)
        return (*self.inherited_launched, *(one for one in own if one.nodes))

    @property
    def waits(self) -> bool:
        return self.granted is None and not self.closed


# --- the breaker -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Breaker:
    """Open: nothing is repaired and nothing is granted, until a person closes it."""

    reason: str = ""
    """Why it is open; empty: it is closed."""
    since: datetime | None = None
    paused: str = ""
    """Why a person has paused repairs (only those), with the name."""
    paused_since: datetime | None = None
    resumed_at: datetime | None = None
    """When a person ended a pause or closed it last."""

    @property
    def is_open(self) -> bool:
        return bool(self.reason)


@dataclass(frozen=True, slots=True)
class Answered:
    """A permit and whom it is for. The newest are kept: who asks twice is answered twice, and the same."""

    workflow: str
    permit: Permit
    told: bool = False


# --- the state ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The last word of a job that has nothing any more; what it said before that and what comes late changes nothing."""

    job: str
    submission: int
    seq: int
    at: datetime


@dataclass(frozen=True, slots=True)
class BehindClaim:
    """A claim with a lower submission than one that the fleet knows, to be answered so."""

    job: str
    submission: int
    seq: int
    above: int


@dataclass(frozen=True, slots=True)
class Reclaiming:
    job: str
    submission: int
    at: datetime
    """When it was ordered last."""


@dataclass(frozen=True, slots=True)
class Offered:
    """An offer, from when it was made until the next one to this job may be."""

    job: str
    submission: int
    seq: int
    places: tuple[Place, ...]
    until: datetime
    """Till then nobody else gets them, unless the job says before that it goes on without."""

    @property
    def offer(self) -> Offer:
        return Offer(self.submission, self.seq, tuple(place.node for place in self.places), self.until)


@dataclass(frozen=True, slots=True)
class FleetState:
    name: str
    repairs: Literal["act", "ask", "observe"] = "ask"
    limits: FleetLimits = field(default_factory=FleetLimits)
    nodes: tuple[NodeRecord, ...] = ()
    """As the fleet file orders them; who left the file while it was used stays, quarantined, until nobody does."""
    claims: tuple[ClaimRecord, ...] = ()
    breaker: Breaker = Breaker()
    requests: tuple[PermitRequest, ...] = ()
    """Not answered yet."""
    reboots: tuple[datetime, ...] = ()
    """Permitted ones of the last hour."""
    awaited: tuple[str, ...] | None = None
    """Jobs that have not said yet what they hold, since this fleet began to be; None: nobody has looked which there are."""
    settles_at: datetime | None = None
    """When they are no longer awaited."""
    notices: tuple[str, ...] = ()
    """What people did and what could not be understood, newest last, with time and name."""
    looks: int = 0
    """Ordered ones, counted, so that a person sees that somebody looks."""
    applied: bool = False
    """The fleet file was read."""
    remembered: bool = False
    """It was learned what the run before this one knew of nodes, or given up to learn it."""
    remembers_until: datetime | None = None
    """When that is given up."""
    restore_error: str = ""
    """Why it is not known who held which nodes before this run began; empty: it is known."""
    begun: bool = False
    """Each node was looked at: before that nobody knows who lives where, and nothing is granted."""
    swept_at: datetime | None = None
    """When a look at all nodes was ordered last."""
    moved_at: datetime | None = None
    """When a running job was granted nodes last, or asked to yield: two jobs that wait longer stand in each other's way."""
    asked: tuple[str, ...] = ()
    """Jobs that were asked what they hold."""
    given_back: tuple[GivenBack, ...] = ()
    """Newest last."""
    behind: tuple[BehindClaim, ...] = ()
    reclaims: tuple[Reclaiming, ...] = ()
    answered: tuple[Answered, ...] = ()
    """Permits, newest last."""
    out_when_resumed: int = 0
    """How many nodes were out when a person closed the breaker over them: only one more opens it again."""
    offers: tuple[Offered, ...] = ()
    """Of each job the last one."""
