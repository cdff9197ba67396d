"""Jobs that may have fewer nodes, with their fleet.

They shrink when a node goes, and grow when one is available.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client

import relaunch.job.fencing
import relaunch.pool.scheduler
import relaunch.workflows.fleet.workflow
from relaunch.activities.fleet import FleetActivities, TellFleetInput
from relaunch.job.state import JobState, Phase
from relaunch.pool.state import FleetState
from tests.fakes.nodes import Exit, Progress, Script, SimulatedBackend
from tests.invariants import assert_invariants
from tests.workflows.claimants import claimants, fleet_state, until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Job, Rig, SimulatedFleets, fleet, policy, replay, worker

pytestmark = pytest.mark.asyncio(loop_scope="session")
FENCING = {"lease": "5s", "lost_after": "600ms", "fence_after": "500ms", "stop_grace": "200ms"}
RUNS = Progress(rate=20.0, hangs=True)
RANGE = {"min": 2, "max": 3}
SOON: dict[str, Any] = {"grow_after": "1s"}


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.job.fencing, "FENCE_MARGIN", timedelta(seconds=0.5))
    for module in (
        relaunch.pool.scheduler,
        relaunch.workflows.fleet.workflow,
    ):  # how soon it is seen that a node is back
        monkeypatch.setattr(module, "SWEEP_INTERVAL", timedelta(seconds=3))


def make(make_rig: MakeRig, *happenings: Any, **options: Any) -> AbstractAsyncContextManager[Rig]:
    return make_rig(
        Script(happenings or (RUNS,), then="run"),
        name=f"f-{uuid.uuid4().hex[:8]}",
        **{"nodes": 3, "gpus": 8, "is_patched": True, **options},
    )


def nodes(state: JobState) -> list[str]:
    return [slot.node for slot in state.slots]


def worlds(rig: Rig) -> dict[int, set[tuple[str, str]]]:
    """Return WORLD_SIZE and GROUP_WORLD_SIZE of the ranks of each generation."""
    found: dict[int, set[tuple[str, str]]] = {}
    for call in rig.backend.calls:
        if call.command == "start":
            order: Any = call.order
            found.setdefault(order.token.generation, set()).add(
                (order.env["WORLD_SIZE"], order.env["GROUP_WORLD_SIZE"])
            )
    return found


def held_nodes(state: FleetState) -> set[str]:
    return {place.node for record in state.claims for place in record.places}


async def strategy(job: Job) -> Any:
    attributes = (await job.handle.describe()).typed_search_attributes
    return next((pair.value for pair in attributes if pair.key.name == "Strategy"), None)


async def quarantine(rig: Rig, node: str, **more: Any) -> None:
    await rig.tell_fleet("quarantine", {"node": node, "reason": "a fan", "by": "grace", **more})


async def release(rig: Rig, node: str) -> None:
    await rig.tell_fleet("release", {"node": node, "reason": "new fan", "by": "grace"})


async def ended(*jobs: Job) -> None:
    for job in jobs:
        await job.handle.signal("cancel")
    for job in jobs:
        await job.result()


@pytest.mark.long_after(variants=1)
async def test_s3_3_a_job_shrinks_on_a_loss_and_grows_on_the_return(
    make_rig: MakeRig,
) -> None:
    still = tuple((0.1 * number, number) for number in range(30))
    script = (Progress(generation=1, steps=still, hangs=True), RUNS)
    async with make(make_rig, *script) as rig:
        job = await rig.submit(
            policy(FENCING, hang={"after": "5s", "first_step": "60s"}, **SOON),
            nodes=RANGE,
            gpus_per_node=8,
        )
        await job.until(
            lambda _: any(
                call.command == "renew" and call.node == "n3" for call in rig.backend.calls
            ),
            "a renewal",
        )
        rig.backend.cut("n3")
        state = await job.until_phase(Phase.RUNNING, 2)
        assert (nodes(state), state.restarts_spent, [one.strategy for one in state.tries]) == (
            ["n1", "n2"],
            0,
            ["REPLACE_NODE"],
        )
        assert state.fewer.startswith("2 of 3 ")
        await until_fleet(rig, lambda fleet: held_nodes(fleet) == {"n1", "n2"}, "n3 given back")
        rig.backend.heal("n3")
        # Where the machine is slow, two nodes may be launched again (a hang, a late watch) before
        # they are three.
        state = await job.until(
            lambda s: s.phase is Phase.RUNNING and len(s.slots) == 3, "three nodes"
        )
        assert (nodes(state), state.fewer, state.restarts_spent) == (["n1", "n2", "n3"], "", 0)
        assert [one.strategy for one in state.tries].count("REPLACE_NODE") == 1
        assert "GROW" in state.notices[-1] and " n3: 2 -> 3" in state.notices[-1]
        of_two = {generation: {("4", "2")} for generation in range(2, state.generation)}
        assert worlds(rig) == {1: {("6", "3")}, **of_two, state.generation: {("6", "3")}}
        await ended(job)


@pytest.mark.long
@pytest.mark.parametrize(
    "which",
    [
        "a server",
        "one that suggests to continue as new all the time",
    ],
)
async def test_s3_3_a_job_shrinks_on_a_drain_and_grows_on_the_release(
    make_rig: MakeRig, make_short_rig: MakeRig, which: str
) -> None:
    async with make(make_rig if which == "a server" else make_short_rig) as rig:
        job = await rig.submit(policy(**SOON), nodes=RANGE, gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await quarantine(rig, "n2", drain=True, within="1s")
        state = await job.until_phase(Phase.RUNNING, 2)
        assert (nodes(state), state.restarts_spent, state.tries, state.incidents) == (
            ["n1", "n3"],
            0,
            (),
            (),
        )
        assert state.fewer and state.fewer in state.reason
        assert state.fewer.startswith("2 of 3 ") and "n2" in state.fewer and "a fan" in state.fewer
        assert "more nodes" in state.next.what
        await until_fleet(rig, lambda fleet: held_nodes(fleet) == {"n1", "n3"}, "n2 left")
        await release(rig, "n2")
        state = await job.until_phase(Phase.RUNNING, 3)
        assert (nodes(state), state.restarts_spent, state.incident, state.incidents) == (
            ["n1", "n3", "n2"],
            0,
            None,
            (),
        )
        assert await strategy(job) == "GROW"
        assert rig.launches() == {1: ["n1", "n2", "n3"], 2: ["n1", "n3"], 3: ["n1", "n3", "n2"]}
        await ended(job)


@pytest.mark.long
async def test_s3_3_a_job_begins_small_and_leaves_nodes_others_want(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig) as rig:
        other = await rig.submit(nodes=1, gpus_per_node=8, ranks=1)
        await other.until_phase(Phase.RUNNING)
        job = await rig.submit(policy(**SOON), nodes={"min": 1, "max": 3}, gpus_per_node=8)
        state = await job.until_phase(Phase.RUNNING, 1)
        assert nodes(state) == ["n2", "n3"]
        assert state.fewer.startswith("2 of 3 ") and (await other.state()).name in state.fewer
        third = await rig.submit(nodes=1, gpus_per_node=8, ranks=1)
        await until_fleet(
            rig,
            lambda fleet: any(record.is_waiting for record in fleet.claims),
            "that a job waits",
        )
        await ended(other)
        assert nodes(await third.until_phase(Phase.RUNNING)) == ["n1"]
        assert (await job.state()).generation == 1
        await ended(third)
        state = await job.until_phase(Phase.RUNNING, 2)
        assert nodes(state) == ["n2", "n3", "n1"]
        await ended(job)


async def test_s3_3_the_rung_shrink_drops_the_suspect_and_adds_no_node(
    make_rig: MakeRig,
) -> None:
    breaks = Exit(generation=1, node="n2", rank=2, exit_code=1, after=0.3)
    rules = policy(causes={"APPLICATION": [{"strategy": "SHRINK"}, {"strategy": "FAIL"}]})
    async with make(make_rig, breaks, RUNS, spares=1) as rig:
        job = await rig.submit(rules, nodes=RANGE, gpus_per_node=8)
        state = await job.until_phase(Phase.RUNNING, 2)
        assert (nodes(state), state.restarts_spent) == (["n1", "n3"], 0)
        assert state.fewer.split()[:3] == ["2", "of", "3"] and "SHRINK" in state.fewer
        assert [one.strategy for one in state.tries] == ["SHRINK"]
        await until_fleet(rig, lambda fleet: held_nodes(fleet) == {"n1", "n3"}, "n2 given back")
        assert rig.orders("stop")[:3] == [("n1", 1), ("n2", 1), ("n3", 1)], (
            "nothing is left on what is given back"
        )
        await ended(job)


@pytest.mark.long
async def test_s3_3_shares_of_nodes_shrink_and_grow_too(make_rig: MakeRig) -> None:
    async with make(make_rig, gpus=4) as rig:
        job = await rig.submit(policy(**SOON), nodes=RANGE, gpus_per_node=2)
        await job.until_phase(Phase.RUNNING, 1)
        await quarantine(rig, "n3", drain=True, within="1s")
        assert nodes(await job.until_phase(Phase.RUNNING, 2)) == ["n1", "n2"]
        await release(rig, "n3")
        state = await job.until_phase(Phase.RUNNING, 3)
        assert [(slot.node, slot.gpus) for slot in state.slots] == [
            ("n1", (0, 1)),
            ("n2", (0, 1)),
            ("n3", (0, 1)),
        ]
        await ended(job)


async def test_s3_3_a_lone_rank_is_stopped_before_it_joins_a_gang(
    make_rig: MakeRig,
) -> None:
    """It does not fence itself: were its node cut off, the gang could not be moved elsewhere."""
    async with make(make_rig, nodes=2) as rig:
        await quarantine(rig, "n1")
        job = await rig.submit(policy(**SOON), nodes={"min": 1, "max": 2}, gpus_per_node=8)
        assert nodes(await job.until_phase(Phase.RUNNING, 1)) == ["n2"]
        await release(rig, "n1")
        assert nodes(await job.until_phase(Phase.RUNNING, 2)) == ["n2", "n1"]
        assert rig.orders("stop") == [("n2", 1)]
        await ended(job)


async def offer(job: Job, rig: Rig, *names: str, late: int = 0) -> None:
    """Offer it nodes in the fleet's name; `late`: to so many claims ago."""
    claim = next(
        record.claim
        for record in (await fleet_state(rig)).claims
        if f"job/{record.claim.job}" == job.handle.id
    )
    until = (datetime.now(UTC) + timedelta(minutes=2)).isoformat()
    await job.handle.signal(
        "nodes_offered",
        {"submission": claim.submission, "seq": claim.seq - late, "nodes": names, "until": until},
    )


async def test_s3_3_an_offer_gone_or_to_an_older_claim_does_nothing(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig) as rig:
        await quarantine(rig, "n3")
        job = await rig.submit(policy(grow_after="0s"), nodes=RANGE, gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        wishes = await until_fleet(
            rig,
            lambda fleet: any(one.claim.more_at for one in fleet.claims),
            "that it would take more",
        )
        seq = wishes.claims[0].claim.seq
        await offer(job, rig, "n3", late=1)
        await job.handle.signal("nodes_offered", {"nodes": "n3"})
        state = await job.until(lambda state: bool(state.notices), "a notice")
        assert (state.phase, state.generation, nodes(state)) == (Phase.RUNNING, 1, ["n1", "n2"])
        assert state.notices[0].startswith("nodes_offered ")
        await offer(job, rig, "n3")
        state = await job.until(
            lambda state: "it was offered more and has not grown" in state.reason, "answered"
        )
        assert (state.generation, state.phase, rig.orders("stop")) == (1, Phase.RUNNING, [])
        await until_fleet(
            rig,
            lambda fleet: (
                fleet.claims[0].claim.seq == seq + 2 and bool(fleet.claims[0].claim.more_at)
            ),
            "said again",
        )
        await ended(job)


@pytest.mark.long
async def test_s3_3_an_offer_goes_back_when_a_fault_comes_first(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim for more is under way when a person wants it launched again: that one counts."""
    reached = stall_growth(monkeypatch)
    async with make(make_rig) as rig:
        await quarantine(rig, "n3")
        job = await rig.submit(policy(**SOON), nodes=RANGE, gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await release(rig, "n3")
        await asyncio.wait_for(reached.wait(), 200)
        await job.handle.signal("force_retry", {"reason": "now"})
        state = await job.until_phase(Phase.RUNNING, 2)
        assert nodes(state) == ["n1", "n2"]
        await until_fleet(
            rig,
            lambda fleet: (
                [one.places for one in fleet.offers] == [()] and held_nodes(fleet) == {"n1", "n2"}
            ),
            "n3 free",
        )
        assert await strategy(job) is None
        await ended(job)


def stall_growth(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The first attempt to say to a fleet that a job wants more while it runs gets stuck.

    The event says that it was made.
    """
    reached = asyncio.Event()
    tell = FleetActivities.tell_fleet

    @activity.defn(name="tell_fleet")
    async def stalled(self: FleetActivities, told: Any) -> None:
        input = (
            told if isinstance(told, TellFleetInput) else TellFleetInput(**told)
        )  # the SDK reads no types of a method that is defined outside its class
        claim: dict[str, Any] = input.message if input.signal == "claim" else {"keep": ()}
        asks_for_more = (
            len(claim["keep"]) > 0 and claim["most"] > len(claim["keep"]) and not claim["more_at"]
        )
        if asks_for_more and not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        await tell(self, input)

    monkeypatch.setattr(FleetActivities, "tell_fleet", stalled)
    return reached


@pytest.mark.long
async def test_s3_3_a_worker_may_die_between_the_offer_and_the_launch(
    server: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = stall_growth(monkeypatch)
    spec = fleet(3, gpus=8, name=f"f-{uuid.uuid4().hex[:8]}")
    backend = SimulatedBackend(spec, Script((RUNS,), then="run"))
    fleets = SimulatedFleets(spec, backend)
    rig = Rig(server, backend, fleets, f"q-{uuid.uuid4().hex[:8]}", tmp_path)
    async with worker(server, rig.queue, fleets, tmp_path):
        await quarantine(rig, "n3")
        job = await rig.submit(policy(**SOON), nodes=RANGE, gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await release(rig, "n3")
        await asyncio.wait_for(reached.wait(), 200)
        state = await job.state()
        assert (state.phase, state.generation) == (Phase.RUNNING, 1)
        assert "n3: 2 -> 3" in state.reason
        fleet_now = await fleet_state(rig)
        assert [(one.job, [place.node for place in one.places]) for one in fleet_now.offers] == [
            (state.name, ["n3"])
        ]
    assert rig.launches() == {1: ["n1", "n2"]}
    async with worker(server, rig.queue, fleets, tmp_path):
        state = await job.until_phase(Phase.RUNNING, 2)
        assert (nodes(state), state.restarts_spent, state.incidents) == (["n1", "n2", "n3"], 0, ())
        assert rig.launches() == {1: ["n1", "n2"], 2: ["n1", "n2", "n3"]}
        await ended(job)
        await rig.end_fleet()
    for history in [*rig.fleet_histories, *await job.runs()]:
        await replay(history, is_sandboxed=False)  # `short_times` has patched the fleet's
    assert_invariants(backend, all_ended=True)


@pytest.mark.long
async def test_s3_3_a_lost_fleet_offers_again_what_its_jobs_would_take(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig) as rig:
        await quarantine(rig, "n3")
        job = await rig.submit(policy(grow_after="4s"), nodes=RANGE, gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        await until_fleet(
            rig,
            lambda fleet: any(one.claim.more_at for one in fleet.claims),
            "that it would take more",
        )
        await rig.end_fleet()
        await release(rig, "n3")
        assert nodes(await job.until_phase(Phase.RUNNING, 2)) == ["n1", "n2", "n3"]
        await ended(job)


async def test_s3_3_an_offer_is_on_the_page_and_reserves_its_nodes(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig) as rig, claimants(rig) as begin:
        one = await begin()
        await one.claim(2, gpus=8)
        keep = tuple(await one.nodes())
        places = (await one.grants())[-1].places
        await one.claim(
            2, keep=keep, holds=places, most=3, had=2, more_at=datetime.now(UTC), running=True
        )
        told = await one.until_told("nodes_offered")
        assert (told["submission"], told["seq"], told["nodes"]) == (
            one.submission,
            one.claimed.seq,
            ["n3"],
        )
        assert f"to job {one.name}" in str(await rig.fleet.query("__temporal_workflow_metadata"))
        other = await begin()
        await other.claim(1, gpus=8)
        waiting = await until_fleet(
            rig,
            lambda fleet: any(
                "n3 is offered to job" in record.wait_reason for record in fleet.claims
            ),
            "told",
        )
        assert waiting.offers[0].places[0].node == "n3"
        await one.claim(2, keep=keep, holds=places, most=3, had=2, more_at=None, running=True)
        granted = await one.nodes()
        assert sorted(granted) == ["n1", "n2", "n3"], (
            "it is kept for the one that it was offered to"
        )
        await one.give_back()
        await other.nodes()
        await other.give_back()
