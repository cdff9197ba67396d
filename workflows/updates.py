"""What messages to workflows share: how updates are refused, when they take effect, and who has
signed a message."""

from __future__ import annotations

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from relaunch.access.orders import SignedText, read_signed

DELAY_S = 0.001
"""Seconds of the timer: it only has to be one, because a sleep of 0 s starts none."""


async def await_next_task() -> None:
    """Wait for the next workflow task. Each update does that before it changes anything.

    If the task before an update ordered nothing, a worker that has not cached the workflow gets the
    results of that task and the update in one activation (sdk-core takes the empty task for a
    heartbeat, `find_end_index_of_next_wft_seq` in its history_update.rs), and the SDK runs updates
    before results. The update has left an event when that history is replayed, so the results then
    come in an activation before it. A workflow that did anything at once would do it in another
    order: every further task of it would fail as nondeterministic.
    """
    await workflow.sleep(DELAY_S, summary="until the update takes effect")


def reject(reason: str) -> ApplicationError:
    """Return the error that refuses an update with a sentence."""
    return ApplicationError(reason, type="BadInput", non_retryable=True)


def read_signed_message(name: str, message: Any) -> SignedText | None:
    """Return what the sender of a signal or an update says to have signed; None: nothing."""
    info = workflow.info()
    receiver = f"{info.workflow_id}/{info.first_execution_run_id}"
    return read_signed(info.namespace, receiver, name, message)
