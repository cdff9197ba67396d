"""Each payload of a history, with the type that today's code reads it as.

Messages that people may send are declared as Any in the workflows, which parse them: `MESSAGES` has
their types.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from temporalio import activity, workflow
from temporalio.api.common.v1 import Payload
from temporalio.client import WorkflowHistory

import relaunch.activities
from relaunch.activities.reports import WatchHeartbeat
from relaunch.messages.fleets import (
    ApplyMessage,
    QuarantineMessage,
    ReasonMessage,
    ReleaseMessage,
)
from relaunch.messages.jobs import (
    AnswerMessage,
    CancelMessage,
    HintMessage,
    JobResult,
    PolicyMessage,
    RepairAsksMessage,
    ReportMessage,
    RetryMessage,
)
from relaunch.messages.notices import Notice
from relaunch.pool.events import RepairResult, RepairStart
from relaunch.pool.messages import (
    Claim,
    DrainRequest,
    FaultReport,
    Grant,
    Offer,
    Permit,
    PermitRequest,
)
from relaunch.workflows.replay import WORKFLOWS

JOB, FLEET, REPAIR, NOTIFIER = "TrainingJob", "Fleet", "NodeRepair", "Notifier"
MESSAGES: Mapping[str, Mapping[str, Any]] = {
    JOB: {
        "cancel": CancelMessage,
        "force_retry": RetryMessage,
        "repair_asks": RepairAsksMessage,
        "granted": Grant,
        "nodes_offered": Offer,
        "drain_node": DrainRequest,
        "report": ReportMessage,
        "hint": HintMessage,
        "change_policy": PolicyMessage,
        "answer": AnswerMessage,
    },
    FLEET: {
        "claim": Claim,
        "report_faults": FaultReport,
        "repair_began": RepairStart,
        "repair_wanted": PermitRequest,
        "repair_ended": RepairResult,
        "quarantine": QuarantineMessage,
        "release": ReleaseMessage,
        "declare_dead": ReleaseMessage,
        "pause": ReasonMessage,
        "resume": ReasonMessage,
        "apply": ApplyMessage,
    },
    REPAIR: {"permitted": Permit, "answer": AnswerMessage},
    NOTIFIER: {"post": tuple[Notice, ...]},
}
WITHOUT_CONTENT = {
    JOB: ("claim_again", "upgrade"),
    FLEET: ("upgrade",),
    REPAIR: ("upgrade",),
    NOTIFIER: ("upgrade",),
}
"""Signals whose content is not read."""
HEARTBEATS: Mapping[str, Any] = {"watch_ranks": WatchHeartbeat}
"""Details that are read as a whole. Those of other activities are lists of plain values."""
_BY_ID = {"job/": JOB, "fleet/": FLEET, "repair/": REPAIR, "notifier/": NOTIFIER}


@dataclass(frozen=True, slots=True)
class RecordedPayload:
    kind: str
    """What it is, the same for all of its type: "input of activity launch_ranks"."""
    where: str
    data: bytes
    """JSON."""


def type_of_workflow(id_: str) -> str:
    return next(kind for prefix, kind in _BY_ID.items() if id_.startswith(prefix))


@cache
def find_types() -> Mapping[str, Any]:
    """Return the type of every payload that workflows and activities of today take and give."""
    found: dict[str, Any] = {"result of a failed TrainingJob": JobResult}
    for cls in WORKFLOWS:
        name = cls.__name__
        found |= _find_signature(cls.run, f"{{}} of workflow {name}")
        for handler, messages in _list_handlers(cls):
            label = f"{messages} {handler.__name__} of {name}"
            hints = get_type_hints(handler)
            if messages == "query":
                found[f"answer of {label}"] = hints["return"]
                del hints["return"]
                found |= {f"question of {label}": hint for hint in hints.values()}
            elif handler.__name__ not in WITHOUT_CONTENT[name]:
                found[label] = MESSAGES[name][handler.__name__]
                if messages == "update":
                    found[f"answer of {label}"] = hints["return"]
    for method in list_activities():
        name = method.__name__
        found |= _find_signature(method, f"{{}} of activity {name}")
        if name in HEARTBEATS:
            found[f"heartbeat of activity {name}"] = HEARTBEATS[name]
    return found


def list_activities() -> list[Callable[..., Any]]:
    return [
        method
        for module in pkgutil.iter_modules(relaunch.activities.__path__)
        for _, cls in inspect.getmembers(
            importlib.import_module(f"relaunch.activities.{module.name}"), inspect.isclass
        )
        if cls.__module__ == f"relaunch.activities.{module.name}"
        for _, method in inspect.getmembers(cls, inspect.isfunction)
        if activity._Definition.from_callable(method) is not None
    ]


def _list_handlers(cls: type) -> Iterator[tuple[Callable[..., Any], str]]:
    known = workflow._Definition.must_from_class(cls)
    for kind in ("signal", "query", "update"):
        handlers = {"signal": known.signals, "query": known.queries, "update": known.updates}[kind]
        for name, handler in handlers.items():
            if name is not None and not name.startswith("__"):
                yield handler.fn, kind


def _find_signature(function: Callable[..., Any], label: str) -> dict[str, Any]:
    hints = get_type_hints(function)
    result = hints.pop("return")
    found = {label.format("input"): hint for hint in hints.values()}
    return found if result is type(None) else {**found, label.format("result"): result}


def list_payloads(name: str, history: WorkflowHistory) -> Iterator[RecordedPayload]:
    """Yield each payload of a history of which the code knows a type.

    Raises:
        KeyError: A workflow or a message of this kind is not known any more.
    """
    own = type_of_workflow(history.workflow_id)
    activities: dict[int, str] = {}
    updates: dict[str, str] = {}
    for event in history.events:
        where = f"{name}, event {event.event_id}"

        def each(kind: str, payloads: Iterable[Payload], where: str = where) -> Iterator[Any]:
            for payload in payloads:
                if payload.metadata.get("encoding") == b"json/plain":
                    yield RecordedPayload(kind, where, payload.data)

        attribute: Any = getattr(event, str(event.WhichOneof("attributes")))
        match event.WhichOneof("attributes"):
            case "workflow_execution_started_event_attributes":
                yield from each(f"input of workflow {own}", attribute.input.payloads)
            case "workflow_execution_continued_as_new_event_attributes":
                yield from each(f"input of workflow {own}", attribute.input.payloads)
            case "workflow_execution_completed_event_attributes":
                yield from each(f"result of workflow {own}", attribute.result.payloads)
            case "workflow_execution_failed_event_attributes":
                details = attribute.failure.application_failure_info.details.payloads
                yield from each(f"result of a failed {own}", details)
            case "activity_task_scheduled_event_attributes":
                kind = activities[event.event_id] = attribute.activity_type.name
                yield from each(f"input of activity {kind}", attribute.input.payloads)
            case "activity_task_completed_event_attributes":
                kind = activities[attribute.scheduled_event_id]
                yield from each(f"result of activity {kind}", attribute.result.payloads)
            case "workflow_execution_signaled_event_attributes":
                yield from _signal(own, attribute.signal_name, attribute.input.payloads, each)
            case "signal_external_workflow_execution_initiated_event_attributes":
                to = type_of_workflow(attribute.workflow_execution.workflow_id)
                yield from _signal(to, attribute.signal_name, attribute.input.payloads, each)
            case "workflow_execution_update_accepted_event_attributes":
                asked = attribute.accepted_request.input
                updates[attribute.accepted_request.meta.update_id] = asked.name
                yield from each(f"update {asked.name} of {own}", asked.args.payloads)
            case "workflow_execution_update_completed_event_attributes":
                update = updates[attribute.meta.update_id]
                answer = attribute.outcome.success.payloads
                yield from each(f"answer of update {update} of {own}", answer)
            case "start_child_workflow_execution_initiated_event_attributes":
                kind = attribute.workflow_type.name
                yield from each(f"input of workflow {kind}", attribute.input.payloads)
            case "child_workflow_execution_completed_event_attributes":
                kind = attribute.workflow_type.name
                yield from each(f"result of workflow {kind}", attribute.result.payloads)


def _signal(
    workflow: str, signal: str, payloads: Iterable[Payload], each: Callable[..., Iterator[Any]]
) -> Iterator[RecordedPayload]:
    if signal not in WITHOUT_CONTENT[workflow]:
        yield from each(f"signal {signal} of {workflow}", payloads)


def find_nested(payload: RecordedPayload) -> RecordedPayload:
    """Return the signal that an activity sends, of the payload that orders it."""
    sent = json.loads(payload.data)
    kind = f"signal {sent['signal']} of {FLEET}"
    return RecordedPayload(kind, payload.where, json.dumps(sent["message"]).encode())
