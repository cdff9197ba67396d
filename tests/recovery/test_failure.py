"""Which fault ended a job, what came before it, and what a person may type next."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.job.apply import finish, resubmit
from relaunch.job.events import CancelRequested, RanksHung, RanksStopped
from relaunch.job.failure import (
    MAX_EARLIER,
    describe_failure,
    find_failure,
    list_commands,
    list_faults,
)
from relaunch.job.state import FaultRecord, Incident, JobState, Phase
from tests.pages import sections
from tests.recovery.builders import T0, at, exited, fault, policy, relaunched, running, step

TAIL = (
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    "    grow()",
    "MemoryError",
)
LADDERS = {
    "HANG": [{"strategy": "RESTART_IN_PLACE"}],
    "APPLICATION": [{"strategy": "RESTART_IN_PLACE", "tries": 1}, {"strategy": "FAIL"}],
    "OUT_OF_MEMORY": [{"strategy": "FAIL"}],
}


def hung(job: JobState) -> RanksHung:
    return RanksHung(job.generation, (0,), "no step for 20 min", T0)


def raised(job: JobState, *tail: str) -> Any:
    return fault(job, exited(3, "n2", code=1, log_tail=tail or TAIL))


def end(job: JobState) -> JobState:
    job, _ = step(job, RanksStopped(job.generation, ("n1", "n2"), at(9)), at(9))
    return finish(job, at(9))


def hung_then_failed() -> JobState:
    """A job that hung, was launched again, and then failed for another reason."""
    job = running(policy=policy(causes=LADDERS))
    job, _ = step(job, hung(job), at(1))
    job = relaunched(job, at(2))
    job, _ = step(job, raised(job), at(3))
    return end(job)


def test_the_fault_that_ended_the_job_is_its_root_cause(page: SnapshotAssertion) -> None:
    job = hung_then_failed()
    assert job.phase is Phase.FAILED
    assert job.incidents[-1].cause is Cause.HANG, "the incident began with it"
    found = find_failure(job)
    assert found is not None
    assert (found.fault.cause, found.fault.ranks) == (Cause.OUT_OF_MEMORY, (3,))
    assert found.fault.traceback == "\n".join(TAIL)
    assert found.logs == "relaunch logs llama --rank 3 --generation 2"
    own = list_commands(job, can_retry=False)
    lines = {
        "why": describe_failure(job),
        "next": list_commands(job),
        "next, where its server ends with it": own,
    }
    assert not any("retry" in line for line in own)
    assert sections(lines) == page


def test_an_incomplete_checkpoint_that_is_taken_is_named() -> None:
    error = "ValueError: Can't find a valid checkpoint at out/checkpoint-20"
    job, _ = step(running(), raised(running(), *TAIL[:-1], error), at(1))
    found = find_failure(job)
    assert found is not None
    assert found.advice.startswith("out/checkpoint-20 is not complete")
    assert f"what helps: {found.advice}" in describe_failure(job)


def test_a_line_that_no_row_explains_comes_with_the_command() -> None:
    job = running()
    killed = exited(3, "n2", signal=15, log_tail=("frobnicator: lost the flux",))
    job, _ = step(job, fault(job, killed), at(1))
    found = find_failure(job)
    assert found is not None and found.fault.cause is Cause.UNKNOWN
    command = "relaunch logs llama --rank 3 --generation 1 | relaunch explain log -"
    assert f"`{command}`" in found.advice


def test_the_last_line_of_a_killed_rank_is_blamed_for_nothing() -> None:
    job = running()
    killed = exited(3, "n2", signal=9, log_tail=("step 63",))
    job, _ = step(job, fault(job, killed), at(1))
    found = find_failure(job)
    assert found is not None and found.fault.cause is Cause.UNKNOWN
    assert found.advice == ""
    assert "killed by SIGKILL" in found.fault.reason
    assert "nothing in its last lines explains it (the last one: step 63)" in found.fault.reason


def test_only_the_first_and_the_newest_traceback_are_kept() -> None:
    ladders = {"APPLICATION": [{"strategy": "RESTART_IN_PLACE"}]}
    job = running(policy=policy(causes=ladders))
    for number in range(4):
        job, _ = step(job, raised(job, *TAIL[:-1], f"KeyError: {number}"), at(number))
        job = relaunched(job, at(number))
    assert job.incident is not None
    kept = [one.traceback[-11:] for one in list_faults(job.incident)]
    assert kept == ["KeyError: 0", "", "", "KeyError: 3"]
    found = find_failure(job)
    assert found is not None
    assert found.fault.generation == 4
    assert [line.split(", launched")[0] for line in found.earlier] == [
        "APPLICATION in 3 generations, 1 to 3 on n2"
    ]


def test_a_cancelled_job_names_the_fault_it_was_in() -> None:
    job = running()
    job, _ = step(job, raised(job), at(1))
    job = relaunched(job, at(2))
    job, _ = step(job, CancelRequested("enough", "ada"), at(3))
    job = end(job)
    assert job.phase is Phase.CANCELLED
    assert describe_failure(job)[0].startswith("last fault: OUT_OF_MEMORY in generation 1: rank 3")


def test_a_job_that_was_cancelled_while_well_has_no_failure() -> None:
    job, _ = step(running(), CancelRequested("enough", "ada"), at(3))
    job = end(job)
    assert find_failure(job) is None
    assert describe_failure(job) == []
    assert [line.split()[-1] for line in list_commands(job, can_retry=False)] == ["llama"]


def closed(number: int, **changes: Any) -> Incident:
    when = at(number)
    known: dict[str, Any] = {"closed": when, "recovered": when, "outcome": f"passed {number}"}
    return Incident(when, number, Cause.HANG, "no step", **{**known, **changes})


def test_earlier_incidents_are_named_and_bounded() -> None:
    job = replace(hung_then_failed(), submitted_at=T0)
    before = tuple(closed(number) for number in range(1, 7))
    before = (*before[:-1], replace(before[-1], recovered=None, outcome=None))
    many = find_failure(replace(job, incidents=(*before, *job.incidents)))
    assert many is not None
    assert many.earlier == (
        "HANG in generation 1, launched again",
        "HANG in generation 6, closed",
        "HANG in generation 5, recovered: passed 5",
        "HANG in generation 4, recovered: passed 4",
        "and 3 more",
    )
    assert len(many.earlier) == MAX_EARLIER + 1


def test_a_closed_incident_is_not_the_failure_of_a_later_end() -> None:
    job = running()
    ended = replace(job, phase=Phase.FAILED, ended_at=at(9), incidents=(closed(1),))
    assert find_failure(ended) is None
    assert find_failure(replace(ended, phase=Phase.RUNNING, ended_at=at(1))) is None


def test_a_withdrawn_fault_is_not_the_newest() -> None:
    job = running()
    lost = FaultRecord(at(2), 1, Cause.NODE_LOST, "n1: no answer", ("n1",))
    first = FaultRecord(at(1), 1, Cause.HANG, "no step")
    opened = Incident(at(1), 1, Cause.HANG, "no step", faults=(first, lost))
    newest = find_failure(replace(job, incident=opened))
    assert newest is not None
    assert (newest.fault.cause, newest.earlier) == (Cause.NODE_LOST, ("HANG in generation 1",))
    back = replace(opened, faults=(first, replace(lost, withdrawn="n1 answers again")))
    found = find_failure(replace(job, incident=back))
    assert found is not None and found.fault.cause is Cause.HANG
    assert found.logs == "relaunch logs llama --generation 1"


def test_only_logs_that_can_be_asked_for_are_named() -> None:
    job = hung_then_failed()
    again = resubmit(job, 2000, "ada", job.submitted_at + timedelta(hours=1), False, ())
    old = replace(again, incident=job.incidents[-1])
    found = find_failure(old)
    assert found is not None and found.logs == ""
    never = replace(running(), launched_at=None, incident=closed(1, closed=None))
    unstarted = find_failure(never)
    assert unstarted is not None and unstarted.logs == ""
