"""Examines nodes, and orders repairs of single nodes.

Every refusal raises `ConfigError` with a one-sentence message and changes nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio.client import ActivityFailureError, Client, WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.exceptions import CancelledError, TerminatedError, WorkflowAlreadyStartedError

from relaunch.cli.client import TASK_TIMEOUT, whoami
from relaunch.cli.job_views import age
from relaunch.cli.sign import sign_start
from relaunch.cli.terminal import check_name, make_console, say
from relaunch.config import ConfigError
from relaunch.messages.ids import REPAIR_ID_PREFIX
from relaunch.messages.jobs import NodeRepairInput, NodeRepairResult
from relaunch.messages.nodes import ExamineNodesInput, NodeHealth
from relaunch.pool.state import NodeRecord, NodeStatus
from relaunch.spec.policy import Strategy
from relaunch.text import count_noun, join_names

CHECK_TIMEOUT = {
    0: timedelta(seconds=90),
    1: timedelta(minutes=5),
    2: timedelta(minutes=20),
    3: timedelta(minutes=65),
}
"""Timeout by DCGM level, for a whole fleet examined concurrently: probing takes seconds, DCGM takes
what its level takes."""
REPAIR_TIMEOUT = timedelta(minutes=40)
"""Deadline of a repair that a person orders: a reboot takes up to 25 minutes, plus a probe before
and after it."""


async def check(
    client: Client, task_queue: str, fleet: str, nodes: Sequence[str], level: int
) -> tuple[NodeHealth, ...]:
    """Examine nodes; all nodes of the fleet if none is named.

    A node with ranks is only probed: DCGM needs its GPUs free.

    Raises:
        ConfigError: No worker answers, or it does not know the fleet or a node.
    """
    for node in nodes:
        check_name("node", node)
    within = CHECK_TIMEOUT[level]
    try:
        result: tuple[NodeHealth, ...] = await client.execute_activity(
            "check_nodes",
            ExamineNodesInput(
                check_name("fleet", fleet), tuple(nodes), f"check by {whoami()}", level, within
            ),
            id=f"check_nodes/{fleet}/{uuid.uuid4().hex}",
            task_queue=task_queue,
            result_type=tuple[NodeHealth, ...],
            schedule_to_start_timeout=timedelta(seconds=10),
            start_to_close_timeout=within,
            schedule_to_close_timeout=within + timedelta(seconds=10),
            heartbeat_timeout=timedelta(seconds=10),
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary=f"check {join_names(nodes) or 'all nodes'} of fleet {fleet}",
        )
    except ActivityFailureError as error:
        cause = error.cause
        told = str(getattr(cause, "message", "") or cause or error)
        raise ConfigError(
            told
            if getattr(cause, "type", "") == "BadInput"
            else f"no worker answers for fleet {fleet}: {told}"
        ) from None
    return result


def row(item: NodeHealth, kept: NodeRecord | None = None) -> dict[str, Any]:
    """Return an entry of `nodes check --json`; its keys are a stable interface.

    `kept` is the fleet's record of a node that it gives to no job.
    """
    health = item.health
    free = "free" if kept is None else str(kept.status)
    jobs = [one.split(" ")[1] for one in health.busy if one.startswith("job ")]
    return {
        "name": item.node,
        "state": "silent" if not health.boot_id else "busy" if health.busy else free,
        "job": jobs[0] if jobs else None,
        "gpus": item.gpus,
        "health": str(health.verdict),
        "reason": health.reason,
        "by": (kept.by or None) if kept is not None else None,
        "status": str(NodeStatus.IN_SERVICE if kept is None else kept.status),
        "status_reason": kept.reason if kept is not None else "",
        "history": [
            {"at": one.at.isoformat(), "what": "reboot", "reason": one.reason}
            for one in health.reboots
        ],
        "findings": [
            {"code": one.code, "role": str(one.role), "gpu": one.gpu, "reason": one.reason}
            for one in health.findings
        ],
        "boot_id": health.boot_id,
    }


def print_nodes(rows: Sequence[dict[str, Any]], now: datetime) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NODE", "STATE", "JOB", "GPUS", "HEALTH", "HISTORY", "REASON"):
        table.add_column(
            title,
            no_wrap=title in ("NODE", "STATE", "HEALTH"),
            justify="right" if title == "GPUS" else "left",
        )
    for one in rows:
        reboots = [datetime.fromisoformat(each["at"]) for each in one["history"]]
        history = (
            f"{count_noun(len(reboots), 'reboot')}, the last {age(now - max(reboots))} ago"
            if reboots
            else ""
        )
        by = f" by {one['by']}" if one["by"] else ""
        kept = f"; {one['status']}{by}: {one['status_reason']}" if one["status_reason"] else ""
        table.add_row(
            one["name"],
            one["state"],
            one["job"] or "",
            str(one["gpus"]),
            one["health"],
            history,
            one["reason"] + kept,
        )
    make_console().print(table)


async def repair(
    client: Client,
    task_queue: str,
    fleet: str,
    node: str,
    strategy: Strategy,
    gpus: Sequence[str],
    reason: str,
    level: int,
    power: bool = False,
) -> NodeRepairResult:
    """Order a repair and wait for its end. The user who orders it has thereby approved it.

    Raises:
        ConfigError: A repair of this node is under way, no worker could carry one out, or it ended
            without a result.
    """
    from relaunch.cli.worker_status import list_pollers

    id_ = repair_id(fleet, node)
    if not await list_pollers(client, task_queue):
        # Left for the next worker, it would be carried out whenever one starts.
        raise ConfigError(
            f"node {node}: no worker answers for fleet {fleet}, and nothing was ordered: start one "
            "(`relaunch up` or `relaunch-worker`), then repeat the command"
        )
    order = NodeRepairInput(
        fleet=fleet,
        node=node,
        strategy=strategy,
        reason=reason,
        by=whoami(),
        deadline=datetime.now(UTC) + REPAIR_TIMEOUT,
        gpus=tuple(gpus),
        approved_by=whoami(),
        level=level,
        power=power,
    )
    proof = await sign_start(client, id_, "NodeRepair", order.describe_repair())
    try:
        handle = await client.start_workflow(
            "NodeRepair",
            replace(order, proof=proof),
            id=id_,
            task_queue=task_queue,
            result_type=NodeRepairResult,
            task_timeout=TASK_TIMEOUT,
            static_summary=f"{strategy} of {node}, ordered by {whoami()}",
        )
        result: NodeRepairResult = await handle.result()
    except asyncio.CancelledError:  # ctrl-C
        say(f"if it was ordered, it goes on: to cancel it, see {id_} in the web UI")
        raise
    except WorkflowAlreadyStartedError:
        raise ConfigError(
            f"node {node}: a repair of it is running already ({id_}); see or cancel it in the web "
            "UI"
        ) from None
    except WorkflowFailureError as error:
        ends = {TerminatedError: "was terminated", CancelledError: "was cancelled"}
        how = ends.get(type(error.cause), "failed")
        raise ConfigError(
            f"node {node}: its repair {how} ({error.cause}), and what it had ordered may be "
            f"carried out all the same: see {id_} in the web UI, then "
            f"`relaunch nodes check {node} --fleet {fleet}`"
        ) from None
    return result


def repair_id(fleet: str, node: str) -> str:
    return f"{REPAIR_ID_PREFIX}{check_name('fleet', fleet)}/{check_name('node', node)}"
