"""Maps state to rows of the tables that github.com/yubingjiaocn/ecs-gpu-recovery documents.

Three of them are those of its present release. The two of its first release had a row for each rank
of a job, and for each container instance.

This module only computes values; it makes no calls.

The tables know fewer states than relaunch does. Where two states map to one, the one chosen tells a
reader of the tables what happens next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from relaunch.job.state import JobState, Phase
from relaunch.pool.state import NodeRecord, NodeStatus


class JobStatus(StrEnum):
    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    PENDING_HEALTHCHECK = "PENDING_HEALTHCHECK"
    PENDING_RESTART = "PENDING_RESTART"
    RESTARTING = "RESTARTING"
    COMPLETE = "COMPLETE"
    FAILED = "FAILED"
    FAILED_OTHERS = "FAILED_OTHERS"
    """Failed by the job itself: the exit code is neither 0 nor 1."""
    USER_STOPPED = "USER_STOPPED"


class RankStatus(StrEnum):
    """Status of a job in the first release, which wrote it into the row of each rank."""

    IN_PROGRESS = "inprogress"
    STOPPED = "STOPPED"
    """The ranks are stopped, and it is not yet known whether they are launched again."""
    COMPLETE = "complete"
    FAILED = "FAILED"
    OTHER = "Other"
    """Stopped by a user."""


class TaskStatus(StrEnum):
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETE = "COMPLETE"
    TERMINATED = "TERMINATED"
    """Stopped by relaunch or by a user, whatever the reason of the job."""
    FAILED = "FAILED"


class LegacyStatus(StrEnum):
    AVAILABLE = "AVAILABLE"
    IN_PROGRESS = "IN_PROGRESS"
    PENDING_HEALTHCHECK = "PENDING_HEALTHCHECK"
    REBOOTING = "REBOOTING"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class JobRow:
    job_id: str
    seq: int
    """Sequence number; higher is newer. A write with a lower number than that of the stored row
    changes nothing.
    """
    status: JobStatus
    timestamp: str
    cluster: str
    num_nodes: int
    assigned_nodes: tuple[str, ...]
    container_instances: tuple[str, ...]
    tasks: tuple[str, ...]
    retry: int


@dataclass(frozen=True, slots=True)
class TaskRow:
    task_id: str
    seq: int
    status: TaskStatus
    node_name: str
    node_index: int
    job_id: str
    job_timestamp: str
    job_num_nodes: int
    cluster: str
    container_instance: str
    """ARN of the container instance."""
    task_definition: str
    """ARN, family:revision, or family alone."""
    retry: int


@dataclass(frozen=True, slots=True)
class RankRow:
    job_id: str
    rank: int
    """Index of its node in the job: one task ran on each node."""
    seq: int
    status: RankStatus
    task_id: str | None
    """None if the newest launch has no task there yet, in which case the stored value is kept."""
    container_instance: str | None
    """ARN of the container instance; None as for `task_id`."""
    retry: int


@dataclass(frozen=True, slots=True)
class NodeRow:
    node_name: str
    seq: int
    status: LegacyStatus
    cluster: str
    container_instance: str | None
    """ARN of the container instance; None if unknown, in which case the stored value is kept."""
    ip: str | None


_OF_PHASE = {
    Phase.QUEUED: JobStatus.PENDING,
    Phase.LAUNCHING: JobStatus.RESTARTING,
    Phase.RUNNING: JobStatus.IN_PROGRESS,
    Phase.NODE_LOST: JobStatus.IN_PROGRESS,
    Phase.STOPPING: JobStatus.IN_PROGRESS,
    Phase.EXAMINING: JobStatus.PENDING_HEALTHCHECK,
    Phase.REPAIRING: JobStatus.PENDING_RESTART,
    Phase.WAITING_FOR_NODES: JobStatus.PENDING_RESTART,
    Phase.WAITING_FOR_PERSON: JobStatus.PENDING_RESTART,
    Phase.SUCCEEDED: JobStatus.COMPLETE,
    Phase.CANCELLED: JobStatus.USER_STOPPED,
}


def job_status(job: JobState, terminated: bool = False) -> JobStatus:
    """Return the status of a job in the terms of the tables.

    Args:
        job: State of the job, as its workflow reports it.
        terminated: Whether its workflow was terminated from outside, so that `job` is not its final
            state.
    """
    if terminated and not job.phase.is_final:
        return JobStatus.USER_STOPPED
    if job.phase is Phase.FAILED:
        return JobStatus.FAILED if job.exit_code in (None, 0, 1) else JobStatus.FAILED_OTHERS
    if job.generation <= 1 and job.phase is Phase.WAITING_FOR_NODES:
        return JobStatus.PENDING
    if job.generation <= 1 and job.phase is Phase.LAUNCHING:
        return JobStatus.IN_PROGRESS
    return _OF_PHASE[job.phase]


_RANK_STATUSES = {
    JobStatus.PENDING: RankStatus.IN_PROGRESS,
    JobStatus.IN_PROGRESS: RankStatus.IN_PROGRESS,
    JobStatus.PENDING_HEALTHCHECK: RankStatus.STOPPED,
    JobStatus.PENDING_RESTART: RankStatus.STOPPED,
    JobStatus.RESTARTING: RankStatus.STOPPED,
    JobStatus.COMPLETE: RankStatus.COMPLETE,
    JobStatus.FAILED: RankStatus.FAILED,
    JobStatus.FAILED_OTHERS: RankStatus.FAILED,
    JobStatus.USER_STOPPED: RankStatus.OTHER,
}


def rank_status(status: JobStatus) -> RankStatus:
    """Return the status of a job in the terms of the first release."""
    return _RANK_STATUSES[status]


def task_status(last_status: str, exit_code: int | None, was_stopped: bool) -> TaskStatus:
    """Return the status of a task in the terms of the tables.

    Args:
        last_status: `lastStatus` of ECS.
        exit_code: Exit code of the training container; None if unknown, which does not count as
            success.
        was_stopped: Whether the task was stopped rather than ended by itself.
    """
    if last_status != "STOPPED":
        return TaskStatus.IN_PROGRESS
    if exit_code == 0:
        return TaskStatus.COMPLETE
    return TaskStatus.TERMINATED if was_stopped else TaskStatus.FAILED


def node_status(node: NodeRecord, in_use: bool) -> LegacyStatus:
    """Return the status of a node in the terms of the tables.

    A node that does not answer is UNKNOWN, unless a worse status is known.
    """
    if node.is_removed:
        return LegacyStatus.FAILED
    # A job keeps the node that it has repaired, so the fleet's own status of it does not change.
    if node.repair_acts:
        return LegacyStatus.REBOOTING
    if node.status is NodeStatus.QUARANTINED:
        return LegacyStatus.FAILED
    if node.repair or node.status in (NodeStatus.REPAIRING, NodeStatus.SUSPECT):
        return LegacyStatus.PENDING_HEALTHCHECK
    if node.silent_since is not None:
        return LegacyStatus.UNKNOWN
    return LegacyStatus.IN_PROGRESS if in_use else LegacyStatus.AVAILABLE
