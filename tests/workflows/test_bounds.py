"""How large payloads, states and histories may become.

2,048 nodes of 8 ranks, names as long as they may be, worst words.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pydantic_core import to_json
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowHistory

from relaunch.activities.gang import WatchedShard
from relaunch.activities.launch import LaunchRanksInput, PreparedNode
from relaunch.activities.reports import WatchRanksInput, WatchReport
from relaunch.evidence.observations import RankError, RankExited
from relaunch.generation import Token
from relaunch.job.apply import apply_decision
from relaunch.job.events import FaultObserved, NodesAcquired, NodeUnreachable, RanksHung, Submitted
from relaunch.job.hang import Pace
from relaunch.job.state import JobState, Phase, Slot
from relaunch.job.step import evaluate_event
from relaunch.messages.jobs import CarriedState, TrainingJobInput
from relaunch.workflows.training_job.commands import SHARD, start_orders
from relaunch.workflows.training_job.workflow import MAX_INCIDENTS
from tests.fakes.nodes import Exit, Progress, Script
from tests.recovery.builders import T0, new_job, play, record
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy
from tests.workflows.test_fleet_bounds import wire_size

NODES, RANKS = 2048, 8
RETRIES = 40
"""Each of them launches a generation."""
KIB, MIB = 1024, 1024 * 1024


def size(value: object) -> int:
    """Bytes of JSON: a payload above 256 KiB is smaller, because it is compressed."""
    return len(to_json(value))


def slots(nodes: int, letters: int = 20) -> tuple[Slot, ...]:
    return tuple(
        Slot(
            f"node-{i}".ljust(letters, "x"), f"10.100.{i >> 8}.{i & 255}".ljust(letters, "x"), 1, 1
        )
        for i in range(nodes)
    )


@pytest.mark.parametrize("letters", [20, 63])
async def test_orders_to_launch_2048_nodes_fit_into_one_workflow_task(
    letters: int,
) -> None:
    job = replace(
        new_job(nodes=NODES, nproc_per_node=RANKS), generation=7, slots=slots(NODES, letters)
    )
    prepared = [
        tuple(
            PreparedNode(s.node, s.address, 65000, 65001, 1e6 + i / 7, "f" * 32)
            for i, s in enumerate(part)
        )
        for part in (job.slots[first : first + SHARD] for first in range(0, NODES, SHARD))
    ]
    orders = start_orders(job, job.token, job.slots, prepared)
    assert len(orders) == NODES // SHARD
    assert all(isinstance(order, LaunchRanksInput) for order in orders)
    assert max(size(order) for order in orders) < 512 * KIB
    assert sum(size(order) for order in orders) < 4 * MIB * 0.9, "one gRPC message"
    if letters == 20:
        assert max(size(order) for order in orders) <= 256 * KIB


@pytest.mark.parametrize(
    "letter", ["\x1b", *(pytest.param(one, marks=pytest.mark.long) for one in ("x", "界", "😀"))]
)
async def test_a_watch_report_is_at_most_256_KiB_whatever_ranks_say(letter: str) -> None:
    order = WatchRanksInput(
        Token("default", "llama", 1, 1),
        "default",
        tuple(f"node-{i}" for i in range(SHARD)),
        RANKS,
        datetime.now(UTC),
        policy().timeouts,
        policy().hang,
    )
    gang = WatchedShard(order, Pace(T0, expected=False))
    error = RankError(letter * 2000, letter * 8000, 1.0)
    for rank in range(SHARD * RANKS):
        node = f"node-{rank // RANKS}"
        gang._nodes[node].seq = 2**40
        tail = tuple(letter * 500 for _ in range(40))
        gang.add_observation(
            node,
            RankExited(
                node,
                rank,
                rank % RANKS,
                1,
                None,
                T0 + timedelta(milliseconds=rank),
                error=error,
                log_tail=tail,
            ),
        )
    fault = gang._make_fault()
    report = gang._make_report(fault)
    assert size(report) <= 256 * KIB
    assert isinstance(report, WatchReport)
    assert len(fault.observations) + fault.more == SHARD * RANKS
    first = fault.observations[0]
    assert isinstance(first, RankExited)
    assert first.rank == 0
    assert first.error == error, "the root keeps its words"
    assert first.log_tail


@pytest.mark.long
def test_2048_nodes_state_is_below_512_KiB_after_500_incidents() -> None:
    job = _started()
    largest = 0
    for number in range(500):
        job = _one_incident(job, number)
        while len(job.incidents) > MAX_INCIDENTS:
            job = replace(
                job,
                incidents=job.incidents[MAX_INCIDENTS // 2 :],
                incidents_archived=job.incidents_archived + MAX_INCIDENTS // 2,
            )
        largest = max(largest, size(job))
    assert job.incidents_archived + len(job.incidents) >= 490
    assert largest <= 512 * KIB


@pytest.mark.long
def test_a_run_with_all_nodes_lost_hands_on_less_than_a_payload() -> None:
    job = _started()
    for slot in job.slots:
        job, _ = play(
            job,
            NodeUnreachable(
                job.generation, slot.node, timedelta(minutes=3), "the connection was closed"
            ),
        )
    assert len(job.lost) == NODES
    job, _ = play(job, RanksHung(job.generation, tuple(range(16)), "step 5 has not changed", T0))
    exited = {slot.node: tuple(range(8 * i, 8 * i + 8)) for i, slot in enumerate(job.slots)}
    carried = CarriedState((), {slot.node: 2**40 for slot in job.slots}, exited, (), T0)
    assert size(job) <= 1 * MIB
    assert (
        wire_size(TrainingJobInput(spec=job.spec, policy=job.policy, resume=job, carried=carried))
        < MIB
    )
    assert all(size(incident) < 64 * KIB for incident in (job.incident, *job.incidents))


def _started() -> JobState:
    job, _ = play(new_job(nodes=NODES, nproc_per_node=RANKS), Submitted("", "ada"))
    job = record(job, NodesAcquired(slots(NODES)))
    return replace(job, maybe_alive=tuple(slot.node for slot in job.slots), phase=Phase.RUNNING)


def _one_incident(job: JobState, number: int) -> JobState:
    now = T0 + timedelta(hours=number)
    job = replace(job, restarts_spent=0)
    error = RankError("E" * 2000, "T" * 8000, 1.0)
    for turn in range(6):
        fault = FaultObserved(
            job.generation,
            (RankExited(job.slots[9].node, 77, 5, 1, None, now, error=error),),
            16000,
            now,
        )
        job, decision = evaluate_event(job, fault, now)
        job = apply_decision(replace(job, phase=Phase.RUNNING), decision, now)
        job = replace(
            job,
            phase=Phase.RUNNING,
            ending=None,
            flat_generations=0,
            generation=job.generation + 1,
            renewed_at=now + timedelta(seconds=turn),
        )
    incident = job.incident
    assert incident is not None
    return replace(
        job,
        incident=None,
        incidents=(
            *job.incidents,
            replace(incident, closed=now, recovered=now, outcome="training passed step 9"),
        ),
    )


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "allowed"), [(2, 30), (200, 30)])
async def test_a_recovery_of_one_shard_costs_at_most_30_events(
    make_rig: MakeRig, nodes: int, allowed: int
) -> None:
    script = Script(
        (
            Exit(generation=1, rank=1, exit_code=1, after=2.0),
            Progress(generation=1, rank=0, steps=((0.0, 1), (0.5, 5))),
            Progress(generation=2, rank=0, steps=((0.0, 1), (3.0, 6)), hangs=True),
        )
    )
    async with make_rig(script, nodes=nodes, cached=10) as rig:
        job = await rig.submit(
            policy(
                {"stop_grace": "10s", "heartbeat": "2s", "lost_after": "20s", "fence_after": "2s"}
            ),
            nodes=nodes,
            ranks=1,
        )
        await job.until(lambda s: s.generation == 2 and len(s.incidents) == 1, "a closed incident")
        history = await job.history()
        spent = recovery_events(history)
        assert len(spent) <= allowed, "\n".join(spent)
        largest = max(len(event.SerializeToString()) for event in history.events)
        assert largest < 2 * MIB
        await job.handle.signal("cancel")
        await job.result()


def recovery_events(history: WorkflowHistory) -> list[str]:
    """Names of the events from the fault's report to the end of the task that closed the incident.

    The report is the start of its watch.
    """
    events = list(history.events)
    watches = {
        e.event_id
        for e in events
        if e.activity_task_scheduled_event_attributes.activity_type.name == "watch_ranks"
    }
    completed = [
        e
        for e in events
        if e.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED
        and e.activity_task_completed_event_attributes.scheduled_event_id in watches
    ]
    first = completed[0].activity_task_completed_event_attributes.started_event_id
    last = completed[-1].event_id
    done = next(
        e.event_id
        for e in events
        if e.event_id > last and e.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    )
    commands = [
        e.event_id
        for e in events
        if e.workflow_properties_modified_event_attributes.workflow_task_completed_event_id == done
    ]
    commands += [
        e.event_id
        for e in events
        if e.activity_task_scheduled_event_attributes.workflow_task_completed_event_id == done
    ]
    end = max([done, *commands])
    return [
        EventType.Name(e.event_type).removeprefix("EVENT_TYPE_")
        for e in events
        if first <= e.event_id <= end
    ]


@pytest.mark.long
async def test_a_storm_of_1000_messages_is_read_by_a_job(make_rig: MakeRig) -> None:
    """Reports that cannot be read or change nothing, hints, and people who retry, all at once."""
    storm: list[tuple[str, object]] = []
    for number in range(240):
        storm += [
            ("report", {"node": f"stranger-{number}", "declared": "dead", "reason": "r" * 1000}),
            ("report", {"node": "n1", "declared": f"{number} " * 400}),
            ("drain_node", {"why": "é" * 900}),
            ("hint", {"what": f"task-{number}", "version": 1, "submission": 1, "generation": 1}),
        ]
    storm += [("force_retry", {"reason": f"retry {number} " * 50}) for number in range(RETRIES)]
    async with make_rig() as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING)
        await asyncio.gather(*(job.handle.signal(name, message) for name, message in storm))
        state = await job.until_phase(Phase.RUNNING, 1 + RETRIES)
        assert size(state) < MIB / 8
        await job.handle.signal("cancel")
        assert (await job.result()).phase is Phase.CANCELLED
        histories = await job.runs()
    events = [event for history in histories for event in history.events]
    kind = EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED
    assert sum(event.event_type == kind for event in events) >= len(storm)
    assert max(len(history.events) for history in histories) < 10_000
    assert max(len(event.SerializeToString()) for event in events) < MIB


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_2048_nodes_of_8_ranks_fail_at_once_and_recover(make_rig: MakeRig) -> None:
    script = Script(
        (
            Exit(
                generation=1,
                exit_code=1,
                after=5.0,
                log_tail=("RuntimeError: NCCL error: remote process exited",),
            ),
        ),
        then="succeed",
    )
    async with make_rig(script, nodes=NODES, cached=10) as rig:
        slow = policy(
            {
                "heartbeat": "10s",
                "lease": "3600s",
                "lost_after": "3600s",
                "fence_after": "1800s",
                "stop_grace": "15s",
            }
        )
        job = await rig.submit(slow, nodes=NODES, ranks=RANKS)
        result = await job.handle.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)
        (incident,) = result.incidents
        assert incident.ranks
        histories = await job.runs()
        assert (
            max(len(event.SerializeToString()) for history in histories for event in history.events)
            < 2 * MIB
        )
