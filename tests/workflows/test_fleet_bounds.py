"""How large the payloads and histories of a fleet become: 10,000 nodes with as many jobs.

Names are random where a person would choose them freely, so that they compress no better than real
ones; every twentieth node has had faults.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from random import Random

import pytest
from temporalio.api.enums.v1 import EventType

from relaunch.activities.fleet import ClosedJobsInput, LookInput, TellFleetInput
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.generation import LaunchedGeneration
from relaunch.messages.fleets import FleetFile, FleetInput, WatchFleetInput, short
from relaunch.pool.events import ClaimEvent, FleetFileContent
from relaunch.pool.inventory import read_inventory
from relaunch.pool.messages import Claim, Grant, Place, Suspect
from relaunch.pool.nodes import MAX_INVENTORIES
from relaunch.pool.restore import export_state
from relaunch.pool.scheduler import MAX_PROBED, Scheduler
from relaunch.pool.state import (
    ClaimRecord,
    FleetState,
    LiveGeneration,
    Mark,
    NodeProbe,
    NodeRecord,
    NodeStatus,
    PastReason,
)
from relaunch.spec.fleet import FleetLimits, FleetNode
from relaunch.temporal import data_converter
from relaunch.workflows.training_job.commands import SHARD
from tests.fakes.nodes import Script
from tests.recovery.fleet_builders import T0
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import runs_of

NODES = 10_000
WIDEST = 32 * SHARD
"""Nodes of the widest job."""
MIB = 1024 * 1024


def wire_size(value: object) -> int:
    (payload,) = data_converter().payload_converter.to_payloads([value])
    return payload.ByteSize()


def launched(*nodes: str) -> LaunchedGeneration:
    minute = timedelta(minutes=1)
    return LaunchedGeneration(
        1763797000000, 3, nodes, len(nodes), True, minute, minute, minute, minute, complete=True
    )


def probe(random: Random, name: str, job: str, *, read: bool) -> NodeProbe:
    some = random.randrange(500, 80_000)  # ranks of one job use nearly the same
    gpus = [
        {
            "name": "NVIDIA H100 80GB HBM3",
            "memory": {"total": 85520809984, "used": (some + random.randrange(40)) << 20},
        }
        for _ in range(8)
    ]
    inventory = read_inventory({"gpus": gpus, "driver": "570.86.15", "nvml": "12.570.86"})
    return NodeProbe(
        name,
        boot_id=f"{random.getrandbits(32):08x}",
        generations=(LiveGeneration(job, 1763797000000 + random.randrange(10**9), 3),),
        inventory=inventory if read else None,
    )


def marks(random: Random, job: str) -> tuple[Mark, ...]:
    reason = f"GPU {random.randrange(8)} fell off the bus (Xid 79), pid {random.randrange(10**6)}"
    mark = Mark(T0, job, 1763797000000 + random.randrange(10**9), 3, Cause.GPU_FATAL, reason, "79")
    return (mark, replace(mark, generation=4), replace(mark, generation=5))


@cache
def fill_fleet() -> FleetState:
    random = Random(1)
    nodes, claims = [], []
    for number in range(NODES):
        name = f"gpu-{number:05d}"
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        spec = FleetNode(name=name, address=address, user="train", gpus=8)
        job = f"{random.choice(('llama', 'gpt', 'vit'))}-{random.getrandbits(40):x}"
        seen = probe(random, name, job, read=True)
        at = T0 + timedelta(seconds=number // MAX_PROBED)
        record = NodeRecord(
            spec,
            probe=replace(seen, inventory=None),
            probed_at=at,
            probe_ordered_at=at,
            has_answered=True,
            inventory=seen.inventory,
            inventory_at=at,
        )
        if number % 20 == 0:
            reason = f"Xid {random.randrange(150)} on 0000:{random.randrange(99):02d}:00.0"
            past = PastReason(reason, f"job {job}", T0, T0, "examined healthy after a repair")
            record = replace(
                record,
                status=NodeStatus.SUSPECT,
                reason=reason,
                since=T0,
                marks=marks(random, job),
                past=(past, past),
                verdict=Verdict.HEALTHY,
                verdict_at=T0,
                verdict_reason="dcgmi diag -r 2 passed",
            )
        place = Place(name, address)
        claim = Claim(
            job,
            seen.generations[0].submission,
            random.randrange(2, 40),
            1,
            gpus=8,
            since=T0 + timedelta(milliseconds=random.randrange(10**9)),
            running=True,
            keep=(name,),
            holds=(place,),
            had=1,
            launched=(launched(name),),
        )
        grant = Grant(claim.submission, claim.seq, reason="it goes on with what it has")
        nodes.append(record)
        claims.append(ClaimRecord(claim, granted=(place,), waiting_since=T0, answer=grant))
    return FleetState(
        "pool",
        nodes=tuple(nodes),
        claims=tuple(claims),
        awaited_jobs=(),
        is_file_read=True,
        is_restored=True,
        is_probed=True,
        swept_at=T0,
    )


def take_claims(count: int) -> tuple[ClaimEvent, ...]:
    suspects = (Suspect("gpu-00001", T0, 3, Cause.HANG, "step 5 has not changed for 15 min"),)
    return tuple(
        ClaimEvent(replace(record.claim, suspects=suspects))
        for record in fill_fleet().claims[:count]
    )


def widest_claim() -> Claim:
    nodes = tuple(f"gpu-{number:05d}" for number in range(WIDEST))
    places = tuple(Place(name, f"{name}.cluster.example") for name in nodes)
    on = (launched(*nodes),)
    return Claim("llama", 1763797000000, 7, len(nodes), keep=nodes, holds=places, launched=on)


PAYLOADS: dict[str, Callable[[], object]] = {
    "continue-as-new with 1,000 messages": lambda: FleetInput(
        "pool", fill_fleet(), take_claims(1000), T0, "0" * 64
    ),
    "query state": lambda: short(fill_fleet()),
    "state for the next run": lambda: export_state(fill_fleet()),
    "file": lambda: FleetFile(
        FleetFileContent("act", tuple(node.spec for node in fill_fleet().nodes), FleetLimits())
    ),
    "order to probe": lambda: LookInput(
        "pool", tuple(node.name for node in fill_fleet().nodes[:MAX_PROBED])
    ),
    "result of a probe": lambda: tuple(
        probe(Random(number), f"gpu-{number:05d}", "llama", read=number < MAX_INVENTORIES)
        for number in range(MAX_PROBED)
    ),
    "jobs that may have ended": lambda: ClosedJobsInput(
        "pool", tuple(record.key for record in fill_fleet().claims)
    ),
    "input of a watch": lambda: WatchFleetInput(
        "pool",
        "0" * 64,
        "",
        tuple(record.key for record in fill_fleet().claims),
        Scheduler().list_known(fill_fleet(), T0),
        timedelta(0),
        timedelta(0),
    ),
    "claim of the widest job": lambda: TellFleetInput("pool", "claim", widest_claim()),
    "grant to the widest job": lambda: Grant(
        1763797000000, 7, places=widest_claim().holds, launched=widest_claim().launched
    ),
}


@pytest.mark.long_after(variants=2)
@pytest.mark.parametrize("what", PAYLOADS)
def test_no_payload_of_10000_nodes_and_jobs_reaches_a_mib(what: str) -> None:
    assert wire_size(PAYLOADS[what]()) < MIB


@pytest.mark.long
async def test_a_storm_of_1000_messages_is_taken_and_bounded(make_rig: MakeRig) -> None:
    """People quarantine and release a node five hundred times, as fast as the server takes it."""
    async with make_rig(Script(then="run"), name=f"f-{uuid.uuid4().hex[:8]}", nodes=3) as rig:
        await rig.tell_fleet("apply")
        await until_fleet(rig, lambda state: state.is_probed, "probed")
        await asyncio.gather(
            *(
                rig.fleet.signal("quarantine" if number % 2 else "release", {"node": "n2"})
                for number in range(999)
            )
        )
        await rig.fleet.signal("quarantine", {"node": "n2", "reason": "the last", "by": "ada"})
        await until_fleet(
            rig,
            lambda state: [node.by for node in state.nodes] == ["", "ada", ""],
            "that the last message was taken",
        )
        description = await rig.fleet.describe()
        first = description.raw_description.workflow_execution_info.first_run_id
        histories = await runs_of(rig.client, rig.fleet.id, first)
        events = [event for history in histories for event in history.events]
        signals = [
            event
            for event in events
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED
        ]
        assert len(signals) >= 1001
        assert len(histories) > 1, "it continued as new, and took every message over"
        assert max(len(history.events) for history in histories) < 10_000
