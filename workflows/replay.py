"""Whether the workflows, as they are here, would have given the orders that a history has."""

from __future__ import annotations

from functools import cache

from temporalio.client import WorkflowHistory
from temporalio.converter import DataConverter
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.worker import Replayer

from relaunch.workflows.fleet.workflow import Fleet
from relaunch.workflows.node_repair.workflow import NodeRepair
from relaunch.workflows.notifier.workflow import Notifier
from relaunch.workflows.sealing import SealedRunner
from relaunch.workflows.training_job.workflow import TrainingJob

WORKFLOWS = (TrainingJob, NodeRepair, Fleet, Notifier)
MAX_REASON = 300


@cache
def _make_runtime() -> Runtime:
    """Return the one of all replays. The SDK's native part would print failures to stdout."""
    return Runtime(telemetry=TelemetryConfig(logging=None))


async def find_difference(
    history: WorkflowHistory, namespace: str, converter: DataConverter
) -> str:
    """Return in what the workflows here differ from a history; empty: they could continue it."""
    replayer = Replayer(
        workflows=WORKFLOWS,
        namespace=namespace,
        data_converter=converter,
        workflow_runner=SealedRunner(),
        runtime=_make_runtime(),
        debug_mode=True,  # a task that takes longer than 2 s is slow, which is no difference
    )
    result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
    if result.replay_failure is None:
        return ""
    return " ".join(str(result.replay_failure).split())[:MAX_REASON]
