"""Sends a test message through the channels of a fleet, from a worker, and shows what came of it.

It is the worker that sends notices, that reads their secrets and that has the way to their
receivers. So a message from this machine would prove nothing.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from temporalio.client import ActivityFailureError, Client
from temporalio.common import RetryPolicy
from temporalio.exceptions import TimeoutError as ActivityTimeout

from relaunch.cli.client import whoami
from relaunch.cli.terminal import check_name
from relaunch.config import ConfigError
from relaunch.messages.notices import ChannelResult, SendTestInput, SendTestResult

START_TIMEOUT = timedelta(seconds=10)
"""For a worker to take it up: milliseconds, but a worker that has just started needs some
seconds."""
SEND_TIMEOUT = timedelta(seconds=50)
"""For all channels at once: each has 10 s, and may wait 30 s for messages before it."""


async def send(client: Client, task_queue: str, fleet: str) -> SendTestResult:
    """Have a worker send a test message to every channel of a fleet.

    Raises:
        ConfigError: no worker answers, it has no such fleet, or the fleet has no channel.
    """
    check_name("fleet", fleet)
    try:
        sent: SendTestResult = await client.execute_activity(
            "send_test",
            SendTestInput(fleet, whoami()),
            id=f"send_test/{fleet}/{uuid.uuid4().hex}",
            task_queue=task_queue,
            result_type=SendTestResult,
            schedule_to_start_timeout=START_TIMEOUT,
            start_to_close_timeout=SEND_TIMEOUT,
            schedule_to_close_timeout=START_TIMEOUT + SEND_TIMEOUT,
            retry_policy=RetryPolicy(maximum_attempts=1),  # a second one would be another message
            summary=f"a test message to the channels of fleet {fleet}, for {whoami()}"[:200],
        )
    except ActivityFailureError as error:
        if isinstance(error.cause, ActivityTimeout):
            raise ConfigError(
                f"no worker answers for fleet {fleet}, so no test message is known to be sent:"
                " start one (`relaunch up` or `relaunch-worker`), then repeat the command"
            ) from None
        reason = getattr(error.cause, "message", "") or error.cause or error
        raise ConfigError(f"no test message was sent: {reason}") from None
    if not sent.results:
        raise ConfigError(
            f"fleet {fleet} has no channel, so no test message was sent: list some below `notify:`"
            " in its fleet file on the worker's machine (docs/notifications.md)"
        )
    return sent


def lines(fleet: str, sent: SendTestResult) -> list[str]:
    width = max(len(one.channel) for one in sent.results)
    return [
        *(f"{one.channel:<{width}}  {_describe(one)}" for one in sent.results),
        f"sent by worker {sent.worker} for fleet {fleet}; another worker may read other secrets",
    ]


def view(fleet: str, sent: SendTestResult) -> dict[str, Any]:
    return {
        "fleet": fleet,
        "worker": sent.worker,
        "channels": [
            {"name": one.channel, "outcome": one.outcome, "reason": one.reason}
            for one in sent.results
        ],
    }


def _describe(result: ChannelResult) -> str:
    if result.outcome == "done":
        return "delivered"
    if result.outcome == "ambiguous":
        return f"FAILED, and may have arrived all the same: {result.reason}"
    return f"FAILED: {result.reason}"
