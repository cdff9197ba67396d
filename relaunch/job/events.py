"""The events that a job acts on, named in the past tense. `decide` chooses the response."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field

from relaunch.evidence.observations import Observation, RankExited
from relaunch.evidence.reachability import LinkFindings
from relaunch.evidence.stacks import HungRank
from relaunch.evidence.stragglers import SlowNode
from relaunch.generation import LaunchedGeneration
from relaunch.job.accounts import RunFigures
from relaunch.job.places import StartedPlaces
from relaunch.job.state import ExaminedNode, ForeignUse, Slot, UnstoppedNode
from relaunch.spec.policy import Policy, Strategy


@dataclass(frozen=True, slots=True)
class Submitted:
    """A person submitted the job, or submitted it again from its old state."""

    reason: str
    by: str
    kind: Literal["Submitted"] = "Submitted"


@dataclass(frozen=True, slots=True)
class NodesAcquired:
    slots: tuple[Slot, ...]
    """In the order of their group ranks."""
    fewer: str = ""
    """A clause that says why there are fewer than the job would take; empty: there are not."""
    kind: Literal["NodesAcquired"] = "NodesAcquired"


@dataclass(frozen=True, slots=True)
class LaunchOrdered:
    """The order to launch is sent: from then on ranks of this generation may exist."""

    generation: int
    launch: LaunchedGeneration
    kind: Literal["LaunchOrdered"] = "LaunchOrdered"


@dataclass(frozen=True, slots=True)
class RanksFound:
    """Ranks of an earlier submission may be alive here: it ended without stopping them."""

    nodes: tuple[str, ...]
    launched: tuple[LaunchedGeneration, ...] = ()
    """The known launches to which they may belong."""
    places: tuple[StartedPlaces, ...] = ()
    """Where a launch that was given up before it completed may have started them."""
    kind: Literal["RanksFound"] = "RanksFound"


@dataclass(frozen=True, slots=True)
class NodesMissing:
    reason: str
    hopeless: bool = False
    """Whether no wait can help: the fleet has too few nodes in total, or there is no such fleet."""
    kind: Literal["NodesMissing"] = "NodesMissing"


@dataclass(frozen=True, slots=True)
class NodesOffered:
    """The fleet reserves these nodes for the job for a while, in addition to those that it has."""

    nodes: tuple[str, ...]
    until: datetime
    kind: Literal["NodesOffered"] = "NodesOffered"


@dataclass(frozen=True, slots=True)
class NodesGranted:
    """The fleet's answer to a job that asked for more nodes while its ranks keep running."""

    generation: int
    nodes: tuple[str, ...]
    """All nodes that the job may have now."""
    kind: Literal["NodesGranted"] = "NodesGranted"


@dataclass(frozen=True, slots=True)
class Launched:
    generation: int
    stopped_at: datetime
    """When every older rank was proven gone on all nodes."""
    started_at: datetime
    """When every node had reported that its ranks run."""
    places: dict[str, str] = field(default_factory=dict)
    """`Place.text` by node: where the ranks were started."""
    kind: Literal["Launched"] = "Launched"
    step: int | None = None
    """The step that all ranks had reached in `step_generation` when they were gone."""
    step_generation: int | None = None
    """The newest generation that nodes know a last step of: it may not be the one before."""
    warm: str = ""
    """How its ranks began, if modules were to be imported ahead; a clause for people."""


@dataclass(frozen=True, slots=True)
class NodeRefusal:
    node: str
    why: str
    """The agent's refusal code: not_above, stopped, stuck, expired, command_not_found,
    workdir_missing, cannot_start, address_not_ready, …"""
    reason: str
    highest: tuple[int, int] | None = None
    """(submission, generation) that the node has seen, for not_above and stopped."""


@dataclass(frozen=True, slots=True)
class LaunchRefused:
    generation: int
    refusals: tuple[NodeRefusal, ...]
    started: bool = False
    """Whether `start` was sent to some node, so that its ranks may run."""
    places: dict[str, str] = field(default_factory=dict)
    """As in Launched, for the nodes where ranks may have been started."""
    kind: Literal["LaunchRefused"] = "LaunchRefused"


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """A launch failed because some nodes did not answer."""

    generation: int
    unreachable: tuple[str, ...]
    started: bool
    """Whether `start` was sent, so that ranks may run on any of the nodes.

    Otherwise only older ranks may be alive, where there were some.
    """
    may_start_within: timedelta
    """How long a node that did not answer may still accept an order that was sent."""
    reason: str
    places: dict[str, str] = field(default_factory=dict)
    """As in Launched, for the nodes where ranks may have been started."""
    elsewhere: tuple[str, ...] = ()
    """Those of `unreachable` that answer, but not from where older ranks were started."""
    kind: Literal["LaunchFailed"] = "LaunchFailed"


@dataclass(frozen=True, slots=True)
class FaultObserved:
    generation: int
    observations: tuple[Observation, ...]
    """Only those that may be the root, the earliest first; the others are counted in `more`."""
    more: int
    opened_at: datetime
    """When the first of them reached the watcher."""
    silent: tuple[tuple[str, timedelta], ...] = ()
    """Nodes that did not answer at that moment, and for how long.

    They are not lost yet, but they are the suspects where there is no other.
    """
    unheard: tuple[tuple[str, timedelta], ...] = ()
    """Nodes that were reported lost and have not returned, and for how long this watch has not
    heard from them: newer than the report of their loss."""
    finished: tuple[RankExited, ...] = ()
    """Ranks that had exited with 0, the earliest first, after which the others took no more steps.

    No fault by themselves: they explain why others lost a connection or timed out.
    """
    kind: Literal["FaultObserved"] = "FaultObserved"


@dataclass(frozen=True, slots=True)
class RanksSucceeded:
    generation: int
    kind: Literal["RanksSucceeded"] = "RanksSucceeded"


@dataclass(frozen=True, slots=True)
class NodeUnreachable:
    """A live watcher has tried to reach a node for `lost_after` and failed."""

    generation: int
    node: str
    unheard_for: timedelta
    """Time since the node's last answer to this watcher, or since this watcher began.

    An age instead of a date, because the clocks of controllers differ.
    """
    reason: str
    is_elsewhere: bool = False
    """It answers, but not from where its ranks were started; `reason` says so with its name."""
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
    """The suspects, then the slowest ranks, at most 16."""
    reason: str
    opened_at: datetime
    silent: tuple[tuple[str, timedelta], ...] = ()
    """As in FaultObserved."""
    unheard: tuple[tuple[str, timedelta], ...] = ()
    """As in FaultObserved."""
    kind: Literal["RanksHung"] = "RanksHung"
    suspects: tuple[HungRank, ...] = ()
    """The ranks for which the others wait, as far as their stacks show, at most 16."""
    groups: tuple[str, ...] = ()
    """Where all ranks were, in lines for people, the widest group first."""
    rule: str = "limit"
    """What decided it: `limit`, `at_most`, or one of `hang.rules`."""
    is_cut_off: bool = False
    """Whether nothing is acknowledged on a connection between two ranks."""


@dataclass(frozen=True, slots=True)
class NodesSlow:
    """Nodes are slower than the others, for long. Each is reported once in a generation."""

    generation: int
    slow: tuple[SlowNode, ...]
    """The slowest first, at most 16."""
    kind: Literal["NodesSlow"] = "NodesSlow"


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    """The step that training has reached, sent with every report of a watch."""

    generation: int
    step: int
    at: datetime
    kind: Literal["ProgressSeen"] = "ProgressSeen"
    restarts: bool = False
    """Whether a rank's counter has started again while the rank lived, as a bar does each epoch."""
    figures: RunFigures | None = None
    """None: another watch of the generation learns them, or an older build saw this."""


@dataclass(frozen=True, slots=True)
class StepReached:
    """Training has passed `JobState.report_at_step`."""

    generation: int
    step: int
    at: datetime
    kind: Literal["StepReached"] = "StepReached"


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint was finished while the job waits for one.

    Each rank that reports its own checkpoints has finished that of this step, or a later one.
    """

    generation: int
    step: int
    at: datetime
    kind: Literal["CheckpointSaved"] = "CheckpointSaved"


@dataclass(frozen=True, slots=True)
class RanksStopped:
    """No rank is left on these nodes: this is proven, or they must have fenced by now."""

    generation: int
    nodes: tuple[str, ...]
    at: datetime
    fenced: tuple[str, ...] = ()
    """Those of `nodes` that did not answer and must have stopped their ranks themselves by now."""
    kind: Literal["RanksStopped"] = "RanksStopped"
    step: int | None = None
    """The step that all ranks had reached when they were gone, which no heartbeat may have said."""


@dataclass(frozen=True, slots=True)
class StopUnproven:
    """A stop is tried for long, and no time will prove it: a person has to hear of it."""

    generation: int
    nodes: tuple[UnstoppedNode, ...]
    stopped: tuple[str, ...] = ()
    """The nodes that are proven stopped."""
    kind: Literal["StopUnproven"] = "StopUnproven"


@dataclass(frozen=True, slots=True)
class NodesExamined:
    generation: int
    examined: tuple[ExaminedNode, ...]
    """One for each examined suspect; a node that did not answer has the verdict UNKNOWN."""
    kind: Literal["NodesExamined"] = "NodesExamined"
    links: LinkFindings | None = None
    """What was found out about their links, where that was asked, and not the nodes examined."""
    foreign: tuple[ForeignUse, ...] | None = None
    """Nodes whose GPUs foreign processes use, where that was asked, and not the nodes examined.

    A node that did not answer, or could not read its GPUs, is not among them.
    """


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
    """A repair that the job waits for has a question to a person, or has none any longer."""

    node: str
    question: str
    """Empty: it was answered, or the repair continues without an answer."""
    until: datetime | None = None
    kind: Literal["RepairAsks"] = "RepairAsks"


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The declared end of a wait (`Wait.until`)."""

    due: datetime | None = None
    """Identifies the wait, because its deadline and an answer may come at the same time.

    None: the present wait.
    """
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
    """A person answered a question of the job, or took the job over."""

    decision: Literal["approve", "deny", "snooze", "take-over"]
    reason: str
    by: str
    until: datetime | None = None
    """For a snooze: when the question is asked again."""
    node: str = ""
    """If set, this answers the drain request for that node, not the job's question."""
    kind: Literal["Answered"] = "Answered"


@dataclass(frozen=True, slots=True)
class FreeNodesCounted:
    """The fleet said how many free nodes could replace those that an approved launch leaves out."""

    generation: int
    count: int
    kind: Literal["FreeNodesCounted"] = "FreeNodesCounted"


@dataclass(frozen=True, slots=True)
class NodeDeclaredDead:
    node: str
    reason: str
    by: str
    kind: Literal["NodeDeclaredDead"] = "NodeDeclaredDead"


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The job is asked to leave a node.

    The requester is a person, for maintenance, or the fleet, which has to examine a node that
    other jobs use too.
    """

    node: str
    reason: str
    by: str
    until: datetime
    kind: Literal["DrainRequested"] = "DrainRequested"


@dataclass(frozen=True, slots=True)
class DrainCancelled:
    """The request to leave that node was withdrawn."""

    node: str
    reason: str
    kind: Literal["DrainCancelled"] = "DrainCancelled"


@dataclass(frozen=True, slots=True)
class DrainDue:
    """The deadline until which the job could leave a node at a time of its choice has passed."""

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
    """A later submission number of this job is known, so it takes a higher one before a launch."""

    submission: int
    kind: Literal["SubmissionRaised"] = "SubmissionRaised"


@dataclass(frozen=True, slots=True)
class SubmitterChecked:
    """The fleet has checked who submitted the job; only fleets with `access` do."""

    by: str
    """For people: `alice` if that is proven, else `alice@laptop (claimed)`."""
    kind: Literal["SubmitterChecked"] = "SubmitterChecked"


@dataclass(frozen=True, slots=True)
class WorkflowReset:
    """The job's workflow was reset to an earlier event: what it knows of nodes may be out of date.

    Since that event another run may have launched ranks, given nodes back, or ended.
    """

    submission: int
    """Above that of the run before, so that nodes and fleet obey this one."""
    kind: Literal["WorkflowReset"] = "WorkflowReset"


@dataclass(frozen=True, slots=True)
class MessageRejected:
    """A signal that could not be parsed, or was refused; kept to show its sender why."""

    name: str
    reason: str
    what: Literal["was not understood", "was refused"] = "was not understood"
    kind: Literal["MessageRejected"] = "MessageRejected"


PersonEvent = CancelRequested | RetryRequested | Answered | NodeDeclaredDead | PolicyChanged
"""What a person orders."""

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
    | NodesSlow
    | ProgressSeen
    | StepReached
    | CheckpointSaved
    | RanksStopped
    | StopUnproven
    | NodesExamined
    | RepairEnded
    | RepairAsks
    | DeadlinePassed
    | CancelRequested
    | RetryRequested
    | Answered
    | FreeNodesCounted
    | NodeDeclaredDead
    | DrainRequested
    | DrainCancelled
    | DrainDue
    | PolicyChanged
    | IncidentsArchived
    | SubmissionRaised
    | SubmitterChecked
    | WorkflowReset
    | MessageRejected,
    Field(discriminator="kind"),
]
