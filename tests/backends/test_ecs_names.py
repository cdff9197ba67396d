"""What is said to ECS and read from it, by name and shape; and how many calls a large gang costs.

AWS is a table here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from relaunch.activities.observations import read_observation
from relaunch.backends.ecs import fence
from relaunch.backends.ecs.aws import Bucket, Kind, _classify_error
from relaunch.backends.ecs.backend import jobs_of
from relaunch.backends.ecs.cluster import Cluster
from relaunch.backends.ecs.fence import Fence, find_removable
from relaunch.backends.ecs.stream import ending
from relaunch.backends.ecs.tasks import (
    Definition,
    build_started_by,
    client_token,
    job_attribute,
    read_definition,
    read_instance,
    read_task,
    run_task,
    stop_reason,
    the_container,
    token_of,
)
from relaunch.evidence.observations import EcsStop, RankExited
from relaunch.generation import Token

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
TOKEN = Token("default", "llama", 1763000000000, 4)
CLUSTER_ARN = "arn:aws:ecs:us-east-1:123456789012"


# --- names


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (TOKEN, "relaunch/default/llama/1763000000000/4"),
        (Token("prod.a1b2c", "my_job-7", 1, 2), "relaunch/prod_da1b2c/my__job-7/1/2"),
        (Token("n", "_d.__", 1, 2), "relaunch/n/__d_d____/1/2"),
    ],
)
def test_a_generation_is_named_in_started_by_and_read_back(token: Token, expected: str) -> None:
    assert build_started_by(token) == expected
    assert token_of(expected) == token


@pytest.mark.parametrize(
    "other",
    ["", "ecs-svc/123", "relaunch-node/probe/1", "relaunch/a/b/1", "relaunch/a/b/1/x", "alice"],
)
def test_what_others_started_is_no_rank(other: str) -> None:
    assert token_of(other) is None


def test_a_name_too_long_for_started_by_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="startedBy, of which ECS takes 128"):
        build_started_by(Token("n" * 63, "j" * 63, 1763000000000, 1))
    with pytest.raises(ValueError, match=r"'a b'.* startedBy"):
        build_started_by(Token("a b", "j", 1, 1))


def test_an_effect_has_one_name_and_another_effect_another() -> None:
    assert client_token("start", "a", "b") == client_token("start", "a", "b")
    assert client_token("start", "ab") != client_token("start", "a", "b")
    assert len(client_token("start")) == 64  # ECS takes 64 characters


def test_a_rank_is_pinned_to_its_node_and_to_its_generation() -> None:
    attribute = job_attribute("default", "llama")
    request = run_task(
        "training",
        "i-0abc",
        task_definition="train:3",
        container="trainer",
        command=("python", "train.py"),
        environment={"B": "2", "A": "1"},
        gpus=8,
        started_by=build_started_by(TOKEN),
        client_token="t" * 64,
        only_where=(fence.only_for(attribute, TOKEN),),
    )
    assert request["placementConstraints"] == [
        {
            "type": "memberOf",
            "expression": (
                f"ec2InstanceId == i-0abc and attribute:{attribute} == prepared.1763000000000.4"
            ),
        }
    ]
    assert request["overrides"] == {
        "containerOverrides": [
            {
                "name": "trainer",
                "command": ["python", "train.py"],
                "environment": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "resourceRequirements": [{"type": "GPU", "value": "8"}],
            }
        ]
    }
    assert "enableExecuteCommand" not in request and "tags" not in request


# --- the fence


def test_the_word_of_a_fence_is_read_back_and_foreign_ones_not() -> None:
    for state in ("prepared", "stopped"):
        word = Fence.from_token(TOKEN, state)  # type: ignore[arg-type]
        assert Fence.read(str(word)) == word
    for other in (None, "", "prepared.1", "prepared.1.2.3", "running.1.2"):
        assert Fence.read(other) is None


def test_attributes_of_jobs_that_left_go_with_stopped_ones_first() -> None:
    names = [job_attribute("default", f"job{number}") for number in range(8)]
    own, *others = names
    attributes = {name: f"prepared.{number}.1" for number, name in enumerate(others, 1)} | {
        "ecs.os-type": "linux",
        "team": "ml",
    }
    assert find_removable({others[0]: "stopped.1.1"}, own, ()) == ()
    assert find_removable(attributes, own, ()) == (others[0],)
    assert find_removable(attributes, own, (others[0], others[1])) == (others[2],)
    assert find_removable({**attributes, others[5]: "stopped.9.9"}, own, ()) == (others[5],)
    assert find_removable(attributes, own, others) == ()
    assert find_removable({**attributes, own: "prepared.9.9"}, own, ()) == (others[0],)


# --- definitions


def definition(*essential: str, named: tuple[str, ...] = ()) -> Definition:
    return Definition("train:1", "host", (*essential, *named), essential, {})


def test_the_training_container_is_named_or_the_only_essential() -> None:
    assert the_container(definition("trainer", named=("log",)), None) == "trainer"
    assert the_container(definition("trainer", "other"), "other") == "other"
    with pytest.raises(
        ValueError,
        match="has not one essential container \\(trainer, other\\): name the one that trains",
    ):
        the_container(definition("trainer", "other"), None)
    with pytest.raises(ValueError, match="container 'x': it has trainer, log"):
        the_container(definition("trainer", named=("log",)), "x")


def test_a_definition_gives_its_output_and_what_is_essential() -> None:
    options = {"awslogs-group": "/train", "awslogs-stream-prefix": "job"}
    read = read_definition(
        {
            "taskDefinitionArn": "arn:train:1",
            "containerDefinitions": [
                {
                    "name": "trainer",
                    "logConfiguration": {"logDriver": "awslogs", "options": options},
                },
                {
                    "name": "side",
                    "essential": False,
                    "logConfiguration": {"logDriver": "json-file"},
                },
            ],
        }
    )
    assert (read.network_mode, read.containers, read.essential) == (
        "bridge",
        ("trainer", "side"),
        ("trainer",),
    )
    assert read.logs["trainer"].stream("trainer", "abc") == "job/trainer/abc"
    assert "side" not in read.logs


# --- how tasks end


def raw(**changes: Any) -> dict[str, Any]:
    override = {"name": "trainer", "environment": [{"name": "RANK", "value": "3"}]}
    return {
        "taskArn": f"{CLUSTER_ARN}:task/training/abc",
        "containerInstanceArn": f"{CLUSTER_ARN}:container-instance/training/n1",
        "startedBy": build_started_by(TOKEN),
        "lastStatus": "STOPPED",
        "desiredStatus": "STOPPED",
        "version": 5,
        "stopCode": "EssentialContainerExited",
        "stoppedReason": "Essential container in task exited",
        "containers": [{"name": "trainer", "exitCode": 0}],
        "overrides": {"containerOverrides": [override]},
        "stoppedAt": "2026-11-21T12:00:00.000Z",
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({}, 0, "Essential container in task exited"),
        (
            {"containers": [{"name": "side", "exitCode": 0}, {"name": "trainer", "exitCode": 1}]},
            1,
            None,
        ),
        (
            {
                "containers": [
                    {"name": "trainer", "exitCode": 137, "reason": "OutOfMemoryError: killed"}
                ]
            },
            137,
            "OutOfMemoryError: killed",
        ),
        ({"containers": [{"name": "trainer", "exitCode": 139}]}, 139, None),
        ({"containers": [{"name": "trainer"}]}, None, None),
        ({"containers": []}, None, None),
        (
            {
                "stopCode": "SpotInterruption",
                "stoppedReason": "Your Spot Task was interrupted.",
                "containers": [{"name": "trainer"}],
            },
            None,
            "Spot",
        ),
        # A trainer that ends well on SIGTERM has not finished.
        (
            {"stopCode": "SpotInterruption", "stoppedReason": "Your Spot Task was interrupted."},
            None,
            "Spot",
        ),
        (
            {
                "stopCode": "TaskFailedToStart",
                "containers": [{"name": "trainer", "reason": "CannotPullContainerError: x"}],
            },
            None,
            "CannotPull",
        ),
        (
            {
                "stopCode": "UserInitiated",
                "stoppedReason": "Host EC2 (instance i-0abc) terminated.",
            },
            None,
            "Host EC2",
        ),
    ],
)
def test_s1_1_the_end_of_a_task_is_reported_with_words_of_ecs(
    changes: dict[str, Any], code: int | None, reason: str | None
) -> None:
    told = ending(read_task(raw(**changes)))
    assert (told["kind"], told["rank"], told["exit_code"], told["signal"], told["stopped"]) == (
        "RankExited",
        3,
        code,
        None,
        False,
    )
    seen = read_observation("n1", told, NOW)
    assert isinstance(seen, RankExited) and seen.failed is (code != 0)
    assert isinstance(seen.ecs, EcsStop) and seen.ecs.stop_code == changes.get(
        "stopCode", "EssentialContainerExited"
    )
    assert reason is None or reason in seen.ecs.reason


def test_s1_1_a_task_stopped_by_a_user_says_so_and_so_does_ours() -> None:
    by_user = ending(
        read_task(
            raw(
                stopCode="UserInitiated",
                stoppedReason="Task stopped by user",
                containers=[{"name": "trainer"}],
            )
        )
    )
    reason = by_user.pop("reason")
    assert by_user == {"kind": "StoppedByUser", "by": "ECS"}
    assert "task abc of rank 3" in reason and reason.endswith(": Task stopped by user")
    by_us = ending(read_task(raw(stopCode="UserInitiated", stoppedReason=stop_reason(TOKEN))))
    assert (by_us["kind"], by_us["stopped"], by_us["exit_code"]) == ("RankExited", True, None)


def test_a_repeated_run_task_is_readable_without_what_it_omits() -> None:
    task = read_task({"taskArn": "a/b", "lastStatus": "STOPPED", "desiredStatus": "STOPPED"})
    assert (task.short, task.stopped, task.rank, task.stopped_at, task.containers) == (
        "b",
        True,
        None,
        None,
        (),
    )


def test_an_instance_is_read_with_its_gpus_and_attributes() -> None:
    read = read_instance(
        {
            "containerInstanceArn": "arn:n1",
            "ec2InstanceId": "i-0abc",
            "status": "ACTIVE",
            "agentConnected": True,
            "attributes": [
                {"name": "ecs.capability.x"},
                {"name": "relaunch.quarantine", "value": "true"},
            ],
            "registeredResources": [
                {"name": "CPU", "integerValue": 4},
                {"name": "GPU", "stringSetValue": ["GPU-1", "GPU-2"]},
            ],
            "healthStatus": {"overallStatus": "IMPAIRED"},
        }
    )
    assert (read.gpus, read.health, dict(read.attributes)) == (
        ("GPU-1", "GPU-2"),
        "IMPAIRED",
        {"ecs.capability.x": "", "relaunch.quarantine": "true"},
    )


def test_tasks_are_listed_by_job_and_generation() -> None:
    other = Token("default", "bert", 7, 1)
    running = {"lastStatus": "RUNNING", "desiredStatus": "RUNNING"}
    tasks = (
        read_task(raw(**running)),
        read_task(raw(startedBy=build_started_by(Token("default", "llama", TOKEN.submission, 3)))),
        read_task(raw(startedBy=build_started_by(other))),
        read_task(raw(startedBy="alice", **running)),
    )
    bert, llama = jobs_of(
        tasks,
        {job_attribute("default", "llama"): str(Fence.from_token(TOKEN, "prepared")), "team": "ml"},
    )
    assert (bert["job"], bert["prepared"], bert["stopped"]) == ("bert", None, None)
    assert [(one["generation"], one["state"]) for one in bert["generations"]] == [(1, "ended")]
    assert (llama["job"], llama["prepared"], llama["stopped"]) == (
        "llama",
        [TOKEN.submission, 4],
        None,
    )
    assert [(one["generation"], one["ranks"]) for one in llama["generations"]] == [
        (3, [{"rank": 3, "pid": None, "alive": False}]),
        (4, [{"rank": 3, "pid": None, "alive": True}]),
    ]


# --- what errors mean


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("ThrottlingException", 400, Kind.THROTTLED),
        ("Throttling", 400, Kind.THROTTLED),
        ("RequestLimitExceeded", 503, Kind.THROTTLED),
        ("ServerException", 500, Kind.UNAVAILABLE),
        ("", 502, Kind.UNAVAILABLE),
        ("AccessDeniedException", 400, Kind.DENIED),
        ("UnauthorizedOperation", 403, Kind.DENIED),
        ("ExpiredTokenException", 400, Kind.DENIED),
        ("ClientException", 400, Kind.REFUSED),
        ("ClusterNotFoundException", 400, Kind.REFUSED),
    ],
)
def test_an_error_of_aws_says_whether_the_call_was_applied(
    code: str, status: int, kind: Kind
) -> None:
    error = _classify_error(
        "ECS RunTask",
        {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": {"HTTPStatusCode": status}},
    )
    assert (error.kind, error.code) == (kind, code)
    assert error.reason == ("ECS RunTask: " + (f"{code}: why" if code else "why"))


async def test_a_bucket_lets_a_burst_through_and_then_so_many_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("relaunch.backends.ecs.aws.time.monotonic", lambda: 1024.0)
    monkeypatch.setattr("relaunch.backends.ecs.aws.asyncio.sleep", sleep)
    bucket = Bucket(8.0, 4)
    for _ in range(7):
        await bucket.take()
    assert waited == [0.125, 0.25, 0.375]


# --- how much is asked


class Table:
    """Stands where `Aws` does: `count` instances, each with one task that runs."""

    def __init__(self, count: int) -> None:
        self.calls: Counter[str] = Counter()
        self.sizes: list[int] = []
        self.ids = [f"i-{number:08x}" for number in range(count)]

    def task(self, number: int) -> dict[str, Any]:
        arns = {"taskArn": f"task/{number}", "containerInstanceArn": f"instance/{number}"}
        return raw(**arns, lastStatus="RUNNING", desiredStatus="RUNNING")

    async def call(self, service: str, operation: str, **request: Any) -> Mapping[str, Any]:
        self.calls[operation] += 1
        match operation:
            case "ListContainerInstances":
                asked = [one for one in self.ids if f"'{one}'" in request["filter"]]
                return {
                    "containerInstanceArns": [f"instance/{self.ids.index(one)}" for one in asked]
                }
            case "DescribeContainerInstances":
                self.sizes.append(len(request["containerInstances"]))
                return {
                    "containerInstances": [
                        self._instance(arn) for arn in request["containerInstances"]
                    ]
                }
            case "ListTasks" if "containerInstance" in request:
                number = request["containerInstance"].rpartition("/")[2]
                return {
                    "taskArns": [f"task/{number}"] if request["desiredStatus"] == "RUNNING" else []
                }
            case "ListTasks":
                first = int(request.get("nextToken", 0))
                more = {"nextToken": str(first + 100)} if first + 100 < len(self.ids) else {}
                arns = [
                    f"task/{number}" for number in range(first, min(first + 100, len(self.ids)))
                ]
                return (
                    {"taskArns": arns, **more}
                    if request["desiredStatus"] == "RUNNING"
                    else {"taskArns": []}
                )
            case "DescribeTasks":
                self.sizes.append(len(request["tasks"]))
                return {
                    "tasks": [self.task(int(arn.rpartition("/")[2])) for arn in request["tasks"]]
                }
        raise AssertionError(operation)

    def _instance(self, arn: str) -> dict[str, Any]:
        ec2_id = self.ids[int(arn.rpartition("/")[2])]
        return {
            "containerInstanceArn": arn,
            "ec2InstanceId": ec2_id,
            "status": "ACTIVE",
            "agentConnected": True,
        }


async def test_a_gang_of_800_is_looked_at_with_a_hundred_tasks_a_call() -> None:
    table = Table(800)
    cluster = Cluster(table, "training", 60.0)  # type: ignore[arg-type]
    found = await asyncio.gather(*(cluster.tasks_on(one) for one in table.ids))
    assert [len(tasks) for tasks in found] == [1] * 800
    assert table.calls == {
        "ListContainerInstances": 16,
        "DescribeContainerInstances": 8,
        "ListTasks": 9,
        "DescribeTasks": 8,
    }
    table.calls.clear()
    followers = [cluster.follow(f"task/{number}") for number in range(800)]
    async with asyncio.timeout(60):
        for one in [each.__enter__() for each in followers]:
            while one.looked_at is None:
                await one.wait_for_change()
    assert table.calls == {"DescribeTasks": 8, "DescribeContainerInstances": 8}
    assert max(table.sizes) == 100
    for each in followers:
        each.__exit__(None, None, None)
    await cluster.close()


async def test_one_node_is_asked_for_its_own_tasks_only() -> None:
    table = Table(800)
    cluster = Cluster(table, "training", 60.0)  # type: ignore[arg-type]
    tasks = await cluster.tasks_on(table.ids[7])
    assert [task.arn for task in tasks] == ["task/7"]
    assert table.calls == {
        "ListContainerInstances": 1,
        "DescribeContainerInstances": 1,
        "ListTasks": 2,
        "DescribeTasks": 1,
    }
    await cluster.close()
