"""Starts a job. It imports only what it needs, because the time for imports delays the start of
ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli.client import GENERATION, PHASE, TASK_TIMEOUT, WORKFLOW, whoami
from relaunch.cli.sign import sign_start
from relaunch.cli.terminal import check_name
from relaunch.config import ConfigError
from relaunch.job.state import JobState
from relaunch.messages.ids import WORKFLOW_ID_PREFIX
from relaunch.messages.jobs import RetryMessage, TrainingJobInput
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy
from relaunch.temporal import find_running_up
from relaunch.text import printable


async def submit(
    client: Client,
    task_queue: str,
    spec: JobSpec,
    policy: Policy,
    reason: str = "",
    previous: JobState | None = None,
    renew_budgets: bool = False,
    avoid: tuple[str, ...] = (),
    has_fleet: bool = False,
    hides_causes: bool = False,
) -> WorkflowHandle[Any, Any]:
    """Start a job.

    Args:
        has_fleet: Whether the caller knows that a worker has the job's fleet, or will have it.
        hides_causes: Whether search attributes show no cause, strategy and nodes.

    Raises:
        ConfigError: A job of that name is running, or the workers have no fleet of that name.
    """
    if not has_fleet:
        from relaunch.cli.fleets import check_fleet

        await check_fleet(client, task_queue, spec.fleet)
    argument = TrainingJobInput(
        spec=spec,
        policy=policy,
        submitted_by=whoami(),
        reason=reason,
        previous=previous,
        renew_budgets=renew_budgets,
        avoid_nodes=avoid,
        hides_causes=hides_causes,
    )
    id_ = f"{WORKFLOW_ID_PREFIX}{spec.name}"
    proof = await sign_start(client, id_, WORKFLOW, argument.describe_submission())
    try:
        return await client.start_workflow(
            WORKFLOW,
            replace(argument, proof=proof),
            id=id_,
            task_queue=task_queue,
            task_timeout=TASK_TIMEOUT,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=f"{spec.name}: {spec.size}"[:200],
            static_details=f"    {printable(' '.join(spec.command), 2000)}"
            + f"\n\nfleet {spec.fleet}, submitted by {argument.submitted_by}",
            search_attributes=TypedSearchAttributes(
                [SearchAttributePair(PHASE, "QUEUED"), SearchAttributePair(GENERATION, 0)]
            ),
            memo={"phase": "QUEUED", "reason": reason or "submitted", "next": "nodes are acquired"},
        )
    except WorkflowAlreadyStartedError:
        from relaunch.cli.jobs import load_job

        now = await load_job(client, spec.name)
        generation = f", generation {now.state.generation}" if now.state else ""
        raise ConfigError(
            f"job {spec.name} is already running ({now.phase}{generation}): choose another name, "
            f"or cancel it first with `relaunch cancel {spec.name}`"
        ) from None
    except RPCError as error:
        if (
            error.status == RPCStatusCode.INVALID_ARGUMENT
            and "search attribute" in error.message.lower()
        ):
            raise ConfigError(
                f"namespace {client.namespace} lacks relaunch's search attributes: start a worker "
                "first (`relaunch up` or `relaunch-worker`), which adds them"
            ) from None
        raise


def set_working_folder(spec: JobSpec, client: Client, state: Path) -> JobSpec:
    """Return a job without `workdir` with the present folder, if its nodes are on this machine."""
    here = find_running_up(state)
    if (
        spec.workdir is None
        and here is not None
        and client.service_client.config.target_host == here.address
        and here.backends.get(spec.fleet) == "local"
    ):
        return spec.model_copy(update={"workdir": str(Path.cwd())})
    return spec


async def retry(
    client: Client,
    task_queue: str,
    name: str,
    reason: str,
    avoid: tuple[str, ...],
    renew_budgets: bool,
    hides_causes: bool = False,
) -> str:
    """Relaunch a running job, or start a closed one again from its last state.

    Return a sentence that says which of the two was done.
    """
    from relaunch.cli.jobs import UNCONFIRMED, describe, load_job, signal_open

    avoid = tuple(check_name("node", node) for node in avoid)
    described = await describe(client, name)
    now = await load_job(client, name) if avoid else None
    if now is not None and now.state is not None:
        from relaunch.cli.fleets import check_nodes

        await check_nodes(client, now.state.spec.fleet, avoid)
    if described.status == WorkflowExecutionStatus.RUNNING:
        is_taken = await signal_open(
            client,
            name,
            "force_retry",
            RetryMessage(
                reason=reason, by=whoami(), avoid_nodes=avoid, renew_budgets=renew_budgets
            ),
        )
        end = "" if is_taken else UNCONFIRMED
        return f"job {name} is running: requested a new generation{end}"
    now = now or await load_job(client, name)
    if now.state is None:
        raise ConfigError(
            f"job {name} ended as {now.status} without a result and no worker answers for it: "
            "start one (`relaunch up` or `relaunch-worker`), or submit the job again"
        )
    await submit(
        client,
        task_queue,
        now.state.spec,
        now.state.policy,
        reason,
        now.state,
        renew_budgets,
        avoid,
        has_fleet=True,  # it had one
        hides_causes=hides_causes,
    )
    return f"job {name} had ended ({now.phase}): restarted with its history and budgets"
