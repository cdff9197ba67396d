"""What a fleet is told: one fact at a time, each of which may come twice. What follows from it is `learn`'s."""

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
    """The fleet file, as it is now."""

    repairs: Literal["act", "ask", "observe"]
    nodes: tuple[FleetNode, ...]
    limits: FleetLimits
    kind: Literal["Applied"] = "Applied"


@dataclass(frozen=True, slots=True)
class JobsFound:
    """Which jobs of this fleet run: asked once, when the fleet begins."""

    jobs: tuple[str, ...]
    kind: Literal["JobsFound"] = "JobsFound"


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the fleet knew before it began anew. Without looks and repairs."""

    nodes: tuple[NodeRecord, ...] = ()
    claims: tuple[ClaimRecord, ...] = ()
    """Of the jobs that held nodes, or whose ranks may have lived on some: a node that does not answer cannot tell of them."""
    breaker: Breaker = field(default_factory=Breaker)
    lost: str = ""
    """Why some of it, or all, is not to be had any more."""
    logins: dict[str, str] = field(default_factory=dict)
    """How the nodes were reached that jobs held: the fleet file may have changed since."""
    kind: Literal["Remembered"] = "Remembered"


@dataclass(frozen=True, slots=True)
class Claimed:
    claim: Claim
    kind: Literal["Claimed"] = "Claimed"


@dataclass(frozen=True, slots=True)
class FaultsReported:
    """A job has met faults, and goes on with the nodes that it has."""

    report: FaultReport
    kind: Literal["FaultsReported"] = "FaultsReported"


@dataclass(frozen=True, slots=True)
class Looked:
    looks: tuple[NodeProbe, ...]
    kind: Literal["Looked"] = "Looked"


@dataclass(frozen=True, slots=True)
class JobsClosed:
    """Workflows of these claims (job, submission) do not run any more."""

    jobs: tuple[tuple[str, int], ...]
    kind: Literal["JobsClosed"] = "JobsClosed"


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """No rank of this submission lives on these nodes any more: proven, or fenced by the time that has passed."""

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
    """Which ordered it and waits for it; empty: the fleet or a person."""
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
    """Also have it left: by its job's next launch, and at the latest after this time. None: its job may stay."""
    kind: Literal["QuarantineAsked"] = "QuarantineAsked"


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """Back into service, also out of SUSPECT; the person vouches for it."""

    node: str
    reason: str
    by: str
    kind: Literal["ReleaseAsked"] = "ReleaseAsked"


@dataclass(frozen=True, slots=True)
class DeadDeclared:
    """A person vouches that nothing of jobs that have ended runs on a node any more."""

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
    """Ends a pause and closes the breaker. What asked meanwhile is refused: it was decided on what was true then."""

    reason: str
    by: str
    kind: Literal["ResumeAsked"] = "ResumeAsked"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message that could not be understood."""

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
