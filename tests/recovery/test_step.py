"""A fault is diagnosed once, however much of a job's logic reads the diagnosis."""

from __future__ import annotations

from datetime import timedelta

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.job.events import (
    Event,
    LaunchFailed,
    LaunchRefused,
    NodeRefusal,
    NodeReturned,
    NodeUnreachable,
    RanksHung,
)
from relaunch.job.state import JobState, Phase
from tests.recovery.builders import error, exited, fault, relaunched, running, step
from tests.recovery.diagnoses import count_diagnoses

BOOM = exited(3, code=1, error=error())
LOSS = NodeUnreachable(1, "n2", timedelta(0), "no answer within 5 s")


def lose_node() -> JobState:
    job, _ = step(running(nodes=3), LOSS)
    assert job.phase is Phase.NODE_LOST
    return job


def alone() -> JobState:
    """Its ranks do not fence, so a fault has to wait for the lost node."""
    job, _ = step(running(nodes=1, nproc_per_node=4), NodeUnreachable(1, "n1", timedelta(0), "…"))
    return job


def launching() -> JobState:
    job = running()
    job, _ = step(job, fault(job, BOOM))
    assert job.phase is Phase.LAUNCHING
    return job


@pytest.mark.parametrize(
    ("job", "event"),
    [
        (running(), fault(running(), BOOM)),
        (running(), RanksHung(1, (0,), "step 7 has not changed", running().submitted_at)),
        (lose_node(), fault(lose_node(), BOOM)),
        (lose_node(), RanksHung(1, (0,), "step 7 has not changed", running().submitted_at)),
        (alone(), fault(alone(), BOOM)),
        (launching(), LaunchFailed(2, ("n2",), False, timedelta(0), "no answer")),
        (launching(), LaunchFailed(2, ("n2",), True, timedelta(0), "no answer")),
        (launching(), LaunchRefused(2, (NodeRefusal("n1", "disk_full", "no space"),))),
    ],
)
def test_each_kind_of_fault_is_diagnosed_once(
    job: JobState, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    diagnosed = count_diagnoses(monkeypatch)
    after, _ = step(job, event)
    assert diagnosed == [event]
    assert after.incident is not None


def test_a_scripted_job_is_diagnosed_at_most_once_per_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnosed = count_diagnoses(monkeypatch)
    job = running(nodes=3)
    for faults in (1, 2):
        job, _ = step(job, fault(job, BOOM))
        assert len(diagnosed) == faults
        stale = fault(job, BOOM)
        job = relaunched(job)
        # a launch is no fault
        assert len(diagnosed) == faults
        job, _ = step(job, NodeUnreachable(job.generation, "n2", timedelta(0), "no answer"))
        job, _ = step(job, NodeReturned(job.generation, "n2"))
        job, _ = step(job, LaunchFailed(stale.generation - 1, ("n2",), True, timedelta(0), "late"))
        # nothing that comes too late is diagnosed
        assert len(diagnosed) == faults


def test_a_fault_that_waits_for_a_lost_node_keeps_its_diagnosis(
    snapshot: SnapshotAssertion,
) -> None:
    """The incident and the decision blame the loss; the fault is kept for the node's return."""
    job = alone()
    after, decision = step(job, fault(job, exited(0, "n1", code=1, error=error())))
    assert after.incident is not None and after.incident.cause is Cause.NODE_LOST
    assert decision.reason == snapshot
    assert after.deferred_fault is not None
    assert after.deferred_fault.cause is Cause.APPLICATION
