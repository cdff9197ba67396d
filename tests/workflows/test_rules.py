"""Jobs whose histories are from before a rule of the job's logic, replayed with all rules."""

from __future__ import annotations

from datetime import timedelta

import pytest

from relaunch.job import ladder
from relaunch.job.state import Phase
from relaunch.workflows.training_job import workflow
from tests.fakes.nodes import Exit, Refuse, Script
from tests.workflows.conftest import MakeRig

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


async def test_a_job_from_before_that_rule_is_replayed(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the rig is left, with the rule in force again."""
    broken = Exit(generation=1, rank=0, exit_code=1)
    with monkeypatch.context() as patch:
        patch.setattr(workflow, "ALL_RULES", ())
        patch.setattr(workflow, "list_affected", lambda *_: ())
        async with make_rig(Script((broken, GONE), then="succeed")) as rig:
            result = await (await rig.submit()).result()
            assert result.phase is Phase.FAILED
            patch.undo()
