"""Runs workflows, and forgets those that took events before the task that these belong to.

To answer a query, sdk-core applies also the events that no workflow task has begun with yet, at the
time of the task before, and sends what the workflow then orders with the next task. Such a history
cannot be replayed: docs/decisions/0049-events-that-come-with-a-query.md.

A workflow that is slow is not removed while it runs: docs/decisions/0079-slow-is-not-deadlocked.md.
"""

from __future__ import annotations

import logging
import threading
import time

from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.worker import Worker, WorkflowInstance, WorkflowInstanceDetails

from relaunch.activities.running_watches import RunningWatches
from relaunch.workflows.sealing import SealedRunner, WrappedInstance

log = logging.getLogger("relaunch.runner")
SLOW_S = 2.0
"""Seconds after which the SDK gives a workflow task up: it is given again by the server."""


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
        self._running = threading.Lock()
        """Held while it runs: the SDK removes one that is slow without waiting for that."""

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        if any(job.HasField("remove_from_cache") for job in act.jobs):
            self._runner.note_eviction(act.run_id)
        elif self._is_early(act):
            log.info("run %s leaves the cache: a query came before its workflow task", act.run_id)
            self._runner.forget(act.run_id)
        self._events, self._bytes = act.history_length, act.history_size_bytes
        with self._running:
            began = time.monotonic()
            completion = self._instance.activate(act)
        if (took := time.monotonic() - began) > SLOW_S:
            log.warning("run %s took %.1f s for a task: this machine is busy", act.run_id, took)
        return completion

    def get_thread_id(self) -> int | None:
        """Return None: what takes a task too long is not to be interrupted."""
        return None

    def _is_early(self, act: WorkflowActivation) -> bool:
        """Return whether there are events that no workflow task has begun with.

        The number of events is that of all that came. Their size is written by the server as a task
        begins, so it is larger for each task, whatever clocks say. A server that writes none
        (Temporal's time-skipping one) is believed.
        """
        is_longer = 0 < self._events < act.history_length
        return is_longer and not act.is_replaying and 0 < self._bytes == act.history_size_bytes
