"""deploy/ecs/relaunch.yaml and Dockerfile.node without AWS and Docker.

What CloudFormation would refuse, and what the worker may do.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.loaders import Loader

from relaunch.activities.task_events import SIGNAL_TIMEOUT_S
from tests.deploy.compose import ROOT, double

TEMPLATE = ROOT / "deploy/ecs/relaunch.yaml"
NODE = (ROOT / "Dockerfile.node").read_text()
SERVICES = ("ecs", "ec2", "logs", "sqs", "sns", "dynamodb", "autoscaling")
ACTION_OF = {"sqs:DeleteMessageBatch": "sqs:DeleteMessage"}
"""Operations whose permission has another name (Service Authorization Reference, Amazon SQS)."""
CALLED_BY_NO_NAME = {"iam:PassRole"}
"""What AWS asks for calls of another name: RunTask with a definition that has roles."""
UNSCOPED = {
    "autoscaling:DescribeAutoScalingInstances",
    "ec2:DescribeInstances",
    "ec2:DescribeInstanceStatus",
    "ec2:DescribeTags",
    "ecs:DescribeTaskDefinition",
}
"""Reads for which IAM knows neither resource nor condition (Service Authorization Reference)."""


class Short(yaml.SafeLoader):
    """Takes `!Sub x` for {"Fn::Sub": x}, and so on."""


def _function(loader: Short, suffix: str, node: yaml.Node) -> dict[str, Any]:
    name = suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}"
    if isinstance(node, yaml.ScalarNode):
        return {name: loader.construct_scalar(node)}
    return {name: loader.construct_sequence(node, deep=True)}  # type: ignore[arg-type]


Short.add_multi_constructor("!", _function)
FILE: dict[str, Any] = yaml.load(TEMPLATE.read_text(), Loader=Short)
RESOURCES: dict[str, dict[str, Any]] = FILE["Resources"]


def statements() -> Iterator[dict[str, Any]]:
    """Of the worker's policy, those that depend on a condition included."""
    for one in RESOURCES["WorkerPolicy"]["Properties"]["PolicyDocument"]["Statement"]:
        yield one["Fn::If"][1] if "Fn::If" in one else one


def actions(statement: dict[str, Any]) -> list[str]:
    found = statement["Action"]
    return [found] if isinstance(found, str) else found


def called(path: Path, operations: dict[str, frozenset[str]]) -> set[str]:
    """`service:Operation` of every call that names an operation of AWS.

    With its service beside it, or else one of ECS.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        words = [
            part.value
            for argument in node.args
            for part in (ast.walk(argument) if isinstance(argument, ast.IfExp) else (argument,))
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        service = next((word for word in words if word in SERVICES), "ecs")
        found |= {f"{service}:{word}" for word in words if word in operations[service]}
    return found


def operations_called() -> set[str]:
    loader = Loader()
    operations = {
        service: frozenset(loader.load_service_model(service, "service-2")["operations"])
        for service in SERVICES
    }
    return {
        one
        for path in sorted((ROOT / "relaunch/backends/ecs").glob("*.py"))
        for one in called(path, operations)
    }


@pytest.mark.long  # some seconds, for a file that hardly ever changes
def test_cloudformation_would_take_the_template() -> None:
    command = [
        str(Path(sys.executable).with_name("cfn-lint")),
        "--include-checks",
        "I",
        "--",
        str(TEMPLATE),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_worker_may_do_what_it_does_and_nothing_else() -> None:
    wanted = {ACTION_OF.get(one, one) for one in operations_called()}
    allowed = {action for statement in statements() for action in actions(statement)}
    assert len(wanted) > 20, "calls are found by the names that they are made with"
    assert wanted - allowed == set(), "called, and denied by AWS"
    assert allowed - wanted - CALLED_BY_NO_NAME == set(), "allowed, and never called"


def test_every_call_names_its_operation_where_this_test_sees_it() -> None:
    """Two methods of the cluster hand an operation on, whose callers name it."""
    hidden = set()
    for path in sorted((ROOT / "relaunch/backends/ecs").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            calls = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("aws.call")
            ]
            if not all(
                isinstance(argument, ast.Constant | ast.IfExp)
                for node in calls
                for argument in node.args
            ):
                hidden.add(f"{path.name} {function.name}")
    assert hidden == {"cluster.py _ecs", "cluster.py _pages"}


def test_only_plain_reads_are_allowed_everywhere_in_the_account() -> None:
    for statement in statements():
        if statement["Resource"] == "*" and "Condition" not in statement:
            assert set(actions(statement)) == UNSCOPED
        assert not any("*" in action for action in actions(statement)), statement["Sid"]


def test_only_named_task_definitions_and_the_node_task_are_run() -> None:
    running = [one for one in statements() if "ecs:RunTask" in actions(one)]
    family = RESOURCES["NodeTask"]["Properties"]["Family"]["Fn::Sub"]
    named, node = (one["Resource"] for one in running)
    assert named == {"Ref": "TaskDefinitionArns"}
    assert node["Fn::Sub"].endswith(f":task-definition/{family}:*")
    assert "Default" not in FILE["Parameters"]["TaskDefinitionArns"], "it would be all or none"
    for statement in running:
        (cluster,) = statement["Condition"]["ArnEquals"].values()
        assert cluster["Fn::Sub"].endswith(":cluster/${ClusterName}")


def test_an_event_is_hidden_longer_than_handing_it_on_takes() -> None:
    hidden_s = RESOURCES["Events"]["Properties"]["VisibilityTimeout"]
    assert hidden_s >= 3 * SIGNAL_TIMEOUT_S


def test_events_that_the_queue_refuses_are_repeated_and_kept() -> None:
    (target,) = RESOURCES["ClusterEvents"]["Properties"]["Targets"]
    assert target["RetryPolicy"]["MaximumRetryAttempts"] > 0
    assert target["DeadLetterConfig"] == {"Arn": {"Fn::GetAtt": "DeadEvents.Arn"}}
    (statement,) = RESOURCES["DeadEventsPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Resource"] == {"Fn::GetAtt": "DeadEvents.Arn"}
    assert statement["Condition"] == {
        "ArnEquals": {"aws:SourceArn": {"Fn::GetAtt": "ClusterEvents.Arn"}}
    }


def test_only_tagged_machines_restart_and_workers_cannot_tag() -> None:
    by_action = {action: statement for statement in statements() for action in actions(statement)}
    for action in (
        "ec2:RebootInstances",
        "ec2:StopInstances",
        "ec2:StartInstances",
        "ec2:CreateTags",
        "autoscaling:EnterStandby",
        "autoscaling:ExitStandby",
    ):
        assert "aws:ResourceTag/relaunch" in by_action[action]["Condition"]["StringEquals"], action
    keys = by_action["ec2:CreateTags"]["Condition"]["ForAllValues:StringLike"]["aws:TagKeys"]
    assert by_action["ec2:DeleteTags"]["Condition"]["Null"] == {"aws:TagKeys": "false"}, (
        "no names are all names"
    )
    from relaunch.backends.ecs.reboots import PREFIX

    assert keys == f"{PREFIX}*" and not "relaunch".startswith(PREFIX)


def test_only_the_rule_fills_a_queue_with_events_of_this_cluster() -> None:
    pattern = RESOURCES["ClusterEvents"]["Properties"]["EventPattern"]
    assert pattern["source"] == ["aws.ecs"]
    (arn,) = pattern["detail"]["clusterArn"]
    assert arn["Fn::Sub"].endswith(":cluster/${ClusterName}"), (
        "a prefix would take a neighbour's events, too"
    )
    (statement,) = RESOURCES["EventsPolicy"]["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Principal"] == {"Service": "events.amazonaws.com"}
    assert statement["Condition"] == {
        "ArnEquals": {"aws:SourceArn": {"Fn::GetAtt": "ClusterEvents.Arn"}}
    }


def test_s1_8_tables_have_documented_keys_and_outlive_the_stack() -> None:
    tables = {name: one for name, one in RESOURCES.items() if one["Type"] == "AWS::DynamoDB::Table"}
    keys = {
        name: one["Properties"]["KeySchema"][0]["AttributeName"] for name, one in tables.items()
    }
    assert keys == {"TaskTable": "ecs_task_id", "JobTable": "job_id", "NodeTable": "node_name"}
    assert {one["DeletionPolicy"] for one in tables.values()} == {"Retain"}


def test_the_node_task_keeps_its_state_on_the_host_for_the_agent() -> None:
    from relaunch.agent.container.task import HOST_STATE

    properties = RESOURCES["NodeTask"]["Properties"]
    (container,) = properties["ContainerDefinitions"]
    (mount,) = container["MountPoints"]
    assert mount["ContainerPath"] == HOST_STATE
    assert [
        one["Host"] for one in properties["Volumes"] if one["Name"] == mount["SourceVolume"]
    ] == [{"SourcePath": HOST_STATE}]
    assert (properties["NetworkMode"], properties["PidMode"], container["Privileged"]) == (
        "host",
        "host",
        True,
    )
    assert "TaskRoleArn" not in properties, "what examines a node speaks to no AWS"
    assert container["LogConfiguration"]["Options"]["awslogs-stream-prefix"]


# --- the node image


def instructions(word: str) -> list[str]:
    joined = NODE.replace("\\\n", " ")
    return [
        line.removeprefix(word).strip()
        for line in joined.splitlines()
        if line.startswith(f"{word} ")
    ]


def test_the_build_context_is_what_the_image_copies() -> None:
    let = [
        line[1:]
        for line in (ROOT / "Dockerfile.node.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [
        word
        for line in instructions("COPY")
        if "--from=" not in line
        for word in line.split()[:-1]
        if not word.startswith("--")
    ]
    assert sorted(let) == sorted(copied)
    assert [word for word in copied if not (ROOT / word).exists()] == []


def test_the_image_builds_an_agent_that_runs_as_a_task(tmp_path: Path) -> None:
    source = tmp_path / "src"
    for line in instructions("COPY"):
        *names, folder = line.split()
        if folder.startswith("relaunch/"):
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(
                        ROOT / name, source / folder, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    (source / folder).mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, source / folder)
    (command,) = [line for line in instructions("RUN") if "build_agent" in line]
    program = re.fullmatch(r'python -c "(.*)"', command)
    assert program is not None
    built = subprocess.run(
        [sys.executable, "-c", program[1].replace("/out", str(tmp_path / "out"))],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert (built.returncode, built.stderr) == (0, "")
    agent = tmp_path / "out/agent.pyz"
    assert {"__main__.py", "relaunch/agent/container/task.py", "pynvml.py"} <= set(
        zipfile.ZipFile(agent).namelist()
    )
    (entry,) = instructions("ENTRYPOINT")
    words = [sys.executable, str(agent), *ast.literal_eval(entry)[2:]]
    misused = subprocess.run(words, capture_output=True, text=True)
    assert (misused.returncode, misused.stdout) == (2, "")
    assert "usage: python3 <agent> task probe|diagnose ORDER" in misused.stderr


def test_everything_that_the_image_installs_is_pinned() -> None:
    assert all(
        re.fullmatch(r"\S+:[\w.-]+\d[\w.-]*( AS \w+)?", line) for line in instructions("FROM")
    ), "a tag with a version"
    (install,) = [line for line in instructions("RUN") if "pip install" in line]
    assert re.search(r"--no-deps --require-hashes .*--requirement bindings\.lock$", install)
    extract = install.partition(" >bindings.lock")[0]
    done = subprocess.run(extract, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"nvidia-ml-py==\S+( \\\n +--hash=sha256:[0-9a-f]{64})+\n", done.stdout), (
        done
    )
    (install,) = [line for line in instructions("RUN") if "apt-get install" in line]
    packages = re.findall(r"datacenter-gpu-manager\S*", install)
    assert packages and all(package.endswith("=${DCGM}") for package in packages)


def dcgmi(tmp_path: Path, *words: str) -> tuple[int, list[str], list[str]]:
    """Run the image's dcgmi over doubles of DCGM's programs.

    Return its exit code, what was run, and what was printed.
    """
    log, running = tmp_path / "log", tmp_path / "engine"
    environment = double(
        tmp_path / "bin",
        "nv-hostengine",
        f'echo "nv-hostengine $*" >> {log}; touch {running}; echo started',
    )
    real = (
        f'echo "dcgmi $*" >> {log}; test "$1" = discovery && {{ test -e {running}; exit; }}; echo '
        f'"{{}}"; exit 226'
    )
    double(tmp_path / "bin", "real-dcgmi", real)
    environment |= {
        "RELAUNCH_DCGMI": str(tmp_path / "bin/real-dcgmi"),
        "RELAUNCH_DCGM_SOCKET": "/run/s",
    }
    done = subprocess.run(
        ["sh", ROOT / "deploy/ecs/dcgmi.sh", *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, log.read_text().splitlines(), done.stdout.splitlines()


def test_dcgmi_of_the_image_starts_its_own_host_engine_once(tmp_path: Path) -> None:
    asks = "dcgmi discovery -l --host unix:///run/s"
    starts = "nv-hostengine --domain-socket /run/s --pid /run/s.pid --log-filename /run/s.log"
    runs = "dcgmi diag --host unix:///run/s -r 2 -j"
    assert dcgmi(tmp_path, "diag", "-r", "2", "-j") == (226, [asks, starts, asks, runs], ["{}"]), (
        "and its exit code and output alone"
    )
    (tmp_path / "log").unlink()
    assert dcgmi(tmp_path, "diag", "-r", "2", "-j") == (226, [asks, runs], ["{}"])


def test_dcgmi_of_the_image_gives_its_version_without_an_engine(tmp_path: Path) -> None:
    assert dcgmi(tmp_path, "-v") == (226, ["dcgmi -v"], ["{}"])
