"""What a job acts on: events, in the past tense. What to do about them is `decide`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field

from relaunch.evidence.observations import Observation
from relaunch.generation import LaunchedGeneration
from relaunch.job.places import StartedPlaces
from relaunch.job.state import ExaminedNode, Slot
from relaunch.spec.policy import Policy, Strategy


@dataclass(frozen=True, slots=True)
class Submitted:
    """A person started the job, or started it again from its old state."""

    reason: str
    by: str
    kind: Literal["Submitted"] = "Submitted"


@dataclass(frozen=True, slots=True)
class NodesAcquired:
    slots: tuple[Slot, ...]
    """In the order of their group ranks."""
    fewer: str = ""
    """Why they are fewer than the job would take, a clause; empty: they are not."""
    kind: Literal["NodesAcquired"] = "NodesAcquired"


@dataclass(frozen=True, slots=True)
class LaunchOrdered:
    """The order to launch goes out with this: from here on ranks of it may exist."""

    generation: int
    launch: LaunchedGeneration
    kind: Literal["LaunchOrdered"] = "LaunchOrdered"


@dataclass(frozen=True, slots=True)
class RanksFound:
    """Ranks of an earlier submission live on these nodes: it was ended without stopping them."""

    nodes: tuple[str, ...]
    launched: tuple[LaunchedGeneration, ...] = ()
    """What is known of the launches that they may be of."""
    places: tuple[StartedPlaces, ...] = ()
    """Where they may have been started, of a launch that was given up half-way."""
    kind: Literal["RanksFound"] = "RanksFound"


@dataclass(frozen=True, slots=True)
class NodesMissing:
    reason: str
    hopeless: bool = False
    """No wait can help: the fleet has fewer nodes than the job asks for, or there is no such fleet."""
    kind: Literal["NodesMissing"] = "NodesMissing"


@dataclass(frozen=True, slots=True)
class NodesOffered:
    """The fleet keeps these for the job for a while, beside those that it has."""

    nodes: tuple[str, ...]
    until: datetime
    kind: Literal["NodesOffered"] = "NodesOffered"


@dataclass(frozen=True, slots=True)
class NodesGranted:
    """The fleet's answer to a job that asked for more, while its ranks ran on."""

    generation: int
    nodes: tuple[str, ...]
    """All that it may have now."""
    kind: Literal["NodesGranted"] = "NodesGranted"


@dataclass(frozen=True, slots=True)
class Launched:
    generation: int
    stopped_at: datetime
    """When every older rank was proven gone on all nodes."""
    started_at: datetime
    """When every node had answered that its ranks run."""
    places: dict[str, str] = field(default_factory=dict)
    """`Place.text` by node: where they were started."""
    kind: Literal["Launched"] = "Launched"


@dataclass(frozen=True, slots=True)
class NodeRefusal:
    node: str
    why: str
    """The agent's word: not_above, stopped, stuck, expired, command_not_found, workdir_missing, cannot_start, …"""
    reason: str
    highest: tuple[int, int] | None = None
    """(submission, generation) that the node has seen, for not_above and stopped."""


@dataclass(frozen=True, slots=True)
class LaunchRefused:
    generation: int
    refusals: tuple[NodeRefusal, ...]
    started: bool = False
    """`start` was sent to some node: its ranks may run."""
    places: dict[str, str] = field(default_factory=dict)
    """As in Launched, where some may have been started."""
    kind: Literal["LaunchRefused"] = "LaunchRefused"


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """Some nodes did not answer."""

    generation: int
    unreachable: tuple[str, ...]
    started: bool
    """`start` was sent: ranks may run on any of the nodes. Otherwise only older ranks may live, where there were some."""
    may_start_within: timedelta
    """How long a node that did not answer may still take an order that was sent."""
    reason: str
    places: dict[str, str] = field(default_factory=dict)
    """As in Launched, where some may have been started."""
    elsewhere: tuple[str, ...] = ()
    """Those of `unreachable` that answer, but not from where older ranks were started."""
    kind: Literal["LaunchFailed"] = "LaunchFailed"


@dataclass(frozen=True, slots=True)
class FaultObserved:
    generation: int
    observations: tuple[Observation, ...]
    """Earliest first. Only those that may be the root; the rest is counted in `more`."""
    more: int
    opened_at: datetime
    """When the first of them reached the watcher."""
    silent: tuple[tuple[str, timedelta], ...] = ()
    """Nodes that did not answer at that moment, and for how long: not lost yet, but suspects where nobody else is."""
    unheard: tuple[tuple[str, timedelta], ...] = ()
    """Nodes reported lost before that have not returned, and for how long this watch has not heard
    them: newer than what was reported."""
    kind: Literal["FaultObserved"] = "FaultObserved"


@dataclass(frozen=True, slots=True)
class RanksSucceeded:
    generation: int
    kind: Literal["RanksSucceeded"] = "RanksSucceeded"


@dataclass(frozen=True, slots=True)
class NodeUnreachable:
    """A live watcher tried for `lost_after` and failed."""

    generation: int
    node: str
    unheard_for: timedelta
    """Since its last word to this watcher (or since this watcher began): an age, because clocks of controllers differ."""
    reason: str
    is_elsewhere: bool = False
    """It answers, but not from where its ranks were started; `reason` says so, naming it."""
    kind: Literal["NodeUnreachable"] = "NodeUnreachable"


@dataclass(frozen=True, slots=True)
class NodeReturned:
    generation: int
    node: str
    kind: Literal["NodeReturned"] = "NodeReturned"


@dataclass(frozen=True, slots=True)
class RanksHung:
    generation: int
    ranks: tuple[int, ...]
    """The slowest ranks, at most 16."""
    reason: str
    opened_at: datetime
    silent: tuple[tuple[str, timedelta], ...] = ()
    """As in FaultObserved."""
    unheard: tuple[tuple[str, timedelta], ...] = ()
    """As in FaultObserved."""
    kind: Literal["RanksHung"] = "RanksHung"


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    """Rides with every report of a watch."""

    generation: int
    step: int
    at: datetime
    kind: Literal["ProgressSeen"] = "ProgressSeen"


@dataclass(frozen=True, slots=True)
class StepReached:
    """Training has passed `JobState.report_at_step`."""

    generation: int
    step: int
    at: datetime
    kind: Literal["StepReached"] = "StepReached"


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint was finished, since somebody waits for one: of this step, or a later one, by each rank that tells of its own."""

    generation: int
    step: int
    at: datetime
    kind: Literal["CheckpointSaved"] = "CheckpointSaved"


@dataclass(frozen=True, slots=True)
class RanksStopped:
    """No rank is left on these nodes: proven, or fenced by the time that has passed."""

    generation: int
    nodes: tuple[str, ...]
    at: datetime
    fenced: tuple[str, ...] = ()
    """Those of `nodes` that did not answer, and must have stopped their ranks themselves by now."""
    kind: Literal["RanksStopped"] = "RanksStopped"


@dataclass(frozen=True, slots=True)
class NodesExamined:
    generation: int
    examined: tuple[ExaminedNode, ...]
    """One per suspect that was asked about; one that did not answer is there with the verdict UNKNOWN."""
    kind: Literal["NodesExamined"] = "NodesExamined"


@dataclass(frozen=True, slots=True)
class RepairEnded:
    generation: int
    strategy: Strategy
    nodes: tuple[str, ...]
    outcome: Literal["done", "refused", "ambiguous"]
    reason: str
    kind: Literal["RepairEnded"] = "RepairEnded"


@dataclass(frozen=True, slots=True)
class RepairAsks:
    """A repair that the job waits for waits for a person, or does no longer."""

    node: str
    question: str
    """Empty: it has its answer, or goes on without one."""
    until: datetime | None = None
    kind: Literal["RepairAsks"] = "RepairAsks"


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The declared end of a wait (`Wait.until`)."""

    due: datetime | None = None
    """Of which wait: its end and an answer may come in one moment. None: of whichever there is."""
    kind: Literal["DeadlinePassed"] = "DeadlinePassed"


@dataclass(frozen=True, slots=True)
class CancelRequested:
    reason: str
    by: str
    kind: Literal["CancelRequested"] = "CancelRequested"


@dataclass(frozen=True, slots=True)
class RetryRequested:
    reason: str
    by: str
    avoid_nodes: tuple[str, ...] = ()
    renew_budgets: bool = False
    kind: Literal["RetryRequested"] = "RetryRequested"


@dataclass(frozen=True, slots=True)
class Answered:
    """What a person says to what the job asks, or takes out of its hands."""

    decision: Literal["approve", "deny", "snooze", "take-over"]
    reason: str
    by: str
    until: datetime | None = None
    """Of a snooze: when it is asked again."""
    node: str = ""
    """Which somebody wants of the job: this is said to that, and not to what the job asks."""
    kind: Literal["Answered"] = "Answered"


@dataclass(frozen=True, slots=True)
class NodeDeclaredDead:
    node: str
    reason: str
    by: str
    kind: Literal["NodeDeclaredDead"] = "NodeDeclaredDead"


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Somebody wants a node: a person, for maintenance, or the fleet, because it has to be examined and others are on it too."""

    node: str
    reason: str
    by: str
    until: datetime
    kind: Literal["DrainRequested"] = "DrainRequested"


@dataclass(frozen=True, slots=True)
class DrainCancelled:
    """Nobody wants that node any more."""

    node: str
    reason: str
    kind: Literal["DrainCancelled"] = "DrainCancelled"


@dataclass(frozen=True, slots=True)
class DrainDue:
    """The time until which the job should have left a node by itself is over."""

    node: str
    kind: Literal["DrainDue"] = "DrainDue"


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    policy: Policy
    reason: str
    by: str
    kind: Literal["PolicyChanged"] = "PolicyChanged"


@dataclass(frozen=True, slots=True)
class IncidentsArchived:
    """The oldest closed incidents are in the archive now."""

    count: int
    kind: Literal["IncidentsArchived"] = "IncidentsArchived"


@dataclass(frozen=True, slots=True)
class SubmissionRaised:
    """A later submission of this job is known than its number says, so it takes a higher one before anything is launched."""

    submission: int
    kind: Literal["SubmissionRaised"] = "SubmissionRaised"


@dataclass(frozen=True, slots=True)
class MessageRejected:
    """A signal that could not be understood, or was refused; kept so that its sender sees why nothing happened."""

    name: str
    reason: str
    what: Literal["was not understood", "was refused"] = "was not understood"
    kind: Literal["MessageRejected"] = "MessageRejected"


Event = Annotated[
    Submitted
    | NodesAcquired
    | NodesMissing
    | NodesOffered
    | NodesGranted
    | LaunchOrdered
    | RanksFound
    | Launched
    | LaunchRefused
    | LaunchFailed
    | FaultObserved
    | RanksSucceeded
    | NodeUnreachable
    | NodeReturned
    | RanksHung
    | ProgressSeen
    | StepReached
    | CheckpointSaved
    | RanksStopped
    | NodesExamined
    | RepairEnded
    | RepairAsks
    | DeadlinePassed
    | CancelRequested
    | RetryRequested
    | Answered
    | NodeDeclaredDead
    | DrainRequested
    | DrainCancelled
    | DrainDue
    | PolicyChanged
    | IncidentsArchived
    | SubmissionRaised
    | MessageRejected,
    Field(discriminator="kind"),
]
