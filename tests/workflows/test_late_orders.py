"""Repairs are not done late, nor after a no: what was true when they were decided may not be now.

Nodes are simulated, and the fleet is a stand-in; the server and the workers are real.
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.testing import WorkflowEnvironment

from relaunch.evidence.findings import Verdict
from relaunch.repair.machine import ASKING_PROBE_INTERVALS
from relaunch.spec.policy import Strategy
from relaunch.workflows.node_repair import orders, permits
from relaunch.workflows.node_repair.workflow import NodeRepair
from tests.fakes.nodes import Refuse, SimulatedBackend
from tests.workflows.test_escalation import (
    BY_RESET,
    PATIENCE,
    allows,
    says_nothing,
    world,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
APPROVE = {"decision": "approve", "by": "alice"}
DENY = {"decision": "deny", "by": "bob"}


class Slow(SimulatedBackend):
    """A node whose probes take until the test lets them go on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waits, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def probe(self, *args: Any) -> Any:
        if not self.go_on.is_set():
            self.waits.set()
            await self.go_on.wait()
        return await super().probe(*args)


@pytest.mark.parametrize("first", [APPROVE, DENY], ids=["approved first", "denied first"])
async def test_a_no_before_the_order_is_given_counts(
    skipping: WorkflowEnvironment, first: dict[str, str]
) -> None:
    """Both answer while the node is probed, so neither answer has been acted on."""
    async with world(skipping.client, BY_RESET, repairs="ask", kind=Slow) as one:
        assert isinstance(one.backend, Slow)
        repair = await one.order(Strategy.RESET_GPU)
        await one.until_asked(repair, Strategy.RESET_GPU)
        one.backend.go_on.clear()
        await skipping.sleep(ASKING_PROBE_INTERVALS[0] + timedelta(seconds=1))
        await asyncio.wait_for(one.backend.waits.wait(), PATIENCE)
        await repair.execute_update("answer", first)
        if first is APPROVE:
            assert await repair.execute_update("answer", DENY) == "denied"
        else:
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await repair.execute_update("answer", APPROVE)
            assert "bob has denied it already" in str(refused.value.cause)
        one.backend.go_on.set()
        ended = await one.end_of(repair)
        assert ended.outcome == "refused" and ended.reason.startswith("bob denied")
        assert one.did == []


async def test_an_order_that_no_worker_took_is_not_given_later(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers are gone when the fleet permits it: once they are back, all is asked again."""
    monkeypatch.setattr(orders, "PICKUP_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(permits, "MAX_PERMIT_DELAY", timedelta(minutes=5))
    async with world(server, BY_RESET, answers=says_nothing) as one:
        repair = await one.order(Strategy.RESET_GPU)

        async def is_asked() -> bool:
            return bool(one.told.requests)

        await one.until(is_asked, "asked")
        request = one.told.messages[-1][1]
        await one.until_next(repair, "waiting for a permit")
        assert one.worker is not None and one.make_worker is not None
        await one.worker.shutdown()
        async with one.make_worker(activities=False):
            one.told.permit_at = given = datetime.now(UTC)
            await one.told.answer(request, True)

            async def has_expired() -> bool:
                events = [event async for event in repair.fetch_history_events()]
                expired = EventType.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT
                return any(event.event_type == expired for event in events)

            await one.until(has_expired, "expired")
        assert one.did == []
        one.told.answers = allows
        async with one.make_worker():
            ended = await one.end_of(repair)
        assert ended.outcome == "done"
        assert one.told.requests == [(1, "reset"), (2, "reset")]
        asked = [message for signal, message in one.told.messages if signal == "repair_wanted"]
        assert datetime.fromisoformat(asked[1]["renews"]) == given
        assert one.did == ["reset-gpus", "diagnose"]


@pytest.mark.parametrize(
    ("age", "asked"), [(timedelta(minutes=10), 2), (timedelta(0), 1)], ids=["old", "new"]
)
async def test_a_permit_is_valid_from_when_it_was_given(
    skipping: WorkflowEnvironment, age: timedelta, asked: int
) -> None:
    async with world(skipping.client, BY_RESET, answers=says_nothing) as one:

        async def the_second_time(request: dict[str, Any]) -> bool | None:
            one.told.permit_at = await skipping.get_current_time() - age
            return len(one.told.requests) >= 2 or None

        one.told.answers = the_second_time
        ended = await one.ended(Strategy.RESET_GPU, level=0)
        assert ended.outcome == "done"
        assert {seq for seq, _ in one.told.requests} == set(range(1, asked + 1))


async def test_a_node_in_use_at_the_order_gets_no_other_repair(server: Client) -> None:
    """It was free when it was probed, and a job has taken it since."""
    busy = Refuse(command="reset-gpus", node="n1", why="busy", reason="job a runs on it")
    async with world(server, BY_RESET, busy) as one:
        ended = await one.ended()
        assert (ended.outcome, ended.verdict) == ("refused", Verdict.UNHEALTHY)
        assert "job a runs on it" in ended.reason
        assert one.did == ["diagnose"]


async def test_a_reset_repair_does_not_reboot_a_second_time(server: Client) -> None:
    async with world(server) as one:
        repair = await one.order(Strategy.REBOOT_NODE)
        assert (await one.end_of(repair)).outcome == "done"
        events = [event async for event in repair.fetch_history_events()]
        first = next(
            event.event_id
            for event in events
            if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
        )
        again = await server.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=server.namespace,
                workflow_execution=WorkflowExecution(
                    workflow_id=repair.id, run_id=repair.result_run_id or ""
                ),
                reason="a test",
                workflow_task_finish_event_id=first,
                request_id=uuid.uuid4().hex,
            )
        )
        second = server.get_workflow_handle_for(NodeRepair.run, repair.id, run_id=again.run_id)
        ended = await one.end_of(second)
        assert (ended.outcome, ended.verdict) == ("done", Verdict.HEALTHY), ended.reason
        assert one.did.count("reboot") == 1
