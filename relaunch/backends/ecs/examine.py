"""Examines a container instance by one-shot tasks that run there.

A task runs the agent's `probe` or `diagnose`, or a health check that reports only an exit code. The
answers have the agent's format, with additional facts from ECS and EC2. This module draws no
conclusions from them.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from relaunch.backends.base import PROTOCOL, Refusal, Unreachable
from relaunch.backends.ecs.aws import Aws, AwsError, Kind
from relaunch.backends.ecs.cluster import Cluster, UnknownInstance
from relaunch.backends.ecs.occupants import examination, node_task, occupants
from relaunch.backends.ecs.reboots import Journal
from relaunch.backends.ecs.repairs import Repairs
from relaunch.backends.ecs.tasks import (
    Definition,
    Instance,
    RunTaskFailure,
    Task,
    client_token,
    run_task,
)
from relaunch.spec.fleet import EcsOptions

PLACEMENT_TIMEOUT = 45.0
"""Seconds for placing, pulling and starting a task, per call: activities give a probe a minute more
than its own time. A repeated call waits for the same task, so that an image which takes longer to
pull is pulled once.
"""
SETTLING_TIMEOUT = 20.0
"""Seconds of a call that may be spent waiting for an instance that is coming back; the caller asks
again every five seconds.
"""
REGISTRATION_TIMEOUT = 10.0
"""Seconds until ECS can describe a task that RunTask has just returned."""
LOG_TIMEOUT = 30.0
"""Seconds until output is in CloudWatch Logs: Docker's driver sends it every five seconds, and it
is visible a little later.
"""
LOG_LOOK = 1.0
FREEING_TIMEOUT = 150.0
"""Seconds for GPUs to become free: a task that is being stopped has 30 s, and at most 120 if its
stopTimeout says so.
"""
FREE_LOOK = 2.0
STOP_REASON = "relaunch: examination"
FAULTY = 1
"""Exit code of an examination that found a fault."""
_ANSWER = re.compile(r"relaunch-answer(?: (\d{1,4})/(\d{1,4}))?: (.*)", re.DOTALL)


class NodeTasks:
    def __init__(
        self, cluster: Cluster, aws: Aws, options: EcsOptions, repairs: Repairs | None = None
    ) -> None:
        self._cluster = cluster
        self._aws = aws
        self._options = options
        self._repairs = repairs or Repairs(cluster, aws, options)

    async def probe(
        self, ec2_id: str, node: str, within: float, kernel_since: float | None
    ) -> Mapping[str, Any]:
        """Probe a node, once every order to it is finished.

        Raises:
            Unreachable: No probe could be run there, or it gave no answer.
        """
        if self._options.node_task is None and self._options.health_check is None:
            raise Unreachable(
                node,
                "nothing can be run on it to probe it: "
                "set ecs.node_task in the fleet file to the node image's task definition",
            )
        until = time.monotonic() + within + PLACEMENT_TIMEOUT
        journal = await self._repairs.settle(node, ec2_id, min(SETTLING_TIMEOUT, within))
        with _asking(node):
            instance = await self._instance(node, ec2_id)
            if self._options.node_task is None:
                return await self._read_without_probe(instance, journal)
            order = {"protocol": PROTOCOL, "within": within, "kernel_since": kernel_since}
            kind = "probe" if kernel_since is None else "probe-since"
            answer = await self._run_probe(node, instance, kind, order, until)
            machine = await self._cluster.machine(ec2_id)
            on_it = occupants(await self._cluster.tasks_on(ec2_id))
        told = journal.list_reboots(str(answer.get("boot_id") or ""), machine.launched_at)
        return {
            **answer,
            "jobs": _join_lists(answer.get("jobs"), list(on_it.jobs)),
            "held": on_it.held or answer.get("held"),
            "reboots": _join_lists(answer.get("reboots"), told),
            "ecs_health": instance.health,
            "ecs_gpus": len(instance.gpus),
        }

    async def diagnose(
        self, ec2_id: str, node: str, id: str, level: int, within: float, gpus: int
    ) -> Mapping[str, Any] | Refusal:
        """Examine the GPUs of a node by a task that reserves all of them.

        If an examination with this id is already running, wait for it.

        Raises:
            Unreachable: It is unknown whether the node is being examined.
        """
        until = time.monotonic() + within
        name = self._options.health_check or self._options.node_task
        if name is None:
            return Refusal(
                node,
                "cannot_start",
                "neither ecs.node_task nor ecs.health_check is set in the fleet file",
            )
        by_agent = self._options.health_check is None
        with _asking(node):
            instance = await self._instance(node, ec2_id)
            definition = await self._cluster.definition(name)
            if (container := _examiner(definition)) is None:
                several = ", ".join(definition.essential) or "none"
                return Refusal(
                    node,
                    "cannot_start",
                    f"{definition.arn} has not one essential container, but {several}: "
                    "which examines?",
                )
            order = {
                "protocol": PROTOCOL,
                "id": id,
                "level": level,
                "within": max(1.0, until - time.monotonic()),
            }
            command = ("diagnose", json.dumps(order)) if by_agent else ()
            task = await self._alone(
                node, instance, id, definition, container, command, gpus, until
            )
            if isinstance(task, Refusal):
                return task
            try:
                ended = await self._wait_or_stop(task, until)
            except TimeoutError:
                return _inconclusive(f"it did not end within {within:g} s and was stopped")
            if ended is None:
                return _inconclusive("ECS does not know its task any more")
            if ended.started_at is None and _code(ended, container) is None:
                return Refusal(node, "cannot_start", f"the examination never ran: {_words(ended)}")
            answer = (
                await self._read(
                    definition, container, ended, min(until, time.monotonic() + LOG_TIMEOUT)
                )
                if by_agent
                else None
            )
            if answer is None:
                if by_agent and _code(ended, container) == FAULTY:
                    # Python ends so, too, where the agent crashes or cannot begin.
                    return _inconclusive(
                        f"it left no answer that can be read, only this: {_words(ended)}", FAULTY
                    )
                return await self._judge_exit_code(ec2_id, ended, container)
        if answer.get("outcome") == "refused":
            return Refusal(
                node,
                str(answer.get("why") or "cannot_start"),
                str(answer.get("reason") or "it does not say why"),
            )
        return answer

    # --- facts from ECS and EC2 alone

    async def _read_without_probe(self, instance: Instance, journal: Journal) -> Mapping[str, Any]:
        """Return a probe's answer that contains only facts from ECS and EC2.

        The launch time stands in for the boot id: only a stop and start changes it.
        """
        machine = await self._cluster.machine(instance.ec2_id)
        on_it = occupants(await self._cluster.tasks_on(instance.ec2_id))
        boot_id = _boot_of_ec2(instance.ec2_id, machine.launched_at)
        return {
            "outcome": "done",
            "unprobed": True,
            "boot_id": boot_id,
            "stamp": None
            if machine.launched_at is None
            else max(0.0, time.time() - machine.launched_at),
            "jobs": list(on_it.jobs),
            "held": on_it.held,
            "reboots": journal.list_reboots(boot_id, machine.launched_at),
            "ecs_health": instance.health,
            "ecs_gpus": len(instance.gpus),
        }

    async def _judge_exit_code(self, ec2_id: str, task: Task, container: str) -> Mapping[str, Any]:
        """Return the result of a health check by its exit code.

        0 is healthy and 1 is faulty; every other code, such as 226 of dcgmi, is inconclusive.
        """
        code = _code(task, container)
        word = (
            {0: "healthy", FAULTY: "faulty"}.get(code, "inconclusive")
            if code is not None
            else "inconclusive"
        )
        answer = {"outcome": "done", "contract": word, "reason": _words(task), "exit_code": code}
        if self._options.node_task is not None:
            return answer  # the boot id would be the kernel's, which an exit code does not report
        return {
            **answer,
            "boot_id": _boot_of_ec2(ec2_id, (await self._cluster.machine(ec2_id)).launched_at),
        }

    async def _instance(self, node: str, ec2_id: str) -> Instance:
        instance = await self._cluster.instance(ec2_id)
        if not instance.agent_connected:
            raise Unreachable(node, f"the ECS agent of {ec2_id} is not connected")
        if instance.status != "ACTIVE":
            raise Unreachable(
                node,
                f"its container instance is {instance.status}, "
                "so ECS places no task there to probe it",
            )
        return instance

    # --- tasks

    async def _run_probe(
        self, node: str, instance: Instance, kind: str, order: Mapping[str, Any], until: float
    ) -> Mapping[str, Any]:
        assert self._options.node_task is not None
        definition = await self._cluster.definition(self._options.node_task)
        container = _examiner(definition)
        if container is None or container not in definition.logs:
            raise Unreachable(
                node,
                f"task definition {definition.arn} cannot be read from: expected one essential "
                "container with logDriver awslogs, awslogs-group and awslogs-stream-prefix",
            )
        started_by = node_task(kind)
        task = await self._running(instance.ec2_id, started_by)
        if task is None:
            asked = run_task(
                self._cluster.name,
                instance.ec2_id,
                task_definition=definition.arn,
                container=container,
                command=("probe", json.dumps(order)),
                started_by=started_by,
                client_token=client_token("probe", uuid.uuid4().hex),
            )
            placed = await self._cluster.run(asked, instance.arn)
            if isinstance(placed, RunTaskFailure):
                raise Unreachable(
                    node, f"ECS placed no task to look at it: {_describe_failure(placed)}"
                )
            task = placed
        try:
            ended = await self._wait(task, until)
        except TimeoutError:
            raise Unreachable(
                node,
                f"the task that probes it, {task.short}, has not ended in time: "
                "pulled or placed late",
            ) from None
        if ended is None or _code(ended, container) is None:
            words = "ECS does not know it any more" if ended is None else _words(ended)
            raise Unreachable(
                node,
                f"the task that was to look at it, {task.short}, ended without an answer: {words}",
            )
        now = time.monotonic()
        answer = await self._read(
            definition, container, ended, min(max(until, now + LOG_LOOK), now + LOG_TIMEOUT)
        )
        if answer is None:
            log = definition.logs[container]
            stream = log.stream(container, task.short)
            raise Unreachable(
                node,
                f"the task that probed it ({_words(ended)}) left no answer in "
                f"log group {log.group}, stream {stream}",
            )
        if answer.get("outcome") != "done":
            raise Unreachable(
                node,
                f"what looked at it could not: {answer.get('reason') or 'it does not say why'}",
            )
        return answer

    async def _alone(
        self,
        node: str,
        instance: Instance,
        id: str,
        definition: Definition,
        container: str,
        command: tuple[str, ...],
        gpus: int,
        until: float,
    ) -> Task | Refusal:
        """Return the task that examines a node for this id, and run it if there is none.

        ECS places it only when no other task has reserved the GPUs.
        """
        started_by = node_task("diagnose", id)
        free_until = min(until, time.monotonic() + FREEING_TIMEOUT)
        while True:
            for task in await self._cluster.tasks_on(instance.ec2_id):
                kind, other = examination(task)
                if task.started_by == started_by:
                    return task
                if kind == "diagnose":
                    return Refusal(
                        node,
                        "held",
                        f"this node is being examined (diagnose, {other})",
                        held_by=other,
                    )
            asked = run_task(
                self._cluster.name,
                instance.ec2_id,
                task_definition=definition.arn,
                container=container,
                command=command,
                gpus=gpus,
                started_by=started_by,
                client_token=client_token("diagnose", id, uuid.uuid4().hex),
            )
            placed = await self._cluster.run(asked, instance.arn)
            if isinstance(placed, Task):
                return placed
            if placed.reason == "AGENT":
                raise Unreachable(
                    node, f"ECS placed no task to examine it: {_describe_failure(placed)}"
                )
            if not placed.reason.startswith("RESOURCE:"):
                return Refusal(
                    node,
                    "cannot_start",
                    f"ECS placed no task to examine it: {_describe_failure(placed)}",
                )
            if time.monotonic() + FREE_LOOK >= free_until:
                return Refusal(
                    node,
                    "busy",
                    f"ECS has not its GPUs free to examine it: {_describe_failure(placed)}",
                )
            await asyncio.sleep(FREE_LOOK)

    async def _running(self, ec2_id: str, started_by: str) -> Task | None:
        return next(
            (
                task
                for task in await self._cluster.tasks_on(ec2_id)
                if task.started_by == started_by
            ),
            None,
        )

    async def _wait_or_stop(self, task: Task, until: float) -> Task | None:
        """Wait for an examination. Stop its task if the wait is cancelled or times out."""
        try:
            return await self._wait(task, until)
        except (TimeoutError, asyncio.CancelledError):
            await asyncio.shield(self._cluster.stop(task.arn, STOP_REASON))
            raise

    async def _wait(self, task: Task, until: float) -> Task | None:
        """Wait until a task has stopped and return it.

        Return None if ECS does not know it although it is old enough to be visible.
        """
        known_by = time.monotonic() + REGISTRATION_TIMEOUT
        while True:
            found = (
                await self._cluster.wait_stopped([task.arn], max(0.0, until - time.monotonic()))
            )[task.arn]
            if found is not None or time.monotonic() >= min(until, known_by):
                return found
            await asyncio.sleep(LOG_LOOK)

    # --- logs

    async def _read(
        self, definition: Definition, container: str, task: Task, until: float
    ) -> dict[str, Any] | None:
        """Return the answer that a task printed; None if it cannot be read."""
        log = definition.logs.get(container)
        if log is None or (
            log.region and self._options.region and log.region != self._options.region
        ):
            return None
        while True:
            try:
                answer = read_answer(
                    await self._lines(log.group, log.stream(container, task.short))
                )
            except AwsError as error:
                if error.kind is Kind.DENIED or (
                    error.kind is Kind.REFUSED and error.code != "ResourceNotFoundException"
                ):
                    return None
                answer = None
            if answer is not None or time.monotonic() + LOG_LOOK >= until:
                return answer
            await asyncio.sleep(LOG_LOOK)

    async def _lines(self, group: str, stream: str) -> list[str]:
        lines: list[str] = []
        page: dict[str, str] = {}
        while True:
            request = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
            answer = await self._aws.call("logs", "GetLogEvents", **request, **page)
            lines += [str(event.get("message") or "") for event in answer.get("events") or ()]
            token = str(answer.get("nextForwardToken") or "")
            if not token or token == page.get("nextToken"):  # the last page returns its own token
                return lines
            page = {"nextToken": token}


def read_answer(lines: list[str]) -> dict[str, Any] | None:
    """Return what an examination's container has logged, in parts; None: not all of it, or not
    that."""
    parts: dict[int, str] = {}
    of = 0
    for match in filter(None, map(_ANSWER.fullmatch, lines)):
        number, of = int(match[1] or 1), int(match[2] or 1)
        parts[number] = match[3]
    if not parts or sorted(parts) != list(range(1, of + 1)):
        return None
    try:
        answer = json.loads("".join(parts[number] for number in sorted(parts)))
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _examiner(definition: Definition) -> str | None:
    if len(definition.containers) == 1:
        return definition.containers[0]
    return definition.essential[0] if len(definition.essential) == 1 else None


def _code(task: Task, container: str) -> int | None:
    return next((one.exit_code for one in task.containers if one.name == container), None)


def _words(task: Task) -> str:
    """Return how a task ended: its exit codes and the reasons that AWS gives."""
    codes = [f"exit code {one.exit_code}" for one in task.containers if one.exit_code is not None]
    said = [task.stopped_reason, *(one.reason for one in task.containers)]
    return "; ".join([*codes, *filter(None, said)]) or "ECS does not say how"


def _describe_failure(failure: RunTaskFailure) -> str:
    return failure.reason + (f" ({failure.detail})" if failure.detail else "")


def _inconclusive(reason: str, exit_code: int | None = None) -> dict[str, Any]:
    return {"outcome": "done", "contract": "inconclusive", "reason": reason, "exit_code": exit_code}


def _join_lists(agents: Any, ours: list[dict[str, Any]]) -> Any:
    """Return both lists joined; a value that the agent could not read is returned unchanged."""
    return [*agents, *ours] if isinstance(agents, list) else agents


def _boot_of_ec2(ec2_id: str, launched_at: float | None) -> str:
    return "" if launched_at is None else f"ec2:{ec2_id}:{launched_at:.0f}"


@contextmanager
def _asking(node: str) -> Iterator[None]:
    try:
        yield
    except (AwsError, UnknownInstance) as error:
        raise Unreachable(node, error.reason) from error
