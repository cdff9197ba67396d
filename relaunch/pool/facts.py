"""Facts that a fleet takes in, one at a time. Each may arrive twice. `learn` applies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field

from relaunch.evidence.findings import Verdict
from relaunch.pool.messages import Claim, FaultReport, PermitRequest
from relaunch.pool.state import Breaker, ClaimRecord, NodeProbe, NodeRecord
from relaunch.spec.fleet import FleetLimits, FleetNode


@dataclass(frozen=True, slots=True)
class Applied:
    """The current content of the fleet file."""

    repairs: Literal["act", "ask", "observe"]
    nodes: tuple[FleetNode, ...]
    limits: FleetLimits
    kind: Literal["Applied"] = "Applied"


@dataclass(frozen=True, slots=True)
class JobsFound:
    """The jobs of this fleet that run, asked for when the fleet starts."""

    jobs: tuple[str, ...]
    kind: Literal["JobsFound"] = "JobsFound"


@dataclass(frozen=True, slots=True)
class Remembered:
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
    kind: Literal["Remembered"] = "Remembered"


@dataclass(frozen=True, slots=True)
class Claimed:
    claim: Claim
    kind: Literal["Claimed"] = "Claimed"


@dataclass(frozen=True, slots=True)
class FaultsReported:
    """A job has had faults and continues with the nodes that it has."""

    report: FaultReport
    kind: Literal["FaultsReported"] = "FaultsReported"


@dataclass(frozen=True, slots=True)
class Looked:
    looks: tuple[NodeProbe, ...]
    kind: Literal["Looked"] = "Looked"


@dataclass(frozen=True, slots=True)
class JobsClosed:
    """The workflows of these claims (job, submission) no longer run."""

    jobs: tuple[tuple[str, int], ...]
    kind: Literal["JobsClosed"] = "JobsClosed"


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """No rank of this submission lives on these nodes any more: proven, or fenced by elapsed
    time."""

    job: str
    submission: int
    nodes: tuple[str, ...]
    kind: Literal["Reclaimed"] = "Reclaimed"


@dataclass(frozen=True, slots=True)
class RepairBegan:
    node: str
    workflow: str
    run: str
    by: str
    reason: str
    kind: Literal["RepairBegan"] = "RepairBegan"


@dataclass(frozen=True, slots=True)
class PermitWanted:
    request: PermitRequest
    kind: Literal["PermitWanted"] = "PermitWanted"


@dataclass(frozen=True, slots=True)
class RepairEnded:
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
    kind: Literal["RepairEnded"] = "RepairEnded"


@dataclass(frozen=True, slots=True)
class QuarantineAsked:
    node: str
    reason: str
    by: str
    drain_within: timedelta | None = None
    """Also drain the node: its job leaves at its next launch, at the latest after this time. None:
    the job may stay."""
    kind: Literal["QuarantineAsked"] = "QuarantineAsked"


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """A person puts a node back into service, also out of SUSPECT, and vouches for it."""

    node: str
    reason: str
    by: str
    kind: Literal["ReleaseAsked"] = "ReleaseAsked"


@dataclass(frozen=True, slots=True)
class DeadDeclared:
    """A person declares that no rank of ended jobs runs on a node any more."""

    node: str
    reason: str
    by: str
    kind: Literal["DeadDeclared"] = "DeadDeclared"


@dataclass(frozen=True, slots=True)
class PauseAsked:
    reason: str
    by: str
    kind: Literal["PauseAsked"] = "PauseAsked"


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """A person ends a pause and closes the breaker. Pending permit requests are refused, because
    they were decided on older facts."""

    reason: str
    by: str
    kind: Literal["ResumeAsked"] = "ResumeAsked"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message that could not be parsed."""

    name: str
    reason: str
    kind: Literal["Rejected"] = "Rejected"


Fact = Annotated[
    Applied
    | JobsFound
    | Remembered
    | Claimed
    | FaultsReported
    | Looked
    | JobsClosed
    | Reclaimed
    | RepairBegan
    | PermitWanted
    | RepairEnded
    | QuarantineAsked
    | ReleaseAsked
    | DeadDeclared
    | PauseAsked
    | ResumeAsked
    | Rejected,
    Field(discriminator="kind"),
]
