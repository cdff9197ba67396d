"""Which ranks that outlive a fault are killed without a grace period."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from relaunch.job.accounts import RunFigures
from relaunch.job.events import CancelRequested, DrainRequested, Event, ProgressSeen
from relaunch.job.fencing import plan_generation
from relaunch.job.state import JobState, Relaunch
from relaunch.job.survivors import kills_survivors
from tests.recovery.builders import (
    at,
    died,
    exited,
    fallen,
    fault,
    hung,
    lose,
    play,
    policy,
    relaunched,
    running,
    sick,
    step,
    xid,
)

Make = Callable[[JobState], Event]


def ran(when: str, *, saved: bool = True, **more: Any) -> JobState:
    """A job that runs on two nodes, and has saved a checkpoint."""
    job = running(policy=policy(kill_survivors=when), **more)
    nodes = tuple(slot.node for slot in job.slots)
    job = replace(job, maybe_alive=nodes, launched=(plan_generation(job, 1, nodes),))
    figures = RunFigures(first_step_at=at(1))
    if saved:
        figures = replace(figures, checkpoint=8, checkpoint_at=at(2), checkpoints=1)
    job, _ = play(job, ProgressSeen(1, 9, at(3), figures=figures), now=at(3))
    return job


def kills(job: JobState, *events: Make) -> bool:
    for make in events:
        job, _ = step(job, make(job), at(9))
    return kills_survivors(job, 1)


DIED, KILLED = died(), lambda job: fault(job, exited(3, "n2", signal=9))
TERMINATED = lambda job: fault(job, exited(3, "n2", signal=15))  # noqa: E731
PREEMPTED = lambda job: fault(  # noqa: E731
    job,
    exited(
        3,
        "n2",
        signal=15,
        log_tail=("slurmstepd: error: *** JOB 7 ON n2 CANCELLED AT 03:12 DUE TO PREEMPTION ***",),
    ),
)


@pytest.mark.parametrize(
    ("when", "saved", "expected"),
    [
        ("never", True, False),
        ("checkpointed", True, True),
        ("checkpointed", False, False),
        ("always", False, True),
        ("always", True, True),
    ],
)
@pytest.mark.parametrize("make", [DIED, KILLED, sick(xid(79))], ids=["exit 1", "SIGKILL", "Xid 79"])
def test_it_follows_the_policy_and_the_checkpoint(
    make: Make, when: str, saved: bool, expected: bool
) -> None:
    assert kills(ran(when, saved=saved), make) is expected


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(hung(), id="a hang"),
        pytest.param(fallen(), id="a node that rebooted"),
        pytest.param(TERMINATED, id="SIGTERM of others"),
        pytest.param(PREEMPTED, id="a preemption"),
        pytest.param(lambda job: DrainRequested("n2", "x", "ada", at(99)), id="a drain"),
        pytest.param(lambda job: CancelRequested(reason="enough", by="ada"), id="a cancel"),
    ],
)
def test_ranks_that_may_do_something_useful_have_their_time(make: Make) -> None:
    assert not kills(ran("always"), make)


def test_a_lost_node_breaks_its_gang() -> None:
    job = ran("always")
    lost, _ = step(job, lose()(job), at(200))
    assert kills_survivors(lost, 1)


def test_ranks_that_need_no_other_have_their_time() -> None:
    assert not kills(ran("always", gang="independent"), DIED)


def test_a_generation_is_not_killed_for_the_fault_of_the_last() -> None:
    job = ran("always")
    job, decision = step(job, DIED(job), at(9))
    assert isinstance(decision, Relaunch)
    assert kills_survivors(job, 1)
    job = relaunched(job, at(10))
    nodes = tuple(slot.node for slot in job.slots)
    alive = replace(plan_generation(job, 2, nodes), complete=True)
    assert not kills_survivors(replace(job, launched=(alive,)), 2)
    both = (plan_generation(job, 1, nodes), alive)
    assert not kills_survivors(replace(job, launched=both), 2), "one of them may be well"
    earlier = replace(both[0], submission=job.submission - 1)
    assert not kills_survivors(replace(job, launched=(earlier,)), 2)


def test_an_older_checkpoint_is_none_of_this_generation() -> None:
    job = ran("checkpointed")
    job, _ = step(job, DIED(job), at(9))
    job = relaunched(job, at(10))
    nodes = tuple(slot.node for slot in job.slots)
    job = replace(job, launched=(plan_generation(job, 2, nodes),), maybe_alive=nodes)
    job, _ = step(job, DIED(job), at(12))
    assert not kills_survivors(job, 2)
    assert kills_survivors(
        replace(job, policy=job.policy.model_copy(update={"kill_survivors": "always"})), 2
    )
