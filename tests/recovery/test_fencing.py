"""When a launch without silent nodes is safe: each generation's times since the last proof."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from relaunch.generation import LaunchedGeneration
from relaunch.job.apply import resubmit
from relaunch.job.claim import build_claim, build_empty_claim, is_known_by
from relaunch.job.events import (
    Answered,
    FaultObserved,
    Launched,
    LaunchFailed,
    LaunchOrdered,
    LaunchRefused,
    NodeDeclaredDead,
    NodeRefusal,
    NodeReturned,
    NodesAcquired,
    NodeUnreachable,
    PolicyChanged,
    RanksFound,
    RanksHung,
    RanksStopped,
    RanksSucceeded,
    Submitted,
)
from relaunch.job.fencing import (
    FENCE_MARGIN,
    fence_wait,
    fences,
    living_generations,
    may_leave_lost_behind,
    plan_generation,
    running_timeouts,
    safe_after,
    safe_launch_at,
    unknown_generation,
)
from relaunch.job.state import JobState, Phase, Relaunch, Slot, Wait
from relaunch.pool.messages import Place
from relaunch.pool.state import ClaimRecord
from tests.recovery.builders import T0, at, exited, new_job, play, policy, record, running, step

LEASE, FENCE, GRACE, VALID = 60.0, 20.0, 5.0, 90.0
WAIT = FENCE + GRACE + FENCE_MARGIN.total_seconds()


def launched(*nodes: str, **changes: object) -> LaunchedGeneration:
    times = (timedelta(seconds=seconds) for seconds in (LEASE, FENCE, GRACE, VALID))
    made = LaunchedGeneration(1000, 1, nodes, len(nodes), True, *times, complete=True)
    return replace(made, **changes)  # type: ignore[arg-type]


# --- the rule


@pytest.mark.parametrize(
    ("stopped_at", "last_heard", "expected"),
    [
        pytest.param(
            {"n1": 5.0, "n3": 50.0},
            {"n2": -180.0},
            50.0,
            id="the last proven stop counts, not the first",
        ),
        pytest.param(
            {"n1": 5.0, "n3": 8.0},
            {"n2": -20.0},
            LEASE - 20.0,
            id="or the end of the silent node's own lease",
        ),
        pytest.param(
            {"n1": 5.0},
            {"n2": -180.0, "n3": -10.0},
            LEASE - 10.0,
            id="or of the lease of another that is silent",
        ),
        pytest.param(
            {"n1": 5.0},
            {"n2": -180.0},
            LEASE,
            id="which was heard until now where nothing else is known",
        ),
        pytest.param(
            {"n1": 5.0, "n3": 8.0},
            {"n2": VALID},
            VALID + LEASE,
            id="an order on its way may start ranks yet",
        ),
    ],
)
def test_the_wait_begins_once_no_node_of_the_gang_can_vouch(
    stopped_at: dict[str, float], last_heard: dict[str, float], expected: float
) -> None:
    assert (
        safe_launch_at([launched("n1", "n2", "n3")], 0.0, stopped_at, last_heard) == expected + WAIT
    )


def test_with_every_node_proven_stopped_nothing_is_awaited() -> None:
    assert safe_launch_at([launched("n1", "n2", stopped=("n2",))], 7.0, {"n1": 9.0}, {}) == 7.0
    assert safe_launch_at([], 7.0, {}, {}) == 7.0


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(launched("n1", "n2", fences=False), id="ranks that do not fence"),
        pytest.param(launched("n2", "n3"), id="a gang of which none is proven stopped"),
        pytest.param(unknown_generation(("n2",)), id="ranks of which nothing is known"),
    ],
)
def test_no_wait_is_long_enough(one: LaunchedGeneration) -> None:
    assert (
        safe_launch_at(
            [launched("n1", "n2"), one], 0.0, {"n1": 5.0}, {"n2": -1000.0, "n3": -1000.0}
        )
        is None
    )


def test_earlier_stops_are_proof_and_generations_stand_alone() -> None:
    old = launched("n1", "n2", stopped=("n1",), fence_after=timedelta(hours=1))
    new = launched("n2", "n3", generation=2)
    long = 3600.0 + GRACE + FENCE_MARGIN.total_seconds()
    assert safe_launch_at([old], 0.0, {}, {"n2": -1000.0}) == long
    assert safe_launch_at([old, new], 0.0, {"n3": 9.0}, {"n2": -1000.0}) == long
    # of the newer one none is proven stopped
    assert safe_launch_at([old, new], 0.0, {}, {"n2": -1000.0}) is None


def test_an_unfinished_launch_may_start_ranks_while_it_is_valid() -> None:
    half = launched("n1", "n2", complete=False)
    assert safe_launch_at([half], 0.0, {"n1": 1.0}, {}) == VALID + LEASE + WAIT
    older = safe_launch_at([half], 0.0, {"n1": 1.0}, {"n2": -10.0})
    # how long it was silent before says nothing of an order that is on its way
    assert older == VALID + LEASE + WAIT
    assert (
        safe_launch_at([half], 0.0, {"n1": 1.0}, {"n2": VALID + 1.0}) == VALID + 1.0 + LEASE + WAIT
    )


def test_a_stop_travels_as_many_hops_as_the_launched_size_takes() -> None:
    large = launched("n1", "n2", size=100)
    assert fence_wait(large, large.size) == fence_wait(launched("n1", "n2"), 2) + timedelta(
        seconds=FENCE
    )
    assert safe_launch_at([large], 0.0, {"n1": 0.0}, {"n2": -1000.0}) == WAIT + FENCE


# --- what a job remembers of its launches


def short(job: JobState) -> PolicyChanged:
    times = {"fence_after": "10s", "lease": "30s", "stop_grace": "1s", "heartbeat": "10s"}
    return PolicyChanged(policy(timeouts=times, strict_lease=True), "faster", "ada")


def test_a_changed_policy_changes_the_next_launch_only() -> None:
    job, _ = play(
        running(), NodeUnreachable(1, "n2", timedelta(seconds=20), "no route"), now=at(120)
    )
    before = safe_after(job, at(120))
    changed = record(job, short(job), at(121))
    assert safe_after(changed, at(120)) == before
    times = running_timeouts(changed)
    assert (times.lease, times.fence_after, times.stop_grace) == tuple(
        timedelta(seconds=seconds) for seconds in (60, 60, 15)
    )
    planned = plan_generation(changed, 2, ("n1", "n2"))
    assert (planned.lease, planned.fence_after, planned.stop_grace) == tuple(
        timedelta(seconds=seconds) for seconds in (30, 10, 1)
    )


def test_heartbeats_come_often_enough_for_the_lease_that_runs() -> None:
    slow = policy(
        timeouts={"lease": "600s", "heartbeat": "120s", "lost_after": "600s", "fence_after": "120s"}
    )
    changed = record(running(), PolicyChanged(slow, "", ""), T0)
    assert (running_timeouts(changed).lease, running_timeouts(changed).heartbeat) == (
        timedelta(seconds=60),
        timedelta(seconds=20),
    )
    assert running_timeouts(new_job(policy=slow)) == slow.timeouts


def test_strict_lease_fences_no_ranks_that_run_without_it() -> None:
    job = record(running(gang="independent"), short(new_job()), T0)
    assert not fences(job)
    job, decision = play(
        job,
        NodeUnreachable(1, "n2", timedelta(seconds=20), "no route"),
        RanksHung(1, (0,), "flat", T0),
    )
    assert isinstance(decision, Wait) and not may_leave_lost_behind(job)
    assert plan_generation(job, 2, ("n1",)).fences


def test_a_launch_is_recorded_as_ordered_despite_later_decisions() -> None:
    job, _ = step(new_job(), Submitted("", "ada"))
    job = record(job, NodesAcquired((Slot("n1", ""), Slot("n2", ""))), T0)
    launch = plan_generation(job, 1, ("n1", "n2"))
    job = record(replace(job, generation=2), LaunchOrdered(1, launch), T0)
    assert job.launched == (launch,)


def ordered(*, generation: int = 2) -> JobState:
    """Generation 1 runs, and the next one is on its way to the same nodes."""
    job = replace(running(), generation=generation)
    return record(
        job, LaunchOrdered(generation, plan_generation(job, generation, ("n1", "n2"))), T0
    )


def test_earlier_ranks_are_forgotten_when_a_launch_is_complete() -> None:
    job = record(ordered(), Launched(2, T0, T0), T0)
    assert [(one.generation, one.complete, one.nodes) for one in job.launched] == [
        (2, True, ("n1", "n2"))
    ]


@pytest.mark.parametrize("started", [False, True])
def test_a_failed_launch_leaves_only_ranks_it_was_to_start(
    started: bool,
) -> None:
    refused = LaunchRefused(2, (NodeRefusal("n2", "command_not_found", "no such file"),), started)
    failed = LaunchFailed(2, ("n2",), started, timedelta(seconds=90), "no answer")
    kept = [1, 2] if started else [1]
    for event in (refused, failed):
        job = record(ordered(), event, T0)
        assert [one.generation for one in job.launched] == kept


def test_ranks_a_refused_launch_started_elsewhere_may_be_alive() -> None:
    job, _ = step(new_job(), Submitted("", "ada"))
    job = record(job, NodesAcquired((Slot("n1", ""), Slot("n2", ""))), T0)
    refused = LaunchRefused(1, (NodeRefusal("n2", "cannot_start", "no memory"),), started=True)
    after = record(job, refused, T0)
    assert (after.maybe_alive, [one.nodes for one in after.launched]) == (
        ("n1", "n2"),
        [("n1", "n2")],
    )


@pytest.mark.parametrize("started", [False, True])
def test_the_end_of_an_abandoned_launch_says_if_ranks_may_live(
    started: bool,
) -> None:
    alive = {"n1", "n2"} if started else set()
    reserved = replace(ordered(), maybe_alive=(), phase=Phase.LAUNCHING)
    by_person = step(reserved, Answered("take-over", "wait", "ada"))[0]
    later = replace(reserved, generation=3)
    for job in (by_person, later):
        refused = LaunchRefused(2, (NodeRefusal("n2", "held", "it is examined"),), started)
        failed = LaunchFailed(2, ("n2",), started, timedelta(seconds=90), "no answer")
        done = (Launched(2, T0, T0),) if started else ()
        for event in (refused, failed, *done):
            after = record(job, event, T0)
            assert set(after.maybe_alive) == alive
            assert after.lost == ()
            assert [one.generation for one in after.launched] == ([1, 2] if started else [1])
    assert record(later, Launched(1, T0, T0), T0) == later
    known = replace(later, maybe_alive=("n1", "n2", "n9"))
    assert record(known, LaunchFailed(2, (), started, timedelta(0), ""), T0) == known
    nothing = replace(later, launched=())
    # nothing was ordered of which it could be the end
    assert record(nothing, Launched(2, T0, T0), T0) == nothing


def test_a_node_that_may_yet_take_the_order_has_negative_silence() -> None:
    job = record(ordered(), LaunchFailed(2, ("n2",), True, timedelta(seconds=90), "no answer"), T0)
    assert [(lost.node, lost.unheard_for) for lost in job.lost] == [("n2", timedelta(seconds=-90))]


def test_launches_are_kept_until_proven_stopped_on_every_node() -> None:
    job = record(ordered(), RanksStopped(2, ("n1",), T0), T0)
    assert [(one.generation, one.stopped) for one in job.launched] == [(1, ("n1",)), (2, ("n1",))]
    assert record(job, RanksStopped(2, ("n2",), T0), T0).launched == ()
    assert record(ordered(), RanksSucceeded(2), T0).launched == ()


def test_attempts_that_differ_by_their_number_only_take_no_room() -> None:
    job = running()
    for generation in range(2, 50):
        job = replace(job, generation=generation)
        job = record(
            job, LaunchOrdered(generation, plan_generation(job, generation, ("n1", "n2"))), T0
        )
    assert [(one.generation, one.complete) for one in job.launched] == [
        (1, True),
        (48, False),
        (49, False),
    ]


def test_a_node_declared_dead_by_a_person_is_no_proof_for_others() -> None:
    job = record(running(), NodeDeclaredDead("n1", "no power", "ada"), T0)
    assert [(one.nodes, one.size, one.stopped) for one in job.launched] == [(("n2",), 2, ())]
    assert safe_launch_at(job.launched, 0.0, {}, {}) is None
    assert record(job, NodeDeclaredDead("n2", "no power", "ada"), T0).launched == ()


def test_a_state_without_launches_is_judged_by_its_policy() -> None:
    old = replace(running(), launched=())
    (judged,) = living_generations(old)
    assert (judged.nodes, judged.size, judged.lease, judged.complete) == (
        ("n1", "n2"),
        2,
        timedelta(seconds=60),
        True,
    )
    assert living_generations(new_job()) == ()
    (planned,) = living_generations(replace(new_job(), slots=(Slot("n7", ""),)))
    assert (planned.nodes, planned.size) == (("n7",), 2)


# --- nodes that are lost, and return


def test_a_lost_node_back_before_a_fault_is_not_left_behind() -> None:
    job, _ = step(running(), NodeUnreachable(1, "n2", timedelta(seconds=200), "no route"))
    after, decision = play(
        job, NodeReturned(1, "n2"), FaultObserved(1, (exited(0, "n1", code=1),), 0, T0)
    )
    assert isinstance(decision, Relaunch)
    assert (after.lost, decision.without) == ((), ())


def test_a_fault_renews_ages_of_lost_nodes_and_the_longer_counts() -> None:
    job, _ = play(
        running(nodes=3),
        NodeUnreachable(1, "n2", timedelta(seconds=20), "no route"),
        NodeUnreachable(1, "n3", timedelta(seconds=20), "no route"),
    )
    ages = (
        ("n2", timedelta(seconds=500)),
        ("n3", timedelta(seconds=3)),
        ("n9", timedelta(seconds=9)),
    )
    after = record(job, RanksHung(1, (0,), "flat", T0, unheard=ages), at(500))
    assert [(lost.node, lost.unheard_for.total_seconds()) for lost in after.lost] == [
        ("n2", 500.0),
        ("n3", 20.0),
    ]


# --- submissions of one name


def test_ranks_of_old_submissions_are_judged_by_their_own_launch() -> None:
    old = launched("n1", "n2", "n3", submission=900)
    job = record(new_job(), RanksFound(("n1", "n2"), (old, launched("n8", submission=800))), T0)
    assert job.maybe_alive == ("n1", "n2")
    # n3 is held no more: it was proven stopped
    assert job.launched == (replace(old, stopped=("n3",)),)
    again = record(job, RanksFound(("n1", "n2"), (old,)), T0)
    assert again.launched == job.launched


def test_silence_proves_nothing_of_ranks_without_a_known_launch() -> None:
    job = record(new_job(), RanksFound(("n1", "n4"), (launched("n1", "n2", submission=900),)), T0)
    assert job.launched[0] == unknown_generation(("n4",))
    assert not fences(job)
    assert safe_after(job, T0) is None


def test_a_retry_goes_on_with_launches_of_the_last_submission() -> None:
    job = running()
    again = resubmit(job, 2000, "ada", T0, False, ())
    assert (again.maybe_alive, again.launched) == (job.maybe_alive, job.launched)


def test_a_claim_lists_launches_maybe_alive_and_the_next_one() -> None:
    job = record(running(), RanksStopped(1, ("n1",), T0), T0)
    living, planned = build_claim(job, 7, keep=("n1",)).launched
    assert (living.nodes, living.complete, living.stopped) == (("n1", "n2"), False, ())
    assert (planned.generation, planned.nodes, planned.size, planned.fences) == (1, (), 2, True)
    assert build_empty_claim(job, 8).launched == (living,)


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, True),
        ({"lease": timedelta(seconds=1), "fence_after": timedelta(seconds=1)}, True),
        ({"lease": timedelta(hours=1)}, False),
        ({"fence_after": timedelta(hours=1)}, False),
        ({"stop_grace": timedelta(hours=1)}, False),
        ({"valid_for": timedelta(hours=1)}, False),
        ({"fences": False}, False),
    ],
)
def test_longer_times_reach_the_fleet_before_they_are_launched(
    changes: dict[str, object], known: bool
) -> None:
    told = build_claim(running(), 7).launched
    next_one = replace(
        plan_generation(running(), 2, ("n1", "n2")),
        **changes,  # type: ignore[arg-type]
    )
    assert is_known_by(told, next_one) is known
    # nothing was reported of it
    assert not is_known_by(told[:-1], next_one)


def test_a_launch_known_not_to_fence_covers_longer_times() -> None:
    job = running(gang="independent")
    told = build_claim(job, 7).launched
    assert is_known_by(
        told, replace(plan_generation(job, 2, ("n1", "n2")), lease=timedelta(hours=1), fences=True)
    )


def test_a_claim_record_knows_which_nodes_were_launched_together() -> None:
    job = running()
    record = ClaimRecord(
        build_claim(job, 7),
        granted=(Place("n1"), Place("n3")),
        inherited_launched=(launched("n5"),),
    )
    assert [(one.nodes, one.size) for one in record.launched] == [
        (("n5",), 1),
        (("n1", "n2"), 2),
        (("n1", "n3"), 2),
    ]
    waits = replace(record, granted=None, inherited_launched=())
    assert [one.nodes for one in waits.launched] == [("n1", "n2")]
