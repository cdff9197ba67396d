"""`nodes discover`: the fleet file that is printed for a cluster, or why there is none.

The double of AWS plays the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from syrupy.assertion import SnapshotAssertion

from relaunch.backends.ecs.aws import AwsError, Kind
from relaunch.cli import app, direct
from relaunch.cli.discover import (
    ContainerInstance,
    _dump_inline,
    _explain_error,
    names,
    select_instances,
)
from relaunch.cli.files import read_fleet
from relaunch.config import ConfigError
from relaunch.spec.fleet import FleetSpec
from tests.doubles.aws import AwsDouble, Delays
from tests.doubles.aws_caller import Caller, until


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsDouble]:
    with AwsDouble(tmp_path_factory.mktemp("aws"), delays=Delays(power_off=0.05)) as double:
        yield double


@pytest.fixture(scope="module")
def machines(aws: AwsDouble) -> tuple[str, ...]:
    """Two with a name as tag, two that share one, and one that was terminated while stopped."""
    calls, ids = Caller(aws), tuple(aws.add_instance(gpus=gpus) for gpus in (8, 8, 0, 8, 8))
    for ec2_id, tag in zip(
        ids, ("trainer-a", "ECS Instance - training", "worker", "worker", ""), strict=True
    ):
        calls.ec2.create_tags(
            Resources=[ec2_id],
            Tags=[{"Key": "Name", "Value": tag}, {"Key": "relaunch", "Value": "node"}],
        )
    aws.instance(ids[3]).disconnect()
    gone = aws.instance(ids[4])
    calls.ec2.terminate_instances(InstanceIds=[gone.ec2_id])
    until(lambda: gone.machine.registered.status == "INACTIVE")
    gone.machine.registered.status = "ACTIVE"  # as AWS leaves it where the agent was away by then
    return ids


@pytest.fixture(autouse=True)
def in_its_account(aws: AwsDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)


def discover(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    """Its exit code, and what it printed."""
    monkeypatch.setattr("sys.argv", ["relaunch", "nodes", "discover", *words])
    code = app.main()
    told = capsys.readouterr()
    return code, told.out, told.err


def test_each_instance_is_a_node_named_by_its_tag_or_a_number(
    machines: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    page: SnapshotAssertion,
) -> None:
    code, out, err = discover(
        monkeypatch,
        capsys,
        "training",
        "--region",
        "us-east-1",
        "--name",
        "lab",
        "--task-definition",
        "trainer:3",
    )
    assert (code, err) == (0, "")
    (tmp_path / "fleet.yaml").write_text(out)
    spec = read_fleet(tmp_path / "fleet.yaml")
    assert [(node.name, node.address, node.gpus) for node in spec.nodes] == [
        ("trainer-a", machines[0], 8),
        ("gpu-01", machines[1], 8),
        ("gpu-02", machines[2], 0),
        ("gpu-03", machines[3], 8),
    ]
    assert (spec.name, spec.backend, spec.ecs.cluster, spec.ecs.region) == (
        "lab",
        "ecs",
        "training",
        "us-east-1",
    )
    assert (spec.ecs.task_definition, spec.ecs.node_task) == ("trainer:3", "relaunch-node-training")
    remarks = [line.partition("  # ")[2] for line in out.splitlines() if "address:" in line]
    assert list(map(bool, remarks)) == [False, False, True, True]
    (left_out,) = [line for line in out.splitlines() if line.startswith("# left out")]
    assert machines[4] in left_out
    for number, ec2_id in enumerate(machines, 1):
        out = out.replace(ec2_id, f"i-{number:017}")
    assert out == page


def test_an_arn_says_its_region_and_what_is_missing_is_a_comment(
    aws: AwsDouble,
    machines: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    arn = aws.ecs.clusters["training"].arn
    code, out, err = discover(monkeypatch, capsys, arn)
    assert (code, err) == (0, "")
    assert yaml.safe_load(out)["ecs"] == {
        "cluster": arn,
        "region": "us-east-1",
        "node_task": "relaunch-node-training",
    }
    assert "# task_definition: FAMILY" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(
            ["trainings", "--region", "us-east-1"],
            "name or ARN of a cluster of this account in us-east-1",
            id="cluster",
        ),
        pytest.param(
            ["empty"],
            "'empty' has no ACTIVE container instance",
            id="empty",
        ),
        pytest.param(["training", "--name", "my fleet"], "'my fleet'", id="name"),
        pytest.param(
            ["training", "--task-definition", "a b"],
            "ecs.task_definition is 'a b'",
            id="definition",
        ),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_exit_code_2(
    words: list[str],
    says: str,
    aws: AwsDouble,
    machines: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    aws.ecs.create_cluster({"clusterName": "empty"})
    code, out, err = discover(monkeypatch, capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_without_credentials_it_says_where_they_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    code, out, err = discover(monkeypatch, capsys, "training")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "credentials" in err and "boto3" in err


def test_without_a_region_it_says_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    code, _, err = discover(monkeypatch, capsys, "training")
    assert (code, err.count("\n")) == (2, 1)
    assert "expected --region REGION" in err


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (
            "AccessDeniedException",
            Kind.DENIED,
            "ecs:ListContainerInstances, ecs:Describe",
        ),
        (
            "ThrottlingException",
            Kind.THROTTLED,
            "ECS ListContainerInstances: ThrottlingException: ",
        ),
    ],
)
def test_a_refusal_of_aws_is_shown_with_its_remedy(code: str, kind: Kind, says: str) -> None:
    assert says in _explain_error(
        "training", "us-east-1", AwsError(f"ECS ListContainerInstances: {code}", code, kind)
    )


def make_instance(
    ec2_id: str, arn: str = "arn:1", connected: bool = True, state: str = "running"
) -> ContainerInstance:
    return ContainerInstance(arn, ec2_id, 8, connected, 0.0, "", state)


def test_a_machine_that_registered_twice_is_one_node() -> None:
    old, new = (
        make_instance("i-0123456789abcdef0", "arn:1", connected=False),
        make_instance("i-0123456789abcdef0", "arn:2"),
    )
    assert select_instances([old, new]) == ([new], []) == select_instances([new, old])


def test_what_is_no_machine_of_ec2_is_left_out_and_said() -> None:
    none, said = select_instances(
        [make_instance("mi-0123456789abcdef0"), make_instance("i-0123456789abcdef0", state="")]
    )
    assert none == [] and [line.split()[0] for line in said] == [
        "mi-0123456789abcdef0",
        "i-0123456789abcdef0",
    ]


def test_numbers_leave_out_what_a_tag_has_taken_already() -> None:
    assert names(["", "gpu-01", "-no name-", ""]) == ("gpu-02", "gpu-01", "gpu-03", "gpu-04")
    assert names([""] * 100)[::99] == ("gpu-001", "gpu-100")


def test_a_tag_that_yaml_would_misread_stays_a_name() -> None:
    assert yaml.safe_load(_dump_inline({"name": "on"})) == {"name": "on"} and yaml.safe_load(
        _dump_inline({"name": "007"})
    ) == {"name": "007"}


def test_nodes_check_file_says_who_looks_at_container_instances() -> None:
    nodes = [{"name": "gpu-01", "address": "i-0123456789abcdef0"}]
    spec = FleetSpec.model_validate(
        {"name": "lab", "backend": "ecs", "nodes": nodes, "ecs": {"cluster": "training"}}
    )
    with pytest.raises(
        ConfigError,
        match=r"`relaunch nodes check NODE --fleet lab`",
    ):
        direct.select_nodes(spec, Path("lab.yaml"), ())
