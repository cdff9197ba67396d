"""Sends answers to jobs and repairs that wait for a person's decision.

Every refusal raises `ConfigError` with a one-sentence message and changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pydantic import ValidationError
from temporalio.client import (
    Client,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli.client import whoami
from relaunch.cli.jobs import QUERY_TIMEOUT, handle_of, load_job
from relaunch.cli.repairs import repair_id
from relaunch.cli.sign import sign_message
from relaunch.config import ConfigError
from relaunch.job.state import JobState, Phase
from relaunch.messages.jobs import AnswerMessage, explain


async def for_job(
    client: Client,
    job: str,
    decision: str,
    reason: str,
    within: str | None = None,
    node: str | None = None,
) -> str:
    """Answer a job's question, or the repair it waits for; return a sentence with the result.

    With `node`, answer the request that the job leave that node.

    Raises:
        ConfigError: The answer is invalid, or no question is pending.
    """
    message = _message(decision, reason, within, node)
    state = (await load_job(client, job)).state
    if state is None:
        raise ConfigError(
            f"job {job}: no worker answers: start one (`relaunch up` or `relaunch-worker`), then "
            "repeat the command"
        )
    if (
        state.phase is Phase.REPAIRING
        and state.tries
        and decision in ("approve", "deny")
        and not message.node
    ):
        return await _answer_repairs(client, job, state, message)
    result = await _update(client, handle_of(client, job).id, message)
    if result.refusal:
        raise ConfigError(result.refusal)
    return f"job {job}: {result.text}"


async def _answer_repairs(client: Client, job: str, state: JobState, message: AnswerMessage) -> str:
    nodes = state.tries[-1].nodes
    outcomes = await asyncio.gather(
        *(_answer_repair(client, repair_id(state.spec.fleet, node), message) for node in nodes)
    )
    answered = [node for node, why in zip(nodes, outcomes, strict=True) if not why]
    if not answered:
        raise ConfigError(f"job {job}: {next(why for why in outcomes if why)}")
    return f"{message.decision}: sent to the repair of {', '.join(answered)}"


async def for_node(client: Client, fleet: str, node: str, decision: str, reason: str) -> None:
    """Approve or deny what the repair of one node asks, no matter who ordered the repair.

    Raises:
        ConfigError: No repair of the node is under way, or it asks nothing.
    """
    if why := await _answer_repair(
        client, repair_id(fleet, node), _message(decision, reason, None)
    ):
        raise ConfigError(f"node {node}: {why}")


async def _answer_repair(client: Client, id_: str, message: AnswerMessage) -> str:
    """Return why the answer was refused, or an empty string if it was accepted."""
    result = await _update(client, id_, message)
    return (
        f"no repair {id_} is running"
        if result.is_missing
        else f"{id_}: {result.refusal}"
        if result.refusal
        else ""
    )


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of sending an answer."""

    text: str = ""
    refusal: str = ""
    is_missing: bool = False
    """True if no workflow with that ID is running."""


async def _update(client: Client, id_: str, message: AnswerMessage) -> UpdateResult:
    signed = await sign_message(client, id_, "answer", message)
    try:
        return UpdateResult(
            text=str(
                await client.get_workflow_handle(id_).execute_update(
                    "answer", signed, rpc_timeout=QUERY_TIMEOUT
                )
            )
        )
    except WorkflowUpdateFailedError as error:
        return UpdateResult(
            refusal=str(getattr(error.cause, "message", "") or error.cause or error)
        )
    except WorkflowUpdateRPCTimeoutOrCancelledError:
        return UpdateResult(
            refusal="no worker answers: start one (`relaunch up` or `relaunch-worker`), "
            "then repeat the command"
        )
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return UpdateResult(refusal="it has ended", is_missing=True)


def _message(
    decision: str, reason: str, within: str | None, node: str | None = None
) -> AnswerMessage:
    if decision not in ("approve", "deny", "snooze", "take-over"):
        raise ConfigError(
            f"unknown answer {decision!r}: expected approve, deny, snooze or take-over"
        )
    if within is not None and decision != "snooze":
        raise ConfigError(
            f"--within {within} sets how long a snooze lasts: use it with snooze, not with "
            f"{decision}"
        )
    if node is not None and decision not in ("approve", "deny"):
        raise ConfigError(
            f"--node {node} answers a request to drain that node: expected approve (leave it now) "
            f"or deny (leave it at the deadline), not {decision}"
        )
    said = {
        "decision": decision,
        "reason": reason,
        "by": whoami(),
        **({"within": within} if within is not None else {}),
    }
    said |= {"node": node} if node is not None else {}
    try:
        return AnswerMessage.model_validate(said)
    except ValidationError as error:
        raise ConfigError(f"--{explain(error)}") from None
