"""Implements `base.Backend` for the nodes of an Amazon ECS cluster.

A node is an EC2 instance, and a rank is a task.

Ranks hold no lease: a rank that cannot be observed may still run, so silence never proves that it
has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, ClassVar

from relaunch.backends.base import (
    PROTOCOL,
    STACKS_WITHIN,
    BackendError,
    Logs,
    Preparation,
    PrepareOrder,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
    Unreachable,
    WatchStream,
)
from relaunch.backends.ecs.aws import Aws, AwsError
from relaunch.backends.ecs.cluster import Cluster, UnknownInstance
from relaunch.backends.ecs.container import Agents, Feed
from relaunch.backends.ecs.events import SqsEvents
from relaunch.backends.ecs.examine import NodeTasks
from relaunch.backends.ecs.fence import Fence, key
from relaunch.backends.ecs.launch import JUST_NOW, Launcher
from relaunch.backends.ecs.legacy_tables import Mirror, TableMirror
from relaunch.backends.ecs.occupants import occupants
from relaunch.backends.ecs.quarantine import Marks
from relaunch.backends.ecs.rank_logs import DELIVERY_TIMEOUT, RankLogs
from relaunch.backends.ecs.repairs import NO_RESET, Repairs
from relaunch.backends.ecs.sns import Topic
from relaunch.backends.ecs.stream import AGENT_FLAPS, SETTLES, EndedStream, TaskStream
from relaunch.backends.ecs.tasks import Task, build_started_by, job_attribute, token_of
from relaunch.backends.session import AgentSession
from relaunch.generation import Token
from relaunch.spec.fleet import EcsOptions, FleetNode, FleetSpec
from relaunch.spec.job import OutputStream

LOOK_AGAIN = 1.0
LAST_LOOK = 20.0
"""Seconds that a node may take to report its boot id before it is rebooted: the same as for a
probe.
"""
NOT_READ = {"unreadable": "ECS tells how many GPUs a machine has, not who computes on them"}


class EcsBackend:
    fences: ClassVar[bool] = False
    sees_people: ClassVar[bool] = True
    no_reset: ClassVar[str] = NO_RESET

    def __init__(self, spec: FleetSpec, options: EcsOptions, settles: float = SETTLES) -> None:
        """Create a backend.

        Args:
            spec: Fleet file.
            options: ECS options, with those taken from the environment.
            settles: Seconds until a change in ECS is visible to every caller.

        Raises:
            ValueError: No cluster is named.
        """
        if options.cluster is None:
            raise ValueError(
                f"fleet {spec.name}: ecs.cluster is missing,"
                " expected the name or ARN of its ECS cluster"
            )
        self._nodes = {node.name: node for node in spec.nodes}
        self.server = ""
        self._settles = settles
        self.aws = Aws(options.region)
        self.cluster = Cluster(self.aws, options.cluster, options.poll.total_seconds())
        machines = [node.address for node in spec.nodes]
        self._launcher = Launcher(spec.name, self.cluster, options, settles, machines)
        self._logs = RankLogs(self.cluster)
        self.repairs = Repairs(self.cluster, self.aws, options)
        self._agents = Agents(options.agent_key, self._address)
        self._node_tasks = NodeTasks(self.cluster, self.aws, options, self.repairs)
        self.options = options
        # Without an event the next poll finds it, and then its last lines are waited for.
        self.exit_delay = options.poll.total_seconds() + DELIVERY_TIMEOUT
        self._topic = Topic(self.aws, options.topic) if options.topic else None
        self._events = (
            SqsEvents(self.aws, options.queue, spec.name, self.cluster.hint)
            if options.queue
            else None
        )
        tables: TableMirror | None = None
        if any(options.tables.model_dump().values()):
            tables = TableMirror(
                spec.name,
                options.cluster,
                Mirror(self.aws, options.tables),
                self.cluster,
                self.node,
            )
        self._marks = Marks(spec.name, self.cluster, self.node, tables)

    def node(self, name: str) -> FleetNode:
        node = self._nodes[name]
        address = self._launcher.address(node.address)
        return (
            node
            if node.network is not None or address is None
            else node.model_copy(update={"network": address})
        )

    # --- ranks

    async def prepare(self, node: str, order: PrepareOrder) -> Preparation | Refusal:
        return await self._launcher.prepare(node, self._ec2_id(node), order)

    async def start(self, node: str, order: StartOrder) -> StartedRanks | Refusal:
        return await self._launcher.start(node, self._ec2_id(node), order)

    async def stop(self, node: str, order: StopOrder) -> StopProof | Refusal:
        return await self._launcher.stop(node, self._ec2_id(node), order)

    @asynccontextmanager
    async def watch(
        self, node: str, token: Token, after_seq: int, heartbeat: float
    ) -> AsyncIterator[WatchStream]:
        ec2_id = self._ec2_id(node)
        with _convert_errors(node):
            arn = await self._find(ec2_id, token)
        if arn is None:
            reason = (
                f"ECS knows no task of {token} on {ec2_id}: "
                "it ended more than an hour ago, or was never run"
            )
            yield EndedStream(token, after_seq, reason)
            return
        with self.cluster.follow(arn) as followed:
            feed = Feed(self._agents, followed, node, token, after_seq, heartbeat)
            try:
                yield TaskStream(
                    self.cluster,
                    followed,
                    node,
                    ec2_id,
                    token,
                    after_seq,
                    heartbeat,
                    self._logs.tail,
                    self._settles,
                    feed,
                )
            finally:
                await feed.close()

    async def _find(self, ec2_id: str, token: Token) -> str | None:
        """Return the ARN of the task of a generation; None if ECS knows none.

        Before returning None it waits `settles` seconds, because ECS is eventually consistent.
        """
        if (ran := self._launcher.ran(ec2_id, token)) is not None:
            return ran
        until = asyncio.get_running_loop().time() + self._settles
        while True:
            found = await self.cluster.task_of(ec2_id, build_started_by(token))
            if found is not None:
                return found.arn
            if asyncio.get_running_loop().time() >= until:
                return None
            await asyncio.sleep(LOOK_AGAIN)

    async def list(self, node: str, gpus: bool = False) -> Mapping[str, Any]:
        ec2_id = self._ec2_id(node)
        with _convert_errors(node):
            tasks = await self.cluster.census(ec2_id)
            # The census has just read the instance too: a fleet lists every node every minute.
            instance = await self.cluster.instance(ec2_id, max_age=JUST_NOW)
            if (silent := self.cluster.silent_for(instance.arn)) > AGENT_FLAPS:
                raise Unreachable(
                    node, f"the ECS agent of {ec2_id} has not been connected for {silent:.0f} s"
                )
        held = occupants(task for task in tasks if not task.stopped).held
        jobs = jobs_of(tasks, instance.attributes)
        answer = {
            "outcome": "done",
            "protocol": PROTOCOL,
            "boot_id": "",
            "jobs": jobs,
            "held": held,
        }
        return {**answer, "gpus": NOT_READ} if gpus and held is None else answer

    async def logs(
        self,
        node: str,
        token: Token,
        offsets: Mapping[int, int] | None,
        max_bytes: int,
        wait: float,
        tail: int | None,
        since: float | None = None,
        stream: OutputStream = "stdout",
    ) -> Logs | Refusal:
        task = await self._task(node, token)
        if (agent := self._agents_of(node, task)) is not None:
            # If the task has ended or is unreachable, report where CloudWatch Logs has its output.
            with contextlib.suppress(BackendError):
                async with agent as session:
                    return await session.logs(token, offsets, max_bytes, wait, tail, since, stream)
        return Refusal(node, "no_such_generation", await self._where(node, token, task))

    async def stacks(
        self,
        node: str,
        token: Token,
        rank: int | None = None,
        frames: bool = True,
        within: float = STACKS_WITHIN,
    ) -> Mapping[str, Any] | Refusal:
        if (agent := self._agents_of(node, await self._task(node, token))) is not None:
            async with agent as session:
                return await session.stacks(token, rank, frames, within)
        reason = (
            "a rank that is an ECS task runs in its own container: "
            "its stacks can be read only if relaunch's agent is in the image"
        )
        return Refusal(node, "no_such_generation", reason)

    async def last_words(self, node: str, token: Token) -> Mapping[str, Any] | Refusal:
        if (agent := self._agents_of(node, await self._task(node, token))) is not None:
            async with agent as session:
                return await session.last_words(token)
        reason = "what a rank that is an ECS task wrote last is in CloudWatch Logs"
        return Refusal(node, "no_such_generation", reason)

    async def checkpoints(
        self, node: str, directory: str, workdir: str | None, pattern: str | None = None
    ) -> Mapping[str, Any] | Refusal:
        reason = "the folders of a container on ECS are not looked at"
        return Refusal(node, "bad_order", reason)

    async def _task(self, node: str, token: Token) -> Task | None:
        with _convert_errors(node):
            return await self.cluster.task_of(self._ec2_id(node), build_started_by(token))

    def _agents_of(
        self, node: str, task: Task | None
    ) -> AbstractAsyncContextManager[AgentSession] | None:
        """Return a session with the agent in a task; None if there is none that can be asked."""
        if task is None or task.stopped or task.port is None or self.options.agent_key is None:
            return None
        return self._agents.session(node, task)

    async def _address(self, node: str) -> str:
        """Return the address at which the containers of a node listen."""
        if (known := self.node(node).network) is not None:
            return known
        with _convert_errors(node):
            machine = await self.cluster.machine(self._ec2_id(node))
        if not machine.address:
            raise Unreachable(node, f"EC2 gives {self._ec2_id(node)} no private address")
        return machine.address

    async def _where(self, node: str, token: Token, task: Task | None) -> str:
        if task is None:
            return f"ECS knows no task of {token} on {self._ec2_id(node)}"
        with _convert_errors(node):
            where = await self._logs.where(task)
        if where is None:
            return (
                f"what ranks print is where their task definition {task.definition} sends it,"
                " and not in CloudWatch Logs"
            )
        return (
            f"what rank {task.rank} prints is in CloudWatch Logs,"
            f" group {where[0]}, stream {where[1]}"
        )

    # --- machines

    async def probe(
        self, node: str, within: float, kernel_since: float | None
    ) -> Mapping[str, Any]:
        with _convert_errors(node):
            return await self._node_tasks.probe(self._ec2_id(node), node, within, kernel_since)

    async def diagnose(
        self, node: str, id: str, level: int, within: float, fleet: str = ""
    ) -> Mapping[str, Any] | Refusal:
        with _convert_errors(node):
            return await self._node_tasks.diagnose(
                self._ec2_id(node), node, id, level, within, self._nodes[node].gpus
            )

    async def reset_gpus(
        self,
        node: str,
        id: str,
        boot_id: str,
        gpus: tuple[str, ...],
        within: float,
        fleet: str = "",
        reason: str = "",
        by: str = "",
    ) -> Mapping[str, Any] | Refusal:
        return self.repairs.reset_gpus(node)

    async def reboot(
        self, node: str, id: str, boot_id: str, reason: str, fleet: str = "", by: str = ""
    ) -> Mapping[str, Any] | Refusal:
        ec2_id = self._ec2_id(node)

        def probe() -> Awaitable[Mapping[str, Any]]:
            return self._node_tasks.probe(ec2_id, node, LAST_LOOK, None)

        with _convert_errors(node):
            return await self.repairs.reboot(node, ec2_id, id, boot_id, reason, probe)

    async def cycle_power(self, node: str, id: str, within: float) -> Mapping[str, Any]:
        with _convert_errors(node):
            return await self.repairs.cycle_power(node, self._ec2_id(node), id, within)

    # --- notifications, events and attributes

    @property
    def has_topic(self) -> bool:
        return self._topic is not None

    async def tell_people(self, subject: str, text: str) -> str:
        if self._topic is None:
            return "its fleet names no topic"
        await self._topic.tell(subject, text)
        return f"published to {self.options.topic}"

    def events(self) -> SqsEvents | None:
        """Return the reader of the cluster's event queue; None if no queue is configured."""
        return self._events

    def marks(self) -> Marks:
        """Return the writer of quarantine attributes and of the dashboard tables, if configured."""
        return self._marks

    async def close(self) -> None:
        await self.cluster.close()
        await self.aws.close()

    def _ec2_id(self, node: str) -> str:
        """Return the instance of a node.

        Raises:
            Unreachable: The fleet file does not name the node.
        """
        if node not in self._nodes:
            raise Unreachable(node, "it is in the fleet file no more")
        return self._nodes[node].address


@contextmanager
def _convert_errors(node: str) -> Iterator[None]:
    try:
        yield
    except (AwsError, UnknownInstance) as error:
        raise Unreachable(node, error.reason) from error


def jobs_of(tasks: Iterable[Task], attributes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the jobs on a node in the format of an agent's `list`.

    Ranks that ended within the last hour are included, because they show which generations there
    were. For a job with no task here within that hour only its attribute is left, which does not
    say which job it belongs to, so the job is not listed.
    """
    jobs: dict[tuple[str, str], dict[tuple[int, int], list[dict[str, Any]]]] = {}
    for task in tasks:
        token = token_of(task.started_by)
        if token is not None:
            generations = jobs.setdefault((token.namespace, token.job), {})
            ranks = [
                {"rank": rank, "pid": None, "alive": not task.stopped}
                for rank in task.ranks or (task.rank,)
            ]
            generations.setdefault(key(token), []).extend(ranks)
    return [_job(*names, generations, attributes) for names, generations in sorted(jobs.items())]


def _job(
    namespace: str,
    job: str,
    generations: Mapping[tuple[int, int], list[dict[str, Any]]],
    attributes: Mapping[str, str],
) -> dict[str, Any]:
    fence = Fence.read(attributes.get(job_attribute(namespace, job)))
    rows = [
        {
            "submission": submission,
            "generation": generation,
            "state": "running" if any(rank["alive"] for rank in ranks) else "ended",
            "ranks": ranks,
            "fleet": "",
        }
        for (submission, generation), ranks in sorted(generations.items())
    ]
    told = {
        state: list(fence.highest) if fence is not None and fence.state == state else None
        for state in ("prepared", "stopped")
    }
    return {"namespace": namespace, "job": job, **told, "generations": rows}
