"""Keeps what was not encrypted from workflows that take only what is.

Which workflows these are, their input says, and so does their history: a run that began where
`encryption_required` was set drops such messages for ever, on every worker, so it is replayed as it
was. A run that began before takes them. docs/decisions/0071-plain-payloads-are-refused.md.

An answer to an activity that is not encrypted counts as none, because the activity may not have
been carried out: docs/decisions/0081-plain-answers-are-no-answers.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import RetryState
from temporalio.api.failure.v1 import Failure
from temporalio.bridge.proto.activity_result import ActivityResolution
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_commands import ScheduleActivity
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.exceptions import ApplicationError
from temporalio.worker import (
    UnsandboxedWorkflowRunner,
    WorkflowInstance,
    WorkflowInstanceDetails,
)
from temporalio.workflow import Info

from relaunch.messages.seals import ORDER_AGAIN, PLAIN_PAYLOAD, PLAIN_RESULT, REQUIRED, SEALED

log = logging.getLogger("relaunch.sealing")
PLAIN_UPDATE = (
    "the message is not encrypted, and this workflow takes only encrypted ones: send it with the"
    " keys of this namespace (RELAUNCH_ENCRYPTION_KEYS)"
)
PLAIN_START = (
    "its input is not encrypted, and this worker takes only encrypted ones"
    " (RELAUNCH_ENCRYPTION_REQUIRED): start it with the keys of this namespace"
    " (RELAUNCH_ENCRYPTION_KEYS)"
)


PLAIN_ANSWER = (
    "the answer to {activity} is not encrypted, and this workflow takes only encrypted ones: a"
    " worker without the keys of this namespace gave it"
)
ASK_AGAIN = frozenset({"launch_ranks"})
"""Activities that their workflow orders again: it has to know that an answer was lost."""


class WrappedInstance(WorkflowInstance):
    """An instance of a workflow that is the given one in all."""

    def __init__(self, instance: WorkflowInstance) -> None:
        self._instance = instance

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        return self._instance.activate(act)

    def get_serialization_context(self, command_info: Any) -> Any:
        return self._instance.get_serialization_context(command_info)

    def get_external_store_context(self, command_info: Any) -> Any:
        return self._instance.get_external_store_context(command_info)

    def get_info(self) -> Info:
        return self._instance.get_info()

    def get_thread_id(self) -> int | None:
        return self._instance.get_thread_id()


class SealedRunner(UnsandboxedWorkflowRunner):
    """Runs workflows outside the sandbox, without the messages that they must not take.

    Args:
        required: Whether a workflow whose input is not encrypted is not run.
    """

    def __init__(self, required: bool = False) -> None:
        self._required = required

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        return _SealedInstance(super().create_instance(det), self._required)


@dataclass(slots=True)
class _OpenActivity:
    """An activity that was ordered and has no answer yet."""

    name: str
    may_end: bool
    """Whether the workflow expects that it ends without an answer."""
    cancelled: bool = False


class _SealedInstance(WrappedInstance):
    def __init__(self, instance: WorkflowInstance, required: bool) -> None:
        super().__init__(instance)
        self._required = required
        self._takes_plain = True
        self._activities: dict[int, _OpenActivity] = {}

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        """Run the workflow.

        Raises:
            ApplicationError: Its input is not encrypted. The task is tried again, here or by a
                worker that takes it.
        """
        refused: list[str] = []
        kept = []
        for job in act.jobs:
            match job.WhichOneof("variant"):
                case "initialize_workflow":
                    given = job.initialize_workflow.arguments
                    if self._required and not _are_sealed(given):
                        raise ApplicationError(PLAIN_START, type=PLAIN_PAYLOAD)
                    self._takes_plain = not (
                        _are_sealed(given) and all(REQUIRED in one.metadata for one in given)
                    )
                case "signal_workflow" if self._refuses(job.signal_workflow.input):
                    name = job.signal_workflow.signal_name
                    if not act.is_replaying:
                        log.warning("run %s: signal %s is dropped, it is plain", act.run_id, name)
                    continue
                case "do_update" if self._refuses(job.do_update.input):
                    refused.append(job.do_update.protocol_instance_id)
                    continue
                case "resolve_activity":
                    resolved = job.resolve_activity
                    open_one = self._activities.pop(resolved.seq, None)
                    if open_one is not None and self._is_no_answer(resolved.result):
                        _take_as_none(resolved.result, open_one)
                        if not act.is_replaying:
                            reason = PLAIN_ANSWER.format(activity=open_one.name)
                            log.warning("run %s: %s; it counts as none", act.run_id, reason)
                case "resolve_child_workflow_execution" if not self._takes_plain:
                    child = job.resolve_child_workflow_execution.result
                    if child.HasField("completed") and not _are_sealed([child.completed.result]):
                        child.failed.failure.CopyFrom(_make_child_failure())
            kept.append(job)
        if len(kept) < len(act.jobs):
            copies = [type(one).FromString(one.SerializeToString()) for one in kept]
            del act.jobs[:]
            act.jobs.extend(copies)
        completion = self._instance.activate(act)
        self._note_orders(completion)
        for id in refused:
            answer = completion.successful.commands.add().update_response
            answer.protocol_instance_id = id
            answer.rejected.message = PLAIN_UPDATE
            answer.rejected.application_failure_info.type = PLAIN_PAYLOAD
            answer.rejected.application_failure_info.non_retryable = True
        return completion

    def _note_orders(self, completion: WorkflowActivationCompletion) -> None:
        """Remember the activities that were ordered and cancelled."""
        for command in completion.successful.commands:
            match command.WhichOneof("variant"):
                case "schedule_activity":
                    order = command.schedule_activity
                    self._activities[order.seq] = _OpenActivity(
                        order.activity_type, _may_end(order)
                    )
                case "request_cancel_activity":
                    if open_one := self._activities.get(command.request_cancel_activity.seq):
                        open_one.cancelled = True

    def _is_no_answer(self, result: ActivityResolution) -> bool:
        """Return whether an answer to an activity has to count as none.

        Of time-outs and cancellations the server says itself, and they say nothing of the node.
        """
        if result.HasField("completed"):
            return self._refuses([result.completed.result])
        cause = result.failed.failure.cause
        match cause.WhichOneof("failure_info"):
            case "application_failure_info":
                is_plain = cause.application_failure_info.type == PLAIN_PAYLOAD
                details = cause.application_failure_info.details.payloads
                return is_plain or self._refuses([cause.encoded_attributes, *details])
            case "server_failure_info":  # the answer was longer than the server takes
                return not self._takes_plain
        return False

    def _refuses(self, payloads: Sequence[Payload]) -> bool:
        return not self._takes_plain and not _are_sealed(payloads)


def _are_sealed(payloads: Sequence[Payload]) -> bool:
    """Return whether a message was encrypted. One without payloads could be anyone's."""
    return bool(payloads) and all(SEALED in one.metadata for one in payloads)


def _may_end(order: ScheduleActivity) -> bool:
    """Return whether the workflow expects that an activity ends without an answer."""
    within = order.schedule_to_close_timeout.ToTimedelta()
    return order.activity_type in ASK_AGAIN or bool(within or order.retry_policy.maximum_attempts)


def _take_as_none(result: ActivityResolution, order: _OpenActivity) -> None:
    """Have an activity that was answered be one that was not.

    One that the server would try again for ever is ordered again, as the SDK does with local
    activities. One that may end without an answer ends so, and one that was cancelled has ended.
    """
    result.Clear()
    if order.cancelled:
        result.cancelled.failure.activity_failure_info.SetInParent()
        result.cancelled.failure.cause.canceled_failure_info.SetInParent()
    elif order.may_end:
        result.failed.failure.CopyFrom(_make_failure(order.name))
    else:
        result.backoff.attempt = 1
        result.backoff.backoff_duration.FromTimedelta(ORDER_AGAIN)


def _make_failure(activity: str) -> Failure:
    failure = Failure(message="activity without an answer")
    failure.activity_failure_info.retry_state = RetryState.RETRY_STATE_TIMEOUT
    failure.cause.message = PLAIN_ANSWER.format(activity=activity)
    failure.cause.application_failure_info.type = PLAIN_PAYLOAD
    return failure


def _make_child_failure() -> Failure:
    failure = Failure(message="child workflow without a result")
    failure.child_workflow_execution_failure_info.SetInParent()
    failure.cause.message = PLAIN_RESULT
    failure.cause.application_failure_info.type = PLAIN_PAYLOAD
    return failure
