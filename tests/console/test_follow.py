"""What is said of a job while it is followed in lines."""

from __future__ import annotations

from dataclasses import replace

from relaunch.cli import follow, jobs
from tests.recovery.builders import running


def test_a_silence_of_workers_is_said_once_and_its_end() -> None:
    said: list[str] = []
    narrator = follow.Narrator(said.append)
    memo = {"phase": "RUNNING", "reason": "all ranks run"}
    works = jobs.JobSnapshot("llama", "r1", True, "RUNNING", 9, running(), "worker", memo)
    silent = replace(works, state=None, source="memo", history_length=12)
    for now in (works, silent, replace(silent, history_length=13), works, works, silent):
        narrator.tell(now)
    sentence = "no worker answers: this is the last state that the job recorded"
    assert said[1:] == [sentence, "a worker answers now", sentence]


def test_a_job_that_was_ended_from_outside_needs_no_worker() -> None:
    said: list[str] = []
    memo = {"phase": "RUNNING", "reason": "all ranks run"}
    ended = jobs.JobSnapshot("llama", "r1", False, "TERMINATED", 9, None, "memo", memo)
    follow.Narrator(said.append).tell(ended)
    assert said == ["TERMINATED: all ranks run"]
