"""Who is shown to the copy, how often and of what age, over a scripted server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities.mirror import MAX_ENDED_AGE, MAX_EVENTS, MirrorLoop
from relaunch.backends.base import Unreachable
from relaunch.job.state import JobState, Phase
from relaunch.messages.jobs import JobResult
from relaunch.pool.state import FleetState
from tests.activities.harness import eventually
from tests.recovery.builders import new_job

RUNNING, COMPLETED = WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.COMPLETED
TERMINATED, CONTINUED = WorkflowExecutionStatus.TERMINATED, WorkflowExecutionStatus.CONTINUED_AS_NEW
LLAMA = replace(new_job(), phase=Phase.RUNNING, generation=1)
DONE = replace(LLAMA, phase=Phase.SUCCEEDED, exit_code=0)


@dataclass
class Info:
    history_length: int

    @property
    def workflow_execution_info(self) -> Info:
        return self


@dataclass
class Run:
    id: str
    state: JobState | FleetState | Exception
    status: WorkflowExecutionStatus = RUNNING
    started: float = 1000.0
    length: int = 10
    said: dict[str, Any] = field(default_factory=lambda: {"fleet": "gpus", "phase": "RUNNING"})
    run_id: str = "run-1"
    history_length: int = 0
    """In a list: a server says it only of runs that have ended."""

    @property
    def start_time(self) -> datetime:
        return datetime.fromtimestamp(self.started, UTC)

    @property
    def raw_description(self) -> Info:
        return Info(self.length)

    async def memo(self) -> dict[str, Any]:
        return self.said


@dataclass
class FakeClient:
    runs: list[Run]
    queries: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Whose state, how."""
    broken: bool = False

    async def list_workflows(self, query: str) -> AsyncIterator[Run]:
        self.queries.append(query)
        if self.broken:
            raise RPCError("the server is away", RPCStatusCode.UNAVAILABLE, b"")
        for run in self.runs:
            if run.id.startswith("job/"):
                yield run

    def get_workflow_handle(
        self, id_: str, *, run_id: str | None = None, result_type: Any = None
    ) -> Handle:
        return Handle(self, id_, run_id)


@dataclass
class Handle:
    client: FakeClient
    id: str
    run_id: str | None

    async def describe(self, rpc_timeout: timedelta) -> Run:
        found = [
            run
            for run in self.client.runs
            if run.id == self.id and self.run_id in (None, run.run_id)
        ]
        if not found:
            raise RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")
        return found[-1]

    async def query(self, name: str, result_type: Any, rpc_timeout: timedelta) -> Any:
        assert name == "state"
        self.client.asked.append(f"query {self.id}")
        state = (await self.describe(rpc_timeout)).state
        if isinstance(state, Exception):
            raise state
        return state

    async def result(self, follow_runs: bool, rpc_timeout: timedelta) -> JobResult:
        assert not follow_runs, "the result of this run, not of the next submission"
        self.client.asked.append(f"result {self.id}")
        state = (await self.describe(rpc_timeout)).state
        assert isinstance(state, JobState)
        return JobResult(state.name, state.phase, 0, "", state.generation, (), 0, state)


@dataclass
class Copy:
    shown: list[tuple[str, int, bool]] = field(default_factory=list)
    """Phase or fleet, age, whether it was terminated."""
    fails: int = 0
    settled: bool = True
    at_once: int = 0
    most: int = 0
    wants_jobs: bool = True

    async def job(self, state: JobState, seq: int, terminated: bool) -> bool:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.fails:
            self.fails -= 1
            raise Unreachable("gpus", "the tables were not written: throttled")
        self.shown.append((str(state.phase), seq, terminated))
        return self.settled

    async def nodes(self, state: FleetState, seq: int) -> None:
        self.shown.append((state.name, seq, False))


def loop(*runs: Run, every: float = 5.0) -> tuple[MirrorLoop, FakeClient, Copy]:
    client, copy = FakeClient(list(runs)), Copy()
    return MirrorLoop(cast(Client, client), {"gpus": copy}, every), client, copy


def age(started: float, length: int) -> int:
    return int(started * 1000) * MAX_EVENTS + length


async def test_a_job_is_asked_only_after_a_change_since_it_was_shown() -> None:
    run = Run("job/llama", LLAMA)
    looking, client, copy = loop(run)
    for _ in range(3):
        await looking.copy_changes()
    assert (copy.shown, client.asked) == ([("RUNNING", age(1000, 10), False)], ["query job/llama"])
    run.said, run.length, run.state = (
        {**run.said, "phase": "EXAMINING"},
        14,
        replace(LLAMA, phase=Phase.EXAMINING),
    )
    await looking.copy_changes()
    assert copy.shown[1:] == [("EXAMINING", age(1000, 14), False)]


async def test_ages_of_states_rise_across_runs_and_submissions() -> None:
    run = Run("job/llama", LLAMA, length=51_000)
    looking, client, copy = loop(run)
    await looking.copy_changes()
    run.status = CONTINUED
    client.runs.append(Run("job/llama", LLAMA, started=1000.001, length=3, run_id="run-2"))
    await looking.copy_changes()
    assert [seq for _, seq, _ in copy.shown] == sorted({seq for _, seq, _ in copy.shown}) and len(
        copy.shown
    ) == 2


async def test_jobs_of_other_or_still_unknown_fleets_are_not_asked() -> None:
    looking, client, copy = loop(
        Run("job/a", LLAMA, said={"fleet": "cpus"}), Run("job/b", LLAMA, said={"phase": "QUEUED"})
    )
    await looking.copy_changes()
    assert (copy.shown, client.asked) == ([], [])
    client.runs[1].said = {"phase": "RUNNING", "fleet": "gpus"}
    await looking.copy_changes()
    assert client.asked == ["query job/b"]


async def test_of_a_job_only_the_newest_submission_is_shown() -> None:
    old = Run("job/llama", DONE, COMPLETED, started=500.0, run_id="run-0")
    looking, _, copy = loop(Run("job/llama", LLAMA), old)
    await looking.copy_changes()
    assert copy.shown == [("RUNNING", age(1000, 10), False)]


async def test_an_ended_job_is_shown_from_its_result_without_a_worker() -> None:
    looking, client, copy = loop(Run("job/llama", DONE, COMPLETED, length=90))
    await looking.copy_changes()
    await looking.copy_changes()
    assert (copy.shown, client.asked) == (
        [("SUCCEEDED", age(1000, 90), False)],
        ["result job/llama"],
    )


async def test_a_terminated_job_is_shown_so_until_its_tasks_have_ended() -> None:
    looking, _, copy = loop(Run("job/llama", LLAMA, TERMINATED))
    copy.settled = False
    await looking.copy_changes()
    copy.settled = True
    await looking.copy_changes()
    await looking.copy_changes()
    assert copy.shown == [("RUNNING", age(1000, 10), True)] * 2


async def test_a_failed_write_is_repeated_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looking, _, copy = loop(Run("job/llama", LLAMA))
    copy.fails = 2
    with caplog.at_level(logging.WARNING, "relaunch.mirror"):
        for _ in range(4):
            await looking.copy_changes()
    assert [phase for phase, _, _ in copy.shown] == ["RUNNING"]
    (record,) = caplog.records
    assert record.getMessage().startswith("job/llama: ")
    assert " Unreachable: " in record.getMessage()


async def test_a_job_that_cannot_be_asked_hides_no_other() -> None:
    looking, client, copy = loop(
        Run("job/a", WorkflowQueryFailedError("no worker")), Run("job/b", LLAMA)
    )
    await looking.copy_changes()
    assert len(copy.shown) == 1
    client.runs[0].state = LLAMA
    await looking.copy_changes()
    assert len(copy.shown) == 2


async def test_a_server_that_is_away_is_asked_again() -> None:
    looking, client, copy = loop(Run("job/llama", LLAMA))
    client.broken = True
    await looking.copy_changes()
    client.broken = False
    await looking.copy_changes()
    assert len(copy.shown) == 1


async def test_a_fleet_is_asked_only_after_a_change_and_may_be_absent() -> None:
    run = Run("fleet/gpus", FleetState("gpus"), started=900.0, length=5)
    looking, client, copy = loop()
    await looking.copy_changes()
    client.runs.append(run)
    for _ in range(2):
        await looking.copy_changes()
    run.length = 8
    await looking.copy_changes()
    assert copy.shown == [("gpus", age(900, 5), False), ("gpus", age(900, 8), False)]


async def test_the_server_is_asked_for_running_and_lately_ended_jobs() -> None:
    looking, client, _ = loop()
    before = datetime.now(UTC)
    await looking.copy_changes()
    (query,) = client.queries
    head, _, since = query.rpartition("CloseTime > ")
    assert head == "WorkflowType = 'TrainingJob' AND (ExecutionStatus = 'Running' OR "
    told = datetime.fromisoformat(since.strip("')").replace("Z", "+00:00"))
    assert abs((before - told - MAX_ENDED_AGE).total_seconds()) < 60


async def test_many_jobs_are_asked_a_few_at_a_time_in_rounds() -> None:
    looking, client, copy = loop(
        *(Run(f"job/j{number}", LLAMA) for number in range(40)), every=0.001
    )
    going = asyncio.create_task(looking.run())
    await eventually(lambda: len(client.queries) > 2, "three rounds")
    going.cancel()
    assert len(copy.shown) == 40
    assert 1 < copy.most <= 8
