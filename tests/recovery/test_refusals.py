"""What a job does when a node refuses to launch what the job has run before, or others accept."""

from __future__ import annotations

from datetime import timedelta

import pytest

from relaunch.job.apply import finish, resubmit
from relaunch.job.events import CancelRequested, Launched
from relaunch.job.state import Ask, JobState, Relaunch
from tests.recovery.builders import (
    T0,
    describe,
    died,
    examine,
    first_launch,
    refused,
    relaunched,
    running,
    step,
    this,
    walk,
)


def restarting() -> JobState:
    """A job that has run is about to be launched again."""
    return walk(running(), (died(1), "RESTART_IN_PLACE"))


@pytest.mark.parametrize("why", ["command_not_found", "workdir_missing", "address_not_ready"])
def test_a_node_whose_mount_is_not_back_is_waited_for(why: str) -> None:
    job, delays = restarting(), []
    for expected in ("RESTART_IN_PLACE", "RESTART_IN_PLACE", "EXAMINE n2"):
        job, decision = step(job, refused(why, "n2", generation=job.generation))
        assert describe(decision) == expected
        if isinstance(decision, Relaunch):
            delays.append(decision.delay)
    assert delays == [timedelta(seconds=10), timedelta(seconds=30)]
    # It is in order, but for what it has not: it is left, and may be used again.
    job = walk(job, (examine(n2="HEALTHY"), "REPLACE_NODE without n2"))
    assert (job.avoided, job.restarts_spent) == ((), 1)


def test_a_node_that_alone_refuses_the_first_launch_is_at_fault() -> None:
    again = walk(first_launch(), (this(refused("command_not_found", "n2")), "RESTART_IN_PLACE"))
    assert "n1 did not refuse it" in again.reason
    wrong = this(refused("command_not_found", "n1", "n2"))
    walk(first_launch(), (wrong, "FAILED 127"))


def test_other_faults_of_a_node_are_not_waited_for() -> None:
    _, decision = step(restarting(), refused("disk_full", "n2", generation=2))
    assert isinstance(decision, Relaunch) and not decision.delay


def test_a_secret_that_is_gone_is_a_matter_for_a_person() -> None:
    walk(first_launch(), (this(refused("secret_missing", "n1")), "FAILED 1"))
    job, decision = step(restarting(), refused("secret_missing", "n1", generation=2))
    assert isinstance(decision, Ask) and job.restarts_spent == 1
    assert "workers of fleet default" in decision.question
    again, _ = step(job, Launched(2, T0, T0))
    assert again == job


def test_what_a_submission_ran_says_nothing_of_the_next() -> None:
    job, _ = step(relaunched(restarting()), CancelRequested("", "ada"))
    assert job.has_run
    assert not resubmit(finish(job, T0), 2000, "ada", T0, False, ()).has_run
