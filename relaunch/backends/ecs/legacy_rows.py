"""What goes on, in the words of the three tables that github.com/yubingjiaocn/ecs-gpu-recovery documents. Only values: nobody is asked.

Those tables know fewer states than relaunch does. Where two become one, it is the one that tells a reader of the tables what comes next.
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
    """The job's own doing, by an exit code that is neither 0 nor 1."""
    USER_STOPPED = "USER_STOPPED"


class TaskStatus(StrEnum):
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETE = "COMPLETE"
    TERMINATED = "TERMINATED"
    """Stopped by relaunch or by a person, for whatever reason the job has."""
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
    """Higher: newer. What has a lower one than the row changes nothing."""
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
    """Its ARN."""
    task_definition: str
    """ARN, family:revision, or family alone."""
    retry: int


@dataclass(frozen=True, slots=True)
class NodeRow:
    node_name: str
    seq: int
    status: LegacyStatus
    cluster: str
    container_instance: str | None
    """Its ARN; None: nobody knows, and the row keeps what it has."""
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
    """Say how a job stands.

    Args:
        job: As it knows itself.
        terminated: Its workflow was ended from outside, and what it knows of itself is not its last word.
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


def task_status(last_status: str, exit_code: int | None, stopped_by_somebody: bool) -> TaskStatus:
    """Say how one task stands.

    Args:
        last_status: ECS's word.
        exit_code: Of the container that trains; None: none is known, which is no success.
        stopped_by_somebody: It did not end by itself.
    """
    if last_status != "STOPPED":
        return TaskStatus.IN_PROGRESS
    if exit_code == 0:
        return TaskStatus.COMPLETE
    return TaskStatus.TERMINATED if stopped_by_somebody else TaskStatus.FAILED


def node_status(node: NodeRecord, in_use: bool) -> LegacyStatus:
    """Say how a node stands. One that does not answer is UNKNOWN, unless something worse is known of it."""
    if node.gone or node.standing is NodeStatus.QUARANTINED:
        return LegacyStatus.FAILED
    if node.standing is NodeStatus.REPAIRING:
        return LegacyStatus.REBOOTING if node.repair_acts else LegacyStatus.PENDING_HEALTHCHECK
    if node.standing is NodeStatus.SUSPECT:
        return LegacyStatus.PENDING_HEALTHCHECK
    if node.silent_since is not None:
        return LegacyStatus.UNKNOWN
    return LegacyStatus.IN_PROGRESS if in_use else LegacyStatus.AVAILABLE
