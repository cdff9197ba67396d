"""What the sampler asks for, and what it shows when a server, a fleet or a job does not answer."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.common import MetricMeter
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities import sampler
from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.sampler import MAX_READ, NEVER, StateSampler
from relaunch.job.state import JobState, Phase
from relaunch.pool.counts import FleetCounts
from relaunch.repair.state import LogEntry, RepairRules, RepairState, Stage
from relaunch.spec.policy import Strategy
from tests.recovery.builders import T0, at, raised, rungs, running, step

AWAY = RPCError("the server is away", RPCStatusCode.UNAVAILABLE, b"")
COUNTS = FleetCounts({"free": 3, "busy": 1}, breaker_open=True, waiting_jobs=2, waiting_since=T0)


def asking(name: str) -> JobState:
    job = running(policy=rungs({"strategy": "ASK"}))
    job, _ = step(job, raised()(job), at(7))
    return replace(job, name=name, spec=job.spec.model_copy(update={"fleet": "gpus"}))


def repair(stage: Stage) -> RepairState:
    rules = RepairRules("ask", 1, 8, timedelta(0), timedelta(hours=1))
    log = (LogEntry(at(5), "Asked", "reset GPU 5?"),)
    return RepairState(
        *("repair/gpus/n1", "gpus", "n1", Strategy.RESET_GPU, (), "Xid 79", "ada", rules, T0),
        deadline=at(9000),
        stage=stage,
        log=log,
    )


@dataclass
class Run:
    id: str
    state: Any
    length: int = 10
    reason: str = "asks"
    run_id: str = "r1"
    status: WorkflowExecutionStatus = WorkflowExecutionStatus.RUNNING

    @property
    def raw_description(self) -> Any:
        return SimpleNamespace(workflow_execution_info=SimpleNamespace(history_length=self.length))

    async def memo(self) -> Mapping[str, Any]:
        return {"reason": self.reason}


@dataclass
class Server:
    """Answers as a client does; `broken` holds what it does not answer: describe, list, count."""

    runs: dict[str, Run] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    namespace: str = "default"

    def add(self, *runs: Run) -> None:
        self.runs |= {run.id: run for run in runs}

    def get_workflow_handle(self, id: str, *, run_id: str | None = None) -> Any:
        server = self

        class Handle:
            async def describe(self, rpc_timeout: timedelta) -> Run:
                if "describe" in server.broken:
                    raise AWAY
                if id not in server.runs:
                    raise RPCError("not found", RPCStatusCode.NOT_FOUND, b"")
                return server.runs[id]

            async def query(self, name: str, result_type: Any, rpc_timeout: timedelta) -> Any:
                server.asked.append(f"{name} {id}")
                state = server.runs[id].state
                if isinstance(state, Exception):
                    raise state
                return state

        return Handle()

    async def list_workflows(
        self, query: str, *, limit: int | None = None, rpc_timeout: timedelta
    ) -> AsyncIterator[Run]:
        if "list" in self.broken:
            raise AWAY
        prefix = "job/" if "'TrainingJob'" in query else "repair/"
        for id, run in self.runs.items():
            if id.startswith(prefix):
                yield run

    async def count_workflows(self, query: str, *, rpc_timeout: timedelta) -> Any:
        if "count" in self.broken:
            raise AWAY
        waits = f"Phase = '{Phase.WAITING_FOR_PERSON}'" in query
        return SimpleNamespace(count=len([i for i in self.runs if i.startswith("job/")]) * waits)


class Shown:
    """A meter that keeps the last value of each series, by the values of its labels."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], float]] = {}

    def with_additional_attributes(self, attributes: Mapping[str, Any]) -> Shown:
        return self

    def create_gauge_float(self, name: str, description: str) -> Any:
        series = self.values.setdefault(name, {})

        class Gauge:
            def set(self, value: float, attributes: Mapping[str, str]) -> None:
                series[tuple(attributes.values())] = value

        return Gauge()


@dataclass
class Scene:
    server: Server
    shown: Shown
    samples: StateSampler
    running: RunningWatches
    unusable: list[str]
    """Fleet files."""
    warm: dict[str, int]
    """Nodes with a session, by fleet."""

    def value(self, name: str, *labels: str) -> float | None:
        """Return the value of a series; None: it is unknown."""
        found = self.shown.values[name][labels]
        return None if math.isnan(found) else found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    server, shown, watches = Server(), Shown(), RunningWatches(tmp_path)
    unusable: list[str] = []
    warm: dict[str, int] = {}
    samples = StateSampler(
        cast(Client, server),
        "relaunch",
        lambda: ["gpus"],
        watches,
        cast(MetricMeter, shown),
        lambda: len(unusable),
        lambda: warm,
    )
    return Scene(server, shown, samples, watches, unusable, warm)


async def test_unusable_fleet_files_are_counted_while_they_are(scene: Scene) -> None:
    for files in ([], ["gpus.yaml"], []):
        scene.unusable[:] = files
        await scene.samples.sample()
        assert scene.value(sampler.UNUSABLE_FILES) == len(files)


async def test_nodes_with_a_session_are_counted_by_fleet(scene: Scene) -> None:
    for warm in ({"gpus": 3}, {"gpus": 0, "lab": 2}, {"lab": 1}):
        scene.warm.clear()
        scene.warm.update(warm)
        await scene.samples.sample()
        shown = {fleet: scene.value(sampler.WARM_NODES, fleet) for fleet in ("gpus", *warm)}
        assert shown == {"gpus": 0, **warm}


async def test_a_fleet_is_asked_again_once_its_history_has_grown(scene: Scene) -> None:
    fleet = Run("fleet/gpus", COUNTS)
    scene.server.add(fleet)
    for length in (10, 10, 11, 11):
        fleet.length = length
        await scene.samples.sample()
    assert scene.server.asked == ["counts fleet/gpus"] * 2
    assert scene.value(sampler.NODES, "gpus", "free") == 3
    assert scene.value(sampler.NODES, "gpus", "silent") is None, "it counted no such state"
    assert scene.value(sampler.BREAKER_OPEN, "gpus") == 1
    assert scene.value(sampler.WAITING_JOBS, "gpus") == 2
    assert scene.value(sampler.WAITING_SINCE, "gpus") == T0.timestamp()


async def test_what_cannot_be_read_is_unknown_and_warned_of_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.server.add(Run("fleet/gpus", COUNTS), Run("job/a", asking("a")))
    await scene.samples.sample()
    fleet_read = scene.value(sampler.FLEET_READ, "gpus")
    jobs_read = scene.value(sampler.JOBS_READ)
    assert scene.value(sampler.JOBS, "WAITING_FOR_PERSON") == 1
    scene.server.broken |= {"describe", "list", "count"}
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        await scene.samples.sample()
    assert [record.message.split(" cannot")[0] for record in caplog.records] == [
        "fleet gpus",
        "the phases of jobs",
        "jobs",
        "repairs",
    ]
    for name, labels in (
        (sampler.NODES, ("gpus", "free")),
        (sampler.BREAKER_OPEN, ("gpus",)),
        (sampler.JOBS, ("WAITING_FOR_PERSON",)),
        (sampler.OPEN_INCIDENTS, ("gpus", "APPLICATION")),
        (sampler.OPEN_INCIDENTS, ("gpus", "HANG")),
        (sampler.QUESTIONS, ("gpus", "job")),
        (sampler.QUESTION_SINCE, ("gpus", "job")),
        (sampler.BUDGET_LEFT, ("gpus", "restarts")),
        (sampler.UNREAD_JOBS, ()),
    ):
        assert scene.value(name, *labels) is None, name
    assert scene.value(sampler.FLEET_READ, "gpus") == fleet_read
    assert scene.value(sampler.JOBS_READ) == jobs_read
    scene.server.broken.clear()
    await scene.samples.sample()
    assert scene.value(sampler.NODES, "gpus", "free") == 3
    assert scene.value(sampler.QUESTIONS, "gpus", "job") == 1


async def test_what_was_never_read_is_older_than_every_limit(scene: Scene) -> None:
    scene.server.broken |= {"describe", "list", "count"}
    await scene.samples.sample()
    assert scene.value(sampler.FLEET_READ, "gpus") == NEVER
    assert scene.value(sampler.JOBS_READ) == NEVER


async def test_a_fleet_that_has_ended_is_unknown(scene: Scene) -> None:
    fleet = Run("fleet/gpus", COUNTS)
    scene.server.add(fleet)
    await scene.samples.sample()
    fleet.status = WorkflowExecutionStatus.TERMINATED
    await scene.samples.sample()
    assert scene.value(sampler.NODES, "gpus", "free") is None
    assert scene.value(sampler.BREAKER_OPEN, "gpus") is None


async def test_a_job_is_asked_again_once_it_shows_something_else(scene: Scene) -> None:
    job = Run("job/a", asking("a"))
    scene.server.add(job)
    for reason in ("asks", "asks", "asks again"):
        job.reason = reason
        await scene.samples.sample()
    assert scene.server.asked == ["state job/a"] * 2
    assert scene.value(sampler.QUESTION_SINCE, "gpus", "job") == at(7).timestamp()
    del scene.server.runs["job/a"]
    await scene.samples.sample()
    assert scene.value(sampler.QUESTIONS, "gpus", "job") == 0
    assert scene.value(sampler.OPEN_INCIDENTS, "gpus", "APPLICATION") == 0
    assert scene.value(sampler.QUESTION_SINCE, "gpus", "job") is None
    assert scene.value(sampler.BUDGET_LEFT, "gpus", "restarts") is None


async def test_a_job_that_does_not_answer_delays_no_other(scene: Scene) -> None:
    scene.server.add(
        Run("job/a", WorkflowQueryFailedError("its workflow task fails")),
        *(Run(f"job/b{number}", asking("b")) for number in range(MAX_READ)),
    )
    await scene.samples.sample()
    assert scene.value(sampler.UNREAD_JOBS) == 2, "the failing one, and one too many for a sample"
    await scene.samples.sample()
    assert scene.value(sampler.UNREAD_JOBS) == 1
    assert scene.value(sampler.QUESTIONS, "gpus", "job") == MAX_READ


async def test_repairs_that_ask_are_counted(scene: Scene) -> None:
    asks, acts = repair(Stage.ASKING), repair(Stage.ORDERING)
    scene.server.add(
        Run("repair/gpus/n1", asks), Run("repair/gpus/n2", acts), Run("repair/gpus/n3", None)
    )
    await scene.samples.sample()
    assert scene.value(sampler.QUESTIONS, "gpus", "repair") == 1
    assert scene.value(sampler.QUESTION_SINCE, "gpus", "repair") == at(5).timestamp()
    scene.server.add(Run("repair/gpus/n1", replace(asks, outcome="refused")))
    await scene.samples.sample()
    assert scene.value(sampler.QUESTIONS, "gpus", "repair") == 0


async def test_the_watch_that_waits_longest_is_shown(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("relaunch.activities.running_watches.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("relaunch.activities.sampler.time.time", lambda: 1000.0 + clock.now)
    with scene.running.record(b"one", "gpus"):
        with scene.running.record(b"two", "gpus"):
            clock.now = 130.0
            scene.running.acknowledge(b"one")
            await scene.samples.sample()
            assert scene.value(sampler.WATCHES, "gpus") == 2
            assert scene.value(sampler.WATCH_ACKNOWLEDGED, "gpus") == 1100.0
        await scene.samples.sample()
        assert scene.value(sampler.WATCH_ACKNOWLEDGED, "gpus") == 1130.0
    await scene.samples.sample()
    assert scene.value(sampler.WATCHES, "gpus") == 0
    assert scene.value(sampler.WATCH_ACKNOWLEDGED, "gpus") is None
