"""What `make aws-smoke` asks of AWS, asked of its double.

That the double and the script agree says nothing of AWS.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from relaunch.backends.ecs import aws as aws_module
from relaunch.backends.ecs import cluster as cluster_module
from tests import aws_smoke
from tests.doubles.aws import DENIED, AwsDouble, Delays

LOGS = {
    "logDriver": "awslogs",
    "options": {
        "awslogs-group": "/relaunch/node",
        "awslogs-stream-prefix": "node",
        "awslogs-region": "us-east-1",
    },
}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsDouble]:
    delays = Delays(
        stop_timeout=0.3, reboot=0.1, boot=5.0
    )  # boot: a look every two seconds has to find it away
    with (
        AwsDouble(tmp_path_factory.mktemp("aws"), delays=delays) as double,
        pytest.MonkeyPatch.context() as patch,
    ):
        double.register("train", [{"name": "trainer", "image": "any"}], networkMode="host")
        double.register(
            "node", [{"name": "node", "image": "relaunch-node", "logConfiguration": LOGS}]
        )
        patch.setattr(aws_module, "RATES", {"read": (10_000.0, 100), "modify": (10_000.0, 100)})
        patch.setattr(cluster_module, "FIRST_LOOK", 0.1)
        patch.setattr(aws_smoke, "POLL", timedelta(seconds=1))
        patch.setattr(aws_smoke, "SETTLES", 0.5)
        patch.setattr(aws_smoke, "ROUNDS", 2)
        patch.setattr(aws_smoke, "REBOOT_LOOK", 0.1)
        for name, value in double.environment().items():
            patch.setenv(name, value)
        for name, value in {
            "CLUSTER": double.cluster,
            "TASK_DEFINITION": "train",
            "NODE_TASK": "node",
        }.items():
            patch.setenv(name, value)
        yield double


@pytest.fixture
def ec2_id(aws: AwsDouble, monkeypatch: pytest.MonkeyPatch) -> str:
    made = aws.add_instance(gpus=0)
    monkeypatch.setenv("INSTANCE", made)
    return made


@pytest.mark.long
def test_the_double_is_as_expected_of_aws_in_every_row(
    aws: AwsDouble, ec2_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = aws.instance(ec2_id).boots
    ended = aws_smoke.main(["--reboot"])
    printed = capsys.readouterr().out
    assert ended == 0 and "DIFFERS" not in printed, printed
    assert "another boot id" in printed and aws.instance(ec2_id).boots == before + 1
    left = [
        one["name"]
        for one in aws.instance(ec2_id).machine.registered.describe()["attributes"]
        if one["name"].startswith("relaunch.")
    ]
    assert left == [] and not aws.tasks(status="RUNNING"), "it leaves something behind"


@pytest.mark.long
def test_what_aws_does_otherwise_is_a_row_that_differs(
    aws: AwsDouble, ec2_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.script("train", exit_code=5, times=1)
    assert aws_smoke.main([]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert len(rows) == 1 and "exit code 5" in rows[0]


@pytest.mark.parametrize("missing", ["CLUSTER", "TASK_DEFINITION", "NODE_TASK", "INSTANCE"])
def test_it_refuses_without_what_it_needs(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in aws_smoke.NEEDED:
        monkeypatch.setenv(name, "something")
    monkeypatch.setenv(missing, "")
    assert aws_smoke.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"aws-smoke: {missing} ") and said.count("\n") == 1


@pytest.mark.long
def test_it_refuses_a_false_instance_and_weak_credentials(
    aws: AwsDouble, ec2_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    denied = aws.faults.add("ListContainerInstances", DENIED)
    assert aws_smoke.main([]) == 2
    assert "is not authorized" in capsys.readouterr().err
    aws.faults.remove(denied)
    monkeypatch.setenv("INSTANCE", "n1")
    assert aws_smoke.main([]) == 2
    assert "'n1', expected" in capsys.readouterr().err
