"""Hand over a job's closed incidents to what sends their traces in this worker.

No order and no state: a job does not know whether traces are sent. The first time that this worker
takes an event of a job it hands over what closed lately, too: the worker before it may have been
killed before it had sent that. Identifiers are the same then (docs/decisions/0061-traces.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.job.state import JobState
    from relaunch.job.trace import ClosedIncident, find_traced

MAX_HANDED_OVER = 10_000
"""What a worker remembers to have handed over: some megabytes, and more than closes in the hour
after which an incident is not handed over any more."""

Sink = Callable[[ClosedIncident], None]

_sinks: list[Sink] = []
_handed_over: dict[tuple[str, ...], None] = {}
"""Keys of incidents, oldest first."""
_lock = threading.Lock()
"""Workflow tasks run in several threads."""


def set_sink(sink: Sink | None) -> None:
    """Set what takes closed incidents from now on; None: nothing does.

    It is called by workflow code, so it must not wait, and must not raise an error.
    """
    _sinks[:] = [] if sink is None else [sink]


def hand_over_incidents(job: JobState) -> None:
    """Hand over the incidents that closed lately, each once in this worker."""
    if not _sinks or not job.incidents or workflow.unsafe.is_replaying():
        return
    info = workflow.info()
    for number, incident in find_traced(job, workflow.now()):
        closed = ClosedIncident(
            job.namespace,
            info.workflow_id,
            info.run_id,
            job.name,
            job.submission,
            job.spec.fleet,
            number,
            incident,
        )
        with _lock:
            if closed.key in _handed_over:
                continue
            _handed_over[closed.key] = None
            if len(_handed_over) > MAX_HANDED_OVER:
                del _handed_over[next(iter(_handed_over))]
        for sink in _sinks:
            sink(closed)
