"""What one repair remembers, the steps it may take, and the facts that come back. Only data: which step is next is `repair`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health
from relaunch.spec.policy import Strategy

Outcome = Literal["done", "refused", "ambiguous"]


class Stage(StrEnum):
    LOOKING = "LOOKING"
    """Nothing was ordered, and whether it may be is to be seen."""
    ASKING = "ASKING"
    ORDERING = "ORDERING"
    """All that speaks against the order was looked at just now."""
    PROVING = "PROVING"
    """It was ordered, and whether it happened is to be seen."""
    EXAMINING = "EXAMINING"
    """It happened."""
    DIAGNOSING = "DIAGNOSING"
    """It happened, the probe was read, and `dcgmi diag` is due."""


@dataclass(frozen=True, slots=True)
class RepairRules:
    mode: Literal["act", "ask", "observe"]
    """Of the fleet: whether an order that acts on a node is given, waits for a person, or is only written down."""
    level: int
    """Of `dcgmi diag`; 0: only probed."""
    expected_gpus: int
    examine_within: timedelta
    """For `dcgmi diag`."""
    answer_within: timedelta
    """For a person; the deadline of the repair comes first."""
    repair_within: timedelta = timedelta(minutes=25)
    """From beginning to end. A host with eight GPUs takes ten to fifteen minutes to boot."""
    max_reboots: int = 2
    """So many within the window, and a person has to look: leptonai/gpud's "inspect hardware" comes after as many."""
    reboot_window: timedelta = timedelta(days=3)
    power: bool = False
    """The fleet file has a command that cycles the node's power."""
    waited_for: bool = False
    """By a job, until the deadline: what cannot be over by then is not begun."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    at: datetime
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class RepairState:
    id: str
    fleet: str
    node: str
    strategy: Strategy
    """RESET_GPU or REBOOT_NODE, by the node itself or by its power."""
    gpus: tuple[str, ...]
    """To reset; by bus id as soon as the node was probed. Empty: all of them."""
    reason: str
    by: str
    """The job or the person that wants it."""
    rules: RepairRules
    started_at: datetime
    deadline: datetime
    stage: Stage = Stage.LOOKING
    boot_id: str = ""
    """The boot it was decided on: any other is proof that the node has rebooted."""
    health: Health | None = None
    """As last read, with the gravest findings only."""
    silent: str = ""
    """Why the last question to the node got no answer; empty: it was answered."""
    wait: timedelta = timedelta(0)
    """Before the node is asked again."""
    waiting: str = ""
    """For what."""
    ask_until: datetime | None = None
    approved_by: str = ""
    ordered_at: datetime | None = None
    """When the last order was given."""
    attempts: int = 0
    """Orders given."""
    arrived: bool = False
    """The node has taken the order, by its own word."""
    proven_at: datetime | None = None
    examined_on: str = ""
    """The boot that the examination began on."""
    examinations: int = 0
    """Runs of `dcgmi diag` that got no answer."""
    cancelled: str = ""
    """Why; empty: it is not."""
    power: bool = False
    """What is to be ordered, or was ordered last, is a power cycle."""
    unseen_since: datetime | None = None
    """Since when no look at the node was answered; None: the last one was."""
    log: tuple[StepRecord, ...] = ()
    """The first and the newest."""
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    conclusion: str = ""
    """Why it ended so."""


# --- steps


@dataclass(frozen=True, slots=True)
class Probe:
    within: timedelta
    kernel_since: timedelta | None
    """How far back the kernel log counts, so that what led to the repair is not held against it; None: all of this boot."""
    reason: str
    kind: Literal["Probe"] = "Probe"


@dataclass(frozen=True, slots=True)
class Diagnose:
    level: int
    within: timedelta
    reason: str
    kind: Literal["Diagnose"] = "Diagnose"


@dataclass(frozen=True, slots=True)
class ResetGpus:
    boot_id: str
    gpus: tuple[str, ...]
    """Bus ids; empty: all."""
    within: timedelta
    reason: str
    kind: Literal["ResetGpus"] = "ResetGpus"


@dataclass(frozen=True, slots=True)
class Reboot:
    boot_id: str
    reason: str
    kind: Literal["Reboot"] = "Reboot"


@dataclass(frozen=True, slots=True)
class PowerCycle:
    """By the worker, with the command of the fleet file: the node is not asked, and cannot refuse."""

    within: timedelta
    reason: str
    kind: Literal["PowerCycle"] = "PowerCycle"


@dataclass(frozen=True, slots=True)
class LookAgain:
    after: timedelta
    reason: str
    kind: Literal["LookAgain"] = "LookAgain"


@dataclass(frozen=True, slots=True)
class AskPerson:
    question: str
    until: datetime
    reason: str
    kind: Literal["AskPerson"] = "AskPerson"


@dataclass(frozen=True, slots=True)
class Finish:
    outcome: Outcome
    verdict: Verdict
    """Of the node after the repair; UNKNOWN where it was not examined then."""
    reason: str
    kind: Literal["Finish"] = "Finish"


Step = Annotated[Probe | Diagnose | ResetGpus | Reboot | PowerCycle | LookAgain | AskPerson | Finish, Field(discriminator="kind")]


# --- facts


@dataclass(frozen=True, slots=True)
class Probed:
    facts: dict[str, Any]
    kind: Literal["Probed"] = "Probed"


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """To whatever was asked or ordered last."""

    reason: str
    kind: Literal["NoAnswer"] = "NoAnswer"


@dataclass(frozen=True, slots=True)
class Diagnosed:
    answer: dict[str, Any]
    kind: Literal["Diagnosed"] = "Diagnosed"


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


@dataclass(frozen=True, slots=True)
class Slept:
    kind: Literal["Slept"] = "Slept"


@dataclass(frozen=True, slots=True)
class Answered:
    approve: bool
    by: str
    reason: str
    kind: Literal["Answered"] = "Answered"


@dataclass(frozen=True, slots=True)
class Permitted:
    """What the fleet said to the order that is due. A leave that came at once needs no such fact: the order is given."""

    allowed: bool
    reason: str
    kind: Literal["Permitted"] = "Permitted"


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Nobody has answered in time, or the repair's own time is over."""

    kind: Literal["DeadlinePassed"] = "DeadlinePassed"


@dataclass(frozen=True, slots=True)
class CancelAsked:
    reason: str
    kind: Literal["CancelAsked"] = "CancelAsked"


Fact = Annotated[
    Probed | NoAnswer | Diagnosed | OrderDone | OrderRefused | Slept | Answered | Permitted | DeadlinePassed | CancelAsked,
    Field(discriminator="kind"),
]
