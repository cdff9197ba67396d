"""What follows from an event: tables over decide, walks over whole steps."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.job.apply import finish
from relaunch.job.claim import suspects
from relaunch.job.events import (
    CancelRequested,
    DeadlinePassed,
    FaultObserved,
    Launched,
    LaunchFailed,
    LaunchRefused,
    MessageRejected,
    NodeDeclaredDead,
    NodeRefusal,
    NodeReturned,
    NodesExamined,
    NodesMissing,
    NodeUnreachable,
    ProgressSeen,
    RanksHung,
    RanksStopped,
    RanksSucceeded,
    RetryRequested,
    StepReached,
    Submitted,
)
from relaunch.job.fencing import FENCE_MARGIN, fences, hops, peers_of, safe_after
from relaunch.job.state import (
    Ask,
    Examine,
    ExaminedNode,
    Ignore,
    JobState,
    Phase,
    Relaunch,
    Stop,
    Wait,
)
from relaunch.spec.policy import Strategy
from tests.recovery.builders import (
    T0,
    at,
    called,
    error,
    exited,
    fault,
    new_job,
    play,
    policy,
    relaunched,
    running,
    step,
)

BUG = exited(2, "n2", code=1, error=error("ValueError: bad batch"))
KILL = exited(3, "n2", signal=9)


def unreachable(job: JobState, node: str = "n2", seconds: float = 0.0) -> NodeUnreachable:
    return NodeUnreachable(job.generation, node, timedelta(seconds=seconds), "no answer within 5 s")


def test_submitting_launches_generation_1(snapshot: SnapshotAssertion) -> None:
    job, decision = step(new_job(), Submitted("first try", "ada"))
    assert decision == Relaunch(1, decision.reason, keep_nodes=False)
    assert decision.reason == snapshot
    assert (job.generation, job.phase) == (1, Phase.LAUNCHING)


def test_an_event_of_another_generation_changes_nothing() -> None:
    job = running(generation=4)
    for stale in (
        fault(running(generation=3), BUG),
        Launched(5, T0, T0),
        NodeUnreachable(3, "n1", timedelta(0), ""),
    ):
        after, decision = step(job, stale)
        assert isinstance(decision, Ignore)
        assert job == after


def test_s3_2_a_failed_rank_spends_a_try_before_all_restart() -> None:
    job, decision = step(running(), fault(running(), BUG))
    assert isinstance(decision, Relaunch)
    assert (
        decision.generation,
        decision.strategy,
        decision.cause,
        decision.spent,
    ) == (2, Strategy.RESTART_IN_PLACE, Cause.APPLICATION, True)
    assert (job.generation, job.restarts_spent, len(job.tries)) == (2, 1, 1)
    assert "ValueError: bad batch" in decision.reason


def test_s3_2_the_ladder_ends_and_the_job_fails_with_its_code() -> None:
    job = running(
        policy=policy(
            causes={
                "APPLICATION": [{"strategy": "RESTART_IN_PLACE", "tries": 3}, {"strategy": "FAIL"}]
            },
            no_progress_stop="off",
            startup_stop="off",
        )
    )
    for expected in (2, 3, 4):
        job, decision = step(job, fault(job, BUG))
        assert isinstance(decision, Relaunch) and expected == decision.generation
        job = relaunched(job)
    job, decision = step(job, fault(job, BUG))
    assert isinstance(decision, Stop)
    assert (decision.phase, decision.exit_code) == (Phase.FAILED, 1)
    assert job.phase == Phase.STOPPING


def test_max_restarts_is_the_jobs_own_budget_over_all_causes(snapshot: SnapshotAssertion) -> None:
    job = running(policy=policy(max_restarts=1))
    job, _ = step(job, fault(job, BUG))
    job, decision = step(relaunched(job), fault(job, KILL))
    assert isinstance(decision, Stop)
    assert decision.reason == snapshot


def test_a_fault_that_is_not_the_jobs_own_spends_nothing() -> None:
    job = running(policy=policy(max_restarts=0))
    job, _ = step(job, unreachable(job))
    job, decision = step(job, RanksHung(1, (0,), "step 7 has not changed", T0))
    assert isinstance(decision, Relaunch)
    assert (decision.strategy, decision.without, decision.spent) == (
        Strategy.REPLACE_NODE,
        ("n2",),
        False,
    )
    assert job.restarts_spent == 0


def test_exit_code_93_is_never_restarted() -> None:
    _, decision = step(running(), fault(running(), exited(0, code=93)))
    assert isinstance(decision, Stop) and decision.exit_code == 93


def test_budgets_are_renewed_by_observed_progress_only() -> None:
    job = running()
    job, _ = play(job, ProgressSeen(1, 10, T0), fault(job, BUG))
    job = relaunched(job)
    assert job.report_at_step == 11
    job, _ = step(job, ProgressSeen(2, 10, at(5)))
    assert job.restarts_spent == 1
    job, decision = step(job, StepReached(2, 11, at(6)))
    assert isinstance(decision, Wait) and decision.phase == Phase.RUNNING
    assert (job.restarts_spent, job.incident, len(job.incidents)) == (0, None, 1)
    assert at(6) == job.incidents[0].recovered


def test_a_job_that_reports_nothing_renews_by_healthy_for() -> None:
    job, _ = step(running(), fault(running(), BUG))
    job, decision = step(job, Launched(2, T0, T0))
    assert isinstance(decision, Wait) and T0 + timedelta(hours=1) == decision.until
    job, _ = step(job, DeadlinePassed(), T0 + timedelta(hours=1))
    assert (job.restarts_spent, job.incident) == (0, None)


def test_windowed_tries_are_not_renewed_by_progress() -> None:
    job = running(
        policy=policy(
            causes={
                "UNKNOWN": [
                    {"strategy": "RESTART_IN_PLACE", "tries": 1, "window": "1h"},
                    {"strategy": "FAIL"},
                ]
            }
        )
    )
    job, _ = step(job, fault(job, KILL))
    job, _ = play(relaunched(job), StepReached(2, 1, at(1)), now=at(1))
    _, decision = step(job, fault(job, KILL), at(60))
    assert isinstance(decision, Stop)
    _, decision = step(job, fault(job, KILL), at(3700))
    assert isinstance(decision, Relaunch)


def test_no_progress_counts_known_flat_generations_of_own_faults(
    snapshot: SnapshotAssertion,
) -> None:
    job = running(
        policy=policy(
            no_progress_stop=2, causes={"APPLICATION": [{"strategy": "RESTART_IN_PLACE"}]}
        )
    )
    job, _ = play(job, ProgressSeen(1, 10, T0), fault(job, BUG))
    for expected in (Relaunch, Stop):
        job = relaunched(job)
        job, decision = play(job, ProgressSeen(job.generation, 10, T0), fault(job, BUG))
        assert isinstance(decision, expected), decision
    assert decision.reason == snapshot


def test_s2_7_an_unreachable_node_is_no_failure_and_no_stop() -> None:
    job, decision = step(running(), unreachable(running()))
    assert isinstance(decision, Wait)
    assert (job.phase, job.lost_names, job.maybe_alive) == (Phase.NODE_LOST, ("n2",), ("n1", "n2"))


def test_s2_8_a_node_that_comes_back_goes_on_and_spends_nothing(
    snapshot: SnapshotAssertion,
) -> None:
    job, decision = play(running(), unreachable(running()), NodeReturned(1, "n2"))
    assert isinstance(decision, Wait)
    assert (job.phase, job.lost, job.restarts_spent, job.generation) == (Phase.RUNNING, (), 0, 1)
    assert job.incidents[0].outcome == snapshot


def test_with_only_lost_connections_a_silent_node_is_the_suspect() -> None:
    echo = exited(
        0, "n1", code=1, log_tail=("ConnectionResetError: [Errno 104] Connection reset by peer",)
    )
    job = running()
    event = FaultObserved(1, (echo,), 0, T0, silent=(("n2", timedelta(seconds=20)),))
    job, decision = step(job, event, at(100))
    assert isinstance(decision, Relaunch)
    assert (decision.cause, decision.without, decision.spent) == (Cause.NODE_LOST, ("n2",), False)
    # it is fenced before anything starts elsewhere
    assert [("n2", at(80))] == [(lost.node, lost.last_heard_at) for lost in job.lost]


def test_a_gang_that_stands_still_waits_for_its_silent_node() -> None:
    silent = (("n2", timedelta(seconds=70)),)
    job, decision = step(
        running(), RanksHung(1, (0,), "step 7 has not changed for 61 s", T0, silent=silent), at(100)
    )
    assert isinstance(decision, Relaunch)
    assert (decision.cause, decision.without) == (Cause.NODE_LOST, ("n2",))
    assert job.lost_names == ("n2",)


def test_a_launch_that_ends_half_way_again_and_again_is_counted() -> None:
    job = running()
    job, _ = step(job, fault(job, KILL))
    for _ in range(5):
        refused = LaunchRefused(
            job.generation,
            (NodeRefusal("n1", "not_above", "it was launched before", (1000, job.generation)),),
        )
        job, decision = step(job, refused)
        assert isinstance(decision, Relaunch) and decision.cause == Cause.PLATFORM
    refused = LaunchRefused(
        job.generation,
        (NodeRefusal("n1", "not_above", "it was launched before", (1000, job.generation)),),
    )
    _, decision = step(job, refused)
    assert isinstance(decision, Ask)


def test_with_all_nodes_lost_nothing_is_proven_or_launched() -> None:
    job = running()
    job, decision = play(
        job, unreachable(job, "n1"), unreachable(job, "n2"), RanksHung(1, (0,), "flat", T0)
    )
    assert isinstance(decision, Wait) and decision.phase == Phase.NODE_LOST
    job, decision = step(job, DeadlinePassed(), at(7200))
    assert isinstance(decision, Ask) and job.phase == Phase.WAITING_FOR_PERSON
    job, decision = step(job, NodeReturned(1, "n1"), at(7300))
    # with a witness, the other one can be left behind
    assert isinstance(decision, Relaunch)
    assert decision.without == ("n2",)


@pytest.mark.parametrize("shape", [{"nodes": 1}, {"gang": "independent"}])
def test_ranks_that_can_go_on_alone_are_not_launched_elsewhere(shape: dict[str, Any]) -> None:
    job = running(**shape)
    node = "n1" if shape.get("nodes") == 1 else "n2"
    job, decision = play(
        job, unreachable(job, node), fault(job, exited(0, "n1", code=1, log_tail=("boom",)))
    )
    assert not fences(job)
    assert isinstance(decision, Wait) and decision.until is not None
    job, decision = step(job, DeadlinePassed(), at(4000))
    assert isinstance(decision, Ask)
    job, decision = step(job, NodeReturned(1, node), at(4100))
    # the fault that had to wait is dealt with now
    assert isinstance(decision, Relaunch)
    assert decision.cause == Cause.APPLICATION


def test_strict_lease_lets_them_be_launched_elsewhere() -> None:
    job = running(policy=policy(strict_lease=True), gang="independent")
    job, decision = play(job, unreachable(job), RanksHung(1, (0,), "flat", T0))
    assert isinstance(decision, Relaunch)


def test_a_lost_node_is_safe_after_lease_and_fence_and_grace() -> None:
    job, _ = step(running(), unreachable(running(), seconds=20), at(120))
    wait = timedelta(seconds=60 + 15) + FENCE_MARGIN
    assert at(100) + timedelta(seconds=60) + wait == safe_after(job, at(110))
    assert at(500) + wait == safe_after(job, at(500))
    alone = running(nodes=1)
    assert safe_after(step(alone, unreachable(alone, "n1"))[0], at(0)) is None


@pytest.mark.parametrize("nodes", [2, 17, 18, 100, 256, 257, 2048])
def test_a_stop_reaches_every_node_within_the_awaited_hops(nodes: int) -> None:
    for stopped in (0, 1, nodes - 1):
        gone, rounds = {stopped}, 0
        while len(gone) < nodes:
            gone |= {node for node in range(nodes) if gone & set(peers_of(node, nodes))}
            rounds += 1
        assert rounds <= hops(nodes)
    assert all(
        node not in peers_of(node, nodes) and len(peers_of(node, nodes)) <= 16
        for node in range(nodes)
    )


def test_declared_dead_is_a_persons_proof() -> None:
    job = running(nodes=1)
    job, decision = play(job, unreachable(job, "n1"), NodeDeclaredDead("n1", "burnt", "ada"))
    assert isinstance(decision, Relaunch) and decision.without == ("n1",)
    assert job.maybe_alive == ()


def test_a_node_declared_dead_has_an_incident() -> None:
    job, decision = step(running(), NodeDeclaredDead("n2", "burnt", "ada"), T0)
    assert isinstance(decision, Relaunch) and decision.strategy is Strategy.REPLACE_NODE
    assert job.incident is not None
    assert (job.incident.cause, job.incident.nodes) == (Cause.NODE_LOST, ("n2",))
    assert "ada" in job.incident.reason and "burnt" in job.incident.reason
    assert [one.strategy for one in job.incident.decisions] == [Strategy.REPLACE_NODE]
    assert [one.node for one in suspects(job)] == ["n2"]
    ending, _ = play(running(), CancelRequested("", "ada"), NodeDeclaredDead("n2", "", "ada"))
    assert ending.incident is None


def test_s2_7_a_node_that_never_ran_the_job_is_not_lost() -> None:
    """It was never heard: nothing of the job can be alive there, and no fence is needed."""
    job, _ = step(new_job(), Submitted("", "ada"))
    job, decision = step(job, LaunchFailed(1, ("n2",), False, timedelta(0), "no answer"))
    assert isinstance(decision, Relaunch)
    assert (decision.without, job.lost, job.phase) == (("n2",), (), Phase.LAUNCHING)


def test_a_node_lost_in_the_middle_of_a_launch_is_fenced() -> None:
    job, _ = step(running(), fault(running(), KILL))
    job, decision = step(job, LaunchFailed(2, ("n2",), True, timedelta(seconds=90), "no answer"))
    assert isinstance(decision, Relaunch)
    assert job.lost_names == ("n2",) and set(job.maybe_alive) == {"n1", "n2"}


def test_after_a_reset_tokens_go_on_above_the_highest_one_seen() -> None:
    job, _ = step(running(generation=3), fault(running(generation=3), KILL))
    job, decision = step(job, LaunchRefused(4, (NodeRefusal("n1", "not_above", "…", (1000, 7)),)))
    assert isinstance(decision, Relaunch)
    assert (job.generation, decision.strategy, job.restarts_spent) == (8, None, 1)


def test_a_node_claiming_ever_higher_generations_is_left(snapshot: SnapshotAssertion) -> None:
    job, _ = step(running(), fault(running(), KILL))
    for turn in range(3):
        job, decision = step(
            job,
            LaunchRefused(
                job.generation, (NodeRefusal("n1", "not_above", "…", (1000, job.generation + 1)),)
            ),
        )
        assert isinstance(decision, Relaunch) and (decision.strategy, decision.without) == (
            None,
            (),
        ), turn
    claim = LaunchRefused(
        job.generation, (NodeRefusal("n1", "not_above", "…", (1000, job.generation + 1)),)
    )
    job, decision = step(job, claim)
    assert isinstance(decision, Relaunch)
    assert (decision.strategy, decision.cause, decision.without) == (
        Strategy.REPLACE_NODE,
        Cause.NODE_LOST,
        ("n1",),
    )
    assert decision.reason == snapshot
    _, decision = step(
        job,
        LaunchRefused(
            job.generation, (NodeRefusal("n1", "not_above", "…", (1000, job.generation + 1)),)
        ),
    )
    assert decision.strategy is None  # another node may have seen a higher one


def test_a_later_submission_ends_this_one() -> None:
    job, _ = step(running(), fault(running(), KILL))
    _, decision = step(job, LaunchRefused(2, (NodeRefusal("n1", "not_above", "…", (2000, 1)),)))
    assert isinstance(decision, Stop) and decision.phase == Phase.FAILED


def test_command_not_found_is_not_tried_again() -> None:
    job, _ = step(new_job(), Submitted("", "ada"))
    _, decision = step(
        job, LaunchRefused(1, (NodeRefusal("n1", "command_not_found", "trian.py is not on PATH"),))
    )
    assert isinstance(decision, Stop) and decision.exit_code == 127


def test_too_small_a_fleet_is_hopeless_and_a_short_one_awaited() -> None:
    job, _ = step(new_job(), Submitted("", "ada"))
    waiting, decision = step(job, NodesMissing("1 of 2 answer"))
    assert isinstance(decision, Wait) and waiting.phase == Phase.QUEUED and decision.until is None
    _, decision = step(job, NodesMissing("fleet a has 1 nodes", hopeless=True))
    assert isinstance(decision, Stop) and decision.exit_code == 2


def test_s3_4_when_every_rank_succeeds_so_does_the_job() -> None:
    job, decision = step(running(), RanksSucceeded(1))
    assert isinstance(decision, Stop) and (decision.phase, decision.exit_code) == (
        Phase.SUCCEEDED,
        0,
    )
    job = finish(job, at(9))
    assert (Phase.SUCCEEDED, at(9)) == (job.phase, job.ended_at)


@pytest.mark.parametrize("phase_event", [None, "lost", "waiting", "asking", "launching"])
def test_s5_4_cancel_works_in_every_phase(phase_event: str | None) -> None:
    job = running()
    if phase_event == "lost":
        job, _ = step(job, unreachable(job))
    elif phase_event == "waiting":
        job, _ = play(new_job(), Submitted("", ""), NodesMissing("0 of 2"))
    elif phase_event == "asking":
        job, _ = play(job, unreachable(job, "n1"), unreachable(job, "n2"), DeadlinePassed())
        assert job.phase == Phase.WAITING_FOR_PERSON
    elif phase_event == "launching":
        job, _ = step(job, fault(job, KILL))
    job, decision = step(job, CancelRequested("enough", "ada"))
    assert isinstance(decision, Stop) and (decision.phase, decision.exit_code) == (
        Phase.CANCELLED,
        130,
    )
    job, decision = step(job, RanksStopped(job.generation, ("n1", "n2"), T0))
    assert (job.phase, job.maybe_alive) == (Phase.STOPPING, ())
    assert finish(job, T0).phase == Phase.CANCELLED


def test_s5_4_force_retry_launches_again_without_spending() -> None:
    job, _ = step(running(), fault(running(), KILL))
    job, decision = step(job, RetryRequested("driver updated", "ada", ("n2",), renew_budgets=True))
    assert isinstance(decision, Relaunch)
    assert (decision.generation, decision.strategy, decision.avoid) == (3, None, ("n2",))
    assert (job.restarts_spent, job.tries) == (0, ())
    assert tuple(avoided.node for avoided in job.avoided) == ("n2",)


def test_while_the_job_ends_nothing_restarts_it() -> None:
    job, _ = step(running(), CancelRequested("", "ada"))
    for event in (
        fault(job, KILL),
        RetryRequested("", "ada"),
        Launched(1, T0, T0),
        DeadlinePassed(),
    ):
        after, decision = step(job, event)
        assert isinstance(decision, Ignore)
        assert after.phase == Phase.STOPPING


def test_an_unknown_message_becomes_a_notice(snapshot: SnapshotAssertion) -> None:
    job, decision = step(running(), MessageRejected("cancel", "becuase: unknown key"))
    assert isinstance(decision, Ignore)
    assert job.notices == snapshot


def test_a_second_fault_before_recovery_joins_the_same_incident() -> None:
    job = running()
    job, _ = step(job, fault(job, KILL))
    job, _ = step(relaunched(job), fault(job, BUG))
    assert job.incident is not None
    assert (job.incident.cause, len(job.incident.decisions)) == (Cause.UNKNOWN, 2)
    assert job.incidents == ()


def test_a_hang_has_its_own_budget() -> None:
    job = running(policy=policy(max_restarts=0))
    job, decision = step(job, RanksHung(job.generation, (1,), "flat", T0))
    assert isinstance(decision, Relaunch) and not decision.spent
    job, _ = step(relaunched(job), RanksHung(2, (1,), "flat", T0))
    job, decision = step(job, called()(job))
    assert isinstance(decision, Relaunch) and not decision.spent
    job, _ = step(relaunched(job), RanksHung(3, (1,), "flat", T0))
    job, decision = step(job, called()(job))
    assert isinstance(decision, Examine) and decision.nodes == ("n1", "n2")
    well = tuple(ExaminedNode(node, Verdict.HEALTHY, "dcgmi diag") for node in decision.nodes)
    _, decision = step(job, NodesExamined(job.generation, well))
    assert isinstance(decision, Stop)
