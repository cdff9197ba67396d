"""Data types of the recovery logic: diagnoses, decisions, and the state of a job.

The logic itself is in `diagnose`, `decide` and `apply_decision`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.evidence.stragglers import SlowNode
from relaunch.generation import LaunchedGeneration, Token
from relaunch.job.accounts import Account, Ledger, LedgerEntry
from relaunch.job.generation_nodes import GenerationNodes
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


# --- diagnosis


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
    """Suspected GPUs on the first of `nodes`, as the kernel names them: `0000:05:00`."""
    ranks: tuple[int, ...] = ()
    code: str = ""
    """The fault code that rungs and budgets can name; empty where the fault has none.

    For example `Xid 79`, `exit 1`, `SIGSEGV`, `log cuda_oom`.
    """
    certainty: Certainty = Certainty.LIKELY
    exit_code: int | None = None
    """The job's exit code, if this ends it: 0 to 255; 128 + signal for a signal, as in a shell."""
    do_not_restart: bool = False
    """The rank itself asked for it (exit code 93, as NVIDIA's resiliency extension defines it)."""
    traceback: str = ""
    """What the rank of the root cause wrote last: its traceback, shortened, or its last lines.

    Of a hang: where all ranks were, the widest group first, and the stacks of the suspects.
    """
    by_program: bool = False
    """Whether all evidence is what a program did: how it ended, what it printed, a full disk.

    Such evidence may accuse hardware, but alone never costs a node: see `ladder`.
    """
    error: str = ""
    """What names the error: a line of `traceback`, or what failed below a launcher. Empty: none."""


@dataclass(frozen=True, slots=True)
class Try:
    """One use of a rung. Budgets count these."""

    at: datetime
    cause: Cause
    strategy: Strategy
    rung: str
    """`Rung.label`, because a ladder may have the same strategy on several rungs."""
    spent: bool
    """Whether it used up one of the job's `max_restarts`."""
    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    code: str = ""


# --- decisions


@dataclass(frozen=True, slots=True)
class Relaunch:
    """Launch all ranks as `generation`, a new number recorded before anything is started."""

    generation: int
    reason: str
    strategy: Strategy | None = None
    """None or GROW: not chosen by a ladder.

    None for the first launch, a person's retry, or a node that has seen a newer token.
    """
    take: Try | None = None
    """The try of the rung, counted before anything is done."""
    left: str = ""
    """A clause that says what remains of the budgets afterwards."""
    without: tuple[str, ...] = ()
    """Nodes this generation does not use, where the fleet has others."""
    avoid: tuple[str, ...] = ()
    """Nodes the job does not use again."""
    keep_nodes: bool = True
    """Whether nodes that are not left out keep their places; False: all are assigned again."""
    delay: timedelta = timedelta(0)
    renew_budgets: bool = False
    approved: bool = False
    """Whether a person approved it: the count that asked begins again."""
    kind: Literal["Relaunch"] = "Relaunch"

    @property
    def cause(self) -> Cause | None:
        return self.take.cause if self.take else None

    @property
    def spent(self) -> bool:
        """Whether it uses up one of the job's `max_restarts`."""
        return self.take is not None and self.take.spent


@dataclass(frozen=True, slots=True)
class Examine:
    """Stop the ranks, which hold the GPUs, and examine the suspects to decide what follows."""

    nodes: tuple[str, ...]
    fault: Diagnosis
    reason: str
    next: str
    until: datetime
    """The deadline, after which the verdict counts as unknown."""
    kind: Literal["Examine"] = "Examine"
    links: bool = False
    """Whether the nodes are not examined themselves, but asked whether they reach each other."""
    foreign_processes: bool = False
    """Whether they are not examined, but asked which foreign processes use the job's GPUs."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Stop the ranks, then repair nodes or GPUs; launch again only when that is proven done."""

    strategy: Strategy
    """RESET_GPU or REBOOT_NODE."""
    nodes: tuple[str, ...]
    gpus: tuple[str, ...]
    """GPUs on the first of `nodes`; empty: all of them."""
    fault: Diagnosis
    reason: str
    take: Try
    left: str
    until: datetime
    """The deadline, after which the repair counts as failed."""
    kind: Literal["Repair"] = "Repair"

    @property
    def spent(self) -> bool:
        return self.take.spent


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until an event comes, or until `until`."""

    phase: Phase
    reason: str
    next: str
    """What happens when the wait ends without a further event."""
    until: datetime | None = None
    reminders: int = 0
    """As in `JobState`."""
    kind: Literal["Wait"] = "Wait"


@dataclass(frozen=True, slots=True)
class FreeNodes:
    """How many free nodes of the fleet a job could have beside its own."""

    count: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Ask:
    """Do nothing until a person answers."""

    reason: str
    question: str
    waits: bool = False
    """Whether it waits without a deadline, because a person has taken the job over."""
    without: tuple[str, ...] = ()
    """Nodes that an approved launch does not use: those that the diagnosis names."""
    ladder: Cause | None = None
    """The cause whose ladder asks: an approval begins its tries again. None: no ladder asks."""
    free: FreeNodes | None = None
    """What the fleet had to replace those nodes; None: not known (yet)."""
    reminders: int = 0
    """As in `JobState`."""
    kind: Literal["Ask"] = "Ask"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the job as soon as no rank of it is left on any node."""

    phase: Phase
    reason: str
    exit_code: int
    kind: Literal["Stop"] = "Stop"


@dataclass(frozen=True, slots=True)
class Ignore:
    """Do nothing about the event."""

    reason: str
    kind: Literal["Ignore"] = "Ignore"


Decision = Annotated[
    Relaunch | Examine | Repair | Wait | Ask | Stop | Ignore, Field(discriminator="kind")
]


# --- the state of a job


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the gang with its node; the index in `JobState.slots` is the group rank."""

    node: str
    address: str
    scheduled: int = 1
    """How many times a node was assigned to this place (ModelArts' MA_SCHEDULE_CNT)."""
    started: int = 0
    """How many times ranks were started on this node in this place (MA_PROC_START_CNT)."""
    gpus: tuple[int, ...] = ()
    """Indices of the job's GPUs on a shared node; empty: no particular ones."""


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node of the job that does not answer."""

    node: str
    last_heard_at: datetime
    """For display only: by the server's clock, which may be stepped."""
    reason: str
    unheard_for: timedelta = timedelta(0)
    """How long it had been silent when that was reported, measured by the clock of one watch.

    Its lease was not renewed in that time, nor after it. Negative: an order that was sent may
    still start its ranks for that long.
    """
    is_elsewhere: bool = False
    """Something answers for it, but not from where its ranks were started."""


@dataclass(frozen=True, slots=True)
class UnstoppedNode:
    """A node whose ranks could not be proven stopped, and no time will prove it."""

    node: str
    reason: str
    """Empty where many hang: only the first are explained."""


@dataclass(frozen=True, slots=True)
class AvoidedNode:
    """A node that the job does not use again."""

    node: str
    reason: str
    at: datetime
    isolated: bool = False
    """Whether a fault is the reason, not a person: there is evidence, and the fleet is informed."""


@dataclass(frozen=True, slots=True)
class NodeDrain:
    """A node that the job was asked to leave, for maintenance."""

    node: str
    reason: str
    by: str
    until: datetime
    """The latest time to leave; the job leaves earlier at a checkpoint or at another relaunch."""
    denied: str = ""
    """A clause that says who decided that the job stays until then, and why; empty: no one did."""


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    """The step that every reporting rank has reached."""
    at: datetime


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision of an incident."""

    at: datetime
    decision: str
    strategy: str | None
    reason: str
    spent: bool
    left: str = ""
    """What remained of the budgets afterwards."""


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """One fault of an incident."""

    at: datetime
    """When it happened, by the receiver's clock."""
    generation: int
    cause: Cause
    reason: str
    nodes: tuple[str, ...] = ()
    """Suspected nodes, the most likely first."""
    gpus: tuple[str, ...] = ()
    """Suspected GPUs on the first of `nodes`."""
    code: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks that failed, the first one first; empty: none is known."""
    traceback: str = ""
    """As in `Diagnosis`, of the newest fault; earlier ones keep only their reason."""
    decisions_before: int = 0
    """How many decisions of the incident were taken before this fault was detected."""
    withdrawn: str = ""
    """A clause that says why the fault does not count against its nodes; empty: it counts."""
    by_program: bool = False
    """As in `Diagnosis`; False after an examination found all its nodes unhealthy."""


@dataclass(frozen=True, slots=True)
class Incident:
    """The time from the first fault until training has passed the step that it had reached before.

    All times are by the receiver's clock.
    """

    opened: datetime
    generation: int
    """The generation in which the fault happened."""
    cause: Cause
    reason: str
    nodes: tuple[str, ...] = ()
    """Suspected nodes of all its faults."""
    ranks: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    code: str = ""
    certainty: Certainty = Certainty.LIKELY
    traceback: str = ""
    """As in `Diagnosis`."""
    faults: tuple[FaultRecord, ...] = ()
    """The fault that opened the incident, then those that came while it was open.

    Cause, reason, ranks, GPUs, code and traceback above are those of the first, whose record here
    has no traceback.
    """
    dropped_faults: int = 0
    """Number of faults of a very long incident that are no longer kept.

    They came after the first half of those that are kept.
    """
    decisions: tuple[DecisionRecord, ...] = ()
    dropped_decisions: int = 0
    """Number of decisions in the middle of a very long incident that are no longer kept."""
    reached: int | None = None
    """The furthest step before the fault; None: not known."""
    detected: datetime | None = None
    decided: datetime | None = None
    stopped: datetime | None = None
    launched: datetime | None = None
    recovered: datetime | None = None
    closed: datetime | None = None
    outcome: str | None = None
    """A clause that says how it closed."""
    costs: dict[Account, timedelta] = field(default_factory=dict)
    """The time that it took from training, by account: see `ledger`."""
    entries: tuple[LedgerEntry, ...] = ()
    """What `costs` consists of, in order. Of a very long incident only the first half and the
    newest half of those that may be kept."""


@dataclass(frozen=True, slots=True)
class Next:
    """What happens next, as shown to people, and when at the latest."""

    what: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ExaminedNode:
    node: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class ForeignUse:
    """A node with processes on the job's GPUs that relaunch did not start."""

    node: str
    processes: str
    """Such as `bob (python, pid 4711) holds 71.0 GB of GPU 0`."""


@dataclass(frozen=True, slots=True)
class RepairQuestion:
    """A question of a node's repair to a person."""

    node: str
    question: str
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Recovery:
    """What is known about a fault while its suspects are examined or repaired."""

    fault: Diagnosis
    examined: tuple[ExaminedNode, ...] | None = None
    """The results of the examination; None: not examined since the fault."""
    failed: tuple[str, ...] = ()
    """Rungs (`Rung.label`) whose repair failed; their tries are spent; the ladder skips them."""
    questions: tuple[RepairQuestion, ...] = ()
    """Questions of repairs that are not answered yet."""
    repair: Next | None = None
    """What comes next, and when, once no question is open."""
    links: Literal["", "asked", "known"] = ""
    """Whether the links between the nodes are being checked, or were since the fault."""
    foreign_check: Literal["", "asked", "known"] = ""
    """Whether its nodes are being asked for foreign processes, or were since the fault."""
    foreign: tuple[ForeignUse, ...] = ()
    """What they answered: the nodes whose GPUs foreign processes use."""

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict on all suspects together; None: not examined.

        UNHEALTHY where one suspect is, HEALTHY only where all are, else UNKNOWN.
        """
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
class SlowRecord:
    """A node that was slower than the others of its generation."""

    at: datetime
    generation: int
    place: int
    """Its index in `JobState.slots`: which ranks it had."""
    slow: SlowNode
    examined: bool = False
    """Whether it was examined for that."""


@dataclass(frozen=True, slots=True)
class FailedResume:
    """The newest error of the program itself, and how often it has ended resumed generations."""

    cause: Cause
    error: str
    """The line that names it, without its numbers: see `mask_numbers`."""
    step: int | None
    """The step at which it ended them; None: they reported none."""
    count: int
    """How many resumed generations it has ended there in a row, none of which passed the step that
    an earlier one had reached. 0, and it stays so: the generation that had reached that step ended
    in this way as well, so the program fails there from whatever it resumes."""
    nodes: tuple[str, ...] = ()
    """The suspects that all of them have in common."""


@dataclass(frozen=True, slots=True)
class JobState:
    """The complete state of a job.

    It is carried over continue-as-new, and `retry` of a closed job starts from it.
    """

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
    """The highest generation number that was reserved."""
    slots: tuple[Slot, ...] = ()
    fewer: str = ""
    """A clause that says why there are fewer nodes than the job would take, as of their grant.

    Empty: there are not fewer.
    """
    strategy: Strategy | None = None
    """The strategy by which the newest generation was decided."""
    maybe_alive: tuple[str, ...] = ()
    """Nodes on which ranks of any generation may be alive: started there and not proven stopped."""
    launched: tuple[LaunchedGeneration, ...] = ()
    """Launches whose ranks may be alive, including earlier submissions; the newest last. Each is
    recorded before its ranks can exist, and kept until they are proven stopped on all nodes."""
    places: tuple[StartedPlaces, ...] = ()
    """Where those ranks were started, by generation: only an answer from there proves anything."""
    generation_nodes: tuple[GenerationNodes, ...] = ()
    """The nodes of this submission's generations, oldest first, for reading their logs."""
    lost: tuple[LostNode, ...] = ()
    unstopped: tuple[UnstoppedNode, ...] = ()
    """Nodes of `maybe_alive` on which a stop was tried for `ask_after`, and could not be proven."""
    stop_reminders: int = 0
    """How many times people have been reminded of them."""
    asked: Ask | None = None
    """The last question to a person, in its original form (before any snooze)."""
    snoozed: bool = False
    """Whether a person snoozed the question; at the end of the wait it is asked again."""
    reminders: int = 0
    """How many times `answer_within` has passed since the job waits for nodes or for an answer."""
    deferred_fault: Diagnosis | None = None
    """A fault that waits for a lost node: nothing can be launched while ranks there may run."""
    recovering: Recovery | None = None
    """Set from the decision to examine or repair until the next launch is decided."""
    avoided: tuple[AvoidedNode, ...] = ()
    drains: tuple[NodeDrain, ...] = ()
    tries: tuple[Try, ...] = ()
    """Newest last. Each rung defines which of them count."""
    restarts_spent: int = 0
    """How many of `max_restarts` were used since the budgets were renewed."""
    renewed_at: datetime | None = None
    """When the budgets were renewed: by progress, where the policy says so, or by a person."""
    approved_at: datetime | None = None
    """When a person last approved a new launch: `no_progress_ask` counts from then on."""
    ladders_renewed: dict[Cause, datetime] = field(default_factory=dict)
    """When a person approved a launch that the ladder of a cause asked for: earlier tries do not
    count for that cause."""
    progressed_at: datetime | None = None
    """When training last passed the step it had reached before a fault."""
    flat_generations: int = 0
    """Consecutive generations that ended by a fault of the job without passing `furthest_step`.

    One that reported no step, or whose counter starts again, counts where an earlier one of the
    open incident ended by a fault of the job as well.
    """
    startup_error: str = ""
    """The error of the last generation, if it ended by itself at once; empty: it did not.

    Without its numbers: see `mask_numbers`.
    """
    startup_failures: int = 0
    """Consecutive generations that ended with `startup_error`."""
    unpassed_step: int | None = None
    """The step that no incident waits for any more and that training has not passed; None: none.

    Set when an incident closes by time alone, which is no progress where steps say how far training
    has come.
    """
    furthest_step: int | None = None
    """The furthest step of all earlier generations; None: never reported."""
    progress: Progress | None = None
    """The progress of this generation."""
    launched_at: datetime | None = None
    incident: Incident | None = None
    incidents: tuple[Incident, ...] = ()
    """Closed incidents that are not archived, oldest first."""
    incidents_archived: int = 0
    policy_changes: tuple[PolicyChange, ...] = ()
    """The newest policy changes of the running job: who made them, and why."""
    notices: tuple[str, ...] = ()
    """The newest messages to people that are no decisions, such as a signal that was not parsed."""
    ending: Stop | None = None
    """Set from the decision to stop, and kept after the job has ended."""
    exit_code: int | None = None
    ended_at: datetime | None = None
    counter_restarts: bool = False
    """Whether the step counter starts again while ranks live, as a bar does in each epoch.

    Its highest step may never be passed, so `healthy_for` without a fault counts as progress too.
    """
    startup_nodes: tuple[str, ...] = ()
    """The suspects that all generations which ended with `startup_error` have in common."""
    broken_links: tuple[tuple[str, str], ...] = ()
    """Pairs of nodes that could not reach each other, since training last advanced."""
    slow_nodes: tuple[SlowRecord, ...] = ()
    """Nodes that were slower than the others, oldest first."""
    ledger: Ledger = field(default_factory=Ledger)
    """What the job's time went into."""
    failed_resume: FailedResume | None = None
    """None: the program has not failed since training last advanced, or has got further since."""
    has_run: bool = False
    """Whether a generation of this submission has been started on all its nodes, so that its
    command, its folder and its secrets were there."""

    @property
    def token(self) -> Token:
        return Token(self.namespace, self.name, self.submission, self.generation)

    @property
    def gang_size(self) -> int:
        """The number of nodes of the newest generation; where not known, the fewest it may have."""
        return len(self.slots) or self.spec.fewest_nodes

    @property
    def lost_names(self) -> tuple[str, ...]:
        return tuple(lost.node for lost in self.lost)

    @property
    def report_at_step(self) -> int | None:
        """The step whose report is progress; it closes the incident, if one is open."""
        if self.lost:
            return None  # while a node is lost the incident stays open, even if the others advance
        reached = self.unpassed_step
        if self.incident is not None:
            reached = self.incident.reached if self.incident.reached is not None else -1
        return None if reached is None else reached + 1
