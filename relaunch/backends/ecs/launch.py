"""Prepares a node for a generation, runs its ranks there as one task, and stops ranks.

Stopping waits until ECS reports the tasks as stopped. All required state is read from ECS each
time, so that any controller can continue where another was killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from relaunch.backends.base import (
    Preparation,
    PrepareOrder,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
    Unreachable,
)
from relaunch.backends.ecs import container as inside
from relaunch.backends.ecs import fence
from relaunch.backends.ecs.aws import AwsError, Kind
from relaunch.backends.ecs.cluster import GONE, Cluster, Machine, UnknownInstance
from relaunch.backends.ecs.errors import (
    convert_aws_error,
    find_network_problem,
    find_order_problem,
    refuse_forbidden,
    refuse_lower_token,
    refuse_unfit,
    refuse_unplaced,
)
from relaunch.backends.ecs.fence import Fence
from relaunch.backends.ecs.stream import SETTLES
from relaunch.backends.ecs.tasks import (
    LONGEST_OVERRIDES,
    QUARANTINE,
    Definition,
    Instance,
    Task,
    build_started_by,
    client_token,
    job_attribute,
    overrides_length,
    run_task,
    stop_reason,
    the_container,
    token_of,
)
from relaunch.generation import Token
from relaunch.spec.fleet import EcsOptions

FIRST_PORT, PORTS = 20000, 10000
"""Range of MASTER_PORT: below the ephemeral ports of Linux (from 32768) and the ports of the ECS
agent (from 51678).
"""
LOOK_AGAIN = 0.5
JUST_NOW = 1.0
"""Seconds for which a value is reused: what was read during the same order is not read again."""


class Launcher:
    """Launcher for all nodes of one fleet."""

    def __init__(
        self,
        fleet: str,
        cluster: Cluster,
        options: EcsOptions,
        settles: float = SETTLES,
        machines: Sequence[str] = (),
    ) -> None:
        """Create a launcher. `machines` are the EC2 ids of the fleet."""
        self._fleet = fleet
        self._machines = machines
        self._cluster = cluster
        self._options = options
        self._settles = settles
        self._ran: dict[tuple[str, str, str], tuple[Token, str]] = {}
        self._addresses: dict[str, str] = {}
        self._wanted: dict[str, PrepareOrder] = {}
        """Newest prepare order of each machine; a start order does not repeat its fields."""

    def address(self, ec2_id: str) -> str | None:
        """Return the address of a machine for ranks on other nodes; None before it is prepared."""
        return self._addresses.get(ec2_id)

    def ran(self, ec2_id: str, token: Token) -> str | None:
        """Return the ARN of the task that this controller itself ran; None if it ran none."""
        newest = self._ran.get((ec2_id, token.namespace, token.job))
        return newest[1] if newest is not None and newest[0] == token else None

    async def prepare(self, node: str, ec2_id: str, order: PrepareOrder) -> Preparation | Refusal:
        token = order.token
        try:
            build_started_by(token)
        except ValueError as error:
            return Refusal(node, "cannot_start", str(error))
        self._wanted[ec2_id] = order
        try:
            return await self._prepare(node, ec2_id, order)
        except UnknownInstance as error:
            raise Unreachable(node, error.reason) from error
        except AwsError as error:
            return convert_aws_error(node, error)

    async def _prepare(self, node: str, ec2_id: str, order: PrepareOrder) -> Preparation | Refusal:
        token, attribute = order.token, job_attribute(order.token.namespace, order.token.job)
        instance = await self._cluster.instance(ec2_id)
        if (refused := refuse_unfit(node, self._fleet, instance)) is not None:
            return refused
        set_ = Fence.read(instance.attributes.get(attribute))
        if (refused := refuse_forbidden(node, set_, token)) is not None:
            return refused
        await self._check_orphans(node, ec2_id, instance, token, set_)
        await self._learn_address(node, ec2_id)
        if set_ != Fence.from_token(token, "prepared"):
            await self._put(instance, ec2_id, attribute, Fence.from_token(token, "prepared"))
        # Read the tasks only now: from here on ECS places tasks of this generation only.
        own = await self._own(
            ec2_id, token, set_ if set_ != Fence.from_token(token, "prepared") else None
        )
        highest = max(map(_key, own), default=fence.key(token))
        if highest > fence.key(token):
            # A later controller prepared the node between our read and our write: set the fence to
            # its generation again.
            await self._cluster.put_attributes(
                instance.arn, {attribute: str(Fence("prepared", *highest))}
            )
            return refuse_lower_token(node, token, highest)
        mine = [task for task in own if token_of(task.started_by) == token]
        if mine and all(task.stopped for task in mine):
            reason = (
                f"generation {token.generation} was started on {node} already and has ended:"
                " a generation is launched once"
            )
            return Refusal(node, "not_above", reason, fence.key(token))
        older = [task for task in own if not task.stopped and task not in mine]
        if (
            refused := await self._end(node, ec2_id, older, order.stop_grace + order.stuck_after)
        ) is not None:
            return refused
        return Preparation(
            node,
            boot_id=instance.arn.rpartition("/")[2],
            master_port=FIRST_PORT + _number(str(token), node) % PORTS,
            peer_port=0,
            stamp=stamp(token, node),
            nonce=client_token("nonce", str(token), node),
        )

    async def _learn_address(self, node: str, ec2_id: str) -> None:
        machine = await self._cluster.machine(ec2_id)
        if machine.state != "running" or not machine.address:
            raise Unreachable(
                node,
                f"{ec2_id} is {_describe_state(machine)}"
                + ("" if machine.address else " and has no private address"),
            )
        self._addresses[ec2_id] = machine.address

    async def _put(self, instance: Instance, ec2_id: str, attribute: str, word: Fence) -> None:
        jobs = len(fence.find_removable(instance.attributes, attribute, ()))
        living: list[str] = []
        if jobs:
            tokens = [token_of(task.started_by) for task in await self._cluster.tasks_on(ec2_id)]
            living = [job_attribute(one.namespace, one.job) for one in tokens if one is not None]
        forgotten = dict.fromkeys(fence.find_removable(instance.attributes, attribute, living))
        await self._cluster.put_attributes(instance.arn, {**forgotten, attribute: str(word)})

    # --- start

    async def start(self, node: str, ec2_id: str, order: StartOrder) -> StartedRanks | Refusal:
        token = order.token
        if order.prepared != stamp(token, node):
            return Refusal(
                node,
                "expired",
                f"the order to start {token} belongs to another preparation of {node}",
            )
        if (reason := find_order_problem(order)) is not None:
            return Refusal(node, "cannot_start", reason)
        given = order.ecs
        name = (given.task_definition if given else None) or self._options.task_definition
        if name is None:
            reason = (
                "neither the job file nor the fleet file says what a rank is run as:"
                " write `ecs: {task_definition: FAMILY}`"
            )
            return Refusal(node, "cannot_start", reason)
        try:
            definition = await self._cluster.definition(name)
        except AwsError as error:
            if error.kind is Kind.REFUSED:
                return Refusal(node, "cannot_start", f"task definition {name!r}: {error.reason}")
            return convert_aws_error(node, error)
        try:
            container = the_container(
                definition, (given.container if given else None) or self._options.container
            )
            port = inside.port_of(definition, container)
        except ValueError as error:
            return Refusal(node, "cannot_start", str(error))
        if port is None and len(order.rank_env) != 1:
            reason = (
                f"a task is one rank and {len(order.rank_env)} were asked for: nproc_per_node must"
                f" be 1, unless the agent is in the image and {inside.PORT} in {definition.arn}"
            )
            return Refusal(node, "cannot_start", reason)
        if (reason := find_network_problem(definition, order)) is not None:
            return Refusal(node, "cannot_start", reason)
        request = run_task(
            self._cluster.name,
            ec2_id,
            task_definition=name,
            container=container,
            command=order.command,
            environment={
                **({} if port is not None else _outside_agent(definition, container)),
                **_environment(definition, order),
                **self._for_agent(ec2_id, order, port),
            },
            gpus=order.gpus,
            started_by=build_started_by(token),
            client_token=client_token("start", str(token), node),
            only_where=(
                fence.only_for(job_attribute(token.namespace, token.job), token),
                f"(attribute:{QUARANTINE} not_exists or attribute:{QUARANTINE} == {self._fleet})",
            ),
        )
        if (length := overrides_length(request)) > LONGEST_OVERRIDES:
            reason = (
                f"command and environment are {length} characters, of which ECS takes"
                f" {LONGEST_OVERRIDES}: put what is constant into {name}"
            )
            return Refusal(node, "cannot_start", reason)
        try:
            answer = await self._run(node, ec2_id, token, request)
        except UnknownInstance as error:
            raise Unreachable(node, error.reason) from error
        except AwsError as error:
            return convert_aws_error(node, error, "cannot_start")
        if isinstance(answer, StartedRanks) and order.warm:
            return replace(answer, cold="each generation is a new container of Amazon ECS")
        return answer

    def _for_agent(self, ec2_id: str, order: StartOrder, port: int | None) -> dict[str, str]:
        if port is None:
            return {}
        wanted = self._wanted.get(ec2_id)
        known = wanted is not None and wanted.token == order.token
        grace, beat = (
            (wanted.stop_grace, wanted.heartbeat)
            if wanted is not None and known
            else (inside.GRACE, inside.HEARTBEAT)
        )
        return {inside.ORDER: inside.order(order, port, grace, beat)}

    async def _run(
        self, node: str, ec2_id: str, token: Token, request: dict[str, Any]
    ) -> StartedRanks | Refusal:
        # Look for the task before running it: ECS forgets a client token an hour after its task has
        # ended.
        known = await self._cluster.task_of(ec2_id, build_started_by(token))
        # `task_of` has just read the instance too.
        instance = await self._cluster.instance(ec2_id, max_age=JUST_NOW)
        until = time.monotonic() + self._settles
        unplaced: Refusal | None = None
        while True:
            set_ = Fence.read(instance.attributes.get(job_attribute(token.namespace, token.job)))
            if (refused := refuse_forbidden(node, set_, token)) is not None:
                return refused
            if known is not None:
                arn = known.arn
                break
            if set_ != Fence.from_token(token, "prepared") and time.monotonic() >= until:
                return Refusal(node, "not_prepared", f"{node} was not prepared for {token}")
            try:
                answer = await self._cluster.run(request, at=instance.arn)
            except AwsError as error:
                if error.code != "ConflictException":
                    raise
                # An earlier attempt ran the task with the same client token but other parameters,
                # such as another address of rank 0.
                arn = await self._conflicting(ec2_id, token, error)
                break
            if isinstance(answer, Task):
                self._ran[ec2_id, token.namespace, token.job] = token, answer.arn
                return StartedRanks(node, {}, already=False)
            if not answer.reason.startswith("MemberOf"):
                return refuse_unplaced(node, ec2_id, answer)
            if unplaced is not None and time.monotonic() >= until:
                return unplaced
            # The scheduler may not have seen our attribute yet; or another controller has changed
            # it since, and then its value counts.
            unplaced = refuse_unplaced(node, ec2_id, answer)
            await asyncio.sleep(LOOK_AGAIN)
            instance = await self._cluster.instance(ec2_id)
        self._ran[ec2_id, token.namespace, token.job] = token, arn
        return StartedRanks(node, {}, already=True)

    async def _conflicting(self, ec2_id: str, token: Token, error: AwsError) -> str:
        """Return the ARN of the task that has the client token already.

        AWS names it in the error, before its lists contain it.
        """
        if arns := error.response.get("resourceIds"):
            return str(arns[0])
        if (known := await self._cluster.task_of(ec2_id, build_started_by(token))) is None:
            raise error
        return known.arn

    # --- stop

    async def stop(self, node: str, ec2_id: str, order: StopOrder) -> StopProof | Refusal:
        token = order.token
        try:
            return await self._stop(node, ec2_id, order)
        except UnknownInstance as error:
            return await self._stop_with_machine(node, ec2_id, token, error)
        except AwsError as error:
            return convert_aws_error(node, error)

    async def _stop(self, node: str, ec2_id: str, order: StopOrder) -> StopProof | Refusal:
        token, attribute = order.token, job_attribute(order.token.namespace, order.token.job)
        instance = await self._cluster.instance(ec2_id)
        before = Fence.read(instance.attributes.get(attribute))
        # What is prepared on this container instance was not started on one before it.
        if before is None or before.state != "prepared" or before.highest < fence.key(token):
            await self._check_orphans(node, ec2_id, instance, token, before)
        if (
            before is None
            or before.highest < fence.key(token)
            or before == Fence.from_token(token, "prepared")
            or before.state == "orphaned"
        ):
            await self._put(instance, ec2_id, attribute, Fence.from_token(token, "stopped"))
        own = await self._own(ec2_id, token, before or Fence.from_token(token, "prepared"))
        if before is not None and not any(_key(task) == before.highest for task in own):
            # It was only prepared here, so nothing shows that the ranks before it have ended.
            await self._check_orphans(node, ec2_id, instance, token, before)
        living = [task for task in own if not task.stopped and _key(task) <= fence.key(token)]
        refused = await self._end(node, ec2_id, living, order.stop_grace + order.stuck_after)
        return StopProof(node) if refused is None else refused

    async def _check_orphans(
        self, node: str, ec2_id: str, instance: Instance, token: Token, before: Fence | None
    ) -> None:
        """Check that no task of a job runs on a machine unseen by ECS.

        ECS calls a task stopped once its container instance is deregistered by force, and says
        nothing of it to the container instance that the machine registers after that. It tells of
        such a task for an hour: after that the fence remembers it.

        Args:
            node: The node.
            ec2_id: Id of the EC2 instance.
            instance: The container instance that it has now.
            token: Token of the job.
            before: Fence that was set until now.

        Raises:
            Unreachable: One may run, because the machine has not been started since.
        """
        known = before if before is not None and before.state == "orphaned" else None
        if known is None:
            lost = [task for task in await self._cluster.orphans(ec2_id) if _is_of(task, token)]
            if not lost:
                return
            since = max(task.started_at or task.stopped_at or 0.0 for task in lost)
            highest = [] if before is None else [before.highest]
            known = Fence("orphaned", *max([*highest, *map(_key, lost)]), math.ceil(since))
        machine = await self._cluster.machine(ec2_id)
        if machine.state in GONE or (machine.launched_at or 0.0) > known.since:
            return
        if known != before:
            attribute = job_attribute(token.namespace, token.job)
            await self._put(instance, ec2_id, attribute, known)
        raise Unreachable(
            node,
            f"a container instance of {ec2_id} was deregistered by force: ECS does not see any more"
            f" what ran on it, and it may be ranks, up to generation {known.generation}; stop and"
            f" start {ec2_id}",
        )

    async def _own(self, ec2_id: str, token: Token, before: Fence | None) -> list[Task]:
        """Return the tasks of a job on a machine, with those stopped within the last hour.

        Args:
            ec2_id: Id of the EC2 instance.
            token: Token of the job.
            before: Fence that was set until now. If it is `prepared` and no task of its generation
                is listed, a controller that has since died may have started one a moment ago, and
                the lists of ECS may not contain it yet: they are read again after `settles`
                seconds.
        """
        own = [task for task in await self._cluster.census(ec2_id) if _is_of(task, token)]
        if (
            before is None
            or before.state != "prepared"
            or any(_key(task) == before.highest for task in own)
        ):
            return own
        await asyncio.sleep(self._settles)
        return [task for task in await self._cluster.census(ec2_id) if _is_of(task, token)]

    async def _stop_with_machine(
        self, node: str, ec2_id: str, token: Token, error: UnknownInstance
    ) -> StopProof:
        try:
            machine = await self._cluster.machine(ec2_id)
            # EC2 forgets an instance about an hour after it was terminated.
            is_forgotten = not machine.state and await self._cluster.sees_any(self._machines)
        except AwsError as failed:
            raise Unreachable(node, failed.reason) from failed
        if machine.state in GONE or is_forgotten:
            return StopProof(node)
        if not machine.state:
            raise Unreachable(
                node,
                f"{error.reason}, and EC2 knows no machine of the fleet: this worker may have "
                "credentials of another account, or another region",
            ) from error
        raise Unreachable(
            node,
            f"{error.reason}, and it is {_describe_state(machine)}: what runs there cannot be seen",
        ) from error

    async def _end(
        self, node: str, ec2_id: str, tasks: Iterable[Task], within: float
    ) -> Refusal | None:
        """Stop tasks and wait until they have stopped; return a refusal if ECS cannot stop them.

        Raises:
            Unreachable: Some have not stopped in time, and the ECS agent is not connected. Or ECS
                stopped counting them while they may run.
        """
        living = await self._leave_out_ended(ec2_id, tasks)
        if not living:
            return None
        for task in living:
            token = token_of(task.started_by)
            if task.desired_status != "STOPPED" and token is not None:
                await self._cluster.stop(task.arn, stop_reason(token))
        try:
            ended = await self._cluster.wait_stopped([task.arn for task in living], within)
        except TimeoutError:
            machine = await self._cluster.machine(ec2_id)
            if machine.state in GONE:
                return None
            instance = await self._cluster.instance(ec2_id)
            if not instance.agent_connected:
                reason = (
                    f"its ECS agent is not connected, and {len(living)} of its tasks may run yet"
                )
                raise Unreachable(
                    node, f"{ec2_id} is {_describe_state(machine)}, {reason}"
                ) from None
            names = ", ".join(task.short for task in living[:4])
            needs = f"{node} needs a reboot"
            if any(task.instance_arn != instance.arn for task in living):
                needs = f"the ECS agent of {ec2_id} has forgotten it; stop and start {ec2_id}"
            return Refusal(
                node, "stuck", f"ECS could not stop task {names} within {within:g} s: {needs}"
            )
        for end in ended.values():
            if end is not None and end.is_unseen and (of := token_of(end.started_by)):
                instance = await self._cluster.instance(ec2_id)
                await self._check_orphans(node, ec2_id, instance, of, None)
        return None

    async def _leave_out_ended(self, ec2_id: str, tasks: Iterable[Task]) -> list[Task]:
        """Return tasks without those that ended with the power of the machine.

        ECS never learns that they have ended, if the machine's agent has registered it again.
        """
        living = list(tasks)
        if not living:
            return []
        instance = await self._cluster.instance(ec2_id, max_age=JUST_NOW)
        if all(task.instance_arn == instance.arn for task in living):
            return living
        launched_at = (await self._cluster.machine(ec2_id)).launched_at or 0.0
        return [
            task
            for task in living
            if task.instance_arn == instance.arn
            or task.started_at is None
            or task.started_at >= launched_at
        ]


def stamp(token: Token, node: str) -> float:
    """Return the number that identifies a preparation.

    It is derived from token and node: every controller computes the same one, and none has to keep
    it.
    """
    return float(_number("stamp", str(token), node))


def _number(*parts: str) -> int:
    # 48 bits, which a float represents exactly.
    return int(hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12], 16)


def _is_of(task: Task, token: Token) -> bool:
    of = token_of(task.started_by)
    return of is not None and (of.namespace, of.job) == (token.namespace, token.job)


def _key(task: Task) -> tuple[int, int]:
    of = token_of(task.started_by)
    assert of is not None, f"{task.started_by} is no rank"
    return fence.key(of)


def _describe_state(machine: Machine) -> str:
    return machine.state or "not known to EC2"


def _outside_agent(definition: Definition, container: str) -> dict[str, str]:
    """Return what the agent sets where ranks are its children.

    Log drivers read a pipe, into which Python would write 8 KiB at a time.
    """
    name = "PYTHONUNBUFFERED"
    return {} if name in definition.variables.get(container, {}) else {name: "1"}


def _environment(definition: Definition, order: StartOrder) -> dict[str, str]:
    environment = {**order.env, **order.rank_env[0], "RELAUNCH_TOKEN": str(order.token)}
    # ECS chooses the GPUs of a task, and the task sees no others.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if definition.network_mode != "host" and "MASTER_ADDR" in environment:
        # With network mode bridge, a rank cannot reach itself by the address of its node.
        environment["MASTER_ADDR"] = "127.0.0.1"
    return environment
