"""Receives events from the platform that runs ranks, and has the job check the rank concerned.

It trusts no event and acts on none.

A message is deleted from its queue only after it was passed on: to a watch of this worker, or to
the job's workflow by a signal. A lost message costs only time, because every watch looks by itself
at intervals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from relaunch.backends.base import BackendError, EventQueue, TaskEvent
from relaunch.messages.ids import WORKFLOW_ID_PREFIX

RETRY_DELAYS_S = (1.0, 30.0)
"""Seconds after which a queue that does not answer is asked again: the first and the longest
delay."""
SIGNAL_TIMEOUT_S = 10.0

log = logging.getLogger("relaunch.events")


@dataclass(frozen=True, slots=True)
class Hint:
    what: str
    version: int
    submission: int
    generation: int


class TaskEvents:
    def __init__(self, client: Client, queue: Callable[[], EventQueue | None]) -> None:
        """Create the receiver.

        `queue` returns the current queue, which changes with the fleet's file.
        """
        self._client = client
        self._queue = queue

    async def run(self) -> None:
        """Receive events until cancelled."""
        delay = RETRY_DELAYS_S[0]
        while True:
            if (queue := self._queue()) is None:
                await asyncio.sleep(RETRY_DELAYS_S[1])
                continue
            try:
                messages = await queue.receive()
                # At once: one after the other, ten that time out would take longer than the queue
                # hides them, and come again.
                done = await asyncio.gather(
                    *(self._deliver(message.event, queue) for message in messages)
                )
                delivered = [
                    message for message, is_done in zip(messages, done, strict=True) if is_done
                ]
                if delivered:
                    await queue.delete(delivered)
                delay = RETRY_DELAYS_S[0]
            except BackendError as error:
                log.warning(
                    "the event queue does not answer; tasks are polled at intervals only: %s",
                    error.reason,
                )
                await asyncio.sleep(delay)
                delay = min(RETRY_DELAYS_S[1], 2 * delay)

    async def _deliver(self, event: TaskEvent | None, queue: EventQueue) -> bool:
        """Pass an event on if it concerns a job. Return whether its message can be deleted."""
        if (
            event is None
            or event.token is None
            or not event.ended
            or event.token.namespace != self._client.namespace
        ):
            return True
        if queue.hint(event.what):
            return True
        token = event.token
        hint = Hint(event.what, event.version, token.submission, token.generation)
        handle = self._client.get_workflow_handle(f"{WORKFLOW_ID_PREFIX}{token.job}")
        try:
            async with asyncio.timeout(SIGNAL_TIMEOUT_S):
                await handle.signal("hint", asdict(hint))
        except TimeoutError:
            return False
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return True  # the job has ended
            log.warning(
                "the event of %s could not be sent to job %s and stays in the queue: %s",
                event.what,
                token.job,
                error,
            )
            return False
        return True
