"""What holds for every stream of events, under every preset and every valid policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaunch.converter import shared_converter
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.evidence.observations import Observation
from relaunch.job.events import (
    DeadlinePassed,
    Event,
    FaultObserved,
    LaunchRefused,
    NodeDeclaredDead,
    NodesExamined,
    NodeUnreachable,
    ProgressSeen,
    RanksHung,
    RanksStopped,
    RanksSucceeded,
    RepairEnded,
    RetryRequested,
    StepReached,
)
from relaunch.job.ladder import STATED
from relaunch.job.state import Ignore, JobState, Phase, Relaunch, Repair, Try
from relaunch.job.step import diagnose_event, evaluate_event, step
from relaunch.spec.policy import Policy, Rung, Strategy, preset, preset_names
from tests.recovery.generated import (
    NUMBER,
    OFTEN,
    anything,
    likely,
    moves,
    policies,
    searched,
    written,
)
from tests.recovery.streams import ENDINGS, INVENTORY, PAUSES, Choice, Move, Root, Run, Turn, echo


def walk(
    policy: Policy, stream: Iterable[Move], others: tuple[Policy, ...] = (), nodes: int = 2
) -> Run:
    run = Run(policy, nodes=nodes, others=others)
    for move in stream:
        move.do(run)
    return run


@searched(100)
@given(policies, anything, st.tuples(policies), st.sampled_from((1, 2, 3)))
def test_every_event_in_every_state_has_a_decision_with_a_reason(
    policy: Policy, stream: list[Move], others: tuple[Policy], nodes: int
) -> None:
    run = walk(policy, stream, others, nodes)
    for turn in run.turns:
        assert turn.decision.reason, turn
        assert turn.decision.kind == type(turn.decision).__name__
        assert not isinstance(turn.decision, Ignore) or turn.after is turn.recorded


# --- budgets


@searched(100)
@given(policies, moves("answer", "answer", "watch", pauses=PAUSES[:5]), st.sampled_from(ENDINGS))
def test_no_budget_is_overdrawn_by_a_fault_that_keeps_coming(
    policy: Policy, stream: list[Move], ending: Root
) -> None:
    run = Run(policy, ending=ending, reported="fault", launch="well", missing=False)
    for move in stream:
        move.do(run)
    check_budgets(run.turns)


@searched(60)
@given(policies, anything, st.tuples(policies))
def test_no_budget_is_overdrawn_whatever_comes(
    policy: Policy, stream: list[Move], others: tuple[Policy]
) -> None:
    check_budgets(walk(policy, stream, others).turns)


def check_budgets(turns: list[Turn]) -> None:
    """Count every try again from the decisions alone."""
    taken: list[tuple[int, Try]] = []
    renewed = progressed = 0
    spent = 0
    for number, turn in enumerate(turns):
        policy = turn.recorded.policy
        if passed_what_it_had_reached(turn):
            progressed = number
            if policy.renewal == "progress":
                renewed, spent = number, 0
        if isinstance(turn.decision, Relaunch) and turn.decision.renew_budgets:
            assert isinstance(turn.event, RetryRequested) and turn.event.renew_budgets
            renewed, spent, taken = number, 0, []
        take = turn.decision.take if isinstance(turn.decision, Relaunch | Repair) else None
        if take is None:
            continue
        spent += take.spent
        assert not take.spent or spent <= policy.max_restarts
        assert turn.after.restarts_spent == spent
        if take.rung == STATED:  # no rung: what bounds it is max_restarts
            continue
        rung = next(rung for rung in policy.ladder(take.cause) if rung.label == take.rung)
        counted = naive_count(rung, take, taken, renewed, progressed, policy.renewal == "progress")
        assert rung.tries is None or counted < rung.tries, (
            f"{rung.label} for {take.cause}: try {counted + 1} of {rung.tries}"
        )
        taken.append((number, take))


def passed_what_it_had_reached(turn: Turn) -> bool:
    if isinstance(turn.event, DeadlinePassed):
        incident = turn.before.incident
        closed = incident is not None and turn.recorded.incident is None
        return closed and incident is not None and incident.reached is None
    due = turn.before.report_at_step
    return (
        isinstance(turn.event, ProgressSeen | StepReached)
        and turn.recorded is not turn.before
        and due is not None
        and turn.event.step >= due
    )


def naive_count(
    rung: Rung,
    take: Try,
    taken: list[tuple[int, Try]],
    renewed: int,
    progressed: int,
    is_vain: bool,
) -> int:
    """Count the tries that count; `is_vain`: those without progress since outlive their window."""
    count = 0
    for number, one in reversed(taken):
        if rung.consecutive:
            if one.cause in rung.reset_by if rung.reset_by else one.cause is not take.cause:
                break
            if number < progressed and (not rung.reset_by or "PROGRESS" in rung.reset_by):
                break
        elif rung.window is not None:
            if take.at - one.at >= rung.window and not (is_vain and number >= renewed):
                break
        elif number < renewed:
            break
        agree = {
            "job": True,
            "cause": one.cause is take.cause,
            "node": bool({*one.nodes} & {*take.nodes}) or one.nodes == take.nodes,
            "gpu": bool({*one.gpus} & {*take.gpus}) or one.gpus == take.gpus,
            "code": one.code == take.code,
        }
        count += one.rung == rung.label and all(agree[key] for key in rung.key)
    return count


@searched(100)
@given(policies, likely)
def test_budgets_come_back_only_by_progress_or_by_a_person(
    policy: Policy, stream: list[Move]
) -> None:
    furthest = before_the_fault = -1
    for turn in walk(policy, stream).turns:
        event = turn.event
        if (
            isinstance(event, ProgressSeen | StepReached)
            and turn.after.generation == event.generation
        ):
            if passed_what_it_had_reached(turn):
                assert event.step > before_the_fault
            furthest = max(furthest, event.step)
        if turn.before.incident is None and turn.after.incident is not None:
            before_the_fault = furthest
        if turn.after.restarts_spent < turn.before.restarts_spent:
            by_person = isinstance(event, RetryRequested) and event.renew_budgets
            assert by_person or (policy.renewal == "progress" and passed_what_it_had_reached(turn))


# --- old and repeated news


@searched(100)
@given(policies, anything, st.lists(NUMBER, min_size=8, max_size=8), st.sampled_from((-1, 1, 5)))
def test_an_event_of_another_generation_changes_nothing(
    policy: Policy, stream: list[Move], numbers: list[int], away: int
) -> None:
    run = Run(policy)
    for index, move in enumerate(stream):
        move.do(run)
        event = run.wild(Choice(numbers[index % len(numbers)] + index))
        if hasattr(event, "generation"):
            event = replace(cast(Any, event), generation=run.job.generation + away)
            recorded, decision = evaluate_event(run.job, event, run.now)
            assert recorded is run.job and isinstance(decision, Ignore)


@searched(60)
@given(policies, likely)
def test_the_deadline_of_an_earlier_wait_changes_nothing(
    policy: Policy, stream: list[Move]
) -> None:
    for turn in walk(policy, stream).turns:
        late = DeadlinePassed(due=turn.now - timedelta(days=1))
        recorded, decision = evaluate_event(turn.after, late, turn.now)
        assert recorded is turn.after
        assert isinstance(decision, Ignore), f"{turn.after.phase} until {turn.after.next.at}"


REPEATABLE = (
    FaultObserved
    | RanksHung
    | NodeUnreachable
    | ProgressSeen
    | StepReached
    | RanksSucceeded
    | RanksStopped
    | NodesExamined
    | RepairEnded
)


@searched(100)
@given(policies, moves(*OFTEN, "people"))
def test_what_is_reported_twice_counts_once(policy: Policy, stream: list[Move]) -> None:
    for turn in walk(policy, stream).turns:
        if isinstance(turn.event, REPEATABLE) and not isinstance(turn.decision, Ignore):
            told_again, decision = step(turn.after, turn.event, turn.now)
            assert essence(told_again) == essence(turn.after), (
                f"{turn.event.kind}: {turn.decision}, then {decision}"
            )


def essence(job: JobState) -> JobState:
    """All but the words: an incident may list a wait twice."""
    return replace(job, reason="", next=replace(job.next, what=""), incident=None, notices=())


# --- every run comes to rest


@searched(100)
@given(policies, likely, st.tuples(policies), st.sampled_from((1, 2, 3)))
def test_something_always_wakes_a_job_or_it_has_ended(
    policy: Policy, stream: list[Move], others: tuple[Policy], nodes: int
) -> None:
    run = Run(policy, nodes=nodes, others=others)
    for move in stream:
        move.do(run)
        assert run.moves_on, f"{run.job.phase}: {run.turns[-1]}"


@searched(100)
@given(policies, likely, st.tuples(policies), st.sampled_from((1, 2, 3)))
def test_without_further_news_a_job_ends_runs_or_asks(
    policy: Policy, stream: list[Move], others: tuple[Policy], nodes: int
) -> None:
    run = walk(policy, stream, others, nodes)
    run.always.update(verdict=Verdict.HEALTHY, outcome="done", launch="well", missing=False)
    for _ in range(40):
        if run.answer(Choice(0)):
            continue
        if run.deadline is None or (run.job.phase is Phase.WAITING_FOR_PERSON and run.job.lost):
            break
        run.pass_deadline()
    waits = run.job.phase in (Phase.RUNNING, Phase.NODE_LOST) and run.watching
    reminds = run.job.phase is Phase.WAITING_FOR_PERSON and run.job.next.at is not None
    assert run.job.phase.is_final or waits or reminds, run.job.phase


def by(ending: Callable[[str, int, datetime], Observation]) -> Callable[[Run], Event]:
    return lambda run: FaultObserved(
        run.job.generation, (ending(run.job.slots[1].node, 3, run.now),), 0, run.now
    )


FAULTS: dict[str, Callable[[Run], Event]] = {
    **{f"ending {index}": by(ending) for index, ending in enumerate((*ENDINGS, echo))},
    "hung": lambda run: RanksHung(run.job.generation, (1,), "no step", run.now),
    "lost and stuck": lambda run: NodeUnreachable(
        run.job.generation, run.job.slots[1].node, timedelta(minutes=3), "no route"
    ),
    "declared dead": lambda run: NodeDeclaredDead(run.job.slots[1].node, "", "ada"),
}


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("verdict", Verdict)
def test_the_same_fault_over_and_over_always_ends(name: str, verdict: Verdict) -> None:
    for what, fault in FAULTS.items():
        for outcome in ("done", "refused"):
            run = Run(preset(name), verdict=verdict, outcome=outcome, launch="well", missing=False)
            for_ever = repeat(run, fault)
            assert for_ever <= (NOBODYS_FAULT if name == "torchelastic" else set()), what


NOBODYS_FAULT = {Cause.NODE_LOST, Cause.NODE_FAULT, Cause.PREEMPTED}
"""A change of membership is no restart that torchelastic counts."""


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("refusal", ["stuck", "expired", "command_not_found"])
def test_a_launch_that_is_always_refused_ends(name: str, refusal: str) -> None:
    run = Run(
        preset(name),
        verdict=Verdict.HEALTHY,
        outcome="done",
        launch="refused",
        refusal=refusal,
        missing=False,
    )
    for_ever = repeat(run, FAULTS["hung"])
    assert for_ever <= (NOBODYS_FAULT if name == "torchelastic" else set())


@searched(150)
@given(
    NUMBER.map(written),
    st.sampled_from(sorted(FAULTS)),
    st.sampled_from(Verdict),
    st.sampled_from(("done", "refused")),
)
def test_the_same_fault_over_and_over_ends_under_any_policy(
    policy: Policy, fault: str, verdict: Verdict, outcome: str
) -> None:
    assert not repeat(
        Run(policy, verdict=verdict, outcome=outcome, launch="well", missing=False), FAULTS[fault]
    )


def repeat(run: Run, fault: Callable[[Run], Event]) -> set[Cause]:
    """Fail in the same way whenever it runs, ten seconds later; nothing is ever reached.

    It ends with the job, or when a person is asked for an answer or reminded of missing nodes.
    Return the causes that no budget bounds.
    """
    while not (run.job.ending or run.job.phase is Phase.WAITING_FOR_PERSON or run.job.reminders):
        takes = [take for turn in run.turns if (take := taken_in(turn)) is not None]
        causes = {take.cause for take in takes}
        if for_ever := {cause for cause in causes if most_tries(run.job.policy, cause) is None}:
            return for_ever
        assert len(takes) <= sum(most_tries(run.job.policy, cause) or 0 for cause in causes)
        # A try takes at most: missing nodes, stop, places, launch, fault; examine, stop, verdict;
        # repair, stop, outcome.
        assert len(run.turns) <= 12 * (len(takes) + 2), run.job.phase
        if run.answer(Choice(0)):
            continue
        if run.job.phase is Phase.RUNNING:
            run.wait(timedelta(seconds=10))
            run.take(fault(run))
        elif run.job.phase is Phase.NODE_LOST:  # the others wait for it without end
            run.take(RanksHung(run.job.generation, (0,), "no step", run.now))
        else:
            run.pass_deadline()
    return set()


def taken_in(turn: Turn) -> Try | None:
    return turn.decision.take if isinstance(turn.decision, Relaunch | Repair) else None


def most_tries(policy: Policy, cause: Cause) -> int | None:
    """What a ladder allows at most; None where a rung is taken for ever."""
    bound = policy.max_restarts if policy.exhaust_restarts else 0
    for rung in policy.ladder(cause):
        if rung.tries is not None:
            bound += rung.tries * (len(INVENTORY) if {"node", "gpu"} & {*rung.key} else 1)
        elif rung.spends and not rung.strategy.ends:
            bound += policy.max_restarts
        elif not rung.strategy.ends:
            return None
    return bound


# --- what a state promises


@searched(40)
@given(policies, likely)
def test_a_state_comes_back_from_history_as_it_was(policy: Policy, stream: list[Move]) -> None:
    run = walk(policy, stream)
    for turn in run.turns[:: len(run.turns) // 3 + 1]:
        payloads = CONVERTER.to_payloads([turn.after])
        assert [turn.after] == CONVERTER.from_payloads(payloads, [JobState])


CONVERTER = shared_converter.payload_converter


@searched(100)
@given(policies, anything, st.tuples(policies))
def test_every_launch_has_its_own_number_and_keeps_avoidances(
    policy: Policy, stream: list[Move], others: tuple[Policy]
) -> None:
    launched: list[int] = [0]
    for turn in walk(policy, stream, others).turns:
        assert turn.before.generation <= turn.after.generation
        assert {one.node for one in turn.before.avoided} <= {one.node for one in turn.after.avoided}
        if isinstance(turn.decision, Relaunch):
            went_back = isinstance(turn.event, LaunchRefused) and any(
                one.highest is not None for one in turn.event.refusals
            )
            assert turn.decision.generation == launched[-1] + 1 or (
                went_back and turn.decision.generation > launched[-1]
            )
            launched.append(turn.decision.generation)
            left_out = {*turn.decision.without, *(one.node for one in turn.after.avoided)}
            assert {*turn.decision.avoid} <= left_out
            if turn.decision.strategy is Strategy.REPLACE_NODE and turn.decision.take is not None:
                # the suspects are what is replaced
                assert {*turn.decision.take.nodes} <= left_out
        else:
            assert turn.after.generation == turn.before.generation


@searched(100)
@given(policies, likely)
def test_no_policy_costs_a_node_for_what_a_program_did(policy: Policy, stream: list[Move]) -> None:
    for turn in walk(policy, stream).turns:
        recovering = turn.recorded.recovering
        fault = (
            recovering.fault if recovering is not None else diagnose_event(turn.before, turn.event)
        )
        if fault is None or not fault.by_program:
            continue
        cost = turn.decision.nodes if isinstance(turn.decision, Repair) else ()
        cost = turn.decision.avoid if isinstance(turn.decision, Relaunch) else cost
        found = () if recovering is None or recovering.examined is None else recovering.examined
        sick = {one.node for one in found if one.verdict is Verdict.UNHEALTHY}
        wished = {rung.label for rung in policy.ladder(fault.cause) if rung.when}
        take = taken_in(turn)
        assert {*cost} <= sick or (take is not None and take.rung in wished), turn


PROGRAMS = (
    Cause.USER_INPUT,
    Cause.APPLICATION,
    Cause.OUT_OF_MEMORY,
    Cause.NUMERICS,
    Cause.HANG,
    Cause.UNKNOWN,
)


@pytest.mark.parametrize("name", preset_names())
def test_no_ladder_of_a_preset_repairs_a_node_for_a_program(name: str) -> None:
    programs = PROGRAMS if name == "modelarts" else (*PROGRAMS, Cause.GPU_USER_INDUCED)
    repairing = [
        rung for cause in programs for rung in preset(name).ladder(cause) if rung.strategy.repairs
    ]
    assert all(
        name == "ecs-reboot-once" and rung.when == (Verdict.UNHEALTHY,) for rung in repairing
    )
