"""Jobs that may have fewer nodes: when they shrink, when they grow, and what they say about it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.job.apply import resubmit
from relaunch.job.claim import build_claim, build_current_claim, build_empty_claim, more_at
from relaunch.job.events import (
    CancelRequested,
    DrainRequested,
    FaultObserved,
    Launched,
    NodesAcquired,
    NodesGranted,
    NodesOffered,
    RetryRequested,
    StepReached,
    Submitted,
)
from relaunch.job.fencing import fences
from relaunch.job.ladder import explain_shrink, remaining_slots
from relaunch.job.ranks import common_environment, keep_places, seat
from relaunch.job.replay import Step, name_decision, simulate
from relaunch.job.state import AvoidedNode, Decision, Ignore, JobState, Phase, Relaunch, Slot, Wait
from relaunch.pool.messages import Place
from relaunch.spec.policy import Policy, Strategy, preset, resolve
from tests.recovery.builders import (
    T0,
    at,
    back,
    climbed,
    describe,
    died,
    error,
    examine,
    exited,
    fault,
    hung,
    lose,
    new_job,
    play,
    raised,
    relaunched,
    rungs,
    running,
    step,
    suspected,
    walk,
    xid,
)
from tests.recovery.generated import NUMBER, OFTEN, moves, policies, searched
from tests.recovery.streams import INVENTORY, Choice, Move, Run

RANGE = {"min": 2, "max": 4}
SHRINK = {"strategy": "SHRINK"}
LATER = at(1800)


def elastic(count: int = 4, *, policy: Policy | None = None, **spec: Any) -> JobState:
    """A job that runs on n1, n2, …, of which it has so many."""
    job = new_job(policy=policy, nodes=RANGE, **spec)
    slots = tuple(Slot(f"n{i + 1}", f"10.0.0.{i + 1}", 1, 1) for i in range(count))
    fewer = "" if count == 4 else f"{count} of 4 nodes: n9 is quarantined (a fan)"
    job, _ = play(job, Submitted("", "ada"), NodesAcquired(slots, fewer), Launched(1, T0, T0))
    assert job.phase is Phase.RUNNING
    return job


def nodes(job: JobState) -> list[str]:
    return [slot.node for slot in job.slots]


# --- SHRINK


def test_s3_3_a_job_with_enough_nodes_left_shrinks_for_free(snapshot: SnapshotAssertion) -> None:
    job, decision = climbed(
        elastic(policy=rungs(SHRINK, {"strategy": "FAIL"})), suspected(Cause.APPLICATION, "n2")
    )
    assert isinstance(decision, Relaunch)
    assert (decision.strategy, decision.without, decision.avoid, decision.keep_nodes) == (
        Strategy.SHRINK,
        ("n2",),
        (),
        True,
    )
    assert decision.reason == snapshot
    assert (job.restarts_spent, [one.strategy for one in job.tries], job.strategy) == (
        0,
        [Strategy.SHRINK],
        Strategy.SHRINK,
    )


def test_s3_3_a_job_at_its_minimum_is_left_to_the_next_rung() -> None:
    policy = rungs(SHRINK, {"strategy": "REPLACE_NODE"}, {"strategy": "FAIL"})
    assert (
        describe(climbed(elastic(2, policy=policy), suspected(Cause.APPLICATION, "n2"))[1])
        == "REPLACE_NODE without n2"
    )
    assert (
        describe(climbed(elastic(3, policy=policy), suspected(Cause.APPLICATION, "n2"))[1])
        == "SHRINK without n2"
    )
    decision = climbed(elastic(3, policy=policy), suspected(Cause.APPLICATION, "n2", "n3"))[1]
    assert isinstance(decision, Relaunch)
    assert (decision.strategy, decision.without) == (Strategy.REPLACE_NODE, ("n2", "n3"))


@pytest.mark.parametrize(
    "rung", [SHRINK, {**SHRINK, "when": "UNHEALTHY"}, {**SHRINK, "isolate": True, "tries": 3}]
)
def test_s3_3_a_job_of_one_size_never_shrinks_nor_is_examined(
    rung: dict[str, Any],
) -> None:
    policy = rungs(rung, {"strategy": "RESTART_IN_PLACE"})
    for size in (4, {"min": 4, "max": 4}):
        assert (
            describe(
                climbed(running(policy=policy, nodes=size), suspected(Cause.APPLICATION, "n2"))[1]
            )
            == "RESTART_IN_PLACE"
        )


def test_without_suspects_no_node_is_left_behind() -> None:
    policy = rungs(SHRINK, {"strategy": "RESTART_IN_PLACE"})
    assert describe(climbed(elastic(policy=policy), suspected())[1]) == "RESTART_IN_PLACE"
    assert (
        describe(climbed(elastic(policy=policy), suspected(Cause.APPLICATION, "n7"))[1])
        == "RESTART_IN_PLACE"
    )
    assert (
        describe(climbed(elastic(policy=policy), suspected(), without=("n3",))[1])
        == "SHRINK without n3"
    )


def test_its_tries_are_counted_and_a_suspect_can_be_isolated() -> None:
    job = elastic(policy=rungs({**SHRINK, "tries": 1, "isolate": True}, {"strategy": "FAIL"}))
    job, decision = climbed(job, suspected(Cause.APPLICATION, "n2"))
    assert isinstance(decision, Relaunch) and decision.avoid == ("n2",)
    assert describe(climbed(job, suspected(Cause.APPLICATION, "n3"))[1]) == "FAILED 1"


def test_whom_an_examination_finds_is_left_out() -> None:
    job = elastic(policy=rungs({**SHRINK, "when": "UNHEALTHY"}, {"strategy": "FAIL"}))
    walk(job, (raised(), "EXAMINE n2"), (examine(n2="UNHEALTHY"), "SHRINK without n2"))


def test_nodes_to_leave_or_avoid_do_not_count_as_left(snapshot: SnapshotAssertion) -> None:
    job = elastic(policy=rungs(SHRINK, {"strategy": "RESTART_IN_PLACE"}))
    leaving, _ = step(job, DrainRequested("n4", "a fan", "grace", at(60)))
    assert [slot.node for slot in remaining_slots(leaving, ("n2",))] == ["n1", "n3"]
    assert explain_shrink(job, remaining_slots(leaving, ("n2",))) == snapshot
    avoiding = replace(leaving, avoided=(AvoidedNode("n3", "so", T0),))
    # only n1 would be left
    assert describe(climbed(avoiding, suspected(Cause.APPLICATION, "n2"))[1]) == "RESTART_IN_PLACE"


def test_s3_3_a_lost_node_may_be_left_behind_without_another_one() -> None:
    policy = resolve({"causes": {"NODE_LOST": [SHRINK, {"strategy": "ASK"}]}})
    job = walk(
        elastic(policy=policy), (lose("n2"), "WAIT NODE_LOST"), (hung(), "SHRINK without n2")
    )
    assert (job.restarts_spent, job.generation) == (0, 2)


# --- how it goes on, and what it says


def test_s3_3_a_smaller_job_says_so_and_when_a_restart_pays_off(
    snapshot: SnapshotAssertion,
) -> None:
    job = elastic(3)
    assert job.reason == snapshot(name="smaller")
    assert job.next.what == snapshot(name="smaller-next")
    never = elastic(3, policy=resolve({"grow_after": "off"}))
    assert never.reason == snapshot(name="off")
    assert never.next.what == snapshot(name="off-next")


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param(elastic(3), at(1800), id="half an hour after its launch"),
        pytest.param(elastic(3, policy=preset("torchelastic")), T0, id="at once, as torchelastic"),
        pytest.param(
            elastic(3, policy=resolve({"grow_after": False})), None, id="never, if it is off"
        ),
        pytest.param(elastic(4), None, id="not beyond its max"),
        pytest.param(running(nodes=2), None, id="not at all where it is of one size"),
        pytest.param(replace(elastic(3), launched_at=None), None, id="not before it runs"),
        pytest.param(
            replace(elastic(3), phase=Phase.NODE_LOST), None, id="not while something is wrong"
        ),
        pytest.param(
            step(elastic(3), DrainRequested("n2", "", "", at(60)))[0],
            None,
            id="not while it has to leave a node",
        ),
        pytest.param(
            walk(
                elastic(3),
                (lose("n2"), "WAIT NODE_LOST"),
                (back("n2"), "WAIT RUNNING"),
                now=at(100),
            ),
            at(1900),
            id="again",
        ),
    ],
)
def test_when_more_nodes_are_worth_a_restart(job: JobState, expected: Any) -> None:
    assert more_at(job) == expected


def test_not_before_training_has_passed_where_it_was() -> None:
    job = relaunched(walk(elastic(3), (died(), "RESTART_IN_PLACE")), at(60))
    assert more_at(job) is None and "takes more" not in job.next.what
    job, _ = step(job, StepReached(2, 1, at(500)), at(500))
    assert more_at(job) == at(2300) and "takes more" in job.next.what


# --- offers


def offered(job: JobState, *, now: Any = LATER, until: Any = at(9999)) -> tuple[JobState, Decision]:
    return step(job, NodesOffered(("n7",), until), now)


def test_s3_3_only_a_grant_not_an_offer_restarts_the_ranks(snapshot: SnapshotAssertion) -> None:
    job, decision = offered(elastic(3))
    assert isinstance(decision, Wait) and (decision.phase, decision.until) == (Phase.RUNNING, None)
    assert job.generation == 1
    assert job.reason == snapshot(name="offer")
    job, decision = step(job, NodesGranted(1, ("n1", "n2", "n3", "n7")), LATER)
    assert isinstance(decision, Relaunch) and decision.reason == job.reason
    assert (
        decision.strategy,
        decision.spent,
        decision.take,
        decision.without,
        decision.keep_nodes,
    ) == (
        Strategy.GROW,
        False,
        None,
        (),
        True,
    )
    assert (job.incident, job.incidents, job.tries, job.restarts_spent, job.strategy) == (
        None,
        (),
        (),
        0,
        Strategy.GROW,
    )
    assert job.notices == snapshot(name="notice")


@pytest.mark.parametrize(
    ("job", "now"),
    [
        pytest.param(elastic(3), at(1799), id="too early"),
        pytest.param(elastic(4), LATER, id="it has all"),
        pytest.param(elastic(3, policy=resolve({"grow_after": "off"})), LATER, id="off"),
        pytest.param(running(nodes=2), LATER, id="of one size"),
        pytest.param(
            step(elastic(3), DrainRequested("n2", "", "", at(60)))[0],
            LATER,
            id="it has to leave a node",
        ),
        pytest.param(walk(elastic(3), (lose("n2"), "WAIT NODE_LOST")), LATER, id="a node is lost"),
        pytest.param(
            walk(elastic(3), (died(), "RESTART_IN_PLACE")), LATER, id="it is launched again"
        ),
        pytest.param(
            relaunched(walk(elastic(3), (died(), "RESTART_IN_PLACE"))),
            LATER,
            id="an incident is open",
        ),
        pytest.param(step(elastic(3), CancelRequested("", "ada"))[0], LATER, id="it ends"),
    ],
)
def test_an_offer_that_comes_at_the_wrong_time_changes_nothing(job: JobState, now: Any) -> None:
    after, decision = offered(job, now=now)
    assert isinstance(decision, Ignore) and after == job


def test_an_offer_that_comes_late_changes_nothing() -> None:
    assert isinstance(offered(elastic(3), until=LATER)[1], Ignore)


def test_a_grant_of_nothing_new_restarts_nothing(snapshot: SnapshotAssertion) -> None:
    job, _ = offered(elastic(3))
    for granted in ((), ("n1", "n2", "n3"), ("n1", "n2", "n7")):
        after, decision = step(job, NodesGranted(1, granted), LATER)
        assert isinstance(decision, Wait) and (after.generation, after.phase) == (1, Phase.RUNNING)
        assert after.reason == snapshot(name=" ".join(granted) or "none")


def test_a_grant_amid_another_trouble_restarts_nothing(snapshot: SnapshotAssertion) -> None:
    job, _ = offered(elastic(3))
    more = NodesGranted(1, ("n1", "n2", "n3", "n7"))
    leaving, decision = play(job, DrainRequested("n2", "", "", at(60)), more, now=LATER)
    assert isinstance(decision, Wait) and leaving.reason == snapshot
    lost = walk(job, (lose("n2"), "WAIT NODE_LOST"))
    assert isinstance(step(lost, more, LATER)[1], Ignore)
    broken = walk(job, (died(), "RESTART_IN_PLACE"))
    # of an earlier generation
    assert isinstance(step(broken, more, LATER)[1], Ignore)


def test_a_grown_job_is_complete_again(snapshot: SnapshotAssertion) -> None:
    job, _ = play(
        elastic(3),
        NodesOffered(("n7",), at(9999)),
        NodesGranted(1, ("n1", "n2", "n3", "n7")),
        now=LATER,
    )
    slots = seat(job.slots, tuple(map(Place, ("n1", "n2", "n3", "n7"))))
    job, _ = play(job, NodesAcquired(slots), Launched(2, LATER, LATER), now=LATER)
    assert (nodes(job), job.fewer, more_at(job)) == (["n1", "n2", "n3", "n7"], "", None)
    assert job.reason == snapshot
    job, _ = step(job, RetryRequested("", "ada"), LATER)
    assert job.strategy is None


# --- what it tells its fleet


def test_it_wants_its_fewest_and_takes_its_most() -> None:
    wanted = build_claim(new_job(nodes=RANGE), 1)
    assert (
        wanted.nodes,
        wanted.most,
        wanted.max_nodes,
        wanted.had,
        wanted.more_at,
        wanted.running,
    ) == (2, 4, 4, 0, None, False)
    again = build_claim(elastic(3), 2, keep=("n1", "n3"), avoid=("n2",))
    assert (again.nodes, again.most, again.max_nodes, again.had, again.running) == (
        2,
        4,
        4,
        3,
        True,
    )


def test_what_runs_says_what_it_has_and_when_it_would_take_more() -> None:
    job = replace(elastic(3), avoided=(AvoidedNode("n8", "so", T0),))
    said = build_current_claim(job, 3, ("n1", "n2", "n3"))
    assert (said.nodes, said.most, said.max_nodes, said.more_at, said.avoid) == (
        3,
        4,
        3,
        at(1800),
        ("n8",),
    )
    launching = build_current_claim(walk(job, (died(), "RESTART_IN_PLACE")), 4, ("n1", "n2", "n3"))
    assert (launching.nodes, launching.max_nodes, launching.more_at, launching.avoid) == (
        3,
        3,
        None,
        (),
    )


def test_a_job_of_one_size_says_what_it_always_said() -> None:
    for said in (
        build_claim(running(), 1),
        build_current_claim(running(), 1, ("n1", "n2")),
        build_empty_claim(running(), 1),
    ):
        assert (said.most, said.had, said.more_at, said.max_nodes) == (0, 0, None, said.nodes)
    wanted = build_claim(running(), 1, keep=("n1", "n2"))
    assert build_current_claim(running(), 1, ("n1", "n2")) == replace(wanted, is_current=True)


def test_a_launch_with_fewer_nodes_than_before_is_a_notice(snapshot: SnapshotAssertion) -> None:
    job, _ = step(elastic(4), RetryRequested("", "ada"), at(60))
    fewer = "3 of 4 nodes: n2 is quarantined (a fan)"
    job, _ = step(job, NodesAcquired(job.slots[:3], fewer), at(60))
    asked, goes_on = job.notices
    # no incident tells why it was launched
    assert asked == snapshot(name="asked")
    assert goes_on == snapshot(name="goes-on")
    # as many as before are no news
    assert step(job, NodesAcquired(job.slots, fewer), at(60))[0].notices == job.notices


def test_written_events_may_shrink_a_job_and_offer_it_more(snapshot: SnapshotAssertion) -> None:
    events = (
        (0, NodesAcquired(elastic(3).slots, "3 of 4 nodes: n9 is quarantined")),
        (10, FaultObserved(0, (exited(5, "n3", code=1, error=error()),), 0, at(10))),
        (20, StepReached(0, 1, at(20))),
        (3600, NodesOffered(("n7",), at(9999))),
        (3600, NodesGranted(0, ("n1", "n2"))),
        (3900, NodesOffered(("n7", "n8"), at(9999))),
        (3999, NodesOffered(("n9",), at(9999))),
    )
    steps = [Step(at(seconds), event) for seconds, event in events]
    done = simulate(rungs(SHRINK, {"strategy": "FAIL"}), new_job(nodes=RANGE), steps)
    assert [
        (one.event, name_decision(one.decision))
        for one in done
        if one.event not in ("NodesAcquired", "StepReached")
    ] == [
        ("Submitted", "Relaunch"),
        ("Launched", "Wait RUNNING"),
        ("FaultObserved", "Relaunch SHRINK"),
        ("Launched", "Wait RUNNING"),
        ("NodesOffered", "Wait RUNNING"),
        ("NodesGranted", "Wait RUNNING"),
        ("NodesOffered", "Wait RUNNING"),
        ("NodesGranted", "Relaunch GROW"),
        ("Launched", "Wait RUNNING"),
        ("NodesOffered", "Ignore"),
    ]
    launched = [one.decision.reason for one in done if one.event == "Launched"]
    assert launched == snapshot


# --- ranks


def test_s3_3_the_world_is_as_large_as_the_generation() -> None:
    shared = common_environment(elastic(3).token, elastic(3).spec, 3, 8, "10.0.0.1", 29500)
    assert [shared[name] for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")] == [
        "6",
        "6",
        "3",
    ]


@pytest.mark.parametrize(
    ("granted", "expected"),
    [
        pytest.param("n1 n3 n4", "n1 n3 n4", id="those behind a gap move up"),
        pytest.param("n1 n4 n7", "n1 n7 n4", id="one newcomer for two gaps"),
        pytest.param("n1 n2 n3 n4 n7 n8", "n1 n2 n3 n4 n7 n8", id="newcomers come last"),
        pytest.param("n7", "n7", id="all others are gone"),
    ],
)
def test_who_sits_where_when_there_are_more_or_fewer(granted: str, expected: str) -> None:
    slots = seat((), tuple(map(Place, ("n1", "n2", "n3", "n4"))))
    assert [
        place.node for place in keep_places(slots, tuple(map(Place, granted.split())))
    ] == expected.split()


def test_lone_ranks_do_not_fence_and_are_not_believed_to() -> None:
    alone = new_job(nodes={"min": 1, "max": 3})
    # it is not known how many there were
    assert not fences(alone)
    assert not fences(replace(alone, slots=(Slot("n1", "10.0.0.1"),)))
    assert fences(replace(alone, slots=(Slot("n1", "10.0.0.1"), Slot("n2", "10.0.0.2"))))
    # there were two at least
    assert fences(new_job(nodes=RANGE))


def test_a_job_that_is_submitted_again_begins_without_places() -> None:
    ended = replace(elastic(3), strategy=Strategy.GROW)
    again = resubmit(ended, 2000, "ada", LATER, False, ())
    assert (again.slots, again.fewer, again.strategy) == ((), "", None)


@pytest.mark.parametrize(
    "name", ["default", "torchelastic", "modelarts", "gputasker", "ecs-reboot-once"]
)
def test_no_preset_decides_otherwise_for_a_job_that_may_shrink(name: str) -> None:
    """Its fleet gives it fewer; the ladders stay as they are."""
    for event in (died(), lambda job: fault(job, exited(kernel=(xid(79),), signal=6)), hung()):
        fixed, free = running(policy=preset(name), nodes=4), elastic(policy=preset(name))
        assert describe(step(fixed, event(fixed))[1]) == describe(step(free, event(free))[1])


def test_a_shrunk_job_reads_its_faults_like_any_other() -> None:
    job = elastic(3)
    assert (
        describe(step(job, FaultObserved(1, (exited(5, "n3", code=1),), 0, T0))[1])
        == "RESTART_IN_PLACE"
    )


# --- whatever happens

SHRINKING = resolve(
    {
        "grow_after": "0s",
        "causes": {
            cause: [*first, SHRINK, {"strategy": "REPLACE_NODE", "tries": 3}, {"strategy": "ASK"}]
            for first, causes in (
                ([{"strategy": "RESTART_IN_PLACE", "tries": 1}], ("APPLICATION", "UNKNOWN")),
                ([], ("GPU_FATAL", "NODE_LOST", "NODE_FAULT")),
            )
            for cause in causes
        },
    }
)


@searched(200)
@given(
    st.sampled_from((SHRINKING, SHRINKING, SHRINKING, None)),
    policies,
    moves(*OFTEN, "people"),
    st.lists(NUMBER, min_size=8, max_size=8),
    st.sampled_from(({"min": 1, "max": 3}, RANGE, 3)),
)
def test_s3_3_a_generation_stays_between_its_minimum_and_maximum(
    shrinking: Policy | None, other: Policy, stream: list[Move], numbers: list[int], size: Any
) -> None:
    run = Run(shrinking or other, nodes=size, launch="well", missing=False)
    for index, move in enumerate(stream):
        move.do(run)
        offer(run, Choice(numbers[index % len(numbers)] + index))
        assert run.moves_on, f"{run.job.phase}: {run.turns[-1]}"
    spec = run.job.spec
    for turn in run.turns:
        if isinstance(turn.event, NodesAcquired):
            assert spec.fewest_nodes <= len(turn.event.slots) <= spec.node_count
        if isinstance(turn.decision, Relaunch) and turn.decision.strategy in (
            Strategy.SHRINK,
            Strategy.GROW,
        ):
            assert spec.is_elastic and turn.after.restarts_spent == turn.recorded.restarts_spent
        if turn.after.slots:
            assert spec.fewest_nodes <= len(turn.after.slots) <= spec.node_count
        if isinstance(turn.decision, Relaunch) and turn.decision.strategy is Strategy.GROW:
            # it is an answer to no fault
            assert (turn.after.incident, turn.after.tries) == (None, turn.before.tries)
            assert isinstance(turn.event, NodesGranted) and len(turn.event.nodes) > len(
                turn.before.slots
            )


def offer(run: Run, choice: Choice) -> None:
    """More nodes, now and then; where the job asks for them the fleet has them, or has not."""
    has = tuple(slot.node for slot in run.job.slots)
    more = tuple(node for node in INVENTORY if node not in has)[
        : run.job.spec.node_count - len(has)
    ]
    if not more or not choice.once_in(2):
        return
    turn = run.take(NodesOffered(more, run.now + timedelta(minutes=choice.among((2, 0)))))
    if isinstance(turn.decision, Wait):
        run.granted = (*has, *more[: choice.among((1, 0, 2))])
        run.take(NodesGranted(run.job.generation, run.granted))
