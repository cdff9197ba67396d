"""Ranks are judged by the times that they were launched with.

The policy, or a later submission, may say other times by then.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import relaunch.activities.stop
import relaunch.job.fencing
from relaunch.job.state import JobState, Phase
from tests.fakes.nodes import Progress, Script
from tests.invariants import alive
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Job, Rig, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = {
    "heartbeat": "100ms",
    "lease": "1s",
    "lost_after": "60s",
    "fence_after": "2s",
    "stop_grace": "200ms",
}
RUNS = Script((Progress(rate=20.0, hangs=True),))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.job.fencing, "FENCE_MARGIN", timedelta(seconds=1))
    monkeypatch.setattr(relaunch.activities.stop, "RETRY_INTERVAL_S", 0.2)


async def renewed(rig: Rig, job: Job) -> JobState:
    return await job.until(
        lambda _: any(call.command == "renew" and call.node == "n2" for call in rig.backend.calls),
        "a renewal",
    )


async def change_policy(job: Job, **changes: object) -> None:
    change = {"policy": changes, "reason": "to see what it does", "by": "ada"}
    await job.handle.execute_update("change_policy", change)


async def test_a_changed_policy_keeps_the_fence_of_running_ranks(
    make_rig: MakeRig,
) -> None:
    async with make_rig(RUNS) as rig:
        job = await rig.submit(policy(LONG), ranks=1)
        state = await renewed(rig, job)
        assert [one.fence_after for one in state.launched] == [timedelta(seconds=2)]
        await change_policy(
            job, timeouts={"fence_after": "0.1s", "lease": "0.3s", "heartbeat": "0.1s"}
        )
        rig.backend.cut("n2")
        await job.handle.signal("cancel")
        result = await job.result()
        assert result.phase is Phase.CANCELLED
        assert alive(rig.backend.lives) == (), "the job ends when no rank is left anywhere"


@pytest.mark.long
async def test_strict_lease_is_not_for_ranks_launched_without_it(
    make_rig: MakeRig,
) -> None:
    async with make_rig(RUNS) as rig:
        job = await rig.submit(
            policy({**LONG, "fence_after": "200ms"}), ranks=1, gang="independent"
        )
        await renewed(rig, job)
        await change_policy(job, strict_lease=True)
        rig.backend.cut("n2")
        await job.handle.signal("cancel")
        await job.until(lambda state: state.phase is Phase.STOPPING, "stopping")
        await asyncio.sleep(3)  # a lease, a fence, a grace and the margin: 2.4 s
        assert (await job.state()).phase is Phase.STOPPING, (
            "its ranks go on, and no wait is long enough"
        )
        rig.backend.heal("n2")
        assert (await job.result()).phase is Phase.CANCELLED


@pytest.mark.long
async def test_a_later_submission_judges_old_ranks_by_their_own_times(
    make_rig: MakeRig,
) -> None:
    async with make_rig(RUNS, nodes=3, all_ended=False) as rig:
        first = await rig.submit(policy({**LONG, "fence_after": "4s"}), ranks=1, name="llama")
        submission = (await renewed(rig, first)).submission
        rig.backend.cut("n2")
        await first.handle.terminate("an operator")
        second = await rig.submit(
            policy({**LONG, "fence_after": "100ms", "lease": "1.5s"}), ranks=1, name="llama"
        )
        state = await second.until(lambda state: state.launched_at is not None, "a launch")
        assert "n2" not in {slot.node for slot in state.slots}
        assert [
            token for token, _, _ in alive(rig.backend.lives) if token.submission == submission
        ] == []
        assert [one.fence_after for one in state.launched] == [timedelta(seconds=0.1)], (
            "its own launch is judged by its own times"
        )
        await second.handle.signal("cancel")
        await second.result()


@pytest.mark.long
async def test_a_person_ends_the_wait_for_older_ranks_that_never_fence(
    make_rig: MakeRig,
) -> None:
    async with make_rig(RUNS, nodes=3, all_ended=False) as rig:
        first = await rig.submit(policy(LONG), ranks=1, name="llama", gang="independent")
        await renewed(rig, first)
        rig.backend.cut("n2")
        await first.handle.terminate("an operator")
        second = await rig.submit(policy(LONG), ranks=1, name="llama")
        await second.until(lambda state: "n2" in state.maybe_alive, "what the first one held")
        await asyncio.sleep(5)  # as long as all times of both together
        assert (await second.state()).launched_at is None
        rig.backend.lose_power("n2", down_for=3600)  # this is what the person saw
        await second.handle.signal("report", {"node": "n2", "reason": "no power", "by": "ada"})
        state = await second.until(lambda state: state.launched_at is not None, "a launch")
        assert "n2" not in {slot.node for slot in state.slots}
        await second.handle.signal("cancel")
        await second.result()
