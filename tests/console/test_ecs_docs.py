"""docs/ecs.md: what a stranger copies from it works, as far as that goes without AWS."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from relaunch.backends.ecs.backend import EcsBackend
from relaunch.backends.ecs.legacy_rows import JobStatus, LegacyStatus, TaskStatus
from relaunch.backends.ecs.options import TABLES, VARIABLES, options
from relaunch.backends.ecs.tasks import read_definition, the_container
from relaunch.cli import app
from relaunch.cli.discover import ContainerInstance, _render_file
from relaunch.cli.files import read_fleet, read_job
from tests.console import page_commands

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ecs.md").read_text()
FLEET, JOB = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
DEFINITION: dict[str, Any] = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
BLOCKS = page_commands.code_lines(PAGE)
INLINE = [
    " ".join(one.strip("`").split())
    for one in re.findall(
        r"`relaunch\s[^`]*`", re.sub(r"^ *```.*?^ *```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    )
]
COMMANDS = [line.partition(" > ")[0] for line in (*BLOCKS, *INLINE) if line.startswith("relaunch ")]
OF_AWS = [shlex.split(line.partition(" | ")[0]) for line in BLOCKS if line.startswith("aws ")]


def service(name: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(name, "service-2"), name)


@pytest.mark.parametrize("line", COMMANDS)
def test_its_commands_are_commands(line: str) -> None:
    page_commands.take(line)


def test_there_are_commands_to_try() -> None:
    assert {
        "nodes",
        "up",
        "submit",
        "follow",
        "history",
        "show",
        "logs",
        "retry",
        "policy",
        "explain",
    } == {line.split()[1] for line in COMMANDS}


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if line.split()[1] in ("policy", "explain")]
)
def test_commands_that_need_no_person_are_run(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", line.split())
    assert app.main() == 0
    assert len(capsys.readouterr().out) > 100


def test_its_fleet_file_is_as_discovered_and_a_worker_takes_it(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    spec = read_fleet(tmp_path / "fleet.yaml")
    found = [
        ContainerInstance("arn:1", node.address, node.gpus, True, 0.0, "", "running")
        for node in spec.nodes
    ]
    assert _render_file("training", "eu-west-1", "default", "trainer", found, ()) == FLEET
    assert EcsBackend(spec, options(spec, {})).fences is False


def test_its_job_goes_to_that_fleet_and_asks_only_the_possible(
    tmp_path: Path,
) -> None:
    (tmp_path / "first.yaml").write_text(JOB)
    spec, _ = read_job(tmp_path / "first.yaml", {})
    assert (spec.fleet, spec.nproc_per_node, spec.launcher, spec.secrets, spec.workdir) == (
        "default",
        1,
        "none",
        {},
        None,
    )


def test_its_command_gives_torchrun_what_relaunch_tells_a_rank(tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "RANK": "1",
        "WORLD_SIZE": "2",
    }
    environment |= {"MASTER_ADDR": "10.0.0.11", "MASTER_PORT": "20017"}
    done = subprocess.run(
        yaml.safe_load(JOB)["command"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.split() == shlex.split(
        "--nnodes 2 --node-rank 1 --nproc-per-node 8 --max-restarts 0"
        " --master-addr 10.0.0.11 --master-port 20017 train.py --resume"
    )


def test_its_task_definition_is_one_and_ranks_can_be_run_as_it() -> None:
    shape = service("ecs").operation_model("RegisterTaskDefinition").input_shape
    report = ParamValidator().validate(DEFINITION, shape)
    assert not report.has_errors(), report.generate_report()
    read = read_definition(DEFINITION)
    assert (the_container(read, None), read.network_mode, list(read.logs)) == (
        "trainer",
        "host",
        ["trainer"],
    )
    assert DEFINITION["family"] == yaml.safe_load(FLEET)["ecs"]["task_definition"]


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=" ".join(words[1:3])) for words in OF_AWS]
)
def test_its_aws_commands_have_operations_and_options_that_exist(words: list[str]) -> None:
    """`aws SERVICE some-operation --some-option`: both are of the API's model.

    Three options are excepted, which only the AWS command line has.
    """
    name, command = words[1:3]
    given = {word for word in words[3:] if word.startswith("--")}
    if (name, command) in (("cloudformation", "deploy"), ("ecr", "get-login-password")):
        return
    model = service(name)
    operations = {_dashed(one): model.operation_model(one) for one in model.operation_names}
    shape = operations[command].input_shape
    members = {f"--{_dashed(one)}" for one in (shape.members if shape is not None else ())}
    assert given <= members | {"--cli-input-json", "--query", "--region"}


def _dashed(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


def test_the_stack_has_the_parameters_and_outputs_that_it_names() -> None:
    template = re.sub(r"!(\w+)", "", (ROOT / "deploy/ecs/relaunch.yaml").read_text())
    file = yaml.safe_load(template)
    deploy = next(words for words in OF_AWS if words[2] == "deploy")
    given = [word.partition("=")[0] for word in deploy[deploy.index("--parameter-overrides") + 1 :]]
    named = re.findall(r"`([A-Z]\w+)(?:=\w+)?`", PAGE)
    assert set(given) <= set(file["Parameters"])
    for parameter in (
        "TaskDefinitionArns",
        "WorkerRoleName",
        "PassRoleArns",
        "TrainingLogGroupArns",
        "AllowRepairs",
        "CreateTables",
        "TableArns",
    ):
        assert parameter in named and parameter in file["Parameters"]
    assert {"Queue", "Topic"} <= set(file["Outputs"])
    assert f"{ROOT}/{deploy[deploy.index('--template-file') + 1]}" == str(
        ROOT / "deploy/ecs/relaunch.yaml"
    )
    assert (ROOT / "Dockerfile.node").exists() and "docker build -f Dockerfile.node" in PAGE


def test_every_row_of_the_catalog_of_stops_is_in_its_table() -> None:
    table = PAGE[
        PAGE.index("| `stopCode`") : PAGE.index("A task that relaunch itself stops")
    ].splitlines()
    rows = json.loads((ROOT / "relaunch/evidence/catalog/ecs_stops.json").read_text())["rows"]
    for row in rows:
        if row["stop_code"] == "UserInitiated":
            cause, word = "the job is cancelled", "UserInitiated"
        else:
            cause = f"`{row['cause']}`"
            word = row["stop_code"] or re.findall(r"[A-Za-z]{4,}", row["reason"])[0]
        assert any(word in line and cause in line for line in table) or any(
            "the same" in line and cause in line for line in table if word.startswith("CannotStart")
        ), row


def test_its_variables_and_statuses_are_those_of_the_code() -> None:
    for key, variable in VARIABLES.items():
        assert f"| `{variable}` | `{key}` |" in PAGE
    for key, variable in TABLES.items():
        row = next(line for line in PAGE.splitlines() if line.startswith("|") and variable in line)
        assert re.search(rf"tables: \{{.*\b{key}: ", row), row
    for table, statuses in (
        ("ecs_job", JobStatus),
        ("ecs_task", TaskStatus),
        ("ecs_node", LegacyStatus),
    ):
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{table}` |"))
        assert set(re.findall(r"`([A-Z_]+)`", line)) - {"NODE_LOST"} == set(statuses)


def test_each_row_of_the_lambdas_has_tests_in_the_named_files() -> None:
    rows = re.findall(
        r"^\| (S1\.\d+) \|(.*)$", (ROOT / "docs" / "testing.md").read_text(), re.MULTILINE
    )
    assert [row for row, _ in rows] == [f"S1.{number}" for number in range(1, 12)]
    for row, rest in rows:
        files = re.findall(r"`(tests/\S+\.py)`", rest)
        name = re.compile(rf"def test_(?:s1_\d+_)*{row.replace('.', '_')}_", re.IGNORECASE)
        assert (
            files and [file for file in files if not name.search((ROOT / file).read_text())] == []
        ), row
