"""Read the events and decisions of a job from its history, by replaying the workflow.

Refuses histories that the current workflow would not have produced: what it would read from them
never happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.converter import DataConverter
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner

from relaunch.job.events import Event
from relaunch.job.replay import Step
from relaunch.job.state import Decision, JobState
from relaunch.messages.jobs import JobResult, TrainingJobInput
from relaunch.workflows.training_job.workflow import TrainingJob


class NotReplayable(Exception):
    """The current workflow would have given other orders than this history has."""


@dataclass(slots=True)
class Recording:
    job: JobState
    """The state before the first step."""
    steps: list[Step] = field(default_factory=list)


# The replayer creates the workflow, so recordings are passed through this module; unsandboxed, both
# share it.
_recordings: dict[str, Recording] = {}


@workflow.defn(name="TrainingJob", sandboxed=False)
class RecordedJob(TrainingJob):
    @workflow.init
    def __init__(self, start: TrainingJobInput) -> None:
        super().__init__(start)
        self._taken: tuple[datetime, Event] | None = None
        self._recording = _recordings[workflow.info().run_id] = Recording(self._session.job)

    @workflow.run
    async def run(self, start: TrainingJobInput) -> JobResult:
        return await super().run(start)

    def _take(self, event: Event) -> None:
        self._taken = workflow.now(), event
        super()._take(event)

    def _carry_out(self, decision: Decision) -> None:
        assert self._taken is not None
        at, event = self._taken
        self._recording.steps.append(Step(at, event, decision))
        super()._carry_out(decision)


async def recording(
    histories: Iterable[WorkflowHistory], namespace: str, converter: DataConverter
) -> Recording:
    """Read the runs of one submission, the oldest first.

    Raises:
        NotReplayable: One of them cannot be replayed by this version.
    """
    whole: Recording | None = None
    replayer = Replayer(
        workflows=[RecordedJob],
        namespace=namespace,
        data_converter=converter,
        workflow_runner=UnsandboxedWorkflowRunner(),
        # The SDK's native part would print failures to stdout, from which the decisions are read.
        runtime=Runtime(telemetry=TelemetryConfig(logging=None)),
        debug_mode=True,  # a task that takes longer than 2 s is slow, and can be replayed
    )
    for history in histories:
        result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
        made = _recordings.pop(history.run_id, None)
        if result.replay_failure is not None or made is None:
            raise NotReplayable(_reason(result.replay_failure))
        if whole is None:
            whole = made
        else:
            whole.steps += made.steps
    if whole is None:
        raise NotReplayable("there is no run")
    return whole


def _reason(failure: Exception | None) -> str:
    """Return the sentence within the structures that the SDK's native part prints."""
    if failure is None:
        return "it has no workflow task"
    text = str(failure).partition("\n")[0]
    found = re.search(r'message: "(?:\[\w+\] )?((?:[^"\\]|\\.)*)"', text)
    return found[1] if found else text
