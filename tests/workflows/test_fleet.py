"""The fleet as a workflow, on simulated nodes.

What it receives comes to grants and repairs, and nothing that ends loses it a node.
"""

from __future__ import annotations

import uuid
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError

from relaunch.activities.fleet import FleetActivities
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.pool.events import FleetEvent
from relaunch.pool.messages import FaultReport, Suspect
from relaunch.pool.scheduler import apply_event
from relaunch.pool.state import FleetState, NodeRecord, NodeStatus
from relaunch.spec.fleet import FleetNode
from relaunch.workflows.fleet import workflow as fleet_workflow
from tests.fakes.nodes import Script, Sick, Takes
from tests.payloads import read_failure
from tests.workflows.claimants import claimants, eventually, fleet_state, until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")


def make(
    make_rig: MakeRig, script: Script | None = None, **options: Any
) -> AbstractAsyncContextManager[Rig]:
    """Return a rig whose fleet has a unique name: the server outlives the test."""
    return make_rig(script or Script(then="run"), name=f"f-{uuid.uuid4().hex[:8]}", **options)


def standing(state: FleetState, node: str) -> NodeStatus:
    return next(record.status for record in state.nodes if record.name == node)


def waits(state: FleetState, job: str) -> str:
    return next(
        (
            record.wait_reason
            for record in state.claims
            if record.claim.job == job and record.is_waiting
        ),
        "",
    )


async def test_a_second_claim_waits_for_the_first_and_gets_its_nodes(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=3, gpus=8) as rig, claimants(rig) as begin:
        first, second = await begin(), await begin()
        await first.claim(2)
        grant = await first.until_answered()
        assert [(place.node, place.address) for place in grant.places] == [
            ("n1", "10.0.0.1"),
            ("n2", "10.0.0.2"),
        ]
        await second.claim(2)
        said = waits(
            await until_fleet(rig, lambda state: bool(waits(state, second.name)), "a reason"),
            second.name,
        )
        assert first.name in said
        assert await second.grants() == []
        await first.give_back()
        assert len(set(await second.nodes())) == 2
        await until_fleet(
            rig,
            lambda state: [record.claim.job for record in state.claims] == [second.name],
            "one claim",
        )


async def test_more_nodes_than_there_are_is_hopeless_and_said_at_once(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig, claimants(rig) as begin:
        job = await begin()
        await job.claim(3)
        grant = await job.until_answered()
        assert (grant.kind, grant.places) == ("hopeless", ())
        assert "3" in grant.reason and "2" in grant.reason


async def test_nodes_of_a_terminated_job_are_cleaned_for_the_next_job(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig, claimants(rig) as begin:
        first, second = await begin(), await begin()
        await first.claim(2)
        grant = await first.until_answered()
        await first.launch(grant.places)
        await first.claim(2, holds=grant.places, keep=("n1", "n2"), running=True)
        await first.handle.terminate("a person pressed the wrong button")
        await second.claim(2)
        await rig.tell_fleet(
            "apply"
        )  # checks who still runs, which is done every ten seconds while a job waits
        assert await second.nodes() == ["n1", "n2"]
        stopped = {call.node for call in rig.backend.calls if call.command == "stop"}
        assert stopped == {"n1", "n2"}
        assert [life.kind for life in rig.backend.lives].count("started") == 2
        assert first.name not in [record.claim.job for record in (await fleet_state(rig)).claims]


async def test_a_grant_that_reaches_no_job_is_taken_back(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig, claimants(rig) as begin:
        job = await begin()
        await job.handle.terminate("before it was granted anything")
        await job.claim(2)
        await until_fleet(
            rig, lambda state: state.is_probed and not state.claims, "an empty list of claims"
        )
        other = await begin()
        await other.claim(2)
        assert await other.nodes() == ["n1", "n2"]


async def test_orphaned_ranks_are_stopped_and_their_nodes_granted(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig, claimants(rig) as begin:
        lost, job = await begin(), await begin()
        await lost.claim(2)
        await lost.launch((await lost.until_answered()).places)
        await rig.end_fleet()
        await lost.handle.terminate("together with its fleet")
        await job.claim(2)
        assert await job.nodes() == ["n1", "n2"]
        assert all(
            not record.probe.generations
            for record in (await fleet_state(rig)).nodes
            if record.probe
        )
        assert {call.node for call in rig.backend.calls if call.command == "stop"} == {"n1", "n2"}


async def test_a_terminated_fleet_grants_nothing_with_holders_unknown(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=3, gpus=8) as rig, claimants(rig) as begin:
        first, second = await begin(), await begin()
        await first.claim(2)
        places = (await first.until_answered()).places
        running = f"WorkflowId = '{first.handle.id}' AND ExecutionStatus = 'Running'"

        async def listed() -> bool:
            return bool([run async for run in rig.client.list_workflows(running)])

        await eventually(listed, "the first job in the server's list", rig)
        await rig.end_fleet()
        await second.claim(1)
        await first.until_told("claim_again")
        assert await second.grants() == []
        assert first.name in ((await fleet_state(rig)).awaited_jobs or ())
        await first.claim(2, holds=places, keep=tuple(place.node for place in places), running=True)
        assert await second.nodes() == ["n3"]
        assert await first.grants() == [], "it has what it wants, and knows that"


async def test_a_quarantine_outlives_the_termination_of_its_fleet(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=3, gpus=8) as rig, claimants(rig) as begin:
        await rig.tell_fleet("quarantine", {"node": "n1", "reason": "flaky NVLink", "by": "grace"})
        await rig.tell_fleet("pause", {"reason": "the cooling is being mended", "by": "grace"})
        state = await until_fleet(
            rig, lambda state: bool(state.breaker.paused) and state.is_restored, "repairs paused"
        )
        assert standing(state, "n1") is NodeStatus.QUARANTINED
        await rig.end_fleet()
        await rig.tell_fleet("quarantine", {"node": "n2", "reason": "loud fan", "by": "ada"})
        await until_fleet(
            rig,
            lambda state: bool(state.nodes) and standing(state, "n2") is NodeStatus.QUARANTINED,
            "n2 quarantined",
        )
        await rig.end_fleet()  # whatever it had learned of the first by then
        await rig.tell_fleet("apply")
        await rig.end_fleet()  # most likely before any worker has taken it up
        job = await begin()
        await job.claim(1)
        assert await job.nodes() == ["n3"]
        state = await fleet_state(rig)
        assert [(node.reason, node.by) for node in state.nodes[:2]] == [
            ("flaky NVLink", "grace"),
            ("loud fan", "ada"),
        ]
        assert "cooling" in state.breaker.paused
        said = "remembers 2 nodes out of service and a pause of repairs from the run before"
        assert [notice.split(": ", 1)[1] for notice in state.notices] == [said]


async def test_a_fleet_after_runs_of_other_workers_begins_empty(
    make_rig: MakeRig,
) -> None:
    name = f"f-{uuid.uuid4().hex[:8]}"
    async with make_rig(Script(then="run"), name=name) as rig:
        await rig.tell_fleet("quarantine", {"node": "n1", "reason": "flaky NVLink", "by": "grace"})
        await until_fleet(
            rig,
            lambda state: bool(state.nodes) and standing(state, "n1") is NodeStatus.QUARANTINED,
            "n1 quarantined",
        )
    async with make_rig(Script(then="run"), name=name) as rig:
        await rig.tell_fleet("apply")
        state = await until_fleet(
            rig, lambda state: state.is_restored, "whether anything is remembered"
        )
        assert standing(state, "n1") is NodeStatus.IN_SERVICE
        (notice,) = state.notices
        assert "said again" in notice and "task queue" in notice


async def test_a_job_that_ends_while_it_is_asked_is_not_awaited(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=1) as rig, claimants(rig) as begin:
        job = await begin()
        running = f"WorkflowId = '{job.handle.id}' AND ExecutionStatus = 'Running'"

        async def listed() -> bool:
            return bool([run async for run in rig.client.list_workflows(running)])

        await eventually(listed, "the job in the server's list", rig)
        await rig.end_fleet()
        await rig.tell_fleet("apply")
        await until_fleet(
            rig, lambda state: job.name in (state.awaited_jobs or ()), "that the job is asked"
        )
        await job.handle.terminate("it never says what it holds")
        await rig.tell_fleet("apply")  # has it checked now
        await until_fleet(
            rig,
            lambda state: job.name not in (state.awaited_jobs or ()),
            "that the fleet does not wait for it",
        )


@pytest.mark.long
async def test_a_repair_that_met_a_pause_is_repeated_not_quarantined(
    make_rig: MakeRig,
) -> None:
    faults = (
        Sick(node="n2", remap_pending=0, until="reset"),
        Takes(node="n2", command="diagnose", seconds=1.0),
    )
    async with (
        make(make_rig, Script(faults, then="run"), nodes=2, gpus=1) as rig,
        claimants(rig) as begin,
    ):
        job = await begin()
        blamed = Suspect(
            "n2", datetime.now(UTC), 1, Cause.GPU_FATAL, "Xid 79 on n2", code="Xid 79", isolate=True
        )
        await job.claim(0, suspects=(blamed,))
        await until_fleet(
            rig, lambda state: standing(state, "n2") is NodeStatus.REPAIRING, "a repair of n2"
        )
        await rig.fleet.signal("pause", {"reason": "the cooling is being mended", "by": "grace"})
        first = (
            (await until_fleet(rig, lambda state: bool(state.requests), "that it asks"))
            .requests[0]
            .run
        )
        await rig.fleet.signal("resume", {"by": "grace"})
        state = await until_fleet(
            rig, lambda state: standing(state, "n2") is NodeStatus.IN_SERVICE, "n2 in service"
        )
        assert [
            (one.permit.run == first, one.permit.allowed, one.permit.stale) for one in state.permits
        ] == [
            (True, False, True),
            (False, True, False),
        ]
        assert state.nodes[1].verdict is Verdict.HEALTHY
        assert [one.command for one in rig.backend.upkeep if one.kind == "began"].count(
            "reset-gpus"
        ) == 1


def blame(node: str, generation: int = 1) -> Suspect:
    """A job's certain evidence against a node, of now."""
    reason = f"Xid 79 on {node}"
    now = datetime.now(UTC)
    return Suspect(node, now, generation, Cause.GPU_FATAL, reason, code="Xid 79", isolate=True)


async def test_a_release_withdraws_what_a_repair_asks(make_rig: MakeRig) -> None:
    sick = Script((Sick(node="n2", remap_pending=0, until="reset"),), then="run")
    async with (
        make(make_rig, sick, nodes=2, gpus=1, repairs="ask") as rig,
        claimants(rig) as begin,
    ):
        job = await begin()
        await job.claim(0, suspects=(blame("n2"),))
        repair = rig.client.get_workflow_handle(f"repair/{rig.fleets.known.name}/n2")
        await until_fleet(rig, lambda state: "/" in find(state, "n2").repair, "a repair of n2")

        async def is_asked() -> bool:
            return str(await repair.query("next")).startswith("AskPerson")

        await eventually(is_asked, "a question", rig)
        await rig.fleet.signal("release", {"node": "n2", "reason": "reseated", "by": "grace"})
        state = await until_fleet(rig, lambda state: not find(state, "n2").repair, "its end")
        assert standing(state, "n2") is NodeStatus.IN_SERVICE
        end = await repair.result()
        assert (end["outcome"], "grace released it: reseated" in end["reason"]) == ("refused", True)
        assert not [one for one in rig.backend.upkeep if one.command == "reset-gpus"]


async def test_a_fleet_that_repaired_despite_a_release_is_replayed(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the rig is left. 0.1.0 had no patches, and did not note when a node was cleared."""

    def apply_as_before(state: FleetState, fact: FleetEvent, now: datetime) -> FleetState:
        state = apply_event(state, fact, now)
        nodes = (replace(one, cleared_at=None, released_at=None) for one in state.nodes)
        return replace(state, nodes=tuple(nodes))

    old = blame("n1")
    async with make(make_rig, nodes=2, gpus=1, is_patched=True) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(fleet_workflow, "apply_event", apply_as_before)
            patch.setattr(workflow, "patched", lambda *_, **__: False)
            await rig.tell_fleet("apply")
            await until_fleet(rig, lambda state: state.is_probed, "probes")
            await rig.tell_fleet("release", {"node": "n1", "reason": "reseated", "by": "grace"})
            ended = ""
            for generation in (1, 2):
                report = FaultReport("a", 1, (replace(old, generation=generation),))
                await rig.tell_fleet("report_faults", report)
                state = await until_fleet(
                    rig,
                    lambda state, before=ended: (  # type: ignore[misc]
                        find(state, "n1").repair_ended != before
                    ),
                    f"the end of repair {generation}",
                )
                ended = find(state, "n1").repair_ended
            await rig.end_fleet()


async def test_a_fleet_that_was_taken_over_heeds_releases(
    make_uncached_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task is replayed from the beginning, also what 0.1.0 did, which had no patches."""

    async def release(node: str) -> NodeRecord:
        await rig.tell_fleet("release", {"node": node, "reason": "reseated", "by": "grace"})
        said = f"grace released {node}: reseated"
        state = await until_fleet(
            rig, lambda state: any(said in one for one in state.notices), f"release of {node}"
        )
        return find(state, node)

    async with make(make_uncached_rig, nodes=4, gpus=1, is_patched=True) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(workflow, "patched", lambda *_, **__: False)
            await rig.tell_fleet("apply")
            await until_fleet(rig, lambda state: state.is_probed, "probes")
            assert (await release("n1")).released_at is None
            assert (await release("n2")).released_at is None
        for node in ("n3", "n4"):
            released = await release(node)
            assert released.released_at is not None
            assert released.released_at == released.cleared_at
        assert find(await fleet_state(rig), "n1").released_at is None
        await rig.end_fleet()


@pytest.mark.long
async def test_within_the_cool_down_a_node_gets_the_next_repair(
    make_rig: MakeRig,
) -> None:
    sick = Sick(node="n2", remap_pending=0, until="reset")
    async with (
        make(make_rig, Script((sick,), then="run"), nodes=2, gpus=1) as rig,
        claimants(rig) as begin,
    ):
        job = await begin()
        for generation, status in enumerate(
            (NodeStatus.IN_SERVICE, NodeStatus.IN_SERVICE, NodeStatus.QUARANTINED), 1
        ):
            if generation > 1:
                rig.backend.fall_ill("n2", sick)
            await job.claim(0, suspects=(blame("n2", generation),))
            state = await until_fleet(
                rig,
                lambda state, count=generation: (  # type: ignore[misc]
                    len(find(state, "n2").marks) == count and not is_out_for_now(state)
                ),
                f"the end of repair {generation}",
            )
            assert standing(state, "n2") is status
        acts = [one.command for one in rig.backend.upkeep if one.kind == "began"]
        assert [one for one in acts if one != "diagnose"] == ["reset-gpus", "reboot"]
        assert "limits.cool_down" in find(state, "n2").reason


def find(state: FleetState, node: str) -> NodeRecord:
    return next(record for record in state.nodes if record.name == node)


def is_out_for_now(state: FleetState) -> bool:
    return standing(state, "n2") in (NodeStatus.SUSPECT, NodeStatus.REPAIRING)


async def test_a_silent_node_is_waited_for_and_granted_once_it_answers(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig:
        rig.backend.cut("n2")
        async with claimants(rig) as begin:
            job = await begin()
            await job.claim(2)
            state = await until_fleet(rig, lambda state: bool(waits(state, job.name)), "a reason")
            assert "answer" in waits(state, job.name)
            assert state.nodes[1].probe is not None and "no answer" in state.nodes[1].probe.silent
            rig.backend.heal("n2")
            assert await job.nodes() == ["n1", "n2"]


async def test_persons_quarantine_drain_and_release_nodes_by_signals(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig, claimants(rig) as begin:
        job, other = await begin(), await begin()
        await job.claim(1)
        assert await job.nodes() == ["n1"]
        before = datetime.now(UTC)
        await rig.fleet.signal(
            "quarantine",
            {"node": "n1", "reason": "new memory", "by": "grace", "drain": True, "within": "5m"},
        )
        await rig.fleet.signal("quarantine", {"node": "n2", "reason": "loud fan", "by": "grace"})
        asked = await job.until_told("drain_node")
        assert (asked["node"], asked["reason"], asked["by"]) == ("n1", "new memory", "grace")
        assert (
            timedelta(minutes=4)
            < datetime.fromisoformat(asked["until"]) - before
            < timedelta(minutes=6)
        )
        state = await until_fleet(
            rig, lambda state: standing(state, "n2") is NodeStatus.QUARANTINED, "n2 quarantined"
        )
        n2 = state.nodes[1]
        assert (n2.reason, n2.by, n2.drain) == ("loud fan", "grace", None)
        assert len([notice for notice in state.notices if "grace" in notice]) == 2
        await job.give_back()
        await other.claim(1)
        await until_fleet(rig, lambda state: bool(waits(state, other.name)), "a reason to wait")
        assert await other.grants() == []
        await rig.fleet.signal("release", {"node": "n2", "reason": "new fan", "by": "ada"})
        assert await other.nodes() == ["n2"]
        page = str(await rig.fleet.query("__temporal_workflow_metadata"))
        assert "**n1** quarantined" in page and "grace: new memory" in page


async def test_a_blamed_node_is_repaired_unless_repairs_are_paused(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=2, gpus=1) as rig, claimants(rig) as begin:
        job = await begin()
        await job.claim(2)
        await job.nodes()
        await rig.fleet.signal("pause", {"reason": "the cooling is being mended", "by": "grace"})
        blamed = Suspect(
            "n2", datetime.now(UTC), 1, Cause.GPU_FATAL, "Xid 79 on n2", code="Xid 79", isolate=True
        )
        await job.claim(0, suspects=(blamed,))
        state = await until_fleet(
            rig,
            lambda state: standing(state, "n2") is not NodeStatus.IN_SERVICE,
            "n2 out of service",
        )
        assert (standing(state, "n2"), state.nodes[1].by) == (NodeStatus.SUSPECT, f"job {job.name}")
        assert "cooling" in state.breaker.paused
        again = await begin()
        await again.claim(2)
        await until_fleet(rig, lambda state: bool(waits(state, again.name)), "a reason to wait")
        assert standing(await fleet_state(rig), "n2") is NodeStatus.SUSPECT
        await rig.fleet.signal("resume", {"by": "grace"})
        assert await again.nodes() == ["n1", "n2"]
        repair = await rig.client.get_workflow_handle(
            f"repair/{rig.fleets.known.name}/n2"
        ).describe()
        assert repair.parent_id == rig.fleet.id
        assert [one.command for one in rig.backend.upkeep if one.kind == "began"] == ["diagnose"], (
            "it was healthy"
        )


@pytest.mark.long_after(variants=4)
@pytest.mark.parametrize(
    ("signal", "message", "sentence"),
    [
        ("quarantine", None, "quarantine: node: "),
        ("quarantine", {"node": "n1", "nod": "n2"}, "quarantine: nod: "),
        (
            "quarantine",
            {"node": "n1", "drain": True, "within": 30},
            "quarantine: within: 30",
        ),
        (
            "quarantine",
            {"node": "n1", "within": "30m"},
            "quarantine: within: ",
        ),
        ("quarantine", {"node": "../n1"}, "quarantine: node: '../n1'"),
        ("quarantine", ["n1"], "quarantine: "),
        ("release", {"node": ""}, "release: node: missing"),
        ("release", "n1", "release: "),
        ("pause", {"reason": 7}, "pause: reason: "),
        ("resume", 3.5, "resume: "),
        ("apply", {"fleet": "other"}, "apply: fleet: "),
        ("claim", {"job": "llama"}, "claim: submission: missing"),
        ("claim", None, "claim: job: missing"),
        ("repair_began", {"node": "n1"}, "repair_began: workflow: missing"),
        ("repair_wanted", {"step": "explode"}, "repair_wanted: "),
        ("repair_ended", [], "repair_ended: "),
    ],
)
async def test_an_unreadable_signal_is_a_notice_and_changes_nothing(
    make_rig: MakeRig, signal: str, message: Any, sentence: str
) -> None:
    async with make(make_rig, nodes=1) as rig:
        await rig.tell_fleet(signal, message)
        state = await until_fleet(rig, lambda state: bool(state.notices), "a notice")
        assert sentence in state.notices[-1]
        assert (state.claims, state.requests, state.breaker.paused) == ((), (), "")
        state = await until_fleet(rig, lambda state: state.is_probed, "every node looked at")
        assert standing(state, "n1") is NodeStatus.IN_SERVICE


async def test_a_bad_fleet_file_changes_nothing_also_for_a_new_fleet(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2) as rig, claimants(rig) as begin:
        await rig.end_fleet()
        rig.fleets.wrong = "fleet.yaml:3: nodes: missing"
        job, later = await begin(), await begin()
        await job.claim(1)
        assert await job.nodes() == ["n1"], "as the worker serves it since it could be used last"
        assert "fleet.yaml:3: nodes: missing" in (await fleet_state(rig)).notices[-1]
        rig.fleets.wrong = ""
        await rig.tell_fleet("apply", {"reason": "mended"})
        rig.fleets.wrong = "fleet.yaml:3: nodes: missing again"
        await rig.tell_fleet("apply")
        state = await until_fleet(rig, lambda state: "again" in state.notices[-1], "a notice")
        assert len(state.nodes) == 2
        await job.give_back()
        await later.claim(2)
        assert await later.nodes() == ["n1", "n2"]


async def test_a_changed_fleet_file_is_applied_when_a_person_says_so(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig, claimants(rig) as begin:
        job = await begin()
        await job.claim(1)
        assert await job.nodes() == ["n1"]
        before = rig.fleets.known
        rig.fleets.known = before.model_copy(
            update={"nodes": (FleetNode(name="n2", address="10.0.0.2", gpus=4),)}
        )
        await rig.tell_fleet("apply", {"reason": "n1 moves", "by": "grace"})
        state = await until_fleet(
            rig, lambda state: standing(state, "n1") is NodeStatus.QUARANTINED, "n1 out of the file"
        )
        assert {one.name: (one.by, one.spec.gpus) for one in state.nodes} == {
            "n1": ("fleet file", 8),
            "n2": ("", 4),
        }
        await job.give_back()
        await until_fleet(rig, lambda state: [one.name for one in state.nodes] == ["n2"], "n1 gone")


@pytest.mark.long
async def test_over_many_runs_no_claim_is_lost_or_node_granted_twice(
    make_short_rig: MakeRig,
) -> None:
    async with make(make_short_rig, nodes=2, gpus=8) as rig, claimants(rig) as begin:
        jobs = [await begin() for _ in range(6)]
        for number, job in enumerate(jobs):
            await job.claim(
                1 + number % 2, since=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=number)
            )
        for job in jobs:
            nodes = await job.nodes()
            assert len(nodes) == job.claimed.nodes
            assert len(await job.grants()) == 1, "told once"
            state = await fleet_state(rig)
            used = [place.node for record in state.claims for place in record.places]
            assert len(used) == len(set(used))
            await job.give_back()
        await until_fleet(rig, lambda state: not state.claims, "an empty list of claims")
        await rig.end_fleet()
        assert len(rig.fleet_histories) >= 3
        assert all(len(history.events) < 300 for history in rig.fleet_histories)


@pytest.mark.long_after(variants=1)
async def test_signals_during_continue_as_new_of_the_fleet_are_kept(
    make_short_rig: MakeRig,
) -> None:
    async with make(make_short_rig, nodes=1) as rig:
        for number in range(30):
            await rig.tell_fleet(
                "pause" if number % 2 == 0 else "resume",
                {"reason": f"number {number}", "by": "grace"},
            )
        await rig.tell_fleet("quarantine", {"node": "n1", "reason": "the last", "by": "grace"})
        state = await until_fleet(
            rig,
            lambda state: state.is_probed and standing(state, "n1") is NodeStatus.QUARANTINED,
            "n1 quarantined",
        )
        assert state.breaker.paused == ""
        assert state.nodes[0].reason == "the last"
        await rig.end_fleet()
        assert len(rig.fleet_histories) >= 2


async def test_the_signal_that_begins_a_fleet_is_applied(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=1) as rig:
        await rig.tell_fleet(
            "quarantine", {"node": "n1", "reason": "the first word", "by": "grace"}
        )
        state = await until_fleet(rig, lambda state: state.is_probed, "every node looked at")
        assert (state.nodes[0].status, state.nodes[0].reason) == (
            NodeStatus.QUARANTINED,
            "the first word",
        )


async def test_a_repeated_claim_is_granted_once_for_each_that_counts(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig, claimants(rig) as begin:
        job = await begin()
        await job.claim(1)
        first = job.claimed
        assert await job.nodes() == ["n1"]
        await job.claim(2, keep=("n1",), holds=(await job.until_answered()).places)
        assert await job.nodes() == ["n1", "n2"]
        await rig.tell_fleet("claim", first)  # late, after what took its place
        await rig.tell_fleet("claim", replace(first, seq=0))
        await rig.tell_fleet("pause", {"by": "grace"})
        state = await until_fleet(
            rig, lambda state: bool(state.breaker.paused), "what was sent last"
        )
        assert [record.claim.seq for record in state.claims] == [2]
        assert len(state.claims[0].places) == 2


async def test_an_unforeseen_error_fails_the_workflow_task_only(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: FleetActivities, fleet: str) -> None:
        raise ApplicationError("a mistake in this program", non_retryable=True)

    broken.__temporal_activity_definition = (
        FleetActivities.read_fleet.__temporal_activity_definition
    )  # type: ignore[attr-defined]
    monkeypatch.setattr(FleetActivities, "read_fleet", broken)
    async with make(make_rig, nodes=1) as rig:
        await rig.tell_fleet("pause")

        async def failed() -> list[str]:
            events = (await rig.fleet.fetch_history()).events
            return [
                read_failure(event.workflow_task_failed_event_attributes.failure)
                for event in events
                if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
            ]

        await eventually(failed, "a failed workflow task", rig)
        assert "mistake in this" in str(await failed())
        assert (await rig.fleet.describe()).status is WorkflowExecutionStatus.RUNNING
        await rig.fleet.terminate("it is broken")
