"""Small builders for tables: a job in a phase, an observation, an event."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from recovery.decide import decide
from recovery.events import Event, FaultObserved, Launched, NodesAcquired, RankError, RankExited, Submitted
from recovery.evolve import absorb, evolve
from recovery.model import Decision, JobState, Phase, Slot
from recovery.policy import Policy, preset, resolve
from recovery.spec import JobSpec

T0 = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "llama", "command": ["python", "train.py"], "nodes": 2, "nproc_per_node": 2, **changes})


def policy(**changes: Any) -> Policy:
    return resolve(changes) if changes else preset("default")


def new_job(*, policy: Policy | None = None, **spec_changes: Any) -> JobState:
    return JobState("default", "llama", 1000, spec(**spec_changes), policy or preset("default"), "ada", T0)


def step(job: JobState, event: Event, now: datetime = T0) -> tuple[JobState, Decision]:
    """One turn of the workflow's loop."""
    job = absorb(job, event, now)
    decision = decide(job, event, now)
    return evolve(job, decision, now), decision


def play(job: JobState, *events: Event, now: datetime = T0) -> tuple[JobState, Decision]:
    assert events
    for event in events:
        job, decision = step(job, event, now)
    return job, decision


def running(*, policy: Policy | None = None, generation: int = 1, **spec_changes: Any) -> JobState:
    """A job whose generation runs on n1, n2, …."""
    job = new_job(policy=policy, **spec_changes)
    job, _ = step(job, Submitted("", "ada"))
    job = replace(job, generation=generation)
    slots = tuple(Slot(f"n{i + 1}", f"10.0.0.{i + 1}", 1, 1) for i in range(job.spec.node_count))
    job, _ = play(job, NodesAcquired(slots), Launched(generation, T0, T0))
    assert job.phase is Phase.RUNNING
    return job


def relaunched(job: JobState, now: datetime = T0) -> JobState:
    """The launch that was decided upon went well."""
    job, _ = step(job, Launched(job.generation, now, now), now)
    return job


def exited(
    rank: int = 3, node: str = "n2", *, code: int | None = None, signal: int | None = None, seconds: float = 0.0, **more: Any
) -> RankExited:
    return RankExited(node, rank, rank % 2, code, signal, at(seconds), **more)


def error(message: str = "RuntimeError: boom", timestamp: float | None = 1.0) -> RankError:
    return RankError(message, f"Traceback (most recent call last):\n{message}\n", timestamp)


def fault(job: JobState, *observations: RankExited, seconds: float = 0.0) -> FaultObserved:
    return FaultObserved(job.generation, observations, 0, at(seconds))
