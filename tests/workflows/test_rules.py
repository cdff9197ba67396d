"""Jobs whose histories are from before a rule of the job's logic, replayed with all rules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from relaunch.job import ladder
from relaunch.job.state import Phase
from relaunch.workflows.training_job import workflow
from tests.fakes.nodes import Exit, Progress, Refuse, Script
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
GONE = Refuse(command="start", node="n2", generation=2, why="workdir_missing")


async def test_a_node_that_refuses_what_has_run_fails_no_job(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "UNPREPARED_DELAY", timedelta(0))
    broken = Exit(generation=1, rank=0, exit_code=1)
    async with make_rig(Script((broken, GONE), then="succeed"), is_patched=True) as rig:
        result = await (await rig.submit()).result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 3)
        refused = result.incidents[0].faults[-1]
        assert (refused.cause, refused.nodes) == ("NODE_FAULT", ("n2",))


@pytest.fixture
def no_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Jobs are as they were without any of the rules, until this is undone."""
    with monkeypatch.context() as patch:
        patch.setattr(workflow, "find_rules", lambda *_: ())
        yield patch


async def test_a_job_from_before_that_rule_is_replayed(
    make_rig: MakeRig, no_rules: pytest.MonkeyPatch
) -> None:
    """When the rig is left, with the rules in force again."""
    broken = Exit(generation=1, rank=0, exit_code=1)
    async with make_rig(Script((broken, GONE), then="succeed")) as rig:
        result = await (await rig.submit()).result()
        assert result.phase is Phase.FAILED
        no_rules.undo()


@pytest.mark.long
async def test_a_question_from_before_it_stayed_open_is_replayed(
    make_rig: MakeRig, no_rules: pytest.MonkeyPatch
) -> None:
    flat = Progress(generation=1, node="n1", steps=((0.0, 1), (0.1, 2)))
    async with make_rig(Script((flat, Progress(rate=20.0, hangs=True)))) as rig:
        hang = {"after": "3s", "first_step": "60s"}
        job = await rig.submit(policy({"ask_after": "500ms"}, hang=hang), gang="independent")
        await job.until_phase(Phase.RUNNING, 1)
        rig.backend.cut("n2", "controller-in", "controller-out")
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        state = await job.until(lambda s: s.deferred_fault is not None, "a hang")
        assert state.phase is Phase.NODE_LOST
        rig.backend.heal("n2")
        await job.until_phase(Phase.RUNNING, 2)
        await job.handle.signal("cancel")
        await job.result()
        no_rules.undo()
