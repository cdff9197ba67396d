"""Starts a job. Imports nothing that this can do without: what is imported here passes before any rank starts."""

from __future__ import annotations

import getpass
import os
import socket
from datetime import timedelta
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.common import (
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from recovery.model import JobState
from recovery.policy import Policy
from recovery.spec import JobSpec
from settings import Mistake
from workflows.messages import WORKFLOW_ID_PREFIX, TrainingJobInput

WORKFLOW = "TrainingJob"
TASK_TIMEOUT = timedelta(seconds=3)
"""After which another worker takes over from one that died with a workflow task in its hands; the default is 10 s."""
PHASE = SearchAttributeKey.for_keyword("Phase")
GENERATION = SearchAttributeKey.for_int("Generation")


def whoami() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"{os.getuid()}@{socket.gethostname()}"


async def submit(
    client: Client,
    task_queue: str,
    spec: JobSpec,
    policy: Policy,
    because: str = "",
    previous: JobState | None = None,
    renew_budgets: bool = False,
    avoid: tuple[str, ...] = (),
) -> WorkflowHandle[Any, Any]:
    """Start a job.

    Raises:
        Mistake: a job of that name runs already.
    """
    argument = TrainingJobInput(
        spec=spec,
        policy=policy,
        submitted_by=whoami(),
        because=because,
        previous=previous,
        renew_budgets=renew_budgets,
        avoid_nodes=avoid,
    )
    try:
        return await client.start_workflow(
            WORKFLOW,
            argument,
            id=f"{WORKFLOW_ID_PREFIX}{spec.name}",
            task_queue=task_queue,
            task_timeout=TASK_TIMEOUT,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=f"{spec.name}: {spec.size}"[:200],
            static_details=f"    {' '.join(spec.command)}"[:2000] + f"\n\nfleet {spec.fleet}, submitted by {argument.submitted_by}",
            search_attributes=TypedSearchAttributes([SearchAttributePair(PHASE, "QUEUED"), SearchAttributePair(GENERATION, 0)]),
            memo={"phase": "QUEUED", "because": because or "submitted", "next": "nodes are acquired"},
        )
    except WorkflowAlreadyStartedError:
        from console.jobs import look

        now = await look(client, spec.name)
        generation = f", generation {now.state.generation}" if now.state else ""
        raise Mistake(
            f"job {spec.name} runs already ({now.phase}{generation}): expected another name, or `starter.py cancel {spec.name}` before"
        ) from None
    except RPCError as error:
        if error.status == RPCStatusCode.INVALID_ARGUMENT and "search attribute" in error.message.lower():
            raise Mistake(
                f"namespace {client.namespace} does not know relaunch's search attributes: start a worker first, it adds them"
            ) from None
        raise
