"""Rules that a release did not have: a job's history from before them is replayed without them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaunch.evidence.observations import RankError, RankExited
from relaunch.job.events import (
    Answered,
    DeadlinePassed,
    FaultObserved,
    Launched,
    LaunchRefused,
    NodeRefusal,
    NodeReturned,
    NodeUnreachable,
    ProgressSeen,
    RanksHung,
)
from relaunch.job.rules import Rule
from relaunch.job.state import Ask, Ignore, JobState, Phase, Relaunch, Wait
from relaunch.job.step import evaluate_event, find_rules
from relaunch.job.step import step as step_with
from relaunch.spec.policy import Policy
from tests.recovery import streams
from tests.recovery.builders import at, policy, running, step
from tests.recovery.generated import anything, policies, searched
from tests.recovery.streams import Move, Root, Run, Turn

UNPROVEN = policy(hang={"after": "off"})
"""With which only a person ends the wait for a lost node."""


class OldRun(Run):
    """A job without any rule, each event of which is replayed by today's code."""

    def take(self, event: streams.Event) -> Turn:
        before = self.job
        rules = find_rules(before, event, self.now, lambda _: False)
        old = step_with(before, event, self.now, ())
        assert step_with(before, event, self.now, rules) == old, (event, rules)
        return super().take(event)


@given(policies | st.just(UNPROVEN), st.integers(1, 4), anything)
@searched(200)
def test_a_history_from_before_the_rules_is_replayed(
    drawn: Policy, nodes: int, moves: list[Move]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            streams, "evaluate_event", lambda job, event, now: evaluate_event(job, event, now, ())
        )
        run = OldRun(drawn, nodes=nodes)
        for move in moves:
            move.do(run)


def lose(*nodes: str, job: JobState) -> JobState:
    for node in nodes:
        job, _ = step(job, NodeUnreachable(1, node, timedelta(seconds=30), "no route"), at(60))
    return job


def ask(job: JobState) -> JobState:
    """Return the job once a person was asked about its lost nodes."""
    assert job.next.at is not None
    job, decision = step(job, DeadlinePassed(job.next.at), job.next.at)
    assert isinstance(decision, Ask)
    return job


@pytest.mark.parametrize(
    "job", [running(nodes=4, gang="independent"), running(nodes=4, policy=UNPROVEN)]
)
def test_one_rule_hides_no_other_one_of_a_replay(job: JobState) -> None:
    job = ask(lose("n2", "n3", job=job))
    event, now = NodeReturned(1, "n2"), at(5000)
    rules = find_rules(job, event, now, lambda _: False)
    assert {Rule.LOST_DEADLINE, Rule.OPEN_QUESTION}.isdisjoint(rules)
    _, decision = step_with(job, event, now, rules)
    assert isinstance(decision, Wait) and decision.until is None
    assert isinstance(step_with(job, event, now)[1], Ignore)


def test_patches_are_asked_for_only_where_rules_differ() -> None:
    asked: list[Rule] = []
    job = lose("n2", job=running(nodes=4))
    find_rules(job, NodeReturned(1, "n2"), at(90), lambda rule: asked.append(rule) or True)  # type: ignore[func-returns-value]
    assert asked == []


def test_a_gpu_that_is_missing_is_found_in_a_chain_of_errors() -> None:
    job = replace(running(), furthest_step=100)
    began = 'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    main()\n'
    chain = (
        f"{began}RuntimeError: CUDA error: invalid device ordinal\n\nThe above exception was the "
        f"direct cause of the following exception:\n\n{began}RuntimeError: setup failed\n"
    )
    error = RankError("RuntimeError: setup failed", chain, at(69).timestamp())
    fault = FaultObserved(1, (RankExited("n1", 0, 0, 1, None, at(70), error=error),), 0, at(70))
    rules = find_rules(job, fault, at(70), lambda _: False)
    old, new = step_with(job, fault, at(70), ()), step_with(job, fault, at(70))
    assert step_with(job, fault, at(70), rules) == old != new


def test_without_the_rules_a_job_decides_as_the_release_did() -> None:
    job = lose("n3", job=running(nodes=4, gang="independent"))
    lost = NodeUnreachable(1, "n2", timedelta(seconds=30), "no route")
    _, decision = step_with(job, lost, at(600), ())
    assert isinstance(decision, Wait)
    assert decision.until == at(600) + job.policy.timeouts.ask_after
    asks = policy(causes={"NODE_LOST": [{"strategy": "ASK"}]})
    job = lose("n3", job=running(nodes=4, policy=asks))
    hung = RanksHung(1, (0,), "hung", at(900), (), unheard=(("n3", timedelta(minutes=14)),))
    job, _ = step_with(job, hung, at(900), ())
    assert job.asked is not None and job.asked.ladder is not None and job.next.at is not None
    _, reminder = step_with(job, DeadlinePassed(job.next.at), job.next.at, ())
    assert isinstance(reminder, Ask) and reminder.ladder is None


# --- what the rules are for


def test_a_node_that_comes_and_goes_puts_no_question_off() -> None:
    job = lose("n3", job=running(nodes=4, gang="independent"))
    until = job.next.at
    for minutes in (20, 40):
        now = at(60 * minutes)
        job, decision = step(job, NodeUnreachable(1, "n2", timedelta(seconds=30), "no route"), now)
        assert isinstance(decision, Wait) and decision.until == until
        job, decision = step(job, NodeReturned(1, "n2"), now + timedelta(seconds=60))
        assert isinstance(decision, Wait) and decision.until == until


def test_ranks_that_fail_put_no_question_off() -> None:
    job = lose("n3", job=running(nodes=4, gang="independent"))
    until = job.next.at
    for seconds in (600, 1200):
        exits = (Root(signal=11)("n1", 0, at(seconds)),)
        job, decision = step(job, FaultObserved(1, exits, 0, at(seconds)), at(seconds))
        assert isinstance(decision, Wait) and decision.until == until


def test_a_reminder_asks_the_question_of_the_same_ladder() -> None:
    asks = policy(causes={"NODE_LOST": [{"strategy": "ASK"}]})
    job = lose("n3", "n4", job=running(nodes=4, policy=asks))
    hung = RanksHung(1, (0,), "hung", at(900), (), unheard=(("n3", timedelta(minutes=14)),))
    job, first = step(job, hung, at(900))
    assert isinstance(first, Ask) and first.ladder is not None
    job = ask(job)
    assert job.asked is not None and job.asked.ladder == first.ladder
    _, decision = step(job, NodeReturned(1, "n4"), at(900_000))
    assert isinstance(decision, Ignore)
    job, decision = step(job, Answered("approve", "", "ada"), at(900_000))
    assert isinstance(decision, Relaunch) and job.ladders_renewed


def test_a_secret_that_no_worker_reads_counts_as_no_failed_try() -> None:
    job = running()
    job, _ = step(job, ProgressSeen(1, 500, at(100)), at(100))
    exits = (Root(signal=11)("n1", 0, at(200)),)
    job, _ = step(job, FaultObserved(1, exits, 0, at(200)), at(200))
    counted = job.flat_generations
    for seconds in (300, 400, 500, 600):
        refused = (NodeRefusal("n1", "secret_missing", "no HF_TOKEN"),)
        job, decision = step(job, LaunchRefused(job.generation, refused), at(seconds))
        assert isinstance(decision, Ask)
        job, _ = step(job, Answered("approve", "", "ada"), at(seconds + 10))
    assert job.flat_generations == counted
    job, _ = step(job, Launched(job.generation, at(2000), at(2000)), at(2000))
    exits = (Root(signal=11)("n1", 0, at(2100)),)
    job, decision = step(job, FaultObserved(job.generation, exits, 0, at(2100)), at(2100))
    assert job.phase is not Phase.FAILED and isinstance(decision, Relaunch)
