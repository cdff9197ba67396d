"""Jobs and their fleet together, both real workflows on simulated nodes.

Tested is which jobs share, leave and give way, and which nodes are replaced.
"""

from __future__ import annotations

import uuid
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from relaunch.activities.fleet import ClosedJobsInput, FleetActivities
from relaunch.evidence.causes import Cause
from relaunch.job.state import Phase
from relaunch.pool.messages import Claim
from relaunch.pool.state import FleetState, NodeStatus
from relaunch.spec.access import Access
from tests.activities.harness import environment
from tests.fakes.nodes import Exit, Progress, Script, ShimDies, Sick, Stranger
from tests.fakes.nodes.health import bus_id
from tests.workflows.claimants import fleet_state, until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Job, Rig, is_claim, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
XID_79 = (
    f"[  100.0] NVRM: Xid (PCI:{bus_id(0)[4:-2]}): 79, pid=4711, name=python, "
    "GPU has fallen off the bus.",
)

NO_SUBMITTERS = Access.model_validate(
    {
        "people": {"grace": {"role": "admin"}},
        "roles": {"ends": ["cancel"]},
        "others": "ends",
        "unproven": ["cancel"],
    }
)


def make(make_rig: MakeRig, *happenings: Any, **options: Any) -> AbstractAsyncContextManager[Rig]:
    return make_rig(Script(happenings, then="run"), name=f"f-{uuid.uuid4().hex[:8]}", **options)


def standing(state: FleetState, node: str) -> NodeStatus:
    return next(record.status for record in state.nodes if record.name == node)


async def ended(*jobs: Job) -> None:
    for job in jobs:
        await job.handle.signal("cancel")
    for job in jobs:
        await job.result()


async def test_two_jobs_share_a_node_and_each_sees_its_own_gpus(make_rig: MakeRig) -> None:
    async with make(make_rig, nodes=1, gpus=4) as rig:
        jobs = [await rig.submit(nodes=1, gpus_per_node=2) for _ in range(2)]
        for job in jobs:
            await job.until_phase(Phase.RUNNING)
        shares = {
            call.order.rank_env[0]["CUDA_VISIBLE_DEVICES"]
            for call in rig.backend.calls
            if call.command == "start"
        }
        assert shares == {"0,1", "2,3"}
        third = await rig.submit(nodes=1, gpus_per_node=1)
        waiting = await third.until_phase(Phase.QUEUED, 1)
        assert any(job.handle.id.removeprefix("job/") in waiting.reason for job in jobs), (
            "it learns which jobs have them"
        )
        await ended(jobs[0])
        await third.until_phase(Phase.RUNNING)
        history = await third.handle.fetch_history()
        assert sum(map(is_claim, history.events)) == 1, "a repeated claim makes a grant void"
        await ended(jobs[1], third)
        state = await until_fleet(rig, lambda state: not state.claims, "no claim")
        assert [record.claim for record in state.claims] == []


async def test_s2_10_jobs_get_gpus_free_of_strangers_or_name_them(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, Stranger(node="n1", gpu=1), nodes=1, gpus=4) as rig:
        part = await rig.submit(nodes=1, gpus_per_node=2)
        await part.until_phase(Phase.RUNNING)
        shares = {
            call.order.rank_env[0]["CUDA_VISIBLE_DEVICES"]
            for call in rig.backend.calls
            if call.command == "start"
        }
        assert shares == {"0,2"}
        await ended(part)
        whole = await rig.submit(nodes=1)
        said = "n1: GPU 1 is used by alice (python, pid 4242)"
        await whole.until(
            lambda s: s.phase is Phase.QUEUED and said in s.reason, "told who is there"
        )
        record = (await fleet_state(rig)).nodes[0]
        assert record.inventory is not None
        assert record.inventory.model.split()[:2] == ["NVIDIA", "H100"]
        assert record.inventory.driver == "570.148.08"
        await ended(whole)


@pytest.mark.long  # a node on which a stranger was seen is read again after ten seconds
async def test_s2_10_a_job_runs_when_the_stranger_it_waits_for_left(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, Stranger(node="n1", gpu=1), nodes=1, gpus=4) as rig:
        job = await rig.submit(nodes=1)
        await job.until(
            lambda s: s.phase is Phase.QUEUED and "GPU 1 is used by alice" in s.reason,
            "told who is there",
        )
        rig.backend.leave("n1")
        await job.until_phase(Phase.RUNNING)
        await ended(job)


async def test_s2_10_a_node_with_a_lost_gpu_is_repaired_before_a_job(
    make_rig: MakeRig,
) -> None:
    lost = Sick(node="n1", gpu_lost=3, until="reboot")
    async with make(make_rig, lost, nodes=1, gpus=4, limits={"nodes_out": "100%"}) as rig:
        job = await rig.submit(nodes=1)
        await job.until_phase(Phase.RUNNING)
        first = min(
            index for index, call in enumerate(rig.backend.calls) if call.command == "prepare"
        )
        before = [call.command for call in rig.backend.calls[:first]]
        assert "reboot" in before, "it was repaired first"
        assert standing(await fleet_state(rig), "n1") is NodeStatus.IN_SERVICE
        await ended(job)


async def test_s4_2_a_spare_replaces_a_broken_node_until_its_repair(
    make_rig: MakeRig,
) -> None:
    breaks = Exit(
        generation=1, node="n2", rank=2, exit_code=None, signal=6, after=0.2, kernel=XID_79
    )
    sick = Sick(node="n2", remap_pending=0, until="reboot", when="running")
    async with make(
        make_rig,
        breaks,
        Progress(generation=2, steps=((0.0, 6),), hangs=True),
        sick,
        nodes=2,
        spares=1,
        gpus=8,
    ) as rig:
        first = await rig.submit(gpus_per_node=8)
        state = await first.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in state.slots] == ["n1", "n3"]
        fleet = await until_fleet(
            rig,
            lambda state: (
                standing(state, "n2") is NodeStatus.IN_SERVICE and bool(rig.backend.upkeep)
            ),
            "n2 back",
        )
        assert [one.command for one in rig.backend.upkeep if one.kind == "began"][:2] == [
            "diagnose",
            "reboot",
        ]
        record = next(record for record in fleet.nodes if record.name == "n2")
        assert [(mark.job, mark.code, bool(mark.retracted)) for mark in record.marks] == [
            (state.name, "Xid 79", True)
        ]
        await ended(first)
        second = await rig.submit(gpus_per_node=8, nodes=2)
        name = (await second.until_phase(Phase.RUNNING)).name
        # Its first generation breaks there as well, a moment later.
        starts = [
            (call.node, call.token)
            for call in rig.backend.calls
            if call.command == "start" and call.token is not None
        ]
        assert {node for node, token in starts if (token.job, token.generation) == (name, 1)} == {
            "n1",
            "n2",
        }
        await ended(second)


@pytest.mark.long
async def test_a_second_bad_node_of_an_incident_goes_to_no_other_job(
    make_rig: MakeRig,
) -> None:
    first = Exit(
        generation=1, node="n2", rank=2, exit_code=None, signal=6, after=0.2, kernel=XID_79
    )
    second = Exit(
        generation=2, node="n1", rank=0, exit_code=None, signal=6, after=0.2, kernel=XID_79
    )
    async with make(
        make_rig,
        first,
        second,
        nodes=2,
        spares=2,
        gpus=8,
        repairs="observe",
        limits={"nodes_out": "100%"},
    ) as rig:
        job = await rig.submit(gpus_per_node=8)
        state = await job.until_phase(Phase.RUNNING, 3)
        assert state.incident is not None, (
            "training has passed no step, so both faults are of one incident"
        )
        assert (state.incident.nodes, len(state.incident.faults)) == (("n2", "n1"), 2)
        fleet = await until_fleet(
            rig,
            lambda state: standing(state, "n1") is not NodeStatus.IN_SERVICE,
            "n1 is out of service",
        )
        assert standing(fleet, "n2") is not NodeStatus.IN_SERVICE
        marks = {
            record.name: [(mark.generation, mark.code, mark.isolated) for mark in record.marks]
            for record in fleet.nodes
        }
        assert (marks["n2"], marks["n1"]) == ([(1, "Xid 79", True)], [(2, "Xid 79", True)])
        await ended(job)


async def test_a_job_that_restarts_in_place_reports_a_hardware_fault(
    make_rig: MakeRig,
) -> None:
    async with make(
        make_rig,
        ShimDies(generation=1, node="n2"),
        Progress(generation=2, steps=((0.0, 6),), hangs=True),
    ) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 2)

        def has_mark(state: FleetState) -> bool:
            return any(
                mark.cause is Cause.NODE_FAULT for record in state.nodes for mark in record.marks
            )

        fleet = await until_fleet(rig, has_mark, "the job, which runs on, has reported n2")
        assert [record.claim.keep for record in fleet.claims] == [()], (
            "by no claim: it is the first one that stands"
        )
        await ended(job)


async def test_a_job_submitted_again_runs_with_the_clock_set_back(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=2) as rig:
        name = f"job-{uuid.uuid4().hex[:8]}"
        # A submission of the year 2096: the server's clock was far ahead then.
        later = 4_000_000_000_000
        await rig.tell_fleet("claim", Claim(name, later, 1, 0))
        job = await rig.submit(name=name)
        state = await job.until_phase(Phase.RUNNING)
        assert state.submission == later + 1
        assert {call.token for call in rig.backend.calls if call.command == "start"} == {
            state.token
        }
        closed = await environment().run(
            FleetActivities(rig.fleets, rig.client, rig.queue).find_closed_jobs,
            ClosedJobsInput(rig.fleets.known.name, ((name, later), (name, later + 1))),
        )
        assert closed == ((name, later),), (
            "its number is known to those who ask which submission runs"
        )
        await ended(job)


async def test_a_job_leaves_a_drained_node_and_spends_nothing(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=2, spares=1, gpus=8) as rig:
        job = await rig.submit(gpus_per_node=8)
        await job.until_phase(Phase.RUNNING, 1)
        message = {
            "node": "n2",
            "reason": "new power supply",
            "by": "grace",
            "drain": True,
            "within": "1s",
        }
        await rig.fleet.signal("quarantine", message)
        state = await job.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in state.slots] == ["n1", "n3"]
        assert (state.restarts_spent, state.tries, state.incidents, state.drains) == (
            0,
            (),
            (),
            (),
        )
        assert any("grace wants n2" in notice for notice in state.notices)
        fleet = await until_fleet(
            rig,
            lambda state: "n2" not in {place.node for one in state.claims for place in one.places},
            "n2 left",
        )
        assert standing(fleet, "n2") is NodeStatus.QUARANTINED
        await ended(job)


async def test_without_another_node_the_old_one_is_used_and_it_says_so(
    make_rig: MakeRig,
) -> None:
    killed = Exit(generation=1, node="n1", rank=0, exit_code=None, signal=9, after=0.2)
    replace = policy(causes={"UNKNOWN": [{"strategy": "REPLACE_NODE"}]})
    async with make(make_rig, killed, nodes=1) as rig:
        job = await rig.submit(replace, nodes=1, ranks=1)
        state = await job.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in state.slots] == ["n1"]
        assert state.incident is not None
        reasons = [one.reason for one in state.incident.decisions]
        assert any(reason.endswith("so it may use n1 again") for reason in reasons), reasons
        await ended(job)


@pytest.mark.long
async def test_of_two_deadlocked_jobs_the_younger_gives_way(
    make_rig: MakeRig,
) -> None:
    """Each loses a node for good and there is no other: both would wait for ever.

    Meanwhile the fleet gets rules by which the jobs could not be submitted any more.
    """
    breaks = [
        Exit(generation=1, node=node, rank=rank, exit_code=None, signal=6, after=3.0, kernel=XID_79)
        for node, rank in (("n2", 1), ("n4", 1))
    ]
    sick = [Sick(node=node, remap_failed=0, when="running") for node in ("n2", "n4")]
    limits = {"replacement_wait": "1s", "nodes_out": "50%"}
    async with make(make_rig, *breaks, *sick, nodes=4, gpus=8, limits=limits) as rig:
        older = await rig.submit(gpus_per_node=8, ranks=1)
        await older.until_phase(Phase.RUNNING, 1)
        younger = await rig.submit(gpus_per_node=8, ranks=1)
        await younger.until_phase(Phase.RUNNING, 1)
        rig.fleets.known = rig.fleets.known.model_copy(update={"access": NO_SUBMITTERS})
        await rig.tell_fleet("apply")
        await until_fleet(rig, lambda state: state.access is not None, "that it has rules")
        state = await older.until_phase(Phase.RUNNING, 2)
        assert {slot.node for slot in state.slots} == {"n1", "n3"}
        waiting = await younger.until(
            lambda s: (
                s.ending is not None or (s.phase is Phase.WAITING_FOR_NODES and not s.maybe_alive)
            ),
            "given way",
        )
        assert waiting.ending is None
        assert waiting.generation == 2
        await ended(older)
        assert {slot.node for slot in (await younger.until_phase(Phase.RUNNING, 2)).slots} == {
            "n1",
            "n3",
        }
        await ended(younger)


async def test_a_job_resubmitted_after_terminate_stops_old_ranks_first(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, nodes=2, gpus=8) as rig:
        name = f"job-{uuid.uuid4().hex[:8]}"
        first = await rig.submit(gpus_per_node=8, name=name)
        await first.until_phase(Phase.RUNNING)
        await first.handle.terminate("by mistake")
        second = await rig.submit(gpus_per_node=8, name=name)
        state = await second.until_phase(Phase.RUNNING)
        old = {
            life.token.submission
            for life in rig.backend.lives
            if life.token.submission < state.submission
        }
        assert len(old) == 1
        living = [life for life in rig.backend.lives if life.token.submission in old]
        assert (
            [one.kind for one in living].count("ended")
            == [one.kind for one in living].count("started")
            == 4
        )
        await ended(second)


async def test_a_job_of_an_unknown_fleet_fails_with_that_sentence(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig) as rig:
        result = await (await rig.submit(fleet="nowhere")).result()
        assert (result.phase, result.exit_code) == (Phase.FAILED, 2)
        assert "'nowhere'" in result.reason


@pytest.mark.long
async def test_a_job_that_asks_keeps_its_nodes_and_the_queue_waits(
    make_rig: MakeRig,
) -> None:
    async with make(make_rig, Exit(generation=1, rank=0, after=0.2), nodes=2, gpus=8) as rig:
        job = await rig.submit(
            policy(causes={"APPLICATION": [{"strategy": "ASK"}]}), gpus_per_node=8
        )
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        assert {place.node for one in (await fleet_state(rig)).claims for place in one.places} == {
            "n1",
            "n2",
        }
        other = await rig.submit(policy({"answer_within": "1s"}), gpus_per_node=8)
        await other.until(
            lambda s: s.phase is Phase.QUEUED and s.generation == 1 and s.next.at is None,
            "in the queue, without a deadline",
        )
        await job.handle.signal("force_retry")
        assert {slot.node for slot in (await job.until_phase(Phase.RUNNING, 2)).slots} == {
            "n1",
            "n2",
        }
        await ended(job)
        await other.until_phase(
            Phase.RUNNING
        )  # in its second generation, perhaps: a rank of the first exits there as well
        await ended(other)
