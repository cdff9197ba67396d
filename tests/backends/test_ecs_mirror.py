"""The tables that mirror jobs (S1.8), and messages to people (S1.7).

Against DynamoDB, SNS and SQS as moto plays them.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from relaunch.backends.base import Unreachable
from relaunch.backends.ecs.aws import Aws, AwsError, Kind
from relaunch.backends.ecs.cluster import Cluster as RealCluster
from relaunch.backends.ecs.legacy_rows import (
    JobRow,
    JobStatus,
    LegacyStatus,
    NodeRow,
    RankRow,
    RankStatus,
    TaskRow,
    TaskStatus,
    job_status,
    node_status,
    task_status,
)
from relaunch.backends.ecs.legacy_tables import Mirror, TableMirror
from relaunch.backends.ecs.sns import LONGEST_MESSAGE, LONGEST_SUBJECT, Topic, plain_subject
from relaunch.backends.ecs.tasks import (
    Container,
    Instance,
    Task,
    build_started_by,
    client_token,
    run_task,
)
from relaunch.job.state import Phase, Slot
from relaunch.pool.messages import Claim, Place
from relaunch.pool.state import ClaimRecord, FleetState, NodeRecord, NodeStatus
from relaunch.spec.fleet import EcsTables, FleetNode
from tests.doubles.aws import THROTTLE, AwsDouble
from tests.recovery.builders import new_job

TABLES = {
    "task": "ecs_task_id",
    "job": "job_id",
    "node": "node_name",
    "training_job": "job_id_rank",
    "container_instance": "container_inst_id",
}
NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
NUMBERS = itertools.count(1)
INSTANCE = "arn:aws:ecs:eu-west-1:123456789012:container-instance/training/{}"


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsDouble]:
    with AwsDouble(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@dataclass
class Account:
    double: AwsDouble
    aws: Aws
    tables: EcsTables
    clock: datetime = NOW

    def mirror(self) -> Mirror:
        return Mirror(self.aws, self.tables, lambda: self.clock)

    async def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """By key, with their values as a reader gets them."""
        answer = await self.aws.call("dynamodb", "Scan", TableName=getattr(self.tables, table))
        read = [{name: plain(value) for name, value in item.items()} for item in answer["Items"]]
        return {row[TABLES[table]]: row for row in read}


def plain(value: dict[str, Any]) -> Any:
    ((kind, inner),) = value.items()
    return [plain(one) for one in inner] if kind == "L" else int(inner) if kind == "N" else inner


@pytest.fixture
async def account(double: AwsDouble, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in double.environment().items():
        monkeypatch.setenv(name, value)
    aws = Aws(None)
    number = next(NUMBERS)
    tables = EcsTables(**{name: f"ecs_{name}_{number}" for name in TABLES})
    for name, key in TABLES.items():
        await aws.call(
            "dynamodb",
            "CreateTable",
            TableName=getattr(tables, name),
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
            KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
        )
    yield Account(double, aws, tables)
    await aws.close()


def a_job(seq: int, status: JobStatus = JobStatus.IN_PROGRESS) -> JobRow:
    return JobRow(
        "llama",
        seq,
        status,
        NOW.isoformat(),
        "training",
        2,
        ("n1", "n2"),
        (INSTANCE.format("c1"), INSTANCE.format("c2")),
        ("t1",),
        1,
    )


def a_task(seq: int, status: TaskStatus = TaskStatus.IN_PROGRESS) -> TaskRow:
    definition = "arn:aws:ecs:eu-west-1:123456789012:task-definition/train:11"
    return TaskRow(
        "t1",
        seq,
        status,
        "n1",
        0,
        "llama",
        NOW.isoformat(),
        2,
        "training",
        INSTANCE.format("c1"),
        definition,
        0,
    )


# --- words


@pytest.mark.parametrize(
    ("phase", "generation", "exit_code", "expected"),
    [
        (Phase.QUEUED, 0, None, "PENDING"),
        (Phase.WAITING_FOR_NODES, 0, None, "PENDING"),
        (Phase.LAUNCHING, 1, None, "IN_PROGRESS"),
        (Phase.RUNNING, 1, None, "IN_PROGRESS"),
        (Phase.NODE_LOST, 1, None, "IN_PROGRESS"),
        (Phase.STOPPING, 1, None, "IN_PROGRESS"),
        (Phase.EXAMINING, 1, None, "PENDING_HEALTHCHECK"),
        (Phase.REPAIRING, 1, None, "PENDING_RESTART"),
        (Phase.WAITING_FOR_NODES, 2, None, "PENDING_RESTART"),
        (Phase.WAITING_FOR_PERSON, 2, None, "PENDING_RESTART"),
        (Phase.LAUNCHING, 2, None, "RESTARTING"),
        (Phase.SUCCEEDED, 2, 0, "COMPLETE"),
        (Phase.FAILED, 1, 1, "FAILED"),
        (Phase.FAILED, 1, None, "FAILED"),
        (Phase.FAILED, 1, 137, "FAILED_OTHERS"),
        (Phase.CANCELLED, 1, 143, "USER_STOPPED"),
    ],
)
def test_s1_1_a_phase_is_the_documented_status(
    phase: Phase, generation: int, exit_code: int | None, expected: str
) -> None:
    assert (
        job_status(replace(new_job(), phase=phase, generation=generation, exit_code=exit_code))
        == expected
    )


def test_every_phase_has_a_status_and_terminated_means_by_a_user() -> None:
    for phase in Phase:
        assert job_status(replace(new_job(), phase=phase, generation=3)) in JobStatus
    assert (
        job_status(replace(new_job(), phase=Phase.RUNNING), terminated=True)
        is JobStatus.USER_STOPPED
    )
    assert (
        job_status(replace(new_job(), phase=Phase.SUCCEEDED), terminated=True) is JobStatus.COMPLETE
    )


@pytest.mark.parametrize(
    ("last_status", "exit_code", "by_request", "expected"),
    [
        ("RUNNING", None, False, "IN_PROGRESS"),
        ("DEPROVISIONING", 1, False, "IN_PROGRESS"),
        ("STOPPED", 0, False, "COMPLETE"),
        ("STOPPED", 0, True, "COMPLETE"),
        ("STOPPED", 1, False, "FAILED"),
        ("STOPPED", None, False, "FAILED"),
        ("STOPPED", 143, True, "TERMINATED"),
        ("STOPPED", None, True, "TERMINATED"),
    ],
)
def test_a_task_without_an_exit_code_is_no_success(
    last_status: str, exit_code: int | None, by_request: bool, expected: str
) -> None:
    assert task_status(last_status, exit_code, by_request) == expected


@pytest.mark.parametrize(
    ("record", "in_use", "expected"),
    [
        ({}, False, "AVAILABLE"),
        ({}, True, "IN_PROGRESS"),
        ({"silent_since": NOW}, True, "UNKNOWN"),
        ({"status": NodeStatus.SUSPECT}, True, "PENDING_HEALTHCHECK"),
        ({"status": NodeStatus.REPAIRING}, False, "PENDING_HEALTHCHECK"),
        (
            {"status": NodeStatus.REPAIRING, "repair_acts": True, "silent_since": NOW},
            False,
            "REBOOTING",
        ),
        ({"repair": "repair/gpus/n1/r"}, True, "PENDING_HEALTHCHECK"),
        ({"repair": "repair/gpus/n1/r", "repair_acts": True}, True, "REBOOTING"),
        ({"status": NodeStatus.QUARANTINED}, False, "FAILED"),
        ({"status": NodeStatus.QUARANTINED, "repair_acts": True}, False, "REBOOTING"),
        ({"is_removed": True, "repair_acts": True}, True, "FAILED"),
    ],
)
def test_a_node_that_does_not_answer_is_not_available(
    record: dict[str, Any], in_use: bool, expected: str
) -> None:
    assert (
        node_status(NodeRecord(FleetNode(name="n1", address="i-0123abcd"), **record), in_use)
        == expected
    )


# --- rows


async def test_s1_8_rows_have_the_documented_attributes_and_formats(account: Account) -> None:
    mirror = account.mirror()
    assert await mirror.job(a_job(7)) and await mirror.task(a_task(7))
    assert await mirror.node(
        NodeRow("n1", 7, LegacyStatus.AVAILABLE, "training", INSTANCE.format("c1"), "10.0.0.1")
    )
    common = {
        "relaunch_seq": 7,
        "created_at": NOW.isoformat(),
        "updated_at": NOW.isoformat(),
        "cluster_name": "training",
    }
    assert (await account.rows("job"))["llama"] == {
        "job_id": "llama",
        "job_timestamp": NOW.isoformat(),
        "num_nodes": 2,
        "assigned_nodes": ["n1", "n2"],
        "submitted_container_inst_ids": ["c1", "c2"],
        "submitted_ecs_task_ids": ["t1"],
        "retry": "1",
        "job_status": "IN_PROGRESS",
        **common,
    }
    assert (await account.rows("task"))["t1"] == {
        "ecs_task_id": "t1",
        "node_name": "n1",
        "node_index_in_job": 0,
        "job_id": "llama",
        "job_timestamp": NOW.isoformat(),
        "job_num_nodes": 2,
        "task_def_arn": "arn:aws:ecs:eu-west-1:123456789012:task-definition/train:11",
        "task_def_name": "train",
        "task_def_revision": "11",
        "container_inst_id": "c1",
        "container_instance_arn": INSTANCE.format("c1"),
        "retry": "0",
        "task_status": "IN_PROGRESS",
        **common,
    }
    assert (await account.rows("node"))["n1"] == {
        "node_name": "n1",
        "container_instance_id": "c1",
        "container_instance_arn": INSTANCE.format("c1"),
        "node_status": "AVAILABLE",
        "ip": "10.0.0.1",
        **common,
    }


async def test_s1_8_writes_that_come_late_or_again_leave_the_newest(account: Account) -> None:
    statuses = [
        JobStatus.IN_PROGRESS,
        JobStatus.PENDING_HEALTHCHECK,
        JobStatus.PENDING_RESTART,
        JobStatus.RESTARTING,
        JobStatus.COMPLETE,
    ]
    writes = [a_job(seq, status) for seq, status in enumerate(statuses, start=1)] * 2
    mirror = account.mirror()
    for seed in range(3):
        random.Random(seed).shuffle(writes)
        for write in writes:
            await mirror.job(replace(write, job_id=f"job-{seed}"))
    rows = await account.rows("job")
    assert [
        (rows[f"job-{seed}"]["job_status"], rows[f"job-{seed}"]["relaunch_seq"])
        for seed in range(3)
    ] == [("COMPLETE", 5)] * 3


async def test_a_write_without_a_change_says_so_and_keeps_its_time(
    account: Account,
) -> None:
    mirror = account.mirror()
    assert [await mirror.job(a_job(seq)) for seq in (5, 5, 4)] == [True, False, False]
    account.clock = NOW + timedelta(minutes=1)
    assert await mirror.job(a_job(6))
    row = (await account.rows("job"))["llama"]
    assert (row["created_at"], row["updated_at"]) == (NOW.isoformat(), account.clock.isoformat())


async def test_of_one_age_the_end_of_a_task_wins_and_stays(account: Account) -> None:
    mirror = account.mirror()
    assert await mirror.task(a_task(5))
    assert await mirror.task(a_task(5, TaskStatus.FAILED))
    assert not await mirror.task(a_task(5))
    assert not await mirror.task(a_task(5, TaskStatus.COMPLETE))
    assert not await mirror.task(a_task(4, TaskStatus.COMPLETE))
    assert (await account.rows("task"))["t1"]["task_status"] == "FAILED"


async def test_a_row_of_another_author_is_adopted_with_unknown_columns(
    account: Account,
) -> None:
    item = {
        "node_name": {"S": "n1"},
        "ibdev": {"S": "mlx5_0"},
        "ip": {"S": "10.0.0.9"},
        "node_status": {"S": "IN_PROGRESS"},
    }
    await account.aws.call("dynamodb", "PutItem", TableName=account.tables.node, Item=item)
    assert await account.mirror().node(
        NodeRow("n1", 7, LegacyStatus.FAILED, "training", None, None)
    )
    row = (await account.rows("node"))["n1"]
    assert (row["ibdev"], row["ip"], row["node_status"]) == ("mlx5_0", "10.0.0.9", "FAILED")


async def test_a_table_that_is_not_named_is_not_written(account: Account) -> None:
    before = account.double.calls["UpdateItem"]
    assert not await Mirror(account.aws, EcsTables(job=account.tables.job)).task(a_task(1))
    assert account.double.calls["UpdateItem"] == before


async def test_what_dynamodb_refuses_otherwise_is_an_error(account: Account) -> None:
    mirror = Mirror(account.aws, EcsTables(job="no-such-table"))
    with pytest.raises(AwsError) as caught:
        await mirror.job(a_job(1))
    assert caught.value.code == "ResourceNotFoundException"


# --- a fleet


@dataclass
class Cluster:
    """What ECS says, as a test has it."""

    tasks: dict[tuple[str, str], Task] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def has(
        self,
        ec2_id: str,
        by: str,
        last_status: str = "RUNNING",
        exit_code: int | None = None,
        reason: str = "",
    ) -> Task:
        arn = f"arn:aws:ecs:eu-west-1:123456789012:task/training/{by.rpartition('/')[2]}-{ec2_id}"
        instance = INSTANCE.format(f"c-{ec2_id}")
        containers = (Container("trainer", exit_code, ""),)
        task = Task(
            arn,
            instance,
            by,
            last_status,
            last_status,
            1,
            None,
            reason,
            containers,
            None,
            None,
            None,
            "train:3",
        )
        self.tasks[ec2_id, by] = task
        return task

    async def instance(self, ec2_id: str, max_age: float = 0.0) -> Instance:
        if ec2_id in self.unknown:
            raise LookupError(ec2_id)
        return Instance(INSTANCE.format(f"c-{ec2_id}"), ec2_id, "ACTIVE", True, {}, (), 1, "")

    async def task_of(self, ec2_id: str, started_by: str) -> Task | None:
        if ec2_id in self.unknown:
            raise LookupError(ec2_id)
        return self.tasks.get((ec2_id, started_by))


NODES = {name: FleetNode(name=name, address=f"i-0000000{name[1]}") for name in ("n1", "n2")}
JOB = replace(
    new_job(),
    phase=Phase.RUNNING,
    generation=1,
    submitted_at=NOW,
    slots=(Slot("n1", "10.0.0.1"), Slot("n2", "10.0.0.2")),
)
FIRST, SECOND = build_started_by(JOB.token), build_started_by(replace(JOB.token, generation=2))


def mirrored(account: Account, cluster: Cluster) -> TableMirror:
    return TableMirror(
        "gpus",
        "arn:aws:ecs:eu-west-1:123456789012:cluster/training",
        account.mirror(),
        cluster,
        NODES.__getitem__,
    )


async def statuses(account: Account) -> dict[str, str]:
    return {name: row["task_status"] for name, row in (await account.rows("task")).items()}


async def test_s1_8_a_job_is_one_row_and_so_is_each_task_to_its_end(
    account: Account,
) -> None:
    cluster = Cluster()
    mirror = mirrored(account, cluster)
    for node in ("i-00000001", "i-00000002"):
        cluster.has(node, FIRST)
    assert await mirror.job(JOB, 1, False)
    row = (await account.rows("job"))["llama"]
    assert row["submitted_ecs_task_ids"] == ["1-i-00000001", "1-i-00000002"]
    assert (row["job_status"], row["retry"], row["submitted_container_inst_ids"]) == (
        "IN_PROGRESS",
        "0",
        ["c-i-00000001", "c-i-00000002"],
    )
    cluster.has("i-00000001", FIRST, "STOPPED", 1)
    cluster.has("i-00000002", FIRST, "STOPPED", 143, "relaunch: default/llama/1000/1")
    for node in ("i-00000001", "i-00000002"):
        cluster.has(node, SECOND)
    assert await mirror.job(replace(JOB, generation=2), 2, False)
    assert await statuses(account) == {
        "1-i-00000001": "FAILED",
        "1-i-00000002": "TERMINATED",
        "2-i-00000001": "IN_PROGRESS",
        "2-i-00000002": "IN_PROGRESS",
    }
    for node in ("i-00000001", "i-00000002"):
        cluster.has(node, SECOND, "STOPPED", 0)
    assert await mirror.job(
        replace(JOB, generation=2, phase=Phase.SUCCEEDED, exit_code=0), 3, False
    )
    assert sorted((await statuses(account)).values()) == [
        "COMPLETE",
        "COMPLETE",
        "FAILED",
        "TERMINATED",
    ]
    row = (await account.rows("job"))["llama"]
    assert (row["job_status"], row["retry"]) == ("COMPLETE", "1")


async def test_a_later_worker_reports_how_the_last_generation_ended(
    account: Account,
) -> None:
    cluster = Cluster()
    cluster.has("i-00000001", FIRST)
    assert await mirrored(account, cluster).job(JOB, 1, False)
    cluster.has("i-00000001", FIRST, "STOPPED", 1)
    cluster.has("i-00000001", SECOND)
    assert await mirrored(account, cluster).job(replace(JOB, generation=2), 2, False)
    assert await statuses(account) == {"1-i-00000001": "FAILED", "2-i-00000001": "IN_PROGRESS"}


async def test_a_terminated_job_is_shown_until_its_tasks_have_ended(
    account: Account,
) -> None:
    cluster = Cluster()
    mirror = mirrored(account, cluster)
    cluster.has("i-00000001", FIRST)
    assert not await mirror.job(JOB, 9, True)
    cluster.has("i-00000001", FIRST, "STOPPED", 143, "relaunch: default/llama/1000/1")
    assert await mirror.job(JOB, 9, True), "of the same age, and its task has ended since"
    assert await statuses(account) == {"1-i-00000001": "TERMINATED"}
    assert (await account.rows("job"))["llama"]["job_status"] == "USER_STOPPED"


async def test_a_task_that_ecs_has_forgotten_does_not_stay_in_progress(account: Account) -> None:
    cluster = Cluster()
    mirror = mirrored(account, cluster)
    cluster.has("i-00000001", FIRST)
    await mirror.job(JOB, 1, False)
    cluster.tasks.clear()
    await mirror.job(replace(JOB, generation=2, phase=Phase.WAITING_FOR_NODES, slots=()), 2, False)
    assert await statuses(account) == {"1-i-00000001": "TERMINATED"}


async def test_nodes_are_written_on_change_and_lost_machines_keep_ids(
    account: Account,
) -> None:
    cluster = Cluster()
    mirror = mirrored(account, cluster)
    claim = ClaimRecord(Claim("llama", 1000, 1, 1, holds=(Place("n1"),)))
    state = FleetState(
        "gpus", nodes=tuple(NodeRecord(node) for node in NODES.values()), claims=(claim,)
    )
    before = account.double.calls["UpdateItem"]
    await mirror.nodes(state, 1)
    await mirror.nodes(state, 2)
    assert account.double.calls["UpdateItem"] == before + 4, "two tables have nodes"
    cluster.unknown = ("i-00000002",)
    broken = replace(state.nodes[1], status=NodeStatus.QUARANTINED)
    await mirror.nodes(replace(state, nodes=(state.nodes[0], broken)), 3)
    assert account.double.calls["UpdateItem"] == before + 6
    rows = await account.rows("node")
    assert {
        name: (row["node_status"], row["container_instance_id"]) for name, row in rows.items()
    } == {
        "n1": ("IN_PROGRESS", "c-i-00000001"),
        "n2": ("FAILED", "c-i-00000002"),
    }


async def test_s1_8_the_first_release_has_a_row_for_each_rank(account: Account) -> None:
    cluster = Cluster()
    mirror = mirrored(account, cluster)
    nodes = ("i-00000001", "i-00000002")

    async def read_rows() -> dict[str, tuple[str, ...]]:
        columns = ("job_id", "ecs_task_id", "container_inst_id", "retry", "run_time", "status")
        rows = await account.rows("training_job")
        assert all(row["job_status"] == row["status"] for row in rows.values())
        return {key: tuple(row[name] for name in columns) for key, row in rows.items()}

    for node in nodes:
        cluster.has(node, FIRST)
    await mirror.job(JOB, 1, False)
    assert await read_rows() == {
        f"llama_{rank}": ("llama", f"1-{node}", f"c-{node}", "0", "1", "inprogress")
        for rank, node in enumerate(nodes)
    }
    for seq, phase in enumerate((Phase.EXAMINING, Phase.REPAIRING), 2):
        await mirror.job(replace(JOB, phase=phase), seq, False)
        assert {row[-1] for row in (await read_rows()).values()} == {"STOPPED"}
    for node in nodes:
        cluster.has(node, SECOND)
    again = replace(JOB, generation=2)
    await mirror.job(again, 4, False)
    assert (await read_rows())["llama_1"] == (
        "llama",
        "2-i-00000002",
        "c-i-00000002",
        "1",
        "2",
        "inprogress",
    )
    ends = [(Phase.SUCCEEDED, 0, "complete"), (Phase.FAILED, 1, "FAILED")]
    ends += [(Phase.CANCELLED, 130, "Other")]
    for seq, (phase, exit_code, status) in enumerate(ends, 5):
        await mirror.job(replace(again, phase=phase, exit_code=exit_code), seq, False)
        assert {row[-1] for row in (await read_rows()).values()} == {status}
    assert not await account.mirror().rank(
        RankRow("llama", 0, 4, RankStatus.IN_PROGRESS, None, None, 1)
    ), "it is older than the stored row"


async def test_s1_8_the_first_release_has_rows_by_container_instance(account: Account) -> None:
    cluster = Cluster()
    mirror = mirrored(account, cluster)
    state = FleetState("gpus", nodes=tuple(NodeRecord(node) for node in NODES.values()))
    reboots = replace(state.nodes[1], repair="repair/gpus/n2/r", repair_acts=True)
    await mirror.nodes(replace(state, nodes=(state.nodes[0], reboots)), 1)
    rows = await account.rows("container_instance")
    assert {key: (row["node_name"], row["status"]) for key, row in rows.items()} == {
        "c-i-00000001": ("n1", "AVAILABLE"),
        "c-i-00000002": ("n2", "REBOOTING"),
    }
    cluster.unknown = ("i-00000002",)
    gone = replace(state.nodes[1], status=NodeStatus.QUARANTINED)
    await mirror.nodes(replace(state, nodes=(state.nodes[0], gone)), 2)
    assert (await account.rows("container_instance"))["c-i-00000002"]["status"] == "FAILED"


async def test_a_throttled_table_is_unreachable_and_a_repeat_completes(
    account: Account,
) -> None:
    mirror = mirrored(account, Cluster())
    account.double.faults.add("UpdateItem", THROTTLE)
    with pytest.raises(Unreachable, match="the tables were not written"):
        await mirror.job(JOB, 1, False)
    assert await mirror.job(JOB, 1, False)
    assert set(await account.rows("job")) == {"llama"}


async def test_tasks_and_container_instances_are_found_in_the_cluster(
    account: Account,
) -> None:
    ec2_id = account.double.add_instance(gpus=0)
    account.double.register("train", [{"name": "trainer", "image": "any", "command": ["false"]}])
    real = RealCluster(account.aws, account.double.cluster, 10.0)
    node = FleetNode(name="n1", address=ec2_id)
    mirror = TableMirror(
        "gpus", account.double.cluster, account.mirror(), real, {"n1": node}.__getitem__
    )
    request = run_task(
        account.double.cluster,
        ec2_id,
        task_definition="train",
        container="trainer",
        started_by=FIRST,
        client_token=client_token("a"),
    )
    ran = await real.run(request)
    assert isinstance(ran, Task)
    assert (await real.wait_stopped((ran.arn,), 10.0))[ran.arn] is not None
    assert await mirror.job(
        replace(JOB, slots=JOB.slots[:1], phase=Phase.FAILED, exit_code=1), 1, False
    )
    (row,) = (await account.rows("task")).values()
    assert (
        row["ecs_task_id"],
        row["task_status"],
        row["task_def_name"],
        row["task_def_revision"],
    ) == (ran.short, "FAILED", "train", "1")
    assert row["container_instance_arn"] == account.double.instance(ec2_id).arn
    assert (await account.rows("job"))["llama"]["submitted_ecs_task_ids"] == [ran.short]
    await real.close()


# --- people


async def receive(account: Account, tell: Callable[[Topic], Awaitable[None]]) -> dict[str, Any]:
    """What a subscriber of a new topic gets."""
    name = f"people-{next(NUMBERS)}"
    topic = (await account.aws.call("sns", "CreateTopic", Name=name))["TopicArn"]
    queue = (await account.aws.call("sqs", "CreateQueue", QueueName=name))["QueueUrl"]
    attributes = await account.aws.call(
        "sqs", "GetQueueAttributes", QueueUrl=queue, AttributeNames=["QueueArn"]
    )
    await account.aws.call(
        "sns",
        "Subscribe",
        TopicArn=topic,
        Protocol="sqs",
        Endpoint=attributes["Attributes"]["QueueArn"],
    )
    await tell(Topic(account.aws, topic))
    (message,) = (
        await account.aws.call("sqs", "ReceiveMessage", QueueUrl=queue, WaitTimeSeconds=5)
    )["Messages"]
    return dict(json.loads(message["Body"]))


async def test_s1_7_people_are_notified_by_sns(account: Account) -> None:
    said = await receive(
        account,
        lambda topic: topic.tell(
            "llama → FAILED", "Xid 79 on n2\nnext: nothing", {"job": "llama", "cause": ""}
        ),
    )
    assert (said["Subject"], said["Message"]) == ("llama -> FAILED", "Xid 79 on n2\nnext: nothing")
    assert said["MessageAttributes"] == {"job": {"Type": "String", "Value": "llama"}}, (
        "SNS refuses an empty one"
    )


async def test_a_message_that_is_too_long_is_cut_and_says_so(account: Account) -> None:
    said = await receive(
        account, lambda topic: topic.tell("long", "ä" * LONGEST_MESSAGE, {"job": "llama"})
    )
    length = len(said["Message"].encode())
    assert LONGEST_MESSAGE - 64 < length <= LONGEST_MESSAGE - len("long") - len("jobStringllama")
    assert said["Message"].rpartition("ä\n[cut: ")[2].endswith(" 256 KiB]")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("job llama needs you", "job llama needs you"),
        ("  two\r\nlines\tand \x07 more ", "two lines and more"),
        ("Überhitzung … n2 → n3 ≥ 95°", "Uberhitzung ... n2 -> n3 ? 95?"),
        ("", "relaunch"),
        ("\n", "relaunch"),
        ("x" * 98 + "yz", "x" * 96 + "..."),
        ("x" * LONGEST_SUBJECT, "x" * LONGEST_SUBJECT),
    ],
)
def test_a_subject_is_made_to_fit(text: str, expected: str) -> None:
    assert plain_subject(text) == expected
    assert 0 < len(expected) <= LONGEST_SUBJECT


async def test_a_topic_that_is_not_there_is_an_error(account: Account) -> None:
    with pytest.raises(AwsError) as caught:
        await Topic(account.aws, "arn:aws:sns:us-east-1:123456789012:missing").tell("a", "b")
    assert caught.value.kind is Kind.REFUSED
