"""A job from its submission to its end: launches, faults, ladders, exit codes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus

from relaunch.backends.base import PrepareOrder, StartOrder
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.job.state import Phase
from relaunch.spec.policy import Strategy
from tests.fakes.nodes import Exit, Fault, Progress, Refuse, Script, ShimDies, error_file
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_job_whose_ranks_all_exit_with_0_succeeds(make_rig: MakeRig) -> None:
    async with make_rig(Script(then="succeed")) as rig:
        result = await (await rig.submit()).result()
        assert (result.phase, result.exit_code, result.generation) == (Phase.SUCCEEDED, 0, 1)
        assert result.incidents == ()
        assert rig.launches() == {1: ["n1", "n2"]}


async def test_s2_2_doubled_and_lost_messages_never_launch_twice(
    make_rig: MakeRig,
) -> None:
    faults = (
        Fault(kind="double", command="prepare", node="n1"),
        Fault(kind="double", command="start", node="n2"),
        Fault(kind="lose_answer", command="prepare", node="n2"),
        Fault(kind="lose_answer", command="start", node="n1"),
    )
    async with make_rig(Script(faults=faults)) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        started = [(life.node, life.rank) for life in rig.backend.lives if life.kind == "started"]
        assert sorted(started) == [("n1", 0), ("n1", 1), ("n2", 2), ("n2", 3)]
        assert (
            sum(
                order.command == "start" and order.outcome == "done" for order in rig.backend.orders
            )
            > 2
        )
        await job.handle.signal("cancel")
        await job.result()


async def test_s3_2_one_failed_rank_restarts_all_ranks_on_all_nodes(
    make_rig: MakeRig,
) -> None:
    exit = Exit(
        generation=1, rank=3, exit_code=1, error=error_file("ValueError: boom", "Traceback: here")
    )
    async with make_rig(Script((exit,), then="succeed")) as rig:
        result = await (await rig.submit()).result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)
        assert rig.launches() == {1: ["n1", "n2"], 2: ["n1", "n2"]}
        (incident,) = result.incidents
        assert (incident.cause, incident.nodes, incident.ranks) == (
            Cause.APPLICATION,
            ("n2",),
            (3,),
        )
        assert incident.code == "log python_bug" and incident.reason.endswith(": ValueError: boom")
        assert incident.traceback == "Traceback: here"
        assert [(d.decision, d.strategy, d.spent) for d in incident.decisions][:1] == [
            ("Relaunch", "RESTART_IN_PLACE", True)
        ]
        assert incident.detected and incident.decided and incident.stopped and incident.launched
        assert incident.stopped <= incident.launched
        assert result.state.restarts_spent == 1


async def test_s5_3_the_web_ui_gets_the_recovery_in_words(make_rig: MakeRig) -> None:
    """Its page asks the workflow for its details, and shows what each activity is for."""
    exit = Exit(generation=1, rank=3, exit_code=1, error=error_file("ValueError: boom"))
    async with make_rig(Script((exit,))) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 2)
        details = str(await job.handle.query("__temporal_workflow_metadata"))
        shown = (
            "rank 3 on n2",
            "ValueError: boom",
            "**Relaunch RESTART_IN_PLACE**",
            "1 of 8 spent",
        )
        assert [words for words in shown if words not in details] == [], details
        summaries = [
            await rig.client.data_converter.decode([event.user_metadata.summary], [str])
            for event in (await job.history()).events
            if event.user_metadata.HasField("summary")
        ]
        assert [text for (text,) in summaries if "generation 2" in text] == [
            "launch generation 2 on n1, n2",
            "watch generation 2 on n1, n2",
        ]
        await job.handle.signal("cancel")
        await job.result()


async def test_s3_2_a_spent_budget_fails_a_job_with_the_rank_exit_code(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((Exit(rank=1, exit_code=7),))) as rig:
        job = await rig.submit(policy(max_restarts=2, startup_stop="off"))
        result = await job.result()
        assert (result.phase, result.exit_code, result.generation) == (Phase.FAILED, 7, 3)
        assert (result.state.restarts_spent, "2 restarts" in result.reason) == (2, True)
        assert (await job.handle.describe()).status is WorkflowExecutionStatus.FAILED
        assert [len(nodes) for nodes in rig.launches().values()] == [2, 2, 2]


async def test_a_used_up_ladder_fails_the_job_with_its_result_attached(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=3),))) as rig:
        rules = policy(no_progress_stop="off", startup_stop="off")
        result = await (await rig.submit(rules)).result()
        assert (result.phase, result.exit_code, result.generation) == (Phase.FAILED, 3, 4)
        assert "ladder of APPLICATION" in result.reason
        # Without a spare the other node is the same one again.
        replaces = next(
            rung.label
            for rung in policy().ladder(Cause.APPLICATION)
            if rung.strategy is Strategy.REPLACE_NODE and Verdict.HEALTHY in rung.when
        )
        assert [t.rung for t in result.state.tries] == ["RESTART_IN_PLACE"] * 2 + [replaces]
        (incident,) = result.incidents
        assert [d.decision for d in incident.decisions] == [
            "Relaunch",
            "Relaunch",
            "Examine",
            "Relaunch",
            "Wait",
            "Examine",
            "Stop",
        ]
        assert "FAILED" in incident.outcome
        assert incident.recovered is None


async def test_exit_code_93_is_not_restarted(make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=93),))) as rig:
        result = await (await rig.submit()).result()
        assert (result.phase, result.exit_code, result.generation) == (Phase.FAILED, 93, 1)


async def test_a_signal_gives_the_exit_code_that_a_shell_would_give(make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=None, signal=11),))) as rig:
        result = await (await rig.submit(policy(max_restarts=0))).result()
        assert (result.phase, result.exit_code) == (Phase.FAILED, 139)


@pytest.mark.long
async def test_no_progress_ends_a_job_before_its_budget_does(
    make_rig: MakeRig,
) -> None:
    script = Script((Exit(rank=0, exit_code=1, after=0.3), Progress(steps=((0.0, 5),))))
    ladder = {"APPLICATION": [{"strategy": "RESTART_IN_PLACE"}]}
    async with make_rig(script) as rig:
        result = await (
            await rig.submit(
                policy(max_restarts=50, no_progress_stop=2, causes={**_defaults(), **ladder})
            )
        ).result()
        assert result.phase is Phase.FAILED
        assert result.state.flat_generations == 2
        assert "2 generations" in result.reason and result.reason.endswith("step 5")
        assert result.generation == 3


@pytest.mark.long
async def test_one_error_at_each_start_ends_a_job_with_a_budget(make_rig: MakeRig) -> None:
    boom = error_file("ModuleNotFoundError: No module named 'flash_attn'", "Traceback: here")
    # On one node alone there would be a fourth launch, without that node.
    exits = (Exit(generation=g, rank=2 * (g % 2), exit_code=1, error=boom) for g in (1, 2, 3))
    async with make_rig(Script(tuple(exits))) as rig:
        result = await (await rig.submit(policy(max_restarts=100))).result()
        assert (result.phase, result.generation) == (Phase.FAILED, 3)
        assert (result.state.startup_failures, result.state.restarts_spent) == (3, 2)


@pytest.mark.long
async def test_a_stated_budget_is_spent_on_kills_of_one_incident(make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=None, signal=9),))) as rig:
        result = await (await rig.submit(policy(max_restarts=6))).result()
        assert (result.phase, result.generation) == (Phase.FAILED, 7)
        assert result.state.restarts_spent == 6
        assert len(result.incidents) == 1


async def test_passing_the_faults_step_closes_the_incident(
    make_rig: MakeRig,
) -> None:
    script = Script(
        (
            Exit(generation=1, rank=0, exit_code=1, after=0.5),
            Progress(generation=1, steps=((0.0, 10),)),
            Progress(generation=2, steps=((0.0, 9), (0.3, 11)), hangs=True),
        )
    )
    async with make_rig(script) as rig:
        job = await rig.submit()
        state = await job.until(
            lambda s: s.generation == 2 and len(s.incidents) == 1, "a closed incident"
        )
        assert (state.phase, state.restarts_spent, state.furthest_step) == (Phase.RUNNING, 0, 10)
        assert state.incidents[0].reached == 10
        assert state.incidents[0].recovered is not None
        await job.handle.signal("cancel")
        await job.result()


async def test_s3_4_success_only_when_every_rank_succeeds(make_rig: MakeRig) -> None:
    script = Script(
        (
            *(Exit(generation=1, rank=rank, exit_code=0) for rank in (0, 1, 2)),
            Exit(generation=1, rank=3, exit_code=1, after=0.4),
        )
    )
    async with make_rig(script) as rig:
        result = await (await rig.submit(policy(max_restarts=0))).result()
        assert (result.phase, result.exit_code) == (Phase.FAILED, 1)


async def test_s3_4_an_exit_with_0_seen_by_an_earlier_watch_counts(
    make_rig: MakeRig,
) -> None:
    # Rank 0 ends, then the incident of generation 1 closes and the watch is ordered again: rank 0's
    # exit is behind it.
    script = Script(
        (
            Exit(generation=1, rank=2, exit_code=1, after=0.3),
            Progress(generation=1, rank=3, steps=((0.0, 1),)),
            Exit(generation=2, rank=0, exit_code=0),
            Progress(generation=2, rank=3, steps=((0.5, 2),)),
            *(Exit(generation=2, rank=rank, exit_code=0, after=2.5) for rank in (1, 2, 3)),
        )
    )
    async with make_rig(script) as rig:
        result = await (await rig.submit()).result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)
        assert (result.incidents[0].reached, result.incidents[0].closed is not None) == (1, True)


async def test_s3_8_a_generation_gives_ranks_world_and_master(make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(generation=1, rank=0),), then="succeed")) as rig:
        job = await rig.submit(env={"MINE": "1"})
        await job.result()
        prepares = {
            (c.node, c.token.generation): c.order
            for c in rig.backend.calls
            if c.command == "prepare" and c.token
        }
        starts = {
            (c.node, c.token.generation): c.order
            for c in rig.backend.calls
            if c.token and isinstance(c.order, StartOrder)
        }
        assert len(starts) == 4
        for (node, generation), order in starts.items():
            prepare = prepares[node, generation]
            assert isinstance(prepare, PrepareOrder)
            assert prepare.ranks == ((0, 1) if node == "n1" else (2, 3))
            assert [env["RANK"] for env in order.rank_env] == [str(rank) for rank in prepare.ranks]
            assert (order.env["WORLD_SIZE"], order.env["MASTER_ADDR"], order.env["MINE"]) == (
                "4",
                "10.0.0.1",
                "1",
            )
            assert order.env["TORCHELASTIC_RESTART_COUNT"] == str(generation - 1)
            assert [env["MA_PROC_START_CNT"] for env in order.rank_env] == [str(generation)] * 2
            assert order.rank_env[0]["WANDB_RESUME"] == "allow"
            assert [peer.node for peer in order.peers] == ["n2" if node == "n1" else "n1"]
        runs = {order.rank_env[0]["WANDB_RUN_ID"] for order in starts.values()}
        assert len(runs) == 2, "the run of rank 0 and of rank 2 in both generations"
        for generation in (1, 2):
            assert (
                len({str(starts[node, generation].env["MASTER_PORT"]) for node in ("n1", "n2")})
                == 1
            )
            assert len({starts[node, generation].secret for node in ("n1", "n2")}) == 1


async def test_s3_9_a_node_with_a_dead_shim_is_replaced_after_restarts(
    make_rig: MakeRig,
) -> None:
    script = Script(tuple(ShimDies(generation=g, node="n2") for g in (1, 2, 3)), then="succeed")
    async with make_rig(script, spares=1) as rig:
        result = await (await rig.submit()).result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 4)
        assert rig.launches()[4] == ["n1", "n3"]
        assert [t.strategy for t in result.state.tries] == [
            "RESTART_IN_PLACE",
            "RESTART_IN_PLACE",
            "REPLACE_NODE",
        ]
        assert result.state.restarts_spent == 0
        assert [(slot.node, slot.scheduled, slot.started) for slot in result.state.slots] == [
            ("n1", 1, 4),
            ("n3", 2, 1),
        ]
        # It was examined: not unhealthy, and a program can kill its shim, so it is not isolated.
        assert result.state.avoided == ()


async def test_a_command_that_does_not_exist_fails_the_job_with_127(make_rig: MakeRig) -> None:
    async with make_rig(
        Script((Refuse(command="start", why="command_not_found", reason="no program 'tran'"),))
    ) as rig:
        result = await (await rig.submit()).result()
        assert (result.phase, result.exit_code) == (Phase.FAILED, 127)
        assert "no program 'tran'" in result.reason
        assert rig.launches() == {}


async def test_a_secret_the_worker_cannot_read_fails_the_job_by_name(
    make_rig: MakeRig,
) -> None:
    async with make_rig() as rig:
        result = await (
            await rig.submit(secrets={"HF_TOKEN": {"env": "RELAUNCH_TEST_NOT_SET"}})
        ).result()
        assert (result.phase, result.exit_code) == (Phase.FAILED, 1)
        assert "HF_TOKEN: variable RELAUNCH_TEST_NOT_SET" in result.reason


async def test_a_secret_reaches_the_ranks_and_no_history(make_rig: MakeRig, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf-very-secret\n")
    (tmp_path / "env").write_text("WANDB_API_KEY=also-very-secret\n")
    (tmp_path / "env").chmod(0o600)
    async with make_rig(Script(then="succeed")) as rig:
        secrets = {"HF_TOKEN": {"file": str(tmp_path / "token")}}
        job = await rig.submit(secrets=secrets, env_file=str(tmp_path / "env"))
        await job.result()
        orders = [call.order for call in rig.backend.calls if call.command == "start"]
        sent = [dict(order.secrets) for order in orders if isinstance(order, StartOrder)]
        assert (
            sent
            == [
                {"WANDB_API_KEY": "also-very-secret", "HF_TOKEN": "hf-very-secret"},
            ]
            * 2
        )
        assert b"very-secret" not in b"".join(
            event.SerializeToString() for event in (await job.history()).events
        )


async def test_a_fleet_that_is_too_small_fails_the_job_at_once(make_rig: MakeRig) -> None:
    async with make_rig() as rig:
        result = await (await rig.submit(nodes=3)).result()
        assert (result.phase, result.exit_code) == (Phase.FAILED, 2)
        assert "fleet default" in result.reason and re.findall(r"\d+", result.reason) == ["2", "3"]


async def test_a_fleet_that_no_worker_knows_fails_the_job_at_once(make_rig: MakeRig) -> None:
    async with make_rig() as rig:
        result = await (await rig.submit(fleet="other")).result()
        assert (result.phase, result.exit_code) == (Phase.FAILED, 2)
        assert "'other'" in result.reason and "default" in result.reason


async def test_a_job_goes_on_above_a_higher_generation_of_a_node(make_rig: MakeRig) -> None:
    async with make_rig(Script((Progress(rank=0, hangs=True),)), two_controllers=True) as rig:
        job = await rig.submit()
        state = await job.until_phase(Phase.RUNNING, 1)
        # What a reset of the workflow leaves behind: a node that has obeyed a generation we know
        # nothing of.
        order = next(
            call.order
            for call in rig.backend.calls
            if call.command == "prepare" and call.node == "n2"
        )
        assert isinstance(order, PrepareOrder)
        await rig.backend.prepare("n2", replace(order, token=replace(state.token, generation=6)))
        state = await job.until_phase(Phase.RUNNING, 7)
        assert state.restarts_spent == 0
        assert list(rig.launches()) == [1, 7]
        await job.handle.signal("cancel")
        await job.result()


async def test_a_retry_of_a_closed_job_has_its_budgets_and_new_tokens(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=3),))) as rig:
        first = await (await rig.submit(policy(max_restarts=1), name="again")).result()
        assert first.phase is Phase.FAILED
        second = await rig.submit(
            policy(max_restarts=1), name="again", start={"previous": first.state, "avoid_nodes": ()}
        )
        result = await second.result()
        assert (result.phase, result.generation) == (
            Phase.FAILED,
            1,
        )  # the one restart was spent before
        assert result.state.submission > first.state.submission
        assert len(result.incidents) == 2
        renewed = await rig.submit(
            policy(max_restarts=1),
            name="again",
            start={"previous": result.state, "renew_budgets": True},
        )
        assert (await renewed.result()).generation == 2


@pytest.mark.parametrize("hides_causes", [False, True])
async def test_a_job_shows_its_phase_with_no_worker_alive(
    make_rig: MakeRig, hides_causes: bool
) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=3),))) as rig:
        job = await rig.submit(policy(max_restarts=0), start={"hides_causes": hides_causes})
        await job.result()
    description = await job.handle.describe()
    memo = await description.memo()
    assert memo["phase"] == "FAILED"
    assert memo["reason"].startswith("rank 0 on n1 ")
    attributes = {pair.key.name: pair.value for pair in description.typed_search_attributes}
    for of_the_server in ("BuildIds", "TemporalChangeVersion"):
        attributes.pop(of_the_server, None)
    shown: dict[str, Any] = {"Phase": "FAILED", "Generation": 1, "Cause": "HIDDEN"}
    if not hides_causes:
        shown |= {"Cause": "APPLICATION", "Nodes": ["n1"]}
    assert attributes == shown


def _defaults() -> dict[str, Any]:
    return {
        str(cause): [rung.model_dump(mode="json") for rung in ladder]
        for cause, ladder in policy().causes.items()
    }
