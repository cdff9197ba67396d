"""Reads the cluster's events, which EventBridge puts into an SQS queue.

Events only prompt a look at ECS; they are not trusted as facts. Their format is Amazon's:
docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs_task_events.html. Task events carry no tags,
so the job of a task is in `startedBy`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relaunch.backends.base import TaskEvent, TaskMessage, Unreachable
from relaunch.backends.ecs.aws import Aws, AwsError
from relaunch.backends.ecs.tasks import STOPPED, is_ours, token_of

AT_ONCE = 10
"""Messages per call; the maximum of SQS."""
WAIT = 20
"""Seconds of long polling, the maximum of SQS: an empty queue costs three calls a minute."""
TASK_CHANGE = "ECS Task State Change"

log = logging.getLogger("relaunch.ecs")


def read_event(body: str) -> TaskEvent | None:
    """Parse a message; None if it is an event of another kind.

    Raises:
        ValueError: The message is not an EventBridge event.
    """
    try:
        event = json.loads(body)
        if event["source"] != "aws.ecs" or event["detail-type"] != TASK_CHANGE:
            return None
        detail: Mapping[str, Any] = event["detail"]
        token = token_of(str(detail.get("startedBy") or ""))
        # Until the task has stopped, ECS reports no exit code. Tasks that relaunch stopped itself
        # need no event.
        ended = detail.get("lastStatus") == STOPPED and not is_ours(
            str(detail.get("stoppedReason") or "")
        )
        return TaskEvent(str(detail["taskArn"]), int(detail["version"]), token, ended)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no event of EventBridge: {type(error).__name__} {error}") from None


class SqsEvents:
    """Reader of the event queue of one fleet's cluster."""

    def __init__(self, aws: Aws, url: str, fleet: str, hint: Callable[[str], bool]) -> None:
        self._aws = aws
        self._url = url
        self._fleet = fleet
        self._hint = hint

    async def receive(self) -> Sequence[TaskMessage]:
        try:
            answer = await self._aws.call(
                "sqs",
                "ReceiveMessage",
                QueueUrl=self._url,
                MaxNumberOfMessages=AT_ONCE,
                WaitTimeSeconds=WAIT,
            )
        except AwsError as error:
            raise Unreachable(self._fleet, error.reason) from error
        found = []
        for message in answer.get("Messages", ()):
            try:
                found.append(
                    TaskMessage(message["ReceiptHandle"], read_event(message.get("Body") or ""))
                )
            except ValueError as error:
                # SQS delivers it again, and after some attempts moves it to the dead-letter queue,
                # where it can be inspected.
                log.warning(
                    "a message in the queue of fleet %s cannot be read: %s", self._fleet, error
                )
        return found

    async def delete(self, messages: Sequence[TaskMessage]) -> None:
        entries = [
            {"Id": str(index), "ReceiptHandle": message.receipt}
            for index, message in enumerate(messages)
        ]
        for first in range(0, len(entries), AT_ONCE):
            try:
                await self._aws.call(
                    "sqs",
                    "DeleteMessageBatch",
                    QueueUrl=self._url,
                    Entries=entries[first : first + AT_ONCE],
                )
            except AwsError as error:
                raise Unreachable(self._fleet, error.reason) from error

    def hint(self, what: str) -> bool:
        return self._hint(what)
