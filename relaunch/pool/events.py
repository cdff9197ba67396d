"""Events that a fleet takes in, one at a time, and orders that it gives.

Each event may arrive twice; `apply_event` applies them. `schedule` gives each order once; the
workflow carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field

from relaunch.access.orders import SignedText
from relaunch.evidence.findings import Verdict
from relaunch.pool.messages import (
    Claim,
    DrainRequest,
    FaultReport,
    Grant,
    Healing,
    Offer,
    Permit,
    PermitRequest,
)
from relaunch.pool.state import (
    Breaker,
    ClaimRecord,
    FleetState,
    NodeProbe,
    NodeRecord,
    RemovedNode,
)
from relaunch.spec.access import Access
from relaunch.spec.fleet import FleetLimits, FleetNode
from relaunch.spec.policy import Strategy


@dataclass(frozen=True, slots=True)
class FleetFileContent:
    """The current content of the fleet file."""

    repairs: Literal["act", "ask", "observe"]
    nodes: tuple[FleetNode, ...]
    limits: FleetLimits
    kind: Literal["FleetFileContent"] = "FleetFileContent"
    access: Access | None = None
    """Who may do what; None: everyone may do everything."""


@dataclass(frozen=True, slots=True)
class RunningJobs:
    """The jobs of this fleet that run, asked for when the fleet starts."""

    jobs: tuple[str, ...]
    kind: Literal["RunningJobs"] = "RunningJobs"


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """What the previous run of the fleet knew, without probes and repairs."""

    nodes: tuple[NodeRecord, ...] = ()
    claims: tuple[ClaimRecord, ...] = ()
    """Claims of jobs that held nodes, or whose ranks may have lived on some: a node that does not
    answer cannot report them."""
    breaker: Breaker = field(default_factory=Breaker)
    lost: str = ""
    """Why some or all of it can no longer be read; empty if nothing is lost."""
    logins: dict[str, str] = field(default_factory=dict)
    """The login of each node that jobs held: the fleet file may have changed since."""
    removed: tuple[RemovedNode, ...] = ()
    """Nodes that the file named no more."""
    kind: Literal["PreviousRun"] = "PreviousRun"


@dataclass(frozen=True, slots=True)
class ClaimEvent:
    claim: Claim
    kind: Literal["ClaimEvent"] = "ClaimEvent"


@dataclass(frozen=True, slots=True)
class FaultReportEvent:
    """A job has had faults and continues with the nodes that it has."""

    report: FaultReport
    kind: Literal["FaultReportEvent"] = "FaultReportEvent"


@dataclass(frozen=True, slots=True)
class ProbeResults:
    probes: tuple[NodeProbe, ...]
    is_sweep: bool = False
    """All nodes were probed, and the others have answered as they did before."""
    kind: Literal["ProbeResults"] = "ProbeResults"


@dataclass(frozen=True, slots=True)
class EndedJobs:
    """The workflows of these claims (job, submission) no longer run."""

    jobs: tuple[tuple[str, int], ...]
    kind: Literal["EndedJobs"] = "EndedJobs"


@dataclass(frozen=True, slots=True)
class ReclaimResult:
    """No rank of this submission lives on these nodes any more: proven, or fenced by elapsed
    time."""

    job: str
    submission: int
    nodes: tuple[str, ...]
    kind: Literal["ReclaimResult"] = "ReclaimResult"


@dataclass(frozen=True, slots=True)
class RepairStart:
    node: str
    workflow: str
    run: str
    by: str
    reason: str
    kind: Literal["RepairStart"] = "RepairStart"


@dataclass(frozen=True, slots=True)
class PermitRequestEvent:
    request: PermitRequest
    kind: Literal["PermitRequestEvent"] = "PermitRequestEvent"


@dataclass(frozen=True, slots=True)
class RepairResult:
    node: str
    workflow: str
    run: str
    by: str
    job: str
    """The job that ordered the repair and waits for it; empty if the fleet or a person ordered
    it."""
    outcome: Literal["done", "refused", "ambiguous"]
    verdict: Verdict
    reason: str
    healing: Healing | None = None
    """What healed the node, if something was done to it and it was examined healthy then."""
    kind: Literal["RepairResult"] = "RepairResult"


@dataclass(frozen=True, slots=True)
class QuarantineCommand:
    node: str
    reason: str
    by: str
    drain_within: timedelta | None = None
    """Also drain the node: its job leaves at its next launch, at the latest after this time. None:
    the job may stay."""
    kind: Literal["QuarantineCommand"] = "QuarantineCommand"
    signed: SignedText | None = None


@dataclass(frozen=True, slots=True)
class ReleaseCommand:
    """A person puts a node back into service, also out of SUSPECT, and vouches for it."""

    node: str
    reason: str
    by: str
    kind: Literal["ReleaseCommand"] = "ReleaseCommand"
    signed: SignedText | None = None


@dataclass(frozen=True, slots=True)
class DeathDeclaration:
    """A person declares that no rank of ended jobs runs on a node any more."""

    node: str
    reason: str
    by: str
    kind: Literal["DeathDeclaration"] = "DeathDeclaration"
    signed: SignedText | None = None


@dataclass(frozen=True, slots=True)
class PauseCommand:
    reason: str
    by: str
    kind: Literal["PauseCommand"] = "PauseCommand"
    signed: SignedText | None = None


@dataclass(frozen=True, slots=True)
class ResumeCommand:
    """A person closes the breaker or, where it is closed, ends a pause. Pending permit requests are
    refused, because they were decided on older facts."""

    reason: str
    by: str
    ends_both: bool = False
    """End the pause with the breaker, as release 0.1.0 did: only in the replay of its histories."""
    kind: Literal["ResumeCommand"] = "ResumeCommand"
    signed: SignedText | None = None


@dataclass(frozen=True, slots=True)
class MalformedMessage:
    """A message that could not be parsed."""

    name: str
    reason: str
    kind: Literal["MalformedMessage"] = "MalformedMessage"


PersonCommand = QuarantineCommand | ReleaseCommand | DeathDeclaration | PauseCommand | ResumeCommand
"""What a person orders of a fleet; `signed` is what may prove who that is."""

FleetEvent = Annotated[
    FleetFileContent
    | RunningJobs
    | PreviousRun
    | ClaimEvent
    | FaultReportEvent
    | ProbeResults
    | EndedJobs
    | ReclaimResult
    | RepairStart
    | PermitRequestEvent
    | RepairResult
    | QuarantineCommand
    | ReleaseCommand
    | DeathDeclaration
    | PauseCommand
    | ResumeCommand
    | MalformedMessage,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Probe these nodes now: a claim waits for them, or a probe is due. Not ordered again while one
    is under way."""

    nodes: tuple[str, ...]
    inventories: tuple[str, ...] = ()
    """Those of the nodes whose GPUs are also read: their inventory and the processes on them."""


@dataclass(frozen=True, slots=True)
class GrantMessage:
    job: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class OfferMessage:
    job: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class DrainMessage:
    job: str
    request: DrainRequest


@dataclass(frozen=True, slots=True)
class ClaimReminder:
    """Ask a job to claim again, because this fleet does not know what the job holds."""

    job: str


@dataclass(frozen=True, slots=True)
class ReclaimOrder:
    """Stop all ranks of this submission and of earlier ones that live on these nodes."""

    job: str
    submission: int
    nodes: tuple[str, ...]
    generation: int | None = None
    """The submission still runs, elsewhere: stop nothing above this generation of it."""

    @property
    def key(self) -> str:
        """Orders with the same key are carried out one at a time."""
        above = "" if self.generation is None else f"/{self.generation}"
        return f"reclaim/{self.job}/{self.submission}{above}"


@dataclass(frozen=True, slots=True)
class RepairRequest:
    node: str
    reason: str
    gpus: tuple[str, ...] = ()
    strategy: Strategy | None = None
    """None: the strategy that an examination calls for."""
    after_reboot: bool = False
    """The node has been silent since a reboot."""
    healed: tuple[Healing, ...] = ()
    """What was done to the node within `limits.cool_down`, which is not done again."""


@dataclass(frozen=True, slots=True)
class PermitMessage:
    workflow: str
    permit: Permit


Order = (
    ProbeOrder
    | GrantMessage
    | OfferMessage
    | DrainMessage
    | ClaimReminder
    | ReclaimOrder
    | RepairRequest
    | PermitMessage
)


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    state: FleetState
    orders: tuple[Order, ...] = field(default_factory=tuple)
