"""Writes the state of jobs, tasks and nodes into DynamoDB tables, for existing dashboards.

relaunch never reads these tables and bases no decision on them.

Every write carries a sequence number, and DynamoDB compares it in a condition: a write that is late
or repeated changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

from relaunch.backends.base import Unreachable
from relaunch.backends.ecs.aws import Aws, AwsError
from relaunch.backends.ecs.legacy_rows import (
    JobRow,
    JobStatus,
    NodeRow,
    RankRow,
    TaskRow,
    TaskStatus,
    job_status,
    node_status,
    rank_status,
    task_status,
)
from relaunch.backends.ecs.tasks import Instance, Task, build_started_by, is_ours
from relaunch.generation import Token
from relaunch.job.state import JobState
from relaunch.pool.state import FleetState
from relaunch.spec.fleet import EcsTables, FleetNode

SEQ = "relaunch_seq"
AT_ONCE = 8
"""Concurrent writes of one fleet: the threads are shared with the calls that keep jobs running."""
KNOWN_FOR = 600.0
"""Seconds after which the row of every node is written again even without a known change: another
worker may have written it since.
"""
ARN_KNOWN_FOR = 3600.0
"""Seconds for which the ARN of a container instance is cached. It changes when its agent loses its
state, which is rare.
"""


class Places(Protocol):
    """Lookup of nodes and ranks in ECS."""

    async def instance(self, ec2_id: str, max_age: float = 0.0) -> Instance:
        """Return the container instance of an EC2 instance.

        Raises:
            LookupError: None is registered.
        """
        ...

    async def task_of(self, ec2_id: str, started_by: str) -> Task | None:
        """Return the task with this `startedBy`, including one that ended within the last hour.

        Raises:
            LookupError: No container instance is registered.
        """
        ...


class Mirror:
    """Writer of the tables that are named; a row of any other is not written.

    It sets the documented attributes and `relaunch_seq`; other attributes of a row are left alone.
    """

    def __init__(
        self, aws: Aws, tables: EcsTables, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._aws = aws
        self._tables = tables
        self._clock = clock

    async def job(self, row: JobRow) -> bool:
        """Write a row if it is newer than the stored one. Return whether it was written.

        `task` and `node` do the same.
        """
        values = {
            "job_timestamp": row.timestamp,
            "cluster_name": row.cluster,
            "num_nodes": row.num_nodes,
            "assigned_nodes": row.assigned_nodes,
            "submitted_container_inst_ids": tuple(_short(arn) for arn in row.container_instances),
            "submitted_ecs_task_ids": row.tasks,
            "retry": str(row.retry),
            "job_status": row.status.value,
        }
        return await self._write(self._tables.job, {"job_id": row.job_id}, row.seq, values)

    async def task(self, row: TaskRow) -> bool:
        family, _, revision = _short(row.task_definition).partition(":")
        values = {
            "node_name": row.node_name,
            "node_index_in_job": row.node_index,
            "job_id": row.job_id,
            "job_timestamp": row.job_timestamp,
            "job_num_nodes": row.job_num_nodes,
            "task_def_arn": row.task_definition,
            "task_def_name": family,
            "task_def_revision": revision,
            "cluster_name": row.cluster,
            "container_inst_id": _short(row.container_instance),
            "container_instance_arn": row.container_instance,
            "retry": str(row.retry),
            "task_status": row.status.value,
        }
        # At equal relaunch_seq, a final status replaces IN_PROGRESS: a task may end after the last
        # update of its job.
        also = (
            ("task_status", TaskStatus.IN_PROGRESS.value)
            if row.status is not TaskStatus.IN_PROGRESS
            else None
        )
        return await self._write(
            self._tables.task, {"ecs_task_id": row.task_id}, row.seq, values, also
        )

    async def node(self, row: NodeRow) -> bool:
        values: dict[str, object] = {"cluster_name": row.cluster, "node_status": row.status.value}
        if row.container_instance is not None:
            values |= {
                "container_instance_id": _short(row.container_instance),
                "container_instance_arn": row.container_instance,
            }
        if row.ip is not None:
            values["ip"] = row.ip
        is_new = await self._write(self._tables.node, {"node_name": row.node_name}, row.seq, values)
        if row.container_instance is None:
            return is_new
        # The table of the first release is keyed by the container instance.
        key = {"container_inst_id": _short(row.container_instance)}
        older: dict[str, object] = {
            "cluster_name": row.cluster,
            "node_name": row.node_name,
            "status": row.status.value,
        }
        return await self._write(self._tables.container_instance, key, row.seq, older) or is_new

    async def rank(self, row: RankRow) -> bool:
        values: dict[str, object] = {
            "job_id": row.job_id,
            "retry": str(row.retry),
            "run_time": str(row.retry + 1),
            # The first release wrote some of its statuses into one of these, some into the other.
            "status": row.status.value,
            "job_status": row.status.value,
        }
        if row.task_id is not None:
            values["ecs_task_id"] = row.task_id
        if row.container_instance is not None:
            values["container_inst_id"] = _short(row.container_instance)
        key = {"job_id_rank": f"{row.job_id}_{row.rank}"}
        return await self._write(self._tables.training_job, key, row.seq, values)

    async def _write(
        self,
        table: str | None,
        key: Mapping[str, object],
        seq: int,
        values: Mapping[str, object],
        also: tuple[str, str] | None = None,
    ) -> bool:
        if table is None:
            return False
        now = self._clock().isoformat()
        # Numbered placeholders, because `status` and others are reserved words of DynamoDB.
        names = {f"#{index}": name for index, name in enumerate([*values, "updated_at", SEQ])}
        given = {
            f":{index}": _value(value) for index, value in enumerate([*values.values(), now, seq])
        }
        condition = "attribute_not_exists(#seq) OR #seq < :seq"
        names |= {"#created": "created_at", "#seq": SEQ}
        given |= {":now": _value(now), ":seq": _value(seq)}
        if also is not None:
            condition += " OR (#seq = :seq AND #also = :also)"
            names["#also"], given[":also"] = also[0], _value(also[1])
        sets = ", ".join(f"#{index} = :{index}" for index in range(len(values) + 2))
        try:
            await self._aws.call(
                "dynamodb",
                "UpdateItem",
                TableName=table,
                Key={name: _value(value) for name, value in key.items()},
                UpdateExpression=f"SET {sets}, #created = if_not_exists(#created, :now)",
                ConditionExpression=condition,
                ExpressionAttributeNames=names,
                ExpressionAttributeValues=given,
            )
        except AwsError as error:
            if error.code == "ConditionalCheckFailedException":
                return False
            raise
        return True


class TableMirror:
    """Writer of the rows of one fleet and its jobs.

    It remembers the tasks that it has not yet seen end.
    """

    wants_jobs = True

    def __init__(
        self,
        fleet: str,
        cluster: str,
        mirror: Mirror,
        places: Places,
        node: Callable[[str], FleetNode],
    ) -> None:
        """Create the writer without writing anything.

        Args:
            fleet: Name of the fleet.
            cluster: Name or ARN of its cluster.
            mirror: Writer of the tables.
            places: Lookup of instances and tasks in ECS.
            node: Returns a node of the fleet by name, as the backend knows it; raises KeyError if
                there is none.
        """
        self._fleet = fleet
        self._cluster = _short(cluster)
        self._mirror = mirror
        self._places = places
        self._node = node
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._going: dict[str, dict[str, tuple[str, str, TaskRow]]] = {}
        """By job and task id: where the task ran (EC2 id, startedBy), and its row."""
        self._nodes: dict[str, tuple[object, ...]] = {}
        self._arns: dict[str, str] = {}
        """Of the container instances, by EC2 id: also of one that is not registered any more."""
        self._all_nodes_at = -KNOWN_FOR

    async def job(self, state: JobState, seq: int, terminated: bool) -> bool:
        """Write a job and its tasks. Return False if the job has ended but a task still runs.

        In that case the caller has to call again later.

        Raises:
            Unreachable: Not all rows were written.
        """
        try:
            return await self._job(state, seq, terminated)
        except AwsError as error:
            raise Unreachable(
                self._fleet, f"the tables were not written: {error.reason}"
            ) from error

    async def nodes(self, state: FleetState, seq: int) -> None:
        """Write the rows of the nodes that have changed.

        Raises:
            Unreachable: Not all rows were written.
        """
        if time.monotonic() - self._all_nodes_at >= KNOWN_FOR:
            self._nodes.clear()
            self._all_nodes_at = time.monotonic()
        used = {place.node for record in state.claims for place in record.places}
        rows = []
        for record in state.nodes:
            node = self._find_node(record.name) or record.spec
            row = NodeRow(
                record.name,
                seq,
                node_status(record, record.name in used),
                self._cluster,
                None,
                node.network,
            )
            if self._nodes.get(record.name) != (row.status, row.ip, node.address):
                rows.append((row, node.address))
        try:
            await asyncio.gather(*(self._write_node(row, ec2_id) for row, ec2_id in rows))
        except AwsError as error:
            raise Unreachable(
                self._fleet, f"the tables were not written: {error.reason}"
            ) from error

    async def _write_node(self, row: NodeRow, ec2_id: str) -> None:
        # Concurrently, so that the lookups are batched into one call.
        with contextlib.suppress(LookupError):
            self._arns[ec2_id] = (await self._places.instance(ec2_id, ARN_KNOWN_FOR)).arn
        async with self._gate:
            await self._mirror.node(replace(row, container_instance=self._arns.get(ec2_id)))
        self._nodes[row.node_name] = (row.status, row.ip, ec2_id)

    async def _job(self, state: JobState, seq: int, terminated: bool) -> bool:
        tokens = [state.token]
        if state.name not in self._going and state.generation > 1:
            # Another worker followed the previous generation, and may have stopped before it saw
            # how that generation ended.
            tokens.append(replace(state.token, generation=state.generation - 1))
        found = [one for token in tokens for one in await self._tasks(state, seq, token)]
        before = self._going.get(state.name, {})
        newest = {row.task_id for _, _, row, _ in found}
        found += await self._read_previous_tasks(
            [one for task, one in before.items() if task not in newest], seq
        )
        await asyncio.gather(*(self._write_task(row) for _, _, row, _ in found))
        going = {
            row.task_id: (ec2_id, by, row)
            for ec2_id, by, row, _ in found
            if row.status is TaskStatus.IN_PROGRESS
        }
        current = [
            (row, task)
            for _, by, row, task in found
            if task is not None and by == _name(state.token)
        ]
        ended = terminated or state.phase.is_final
        if ended and not going:
            self._going.pop(state.name, None)
        else:
            self._going[state.name] = going
        status = job_status(state, terminated)
        await self._write_ranks(state, seq, status, current)
        await self._mirror.job(
            JobRow(
                job_id=state.name,
                seq=seq,
                status=status,
                timestamp=state.submitted_at.isoformat(),
                cluster=self._cluster,
                num_nodes=state.gang_size,
                assigned_nodes=tuple(slot.node for slot in state.slots),
                container_instances=tuple(dict.fromkeys(task.instance_arn for _, task in current)),
                tasks=tuple(row.task_id for row, _ in current),
                retry=max(0, state.generation - 1),
            )
        )
        return not (ended and going)

    async def _write_ranks(
        self, state: JobState, seq: int, status: JobStatus, current: list[tuple[TaskRow, Task]]
    ) -> None:
        tasks = {row.node_index: row for row, _ in current}

        async def one(index: int) -> None:
            task = tasks.get(index)
            row = RankRow(
                job_id=state.name,
                rank=index,
                seq=seq,
                status=rank_status(status),
                task_id=None if task is None else task.task_id,
                container_instance=None if task is None else task.container_instance,
                retry=max(0, state.generation - 1),
            )
            async with self._gate:
                await self._mirror.rank(row)

        await asyncio.gather(*(one(index) for index in range(state.gang_size)))

    async def _tasks(
        self, state: JobState, seq: int, token: Token
    ) -> list[tuple[str, str, TaskRow, Task | None]]:
        """Return the tasks of one generation that ECS knows, in the order of its nodes."""
        by = _name(token)
        if by is None or not token.generation:
            return []

        async def one(index: int, name: str) -> tuple[str, str, TaskRow, Task | None] | None:
            node = self._find_node(name)
            if node is None:
                return None
            task = await self._task(node.address, by)
            if task is None:
                return None
            row = TaskRow(
                task_id=task.short,
                seq=seq,
                status=_status(task),
                node_name=name,
                node_index=index,
                job_id=state.name,
                job_timestamp=state.submitted_at.isoformat(),
                job_num_nodes=state.gang_size,
                cluster=self._cluster,
                container_instance=task.instance_arn,
                task_definition=task.definition,
                retry=max(0, token.generation - 1),
            )
            return node.address, by, row, task

        looked = await asyncio.gather(
            *(one(index, slot.node) for index, slot in enumerate(state.slots))
        )
        return [each for each in looked if each is not None]

    async def _read_previous_tasks(
        self, going: list[tuple[str, str, TaskRow]], seq: int
    ) -> list[tuple[str, str, TaskRow, Task | None]]:
        """Look up again tasks of earlier generations and of nodes that the job has left."""

        async def one(ec2_id: str, by: str, row: TaskRow) -> tuple[str, str, TaskRow, Task | None]:
            task = await self._task(ec2_id, by)
            # ECS forgets a task an hour after it ended, so how it ended is unknown. That it has
            # ended is certain: a job is launched again only when its ranks are gone.
            status = TaskStatus.TERMINATED if task is None else _status(task)
            return ec2_id, by, replace(row, seq=seq, status=status), task

        return list(await asyncio.gather(*(one(*each) for each in going)))

    async def _task(self, ec2_id: str, by: str) -> Task | None:
        try:
            return await self._places.task_of(ec2_id, by)
        except LookupError:
            return None

    async def _write_task(self, row: TaskRow) -> None:
        async with self._gate:
            await self._mirror.task(row)

    def _find_node(self, name: str) -> FleetNode | None:
        try:
            return self._node(name)
        except KeyError:
            return None


def _name(token: Token) -> str | None:
    try:
        return build_started_by(token)
    except ValueError:  # such a job cannot be launched, so it has no tasks
        return None


def _status(task: Task) -> TaskStatus:
    codes = [container.exit_code for container in task.containers]
    # A nonzero exit code takes precedence: the other containers were stopped because of that
    # failure.
    worst = next((code for code in codes if code), None if None in codes or not codes else 0)
    return task_status(
        task.last_status, worst, is_ours(task.stopped_reason) or task.stop_code == "UserInitiated"
    )


def _short(arn: str) -> str:
    """Return the last part of an ARN; a plain name is returned unchanged."""
    return arn.rpartition("/")[2]


def _value(value: object) -> dict[str, Any]:
    """Return a value in DynamoDB's typed attribute format."""
    if isinstance(value, int):
        return {"N": str(value)}
    if isinstance(value, tuple):
        return {"L": [_value(one) for one in value]}
    return {"S": str(value)}
