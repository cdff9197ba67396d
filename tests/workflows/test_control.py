"""What people may do to a job: cancel it, retry it, change its policy, and send it nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import pytest
from pydantic import TypeAdapter
from temporalio import activity
from temporalio.client import WorkflowExecutionStatus, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from relaunch.activities.launch import JobActivities
from relaunch.activities.stop import StopRanksInput, StopRanksOutput
from relaunch.job.state import JobState, Phase
from tests.fakes.nodes import Cut, Exit, Fault, Lingers, Progress, Script
from tests.invariants import alive
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import Job, Rig, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASK = {"APPLICATION": [{"strategy": "ASK"}], "UNKNOWN": [{"strategy": "ASK"}]}


def new_fleet() -> str:
    """A name that no fleet of another test had.

    What such a fleet knew could not be asked for, and silent nodes would be waited for.
    """
    return f"f-{uuid.uuid4().hex[:8]}"


async def is_cancelled(rig: Rig, job: Job) -> None:
    result = await job.result()
    assert (result.phase, result.exit_code) == (Phase.CANCELLED, 130)
    assert not alive(rig.backend.lives)
    assert (await job.handle.describe()).status is WorkflowExecutionStatus.COMPLETED
    assert result.state.maybe_alive == ()


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("way", ["signal", "temporal"])
async def test_s5_4_cancel_stops_running_ranks(make_rig: MakeRig, way: str) -> None:
    async with make_rig() as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING)
        if way == "signal":
            await job.handle.signal("cancel", {"reason": "enough", "by": "ada"})
        else:
            await job.handle.cancel()
        await is_cancelled(rig, job)
        reason = (await job.result()).reason
        assert reason.startswith("cancelled")
        assert all(word in reason for word in (("ada", "enough") if way == "signal" else ()))


async def test_s5_4_cancel_while_ranks_are_launched(make_rig: MakeRig) -> None:
    faults = tuple(
        Fault(kind="delay", command="start", node=node, seconds=0.8) for node in ("n1", "n2")
    )
    async with make_rig(Script(faults=faults)) as rig:
        job = await rig.submit()
        await job.until(lambda s: s.phase is Phase.LAUNCHING and bool(s.slots), "LAUNCHING")
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


async def test_s5_4_cancel_while_nodes_are_waited_for(make_rig: MakeRig) -> None:
    async with make_rig(
        Script((Cut(generation=0, when="first_call", node="n2"),)), name=new_fleet()
    ) as rig:
        job = await rig.submit()
        state = await job.until(
            lambda s: s.phase is Phase.QUEUED and s.generation == 1, "in the queue"
        )
        assert state.reason.startswith("1 of 2 ") and "n2" in state.reason
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)
        assert rig.launches() == {}


async def test_s5_4_cancel_while_a_person_is_asked(make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(rank=0),))) as rig:
        job = await rig.submit(policy(causes=ASK))
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


async def test_s5_4_cancel_during_the_delay_before_a_restart(make_rig: MakeRig) -> None:
    ladder = {"APPLICATION": [{"strategy": "RESTART_IN_PLACE", "delay": "1h"}]}
    async with make_rig(Script((Exit(rank=0),))) as rig:
        job = await rig.submit(policy(causes=ladder))
        await job.until_phase(Phase.LAUNCHING, 2)
        await job.handle.cancel()
        await is_cancelled(rig, job)
        assert list(rig.launches()) == [1]


async def test_a_cancel_waits_until_ranks_that_linger_are_gone(make_rig: MakeRig) -> None:
    async with make_rig(Script((Lingers(rank=3, seconds=60),))) as rig:
        job = await rig.submit(policy({"stop_grace": "1s"}))
        await job.until_phase(Phase.RUNNING)
        await job.handle.signal("cancel")
        state = await job.until_phase(Phase.STOPPING)
        assert state.ending is not None
        await is_cancelled(rig, job)


async def test_ranks_that_a_cancel_stops_are_no_incident(make_rig: MakeRig) -> None:
    """Their watch most often sees them end before it is cancelled itself."""
    async with make_rig(Script((Lingers(rank=3, seconds=60),))) as rig:
        job = await rig.submit(policy({"stop_grace": "1s"}))
        await job.until_phase(Phase.RUNNING, 1)
        await job.handle.signal("cancel")
        result = await job.result()
        assert (result.phase, result.incidents) == (Phase.CANCELLED, ())


async def test_a_cancel_while_a_failed_job_stops_makes_it_cancelled(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((Exit(rank=0, after=0.2), Lingers(rank=3, seconds=60)))) as rig:
        job = await rig.submit(policy({"stop_grace": "2s"}, max_restarts=0))
        await job.until_phase(Phase.STOPPING)
        await job.handle.signal("cancel", {"by": "ada"})
        await is_cancelled(rig, job)


async def test_two_cancels_of_both_kinds_end_the_job_once(make_rig: MakeRig) -> None:
    async with make_rig(Script((Lingers(rank=0, seconds=60),))) as rig:
        job = await rig.submit(policy({"stop_grace": "1s"}))
        await job.until_phase(Phase.RUNNING)
        await job.handle.signal("cancel", {"reason": "first"})
        await job.until_phase(Phase.STOPPING)
        await job.handle.cancel()
        await job.handle.cancel()
        await is_cancelled(rig, job)
        assert (await job.result()).reason == "cancelled: first"


async def test_s5_4_force_retry_while_running_relaunches_all_ranks(
    make_rig: MakeRig,
) -> None:
    async with make_rig(spares=1) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        await job.handle.signal(
            "force_retry", {"reason": "n2 is slow", "by": "ada", "avoid_nodes": ["n2"]}
        )
        state = await job.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in state.slots] == ["n1", "n3"]
        assert state.restarts_spent == 0
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


async def test_s5_4_force_retry_while_launching_gives_up_that_launch(make_rig: MakeRig) -> None:
    faults = tuple(
        Fault(kind="delay", command="start", generation=1, node=node, seconds=1.0)
        for node in ("n1", "n2")
    )
    async with make_rig(Script(faults=faults)) as rig:
        job = await rig.submit()
        await job.until(lambda s: s.phase is Phase.LAUNCHING and bool(s.slots), "LAUNCHING")
        await job.handle.signal("force_retry")
        await job.until_phase(Phase.RUNNING, 2)
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


async def test_s5_4_force_retry_while_asking_renews_budgets_on_request(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((Exit(generation=1, rank=0),), then="succeed")) as rig:
        job = await rig.submit(policy(causes=ASK))
        state = await job.until_phase(Phase.WAITING_FOR_PERSON)
        assert "`answer` approve" in state.next.what
        await job.handle.signal("force_retry", {"renew_budgets": True})
        result = await job.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)


async def test_s5_4_force_retry_while_waiting_looks_for_other_nodes(
    make_rig: MakeRig,
) -> None:
    async with make_rig(
        Script((Cut(generation=0, when="first_call", node="n2"),), then="succeed"),
        nodes=2,
        name=new_fleet(),
    ) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.QUEUED, 1)
        rig.backend.heal("n2")
        await job.handle.signal("force_retry")
        result = await job.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 2)


async def test_a_job_that_waits_for_nodes_goes_on_when_they_answer(
    make_rig: MakeRig,
) -> None:
    async with make_rig(
        Script((Cut(generation=0, when="first_call", node="n2"),), then="succeed"), name=new_fleet()
    ) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.QUEUED, 1)
        rig.backend.heal("n2")
        result = await job.result()
        assert (result.phase, result.generation) == (Phase.SUCCEEDED, 1)


async def test_change_policy_is_in_force_from_the_next_decision_on(make_rig: MakeRig) -> None:
    script = Script(tuple(Exit(generation=g, rank=0, after=1.0) for g in range(1, 20)))
    async with make_rig(script) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        await job.handle.execute_update(
            "change_policy", {"policy": {"max_restarts": 0}, "reason": "budget", "by": "ada"}
        )
        result = await job.result()
        assert result.phase is Phase.FAILED
        assert any("ada" in one and "max_restarts" in one for one in result.state.notices)
        (change,) = result.state.policy_changes
        assert (change.by, change.reason, change.keys) == (
            "ada",
            "budget",
            ("exhaust_restarts", "max_restarts", "no_progress_stop"),
        )
        decisions = [one for incident in result.incidents for one in incident.decisions]
        # On a slow machine rank 0 may have failed once before the change, also in the same task.
        assert decisions[-1].decision == "Stop" and decisions[-1].at >= change.at
        assert not [one for one in decisions[:-1] if one.at > change.at]


async def test_two_changes_of_the_policy_at_once_are_both_kept(make_rig: MakeRig) -> None:
    async with make_rig() as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        changes: list[dict[str, Any]] = [{"max_restarts": 3}, {"no_progress_stop": 2}]
        await asyncio.gather(
            *(job.handle.execute_update("change_policy", {"policy": one}) for one in changes)
        )
        changed = (await job.until(lambda s: len(s.policy_changes) == 2, "changed twice")).policy
        assert (changed.max_restarts, changed.no_progress_stop) == (3, 2)
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


@pytest.mark.long_after(variants=2)
@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        ([], "policy: "),
        ([{}], "policy: "),
        ([{"polizy": {}}], "polizy: "),
        (
            [{"policy": {"max_restarts": -1}}],
            "max_restarts: Input should be",
        ),
        ([{"policy": {"max_retries": 3}}], "max_retries: "),
        ([{"policy": {"timeouts": {"lease": "0.1s"}}}], "timeouts.lease is 0.1s"),
        (["nonsense"], "Input should be a valid dictionary"),
    ],
)
async def test_change_policy_is_refused_with_a_sentence(
    make_rig: MakeRig, sent: list[Any], sentence: str
) -> None:
    async with make_rig() as rig:
        job = await rig.submit()
        before = (await job.until_phase(Phase.RUNNING)).policy
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await job.handle.execute_update("change_policy", args=sent)
        assert isinstance(refused.value.cause, ApplicationError)
        assert sentence in refused.value.cause.message
        assert (await job.state()).policy == before
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


MALFORMED: list[tuple[str, list[Any], str]] = [
    ("cancel", ["a string"], "cancel was not understood: Input should be"),
    ("cancel", [17], "cancel was not understood"),
    ("cancel", [["a", "list"]], "cancel was not understood"),
    ("cancel", [False], "cancel was not understood"),
    (
        "cancel",
        [{"reason": 5}],
        "cancel was not understood: reason: ",
    ),
    ("cancel", [{"because": "x"}], "cancel was not understood: because: "),
    ("force_retry", [{"avoid_nodes": "n2"}], "force_retry was not understood: avoid_nodes"),
    ("force_retry", [{"avoid_nodes": [{"a": 1}]}], "force_retry was not understood: avoid_nodes.0"),
    (
        "force_retry",
        [{"renew_budgets": "perhaps"}],
        "force_retry was not understood: renew_budgets",
    ),
    ("report", [], "report was not understood: node: missing"),
    ("report", [None], "report was not understood: node: missing"),
    ("report", [{"node": "n 2"}], "report was not understood: node: 'n 2'"),
    ("report", [{"node": "n2", "declared": "alive"}], "report was not understood: declared"),
    ("report", [{"node": "n2", "reason": ""}], "report was not understood: reason: "),
    (
        "report",
        [{"node": "n2", "reason": "burnt"}],
        "report was refused: node n2 ",
    ),
]


async def test_malformed_signals_are_shown_and_change_nothing(
    make_rig: MakeRig,
) -> None:
    async with make_rig() as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        for name, sent, notice in MALFORMED:
            await job.handle.signal(name, args=sent)
            state = await job.until(
                lambda s, notice=notice: notice in (s.notices or ("",))[-1], notice
            )  # type: ignore[misc]
            assert (state.phase, state.generation, len(state.notices) <= 5) == (
                Phase.RUNNING,
                1,
                True,
            )
        await job.handle.signal("cancel", {"by": "ada"})
        await is_cancelled(rig, job)


@pytest.mark.long_after(variants=2)
@pytest.mark.parametrize("sent", [[], [None], [""], [{}], [{"reason": "b"}, {"by": "ada"}]])
async def test_an_empty_signal_means_defaults_and_one_payload_counts(
    make_rig: MakeRig, sent: list[Any]
) -> None:
    async with make_rig(Script((Progress(rank=0, hangs=True),))) as rig:
        job = await rig.submit()
        await job.until_phase(Phase.RUNNING, 1)
        await job.handle.signal("force_retry", args=sent)
        state = await job.until_phase(Phase.RUNNING, 2)
        assert [notice.split(": ")[1] for notice in state.notices] == ["generation 2"], (
            "nothing was not understood"
        )
        await job.handle.signal("cancel", args=sent)
        await is_cancelled(rig, job)


def decisions(state: JobState) -> list[str]:
    return [one.decision for one in state.incident.decisions] if state.incident is not None else []


async def test_a_question_is_snoozed_taken_over_and_approved_by_page(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((Exit(generation=1, rank=0),))) as rig:
        job = await rig.submit(policy(causes=ASK))
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        told = await job.handle.execute_update(
            "answer", {"decision": "snooze", "by": "ada", "reason": "later", "within": "1s"}
        )
        assert told.endswith("1s")
        # A slow machine may see the snooze only when it is over: what it said is kept in the
        # incident.
        asked = await job.until(
            lambda s: (
                decisions(s)[-3:] == ["Ask", "Wait", "Ask"] and "Without an answer" in s.next.what
            ),
            "asked again",
        )
        assert asked.phase is Phase.WAITING_FOR_PERSON
        assert asked.incident is not None
        snoozed = asked.incident.decisions[-2].reason
        assert snoozed.startswith("ada snoozed") and "later" in snoozed
        await job.handle.execute_update("answer", {"decision": "take-over", "by": "ada"})
        state = await job.until(
            lambda s: s.reason.startswith("ada has taken it over"), "taken over"
        )
        assert state.next.at is None
        assert not alive(rig.backend.lives)
        # The fleet has no third node, and the page says so before the person answers.
        assert state.asked is not None and state.asked.without == ("n1",)
        await job.until(lambda s: s.asked is not None and s.asked.free is not None, "counted")
        told = await job.handle.execute_update("answer", {"decision": "approve", "by": "ada"})
        assert "on n1 again" in told and "none" in told
        await job.until_phase(Phase.RUNNING, 2)
        assert rig.launches()[2] == rig.launches()[1]
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await job.handle.execute_update("answer", {"decision": "deny"})
        assert isinstance(refused.value.cause, ApplicationError)
        message = refused.value.cause.message
        assert message.startswith(job.handle.id.replace("/", " "))
        assert "deny" in message and "RUNNING" in message
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


async def test_an_approved_launch_leaves_out_the_named_node(make_rig: MakeRig) -> None:
    async with make_rig(
        Script((Exit(generation=1, rank=0),)),
        spares=2,
        name=new_fleet(),
    ) as rig:
        job = await rig.submit(policy(causes=ASK))
        state = await job.until(lambda s: s.asked is not None and s.asked.free is not None)
        assert state.asked is not None and state.asked.free is not None
        assert (state.asked.without, state.asked.free.count) == (("n1",), 2)
        assert "without n1" in state.next.what
        told = await job.handle.execute_update("answer", {"decision": "approve", "by": "ada"})
        assert "without n1" in told
        state = await job.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in state.slots] == ["n3", "n2"]
        assert state.incident is not None
        assert "ada approved a new launch without n1" in state.incident.decisions[-1].reason
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


@pytest.mark.long
@pytest.mark.parametrize("decision", ["approve", "take-over"])
async def test_a_worker_without_cache_takes_an_answer_as_any_other(
    make_uncached_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, decision: str
) -> None:
    """The answer is the next task after two that ordered nothing.

    A worker that has not cached the workflow then gives it the results of the task before together
    with the answer, and the answer first. In a replay the results come first.
    """
    stop_ranks = JobActivities.stop_ranks

    @activity.defn(name="stop_ranks")
    async def slow(self: JobActivities, told: Any) -> StopRanksOutput:
        """Ends after the notice, so that each has a task."""
        await asyncio.sleep(2)
        return await stop_ranks(self, TypeAdapter(StopRanksInput).validate_python(told))

    monkeypatch.setattr(JobActivities, "stop_ranks", slow)
    async with make_uncached_rig(Script((Exit(generation=1, rank=0),))) as rig:
        job = await rig.submit(policy(causes=ASK))
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        await job.until_idle()
        await job.handle.execute_update("answer", {"decision": "snooze", "within": "1s"})
        await job.until(lambda s: decisions(s)[-3:] == ["Ask", "Wait", "Ask"], "asked again")
        await job.until_idle()
        await job.handle.execute_update("answer", {"decision": decision})
        await job.until(lambda s: decisions(s)[-1] != "Ask" or not s.next.at, "answered")
        await job.until_idle()
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


async def test_a_job_that_is_denied_fails_and_names_who_denied_it(make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(rank=0),))) as rig:
        job = await rig.submit(policy(causes=ASK))
        await job.until_phase(Phase.WAITING_FOR_PERSON)
        await job.handle.execute_update(
            "answer", {"decision": "deny", "by": "ada", "reason": "hopeless"}
        )
        result = await job.result()
        assert result.phase is Phase.FAILED
        assert result.reason.startswith("ada denied ") and "hopeless" in result.reason


async def test_a_launch_that_is_taken_over_leaves_no_rank(make_rig: MakeRig) -> None:
    ladder = {"APPLICATION": [{"strategy": "RESTART_IN_PLACE", "delay": "1h"}]}
    async with make_rig(Script((Exit(generation=1, rank=0),))) as rig:
        job = await rig.submit(policy(causes=ladder))
        await job.until_phase(Phase.LAUNCHING, 2)
        await job.handle.execute_update(
            "answer", {"decision": "take-over", "by": "ada", "reason": "I look at it"}
        )
        await job.until(
            lambda s: s.phase is Phase.WAITING_FOR_PERSON and not s.maybe_alive,
            "taken over, with no rank left",
        )
        assert not alive(rig.backend.lives)
        await job.handle.signal("force_retry", {"by": "ada"})
        await job.until_phase(Phase.RUNNING, 3)
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


async def test_an_abandoned_launch_is_stopped_before_one_elsewhere(
    make_rig: MakeRig,
) -> None:
    slow = Fault(node="n1", generation=1, command="start", kind="delay", seconds=4.0)
    async with make_rig(Script((Progress(hangs=True),), (slow,)), spares=1) as rig:
        job = await rig.submit()
        await job.until(
            lambda s: any(life.node == "n2" for life in rig.backend.lives), "ranks on n2"
        )
        assert (await job.state()).phase is Phase.LAUNCHING
        await job.handle.signal("force_retry", {"by": "ada", "avoid_nodes": ["n2"]})
        await job.until_phase(Phase.RUNNING, 2)
        assert sorted(rig.launches()[2]) == ["n1", "n3"]
        assert {token.generation for token, _, _ in alive(rig.backend.lives)} == {2}
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)


async def test_a_cancel_while_ranks_are_stopped_begins_no_examination(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = asyncio.Event(), asyncio.Event()
    stop_ranks = JobActivities.stop_ranks

    @activity.defn(name="stop_ranks")
    async def unheeding(self: JobActivities, told: Any) -> StopRanksOutput:
        """Ends well, as an activity does that hears of its cancel too late."""
        # The SDK reads no types of a method that is defined outside its class.
        input = TypeAdapter(StopRanksInput).validate_python(told)

        async def in_its_own_time() -> StopRanksOutput:
            await go.wait()
            return await stop_ranks(self, input)

        reached.set()
        stopping = asyncio.create_task(in_its_own_time())
        while not stopping.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({stopping})
        return stopping.result()

    monkeypatch.setattr(JobActivities, "stop_ranks", unheeding)
    ladder = {
        "APPLICATION": [{"strategy": "REPLACE_NODE", "when": "UNHEALTHY"}, {"strategy": "FAIL"}]
    }
    async with make_rig(Script((Exit(rank=0),))) as rig:
        job = await rig.submit(policy(causes=ladder))
        await job.until_phase(Phase.EXAMINING)
        async with asyncio.timeout(60):
            await reached.wait()
        await job.handle.signal("cancel")
        await job.until(lambda s: s.ending is not None, "cancelled")
        go.set()
        await is_cancelled(rig, job)
        names = [
            event.activity_task_scheduled_event_attributes.activity_type.name
            for event in (await job.history()).events
        ]
        assert "examine_nodes" not in names


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize(
    "nonsense", [{}, {"decision": "perhaps"}, {"decision": "snooze", "within": "soon"}, "yes"]
)
async def test_an_answer_that_is_none_is_refused_and_changes_nothing(
    make_rig: MakeRig, nonsense: Any
) -> None:
    async with make_rig(Script((Exit(rank=0),))) as rig:
        job = await rig.submit(policy(causes=ASK))
        before = await job.until(
            lambda s: (
                s.phase is Phase.WAITING_FOR_PERSON
                and not s.maybe_alive
                and s.asked is not None
                and s.asked.free is not None
            ),
            "asking, with no rank left and the fleet's free nodes counted",
        )
        with pytest.raises(WorkflowUpdateFailedError):
            await job.handle.execute_update("answer", nonsense)
        assert await job.state() == before
        await job.handle.signal("cancel")
        await is_cancelled(rig, job)
