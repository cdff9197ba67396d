"""Input and output of the job workflow: its argument, its result, and messages from people."""

from __future__ import annotations

import hashlib
import json
import reprlib
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from relaunch.access.orders import Proof, SignedText, UsedProof
from relaunch.evidence.catalog.overrides import NO_OVERRIDES, CatalogOverrides
from relaunch.evidence.findings import Verdict
from relaunch.fields import Duration, Name, Reason, StrictModel
from relaunch.generation import LaunchedGeneration
from relaunch.job.decide import check_declaration
from relaunch.job.events import (
    Answered,
    CancelRequested,
    DrainCancelled,
    DrainRequested,
    Event,
    MessageRejected,
    NodeDeclaredDead,
    RepairAsks,
    RetryRequested,
)
from relaunch.job.state import Examine, Incident, JobState, Phase, Relaunch, Repair
from relaunch.messages.bounds import MAX_REASON
from relaunch.messages.notices import Notice
from relaunch.pool.messages import DrainRequest, Grant, Healing, Offer, Place, Suspect
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import (
    EXHAUST,
    Policy,
    RepairKind,
    Strategy,
    list_stated,
    resolve,
    state_restarts,
)
from relaunch.text import printable

MAX_SHOWN = 100
"""Characters of a text that an error repeats."""

WITHDRAW = TypeAdapter(DrainRequest)
OFFER = TypeAdapter(Offer)


@dataclass(frozen=True, slots=True)
class OpenClaim:
    """What a claim that was not answered yet asks for, beside what the job says of itself."""

    keep: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    queue: bool = False


@dataclass(frozen=True, slots=True)
class ClaimsCarried:
    """What was last requested from the fleet."""

    seq: int = 0
    nodes: tuple[str, ...] = ()
    """Nodes that belong to the job: granted and not released. They equal the nodes of its slots,
    except briefly around a launch."""
    more_at: datetime | None = None
    """When the job would take more nodes, as last reported to the fleet."""
    more: tuple[Place, ...] = ()
    """Granted to a job that asked for more while it ran; not launched on yet."""
    launched: tuple[LaunchedGeneration, ...] = ()
    """Generations and the times by which their ranks stop themselves, as last reported to the
    fleet."""
    reported: tuple[Suspect, ...] = ()
    """Faults as last reported to the fleet."""
    open: OpenClaim | None = None
    """The claim `seq`, if the fleet has not answered it with a grant."""
    grants: tuple[Grant, ...] = ()
    """Answers that were not taken yet."""
    signed: SignedText | None = None
    """The submission as its caller has signed it, if they have."""


@dataclass(frozen=True, slots=True)
class ChosenNodes:
    """The nodes of the next launch."""

    places: tuple[Place, ...]
    fewer: str = ""
    """Why they are fewer than the job would take."""
    shrinks: bool = False
    """Whether the job shrinks to them."""


Treatment = Annotated[Examine | Repair, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True)
class CarriedAction:
    """The action under way. A run that continues another begins it again with what is known."""

    kind: Literal["relaunch", "treat", "stop", "release"]
    relaunch: Relaunch | None = None
    not_before: datetime | None = None
    """When the delay before the launch is over."""
    chosen: ChosenNodes | None = None
    """The nodes of the launch, once the fleet has granted them."""
    treatment: Treatment | None = None
    repairs: dict[str, str] = field(default_factory=dict)
    """The run id of the repair of each node, once it has begun; empty if it was refused."""
    once: bool = False
    """For a stop: try once on every node instead of waiting for the proof."""
    withdraws: bool = False
    """For a release: whether a claim waits, which has to be withdrawn."""


@dataclass(frozen=True, slots=True)
class OrdersCarried:
    """What is known of the orders of people."""

    used: tuple[UsedProof, ...] = ()
    """Signatures that must not be accepted again."""


@dataclass(frozen=True, slots=True)
class CarriedState:
    """What a run passes to the run that continues it, in addition to the state."""

    inbox: tuple[Event, ...] = ()
    after_seq: dict[str, int] = field(default_factory=dict)
    """Sequence number of the newest observation received from each node in this generation."""
    exited: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of this generation that have exited with 0, by node."""
    dead: tuple[str, ...] = ()
    """Nodes that a person has declared dead since nodes were last chosen."""
    deadline: datetime | None = None
    last_notice: str = ""
    """The key of the last notice sent to people."""
    claims: ClaimsCarried = ClaimsCarried()
    action: CarriedAction | None = None
    orders: OrdersCarried = OrdersCarried()
    notices: tuple[Notice, ...] = ()
    """Those that could not be posted to people yet, the oldest first."""


@dataclass(frozen=True, slots=True)
class TrainingJobInput:
    spec: JobSpec
    policy: Policy
    submitted_by: str = ""
    reason: str = ""
    previous: JobState | None = None
    """For `retry` of a closed job: the last state of its last submission. Budgets and history
    continue, tokens are new."""
    renew_budgets: bool = False
    avoid_nodes: tuple[str, ...] = ()
    resume: JobState | None = None
    """Set by continue-as-new only."""
    carried: CarriedState = CarriedState()
    hides_causes: bool = False
    """Whether search attributes show no cause, strategy and nodes."""
    proof: Proof | None = None
    """Of `describe_submission`."""

    def describe_submission(self) -> dict[str, object]:
        """Return what is signed of a submission: the job in full, by a digest.

        Fields with defaults are left out, so that builds which know different fields agree on jobs
        that do not use them.
        """
        content = {
            "spec": self.spec.model_dump(mode="json", exclude_defaults=True),
            "policy": self.policy.model_dump(mode="json", exclude_defaults=True),
        }
        return {
            "name": self.spec.name,
            "fleet": self.spec.fleet,
            "reason": self.reason,
            "renew_budgets": self.renew_budgets,
            "avoid_nodes": list(self.avoid_nodes),
            "sha256": hashlib.sha256(
                json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
            ).hexdigest(),
        }


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job, readable in the web UI while no worker runs."""

    name: str
    phase: Phase
    exit_code: int
    reason: str
    generation: int
    incidents: tuple[Incident, ...]
    incidents_archived: int
    state: JobState
    """`retry` of a closed job starts from it."""


@dataclass(frozen=True, slots=True)
class NodeRepairInput:
    fleet: str
    node: str
    strategy: Strategy | None
    """RESET_GPU or REBOOT_NODE; None: what the examination calls for, which may be nothing."""
    reason: str
    by: str
    deadline: datetime
    gpus: tuple[str, ...] = ()
    """PCI bus ids; empty: all GPUs of the node. Without a strategy the examination names them."""
    job: str = ""
    """The job that waits for the repair; empty if the fleet or a person ordered it."""
    approved_by: str = ""
    """Who has already approved it, for fleets whose repairs need approval."""
    level: int = 2
    catalog: CatalogOverrides = NO_OVERRIDES
    answer_within: timedelta = timedelta(hours=24)
    power: bool = False
    """With REBOOT_NODE: power-cycle the node at once. Otherwise a power cycle is used only after a
    reboot was not possible."""
    after_reboot: bool = False
    """Without a strategy: the node has been silent since a reboot that was ordered."""
    proof: Proof | None = None
    """Of `describe_repair`; only a person's order has one."""
    healed: tuple[Healing, ...] = ()
    """Without a strategy: what is not done again, because it healed the node a short time ago."""

    def describe_repair(self) -> dict[str, object]:
        """Return what is signed of a person's order."""
        return {
            "fleet": self.fleet,
            "node": self.node,
            "strategy": self.strategy,
            "power": self.power,
            "gpus": list(self.gpus),
            "level": self.level,
            "reason": self.reason,
            "after_reboot": self.after_reboot,
        }


@dataclass(frozen=True, slots=True)
class NodeRepairResult:
    node: str
    outcome: Literal["done", "refused", "ambiguous"]
    reason: str
    verdict: Verdict = Verdict.UNKNOWN


SNOOZE = timedelta(hours=1)


class AnswerMessage(StrictModel):
    decision: Literal["", "approve", "deny", "snooze", "take-over"] = ""
    reason: Reason = ""
    by: str = ""
    within: Duration = SNOOZE
    """For a snooze: how long until the question is asked again."""
    node: Literal[""] | Name = ""
    """The node, if this answers a request to leave it and not the job's own question."""
    repair: RepairKind | Literal[""] = ""
    """What is approved, if this answers a repair: refused if the repair asks something else when it
    arrives. Empty: whatever is asked."""
    proof: Proof | None = None


class RepairAsksMessage(StrictModel):
    node: str = ""
    question: str = ""
    until: datetime | None = None


class CancelMessage(StrictModel):
    reason: str = ""
    by: str = ""
    proof: Proof | None = None


class RetryMessage(StrictModel):
    reason: str = ""
    by: str = ""
    avoid_nodes: tuple[Name, ...] = ()
    renew_budgets: bool = False
    proof: Proof | None = None


class ReportMessage(StrictModel):
    node: Name | None = None
    declared: Literal["dead"] = "dead"
    force: bool = False
    """Accept the report even if the job still hears from the node."""
    reason: Reason = ""
    by: str = ""
    proof: Proof | None = None


class HintMessage(StrictModel):
    """A hint that something may have happened to a rank; it triggers a check and is not trusted."""

    what: str = ""
    """The task, or whatever the backend runs ranks in."""
    version: int = 0
    """Version of the hint's subject; an older or equal version is ignored."""
    submission: int = 0
    generation: int = 0


class PolicyMessage(StrictModel):
    policy: dict[str, object] = Field(default_factory=dict)
    """Keys as in a policy file, laid over the policy the job has."""
    reason: Reason = ""
    by: str = ""
    proof: Proof | None = None


def cancel_event(raw: Any) -> Event:
    message = CancelMessage.model_validate(raw)
    return CancelRequested(message.reason, message.by)


def retry_event(raw: Any) -> Event:
    message = RetryMessage.model_validate(raw)
    return RetryRequested(message.reason, message.by, message.avoid_nodes, message.renew_budgets)


def answer_event(message: AnswerMessage, now: datetime) -> Answered:
    assert message.decision, "it is checked before it is taken"
    until = now + message.within if message.decision == "snooze" else None
    return Answered(message.decision, message.reason, message.by, until, message.node)


def repair_asks_event(raw: Any) -> Event:
    message = RepairAsksMessage.model_validate(raw)
    return RepairAsks(message.node, message.question, message.until)


def report_event(raw: Any, job: JobState) -> Event:
    message = ReportMessage.model_validate(raw)
    if message.node is None:
        return MessageRejected("report", "node: missing, expected the name of a node")
    if not message.force and (why := check_declaration(job, message.node)):
        return MessageRejected("report", why, "was refused")
    return NodeDeclaredDead(message.node, message.reason, message.by)


def drain_event(raw: Any) -> Event:
    asked = WITHDRAW.validate_python(raw)
    if asked.cancelled:
        return DrainCancelled(asked.node, asked.reason)
    return DrainRequested(asked.node, asked.reason, asked.by, asked.until)


def overlay(policy: Policy, changes: dict[str, object]) -> Policy:
    """Lay keys over a policy: merge mappings key by key, replace a cause's ladder as a whole.

    With `extends`, the keys are laid over that preset alone.

    Raises:
        ValueError: the resulting policy is inconsistent.
    """
    if "extends" in changes:
        return resolve(changes)
    if isinstance(count := changes.get("max_restarts"), int) and changes.get(EXHAUST) is not False:
        policy = state_restarts(policy, count)
    merged = policy.model_dump(mode="json")
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = (
            {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
        )
    return Policy.model_validate({**merged, "stated": list_stated(changes, policy.stated)})


def explain(error: ValueError) -> str:
    """Return one sentence for the first error in what a person wrote, who may have written
    anything."""
    if not isinstance(error, ValidationError):
        return printable(str(error), MAX_REASON)
    first = error.errors(include_url=False)[0]
    return printable(_explain(first), MAX_REASON)


def _explain(first: ErrorDetails) -> str:
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    if first["type"] == "missing":
        return f"{where}: missing"
    return (
        f"{where}: {what} (got {_shorten(first['input'])})"
        if where and first["type"] != "value_error"
        else f"{where}: {what}"
        if where
        else what
    )


def _shorten(value: object) -> str:
    """Return the begin of a value as Python writes it."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}…"
    return reprlib.repr(value)
