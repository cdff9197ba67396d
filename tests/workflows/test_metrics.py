"""What a worker's meters show of real workflows, and that replaying them shows nothing."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from temporalio.client import Client
from temporalio.runtime import (
    BUFFERED_METRIC_KIND_COUNTER,
    MetricBuffer,
    Runtime,
    TelemetryConfig,
)
from temporalio.worker import Replayer

from relaunch.activities import sampler
from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.sampler import StateSampler
from relaunch.job.accounts import Account, Ledger
from relaunch.job.state import Incident, JobState, Phase
from relaunch.job.trace import ClosedIncident
from relaunch.temporal import data_converter
from relaunch.workflows.runner import TaskRunner
from relaunch.workflows.training_job import metrics, traces
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.fakes.nodes import Exit, Script
from tests.recovery.builders import new_job
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy, rig

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASK = {"APPLICATION": [{"strategy": "ASK"}], "UNKNOWN": [{"strategy": "ASK"}]}
Series = dict[tuple[str, ...], float]


class Meters:
    """A runtime whose metrics are kept as they come."""

    def __init__(self) -> None:
        self._buffer = MetricBuffer(100_000)
        self.runtime = Runtime(telemetry=TelemetryConfig(metrics=self._buffer, logging=None))
        self._values: dict[str, Series] = {}
        self.counts: dict[str, int] = {}
        """How often each metric was recorded."""

    def read(self, name: str, *labels: str) -> Series:
        """Return the series of a metric: what was added or set last, by the values of labels."""
        for update in self._buffer.retrieve_updates():
            metric = update.metric.name
            series = self._values.setdefault(metric, {})
            self.counts[metric] = self.counts.get(metric, 0) + 1
            key = tuple(f"{k}={v}" for k, v in sorted(update.attributes.items()))
            is_sum = update.metric.kind == BUFFERED_METRIC_KIND_COUNTER
            series[key] = update.value + (series.get(key, 0) if is_sum else 0)
        return {
            tuple(dict(one.split("=", 1) for one in key)[label] for label in labels): value
            for key, value in self._values.get(name, {}).items()
        }


@pytest.fixture
def meters() -> Meters:
    return Meters()


def drop_times(value: Any) -> Any:
    """Return a JSON value in which each time and each span is the same."""
    if isinstance(value, dict):
        return {key: drop_times(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [drop_times(one) for one in value]
    return None if isinstance(value, datetime | timedelta) else value


async def test_an_incident_is_counted_once_and_not_again_on_replay(
    server: Client, tmp_path: Path, meters: Meters, request: pytest.FixtureRequest
) -> None:
    config = server.service_client.config
    client = await Client.connect(
        config.target_host, data_converter=data_converter(), runtime=meters.runtime
    )
    script = Script((Exit(generation=1, rank=0, exit_code=3),), then="succeed")
    handed_over: list[ClosedIncident] = []
    traces.set_sink(handed_over.append)
    request.addfinalizer(lambda: traces.set_sink(None))
    # Nothing is kept in a cache: each workflow task replays all that came before it, and so does
    # each query, which may come before the task of what it replays.
    async with rig(client, tmp_path, script, cached=0) as made:
        job = await made.submit()
        ending = asyncio.create_task(job.result())
        while not ending.done():
            await job.state()
        (incident,) = ending.result().incidents
        cause = incident.cause.value
        assert meters.read(metrics.FAULTS, "fleet", "cause") == {("default", cause): 1}
        assert meters.read(metrics.INCIDENTS, "cause", "strategy", "outcome") == {
            (cause, "RESTART_IN_PLACE", "recovered"): 1
        }
        assert meters.read(metrics.ENDED_JOBS, "fleet", "phase") == {("default", "SUCCEEDED"): 1}
        stages = meters.read(metrics.STAGE_SECONDS, "stage")
        assert set(stages) == {("detect",), ("decide",), ("relaunch",), ("regain",)}
        assert sum(stages.values()) == pytest.approx(meters.read(metrics.INCIDENT_SECONDS)[()])
        assert [meters.counts[name] for name in (metrics.INCIDENTS, metrics.STAGE_SECONDS)] == [
            1,
            4,
        ]
        seconds = meters.read(metrics.JOB_SECONDS, "fleet", "account")
        totals = ending.result().state.ledger.totals
        # A task that is repeated, or comes after a query, is later than what was counted.
        for account, span in totals.items():
            assert 0 <= seconds.get(("default", account.value), 0) <= span.total_seconds() + 1e-3
        assert seconds.keys() <= {("default", one.value) for one in totals}
        history = await job.handle.fetch_history()
    before = dict(meters.counts)
    traces._handed_over.clear()  # as in another worker
    replayer = Replayer(
        workflows=[TrainingJob],
        data_converter=data_converter(),
        workflow_runner=TaskRunner(),
        runtime=meters.runtime,
    )
    await replayer.replay_workflow(history)
    meters.read(metrics.FAULTS)
    ours = {name: count for name, count in meters.counts.items() if name.startswith("relaunch")}
    assert ours == {name: before[name] for name in ours}
    (closed,) = handed_over
    # So are the times of what was handed over.
    dump = TypeAdapter(Incident).dump_python
    assert drop_times(dump(closed.incident)) == drop_times(dump(incident))
    assert (closed.job, closed.number, closed.workflow) == (ending.result().name, 0, job.handle.id)


async def test_a_worker_counts_nothing_twice_and_forgets_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "_recorded", {})
    monkeypatch.setattr(metrics, "MAX_RECORDED", 2)
    job = new_job()
    again = replace(job, submission=job.submission + 1)
    assert [metrics._is_new(one, "incident", 0) for one in (job, job, again)] == [True, False, True]
    assert metrics._is_new(job, "incident", 1)
    assert len(metrics._recorded) == 2
    assert metrics._is_new(job, "incident", 0), "it was the oldest"


async def test_a_worker_counts_no_second_of_a_job_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_charged", {})
    monkeypatch.setattr(metrics, "MAX_RECORDED", 1)

    def charged(**seconds: float) -> JobState:
        totals = {Account(name): timedelta(seconds=span) for name, span in seconds.items()}
        return replace(new_job(), ledger=Ledger(totals=totals))

    first, second = charged(queued=4.6), charged(queued=4.6, stopping=2.5)
    again, third = charged(queued=4.6, stopping=1.9), charged(queued=4.6, stopping=6)
    find = metrics._find_new_seconds
    assert find(charged(queued=1.5), first) == {Account.QUEUED: 3}, "1 s by the worker before"
    assert find(first, second) == {Account.STOPPING: 2}
    assert find(first, again) == {}, "a repeated task, at an earlier time"
    assert find(again, third) == {Account.STOPPING: 4}
    assert find(third, third) == {}
    find(first, replace(second, name="other"))
    assert len(metrics._charged) == 1, "the job that was counted least lately is forgotten"


@pytest.mark.long
async def test_the_sampler_shows_a_question_until_it_is_answered(
    make_rig: MakeRig, meters: Meters, tmp_path: Path
) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=1),)), spares=1) as made:
        running = RunningWatches(tmp_path / "watches")
        running.open()
        meter = meters.runtime.metric_meter
        samples = StateSampler(
            made.client, made.queue, lambda: ["default", "none"], running, meter, lambda: 0, dict
        )
        job = await made.submit(policy(causes=ASK, max_restarts=4))
        state = await job.until_phase(Phase.WAITING_FOR_PERSON)
        assert state.incident is not None
        cause = state.incident.cause.value

        async def sample_until(name: str, labels: tuple[str, ...], expected: Series) -> None:
            """Lists of the server are some time behind its workflows."""
            async with asyncio.timeout(120):
                while True:
                    await samples.sample()
                    found = meters.read(name, *labels)
                    if {key: found.get(key) for key in expected} == expected:
                        return
                    await asyncio.sleep(0.2)

        await sample_until(sampler.QUESTIONS, ("fleet", "asker"), {("default", "job"): 1})
        assert meters.read(sampler.OPEN_INCIDENTS, "fleet", "cause")["default", cause] == 1
        assert meters.read(sampler.BUDGET_LEFT, "fleet", "budget")["default", "restarts"] == 4
        assert meters.read(sampler.UNREAD_JOBS) == {(): 0}
        since = meters.read(sampler.QUESTION_SINCE, "fleet", "asker")["default", "job"]
        assert state.incident.decisions[-1].at.timestamp() == pytest.approx(since)
        assert since <= datetime.now(UTC).timestamp()
        await sample_until(sampler.JOBS, ("phase",), {("WAITING_FOR_PERSON",): 1, ("RUNNING",): 0})
        nodes = meters.read(sampler.NODES, "fleet", "state")
        assert sum(v for (fleet, _), v in nodes.items() if fleet == "default") == 3
        assert all(math.isnan(v) for (fleet, _), v in nodes.items() if fleet == "none")
        assert math.isnan(meters.read(sampler.BREAKER_OPEN, "fleet")["none",])
        assert meters.read(sampler.FLEET_READ, "fleet")["none",] > 0, "it is read: it does not run"

        await job.handle.execute_update("answer", {"decision": "deny", "by": "ada"})
        await job.result()
        await sample_until(sampler.QUESTIONS, ("fleet", "asker"), {("default", "job"): 0})
        await sample_until(sampler.OPEN_INCIDENTS, ("fleet", "cause"), {("default", cause): 0})
        assert math.isnan(meters.read(sampler.QUESTION_SINCE, "fleet", "asker")["default", "job"])
        assert math.isnan(
            meters.read(sampler.BUDGET_LEFT, "fleet", "budget")["default", "restarts"]
        )
