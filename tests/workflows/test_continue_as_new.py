"""Long lives: continue-as-new loses nothing and touches no rank.

A reset goes on above; old incidents go to the archive.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import WorkflowEnvironment
from temporalio.workflow import Info

import relaunch.pool.scheduler
import relaunch.workflows.fleet.workflow
from relaunch.activities.fleet import FleetActivities
from relaunch.activities.records import read_archive
from relaunch.job.events import MessageRejected, StopUnproven, SubmitterChecked
from relaunch.job.state import Phase, UnstoppedNode
from relaunch.messages.jobs import TrainingJobInput
from relaunch.workflows.fleet.workflow import Fleet
from relaunch.workflows.search_attributes import memo
from relaunch.workflows.training_job import stops
from relaunch.workflows.training_job.workflow import TrainingJob
from tests.fakes.nodes import Exit, Progress, Script
from tests.payloads import decrypt
from tests.workflows.claimants import claimants
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import PATIENCE, Job, is_claim, policy, rig
from tests.workflows.test_histories import SCENARIOS
from tests.workflows.test_unproven_stops import FALLS_OFF, SOON, STUCK, is_unproven

pytestmark = pytest.mark.asyncio(loop_scope="session")
ALWAYS = {"APPLICATION": [{"strategy": "RESTART_IN_PLACE"}]}


@pytest.mark.long
async def test_s5_1_recoveries_over_many_runs_are_counted_exactly(
    make_short_rig: MakeRig,
) -> None:
    faults = 5
    script = Script(
        tuple(Exit(generation=g, rank=g % 4, exit_code=1) for g in range(1, faults + 1)),
        then="succeed",
    )
    async with make_short_rig(script) as rig:
        job = await rig.submit(policy(max_restarts=100, startup_stop="off", causes=ALWAYS))
        result = await job.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, faults + 1)
        assert result.state.restarts_spent == faults
        assert len(await job.runs()) >= 3
        starts = [o for o in rig.backend.orders if o.command == "start" and o.outcome == "done"]
        assert sorted((o.node, o.token.generation) for o in starts) == sorted(
            (n, g) for g in range(1, faults + 2) for n in ("n1", "n2")
        )
        assert {generation for _, generation in rig.orders("stop")} == {faults + 1}, (
            "only the end stops by order"
        )


async def test_a_signal_sent_while_the_job_continues_as_new_is_kept(
    make_short_rig: MakeRig,
) -> None:
    async with make_short_rig(Script((Progress(hangs=True),))) as rig:
        job = await rig.submit(start={"hides_causes": True})
        await job.until_phase(Phase.RUNNING, 1)
        sent = 30
        for number in range(sent):
            await job.handle.signal(
                "force_retry" if number == sent - 1 else "report", {"reason": f"number {number}"}
            )
        state = await job.until_phase(Phase.RUNNING, 2)
        assert (await job.state()).reason.startswith("generation 2 runs")
        assert len(state.notices) == 5
        runs = await job.runs()
        assert len(runs) >= 2
        begun = runs[-1].events[0].workflow_execution_started_event_attributes.input.payloads
        (start,) = await rig.client.data_converter.decode(begun, [TrainingJobInput])
        assert start.hides_causes
        assert rig.orders("stop") == []
        starts = [o for o in rig.backend.orders if o.command == "start"]
        assert sorted((o.node, o.token.generation) for o in starts) == [
            ("n1", 1),
            ("n1", 2),
            ("n2", 1),
            ("n2", 2),
        ]
        await job.handle.signal("cancel")
        await job.result()


async def test_what_0_1_0_cannot_read_is_not_carried_on(
    make_short_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of a fleet with `access` comes while the job is about to continue as new."""
    continue_as_new = TrainingJob._continue_as_new

    async def get_answer_meanwhile(self: TrainingJob) -> None:
        self._session.post(MessageRejected("report", "it is not known"))
        self._session.post(SubmitterChecked("ada (claimed)"))
        generation = self._session.job.generation
        self._session.post(StopUnproven(generation, (UnstoppedNode("n1", "it hangs"),)))
        await continue_as_new(self)

    monkeypatch.setattr(TrainingJob, "_continue_as_new", get_answer_meanwhile)
    async with make_short_rig(Script((Progress(hangs=True),)), is_patched=True) as rig:
        job = await rig.submit()
        await job.until(lambda s: s.submitted_by == "ada (claimed)" and bool(s.notices))
        runs = await job.runs()
        begun = runs[1].events[0].workflow_execution_started_event_attributes.input.payloads
        start = json.loads(decrypt(begun[0]).data)
        assert [one["kind"] for one in start["carried"]["inbox"]] == ["MessageRejected"]
        assert start["resume"]["submitted_by"] == "ada (claimed)"
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.long
async def test_a_claim_asked_for_during_continue_as_new_is_answered(
    make_short_rig: MakeRig,
) -> None:
    async with make_short_rig(Script((Progress(hangs=True),))) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        for number in range(12):
            # The report makes the history long enough; the question comes while the watches are let
            # go of.
            await job.handle.signal("report", {"reason": f"number {number}"})
            await asyncio.sleep(0.01 * number)
            await job.handle.signal("claim_again")
            await asyncio.sleep(0.2)
        await job.handle.signal("cancel")
        await job.result()
        runs = await job.runs()
        assert len(runs) >= 2
        for run in runs[:-1]:
            asked = {event.event_id for event in run.events if is_claim(event)}
            told = {
                event.activity_task_completed_event_attributes.scheduled_event_id
                for event in run.events
            }
            assert asked <= told, "no claim is left half-way by a run that is continued"


@pytest.mark.long
async def test_a_temporal_cancel_during_continue_as_new_stops_ranks(
    make_short_rig: MakeRig,
) -> None:
    async with make_short_rig(Script((Progress(hangs=True),))) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        for number in range(20):
            await job.handle.signal("report", {"reason": f"number {number}"})
        await job.handle.cancel()
        assert (await job.result()).phase is Phase.CANCELLED


async def test_an_exit_with_0_before_continue_as_new_still_counts(
    make_short_rig: MakeRig,
) -> None:
    script = Script(
        (
            Exit(generation=1, rank=2, exit_code=1, after=0.3),
            Progress(generation=1, rank=3, steps=((0.0, 1),)),
            Exit(generation=2, rank=0, exit_code=0),
            Progress(generation=2, rank=3, steps=((0.5, 2),)),
            *(Exit(generation=2, rank=rank, exit_code=0, after=3.0) for rank in (1, 2, 3)),
        )
    )
    async with make_short_rig(script) as rig:
        job = await rig.submit()
        result = await job.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)
        assert len(await job.runs()) >= 2


async def test_a_question_to_a_person_outlives_continue_as_new(
    make_short_rig: MakeRig,
) -> None:
    async with make_short_rig(
        Script((Exit(generation=1, rank=0, exit_code=1),), then="succeed")
    ) as rig:
        job = await rig.submit(policy(causes={"APPLICATION": [{"strategy": "ASK"}]}))
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        deadline = (await job.state()).next.at
        for number in range(12):
            await job.handle.signal("report", {"reason": f"number {number}"})
        await _second_run(job)
        state = await job.state()
        assert (state.phase, state.generation, state.next.at) == (
            Phase.WAITING_FOR_PERSON,
            1,
            deadline,
        )
        # Its old exits are no news: a watch of the stopped generation would report them again.
        assert sum(c.command == "watch" for c in rig.backend.calls) == 2
        await job.handle.signal("force_retry")
        result = await job.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)


@pytest.mark.long
async def test_a_lost_node_stays_lost_over_continue_as_new_and_returns(
    make_short_rig: MakeRig,
) -> None:
    async with make_short_rig(Script((Progress(rate=20.0, hangs=True),))) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n2", "controller-in", "controller-out")
        await job.until_phase(Phase.NODE_LOST)
        for number in range(12):
            await job.handle.signal("report", {"reason": f"number {number}"})
        await _second_run(job)
        assert (await job.state()).lost_names == ("n2",)
        rig.backend.heal("n2")
        await job.until(lambda s: s.phase is Phase.RUNNING and not s.lost)
        assert rig.orders("stop") == []
        await job.handle.signal("cancel")
        await job.result()


async def test_a_queued_job_continues_as_new_and_keeps_its_turn(
    make_short_rig: MakeRig,
) -> None:
    async with make_short_rig(Script((Progress(hangs=True),)), gpus=8) as rig:
        first = await rig.submit(gpus_per_node=8)
        await first.until_phase(Phase.RUNNING, 1)
        second = await rig.submit(gpus_per_node=8)
        await second.until(lambda s: s.phase is Phase.QUEUED and bool(s.reason), "queued")
        third = await rig.submit(gpus_per_node=8)
        await third.until(lambda s: s.phase is Phase.QUEUED and bool(s.reason), "queued")
        await _send_reports(second, until_runs=4)
        state = await second.state()
        assert state.phase is Phase.QUEUED
        # What is said of it where no worker answers, and by which it is found as one of its fleet.
        assert await (await second.handle.describe()).memo() == memo(state)
        await first.handle.signal("cancel")
        await first.result()
        await second.until_phase(Phase.RUNNING, 1)
        assert (await third.state()).phase is Phase.QUEUED
        for job in (third, second):
            await job.handle.signal("cancel")
            assert (await job.result()).phase is Phase.CANCELLED


async def test_a_job_queued_for_30_days_starts_when_it_is_its_turn(
    skipping: WorkflowEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each day the fleet has news for the job: a node is out, or in again.

    The server that skips time lists no workflows, skips none while an activity runs, and may wedge
    where a timer or an activity is cancelled as it ends. So the fleet finds no jobs, looks at
    nothing by itself and does not continue as new, and workflows are kept.
    """
    most = 50  # the real server has thousands

    async def list_none(*_: object) -> AsyncIterator[str]:
        for nothing in ():
            yield nothing

    async def find_none(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(FleetActivities, "_list_running_jobs", list_none)
    monkeypatch.setattr(FleetActivities, "_runs_before", find_none)
    monkeypatch.setattr(Fleet, "_may_watch", lambda _: False)
    monkeypatch.setattr(relaunch.workflows.fleet.workflow, "HURRY_FOR", timedelta(0))
    for module in (relaunch.pool.scheduler, relaunch.workflows.fleet.workflow):
        monkeypatch.setattr(module, "SWEEP_INTERVAL", timedelta(days=365))
    monkeypatch.setattr(
        Info,
        "is_continue_as_new_suggested",
        lambda self: (
            self.workflow_type == TrainingJob.__name__ and self.get_current_history_length() >= most
        ),
    )
    script, name = Script((Progress(hangs=True),)), f"f-{uuid.uuid4().hex[:8]}"
    options: dict[str, Any] = {"gpus": 8, "name": name, "is_patched": True, "cached": 100}
    options["all_ended"] = False
    async with rig(skipping.client, tmp_path, script, **options) as made, claimants(made) as begin:
        first, third = await begin(), await begin()
        await first.claim(2)
        assert len(await first.nodes()) == 2
        job = await made.submit(gpus_per_node=8)
        await job.until(lambda s: s.phase is Phase.QUEUED and bool(s.reason), "queued")
        await third.claim(2)
        for day in range(30):
            change = "release" if day % 2 else "quarantine"
            message = {"node": "n1", "reason": f"its fan, day {day}", "by": "grace"}
            await made.tell_fleet(change, message)
            await skipping.sleep(timedelta(days=1))
        state = await job.state()
        assert state.phase is Phase.QUEUED
        assert await skipping.get_current_time() - state.submitted_at >= timedelta(days=30)
        runs = await job.runs()
        assert len(runs) >= 3 and max(len(run.events) for run in runs) < 1.5 * most
        second, *_, last = [run.events[0].ByteSize() for run in runs[1:]]
        assert last < 1.1 * second < 100_000, "what it takes along does not grow with the days"
        assert await third.grants() == []
        await first.give_back()
        assert (await job.until_phase(Phase.RUNNING, 1)).submission == state.submission
        # It is not cancelled: that would cancel its watch as it ends.
        assert await third.grants() == []


@pytest.mark.long
async def test_a_stop_that_waits_for_proof_continues_as_new(
    make_short_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "STOP_PAUSABLE_AFTER", timedelta(seconds=1))
    async with make_short_rig(Script((Progress(hangs=True),)), nodes=1, all_ended=False) as rig:
        job = await rig.submit(nodes=1)
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n1")
        await job.handle.signal("cancel", {"reason": "enough"})
        await job.until_phase(Phase.STOPPING)
        await _send_reports(job, until_runs=4)
        state = await job.state()
        assert (state.phase, state.ending is not None) == (Phase.STOPPING, True)
        await job.handle.signal("report", {"node": "n1", "by": "ada"})
        result = await job.result()
        assert (result.phase, "enough" in result.reason) == (Phase.CANCELLED, True)


async def test_a_stop_of_a_job_without_nodes_continues_as_new(
    make_short_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run asks the node again, and does not only wait for others."""
    monkeypatch.setattr(stops, "STOP_PAUSABLE_AFTER", timedelta(0))
    script = Script((FALLS_OFF, Progress(rate=20.0, hangs=True), STUCK))
    async with make_short_rig(script, nodes=1, all_ended=False) as rig:
        job = await rig.submit(policy(SOON), nodes=1)
        await job.until(is_unproven)
        await _send_reports(job, until_runs=3)
        asked = len(rig.orders("stop"))
        await job.until(lambda _: len(rig.orders("stop")) > asked, "asked again")
        state = await job.state()
        assert (state.phase, state.maybe_alive) == (Phase.WAITING_FOR_NODES, ("n1",))
        await job.handle.signal("report", {"node": "n1", "by": "ada"})
        await job.until(lambda state: not state.unstopped)
        await job.handle.signal("cancel")
        await job.result()


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        pytest.param("ladder_used_up", (Phase.FAILED, 4, 3), marks=pytest.mark.long),
        pytest.param("replace_node", (Phase.SUCCEEDED, 4, 0), marks=pytest.mark.long),
        pytest.param("examined_and_rebooted", (Phase.SUCCEEDED, 2, 1), marks=pytest.mark.long),
        ("node_lost_and_back", (Phase.SUCCEEDED, 1, 0)),
    ],
)
async def test_a_job_told_things_all_the_time_ends_as_any_other(
    make_short_rig: MakeRig, name: str, ends: tuple[Phase, int, int]
) -> None:
    """It continues as new at almost every wait, and nothing is done twice or left out."""
    script, rules = SCENARIOS[name]
    fleet = f"f-{uuid.uuid4().hex[:8]}"
    async with make_short_rig(script, spares=1, gpus=1, name=fleet) as rig:
        job = await rig.submit(rules)
        telling = asyncio.create_task(_tell(job))
        result = await job.result()
        await telling
        got = (result.phase, result.generation, result.state.restarts_spent)
        assert got == ends, result.reason
        assert len(await job.runs()) > 3
        rebooted = [one.node for one in rig.backend.upkeep if one.kind == "rebooted"]
        assert rebooted == (["n2"] if name == "examined_and_rebooted" else [])
        starts = [
            (one.node, one.token.generation)
            for one in rig.backend.orders
            if one.command == "start" and one.outcome == "done"
        ]
        assert len(set(starts)) == len(starts) == 2 * result.generation


async def _tell(job: Job) -> None:
    """Send the job messages until it has ended."""
    number = 0
    while True:
        try:
            await job.handle.signal("report", {"reason": f"number {number}"})
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return
            raise
        number += 1
        await asyncio.sleep(0.3)


async def _send_reports(job: Job, *, until_runs: int) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while len(await job.runs()) < until_runs:
        assert asyncio.get_running_loop().time() < deadline, "it does not continue as new"
        await job.handle.signal("report", {"reason": "something"})
        await asyncio.sleep(0.05)
    await job.state()


@pytest.mark.long
async def test_closed_incidents_beyond_ten_are_all_in_the_archive(
    make_rig: MakeRig,
) -> None:
    faults = 13
    happenings = [Exit(generation=g, rank=0, exit_code=1, after=0.2) for g in range(1, faults + 1)]
    steps = [Progress(generation=g, steps=((0.0, 10 * g),)) for g in range(1, faults + 2)]
    async with make_rig(Script((*happenings, *steps), then="succeed")) as rig:
        job = await rig.submit()
        result = await job.result()
        assert (result.phase, result.generation, result.state.restarts_spent) == (
            Phase.SUCCEEDED,
            faults + 1,
            1,
        )
        archived = read_archive(rig.archive, "default", result.name)
        assert len(archived) == result.incidents_archived > 0
        assert [i.generation for i in (*archived, *result.incidents)] == list(range(1, faults + 1))
        assert len(result.incidents) <= 10
        for one in archived:  # with its price, of what the job's accounts have
            assert sum(one.costs.values(), timedelta(0)) > timedelta(0)
        for account, span in result.state.ledger.totals.items():
            incidents = (*archived, *result.incidents)
            cost = sum((one.costs.get(account, timedelta(0)) for one in incidents), timedelta(0))
            assert cost <= span


@pytest.mark.long
async def test_after_a_reset_a_job_goes_on_above_its_nodes_generation(
    server: Client, make_rig: MakeRig
) -> None:
    script = Script(
        (
            Exit(generation=1, rank=0, exit_code=1),
            Exit(generation=2, rank=0, exit_code=1),
            Progress(hangs=True),
        )
    )
    async with make_rig(script, two_controllers=True) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 3)
        history = await job.history()
        first = next(
            event.event_id
            for event in history.events
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
        )
        reset = await server.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace="default",
                workflow_execution=WorkflowExecution(
                    workflow_id=job.handle.id, run_id=job.handle.first_execution_run_id or ""
                ),
                reason="a test",
                workflow_task_finish_event_id=first,
                request_id="reset-1",
            )
        )
        again = Job(
            server.get_workflow_handle_for(TrainingJob.run, job.handle.id, run_id=reset.run_id),
            server,
        )
        rig.jobs[:] = []
        state = await again.until(
            lambda s: s.phase is Phase.RUNNING and s.generation >= 4, "running above generation 3"
        )
        assert state.generation == 4
        assert state.restarts_spent == 0
        await again.handle.signal("cancel")
        result = await again.result()
        assert result.phase is Phase.CANCELLED


async def test_failed_jobs_are_found_by_their_phase(server: Client, make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=1),))) as rig:
        job = await rig.submit(policy(max_restarts=0))
        await job.result()
        deadline = asyncio.get_running_loop().time() + 10
        while job.handle.id not in [
            w.id async for w in server.list_workflows('Phase = "FAILED" AND Generation = 1')
        ]:
            assert asyncio.get_running_loop().time() < deadline, (
                "visibility is behind, but not by that much"
            )
            await asyncio.sleep(0.1)


async def _second_run(job: Job) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while len(await job.runs()) < 2:
        assert asyncio.get_running_loop().time() < deadline, "it never continued as new"
        await asyncio.sleep(0.1)
