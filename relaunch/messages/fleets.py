"""Input of the fleet workflow: its argument, messages from programs, and messages from people.

A message that cannot be parsed becomes a `MalformedMessage`, which is shown to people as a notice:
a message never fails a workflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import PlainSerializer, TypeAdapter
from pydantic.dataclasses import dataclass

from relaunch.access.orders import Proof
from relaunch.fields import Duration, Reason, StrictModel, parse_name
from relaunch.messages.bounds import MAX_REASON, MAX_TEXT, MessageError, bound_message
from relaunch.messages.jobs import explain
from relaunch.pool.events import (
    ClaimEvent,
    DeathDeclaration,
    FaultReportEvent,
    FleetEvent,
    FleetFileContent,
    MalformedMessage,
    PauseCommand,
    PermitRequestEvent,
    QuarantineCommand,
    ReleaseCommand,
    RepairResult,
    RepairStart,
    ResumeCommand,
)
from relaunch.pool.messages import Claim, FaultReport, PermitRequest, Suspect
from relaunch.pool.rounds import KnownNode
from relaunch.pool.state import FleetState, NodeProbe
from relaunch.text import printable

DRAIN_TIMEOUT = timedelta(minutes=30)
"""Default time for a job to leave a node that a person drains: longer than most jobs need between
two checkpoints."""

MAX_ID_BYTES = 500
"""Of a name that becomes part of a workflow id, which may have 1,000."""

MAX_SUBMISSION = 253_402_300_799_999
"""The last millisecond of the year 9999, as a Unix time: no later one can be named."""
MAX_WANTED = 1_000_000
"""Nodes that a claim can want, or GPUs on each."""

Said = TypeVar("Said")
_CLAIM: TypeAdapter[Claim] = TypeAdapter(Claim)
_FAULT_REPORT: TypeAdapter[FaultReport] = TypeAdapter(FaultReport)
_PERMIT_REQUEST: TypeAdapter[PermitRequest] = TypeAdapter(PermitRequest)
_REPAIR_BEGAN: TypeAdapter[RepairStart] = TypeAdapter(RepairStart)
_REPAIR_ENDED: TypeAdapter[RepairResult] = TypeAdapter(RepairResult)


@cache
def _make_state_adapter() -> TypeAdapter[FleetState]:
    """Return the adapter, made when a fleet first continues as new: that takes 20 ms."""
    return TypeAdapter(FleetState)


def short(state: FleetState | None) -> Any:
    """Return the state as JSON without fields that have their defaults; readers see no difference.

    2,048 nodes and 1,000 jobs must stay below 2 MiB.
    """
    if state is None:
        return None
    return _make_state_adapter().dump_python(state, mode="json", exclude_defaults=True)


@dataclass(frozen=True, slots=True)
class FleetInput:
    name: str
    resume: Annotated[FleetState | None, PlainSerializer(short)] = None
    """Set by continue-as-new only."""
    inbox: tuple[FleetEvent, ...] = ()
    checked_at: datetime | None = None
    """When the fleet file was last read and the claims were last checked."""
    file_digest: str = ""
    """Of the fleet file as last read."""
    open_notices: tuple[str, ...] = ()
    """The keys of the open matters that people were notified of."""


@dataclass(frozen=True, slots=True)
class ReadFleetInput:
    fleet: str
    digest: str = ""
    """Of the file as it was last read: the same content is not sent again."""


@dataclass(frozen=True, slots=True)
class FleetFile:
    """What a worker found in its fleet file."""

    applied: FleetFileContent | None
    """None: it cannot be used, or is as it was. Beside `wrong`, for a fleet that has read none yet:
    how the worker serves the fleet since the file could be used last."""
    wrong: str = ""
    """Why it cannot be used."""
    digest: str = ""
    """Of its content, to be compared with the next reading."""


@dataclass(frozen=True, slots=True)
class WatchFleetInput:
    """What a fleet knows when its watch begins."""

    fleet: str
    file_digest: str
    """Of the fleet file as it was last read."""
    file_wrong: str
    """Why it could not be used; empty if it could."""
    claims: tuple[tuple[str, int], ...]
    """(job, submission) of the claims that are not closed."""
    nodes: tuple[KnownNode, ...]
    first_in: timedelta
    """Until the first round."""
    interval: timedelta
    """Between two rounds."""


@dataclass(frozen=True, slots=True)
class FleetNews:
    """What a round of the watch has found that the fleet did not know."""

    file: FleetFile | None = None
    closed: tuple[tuple[str, int], ...] = ()
    """(job, submission) of claims whose workflows no longer run."""
    probes: tuple[NodeProbe, ...] = ()


class QuarantineMessage(StrictModel):
    node: str = ""
    reason: Reason = ""
    by: str = ""
    drain: bool = False
    within: Duration | None = None
    proof: Proof | None = None


class ReleaseMessage(StrictModel):
    """The message of `release` and `declare_dead`."""

    node: str = ""
    reason: Reason = ""
    by: str = ""
    proof: Proof | None = None


class ReasonMessage(StrictModel):
    """The message of `pause` and `resume`."""

    reason: Reason = ""
    by: str = ""
    proof: Proof | None = None


class ApplyMessage(StrictModel):
    reason: str = ""
    by: str = ""
    proof: Proof | None = None


def claim_fact(raw: Any) -> FleetEvent:
    claim = _CLAIM.validate_python(raw)
    _check_id(claim.job)
    if claim.submission > MAX_SUBMISSION:
        raise MessageError(f"submission is {claim.submission}: expected milliseconds since 1970")
    if (most := max(claim.nodes, claim.most, claim.had, claim.gpus)) > MAX_WANTED:
        raise MessageError(f"it wants {most}: expected at most {MAX_WANTED:,}")
    return ClaimEvent(
        replace(
            claim,
            since=_in_utc(claim.since),
            more_at=_in_utc(claim.more_at),
            suspects=_suspects_in_utc(claim.suspects),
        )
    )


def fault_report_fact(raw: Any) -> FleetEvent:
    report = _FAULT_REPORT.validate_python(raw)
    return FaultReportEvent(replace(report, suspects=_suspects_in_utc(report.suspects)))


def repair_began_fact(raw: Any) -> FleetEvent:
    return _REPAIR_BEGAN.validate_python(raw)


def repair_wanted_fact(raw: Any) -> FleetEvent:
    request = _PERMIT_REQUEST.validate_python(raw)
    _check_id(request.workflow)
    return PermitRequestEvent(request)


def repair_ended_fact(raw: Any) -> FleetEvent:
    ended = _REPAIR_ENDED.validate_python(raw)
    if ended.healing is None:
        return ended
    return replace(ended, healing=replace(ended.healing, at=_in_utc(ended.healing.at)))


At = TypeVar("At", datetime, datetime | None)


def _in_utc(at: At) -> At:
    """Return a time with its zone: UTC, if it names none, as only a stranger's does.

    Compared with another it would fail each of the fleet's workflow tasks.
    """
    return at if at is None or at.tzinfo is not None else at.replace(tzinfo=UTC)


def _suspects_in_utc(suspects: tuple[Suspect, ...]) -> tuple[Suspect, ...]:
    return tuple(replace(one, at=_in_utc(one.at)) for one in suspects)


def quarantine_fact(raw: Any) -> FleetEvent:
    message = QuarantineMessage.model_validate(raw)
    if (wrong := _wrong_node(message.node)) is not None:
        return MalformedMessage("quarantine", wrong)
    if message.within is not None and not message.drain:
        return MalformedMessage(
            "quarantine",
            "within: it limits the time for a drain, expected drain true beside it",
        )
    within = message.within if message.within is not None else DRAIN_TIMEOUT
    return QuarantineCommand(
        message.node, message.reason[:MAX_REASON], message.by, within if message.drain else None
    )


def release_fact(raw: Any) -> FleetEvent:
    message = ReleaseMessage.model_validate(raw)
    if (wrong := _wrong_node(message.node)) is not None:
        return MalformedMessage("release", wrong)
    return ReleaseCommand(message.node, message.reason[:MAX_REASON], message.by)


def dead_fact(raw: Any) -> FleetEvent:
    message = ReleaseMessage.model_validate(raw)
    if (wrong := _wrong_node(message.node)) is not None:
        return MalformedMessage("declare_dead", wrong)
    return DeathDeclaration(message.node, message.reason[:MAX_REASON], message.by)


def pause_fact(raw: Any) -> FleetEvent:
    message = ReasonMessage.model_validate(raw)
    return PauseCommand(message.reason[:MAX_REASON], message.by)


def resume_fact(raw: Any) -> FleetEvent:
    message = ReasonMessage.model_validate(raw)
    return ResumeCommand(message.reason[:MAX_REASON], message.by)


def apply_message(raw: Any) -> ApplyMessage:
    return ApplyMessage.model_validate(raw)


def read(name: str, message: Any, parse: Callable[[Any], Said]) -> Said | MalformedMessage:
    """Parse a message; an empty message counts as an empty object."""
    try:
        return parse(bound_message({} if message in (None, "") else message, MAX_TEXT))
    except ValueError as error:
        return MalformedMessage(name, explain(error))


def _check_id(text: str) -> None:
    """Refuse what cannot be part of a workflow id, to which the fleet would send its answer: the
    server refuses the workflow task that does, again and again."""
    if len(text.encode()) > MAX_ID_BYTES:
        raise MessageError(
            f"the id {printable(text, 60)} has more than {MAX_ID_BYTES} bytes: no workflow has it"
        )


def _wrong_node(name: str) -> str | None:
    if not name:
        return "node: missing, expected the name of a node"
    try:
        parse_name(name)
    except ValueError as error:
        return f"node: {error}"[:MAX_REASON]
    return None
