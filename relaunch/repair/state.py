"""State of one repair, the steps it may take, and the facts that come back. Data only: `machine`
decides on the next step."""

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
    """Nothing was ordered; whether the order is allowed has to be checked."""
    ASKING = "ASKING"
    ORDERING = "ORDERING"
    """Everything that could speak against the order was just checked."""
    PROVING = "PROVING"
    """The order was given; whether it was carried out has to be proven."""
    EXAMINING = "EXAMINING"
    """The order was carried out; the node is examined."""
    DIAGNOSING = "DIAGNOSING"
    """The order was carried out, the probe was read, and `dcgmi diag` is due."""


@dataclass(frozen=True, slots=True)
class RepairRules:
    mode: Literal["act", "ask", "observe"]
    """The fleet's mode: an order that acts on a node is given, waits for a person, or is only
    recorded."""
    level: int
    """Level of `dcgmi diag`; 0: probe only."""
    expected_gpus: int
    examine_within: timedelta
    """Timeout of `dcgmi diag`."""
    answer_within: timedelta
    """Timeout of a person's answer; the deadline of the repair takes precedence."""
    repair_within: timedelta = timedelta(minutes=25)
    """Timeout of the whole repair. A host with eight GPUs takes ten to fifteen minutes to boot."""
    max_reboots: int = 2
    """After so many reboots within the window a person has to look. leptonai/gpud reports "inspect
    hardware" after as many."""
    reboot_window: timedelta = timedelta(days=3)
    power: bool = False
    """The fleet file has a command that cycles the node's power."""
    waited_for: bool = False
    """A job waits for the repair until the deadline: what cannot end by then is not started."""


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
    """RESET_GPU or REBOOT_NODE; a reboot is done by the node itself or by its power."""
    gpus: tuple[str, ...]
    """GPUs to reset, by bus id once the node was probed. Empty: all of them."""
    reason: str
    by: str
    """The job or the person that ordered the repair."""
    rules: RepairRules
    started_at: datetime
    deadline: datetime
    stage: Stage = Stage.LOOKING
    boot_id: str = ""
    """The boot that the repair was decided on: any other boot id proves that the node has
    rebooted."""
    health: Health | None = None
    """As last read, with the gravest findings only."""
    silent: str = ""
    """Why the last request to the node got no answer; empty if it was answered."""
    wait: timedelta = timedelta(0)
    """Delay before the node is asked again."""
    waiting: str = ""
    """What the delay is for."""
    ask_until: datetime | None = None
    approved_by: str = ""
    ordered_at: datetime | None = None
    """When the last order was given."""
    attempts: int = 0
    """Number of orders given."""
    arrived: bool = False
    """The node has confirmed that it took the order."""
    proven_at: datetime | None = None
    examined_on: str = ""
    """The boot on which the examination began."""
    examinations: int = 0
    """Number of runs of `dcgmi diag` that got no answer."""
    cancelled: str = ""
    """Why the repair was cancelled; empty if it was not."""
    power: bool = False
    """The next order, or the last one given, is a power cycle."""
    unseen_since: datetime | None = None
    """Since when no probe of the node was answered; None if the last one was."""
    log: tuple[StepRecord, ...] = ()
    """The first record and the newest ones."""
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    conclusion: str = ""
    """Why the repair ended with this outcome."""


# --- steps


@dataclass(frozen=True, slots=True)
class Probe:
    within: timedelta
    kernel_since: timedelta | None
    """How far back the kernel log counts, so that the fault that led to the repair is not held
    against the node; None: all of this boot."""
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
    """Bus ids; empty: all GPUs."""
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
    """Power cycle by the worker, with the command of the fleet file: the node is not asked and
    cannot refuse."""

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
    """Of the node after the repair; UNKNOWN if it was not examined then."""
    reason: str
    kind: Literal["Finish"] = "Finish"


Step = Annotated[
    Probe | Diagnose | ResetGpus | Reboot | PowerCycle | LookAgain | AskPerson | Finish,
    Field(discriminator="kind"),
]


# --- facts


@dataclass(frozen=True, slots=True)
class Probed:
    facts: dict[str, Any]
    kind: Literal["Probed"] = "Probed"


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """No answer to the last request or order."""

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
    """The fleet's answer for the order that is due. A permit that came at once needs no such fact:
    the order is given."""

    allowed: bool
    reason: str
    kind: Literal["Permitted"] = "Permitted"


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time for a person's answer, or for the whole repair, is over."""

    kind: Literal["DeadlinePassed"] = "DeadlinePassed"


@dataclass(frozen=True, slots=True)
class CancelAsked:
    reason: str
    kind: Literal["CancelAsked"] = "CancelAsked"


Fact = Annotated[
    Probed
    | NoAnswer
    | Diagnosed
    | OrderDone
    | OrderRefused
    | Slept
    | Answered
    | Permitted
    | DeadlinePassed
    | CancelAsked,
    Field(discriminator="kind"),
]
