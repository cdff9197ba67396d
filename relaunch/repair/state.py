"""State of one strategy on one node, the events that change it, and the decisions it leads to.

Data only: `machine` has the transitions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health
from relaunch.spec.policy import RepairKind, Strategy

RepairOutcome = Literal["done", "refused", "ambiguous"]

MAX_ORDERS = 2
"""Orders to reset or to reboot, the repeated one included. A power cycle is ordered once."""


class Stage(StrEnum):
    """Stages of a repair, in order."""

    CHECKING = "CHECKING"
    """The node is probed for anything against the order."""
    ASKING = "ASKING"
    """A person is asked for approval."""
    ORDERING = "ORDERING"
    """The checks have passed, and the order is due."""
    PROVING = "PROVING"
    """The order was given, and the node is probed until it is proven carried out."""
    EXAMINING = "EXAMINING"
    """The order was carried out, and the node is probed for its health."""
    DIAGNOSING = "DIAGNOSING"
    """The probe found no fault, and `dcgmi diag` is due."""


@dataclass(frozen=True, slots=True)
class RepairRules:
    mode: Literal["act", "ask", "observe"]
    """The fleet's mode: an order is given, given after a person's approval, or only recorded."""
    level: int
    """Level of `dcgmi diag`; 0: probe only."""
    expected_gpus: int
    diag_timeout: timedelta
    answer_timeout: timedelta
    """For a person's answer; the deadline of the repair takes precedence."""
    repair_timeout: timedelta = timedelta(minutes=25)
    """For the whole repair. A host with eight GPUs takes ten to fifteen minutes to boot."""
    max_reboots: int = 2
    """After so many reboots within the window a person has to inspect the node. leptonai/gpud
    reports "inspect hardware" after as many."""
    reboot_window: timedelta = timedelta(days=3)
    has_power_command: bool = False
    """The fleet file has a command that cycles the node's power."""
    job_waits: bool = False
    """A job waits for the repair until the deadline: what cannot end by then is not started."""
    by_examination: bool = False
    """An examination has chosen the strategy: a node that is found healthy before is not
    repaired."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    at: datetime
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class RepairState:
    id: str
    fleet: str
    node: str
    strategy: Strategy
    """RESET_GPU or REBOOT_NODE; a reboot is done by the node itself or by its power."""
    gpus: tuple[str, ...]
    """GPUs to reset, by bus id once the node was probed. Empty: all of them."""
    reason: str
    by: str
    """The job or the person that ordered the repair."""
    rules: RepairRules
    started_at: datetime
    deadline: datetime
    stage: Stage = Stage.CHECKING
    boot_id: str = ""
    """The boot that the repair was decided on: any other boot id proves that the node has
    rebooted."""
    health: Health | None = None
    """As last read, with the gravest findings only."""
    missing_answer: str = ""
    """Why the last request to the node got no answer; empty if it was answered."""
    wait: timedelta = timedelta(0)
    """Delay before the node is probed again."""
    wait_reason: str = ""
    ask_until: datetime | None = None
    approved_by: str = ""
    ordered_at: datetime | None = None
    """When the last order was given."""
    attempts: int = 0
    """Number of orders given."""
    acknowledged: bool = False
    """The node has confirmed that it took the order."""
    proven_at: datetime | None = None
    """When the order was proven carried out."""
    examined_boot_id: str = ""
    """The boot on which the examination began."""
    diag_attempts: int = 0
    """Number of runs of `dcgmi diag` that got no answer."""
    cancel_reason: str = ""
    """Why the repair was cancelled; empty if it was not."""
    power: bool = False
    """The next order, or the last one given, is a power cycle."""
    silent_since: datetime | None = None
    """Since when no probe of the node was answered; None if the last one was."""
    log: tuple[LogEntry, ...] = ()
    """The first entry and the newest ones."""
    outcome: RepairOutcome | None = None
    verdict: Verdict | None = None
    conclusion: str = ""
    """Why the repair ended with this outcome."""
    recovered: bool = False
    """The fault was gone while a person was asked: the node has to be examined again."""


# --- events: what has happened


@dataclass(frozen=True, slots=True)
class NodeProbed:
    answer: dict[str, Any]
    kind: Literal["NodeProbed"] = "NodeProbed"


@dataclass(frozen=True, slots=True)
class NodeDiagnosed:
    answer: dict[str, Any]
    kind: Literal["NodeDiagnosed"] = "NodeDiagnosed"


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The last request or order got no answer."""

    reason: str
    kind: Literal["NoAnswer"] = "NoAnswer"


@dataclass(frozen=True, slots=True)
class OrderDone:
    answer: dict[str, Any] = field(default_factory=dict)
    kind: Literal["OrderDone"] = "OrderDone"


@dataclass(frozen=True, slots=True)
class OrderRefused:
    why: str
    """`boot_changed`, `busy`, `held`, `other_fleet`, `cannot_reboot`."""
    reason: str
    boot_id: str | None = None
    kind: Literal["OrderRefused"] = "OrderRefused"
    is_attempt: bool = True
    """Whether it counts as an order that was given, as it does in histories of 0.1.0."""


@dataclass(frozen=True, slots=True)
class OrderExpired:
    """No worker took the order in time, so it was not given."""

    reason: str
    kind: Literal["OrderExpired"] = "OrderExpired"


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """The delay is over, or another event ended it early."""

    kind: Literal["WaitEnded"] = "WaitEnded"


@dataclass(frozen=True, slots=True)
class PersonAnswered:
    approve: bool
    by: str
    reason: str
    approved: RepairKind | Literal[""] = ""
    """What the person approves. Empty: whatever is asked, as in messages of 0.1.0."""
    kind: Literal["PersonAnswered"] = "PersonAnswered"


@dataclass(frozen=True, slots=True)
class PermitAnswered:
    """The fleet's answer for the order that is due.

    A permit that came at once needs no such event: the order is given.
    """

    allowed: bool
    reason: str
    kind: Literal["PermitAnswered"] = "PermitAnswered"
    is_unused: bool = False
    """Whether it is certain that no order was given as it permits; False in histories of 0.1.0."""


@dataclass(frozen=True, slots=True)
class TimeExpired:
    """The time for a person's answer, or for the whole repair, is over."""

    kind: Literal["TimeExpired"] = "TimeExpired"


@dataclass(frozen=True, slots=True)
class RepairCancelRequested:
    reason: str
    kind: Literal["RepairCancelRequested"] = "RepairCancelRequested"


RepairEvent = Annotated[
    NodeProbed
    | NodeDiagnosed
    | NoAnswer
    | OrderDone
    | OrderRefused
    | OrderExpired
    | WaitEnded
    | PersonAnswered
    | PermitAnswered
    | TimeExpired
    | RepairCancelRequested,
    Field(discriminator="kind"),
]


# --- decisions: what is next


@dataclass(frozen=True, slots=True)
class ProbeNode:
    timeout: timedelta
    kernel_since: timedelta | None
    """How far back the kernel log counts, so that the fault that led to the repair is not held
    against the node; None: all of this boot."""
    reason: str
    kind: Literal["ProbeNode"] = "ProbeNode"


@dataclass(frozen=True, slots=True)
class RunDiag:
    """Run `dcgmi diag`."""

    level: int
    timeout: timedelta
    reason: str
    kind: Literal["RunDiag"] = "RunDiag"


@dataclass(frozen=True, slots=True)
class ResetGpus:
    boot_id: str
    """The node refuses the order on any other boot."""
    gpus: tuple[str, ...]
    """Bus ids; empty: all GPUs."""
    timeout: timedelta
    reason: str
    kind: Literal["ResetGpus"] = "ResetGpus"


@dataclass(frozen=True, slots=True)
class RebootNode:
    boot_id: str
    """The node refuses the order on any other boot."""
    reason: str
    kind: Literal["RebootNode"] = "RebootNode"


@dataclass(frozen=True, slots=True)
class PowerCycleNode:
    """Cycle the power from the worker, with the command of the fleet file.

    The node is not asked and cannot refuse.
    """

    timeout: timedelta
    reason: str
    kind: Literal["PowerCycleNode"] = "PowerCycleNode"


@dataclass(frozen=True, slots=True)
class WaitForNode:
    delay: timedelta
    reason: str
    kind: Literal["WaitForNode"] = "WaitForNode"


@dataclass(frozen=True, slots=True)
class AskPerson:
    question: str
    until: datetime
    reason: str
    kind: Literal["AskPerson"] = "AskPerson"


@dataclass(frozen=True, slots=True)
class FinishRepair:
    outcome: RepairOutcome
    verdict: Verdict
    """Of the node after the repair; UNKNOWN if it was not examined then."""
    reason: str
    kind: Literal["FinishRepair"] = "FinishRepair"


Order = ResetGpus | RebootNode | PowerCycleNode
"""Decisions that act on the node. Each needs a permit of the fleet."""

RepairDecision = Annotated[
    ProbeNode | RunDiag | Order | WaitForNode | AskPerson | FinishRepair,
    Field(discriminator="kind"),
]
