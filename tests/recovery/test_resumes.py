"""Resumed generations that end with the same error at the same step: the checkpoint is bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.observations import RankError
from relaunch.job.apply import finish, resubmit
from relaunch.job.events import (
    Answered,
    DeadlinePassed,
    Event,
    Launched,
    ProgressSeen,
    RanksHung,
    RanksStopped,
    RanksSucceeded,
    RetryRequested,
    StepReached,
)
from relaunch.job.state import Ask, JobState, Phase, Relaunch
from relaunch.spec.policy import Policy
from tests.recovery.builders import (
    T0,
    at,
    describe,
    died,
    error,
    examine,
    exited,
    fallen,
    fault,
    lose,
    policy,
    raised,
    record,
    relaunched,
    running,
    sick,
    step,
    this,
    walk,
    xid,
)

Make = Callable[[JobState], Event]

TORN = (
    "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"
)
PICKLE = "_pickle.UnpicklingError: pickle data was truncated"
HEADER = "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"
BUFFER = HEADER.replace("HeaderTooLarge", "MetadataIncompleteBuffer")
MISMATCH = "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for wte.weight"
NAN = "FloatingPointError: loss is nan at step 501"
APPROVED = this(Answered("approve", "it is moved away", "ada"))


def trained(rules: Policy | None = None, **spec: Any) -> JobState:
    """A job that ran up to step 500, lost n1's GPU, and was launched again."""
    job = running(policy=rules, **spec)
    job = record(job, ProgressSeen(1, 500, T0))
    job, decision = step(job, sick(xid(79), node="n1", rank=0)(job))
    assert isinstance(decision, Relaunch)
    return relaunched(job)


def play(job: JobState, *turns: tuple[Make, str] | tuple[Make, str, int]) -> JobState:
    """As `walk`, with the step that the generation has reached as a third value."""
    for make, expected, *reached in turns:
        if job.phase is Phase.LAUNCHING:
            job = relaunched(job)
        for number in reached:
            job = record(job, ProgressSeen(job.generation, number, T0))
        job = walk(job, (make, expected))
    return job


# --- which faults make a job ask


@pytest.mark.parametrize("message", [TORN, PICKLE, HEADER, BUFFER, MISMATCH])
def test_a_checkpoint_that_cannot_be_read_asks_the_second_time(message: str) -> None:
    job = play(trained(), (raised(message), "RESTART_IN_PLACE"), (raised(message), "ASK"))
    assert job.phase is Phase.WAITING_FOR_PERSON
    assert (job.generation, job.restarts_spent) == (3, 1)


def test_the_question_names_the_error_and_what_to_do(snapshot: SnapshotAssertion) -> None:
    job = trained()
    job = replace(job, ledger=replace(job.ledger, newest_checkpoint=480))
    job = play(job, (raised(TORN), "RESTART_IN_PLACE"), (raised(TORN), "ASK"))
    assert (job.reason, job.next.what) == snapshot(name="step")
    job = trained(nodes=1, checkpoint={"directory": "out"})
    job = play(
        job,
        (raised(NAN, node="n1"), "RESTART_IN_PLACE", 499),
        (raised(NAN, node="n1"), "EXAMINE n1", 499),
        (examine(n1="HEALTHY"), "ASK"),
    )
    assert (job.reason, job.next.what) == snapshot(name="folder")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(None, None, id="before any step"),
        pytest.param(480, 480, id="at a step that an earlier generation has passed"),
        pytest.param(500, 500, id="at the furthest step, which another fault had ended"),
    ],
)
def test_the_same_error_at_the_same_step_asks(first: int | None, second: int | None) -> None:
    job = trained(nodes=1)
    turns = [
        (raised(BUG, node="n1"), expected, *(() if number is None else (number,)))
        for expected, number in (("RESTART_IN_PLACE", first), ("ASK", second))
    ]
    play(job, *turns)


def test_an_error_file_without_a_traceback_names_the_error() -> None:
    ended = exited(0, "n1", code=1, error=RankError(TORN, "", 1.0))
    play(
        trained(nodes=1),
        (lambda job: fault(job, ended), "RESTART_IN_PLACE"),
        (lambda job: fault(job, ended), "ASK"),
    )


def test_what_a_program_says_before_it_exits_is_its_error() -> None:
    ends = died(3, "n1", log_tail=("cannot restore from out/step_480",))
    play(trained(nodes=1), (ends, "RESTART_IN_PLACE"), (ends, "ASK"))


BUG = "IndexError: index 50304 is out of range for a vocabulary of 50304"


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(
            ((raised(TORN), "RESTART_IN_PLACE"), (raised(PICKLE), "RESTART_IN_PLACE")),
            id="another error",
        ),
        pytest.param(
            ((raised(TORN), "RESTART_IN_PLACE", 480), (raised(TORN), "RESTART_IN_PLACE", 481)),
            id="at another step",
        ),
        pytest.param(
            ((raised(TORN), "RESTART_IN_PLACE", 501), (raised(TORN), "RESTART_IN_PLACE", 501)),
            id="training had advanced before the first",
        ),
        pytest.param(
            ((died(-9), "RESTART_IN_PLACE"), (died(-9), "RESTART_IN_PLACE")), id="a kill, twice"
        ),
        pytest.param(
            ((died(1), "RESTART_IN_PLACE"), (died(1), "RESTART_IN_PLACE")),
            id="an exit without a word, twice",
        ),
        pytest.param(
            ((fallen(), "RESTART_IN_PLACE"), (fallen(), "RESTART_IN_PLACE")),
            id="a node that reboots twice",
        ),
        pytest.param(
            (
                (sick(xid(94)), "RESTART_IN_PLACE"),
                (sick(xid(94)), "RESTART_IN_PLACE"),
            ),
            id="a memory error of a GPU, twice",
        ),
        pytest.param(
            (
                (raised("KeyboardInterrupt", code=130), "RESTART_IN_PLACE"),
                (raised("KeyboardInterrupt", code=130), "RESTART_IN_PLACE"),
            ),
            id="an interrupt from outside",
        ),
        pytest.param(
            (
                (raised("OSError: [Errno 5] Input/output error"), "RESTART_IN_PLACE"),
                (raised("OSError: [Errno 5] Input/output error"), "RESTART_IN_PLACE"),
            ),
            id="a file system that fails twice",
        ),
        pytest.param(
            (
                (raised("torch.OutOfMemoryError: CUDA out of memory."), "RESTART_IN_PLACE"),
                (raised("torch.OutOfMemoryError: CUDA out of memory."), "FAILED 1"),
            ),
            id="memory that runs out twice",
        ),
    ],
)
def test_other_faults_take_their_ladder(turns: tuple[tuple[Make, str], ...]) -> None:
    play(trained(nodes=1), *turns)


def test_a_job_that_never_reported_a_step_has_not_resumed() -> None:
    ends = raised(TORN, node="n1")
    play(
        running(nodes=1),
        (ends, "RESTART_IN_PLACE"),
        (ends, "RESTART_IN_PLACE"),
        (ends, "FAILED 1"),
    )


def test_a_bug_at_one_step_is_no_checkpoint() -> None:
    """The generation that had come furthest ended in the same way: it resumed from another one."""
    job = play(
        running(nodes=1),
        (raised(BUG, node="n1"), "RESTART_IN_PLACE", 500),
        (raised(BUG, node="n1"), "RESTART_IN_PLACE", 500),
        (raised(BUG, node="n1"), "EXAMINE n1", 500),
        (examine(n1="HEALTHY"), "REPLACE_NODE without n1"),
        (raised(BUG, node="n1"), "FAILED 1", 500),
    )
    assert "3 generations in a row ended without passing step 500" in job.reason


@pytest.mark.parametrize("stopped_by", ["an order", "the next launch"])
def test_a_step_that_only_the_stop_reveals_makes_it_a_bug(stopped_by: str) -> None:
    job, _ = step(trained(nodes=1), raised(BUG, node="n1")(trained(nodes=1)))
    assert job.failed_resume is not None and job.failed_resume.count == 1
    if stopped_by == "an order":
        job = record(job, RanksStopped(job.generation, ("n1",), T0, step=510))
        job = relaunched(job)
    else:
        job = record(job, Launched(job.generation, T0, T0, step=510))
    job = play(job, (raised(BUG, node="n1"), "RESTART_IN_PLACE", 510))
    assert job.failed_resume is not None and job.failed_resume.count == 0


# --- what comes in between


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        pytest.param(fallen(), "RESTART_IN_PLACE", id="a node that reboots"),
        pytest.param(sick(xid(94)), "RESTART_IN_PLACE", id="an error of a GPU"),
        pytest.param(died(-9), "RESTART_IN_PLACE", id="a kill"),
    ],
)
def test_a_fault_before_the_checkpoint_is_read_changes_no_count(
    between: Make, expected: str
) -> None:
    play(
        trained(),
        (raised(TORN), "RESTART_IN_PLACE"),
        (between, expected),
        (raised(TORN), "ASK"),
    )


def test_a_generation_that_resumes_well_begins_the_count_again() -> None:
    job = play(
        trained(), (raised(TORN), "RESTART_IN_PLACE"), (sick(xid(94)), "RESTART_IN_PLACE", 480)
    )
    assert job.failed_resume is None
    play(job, (raised(TORN), "RESTART_IN_PLACE"))


def test_a_lost_node_is_no_failed_resume() -> None:
    job = play(trained(), (raised(TORN), "RESTART_IN_PLACE"))
    job, _ = step(relaunched(job), lose("n1")(job))
    job, decision = step(job, fault(job, exited(3, code=1, error=error(TORN))))
    assert describe(decision) == "REPLACE_NODE without n1"
    assert job.failed_resume is not None and job.failed_resume.count == 1


def test_progress_forgets_the_error() -> None:
    job = play(trained(), (raised(TORN), "RESTART_IN_PLACE"))
    job, _ = step(relaunched(job), StepReached(3, 501, at(9)), at(9))
    assert job.failed_resume is None and job.incident is None


def test_an_hour_at_older_steps_is_no_progress() -> None:
    job = play(trained(nodes=1), (raised(BUG, node="n1"), "RESTART_IN_PLACE", 480))
    job, _ = step(relaunched(job), DeadlinePassed(), at(3600))
    assert job.incident is None
    play(job, (raised(BUG, node="n1"), "ASK", 480))


# --- where a node may be at fault


MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'"


def test_one_of_several_nodes_is_replaced_first() -> None:
    job = trained()
    job = play(
        job,
        (raised(MISSING), "RESTART_IN_PLACE"),
        (raised(MISSING), "RESTART_IN_PLACE"),
        (raised(MISSING), "EXAMINE n2"),
        (examine(n2="HEALTHY"), "REPLACE_NODE without n2"),
        (raised(MISSING, node="n3"), "ASK"),
    )
    assert job.asked is not None and job.asked.without == ()


def test_where_the_ladder_would_end_the_job_a_person_is_asked() -> None:
    ladder = [{"strategy": "RESTART_IN_PLACE", "tries": 3}, {"strategy": "FAIL"}]
    rules = policy(causes={"APPLICATION": ladder}, startup_stop="off", no_progress_stop="off")
    again = (raised(MISSING), "RESTART_IN_PLACE")
    play(trained(rules), again, again, again, (raised(MISSING), "ASK"))


def test_different_nodes_with_one_error_are_not_at_fault() -> None:
    play(trained(), (raised(MISSING), "RESTART_IN_PLACE"), (raised(MISSING, node="n1"), "ASK"))


def test_an_unhealthy_node_is_replaced_before_a_person_is_asked() -> None:
    play(
        trained(),
        (raised(MISSING), "RESTART_IN_PLACE"),
        (raised(MISSING), "RESTART_IN_PLACE"),
        (raised(MISSING), "EXAMINE n2"),
        (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2 avoiding n2"),
    )


# --- a NaN, which a broken GPU may have computed

AGAIN = (raised(NAN, node="n1"), "RESTART_IN_PLACE", 480)


@pytest.mark.parametrize("verdict", ["HEALTHY", "UNKNOWN"])
def test_a_nan_has_its_node_examined_before_a_person_is_asked(verdict: str) -> None:
    job = play(
        trained(nodes=1),
        AGAIN,
        (raised(NAN, node="n1"), "EXAMINE n1", 480),
        (examine(n1=verdict), "ASK"),
    )
    assert f"n1 examined: {verdict}" in job.reason and "probably bad" in job.reason
    # Once an incident: an approval costs one launch, not one examination more.
    play(job, (APPROVED, "LAUNCH"), (raised(NAN, node="n1"), "ASK", 480))


def test_a_nan_of_an_unhealthy_node_replaces_it_without_a_person() -> None:
    play(
        trained(nodes=1),
        AGAIN,
        (raised(NAN, node="n1"), "EXAMINE n1", 480),
        (examine(n1="UNHEALTHY"), "REPLACE_NODE without n1 avoiding n1"),
        (raised(NAN, node="n2"), "ASK", 480),
    )


def test_a_nan_on_different_nodes_has_the_last_one_examined() -> None:
    play(
        trained(),
        (raised(NAN, node="n1"), "RESTART_IN_PLACE", 480),
        (raised(NAN, node="n2"), "EXAMINE n2", 480),
        (examine(n2="HEALTHY"), "ASK"),
    )


def test_a_person_who_is_asked_goes_on_without_an_unhealthy_node() -> None:
    job = play(
        replace(trained(nodes=1), flat_generations=1),
        AGAIN,
        (raised(NAN, node="n1"), "EXAMINE n1", 480),
        (examine(n1="UNHEALTHY"), "ASK"),
    )
    assert job.asked is not None and job.asked.without == ("n1",)


def test_a_nan_asks_at_once_where_no_verdict_changes_the_ladder() -> None:
    rules = policy(causes={"NUMERICS": [{"strategy": "RESTART_IN_PLACE", "tries": 9}]})
    play(trained(rules, nodes=1), AGAIN, (raised(NAN, node="n1"), "ASK", 480))


# --- what the policy and people say


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        pytest.param({}, 3, id="default"),
        pytest.param({"max_restarts": 50}, 3, id="also with a stated budget"),
        pytest.param({"bad_checkpoint_ask": 3}, 4, id="a third time"),
    ],
)
def test_how_many_generations_run(rules: dict[str, object], expected: int) -> None:
    job = trained(policy(**rules), nodes=1)
    while job.phase is not Phase.WAITING_FOR_PERSON:
        assert job.phase in (Phase.RUNNING, Phase.LAUNCHING) and job.generation < 10, job.reason
        job = relaunched(job)
        job, _ = step(job, raised(TORN, node="n1")(job), at(5.0))
    assert job.generation == expected


@pytest.mark.parametrize("name", ["off", "torchelastic"])
def test_off_takes_the_ladder(name: str) -> None:
    rules = policy(bad_checkpoint_ask=False) if name == "off" else policy(extends=name)
    assert rules.bad_checkpoint_ask == "off"
    again = (raised(TORN, node="n1"), "RESTART_IN_PLACE")
    play(trained(rules, nodes=1), again, again)


def asking() -> JobState:
    return play(
        trained(nodes=1),
        (raised(TORN, node="n1"), "RESTART_IN_PLACE"),
        (raised(TORN, node="n1"), "ASK"),
    )


def test_each_approval_launches_once_until_the_program_resumes() -> None:
    job = play(asking(), (APPROVED, "LAUNCH"), (raised(TORN, node="n1"), "ASK"))
    assert "3 resumed generations in a row" in job.reason
    job = play(job, (APPROVED, "LAUNCH"))
    job, _ = step(relaunched(job), StepReached(job.generation, 501, at(9)), at(9))
    assert (job.phase, job.failed_resume) == (Phase.RUNNING, None)


def test_success_forgets_the_error_though_no_step_was_seen() -> None:
    """A generation may end before its watch has read a step; the stop finds the last one."""
    job = relaunched(play(asking(), (APPROVED, "LAUNCH")))
    job, _ = step(job, RanksSucceeded(job.generation), at(9))
    job, _ = step(job, RanksStopped(job.generation, ("n1",), T0, step=510), at(9))
    assert job.ending is not None and job.failed_resume is None


def test_another_fault_after_an_approval_takes_its_ladder() -> None:
    job = play(asking(), (APPROVED, "LAUNCH"), (fallen("n1"), "RESTART_IN_PLACE"))
    play(job, (raised(TORN, node="n1"), "ASK"))


def test_what_failed_before_the_approval_does_not_end_the_job() -> None:
    """From an earlier checkpoint it takes long to pass the furthest step: other faults may come."""
    job = asking()
    job = play(replace(job, flat_generations=2, startup_failures=2), (APPROVED, "LAUNCH"))
    assert (job.flat_generations, job.startup_failures, job.startup_error) == (0, 0, "")
    play(job, (raised("KeyError: 'a'", node="n1"), "RESTART_IN_PLACE", 300))


def test_without_an_answer_it_is_asked_again() -> None:
    job = asking()
    assert job.next.at is not None
    job, decision = step(job, DeadlinePassed(job.next.at), job.next.at)
    assert isinstance(decision, Ask) and decision.reminders == 1
    failing = replace(asking(), policy=policy(unanswered="fail"))
    assert failing.next.at is not None
    _, decision = step(failing, DeadlinePassed(failing.next.at), failing.next.at)
    assert describe(decision) == "FAILED 1"


def test_renewed_budgets_and_a_new_submission_begin_again() -> None:
    job, _ = step(asking(), RetryRequested("", "ada", renew_budgets=True))
    assert job.failed_resume is None
    job, _ = step(asking(), Answered("deny", "", "ada"))
    again = resubmit(finish(job, at(9)), 2000, "ada", at(10), renew_budgets=False, avoid=())
    assert (again.failed_resume, again.furthest_step) == (None, 500)


def test_a_hang_says_nothing_of_the_checkpoint() -> None:
    def hangs(job: JobState) -> Event:
        return RanksHung(job.generation, (0,), "no step for 1800 s", T0)

    play(trained(nodes=1), (hangs, "RESTART_IN_PLACE"), (hangs, "RESTART_IN_PLACE"))


def test_a_counter_of_epochs_does_not_say_where_it_failed() -> None:
    job = replace(trained(nodes=1), counter_restarts=True)
    again = (raised(NAN, node="n1"), "RESTART_IN_PLACE", 480)
    job = play(job, again, again)
    assert job.failed_resume is not None and job.failed_resume.count == 0
