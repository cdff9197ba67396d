"""Sends answers to jobs and repairs that wait for a person's decision.

Every refusal raises `ConfigError` with a one-sentence message and changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError
from temporalio.client import (
    Client,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import QueryRejectCondition
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli.client import whoami
from relaunch.cli.jobs import QUERY_TIMEOUT, handle_of, load_job
from relaunch.cli.repairs import repair_id
from relaunch.cli.sign import sign_message
from relaunch.config import ConfigError
from relaunch.job.state import JobState, Phase
from relaunch.messages.jobs import AnswerMessage, explain
from relaunch.repair.explain import kind_of_order
from relaunch.repair.state import RepairState, Stage
from relaunch.spec.policy import RepairKind
from relaunch.text import join_names

NO_WORKER = (
    "no worker answers: start one (`relaunch up` or `relaunch-worker`), then repeat the command"
)


async def for_job(
    client: Client,
    job: str,
    decision: str,
    reason: str,
    within: str | None = None,
    node: str | None = None,
) -> str:
    """Answer a job's question; return a sentence with the result.

    With `node`, answer the request that the job leave that node. A repair that the job waits for is
    answered by `for_node`: an approval that a person has typed for another launch must not reboot a
    node, because the job has gone on to a repair meanwhile.

    Raises:
        ConfigError: The answer is invalid, or no question is pending.
    """
    message = _message(decision, reason, within, node)
    state = (await load_job(client, job)).state
    if state is None:
        raise ConfigError(f"job {job}: {NO_WORKER}")
    if (
        state.phase is Phase.REPAIRING
        and state.tries
        and decision in ("approve", "deny")
        and not message.node
    ):
        raise ConfigError(await _name_repairs(client, job, state))
    result = await _update(client, handle_of(client, job).id, message)
    if result.refusal:
        raise ConfigError(result.refusal)
    return f"job {job}: {result.text}"


async def _name_repairs(client: Client, job: str, state: JobState) -> str:
    """Return, as a sentence, which repairs a job waits for and the commands that answer them."""
    fleet, nodes = state.spec.fleet, state.tries[-1].nodes
    asked = await asyncio.gather(
        *(_find_asked(client, repair_id(fleet, node)) for node in nodes), return_exceptions=True
    )
    commands = []
    for node, kind in zip(nodes, asked, strict=True):
        if isinstance(kind, BaseException):
            if not isinstance(kind, ConfigError):
                raise kind
        elif kind:
            approve = f"relaunch nodes answer {node} approve --{kind} --fleet {fleet} --reason …"
            commands.append(f"`{approve}` or `deny`")
    waits = f"job {job}: it asks nothing; it waits for the repair of {join_names(nodes)}"
    if not commands:
        return f"{waits}, which asks nothing now either"
    return f"{waits}, which is answered by its node: {'; '.join(commands)}"


async def _find_asked(client: Client, id_: str) -> RepairKind | Literal[""]:
    """Return what a repair asks a person to approve; an empty string if it asks nothing.

    Raises:
        ConfigError: No worker answers for it.
    """
    handle = client.get_workflow_handle(id_)
    try:
        # A repair that has not begun its strategy answers null, which the converter takes as well.
        state: RepairState | None = await handle.query(
            "state",
            result_type=RepairState,
            rpc_timeout=QUERY_TIMEOUT,
            reject_condition=QueryRejectCondition.NOT_OPEN,
        )
    except WorkflowQueryRejectedError:
        return ""  # it has ended, whatever it asked at that time
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return ""
        if error.status in (
            RPCStatusCode.DEADLINE_EXCEEDED,
            RPCStatusCode.CANCELLED,
            RPCStatusCode.FAILED_PRECONDITION,
        ):
            raise ConfigError(f"{id_}: {NO_WORKER}") from None
        raise
    except WorkflowQueryFailedError as error:
        raise ConfigError(f"{id_}: it cannot say what it asks: {error}") from None
    if state is None or state.outcome is not None or state.cancel_reason:
        return ""
    if state.stage is not Stage.ASKING:
        return ""
    return kind_of_order(state)


async def for_node(
    client: Client,
    fleet: str,
    node: str,
    decision: str,
    reason: str,
    approved: RepairKind | None = None,
) -> None:
    """Approve or deny what the repair of one node asks, no matter who ordered the repair.

    Args:
        client: The client of the server.
        fleet: The fleet of the node.
        node: Its name.
        decision: `approve` or `deny`.
        reason: For the history.
        approved: What is approved: refused if the repair asks something else by now.

    Raises:
        ConfigError: No repair of the node is under way, or it asks nothing, or something else.
    """
    id_ = repair_id(fleet, node)
    message = _message(decision, reason, None)
    if decision == "approve":
        # A repair of 0.1.0 is sent no name and checks none, so it is compared here as well.
        asked = await _find_asked(client, id_)
        if approved is None:
            asks = f"it asks for --{asked} now" if asked else "it asks nothing now"
            raise ConfigError(
                f"node {node}: say what is approved (--reset-gpus, --reboot, --power-cycle); {asks}"
            )
        if asked and asked != approved:
            raise ConfigError(
                f"node {node}: it asks for --{asked} now, and what was approved is --{approved}"
            )
        message = message.model_copy(update={"repair": approved})
    result = await _update(client, id_, message)
    if result.is_missing:
        raise ConfigError(f"node {node}: no repair {id_} is running")
    if result.refusal:
        raise ConfigError(f"node {node}: {id_}: {result.refusal}")


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
        return UpdateResult(refusal=NO_WORKER)
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
