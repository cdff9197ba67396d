"""Reads tasks and instances of an ECS cluster, and sends it orders. It makes no decisions.

ECS is eventually consistent and throttles per account. Concurrent requests for the same kind of
object are therefore combined into one call, and all followed tasks are polled together, a hundred
per call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from relaunch.backends.ecs.aws import Aws, AwsError, Kind
from relaunch.backends.ecs.batch import Batch
from relaunch.backends.ecs.follow import FollowedTask, Follower
from relaunch.backends.ecs.tasks import (
    STOPPED,
    Definition,
    Instance,
    RunTaskFailure,
    Task,
    read_definition,
    read_instance,
    read_task,
    seconds,
    token_of,
)

AT_ONCE = 100
"""Limit of ids per call of DescribeTasks and DescribeContainerInstances, and the largest page size
of their lists.
"""
IDS_AT_ONCE = 50
"""Instance ids in one filter, about 1,100 characters; the API reference gives no limit."""
FEW = 4
"""Number of instances up to which tasks are listed per instance. Above it, one list of the whole
cluster takes fewer calls.
"""
DEFINITION_FOR = 30.0
"""Seconds for which the newest revision of a family is cached: long enough for all nodes of a
launch.
"""
STOPPED_KEPT = 3600.0
"""Seconds for which stopped tasks are cached. They no longer change, and ECS itself forgets them
after an hour.
"""
FIRST_LOOK, LONGEST_LOOK = 0.5, 4.0
"""Shortest and longest interval in seconds between polls of a task whose end is awaited: stopping
takes between one and thirty seconds.
"""
GONE = ("stopped", "terminated")
"""EC2 instance states in which no process can run on the machine."""


class UnknownInstance(LookupError):
    """No container instance of the cluster has this EC2 id."""

    def __init__(self, ec2_id: str, cluster: str) -> None:
        super().__init__(f"no container instance of ECS cluster {cluster} is {ec2_id}")
        self.reason = str(self)


@dataclass(frozen=True, slots=True)
class Machine:
    """State of an EC2 instance, as EC2 reports it."""

    state: str
    """pending, running, stopping, stopped, shutting-down or terminated; empty if EC2 does not know
    the instance.
    """
    address: str
    """Private IP address; empty if it has none."""
    launched_at: float | None
    """Unix seconds of the newest start; a reboot does not change it."""


class Cluster:
    def __init__(self, aws: Aws, name: str, poll: float) -> None:
        self.aws = aws
        self.name = name
        self.poll = poll
        self._instances: Batch[str, tuple[Instance, ...]] = Batch(self._ask_instances)
        self._census: Batch[str, tuple[Task, ...] | None] = Batch(self._ask_census)
        self._orphans: Batch[str, tuple[Task, ...]] = Batch(self._ask_orphans)
        self._tasks: Batch[str, Task | None] = Batch(self.describe_tasks)
        self._machines: Batch[str, Machine] = Batch(self.describe_machines)
        self._definitions: Batch[str, Definition] = Batch(self._ask_definitions)
        self._known: dict[str, tuple[Instance, float]] = {}
        self._ended: dict[str, tuple[Task, float]] = {}
        self._placed: dict[str, str] = {}
        """ARN of the container instance of each task, from the newest list of the whole cluster."""
        self._defined: dict[str, tuple[Definition, float]] = {}
        self._silent: dict[str, float] = {}
        self._described: set[str] = set()
        """EC2 ids that EC2 has known."""
        self._follower = Follower(self, poll)

    # --- instances

    async def instance(self, ec2_id: str, max_age: float = 0.0) -> Instance:
        """Return the container instance of an EC2 instance.

        An EC2 instance has several if its ECS agent lost its checkpoint; the one in use is
        returned.

        Args:
            ec2_id: Id of the EC2 instance.
            max_age: Seconds that a cached answer may be old; 0 always asks ECS.

        Raises:
            UnknownInstance: The cluster has no such container instance.
            AwsError: The call failed.
        """
        known = self._known.get(ec2_id)
        if known is not None and max_age and time.monotonic() - known[1] <= max_age:
            return known[0]
        found = await self._instances.get(ec2_id)
        if not found:
            raise UnknownInstance(ec2_id, self.name)
        return found[0]

    def silent_for(self, arn: str) -> float:
        """Return the seconds for which the ECS agent of an instance has been seen disconnected.

        Return 0 if it is connected as far as known.
        """
        since = self._silent.get(arn)
        return 0.0 if since is None else time.monotonic() - since

    async def machine(self, ec2_id: str) -> Machine:
        return await self._machines.get(ec2_id)

    async def sees_any(self, ec2_ids: Sequence[str]) -> bool:
        """Return whether EC2 knows, or has known, one of these instances.

        If it knows none, this worker may have credentials of another account, or another region.
        """
        if not self._described.isdisjoint(ec2_ids):
            return True
        return any(one.state for one in (await self.describe_machines(ec2_ids)).values())

    async def ec2_state(self, ec2_id: str) -> str:
        """Return the EC2 state of an instance; empty if EC2 does not know the instance."""
        return (await self._machines.get(ec2_id)).state

    async def put_attributes(self, arn: str, attributes: Mapping[str, str | None]) -> None:
        """Set attributes of a container instance; the value None removes an attribute."""
        target = {"targetType": "container-instance", "targetId": arn}
        if unwanted := [
            {"name": name, **target} for name, value in attributes.items() if value is None
        ]:
            await self._ecs("DeleteAttributes", attributes=unwanted)
        if wanted := [
            {"name": name, "value": value, **target}
            for name, value in attributes.items()
            if value is not None
        ]:
            await self._ecs("PutAttributes", attributes=wanted)

    # --- tasks

    async def tasks_on(self, ec2_id: str) -> tuple[Task, ...]:
        """Return every task on the instance that has not stopped.

        Tasks of any owner are included, and so are tasks that are being stopped.

        Raises:
            UnknownInstance: The cluster has no such container instance.
            AwsError: The call failed.
        """
        return tuple(task for task in await self.census(ec2_id) if not task.stopped)

    async def task_of(self, ec2_id: str, started_by: str) -> Task | None:
        """Return the task on the instance that has this `startedBy`.

        Tasks stopped within the last hour are included. Of several, one that has not stopped is
        preferred, then the newest.
        """
        found = [task for task in await self.census(ec2_id) if task.started_by == started_by]
        return max(found, key=lambda task: (not task.stopped, task.created_at or 0.0), default=None)

    async def census(self, ec2_id: str) -> tuple[Task, ...]:
        """Return all tasks on the instance, including those stopped within the last hour."""
        found = await self._census.get(ec2_id)
        if found is None:
            raise UnknownInstance(ec2_id, self.name)
        return found

    async def orphans(self, ec2_id: str) -> tuple[Task, ...]:
        """Return the tasks that were orphaned on a machine within the last hour."""
        return await self._orphans.get(ec2_id)

    async def task(self, arn: str) -> Task | None:
        """Return a task; None if ECS does not know it (yet or any more)."""
        return await self._tasks.get(arn)

    async def run(self, request: Mapping[str, Any], at: str = "") -> Task | RunTaskFailure:
        """Run a task. If ECS already knows the client token, return the task that has it.

        Args:
            request: Fields of RunTask, for one task.
            at: ARN of the intended container instance. Of the failures that ECS lists for all
                instances, the one of this instance is returned.
        """
        answer = await self.aws.call("ecs", "RunTask", **request)
        if tasks := answer.get("tasks"):
            return read_task(tasks[0])
        failures = list(answer.get("failures") or ())
        own: Mapping[str, Any] = next(
            (one for one in failures if one.get("arn") == at), failures[0] if failures else {}
        )
        return RunTaskFailure(str(own.get("reason") or "UNKNOWN"), str(own.get("detail") or ""))

    async def stop(self, arn: str, reason: str) -> None:
        """Tell ECS to stop a task. Do nothing if it has stopped or is not known any more."""
        try:
            await self._ecs("StopTask", task=arn, reason=reason)
        except AwsError as error:
            if error.kind is not Kind.REFUSED:
                raise
            known = await self.task(arn)
            if known is not None and not known.stopped:
                raise

    async def wait_stopped(self, arns: Sequence[str], within: float) -> dict[str, Task | None]:
        """Wait until every task has stopped, and return each by its ARN.

        The value is None for a task that ECS does not know any more.

        Raises:
            TimeoutError: Some have not stopped in time.
            AwsError: The time is over and the latest call failed.
        """
        return dict(
            zip(
                arns,
                await asyncio.gather(*(self._wait_stopped(arn, within) for arn in arns)),
                strict=True,
            )
        )

    async def _wait_stopped(self, arn: str, within: float) -> Task | None:
        pause, until = FIRST_LOOK, time.monotonic() + within
        with self.follow(arn) as followed:
            while not (followed.missing or (followed.task is not None and followed.task.stopped)):
                left = until - time.monotonic()
                if left <= 0:
                    if followed.failing is not None:
                        raise followed.failing
                    raise TimeoutError(f"task {arn} has not stopped within {within:g} s")
                try:
                    async with asyncio.timeout(min(pause, left)):
                        await followed.wait_for_change()
                except TimeoutError:
                    pause = min(2 * pause, LONGEST_LOOK)
                    self.hint(arn)
            return followed.task if not followed.missing else None

    def hint(self, arn: str) -> bool:
        """Poll a followed task immediately. Return whether the task is followed."""
        return self._follower.hint(arn)

    @contextmanager
    def follow(self, arn: str) -> Iterator[FollowedTask]:
        """Poll a task now and repeatedly while the context is open."""
        followed = self._follower.add(arn)
        try:
            yield followed
        finally:
            self._follower.remove(followed)

    async def definition(self, name: str) -> Definition:
        """Return a task definition by family, family:revision or ARN.

        For a family, return its newest revision, which may be cached for half a minute.
        """
        known = self._defined.get(name)
        if known is not None and time.monotonic() - known[1] <= DEFINITION_FOR:
            return known[0]
        return await self._definitions.get(name)

    async def close(self) -> None:
        await self._follower.close()
        for batch in (
            self._instances,
            self._census,
            self._orphans,
            self._tasks,
            self._machines,
            self._definitions,
        ):
            await batch.close()

    # --- batched calls

    async def describe_tasks(self, arns: Iterable[str]) -> dict[str, Task | None]:
        found: dict[str, Task | None] = {
            arn: self._ended[arn][0] for arn in arns if arn in self._ended
        }
        asked = [arn for arn in arns if arn not in found]
        for answer in await _all(
            self._ecs("DescribeTasks", tasks=part) for part in _parts(asked, AT_ONCE)
        ):
            found.update({task.arn: task for task in map(read_task, answer.get("tasks") or ())})
            found.update(
                {
                    str(one.get("arn")): None
                    for one in answer.get("failures") or ()
                    if one.get("reason") == "MISSING"
                }
            )
        self._remember(
            task for arn in asked if (task := found.get(arn)) is not None and task.stopped
        )
        if left_out := [arn for arn in asked if arn not in found]:
            raise AwsError(f"ECS DescribeTasks says nothing of {left_out[0]}", "", Kind.UNAVAILABLE)
        return found

    async def describe_instances(self, arns: Iterable[str]) -> dict[str, Instance | None]:
        asked = list(arns)
        found: dict[str, Instance | None] = dict.fromkeys(asked)
        request = {"include": ["CONTAINER_INSTANCE_HEALTH"]}
        for answer in await _all(
            self._ecs("DescribeContainerInstances", containerInstances=part, **request)
            for part in _parts(asked, AT_ONCE)
        ):
            found.update(
                {one.arn: one for one in map(read_instance, answer.get("containerInstances") or ())}
            )
        for arn, instance in found.items():
            if instance is None or instance.agent_connected:
                self._silent.pop(arn, None)
            else:
                self._silent.setdefault(arn, time.monotonic())
        return found

    async def describe_machines(self, ec2_ids: Iterable[str]) -> dict[str, Machine]:
        asked = list(ec2_ids)
        found = dict.fromkeys(asked, Machine("", "", None))
        for part in _parts(asked, AT_ONCE):
            # Filter instead of InstanceIds, because an id that EC2 has forgotten would fail the
            # whole call.
            async for answer in self._pages(
                "ec2",
                "DescribeInstances",
                "NextToken",
                Filters=[{"Name": "instance-id", "Values": part}],
            ):
                for reservation in answer.get("Reservations") or ():
                    for one in reservation.get("Instances") or ():
                        state = str((one.get("State") or {}).get("Name") or "")
                        self._described.add(str(one["InstanceId"]))
                        found[str(one["InstanceId"])] = Machine(
                            state,
                            str(one.get("PrivateIpAddress") or ""),
                            seconds(one.get("LaunchTime")),
                        )
        return found

    async def _ask_instances(self, ec2_ids: tuple[str, ...]) -> dict[str, tuple[Instance, ...]]:
        filters = [
            f"ec2InstanceId in [{', '.join(repr(one) for one in part)}]"
            for part in _parts(ec2_ids, IDS_AT_ONCE)
        ]
        listed = await _all(
            self._list("ListContainerInstances", "containerInstanceArns", filter=one)
            for one in filters
        )
        described = await self.describe_instances([arn for arns in listed for arn in arns])
        found: dict[str, list[Instance]] = {ec2_id: [] for ec2_id in ec2_ids}
        for instance in described.values():
            if instance is not None and instance.ec2_id in found and instance.status != "INACTIVE":
                found[instance.ec2_id].append(instance)
        now = time.monotonic()
        for ec2_id, instances in found.items():
            instances.sort(
                key=lambda one: (one.agent_connected, one.registered_at or 0.0, one.arn),
                reverse=True,
            )
            if instances:
                self._known[ec2_id] = (instances[0], now)
            else:
                self._known.pop(ec2_id, None)
        return {ec2_id: tuple(instances) for ec2_id, instances in found.items()}

    async def _ask_census(self, ec2_ids: tuple[str, ...]) -> dict[str, tuple[Task, ...] | None]:
        instances = await self._ask_instances(ec2_ids)
        lives_on = {one.arn: ec2_id for ec2_id, several in instances.items() for one in several}
        wheres: list[dict[str, str]] = (
            [{"containerInstance": arn} for arn in lives_on] if len(lives_on) <= FEW else [{}]
        )
        asked = [
            {**where, "desiredStatus": status}
            for where in wheres
            for status in ("RUNNING", "STOPPED")
        ]
        listed = await _all(self._list("ListTasks", "taskArns", **request) for request in asked)
        arns = dict.fromkeys(arn for page in listed for arn in page)
        # A task never moves: skip those known to run elsewhere.
        here = {"", *lives_on}
        described = await self.describe_tasks(
            [arn for arn in arns if self._placed.get(arn, "") in here]
        )
        if {} in wheres:
            places = {arn: task.instance_arn for arn, task in described.items() if task is not None}
            self._placed = {
                arn: place for arn in arns if (place := places.get(arn) or self._placed.get(arn))
            }
        found: dict[str, list[Task]] = {
            ec2_id: [] for ec2_id, several in instances.items() if several
        }
        for task in described.values():
            if task is not None and task.instance_arn in lives_on:
                found[lives_on[task.instance_arn]].append(task)
        return {ec2_id: tuple(found[ec2_id]) if ec2_id in found else None for ec2_id in ec2_ids}

    async def _ask_orphans(self, ec2_ids: tuple[str, ...]) -> dict[str, tuple[Task, ...]]:
        # No list has the instance that such a task was on, nor can stopped tasks be listed by
        # `startedBy`.
        arns = await self._list("ListTasks", "taskArns", desiredStatus=STOPPED)
        described = await self.describe_tasks(arns)
        # Tasks on Fargate, and those that were never placed, have no container instance to ask for.
        # Those of others are none of a job.
        unseen = [
            task
            for task in described.values()
            if task is not None
            and task.is_unseen
            and task.instance_arn
            and token_of(task.started_by) is not None
        ]
        instances = await self.describe_instances({task.instance_arn for task in unseen})
        found: dict[str, list[Task]] = {ec2_id: [] for ec2_id in ec2_ids}
        for task in unseen:
            instance = instances[task.instance_arn]
            # The reason may be that of an earlier order to stop it.
            if (
                instance is not None
                and instance.ec2_id in found
                and (instance.status == "INACTIVE" or task.is_deregistered)
            ):
                found[instance.ec2_id].append(task)
        return {ec2_id: tuple(tasks) for ec2_id, tasks in found.items()}

    async def _ask_definitions(self, names: tuple[str, ...]) -> dict[str, Definition]:
        answers = await _all(
            self.aws.call("ecs", "DescribeTaskDefinition", taskDefinition=name) for name in names
        )
        found = {
            name: read_definition(answer.get("taskDefinition") or {})
            for name, answer in zip(names, answers, strict=True)
        }
        self._defined.update(
            {name: (definition, time.monotonic()) for name, definition in found.items()}
        )
        return found

    def _remember(self, ended: Iterable[Task]) -> None:
        now = time.monotonic()
        self._ended = {
            arn: kept for arn, kept in self._ended.items() if now - kept[1] < STOPPED_KEPT
        }
        self._ended.update({task.arn: (task, now) for task in ended})

    async def _list(self, operation: str, what: str, **request: Any) -> list[str]:
        return [
            str(arn)
            async for answer in self._pages(
                "ecs", operation, "nextToken", cluster=self.name, maxResults=AT_ONCE, **request
            )
            for arn in answer.get(what) or ()
        ]

    async def _pages(
        self, service: str, operation: str, next_: str, **request: Any
    ) -> AsyncIterator[dict[str, Any]]:
        page: dict[str, str] = {}
        while True:
            answer = await self.aws.call(service, operation, **request, **page)
            yield answer
            if not answer.get(next_):
                return
            page = {next_: answer[next_]}

    async def _ecs(self, operation: str, **request: Any) -> dict[str, Any]:
        return await self.aws.call("ecs", operation, cluster=self.name, **request)


async def _all(calls: Iterable[Any]) -> list[Any]:
    """Await all calls; if one fails, let the others finish before raising its error.

    No result is left unretrieved.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _parts(items: Iterable[str], size: int) -> list[list[str]]:
    listed = list(items)
    return [listed[first : first + size] for first in range(0, len(listed), size)]
