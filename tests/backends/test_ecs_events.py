"""The cluster's events from a queue: what is read of them, and how others are handled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relaunch.backends.base import TaskEvent, Unreachable
from relaunch.backends.ecs.aws import Aws
from relaunch.backends.ecs.events import SqsEvents, read_event
from relaunch.backends.ecs.tasks import build_started_by, stop_reason
from relaunch.generation import Token
from tests.doubles.aws import SERVER_ERROR, AwsDouble
from tests.doubles.aws_caller import Caller

TOKEN = Token("default", "llama", 1000, 3)
ARN = "arn:aws:ecs:us-east-1:123456789012:task/training/0a1b"


def body(kind: str = "ECS Task State Change", source: str = "aws.ecs", **detail: Any) -> str:
    given = {
        "taskArn": ARN,
        "version": 4,
        "lastStatus": "STOPPED",
        "desiredStatus": "STOPPED",
        "startedBy": build_started_by(TOKEN),
        **detail,
    }
    return json.dumps({"version": "0", "source": source, "detail-type": kind, "detail": given})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            body(stoppedReason="Essential container in task exited"),
            TaskEvent(ARN, 4, TOKEN, ended=True),
            id="it ended",
        ),
        pytest.param(
            body(stoppedReason="by hand", stopCode="UserInitiated"),
            TaskEvent(ARN, 4, TOKEN, ended=True),
            id="by a person",
        ),
        pytest.param(
            body(stoppedReason=stop_reason(TOKEN)),
            TaskEvent(ARN, 4, TOKEN, ended=False),
            id="by us",
        ),
        pytest.param(
            body(lastStatus="RUNNING"),
            TaskEvent(ARN, 4, TOKEN, ended=False),
            id="it has not stopped",
        ),
        pytest.param(
            body(startedBy="ecs-svc/1"), TaskEvent(ARN, 4, None, ended=True), id="not relaunch's"
        ),
        pytest.param(body("ECS Container Instance State Change"), None, id="of an instance"),
        pytest.param(body(source="aws.ec2"), None, id="of another service"),
    ],
)
def test_s1_9_an_event_is_read_for_what_it_hints_at(text: str, expected: TaskEvent | None) -> None:
    assert read_event(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        '{"source": "aws.ecs", "detail-type": "ECS Task State Change", "detail": {}}',
    ],
)
def test_s1_9_what_is_no_event_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|it is no event"):
        read_event(text)


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsDouble]:
    with AwsDouble(tmp_path_factory.mktemp("aws")) as double:
        yield double


async def test_s1_9_messages_stay_until_deleted_also_unreadable_ones(
    aws: AwsDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("relaunch.backends.ecs.events.WAIT", 1)
    url, sqs = aws.create_queue("hints"), Caller(aws).sqs
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "0"})
    for text in (body(), "poison"):
        sqs.send_message(QueueUrl=url, MessageBody=text)
    queue = SqsEvents(Aws(None), url, "default", lambda arn: arn == ARN)
    found = []
    while not found:
        found = list(await queue.receive())
    assert [message.event for message in found] == [TaskEvent(ARN, 4, TOKEN, ended=True)]
    await queue.delete(found)
    left = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", [])
    assert [message["Body"] for message in left] == ["poison"]
    assert queue.hint(ARN) and not queue.hint("another")
    aws.faults.add("ReceiveMessage", SERVER_ERROR)
    with pytest.raises(Unreachable):
        await queue.receive()
