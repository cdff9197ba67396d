"""What an ECS cluster says of its tasks and instances, asked for by many at once, and what it is told to do. It decides nothing.

ECS is eventually consistent and throttles an account as a whole: what several ask for within a moment is one call, and everything that is
followed is looked at together, a hundred in a call.
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
from relaunch.backends.ecs.follow import Followed, Follower
from relaunch.backends.ecs.tasks import Definition, Failure, Instance, Task, read_definition, read_instance, read_task, seconds

AT_ONCE = 100
"""Of DescribeTasks and DescribeContainerInstances, and the longest page of their lists."""
IDS_AT_ONCE = 50
"""Instance ids in one filter: some 1,100 characters; the API reference gives no limit."""
FEW = 4
"""Nodes whose tasks are listed node by node; for more, the whole cluster's list is shorter."""
DEFINITION_FOR = 30.0
"""Seconds for which a family's newest revision is remembered: long enough for all nodes of a launch."""
STOPPED_KEPT = 3600.0
"""Seconds: what has stopped does not change, and ECS itself forgets it after an hour."""
FIRST_LOOK, LONGEST_LOOK = 0.5, 4.0
"""Seconds between two looks at tasks whose end is waited for: a stopped one takes from one to thirty seconds."""
GONE = ("stopped", "terminated")
"""States of EC2 in which nothing runs on a machine any more."""


class UnknownInstance(LookupError):
    """No container instance of the cluster has this EC2 id."""

    def __init__(self, ec2_id: str, cluster: str) -> None:
        super().__init__(f"no container instance of ECS cluster {cluster} is {ec2_id}")
        self.reason = str(self)


@dataclass(frozen=True, slots=True)
class Machine:
    """What EC2 says of an instance."""

    state: str
    """pending, running, stopping, stopped, shutting-down or terminated; empty: EC2 does not know it."""
    address: str
    """On the private network; empty: it has none."""
    launched_at: float | None
    """Unix seconds: of its newest start, not of a reboot."""


class Cluster:
    def __init__(self, aws: Aws, name: str, poll: float) -> None:
        self.aws = aws
        self.name = name
        self.poll = poll
        self._instances: Batch[str, tuple[Instance, ...]] = Batch(self._ask_instances)
        self._census: Batch[str, tuple[Task, ...] | None] = Batch(self._ask_census)
        self._tasks: Batch[str, Task | None] = Batch(self.describe_tasks)
        self._machines: Batch[str, Machine] = Batch(self.describe_machines)
        self._definitions: Batch[str, Definition] = Batch(self._ask_definitions)
        self._known: dict[str, tuple[Instance, float]] = {}
        self._ended: dict[str, tuple[Task, float]] = {}
        self._placed: dict[str, str] = {}
        """The container instance of each task in the whole cluster's newest list."""
        self._defined: dict[str, tuple[Definition, float]] = {}
        self._silent: dict[str, float] = {}
        self._follower = Follower(self, poll)

    # --- instances

    async def instance(self, ec2_id: str, max_age: float = 0.0) -> Instance:
        """Return the container instance of a machine; of several, as a lost checkpoint of its agent leaves them, the one in use.

        Args:
            ec2_id: Of the machine.
            max_age: Seconds that what is told may be old; 0: asks now.

        Raises:
            UnknownInstance: there is none.
            AwsError: nobody could be asked.
        """
        known = self._known.get(ec2_id)
        if known is not None and max_age and time.monotonic() - known[1] <= max_age:
            return known[0]
        found = await self._instances.get(ec2_id)
        if not found:
            raise UnknownInstance(ec2_id, self.name)
        return found[0]

    def silent_for(self, arn: str) -> float:
        """Seconds for which this cluster has known that the agent of a container instance is not connected; 0: it is, for all we know."""
        since = self._silent.get(arn)
        return 0.0 if since is None else time.monotonic() - since

    async def machine(self, ec2_id: str) -> Machine:
        return await self._machines.get(ec2_id)

    async def ec2_state(self, ec2_id: str) -> str:
        """Return EC2's word for what the machine does; empty where EC2 does not know it."""
        return (await self._machines.get(ec2_id)).state

    async def put_attributes(self, arn: str, attributes: Mapping[str, str | None]) -> None:
        """Set attributes of a container instance; None removes one."""
        target = {"targetType": "container-instance", "targetId": arn}
        if unwanted := [{"name": name, **target} for name, value in attributes.items() if value is None]:
            await self._ecs("DeleteAttributes", attributes=unwanted)
        if wanted := [{"name": name, "value": value, **target} for name, value in attributes.items() if value is not None]:
            await self._ecs("PutAttributes", attributes=wanted)

    # --- tasks

    async def tasks_on(self, ec2_id: str) -> tuple[Task, ...]:
        """Return every task there that has not stopped, whosesoever, also one that is being stopped.

        Raises:
            UnknownInstance: there is no such container instance.
            AwsError: nobody could be asked.
        """
        return tuple(task for task in await self.census(ec2_id) if not task.stopped)

    async def task_of(self, ec2_id: str, started_by: str) -> Task | None:
        """Return the task there that was started by this name, also one that stopped within the last hour; of several, one that runs."""
        found = [task for task in await self.census(ec2_id) if task.started_by == started_by]
        return max(found, key=lambda task: (not task.stopped, task.created_at or 0.0), default=None)

    async def census(self, ec2_id: str) -> tuple[Task, ...]:
        """Return all tasks there, with those that stopped within the last hour."""
        found = await self._census.get(ec2_id)
        if found is None:
            raise UnknownInstance(ec2_id, self.name)
        return found

    async def task(self, arn: str) -> Task | None:
        """Return a task; None: ECS does not know it, any more or yet."""
        return await self._tasks.get(arn)

    async def run(self, request: Mapping[str, Any], at: str = "") -> Task | Failure:
        """Run a task. A name that ECS knows already is answered with the task that has it.

        Args:
            request: Of RunTask, for one task.
            at: The container instance that it is meant for: of the reasons of all instances, its own is told.
        """
        answer = await self.aws.call("ecs", "RunTask", **request)
        if tasks := answer.get("tasks"):
            return read_task(tasks[0])
        failures = list(answer.get("failures") or ())
        own: Mapping[str, Any] = next((one for one in failures if one.get("arn") == at), failures[0] if failures else {})
        return Failure(str(own.get("reason") or "UNKNOWN"), str(own.get("detail") or ""))

    async def stop(self, arn: str, reason: str) -> None:
        """Tell ECS to stop a task. One that has stopped, or is not known any more, is left as it is."""
        try:
            await self._ecs("StopTask", task=arn, reason=reason)
        except AwsError as error:
            if error.kind is not Kind.REFUSED:
                raise
            known = await self.task(arn)
            if known is not None and not known.stopped:
                raise

    async def wait_stopped(self, arns: Sequence[str], within: float) -> dict[str, Task | None]:
        """Wait until every task has stopped. None: ECS does not know it any more.

        Raises:
            TimeoutError: some have not.
            AwsError: at the end of that time, nobody could be asked.
        """
        return dict(zip(arns, await asyncio.gather(*(self._stopped(arn, within) for arn in arns)), strict=True))

    async def _stopped(self, arn: str, within: float) -> Task | None:
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
                        await followed.changed()
                except TimeoutError:
                    pause = min(2 * pause, LONGEST_LOOK)
                    self.hint(arn)
            return followed.task if not followed.missing else None

    def hint(self, arn: str) -> bool:
        """Look at once at a task that is followed; False: it is not."""
        return self._follower.hint(arn)

    @contextmanager
    def follow(self, arn: str) -> Iterator[Followed]:
        """Look at a task now, and again and again while this is open."""
        followed = self._follower.add(arn)
        try:
            yield followed
        finally:
            self._follower.remove(followed)

    async def definition(self, name: str) -> Definition:
        """Return a task definition; of a family alone, its newest revision, or what that was half a minute ago."""
        known = self._defined.get(name)
        if known is not None and time.monotonic() - known[1] <= DEFINITION_FOR:
            return known[0]
        return await self._definitions.get(name)

    async def close(self) -> None:
        await self._follower.close()
        for batch in (self._instances, self._census, self._tasks, self._machines, self._definitions):
            await batch.close()

    # --- what is asked together

    async def describe_tasks(self, arns: Iterable[str]) -> dict[str, Task | None]:
        found: dict[str, Task | None] = {arn: self._ended[arn][0] for arn in arns if arn in self._ended}
        asked = [arn for arn in arns if arn not in found]
        for answer in await _all(self._ecs("DescribeTasks", tasks=part) for part in _parts(asked, AT_ONCE)):
            found.update({task.arn: task for task in map(read_task, answer.get("tasks") or ())})
            found.update({str(one.get("arn")): None for one in answer.get("failures") or () if one.get("reason") == "MISSING"})
        self._remember(task for arn in asked if (task := found.get(arn)) is not None and task.stopped)
        if left_out := [arn for arn in asked if arn not in found]:
            raise AwsError(f"ECS DescribeTasks says nothing of {left_out[0]}", "", Kind.UNAVAILABLE)
        return found

    async def describe_instances(self, arns: Iterable[str]) -> dict[str, Instance | None]:
        asked = list(arns)
        found: dict[str, Instance | None] = dict.fromkeys(asked)
        request = {"include": ["CONTAINER_INSTANCE_HEALTH"]}
        for answer in await _all(
            self._ecs("DescribeContainerInstances", containerInstances=part, **request) for part in _parts(asked, AT_ONCE)
        ):
            found.update({one.arn: one for one in map(read_instance, answer.get("containerInstances") or ())})
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
            # Not by InstanceIds: one that EC2 has forgotten would fail the whole call.
            async for answer in self._pages("ec2", "DescribeInstances", "NextToken", Filters=[{"Name": "instance-id", "Values": part}]):
                for reservation in answer.get("Reservations") or ():
                    for one in reservation.get("Instances") or ():
                        state = str((one.get("State") or {}).get("Name") or "")
                        found[str(one["InstanceId"])] = Machine(
                            state, str(one.get("PrivateIpAddress") or ""), seconds(one.get("LaunchTime"))
                        )
        return found

    async def _ask_instances(self, ec2_ids: tuple[str, ...]) -> dict[str, tuple[Instance, ...]]:
        filters = [f"ec2InstanceId in [{', '.join(repr(one) for one in part)}]" for part in _parts(ec2_ids, IDS_AT_ONCE)]
        listed = await _all(self._list("ListContainerInstances", "containerInstanceArns", filter=one) for one in filters)
        described = await self.describe_instances([arn for arns in listed for arn in arns])
        found: dict[str, list[Instance]] = {ec2_id: [] for ec2_id in ec2_ids}
        for instance in described.values():
            if instance is not None and instance.ec2_id in found and instance.status != "INACTIVE":
                found[instance.ec2_id].append(instance)
        now = time.monotonic()
        for ec2_id, instances in found.items():
            instances.sort(key=lambda one: (one.agent_connected, one.registered_at or 0.0, one.arn), reverse=True)
            if instances:
                self._known[ec2_id] = (instances[0], now)
            else:
                self._known.pop(ec2_id, None)
        return {ec2_id: tuple(instances) for ec2_id, instances in found.items()}

    async def _ask_census(self, ec2_ids: tuple[str, ...]) -> dict[str, tuple[Task, ...] | None]:
        instances = await self._ask_instances(ec2_ids)
        lives_on = {one.arn: ec2_id for ec2_id, several in instances.items() for one in several}
        wheres: list[dict[str, str]] = [{"containerInstance": arn} for arn in lives_on] if len(lives_on) <= FEW else [{}]
        asked = [{**where, "desiredStatus": status} for where in wheres for status in ("RUNNING", "STOPPED")]
        listed = await _all(self._list("ListTasks", "taskArns", **request) for request in asked)
        arns = dict.fromkeys(arn for page in listed for arn in page)
        # A task never moves: what is known to run elsewhere is left out.
        here = {"", *lives_on}
        described = await self.describe_tasks([arn for arn in arns if self._placed.get(arn, "") in here])
        if {} in wheres:
            places = {arn: task.instance_arn for arn, task in described.items() if task is not None}
            self._placed = {arn: place for arn in arns if (place := places.get(arn) or self._placed.get(arn))}
        found: dict[str, list[Task]] = {ec2_id: [] for ec2_id, several in instances.items() if several}
        for task in described.values():
            if task is not None and task.instance_arn in lives_on:
                found[lives_on[task.instance_arn]].append(task)
        return {ec2_id: tuple(found[ec2_id]) if ec2_id in found else None for ec2_id in ec2_ids}

    async def _ask_definitions(self, names: tuple[str, ...]) -> dict[str, Definition]:
        answers = await _all(self.aws.call("ecs", "DescribeTaskDefinition", taskDefinition=name) for name in names)
        found = {name: read_definition(answer.get("taskDefinition") or {}) for name, answer in zip(names, answers, strict=True)}
        self._defined.update({name: (definition, time.monotonic()) for name, definition in found.items()})
        return found

    def _remember(self, ended: Iterable[Task]) -> None:
        now = time.monotonic()
        self._ended = {arn: kept for arn, kept in self._ended.items() if now - kept[1] < STOPPED_KEPT}
        self._ended.update({task.arn: (task, now) for task in ended})

    async def _list(self, operation: str, what: str, **request: Any) -> list[str]:
        return [
            str(arn)
            async for answer in self._pages("ecs", operation, "nextToken", cluster=self.name, maxResults=AT_ONCE, **request)
            for arn in answer.get(what) or ()
        ]

    async def _pages(self, service: str, operation: str, next_: str, **request: Any) -> AsyncIterator[dict[str, Any]]:
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
    """Await all; where one fails, the others are finished first: none is left without somebody who takes its answer."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _parts(items: Iterable[str], size: int) -> list[list[str]]:
    listed = list(items)
    return [listed[first : first + size] for first in range(0, len(listed), size)]
