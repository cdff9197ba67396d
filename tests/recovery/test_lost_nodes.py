"""Several nodes of a job that do not answer, and what else happens meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from relaunch.job.events import DeadlinePassed
from relaunch.job.state import Phase
from relaunch.spec.policy import preset
from tests.recovery.builders import at, back, describe, died, lose, policy, running, step

ASKS_ONLY = [
    pytest.param({"policy": preset("torchelastic")}, id="ranks that fence only as a whole"),
    pytest.param({"policy": preset("gputasker")}, id="a policy of single nodes"),
    pytest.param({"policy": policy(hang={"after": "off"})}, id="no hang is detected"),
    pytest.param({"gang": "independent"}, id="ranks that go on alone"),
]
"""Jobs whose lost nodes are a matter for a person."""


@pytest.mark.parametrize("shape", ASKS_ONLY)
@pytest.mark.parametrize("fails", [False, True], ids=["the others go on", "another rank fails"])
def test_a_person_is_asked_although_one_of_two_is_back(shape: dict[str, Any], fails: bool) -> None:
    job = running(nodes=3, **shape)
    job, _ = step(job, lose("n2")(job), at(0))
    job, first = step(job, lose("n3")(job), at(60))
    if fails and job.policy.hang.after != "off":
        job, first = step(job, died(1, "n1", 0)(job), at(120))
    until = job.next.at
    assert first.kind == "Wait" and until is not None
    job, decision = step(job, back("n2")(job), at(180))
    assert (describe(decision), job.lost_names, job.next.at) == ("WAIT NODE_LOST", ("n3",), until)
    job, decision = step(job, DeadlinePassed(until), until)
    assert describe(decision) == "ASK" and job.phase is Phase.WAITING_FOR_PERSON


def test_a_job_that_finds_the_hang_itself_asks_no_person() -> None:
    job = running(nodes=3)
    for event in (lose("n2"), lose("n3"), back("n2")):
        job, decision = step(job, event(job), at(10))
        assert (describe(decision), job.next.at) == ("WAIT NODE_LOST", None)
