"""Histories of jobs as they once went, replayed by the workflow as it is now.

A changed order of commands breaks jobs that run: when one of these fails, guard the change by
`workflow.patched`. They are never captured again. A new scenario is added by
`python -m tests.workflows.test_histories NAME`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from datetime import UTC, timedelta
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory

from relaunch.job.accounts import Account
from relaunch.job.diagnose import Fault
from relaunch.job.replay import restore
from relaunch.spec.policy import Policy
from relaunch.temporal import data_converter
from relaunch.workflows.training_job.recording import recording
from tests.fakes.nodes import Cut, Exit, Progress, Script, ShimDies, Sick, error_file
from tests.invariants import find_unbalanced
from tests.recovery.diagnoses import count_diagnoses
from tests.workflows.rig import policy, replay, rig

HISTORIES = Path(__file__).parents[1] / "histories"
SCENARIOS: dict[str, tuple[Script, Policy]] = {
    "success": (Script(then="succeed"), policy()),
    "restart_in_place": (
        Script(
            (
                Exit(
                    generation=1,
                    rank=3,
                    exit_code=1,
                    error=error_file("ValueError: boom", "Traceback"),
                ),
            ),
            then="succeed",
        ),
        policy(),
    ),
    "ladder_used_up": (Script((Exit(rank=0, exit_code=3),)), policy()),
    "replace_node": (
        Script(tuple(ShimDies(generation=g, node="n2") for g in (1, 2, 3)), then="succeed"),
        policy(),
    ),
    "incident_closed_by_progress": (
        Script(
            (
                Exit(generation=1, rank=0, exit_code=1, after=0.8),
                Progress(generation=1, steps=((0.0, 10),)),
                Exit(generation=2, exit_code=0, after=1.5),
                Progress(generation=2, steps=((0.0, 9), (0.5, 11))),
            )
        ),
        policy(),
    ),
    "examined_and_rebooted": (
        Script(
            (
                Exit(generation=1, node="n2", rank=2, exit_code=1, after=0.2),
                Sick(node="n2", remap_pending=0, until="reboot", when="running"),
            ),
            then="succeed",
        ),
        policy(extends="ecs-reboot-once"),
    ),
    "node_lost_and_back": (
        Script(
            (
                Cut(
                    generation=1,
                    node="n2",
                    after=0.5,
                    lasts=2.0,
                    words=("controller-in", "controller-out"),
                ),
                Exit(exit_code=0, after=5.0),
            )
        ),
        policy(),
    ),
}
REPAIR = "repair_of_n2"
"""The repair within `examined_and_rebooted`, a separate workflow."""


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.json")), ids=lambda path: path.stem)
async def test_a_captured_history_replays(path: Path) -> None:
    await replay(WorkflowHistory.from_json(f"job/{path.stem}", path.read_text()))


async def test_a_captured_job_diagnoses_each_fault_once(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed, faults = count_diagnoses(monkeypatch), 0
    for path in sorted(set(HISTORIES.glob("*.json")) - {HISTORIES / f"{REPAIR}.json"}):
        history = WorkflowHistory.from_json(f"job/{path.stem}", path.read_text())
        made = await recording([history], "default", data_converter())
        faults += sum(isinstance(one.event, Fault) for one in made.steps)
        assert len({id(fault) for fault in diagnosed}) == len(diagnosed) <= faults, path.stem
    assert len(diagnosed) >= 9, "the histories have faults"


async def test_the_ledger_of_a_captured_job_is_computed() -> None:
    """These were captured before jobs kept one."""
    for path in sorted(set(HISTORIES.glob("*.json")) - {HISTORIES / f"{REPAIR}.json"}):
        history = WorkflowHistory.from_json(f"job/{path.stem}", path.read_text())
        made = await recording([history], "default", data_converter())
        ended = history.events[-1].event_time.ToDatetime(UTC)
        job = restore(made.job, made.steps, ended)
        assert job.ledger.charged_until == ended, path.stem
        assert find_unbalanced(job) == []
        assert job.ledger.totals[Account.LAUNCHING] > timedelta(0), path.stem


def test_each_scenario_has_its_history() -> None:
    assert {path.stem for path in HISTORIES.glob("*.json")} == {*SCENARIOS, REPAIR}


def _write(name: str, history: WorkflowHistory) -> None:
    # Stack traces name the folder of the person who captured it.
    text = json.dumps(json.loads(history.to_json()), indent=1).replace(
        f"{HISTORIES.parent.parent}/", ""
    )
    with (HISTORIES / f"{name}.json").open("x") as file:  # what is recorded stays
        file.write(text + "\n")


async def _capture(names: list[str]) -> None:
    """Record those scenarios.

    Raises:
        FileExistsError: one is recorded.
    """
    from tests.workflows.conftest import FAST, _dev

    async with _dev(
        [word for value in FAST for word in ("--dynamic-config-value", value)]
    ) as client:
        for name in names:
            script, rules = SCENARIOS[name]
            async with rig(client, Path(tempfile.mkdtemp()), script, spares=1, gpus=1) as one:
                job = await one.submit(rules, name=name)
                await job.result()
                _write(name, await job.history())
                if name == "examined_and_rebooted":
                    _write(
                        REPAIR,
                        await client.get_workflow_handle("repair/default/n2").fetch_history(),
                    )


if __name__ == "__main__":
    sys.exit(asyncio.run(_capture(sys.argv[1:])))
