"""Keeps messages that were not encrypted from workflows that take only encrypted ones.

Which workflows these are, their input says, and so does their history: a run that began where
`encryption_required` was set drops such messages for ever, on every worker, so it is replayed as it
was. A run that began before takes them. docs/decisions/0071-plain-payloads-are-refused.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.exceptions import ApplicationError
from temporalio.worker import (
    UnsandboxedWorkflowRunner,
    WorkflowInstance,
    WorkflowInstanceDetails,
)
from temporalio.workflow import Info

from relaunch.messages.seals import REQUIRED, SEALED

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


class _SealedInstance(WrappedInstance):
    def __init__(self, instance: WorkflowInstance, required: bool) -> None:
        super().__init__(instance)
        self._required = required
        self._takes_plain = True

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
                        raise ApplicationError(PLAIN_START, type="PlainPayload")
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
            kept.append(job)
        if len(kept) < len(act.jobs):
            copies = [type(one).FromString(one.SerializeToString()) for one in kept]
            del act.jobs[:]
            act.jobs.extend(copies)
        completion = self._instance.activate(act)
        for id in refused:
            answer = completion.successful.commands.add().update_response
            answer.protocol_instance_id = id
            answer.rejected.message = PLAIN_UPDATE
            answer.rejected.application_failure_info.type = "PlainPayload"
            answer.rejected.application_failure_info.non_retryable = True
        return completion

    def _refuses(self, payloads: Sequence[Payload]) -> bool:
        return not self._takes_plain and not _are_sealed(payloads)


def _are_sealed(payloads: Sequence[Payload]) -> bool:
    """Return whether a message was encrypted. One without payloads could be anyone's."""
    return bool(payloads) and all(SEALED in one.metadata for one in payloads)
