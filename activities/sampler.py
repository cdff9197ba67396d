"""Samples the state of fleets, jobs and watches as gauges, in a loop beside the worker.

A workflow that set gauges itself would leave its last values on each worker that it has been on. So
each worker reads what the server knows, and what it cannot read is NaN: no alert compares with it,
and another worker's reading counts instead. Nothing is added to a history, and no decision depends
on it. docs/decisions/0052-metrics.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from pydantic import ValidationError
from temporalio.client import (
    Client,
    WorkflowExecution,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import MetricGaugeFloat, MetricMeter
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities.running_watches import RunningWatches
from relaunch.evidence.causes import Cause
from relaunch.job.measures import find_budgets_left, find_question_time
from relaunch.job.state import JobState, Phase
from relaunch.messages.ids import FLEET_ID_PREFIX, WORKFLOW_ID_PREFIX
from relaunch.pool.counts import FleetCounts
from relaunch.pool.tenants import STATES
from relaunch.repair.state import RepairState, Stage

log = logging.getLogger("relaunch.sampler")

SAMPLE_INTERVAL_S = 15.0
"""Seconds from the end of a sample to the next: that between two scrapes of deploy/prometheus."""
ANSWER_TIMEOUT = timedelta(seconds=10)
MAX_READ = 100
"""Most jobs whose state is read for one sample: a state has up to 512 KiB, and a worker that has
other work may have to replay the job for it. The rest is read for the samples after it."""
MAX_CONCURRENT = 8
"""Most workflows queried at once, as for the copies of `mirror`."""
PHASES = tuple(phase for phase in Phase if not phase.is_final)
READ_ERRORS = (RPCError, WorkflowQueryFailedError, WorkflowQueryRejectedError, ValidationError)
"""Errors that leave a value unknown, and that may not recur with the next sample."""
NAN = math.nan
NEVER = 0.0
"""As the time at which something was read, so that its age is beyond every limit."""
ASKERS = ("job", "repair")

NODES = "relaunch_nodes"
BREAKER_OPEN = "relaunch_breaker_open"
REPAIRS_PAUSED = "relaunch_repairs_paused"
WAITING_JOBS = "relaunch_waiting_jobs"
WAITING_SINCE = "relaunch_oldest_waiting_job_timestamp_seconds"
FLEET_READ = "relaunch_fleet_read_timestamp_seconds"
JOBS = "relaunch_jobs"
OPEN_INCIDENTS = "relaunch_open_incidents"
INCIDENT_SINCE = "relaunch_oldest_incident_timestamp_seconds"
BUDGET_LEFT = "relaunch_budget_left"
QUESTIONS = "relaunch_questions"
QUESTION_SINCE = "relaunch_oldest_question_timestamp_seconds"
UNREAD_JOBS = "relaunch_unread_jobs"
JOBS_READ = "relaunch_jobs_read_timestamp_seconds"
WATCHES = "relaunch_watches"
WATCH_ACKNOWLEDGED = "relaunch_watch_acknowledged_timestamp_seconds"
WARM_NODES = "relaunch_warm_nodes"
UNUSABLE_FILES = "relaunch_unusable_fleet_files"

Labels = tuple[str, ...]
Read = TypeVar("Read")


@dataclass(slots=True)
class Gauge:
    """A gauge all of whose series are set with each sample, because the SDK never forgets one."""

    gauge: MetricGaugeFloat
    names: tuple[str, ...]
    """Of its labels."""
    empty: float
    """What a series becomes that has no value any more: 0 where it counts, NaN where it measures
    something that is not there."""
    series: set[Labels] = field(default_factory=set)

    def set(self, values: Mapping[Labels, float] | None) -> None:
        """Set the values; None: nothing is known."""
        if values is None:
            values = dict.fromkeys(self.series, NAN)
        for labels in self.series - values.keys():
            self._record(labels, self.empty)
        for labels, value in values.items():
            self._record(labels, value)
        self.series |= values.keys()

    def _record(self, labels: Labels, value: float) -> None:
        self.gauge.set(value, dict(zip(self.names, labels, strict=True)))


@dataclass(frozen=True, slots=True)
class FleetReading:
    seen: Hashable
    """Its run and the length of its history."""
    counts: FleetCounts


@dataclass(frozen=True, slots=True)
class JobReading:
    seen: Hashable
    """Its run, and what it shows in lists."""
    state: JobState


@dataclass(frozen=True, slots=True)
class Question:
    fleet: str
    asker: str
    """job or repair."""
    since: datetime


class StateSampler:
    def __init__(
        self,
        client: Client,
        task_queue: str,
        fleets: Callable[[], Iterable[str]],
        running: RunningWatches,
        meter: MetricMeter,
        unusable_files: Callable[[], int],
        warm_nodes: Callable[[], Mapping[str, int]],
    ) -> None:
        """Create the sampler.

        Args:
            client: The client of the namespace that is read.
            task_queue: Workflows of other task queues are left out.
            fleets: Returns the names of the worker's fleets.
            running: The watches of this worker.
            meter: Where the gauges are made.
            unusable_files: Returns how many fleet files this worker cannot use as they are now.
            warm_nodes: Returns to how many nodes this worker has an open session, by fleet; without
                fleets whose nodes have none.
        """
        self._client = client
        self._workflows = f'TaskQueue = "{task_queue}" AND ExecutionStatus = "Running"'
        self._names = fleets
        self._running = running
        self._count_unusable_files = unusable_files
        self._count_warm_nodes = warm_nodes
        self._meter = meter.with_additional_attributes(
            {"namespace": client.namespace, "task_queue": task_queue}
        )
        self._fleets: dict[str, FleetReading] = {}
        self._read_at: dict[str, float] = {}
        """When each fleet was last read, in seconds since the epoch."""
        self._jobs_read_at = NEVER
        self._jobs: dict[str, JobReading] = {}
        """Of the jobs in trouble, by workflow id."""
        self._failing: dict[str, str] = {}
        make = self._make
        self._nodes = make(NODES, "Nodes by state.", "fleet", "state")
        self._breaker_open = make(BREAKER_OPEN, "1: the breaker is open.", "fleet")
        self._repairs_paused = make(REPAIRS_PAUSED, "1: a person has paused repairs.", "fleet")
        self._waiting_jobs = make(WAITING_JOBS, "Jobs that wait for nodes.", "fleet")
        self._waiting_since = make(WAITING_SINCE, "Since when the first of them waits.", "fleet")
        self._fleet_read = make(FLEET_READ, "When the fleet was last read.", "fleet")
        self._by_phase = make(JOBS, "Running jobs by phase.", "phase")
        self._open_incidents = make(OPEN_INCIDENTS, "Open incidents.", "fleet", "cause", empty=0)
        self._incident_since = make(INCIDENT_SINCE, "When the oldest of them began.", "fleet")
        self._budget_left = make(
            BUDGET_LEFT, "The least that a job with an open incident has left.", "fleet", "budget"
        )
        self._questions = make(
            QUESTIONS, "Questions that wait for a person.", "fleet", "asker", empty=0
        )
        self._question_since = make(
            QUESTION_SINCE, "Since when the oldest of them waits.", "fleet", "asker"
        )
        self._unread_jobs = make(UNREAD_JOBS, "Jobs in trouble whose state is not known.")
        self._jobs_read = make(JOBS_READ, "When the jobs were last read.")
        self._watches = make(WATCHES, "Watches of this worker.", "fleet", empty=0)
        self._watch_acknowledged = make(
            WATCH_ACKNOWLEDGED,
            "When the server last acknowledged a heartbeat of the watch that waits longest for it.",
            "fleet",
        )
        self._warm_nodes = make(
            WARM_NODES, "Nodes to which this worker has an open session.", "fleet", empty=0
        )
        self._unusable_files = make(
            UNUSABLE_FILES, "Fleet files that this worker cannot use as they are now."
        )

    def _make(self, name: str, description: str, *labels: str, empty: float = NAN) -> Gauge:
        return Gauge(self._meter.create_gauge_float(name, description), labels, empty)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def sample(self) -> None:
        """Set every gauge once."""
        self._sample_watches()
        self._unusable_files.set({(): self._count_unusable_files()})
        self._warm_nodes.set({(fleet,): count for fleet, count in self._count_warm_nodes().items()})
        await asyncio.gather(self._sample_fleets(), self._sample_jobs())

    async def _try(self, what: str, reading: Coroutine[object, object, Read]) -> Read | None:
        """Return what was read, or None after a warning: the first of several that are equal."""
        try:
            read = await reading
        except READ_ERRORS as error:
            failure = f"{type(error).__name__}: {error}"
            if self._failing.get(what) != failure:
                log.warning("%s cannot be read, its metrics are NaN until then: %s", what, failure)
            self._failing[what] = failure
            return None
        self._failing.pop(what, None)
        return read

    def _sample_watches(self) -> None:
        lags, now = self._running.list_lags(), time.time()
        self._watches.set({(fleet,): len(lags.get(fleet, ())) for fleet in {*self._names(), *lags}})
        self._watch_acknowledged.set({(fleet,): now - max(each) for fleet, each in lags.items()})

    # --- fleets

    async def _sample_fleets(self) -> None:
        names = sorted(self._names())
        read = await asyncio.gather(
            *(self._try(f"fleet {name}", self._read_fleet(name)) for name in names)
        )
        fleets = dict(zip(names, read, strict=True))

        def by_fleet(find: Callable[[FleetCounts], float]) -> dict[Labels, float]:
            return {(name,): NAN if one is None else find(one) for name, one in fleets.items()}

        self._nodes.set(
            {
                (name, state): NAN if one is None else one.nodes.get(state, NAN)
                for name, one in fleets.items()
                for state in STATES
            }
        )
        self._breaker_open.set(by_fleet(lambda one: float(one.breaker_open)))
        self._repairs_paused.set(by_fleet(lambda one: float(one.repairs_paused)))
        self._waiting_jobs.set(by_fleet(lambda one: one.waiting_jobs))
        self._waiting_since.set(by_fleet(lambda one: _stamp(one.waiting_since)))
        self._fleet_read.set({(name,): self._read_at.get(name, NEVER) for name in names})

    async def _read_fleet(self, name: str) -> FleetCounts | None:
        """Ask a fleet if its history has grown; return None if it does not run.

        A fleet begins with the first job, or when its file is applied.
        """
        id = f"{FLEET_ID_PREFIX}{name}"
        counts = None
        if (seen := await self._look(id)) is not None:
            known = self._fleets.get(name)
            if known is None or known.seen != seen:
                counts = await self._client.get_workflow_handle(id, run_id=seen[0]).query(
                    "counts", result_type=FleetCounts, rpc_timeout=ANSWER_TIMEOUT
                )
                known = self._fleets[name] = FleetReading(seen, counts)
            counts = known.counts
        self._read_at[name] = time.time()
        return counts

    async def _look(self, id: str) -> tuple[str | None, int] | None:
        """Return the run of a workflow and the length of its history; None if it does not run."""
        try:
            found = await self._client.get_workflow_handle(id).describe(rpc_timeout=ANSWER_TIMEOUT)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        if found.status is not WorkflowExecutionStatus.RUNNING:
            return None
        return found.run_id, found.raw_description.workflow_execution_info.history_length

    # --- jobs and repairs

    async def _sample_jobs(self) -> None:
        phases = await self._try("the phases of jobs", self._count_phases())
        jobs = await self._try("jobs", self._read_jobs())
        repairs = await self._try("repairs", self._read_repairs())
        is_read = phases is not None and jobs is not None and repairs is not None
        self._by_phase.set(phases)
        self._show_incidents(jobs)
        asked = None if jobs is None or repairs is None else [*_list_questions(jobs), *repairs]
        self._show_questions(asked)
        if is_read:
            self._jobs_read_at = time.time()
        self._jobs_read.set({(): self._jobs_read_at})

    async def _count_phases(self) -> dict[Labels, float]:
        jobs = f"{self._workflows} AND WorkflowType = 'TrainingJob'"
        counts = await asyncio.gather(
            *(
                self._client.count_workflows(
                    f"{jobs} AND Phase = '{phase}'", rpc_timeout=ANSWER_TIMEOUT
                )
                for phase in PHASES
            )
        )
        return {(str(phase),): one.count for phase, one in zip(PHASES, counts, strict=True)}

    async def _read_jobs(self) -> list[JobState]:
        """Return the states of the jobs that have an open incident or ask a person.

        A job is asked again once it shows something else in lists, as it does with each decision.
        """
        trouble = "(Cause IS NOT NULL OR Phase = 'WAITING_FOR_PERSON')"
        query = f"{self._workflows} AND WorkflowType = 'TrainingJob' AND {trouble}"
        listed: dict[str, tuple[WorkflowExecution, Hashable]] = {}
        async for run in self._client.list_workflows(query, rpc_timeout=ANSWER_TIMEOUT):
            memo = sorted((name, str(value)) for name, value in (await run.memo()).items())
            listed[run.id] = run, (run.run_id, tuple(memo))
        self._jobs = {id: known for id, known in self._jobs.items() if id in listed}
        self._failing = {
            what: failure
            for what, failure in self._failing.items()
            if what in listed or not what.startswith(WORKFLOW_ID_PREFIX)
        }
        outdated = [
            (run, seen)
            for id, (run, seen) in listed.items()
            if id not in self._jobs or self._jobs[id].seen != seen
        ]
        outdated.sort(key=lambda one: one[0].id in self._failing)  # they must not delay the others
        gate = asyncio.Semaphore(MAX_CONCURRENT)

        async def read(run: WorkflowExecution, seen: Hashable) -> None:
            async with gate:
                state = await self._try(run.id, self._query_job(run))
            if state is None:
                self._jobs.pop(run.id, None)
            else:
                self._jobs[run.id] = JobReading(seen, state)

        await asyncio.gather(*(read(*one) for one in outdated[:MAX_READ]))
        late = [run.id for run, _ in outdated[MAX_READ:]]
        self._jobs = {id: known for id, known in self._jobs.items() if id not in late}
        self._unread_jobs.set({(): len(listed) - len(self._jobs)})
        return [one.state for one in self._jobs.values()]

    async def _query_job(self, run: WorkflowExecution) -> JobState:
        handle = self._client.get_workflow_handle(run.id, run_id=run.run_id)
        state: JobState = await handle.query(
            "state", result_type=JobState, rpc_timeout=ANSWER_TIMEOUT
        )
        return state

    async def _read_repairs(self) -> list[Question]:
        """Return the questions of the repairs that run: a fleet limits how many do."""
        query = f"{self._workflows} AND WorkflowType = 'NodeRepair'"
        asked = []
        async for run in self._client.list_workflows(
            query, limit=MAX_READ, rpc_timeout=ANSWER_TIMEOUT
        ):
            handle = self._client.get_workflow_handle(run.id, run_id=run.run_id)
            repair: RepairState | None = await handle.query(
                "state", result_type=RepairState, rpc_timeout=ANSWER_TIMEOUT
            )
            if repair is not None and (since := _find_repair_question_time(repair)) is not None:
                asked.append(Question(repair.fleet, "repair", since))
        return asked

    def _show_incidents(self, jobs: list[JobState] | None) -> None:
        if jobs is None:
            for gauge in (self._open_incidents, self._incident_since, self._budget_left):
                gauge.set(None)
            self._unread_jobs.set(None)
            return
        counted: Counter[Labels] = Counter()
        # Every cause has a value, so that 0 and unknown can be told apart.
        counted.update(dict.fromkeys(((f, c) for f in self._names() for c in Cause), 0))
        since: dict[Labels, float] = {}
        budgets: dict[Labels, float] = {}
        now = datetime.now(UTC)
        for job in jobs:
            if job.incident is None:
                continue
            fleet = job.spec.fleet
            counted[fleet, job.incident.cause.value] += 1
            _keep_least(since, (fleet,), job.incident.opened.timestamp())
            for budget, left in find_budgets_left(job, now).items():
                _keep_least(budgets, (fleet, budget.value), left)
        self._open_incidents.set(counted)
        self._incident_since.set(since)
        self._budget_left.set(budgets)

    def _show_questions(self, asked: list[Question] | None) -> None:
        if asked is None:
            self._questions.set(None)
            self._question_since.set(None)
            return
        counted: Counter[Labels] = Counter()
        counted.update(dict.fromkeys(((f, a) for f in self._names() for a in ASKERS), 0))
        since: dict[Labels, float] = {}
        for one in asked:
            counted[one.fleet, one.asker] += 1
            _keep_least(since, (one.fleet, one.asker), one.since.timestamp())
        self._questions.set(counted)
        self._question_since.set(since)


def _keep_least(values: dict[Labels, float], labels: Labels, value: float) -> None:
    values[labels] = min(value, values.get(labels, value))


def _stamp(at: datetime | None) -> float:
    return NAN if at is None else at.timestamp()


def _list_questions(jobs: Iterable[JobState]) -> list[Question]:
    asked = ((job.spec.fleet, find_question_time(job)) for job in jobs)
    return [Question(fleet, "job", since) for fleet, since in asked if since is not None]


def _find_repair_question_time(repair: RepairState) -> datetime | None:
    """Return since when a repair waits for a person's approval; None if it does not."""
    if repair.stage is not Stage.ASKING or repair.outcome is not None:
        return None
    asked = (one.at for one in reversed(repair.log) if one.what == "Asked")
    return next(asked, repair.started_at)
