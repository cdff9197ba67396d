"""The values that recovery reasons with: tokens, diagnoses, decisions, and all that a job remembers.

Only data: what they mean for the next step is in `diagnose`, `decide` and `apply_decision`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.generation import LaunchedGeneration, Token
from relaunch.job.places import StartedPlaces
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, Strategy


class Phase(StrEnum):
    QUEUED = "QUEUED"
    LAUNCHING = "LAUNCHING"
    RUNNING = "RUNNING"
    NODE_LOST = "NODE_LOST"
    STOPPING = "STOPPING"
    EXAMINING = "EXAMINING"
    REPAIRING = "REPAIRING"
    WAITING_FOR_NODES = "WAITING_FOR_NODES"
    WAITING_FOR_PERSON = "WAITING_FOR_PERSON"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


# --- diagnosis --------------------------------------------------------------------------------------------------------------


class Certainty(StrEnum):
    CERTAIN = "certain"
    LIKELY = "likely"
    GUESS = "guess"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cause: Cause
    reason: str
    nodes: tuple[str, ...] = ()
    """Suspects, the most likely first."""
    gpus: tuple[str, ...] = ()
    """Suspects on the first of `nodes`, as the kernel names them: `0000:05:00`."""
    ranks: tuple[int, ...] = ()
    code: str = ""
    """What rungs and budgets can name: `Xid 79`, `exit 1`, `SIGSEGV`, `log cuda_oom`; empty where the fault has none."""
    certainty: Certainty = Certainty.LIKELY
    exit_code: int | None = None
    """What the job's own exit code would be: 0 to 255, 128 + signal for a signal (the shell's rule)."""
    do_not_restart: bool = False
    """The rank itself said so (exit code 93, as NVIDIA's resiliency extension defines it)."""
    traceback: str = ""
    """Of the root cause, as the rank wrote it."""


@dataclass(frozen=True, slots=True)
class Try:
    """One use of a rung: what budgets count."""

    at: datetime
    cause: Cause
    strategy: Strategy
    rung: str
    """`Rung.label`: a ladder may have one strategy on several rungs."""
    spent: bool
    """It took one of the job's `max_restarts`."""
    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    code: str = ""


# --- decisions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Relaunch:
    """Launch all ranks as `generation`, which nobody has used: the number is spent before anything is started."""

    generation: int
    reason: str
    strategy: Strategy | None = None
    """None: not a rung of a ladder (the first launch, a person's retry, a node that has seen a newer token). GROW: nor is that."""
    take: Try | None = None
    """The rung's try, reserved before anything is done."""
    left: str = ""
    """What remains of the budgets after it, a clause."""
    without: tuple[str, ...] = ()
    """Nodes this generation does not use."""
    avoid: tuple[str, ...] = ()
    """Nodes the job does not use again."""
    keep_nodes: bool = True
    """Every node that is not left out keeps its place; False: all places are given anew."""
    delay: timedelta = timedelta(0)
    renew_budgets: bool = False
    kind: Literal["Relaunch"] = "Relaunch"

    @property
    def cause(self) -> Cause | None:
        return self.take.cause if self.take else None

    @property
    def spent(self) -> bool:
        """One of the job's own restarts."""
        return self.take is not None and self.take.spent


@dataclass(frozen=True, slots=True)
class Examine:
    """Stop the ranks, which hold the GPUs, and examine the suspects; what to do depends on their verdict."""

    nodes: tuple[str, ...]
    fault: Diagnosis
    reason: str
    next: str
    until: datetime
    """When its verdict counts as unknown."""
    kind: Literal["Examine"] = "Examine"


@dataclass(frozen=True, slots=True)
class Repair:
    """Stop the ranks, then change a node; launch again only when that is proven done."""

    strategy: Strategy
    """RESET_GPU or REBOOT_NODE."""
    nodes: tuple[str, ...]
    gpus: tuple[str, ...]
    """On the first of `nodes`; empty: all of them."""
    fault: Diagnosis
    reason: str
    take: Try
    left: str
    until: datetime
    """When it counts as failed."""
    kind: Literal["Repair"] = "Repair"

    @property
    def spent(self) -> bool:
        return self.take.spent


@dataclass(frozen=True, slots=True)
class Wait:
    """Act no further until an event comes, or until `until`."""

    phase: Phase
    reason: str
    next: str
    """What happens when the wait ends by itself."""
    until: datetime | None = None
    kind: Literal["Wait"] = "Wait"


@dataclass(frozen=True, slots=True)
class Ask:
    """Act no further until a person says so."""

    reason: str
    question: str
    waits: bool = False
    """For as long as it takes: somebody has taken it over."""
    kind: Literal["Ask"] = "Ask"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the job, as soon as no rank of it is left anywhere."""

    phase: Phase
    reason: str
    exit_code: int
    kind: Literal["Stop"] = "Stop"


@dataclass(frozen=True, slots=True)
class Ignore:
    reason: str
    kind: Literal["Ignore"] = "Ignore"


Decision = Annotated[Relaunch | Examine | Repair | Wait | Ask | Stop | Ignore, Field(discriminator="kind")]


# --- what a job remembers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the gang and the node that fills it; the index in `JobState.slots` is the group rank."""

    node: str
    address: str
    scheduled: int = 1
    """How many nodes have filled this place (ModelArts' MA_SCHEDULE_CNT)."""
    started: int = 0
    """How often ranks were started on this node in this place (MA_PROC_START_CNT)."""
    gpus: tuple[int, ...] = ()
    """The job's share of the node, by index; empty: no part in particular."""


@dataclass(frozen=True, slots=True)
class LostNode:
    node: str
    last_heard_at: datetime
    """For people: the server's clock, which may be stepped."""
    reason: str
    unheard_for: timedelta = timedelta(0)
    """How long it had been silent when that was reported, measured by one clock of one watch.

    Its lease was not renewed in that time, nor after it. Negative: an order that was sent may
    still start its ranks for so long.
    """
    is_elsewhere: bool = False
    """Something answers for it, but not from where its ranks were started."""


@dataclass(frozen=True, slots=True)
class Avoided:
    node: str
    reason: str
    at: datetime
    isolated: bool = False
    """A fault said so, not a person: the evidence is against the node, and the fleet hears of it."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A node that the job was asked to leave, for maintenance."""

    node: str
    reason: str
    by: str
    until: datetime
    """When it leaves at the latest; sooner at its next checkpoint, or where it is launched anew anyway."""
    denied: str = ""
    """Who has said that it stays until then and why, a clause; empty: nobody."""


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    """The step that every reporting rank has reached."""
    at: datetime


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    at: datetime
    decision: str
    strategy: str | None
    reason: str
    spent: bool
    left: str = ""
    """What remained of the budgets."""


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault of an incident."""

    at: datetime
    """When it happened, by the receiver's clock."""
    generation: int
    cause: Cause
    reason: str
    nodes: tuple[str, ...] = ()
    """Its suspects, the most likely first."""
    gpus: tuple[str, ...] = ()
    """Suspects on the first of `nodes`."""
    code: str = ""
    decisions_before: int = 0
    """How many decisions of the incident were taken before it was detected."""
    withdrawn: str = ""
    """Why it does not count against its nodes, a clause; empty: it counts."""


@dataclass(frozen=True, slots=True)
class Incident:
    """From the first fault until training has passed the step it had reached. Times by the receiver's clock."""

    opened: datetime
    generation: int
    """The generation that met the fault."""
    cause: Cause
    reason: str
    nodes: tuple[str, ...] = ()
    """Suspects of all its faults."""
    ranks: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    code: str = ""
    certainty: Certainty = Certainty.LIKELY
    traceback: str = ""
    faults: tuple[FaultRecord, ...] = ()
    """The fault that opened it, then each that came while it was open. Cause, reason, ranks, GPUs and code above are the first one's."""
    dropped_faults: int = 0
    """Faults of a very long incident that are no longer kept: those after the first half of what is kept."""
    decisions: tuple[DecisionRecord, ...] = ()
    dropped_decisions: int = 0
    """Decisions in the middle of a very long incident that are no longer kept."""
    reached: int | None = None
    """The furthest step before the fault; None: not known."""
    detected: datetime | None = None
    decided: datetime | None = None
    stopped: datetime | None = None
    launched: datetime | None = None
    recovered: datetime | None = None
    closed: datetime | None = None
    outcome: str | None = None
    """How it closed, a clause."""


@dataclass(frozen=True, slots=True)
class Next:
    what: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ExaminedNode:
    node: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class RepairQuestion:
    """What the repair of a node asks a person."""

    node: str
    question: str
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Recovering:
    """What is known about a fault while its suspects are examined or repaired."""

    fault: Diagnosis
    examined: tuple[ExaminedNode, ...] | None = None
    """None: not examined since the fault."""
    failed: tuple[str, ...] = ()
    """Rungs (`Rung.label`) whose repair did not succeed; their tries are spent, and the ladder goes on above them."""
    questions: tuple[RepairQuestion, ...] = ()
    """What repairs ask that have had no answer yet."""
    repair: Next | None = None
    """What comes next, and when, once nothing is asked any more."""

    @property
    def verdict(self) -> Verdict | None:
        """One unhealthy suspect is enough; healthy are they only all together."""
        if self.examined is None:
            return None
        verdicts = {one.verdict for one in self.examined}
        if Verdict.UNHEALTHY in verdicts:
            return Verdict.UNHEALTHY
        return Verdict.HEALTHY if verdicts == {Verdict.HEALTHY} else Verdict.UNKNOWN


@dataclass(frozen=True, slots=True)
class PolicyChange:
    at: datetime
    by: str
    reason: str
    keys: tuple[str, ...]
    """What was changed, as paths such as `causes.HANG` or `timeouts.lost_after`."""


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything a job knows about itself. It survives continue-as-new, and `retry` of a closed job starts from it."""

    namespace: str
    name: str
    submission: int
    spec: JobSpec
    policy: Policy
    submitted_by: str
    submitted_at: datetime
    phase: Phase = Phase.QUEUED
    reason: str = "submitted"
    next: Next = Next("nodes are acquired")
    generation: int = 0
    """The highest one reserved."""
    slots: tuple[Slot, ...] = ()
    fewer: str = ""
    """Why these are fewer than it would take, a clause of when they were given; empty: they are not."""
    strategy: Strategy | None = None
    """By which the newest generation was decided."""
    maybe_alive: tuple[str, ...] = ()
    """Nodes on which ranks of some generation of this job may live: started there and not proven gone."""
    launched: tuple[LaunchedGeneration, ...] = ()
    """Launches whose ranks may be alive, also of earlier submissions; the newest last. Each is
    written down before its ranks can exist, and kept until they are proven gone everywhere."""
    places: tuple[StartedPlaces, ...] = ()
    """Where those were started, by generation: only an answer from there proves anything of them."""
    lost: tuple[LostNode, ...] = ()
    asked: Ask | None = None
    """What a person was asked last, as it was asked first."""
    snoozed: bool = False
    """The wait for an answer is somebody's snooze, and its end asks again."""
    deferred_fault: Diagnosis | None = None
    """A fault that waits for a lost node, because nothing can be launched while that one may go on."""
    recovering: Recovering | None = None
    """From the decision to examine or to repair until the next launch is decided."""
    avoided: tuple[Avoided, ...] = ()
    leaving: tuple[Leaving, ...] = ()
    tries: tuple[Try, ...] = ()
    """Newest last. Which of them count is each rung's matter."""
    restarts_spent: int = 0
    """Of `max_restarts`, since the budgets were renewed."""
    renewed_at: datetime | None = None
    """When the budgets were given back: by progress, where the policy says so, or by a person."""
    progressed_at: datetime | None = None
    """When training last passed the step it had reached before a fault."""
    flat_generations: int = 0
    """Generations in a row that ended by a fault of the job's own, with known progress that did not pass `furthest_step`."""
    furthest_step: int | None = None
    """Of all generations before this one; None: never reported."""
    progress: Progress | None = None
    """Of this generation."""
    launched_at: datetime | None = None
    incident: Incident | None = None
    incidents: tuple[Incident, ...] = ()
    """Closed ones that are not archived, oldest first."""
    incidents_archived: int = 0
    policy_changes: tuple[PolicyChange, ...] = ()
    """The newest few: who changed the policy of the running job, and why."""
    notices: tuple[str, ...] = ()
    """What people should see that is no decision, such as a signal that could not be understood; the newest few."""
    ending: Stop | None = None
    """Set from the decision to stop until the job has ended, and after."""
    exit_code: int | None = None
    ended_at: datetime | None = None

    @property
    def token(self) -> Token:
        return Token(self.namespace, self.name, self.submission, self.generation)

    @property
    def gang_size(self) -> int:
        """Nodes of the newest generation; where that is not known, the fewest that it may have had."""
        return len(self.slots) or self.spec.fewest_nodes

    @property
    def lost_names(self) -> tuple[str, ...]:
        return tuple(lost.node for lost in self.lost)

    @property
    def report_at_step(self) -> int | None:
        """The step whose passing closes the open incident."""
        if self.incident is None or self.lost:
            return None  # while a node is lost the incident goes on, however well the others advance
        return 0 if self.incident.reached is None else self.incident.reached + 1
