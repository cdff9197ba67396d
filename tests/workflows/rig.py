"""A worker with real activities over a simulated fleet, and its jobs.

Leaving it replays each history and checks the records.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.api.history.v1 import HistoryEvent
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowHistory,
)
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import (
    Interceptor,
    Replayer,
    Worker,
    WorkflowInstance,
    WorkflowInstanceDetails,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from relaunch.activities.access import AccessActivities
from relaunch.activities.examine import NodeActivities
from relaunch.activities.fleet import FleetActivities, TellFleetInput
from relaunch.activities.launch import JobActivities
from relaunch.activities.links import LinkActivities
from relaunch.activities.logs import LogActivities
from relaunch.activities.notify import PeopleActivities
from relaunch.activities.records import RecordActivities
from relaunch.activities.repairs import RepairActivities
from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.watch import WatchActivities
from relaunch.builds import deployment
from relaunch.job.state import JobState, Phase
from relaunch.messages.ids import FLEET_ID_PREFIX, NOTIFIER_ID_PREFIX
from relaunch.messages.jobs import JobResult, TrainingJobInput
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, resolve
from relaunch.temporal import data_converter
from relaunch.worker import _leave_unreadable_activities
from relaunch.workflows.fleet.workflow import Fleet
from relaunch.workflows.node_repair.workflow import NodeRepair
from relaunch.workflows.notifier.workflow import Notifier
from relaunch.workflows.runner import TaskRunner, _TaskInstance
from relaunch.workflows.sealing import SealedRunner
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.fakes.nodes import ManualClock, Script, SimulatedBackend
from tests.invariants import assert_invariants, find_unbalanced
from tests.payloads import decrypt, read_failure
from tests.test_layering import CORE

PATIENCE = 120.0
"""Seconds until a wait gives up: the machine that runs the tests may be busy with others."""
QUERY_TIMEOUT = timedelta(seconds=20)
MAX_CACHED = int(os.environ.get("RELAUNCH_TEST_CACHED", "100"))
"""Workflows that a worker keeps. With 0 (`make long`, and always `make_uncached_rig`) it replays
the workflow from the beginning for each task, as a restarted worker does for the first one."""
QUICK = {
    "heartbeat": "200ms",
    "lease": "20s",
    "lost_after": "600ms",
    "fence_after": "500ms",
    "stop_grace": "200ms",
}


POLL_INTERVAL = 0.05
"""Seconds between looks at something in this process, which cost nothing."""
QUERY_INTERVAL = 0.5
"""Seconds between queries of a workflow that has done nothing in the meantime."""
TASKS = Counter[str]()
"""How often workers of this process have called each workflow for more than a query."""


class CountingRunner(TaskRunner):
    """Counts the tasks of each workflow: its state changes with one of them."""

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance = super(TaskRunner, self).create_instance(det)
        return _CountedInstance(instance, self, det.info.workflow_id)


class _CountedInstance(_TaskInstance):
    def __init__(self, instance: WorkflowInstance, runner: TaskRunner, workflow: str) -> None:
        super().__init__(instance, runner)
        self._workflow = workflow

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        completion = super().activate(act)
        if not all(job.HasField("query_workflow") for job in act.jobs):
            TASKS[self._workflow] += 1
        return completion


async def until_changed(workflow: str, tasks: int) -> None:
    """Wait until this workflow has done more tasks, or for `QUERY_INTERVAL`.

    A query costs the server and the worker 15 ms of a core, and most answers would be the same.
    """
    for _ in range(int(QUERY_INTERVAL / POLL_INTERVAL)):
        await asyncio.sleep(POLL_INTERVAL)
        if TASKS[workflow] != tasks:
            return


def policy(timeouts: dict[str, str] | None = None, **changes: Any) -> Policy:
    """The default policy with short timeouts.

    The lease stays long: a busy machine must not fence any node.
    """
    wanted = {**QUICK, **(timeouts or {})}
    seconds = {
        key: f"{float(value[:-2]) / 1000}s" if value.endswith("ms") else value
        for key, value in wanted.items()
    }
    return resolve({**changes, "timeouts": seconds})


def fleet(
    nodes: int,
    spares: int = 0,
    gpus: int = 0,
    repairs: str = "act",
    name: str = "default",
    **more: Any,
) -> FleetSpec:
    named = [
        {
            "name": f"n{i}",
            "address": f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}",
            "spare": i > nodes,
            "gpus": gpus,
        }
        for i in range(1, nodes + spares + 1)
    ]
    return FleetSpec.model_validate(
        {"name": name, "backend": "simulated", "repairs": repairs, "nodes": named, **more}
    )


@dataclass
class SimulatedFleets:
    known: FleetSpec
    simulated: SimulatedBackend
    wrong: str = ""
    """Why the fleet file cannot be read."""

    def reload(self, fleet: str) -> FleetSpec:
        if self.wrong:
            raise ValueError(self.wrong)
        return self.spec(fleet)

    def spec(self, fleet: str) -> FleetSpec:
        if fleet != self.known.name:
            raise KeyError(
                f"fleet {fleet!r} is not known to this worker, it serves {self.known.name}"
            )
        return self.known

    def backend(self, fleet: str) -> SimulatedBackend:
        self.spec(fleet)
        return self.simulated


@dataclass
class Job:
    handle: WorkflowHandle[Any, JobResult]
    client: Client

    async def state(self) -> JobState:
        """Query the state, and again while the server or a busy worker loses the query.

        Raises:
            AssertionError: A workflow task failed, which is a bug of the workflow.
        """
        for _ in range(5):
            try:
                return await self.handle.query(TrainingJob.state, rpc_timeout=QUERY_TIMEOUT)
            except RPCError as error:
                if error.status is RPCStatusCode.FAILED_PRECONDITION:
                    # The last attempts at its workflow task failed or timed out.
                    assert not (failures := await self.failed_tasks()), failures
                    await asyncio.sleep(1)
                elif error.status not in (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED):
                    raise
        return await self.handle.query(TrainingJob.state)

    async def until_idle(self) -> None:
        """Wait until no activity but the watch of its ranks runs, and no workflow task."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            described = (await self.handle.describe()).raw_description
            kinds = {one.activity_type.name for one in described.pending_activities}
            if not kinds - {"watch_ranks"} and not described.HasField("pending_workflow_task"):
                return
            assert asyncio.get_running_loop().time() < deadline, kinds
            await asyncio.sleep(0.05)

    async def failed_tasks(self) -> list[str]:
        """Return why workflow tasks of this run failed; those that timed out did not."""
        events = (await self.history()).events
        kind = "workflow_task_failed_event_attributes"
        failed = [
            event.workflow_task_failed_event_attributes for event in events if event.HasField(kind)
        ]
        return [read_failure(one.failure) for one in failed]

    async def until(self, holds: Callable[[JobState], bool], what: str = "") -> JobState:
        """Wait until the state is as wanted, and return it."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            tasks = TASKS[self.handle.id]
            state = await self.state()
            if holds(state):
                return state
            assert asyncio.get_running_loop().time() < deadline, (
                f"never {what or 'so'}: {state.phase} because {state.reason}; {state.incidents}"
            )
            await until_changed(self.handle.id, tasks)

    async def until_phase(self, phase: Phase, generation: int | None = None) -> JobState:
        return await self.until(
            lambda s: s.phase is phase and generation in (None, s.generation),
            f"{phase} in generation {generation}",
        )

    async def result(self) -> JobResult:
        """The result, also of a job that failed, where it rides in the failure's details.

        The accounts in it add up to the time that the job took.
        """
        try:
            result: JobResult = await asyncio.wait_for(self.handle.result(), PATIENCE)
        except WorkflowFailureError as error:
            result = failed_result(error)
        except TimeoutError:
            state = await self.state()
            raise AssertionError(
                f"it never ended: {state.phase} because {state.reason}; next {state.next}; {state}"
            ) from None
        assert find_unbalanced(result.state) == []
        return result

    async def history(self) -> WorkflowHistory:
        return await self.handle.fetch_history()

    async def runs(self) -> list[WorkflowHistory]:
        """Histories of all runs of this job, oldest first."""
        return await runs_of(self.client, self.handle.id, self.handle.first_execution_run_id)


async def runs_of(client: Client, id_: str, run_id: str | None) -> list[WorkflowHistory]:
    found = []
    while run_id:
        history = await client.get_workflow_handle(id_, run_id=run_id).fetch_history()
        found.append(history)
        run_id = history.events[
            -1
        ].workflow_execution_continued_as_new_event_attributes.new_execution_run_id
    return found


def failed_result(error: WorkflowFailureError) -> JobResult:
    assert isinstance(error.cause, ApplicationError), error.cause
    assert error.cause.type == "JobFailed", error.cause
    converter = data_converter()
    payload = converter.payload_converter.to_payloads([error.cause.details[0]])
    return converter.payload_converter.from_payloads(payload, [JobResult])[0]  # type: ignore[no-any-return]


@dataclass
class Rig:
    client: Client
    backend: SimulatedBackend
    fleets: SimulatedFleets
    queue: str
    archive: Path
    jobs: list[Job] = field(default_factory=list)
    fleet_histories: list[WorkflowHistory] = field(default_factory=list)
    """Of the fleet's and the notifier's workflows that have been ended."""

    @property
    def fleet(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(f"{FLEET_ID_PREFIX}{self.fleets.known.name}")

    @property
    def notifier(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(f"{NOTIFIER_ID_PREFIX}{self.fleets.known.name}")

    async def tell_fleet(self, signal: str, message: Any = None) -> None:
        """Send it a signal as jobs and repairs do: the first one begins it."""
        activities = FleetActivities(self.fleets, self.client, self.queue)
        await activities.tell_fleet(TellFleetInput(self.fleets.known.name, signal, message))

    async def end_jobs(self) -> None:
        """Terminate what a test left open: the next rig's fleet would ask it what it holds."""
        for job in self.jobs:
            try:
                await job.handle.terminate("the test is over")
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise

    async def end_fleet(self) -> None:
        """Terminate it and its notifier, if there are any."""
        for handle in (self.fleet, self.notifier):
            await self._end(handle)

    async def _end(self, handle: WorkflowHandle[Any, Any]) -> None:
        try:
            described = await handle.describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return
            raise
        if (
            described.task_queue != self.queue
            or described.status is not WorkflowExecutionStatus.RUNNING
        ):
            return
        await handle.terminate("the test is over")
        first = described.raw_description.workflow_execution_info.first_run_id or described.run_id
        self.fleet_histories += await runs_of(self.client, handle.id, first)

    async def submit(
        self,
        policy_: Policy | None = None,
        *,
        nodes: int | dict[str, int] = 2,
        ranks: int = 2,
        name: str | None = None,
        start: dict[str, Any] | None = None,
        **spec: Any,
    ) -> Job:
        name = name or f"job-{uuid.uuid4().hex[:8]}"
        known = self.fleets.known.name
        job_spec = JobSpec.model_validate(
            {
                "name": name,
                "command": ["train"],
                "nodes": nodes,
                "nproc_per_node": ranks,
                "fleet": known,
                **spec,
            }
        )
        handle = await self.client.start_workflow(
            TrainingJob.run,
            TrainingJobInput(
                spec=job_spec, policy=policy_ or policy(), submitted_by="ada", **(start or {})
            ),
            id=f"job/{name}",
            task_queue=self.queue,
            task_timeout=timedelta(seconds=10),
        )
        self.jobs.append(Job(handle, self.client))
        return self.jobs[-1]

    def adopt(self, handle: WorkflowHandle[Any, Any]) -> Job:
        """A job that a test has started by itself."""
        self.jobs.append(
            Job(
                self.client.get_workflow_handle(
                    handle.id,
                    first_execution_run_id=handle.first_execution_run_id,
                    result_type=JobResult,
                ),
                self.client,
            )
        )
        return self.jobs[-1]

    def launches(self) -> dict[int, list[str]]:
        """Which nodes obeyed a first start, by generation."""
        found: dict[int, list[str]] = {}
        for life in self.backend.lives:
            nodes = found.setdefault(life.token.generation, [])
            if life.kind == "started" and life.node not in nodes:
                nodes.append(life.node)
        return found

    def orders(self, command: str) -> list[tuple[str, int]]:
        return [
            (order.node, order.token.generation)
            for order in self.backend.orders
            if order.command == command
        ]


def activities(
    fleets: SimulatedFleets, client: Client, archive: Path, queue: str
) -> list[Callable[..., Any]]:
    of_fleet = FleetActivities(fleets, client, queue)
    people = PeopleActivities(fleets, client, queue, "http://ui.example.com")
    jobs, watch = (
        JobActivities(fleets, client),
        WatchActivities(fleets, client, RunningWatches(archive / "watches")),
    )
    records, logs, nodes = (
        RecordActivities(archive),
        LogActivities(fleets, archive),
        NodeActivities(fleets),
    )
    return [
        nodes.examine_nodes,
        nodes.check_nodes,
        nodes.find_foreign_processes,
        nodes.read_terms,
        nodes.order_repair,
        RepairActivities(client).follow_repair,
        AccessActivities(fleets).check_order,
        LinkActivities(fleets).check_links,
        of_fleet.read_fleet,
        of_fleet.probe_nodes,
        of_fleet.watch_fleet,
        of_fleet.read_last_state,
        of_fleet.count_free_nodes,
        of_fleet.find_jobs,
        of_fleet.find_closed_jobs,
        of_fleet.reclaim,
        of_fleet.tell_fleet,
        jobs.launch_ranks,
        jobs.stop_ranks,
        watch.watch_ranks,
        people.tell_people,
        people.deliver_notices,
        records.archive_incidents,
        logs.read_logs,
        logs.read_incidents,
    ]


def worker(
    client: Client,
    queue: str,
    fleets: SimulatedFleets,
    archive: Path,
    *,
    cached: int = MAX_CACHED,
    build: str = "",
    interceptors: Sequence[Interceptor] = (),
) -> Worker:
    """A worker of this build, or of none."""
    runner = CountingRunner()
    worker = Worker(
        client,
        task_queue=queue,
        workflows=[TrainingJob, NodeRepair, Fleet, Notifier],
        activities=activities(fleets, client, archive, queue),
        # As the real worker does; each history is replayed at the end.
        workflow_runner=runner,
        # Without the limit of 2 s for a workflow task, which a busy machine exceeds.
        debug_mode=True,
        max_cached_workflows=cached,
        deployment_config=deployment(queue, build) if build else None,
        max_heartbeat_throttle_interval=timedelta(milliseconds=100),
        graceful_shutdown_timeout=timedelta(seconds=5),
        interceptors=interceptors,
    )
    _leave_unreadable_activities(worker, client)
    return runner.attach(worker)


@asynccontextmanager
async def rig(
    client: Client,
    archive: Path,
    script: Script | None = None,
    *,
    nodes: int = 2,
    spares: int = 0,
    clock: ManualClock | None = None,
    all_ended: bool = True,
    cached: int = MAX_CACHED,
    two_controllers: bool = False,
    gpus: int = 0,
    repairs: str = "act",
    name: str = "default",
    limits: dict[str, Any] | None = None,
    notify: list[dict[str, Any]] | None = None,
    is_patched: bool = False,
    access: dict[str, Any] | None = None,
    build: str = "",
    interceptors: Sequence[Interceptor] = (),
) -> AsyncIterator[Rig]:
    more = {"limits": limits or {}, "notify": notify or [], "access": access}
    spec = fleet(nodes, spares, gpus, repairs, name, **more)
    backend = SimulatedBackend(spec, script, clock)
    fleets = SimulatedFleets(spec, backend)
    made = Rig(client, backend, fleets, f"q-{uuid.uuid4().hex[:8]}", archive)
    await end_unserved_fleet(made)
    SERVED.add(made.queue)
    try:
        more = {"cached": cached, "build": build, "interceptors": interceptors}
        async with worker(client, made.queue, fleets, archive, **more):
            try:
                yield made
            finally:
                await made.end_jobs()
                await made.end_fleet()
    finally:
        # An activity that ended with the worker may have started the fleet again.
        await made.end_fleet()
        SERVED.discard(made.queue)
    # Building a sandbox for each is a tenth of the workflow tests: `make long` does it.
    await replay(
        *made.fleet_histories,
        *[history for job in made.jobs for history in await job.runs()],
        # A sandbox imports the workflows again, without what a test has patched in them.
        is_sandboxed=MAX_CACHED == 0 and not is_patched,
    )
    if two_controllers:
        # Another controller has launched higher tokens of the job before, so that ours are older
        # ones for a while.
        backend.calls[:] = [
            call for call in backend.calls if call.command not in ("prepare", "start")
        ]
    assert_invariants(backend, all_ended=all_ended)


SERVED: set[str] = set()
"""The task queues of the rigs that are open: each has a worker."""


async def end_unserved_fleet(rig_: Rig) -> None:
    """Terminate the fleet of this name, or its notifier, that an earlier rig has left running.

    On a busy machine an activity of that rig may have started it after its end. No worker serves it
    any more, and every job would wait for it without end.
    """
    for handle in (rig_.fleet, rig_.notifier):
        try:
            described = await handle.describe()
            if (
                described.status is WorkflowExecutionStatus.RUNNING
                and described.task_queue not in SERVED
            ):
                await handle.terminate("its rig has ended")
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise


def forget_setting(history: WorkflowHistory, setting: str) -> None:
    """Take a setting that is false out of a job's policy, as if an older build had begun it."""
    begun = history.events[0].workflow_execution_started_event_attributes.input.payloads[0]
    begun.CopyFrom(decrypt(begun))
    unaware = begun.data.replace(f'"{setting}":false,'.encode(), b"")
    assert unaware != begun.data, "its policy names the setting"
    begun.data = unaware


async def replay(*histories: WorkflowHistory, is_sandboxed: bool = True) -> None:
    """Run histories through the workflows as they are now.

    Raises:
        NondeterminismError: one would have ordered something else.
    """
    # The core is pure, which tests/test_layering.py holds; types that only it names would be
    # unknown in a sandbox that imports it again. So would those of notices.
    passed = SandboxRestrictions.default.with_passthrough_modules(
        *CORE, "relaunch.messages.notices", "re2", "cryptography"
    )
    replayer = Replayer(
        workflows=[TrainingJob, NodeRepair, Fleet, Notifier],
        namespace="default",  # which orders to a fleet are signed for, so it decides by it
        workflow_runner=SandboxedWorkflowRunner(passed) if is_sandboxed else SealedRunner(),
        data_converter=data_converter(),
        debug_mode=True,  # without a limit of 2 s for a task
    )

    async def each() -> AsyncIterator[WorkflowHistory]:
        for history in histories:
            yield history

    await replayer.replay_workflows(each())


def is_claim(event: HistoryEvent) -> bool:
    """Return whether a job tells its fleet something with this event of its history."""
    return event.activity_task_scheduled_event_attributes.activity_type.name == "tell_fleet"
