"""What goes into and comes out of the job workflow: its argument, its result, and what people may send to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from relaunch.evidence.catalog.overrides import NO_OVERRIDES, CatalogOverrides
from relaunch.evidence.findings import Verdict
from relaunch.fields import Duration, Name, Reason, Strict
from relaunch.generation import LaunchedGeneration
from relaunch.job.decide import why_not_dead
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
from relaunch.job.state import Incident, JobState, Phase
from relaunch.pool.messages import Offer, Place, Suspect, Withdraw
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, Strategy, resolve

WITHDRAW = TypeAdapter(Withdraw)
OFFER = TypeAdapter(Offer)
TASK_QUEUE = "relaunch"
WORKFLOW_ID_PREFIX = "job/"
FLEET_ID_PREFIX = "fleet/"
REPAIR_ID_PREFIX = "repair/"
"""And then fleet/node: two repairs of one node would have one id, and the server takes only one."""


@dataclass(frozen=True, slots=True)
class ClaimsCarried:
    """What was asked of the fleet last."""

    seq: int = 0
    nodes: tuple[str, ...] = ()
    """The job's own: granted and not given back. They are those of its slots, but for a moment around a launch."""
    more_at: datetime | None = None
    """When it would take more, as the fleet was told last."""
    more: tuple[Place, ...] = ()
    """Granted to a job that asked for more while it ran; it has not been launched with them yet."""
    launched: tuple[LaunchedGeneration, ...] = ()
    """By which times its ranks stop themselves, as the fleet was told last."""
    reported: tuple[Suspect, ...] = ()
    """What the fleet was told last of faults."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What a run hands to the run that continues it, beside the state."""

    inbox: tuple[Event, ...] = ()
    after_seq: dict[str, int] = field(default_factory=dict)
    """The newest observation taken from each node in this generation."""
    exited: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of this generation that have exited with 0, by node."""
    dead: tuple[str, ...] = ()
    """Nodes that a person declared dead, since they were chosen last."""
    deadline: datetime | None = None
    told: str = ""
    """What people were told last."""
    claims: ClaimsCarried = ClaimsCarried()


@dataclass(frozen=True, slots=True)
class TrainingJobInput:
    spec: JobSpec
    policy: Policy
    submitted_by: str = ""
    reason: str = ""
    previous: JobState | None = None
    """`retry` of a closed job: what its last submission knew. Budgets and history go on, tokens are new."""
    renew_budgets: bool = False
    avoid_nodes: tuple[str, ...] = ()
    resume: JobState | None = None
    """Set by continue-as-new only."""
    carried: Carried = Carried()


@dataclass(frozen=True, slots=True)
class JobResult:
    """Readable in the web UI with no worker alive."""

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
    """RESET_GPU or REBOOT_NODE; None: whatever its examination calls for, which may be nothing."""
    reason: str
    by: str
    deadline: datetime
    gpus: tuple[str, ...] = ()
    """By bus id; empty: all of the node. Without a strategy the examination names them."""
    job: str = ""
    """Which waits for it; empty: the fleet or a person ordered it."""
    approved_by: str = ""
    """Who has approved it already, where the fleet's repairs are to be asked for."""
    level: int = 2
    catalog: CatalogOverrides = NO_OVERRIDES
    answer_within: timedelta = timedelta(hours=24)
    power: bool = False
    """With REBOOT_NODE: its power is cycled at once. Otherwise that is what comes after a reboot that was not to be had."""
    after_reboot: bool = False
    """Without a strategy: the node has been silent since a reboot that somebody ordered."""


@dataclass(frozen=True, slots=True)
class NodeRepairResult:
    node: str
    outcome: Literal["done", "refused", "ambiguous"]
    reason: str
    verdict: Verdict = Verdict.UNKNOWN


SNOOZE = timedelta(hours=1)


class AnswerMessage(Strict):
    decision: Literal["", "approve", "deny", "snooze", "take-over"] = ""
    reason: Reason = ""
    by: str = ""
    within: Duration = SNOOZE
    """Of a snooze: when it is asked again."""
    node: Literal[""] | Name = ""
    """Which somebody wants of the job: this is the answer to that, and not to what the job asks."""


class RepairAsksMessage(Strict):
    node: str = ""
    question: str = ""
    until: datetime | None = None


class CancelMessage(Strict):
    reason: str = ""
    by: str = ""


class RetryMessage(Strict):
    reason: str = ""
    by: str = ""
    avoid_nodes: tuple[Name, ...] = ()
    renew_budgets: bool = False


class ReportMessage(Strict):
    node: Name | None = None
    declared: Literal["dead"] = "dead"
    force: bool = False
    """Also where the job hears the node."""
    reason: Reason = ""
    by: str = ""


class HintMessage(Strict):
    """Something may have happened to a rank where ranks are run. It is looked at, and not believed."""

    what: str = ""
    """Which task, or whatever it is there."""
    version: int = 0
    """Of what is known of it: an older one, or the same again, is no news."""
    submission: int = 0
    generation: int = 0


class PolicyMessage(Strict):
    policy: dict[str, object] = Field(default_factory=dict)
    """Keys as in a policy file, laid over the policy the job has."""
    reason: Reason = ""
    by: str = ""


def cancel_event(raw: Any) -> Event:
    message = CancelMessage.model_validate(raw)
    return CancelRequested(message.reason, message.by)


def retry_event(raw: Any) -> Event:
    message = RetryMessage.model_validate(raw)
    return RetryRequested(message.reason, message.by, message.avoid_nodes, message.renew_budgets)


def answer_event(message: AnswerMessage, now: datetime) -> Event:
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
    if not message.force and (why := why_not_dead(job, message.node)):
        return MessageRejected("report", why, "was refused")
    return NodeDeclaredDead(message.node, message.reason, message.by)


def leave_event(raw: Any) -> Event:
    asked = WITHDRAW.validate_python(raw)
    if asked.withdrawn:
        return DrainCancelled(asked.node, asked.reason)
    return DrainRequested(asked.node, asked.reason, asked.by, asked.until)


def overlay(policy: Policy, changes: dict[str, object]) -> Policy:
    """Lay keys over a policy: mappings key by key, a cause's ladder as a whole. With `extends` they stand over that preset alone.

    Raises:
        ValueError: the policy that this would make cannot hold together.
    """
    if "extends" in changes:
        return resolve(changes)
    merged = policy.model_dump(mode="json")
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return Policy.model_validate(merged)


def explain(error: ValidationError) -> str:
    """One sentence for the first thing that is wrong in what a person wrote."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    if first["type"] == "missing":
        return f"{where}: missing"
    return (
        f"{where}: {what} (got {first['input']!r})" if where and first["type"] != "value_error" else f"{where}: {what}" if where else what
    )
