"""docs/ssh.md: what a stranger copies from it works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from relaunch.cli.node_check import _write_sudoers_rule
from relaunch.spec.fleet import FleetSpec, SshOptions
from relaunch.spec.job import JobSpec
from tests.console import page_commands

PAGE = (Path(__file__).parents[2] / "docs" / "ssh.md").read_text()
FILES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
COMMANDS = [line for line in page_commands.code_lines(PAGE) if line.startswith("relaunch ")]


def test_its_files_can_be_read() -> None:
    fleets = [
        FleetSpec.model_validate(one)
        for one in FILES
        if "name" in one and "nodes" in one and isinstance(one["nodes"], list)
    ]
    jobs = [JobSpec.model_validate(one) for one in FILES if "command" in one]
    parts = [
        FleetSpec.model_validate({"name": "lab", "backend": "ssh", **one})
        for one in FILES
        if "name" not in one
    ]
    assert (len(fleets), len(jobs), len(parts)) == (1, 1, 1)
    assert fleets[0].name == jobs[0].fleet, (
        "a job that names no fleet goes to the one of the first file"
    )
    assert parts[0].ssh == SshOptions.model_validate(FILES[-1]["ssh"])


@pytest.mark.parametrize("line", COMMANDS)
def test_its_commands_are_commands(line: str) -> None:
    page_commands.take(line)


def test_there_are_commands_to_try() -> None:
    assert {"nodes", "up", "submit", "follow", "history", "logs", "cancel"} == {
        line.split()[1] for line in COMMANDS
    }


def test_its_lines_for_sudoers_are_those_that_a_check_asks_for() -> None:
    reset = "/usr/bin/nvidia-smi --gpu-reset -i 00000000:00:00.0"
    for rule in (
        _write_sudoers_rule("train", "reboot", "systemctl reboot"),
        _write_sudoers_rule("train", "gpu_reset", reset),
    ):
        assert f"\n{rule}\n" in PAGE


def test_it_names_every_row_of_a_check() -> None:
    source = (Path(__file__).parents[2] / "relaunch" / "cli" / "node_check.py").read_text()
    table = re.search(r"\| row \|.*?\n\n", PAGE, re.DOTALL)
    assert table is not None
    named = {
        name.strip()
        for line in table[0].splitlines()[2:]
        if line
        for name in line.split("|")[1].split(",")
    }
    in_code = set(re.findall(r'Row\(\s*"([^"]+)"', source)) | {
        "nvidia-smi",
        "dcgmi",
        "reboot",
        "GPU reset",
    }
    assert named == in_code
