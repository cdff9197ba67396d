"""Waiting for a repair of a node that another run of the job's workflow has begun."""

from __future__ import annotations

from dataclasses import dataclass

from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import RawValue
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities.stop import send_heartbeats
from relaunch.messages.jobs import NodeRepairResult
from relaunch.messages.seals import PLAIN_RESULT


@dataclass(frozen=True, slots=True)
class FollowRepairInput:
    node: str
    workflow_id: str
    run_id: str


class RepairActivities:
    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn
    async def follow_repair(self, input: FollowRepairInput) -> NodeRepairResult:
        """Wait until the repair ends, and return its result. A cancel leaves the repair alone."""
        from relaunch.encryption import has_proof  # not for workflows, which import this module

        handle = self._client.get_workflow_handle(
            input.workflow_id, run_id=input.run_id, result_type=RawValue
        )
        async with send_heartbeats():
            try:
                ended: RawValue = await handle.result(follow_runs=False)
                if has_proof(self._client, ended.payload):
                    converter = self._client.data_converter.payload_converter
                    result: NodeRepairResult = converter.from_payload(
                        ended.payload, NodeRepairResult
                    )
                    return result
                reason = PLAIN_RESULT
            except WorkflowFailureError as error:
                reason = str(error.cause or error)
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise
                reason = "the server knows nothing of it any more"
        reason = f"the repair of {input.node} was ended from outside: {reason}"
        return NodeRepairResult(input.node, "ambiguous", reason)
