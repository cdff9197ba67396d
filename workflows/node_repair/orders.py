"""Activities of a repair on its node, with their timeouts and retries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    TimeoutError,
    TimeoutType,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from relaunch.access.orders import SignedText
    from relaunch.activities.examine import (
        DIAGNOSE_TIMEOUTS,
        NodeActivities,
        NodeInput,
        NodeTerms,
        RepairOrder,
    )
    from relaunch.evidence.findings import Verdict
    from relaunch.evidence.health import Health
    from relaunch.fields import duration
    from relaunch.messages.jobs import NodeRepairInput
    from relaunch.messages.nodes import ExamineNodesInput
    from relaunch.repair.state import (
        NoAnswer,
        Order,
        OrderExpired,
        PowerCycleNode,
        ProbeNode,
        RebootNode,
        RepairEvent,
        ResetGpus,
        RunDiag,
    )
    from relaunch.workflows.training_job.commands import BEAT, DETACH, KEEP_TRYING

REBOOT_ORDER_TIMEOUT = timedelta(minutes=1)
"""For the node to take the order; whether it was carried out is probed afterwards."""
EXAMINATION_OVERHEAD = timedelta(seconds=90)
"""The time of an examination besides DCGM: three probes of twenty seconds, and what is between
them."""
ONCE = RetryPolicy(maximum_attempts=1)
"""For orders that act on the node: if the answer is lost, the node is probed before anything is
ordered again."""
PICKUP_TIMEOUT = timedelta(seconds=15)
"""For a worker to take such an order. One that waits longer, because no worker runs, is not given:
the node may be in use by then, repairs paused, or the deadline over."""
ORDERS = ResetGpus | RebootNode | PowerCycleNode
MAX_NAMED_GPUS = 4


async def read_terms(repair: NodeRepairInput) -> NodeTerms:
    """Read what the fleet file says about repairs of the node."""
    return await workflow.execute_activity_method(
        NodeActivities.read_terms,
        NodeInput(repair.fleet, repair.node),
        start_to_close_timeout=timedelta(seconds=10),
        retry_policy=KEEP_TRYING,
        summary=f"read the repair settings of {repair.node}",
    )


async def send_order(
    repair: NodeRepairInput,
    id: str,
    decision: ProbeNode | RunDiag | Order,
    approved_by: str = "",
    signed: SignedText | None = None,
) -> RepairEvent:
    """Have a worker carry out the decision on the node, and return what came of it.

    Raises:
        ActivityError: A probe or diagnosis failed for good. An order that acts on the node returns
            NoAnswer instead: it may have been carried out; or OrderExpired: it was not.
    """
    order, summary = _write_order(repair, id, decision)
    acts = isinstance(decision, ORDERS)
    if acts:
        approval = approved_by if approved_by != repair.by else ""
        by = f"{repair.by}, approved by {approval}" if approval else repair.by
        order = replace(order, reason=order.reason or decision.reason, by=by, signed=signed)
    try:
        return await workflow.execute_activity_method(
            NodeActivities.order_repair,
            order,
            start_to_close_timeout=order.within + timedelta(minutes=1),
            schedule_to_start_timeout=PICKUP_TIMEOUT if acts else None,
            heartbeat_timeout=BEAT,
            retry_policy=ONCE if acts else KEEP_TRYING,
            summary=summary,
        )
    except ActivityError as error:
        if not acts:
            raise
        if _was_not_taken(error):
            late = f"no worker took the order within {duration(PICKUP_TIMEOUT)}"
            return OrderExpired(f"{late}, so it was not given")
        return NoAnswer(f"the worker was lost while it sent the order: {error.cause or error}")


def _was_not_taken(error: ActivityError) -> bool:
    cause = error.cause
    return isinstance(cause, TimeoutError) and cause.type is TimeoutType.SCHEDULE_TO_START


def _write_order(
    repair: NodeRepairInput, id: str, decision: ProbeNode | RunDiag | Order
) -> tuple[RepairOrder, str]:
    """Return the order for the activity, and its summary for the web UI."""
    fleet, node = repair.fleet, repair.node
    match decision:
        case ProbeNode(timeout=timeout):
            since = decision.kernel_since
            order = RepairOrder(fleet, node, id, "probe", timeout, kernel_since=since)
            return order, f"probe {node}"
        case RunDiag(timeout=timeout, level=level):
            order = RepairOrder(fleet, node, id, "diagnose", timeout, level=level)
            return order, f"dcgmi diag -r {level} on {node}"
        case ResetGpus(timeout=timeout, boot_id=boot, gpus=gpus):
            order = RepairOrder(fleet, node, id, "reset-gpus", timeout, boot, gpus)
            return order, f"reset {', '.join(gpus[:MAX_NAMED_GPUS]) or 'all GPUs'} on {node}"
        case RebootNode(boot_id=boot, reason=reason):
            timeout = REBOOT_ORDER_TIMEOUT
            order = RepairOrder(fleet, node, id, "reboot", timeout, boot, reason=reason)
            return order, f"reboot {node}"
        case PowerCycleNode(timeout=timeout):
            order = RepairOrder(fleet, node, id, "power-cycle", timeout)
            return order, f"power-cycle {node}"


async def examine_node(
    repair: NodeRepairInput, id: str, kernel_from: datetime | None, has_gpus: bool
) -> Health | None:
    """Examine the node as `nodes check` does; return None if it was cancelled before there was a
    result."""
    now, level = workflow.now(), repair.level
    left = max(timedelta(seconds=1), repair.deadline - now)
    diag_timeout = DIAGNOSE_TIMEOUTS.get(level, timedelta(0))
    timeout = min(diag_timeout + EXAMINATION_OVERHEAD, left)
    diag = f" (dcgmi diag -r {level})" if level and has_gpus else ""
    request = ExamineNodesInput(
        fleet=repair.fleet,
        nodes=(repair.node,),
        id=id,
        level=level,
        within=timeout,
        kernel_since=None if kernel_from is None else now - kernel_from,
        catalog=repair.catalog,
    )
    try:
        (examined,) = await workflow.execute_activity_method(
            NodeActivities.check_nodes,
            request,
            start_to_close_timeout=timeout + timedelta(minutes=1),
            schedule_to_close_timeout=left + timedelta(minutes=1),
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            cancellation_type=DETACH,
            summary=f"examine {repair.node}{diag}",
        )
    except (ActivityError, asyncio.CancelledError) as error:
        if is_cancelled_exception(error):
            return None
        cause = getattr(error, "cause", None) or error
        return Health(Verdict.UNKNOWN, f"the examination of {repair.node} failed: {cause}")
    return examined.health
