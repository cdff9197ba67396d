"""A foreign process that takes the memory of a job's GPU, over simulated nodes."""

from __future__ import annotations

import uuid
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

import pytest

from relaunch.evidence.causes import Cause
from relaunch.job import ladder
from relaunch.job.state import Phase
from tests.fakes.nodes import Exit, Script, Stranger, error_file
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Rig, forget_setting, policy, replay
from tests.workflows.test_links import activities

pytestmark = pytest.mark.asyncio(loop_scope="session")
FULL = error_file("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
ALICE = "alice (python, pid 4242) holds 1.1 GB of GPU 1"
LAST = {"OUT_OF_MEMORY": [{"strategy": "FAIL"}]}
"""A ladder without a restart: every one is for the foreign process."""


def make(make_rig: MakeRig, **options: Any) -> AbstractAsyncContextManager[Rig]:
    """A foreign process comes while the first generation runs, whose memory then runs out."""
    happenings = (
        Stranger(generation=1, node="n1", gpu=1, when="running"),
        Exit(generation=1, node="n1", error=FULL, after=0.1),
    )
    name = f"f-{uuid.uuid4().hex[:8]}"
    return make_rig(Script(happenings, then="succeed"), name=name, nodes=1, gpus=2, **options)


async def test_a_job_leaves_a_gpu_that_a_foreign_process_took(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another node is not waited for, so no older reading of this one matters.
    monkeypatch.setattr(ladder, "FOREIGN_DELAY", timedelta(0))
    async with make(make_rig, spares=1) as rig:
        result = await (await rig.submit(policy(causes=LAST), nodes=1)).result()
    assert result.phase is Phase.SUCCEEDED
    assert rig.launches() == {1: ["n1"], 2: ["n2"]}
    assert (result.state.restarts_spent, result.state.avoided) == (0, ())
    (incident,) = result.incidents
    assert incident.cause is Cause.OUT_OF_MEMORY
    assert incident.reason.startswith(f"on n1 {ALICE}, not started by relaunch; rank")
    assert [one.decision for one in incident.decisions] == ["Examine", "Relaunch"]
    commands = {call.command for call in rig.backend.calls} | {
        one.command for one in rig.backend.upkeep
    }
    assert not commands & {"reset-gpus", "reboot", "diagnose"}, "nothing is done to the node"


@pytest.mark.long  # ten seconds until the fleet's reading of before the process is void
async def test_a_job_waits_for_the_only_gpu_and_names_who_has_it(make_rig: MakeRig) -> None:
    async with make(make_rig) as rig:
        job = await rig.submit(policy(causes=LAST), nodes=1)
        used = "n1: GPU 1 is used by alice (python, pid 4242)"
        waits = await job.until(
            lambda state: state.phase is Phase.WAITING_FOR_NODES and used in state.reason,
            "named who is there",
        )
        assert waits.incident is not None and ALICE in waits.incident.reason
        assert (waits.generation, rig.launches()) == (2, {1: ["n1"]})
        rig.backend.leave("n1")
        result = await job.result()
    assert (result.phase, rig.launches()) == (Phase.SUCCEEDED, {1: ["n1"], 2: ["n1"]})


async def test_a_history_of_before_the_question_is_replayed(make_rig: MakeRig) -> None:
    async with make(make_rig) as rig:
        job = await rig.submit(policy(check_foreign_processes=False), nodes=1)
        assert (await job.result()).phase is Phase.SUCCEEDED
        history = await job.history()
    assert "find_foreign_processes" not in activities(history)
    forget_setting(history, "check_foreign_processes")
    await replay(history)
