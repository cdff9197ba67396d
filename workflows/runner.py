"""Runs workflows, and forgets those that took events before the task that these belong to.

To answer a query, sdk-core applies also the events that no workflow task has begun with yet, at the
time of the task before, and sends what the workflow then orders with the next task. Such a history
cannot be replayed: docs/decisions/0049-events-that-come-with-a-query.md.
"""

from __future__ import annotations

import logging
from typing import Any

from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.worker import (
    UnsandboxedWorkflowRunner,
    Worker,
    WorkflowInstance,
    WorkflowInstanceDetails,
)
from temporalio.workflow import Info

log = logging.getLogger("relaunch.runner")


class TaskRunner(UnsandboxedWorkflowRunner):
    """Runs workflows outside the sandbox. It has to be attached to its worker."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def attach(self, worker: Worker) -> Worker:
        """Have workflows leave the cache of this worker, and return it."""
        self._worker = worker
        return worker

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        return _TaskInstance(super().create_instance(det), self)

    def forget(self, run: str) -> None:
        """Have a run leave the cache as soon as its query is answered, before its next task.

        The SDK has no public name for this, and its version is pinned.
        """
        if self._worker is None:
            raise RuntimeError("the runner was not attached to its worker")
        self._worker._bridge_worker.request_workflow_eviction(run)


class _TaskInstance(WorkflowInstance):
    """A workflow that leaves the cache once it took events that came before their workflow task."""

    def __init__(self, instance: WorkflowInstance, runner: TaskRunner) -> None:
        self._instance, self._runner = instance, runner
        self._events = 0
        self._bytes = 0

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        if self._is_early(act):
            log.info("run %s leaves the cache: a query came before its workflow task", act.run_id)
            self._runner.forget(act.run_id)
        self._events, self._bytes = act.history_length, act.history_size_bytes
        return self._instance.activate(act)

    def _is_early(self, act: WorkflowActivation) -> bool:
        """Return whether there are events that no workflow task has begun with.

        The number of events is that of all that came. Their size is written by the server as a task
        begins, so it is larger for each task, whatever clocks say. A server that writes none
        (Temporal's time-skipping one) is believed.
        """
        is_longer = 0 < self._events < act.history_length
        return is_longer and not act.is_replaying and 0 < self._bytes == act.history_size_bytes

    def get_serialization_context(self, command_info: Any) -> Any:
        return self._instance.get_serialization_context(command_info)

    def get_external_store_context(self, command_info: Any) -> Any:
        return self._instance.get_external_store_context(command_info)

    def get_info(self) -> Info:
        return self._instance.get_info()

    def get_thread_id(self) -> int | None:
        return self._instance.get_thread_id()
