"""Builds of relaunch that work for one server: which one is current, and how workflows move.

Each worker states its build. New workflows begin on the *current* build; each one stays on the
build that it began on, until it moves:

* by continuing as new, while a worker of its build runs (`relaunch.workflows.builds`);
* otherwise by a replay: its history is run through the code of the current build, and if that gives
  the same orders, the server lets that build continue it (`relaunch.handover`).

The server's word for this is Worker Deployment Versioning; the deployment is the task queue.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from temporalio.client import Client
    from temporalio.worker import WorkerDeploymentConfig

UPGRADE_SIGNAL = "upgrade"
"""Wakes a workflow, which then learns from the server that it is to move."""
HEARTBEAT_INTERVAL = timedelta(seconds=10)
"""How often a worker tells the server that it is there."""
GONE_AFTER = timedelta(seconds=30)
"""Silence after which a worker is gone. One that ends in order says so at once."""

POLLS_WITHIN = timedelta(seconds=75)
"""How often a worker asks for work at least: the server answers after 60 s at the latest."""


@cache
def build_id() -> str:
    """Return the build of this installation: the release, or for a checkout also what it contains.

    A server keeps a hundred builds of a deployment by default, so those of a release are not told
    apart by anything else.
    """
    release = version("relaunch")
    if ".dev" not in release:
        return release
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for folder in (root, root / "workflows", root / "activities"):  # links in a checkout
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{release}+{digest.hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Build:
    id: str
    is_current: bool
    was_current_at: datetime | None
    """When it was last made current or ceased to be; None: never."""
    heard_at: datetime | None
    """When one of its workers was last heard; None: it has none, or they have ended in order."""

    def has_worker(self, now: datetime) -> bool:
        return self.heard_at is not None and now - self.heard_at < GONE_AFTER


@dataclass(frozen=True, slots=True)
class Builds:
    """The builds that a server knows of one task queue."""

    known: tuple[Build, ...] = ()
    token: bytes = field(default=b"", repr=False)
    """Makes a change fail if another came first."""

    @property
    def current(self) -> Build | None:
        return next((one for one in self.known if one.is_current), None)

    @property
    def previous(self) -> Build | None:
        """The build that was current before the one that is."""
        earlier = [
            (one.was_current_at, one)
            for one in self.known
            if not one.is_current and one.was_current_at is not None
        ]
        return max(earlier, key=lambda pair: pair[0], default=(None, None))[1]

    def find(self, id: str) -> Build | None:
        return next((one for one in self.known if one.id == id), None)


def deployment(task_queue: str, build: str) -> WorkerDeploymentConfig:
    """Return what a worker of this build states, and that workflows stay on the build they began
    on."""
    from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
    from temporalio.worker import WorkerDeploymentConfig

    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(deployment_name=task_queue, build_id=build),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.PINNED,
    )


async def read_builds(client: Client, task_queue: str) -> Builds:
    """Ask the server. Without any build that it knows, `known` is empty."""
    from temporalio.api.workflowservice.v1 import DescribeWorkerDeploymentRequest
    from temporalio.service import RPCError, RPCStatusCode

    try:
        described = await client.workflow_service.describe_worker_deployment(
            DescribeWorkerDeploymentRequest(namespace=client.namespace, deployment_name=task_queue),
            retry=True,  # the server limits how often it answers this
        )
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return Builds()
        raise
    heard = await _read_workers(client, task_queue)
    info = described.worker_deployment_info
    current = info.routing_config.current_deployment_version.build_id
    found = []
    for one in info.version_summaries:
        id = one.deployment_version.build_id
        at = one.last_current_time.ToDatetime(UTC) if one.HasField("last_current_time") else None
        found.append(Build(id, id == current, at, heard.get(id)))
    return Builds(tuple(found), described.conflict_token)


async def _read_workers(client: Client, task_queue: str) -> dict[str, datetime]:
    """Return when a worker of each build was last heard, of those that have not ended."""
    from temporalio.api.enums.v1 import WorkerStatus
    from temporalio.api.workflowservice.v1 import ListWorkersRequest
    from temporalio.service import RPCError, RPCStatusCode

    heard: dict[str, datetime] = {}
    page = b""
    while True:
        request = ListWorkersRequest(
            namespace=client.namespace, page_size=1000, next_page_token=page
        )
        try:
            answer = await client.workflow_service.list_workers(request)
        except RPCError as error:
            if error.status is RPCStatusCode.UNIMPLEMENTED:
                return await _read_pollers(client, task_queue)
            raise
        for one in answer.workers_info:
            beat = one.worker_heartbeat
            build = beat.deployment_version.build_id
            running = beat.status == WorkerStatus.WORKER_STATUS_RUNNING
            if running and beat.task_queue == task_queue:
                at = beat.heartbeat_time.ToDatetime(UTC)
                heard[build] = max(at, heard.get(build, at))
        page = answer.next_page_token
        if not page:
            return heard


async def _read_pollers(client: Client, task_queue: str) -> dict[str, datetime]:
    """Return now for each build that has asked for work lately, on a server that does not hear
    workers: it remembers for five minutes who has asked."""
    from temporalio.api.enums.v1 import TaskQueueType
    from temporalio.api.taskqueue.v1 import TaskQueue
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

    now = datetime.now(UTC)
    queue = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=task_queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
    )
    return {
        poller.deployment_options.build_id: now
        for poller in queue.pollers
        if now - poller.last_access_time.ToDatetime(UTC) < POLLS_WITHIN
    }


async def make_current(client: Client, task_queue: str, build: str, token: bytes) -> None:
    """Have new workflows begin on this build, and those that run move to it.

    Raises:
        RPCError: no worker of it polls, or another one was made current since.
    """
    from temporalio.api.workflowservice.v1 import SetWorkerDeploymentCurrentVersionRequest

    await client.workflow_service.set_worker_deployment_current_version(
        SetWorkerDeploymentCurrentVersionRequest(
            namespace=client.namespace,
            deployment_name=task_queue,
            build_id=build,
            conflict_token=token,
            identity=client.identity,
        ),
        retry=True,
    )


@dataclass(frozen=True, slots=True)
class RunningWorkflow:
    id: str
    run_id: str
    type: str


async def list_running(
    client: Client, task_queue: str, build: str | None = None
) -> tuple[RunningWorkflow, ...]:
    """List the running workflows of a task queue, or those that this build works for.

    With an empty build: those of which no worker with a build has completed a task yet.
    """
    query = f'TaskQueue = "{task_queue}" AND ExecutionStatus = "Running"'
    if build:
        query += f' AND TemporalWorkerDeploymentVersion = "{task_queue}:{build}"'
    elif build is not None:
        query += " AND TemporalWorkerDeploymentVersion IS NULL"
    found = [one async for one in client.list_workflows(query)]
    return tuple(RunningWorkflow(one.id, one.run_id, one.workflow_type) for one in found)


async def wake(client: Client, workflow: RunningWorkflow) -> None:
    """Have a workflow look at once whether it is to move. One that has ended is left alone."""
    from temporalio.service import RPCError, RPCStatusCode

    try:
        await client.get_workflow_handle(workflow.id).signal(UPGRADE_SIGNAL, {})
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise


async def hand_over(client: Client, workflow: RunningWorkflow, task_queue: str, build: str) -> None:
    """Have another build continue a workflow from its history, whatever its own build does."""
    from google.protobuf.field_mask_pb2 import FieldMask
    from temporalio.api.common.v1 import WorkflowExecution
    from temporalio.api.deployment.v1 import WorkerDeploymentVersion
    from temporalio.api.workflow.v1 import VersioningOverride, WorkflowExecutionOptions
    from temporalio.api.workflowservice.v1 import UpdateWorkflowExecutionOptionsRequest

    target = WorkerDeploymentVersion(deployment_name=task_queue, build_id=build)
    override = VersioningOverride(
        one_time=VersioningOverride.OneTimeOverride(target_deployment_version=target)
    )
    await client.workflow_service.update_workflow_execution_options(
        UpdateWorkflowExecutionOptionsRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow.id, run_id=workflow.run_id),
            workflow_execution_options=WorkflowExecutionOptions(versioning_override=override),
            update_mask=FieldMask(paths=["versioning_override"]),
        )
    )
    # It moves with its next task, and what it had ordered comes with it.
    await wake(client, workflow)
