"""Stops that no time will prove: nothing is launched before, and a notice is sent."""

from __future__ import annotations

import uuid

import pytest

import relaunch.activities.stop
from relaunch.job.state import JobState, Phase, UnstoppedNode
from relaunch.workflows.search_attributes import current_details
from tests.fakes.nodes import Exit, Progress, Refuse, Script
from tests.receivers import webhook
from tests.recovery.builders import T0
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy
from tests.workflows.test_jobs_and_fleet import XID_79
from tests.workflows.test_notices import until_events

pytestmark = pytest.mark.asyncio(loop_scope="session")
RUNS = Progress(rate=20.0, hangs=True)
FALLS_OFF = Exit(
    generation=1, node="n1", rank=0, exit_code=None, signal=6, after=0.2, kernel=XID_79
)
STUCK = Refuse(command="stop", node="n1", generation=1, why="stuck", reason="rank 0 is in D state")
SOON = {"ask_after": "300ms", "stop_grace": "100ms"}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(relaunch.activities.stop, "RETRY_INTERVAL_S", 0.1)


def is_unproven(state: JobState) -> bool:
    return bool(state.unstopped)


def is_reminded(state: JobState) -> bool:
    return state.stop_reminders >= 1


async def test_a_launch_waits_for_proof_and_says_so(make_rig: MakeRig) -> None:
    """A GPU fell off the bus: the driver never lets its process go, and another node is free."""
    with webhook() as received:
        async with make_rig(
            Script((FALLS_OFF, RUNS, STUCK)),
            nodes=1,
            spares=1,
            all_ended=False,
            name=f"f-{uuid.uuid4().hex[:8]}",
            notify=[{"webhook": received.url}],
        ) as rig:
            job = await rig.submit(policy(SOON), nodes=1)
            state = await job.until(is_unproven)
            assert state.unstopped == (UnstoppedNode("n1", "rank 0 is in D state"),)
            assert (state.phase, state.generation) == (Phase.LAUNCHING, 2)
            (notice,) = await until_events(received, ("question", "open"))
            assert notice["nodes"] == ["n1"]
            assert "n1: rank 0 is in D state" in notice["reason"]
            assert list(rig.launches()) == [1], "nothing is launched without the proof"
            await job.handle.signal("report", {"node": "n1", "reason": "cut off", "by": "ada"})
            state = await job.until_phase(Phase.RUNNING)
            assert [slot.node for slot in state.slots] == ["n2"]
            assert state.unstopped == ()
            await until_events(received, ("question", "open"), ("question", "resolved"))
            await job.handle.signal("cancel")
            await job.result()


async def test_the_end_of_a_job_waits_for_proof_and_says_so(make_rig: MakeRig) -> None:
    with webhook() as received:
        async with make_rig(
            Script((RUNS,)),
            nodes=1,
            name=f"f-{uuid.uuid4().hex[:8]}",
            notify=[{"webhook": received.url, "from_reminder": 1}],
        ) as rig:
            job = await rig.submit(policy({**SOON, "answer_within": "500ms"}), nodes=1)
            await job.until_phase(Phase.RUNNING, 1)
            rig.backend.cut("n1")
            await job.handle.signal("cancel")
            state = await job.until(is_reminded)
            assert (state.phase, state.maybe_alive) == (Phase.STOPPING, ("n1",))
            rig.backend.heal("n1")
            result = await job.result()
            assert (result.phase, result.state.unstopped) == (Phase.CANCELLED, ())
            assert {one["reminders"] for one in received.notices} >= {1}


async def test_an_approved_launch_waits_for_the_proof_too(make_rig: MakeRig) -> None:
    async with make_rig(Script((RUNS,)), nodes=1) as rig:
        job = await rig.submit(policy(SOON), nodes=1)
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n1")
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        await job.handle.execute_update("answer", {"decision": "approve", "by": "ada"})
        state = await job.until(is_unproven)
        assert list(rig.launches()) == [1]
        rig.backend.heal("n1")
        state = await job.until_phase(Phase.RUNNING, 2)
        assert state.unstopped == ()
        await job.handle.signal("cancel")
        await job.result()


async def test_a_job_that_waits_for_nodes_says_what_hangs(make_rig: MakeRig) -> None:
    """The fleet has no other node: the ranks are stopped while the job waits for one."""
    async with make_rig(Script((FALLS_OFF, RUNS, STUCK)), nodes=1, all_ended=False) as rig:
        job = await rig.submit(policy(SOON), nodes=1)
        state = await job.until(is_unproven)
        assert state.phase is Phase.WAITING_FOR_NODES
        details = current_details(state, T0)
        assert "rank 0 is in D state" in details and "declare-dead" in details
        await job.handle.signal("report", {"node": "n1", "by": "ada"})
        await job.until(lambda s: not s.unstopped)
        await job.handle.signal("cancel")
        await job.result()
