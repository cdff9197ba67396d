"""The watch of a fleet: one activity for as long as nothing happens, and what ends it."""

from __future__ import annotations

import uuid
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType

import relaunch.workflows.fleet.workflow as fleet_workflow
from relaunch.evidence.findings import Verdict
from relaunch.messages.fleets import WatchFleetInput
from relaunch.pool.events import RepairStart
from relaunch.pool.state import NodeStatus
from relaunch.spec.fleet import FleetNode
from tests.fakes.nodes import Script, Sick, Stranger
from tests.workflows.claimants import StandIn, claimants, eventually, fleet_state, until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROUND = timedelta(milliseconds=200)
INPUT: Any = WatchFleetInput


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_workflow, "SWEEP_INTERVAL", ROUND)


def make(
    make_rig: MakeRig, script: Script | None = None, **options: Any
) -> AbstractAsyncContextManager[Rig]:
    """Return a rig whose fleet has a unique name: the server outlives the test."""
    name = f"f-{uuid.uuid4().hex[:8]}"
    return make_rig(script or Script(then="run"), name=name, is_patched=True, **options)


async def events_of(rig: Rig) -> list[str]:
    return [
        EventType.Name(event.event_type).removeprefix("EVENT_TYPE_")
        async for event in rig.fleet.fetch_history_events()
    ]


def rounds_of(rig: Rig) -> int:
    """Return how often the first node was asked."""
    return sum((call.command, call.node) == ("list", "n1") for call in rig.backend.calls)


async def until_watched(rig: Rig) -> None:
    """Wait until a watch has made a round."""

    async def is_watched() -> bool:
        pending = (await rig.fleet.describe()).raw_description.pending_activities
        return any(
            one.activity_type.name == "watch_fleet" and one.heartbeat_details.payloads
            for one in pending
        )

    await eventually(is_watched, "a round of the watch", rig)


async def until_rounds(rig: Rig, count: int) -> None:
    wanted = rounds_of(rig) + count

    async def is_reached() -> bool:
        return rounds_of(rig) >= wanted

    await eventually(is_reached, f"{count} more rounds", rig)


async def test_an_idle_fleet_writes_no_event_however_often_it_looks(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=3, gpus=2) as rig:
        await rig.tell_fleet("apply")
        await until_watched(rig)
        before = await events_of(rig)
        await until_rounds(rig, 10)
        assert await events_of(rig) == before
        assert before[-1] != "TIMER_STARTED"
        assert (await fleet_state(rig)).probe_count == 1


async def test_a_node_that_falls_silent_and_answers_again_is_news(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=3) as rig:
        await rig.tell_fleet("apply")
        await until_watched(rig)
        rig.backend.cut("n2")
        state = await until_fleet(
            rig, lambda state: bool(state.nodes[1].probe and state.nodes[1].probe.silent), "silence"
        )
        assert state.nodes[1].silent_since is not None
        assert not any(node.silent_since for node in (state.nodes[0], state.nodes[2]))
        rig.backend.heal("n2")
        await until_fleet(rig, lambda state: state.nodes[1].silent_since is None, "an answer")
        assert (await fleet_state(rig)).probe_count == 1


async def test_the_end_of_a_job_that_keeps_its_nodes_is_news(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2) as rig, claimants(rig) as begin:
        job = await begin()
        await job.claim(2)
        places = (await job.until_answered()).places
        await job.launch(places)
        await job.claim(2, holds=places, keep=("n1", "n2"), running=True)
        await until_watched(rig)
        await job.handle.terminate("a person pressed the wrong button")
        await until_fleet(rig, lambda state: not state.claims, "an empty list of claims")
        stopped = {call.node for call in rig.backend.calls if call.command == "stop"}
        assert stopped == {"n1", "n2"}


@pytest.mark.long
async def test_ranks_that_outlive_their_job_are_reported_though_known(make_rig: MakeRig) -> None:
    """They were there when the job had the nodes, too: what nodes answer has not changed."""
    async with make(make_rig, nodes=2) as rig, claimants(rig) as begin:
        job = await begin()
        await job.claim(2)
        places = (await job.until_answered()).places
        await job.launch(places)
        await job.claim(2, holds=places, keep=("n1", "n2"), running=True)
        await until_fleet(
            rig,
            lambda state: all(node.probe and node.probe.generations for node in state.nodes),
            "ranks that are seen",
        )
        await job.give_back()
        await job.handle.signal(StandIn.end)
        await until_fleet(
            rig,
            lambda state: all(node.probe and not node.probe.generations for node in state.nodes),
            "clean nodes",
        )
        stopped = {call.node for call in rig.backend.calls if call.command == "stop"}
        assert stopped == {"n1", "n2"}


async def test_a_changed_a_wrong_and_a_mended_fleet_file_are_news(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2) as rig:
        await rig.tell_fleet("apply")
        await until_watched(rig)
        rig.fleets.wrong = "fleet file lab.yaml: no such key"
        state = await until_fleet(rig, lambda state: bool(state.notices), "a notice")
        assert "no such key" in state.notices[-1] and len(state.notices) == 1
        more = FleetNode(name="n9", address="10.0.0.9")
        known = rig.fleets.known
        rig.fleets.known = known.model_copy(update={"nodes": [*known.nodes, more]})
        await until_rounds(rig, 2)
        assert len((await fleet_state(rig)).notices) == 1
        rig.fleets.wrong = ""
        state = await until_fleet(rig, lambda state: len(state.nodes) == 3, "another node")
        assert state.nodes[2].spec == more


async def test_foreign_processes_on_a_free_node_are_news(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaunch.pool.rounds.INVENTORY_INTERVAL", ROUND)
    monkeypatch.setattr("relaunch.activities.fleet.INVENTORY_INTERVAL", ROUND)
    async with make(make_rig, nodes=2, gpus=2) as rig:
        await rig.tell_fleet("apply")
        await until_fleet(rig, lambda state: all(one.inventory for one in state.nodes), "GPUs")
        await until_watched(rig)
        before = len(await events_of(rig))
        await until_rounds(rig, 5)
        assert len(await events_of(rig)) == before
        rig.backend.visit("n2", Stranger(node="n2", gpu=1))
        state = await until_fleet(
            rig, lambda state: bool(state.nodes[1].foreign_processes), "a foreign process"
        )
        assert "alice" in state.nodes[1].foreign_processes[0].who
        assert not state.nodes[0].foreign_processes


async def test_an_idle_node_with_a_fault_is_mended_before_a_job_fails(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaunch.pool.rounds.INVENTORY_INTERVAL", ROUND)
    monkeypatch.setattr("relaunch.activities.fleet.INVENTORY_INTERVAL", ROUND)
    monkeypatch.setattr("relaunch.pool.state.FAULT_LASTS", ROUND)
    async with make(make_rig, nodes=2, gpus=2) as rig:
        await rig.tell_fleet("apply")
        await until_watched(rig)
        rig.backend.fall_ill("n2", Sick(node="n2", recovery_action=(1, 1), until="reset"))
        state = await until_fleet(
            rig, lambda state: bool(state.nodes[1].healed), "a repair that was proven"
        )
        assert [one.command for one in rig.backend.upkeep if one.kind == "began"] == [
            *("diagnose", "reset-gpus", "diagnose")
        ]
        node = state.nodes[1]
        assert node.verdict is Verdict.HEALTHY and node.past[-1].by == "relaunch"
        assert "the driver asks for a reset of the GPU" in node.past[-1].reason
        await until_fleet(rig, lambda state: not state.nodes[1].remarks, "that it reads as sound")
        assert (await fleet_state(rig)).nodes[1].status is NodeStatus.IN_SERVICE


async def test_a_watch_reads_no_gpus_from_the_moment_a_repair_begins(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process may have them open for a reset: it is replaced at once, not after a round."""
    monkeypatch.setattr(fleet_workflow, "SWEEP_INTERVAL", timedelta(hours=1))
    async with make(make_rig, nodes=2, gpus=2) as rig:
        await rig.tell_fleet("apply")

        async def list_inputs() -> list[WatchFleetInput]:
            return [
                (await rig.client.data_converter.decode(scheduled.input.payloads, [INPUT]))[0]
                async for event in rig.fleet.fetch_history_events()
                if (scheduled := event.activity_task_scheduled_event_attributes).activity_type.name
                == "watch_fleet"
            ]

        async def has_begun(count: int) -> bool:
            return len(await list_inputs()) == count

        await eventually(lambda: has_begun(1), "a watch", rig)
        assert all(node.read_in is not None for node in (await list_inputs())[0].nodes)
        began = RepairStart("n1", f"repair/{rig.fleets.known.name}/n1", "run-1", "grace", "loud")
        await rig.tell_fleet("repair_began", began)
        await eventually(lambda: has_begun(2), "another watch", rig)
        first, second = (await list_inputs())[1].nodes
        assert (first.node, first.read_in) == ("n1", None)
        assert second.read_in is not None
        before, after = await list_inputs()
        assert after.first_in < before.first_in, "the round that was due is not put off"
        assert (await fleet_state(rig)).watched_at is None, "none has ended"


async def test_a_new_claim_is_watched_within_a_round(make_rig: MakeRig) -> None:
    """The watch that has begun before knows nothing of it, and is replaced."""
    async with make(make_rig, nodes=2) as rig, claimants(rig) as begin:
        await until_watched(rig)
        job = await begin()
        await job.claim(1)
        await job.until_answered()
        await until_watched(rig)
        await job.handle.terminate("a person pressed the wrong button")
        await until_fleet(rig, lambda state: not state.claims, "an empty list of claims")
