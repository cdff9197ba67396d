"""Nodes that do not answer: nothing is stopped for it.

Nothing is launched before their ranks must be gone, and people may know better.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta

import pytest

import relaunch.job.fencing
from relaunch.activities.reports import WatchRanksInput
from relaunch.job.fencing import fence_wait
from relaunch.job.state import LostNode, Phase
from relaunch.workflows.training_job import commands
from tests.fakes.nodes import Cut, Exit, Progress, Script
from tests.recovery.builders import T0, running
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Rig, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
FENCING = {"lease": "5s", "lost_after": "600ms", "fence_after": "500ms", "stop_grace": "200ms"}
RUNS = Progress(rate=20.0, hangs=True)
HANG = {"after": "1s", "first_step": "60s"}


@pytest.fixture(autouse=True)
def short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.job.fencing, "FENCE_MARGIN", timedelta(seconds=0.5))


def stopped(rig: Rig) -> list[tuple[str, int]]:
    return rig.orders("stop")


async def test_s2_8_a_lost_node_that_returns_goes_on_undisturbed(
    make_rig: MakeRig,
) -> None:
    async with make_rig() as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n2", "controller-in", "controller-out")
        state = await job.until_phase(Phase.NODE_LOST)
        assert state.lost_names == ("n2",)
        assert "nothing is stopped" in state.reason
        rig.backend.heal("n2")
        state = await job.until_phase(Phase.RUNNING, 1)
        assert (state.lost, state.restarts_spent, len(state.incidents)) == ((), 0, 1)
        assert "n2 came back" in state.incidents[0].outcome
        assert stopped(rig) == []
        assert list(rig.launches()) == [1]
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_lost_node_that_forgot_its_launch_gets_another(
    make_rig: MakeRig, nodes: int
) -> None:
    """Its agent, of 0.1.0, says that it has nothing to report, and nothing of a reboot."""
    async with make_rig(Script((RUNS,))) as rig:
        job = await rig.submit(policy({**FENCING, "lease": "60s"}), nodes=nodes, ranks=1)
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n1", "controller-in", "controller-out")
        await job.until_phase(Phase.NODE_LOST)
        rig.backend.lose_power("n1", forgets=True)
        rig.backend.heal("n1")
        state = await job.until_phase(Phase.RUNNING, 2)
        every = (*state.incidents, *((state.incident,) if state.incident else ()))
        assert "n1: the node rebooted; the exits of 1 of 1 are not known" in {
            fault.reason for incident in every for fault in incident.faults
        }
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_s2_8_a_node_may_be_lost_and_return_many_times(make_rig: MakeRig) -> None:
    async with make_rig(Script((RUNS,))) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        for times in (1, 2):
            rig.backend.cut("n1", "controller-out")
            await job.until_phase(Phase.NODE_LOST)
            rig.backend.heal("n1")
            await job.until(
                lambda s, times=times: s.phase is Phase.RUNNING and len(s.incidents) == times
            )  # type: ignore[misc]
        assert stopped(rig) == []
        assert list(rig.launches()) == [1]
        await job.handle.signal("cancel")
        await job.result()


async def test_a_stuck_gang_moves_only_when_its_lost_node_has_fenced(
    make_rig: MakeRig,
) -> None:
    # n2 is cut off from everybody; n1's rank stands still a little later.
    steps = tuple((0.1 * number, number) for number in range(50))
    script = Script(
        (Progress(generation=1, steps=steps), Progress(generation=2, rate=20.0, hangs=True))
    )
    async with make_rig(script, spares=1) as rig:
        job = await rig.submit(policy(FENCING, hang={**HANG, "after": "3s"}), ranks=1)
        await job.until(
            lambda _: any(
                call.command == "renew" and call.node == "n2" for call in rig.backend.calls
            ),
            "a renewal",
        )
        rig.backend.cut("n2")
        state = await job.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in state.slots] == ["n1", "n3"]
        ends = {
            life.node: life.at
            for life in rig.backend.lives
            if life.kind == "ended" and life.token.generation == 1
        }
        begins = [
            life.at
            for life in rig.backend.lives
            if life.kind == "started" and life.token.generation == 2
        ]
        assert set(ends) == {"n1", "n2"}
        assert max(ends.values()) < min(begins)
        # Not before t0, the proof that a node is stopped, and the time that the lost one needs to
        # notice.
        timeouts = policy(FENCING).timeouts
        assert min(begins) >= ends["n1"] + fence_wait(timeouts, 2).total_seconds() - 0.05
        heard = max(
            call.at for call in rig.backend.calls if call.command == "renew" and call.node == "n2"
        )
        assert (
            min(begins)
            >= heard
            - timeouts.lease.total_seconds() / 4
            + (timeouts.lease + fence_wait(timeouts, 2)).total_seconds()
            - 0.3
        )
        assert state.restarts_spent == 0
        assert [t.strategy for t in state.tries] == ["REPLACE_NODE"]
        rig.backend.heal("n2")
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_a_rank_failure_during_a_lost_node_is_blamed_on_it(
    make_rig: MakeRig,
) -> None:
    script = Script(
        (
            Exit(
                generation=1,
                rank=0,
                exit_code=1,
                after=2.5,
                log_tail=("RuntimeError: Connection reset by peer",),
            ),
        ),
        then="succeed",
    )
    async with make_rig(script, spares=1) as rig:
        job = await rig.submit(policy(FENCING), ranks=1)
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n2")
        result = await job.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)
        assert [slot.node for slot in result.state.slots] == ["n1", "n3"]
        assert result.incidents[0].cause == "NODE_LOST"
        rig.backend.heal("n2")


async def test_a_job_resubmitted_without_its_fleet_waits_for_the_fence(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((RUNS,)), nodes=3, name=f"f-{uuid.uuid4().hex[:8]}") as rig:
        first = await rig.submit(policy(FENCING))
        name = (await first.until_phase(Phase.RUNNING, 1)).name
        await first.until(
            lambda _: any(
                call.command == "renew" and call.node == "n2" for call in rig.backend.calls
            ),
            "a renewal",
        )
        rig.backend.cut("n2")
        await first.handle.terminate("an operator")
        await rig.fleet.terminate("an operator")
        second = await rig.submit(policy(FENCING), name=name)
        state = await second.until_phase(Phase.RUNNING, 1)
        assert "n2" not in {slot.node for slot in state.slots}
        token = state.token
        ends = {
            life.node: life.at
            for life in rig.backend.lives
            if life.kind == "ended" and life.token.submission < token.submission
        }
        begins = [
            life.at for life in rig.backend.lives if life.kind == "started" and life.token == token
        ]
        assert set(ends) == {"n1", "n2"}
        assert max(ends.values()) < min(begins)
        rig.backend.heal("n2")
        await second.handle.signal("cancel")
        await second.result()


async def test_with_every_node_lost_the_job_waits_and_stops_nothing(make_rig: MakeRig) -> None:
    async with make_rig(Script((RUNS,))) as rig:
        job = await rig.submit(policy(hang=HANG))
        await job.until_phase(Phase.RUNNING, 1)
        for node in ("n1", "n2"):
            rig.backend.cut(node, "controller-in", "controller-out")
        state = await job.until(lambda s: len(s.lost) == 2, "both lost")
        assert state.phase is Phase.NODE_LOST
        assert "no node answers" in state.next.what
        assert state.next.at is not None
        for node in ("n1", "n2"):
            rig.backend.heal(node)
        await job.until(lambda s: s.phase is Phase.RUNNING and not s.lost)
        assert stopped(rig) == []
        assert list(rig.launches()) == [1]
        await job.handle.signal("cancel")
        await job.result()


async def test_a_single_lost_node_raises_a_question_until_it_returns(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((RUNS,)), nodes=1) as rig:
        job = await rig.submit(policy({"ask_after": "500ms"}), nodes=1)
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n1")
        state = await job.until_phase(Phase.WAITING_FOR_PERSON)
        assert "declare-dead" in state.next.what
        rig.backend.heal("n1")
        state = await job.until_phase(Phase.RUNNING, 1)
        assert stopped(rig) == []
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_a_person_is_asked_about_the_node_that_stays_lost(make_rig: MakeRig) -> None:
    async with make_rig(Script((RUNS,)), nodes=3, all_ended=False) as rig:
        job = await rig.submit(policy({"ask_after": "3s"}), nodes=3, gang="independent")
        await job.until_phase(Phase.RUNNING, 1)
        for node in ("n2", "n3"):
            rig.backend.cut(node)
        state = await job.until(lambda s: s.lost_names in (("n2", "n3"), ("n3", "n2")), "lost")
        assert state.phase is Phase.NODE_LOST
        rig.backend.heal("n2")
        await job.until(lambda s: s.lost_names == ("n3",), "one is back")
        state = await job.until_phase(Phase.WAITING_FOR_PERSON)
        assert "n3" in state.reason and "n2" not in state.reason
        assert stopped(rig) == []


async def test_a_node_that_a_person_declares_dead_is_replaced_at_once(make_rig: MakeRig) -> None:
    async with make_rig(Script((RUNS,)), spares=1, all_ended=False) as rig:
        job = await rig.submit(policy({"lease": "600s"}))
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n2")
        rig.backend.lose_power("n2", down_for=3600)  # this is what the person saw
        await job.until_phase(Phase.NODE_LOST)
        await job.handle.signal("report", {"node": "n2", "reason": "no power", "by": "ada"})
        state = await job.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in state.slots] == ["n1", "n3"]
        (declared,) = [notice for notice in state.notices if "declared" in notice]
        assert all(word in declared for word in ("ada", "n2", "no power"))
        await job.handle.signal("cancel")
        await job.result()


async def test_a_report_about_a_node_not_in_use_changes_nothing(
    make_rig: MakeRig,
) -> None:
    async with make_rig(spares=1) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        await job.handle.signal("report", {"node": "n3"})
        state = await job.until(lambda s: bool(s.notices))
        assert (state.phase, state.generation) == (Phase.RUNNING, 1)
        await job.handle.signal("cancel")
        await job.result()


async def test_stopping_lasts_until_an_unreachable_node_answers(make_rig: MakeRig) -> None:
    async with make_rig(Script((RUNS,)), nodes=1) as rig:
        job = await rig.submit(nodes=1)
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n1")
        await job.handle.signal("cancel")
        state = await job.until(
            lambda s: (
                s.phase is Phase.STOPPING and any(c.command == "stop" for c in rig.backend.calls)
            ),
            "a try to stop",
        )
        assert state.maybe_alive == ("n1",)
        rig.backend.heal("n1")
        assert (await job.result()).phase is Phase.CANCELLED


async def test_stopping_lasts_until_an_unreachable_node_has_fenced(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((RUNS,))) as rig:
        job = await rig.submit(policy(FENCING))
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n2")
        await job.handle.signal("cancel")
        result = await job.result()
        assert result.phase is Phase.CANCELLED
        assert ("n2", 1) not in stopped(rig)


async def test_stopping_does_not_wait_for_a_node_declared_dead(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((RUNS,)), nodes=1, all_ended=False) as rig:
        job = await rig.submit(nodes=1)
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n1")
        await job.handle.signal("cancel")
        await job.until_phase(Phase.STOPPING)
        await job.handle.signal("report", {"node": "n1", "by": "ada"})
        assert (await job.result()).phase is Phase.CANCELLED


async def test_an_independent_gang_with_a_lost_node_is_not_moved(
    make_rig: MakeRig,
) -> None:
    script = Script(
        (
            Progress(generation=1, node="n1", steps=((0.0, 1), (0.1, 2))),
            Progress(generation=1, node="n2", rate=20.0, hangs=True),
        )
    )
    async with make_rig(script, spares=1) as rig:
        job = await rig.submit(policy(hang={**HANG, "after": "3s"}), gang="independent")
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n2", "controller-in", "controller-out")
        state = await job.until(
            lambda s: s.deferred_fault is not None, "a hang that waits for the lost node"
        )
        assert (state.phase, state.generation) == (Phase.NODE_LOST, 1)
        before = len((await job.history()).events)
        rig.backend.heal("n2")
        state = await job.until(lambda s: s.generation == 2, "the restart that was owed")
        assert [t.cause for t in state.tries] == ["HANG"]
        assert before < 80, "a hang that is known is reported once, not again and again"
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_a_job_that_was_taken_over_is_left_alone(make_rig: MakeRig) -> None:
    """Its other node hangs, and then the lost one returns."""
    script = Script(
        (
            Progress(generation=1, node="n1", steps=((0.0, 1), (0.1, 2))),
            Progress(rate=20.0, hangs=True),
        )
    )
    async with make_rig(script) as rig:
        asks = policy({"ask_after": "500ms"}, hang={**HANG, "after": "3s"})
        job = await rig.submit(asks, gang="independent")
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n2", "controller-in", "controller-out")
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        await job.handle.execute_update("answer", {"decision": "take-over", "by": "carol"})
        state = await job.until(lambda s: s.deferred_fault is not None, "a hang")
        assert state.phase is Phase.WAITING_FOR_PERSON
        assert state.asked is not None and state.asked.waits
        rig.backend.heal("n2")
        state = await job.until(lambda s: not s.lost, "n2 is back")
        assert state.phase is Phase.WAITING_FOR_PERSON
        assert (list(rig.launches()), stopped(rig)) == ([1], [])
        await job.handle.execute_update("answer", {"decision": "approve", "by": "carol"})
        await job.until_phase(Phase.RUNNING, 2)
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_a_take_over_ends_a_launch_that_waits_for_a_fence(make_rig: MakeRig) -> None:
    steps = tuple((0.1 * number, number) for number in range(50))
    script = Script((Progress(generation=1, steps=steps), RUNS))
    async with make_rig(script, spares=1) as rig:
        job = await rig.submit(policy(FENCING, hang={**HANG, "after": "3s"}), ranks=1)
        await job.until(
            lambda _: any(
                call.command == "renew" and call.node == "n2" for call in rig.backend.calls
            ),
            "a renewal",
        )
        rig.backend.cut("n2")
        await job.until_phase(Phase.LAUNCHING, 2)
        await job.handle.execute_update("answer", {"decision": "take-over", "by": "carol"})
        await job.until_idle()
        state = await job.state()
        assert state.phase is Phase.WAITING_FOR_PERSON and state.lost_names == ("n2",)
        assert list(rig.launches()) == [1]
        await job.handle.execute_update("answer", {"decision": "approve", "by": "carol"})
        state = await job.until_phase(Phase.RUNNING, 3)
        assert [slot.node for slot in state.slots] == ["n1", "n3"]
        rig.backend.heal("n2")
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_a_drain_reaches_a_job_whose_launch_waits_for_a_fence(make_rig: MakeRig) -> None:
    steps = tuple((0.1 * number, number) for number in range(50))
    name = f"f-{uuid.uuid4().hex[:8]}"
    async with make_rig(
        Script((Progress(generation=1, steps=steps), RUNS)), spares=1, name=name
    ) as rig:
        job = await rig.submit(policy(FENCING, hang={**HANG, "after": "3s"}), ranks=1)
        await job.until(
            lambda _: any(
                call.command == "renew" and call.node == "n2" for call in rig.backend.calls
            ),
            "a renewal",
        )
        rig.backend.cut("n2")
        await until_fleet(
            rig,
            lambda state: any(place.node == "n3" for one in state.claims for place in one.places),
            "n3 granted",
        )
        drain = {"node": "n3", "reason": "swap its PSU", "by": "carol", "drain": True}
        await rig.fleet.signal("quarantine", {**drain, "within": "2h"})
        state = await job.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in state.slots] == ["n1", "n3"]
        assert [one.node for one in state.drains] == ["n3"]
        rig.backend.heal("n2")
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_a_node_that_takes_no_start_is_replaced_once_it_gave_up(
    make_rig: MakeRig,
) -> None:
    script = Script((Cut(generation=1, node="n2", when="start"),), then="succeed")
    async with make_rig(script, spares=1) as rig:
        job = await rig.submit(policy(FENCING), ranks=1)
        result = await job.result()
        assert (result.phase, [slot.node for slot in result.state.slots]) == (
            Phase.SUCCEEDED,
            ["n1", "n3"],
        )
        assert result.state.restarts_spent == 0


async def test_a_node_silent_at_prepare_with_no_ranks_is_replaced(
    make_rig: MakeRig,
) -> None:
    script = Script((Cut(generation=1, node="n2", when="prepare"),), then="succeed")
    async with make_rig(script, spares=1) as rig:
        job = await rig.submit(policy({"lease": "600s"}))
        result = await job.result()
        assert (result.phase, [slot.node for slot in result.state.slots]) == (
            Phase.SUCCEEDED,
            ["n1", "n3"],
        )
        assert list(rig.launches()) == [2]


async def test_a_policy_may_fail_jobs_that_no_person_answers(make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(rank=0),))) as rig:
        job = await rig.submit(
            policy(
                {"answer_within": "3s"},
                causes={"APPLICATION": [{"strategy": "ASK"}]},
                unanswered="fail",
            )
        )
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        result = await job.result()
        assert (result.phase, result.exit_code) == (Phase.FAILED, 1)
        assert "within 3s" in result.reason


@pytest.mark.parametrize(("watched", "in_others"), [("n1", True), ("n2", False)])
async def test_a_watch_knows_of_lost_nodes_in_other_shards(
    watched: str, in_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[WatchRanksInput] = []

    async def note_order(activity: object, order: WatchRanksInput, **options: object) -> None:
        given.append(order)

    monkeypatch.setattr(commands.workflow, "execute_activity_method", note_order)
    job = replace(running(), lost=(LostNode("n2", T0, "cut off"),))
    await commands.watch(job, (watched,), {}, {})
    (order,) = given
    assert order.lost_in_others is in_others


@pytest.mark.parametrize("nodes", [1, 2])
async def test_nodes_lost_before_a_launch_get_it_when_they_return(
    make_rig: MakeRig, nodes: int
) -> None:
    """They answer that they know nothing of that generation, which was never prepared there."""
    cuts = [Cut(generation=2, node=f"n{number + 1}", when="prepare") for number in range(nodes)]
    async with make_rig(Script((Exit(generation=1, rank=0, exit_code=1), *cuts))) as rig:
        job = await rig.submit(nodes=nodes)
        await job.until_phase(Phase.NODE_LOST)
        for number in range(nodes):
            rig.backend.heal(f"n{number + 1}")
        # Generation 2 counts as running between their return and what they say of it.
        state = await job.until_phase(Phase.RUNNING, 3)
        assert (state.lost, state.restarts_spent) == ((), 1)
        await job.handle.signal("cancel")
        await job.result()
