"""The messages that people get without asking, and hints to a job's watch to look again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowUpdateFailedError

from relaunch.job.state import Phase
from tests.fakes.nodes import Cut, Exit, Script, SimulatedBackend
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import PATIENCE, Job, policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASK = {"APPLICATION": [{"strategy": "ASK"}], "UNKNOWN": [{"strategy": "ASK"}]}


async def scheduled(job: Job, activity: str) -> int:
    kind = EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
    events = [e async for e in job.handle.fetch_history_events() if e.event_type == kind]
    return sum(
        e.activity_task_scheduled_event_attributes.activity_type.name == activity for e in events
    )


async def test_s1_7_people_are_notified_when_a_job_is_given_up(make_rig: MakeRig) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=3),))) as rig:
        job = await rig.submit(policy(extends="ecs-reboot-once"))
        result = await job.result()
        assert result.phase is Phase.FAILED
        await _until_told(rig.backend, 1)
        ((subject, text),) = rig.backend.told
        assert subject == f"relaunch: job {result.name} has failed"
        assert result.reason in text and f"relaunch retry {result.name}" in text


async def test_s1_7_people_hear_of_a_question_and_after_a_snooze_again(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((Exit(rank=0, exit_code=1),))) as rig:
        job = await rig.submit(policy(causes=ASK))
        state = await job.until_phase(Phase.WAITING_FOR_PERSON)
        await _until_told(rig.backend, 1)
        subject, text = rig.backend.told[0]
        assert subject.startswith(f"relaunch: job {state.name} ")
        # Not `next.what`: how many nodes are free may be counted before or after the notice.
        assert state.asked is not None
        assert (
            state.reason in text
            and "\n| ValueError: so the script says\n" in text  # its traceback
            and f"Wanted: an answer. Without an answer: {state.asked.question}" in text
            and f"relaunch answer {state.name} approve|deny|snooze|take-over" in text
        )
        await job.handle.execute_update(
            "answer", {"decision": "snooze", "within": "1s", "by": "ada"}
        )
        await _until_told(rig.backend, 2)
        await job.handle.execute_update("answer", {"decision": "deny", "by": "ada"})
        assert (await job.result()).phase is Phase.FAILED
        await _until_told(rig.backend, 4)
        subjects = [subject for subject, _ in rig.backend.told]
        assert subjects == [
            subject,
            subject,
            f"relaunch: resolved: job {state.name} waits for no person any more",
            f"relaunch: job {state.name} has failed",
        ]


async def test_a_question_left_unanswered_frees_nodes_and_ends_no_job(
    make_rig: MakeRig,
) -> None:
    async with make_rig(Script((Exit(generation=1, rank=0, exit_code=1),))) as rig:
        asks = await rig.submit(policy({"answer_within": "5s"}, causes=ASK), name="asks")
        await asks.until_phase(Phase.WAITING_FOR_PERSON)
        waits = await rig.submit(policy(), name="waits")
        # Only now has the first job given back its nodes.
        await waits.until_phase(Phase.RUNNING)
        state = await asks.until(lambda s: s.reminders > 1, "reminded twice")
        assert state.phase is Phase.WAITING_FOR_PERSON
        await waits.handle.signal("cancel")
        assert (await waits.result()).phase is Phase.CANCELLED
        reboot = {"decision": "approve", "repair": "reboot", "by": "ada"}
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await asks.handle.execute_update("answer", reboot)
        assert "reboot" in str(refused.value.cause), "an approval of a repair launches no ranks"
        await asks.handle.execute_update("answer", {"decision": "approve", "by": "ada"})
        state = await asks.until_phase(Phase.RUNNING, 2)
        assert state.reminders == 0
        resolved = "relaunch: resolved: job asks waits for no person any more"
        await _until_subject(rig.backend, resolved)
        subjects = [subject for subject, _ in rig.backend.told]
        assert subjects[0] == "relaunch: job asks waits for a person"
        assert subjects[1:-1] == [
            f"relaunch: job asks still waits for a person (reminder {number})"
            for number in range(1, len(subjects) - 1)
        ]
        assert subjects[-1] == resolved
        await asks.handle.signal("cancel")
        assert (await asks.result()).phase is Phase.CANCELLED


@pytest.mark.long
async def test_people_are_reminded_of_a_job_that_waits_for_nodes(make_rig: MakeRig) -> None:
    script = Script((Cut(generation=1, node="n2", when="prepare"),))
    async with make_rig(script, name="scarce") as rig:
        job = await rig.submit(policy({"answer_within": "3s"}), name="scarce")
        await job.until_phase(Phase.WAITING_FOR_NODES)
        await _until_told(rig.backend, 1)
        subject, text = rig.backend.told[0]
        assert subject == "relaunch: job scarce still waits for nodes"
        assert "relaunch nodes list" in text and "relaunch cancel scarce" in text
        rig.backend.heal("n2")
        await job.until_phase(Phase.RUNNING)
        await _until_subject(
            rig.backend, "relaunch: resolved: job scarce waits for no nodes any more"
        )
        await job.handle.signal("cancel")
        assert (await job.result()).phase is Phase.CANCELLED


async def test_s1_7_a_job_that_succeeds_or_is_cancelled_sends_no_alert(make_rig: MakeRig) -> None:
    async with make_rig(Script(then="succeed")) as rig:
        job = await rig.submit()
        assert (await job.result()).phase is Phase.SUCCEEDED
        assert rig.backend.told == [] and await scheduled(job, "tell_people") == 0


async def test_s1_7_a_job_ends_also_when_no_person_can_be_notified(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def fail(self: SimulatedBackend, subject: str, text: str) -> str:
        tried.append(subject)
        raise ConnectionError("no route")

    monkeypatch.setattr(SimulatedBackend, "tell_people", fail)
    async with make_rig(Script((Exit(rank=0, exit_code=3),))) as rig:
        job = await rig.submit(policy(extends="ecs-reboot-once"))
        result = await job.result()
        assert result.phase is Phase.FAILED

        async def count_tried() -> int:
            return len(set(tried))

        await _until(count_tried, 1)
        assert set(tried) == {f"relaunch: job {result.name} has failed"}


async def test_s1_9_a_hint_has_ranks_looked_at_once_for_each_version(
    make_rig: MakeRig,
) -> None:
    async with make_rig() as rig:
        job = await rig.submit()
        state = await job.until_phase(Phase.RUNNING)
        hint = {
            "what": "task/1",
            "version": 3,
            "submission": state.submission,
            "generation": state.generation,
        }
        for stale in ({**hint, "generation": 7}, {**hint, "submission": 1}):
            await job.handle.signal("hint", stale)
        await job.handle.signal("hint", hint)
        await _until(lambda: scheduled(job, "watch_ranks"), 2)
        for again in (hint, {**hint, "version": 2}):
            await job.handle.signal("hint", again)
        await job.handle.signal("hint", {"version": "x"})
        await job.until(
            lambda s: any("hint" in notice for notice in s.notices), "told that it cannot be read"
        )
        await job.handle.signal("hint", {**hint, "version": 4})
        await _until(lambda: scheduled(job, "watch_ranks"), 3)
        assert (await job.state()).generation == state.generation, (
            "a hint is looked at, and not believed"
        )
        await job.handle.signal("cancel")
        await job.result()


async def _until_subject(backend: SimulatedBackend, subject: str) -> None:
    async def count_messages() -> int:
        return sum(one == subject for one, _ in backend.told)

    await _until(count_messages, 1)


async def _until_told(backend: SimulatedBackend, count: int) -> None:
    async def count_messages() -> int:
        return len(backend.told)

    await _until(count_messages, count)


async def _until(count: Callable[[], Awaitable[int]], wanted: int) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while (found := await count()) < wanted:
        assert asyncio.get_running_loop().time() < deadline, f"only {found} of {wanted}"
        await asyncio.sleep(0.05)
    assert found == wanted
