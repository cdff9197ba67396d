"""The double of AWS keeps to what AWS documents of ECS's API: the rules that relaunch leans on.

It is no proof of AWS.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError

from tests.doubles.aws import LOST, RESET, THROTTLE, AwsDouble, failure
from tests.doubles.aws_caller import Caller, logs_in, new_family, refused, register, until


def test_a_client_token_starts_one_task_however_often_it_is_sent(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    aws.script("train", after=None)
    aws.register("train", [{"name": "trainer", "image": "any"}])
    first = caller.run(node, clientToken="once")["tasks"]
    assert [one["taskArn"] for one in first] == [
        one["taskArn"] for one in caller.run(node, clientToken="once")["tasks"]
    ]

    with pytest.raises(ClientError) as error:
        caller.run(node, clientToken="once", startedBy="another")
    assert refused(error) == "ConflictException"
    assert error.value.response["resourceIds"] == [first[0]["taskArn"]]

    caller.ecs.stop_task(cluster="training", task=first[0]["taskArn"])
    caller.until(first[0]["taskArn"], "STOPPED")
    assert set(caller.run(node, clientToken="once")["tasks"][0]) == {
        "taskArn",
        "lastStatus",
        "desiredStatus",
    }
    aws.advance(3601)
    assert caller.run(node, clientToken="once")["tasks"][0]["taskArn"] != first[0]["taskArn"], (
        "it forgets with the task"
    )


def test_a_lost_answer_left_a_task_and_a_reset_connection_none(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    family = register(aws)
    aws.script(family, after=None)
    for kind, started in ((RESET, 0), (LOST, 1)):
        aws.faults.add("RunTask", kind)
        with pytest.raises(ConnectionClosedError):
            caller.run(node, family, clientToken="a")
        assert len(aws.tasks(family)) == started
    caller.run(node, family, clientToken="a")
    assert len(aws.tasks(family)) == 1


def test_throttling_is_an_error_and_a_failure_is_an_answer(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    family = register(aws)
    aws.faults.add("ecs.RunTask", THROTTLE)
    aws.faults.add(
        "DescribeInstances", THROTTLE, when=lambda request: request["InstanceId.1"] == node
    )
    aws.faults.add("RunTask", failure("RESOURCE:GPU"))
    with pytest.raises(ClientError) as error:
        caller.run(node, family)
    assert refused(error) == "ThrottlingException"
    with pytest.raises(ClientError) as error:
        caller.ec2.describe_instances(InstanceIds=[node])
    assert refused(error) == "RequestLimitExceeded"
    answer = caller.run(node, family)
    assert (answer["tasks"], [one["reason"] for one in answer["failures"]]) == (
        [],
        ["RESOURCE:GPU"],
    )
    assert aws.tasks(family) == ()


def test_limits_are_those_of_the_documents(aws: AwsDouble, caller: Caller, node: str) -> None:
    family = register(aws)
    arn = aws.instance(node).arn
    ten = [{"name": f"a{number}", "value": "v", "targetId": arn} for number in range(10)]
    caller.ecs.put_attributes(cluster="training", attributes=ten)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("InvalidParameterException", "describe_tasks", {"tasks": ["t"] * 101}),
        (
            "InvalidParameterException",
            "update_container_instances_state",
            {"containerInstances": [arn] * 11, "status": "DRAINING"},
        ),
        ("InvalidParameterException", "run_task", {"taskDefinition": family, "count": 11}),
        (
            "InvalidParameterException",
            "run_task",
            {"taskDefinition": family, "startedBy": "x" * 129},
        ),
        (
            "InvalidParameterException",
            "run_task",
            {"taskDefinition": family, "startedBy": "with.dot"},
        ),
        (
            "InvalidParameterException",
            "run_task",
            {"taskDefinition": family, "clientToken": "x" * 65},
        ),
        (
            "InvalidParameterException",
            "run_task",
            {"taskDefinition": family, "overrides": {"containerOverrides": [{"name": "other"}]}},
        ),
        (
            "InvalidParameterException",
            "run_task",
            {"taskDefinition": family, "overrides": {"cpu": "9" * 8192}},
        ),
        ("InvalidParameterException", "list_tasks", {"startedBy": "x", "desiredStatus": "STOPPED"}),
        (
            "InvalidParameterException",
            "put_attributes",
            {"attributes": [{"name": "a", "value": " v", "targetId": arn}]},
        ),
        (
            "AttributeLimitExceededException",
            "put_attributes",
            {"attributes": [{"name": "eleventh", "value": "v", "targetId": arn}]},
        ),
        ("ClientException", "run_task", {"taskDefinition": "missing"}),
        ("ClusterNotFoundException", "list_tasks", {"cluster": "missing"}),
    ]
    for code, operation, request in cases:
        with pytest.raises(ClientError) as error:
            getattr(caller.ecs, operation)(**{"cluster": "training"} | request)
        assert refused(error) == code, (operation, request)


def test_pages_hold_a_hundred(aws: AwsDouble, caller: Caller, node: str) -> None:
    family = register(aws)
    aws.script(family, after=None, never_starts=True)
    for _ in range(11):
        caller.run(node, family, count=10)
    first = caller.ecs.list_tasks(cluster="training", family=family)
    second = caller.ecs.list_tasks(cluster="training", family=family, nextToken=first["nextToken"])
    assert (len(first["taskArns"]), len(second["taskArns"]), "nextToken" in second) == (
        100,
        10,
        False,
    )


def test_placement_is_by_instance_attribute_gpus_agent_and_state(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    family = register(aws, resourceRequirements=[{"type": "GPU", "value": "2"}])
    aws.script(family, after=None)
    aws.add_instance(
        gpus=0
    )  # of a cluster in which every instance drains, RunTask says that it has none
    arn = aws.instance(node).arn

    def placed(also: str = "") -> str:
        answer = caller.run(node, family, also=also)
        own = [one["reason"] for one in answer["failures"] if one["arn"] == arn]
        return (
            own[0]
            if own
            else str(answer["tasks"][0]["lastStatus"])
            if answer["tasks"]
            else "not considered"
        )

    unsatisfied = "MemberOf placement constraint unsatisfied."
    assert placed(" and attribute:relaunch.job == 1.4") == unsatisfied
    caller.mark(arn, "relaunch.job", "1.4")
    caller.mark(arn, "relaunch.quarantine", "x")
    assert placed(" and attribute:relaunch.job == 1.3") == unsatisfied
    assert placed(" and not(attribute:relaunch.quarantine exists)") == unsatisfied
    assert placed(" and attribute:relaunch.job in [1.4, 1.5]") == "PENDING"
    assert placed() == "RESOURCE:GPU"
    assert caller.node(arn)["remainingResources"][-1]["stringSetValue"] == []
    aws.instance(node).disconnect()
    assert placed() == "AGENT"
    aws.instance(node).connect()
    caller.ecs.update_container_instances_state(
        cluster="training", containerInstances=[arn], status="DRAINING"
    )
    assert placed() == "not considered"


def test_an_unreadable_expression_is_refused(caller: Caller, node: str, aws: AwsDouble) -> None:
    family = register(aws)
    for also in (
        " and",
        " and (attribute:a exists",
        " and attribute:a === b",
        " nor agentConnected == true",
    ):
        with pytest.raises(ClientError) as error:
            caller.run(node, family, also=also)
        assert refused(error) == "InvalidParameterException"


def test_a_task_that_stopped_an_hour_ago_is_missing(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    family = register(aws, "true")
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    caller.until(arn, "STOPPED")
    aws.expire(arn)
    answer = caller.ecs.describe_tasks(cluster="training", tasks=[arn])
    assert (answer["tasks"], answer["failures"]) == ([], [{"arn": arn, "reason": "MISSING"}])
    assert (
        arn
        not in caller.ecs.list_tasks(cluster="training", desiredStatus="STOPPED", family=family)[
            "taskArns"
        ]
    )


def test_a_task_is_not_seen_at_once_where_the_api_lags(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    family = register(aws)
    aws.script(family, after=None)
    aws.ecs.lag = 60.0
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    aws.ecs.lag = 0.0
    assert caller.ecs.describe_tasks(cluster="training", tasks=[arn])["failures"] == [
        {"arn": arn, "reason": "MISSING"}
    ]
    assert caller.ecs.list_tasks(cluster="training", family=family)["taskArns"] == []
    aws.advance(61)
    assert caller.ecs.list_tasks(cluster="training", family=family)["taskArns"] == [arn]


def test_reports_have_the_names_of_the_api(aws: AwsDouble, caller: Caller, node: str) -> None:
    shapes = caller.ecs.meta.service_model
    family = register(aws, "true", resourceRequirements=[{"type": "GPU", "value": "1"}])
    caller.until(caller.run(node, family)["tasks"][0]["taskArn"], "STOPPED")
    task = aws.tasks(family)[0]
    instance = aws.ecs.answer(
        "DescribeContainerInstances",
        {"cluster": "training", "containerInstances": [aws.instance(node).arn]},
    )
    definition = aws.ecs.answer("DescribeTaskDefinition", {"taskDefinition": family})[
        "taskDefinition"
    ]
    rows = [("Task", task), ("Container", task["containers"][0]), ("TaskDefinition", definition)]
    rows += [("ContainerInstance", one) for one in instance["containerInstances"]]
    for shape, told in rows:
        assert set(told) <= set(shapes.shape_for(shape).members), shape
    assert {task["stopCode"]} <= set(shapes.shape_for("TaskStopCode").enum)


def test_a_script_says_how_tasks_go(aws: AwsDouble, caller: Caller, node: str) -> None:
    family = register(aws, logConfiguration=logs_in("scripted"))
    aws.script(
        family,
        exit_code=137,
        reason="OutOfMemoryError: Container killed due to memory usage",
        stdout=["a line"],
        times=1,
    )
    aws.script(
        family,
        stop_code="TaskFailedToStart",
        reason="CannotPullContainerError: no such image",
        times=1,
    )
    aws.script(
        family,
        exit_code=None,
        stop_code="SpotInterruption",
        stopped_reason="Your Spot Task was interrupted.",
        times=1,
    )
    said = []
    for _ in range(3):
        ended = caller.until(caller.run(node, family)["tasks"][0]["taskArn"], "STOPPED")
        container = ended["containers"][0]
        said.append((ended["stopCode"], container.get("exitCode"), container.get("reason")))
    assert said == [
        ("EssentialContainerExited", 137, "OutOfMemoryError: Container killed due to memory usage"),
        ("TaskFailedToStart", None, "CannotPullContainerError: no such image"),
        ("SpotInterruption", None, None),
    ]


def test_events_are_those_of_eventbridge_lost_doubled_or_late(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    queue = caller.sqs.create_queue(QueueName=new_family())["QueueUrl"]
    aws.events_to(queue)
    family = register(aws)
    aws.script(family, exit_code=0, after=0.0)
    got: list[dict[str, Any]] = []

    def ended(arn: str) -> list[dict[str, Any]]:
        for message in caller.sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get(
            "Messages", []
        ):
            caller.sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
            got.append(json.loads(message["Body"]))
        return [
            one
            for one in got
            if one["resources"] == [arn] and one["detail"]["lastStatus"] == "STOPPED"
        ]

    arn = caller.run(node, family, startedBy="relaunch/x")["tasks"][0]["taskArn"]
    event = until(lambda: ended(arn))[0]
    assert (event["source"], event["detail-type"], event["detail"]["startedBy"]) == (
        "aws.ecs",
        "ECS Task State Change",
        "relaunch/x",
    )
    assert isinstance(event["detail"]["stoppedAt"], str) and "tags" not in event["detail"]
    of_nodes = [
        one["detail"] for one in got if one["detail-type"] == "ECS Container Instance State Change"
    ]
    assert {one["status"] for one in of_nodes if one["ec2InstanceId"] == node} == {"ACTIVE"}, (
        "each placement is one, and says nothing else"
    )
    until(lambda: not aws.pids(arn))

    aws.events.double, before = 1, len(got)
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    until(lambda: ended(arn))
    ids = [one["id"] for one in got[before:]]
    assert len(ids) == len(set(ids)) + 1

    aws.events.drop, before = 100, len(got)
    caller.until(caller.run(node, family)["tasks"][0]["taskArn"], "STOPPED")
    aws.events.drop, aws.events.reorder = 0, 1
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    until(lambda: ended(arn))
    versions = [one["detail"]["version"] for one in got[before:] if one["resources"] == [arn]]
    assert (
        sorted(versions) == [1, 2, 3, 4]
        and len({tuple(one["resources"]) for one in got[before:]}) == 2
    )
    assert got[before]["resources"] != [arn], (
        "the first, of the task, came after the one of its node"
    )
