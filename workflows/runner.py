"""Runs workflows, and forgets those that took events before the task that these belong to.

To answer a query, sdk-core applies also the events that no workflow task has begun with yet, at the
time of the task before, and sends what the workflow then orders with the next task. Such a history
cannot be replayed: docs/decisions/0049-events-that-come-with-a-query.md.
"""

from __future__ import annotations

import logging

from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.worker import Worker, WorkflowInstance, WorkflowInstanceDetails

from relaunch.activities.running_watches import RunningWatches
from relaunch.workflows.sealing import SealedRunner, WrappedInstance

log = logging.getLogger("relaunch.runner")


class TaskRunner(SealedRunner):
    """Runs workflows outside the sandbox. It has to be attached to its worker.

    Args:
        required: Whether a workflow whose input is not encrypted is not run.
        running: Records what is in the cache, for the successor of a worker that is killed.
    """

    def __init__(self, required: bool = False, running: RunningWatches | None = None) -> None:
        super().__init__(required)
        self._running = running
        self._worker: Worker | None = None

    def attach(self, worker: Worker) -> Worker:
        """Have workflows leave the cache of this worker, and return it."""
        self._worker = worker
        return worker

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        if self._running is not None:
            self._running.add_run(det.info.workflow_id, det.info.run_id)
        return _TaskInstance(super().create_instance(det), self)

    def note_eviction(self, run: str) -> None:
        if self._running is not None:
            self._running.drop_run(run)

    def forget(self, run: str) -> None:
        """Have a run leave the cache as soon as its query is answered, before its next task.

        The SDK has no public name for this, and its version is pinned.
        """
        if self._worker is None:
            raise RuntimeError("the runner was not attached to its worker")
        self._worker._bridge_worker.request_workflow_eviction(run)


class _TaskInstance(WrappedInstance):
    """A workflow that leaves the cache once it took events that came before their workflow task."""

    def __init__(self, instance: WorkflowInstance, runner: TaskRunner) -> None:
        super().__init__(instance)
        self._runner = runner
        self._events = 0
        self._bytes = 0

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        if any(job.HasField("remove_from_cache") for job in act.jobs):
            self._runner.note_eviction(act.run_id)
        elif self._is_early(act):
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
