"""Questions and orders of a fleet: one function per activity, with its timeouts, its retry policy
and its summary in the web UI.

Each returns None if it was cancelled or timed out; the fleet asks again if it still needs the
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    RetryState,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from relaunch.activities.fleet import (
        ClosedJobsInput,
        FleetActivities,
        LookInput,
        ReclaimInput,
    )
    from relaunch.messages.fleets import FleetFile, FleetNews, ReadFleetInput, WatchFleetInput
    from relaunch.messages.ids import REPAIR_ID_PREFIX
    from relaunch.messages.jobs import NodeRepairInput
    from relaunch.pool.events import PreviousRun, ProbeOrder, ReclaimOrder, RepairRequest
    from relaunch.pool.state import NodeProbe
    from relaunch.text import count_noun, escape_markdown, join_names
    from relaunch.workflows.training_job.commands import BEAT, KEEP_TRYING

ASK_TIMEOUT = timedelta(minutes=2)
"""For probes and questions to the server, retries included; after that the fleet asks again with
what it needs by then."""
WATCH_TIMEOUT = timedelta(days=1)
"""For one attempt of a watch; the server then begins the next one, and records neither."""
WATCH_HEARTBEAT = timedelta(seconds=20)
"""How soon the watch of a dead worker is taken over, which a round a minute has time for."""
READ_TIMEOUT = timedelta(seconds=10)
RECLAIM_TIMEOUT = timedelta(minutes=10)
"""For one order to stop ranks; it ends by itself after half of that."""
RESTORE_TIMEOUT = timedelta(seconds=15)
"""As long as the fleet waits for it."""
REPAIR_TIMEOUT = timedelta(hours=2)
"""Until a repair that the fleet has ordered gives up."""
RETRY_DELAYS_S = (1, 2, 4, 8, 16, 32)
"""Seconds. A repair that has reported its end takes a moment to end; one that is still there after
a minute is another one."""

Answer = TypeVar("Answer")


async def find_jobs(fleet: str) -> tuple[str, ...] | None:
    return await _await_answer(
        workflow.execute_activity_method(
            FleetActivities.find_jobs,
            fleet,
            start_to_close_timeout=ASK_TIMEOUT,
            schedule_to_close_timeout=ASK_TIMEOUT,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            summary="which jobs run, that may hold nodes",
        )
    )


async def read_last_state(fleet: str) -> PreviousRun | None:
    return await _await_answer(
        workflow.execute_activity_method(
            FleetActivities.read_last_state,
            fleet,
            start_to_close_timeout=RESTORE_TIMEOUT,
            schedule_to_close_timeout=RESTORE_TIMEOUT,
            retry_policy=KEEP_TRYING,
            summary="which nodes were out of service in the previous run",
        )
    )


async def read_fleet(fleet: str, digest: str) -> FleetFile | None:
    return await _await_answer(
        workflow.execute_activity_method(
            FleetActivities.read_fleet,
            ReadFleetInput(fleet, digest),
            start_to_close_timeout=READ_TIMEOUT,
            schedule_to_close_timeout=ASK_TIMEOUT,
            retry_policy=KEEP_TRYING,
            summary="what the fleet file says",
        )
    )


async def find_closed_jobs(
    fleet: str, claims: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...] | None:
    return await _await_answer(
        workflow.execute_activity_method(
            FleetActivities.find_closed_jobs,
            ClosedJobsInput(fleet, claims),
            start_to_close_timeout=ASK_TIMEOUT,
            schedule_to_close_timeout=ASK_TIMEOUT,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            summary=f"which of {count_noun(len(claims), 'job')} ended and kept their nodes",
        )
    )


async def probe_nodes(fleet: str, order: ProbeOrder) -> tuple[NodeProbe, ...] | None:
    return await _await_answer(
        workflow.execute_activity_method(
            FleetActivities.probe_nodes,
            LookInput(fleet, order.nodes, order.inventories),
            start_to_close_timeout=ASK_TIMEOUT,
            schedule_to_close_timeout=ASK_TIMEOUT,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            summary=f"probe {join_names(order.nodes)}"[:200],
        )
    )


async def watch_fleet(input: WatchFleetInput) -> FleetNews | None:
    return await _await_answer(
        workflow.execute_activity_method(
            FleetActivities.watch_fleet,
            input,
            start_to_close_timeout=WATCH_TIMEOUT,
            heartbeat_timeout=WATCH_HEARTBEAT,
            retry_policy=KEEP_TRYING,
            summary=(
                f"{count_noun(len(input.nodes), 'node')}, {count_noun(len(input.claims), 'job')}"
                " and the fleet file, until one has changed"
            ),
        )
    )


async def reclaim(fleet: str, order: ReclaimOrder) -> tuple[str, ...] | None:
    return await _await_answer(
        workflow.execute_activity_method(
            FleetActivities.reclaim,
            ReclaimInput(fleet, order.job, order.submission, order.nodes, order.generation),
            start_to_close_timeout=RECLAIM_TIMEOUT,
            schedule_to_close_timeout=RECLAIM_TIMEOUT,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            summary=f"stop what is left of job {order.job} on {join_names(order.nodes)}"[:200],
        )
    )


async def start_repair(fleet: str, order: RepairRequest, is_awaited: Callable[[], bool]) -> None:
    """Start a repair without waiting for its end: it reports to whichever run of the fleet exists
    then."""
    for delay in RETRY_DELAYS_S:
        if await _start_child(fleet, order):
            return
        await workflow.sleep(delay, summary=f"before another repair of {order.node} begins")
        if not is_awaited():
            break
    workflow.logger.info("a repair of %s is under way already, and reports its end", order.node)


async def _start_child(fleet: str, order: RepairRequest) -> bool:
    try:
        repair = await workflow.start_child_workflow(
            "NodeRepair",
            NodeRepairInput(
                fleet=fleet,
                node=order.node,
                strategy=order.strategy,
                reason=order.reason,
                by=f"fleet {fleet}",
                deadline=workflow.now() + REPAIR_TIMEOUT,
                gpus=order.gpus,
                after_reboot=order.after_reboot,
                healed=order.healed,
            ),
            id=f"{REPAIR_ID_PREFIX}{fleet}/{order.node}",
            parent_close_policy=ParentClosePolicy.ABANDON,
            static_summary=escape_markdown(f"repair of {order.node}: {order.reason}"[:150])[:200],
        )
    except WorkflowAlreadyStartedError:
        return False
    repair.add_done_callback(_retrieve_result)
    return True


async def withdraw_repair(repair: str, reason: str) -> None:
    """Cancel a repair, named `repair/FLEET/NODE/RUN` or, before it begins, without the run."""
    parts = repair.split("/")
    handle = workflow.get_external_workflow_handle(
        "/".join(parts[:3]), run_id="".join(parts[3:]) or None
    )
    try:
        await handle.cancel(reason=reason)
    except ApplicationError as error:  # it has ended, or has not begun
        workflow.logger.info("%s could not be withdrawn: %s", repair, error)


def _retrieve_result(repair: asyncio.Future[Any]) -> None:
    """Retrieve the result of an ended repair, so that asyncio logs no exception as never
    retrieved."""
    if not repair.cancelled():
        repair.exception()


async def _await_answer(activity: Awaitable[Answer]) -> Answer | None:
    try:
        return await activity
    except ActivityError as error:
        # Only a timeout or a cancel can end them: they are retried after any other failure.
        if is_cancelled_exception(error) or error.retry_state is RetryState.TIMEOUT:
            workflow.logger.info("without an answer: %s", error.cause or error)
            return None
        raise
