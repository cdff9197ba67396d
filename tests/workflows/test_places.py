"""Another machine answers for a node.

It never saw the ranks, so it proves nothing, and nothing is launched beside them.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

import relaunch.activities.launch
import relaunch.job.fencing
from relaunch.job.fencing import fence_wait
from relaunch.job.state import Phase
from relaunch.pool.state import FleetState
from relaunch.spec.fleet import FleetNode
from tests.fakes.nodes import Progress, Script
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Rig, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
FENCING = {"lease": "4s", "lost_after": "600ms", "fence_after": "500ms", "stop_grace": "200ms"}
RUNS = Progress(rate=20.0, hangs=True)
ELSEWHERE = "answers, but from another machine than the one generation 1 was started on"


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.job.fencing, "FENCE_MARGIN", timedelta(seconds=0.5))
    monkeypatch.setattr(
        relaunch.activities.launch, "LAUNCH_RETRY_DELAY", timedelta(milliseconds=50)
    )


def ends(rig: Rig, generation: int = 1) -> dict[str, float]:
    return {
        life.node: life.at
        for life in rig.backend.lives
        if life.kind == "ended" and life.token.generation == generation
    }


def begins(rig: Rig, generation: int = 2) -> list[float]:
    return [
        life.at
        for life in rig.backend.lives
        if life.kind == "started" and life.token.generation == generation
    ]


def fleet_file(fleet: FleetState) -> tuple[FleetNode, ...]:
    return tuple(record.spec for record in fleet.nodes)


def is_renewed(rig: Rig, node: str) -> bool:
    return any(call.command == "renew" and call.node == node for call in rig.backend.calls)


async def test_a_gang_moves_when_the_former_machines_ranks_have_fenced(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((RUNS,)), spares=1) as rig:
        job = await rig.submit(policy(FENCING), ranks=1)
        await job.until(lambda _: is_renewed(rig, "n2"), "a renewal")
        rig.backend.move("n2", 1)
        await job.handle.signal("force_retry", {"reason": "a new driver"})
        state = await job.until(
            lambda s: s.phase is Phase.RUNNING and [slot.node for slot in s.slots] == ["n1", "n3"],
            "ranks on n1 and n3",
        )
        newest = state.generation
        if newest == 3:  # unless the watch had seen it before the retry came
            assert begins(rig) == [], "generation 2 was prepared, and found n2 elsewhere"
        stopped = ends(rig)
        assert set(stopped) == {"n1", "n2"}
        assert min(begins(rig, newest)) >= max(stopped.values())
        # The first proof of n1's end is the preparation; the wait begins no earlier than the stop
        # that came after it.
        assert (
            min(begins(rig, newest))
            >= stopped["n1"] + fence_wait(policy(FENCING).timeouts, 2).total_seconds() - 0.05
        )
        assert ELSEWHERE in (state.incident or state.incidents[-1]).reason, (
            "it closes as training goes on"
        )
        assert [place.generation for place in state.places] == [newest]
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_a_watch_neither_renews_nor_believes_another_machine(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((RUNS,))) as rig:
        job = await rig.submit(policy({**FENCING, "lease": "20s", "fence_after": "20s"}))
        await job.until(lambda _: is_renewed(rig, "n2"), "a renewal")
        rig.backend.move("n2", 1)
        state = await job.until_phase(Phase.NODE_LOST)
        assert state.reason.startswith(f"n2 {ELSEWHERE}")
        assert state.reason.endswith("nothing is stopped")
        assert [(lost.node, lost.is_elsewhere) for lost in state.lost] == [("n2", True)]
        rig.backend.move("n2", 0)
        state = await job.until_phase(Phase.RUNNING, 1)
        assert (state.lost, ends(rig), rig.orders("stop")) == ((), {}, [])
        await job.handle.signal("cancel")
        await job.result()


async def test_lone_ranks_are_never_launched_beside_the_former_machine(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((RUNS,)), nodes=1, spares=1) as rig:
        job = await rig.submit(policy({**FENCING, "ask_after": "500ms"}), nodes=1)
        await job.until(lambda _: is_renewed(rig, "n1"), "a renewal")
        rig.backend.move("n1", 1)
        state = await job.until_phase(Phase.WAITING_FOR_PERSON)
        assert state.reason.startswith(f"n1 {ELSEWHERE}")
        assert "declare-dead" in state.next.what
        await job.handle.signal("force_retry", {"reason": "go on"})
        await job.until(lambda s: s.generation == 2, "the person's launch")
        await job.until(
            lambda _: sum(order == ("n1", 1) for order in rig.orders("stop")) > 0,
            "an order to stop",
        )
        assert (ends(rig), begins(rig)) == ({}, [])
        rig.backend.move("n1", 0)
        state = await job.until_phase(Phase.RUNNING, 2)
        assert min(begins(rig)) >= max(ends(rig).values())
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
@pytest.mark.parametrize("fleet_ends", [False, True])
async def test_a_later_submission_distrusts_a_node_that_moved_before(
    make_rig: MakeRig, fleet_ends: bool
) -> None:
    async with make_rig(Script((RUNS,)), nodes=3, all_ended=False) as rig:
        # Longer than the test: the job must not react to the move before it is terminated.
        patient = {**FENCING, "lost_after": "5m"}
        first = await rig.submit(policy(patient), ranks=1, name="llama")
        await first.until(lambda _: is_renewed(rig, "n2"), "a renewal")
        submission = (await first.state()).submission
        rig.backend.move("n2", 1)
        specs = rig.fleets.known.nodes
        moved = tuple(
            spec.model_copy(update={"address": "10.9.9.9"}) if spec.name == "n2" else spec
            for spec in specs
        )
        rig.fleets.known = rig.fleets.known.model_copy(update={"nodes": moved})
        # The job still holds n2 when the file changes. Once it is terminated, the fleet may take an
        # answer of the new machine for proof at any moment, if it still knows the old address.
        if fleet_ends:
            await rig.end_fleet()
        else:
            await rig.tell_fleet("apply", {"reason": "n2 has another address", "by": "ada"})
            await until_fleet(rig, lambda fleet: moved == fleet_file(fleet), "the new address")
        await first.handle.terminate("an operator")
        second = await rig.submit(policy(FENCING), ranks=1, name="llama")
        await second.until(lambda state: state.launched_at is not None, "a launch")
        old = [
            life
            for life in rig.backend.lives
            if life.token.submission == submission and life.kind == "ended"
        ]
        new = [
            life
            for life in rig.backend.lives
            if life.token.submission > submission and life.kind == "started"
        ]
        assert {life.node for life in old} == {"n1", "n2"}
        assert min(life.at for life in new) >= max(life.at for life in old)
        await second.handle.signal("cancel")
        await second.result()
